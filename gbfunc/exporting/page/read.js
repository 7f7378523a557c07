/** From the bytes of a genome's file to its plan, its metadata and its numbers; one function for each piece of the format. */

/** What a person should read as it stands: a file that is damaged, or holds what this page does not know. */
class Refusal extends Error {}

const notYet = (what) => new Refusal(`not in the browser yet: ${what}; load the genome in Python (gb.load)`);

/** Limits of the format, and of this page: what a stranger's file may cost whoever opens it. */
const LIMITS = {
  ...FORMAT.schema.limits,
  mostWeights: FORMAT.mostWeights,
  mostMemory: 64 << 20, // bytes of weights that grow without a click
  mostSeconds: 30, // expected, of a growth without a click
  workPerSecond: 2e8, // multiplications and additions
  mostWork: 4e8, // multiplications for one example
  mostNumbers: 1 << 22, // that a layer makes of one example
  mostPixels: 1 << 20, // numbers of an image
  mostOutputs: 1_000,
  mostContext: 1 << 14,
};
const PLAIN = "gbfunc-genome-3";
const ITEM_BYTES = {
  int64: 8, float64: 8, complex64: 8, float32: 4, int32: 4, bfloat16: 2, float16: 2, int16: 2, int8: 1, uint8: 1, bool: 1,
};
const CODES_OF = {
  int64: "I64", float64: "F64", complex64: "C64", float32: "F32", int32: "I32", bfloat16: "BF16", float16: "F16", int16: "I16",
  int8: "I8", uint8: "U8", bool: "BOOL",
};
const FLOATS = ["float64", "float32", "bfloat16", "float16"];
const STATISTICS = { running_mean: "float16", running_var: "bfloat16" };
const BLOCK = 64;
const NARROW = 16;
const RUNS = 32;
const IN_CODES = 64;

const product = (numbers) => numbers.reduce((a, b) => a * b, 1);
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const count = (n) => n.toLocaleString("en");
const utf8 = (bytes) => new TextDecoder("utf-8", { fatal: true }).decode(bytes);
const ascii = (text) => Uint8Array.from(text, (c) => c.charCodeAt(0));

/**
 * All that a file holds: {plan, metadata, leaves: {name: {shape, data}}, parts: [[name, first byte, end], ...]}.
 * Throws a Refusal for anything but a whole genome of types that are known here.
 */
function readGenome(bytes) {
  try {
    const genome = readFile(bytes);
    for (const [name, { data }] of Object.entries(genome.leaves)) {
      const holds = name.startsWith("buffers/") ? (x) => !Number.isNaN(x) : Number.isFinite;
      refuseUnless(data.every(holds), `not a valid genome: it holds values that are not finite in ${quoted(name)}`);
    }
    return genome;
  } catch (error) {
    if (error instanceof Refusal) throw error;
    throw new Refusal(`not a valid genome (${error.message})`);
  }
}

function readFile(bytes) {
  if (bytes.length < 9) throw new Refusal(`not a genome: ${bytes.length} bytes are too few`);
  if (String.fromCharCode(...bytes.subarray(0, 3)) === FORMAT.magic) return readCompact(bytes);
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
  const size = Number(view.getBigUint64(0, true));
  const start = 8 + size;
  if (start > bytes.length || size > LIMITS.mostHeader) throw new Refusal("not a genome, or cut short");
  let header;
  try {
    header = JSON.parse(utf8(bytes.subarray(8, start)));
  } catch {
    throw new Refusal("not a genome: its header cannot be read");
  }
  const { __metadata__: about, ...entries } = isRecord(header) ? header : {};
  if (!isRecord(about) || about.format !== PLAIN || !isText(about.plan)) {
    throw new Refusal("not a genome of a version that this page knows: save it again with the newest gbfunc");
  }
  refuseUnless(about.numbers === undefined || FLOATS.includes(about.numbers), "not a genome: its numbers have no known dtype");
  return readPlain(about, tensorsIn(bytes, start, entries), start, bytes.length);
}

