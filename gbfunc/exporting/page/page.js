/** Shows a genome, its growth and its network. */

const $ = (id) => document.getElementById(id);
const EMBEDDED = JSON.parse($("embedded").textContent);
const PACE = matchMedia("(prefers-reduced-motion: reduce)").matches ? 0 : 1800; // ms that a growth takes at least
const BUDGET = 12; // ms of work a frame
const PEN = 22;
const MOST_BYTES = 256 << 20; // of a file that is opened
const SQUARES = 1 << 16; // bytes of a file that are drawn
const FIGURES = 200;
const FIGURE_PIXELS = 1 << 22; // of all figures
const PICTURE_PIXELS = 1 << 24; // of an image that is opened
const DARK = matchMedia("(prefers-color-scheme: dark)");

/** What a change of the colours draws again. */
const repaints = { genome: () => {}, weights: () => {} };

const element = (tag, properties, ...children) => {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
};

/** What the page shows now is seen before `work` begins. */
const afterPaint = (work) => requestAnimationFrame(() => setTimeout(work));

/** A text of a file, in one line that is not too long. */
const clipped = (text, most = 80) => (text.length > most ? `${text.slice(0, most - 3)}...` : text).replace(/\s+/g, " ");

function refuse(error, what = "This genome cannot be shown") {
  if (!(error instanceof Refusal)) console.error(error);
  $("alert").textContent = `${what}: ${clipped(error.message, 300)}.`;
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
  const shown = Math.min(bytes.length, SQUARES);
  const draw = () => {
    const strip = $("strip");
    const [width, ratio] = [strip.clientWidth, devicePixelRatio];
    const cell = Math.max(2, Math.min(11, Math.sqrt((width * 200) / shown)));
    const across = Math.floor(width / cell);
    strip.width = width * ratio;
    strip.height = Math.ceil(shown / across) * cell * ratio;
    strip.style.height = `${strip.height / ratio}px`;
    const ink = strip.getContext("2d");
    ink.scale(ratio, ratio);
    const size = cell - (cell > 4 ? 1 : 0);
    parts.forEach(([name, from, to]) => {
      for (let i = from; i < Math.min(to, shown); i++) {
        ink.fillStyle = shade(name, bytes[i]);
        ink.fillRect((i % across) * cell, Math.floor(i / across) * cell, size, size);
      }
    });
  };
  $("genome").hidden = false;
  $("strip").setAttribute("aria-label", `The ${count(bytes.length)} bytes of the genome`);
  const those = shown < bytes.length ? `The first ${count(shown)} of ${count(bytes.length)}` : `All ${count(bytes.length)}`;
  $("genome-note").textContent = `${those} bytes of the file, one square per byte.`;
  $("legend").replaceChildren(...parts.map(([name, from, to]) => {
    const dot = element("i");
    dot.style.background = shade(name, 128);
    return element("li", {}, dot, `${name}: ${count(to - from)}`);
  }));
  repaints.genome = draw;
  afterPaint(draw);
}

/* The weights, while they grow. */

const WAVES_OF = { periodic: "waves", bilinear: "pairs of waves", low_rank: "products", xox: "genes", gnet: "units", stochastic: "units" };

/**
 * How the matrices of a tensor are laid out as a picture of at most so many pixels: {width, height, at}, with the weight
 * of each pixel, -1 between patches. Weights of an image's pixels, or of a kernel, stand beside each other as in the
 * image, as many in a row as fit into the room (in pixels). Of larger matrices every second, third, ... weight is shown.
 */
