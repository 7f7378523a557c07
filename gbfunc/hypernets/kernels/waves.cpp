// Sines and cosines of codes on a CPU: with A = X U + phase, [s sin A + t cos A, s cos A - t sin A], and its gradients.
//
// A feature depends on no other: a work item is some features of some groups of tiles, and no two items share a sum.
// Backward makes A again, so that nothing is kept but the inputs.
//
// All arrays are contiguous. Suffixes: T tiles; G groups of tiles that share U; n rows; p width of the codes; H features.

#include <cmath>

#include "vectors.h"

namespace {

template <class S>
struct Wave {
  const S *codes, *weights;         // X [1 or T, n, p] and U [G, p, H]
  const S *phase, *sine, *cosine;   // [T, H], or null: 0, 1 and 0
  const S* scale;                   // of s and t: [T], or null: 1
  const Size* groups;               // [T], or null: each tile is a group
  S* out;                           // [T, n, 2 H]; in backward its gradient
  S *d_weights, *d_phase, *d_sine, *d_cosine;  // [G, p, H] and [T, H], written to
  Size tiles, n_groups, rows, width, features, code_step, cosine_first;
  Size group_of(Size tile) const { return groups ? groups[tile] : tile; }
};

template <class S>
struct Bits;
template <>
struct Bits<float> {
  typedef std::int32_t type __attribute__((vector_size(kBytes)));
  static constexpr float magic = 12582912.0f, limit = 8192.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  static constexpr int sign_shift = 30;
};
template <>
struct Bits<double> {
  typedef std::int64_t type __attribute__((vector_size(kBytes)));
  static constexpr double magic = 6755399441055744.0, limit = 1e6;  // 1.5 * 2^52
  static constexpr int sign_shift = 62;
};

// Whether any bit is set.
template <class S>
bool any(typename Bits<S>::type x) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)x, (__m512i)x);
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)x, (__m256i)x);
#else
  std::uint64_t words[kBytes / 8], all = 0;
  std::memcpy(words, &x, kBytes);
  for (const auto word : words) all |= word;
  return all;
#endif
}

// Horner's rule, highest coefficient first.
template <class S, int N>
Vec<S> polynomial(const S (&c)[N], Vec<S> z) {
  Vec<S> sum = spread(c[0]);
  for (int i = 1; i < N; i++) sum = sum * z + spread(c[i]);
  return sum;
}

// Sine and cosine to one or two units in the last place: x less a multiple of pi / 2, in three parts of which the first
// two are exact (Cody and Waite, 1980), then the polynomials of Cephes (Moshier, 1989) on [-pi / 4, pi / 4].
template <class S>
void sincos(Vec<S> x, Vec<S>& sin, Vec<S>& cos) {
  using B = Bits<S>;
  using I = typename B::type;
  const Vec<S> shifted = x * spread(S(0.63661977236758134308)) + spread(B::magic), n = shifted - spread(B::magic);
  Vec<S> r, s, c;
  if constexpr (sizeof(S) == 4) {
    r = ((x - n * spread(1.5703125f)) - n * spread(4.837512969970703125e-4f)) - n * spread(7.54978995489188216e-8f);
    const Vec<S> z = r * r;
    s = polynomial<S>({-1.9515295891e-4f, 8.3321608736e-3f, -1.6666654611e-1f}, z) * z * r + r;
    c = polynomial<S>({2.443315711809948e-5f, -1.388731625493765e-3f, 4.166664568298827e-2f}, z) * z * z -
        z * spread(0.5f) + spread(1.0f);
  } else {
    r = ((x - n * spread(1.57079625129699707031)) - n * spread(7.54978941586159635336e-8)) -
        n * spread(5.39030285815811905290e-15);
    const Vec<S> z = r * r;
    s = polynomial<S>({1.58962301576546568060e-10, -2.50507477628578072866e-8, 2.75573136213857245213e-6,
                       -1.98412698295895385996e-4, 8.33333333332211858878e-3, -1.66666666666666307295e-1},
                      z) * z * r + r;
    c = polynomial<S>({-1.13585365213876817300e-11, 2.08757008419747316778e-9, -2.75573141792967388112e-7,
                       2.48015872888517045348e-5, -1.38888888888730564116e-3, 4.16666666666665929218e-2},
                      z) * z * z - z * spread(0.5) + spread(1.0);
  }
  I quarter, s_bits, c_bits;
  std::memcpy(&quarter, &shifted, kBytes);
  const I swapped = -(quarter & 1);  // all bits where sine and cosine change places
  std::memcpy(&s_bits, &s, kBytes);
  std::memcpy(&c_bits, &c, kBytes);
  const I sin_bits = ((s_bits & ~swapped) | (c_bits & swapped)) ^ ((quarter & 2) << B::sign_shift);
  const I cos_bits = ((c_bits & ~swapped) | (s_bits & swapped)) ^ (((quarter + 1) & 2) << B::sign_shift);
  std::memcpy(&sin, &sin_bits, kBytes);
  std::memcpy(&cos, &cos_bits, kBytes);
  const I large = ~((x < spread(B::limit)) & (x > spread(-B::limit)));  // or not a number
  if (__builtin_expect(any<S>(large), 0))
    for (Size l = 0; l < kLanes<S>; l++) {
      sin[l] = std::sin(x[l]);
      cos[l] = std::cos(x[l]);
    }
}