/** The tensors of a safetensors file by name, {from, to, bytes}: each [n] of the dtype that names it, without gaps. */
function tensorsIn(bytes, start, entries) {
  const tensors = {};
  let total = 0;
  for (const [name, entry] of Object.entries(entries)) {
    const [{ shape, dtype } = {}, [from, to] = []] = [entry ?? {}, isList(entry?.data_offsets) ? entry.data_offsets : []];
    const size = known(ITEM_BYTES, name);
    const fits = size && dtype === known(CODES_OF, name) && isList(shape) && shape.length === 1 && to - from === size * shape[0];
    refuseUnless(fits && isInteger(from) && 0 <= from && from <= to && start + to <= bytes.length, "not a genome, or cut short");
    tensors[name] = { from: start + from, to: start + to, bytes: bytes.subarray(start + from, start + to) };
    total += to - from;
  }
  const places = Object.values(tensors).sort((a, b) => a.from - b.from || a.to - b.to);
  const joined = places.every(({ from }, i) => from === (i ? places[i - 1].to : start));
  refuseUnless(joined && start + total === bytes.length, "not a genome: its tensors do not fill the file");
  return tensors;
}

/** The preset dictionary of packed plans. */
function documents() {
  return inflate(ascii(atob(FORMAT.documents)), 0).out;
}

/** A file of which every tensor is of a dtype of its own; its plan is in the header. */
function readPlain(about, tensors, start, size) {
  const text = utf8(inflate(base85(about.plan), 0, documents()).out);
  const names = Object.keys(tensors).sort();
  const said = names.flatMap((name) => [
    ascii(`\n${name} torch.${name} (${tensors[name].bytes.length / ITEM_BYTES[name]},)\n`), tensors[name].bytes,
  ]);
  if (hex(sha256(joined([new TextEncoder().encode(text), ...said]))) !== about.sha256) throw damaged();
  const { plan, metadata } = parsePlan(text, size);
  const wanted = Object.keys(plan.leaves).sort().map((name) => {
    const { shape } = plan.leaves[name];
    return { name, shape, dtype: storedDtype(name, plan.leaves[name], about.numbers ?? null, true), size: product(shape) };
  });
  for (const dtype of new Set([...names, ...wanted.map((leaf) => leaf.dtype)])) {
    const size = ITEM_BYTES[dtype] * sum(wanted.filter((leaf) => leaf.dtype === dtype).map((leaf) => leaf.size));
    const held = wanted.some((leaf) => leaf.dtype === dtype) ? tensors[dtype]?.bytes.length : undefined;
    refuseUnless(held === size, "damaged: its tensors are not those of its plan");
  }
  const flat = {};
  const places = Object.fromEntries(names.map((name) => [name, 0]));
  for (const { name, shape, dtype, size } of wanted) {
    const end = places[dtype] + ITEM_BYTES[dtype] * size;
    flat[name] = { shape, data: numbersOf(tensors[dtype].bytes.subarray(places[dtype], end), dtype) };
    places[dtype] = end;
  }
  const numbers = names.map((name) => [`numbers (${name})`, tensors[name].from, tensors[name].to]);
  const parts = [["container and plan", 0, start], ...numbers.sort((a, b) => a[1] - b[1])];
  return { plan, metadata, leaves: flat, parts };
}

