/** From a plan and its leaves to weights: codes, g-nets of every type, tiles, matrices, tensors. */

const erf = (x) => {
  // Abramowitz and Stegun, 7.1.26: within 1.5e-7.
  const t = 1 / (1 + 0.3275911 * Math.abs(x));
  const total = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))));
  return Math.sign(x) * (1 - total * Math.exp(-x * x));
};
const ACTIVATIONS = {
  relu: (x) => Math.max(0, x),
  tanh: Math.tanh,
  gelu: (x) => (x / 2) * (1 + erf(x / Math.SQRT2)),
  sin: Math.sin,
};

/** Codes [count, p] of an axis of n from position `from` on, for the tile that begins at `start`. */
function codesOf(code, n, tile, from, count, start = from) {
  const [length, first] = code.local ? [tile, from - start] : [n, from];
  const width = code.width(length);
  const codes = new Float64Array(count * width);
  for (let i = 0; i < count; i++) code.put(codes, i * width, first + i, length);
  return codes;
}

/** [n, p] @ [p, m], both flat, and [m] more to each row. */
function times(rows, matrix, n, m, more = null) {
  const p = rows.length / n;
  const out = new Float64Array(n * m);
  for (let i = 0; i < n; i++) {
    const to = i * m;
    if (more) for (let j = 0; j < m; j++) out[to + j] = more[j];
    for (let k = 0; k < p; k++) {
      const x = rows[i * p + k];
      for (let j = 0; j < m; j++) out[to + j] += x * matrix[k * m + j];
    }
  }
  return out;
}

const codeWeights = ({ rowWidth, colWidth }, size, scope) => ({
  row_weight: { shape: [rowWidth, size], scope },
  col_weight: { shape: [colWidth, size], scope },
});
const sharing = ({ share }) => share !== "none";
const tileLeaf = (...shape) => ({ shape, scope: "tile" });

/** [n, H] angles -> [n, 2 H] their sines, then their cosines; with `swapped`, cosines first. */
function waves(angles, H, swapped = false) {
  const out = new Float64Array(2 * angles.length);
  const [sine, cosine] = swapped ? [H, 0] : [0, H];
  angles.forEach((angle, k) => {
    const to = 2 * H * Math.floor(k / H) + (k % H);
    out[to + sine] = Math.sin(angle);
    out[to + cosine] = Math.cos(angle);
  });
  return out;
}

/**
 * An MLP over the codes of a weight, as `gbfunc.hypernets.mlp`: from what a row and a column give, [H] each, to a weight.
 * `work` is what a weight takes, in multiplications.
 */
const MLP = {
  size: (h) => h.hidden?.[0],
  work: ({ hidden }) => sum(hidden.map((width, i) => width * (10 + (hidden[i + 1] ?? 1)))),
  leaves(h, dims) {
    const { hidden } = h;
    const leaves = { ...codeWeights(dims, hidden[0], "tile"), bias: tileLeaf(hidden[0]) };
    hidden.slice(1).forEach((width, i) => {
      leaves[`weight_${i + 1}`] = tileLeaf(hidden[i], width);
      leaves[`bias_${i + 1}`] = tileLeaf(width);
    });
    return { ...leaves, out_weight: tileLeaf(hidden.at(-1)), out_bias: tileLeaf() };
  },
  side: (h, leaves, { codes, count }, side) => times(codes, leaves[`${side}_weight`], count, h.hidden[0], side === "row" ? leaves.bias : null),
  weight({ hidden, activation }, leaves) {
    const act = known(ACTIVATIONS, activation);
    const layers = hidden.map((width) => new Float64Array(width));
    return (a, i, b, j) => {
      let units = layers[0];
      for (let h = 0; h < units.length; h++) units[h] = act(a[i * units.length + h] + b[j * units.length + h]);
      for (let layer = 1; layer < layers.length; layer++) {
        const [below, matrix, bias] = [units, leaves[`weight_${layer}`], leaves[`bias_${layer}`]];
        units = layers[layer];
        for (let h = 0; h < units.length; h++) {
          let total = bias[h];
          for (let k = 0; k < below.length; k++) total += below[k] * matrix[k * units.length + h];
          units[h] = act(total);
        }
      }
      let total = leaves.out_bias[0];
      for (let h = 0; h < units.length; h++) total += units[h] * leaves.out_weight[h];
      return total;
    };
  },
};

/**
 * The types of g-net: `size`, the `leaves` of one, and what makes a tile of some rows and columns, {codes, first, count}:
 * its factors `row` [n, k] and `col` [m, k], of `width` k; or what each `side` gives to its `weight`.
 */