constexpr Size kBlock = 64;  // rows whose outputs are written, or whose gradients are summed, vector by vector

// What a tile's rows are computed from, for some features: weights [p, features], then phase, s and t, padded by zeros.
template <class S>
struct Inputs {
  std::vector<Vec<S>> weights, phase, s, t;

  void read(const Wave<S>& w, Size tile, Size first, Size end) {
    const Size lanes = kLanes<S>, vectors = round_up(end - first, lanes) / lanes, H = w.features;
    weights.resize(vectors * w.width);
    phase.resize(vectors), s.resize(vectors), t.resize(vectors);
    const S* u = w.weights + w.group_of(tile) * w.width * H;
    const Vec<S> scale = spread(w.scale ? w.scale[tile] : S(1));
    for (Size k = 0; k < vectors; k++) {
      const Size h = first + k * lanes, some = end - h, at = tile * H + h;
      for (Size j = 0; j < w.width; j++) weights[k * w.width + j] = load(u + j * H + h, some);
      phase[k] = w.phase ? load(w.phase + at, some) : Vec<S>{};
      s[k] = w.sine ? load(w.sine + at, some) * scale : scale;
      t[k] = w.cosine ? load(w.cosine + at, some) * scale : Vec<S>{};
    }
  }
};

template <class S, int R>
void angles(const S* codes, const Vec<S>* weights, Vec<S> phase, Size width, Vec<S> (&sin)[R], Vec<S> (&cos)[R]) {
  Vec<S> a[R];
  for (auto& x : a) x = phase;
  for (Size j = 0; j < width; j++)
    for (int r = 0; r < R; r++) a[r] += spread(codes[r * width + j]) * weights[j];
  for (int r = 0; r < R; r++) sincos<S>(a[r], sin[r], cos[r]);
}

// Calls f(tile, first row, end of rows, vector of features, first of them) for all of an item.
template <class S, class F>
void by_blocks(const Wave<S>& w, Size first, Size end, F f) {
  for (Size top = 0; top < w.rows; top += kBlock)
    for (Size k = 0, h = first; h < end; k++, h += kLanes<S>) f(top, std::min(w.rows, top + kBlock), k, h);
}

template <class S>
void forward(const Wave<S>& w, Inputs<S>& in, Size tile, Size first, Size end) {
  in.read(w, tile, first, end);
  const Size H = w.features, sine_at = w.cosine_first ? H : 0, cosine_at = H - sine_at;
  const S* codes = w.codes + tile * w.code_step;
  S* out = w.out + tile * w.rows * 2 * H;
  by_blocks(w, first, end, [&](Size top, Size bottom, Size k, Size h) {
    const Vec<S> s = in.s[k], t = in.t[k];
    by_rows(top, bottom, [&](Size i, auto count) {
      constexpr int R = decltype(count)::value;
      Vec<S> sin[R], cos[R];
      angles<S, R>(codes + i * w.width, &in.weights[k * w.width], in.phase[k], w.width, sin, cos);
      for (int r = 0; r < R; r++) {
        S* row = out + (i + r) * 2 * H + h;
        store(row + sine_at, s * sin[r] + t * cos[r], end - h);
        store(row + cosine_at, s * cos[r] - t * sin[r], end - h);
      }
    });
  });
}

// Sums of gradients of some features.
template <class S>
struct Sums {
  std::vector<Vec<S>> weights, phase, s, t, block;
};

template <class S>
void backward(const Wave<S>& w, Inputs<S>& in, Sums<S>& d, Size tile, Size first, Size end) {
  in.read(w, tile, first, end);
  const Size H = w.features, sine_at = w.cosine_first ? H : 0, cosine_at = H - sine_at;
  const S* codes = w.codes + tile * w.code_step;
  const S* out = w.out + tile * w.rows * 2 * H;
  for (auto* x : {&d.phase, &d.s, &d.t}) x->assign(in.s.size(), Vec<S>{});
  d.block.resize(w.width);
  by_blocks(w, first, end, [&](Size top, Size bottom, Size k, Size h) {
    // Block by block, so that the rounding errors of long columns do not pile up.
    std::fill(d.block.begin(), d.block.end(), Vec<S>{});
    Vec<S> dA_sum = {}, ds = {}, dt = {};
    const Vec<S> s = in.s[k], t = in.t[k];
    by_rows(top, bottom, [&](Size i, auto count) {
      constexpr int R = decltype(count)::value;
      Vec<S> sin[R], cos[R], dA[R];
      angles<S, R>(codes + i * w.width, &in.weights[k * w.width], in.phase[k], w.width, sin, cos);
      for (int r = 0; r < R; r++) {
        const S* row = out + (i + r) * 2 * H + h;
        const Vec<S> of_sine = load(row + sine_at, end - h), of_cosine = load(row + cosine_at, end - h);
        const Vec<S> along = of_sine * sin[r] + of_cosine * cos[r], across = of_sine * cos[r] - of_cosine * sin[r];
        dA[r] = s * across - t * along;
        ds += along, dt += across, dA_sum += dA[r];
      }
      for (Size j = 0; j < w.width; j++)
        for (int r = 0; r < R; r++) d.block[j] += spread(codes[(i + r) * w.width + j]) * dA[r];
    });
    for (Size j = 0; j < w.width; j++) d.weights[k * w.width + j] += d.block[j];
    d.phase[k] += dA_sum, d.s[k] += ds, d.t[k] += dt;
  });
  const Vec<S> scale = spread(w.scale ? w.scale[tile] : S(1));
  for (Size k = 0, h = first; h < end; k++, h += kLanes<S>) {
    const Size at = tile * H + h;
    if (w.d_phase) store(w.d_phase + at, d.phase[k], end - h);
    if (w.d_sine) store(w.d_sine + at, d.s[k] * scale, end - h);
    if (w.d_cosine) store(w.d_cosine + at, d.t[k] * scale, end - h);
  }
}