/** A file of a format of its own: bits, checksum, plan, plain leaves, and runs of codes. */
function readCompact(bytes) {
  const start = 8;
  const checked = joined([bytes.subarray(start - 5, start - 4), bytes.subarray(start)]);
  if (crc32(checked) !== new DataView(bytes.buffer, bytes.byteOffset).getUint32(start - 4, true)) throw damaged();
  const flags = bytes[start - 5];
  const bits = flags & ~(NARROW | RUNS | IN_CODES);
  const inCodes = (flags & IN_CODES) > 0;
  refuseUnless(bits === FORMAT.steps || (!inCodes && bits >= 2 && bits <= 8), `not a genome: it has codes of ${bits} bits`);
  const document = inflate(bytes, start, documents());
  const { plan, metadata } = parsePlan(utf8(document.out), bytes.length);
  // Numbers may take no bits: what a file of this size may make is limited all the same.
  const names = Object.keys(plan.leaves).sort();
  const sizeOf = (name) => product(plan.leaves[name].shape);
  const stepped = bits === FORMAT.steps ? steppedLeaves(plan, inCodes) : null;
  const stored = (name) => storedDtype(name, plan.leaves[name], `int${bits}`, (flags & NARROW) > 0);
  const dtypes = Object.fromEntries(names.map((name) => [name, stepped?.has(name) ? null : stored(name)]));
  const flat = {};
  let at = document.end;
  for (const dtype of Object.keys(ITEM_BYTES)) {
    for (const name of names.filter((name) => dtypes[name] === dtype)) {
      const end = at + ITEM_BYTES[dtype] * sizeOf(name);
      refuseUnless(end <= bytes.length, "damaged: it holds fewer numbers than its plan has");
      flat[name] = { shape: plan.leaves[name].shape, data: numbersOf(bytes.subarray(at, end), dtype) };
      at = end;
    }
  }
  const parts = [["container", 0, start], ["plan", start, document.end], ["direct", document.end, at]];
  if (stepped) {
    Object.assign(flat, readSteps(bytes.subarray(at), plan, inCodes, bytes.length));
    return { plan, metadata, leaves: flat, parts: [...parts, ["codes", at, bytes.length]].filter(([, a, b]) => b > a) };
  }
  const coded = names.filter((name) => dtypes[name] === null);
  const lengths = coded.map(sizeOf);
  const counts = coded.map((name, i) => lengths[i] / Math.max(1, blockSize(plan.leaves[name].shape)));
  const read = flags & RUNS ? readRuns : readSymbols;
  const numbers = read(bytes.subarray(at), counts, lengths, bits);
  coded.forEach((name, i) => {
    const { scales, zeros, codes } = numbers[i];
    const block = lengths[i] / counts[i];
    const data = Float32Array.from(codes, (code, k) => scales[Math.floor(k / block)] * (code - zeros[Math.floor(k / block)]));
    flat[name] = { shape: plan.leaves[name].shape, data };
  });
  const last = [`codes of ${bits} bits, scales`, at, bytes.length];
  return { plan, metadata, leaves: flat, parts: [...parts, last].filter(([, a, b]) => b > a) };
}

/** Scales, zero points and codes of each leaf from a file of too many codes for runs. */
function readSymbols(bytes, counts, lengths, bits) {
  const end = 2 * sum(counts);
  refuseUnless(end <= bytes.length, "damaged: it holds fewer scales than its plan has");
  const scales = numbersOf(bytes.subarray(0, end), "bfloat16");
  const symbols = unpackSymbols(bytes.subarray(end), sum(counts) + sum(lengths), bits);
  let [scale, symbol] = [0, 0];
  return counts.map((n, i) => ({
    scales: scales.subarray(scale, (scale += n)),
    zeros: symbols.subarray(symbol, (symbol += n)),
    codes: symbols.subarray(symbol, (symbol += lengths[i])),
  }));
}

/** The same from runs. */
function readRuns(bytes, counts, lengths, bits) {
  const blocks = sum(counts);
  refuseUnless(sum(lengths) + 3 * blocks <= LIMITS.mostSymbols, "not a genome: it has too many codes in runs");
  const { read, close } = runReader(bytes, 3 + counts.length + 3 * blocks + sum(lengths));
  const exponents = read(blocks, 8, () => FORMAT.exponent);
  const mantissas = read(blocks, 7, () => 64);
  const zeros = read(blocks, bits, () => 2 ** (bits - 1));
  const pairs = exponents.map((e, i) => (e << 7) | mantissas[i]);
  const scales = numbersOf(new Uint8Array(Uint16Array.from(pairs).buffer), "bfloat16");
  let first = 0;
  const leaves = counts.map((n, i) => {
    const own = zeros.slice(first, first + n);
    const codes = read(lengths[i], bits, (k) => own[Math.floor(k / (lengths[i] / n))]);
    return { scales: scales.subarray(first, (first += n)), zeros: own, codes };
  });
  close();
  return leaves;
}

