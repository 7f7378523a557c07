/** Shows a genome, its growth and its network. */

const $ = (id) => document.getElementById(id);
const count = (n) => n.toLocaleString("en");
const EMBEDDED = JSON.parse($("embedded").textContent);
const PACE = matchMedia("(prefers-reduced-motion: reduce)").matches ? 0 : 1800; // ms that a growth takes at least
const BUDGET = 12; // ms of work a frame
const PEN = 22;

const element = (tag, properties, ...children) => {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
};

/** What the page shows now is seen before `work` begins. */
const afterPaint = (work) => requestAnimationFrame(() => setTimeout(work));

function refuse(error, what = "This genome cannot be shown") {
  if (!(error instanceof Refusal)) console.error(error);
  $("alert").textContent = `${what}: ${error.message}.`;
  $("alert").hidden = false;
}

/* The genome, as a strip of bytes. */

/** Hue and saturation of the parts of a file, by the first words of their names. */
const INKS = { head: [215, 10], container: [215, 10], digest: [42, 70], plan: [28, 75], direct: [165, 45] };
const NUMBERS = [265, 35];

function showGenome(bytes, { parts }) {
  const shade = (part, value) => {
    const [hue, saturation] = INKS[part.split(" ")[0]] ?? NUMBERS;
    return `hsl(${hue} ${saturation}% ${86 - value / 4.8}%)`;
  };
  const draw = () => {
    const strip = $("strip");
    const [width, ratio] = [strip.clientWidth, devicePixelRatio];
    const cell = Math.max(2, Math.min(11, Math.sqrt((width * 200) / bytes.length)));
    const across = Math.floor(width / cell);
    strip.width = width * ratio;
    strip.height = Math.ceil(bytes.length / across) * cell * ratio;
    strip.style.height = `${strip.height / ratio}px`;
    const ink = strip.getContext("2d");
    ink.scale(ratio, ratio);
    const size = cell - (cell > 4 ? 1 : 0);
    parts.forEach(([name, from, to]) => {
      for (let i = from; i < to; i++) {
        ink.fillStyle = shade(name, bytes[i]);
        ink.fillRect((i % across) * cell, Math.floor(i / across) * cell, size, size);
      }
    });
  };
  $("genome").hidden = false;
  $("strip").setAttribute("aria-label", `The ${count(bytes.length)} bytes of the genome`);
  $("genome-note").textContent = `All ${count(bytes.length)} bytes of the file, one square each.`;
  $("legend").replaceChildren(...parts.map(([name, from, to]) => {
    const dot = element("i");
    dot.style.background = shade(name, 128);
    return element("li", {}, dot, `${name}: ${count(to - from)}`);
  }));
  afterPaint(draw);
  onresize = draw;
}

/* The weights, while they grow. */

const WAVES = { periodic: "waves", bilinear: "pairs of waves", low_rank: "products", xox: "genes", gnet: "units", stochastic: "units" };

/**
 * How the matrices of a tensor are laid out as a picture: {width, height, at}, with the pixel of each weight. Weights of
 * an image's pixels, or of a kernel, stand beside each other as in the image, as many in a row as fit into the room (in
 * pixels); other matrices are as they are.
 */
function pictureOf({ kind, shape, slots: [{ grid, colCode }, ...more] }, room) {
  const image = colCode.type === "grid" && colCode.dims.length > 1 ? colCode.dims.slice(-2) : null;
  const patch = image ?? (kind === "conv" && shape.length === 4 ? shape.slice(2) : null);
  if (!patch || product(patch) === 1) {
    const height = grid.rows * (more.length + 1);
    return { width: grid.cols, height, at: (k) => k };
  }
  const [h, w] = patch;
  const patches = (grid.rows * grid.cols) / (h * w);
  const beside = grid.cols / (h * w);
  const gap = 1;
  const [least, most] = [0.78, 2].map((ratio) => Math.ceil(Math.sqrt((patches * ratio * h) / w)));
  const across = beside > 3 ? beside : Math.max(least, Math.min(most, Math.floor(room / (w + gap))));
  const width = across * (w + gap) - gap;
  const at = (k) => {
    const p = Math.floor(k / (h * w));
    const y = Math.floor(k / w) % h;
    const x = k % w;
    return (Math.floor(p / across) * (h + gap) + y) * width + (p % across) * (w + gap) + x;
  };
  return { width, height: Math.ceil(patches / across) * (h + gap) - gap, at };
}

