// Used by all kernels: vectors of the widest type that the machine has, loops over rows, and large pages.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

using Size = std::int64_t;

#if defined(__AVX512F__)
#include <immintrin.h>
constexpr Size kBytes = 64;
#elif defined(__AVX2__)
#include <immintrin.h>
constexpr Size kBytes = 32;
#else
constexpr Size kBytes = 16;
#endif

namespace {

template <class S>
struct Vector {
  typedef S type __attribute__((vector_size(kBytes)));
};
template <class S>
using Vec = typename Vector<S>::type;
template <class S>
constexpr Size kLanes = kBytes / sizeof(S);

#if defined(__AVX512F__)
template <class S>
auto first_lanes(Size count) {
  if constexpr (sizeof(S) == 4)
    return __mmask16((1u << count) - 1);
  else
    return __mmask8((1u << count) - 1);
}
#endif

// Loads the first `count` numbers of a vector. The other numbers are zero.
template <class S>
Vec<S> load(const S* from, Size count = kLanes<S>) {
  Vec<S> x = {};
  if (count >= kLanes<S>)
    std::memcpy(&x, from, kBytes);
#if defined(__AVX512F__)
  else if constexpr (sizeof(S) == 4)
    x = _mm512_maskz_loadu_ps(first_lanes<S>(count), from);
  else
    x = _mm512_maskz_loadu_pd(first_lanes<S>(count), from);
#else
  else
    for (Size l = 0; l < count; l++) x[l] = from[l];
#endif
  return x;
}

template <class S>
void store(S* to, Vec<S> x, Size count = kLanes<S>) {
  if (count >= kLanes<S>)
    std::memcpy(to, &x, kBytes);
#if defined(__AVX512F__)
  else if constexpr (sizeof(S) == 4)
    _mm512_mask_storeu_ps(to, first_lanes<S>(count), x);
  else
    _mm512_mask_storeu_pd(to, first_lanes<S>(count), x);
#else
  else
    for (Size l = 0; l < count; l++) to[l] = x[l];
#endif
}

template <class S>
Vec<S> filled(S x) {
  return x - Vec<S>{};  // A compiler removes `x - 0`, but not `x + 0`, which would change x = -0.
}

// Returns the sum of a vector's numbers.
template <class S>
S total(Vec<S> x) {
  S numbers[kLanes<S>];
  std::memcpy(numbers, &x, kBytes);
  for (Size half = kLanes<S> / 2; half; half /= 2)
    for (Size l = 0; l < half; l++) numbers[l] += numbers[l + half];
  return numbers[0];
}

Size round_up(Size n, Size step) { return (n + step - 1) / step * step; }

// Requests large pages for new memory, because small pages take longer to get than to fill.
void prefer_large_pages(void* memory, std::size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr std::uintptr_t page = 4096;  // With another page size, `madvise` fails, which does no harm.
  constexpr std::size_t repays = 4 << 20;
  const auto start = (reinterpret_cast<std::uintptr_t>(memory) + page - 1) / page * page;
  const auto end = (reinterpret_cast<std::uintptr_t>(memory) + bytes) / page * page;
  if (bytes >= repays) madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
#endif
}

constexpr int kRows = 4;  // number of rows computed at once: their sums stay in registers and share each load

// Calls f(first row, number of rows) for blocks of `kRows` rows, then for each remaining row.
template <class F>
void by_rows(Size first, Size end, F f) {
  for (; first + kRows <= end; first += kRows) f(first, std::integral_constant<int, kRows>{});
  for (; first < end; first++) f(first, std::integral_constant<int, 1>{});
}

}  // namespace
