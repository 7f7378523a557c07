// The ReLU tile on a CPU: W[i, j] = b + sum_h v[h] relu(A[i, h] + B[j, h]), written straight into the matrix that the
// tiles make, and its gradients, read straight from that of the matrix.
//
// Threads take work items as they become free: a tile each, or some rows of one where there are few tiles. What items
// of one tile share (the gradients of B, v and b) is summed by the caller.
//
// All arrays are contiguous. Suffixes: T tiles, row-major; r, c rows and columns of a tile; H hidden units; P parts of
// a tile. Each function is there for float (f32) and double (f64).

#include "vectors.h"

namespace {

// NaN stays NaN, as in torch.
template <class S>
Vec<S> relu(Vec<S> x) {
#if defined(__AVX512F__)
  if constexpr (sizeof(S) == 4)
    return _mm512_max_ps(Vec<S>{}, x);
  else
    return _mm512_max_pd(Vec<S>{}, x);
#elif defined(__AVX2__)
  if constexpr (sizeof(S) == 4)
    return _mm256_max_ps(Vec<S>{}, x);
  else
    return _mm256_max_pd(Vec<S>{}, x);
#else
  return x < Vec<S>{} ? Vec<S>{} : x;
#endif
}

// Adds a value to a sum where x > y, and returns it there, and zero elsewhere.
template <class S>
Vec<S> add_where_greater(Vec<S>& sum, Vec<S> x, Vec<S> y, Vec<S> value) {
#if defined(__AVX512F__)
  // By a mask that is used twice: a compiler may load a value that is used once under it, which takes twice the time.
  if constexpr (sizeof(S) == 4) {
    const __mmask16 active = _mm512_cmp_ps_mask(x, y, _CMP_GT_OQ);
    sum = _mm512_mask_add_ps(sum, active, sum, value);
    return _mm512_maskz_mov_ps(active, value);
  } else {
    const __mmask8 active = _mm512_cmp_pd_mask(x, y, _CMP_GT_OQ);
    sum = _mm512_mask_add_pd(sum, active, sum, value);
    return _mm512_maskz_mov_pd(active, value);
  }
#else
  const Vec<S> active = x > y ? value : Vec<S>{};
  sum += active;
  return active;
#endif
}

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
  const Size first = std::min(rows, part * step), end = std::min(rows, (part + 1) * step);
  return {tile, part, first, end, std::min(g.tile_cols, g.cols - left), top * g.cols + left};
}

constexpr Size kColumns = 256;  // at once, so that what is read for each row stays in the first-level cache

// What comes before the ReLU: A [T, r, H] and B [T, c, H], or what they are made of where those are null: codes
// X [1 or T, r, p] and Y [1 or T, c, q], their weights U [T, p, H] and V [T, q, H], the bias u [T, H]: A = X U + u, B = Y V.
template <class S>
struct Sides {
  const S *A, *B, *X, *Y, *U, *V, *u;
  Size p, q, X_step, Y_step;  // widths of codes; from the codes of a tile to those of the next
};

// codes [n, width] times weights [width, H] and a bias (or null) -> out [n, H]
template <class S>
void project(const S* codes, const S* weights, const S* bias, S* out, Size n, Size width, Size H) {
  for (Size h = 0; h < H; h += kLanes<S>) {
    const Size some = H - h;
    by_rows(0, n, [&](Size i, auto count) {
      constexpr int R = decltype(count)::value;
      Vec<S> sums[R];
      for (auto& sum : sums) sum = bias ? load(bias + h, some) : Vec<S>{};
      for (Size k = 0; k < width; k++) {
        const Vec<S> weight = load(weights + k * H + h, some);
        for (int r = 0; r < R; r++) sums[r] += spread(codes[(i + r) * width + k]) * weight;
      }
      for (int r = 0; r < R; r++) store(out + (i + r) * H + h, sums[r], some);
    });
  }
}

// Adds the gradient of weights [width, H] (and of a bias) from that of `codes weights` [n, H].
template <class S>
void project_back(const S* codes, const S* d, S* d_weights, S* d_bias, Size n, Size width, Size H) {
  for (Size h = 0; h < H; h += kLanes<S>) {
    const Size some = H - h;
    by_rows(0, width, [&](Size k, auto count) {
      constexpr int R = decltype(count)::value;
      Vec<S> sums[R];
      for (int r = 0; r < R; r++) sums[r] = load(d_weights + (k + r) * H + h, some);
      for (Size i = 0; i < n; i++) {
        const Vec<S> row = load(d + i * H + h, some);
        for (int r = 0; r < R; r++) sums[r] += spread(codes[i * width + k + r]) * row;
      }
      for (int r = 0; r < R; r++) store(d_weights + (k + r) * H + h, sums[r], some);
    });
    if (d_bias) {
      Vec<S> sum = load(d_bias + h, some);
      for (Size i = 0; i < n; i++) sum += load(d + i * H + h, some);
      store(d_bias + h, sum, some);
    }
  }
}

