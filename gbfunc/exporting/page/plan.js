/** From a plan's JSON to a plan: every field is checked, and what the plan would make is counted, before anything is made. */

/** Own properties alone: a name such as "constructor" finds nothing. */
const known = (table, name) => (typeof name === "string" && Object.hasOwn(table, name) ? table[name] : undefined);
const isIn = (table) => (name) => known(table, name) !== undefined;

const refuseUnless = (holds, message) => {
  if (!holds) throw new Refusal(message);
};

/* JSON, in which 3 and 3.0 are not the same. */

const DECIMALS = new WeakMap();
const isText = (value) => typeof value === "string";
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const isInteger = (value, holder, key) => Number.isInteger(value) && !DECIMALS.get(holder)?.has(String(key));
const isList = (value) => Array.isArray(value);
const isRecord = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** What a file of so many bytes may declare: numbers, symbols, pieces or containers. */
const allowed = (what, bytes) => LIMITS[`free${what[0].toUpperCase()}${what.slice(1)}`] + Math.floor(LIMITS[`${what}PerByte`] * bytes);

function allow(what, declared, bytes) {
  refuseUnless(declared <= allowed(what, bytes), `it declares ${count(declared)} ${what}, and has ${count(bytes)} bytes`);
}

/** Parses the JSON of a file of so many bytes; remembers the places of whole numbers with a point or an exponent. */
function parseJson(text, bytes) {
  const { mostDicts, mostLists, mostCommas, mostDepth } = LIMITS;
  const [dicts, lists, commas] = ["{", "[", ","].map((mark) => text.split(mark).length - 1);
  const short = dicts <= mostDicts && lists <= mostLists && commas <= mostCommas;
  refuseUnless(short, "its plan is too long for this page");
  allow("containers", dicts + lists, bytes);
  const open = [];
  for (const [mark, key, colon] of text.matchAll(/("[^"\\]*(?:\\.[^"\\]*)*")(\s*:)?|[[\]{}]/gs)) {
    if (mark === "{" || mark === "[") open.push(new Set());
    if (mark === "}" || mark === "]") open.pop();
    refuseUnless(open.length <= mostDepth, "its plan is nested too deep");
    if (!colon) continue;
    refuseUnless(!open.at(-1)?.has(key), `not a plan: the field ${quoted(key)} stands there twice`);
    open.at(-1)?.add(key);
  }
  if (!/\d(\.0*(?!\d)|[eE])/.test(text)) return JSON.parse(text);
  // Browsers before 2025 do not give the source: there 3.0 is read as 3.
  return JSON.parse(text, function (key, value, context) {
    refuseUnless(Math.abs(value) !== Infinity, "not a plan: it holds a number that is not finite");
    if (Number.isInteger(value) && /[.eE]/.test(context?.source ?? "")) {
      if (!DECIMALS.has(this)) DECIMALS.set(this, new Set());
      DECIMALS.get(this).add(key);
    }
    return value;
  });
}

const IS = {
  object: isRecord, array: isList, string: isText, number: isNumber, integer: isInteger,
  boolean: (value) => typeof value === "boolean", null: (value) => value === null,
};

/** Tests of a value by the keywords of a JSON Schema, of which the format's has these alone. */
const KEYWORDS = {
  $ref: (path, place) => breach(FORMAT.schema.definitions[path.split("/").at(-1)], place),
  type: (name, { value, holder, key }) => !IS[name](value, holder, key) && `expected ${name}`,
  const: (only, { value }) => value !== only && `expected ${quoted(only)}`,
  enum: (values, { value }) => !values.includes(value) && `expected one of ${values.join(", ")}`,
  minimum: (least, { value }) => value < least && `expected ${least} or more`,
  maximum: (most, { value }) => value > most && `expected at most ${most}`,
  exclusiveMinimum: (least, { value }) => value <= least && `expected more than ${least}`,
  minItems: (least, { value }) => value.length < least && `expected ${least} entries or more`,
  maxItems: (most, { value }) => value.length > most && `expected at most ${most} entries`,
  required: (names, { value }) => names.some((name) => !Object.hasOwn(value, name)) && `expected ${names.join(", ")}`,
  additionalItems: (_, { value, schema }) => value.length > schema.items.length && `expected at most ${schema.items.length} entries`,
  additionalProperties(_, { value, schema }) {
    const other = Object.keys(value).find((name) => !Object.hasOwn(schema.properties, name));
    return other !== undefined && `it has an unknown field ${quoted(other)}`;
  },
  properties(fields, { value }) {
    const own = Object.keys(fields).filter((name) => Object.hasOwn(value, name));
    return first(own, (name) => breach(fields[name], { value: value[name], holder: value, key: name }));
  },
  items(items, { value }) {
    return first(value.keys(), (i) => breach(isList(items) ? items[i] ?? {} : items, { value: value[i], holder: value, key: i }));
  },
  anyOf: (schemas, place) => schemas.every((schema) => breach(schema, place)) && breach(schemas.at(-1), place),
  allOf: (schemas, place) => first(schemas, (schema) => breach(schema, place)),
  if: (schema, place) => !breach(schema, place) && breach(place.schema.then, place),
};

/** The first result that is no false. */
function first(list, test) {
  for (const entry of list) {
    const found = test(entry);
    if (found) return found;
  }
  return false;
}

/** How a value breaches a schema, false if it does not; the type is tested first. */
function breach(schema, place) {
  const { type, ...others } = schema;
  const wrong = type && KEYWORDS.type(type, place);
  const said = wrong || first(Object.keys(others), (word) => known(KEYWORDS, word)?.(others[word], { ...place, schema }));
  if (!said || place.key === undefined || said.startsWith("in ")) return said;
  return `in ${quoted(place.key)}: ${said}, got ${quoted(place.value)}`;
}

function quoted(value) {
  const text = JSON.stringify(value) ?? "nothing";
  return text.length > 60 ? `${text.slice(0, 57)}...` : text;
}

/* Encodings: {type, local, depth, check(n), width(n), put(out, at, i, n), squares(n)} of an axis of n. */

const bitWidth = (n) => 32 - Math.clz32(n - 1);
const halfOf = (i, unit) => (i % (2 * unit) >= unit ? 1 : -1);

/** A code of +-1 for each bit of the position, of which `at(i, unit)` gives one. */
const bitCode = (type, at) => ({
  type,
  local: true,
  check: () => true,
  width: bitWidth,
  put(out, to, i, n) {
    for (let bit = bitWidth(n) - 1; bit >= 0; bit--) out[to++] = at(i, 2 ** bit);
  },
  // The mean squares of each number of the code, over all positions.
  squares: (n) => Array(bitWidth(n)).fill(1),
});

const BITS = { binary: bitCode("binary", halfOf), gray: bitCode("gray", (i, unit) => halfOf(i + unit, 2 * unit)) };

const ENCODINGS = {
  binary: () => BITS.binary,
  gray: () => BITS.gray,
  one_hot: () => ({
    type: "one_hot",
    local: true,
    check: () => true,
    width: (n) => n,
    put: (out, to, i, n) => (out.fill(0, to, to + n)[to + i] = 1),
    squares: (n) => new Float64Array(n).fill(1 / n),
  }),

  grid({ dims, code = "coordinate", bandwidth = 6 }) {
    const bits = known(BITS, code);
    const axes = dims.map((d, k) => ({ d, unit: product(dims.slice(k + 1)), width: bits ? bitWidth(d) : 1 })).filter(({ d }) => d > 1);
    return {
      type: "grid",
      dims,
      local: false,
          check: (n) => product(dims) === n,
      width: () => sum(axes.map(({ width }) => width)),
      put(out, to, i) {
        for (const { d, unit, width } of axes) {
          const j = Math.floor(i / unit) % d;
          if (bits) bits.put(out, to, j, d);
          else out[to] = ((2 * j - (d - 1)) / (d - 1)) * bandwidth;
          to += width;
        }
      },
      squares: () => axes.flatMap(({ d }) => (bits ? bits.squares(d) : [(bandwidth ** 2 * (d + 1)) / (3 * (d - 1))])),
    };
  },

  table({ shape: [n, k], dtype, data: text }) {
    refuseUnless(text.length === 4 * Math.ceil((n * k * ITEM_BYTES[dtype]) / 3), "a table has other data than its shape");
    const rows = numbersOf(base64(text), dtype);
    refuseUnless(rows.length === n * k && rows.every((x) => Math.abs(x) <= LIMITS.bandwidth), "a table holds too large numbers");
    let squares;
    const sumSquares = () => {
      const sums = new Float64Array(k);
      rows.forEach((x, i) => (sums[i % k] += x * x));
      return sums.map((x) => x / n);
    };
    return {
      type: "table",
      local: false,
          check: (length) => length === n,
      width: () => k,
      put: (out, to, i) => out.set(rows.subarray(i * k, (i + 1) * k), to),
      squares: () => (squares ??= sumSquares()),
    };
  },

  per_axis(data, depth) {
    refuseUnless(depth < LIMITS.depth, "its encodings are nested too deep");
    const m = data.n_positions;
    const [channels, positions] = [data.channels, data.positions].map((code) => encodingOf(code, depth + 1));
    const both = (n, value) => [value(channels, n / m), value(positions, m)];
    refuseUnless(positions.check(m), "a code per axis does not fit its kernel");
    return {
      type: "per_axis",
      local: channels.local,
      check: (n) => n % m === 0 && channels.check(n / m),
      width: (n) => sum(both(n, (code, length) => code.width(length))),
      put(out, to, i, n) {
        channels.put(out, to, Math.floor(i / m), n / m);
        positions.put(out, to + channels.width(n / m), i % m, m);
      },
      squares: (n) => both(n, (code, length) => [...code.squares(length)]).flat(),
      inner: (n) => both(n, (code, length) => [code, length]),
    };
  },
};

function encodingOf(data, depth = 0) {
  const read = known(ENCODINGS, data.type);
  if (!read) throw notYet(`the encoding ${quoted(data.type)}`);
  return { ...read(data, depth), key: JSON.stringify(data) };
}

/* G-nets. */

const WAVES = { features: null, share: "none", frequency: null };
const MLP_OPTIONS = { hidden: null, activation: "relu" };

/** Options of each type of g-net, as they are where a plan says nothing. */
const OPTIONS = {
  periodic: WAVES,
  bilinear: WAVES,
  low_rank: { rank: null, share: "none" },
  xox: { genes: null },
  constant: { value: 0 },
  gnet: MLP_OPTIONS,
  stochastic: MLP_OPTIONS,
};

function hypernetOf({ type, ...options }) {
  const usual = known(OPTIONS, type);
  if (!usual) throw notYet(`g-nets of type ${quoted(type)}`);
  return { type, ...usual, ...options };
}

/* Tensors. */

const USUAL_KINDS = { 1: "vector", 2: "linear", 4: "conv" };
const outerInner = (s) => [[s[0], product(s.slice(1))]];

/** Rows and columns of the matrices that a tensor folds from, by the kind of its layer. */
const MATRICES = {
  linear: (s) => [[s[0], s[1]]],
  transposed_linear: (s) => [[s[1], s[0]]],
  conv: outerInner,
  conv_transpose: (s) => [[s[1], s[0] * product(s.slice(2))]],
  attention_in: (s) => Array(3).fill([Math.floor(s[0] / 3), s[1]]),
  attention: outerInner,
  embedding: outerInner,
  vector: (s) => [[product(s), 1]],
  matrix: outerInner,
};

function tensorOf(entry, hypernets, encodings) {
  const { name, shape, dtype = "float32", kind = USUAL_KINDS[shape.length], aliases = [] } = entry;
  refuseUnless(kind, `not a plan: the tensor ${quoted(name)} has no kind`);
  if (entry.base) throw notYet("a genome that changes a pretrained network");
  if (!["float32", "float64"].includes(dtype)) throw notYet(`weights of ${dtype}`);
  const sizes = entry.slots ? MATRICES[kind](shape) : [];
  const slots = entry.slots ?? [];
  const fits = sizes.length === slots.length && (!entry.slots || sum(sizes.map(product)) === product(shape));
  refuseUnless(fits, `not a plan: the slots of ${quoted(name)} do not make its shape`);
  return { name, shape, kind, dtype, aliases, slots: slots.map((values, i) => slotOf(values, sizes[i], hypernets, encodings, name)) };
}

function slotOf(values, [rows, cols], hypernets, encodings, name) {
  const [h, rowAt, colAt, scale, offset = 0, group = "", tileRows = rows, tileCols = cols] = values;
  const [hypernet, rowCode, colCode] = [hypernets[h], encodings[rowAt], encodings[colAt]];
  refuseUnless(hypernet && rowCode && colCode, `not a plan: a slot of ${quoted(name)} refers to what is not there`);
  refuseUnless((typeOf(hypernet).size(hypernet) ?? null) !== null, "not a plan: a g-net has no size");
  refuseUnless(1 <= tileRows && tileRows <= rows && 1 <= tileCols && tileCols <= cols, `not a plan: a tile does not fit ${quoted(name)}`);
  const grid = { rows, cols, tileRows, tileCols, down: Math.ceil(rows / tileRows), across: Math.ceil(cols / tileCols) };
  for (const [code, n, tile] of [[rowCode, rows, tileRows], [colCode, cols, tileCols]]) {
    refuseUnless(code.check(n) && (!code.local || code.check(tile)), `not a plan: a code does not fit ${quoted(name)}`);
  }
  return { hypernet, grid, rowCode, colCode, scale, offset, group };
}

/** A plan and the metadata beside it, from their JSON in a file of so many bytes. */
function parsePlan(text, bytes) {
  const data = parseJson(text, bytes);
  const { mostTensors, mostLeaves, mostTiles, mostWeights } = LIMITS;
  refuseUnless(!isRecord(data) || data.version === FORMAT.version, `its plan is of version ${quoted(data?.version)}, this page reads ${FORMAT.version}`);
  const wrong = breach(FORMAT.schema, { value: data });
  refuseUnless(!wrong, `not a plan: ${wrong}`);
  if (Object.hasOwn(data, "base")) throw notYet("a genome that changes a pretrained network");
  const names = sum(data.tensors.map(({ aliases = [] }) => 1 + aliases.length)) + (data.buffers ?? []).length;
  refuseUnless(names <= mostTensors, "its plan is too long for this page");
  const [hypernets, encodings] = [data.hypernets.map(hypernetOf), data.encodings.map((code) => encodingOf(code))];
  const tensors = data.tensors.map((entry) => tensorOf(entry, hypernets, encodings));
  const buffers = (data.buffers ?? []).map(([name, shape, dtype]) => ({ name, shape, dtype }));
  const all = [...tensors.flatMap(({ name, aliases }) => [name, ...aliases]), ...buffers.map(({ name }) => name)];
  refuseUnless(new Set(all).size === all.length, "not a plan: two tensors have one name");
  const weights = sum(tensors.map(({ shape }) => product(shape)));
  refuseUnless(weights <= mostWeights, `its network has ${count(weights)} weights, this page grows up to ${count(mostWeights)}`);
  const tiles = sum(tensors.flatMap(({ slots }) => slots.map(({ grid }) => grid.down * grid.across)));
  refuseUnless(tiles <= mostTiles, "its plan has too many tiles");
  const plan = { tensors, buffers, weights, wide: tensors.some((t) => t.dtype === "float64"), ensembles: ensemblesOf(tensors) };
  const leaves = plan.ensembles.map(({ hypernet, dims, slots }) => slots.length * Object.keys(typeOf(hypernet).leaves(hypernet, dims)).length);
  allow("pieces", tensors.length + buffers.length + sum(leaves), bytes);
  plan.leaves = leavesOf(plan);
  allow("numbers", sum(Object.values(plan.leaves).map(({ shape }) => product(shape))), bytes);
  refuseUnless(Object.keys(plan.leaves).length <= mostLeaves, "its plan has too many leaves");
  return { plan, metadata: isRecord(data.metadata) ? data.metadata : {} };
}

/** Slots by what one call generates together: the same g-net, tile and widths of codes; named as in the file. */
function ensemblesOf(tensors) {
  const alike = new Map();
  for (const slot of tensors.flatMap((tensor) => tensor.slots)) {
    const { rows, cols, tileRows, tileCols, down, across } = slot.grid;
    const width = (code, n, tile) => code.width(code.local ? tile : n);
    const dims = {
      rows: tileRows, cols: tileCols,
      rowWidth: width(slot.rowCode, rows, tileRows), colWidth: width(slot.colCode, cols, tileCols),
    };
    const key = JSON.stringify([slot.hypernet, dims]);
    if (!alike.has(key)) alike.set(key, { hypernet: slot.hypernet, dims, slots: [], tiles: 0, taken: 0, known: new Map() });
    const ensemble = alike.get(key);
    const tiles = down * across;
    refuseUnless(slot.hypernet.type !== "constant" || tiles === 1, "its plan has tiles of a constant");
    Object.assign(slot, { ensemble, first: ensemble.tiles });
    ensemble.slots.push(slot);
    ensemble.tiles += tiles;
    // Tiles at the same place of slots of a group share leaves: [first tile, number of its leaves] of each stretch.
    if (!ensemble.known.has(slot.group)) ensemble.known.set(slot.group, { length: 0, stretches: [] });
    slot.shared = ensemble.known.get(slot.group);
    if (tiles > slot.shared.length) {
      slot.shared.stretches.push([slot.shared.length, ensemble.taken]);
      ensemble.taken += tiles - slot.shared.length;
      slot.shared.length = tiles;
    }
  }
  const named = new Map();
  for (const ensemble of alike.values()) {
    const { hypernet, dims } = ensemble;
    const base = `${hypernet.type}${typeOf(hypernet).size(hypernet) || ""}_${dims.rows}x${dims.cols}`;
    const name = named.has(base) ? `${base}_${named.size}` : base;
    named.set(name, Object.assign(ensemble, { name }));
  }
  return [...named.values()];
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
