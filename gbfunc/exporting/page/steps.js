/** Codes whose steps training found: as `gbfunc.formats.steps`, whose comments say what they are. */

const OCTAVE = 8;
const [NARROWEST, WIDEST] = FORMAT.widths;

/**
 * Parts of all trained leaves: {name, first, count, shape, gain, finer, period}, those of amplitudes first; with
 * `inCodes` those of running statistics, too, whose `deviation` is the variance's name.
 */
function partsOf(plan, inCodes) {
  const found = [];
  for (const ensemble of plan.ensembles) {
    const { name, hypernet, dims, tiles, taken, slots } = ensemble;
    const periodic = hypernet.type === "periodic";
    const gained = periodic && !sharing(hypernet);
    for (const [leaf, { shape, scope }] of Object.entries(typeOf(hypernet).leaves(hypernet, dims))) {
      if (shape.includes(0)) continue;
      const spans = scope === "tile" ? slots.map((s) => [s.first, s.grid.down * s.grid.across]) : [[0, taken]];
      const side = { row_weight: "row", col_weight: "col" }[leaf];
      const finer = side && ["periodic", "bilinear"].includes(hypernet.type) ? finerOf(slots, side) : [];
      const gain = gained && leaf !== "amplitude" ? `gnets/${name}/amplitude` : null;
      for (const [first, count] of spans) {
        found.push({ name: `gnets/${name}/${leaf}`, first, count, shape, gain, finer, period: leaf === "phase" ? 2 * Math.PI : null });
      }
    }
  }
  for (const { name, shape } of plan.tensors.filter((t) => !t.slots.length)) {
    found.push({ name: `direct/${name}`, first: 0, count: 1, shape, gain: null, finer: [], period: null });
  }
  const statistics = inCodes ? statisticsOf(plan) : [];
  return [...found.filter((part) => !part.gain), ...found.filter((part) => part.gain), ...statistics];
}

/** Variances of norms, then their means: as `gbfunc.formats.statistics`. */
function statisticsOf({ buffers }) {
  const shapes = Object.fromEntries(buffers.filter(({ dtype }) => FLOATS.includes(dtype)).map(({ name, shape }) => [name, shape]));
  const mean = (name) => name.replace(/running_var$/, "running_mean");
  const variances = Object.keys(shapes).filter((name) => name.split(".").pop() === "running_var" && mean(name) in shapes).sort();
  const part = (name, deviation) => (
    { name: `buffers/${name}`, first: 0, count: 1, shape: shapes[name], gain: null, finer: [], period: null, deviation: `buffers/${deviation}` }
  );
  return [...variances.map((name) => part(name, name)), ...variances.map((name) => part(mean(name), name))];
}

/** Names of scalars that count batches. */
const countersOf = ({ buffers }) =>
  buffers
    .filter(({ name, shape, dtype }) => dtype === "int64" && !shape.length && name.split(".").pop() === "num_batches_tracked")
    .map(({ name }) => `buffers/${name}`)
    .sort();

/** Names of all leaves that have codes with steps. */
const steppedLeaves = (plan, inCodes) => new Set([...partsOf(plan, inCodes).map(({ name }) => name), ...(inCodes ? countersOf(plan) : [])]);

/** Half octaves of the root mean square of each code of an ensemble's rows or columns. */
function finerOf(slots, side) {
  const sums = [];
  let tiles = 0;
  for (const { grid, rowCode, colCode } of slots) {
    const [code, n, tile, along] = side === "row" ? [rowCode, grid.rows, grid.tileRows, grid.down] : [colCode, grid.cols, grid.tileCols, grid.across];
    const own = grid.down * grid.across;
    const squares = code.squares(code.local ? tile : n);
    // Positions past the end of the axis repeat the last one.
    const past = code.local ? 0 : along * tile - n;
    const last = past ? codesOf(code, n, tile, n - 1, 1) : null;
    squares.forEach((x, i) => (sums[i] = (sums[i] ?? 0) + own * (past ? (n * x + past * last[i] ** 2) / (n + past) : x)));
    tiles += own;
  }
  const [least, most] = FORMAT.finer;
  return sums.map((x) => (x > 0 ? Math.min(most, Math.max(least, Math.round(Math.log2(x / tiles)))) : 0));
}

/** Numbers of the codes whose mean squares Python's reader computes. */
function numbersOfCodes(ensembles) {
  const numbers = (code, n, tile) => {
    if (known(BITS, code.type)) return 0;
    if (code.inner && code.local) return sum(code.inner(n).map(([inner, length]) => numbers(inner, length, length)));
    return Math.ceil(n / tile) * tile * code.width(n);
  };
  const sides = new Map();
  for (const { grid, rowCode, colCode } of ensembles.flatMap(({ slots }) => slots)) {
    for (const [code, axis, tile] of [[rowCode, grid.rows, grid.tileRows], [colCode, grid.cols, grid.tileCols]]) {
      const n = code.local ? tile : axis;
      sides.set(`${code.key} ${n} ${tile}`, numbers(code, n, tile));
    }
  }
  return sum([...sides.values()]);
}