// Rows [first, first + n) of A in a tile, or of B: those in memory, or made in `buffer`.
template <class S>
const S* rows_of_A(const Sides<S>& s, const Grid& g, Size tile, Size first, Size n, S* buffer) {
  if (s.A) return s.A + (tile * g.tile_rows + first) * g.hidden;
  project(s.X + tile * s.X_step + first * s.p, s.U + tile * s.p * g.hidden, s.u + tile * g.hidden, buffer, n, s.p, g.hidden);
  return buffer;
}

template <class S>
const S* rows_of_B(const Sides<S>& s, const Grid& g, Size tile, Size first, Size n, S* buffer) {
  if (s.B) return s.B + (tile * g.tile_cols + first) * g.hidden;
  project(s.Y + tile * s.Y_step + first * s.q, s.V + tile * s.q * g.hidden, (const S*)nullptr, buffer, n, s.q, g.hidden);
  return buffer;
}

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
      for (int k = 0; k < K; k++) sums[r][k] += relu<S>(row + column[k]) * scale;
    }
  }
  for (int r = 0; r < R; r++)
    for (int k = 0; k < K; k++) store(out + r * width + k * kLanes<S>, sums[r][k]);
}

// Sides, v [T, H], b [T] -> W [rows, cols].
template <class S>
void forward(Sides<S> s, const S* v, const S* b, S* W, Grid g, int threads) {
  const Size H = g.hidden, lanes = kLanes<S>, width = round_up(std::min(g.tile_cols, kColumns), lanes);
  prefer_large_pages(W, g.rows * g.cols * sizeof(S));
#pragma omp parallel num_threads(threads)
  {
    std::vector<S> Bt(H * width), out(kRows * width), A_made(s.A ? 0 : g.tile_rows * H), B_made(s.B ? 0 : width * H);
#pragma omp for schedule(dynamic)
    for (Size index = 0; index < g.tiles() * g.parts; index++) {
      const Item it = item_of(g, index);
      const S* vt = v + it.tile * H;
      const S* At = rows_of_A(s, g, it.tile, it.first, it.end - it.first, A_made.data());
      for (Size left = 0; left < it.cols; left += kColumns) {
        const Size cols = std::min(kColumns, it.cols - left), padded = round_up(cols, lanes);
        const S* rows = rows_of_B(s, g, it.tile, left, cols, B_made.data());
        for (Size h = 0; h < H; h++)
          for (Size j = 0; j < cols; j++) Bt[h * width + j] = rows[j * H + h];
        by_rows(it.first, it.end, [&](Size i, auto count) {
          constexpr int R = decltype(count)::value;
          const S* a = At + (i - it.first) * H;
          Size j = 0;
          for (; j + 2 * lanes <= padded; j += 2 * lanes)
            weights<S, R, 2>(a, &Bt[j], vt, b[it.tile], &out[j], H, width);
          if (j < padded) weights<S, R, 1>(a, &Bt[j], vt, b[it.tile], &out[j], H, width);
          for (int r = 0; r < R; r++) std::copy_n(&out[r * width], cols, W + it.corner + (i + r) * g.cols + left);
        });
      }
    }
  }
}

