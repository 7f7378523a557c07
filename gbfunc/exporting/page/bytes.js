/** Texts and streams of bytes: base85, base64, deflate, SHA-256, CRC-32. */

/** Python's `base64.b85decode`. */
function base85(text) {
  const alphabet = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~";
  const missing = (5 - (text.length % 5)) % 5;
  const padded = text + "~".repeat(missing);
  const out = new Uint8Array((padded.length / 5) * 4);
  const view = new DataView(out.buffer);
  for (let i = 0; i < padded.length; i += 5) {
    let word = 0;
    for (const c of padded.slice(i, i + 5)) {
      const digit = alphabet.indexOf(c);
      if (digit < 0) throw damaged();
      word = 85 * word + digit;
    }
    if (word >= 2 ** 32) throw damaged();
    view.setUint32((i / 5) * 4, word);
  }
  return out.subarray(0, out.length - missing);
}

/** Padded base64. */
function base64(text) {
  if (!/^[A-Za-z0-9+/]*={0,2}$/.test(text)) throw new Refusal("not a plan: a table of codes is no base64");
  return ascii(atob(text));
}

/** A genome in the fragment of an address: base64 with - and _, without padding. */
function base64url(text) {
  if (!/^[A-Za-z0-9_-]+$/.test(text) || text.length % 4 === 1) throw new Refusal("no genome in this address: it is damaged");
  return ascii(atob(text.replaceAll("-", "+").replaceAll("_", "/")));
}

const EXTRA_BITS = (count, step) => Array.from({ length: count }, (_, i) => Math.max(0, Math.floor(i / step) - 1));
const starts = (first, extra) => extra.reduce((list, bits) => [...list, list.at(-1) + (1 << bits)], [first]).slice(0, -1);
const LENGTH_BITS = [...EXTRA_BITS(28, 4), 0];
const LENGTHS = [...starts(3, LENGTH_BITS.slice(0, 28)), 258];
const DISTANCE_BITS = EXTRA_BITS(30, 2);
const DISTANCES = starts(1, DISTANCE_BITS);
const ORDER = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];

/**
 * Raw deflate (RFC 1951) from byte `at` on, with a preset dictionary: {out, end}, `end` the byte after the stream.
 * The browser's own DecompressionStream takes no dictionary, and does not say where a stream ends.
 */
function inflate(data, at, words = new Uint8Array(), most = LIMITS.mostPlan) {
  let out = new Uint8Array(Math.min(most, 1 << 16) + words.length);
  out.set(words);
  let size = words.length;
  /** Appends a byte; copies may be longer than what they copy. */
  const push = (byte) => {
    if (size === out.length) {
      refuseUnless(size < most + words.length, "its plan is too long for this page");
      const wider = new Uint8Array(Math.min(2 * size, most + words.length));
      wider.set(out);
      out = wider;
    }
    out[size++] = byte;
  };
  let held = 0;
  let bits = 0;
  const take = (count) => {
    for (; held < count; held += 8) {
      if (at >= data.length) throw new Refusal("damaged: a stream is cut short");
      bits |= data[at++] << held;
    }
    const value = bits & ((1 << count) - 1);
    bits >>>= count;
    held -= count;
    return value;
  };
  const decode = ({ counts, symbols }) => {
    for (let length = 1, code = 0, first = 0, index = 0; length < 16; length++) {
      code |= take(1);
      if (code - counts[length] < first) return symbols[index + code - first];
      index += counts[length];
      first = (first + counts[length]) << 1;
      code <<= 1;
    }
    throw new Refusal("damaged: a stream has a code that it does not declare");
  };
  const fixed = () => [
    huffman(Array.from({ length: 288 }, (_, i) => (i < 144 ? 8 : i < 256 ? 9 : i < 280 ? 7 : 8))),
    huffman(Array(30).fill(5)),
  ];
  const declared = () => {
    const [literals, distances, count] = [take(5) + 257, take(5) + 1, take(4) + 4];
    const orders = Array(19).fill(0);
    for (let i = 0; i < count; i++) orders[ORDER[i]] = take(3);
    const code = huffman(orders);
    const lengths = [];
    while (lengths.length < literals + distances) {
      const symbol = decode(code);
      if (symbol < 16) lengths.push(symbol);
      else if (symbol === 16) lengths.push(...Array(take(2) + 3).fill(lengths.at(-1)));
      else lengths.push(...Array(symbol === 17 ? take(3) + 3 : take(7) + 11).fill(0));
    }
    return [huffman(lengths.slice(0, literals)), huffman(lengths.slice(literals))];
  };
  for (let last = 0; !last; ) {
    last = take(1);
    const kind = take(2);
    if (kind === 3) throw new Refusal("damaged: a stream has a block of no kind");
    if (kind === 0) {
      bits = held = 0;
      const length = data[at] | (data[at + 1] << 8);
      if (at + 4 + length > data.length) throw new Refusal("damaged: a stream is cut short");
      for (let i = 0; i < length; i++) push(data[at + 4 + i]);
      at += 4 + length;
      continue;
    }
    const [literals, distances] = kind === 1 ? fixed() : declared();
    for (let symbol; (symbol = decode(literals)) !== 256; ) {
      if (symbol < 256) {
        push(symbol);
      } else {
        const length = LENGTHS[symbol - 257] + take(LENGTH_BITS[symbol - 257]);
        const code = decode(distances);
        const from = size - DISTANCES[code] - take(DISTANCE_BITS[code]);
        if (!(from >= 0)) throw new Refusal("damaged: a stream copies what is not there");
        for (let i = 0; i < length; i++) push(out[from + i]);
      }
    }
  }
  return { out: out.slice(words.length, size), end: at };
}

