/** Networks in plain JavaScript, one example at a time: the p-nets of `gbfunc.tasks.pnets`, by their names there. */

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

/** A convolution of [C, h, w] with zeros around it. */
function conv({ shape: [channels, h, w], data }, weight, bias, stride = 1, padding = 0) {
  const [outs, , kh, kw] = weight.shape;
  const size = (n, k) => Math.floor((n + 2 * padding - k) / stride) + 1;
  const [oh, ow] = [size(h, kh), size(w, kw)];
  const out = new Float64Array(outs * oh * ow);
  for (let o = 0; o < outs; o++) {
    const map = out.subarray(o * oh * ow, (o + 1) * oh * ow).fill(bias ? bias.data[o] : 0);
    for (let c = 0; c < channels; c++) {
      for (let y = 0; y < kh; y++) {
        for (let x = 0; x < kw; x++) {
          const v = weight.data[((o * channels + c) * kh + y) * kw + x];
          for (let i = 0; i < oh; i++) {
            const row = i * stride + y - padding;
            if (row < 0 || row >= h) continue;
            for (let j = 0; j < ow; j++) {
              const col = j * stride + x - padding;
              if (col >= 0 && col < w) map[i * ow + j] += v * data[(c * h + row) * w + col];
            }
          }
        }
      }
    }
  }
  return { shape: [outs, oh, ow], data: out };
}

/** Batch normalisation of [C, h, w] by running statistics. */
function batchNorm({ shape, data }, net, name) {
  const [weight, bias, mean, variance] = ["weight", "bias", "running_mean", "running_var"].map((k) => net[`${name}.${k}`].data);
  const size = shape[1] * shape[2];
  const scale = Array.from(weight, (v, c) => v / Math.sqrt(variance[c] + 1e-5));
  return { shape, data: data.map((v, i) => ((c) => (v - mean[c]) * scale[c] + bias[c])(Math.floor(i / size))) };
}

function maxPool({ shape: [c, h, w], data }) {
  const [oh, ow] = [h >> 1, w >> 1];
  const out = new Float64Array(c * oh * ow).map((_, k) => {
    const [m, i, j] = [Math.floor(k / oh / ow), Math.floor(k / ow) % oh, k % ow];
    const at = (m * h + 2 * i) * w + 2 * j;
    return Math.max(data[at], data[at + 1], data[at + w], data[at + w + 1]);
  });
  return { shape: [c, oh, ow], data: out };
}

const flat = ({ data }) => ({ shape: [data.length], data });

/** [C, h, w] -> [C], the mean of every channel. */
function means({ shape: [channels, h, w], data }) {
  const mean = (_, c) => data.subarray(c * h * w, (c + 1) * h * w).reduce((a, b) => a + b, 0) / (h * w);
  return { shape: [channels], data: Float64Array.from({ length: channels }, mean) };
}

function layerNorm({ shape, data }, net, name) {
  const [weight, bias] = [net[`${name}.weight`].data, net[`${name}.bias`].data];
  const n = shape.at(-1);
  const out = new Float64Array(data.length);
  for (let r = 0; r < data.length; r += n) {
    const row = data.subarray(r, r + n);
    const mean = row.reduce((a, b) => a + b, 0) / n;
    const scale = 1 / Math.sqrt(row.reduce((a, b) => a + (b - mean) ** 2, 0) / n + 1e-5);
    for (let i = 0; i < n; i++) out[r + i] = (row[i] - mean) * scale * weight[i] + bias[i];
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

/** Each takes the tensors by name and the p-net's options, and gives what maps an example to logits. */
const NETWORKS = {
  mlp: (net) => (x) => {
    const layers = Object.keys(net).filter((name) => name.endsWith(".weight")).length;
    let y = flat(x);
    for (let i = 0; i < layers; i++) {
      y = linear(i ? relu(y) : y, net[`${2 * i}.weight`], net[`${2 * i}.bias`]);
    }
    return y;
  },

  lenet5: (net) => (x) => {
    const first = maxPool(conv(x, net["0.weight"], net["0.bias"]));
    const maps = maxPool(conv(first, net["2.weight"], net["2.bias"]));
    return linear(relu(linear(flat(maps), net["5.weight"], net["5.bias"])), net["7.weight"], net["7.bias"]);
  },

  allconv: (net, { dropout = 0, norm = true }) => (x) => {
    // [stride, padding] of each convolution but the last.
    const shapes = [[1, 1], [1, 1], [2, 1], [1, 1], [1, 1], [2, 1], [1, 0], [1, 0]];
    let layer = 0;
    for (const [stride, padding] of shapes) {
      x = conv(x, net[`${layer}.weight`], net[`${layer}.bias`], stride, padding);
      x = relu(norm ? batchNorm(x, net, layer + 1) : x);
      layer += (norm ? 3 : 2) + (stride === 2 && dropout ? 1 : 0);
    }
    return means(conv(x, net[`${layer}.weight`], net[`${layer}.bias`]));
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
    x = relu(batchNorm(conv(x, net["stem.weight"], null, 1, 1), net, "stem_norm"));
    for (let i = 0; `blocks.${i}.first.weight` in net; i++) {
      const weight = net[`blocks.${i}.first.weight`];
      const stride = weight.shape[0] === weight.shape[1] ? 1 : 2;
      const first = relu(batchNorm(conv(x, weight, null, stride, 1), net, `blocks.${i}.first_norm`));
      const second = batchNorm(conv(first, net[`blocks.${i}.second.weight`], null, 1, 1), net, `blocks.${i}.second_norm`);
      x = relu(added(second, shortcut(x, second.shape)));
    }
    return linear(means(x), net["head.weight"], net["head.bias"]);
  };
}

/** What maps an example to logits, by what a genome's file says of its p-net. */
function networkOf(metadata, tensors) {
  const { pnet, pnet_config: config = {} } = metadata;
  if (!pnet) throw new Refusal("the file does not say which network it grows: it was not written by gbfunc train");
  if (!(pnet in NETWORKS)) throw new Refusal(`not in the browser yet: running the network ${JSON.stringify(pnet)}`);
  return NETWORKS[pnet](tensors, config);
}