function pictureOf({ kind, shape, slots: [{ grid, colCode }, ...more] }, room, most) {
  const image = colCode.type === "grid" && colCode.dims.length > 1 ? colCode.dims.slice(-2) : null;
  const patch = image ?? (kind === "conv" && shape.length === 4 ? shape.slice(2) : null);
  const rows = grid.rows * (more.length + 1);
  if (!patch || product(patch) === 1 || 2 * product(patch) > most) {
    let step = 1;
    while (Math.ceil(rows / step) * Math.ceil(grid.cols / step) > most) step++;
    const [height, width] = [Math.ceil(rows / step), Math.ceil(grid.cols / step)];
    return { width, height, at: (x, y) => step * (y * grid.cols + x) };
  }
  const [h, w] = patch;
  const gap = 1;
  const patches = Math.max(1, Math.min((rows * grid.cols) / (h * w), Math.floor(most / ((h + gap) * (w + gap)))));
  const beside = grid.cols / (h * w);
  const [least, widest] = [0.78, 2].map((ratio) => Math.ceil(Math.sqrt((patches * ratio * h) / w)));
  const across = Math.min(patches, beside > 3 ? beside : Math.max(least, Math.min(widest, Math.floor(room / (w + gap)))));
  const at = (x, y) => {
    const [p, i, j] = [Math.floor(y / (h + gap)) * across + Math.floor(x / (w + gap)), y % (h + gap), x % (w + gap)];
    return i < h && j < w && p < patches ? p * h * w + i * w + j : -1;
  };
  return { width: across * (w + gap) - gap, height: Math.ceil(patches / across) * (h + gap) - gap, at };
}

/** A figure for a tensor, with `paint`, which shows its matrices as they are. */
function figureOf(tensor, { width, height, at }, zoom) {
  const { hypernet, grid } = tensor.slots[0];
  const canvas = element("canvas", { width, height, className: zoom > 1 ? "large" : "" });
  canvas.style.width = `${Math.max(8, width * zoom)}px`;
  canvas.style.aspectRatio = height * zoom < 8 ? `${width * zoom} / 8` : `${width} / ${height}`;
  const tiles = sum(tensor.slots.map((slot) => slot.grid.down * slot.grid.across));
  const size = typeOf(hypernet).size(hypernet);
  const by = `${count(size)} ${WAVES_OF[hypernet.type]}${tiles > 1 ? ` × ${count(tiles)} tiles` : ""}`;
  const words = `${count(grid.rows * tensor.slots.length)} × ${count(grid.cols)} from ${by}`;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `Weights of ${clipped(tensor.name)}, ${words}`);
  const name = clipped(tensor.name).split(".").flatMap((part, i) => (i ? [element("wbr"), `.${part}`] : [part]));
  const caption = element("figcaption", {}, element("b", {}, ...name), element("br"), words);
  const ink = canvas.getContext("2d");
  let image;
  let weights;
  const paint = () => {
    if (!tensor.grown) return;
    if (!image) {
      image = ink.createImageData(width, height);
      weights = Int32Array.from({ length: width * height }, (_, k) => at(k % width, Math.floor(k / width)));
    }
    const pixels = new Uint32Array(image.data.buffer);
    // Contrast by what has grown so far: a single wave is as clear as the sum of all.
    let [grown, squares] = [0, 0];
    for (const k of weights) {
      const w = k < 0 ? 0 : tensor.grown[k];
      if (w) (grown++, (squares += w * w));
    }
    const unit = 127.5 / (2.2 * Math.sqrt(squares / grown) || 1);
    const colours = DARK.matches ? COLOURS.dark : COLOURS.light;
    weights.forEach((k, i) => {
      if (k >= 0) pixels[i] = colours[Math.max(0, Math.min(255, tensor.grown[k] * unit + 127.5)) | 0];
    });
    ink.putImageData(image, 0, 0);
  };
  const figure = element("figure", {}, canvas, caption);
  figure.style.width = `max(8.2rem, ${width * zoom}px)`;
  return { figure, paint };
}

/** Blue below zero, paper at zero, orange above: little-endian RGBA. */
const coloursOf = (paper, below, above) => Uint32Array.from({ length: 256 }, (_, i) => {
  const [x, side] = [Math.abs(i - 127.5) / 127.5, i < 128 ? below : above];
  const [r, g, b] = paper.map((p, k) => Math.round(p + (side[k] - p) * x ** 0.8));
  return (255 << 24) | (b << 16) | (g << 8) | r;
});
const COLOURS = {
  light: coloursOf([250, 249, 246], [23, 78, 122], [190, 82, 24]),
  dark: coloursOf([27, 30, 36], [112, 184, 232], [244, 152, 84]),
};