/** A figure for a tensor, with `paint`, which shows its matrices as they are. */
function figureOf(tensor, { width, height, at }, zoom) {
  const { hypernet, grid } = tensor.slots[0];
  const canvas = element("canvas", { width, height, className: zoom > 1 ? "large" : "" });
  canvas.style.width = `${Math.max(8, width * zoom)}px`;
  canvas.style.aspectRatio = height * zoom < 8 ? `${width * zoom} / 8` : `${width} / ${height}`;
  const tiles = tensor.slots.reduce((n, slot) => n + slot.grid.down * slot.grid.across, 0);
  const by = `${typeOf(hypernet).size(hypernet)} ${WAVES[hypernet.type] ?? hypernet.type}${tiles > 1 ? ` × ${tiles} tiles` : ""}`;
  const words = `${count(grid.rows * tensor.slots.length)} × ${count(grid.cols)} from ${by}`;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `Weights of ${tensor.name}, ${words}`);
  const name = tensor.name.split(".").flatMap((part, i) => (i ? [element("wbr"), `.${part}`] : [part]));
  const caption = element("figcaption", {}, element("b", {}, ...name), element("br"), words);
  const ink = canvas.getContext("2d");
  const image = ink.createImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  let pixel;
  const paint = () => {
    if (!pixel) {
      pixel = new Int32Array(product(tensor.shape));
      for (let k = 0; k < pixel.length; k++) pixel[k] = at(k);
    }
    // Contrast by what has grown so far: a single wave is as clear as the sum of all.
    let [grown, squares, k] = [0, 0, 0];
    for (const matrix of tensor.matrices) for (const w of matrix) if (w) (grown++, (squares += w * w));
    const unit = 127.5 / (2.2 * Math.sqrt(squares / grown) || 1);
    for (const matrix of tensor.matrices) {
      for (const w of matrix) pixels[pixel[k++]] = COLOURS[Math.max(0, Math.min(255, w * unit + 127.5)) | 0];
    }
    ink.putImageData(image, 0, 0);
  };
  const figure = element("figure", {}, canvas, caption);
  figure.style.width = `max(8.2rem, ${width * zoom}px)`;
  return { figure, paint };
}

/** Blue below zero, paper at zero, orange above: little-endian RGBA. */
const COLOURS = Uint32Array.from({ length: 256 }, (_, i) => {
  const [x, side] = [Math.abs(i - 127.5) / 127.5, i < 128 ? [23, 78, 122] : [190, 82, 24]];
  const [r, g, b] = [250, 249, 246].map((paper, k) => Math.round(paper + (side[k] - paper) * x ** 0.8));
  return (255 << 24) | (b << 16) | (g << 8) | r;
});

/** Small kernels are shown larger than large matrices. */
const zoomOf = ({ width, height }, zoom) => (Math.max(width, height) < 120 ? Math.max(zoom, Math.min(4, 160 / Math.max(width, height))) : zoom);

const isDrawn = ({ slots }) => slots.length > 0 && slots[0].hypernet.type !== "constant";