const TYPES = {
  periodic: {
    size: (h) => h.features,
    width: (h) => 2 * h.features,
    leaves(h, dims) {
      const own = sharing(h) ? ["sine", "cosine"] : ["phase", "amplitude"];
      const each = Object.fromEntries(own.map((name) => [name, tileLeaf(h.features)]));
      return { ...codeWeights(dims, h.features, sharing(h) ? "group" : "tile"), ...each };
    },
    row({ features: H }, { row_weight, phase, amplitude, sine = amplitude, cosine }, { codes, count }) {
      const left = waves(times(codes, row_weight, count, H, phase), H);
      for (let from = 0; from < left.length; from += 2 * H) {
        for (let i = 0; i < H; i++) {
          const [s, c, t] = [left[from + i], left[from + H + i], cosine ? cosine[i] : 0];
          left[from + i] = s * sine[i] + c * t;
          left[from + H + i] = c * sine[i] - s * t;
        }
      }
      return left;
    },
    // sin(a + b) = sin(a) cos(b) + cos(a) sin(b): the halves of one side change places.
    col: ({ features: H }, { col_weight }, { codes, count }) => waves(times(codes, col_weight, count, H), H, true),
  },
  bilinear: {
    size: (h) => h.features,
    width: (h) => 2 * h.features,
    leaves: (h, dims) => ({ ...codeWeights(dims, h.features, sharing(h) ? "group" : "tile"), mix: tileLeaf(2 * h.features, 2 * h.features) }),
    row: ({ features: H }, { row_weight, mix }, { codes, count }) => times(waves(times(codes, row_weight, count, H), H), mix, count, 2 * H),
    col: ({ features: H }, { col_weight }, { codes, count }) => waves(times(codes, col_weight, count, H), H),
  },
  low_rank: {
    size: (h) => h.rank,
    width: (h) => h.rank,
    leaves: (h, { rows, cols }) => ({ left: tileLeaf(rows, h.rank), right: { shape: [cols, h.rank], scope: sharing(h) ? "group" : "tile" } }),
    row: ({ rank }, { left }, { first, count }) => left.subarray(first * rank, (first + count) * rank),
    col: ({ rank }, { right }, { first, count }) => right.subarray(first * rank, (first + count) * rank),
  },
  xox: {
    size: (h) => h.genes,
    width: (h) => h.genes,
    leaves: ({ genes }, { rows, cols }) => ({
      row_genes: tileLeaf(rows, genes), col_genes: tileLeaf(cols, genes), rules: tileLeaf(genes, genes), scale: tileLeaf(),
    }),
    row({ genes }, { row_genes, rules, scale }, { first, count }) {
      return times(row_genes.subarray(first * genes, (first + count) * genes), rules.map((x) => x * scale[0]), count, genes);
    },
    col: ({ genes }, { col_genes }, { first, count }) => col_genes.subarray(first * genes, (first + count) * genes),
  },
  constant: {
    size: () => 0,
    work: () => 1,
    leaves: () => ({}),
    unscaled: true,
    side: () => null,
    weight: (h) => () => h.value,
  },
  gnet: MLP,
  // At its mean: what it adds in training is noise.
  stochastic: {
    ...MLP,
    leaves: (h, dims) => ({ ...MLP.leaves(h, dims), log_sigma_weight: tileLeaf(h.hidden.at(-1)), log_sigma_bias: tileLeaf() }),
  },
};

function typeOf(hypernet) {
  const type = known(TYPES, hypernet.type);
  if (!type) throw notYet(`g-nets of type ${quoted(hypernet.type)}`);
  return type;
}

/** Multiplications and additions that a slot's weights take. */
function workOf({ hypernet, grid, ensemble: { dims } }) {
  const type = typeOf(hypernet);
  const each = type.width ? type.width(hypernet) : type.work(hypernet);
  const sides = grid.tileRows * (10 + dims.rowWidth) + grid.tileCols * (10 + dims.colWidth);
  const size = Math.max(1, type.size(hypernet));
  return grid.rows * grid.cols * each + grid.down * grid.across * (5_000 + sides * size);
}

/** What growing takes, by the plan alone: seconds on a slow machine, and bytes. */
function costOf({ tensors, weights }) {
  const slots = tensors.flatMap((tensor) => tensor.slots);
  return { seconds: sum(slots.map(workOf)) / LIMITS.workPerSecond, bytes: 4 * weights };
}

/** The tensor, flat, of a matrix that is stored in another order. */
const FOLDS = {
  transposed_linear: ([n, m], matrix) => matrix.map((_, k) => matrix[(k % m) * n + Math.floor(k / m)]),
  conv_transpose(shape, matrix) {
    const [n, m, inner] = [shape[0], shape[1], product(shape.slice(2))];
    return matrix.map((_, k) => matrix[((Math.floor(k / inner) % m) * n + Math.floor(k / inner / m)) * inner + (k % inner)]);
  },
};