/** Integers -reach .. reach whose frequencies halve every 2^(width / 4): {reach, limits}. */
function geometric(width, most) {
  if (width <= NARROWEST) return { reach: 0, limits: [0, 1] };
  if (width >= WIDEST) return { reach: most, limits: Array.from({ length: 2 * most + 2 }, (_, i) => i) };
  const reach = Math.min(most, Math.ceil(FORMAT.halvings * 2 ** (width / 4)));
  const limits = [0];
  for (let i = -reach; i <= reach; i++) {
    const fine = BigInt(Math.abs(i) * 16) * BigInt(FORMAT.roots[((width % 4) + 4) % 4]);
    const sixteenths = Number(fine >> BigInt(24 + Math.floor(width / 4)));
    const power = Math.floor((FORMAT.powers[sixteenths % 16] * 256) / 2 ** Math.min(Math.floor(sixteenths / 16), 40));
    limits.push(limits.at(-1) + 1 + power);
  }
  return { reach, limits };
}

/** The leaves of a stream: {name: {shape, data}}. */
function readSteps(bytes, plan, inCodes, size) {
  allow("numbers", numbersOfCodes(plan.ensembles), size);
  allow("symbols", FORMAT.piece * (bytes[0] + 256 * bytes[1] - 1), size);
  const parts = partsOf(plan, inCodes);
  const { next, close } = runReader(bytes.subarray(2), FORMAT.piece * (bytes[0] + 256 * bytes[1]));
  const tables = new Map();
  const table = (width, most) => {
    const key = width * 4096 + most;
    if (!tables.has(key)) tables.set(key, geometric(width, most));
    return tables.get(key);
  };
  const integer = (width, most) => {
    const { reach, limits } = table(width, most);
    return next(limits) - reach;
  };
  const span = (count) => Array.from({ length: count + 1 }, (_, i) => i);
  const header = (least, most) => {
    const median = next(span(most - least + 1)) + least;
    const width = next(span(WIDEST - NARROWEST + 1)) + NARROWEST;
    return parts.map(() => {
      const value = integer(width, FORMAT.largest) + median;
      if (value < least || value > most) throw damaged();
      return value;
    });
  };
  const [indices, widths] = [header(-128, 127), header(NARROWEST, WIDEST)];
  const step = (index) => Math.fround(2 ** ((((index % OCTAVE) + OCTAVE) % OCTAVE) / OCTAVE)) * 2 ** Math.floor(index / OCTAVE);
  const leaves = {};
  const held = {};
  const logs = {};
  parts.forEach(({ name, first, count, shape, gain, finer, period, deviation }, at) => {
    const [size, features] = [product(shape), shape.at(-1) ?? 1];
    const gains = gain === null ? null : held[`${gain} ${first}`];
    const integers = new Int16Array(count * size);
    const { shape: whole } = plan.leaves[name];
    const leaf = (leaves[name] ??= { shape: whole, data: new Float32Array(product(whole)) });
    if (widths[at] === WIDEST && period === null) throw damaged();
    const coded = widths[at] !== NARROWEST;
    for (let k = 0; coded && k < integers.length; k++) {
      const own = gains && gains[Math.floor(k / size) * features + (k % features)];
      let shift = finer.length ? finer[Math.floor(k / features) % finer.length] : 0;
      if (own) shift += 32 - Math.clz32(own * own);
      const unit = step(indices[at] - (OCTAVE / 2) * shift);
      if (own !== 0) {
        const width = Math.max(NARROWEST + 1, Math.min(WIDEST - 1, widths[at] + 2 * shift));
        integers[k] = widths[at] === WIDEST ? integer(WIDEST, Math.min(FORMAT.largest, Math.floor(period / 2 / unit))) : integer(width, FORMAT.largest);
      }
      leaf.data[first * size + k] = integers[k] * unit;
    }
    if (deviation === name) {
      logs[name] = Float64Array.from(integers, (q) => q * step(indices[at]));
      leaf.data = Float32Array.from(logs[name], (u) => Math.max(0, Math.exp(2 * u) - FORMAT.leastVariance));
    } else if (deviation) {
      leaf.data = Float32Array.from(integers, (q, k) => q * step(indices[at]) * Math.exp(logs[deviation][k]));
    }
    held[`${name} ${first}`] = integers;
  });
  let count = 0n;
  for (const name of inCodes ? countersOf(plan) : []) {
    const size = next(span(65));
    let difference = 0n;
    for (let low = 0; low < size; low += 16) difference += BigInt(next(span(1 << 16))) << BigInt(low);
    if (difference.toString(2).length !== Math.max(1, size) || (size && !difference)) throw damaged();
    count += difference;
    leaves[name] = { shape: [], data: Float64Array.of(Number(BigInt.asIntN(64, count))) };
  }
  close();
  return leaves;
}
