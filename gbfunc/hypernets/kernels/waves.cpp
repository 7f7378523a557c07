// Factors of sines and cosines on a CPU, [s sin A + t cos A, s cos A - t sin A] with A = X U + phase, and gradients.
//
// With z = exp(i A), the half `s sin A + t cos A` is the imaginary part of (s + i t) z, and the other half is the real
// part. Codes with a period m are sums: row b m + o (place o of block b) has the code of row b m, plus the code of row
// o, minus the code of row 0. For these codes, z is exp(i A_o) times the turn exp(i (A_bm - A_0)), so that n rows take
// m + n / m sines. Other codes have one block, m = n. Let q be the gradient of the real part, g that of the imaginary
// part, and P = (q + i g) conj(z). Then ds = sum Re P, dt = sum Im P and dA = s Im P - t Re P. The gradients of the
// code weights need the sum of dA over blocks for each place, and over places for each block, but no z of a single row.
//
// Features are independent: a work item is some features of all tiles, and no two items add to the same sum.
// Backward computes z again, so that only the inputs stay in memory. Vectors contain consecutive rows.
//
// All arrays are contiguous. Suffixes: T tiles; G groups of tiles that share U; n rows; p width of the codes; H features.

#include <cmath>

#include "vectors.h"

namespace {

template <class S>
struct Wave {
  const S *codes, *weights;         // X [1 or T, n, p] and U [G, p, H]
  const S *phase, *sine, *cosine;   // [T, H], or null: 0, 1 and 0
  const S* scale;                   // factor of s and t: [T], or null: 1
  const Size* groups;               // index of each tile's group [T], or null: a group is a tile
  S* out;                           // [T, 2 H, n]; in backward, the gradient of this array
  S *d_weights, *d_phase, *d_sine, *d_cosine;  // results of backward: [G, p, H] and [T, H]
  Size tiles, n_groups, rows, width, features, code_step, cosine_first, period;
  Size group_of(Size tile) const { return groups ? groups[tile] : tile; }
  S* sines(Size tile, Size h) const { return out + (tile * 2 * features + (cosine_first ? features : 0) + h) * rows; }
  S* cosines(Size tile, Size h) const { return out + (tile * 2 * features + (cosine_first ? 0 : features) + h) * rows; }
};

template <class S>
struct Bits {
  typedef std::conditional_t<sizeof(S) == 4, std::int32_t, std::int64_t> type __attribute__((vector_size(kBytes)));
  static constexpr S magic = sizeof(S) == 4 ? 12582912.0 : 6755399441055744.0;  // adding this number rounds
  static constexpr S limit = sizeof(S) == 4 ? 8192.0 : 1e6;
  static constexpr int sign_shift = 8 * sizeof(S) - 2;
};

// Evaluates a polynomial by Horner's rule. The highest coefficient is the first.
template <class S, int N>
Vec<S> polynomial(const S (&c)[N], Vec<S> z) {
  Vec<S> sum = filled(c[0]);
  for (int i = 1; i < N; i++) sum = sum * z + filled(c[i]);
  return sum;
}

// Computes sine and cosine to one or two units in the last place. A multiple of pi / 2 is subtracted in three steps, of
// which two are exact (Cody and Waite, 1980). Polynomials of Cephes follow on [-pi / 4, pi / 4] (Moshier, 1989).
template <class S>
void sincos(Vec<S> x, Vec<S>& sin, Vec<S>& cos) {
  using B = Bits<S>;
  using I = typename B::type;
  const Vec<S> shifted = x * filled(S(0.63661977236758134308)) + filled(B::magic), n = shifted - filled(B::magic);
  Vec<S> r, s, c;
  if constexpr (sizeof(S) == 4) {
    r = ((x - n * filled(1.5703125f)) - n * filled(4.837512969970703125e-4f)) - n * filled(7.54978995489188216e-8f);
    const Vec<S> z = r * r;
    s = polynomial<S>({-1.9515295891e-4f, 8.3321608736e-3f, -1.6666654611e-1f}, z) * z * r + r;
    c = polynomial<S>({2.443315711809948e-5f, -1.388731625493765e-3f, 4.166664568298827e-2f}, z) * z * z -
        z * filled(0.5f) + filled(1.0f);
  } else {
    r = ((x - n * filled(1.57079625129699707031)) - n * filled(7.54978941586159635336e-8)) -
        n * filled(5.39030285815811905290e-15);
    const Vec<S> z = r * r;
    s = polynomial<S>({1.58962301576546568060e-10, -2.50507477628578072866e-8, 2.75573136213857245213e-6,
                       -1.98412698295895385996e-4, 8.33333333332211858878e-3, -1.66666666666666307295e-1},
                      z) * z * r + r;
    c = polynomial<S>({-1.13585365213876817300e-11, 2.08757008419747316778e-9, -2.75573141792967388112e-7,
                       2.48015872888517045348e-5, -1.38888888888730564116e-3, 4.16666666666665929218e-2},
                      z) * z * z - z * filled(0.5) + filled(1.0);
  }
  I quarter, s_bits, c_bits;
  std::memcpy(&quarter, &shifted, kBytes);
  const I swapped = -(quarter & 1);  // all bits set where sine and cosine are exchanged
  std::memcpy(&s_bits, &s, kBytes);
  std::memcpy(&c_bits, &c, kBytes);
  const I sin_bits = ((s_bits & ~swapped) | (c_bits & swapped)) ^ ((quarter & 2) << B::sign_shift);
  const I cos_bits = ((c_bits & ~swapped) | (s_bits & swapped)) ^ (((quarter + 1) & 2) << B::sign_shift);
  std::memcpy(&sin, &sin_bits, kBytes);
  std::memcpy(&cos, &cos_bits, kBytes);
}

constexpr Size kChunk = 512;  // number of places computed at once: their numbers stay in the first-level cache

// An array of numbers, padded to a multiple of the vector length.
template <class S>
struct Row {
  std::vector<Vec<S>> vectors;
  void fit(Size count) { vectors.assign(round_up(count, kLanes<S>) / kLanes<S>, Vec<S>{}); }
  S* data() { return reinterpret_cast<S*>(vectors.data()); }
};

// The codes of a tile, transposed: the codes of places, and the codes of blocks minus the code of block 0.
template <class S>
struct Codes {
  Row<S> places, blocks;  // [p, m] and [p, n / m], with padded rows
  const S* of = nullptr;
  Size m = 0, rows = 0, width = 0, count = 0, place_step = 0, block_step = 0;