/** Leaves of the g-net of a tile of a slot. */
function leavesOfTile(genome, slot, tile) {
  const { name, hypernet, dims } = slot.ensemble;
  const specs = Object.entries(typeOf(hypernet).leaves(hypernet, dims));
  return Object.fromEntries(specs.map(([leaf, { shape, scope }]) => {
    const size = product(shape);
    const number = scope === "tile" ? slot.first + tile : sharedLeaf(slot, tile);
    const stack = genome.leaves[`gnets/${name}/${leaf}`]?.data ?? new Float64Array();
    return [leaf, stack.subarray(number * size, (number + 1) * size)];
  }));
}

function sharedLeaf({ shared: { stretches } }, tile) {
  const [from, number] = stretches.findLast(([from]) => from <= tile);
  return number + tile - from;
}

const PAUSE = 1 << 22; // multiplications between two pauses
const HELD = 1 << 18; // numbers of codes, or of factors, at a time

/** Grows one tensor step by step: `tensor.grown` holds its matrices, `tensor.data` at the end its weights. Yields what share of a weight, times how many, each step has grown. */
function* growTensor(genome, tensor) {
  const data = new Float32Array(product(tensor.shape));
  let at = 0;
  tensor.grown = data;
  const matrices = tensor.slots.map(({ grid }) => data.subarray(at, (at += grid.rows * grid.cols)));
  for (const [part, slot] of tensor.slots.entries()) {
    const { tileRows, tileCols, down, across } = slot.grid;
    for (let tile = 0; tile < down * across; tile++) {
      const [top, left] = [Math.floor(tile / across) * tileRows, (tile % across) * tileCols];
      yield* growTile(leavesOfTile(genome, slot, tile), slot, top, left, matrices[part]);
    }
  }
  tensor.data = known(FOLDS, tensor.kind)?.(tensor.shape, data) ?? data;
}

/** Grows a tile in bands of rows and columns, of which one usually is the whole tile. */
function* growTile(leaves, slot, top, left, matrix) {
  const { hypernet, offset, scale, rowCode, colCode, ensemble: { dims } } = slot;
  const type = typeOf(hypernet);
  const { rows, cols, tileRows, tileCols } = slot.grid;
  const [height, width] = [Math.min(tileRows, rows - top), Math.min(tileCols, cols - left)];
  const size = Math.max(1, type.size(hypernet));
  const K = type.width ? type.width(hypernet) : size;
  const most = (p) => Math.max(1, Math.floor(Math.min(HELD / Math.max(p, K), (4 * PAUSE) / (Math.max(p, 1) * size + K))));
  const tall = Math.min(height, most(dims.rowWidth));
  const wide = Math.min(width, most(dims.colWidth), Math.max(1, Math.floor(PAUSE / tall)));
  const side = (name, code, n, tile, start, first, count) => {
    const codes = type.leaves(hypernet, dims)[`${name}_weight`] ? codesOf(code, n, tile, start + first, count, start) : null;
    return type.side ? type.side(hypernet, leaves, { codes, count }, name) : type[name](hypernet, leaves, { codes, first, count });
  };
  const weight = type.weight?.(hypernet, leaves);
  for (let i0 = 0; i0 < height; i0 += tall) {
    const h = Math.min(tall, height - i0);
    const l = side("row", rowCode, rows, tileRows, top, i0, h);
    for (let j0 = 0; j0 < width; j0 += wide) {
      const w = Math.min(wide, width - j0);
      const r = side("col", colCode, cols, tileCols, left, j0, w);
      const start = (i) => (top + i0 + i) * cols + left + j0;
      if (weight) {
        const [unit, several] = [type.unscaled ? 1 : scale, Math.max(1, Math.floor(PAUSE / type.work(hypernet)))];
        for (let k = 0; k < h * w; k++) {
          const [i, j] = [Math.floor(k / w), k % w];
          matrix[start(i) + j] = offset + unit * weight(l, i, r, j);
          if (k % several === several - 1) yield several;
        }
        yield (h * w) % several;
        continue;
      }
      for (let i = 0; i < h; i++) matrix.fill(offset, start(i), start(i) + w);
      const column = new Float64Array(w);
      for (let k = 0; k < K; k++) {
        for (let j = 0; j < w; j++) column[j] = r[j * K + k] * scale;
        for (let i = 0; i < h; i++) {
          const x = l[i * K + k];
          const to = start(i);
          for (let j = 0; j < w; j++) matrix[to + j] += x * column[j];
        }
        yield (h * w) / K;
      }
    }
  }
}

/** Every tensor and buffer of a network by name, {shape, data}, once all generated tensors have grown. */
function tensorsOf(genome) {
  const all = Object.create(null);
  for (const { name, shape, aliases, slots, data } of genome.plan.tensors) {
    const tensor = slots.length ? { shape, data } : genome.leaves[`direct/${name}`];
    for (const other of [name, ...aliases]) all[other] = tensor;
  }
  for (const { name } of genome.plan.buffers) all[name] = genome.leaves[`buffers/${name}`];
  return all;
}

/** All weights at once. */
function generate(genome) {
  for (const tensor of genome.plan.tensors) for (const step of growTensor(genome, tensor)) step;
  return tensorsOf(genome);
}
