/**
 * Networks in plain JavaScript, one example at a time: the p-nets of `gbfunc.tasks.pnets`, by their names there, and layers
 * in a row, as `layers_in_a_row` describes them. A network of an example without data, {shape, data: null}, computes
 * shapes alone, and refuses what does not fit or is too much.
 */

const unfit = () => new Refusal("its network's layers do not fit its weights");
const fits = (holds) => {
  if (!holds) throw unfit();
};

/** What a layer makes of `x`: {shape, data, spent}, where `fill(out)` writes the numbers, by so many multiplications. */
function made(x, shape, work, fill) {
  const size = product(shape);
  fits(size >= 1);
  const spent = (x.spent ?? 0) + work + size;
  const { mostWork, mostNumbers } = LIMITS;
  if (spent > mostWork || size > mostNumbers) throw new Refusal("its network is too much work for this page");
  if (x.data === null) return { shape, data: null, spent };
  const data = new Float64Array(size);
  fill(data);
  return { shape, data, spent };
}

const mapped = (x, f) => made(x, x.shape, 10 * product(x.shape), (out) => x.data.forEach((v, i) => (out[i] = f(v))));
const relu = (x) => mapped(x, (v) => Math.max(0, v));

function added(x, y) {
  fits(product(x.shape) === product(y.shape));
  return made({ ...x, spent: Math.max(x.spent ?? 0, y.spent ?? 0) }, x.shape, 0, (out) => x.data.forEach((v, i) => (out[i] = v + y.data[i])));
}

const sized = (tensor, size) => fits(!tensor || product(tensor.shape) === size);

/** [..., n] @ [m, n].T + [m]. */
function linear(x, weight, bias) {
  const [m, n] = weight.shape;
  fits(weight.shape.length === 2 && x.shape.at(-1) === n);
  sized(bias, m);
  const rows = product(x.shape.slice(0, -1));
  return made(x, [...x.shape.slice(0, -1), m], rows * m * n, (out) => {
    for (let r = 0; r < rows; r++) {
      for (let i = 0; i < m; i++) {
        let total = bias ? bias.data[i] : 0;
        for (let j = 0; j < n; j++) total += x.data[r * n + j] * weight.data[i * n + j];
        out[r * m + i] = total;
      }
    }
  });
}

/** Both numbers of what is one for rows and for columns, or a number for both. */
const pair = (n) => (Array.isArray(n) ? n : [n, n]);

/** Places of a window along an axis of n, as torch counts them. */
const windows = (n, size, stride, padding) => Math.max(0, Math.floor((n + 2 * padding - size) / stride) + 1);

/** A convolution of [C, h, w] with zeros around it. */
function conv(x, weight, bias, stride = 1, padding = 0, dilation = 1) {
  const [[channels, h, w], [outs, ins, kh, kw]] = [x.shape, weight.shape];
  const [[sh, sw], [ph, pw], [dh, dw]] = [stride, padding, dilation].map(pair);
  const [oh, ow] = [windows(h, dh * (kh - 1) + 1, sh, ph), windows(w, dw * (kw - 1) + 1, sw, pw)];
  // Each group of outputs sees its own `ins` of the channels.
  const each = (outs * ins) / channels;
  fits(x.shape.length === 3 && weight.shape.length === 4 && channels % ins === 0 && Number.isInteger(each));
  sized(bias, outs);
  /** Places of the output [first, end), on an axis of `places`, whose window's entry at `at` is within [0, n). */
  const inside = (at, n, step, places) => [Math.max(0, Math.ceil(-at / step)), Math.min(places, Math.floor((n - 1 - at) / step) + 1)];
  return made(x, [outs, oh, ow], outs * ins * kh * kw * oh * ow, (out) => {
    for (let o = 0; o < outs; o++) {
      const map = out.subarray(o * oh * ow, (o + 1) * oh * ow).fill(bias ? bias.data[o] : 0);
      for (let c = 0; c < ins; c++) {
        const from = (Math.floor(o / each) * ins + c) * h;
        for (let ky = 0; ky < kh; ky++) {
          const [top, bottom] = inside(ky * dh - ph, h, sh, oh);
          for (let kx = 0; kx < kw; kx++) {
            const v = weight.data[((o * ins + c) * kh + ky) * kw + kx];
            const [left, right] = inside(kx * dw - pw, w, sw, ow);
            for (let i = top; i < bottom; i++) {
              const row = (from + i * sh + ky * dh - ph) * w + kx * dw - pw;
              for (let j = left; j < right; j++) map[i * ow + j] += v * x.data[row + j * sw];
            }
          }
        }
      }
    }
  });
}

