/** From a plan and its leaves to weights: codes, g-nets of every type, tiles, matrices, tensors. */

const USUAL_KINDS = { 1: "vector", 2: "linear", 4: "conv" };

/** A plan and the metadata beside it, from their JSON. */
function parsePlan(text) {
  const data = JSON.parse(text);
  if (data.version !== FORMAT.version) {
    throw new Refusal(`its plan is of version ${data.version}, this page reads ${FORMAT.version}`);
  }
  if (data.base) throw new Refusal("not in the browser yet: a genome that changes a pretrained network");
  const tensors = data.tensors.map((entry) => {
    const { name, shape, dtype = "float32", aliases = [], slots = [] } = entry;
    const kind = entry.kind ?? USUAL_KINDS[shape.length];
    if (!["float32", "float64"].includes(dtype)) throw new Refusal(`not in the browser yet: weights of ${dtype}`);
    const sizes = slots.length ? matricesOf(kind, shape) : [];
    const made = slots.map((values, part) => {
      const [rows, cols] = sizes[part];
      const [h, rowCode, colCode, scale, offset = 0, group = "", tileRows = rows, tileCols = cols] = values;
      const codes = { rowCode: data.encodings[rowCode], colCode: data.encodings[colCode] };
      const grid = { rows, cols, tileRows, tileCols, down: Math.ceil(rows / tileRows), across: Math.ceil(cols / tileCols) };
      return { hypernet: data.hypernets[h], grid, ...codes, scale, offset, group };
    });
    return { name, shape, kind, dtype, aliases, slots: made };
  });
  if (tensors.reduce((n, t) => n + product(t.shape), 0) > FORMAT.mostWeights) throw new Refusal("its network is too large for a browser");
  const buffers = (data.buffers ?? []).map(([name, shape, dtype]) => ({ name, shape, dtype }));
  const plan = { tensors, buffers, wide: tensors.some((t) => t.dtype === "float64") };
  return { plan: { ...plan, ensembles: ensemblesOf(tensors) }, metadata: data.metadata ?? {} };
}

/** Codes of the positions of an axis: `at(code, i, n)` is that of position i of n, as `gbfunc.encoding`. */
const bitWidth = (n) => 32 - Math.clz32(n - 1);
const places = (n) => Array.from({ length: n > 1 ? bitWidth(n) : 0 }, (_, bit) => 2 ** bit).reverse();
const half_of = (i, unit) => (i % (2 * unit) >= unit ? 1 : -1);
const CODES = {
  binary: { at: (code, i, n) => places(n).map((unit) => half_of(i, unit)) },
  gray: { at: (code, i, n) => places(n).map((unit) => half_of(i + unit, 2 * unit)) },
  one_hot: { at: (code, i, n) => Array.from({ length: n }, (_, j) => (i === j ? 1 : 0)) },
  grid: {
    global: () => true,
    at(code, i, n) {
      let unit = n;
      return code.dims.flatMap((d) => {
        unit /= d;
        const j = Math.floor(i / unit) % d;
        if (d === 1) return [];
        return code.code === "coordinate" ? [((2 * j - (d - 1)) / (d - 1)) * code.bandwidth] : CODES[code.code].at(null, j, d);
      });
    },
  },
  table: {
    global: () => true,
    at(code, i) {
      const [, k] = code.shape;
      code.numbers ??= numbersOf(ascii(atob(code.data)), code.dtype);
      return Array.from(code.numbers.subarray(i * k, (i + 1) * k));
    },
  },
  per_axis: {
    global: (code) => isGlobal(code.channels),
    at(code, i, n) {
      const m = code.n_positions;
      return [...codeAt(code.channels, Math.floor(i / m), n / m), ...codeAt(code.positions, i % m, m)];
    },
  },
};

function codeOf(code) {
  if (!(code.type in CODES)) throw new Refusal(`not in the browser yet: the encoding ${JSON.stringify(code.type)}`);
  return CODES[code.type];
}
const codeAt = (code, i, n) => codeOf(code).at(code, i, n);
const isGlobal = (code) => codeOf(code).global?.(code) ?? false;

/** Codes of the tile that begins at `first` on an axis of n: an array of codes, which past its end repeat the last. */
function tileCodes(code, n, tile, first) {
  const at = (i) => (isGlobal(code) ? codeAt(code, Math.min(first + i, n - 1), n) : codeAt(code, i, tile));
  return Array.from({ length: tile }, (_, i) => at(i));
}

const erf = (x) => {
  // Abramowitz and Stegun, 7.1.26: within 1.5e-7.
  const t = 1 / (1 + 0.3275911 * Math.abs(x));
  const sum = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))));
  return Math.sign(x) * (1 - sum * Math.exp(-x * x));
};
const ACTIVATIONS = {
  relu: (x) => Math.max(0, x),
  tanh: Math.tanh,
  gelu: (x) => (x / 2) * (1 + erf(x / Math.SQRT2)),
  sin: Math.sin,
};

