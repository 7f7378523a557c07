/** The network at work on images: drawn, opened, or dropped. */

function classifier({ shape: [channels, rows, cols], outputs, mean, std, white, classes }, task) {
  const names = classes ?? Array.from({ length: outputs }, (_, i) => String(i));
  const pad = $("draw").getContext("2d", { willReadFrequently: true });
  const size = $("draw").width;
  const of = (value, c) => (Array.isArray(value) ? value[c % value.length] : value);
  $("classifier").hidden = false;
  $("pad").hidden = channels !== 1;
  $("clear").hidden = channels !== 1;
  $("drop-text").textContent = "Open an image, or drop one";
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
      const why = error instanceof Refusal ? error.message : "is no genome, and no image that can be read";
      $("answer").textContent = `${clipped(file.name)} ${why}`;
      return;
    }
    clear();
    show(pixels);
  };
  $("image").onchange = ({ target }) => open(target.files[0]);
  openImage = open;
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
