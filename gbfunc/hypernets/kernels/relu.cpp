// Tiles of ReLU g-nets on a CPU, W[i, j] = b + sum_h v[h] relu(A[i, h] + B[j, h]), and their gradients. The tiles are
// written into the matrix that consists of the tiles. Backward reads the gradient of this matrix.
//
// A work item is a tile or, if there are few tiles, a block of rows of a tile. A thread takes the next item when it is
// free. Every block has its own sums of the gradients of U, V, u, v and b. The caller adds the sums of a tile.
//
// All arrays are contiguous. Suffixes: T tiles, row-major; r, c rows and columns of a tile; H hidden units; P blocks of
// rows of a tile. Each function exists for float (f32) and double (f64).

#include "vectors.h"

namespace {

// NaN stays NaN, as in torch.
template <class S>
Vec<S> relu(Vec<S> x) {
#if defined(__AVX512F__)
  if constexpr (sizeof(S) == 4) return _mm512_max_ps(Vec<S>{}, x);
#endif
  return x < Vec<S>{} ? Vec<S>{} : x;
}

// Adds `value` to `sum` where x > y. Returns `value` where x > y, and zero elsewhere.
template <class S>
Vec<S> add_where_greater(Vec<S>& sum, Vec<S> x, Vec<S> y, Vec<S> value) {
#if defined(__AVX512F__)
  // Use the mask for both results. Otherwise a compiler may load `value` under the mask, which takes twice the time.
  if constexpr (sizeof(S) == 4) {
    const __mmask16 active = _mm512_cmp_ps_mask(x, y, _CMP_GT_OQ);
    sum = _mm512_mask_add_ps(sum, active, sum, value);
    return _mm512_maskz_mov_ps(active, value);
  }
#endif
  const Vec<S> active = x > y ? value : Vec<S>{};
  sum += active;
  return active;
}

struct Grid {
  Size rows, cols, tile_rows, tile_cols, hidden, row_blocks;
  Size tiles_across() const { return (cols + tile_cols - 1) / tile_cols; }
  Size tiles() const { return (rows + tile_rows - 1) / tile_rows * tiles_across(); }
};

// A block of a tile inside of the matrix: rows [first, end) and `cols` columns. The tile starts at index `corner`.
struct Item {
  Size tile, block, first, end, cols, corner;
};

Item item_of(const Grid& g, Size index) {
  const Size tile = index / g.row_blocks, block = index % g.row_blocks;
  const Size top = tile / g.tiles_across() * g.tile_rows, left = tile % g.tiles_across() * g.tile_cols;
  const Size rows = std::min(g.tile_rows, g.rows - top), step = (g.tile_rows + g.row_blocks - 1) / g.row_blocks;
  const Size first = std::min(rows, block * step), end = std::min(rows, (block + 1) * step);
  return {tile, block, first, end, std::min(g.tile_cols, g.cols - left), top * g.cols + left};
}

constexpr Size kColumns = 256;  // number of columns computed at once: their numbers stay in the first-level cache

// The inputs of the ReLU, A = X U + u and B = Y V, are computed tile by tile from codes X [1 or T, r, p] and
// Y [1 or T, c, q], code weights U [T, p, H] and V [T, q, H], and the bias u [T, H].
template <class S>
struct Sides {
  const S *X, *Y, *U, *V, *u;
  Size p, q, X_step, Y_step;  // widths of codes; distances between the codes of two tiles
  const S* X_of(const Item& it) const { return X + it.tile * X_step + it.first * p; }
  const S* Y_of(const Item& it, Size left) const { return Y + it.tile * Y_step + left * q; }
};

// Computes sign * (codes [n, width] @ weights [width, H] + bias). `bias` may be null. Vector k of row i, padded with
// zeros, is written to out + i row_step + k step.
template <class S>
void project(const S* codes, const S* weights, const S* bias, S sign, S* out, Size n, Size width, Size H,
             Size row_step, Size step) {
  for (Size h = 0; h < H; h += kLanes<S>, out += step) {
    by_rows(0, n, [&](Size i, auto count) {
      constexpr int R = decltype(count)::value;
      Vec<S> sums[R];
      for (auto& sum : sums) sum = bias ? load(bias + h, H - h) : Vec<S>{};
      for (Size k = 0; k < width; k++) {
        const Vec<S> weight = load(weights + k * H + h, H - h);
        for (int r = 0; r < R; r++) sums[r] += filled(codes[(i + r) * width + k]) * weight;
      }
      for (int r = 0; r < R; r++) store(out + (i + r) * row_step, sums[r] * sign);
    });
  }
}

// From the gradient d [H / lanes, n, lanes] of a product, adds to the gradients of weights [width, H] and bias.
template <class S>
void project_back(const S* codes, const S* d, S* d_weights, S* d_bias, Size n, Size width, Size H) {
  for (Size h = 0; h < H; h += kLanes<S>, d += n * kLanes<S>) {
    by_rows(0, width, [&](Size k, auto count) {
      constexpr int R = decltype(count)::value;
      Vec<S> sums[R];
      for (int r = 0; r < R; r++) sums[r] = load(d_weights + (k + r) * H + h, H - h);
      for (Size i = 0; i < n; i++) {
        const Vec<S> row = load(d + i * kLanes<S>);
        for (int r = 0; r < R; r++) sums[r] += filled(codes[i * width + k + r]) * row;
      }
      for (int r = 0; r < R; r++) store(d_weights + (k + r) * H + h, sums[r], H - h);
    });
    if (!d_bias) continue;
    Vec<S> sum = load(d_bias + h, H - h);
    for (Size i = 0; i < n; i++) sum += load(d + i * kLanes<S>);
    store(d_bias + h, sum, H - h);
  }
}

// Computes the weights of R rows and K vectors of columns: a [R, step], Bt [H, width] -> out [R, width].
template <class S, int R, int K>
void weights(const S* a, Size step, const S* Bt, const S* v, S b, S* out, Size hidden, Size width) {
  Vec<S> sums[R][K];
  for (auto& row : sums)
    for (auto& sum : row) sum = filled(b);
  for (Size h = 0; h < hidden; h++) {
    Vec<S> column[K];
    for (int k = 0; k < K; k++) column[k] = load(Bt + h * width + k * kLanes<S>);
    const Vec<S> scale = filled(v[h]);
    for (int r = 0; r < R; r++) {
      const Vec<S> row = filled(a[r * step + h]);
      for (int k = 0; k < K; k++) sums[r][k] += relu<S>(row + column[k]) * scale;
    }
  }
  for (int r = 0; r < R; r++)
    for (int k = 0; k < K; k++) store(out + r * width + k * kLanes<S>, sums[r][k]);
}

// Computes the matrix: codes and leaves, v [T, H], b [T] -> W [rows, cols].
template <class S>
void forward(Sides<S> s, const S* v, const S* b, S* W, Grid g, int threads) {
  const Size H = g.hidden, lanes = kLanes<S>, step = round_up(H, lanes);
  const Size width = round_up(std::min(g.tile_cols, kColumns), lanes);
  prefer_large_pages(W, g.rows * g.cols * sizeof(S));
#pragma omp parallel num_threads(threads)
  {
    std::vector<S> A(g.tile_rows * step), B(width * step), Bt(H * width), out(kRows * width);
#pragma omp for schedule(dynamic)
    for (Size index = 0; index < g.tiles() * g.row_blocks; index++) {
      const Item it = item_of(g, index);
      const S* vt = v + it.tile * H;
      project(s.X_of(it), s.U + it.tile * s.p * H, s.u + it.tile * H, S(1), A.data(), it.end - it.first, s.p, H, step, lanes);
      for (Size left = 0; left < it.cols; left += kColumns) {
        const Size cols = std::min(kColumns, it.cols - left), padded = round_up(cols, lanes);
        project(s.Y_of(it, left), s.V + it.tile * s.q * H, (S*)nullptr, S(1), B.data(), cols, s.q, H, step, lanes);
        for (Size h = 0; h < H; h++)
          for (Size j = 0; j < cols; j++) Bt[h * width + j] = B[j * step + h];
        by_rows(it.first, it.end, [&](Size i, auto count) {
          constexpr int R = decltype(count)::value;
          const S* a = &A[(i - it.first) * step];
          Size j = 0;
          for (; j + 2 * lanes <= padded; j += 2 * lanes)
            weights<S, R, 2>(a, step, &Bt[j], vt, b[it.tile], &out[j], H, width);
          if (j < padded) weights<S, R, 1>(a, step, &Bt[j], vt, b[it.tile], &out[j], H, width);
          for (int r = 0; r < R; r++) std::copy_n(&out[r * width], cols, W + it.corner + (i + r) * g.cols + left);
        });
      }
    }
  }
}

// For one vector of hidden units, adds g where a > -b to the sums of R rows and to the sums of all columns.
template <class S, int R>
void active_sums(const S* a, const S* minus_b, const S* g, Size stride, S* row_sums, S* col_sums, Size cols) {
  Vec<S> rows[R], sums[R] = {};
  for (int r = 0; r < R; r++) rows[r] = load(a + r * kLanes<S>);
  for (Size j = 0; j < cols; j++) {
    const Vec<S> threshold = load(minus_b + j * kLanes<S>);
    Vec<S> active[R];
    for (int r = 0; r < R; r++)
      active[r] = add_where_greater<S>(sums[r], rows[r], threshold, filled(g[r * stride + j]));
    Vec<S> sum = load(col_sums + j * kLanes<S>);
    if constexpr (R == 4)
      sum += (active[0] + active[1]) + (active[2] + active[3]);
    else
      for (const auto& x : active) sum += x;
    store(col_sums + j * kLanes<S>, sum);
  }
  // Add the sum of each block of columns, so that rounding errors of long rows do not accumulate.
  for (int r = 0; r < R; r++) store(row_sums + r * kLanes<S>, load(row_sums + r * kLanes<S>) + sums[r]);
}

// Replaces sums [H / lanes, rows, lanes] by the gradient `sums v` of A (or -B), and adds `sign sum_i A sums` to dv.
template <class S>
void finish(S* sums, const S* A, S sign, const S* v, S* dv, Size rows, Size hidden) {
  for (Size h = 0; h < hidden; h += kLanes<S>) {
    const Vec<S> scale = load(v + h, hidden - h);
    Vec<S> products = {};
    for (Size i = 0; i < rows; i++, sums += kLanes<S>, A += kLanes<S>) {
      products += load(sums) * load(A);
      store(sums, load(sums) * scale);
    }
    store(dv + h, load(dv + h, hidden - h) + products * sign, hidden - h);
  }
}

template <class S>
struct Gradients {
  S *U, *V, *u, *v, *b;  // [P, T, ...]: every block of rows has its own sums
};

// Adds the gradients of the leaves, which start at zero, from the gradient dW [rows, cols].
template <class S>
void backward(const S* dW, Sides<S> s, const S* v, Gradients<S> d, Grid g, int threads) {
  const Size H = g.hidden, lanes = kLanes<S>, padded = round_up(H, lanes), vectors = padded / lanes;
#pragma omp parallel num_threads(threads)
  {
    // Four arrays [H / lanes, rows or columns, lanes].
    std::vector<S> a(g.tile_rows * padded), SA(a.size()), minus_b(std::min(g.tile_cols, kColumns) * padded), SB(minus_b.size());
#pragma omp for schedule(dynamic)
    for (Size index = 0; index < g.tiles() * g.row_blocks; index++) {
      const Item it = item_of(g, index);
      const Size rows = it.end - it.first, offset = it.block * g.tiles() + it.tile;
      const S *vt = v + it.tile * H, *gt = dW + it.corner + it.first * g.cols;
      S* dvt = d.v + offset * H;
      project(s.X_of(it), s.U + it.tile * s.p * H, s.u + it.tile * H, S(1), a.data(), rows, s.p, H, lanes, rows * lanes);
      std::fill(SA.begin(), SA.end(), S(0));
      for (Size left = 0; left < it.cols; left += kColumns, gt += kColumns) {
        const Size cols = std::min(kColumns, it.cols - left);
        project(s.Y_of(it, left), s.V + it.tile * s.q * H, (S*)nullptr, S(-1), minus_b.data(), cols, s.q, H, lanes,
                cols * lanes);
        std::fill(SB.begin(), SB.end(), S(0));
        for (Size k = 0; k < vectors; k++) {
          S *ak = &a[k * rows * lanes], *bk = &minus_b[k * cols * lanes];
          S *SAk = &SA[k * rows * lanes], *SBk = &SB[k * cols * lanes];
          by_rows(0, rows, [&](Size i, auto count) {
            active_sums<S, decltype(count)::value>(ak + i * lanes, bk, gt + i * g.cols, g.cols, SAk + i * lanes, SBk,
                                                   cols);
          });
        }
        finish(SB.data(), minus_b.data(), S(-1), vt, dvt, cols, H);
        project_back(s.Y_of(it, left), SB.data(), d.V + offset * s.q * H, (S*)nullptr, cols, s.q, H);
        for (Size i = 0; i < rows; i++) {
          Vec<S> sum = {};
          for (Size j = 0; j < cols; j += lanes) sum += load(gt + i * g.cols + j, cols - j);
          d.b[offset] += total<S>(sum);
        }
      }
      finish(SA.data(), a.data(), S(1), vt, dvt, rows, H);
      project_back(s.X_of(it), SA.data(), d.U + offset * s.p * H, d.u + offset * H, rows, s.p, H);
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
