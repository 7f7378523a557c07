// The ReLU tile on a CPU: W[i, j] = b + sum_h v[h] relu(A[i, h] + B[j, h]), written straight into the matrix that the
// tiles make, and its gradients, read straight from that of the matrix.
//
// A work item is one tile, or some rows of one where there are few tiles; threads take them as they become free. What
// items of one tile share (the gradients of B, v and b) is summed by the caller.
//
// All arrays are contiguous. Suffixes: T tiles, row-major; r, c rows and columns of a tile; H hidden units; P parts of a
// tile. Each function is there for float (f32) and double (f64).

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

using Size = std::int64_t;

#if defined(__AVX2__)
constexpr Size kBytes = 32;
#else
constexpr Size kBytes = 16;
#endif

template <class S>
struct Vectors {
  typedef S Aligned __attribute__((vector_size(kBytes)));
  typedef S Loose __attribute__((vector_size(kBytes), aligned(sizeof(S)), may_alias));
};
template <class S>
using Vec = typename Vectors<S>::Aligned;
template <class S>
constexpr Size kLanes = kBytes / sizeof(S);

template <class S>
Vec<S> load(const S* from) {
  return *reinterpret_cast<const typename Vectors<S>::Loose*>(from);
}

template <class S>
void store(S* to, Vec<S> x) {
  *reinterpret_cast<typename Vectors<S>::Loose*>(to) = x;
}

// The first `count` numbers of a vector, or all; the others are zero.
template <class S>
Vec<S> load_some(const S* from, Size count) {
  if (count >= kLanes<S>) return load(from);
  Vec<S> x = {};
  for (Size l = 0; l < count; l++) x[l] = from[l];
  return x;
}

template <class S>
void store_some(S* to, Vec<S> x, Size count) {
  if (count >= kLanes<S>) return store(to, x);
  for (Size l = 0; l < count; l++) to[l] = x[l];
}

template <class S>
Vec<S> spread(S x) {
  return x - Vec<S>{};  // not `x +`: only the difference to 0 is x for each x, so that it costs nothing
}

// NaN stays NaN, as in torch.
template <class V>
V relu(V x) {
  const V zero = {};
  return zero > x ? zero : x;
}
#if defined(__AVX2__)
template <>
inline Vec<float> relu(Vec<float> x) {
  return _mm256_max_ps(Vec<float>{}, x);
}
template <>
inline Vec<double> relu(Vec<double> x) {
  return _mm256_max_pd(Vec<double>{}, x);
}
#endif

template <class S>
Vec<S> where(decltype(Vec<S>{} > Vec<S>{}) mask, Vec<S> x) {
  return reinterpret_cast<Vec<S>>(reinterpret_cast<decltype(mask)>(x) & mask);
}

Size round_up(Size n, Size step) { return (n + step - 1) / step * step; }

struct Grid {
  Size rows, cols, tile_rows, tile_cols, hidden, parts;
  Size tiles_across() const { return (cols + tile_cols - 1) / tile_cols; }
  Size tiles() const { return (rows + tile_rows - 1) / tile_rows * tiles_across(); }
};

// Rows [first, end) of a tile that lie in the matrix, its columns that do, and its corner's index there.
struct Item {
  Size tile, part, first, end, cols, corner;
};

Item item_of(const Grid& g, Size index) {
  const Size tile = index / g.parts, part = index % g.parts;
  const Size top = tile / g.tiles_across() * g.tile_rows, left = tile % g.tiles_across() * g.tile_cols;
  const Size rows = std::min(g.tile_rows, g.rows - top), step = (g.tile_rows + g.parts - 1) / g.parts;
  return {tile,
          part,
          std::min(rows, part * step),
          std::min(rows, (part + 1) * step),
          std::min(g.tile_cols, g.cols - left),
          top * g.cols + left};
}

template <int N>
using Constant = std::integral_constant<int, N>;

constexpr Size kColumns = 256;  // at once, so that what is read for each row stays in the first-level cache
constexpr int kRows = 4;        // at once, so that their sums stay in registers and share each load