/** [n, p] codes times weights [p, H]: the part of every angle, or pre-activation, that an axis gives. */
function project(codes, weight, width) {
  return codes.map((code) => {
    const sums = new Float64Array(width);
    for (let p = 0; p < code.length; p++) {
      for (let h = 0; h < width; h++) sums[h] += code[p] * weight[p * width + h];
    }
    return sums;
  });
}

const codeWeights = ({ rowWidth, colWidth }, size, scope) => ({
  row_weight: { shape: [rowWidth, size], scope },
  col_weight: { shape: [colWidth, size], scope },
});
const sharing = ({ share = "none" }) => share !== "none";
const tileLeaf = (...shape) => ({ shape, scope: "tile" });

/** [n][H] angles of a side -> [n][2 H] their sines, then their cosines; with `swapped`, cosines first. */
const waves = (angles, swapped = false) => angles.map((a) => {
  const H = a.length;
  const out = new Float64Array(2 * H);
  const [sine, cosine] = swapped ? [H, 0] : [0, H];
  for (let h = 0; h < H; h++) {
    out[sine + h] = Math.sin(a[h]);
    out[cosine + h] = Math.cos(a[h]);
  }
  return out;
});

/** [n, k] @ [k, m], the second one flat. */
const times = (rows, matrix, m) => rows.map((row) => Float64Array.from({ length: m }, (_, j) => row.reduce((sum, x, i) => sum + x * matrix[i * m + j], 0)));
const rowsOf = (flat, width) => Array.from({ length: flat.length / width }, (_, i) => flat.subarray(i * width, (i + 1) * width));

/** An MLP over the codes of a weight, as `gbfunc.hypernets.mlp`. */
const MLP = {
  size: (h) => h.hidden[0],
  leaves(h, dims) {
    const { hidden } = h;
    const leaves = { ...codeWeights(dims, hidden[0], "tile"), bias: tileLeaf(hidden[0]) };
    hidden.slice(1).forEach((width, i) => {
      leaves[`weight_${i + 1}`] = tileLeaf(hidden[i], width);
      leaves[`bias_${i + 1}`] = tileLeaf(width);
    });
    return { ...leaves, out_weight: tileLeaf(hidden.at(-1)), out_bias: tileLeaf() };
  },
  dense(h, leaves, row, col) {
    const { hidden, activation = "relu" } = h;
    const act = ACTIVATIONS[activation];
    const a = project(row, leaves.row_weight, hidden[0]);
    const b = project(col, leaves.col_weight, hidden[0]);
    const weight = (x, y) => {
      let units = x.map((v, i) => act(v + y[i] + leaves.bias[i]));
      for (let layer = 1; layer < hidden.length; layer++) {
        const bias = leaves[`bias_${layer}`];
        units = times([units], leaves[`weight_${layer}`], hidden[layer])[0].map((v, i) => act(v + bias[i]));
      }
      return units.reduce((sum, v, i) => sum + v * leaves.out_weight[i], leaves.out_bias[0]);
    };
    return Float64Array.from(a.flatMap((x) => b.map((y) => weight(x, y))));
  },
};

/**
 * The types of g-net: `size`, the `leaves` of one, and what it makes of them and of the codes of a tile's rows and
 * columns: `factors`, ([r][k], [c][k]) whose product the tile is, or `dense`, the tile [r * c].
 */