  void read(const Wave<S>& w, Size tile) {
    const S* codes = w.codes + tile * w.code_step;
    if (of == codes && m == w.period && rows == w.rows && width == w.width) return;  // the last tile had equal codes
    of = codes, m = w.period, rows = w.rows, width = w.width, count = (rows + m - 1) / m;
    place_step = round_up(m, kLanes<S>), block_step = round_up(count, kLanes<S>);
    places.fit(place_step * w.width), blocks.fit(block_step * w.width);
    for (Size o = 0; o < m; o++)
      for (Size j = 0; j < w.width; j++) places.data()[j * place_step + o] = codes[o * w.width + j];
    for (Size b = 1; b < count; b++)
      for (Size j = 0; j < w.width; j++)
        blocks.data()[j * block_step + b] = codes[b * m * w.width + j] - codes[j];
  }
};

// The inputs and gradients of one feature of a tile, and memory for intermediate results.
template <class S>
struct Feature {
  Codes<S> codes;
  std::vector<S> weights, d_weights;
  S phase, s, t, d_phase, d_s, d_t;
  Row<S> sin, cos, block_sin, block_cos;  // of the places in a chunk, and of the turns of blocks
  Row<S> re, im, block_re, block_im;      // sums of (q + i g) conj(turn), and of (q + i g) conj(exp(i A_o))

  void read(const Wave<S>& w, Size tile, Size h) {
    codes.read(w, tile);
    weights.resize(w.width);
    const Size at = tile * w.features + h;
    for (Size j = 0; j < w.width; j++) weights[j] = w.weights[(w.group_of(tile) * w.width + j) * w.features + h];
    const S scale = w.scale ? w.scale[tile] : S(1);
    phase = w.phase ? w.phase[at] : S(0), s = w.sine ? w.sine[at] * scale : S(1);
    t = w.cosine ? w.cosine[at] * scale : S(0);
    turn(codes.blocks.data(), codes.block_step, codes.count, S(0), block_sin, block_cos);
  }

