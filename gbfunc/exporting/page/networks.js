/**
 * Networks in plain JavaScript, one example at a time: the p-nets of `gbfunc.tasks.pnets`, by their names there, and layers
 * in a row, as `layers_in_a_row` describes them.
 */

const relu = (x) => ({ ...x, data: x.data.map((v) => Math.max(0, v)) });
const added = (x, y) => ({ ...x, data: x.data.map((v, i) => v + y.data[i]) });

/** [..., n] @ [m, n].T + [m]. */
function linear({ shape, data }, weight, bias) {
  const [m, n] = weight.shape;
  const rows = data.length / n;
  const out = new Float64Array(rows * m);
  for (let r = 0; r < rows; r++) {
    for (let i = 0; i < m; i++) {
      let sum = bias ? bias.data[i] : 0;
      for (let j = 0; j < n; j++) sum += data[r * n + j] * weight.data[i * n + j];
      out[r * m + i] = sum;
    }
  }
  return { shape: [...shape.slice(0, -1), m], data: out };
}

/** Both numbers of what is one for rows and for columns, or a number for both. */
const pair = (n) => (Array.isArray(n) ? n : [n, n]);

/** Places of a window along an axis of n, as torch counts them. */
const windows = (n, size, stride, padding) => Math.floor((n + 2 * padding - size) / stride) + 1;

/** A convolution of [C, h, w] with zeros around it. */
function conv({ shape: [channels, h, w], data }, weight, bias, stride = 1, padding = 0, dilation = 1) {
  const [outs, ins, kh, kw] = weight.shape;
  const [[sh, sw], [ph, pw], [dh, dw]] = [stride, padding, dilation].map(pair);
  const [oh, ow] = [windows(h, dh * (kh - 1) + 1, sh, ph), windows(w, dw * (kw - 1) + 1, sw, pw)];
  // Each group of outputs sees its own `ins` of the channels.
  const each = (outs * ins) / channels;
  const out = new Float64Array(outs * oh * ow);
  for (let o = 0; o < outs; o++) {
    const map = out.subarray(o * oh * ow, (o + 1) * oh * ow).fill(bias ? bias.data[o] : 0);
    for (let c = 0; c < ins; c++) {
      const from = (Math.floor(o / each) * ins + c) * h;
      for (let y = 0; y < kh; y++) {
        for (let x = 0; x < kw; x++) {
          const v = weight.data[((o * ins + c) * kh + y) * kw + x];
          for (let i = 0; i < oh; i++) {
            const row = i * sh + y * dh - ph;
            if (row < 0 || row >= h) continue;
            for (let j = 0; j < ow; j++) {
              const col = j * sw + x * dw - pw;
              if (col >= 0 && col < w) map[i * ow + j] += v * data[(from + row) * w + col];
            }
          }
        }
      }
    }
  }
  return { shape: [outs, oh, ow], data: out };
}

/** Batch normalisation of [C, ...] by running statistics. */
function batchNorm({ shape, data }, net, name, eps = 1e-5) {
  const [weight, bias, mean, variance] = ["weight", "bias", "running_mean", "running_var"].map((k) => net[`${name}.${k}`]?.data);
  const size = product(shape.slice(1));
  const scale = Array.from(variance, (v, c) => (weight ? weight[c] : 1) / Math.sqrt(v + eps));
  return { shape, data: data.map((v, i) => ((c) => (v - mean[c]) * scale[c] + (bias ? bias[c] : 0))(Math.floor(i / size))) };
}

/** The largest entry of each window of [C, h, w], or with `mean` their mean, with zeros around. */
function pool({ shape: [channels, h, w], data }, size, stride = size, padding = 0, mean = false) {
  const [[kh, kw], [sh, sw], [ph, pw]] = [size, stride, padding].map(pair);
  const [oh, ow] = [windows(h, kh, sh, ph), windows(w, kw, sw, pw)];
  const out = new Float64Array(channels * oh * ow).map((_, k) => {
    const [c, i, j] = [Math.floor(k / oh / ow), Math.floor(k / ow) % oh, k % ow];
    let [sum, most] = [0, -Infinity];
    for (let row = Math.max(0, i * sh - ph); row < Math.min(h, i * sh - ph + kh); row++) {
      for (let col = Math.max(0, j * sw - pw); col < Math.min(w, j * sw - pw + kw); col++) {
        const v = data[(c * h + row) * w + col];
        sum += v;
        most = Math.max(most, v);
      }
    }
    return mean ? sum / (kh * kw) : most;
  });
  return { shape: [channels, oh, ow], data: out };
}

const flat = ({ data }) => ({ shape: [data.length], data });

/** [C, h, w] -> [C], the mean of every channel. */
function means({ shape: [channels, h, w], data }) {
  const mean = (_, c) => data.subarray(c * h * w, (c + 1) * h * w).reduce((a, b) => a + b, 0) / (h * w);
  return { shape: [channels], data: Float64Array.from({ length: channels }, mean) };
}