const TYPES = {
  periodic: {
    size: (h) => h.features,
    leaves(h, dims) {
      const own = sharing(h) ? ["sine", "cosine"] : ["phase", "amplitude"];
      const each = Object.fromEntries(own.map((name) => [name, tileLeaf(h.features)]));
      return { ...codeWeights(dims, h.features, sharing(h) ? "group" : "tile"), ...each };
    },
    factors(h, { row_weight, col_weight, phase, amplitude, sine = amplitude, cosine }, row, col) {
      const H = h.features;
      const angles = project(row, row_weight, H).map((a) => (phase ? a.map((x, i) => x + phase[i]) : a));
      const left = waves(angles);
      for (const w of left) {
        for (let i = 0; i < H; i++) {
          const s = w[i];
          const c = w[i + H];
          const t = cosine ? cosine[i] : 0;
          w[i] = s * sine[i] + c * t;
          w[i + H] = c * sine[i] - s * t;
        }
      }
      // sin(a + b) = sin(a) cos(b) + cos(a) sin(b): the halves of one side change places.
      return [left, waves(project(col, col_weight, H), true)];
    },
  },
  bilinear: {
    size: (h) => h.features,
    leaves: (h, dims) => ({ ...codeWeights(dims, h.features, sharing(h) ? "group" : "tile"), mix: tileLeaf(2 * h.features, 2 * h.features) }),
    factors(h, { row_weight, col_weight, mix }, row, col) {
      const [left, right] = [waves(project(row, row_weight, h.features)), waves(project(col, col_weight, h.features))];
      return [times(left, mix, 2 * h.features), right];
    },
  },
  low_rank: {
    size: (h) => h.rank,
    leaves: (h, { rows, cols }) => ({ left: tileLeaf(rows, h.rank), right: tileLeaf(cols, h.rank) }),
    factors: (h, { left, right }) => [rowsOf(left, h.rank), rowsOf(right, h.rank)],
  },
  xox: {
    size: (h) => h.genes,
    leaves: ({ genes }, { rows, cols }) => ({
      row_genes: tileLeaf(rows, genes), col_genes: tileLeaf(cols, genes), rules: tileLeaf(genes, genes), scale: tileLeaf(),
    }),
    factors(h, { row_genes, col_genes, rules, scale }) {
      return [times(rowsOf(row_genes, h.genes), rules.map((x) => x * scale[0]), h.genes), rowsOf(col_genes, h.genes)];
    },
  },
  constant: {
    size: () => 0,
    leaves: () => ({}),
    unscaled: true,
    dense: (h, leaves, row, col) => new Float64Array(row.length * col.length).fill(h.value ?? 0),
  },
  gnet: MLP,
  // At its mean: what it adds in training is noise.
  stochastic: {
    ...MLP,
    leaves: (h, dims) => ({ ...MLP.leaves(h, dims), log_sigma_weight: tileLeaf(h.hidden.at(-1)), log_sigma_bias: tileLeaf() }),
  },
};

function typeOf(hypernet) {
  if (!(hypernet.type in TYPES)) throw new Refusal(`not in the browser yet: g-nets of type ${JSON.stringify(hypernet.type)}`);
  return TYPES[hypernet.type];
}

/** Slots by what one call generates together: the same g-net, tile and widths of codes; named as in the file. */
function ensemblesOf(tensors) {
  const alike = new Map();
  for (const slot of tensors.flatMap((tensor) => tensor.slots)) {
    const { rows, cols, tileRows, tileCols } = slot.grid;
    const width = (code, n, tile) => (isGlobal(code) ? codeAt(code, 0, n) : codeAt(code, 0, tile)).length;
    const dims = {
      rows: tileRows, cols: tileCols,
      rowWidth: width(slot.rowCode, rows, tileRows), colWidth: width(slot.colCode, cols, tileCols),
    };
    const key = JSON.stringify([slot.hypernet, dims]);
    if (!alike.has(key)) alike.set(key, { hypernet: slot.hypernet, dims, slots: [], tiles: 0, known: {}, groups: [] });
    const ensemble = alike.get(key);
    slot.ensemble = ensemble;
    slot.first = ensemble.tiles;
    ensemble.slots.push(slot);
    ensemble.tiles += slot.grid.down * slot.grid.across;
    // Tiles at the same place of slots of a group share leaves.
    const known = (ensemble.known[slot.group] ??= []);
    const count = slot.grid.down * slot.grid.across;
    while (known.length < count) known.push((ensemble.taken = (ensemble.taken ?? 0) + 1) - 1);
    ensemble.groups.push(...known.slice(0, count));
  }
  const named = {};
  for (const ensemble of alike.values()) {
    const { hypernet, dims } = ensemble;
    const base = `${hypernet.type}${typeOf(hypernet).size(hypernet) || ""}_${dims.rows}x${dims.cols}`;
    let name = base;
    while (name in named) name = `${base}_${Object.keys(named).length}`;
    named[name] = Object.assign(ensemble, { name });
  }
  return Object.values(named);
}

/** Shape and dtype of all that a genome's file holds, by name. */
function leavesOf({ tensors, buffers, ensembles, wide }) {
  const specs = {};
  for (const { name, hypernet, dims, tiles, taken } of ensembles) {
    for (const [leaf, { shape, scope }] of Object.entries(typeOf(hypernet).leaves(hypernet, dims))) {
      if (shape.includes(0)) continue;
      specs[`gnets/${name}/${leaf}`] = { shape: [scope === "tile" ? tiles : taken, ...shape], dtype: wide ? "float64" : "float32" };
    }
  }
  for (const { name, shape, dtype } of tensors.filter((t) => !t.slots.length)) specs[`direct/${name}`] = { shape, dtype };
  for (const { name, shape, dtype } of buffers) specs[`buffers/${name}`] = { shape, dtype };
  return specs;
}