/** Batch normalisation of [C, ...] by running statistics. */
function batchNorm(x, net, name, eps = 1e-5) {
  const [weight, bias, mean, variance] = ["weight", "bias", "running_mean", "running_var"].map((k) => net[`${name}.${k}`]);
  for (const tensor of [weight, bias, mean, variance]) sized(tensor, x.shape[0]);
  fits(mean && variance);
  const size = product(x.shape.slice(1));
  return made(x, x.shape, 3 * product(x.shape), (out) => {
    x.data.forEach((v, i) => {
      const c = Math.floor(i / size);
      const scale = (weight ? weight.data[c] : 1) / Math.sqrt(variance.data[c] + eps);
      out[i] = (v - mean.data[c]) * scale + (bias ? bias.data[c] : 0);
    });
  });
}

/** The largest entry of each window of [C, h, w], or with `mean` their mean, with zeros around. */
function pool(x, size, stride = size, padding = 0, mean = false) {
  const [channels, h, w] = x.shape;
  const [[kh, kw], [sh, sw], [ph, pw]] = [size, stride, padding].map(pair);
  const [oh, ow] = [windows(h, kh, sh, ph), windows(w, kw, sw, pw)];
  fits(x.shape.length === 3);
  return made(x, [channels, oh, ow], channels * oh * ow * kh * kw, (out) => {
    for (let k = 0; k < out.length; k++) {
      const [c, i, j] = [Math.floor(k / oh / ow), Math.floor(k / ow) % oh, k % ow];
      let [total, most] = [0, -Infinity];
      for (let row = Math.max(0, i * sh - ph); row < Math.min(h, i * sh - ph + kh); row++) {
        for (let col = Math.max(0, j * sw - pw); col < Math.min(w, j * sw - pw + kw); col++) {
          const v = x.data[(c * h + row) * w + col];
          total += v;
          most = Math.max(most, v);
        }
      }
      out[k] = mean ? total / (kh * kw) : most;
    }
  });
}

const flat = (x) => ({ ...x, shape: [product(x.shape)] });

/** [C, h, w] -> [C], the mean of every channel. */
function means(x) {
  const size = product(x.shape.slice(1));
  return made(x, [x.shape[0]], product(x.shape), (out) => x.data.forEach((v, i) => (out[Math.floor(i / size)] += v / size)));
}

/** Layer normalisation of the last dimension, with the scale and shift of `name`, if any. */
function layerNorm(x, net, name, eps = 1e-5) {
  const n = x.shape.at(-1);
  const [weight, bias] = ["weight", "bias"].map((k) => net[`${name}.${k}`]);
  for (const tensor of [weight, bias]) sized(tensor, n);
  return made(x, x.shape, 5 * product(x.shape), (out) => {
    for (let r = 0; r < out.length; r += n) {
      const row = x.data.subarray(r, r + n);
      const mean = sum(row) / n;
      const scale = 1 / Math.sqrt(row.reduce((a, b) => a + (b - mean) ** 2, 0) / n + eps);
      for (let i = 0; i < n; i++) out[r + i] = (row[i] - mean) * scale * (weight ? weight.data[i] : 1) + (bias ? bias.data[i] : 0);
    }
  });
}

function softmax(values) {
  const most = values.reduce((a, b) => Math.max(a, b), -Infinity);
  const powers = values.map((v) => Math.exp(v - most));
  const total = sum(powers);
  return powers.map((v) => v / total);
}

/** Causal attention of [L, 3 E] queries, keys and values: [L, E]. */
function attention(x, heads) {
  const [{ data, shape: [length, packed] }, width] = [x, x.shape[1] / 3];
  const each = width / heads;
  fits(Number.isInteger(width) && Number.isInteger(each));
  const dot = (a, b) => {
    let total = 0;
    for (let d = 0; d < each; d++) total += data[a + d] * data[b + d];
    return total;
  };
  return made(x, [length, width], length * length * width, (out) => {
    for (let head = 0; head < heads; head++) {
      for (let i = 0; i < length; i++) {
        const query = i * packed + head * each;
        const key = (j) => j * packed + width + head * each;
        const scores = Float64Array.from({ length: i + 1 }, (_, j) => dot(query, key(j)) / Math.sqrt(each));
        softmax(scores).forEach((p, j) => {
          for (let d = 0; d < each; d++) out[i * width + head * each + d] += p * data[key(j) + width + d];
        });
      }
    }
  });
}

/** What acts on each number by itself, by its name in a description. */
const POINTWISE = {
  ...ACTIVATIONS,
  sigmoid: (x) => 1 / (1 + Math.exp(-x)),
  silu: (x) => x / (1 + Math.exp(-x)),
  gelu_tanh: (x) => (x / 2) * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3))),
};