function layerNorm({ shape, data }, net, name, eps = 1e-5) {
  const [weight, bias] = [net[`${name}.weight`]?.data, net[`${name}.bias`]?.data];
  const n = shape.at(-1);
  const out = new Float64Array(data.length);
  for (let r = 0; r < data.length; r += n) {
    const row = data.subarray(r, r + n);
    const mean = row.reduce((a, b) => a + b, 0) / n;
    const scale = 1 / Math.sqrt(row.reduce((a, b) => a + (b - mean) ** 2, 0) / n + eps);
    for (let i = 0; i < n; i++) out[r + i] = (row[i] - mean) * scale * (weight ? weight[i] : 1) + (bias ? bias[i] : 0);
  }
  return { shape, data: out };
}

function softmax(values) {
  const most = values.reduce((a, b) => Math.max(a, b), -Infinity);
  const powers = values.map((v) => Math.exp(v - most));
  const sum = powers.reduce((a, b) => a + b, 0);
  return powers.map((v) => v / sum);
}

/** Causal attention of [L, 3 E] queries, keys and values: [L, E]. */
function attention({ shape: [length, packed], data }, heads) {
  const width = packed / 3;
  const each = width / heads;
  const out = new Float64Array(length * width);
  const dot = (a, b) => {
    let sum = 0;
    for (let d = 0; d < each; d++) sum += data[a + d] * data[b + d];
    return sum;
  };
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
  return { shape: [length, width], data: out };
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
    if (!held) throw new Refusal(`this genome's network has no layer ${JSON.stringify(name)}, which the page's has`);
    if (!(kind in POINTWISE || kind in LAYERS)) throw new Refusal(`not in the browser yet: layers ${JSON.stringify(kind)}`);
  }
  const applied = (x, [kind, ...how]) => (kind in LAYERS ? LAYERS[kind](x, net, ...how) : { ...x, data: x.data.map(POINTWISE[kind]) });
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

  allconv: (net, { dropout = 0, norm = true }) => {
    // [stride, padding] of each convolution but the last.
    const shapes = [[1, 1], [1, 1], [2, 1], [1, 1], [1, 1], [2, 1], [1, 0], [1, 0]];
    const row = [];
    let layer = 0;
    for (const [stride, padding] of shapes) {
      row.push(["conv", `${layer}`, stride, padding], ...(norm ? [["batch_norm", `${layer + 1}`]] : []), ["relu"]);
      layer += (norm ? 3 : 2) + (stride === 2 && dropout ? 1 : 0);
    }
    return inARow(net, [...row, ["conv", `${layer}`], ["means"], ["flatten"]]);
  },

  resnet20: resnet,
  resnet56: resnet,

  gpt: (net, { heads = 4 }) => (tokens) => {
    const width = net["norm.weight"].shape[0];
    const row = (table, i) => table.data.subarray(i * width, (i + 1) * width);
    const embedded = tokens.flatMap((token, i) => {
      const place = row(net["positions.weight"], i);
      return Array.from(row(net["tokens.weight"], token), (v, e) => v + place[e]);
    });
    let x = { shape: [tokens.length, width], data: Float64Array.from(embedded) };
    for (let i = 0; `blocks.${i}.up.weight` in net; i++) {
      const layer = (y, name) => linear(y, net[`blocks.${i}.${name}.weight`], net[`blocks.${i}.${name}.bias`]);
      const packed = layer(layerNorm(x, net, `blocks.${i}.attention_norm`), "qkv");
      x = added(x, layer(attention(packed, heads), "out"));
      const hidden = layer(layerNorm(x, net, `blocks.${i}.mlp_norm`), "up");
      x = added(x, layer({ ...hidden, data: hidden.data.map(ACTIVATIONS.gelu) }, "down"));
    }
    return linear(layerNorm(x, net, "norm"), net["head.weight"]);
  },
};

/** Residual networks of CIFAR form: shortcuts have no parameters. */
function resnet(net) {
  const shortcut = ({ shape: [c, h, w], data }, [outs, oh, ow]) => {
    const stride = Math.round(h / oh);
    const at = (k) => [Math.floor(k / oh / ow), Math.floor(k / ow) % oh, k % ow];
    const value = ([m, i, j]) => (m < c ? data[(m * h + i * stride) * w + j * stride] : 0);
    return { data: new Float64Array(outs * oh * ow).map((_, k) => value(at(k))) };
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
  const { pnet, pnet_config: config = {} } = metadata;
  if (!pnet) throw new Refusal("the file does not say which network it grows: it was not written by gbfunc train");
  if (Object.hasOwn(described, pnet)) {
    const { layers, options } = described[pnet];
    const { task_config = {}, pnet_config = {} } = metadata;
    const others = inOrder(options) !== inOrder({ task_config, pnet_config });
    if (others) throw new Refusal(`this page knows the network ${JSON.stringify(pnet)} with other options`);
    return inARow(tensors, layers);
  }
  if (pnet in NETWORKS) return NETWORKS[pnet](tensors, config);
  throw new Refusal(`this page does not know the network ${JSON.stringify(pnet)}`);
}