/** Rows and columns of the matrices that a tensor folds from, by the kind of its layer. */
function matricesOf(kind, s) {
  const kinds = {
    transposed_linear: () => [[s[1], s[0]]],
    conv_transpose: () => [[s[1], s[0] * product(s.slice(2))]],
    attention_in: () => Array(3).fill([s[0] / 3, s[1]]),
    vector: () => [[product(s), 1]],
  };
  return (kinds[kind] ?? (() => [[s[0], product(s.slice(1))]]))();
}

/** The tensor, flat, of its matrices. */
function fold(kind, shape, matrices) {
  const [first] = matrices;
  if (kind === "transposed_linear") return first.map((_, k) => first[(k % shape[1]) * shape[0] + Math.floor(k / shape[1])]);
  if (kind === "conv_transpose") {
    const inner = product(shape.slice(2));
    const at = (k) => [Math.floor(k / inner / shape[1]), Math.floor(k / inner) % shape[1], k % inner];
    return first.map((_, k) => (([i, o, p]) => first[(o * shape[0] + i) * inner + p])(at(k)));
  }
  return matrices.length === 1 ? first : Float64Array.from(matrices.flatMap((m) => Array.from(m)));
}

/** Leaves of g-net `tile` of an ensemble. */
function leavesOfTile(genome, { name, hypernet, dims, groups }, tile) {
  const specs = Object.entries(typeOf(hypernet).leaves(hypernet, dims));
  return Object.fromEntries(specs.map(([leaf, { shape, scope }]) => {
    const size = product(shape);
    const number = scope === "tile" ? tile : groups[tile];
    const stack = genome.leaves[`gnets/${name}/${leaf}`]?.data ?? new Float64Array();
    return [leaf, stack.subarray(number * size, (number + 1) * size)];
  }));
}

/**
 * Grow one tensor: fills `tensor.matrices` step by step, a column of a tile's factors or a dense tile at a time, and
 * yields how many weights each step has touched; at the end `tensor.data` holds the weights.
 */
function* growTensor(genome, tensor) {
  tensor.matrices = tensor.slots.map(({ grid }) => new Float64Array(grid.rows * grid.cols));
  for (const [part, slot] of tensor.slots.entries()) {
    const { hypernet } = slot.ensemble;
    const type = typeOf(hypernet);
    const { rows, cols, tileRows, tileCols, down, across } = slot.grid;
    const matrix = tensor.matrices[part];
    for (let tile = 0; tile < down * across; tile++) {
      const [top, left] = [Math.floor(tile / across) * tileRows, (tile % across) * tileCols];
      const [height, width] = [Math.min(tileRows, rows - top), Math.min(tileCols, cols - left)];
      const row = tileCodes(slot.rowCode, rows, tileRows, top);
      const col = tileCodes(slot.colCode, cols, tileCols, left);
      const leaves = leavesOfTile(genome, slot.ensemble, slot.first + tile);
      const fill = (value) => {
        for (let i = 0; i < height; i++) {
          const start = (top + i) * cols + left;
          for (let j = 0; j < width; j++) matrix[start + j] += value(i, j);
        }
      };
      if (slot.offset) fill(() => slot.offset);
      if (type.dense) {
        const made = type.dense(hypernet, leaves, row, col);
        const scale = type.unscaled ? 1 : slot.scale;
        fill((i, j) => scale * made[i * tileCols + j]);
        yield height * width;
        continue;
      }
      const [l, r] = type.factors(hypernet, leaves, row, col);
      for (let k = 0; k < l[0].length; k++) {
        const column = Float64Array.from({ length: width }, (_, j) => r[j][k] * slot.scale);
        for (let i = 0; i < height; i++) {
          const x = l[i][k];
          const start = (top + i) * cols + left;
          for (let j = 0; j < width; j++) matrix[start + j] += x * column[j];
        }
        yield height * width;
      }
    }
  }
  tensor.data = Float32Array.from(fold(tensor.kind, tensor.shape, tensor.matrices));
}

/** Every tensor and buffer of a network by name, {shape, data}, once all generated tensors have grown. */
function tensorsOf(genome) {
  const all = {};
  for (const { name, shape, aliases, slots, data } of genome.plan.tensors) {
    const tensor = slots.length ? { shape, data } : genome.leaves[`direct/${name}`];
    for (const known of [name, ...aliases]) all[known] = tensor;
  }
  for (const { name } of genome.plan.buffers) all[name] = genome.leaves[`buffers/${name}`];
  return all;
}

/** All weights at once. */
function generate(genome) {
  for (const tensor of genome.plan.tensors) for (const step of growTensor(genome, tensor)) step;
  return tensorsOf(genome);
}