/** Small kernels are shown larger than large matrices. */
const zoomOf = ({ width, height }, zoom) => (Math.max(width, height) < 120 ? Math.max(zoom, Math.min(4, 160 / Math.max(width, height))) : zoom);

const isDrawn = ({ slots }) => slots.length > 0 && slots[0].hypernet.type !== "constant";

/** Grows all tensors, a frame at a time, while it is `wanted`; resolves when all weights are there. */
function grow(genome, wanted) {
  const generated = genome.plan.tensors.filter((t) => t.slots.length);
  for (const tensor of generated) tensor.grown = tensor.data = null;
  const drawn = generated.filter(isDrawn).slice(0, FIGURES);
  const width = $("tensors").clientWidth;
  const most = Math.floor(FIGURE_PIXELS / Math.max(4, drawn.length));
  const pictures = new Map(drawn.map((tensor) => [tensor, pictureOf(tensor, width, most)]));
  const largest = (side) => Math.max(1, ...[...pictures.values()].map((picture) => picture[side]));
  const area = 1 + sum([...pictures.values()].map((picture) => picture.width * picture.height));
  const room = width * Math.max(480, width) * (drawn.length > 6 ? 0.6 : 1);
  const zoom = Math.min(4, width / largest("width"), Math.sqrt(room / area));
  const figures = new Map(drawn.map((tensor) => [tensor, figureOf(tensor, pictures.get(tensor), zoomOf(pictures.get(tensor), zoom))]));
  $("tensors").replaceChildren(...drawn.map((tensor) => figures.get(tensor).figure));
  repaints.weights = () => figures.forEach(({ paint }) => paint());
  $("progress").hidden = false;
  const begun = performance.now();
  let done = 0;
  const steps = (function* () {
    for (const tensor of generated) {
      let made = 0;
      const all = product(tensor.shape);
      for (const weights of growTensor(genome, tensor)) yield [tensor, (done + (made += weights) / all) / generated.length];
      yield [tensor, ++done / generated.length];
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
            if (!end) return afterPaint(frame);
            $("progress").hidden = true;
            return resolve(performance.now() - begun);
          }
        }
      } catch (error) {
        return reject(error);
      }
    };
    frame();
  });
}

function sayWeights({ plan: { tensors } }, seconds) {
  const generated = tensors.filter((t) => t.slots.length);
  const size = (list) => sum(list.map((t) => product(t.shape)));
  const direct = size(tensors) - size(generated);
  const rest = direct ? ` The file holds ${count(direct)} more as they are.` : "";
  const hidden = generated.filter(isDrawn).length - FIGURES;
  const others = hidden > 0 ? ` ${count(hidden)} more tensors are not drawn.` : "";
  const time = seconds === undefined ? "" : ` Growing took ${seconds.toFixed(1)} s.`;
  $("weights-note").textContent = `The g-nets generate ${count(size(generated))} weights: blue is below zero, orange is above.${rest}${others}${time}`;
}

/* The network: images. */

