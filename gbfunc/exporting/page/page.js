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
    : about.shape[0] === 1 ? drawing : "Open an image, or drop one on the page.";
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

/** What reads an image that is dropped on the page; null while no network of images is shown. */
let openImage = null;

async function show(bytes) {
  const mine = ++shown;
  writing++;
  for (const id of ["alert", "genome", "weights", "network", "classifier", "writer"]) $(id).hidden = true;
  delete document.body.dataset.grown;
  delete globalThis.gbfunc;
  Object.assign(repaints, { genome: () => {}, weights: () => {} });
  openImage = null;
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
    const { mostSeconds, mostMemory } = LIMITS;
    if (seconds <= mostSeconds && memory <= mostMemory) return await growth();
    const takes = `about ${count(Math.ceil(seconds))} s and ${count(Math.ceil(memory / 2 ** 20))} MB`;
    const before = $("alert").hidden ? "" : `${$("alert").textContent} `;
    refuse(new Refusal(`its ${count(weights)} weights take ${takes}. Press Grow to grow them`), `${before}This genome waits`);
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
ondragover = (event) => (event.preventDefault(), $("drop").classList.add("over"));
ondragleave = () => $("drop").classList.remove("over");
ondrop = async (event) => {
  event.preventDefault();
  $("drop").classList.remove("over");
  const files = [...event.dataTransfer.files];
  const genomes = await Promise.all(files.map(isGenome));
  if (genomes.includes(true)) opened(files[genomes.indexOf(true)]);
  else if (files.length && openImage) openImage(files[0]);
  else if (files.length) refuse(new Refusal(`${clipped(files[0].name)} is no genome`), "Not opened");
};
onresize = () => repaints.genome();
DARK.onchange = () => Object.values(repaints).forEach((repaint) => repaint());
onhashchange = begin;
begin();