/** Runs of symbols that are one integer each piece (asymmetric numeral systems): as `gbfunc.formats.symbols`. */
function runReader(data, total) {
  const tables = new Map();
  let [x, left, inPiece] = [1n, total, 0];
  const limitsOf = (bits, centre, spread) => {
    const key = (bits * 256 + centre) * 16 + spread;
    if (!tables.has(key)) {
      const limits = [0];
      for (let s = 0; s < 2 ** bits; s++) {
        const q = Math.floor((64 * (s - centre) ** 2) / 2 ** (spread - 1));
        limits.push(limits[s] + 1 + (spread ? Math.floor(FORMAT.powers[q % 16] / 2 ** Math.floor(q / 16)) : 0));
      }
      tables.set(key, limits);
    }
    return tables.get(key);
  };
  const open = () => {
    if (x !== 1n) throw damaged();
    const [from, to] = left > FORMAT.piece ? [2, 2 + data[0] + 256 * data[1]] : [0, data.length];
    inPiece = Math.min(left, FORMAT.piece);
    left -= inPiece;
    const fits = to <= data.length && to > from && to - from <= LIMITS.symbolBytes * inPiece;
    if (!fits || !data[to - 1]) throw damaged();
    x = BigInt(`0x${hex(data.slice(from, to).reverse())}`);
    data = data.subarray(to);
  };
  const next = (limits) => {
    if (!inPiece) open();
    inPiece--;
    const all = BigInt(limits.at(-1));
    const rest = Number(x % all);
    let [low, high] = [0, limits.length - 1];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (limits[middle] <= rest) low = middle;
      else high = middle;
    }
    x = (x / all) * BigInt(limits[low + 1] - limits[low]) + BigInt(rest - limits[low]);
    return low;
  };
  const read = (count, bits, centre) => {
    const spread = next(limitsOf(4, 0, 0));
    return Array.from({ length: count }, (_, k) => next(limitsOf(bits, centre(k), spread)));
  };
  const close = () => {
    if (x !== 1n || data.length) throw damaged();
  };
  return { read, next, close };
}

const damaged = () => new Refusal("damaged: its digest does not fit its content");

/** What a leaf is stored in where `dtype` is asked for, null for codes: as `gbfunc.formats.rounding.stored_dtype`. */
function storedDtype(name, leaf, dtype, narrow) {
  const buffer = name.startsWith("buffers/");
  const statistic = buffer ? STATISTICS[name.split(".").pop()] : undefined;
  const codes = dtype !== null && dtype.startsWith("int");
  if (dtype === null || !FLOATS.includes(leaf.dtype)) return leaf.dtype;
  if (buffer && !(narrow && codes && statistic)) return leaf.dtype;
  if (codes && !buffer && !(name.startsWith("direct/") && leaf.shape.length < 2)) return null;
  const wanted = buffer ? statistic : codes ? "float16" : dtype;
  return ITEM_BYTES[leaf.dtype] <= ITEM_BYTES[wanted] ? leaf.dtype : wanted;
}

/** Numbers that have a scale in common: the fewest last dimensions with BLOCK numbers or more, else all. */
function blockSize(shape) {
  for (let i = shape.length; i >= 0; i--) if (product(shape.slice(i)) >= BLOCK) return product(shape.slice(i));
  return product(shape);
}

/** Symbols in so many bits each, or in a stream of deflate. */
function unpackSymbols(bytes, count, bits) {
  if (bytes.length !== Math.ceil((count * bits) / 8)) {
    const { out, end } = inflate(bytes, 0, new Uint8Array(), count);
    const fits = out.length === count && end === bytes.length && out.every((symbol) => symbol < 2 ** bits);
    refuseUnless(fits, "damaged: its codes are not those of its plan");
    return out;
  }
  const digit = (k) => (bytes[k >> 3] >> (7 - (k & 7))) & 1;
  return Uint8Array.from({ length: count }, (_, i) => {
    let symbol = 0;
    for (let b = 0; b < bits; b++) symbol = 2 * symbol + digit(i * bits + b);
    return symbol;
  });
}

const ARRAYS = {
  float64: Float64Array, float32: Float32Array, int32: Int32Array, int16: Int16Array, int8: Int8Array, uint8: Uint8Array, bool: Uint8Array,
};

/** Numbers of a dtype, little-endian. */
function numbersOf(bytes, dtype) {
  const own = known(ARRAYS, dtype);
  const { buffer } = bytes.slice();
  if (own) return new own(buffer);
  if (dtype === "bfloat16") return new Float32Array(Uint32Array.from(new Uint16Array(buffer), (code) => code << 16).buffer);
  if (dtype === "float16") return Float32Array.from(new Uint16Array(buffer), half);
  if (dtype === "int64") return Float64Array.from(new BigInt64Array(buffer), Number);
  throw notYet(`numbers of ${dtype}`);
}

function half(code) {
  const [sign, exponent, fraction] = [code >> 15 ? -1 : 1, (code >> 10) & 31, code & 1023];
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24);
}