/** Grow all tensors, a frame at a time, while it is `wanted`; resolves when all weights are there. */
function grow(genome, wanted) {
  const { tensors } = genome.plan;
  const drawn = tensors.filter(isDrawn);
  const width = $("tensors").clientWidth;
  const pictures = new Map(drawn.map((tensor) => [tensor, pictureOf(tensor, width)]));
  const largest = (side) => Math.max(1, ...[...pictures.values()].map((picture) => picture[side]));
  const area = [...pictures.values()].reduce((sum, picture) => sum + picture.width * picture.height, 1);
  const room = width * Math.max(480, width) * (drawn.length > 6 ? 0.6 : 1);
  const zoom = Math.min(4, width / largest("width"), Math.sqrt(room / area));
  const figures = new Map(drawn.map((tensor) => [tensor, figureOf(tensor, pictures.get(tensor), zoomOf(pictures.get(tensor), zoom))]));
  $("tensors").replaceChildren(...drawn.map((tensor) => figures.get(tensor).figure));
  const total = tensors.filter((t) => t.slots.length).length;
  const begun = performance.now();
  let done = 0;
  const steps = (function* () {
    for (const tensor of tensors.filter((t) => t.slots.length)) {
      let made = 0;
      const all = stepsOf(tensor);
      for (const _ of growTensor(genome, tensor)) yield [tensor, (done + ++made / all) / total];
      yield [tensor, ++done / total];
    }
  })();
  return new Promise((resolve, reject) => {
    const frame = () => {
      if (!wanted()) return resolve();
      try {
        const start = performance.now();
        const changed = new Set();
        for (;;) {
          const { value, done: end } = steps.next();
          if (value) changed.add(value[0]);
          if (value) $("progress").value = value[1];
          const ahead = value && value[1] * PACE > performance.now() - begun;
          if (end || ahead || performance.now() - start > BUDGET) {
            for (const tensor of changed) figures.get(tensor)?.paint();
            performance.mark("weights drawn");
            if (end) return resolve(performance.now() - begun);
            return afterPaint(frame);
          }
        }
      } catch (error) {
        return reject(error);
      }
    };
    frame();
  });
}

/** How often `growTensor` yields. */
function stepsOf({ slots }) {
  const each = ({ hypernet, grid }) => {
    const { size, dense } = typeOf(hypernet);
    const columns = dense ? 1 : size(hypernet) * (["periodic", "bilinear"].includes(hypernet.type) ? 2 : 1);
    return grid.down * grid.across * columns;
  };
  return slots.reduce((n, slot) => n + each(slot), 0);
}

function sayWeights({ plan: { tensors } }, seconds) {
  const generated = tensors.filter((t) => t.slots.length);
  const size = (list) => list.reduce((n, t) => n + product(t.shape), 0);
  const direct = size(tensors) - size(generated);
  const rest = direct ? ` ${count(direct)} more stand in the file as they are.` : "";
  const time = seconds === undefined ? "" : ` It took ${seconds.toFixed(1)} s.`;
  $("weights-note").textContent = `${count(size(generated))} weights grow, wave by wave: blue below zero, orange above.${rest}${time}`;
}

/* The network: images. */