/** A canonical code from the lengths of its words. */
function huffman(lengths) {
  const counts = Array(16).fill(0);
  lengths.forEach((length) => counts[length]++);
  counts[0] = 0;
  const symbols = lengths.map((length, symbol) => [length, symbol]).filter(([length]) => length);
  return { counts, symbols: symbols.sort((a, b) => a[0] - b[0] || a[1] - b[1]).map(([, symbol]) => symbol) };
}

const primes = (count) => {
  const found = [];
  for (let n = 2; found.length < count; n++) if (found.every((p) => n % p)) found.push(n);
  return found;
};
const fraction = (x) => ((x - Math.floor(x)) * 2 ** 32) | 0;
const ROUNDS = primes(64).map((p) => fraction(Math.cbrt(p)));
const INITIAL = primes(8).map((p) => fraction(Math.sqrt(p)));

/** SHA-256 (FIPS 180-4), which `crypto.subtle` has only where a page comes by https. */
function sha256(bytes) {
  const padded = new Uint8Array(Math.ceil((bytes.length + 9) / 64) * 64);
  padded.set(bytes);
  padded[bytes.length] = 128;
  const view = new DataView(padded.buffer);
  view.setBigUint64(padded.length - 8, BigInt(bytes.length) * 8n);
  const turn = (x, n) => (x >>> n) | (x << (32 - n));
  const words = new Int32Array(64);
  const hash = Int32Array.from(INITIAL);
  for (let block = 0; block < padded.length; block += 64) {
    for (let i = 0; i < 64; i++) {
      if (i < 16) {
        words[i] = view.getInt32(block + 4 * i);
      } else {
        const [a, b] = [words[i - 15], words[i - 2]];
        const low = turn(a, 7) ^ turn(a, 18) ^ (a >>> 3);
        words[i] = words[i - 16] + low + words[i - 7] + (turn(b, 17) ^ turn(b, 19) ^ (b >>> 10));
      }
    }
    let [a, b, c, d, e, f, g, h] = hash;
    for (let i = 0; i < 64; i++) {
      const one = h + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + ((e & f) ^ (~e & g)) + ROUNDS[i] + words[i];
      const two = (turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      [h, g, f, e, d, c, b, a] = [g, f, e, (d + one) | 0, c, b, a, (one + two) | 0];
    }
    [a, b, c, d, e, f, g, h].forEach((x, i) => (hash[i] += x));
  }
  const out = new DataView(new ArrayBuffer(32));
  hash.forEach((x, i) => out.setInt32(4 * i, x));
  return new Uint8Array(out.buffer);
}

const CRCS = Uint32Array.from({ length: 256 }, (_, byte) => {
  for (let bit = 0; bit < 8; bit++) byte = (byte >>> 1) ^ (byte & 1 ? 0xedb88320 : 0);
  return byte;
});

function crc32(bytes) {
  let sum = ~0;
  for (const byte of bytes) sum = (sum >>> 8) ^ CRCS[(sum ^ byte) & 255];
  return ~sum >>> 0;
}

const hex = (bytes) => Array.from(bytes, (b) => b.toString(16).padStart(2, "0")).join("");

function joined(arrays) {
  const out = new Uint8Array(arrays.reduce((n, a) => n + a.length, 0));
  arrays.reduce((at, a) => (out.set(a, at), at + a.length), 0);
  return out;
}