// Sums of R rows and K vectors of columns: a [R, H], Bt [H, width] -> out [R, width].
template <class S, int R, int K>
void weights(const S* a, const S* Bt, const S* v, S b, S* out, Size hidden, Size width) {
  Vec<S> sums[R][K];
  for (auto& row : sums)
    for (auto& sum : row) sum = spread(b);
  for (Size h = 0; h < hidden; h++) {
    Vec<S> column[K];
    for (int k = 0; k < K; k++) column[k] = load(Bt + h * width + k * kLanes<S>);
    const Vec<S> scale = spread(v[h]);
    for (int r = 0; r < R; r++) {
      const Vec<S> row = spread(a[r * hidden + h]);
      for (int k = 0; k < K; k++) sums[r][k] += relu<Vec<S>>(row + column[k]) * scale;
    }
  }
  for (int r = 0; r < R; r++)
    for (int k = 0; k < K; k++) store(out + r * width + k * kLanes<S>, sums[r][k]);
}

// A [T, r, H], B [T, c, H], v [T, H], b [T] -> W [rows, cols].
template <class S>
void forward(const S* A, const S* B, const S* v, const S* b, S* W, Grid g, int threads) {
  const Size H = g.hidden, lanes = kLanes<S>, width = round_up(std::min(g.tile_cols, kColumns), lanes);
#pragma omp parallel num_threads(threads)
  {
    std::vector<S> Bt(H * width), out(kRows * width);
#pragma omp for schedule(dynamic)
    for (Size index = 0; index < g.tiles() * g.parts; index++) {
      const Item it = item_of(g, index);
      const S* vt = v + it.tile * H;
      for (Size left = 0; left < it.cols; left += kColumns) {
        const Size cols = std::min(kColumns, it.cols - left), padded = round_up(cols, lanes);
        for (Size h = 0; h < H; h++)
          for (Size j = 0; j < cols; j++) Bt[h * width + j] = B[(it.tile * g.tile_cols + left + j) * H + h];
        Size i = it.first;
        const auto rows_at_once = [&](auto count) {
          constexpr int R = decltype(count)::value;
          for (; i + R <= it.end; i += R) {
            const S* a = A + (it.tile * g.tile_rows + i) * H;
            Size j = 0;
            for (; j + 2 * lanes <= padded; j += 2 * lanes)
              weights<S, R, 2>(a, &Bt[j], vt, b[it.tile], &out[j], H, width);
            if (j < padded) weights<S, R, 1>(a, &Bt[j], vt, b[it.tile], &out[j], H, width);
            for (int r = 0; r < R; r++)
              std::copy_n(&out[r * width], cols, W + it.corner + (i + r) * g.cols + left);
          }
        };
        rows_at_once(Constant<kRows>{});
        rows_at_once(Constant<1>{});
      }
    }
  }
}

// Adds g where a > -b to the sums of R rows and of all columns, for the hidden units of one vector.
template <class S, int R>
void active_sums(const S* a, const S* minus_b, const S* g, Size stride, S* row_sums, S* col_sums, Size cols) {
  Vec<S> rows[R], sums[R];
  for (int r = 0; r < R; r++) {
    rows[r] = load(a + r * kLanes<S>);
    sums[r] = Vec<S>{};
  }
  for (Size j = 0; j < cols; j++) {
    const Vec<S> threshold = load(minus_b + j * kLanes<S>);
    Vec<S> active[R];
    for (int r = 0; r < R; r++) {
      active[r] = where<S>(rows[r] > threshold, spread(g[r * stride + j]));
      sums[r] += active[r];
    }
    Vec<S> sum = load(col_sums + j * kLanes<S>);
    if constexpr (R == 4)
      sum += (active[0] + active[1]) + (active[2] + active[3]);
    else
      for (const auto& x : active) sum += x;
    store(col_sums + j * kLanes<S>, sum);
  }
  // Block by block, so that the rounding errors of long rows do not pile up.
  for (int r = 0; r < R; r++) store(row_sums + r * kLanes<S>, load(row_sums + r * kLanes<S>) + sums[r]);
}

// [rows, H] to [H / lanes, rows, lanes], padded by zeros.
template <class S>
void by_vectors(const S* from, S sign, S* to, Size rows, Size hidden) {
  for (Size h = 0; h < hidden; h += kLanes<S>)
    for (Size i = 0; i < rows; i++, to += kLanes<S>) store(to, load_some(from + i * hidden + h, hidden - h) * sign);
}