function classifier(run, { interface: [[channels, rows, cols], outputs], mean, std, white = 255, classes, task }) {
  const names = classes ?? Array.from({ length: outputs }, (_, i) => String(i));
  const pad = $("draw").getContext("2d", { willReadFrequently: true });
  const size = $("draw").width;
  const of = (value, c) => (Array.isArray(value) ? value[c % value.length] : value);
  $("classifier").hidden = false;
  $("pad").hidden = channels !== 1;
  $("clear").hidden = channels !== 1;
  $("drop-text").textContent = channels === 1 ? "or an image" : "Drop an image here, or choose one";
  $("bars").className = classes ? "named" : "";
  const bars = names.map((name) => {
    const [fill, part] = [element("i"), element("output")];
    const row = element("li", {}, name, element("div", { className: "bar" }, fill), part);
    return { row, fill, part };
  });
  $("bars").replaceChildren(...bars.map(({ row }) => row));
  Object.assign($("seen"), { width: cols, height: rows });
  const bench = $("seen").getContext("2d");

  /** Show pixels [C * h * w] of 0 to 255, and what the network makes of them; null for none. */
  const show = (pixels) => {
    bench.clearRect(0, 0, cols, rows);
    const parts = pixels ? softmax(run(pixels)) : null;
    if (pixels) {
      const image = bench.createImageData(cols, rows);
      const plane = rows * cols;
      for (let i = 0; i < plane; i++) {
        for (let c = 0; c < 3; c++) image.data[4 * i + c] = pixels[(c % channels) * plane + i];
        image.data[4 * i + 3] = 255;
      }
      bench.putImageData(image, 0, 0);
    }
    const best = parts ? parts.indexOf(Math.max(...parts)) : -1;
    bars.forEach(({ row, fill, part }, k) => {
      fill.style.width = parts ? `${100 * parts[k]}%` : "0";
      part.textContent = parts ? `${(100 * parts[k]).toFixed(1)} %` : "";
      row.classList.toggle("best", k === best);
    });
    const said = parts ? `${names[best]}, ${(100 * parts[best]).toFixed(0)} %` : "";
    if ($("answer").textContent !== said) $("answer").textContent = said;
  };

  /**
   * The drawing as the data's images are: its longest side fills 20 of 28 pixels (of the small digits all 8), and its
   * centre of mass is in the middle.
   */
  const drawing = () => {
    const alpha = pad.getImageData(0, 0, size, size).data;
    const inked = [];
    let [mass, x, y] = [0, 0, 0];
    let [left, right, top, bottom] = [size, 0, size, 0];
    for (let i = 0; i < size * size; i++) {
      const a = alpha[4 * i + 3];
      if (!a) continue;
      const [px, py] = [i % size, Math.floor(i / size)];
      inked.push([px, py, a]);
      [mass, x, y] = [mass + a, x + a * (px + 0.5), y + a * (py + 0.5)];
      [left, right, top, bottom] = [Math.min(left, px), Math.max(right, px), Math.min(top, py), Math.max(bottom, py)];
    }
    if (!mass) return null;
    const [part, shift] = task === "digits" ? [1, 0] : [20 / 28, 0.5];
    const [wide, high] = [cols * part, rows * part];
    const zoom = Math.min(wide / (right - left + 1), high / (bottom - top + 1), (2.5 * Math.min(wide, high)) / size);
    const pixels = new Float64Array(rows * cols);
    const add = (j, i, value) => {
      if (i >= 0 && i < rows && j >= 0 && j < cols) pixels[i * cols + j] += value;
    };
    for (const [px, py, a] of inked) {
      // Each dot of ink is shared out among the four pixels around it.
      const u = (px + 0.5 - x / mass) * zoom + cols / 2 + shift - 0.5;
      const v = (py + 0.5 - y / mass) * zoom + rows / 2 + shift - 0.5;
      const [j, i] = [Math.floor(u), Math.floor(v)];
      const [fu, fv] = [u - j, v - i];
      add(j, i, a * zoom * zoom * (1 - fu) * (1 - fv));
      add(j + 1, i, a * zoom * zoom * fu * (1 - fv));
      add(j, i + 1, a * zoom * zoom * (1 - fu) * fv);
      add(j + 1, i + 1, a * zoom * zoom * fu * fv);
    }
    return pixels.map((v) => Math.min(255, v));
  };

  let waiting = false;
  const changed = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      show(drawing());
    });
  };
  const pen = { down: false, x: size / 2, y: size / 2 };
  const stroke = (x, y, from = pen) => {
    Object.assign(pad, { lineWidth: PEN, lineCap: "round", lineJoin: "round", strokeStyle: "#22252b" });
    pad.beginPath();
    pad.moveTo(from.x, from.y);
    pad.lineTo(x, y);
    pad.stroke();
    Object.assign(pen, { x, y });
    changed();
  };
  const place = (event) => {
    const { left, top, width } = $("draw").getBoundingClientRect();
    return [((event.clientX - left) * size) / width, ((event.clientY - top) * size) / width];
  };
  $("draw").onpointerdown = (event) => {
    $("draw").setPointerCapture(event.pointerId);
    const [x, y] = place(event);
    Object.assign(pen, { down: true, x, y });
    stroke(x, y);
  };
  $("draw").onpointermove = (event) => pen.down && stroke(...place(event));
  $("draw").onpointerup = $("draw").onpointercancel = () => (pen.down = false);
  const clear = () => {
    pad.clearRect(0, 0, size, size);
    Object.assign(pen, { down: false, x: size / 2, y: size / 2 });
    show(null);
  };
  $("clear").onclick = clear;
  const arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  $("draw").onkeydown = (event) => {
    const step = arrows[event.key];
    if (step) {
      const [x, y] = step.map((d, k) => Math.max(PEN, Math.min(size - PEN, (k ? pen.y : pen.x) + 10 * d)));
      event.shiftKey ? Object.assign(pen, { x, y }) : stroke(x, y);
    } else if (event.key === "Escape" || event.key === "Delete") {
      clear();
    } else return;
    event.preventDefault();
  };

  /** Pixels of an image's file, in the network's size; of one channel by the weights of ITU-R 601, as Pillow does. */
  const read = async (file) => {
    const image = await createImageBitmap(file);
    const sheet = element("canvas", { width: cols, height: rows }).getContext("2d");
    sheet.imageSmoothingQuality = "high";
    // What is transparent shows white, as for `gbfunc predict`.
    sheet.fillStyle = "#fff";
    sheet.fillRect(0, 0, cols, rows);
    sheet.drawImage(image, 0, 0, cols, rows);
    const { data } = sheet.getImageData(0, 0, cols, rows);
    const grey = (i) => Math.floor((data[i] * 19595 + data[i + 1] * 38470 + data[i + 2] * 7471 + 0x8000) / 65536);
    return Float64Array.from({ length: channels * rows * cols }, (_, k) => {
      const i = 4 * (k % (rows * cols));
      return channels === 1 ? grey(i) : data[i + Math.floor(k / (rows * cols))];
    });
  };
  const open = async (file) => {
    if (!file) return;
    let pixels;
    try {
      pixels = await read(file);
    } catch {
      $("answer").textContent = `${file.name} is no image that can be read`;
      return;
    }
    clear();
    show(pixels);
  };
  $("image").onchange = ({ target }) => open(target.files[0]);
  $("classifier").ondragover = (event) => (event.preventDefault(), $("drop").classList.add("over"));
  $("classifier").ondragleave = () => $("drop").classList.remove("over");
  $("classifier").ondrop = async (event) => {
    event.preventDefault();
    $("drop").classList.remove("over");
    const [file] = event.dataTransfer.files;
    if (file && !(await isGenome(file))) open(file);
  };
  show(null);

  /** From pixels of 0 to 255 to the network's input. */
  return (pixels) => Float64Array.from(pixels, (v, k) => {
    const c = Math.floor(k / (rows * cols));
    return Math.fround(((v * white) / 255 - of(mean, c)) / of(std, c));
  });
}