// The gradients of the weights of some groups, and of what their tiles have of their own.
template <class S>
void backward_groups(const Wave<S>& w, Inputs<S>& in, Sums<S>& d, Size low, Size high, Size first, Size end) {
  const Size lanes = kLanes<S>, vectors = round_up(end - first, lanes) / lanes, size = vectors * w.width;
  const bool shared = w.groups || !w.tiles;  // an empty array has no address
  std::vector<Vec<S>> totals(shared ? (high - low) * size : 0);
  auto write = [&](Size group, const Vec<S>* from) {
    for (Size k = 0, h = first; k < vectors; k++, h += lanes)
      for (Size j = 0; j < w.width; j++)
        store(w.d_weights + (group * w.width + j) * w.features + h, from[k * w.width + j], end - h);
  };
  for (Size tile = shared ? 0 : low; tile < (shared ? w.tiles : high); tile++) {
    const Size group = w.group_of(tile);
    if (group < low || group >= high) continue;
    d.weights.assign(size, Vec<S>{});
    backward(w, in, d, tile, first, end);
    if (shared)
      for (Size i = 0; i < size; i++) totals[(group - low) * size + i] += d.weights[i];
    else
      write(group, d.weights.data());
  }
  if (shared)
    for (Size group = low; group < high; group++) write(group, totals.data() + (group - low) * size);
}

// Calls f(wave, first tile or group, end, first feature, end) for all of several waves, in parallel.
template <class S, class F>
void by_items(const Wave<S>* waves, Size count, int threads, bool groups, F make) {
  const Size parts = threads > 1 ? 4 * threads : 1;
  struct Item {
    Size wave, low, high, first, end;
  };
  std::vector<Item> items;
  for (Size i = 0; i < count; i++) {
    const Size units = groups ? waves[i].n_groups : waves[i].tiles, H = waves[i].features;
    const Size at_once = std::max<Size>(1, (units + parts - 1) / parts);
    // Few tiles are divided by features.
    const Size some = units >= parts ? H : round_up(std::max<Size>(1, H * units / parts), kLanes<S>);
    for (Size low = 0; low < units; low += at_once)
      for (Size first = 0; first < H; first += some)
        items.push_back({i, low, std::min(units, low + at_once), first, std::min(H, first + some)});
  }
#pragma omp parallel num_threads(threads)
  {
    auto f = make();
#pragma omp for schedule(dynamic)
    for (Size i = 0; i < Size(items.size()); i++)
      f(waves[items[i].wave], items[i].low, items[i].high, items[i].first, items[i].end);
  }
}

template <class S>
void all_forward(const Wave<S>* waves, Size count, int threads) {
  for (Size i = 0; i < count; i++)
    prefer_large_pages(waves[i].out, waves[i].tiles * waves[i].rows * waves[i].features * 2 * sizeof(S));
  by_items(waves, count, threads, false, [] {
    return [in = Inputs<S>()](const Wave<S>& w, Size low, Size high, Size first, Size end) mutable {
      for (Size tile = low; tile < high; tile++) forward(w, in, tile, first, end);
    };
  });
}

template <class S>
void all_backward(const Wave<S>* waves, Size count, int threads) {
  by_items(waves, count, threads, true, [] {
    return [in = Inputs<S>(), d = Sums<S>()](const Wave<S>& w, Size low, Size high, Size first, Size end) mutable {
      backward_groups(w, in, d, low, high, first, end);
    };
  });
}

}  // namespace

#define GBFUNC_EXPORT(S, NAME)                                                                                     \
  extern "C" void waves_forward_##NAME(const Wave<S>* w, Size count, int n) { all_forward<S>(w, count, n); }       \
  extern "C" void waves_backward_##NAME(const Wave<S>* w, Size count, int n) { all_backward<S>(w, count, n); }

GBFUNC_EXPORT(float, f32)
GBFUNC_EXPORT(double, f64)