// Adds g where a > -b to the sums of R rows and of all columns, for the hidden units of one vector.
template <class S, int R>
void active_sums(const S* a, const S* minus_b, const S* g, Size stride, S* row_sums, S* col_sums, Size cols) {
  Vec<S> rows[R], sums[R] = {};
  for (int r = 0; r < R; r++) rows[r] = load(a + r * kLanes<S>);
  for (Size j = 0; j < cols; j++) {
    const Vec<S> threshold = load(minus_b + j * kLanes<S>);
    Vec<S> active[R];
    for (int r = 0; r < R; r++)
      active[r] = add_where_greater<S>(sums[r], rows[r], threshold, spread(g[r * stride + j]));
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
    for (Size i = 0; i < rows; i++, to += kLanes<S>) store(to, load(from + i * hidden + h, hidden - h) * sign);
}

// Gradient of A (or B) from its sums [H / lanes, rows, lanes], and its part of that of v: `sums v` and `sum_i A sums`.
template <class S>
void finish(const S* sums, const S* A, const S* v, S* dA, S* dv, Size rows, Size hidden) {
  for (Size h = 0; h < hidden; h += kLanes<S>) {
    const Vec<S> scale = load(v + h, hidden - h);
    Vec<S> total = load(dv + h, hidden - h);
    for (Size i = 0; i < rows; i++, sums += kLanes<S>) {
      total += load(sums) * load(A + i * hidden + h, hidden - h);
      store(dA + i * hidden + h, load(sums) * scale, hidden - h);
    }
    store(dv + h, total, hidden - h);
  }
}

// Gradients of what is there of `Sides`, but for codes: A [T, r, H], of which each item has rows, and [P, T, ...].
template <class S>
struct Gradients {
  S *A, *B, *X, *Y, *U, *V, *u, *v, *b;
};

// Gradient of W [rows, cols] -> those of the sides, of v and of b; all start at zero.
template <class S>
void backward(const S* dW, Sides<S> s, const S* v, Gradients<S> d, Grid g, int threads) {
  const Size H = g.hidden, lanes = kLanes<S>, padded = round_up(H, lanes), vectors = padded / lanes;
  const Size tile_columns = std::min(g.tile_cols, kColumns);
#pragma omp parallel num_threads(threads)
  {
    std::vector<S> a(g.tile_rows * padded), SA(a.size()), minus_b(tile_columns * padded), SB(minus_b.size());
    std::vector<S> A_made(s.A ? 0 : g.tile_rows * H), dA_made(A_made), B_made(s.B ? 0 : tile_columns * H), dB_made(B_made);
#pragma omp for schedule(dynamic)
    for (Size index = 0; index < g.tiles() * g.parts; index++) {
      const Item it = item_of(g, index);
      const Size rows = it.end - it.first, offset = it.part * g.tiles() + it.tile;
      const S *At = rows_of_A(s, g, it.tile, it.first, rows, A_made.data()), *vt = v + it.tile * H;
      S* dvt = d.v + offset * H;
      by_vectors(At, S(1), a.data(), rows, H);
      std::fill(SA.begin(), SA.end(), S(0));
      for (Size left = 0; left < it.cols; left += kColumns) {
        const Size cols = std::min(kColumns, it.cols - left);
        const S* gt = dW + it.corner + it.first * g.cols + left;
        const S* Bt = rows_of_B(s, g, it.tile, left, cols, B_made.data());
        by_vectors(Bt, S(-1), minus_b.data(), cols, H);
        std::fill(SB.begin(), SB.end(), S(0));
        for (Size k = 0; k < vectors; k++) {
          S *ak = &a[k * rows * lanes], *bk = &minus_b[k * cols * lanes];
          S *SAk = &SA[k * rows * lanes], *SBk = &SB[k * cols * lanes];
          by_rows(0, rows, [&](Size i, auto count) {
            active_sums<S, decltype(count)::value>(ak + i * lanes, bk, gt + i * g.cols, g.cols, SAk + i * lanes, SBk,
                                                   cols);
          });
        }
        S* dBt = s.B ? d.B + (offset * g.tile_cols + left) * H : dB_made.data();
        finish(SB.data(), Bt, vt, dBt, dvt, cols, H);
        if (!s.B) project_back(s.Y + it.tile * s.Y_step + left * s.q, dBt, d.V + offset * s.q * H, (S*)nullptr, cols, s.q, H);
        for (Size i = 0; i < rows; i++) {
          Vec<S> sum = {};
          Size j = 0;
          for (; j + lanes <= cols; j += lanes) sum += load(gt + i * g.cols + j);
          S total = 0;
          for (; j < cols; j++) total += gt[i * g.cols + j];
          for (Size l = 0; l < lanes; l++) total += sum[l];
          d.b[offset] += total;
        }
      }
      S* dAt = s.A ? d.A + (it.tile * g.tile_rows + it.first) * H : dA_made.data();
      finish(SA.data(), At, vt, dAt, dvt, rows, H);
      if (!s.A)
        project_back(s.X + it.tile * s.X_step + it.first * s.p, dAt, d.U + offset * s.p * H, d.u + offset * H, rows, s.p, H);
    }
  }
}

}  // namespace

#define GBFUNC_EXPORT(S, NAME)                                                                                         \
  extern "C" void relu_forward_##NAME(const Sides<S>* s, const S* v, const S* b, S* W, const Grid* g, int n) {         \
    forward<S>(*s, v, b, W, *g, n);                                                                                    \
  }                                                                                                                    \
  extern "C" void relu_backward_##NAME(const S* dW, const Sides<S>* s, const S* v, const Gradients<S>* d, const Grid* g, \
                                       int n) {                                                                        \
    backward<S>(dW, *s, v, *d, *g, n);                                                                                 \
  }

GBFUNC_EXPORT(float, f32)
GBFUNC_EXPORT(double, f64)