/* The network: texts. */

/** Which text is written: one stops when the next begins, or another network is shown. */
let writing = 0;

function writer(run, alphabet, context) {
  $("writer").hidden = false;
  $("prompt").value ||= "ROMEO:\n";
  const letters = Array.from(alphabet);
  $("temperature").oninput = () => ($("degrees").textContent = Number($("temperature").value).toFixed(1));
  $("text").replaceChildren();
  $("writer").onsubmit = (event) => {
    event.preventDefault();
    const mine = ++writing;
    const prompt = Array.from($("prompt").value || "\n");
    const unknown = prompt.filter((c) => !letters.includes(c));
    const written = prompt.map((c) => letters.indexOf(c));
    const rest = document.createTextNode("");
    $("text").replaceChildren(element("b", {}, prompt.join("")), rest);
    if (unknown.length) {
      $("text").textContent = `The network knows no ${[...new Set(unknown)].map((c) => JSON.stringify(c)).join(", ")}.`;
      return;
    }
    const next = () => {
      if (mine !== writing || rest.length >= 400) return;
      const logits = run(written.slice(-context));
      const temperature = Number($("temperature").value);
      written.push(drawn(logits.slice(-letters.length), temperature));
      rest.data += letters[written.at(-1)];
      setTimeout(next);
    };
    setTimeout(next);
  };
}

/** A token by its logit; at temperature 0 the likeliest. */
function drawn(logits, temperature) {
  if (!temperature) return logits.indexOf(Math.max(...logits));
  const parts = softmax(logits.map((v) => v / temperature));
  let left = Math.random();
  return Math.max(0, parts.findIndex((p) => (left -= p) < 0));
}