// Gradient of A (or B) from its sums [H / lanes, rows, lanes], and its part of that of v: `sums v` and `sum_i A sums`.
template <class S>
void finish(const S* sums, const S* A, const S* v, S* dA, S* dv, Size rows, Size hidden) {
  for (Size h = 0; h < hidden; h += kLanes<S>) {
    const Vec<S> scale = load_some(v + h, hidden - h);
    Vec<S> total = load_some(dv + h, hidden - h);
    for (Size i = 0; i < rows; i++, sums += kLanes<S>) {
      total += load(sums) * load_some(A + i * hidden + h, hidden - h);
      store_some(dA + i * hidden + h, load(sums) * scale, hidden - h);
    }
    store_some(dv + h, total, hidden - h);
  }
}

// Gradient of W [rows, cols] -> those of A [T, r, H], B [P, T, c, H], v [P, T, H], b [P, T]; all start at zero.
template <class S>
void backward(const S* dW, const S* A, const S* B, const S* v, S* dA, S* dB, S* dv, S* db, Grid g, int threads) {
  const Size H = g.hidden, vectors = (H + kLanes<S> - 1) / kLanes<S>, padded = vectors * kLanes<S>;
  const Size tile_columns = std::min(g.tile_cols, kColumns);
#pragma omp parallel num_threads(threads)
  {
    std::vector<S> a(g.tile_rows * padded), SA(a.size()), minus_b(tile_columns * padded), SB(minus_b.size());
#pragma omp for schedule(dynamic)
    for (Size index = 0; index < g.tiles() * g.parts; index++) {
      const Item it = item_of(g, index);
      const Size rows = it.end - it.first, offset = it.part * g.tiles() + it.tile;
      const S *At = A + (it.tile * g.tile_rows + it.first) * H, *vt = v + it.tile * H;
      S* dvt = dv + offset * H;
      by_vectors(At, S(1), a.data(), rows, H);
      std::fill(SA.begin(), SA.end(), S(0));
      for (Size left = 0; left < it.cols; left += kColumns) {
        const Size cols = std::min(kColumns, it.cols - left);
        const S* gt = dW + it.corner + it.first * g.cols + left;
        const S* Bt = B + (it.tile * g.tile_cols + left) * H;
        by_vectors(Bt, S(-1), minus_b.data(), cols, H);
        std::fill(SB.begin(), SB.end(), S(0));
        for (Size k = 0; k < vectors; k++) {
          Size i = 0;
          const auto rows_at_once = [&](auto count) {
            constexpr int R = decltype(count)::value;
            for (; i + R <= rows; i += R)
              active_sums<S, R>(&a[(k * rows + i) * kLanes<S>], &minus_b[k * cols * kLanes<S>], gt + i * g.cols, g.cols,
                                &SA[(k * rows + i) * kLanes<S>], &SB[k * cols * kLanes<S>], cols);
          };
          rows_at_once(Constant<kRows>{});
          rows_at_once(Constant<1>{});
        }
        finish(SB.data(), Bt, vt, dB + (offset * g.tile_cols + left) * H, dvt, cols, H);
        for (Size i = 0; i < rows; i++) {
          Vec<S> sum = {};
          Size j = 0;
          for (; j + kLanes<S> <= cols; j += kLanes<S>) sum += load(gt + i * g.cols + j);
          S total = 0;
          for (; j < cols; j++) total += gt[i * g.cols + j];
          for (Size l = 0; l < kLanes<S>; l++) total += sum[l];
          db[offset] += total;
        }
      }
      finish(SA.data(), At, vt, dA + (it.tile * g.tile_rows + it.first) * H, dvt, rows, H);
    }
  }
}

}  // namespace

#define GBFUNC_EXPORT(S, NAME)                                                                                    \
  extern "C" void relu_forward_##NAME(const S* A, const S* B, const S* v, const S* b, S* W, const Size* g, int threads) { \
    forward<S>(A, B, v, b, W, Grid{g[0], g[1], g[2], g[3], g[4], g[5]}, threads);                                 \
  }                                                                                                               \
  extern "C" void relu_backward_##NAME(const S* dW, const S* A, const S* B, const S* v, S* dA, S* dB, S* dv, S* db, \
                                       const Size* g, int threads) {                                              \
    backward<S>(dW, A, B, v, dA, dB, dv, db, Grid{g[0], g[1], g[2], g[3], g[4], g[5]}, threads);                  \
  }

GBFUNC_EXPORT(float, f32)
GBFUNC_EXPORT(double, f64)
