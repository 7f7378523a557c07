/** Pictures of weights while they grow. */

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