/** The network in action, or why it is not. */
function showNetwork({ metadata }, tensors) {
  writing++;
  $("classifier").hidden = $("writer").hidden = true;
  const run = networkOf(metadata, tensors, EMBEDDED.networks);
  const [inputs, outputs, tokens] = metadata.interface ?? [[], 0];
  const about = `${metadata.pnet}, for ${metadata.task}`;
  if (tokens) {
    const alphabet = EMBEDDED.alphabets[metadata.alphabet];
    if (!alphabet) throw new Refusal("this page does not know the characters of its text");
    const logits = (list) => run(list).data;
    writer(logits, alphabet, inputs[0]);
    $("network-note").textContent = `The network (${about}) writes one character after the other, each from the ${inputs[0]} before it.`;
    return logits;
  }
  if (inputs.length !== 3 || !metadata.std) throw new Refusal(`the page takes images and characters, and the file says of neither how they become inputs`);
  let scaled;
  const logits = (pixels) => run({ shape: inputs, data: scaled(pixels) }).data;
  scaled = classifier((pixels) => logits(pixels), metadata);
  const how = inputs[0] === 1
    ? "Draw with a mouse, a finger or the arrow keys (with Shift the pen is up; Esc clears)."
    : "Give it an image.";
  $("network-note").textContent = `The network (${about}) runs as you draw. ${how}`.replace("as you draw. Give", "here. Give");
  return logits;
}

/* All of it. */

/** Which genome is shown: the one that was opened last. */
let shown = 0;

async function show(bytes) {
  const mine = ++shown;
  writing++;
  for (const id of ["alert", "genome", "weights", "network"]) $(id).hidden = true;
  onresize = null;
  try {
    const genome = readGenome(bytes);
    const weights = genome.plan.tensors.reduce((n, t) => n + product(t.shape), 0);
    const dense = weights * (genome.plan.wide ? 8 : 4);
    $("title").textContent = `${count(weights)} weights from ${count(bytes.length)} bytes`;
    document.title = $("title").textContent;
    $("lead").textContent = `A neural network grows here from its genome: a file ${count(Math.round(dense / bytes.length))} times smaller than its weights. The g-nets in it see where a weight stands, and generate what it is.`;
    showGenome(bytes, genome);
    $("weights").hidden = false;
    sayWeights(genome);
    const growth = async () => {
      $("again").disabled = true;
      const time = await grow(genome, () => mine === shown);
      if (mine !== shown) return;
      sayWeights(genome, time / 1000);
      $("again").disabled = false;
    };
    $("again").onclick = growth;
    await growth();
    if (mine === shown) startNetwork(genome);
  } catch (error) {
    if (mine === shown) refuse(error);
  }
}

/** Shows the network, and hands it to the console with what it is made of. */
function startNetwork(genome) {
  const tensors = tensorsOf(genome);
  globalThis.gbfunc = { genome, tensors };
  try {
    globalThis.gbfunc.run = showNetwork(genome, tensors);
    $("network").hidden = false;
  } catch (error) {
    refuse(error, "The network does not run here");
  }
}

function begin() {
  const fragment = location.hash.slice(1);
  try {
    if (fragment) show(base64url(fragment));
    else if (EMBEDDED.genome) show(base64url(EMBEDDED.genome));
  } catch (error) {
    refuse(error);
  }
}

/** Whether a file begins as one of safetensors: the length of its header, and the header, in JSON. */
async function isGenome(file) {
  const head = new Uint8Array(await file.slice(0, 9).arrayBuffer());
  return head.length === 9 && head[8] === 123 && !head[6] && !head[7];
}
const opened = async (file) => file && show(new Uint8Array(await file.arrayBuffer()));
$("file").onchange = ({ target }) => opened(target.files[0]);
ondragover = (event) => event.preventDefault();
ondrop = async (event) => {
  event.preventDefault();
  const files = [...event.dataTransfer.files];
  const genomes = await Promise.all(files.map(isGenome));
  opened(files[genomes.indexOf(true)]);
  if (files.length && !genomes.includes(true) && !$("classifier").contains(event.target)) {
    refuse(new Refusal(`${files[0].name} is no genome`), "Not opened");
  }
};
onhashchange = begin;
begin();