  // Computes sines and cosines for some columns of codes [p, step]. Uses std::sin if an angle is large or NaN.
  void turn(const S* from, Size step, Size some, S first, Row<S>& sines, Row<S>& cosines) {
    sines.fit(some), cosines.fit(some);
    typename Bits<S>::type large = {};
    for (Size k = 0; k < Size(sines.vectors.size()); k++) {
      Vec<S> a = filled(first);
      for (Size j = 0; j < Size(weights.size()); j++) a += load(from + j * step + k * kLanes<S>) * filled(weights[j]);
      large |= ~((a < filled(Bits<S>::limit)) & (a > filled(-Bits<S>::limit)));
      sincos<S>(a, sines.vectors[k], cosines.vectors[k]);
    }
    bool any = false;
    for (Size l = 0; l < kLanes<S>; l++) any |= large[l] != 0;
    if (!any) return;
    for (Size i = 0; i < some; i++) {
      S a = first;
      for (Size j = 0; j < Size(weights.size()); j++) a += from[j * step + i] * weights[j];
      sines.data()[i] = std::sin(a), cosines.data()[i] = std::cos(a);
    }
  }

  // For each chunk of places, computes the sines and cosines, then calls f(first place, number of places).
  template <class F>
  void by_chunks(F f) {
    for (Size first = 0; first < codes.m; first += kChunk) {
      const Size some = std::min(kChunk, codes.m - first);
      turn(codes.places.data() + first, codes.place_step, some, phase, sin, cos);
      f(first, some);
    }
  }
};

// Adds codes [p, step] times dA to the gradients of the code weights.
template <class S>
void add(Feature<S>& f, const S* codes, Size step, const Row<S>& dA) {
  for (Size j = 0; j < Size(f.weights.size()); j++) {
    Vec<S> sum = {};
    for (Size k = 0; k < Size(dA.vectors.size()); k++) sum += load(codes + j * step + k * kLanes<S>) * dA.vectors[k];
    f.d_weights[j] += total<S>(sum);
  }
}

template <class S>
void forward(const Wave<S>& w, Feature<S>& f, Size tile, Size h) {
  f.read(w, tile, h);
  S *sines = w.sines(tile, h), *cosines = w.cosines(tile, h);
  f.by_chunks([&](Size first, Size some) {
    for (Size b = 0; b < f.codes.count; b++) {
      const S c = f.block_cos.data()[b], d = f.block_sin.data()[b];
      const Vec<S> re = filled(f.s * c - f.t * d), im = filled(f.s * d + f.t * c);
      const Size at = b * f.codes.m + first, end = std::min(some, w.rows - at);
      for (Size o = 0, k = 0; o < end; o += kLanes<S>, k++) {
        store(sines + at + o, re * f.sin.vectors[k] + im * f.cos.vectors[k], end - o);
        store(cosines + at + o, re * f.cos.vectors[k] - im * f.sin.vectors[k], end - o);
      }
    }
  });
}

template <class S>
void backward(const Wave<S>& w, Feature<S>& f, Size tile, Size h) {
  f.read(w, tile, h);
  const S *sines = w.sines(tile, h), *cosines = w.cosines(tile, h);
  const Size lanes = kLanes<S>, m = f.codes.m, count = f.codes.count;
  f.d_weights.assign(w.width, S(0)), f.d_phase = f.d_s = f.d_t = 0;
  f.block_re.fit(count), f.block_im.fit(count);
  f.by_chunks([&](Size first, Size some) {
    f.re.fit(some), f.im.fit(some);
    for (Size b = 0; b < count; b++) {
      const Vec<S> c = filled(f.block_cos.data()[b]), d = filled(f.block_sin.data()[b]);
      const Size at = b * m + first, end = std::min(some, w.rows - at);
      Vec<S> re = {}, im = {};
      for (Size o = 0, k = 0; o < end; o += lanes, k++) {
        const Vec<S> g = load(sines + at + o, end - o), q = load(cosines + at + o, end - o);
        f.re.vectors[k] += q * c + g * d, f.im.vectors[k] += g * c - q * d;
        re += q * f.cos.vectors[k] + g * f.sin.vectors[k], im += g * f.cos.vectors[k] - q * f.sin.vectors[k];
      }
      if (count > 1) f.block_re.data()[b] += total<S>(re), f.block_im.data()[b] += total<S>(im);
    }
    Vec<S> along = {}, across = {};
    for (Size k = 0; k < Size(f.re.vectors.size()); k++) {
      Vec<S>&re = f.re.vectors[k], &im = f.im.vectors[k];
      const Vec<S> x = re * f.cos.vectors[k] + im * f.sin.vectors[k], y = im * f.cos.vectors[k] - re * f.sin.vectors[k];
      along += x, across += y;
      re = filled(f.s) * y - filled(f.t) * x;  // now dA
    }
    add(f, f.codes.places.data() + first, f.codes.place_step, f.re);
    const S ds = total<S>(along), dt = total<S>(across);
    f.d_s += ds, f.d_t += dt, f.d_phase += f.s * dt - f.t * ds;
  });
  for (Size b = 0; b < count; b++) {
    const S c = f.block_cos.data()[b], d = f.block_sin.data()[b];
    S &re = f.block_re.data()[b], im = f.block_im.data()[b];
    re = f.s * (im * c - re * d) - f.t * (re * c + im * d);
  }
  if (count > 1) add(f, f.codes.blocks.data(), f.codes.block_step, f.block_re);
  const S scale = w.scale ? w.scale[tile] : S(1);
  const Size at = tile * w.features + h;
  if (w.d_phase) w.d_phase[at] = f.d_phase;
  if (w.d_sine) w.d_sine[at] = f.d_s * scale;
  if (w.d_cosine) w.d_cosine[at] = f.d_t * scale;
}

// Calls f(wave, scratch, first feature, end) for ranges of features of all waves, in parallel.
template <class S, class F>
void by_features(const Wave<S>* waves, Size count, int threads, F f) {
  const Size ranges = threads > 1 ? 2 * threads : 1;
#pragma omp parallel num_threads(threads)
  {
    Feature<S> scratch;
#pragma omp for schedule(dynamic)
    for (Size i = 0; i < count * ranges; i++) {
      const Size H = waves[i / ranges].features, range = i % ranges;
      f(waves[i / ranges], scratch, range * H / ranges, (range + 1) * H / ranges);
    }
  }
}

template <class S>
void all_forward(const Wave<S>* waves, Size count, int threads) {
  for (Size i = 0; i < count; i++)
    prefer_large_pages(waves[i].out, waves[i].tiles * waves[i].rows * waves[i].features * 2 * sizeof(S));
  by_features(waves, count, threads, [](const Wave<S>& w, Feature<S>& f, Size first, Size end) {
    for (Size tile = 0; tile < w.tiles; tile++)
      for (Size h = first; h < end; h++) forward(w, f, tile, h);
  });
}

template <class S>
void all_backward(const Wave<S>* waves, Size count, int threads) {
  by_features(waves, count, threads, [](const Wave<S>& w, Feature<S>& f, Size first, Size end) {
    for (Size row = 0; row < w.n_groups * w.width; row++)
      std::fill(w.d_weights + row * w.features + first, w.d_weights + row * w.features + end, S(0));
    for (Size tile = 0; tile < w.tiles; tile++)
      for (Size h = first; h < end; h++) {
        backward(w, f, tile, h);
        S* d = w.d_weights + w.group_of(tile) * w.width * w.features + h;
        for (Size j = 0; j < w.width; j++) d[j * w.features] += f.d_weights[j];
      }
  });
}

}  // namespace

#define GBFUNC_EXPORT(S, NAME)                                                                                     \
  extern "C" void waves_forward_##NAME(const Wave<S>* w, Size count, int n) { all_forward<S>(w, count, n); }       \
  extern "C" void waves_backward_##NAME(const Wave<S>* w, Size count, int n) { all_backward<S>(w, count, n); }

GBFUNC_EXPORT(float, f32)
GBFUNC_EXPORT(double, f64)