/** The other layers, by their names in a description: each maps an example, with the tensors by name and its options. */
const LAYERS = {
  linear: (x, net, name) => linear(x, net[`${name}.weight`], net[`${name}.bias`]),
  conv: (x, net, name, ...how) => conv(x, net[`${name}.weight`], net[`${name}.bias`], ...how),
  batch_norm: batchNorm,
  layer_norm: layerNorm,
  max_pool: (x, net, ...how) => pool(x, ...how),
  avg_pool: (x, net, size, stride, padding) => pool(x, size, stride, padding, true),
  means: (x) => ({ ...means(x), shape: [x.shape[0], 1, 1] }),
  flatten: flat,
};

/** A network that is described as its layers in a row, [[name, option, ...], ...]. */
function inARow(net, layers) {
  for (const [kind, name] of layers) {
    const held = typeof name !== "string" || Object.keys(net).some((key) => key.startsWith(`${name}.`));
    if (!held) throw new Refusal(`this genome's network has no layer ${quoted(name)}, which the page's has`);
    if (!known(POINTWISE, kind) && !known(LAYERS, kind)) throw notYet(`layers ${quoted(kind)}`);
  }
  const applied = (x, [kind, ...how]) => (known(LAYERS, kind) ? LAYERS[kind](x, net, ...how) : mapped(x, POINTWISE[kind]));
  return (x) => layers.reduce(applied, x);
}

/** Each takes the tensors by name and the p-net's options, and gives what maps an example to logits. */
const NETWORKS = {
  mlp: (net) => {
    const layers = Object.keys(net).filter((name) => name.endsWith(".weight")).length;
    const row = Array.from({ length: layers }, (_, i) => [["linear", `${2 * i}`], ["relu"]]).flat();
    return inARow(net, [["flatten"], ...row.slice(0, -1)]);
  },

  convnet: (net) => inARow(net, [
    ...["0", "3"].flatMap((name) => [["conv", name], ["max_pool", 2], ["relu"]]), ["flatten"], ["linear", "7"],
  ]),

  lenet5: (net) => inARow(net, [
    ["conv", "0"], ["max_pool", 2], ["conv", "2"], ["max_pool", 2], ["flatten"], ["linear", "5"], ["relu"], ["linear", "7"],
  ]),

  allconv: (net) => {
    // [stride, padding] of each convolution but the last.
    const shapes = [[1, 1], [1, 1], [2, 1], [1, 1], [1, 1], [2, 1], [1, 0], [1, 0]];
    const row = [];
    let layer = 0;
    for (const [stride, padding] of shapes) {
      row.push(["conv", `${layer}`, stride, padding], ["batch_norm", `${layer + 1}`], ["relu"]);
      layer += 3;
    }
    return inARow(net, [...row, ["conv", `${layer}`], ["means"], ["flatten"]]);
  },

  resnet20: resnet,
  resnet56: resnet,

  gpt: (net, { heads = 4 }) => (tokens) => {
    const [length, [places, width]] = [tokens.shape[0], net["positions.weight"].shape];
    const { shape: [letters, ...rest], data: table } = net["tokens.weight"];
    fits(heads >= 1 && length <= places && rest.length === 1 && rest[0] === width);
    let x = made(tokens, [length, width], 0, (out) => {
      tokens.data.forEach((token, i) => {
        fits(token < letters);
        for (let e = 0; e < width; e++) out[i * width + e] = table[token * width + e] + net["positions.weight"].data[i * width + e];
      });
    });
    for (let i = 0; `blocks.${i}.up.weight` in net; i++) {
      const layer = (y, name) => linear(y, net[`blocks.${i}.${name}.weight`], net[`blocks.${i}.${name}.bias`]);
      const packed = layer(layerNorm(x, net, `blocks.${i}.attention_norm`), "qkv");
      x = added(x, layer(attention(packed, heads), "out"));
      const hidden = layer(layerNorm(x, net, `blocks.${i}.mlp_norm`), "up");
      x = added(x, layer(mapped(hidden, ACTIVATIONS.gelu), "down"));
    }
    return linear(layerNorm(x, net, "norm"), net["head.weight"]);
  },
};