function classifier({ shape: [channels, rows, cols], outputs, mean, std, white, classes }, task) {
  const names = classes ?? Array.from({ length: outputs }, (_, i) => String(i));
  const pad = $("draw").getContext("2d", { willReadFrequently: true });
  const size = $("draw").width;
  const of = (value, c) => (Array.isArray(value) ? value[c % value.length] : value);
  $("classifier").hidden = false;
  $("pad").hidden = channels !== 1;
  $("clear").hidden = channels !== 1;
  $("drop-text").textContent = channels === 1 ? "Open an image" : "Drop an image here or open one";
  $("bars").className = classes ? "named" : "";
  const bars = names.map((name) => {
    const [fill, part] = [element("i"), element("output")];
    const row = element("li", {}, name, element("div", { className: "bar" }, fill), part);
    return { row, fill, part };
  });
  $("bars").replaceChildren(...bars.map(({ row }) => row));
  Object.assign($("seen"), { width: cols, height: rows });
  const bench = $("seen").getContext("2d");
  let run = null; // until all weights have grown
  let last = null;

  /** Show pixels [C * h * w] of 0 to 255, and what the network makes of them; null for none. */
  const show = (pixels) => {
    last = pixels;
    bench.clearRect(0, 0, cols, rows);
    const parts = pixels && run ? softmax(run(pixels)) : null;
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
    Object.assign(pad, { lineWidth: PEN, lineCap: "round", lineJoin: "round", strokeStyle: getComputedStyle($("draw")).color });
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
    await checkPicture(file);
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
    } catch (error) {
      const why = error instanceof Refusal ? error.message : "is no image that can be read";
      $("answer").textContent = `${clipped(file.name)} ${why}`;
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
  const scaled = (pixels) => Float64Array.from(pixels, (v, k) => {
    const c = Math.floor(k / (rows * cols));
    return Math.fround(((v * white) / 255 - of(mean, c)) / of(std, c));
  });
  /** Begins to run the network, and gives what maps pixels to logits. */
  return (net) => {
    run = (pixels) => net({ shape: [channels, rows, cols], data: scaled(pixels) }).data;
    show(last);
    return run;
  };
}

/** Throws a Refusal for a picture of too many pixels, by its header alone. */
async function checkPicture(file) {
  const image = new Image();
  const loaded = new Promise((resolve, reject) => Object.assign(image, { onload: resolve, onerror: reject }));
  image.src = URL.createObjectURL(file);
  try {
    await loaded;
  } finally {
    URL.revokeObjectURL(image.src);
  }
  const pixels = image.naturalWidth * image.naturalHeight;
  if (pixels > PICTURE_PIXELS) throw new Refusal(`has ${count(pixels)} pixels, this page opens up to ${count(PICTURE_PIXELS)}`);
}

/* The network: texts. */

/** Which text is written: one stops when the next begins, or another network is shown. */
let writing = 0;

function writer({ letters, shape: [context] }) {
  $("writer").hidden = false;
  $("prompt").value ||= "ROMEO:\n";
  $("temperature").oninput = () => ($("degrees").textContent = Number($("temperature").value).toFixed(1));
  $("text").replaceChildren();
  $("write").disabled = true;
  $("writer").onsubmit = (event) => event.preventDefault();
  /** Begins to run the network, and gives what maps tokens to logits. */
  return (net) => {
    const run = (tokens) => net({ shape: [tokens.length], data: tokens }).data;
    const write = (prompt, length) => {
      const mine = ++writing;
      const written = prompt.map((c) => letters.indexOf(c));
      const rest = document.createTextNode("");
      $("text").replaceChildren(element("b", {}, prompt.join("")), rest);
      const next = () => {
        if (mine !== writing || rest.length >= length) return;
        const logits = run(written.slice(-context));
        written.push(drawn(logits.slice(-letters.length), Number($("temperature").value)));
        rest.data += letters[written.at(-1)];
        setTimeout(next);
      };
      setTimeout(next);
    };
    $("write").disabled = false;
    $("writer").onsubmit = (event) => {
      event.preventDefault();
      const prompt = Array.from($("prompt").value || "\n");
      const unknown = [...new Set(prompt.filter((c) => !letters.includes(c)))];
      if (!unknown.length) return write(prompt, 400);
      writing++;
      $("text").textContent = `The network does not know the characters ${unknown.map((c) => JSON.stringify(c)).join(", ")}.`;
    };
    // A sample, before anybody asks.
    const prompt = Array.from($("prompt").value).filter((c) => letters.includes(c));
    write(prompt.length ? prompt : letters.slice(0, 1), 200);
    return run;
  };
}

/** A token by its logit; at temperature 0 the likeliest. */
function drawn(logits, temperature) {
  if (!temperature) return logits.indexOf(Math.max(...logits));
  const parts = softmax(logits.map((v) => v / temperature));
  let left = Math.random();
  return Math.max(0, parts.findIndex((p) => (left -= p) < 0));
}

/** Shows the network, which runs as soon as what this returns is called; throws a Refusal if it cannot run. */
function showNetwork(genome) {
  const { metadata } = genome;
  const about = interfaceOf(metadata, EMBEDDED.alphabets);
  checkNetwork(networkOf(metadata, tensorsOf(genome), EMBEDDED.networks), about);
  const name = clipped(`${metadata.pnet}, for ${metadata.task}`);
  const drawing = "Draw with a mouse, a finger or the arrow keys. Shift lifts the pen, Esc clears.";
  const how = about.letters
    ? `It writes one character at a time, from up to ${count(about.shape[0])} characters before it.`
    : about.shape[0] === 1 ? drawing : "Open an image, or drop one here.";
  $("network-note").textContent = `This page runs the network (${name}). ${how}`;
  $("network").hidden = false;
  const start = about.letters ? writer(about) : classifier(about, metadata.task);
  return () => {
    const tensors = tensorsOf(genome);
    // For the console.
    globalThis.gbfunc = { genome, tensors, run: start(networkOf(metadata, tensors, EMBEDDED.networks)) };
  };
}

/* All of it. */

/** Which genome is shown: the one that was opened last. */
let shown = 0;

async function show(bytes) {
  const mine = ++shown;
  writing++;
  for (const id of ["alert", "genome", "weights", "network", "classifier", "writer"]) $(id).hidden = true;
  delete document.body.dataset.grown;
  delete globalThis.gbfunc;
  Object.assign(repaints, { genome: () => {}, weights: () => {} });
  try {
    const genome = readGenome(bytes);
    const { weights, wide } = genome.plan;
    $("title").textContent = `${count(weights)} weights from ${count(bytes.length)} bytes`;
    document.title = $("title").textContent;
    const times = count(Math.round((weights * (wide ? 8 : 4)) / bytes.length));
    $("lead").textContent = `This neural network grows from its genome, a file ${times} times smaller than its weights. The g-nets in the file generate each weight from its position.`;
    let start = () => {};
    try {
      start = showNetwork(genome);
    } catch (error) {
      refuse(error, "The network does not run here");
    }
    showGenome(bytes, genome);
    $("weights").hidden = false;
    $("tensors").replaceChildren();
    sayWeights(genome);
    const growth = async () => {
      $("again").disabled = true;
      const time = await grow(genome, () => mine === shown);
      if (mine !== shown) return;
      sayWeights(genome, time / 1000);
      Object.assign($("again"), { disabled: false, textContent: "Grow again" });
      if (!document.body.dataset.grown) start();
      document.body.dataset.grown = "yes";
    };
    $("again").onclick = () => growth().catch((error) => mine === shown && refuse(error));
    $("again").textContent = "Grow";
    const { seconds, bytes: memory } = costOf(genome.plan);
    const { mostSeconds, mostMemory } = FORMAT.limits;
    if (seconds <= mostSeconds && memory <= mostMemory) return await growth();
    const takes = `about ${count(Math.ceil(seconds))} s and ${count(Math.ceil(memory / 2 ** 20))} MB`;
    refuse(new Refusal(`its ${count(weights)} weights take ${takes}. Press Grow to grow them all the same`), "This genome waits");
    $("again").disabled = false;
  } catch (error) {
    if (mine === shown) refuse(error);
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

/** Whether a file begins as a genome: as a compact one, or with the length of a header in JSON. */
async function isGenome(file) {
  const head = new Uint8Array(await file.slice(0, 9).arrayBuffer());
  const compact = String.fromCharCode(...head.subarray(0, 3)) === FORMAT.magic;
  return head.length === 9 && (compact || (head[8] === 123 && !head[6] && !head[7]));
}
async function opened(file) {
  if (!file) return;
  if (file.size > MOST_BYTES) return refuse(new Refusal(`${clipped(file.name)} has ${count(file.size)} bytes`), "Not opened");
  await show(new Uint8Array(await file.arrayBuffer()));
}
$("file").onchange = ({ target }) => opened(target.files[0]);
ondragover = (event) => event.preventDefault();
ondrop = async (event) => {
  event.preventDefault();
  const files = [...event.dataTransfer.files];
  const genomes = await Promise.all(files.map(isGenome));
  opened(files[genomes.indexOf(true)]);
  if (files.length && !genomes.includes(true) && !$("classifier").contains(event.target)) {
    refuse(new Refusal(`${clipped(files[0].name)} is no genome`), "Not opened");
  }
};
onresize = () => repaints.genome();
DARK.onchange = () => Object.values(repaints).forEach((repaint) => repaint());
onhashchange = begin;
begin();