/** Residual networks of CIFAR form: shortcuts have no parameters. */
function resnet(net) {
  const shortcut = (x, [outs, oh, ow]) => {
    const [c, h, w] = x.shape;
    const stride = Math.round(h / oh);
    return made(x, [outs, oh, ow], 0, (out) => {
      for (let k = 0; k < Math.min(c, outs) * oh * ow; k++) {
        out[k] = x.data[(Math.floor(k / oh / ow) * h + (Math.floor(k / ow) % oh) * stride) * w + (k % ow) * stride];
      }
    });
  };
  return (x) => {
    const normed = (x, name, i, stride) => {
      return batchNorm(conv(x, net[`${name}.${i}.weight`], null, stride, 1), net, `${name}.${i + 1}`);
    };
    x = relu(normed(x, "stem", 0, 1));
    for (let i = 0; `blocks.${i}.convolutions.0.weight` in net; i++) {
      const name = `blocks.${i}.convolutions`;
      const [outs, ins] = net[`${name}.0.weight`].shape;
      const second = normed(relu(normed(x, name, 0, outs === ins ? 1 : 2)), name, 3, 1);
      x = relu(added(second, shortcut(x, second.shape)));
    }
    return linear(means(x), net["head.weight"], net["head.bias"]);
  };
}

/** JSON whose keys have one order. */
function inOrder(x) {
  if (Array.isArray(x)) return `[${x.map(inOrder)}]`;
  if (x === null || typeof x !== "object") return JSON.stringify(x);
  return `{${Object.keys(x).sort().map((key) => `${JSON.stringify(key)}:${inOrder(x[key])}`)}}`;
}

/** What maps an example to logits, by what a genome's file says of its p-net and by descriptions of others. */
function networkOf(metadata, tensors, described = {}) {
  const { pnet } = metadata;
  if (!pnet) throw new Refusal("the file does not say which network it grows: it was not written by gbfunc train");
  const config = isRecord(metadata.pnet_config) ? metadata.pnet_config : {};
  const own = known(described, pnet);
  const { task_config = {}, pnet_config = {} } = metadata;
  if (own && inOrder(own.options) !== inOrder({ task_config, pnet_config })) {
    throw new Refusal(`this page knows the network ${quoted(pnet)} with other options`);
  }
  const network = own ? (net) => inARow(net, own.layers) : known(NETWORKS, pnet);
  if (!network) throw new Refusal(`this page does not know the network ${quoted(pnet)}`);
  return network(tensors, config);
}

/**
 * What a file says of its network's inputs and outputs: {shape, outputs, tokens, mean, std, white, classes}. Throws a
 * Refusal if these are not what the page shows, or are more than it shows.
 */
function interfaceOf({ interface: about, mean = 0, std, white = 255, classes = null, alphabet }, alphabets) {
  const [shape, outputs, tokens = false] = isList(about) ? about : [[], 0];
  const { mostOutputs, mostPixels, mostContext } = LIMITS;
  const isSize = (n) => Number.isSafeInteger(n) && n >= 1;
  if (!isList(shape) || !shape.every(isSize) || !isSize(outputs) || typeof tokens !== "boolean") throw new Refusal("the file does not say what its network takes and gives");
  if (outputs > mostOutputs) throw new Refusal(`its network has ${count(outputs)} outputs, this page shows up to ${count(mostOutputs)}`);
  if (tokens) {
    const letters = isText(known(alphabets, alphabet)) ? Array.from(alphabets[alphabet]) : [];
    if (letters.length !== outputs) throw new Refusal("this page does not know the characters of its text");
    if (shape.length !== 1 || !(shape[0] >= 1 && shape[0] <= mostContext)) throw new Refusal("it reads longer texts than this page");
    return { shape, outputs, letters };
  }
  const numbers = (value) => isNumber(value) || (isList(value) && [1, shape[0]].includes(value.length) && value.every(isNumber));
  const images = shape.length === 3 && numbers(mean) && numbers(std) && ![std].flat().includes(0) && isNumber(white);
  if (!images) throw new Refusal("the page takes images and characters, and the file says of neither how they become inputs");
  const size = product(shape);
  if (!(size >= 1 && size <= mostPixels)) throw new Refusal(`its network takes images of ${count(size)} numbers, this page draws up to ${count(mostPixels)}`);
  const named = classes === null || (isList(classes) && classes.every(isText) && classes.length === outputs);
  if (!named) throw new Refusal("the names of its classes are not those of its outputs");
  const short = (name) => (name.length > 60 ? `${name.slice(0, 57)}...` : name);
  return { shape, outputs, mean, std, white, classes: classes && classes.map(short), letters: null };
}

/** Computes the shapes of a network before its weights are there; throws a Refusal if it cannot run. */
function checkNetwork(run, { shape, outputs, letters }) {
  let result;
  try {
    result = run({ shape, data: null }).shape;
  } catch (error) {
    throw error instanceof Refusal ? error : unfit();
  }
  fits(product(result) === outputs * (letters ? shape[0] : 1));
}
