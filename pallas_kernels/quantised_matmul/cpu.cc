// Products of float32 activations with weights in eight or four bits, as an XLA custom call.
//
// The weight is stored in panels of kPanel columns (see packing.py), so that a panel is read from
// memory in one run. Activations are rounded to int8 first, with a scale for each row and group of
// rows of the weight. A tile of rows of x times a few panels then has its sums in registers: int32
// within a group, float32 over the groups. Decoded codes are used for all rows of a tile.
//
// The sums of a row depend on the row alone: its bits do not change with the number of rows or of
// threads. dots.h has the instruction sets: AVX-512 VNNI, AVX-VNNI, AVX2 (maddubs), NEON dot products,
// and plain C++ for the rest. The compiler's target says which: it is this machine. With AMX, tiles of
// many rows are multiplied by matrix instructions (squares.h). The integers are the same, and scales
// are applied in the same order, so that AMX changes no bits.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "computed_rows.h"
#include "dots.h"
#include "ffi.h"
#include "squares.h"
#include "threads.h"

namespace {

constexpr int kPanel = 16;

constexpr int V = kPanel / W;                // vectors of a panel
constexpr int kTile = W == 16 ? 6 : 4;       // maximum of rows of x of a tile
constexpr int panels_of(int rows) { return W == 16 ? (rows <= 2 ? 4 : 2) : (rows == 1 ? 2 : 1); }
constexpr int64_t kWorthAThread = 1 << 18;   // multiply-adds per additional thread
constexpr int64_t kRoundsTogether = 1 << 16;  // activations that are rounded by one thread
constexpr float kTiny = 0x1p-100f;           // groups of activations below are zeros

typedef uint8_t Bytes __attribute__((vector_size(W)));
typedef int16_t Shorts __attribute__((vector_size(2 * W)));

inline Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

struct Problem {
  ComputedRows rows;
  const float* x;         // [all rows, k]
  const uint8_t* codes;   // [panels, groups, group bytes of kPanel columns]
  const float* channels;  // [panels, kPanel]
  const void* scales;     // [panels, groups, kPanel], or null
  const void* minima;     // as scales, or zero points, or null
  bool halves;            // scales and minima are float16, else float32
  int zero_bytes;         // of a zero point: 1 (unsigned) or 2; 0 for minima
  int bits, offset;
  int64_t m, k, panels, groups, group;  // m: of the computed rows
  float* y;  // [all rows, panels * kPanel]

  // The rounded activations.
  int8_t* rounded;   // [m, groups * group], with zeros past k
  float* factor;     // [m, groups]: the scale
  float* total;      // [m, groups]: the scale times the sum of the group
  int32_t* initial;  // [m, groups]: what takes the offset of the codes back

  int64_t width;  // panels of an item
  int64_t group_bytes() const { return group * kPanel * bits / 8; }
};

void round_row(const Problem& p, int64_t row) {
  const int offset = p.bits == 8 && kSigned ? 0 : p.offset;
  int8_t* to = p.rounded + row * p.groups * p.group;
  for (int64_t g = 0; g < p.groups; ++g, to += p.group) {
    const float* x = p.x + p.rows[row] * p.k + g * p.group;
    const int64_t count = std::min(p.group, p.k - g * p.group);
    uint32_t largest_bits = 0;  // as integers, so that NaN is larger than infinity
    for (int64_t i = 0; i < count; ++i) {
      uint32_t bits;
      std::memcpy(&bits, x + i, 4);
      largest_bits = std::max(largest_bits, bits & 0x7fffffffu);
    }
    float largest;
    std::memcpy(&largest, &largest_bits, 4);
    const bool is_finite = largest_bits < 0x7f800000u, is_zero = largest < kTiny;
    const float inverse = !is_finite || is_zero ? 0.0f : 127.0f / largest;
    int32_t sum = 0;
    if (is_finite) {
      for (int64_t i = 0; i < count; ++i) {
        const float shifted = x[i] * inverse + 12582912.0f;  // rounds to the nearest even integer
        int32_t bits;
        std::memcpy(&bits, &shifted, 4);
        bits -= 0x4b400000;
        to[i] = static_cast<int8_t>(bits);
        sum += bits;
      }
    } else {
      std::fill_n(to, count, 0);
    }
    std::fill(to + count, to + p.group, 0);
    const float factor = !is_finite ? __builtin_nanf("") : is_zero ? 0.0f : largest / 127.0f;
    p.factor[row * p.groups + g] = factor;
    p.total[row * p.groups + g] = factor * static_cast<float>(sum);
    p.initial[row * p.groups + g] = -offset * sum;
  }
}

inline Floats scale_at(const Problem& p, const void* scales, int64_t at) {
  return p.halves ? half(static_cast<const uint16_t*>(scales) + at)
                  : load(static_cast<const float*>(scales) + at);
}

// The minimum of a group, which its zero point may say.
inline Floats minimum_at(const Problem& p, int64_t at, const Floats& scale) {
  if (p.zero_bytes == 0) return scale_at(p, p.minima, at);
  Floats zero;
  if (p.zero_bytes == 1) {
    Bytes bytes;
    std::memcpy(&bytes, static_cast<const uint8_t*>(p.minima) + at, sizeof(bytes));
    zero = __builtin_convertvector(bytes, Floats);
  } else {
    Shorts shorts;
    std::memcpy(&shorts, static_cast<const int16_t*>(p.minima) + at, sizeof(shorts));
    zero = __builtin_convertvector(shorts, Floats);
  }
  return scale * (static_cast<float>(p.offset) - zero);
}

// y for R rows from `row` on and C panels from `panel` on.
template <int kBits, int R, int C>
void tile(const Problem& p, int64_t row, int64_t panel) {
  constexpr int N = C * V;
  Floats sum[R][N] = {};
  const int64_t depth = p.groups * p.group, group_bytes = p.group_bytes();
  const int8_t* x = p.rounded + row * depth;
  const uint8_t* codes = p.codes + panel * p.groups * group_bytes;
  for (int64_t g = 0; g < p.groups; ++g, x += p.group, codes += group_bytes) {
    Ints acc[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[r][n] = p.initial[(row + r) * p.groups + g] + Ints{};
    const auto four = [&](int r, int64_t k) __attribute__((always_inline)) {
      int32_t bytes;
      std::memcpy(&bytes, x + r * depth + k, 4);
      return bytes;
    };
    const uint8_t* from = codes;
    for (int64_t k = 0; k < p.group; k += 32 / kBits, from += 4 * kPanel) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        const uint8_t* at = from + n / V * p.groups * group_bytes + n % V * 4 * W;
        if (R <= 4 && n % V == 0) __builtin_prefetch(at + 1024, 0, 2);
        if constexpr (kBits == 8) {
          const Codes8 each = codes8(at);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) acc[r][n] = dot(acc[r][n], each, four(r, k));
        } else {
          Codes4 low, high;
          codes4(at, low, high);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) acc[r][n] = dot(acc[r][n], low, four(r, k));
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) acc[r][n] = dot(acc[r][n], high, four(r, k + 4));
        }
      }
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const int64_t at = ((panel + n / V) * p.groups + g) * kPanel + n % V * W;
      if (p.scales == nullptr && p.minima == nullptr) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
          sum[r][n] +=
              __builtin_convertvector(acc[r][n], Floats) * p.factor[(row + r) * p.groups + g];
        continue;
      }
      const Floats scale = p.scales == nullptr ? Floats{} + 1.0f : scale_at(p, p.scales, at);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Floats scaled = scale * p.factor[(row + r) * p.groups + g];
        sum[r][n] += __builtin_convertvector(acc[r][n], Floats) * scaled;
      }
      if (p.minima != nullptr) {
        const Floats minimum = minimum_at(p, at, scale);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
          sum[r][n] += minimum * p.total[(row + r) * p.groups + g];
      }
    }
  }
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) {
    const int64_t column = (panel + n / V) * kPanel + n % V * W;
    const Floats channel = load(p.channels + column);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Floats y = sum[r][n] * channel;
      std::memcpy(p.y + p.rows[row + r] * p.panels * kPanel + column, &y, sizeof(y));
    }
  }
}

// All panels of an item times R rows.
template <int kBits, int R>
void rows_of_item(const Problem& p, int64_t row, int64_t panel, int64_t panels) {
  constexpr int C = panels_of(R);
  int64_t c = 0;
  for (; c + C <= panels; c += C) tile<kBits, R, C>(p, row, panel + c);
  for (; c < panels; ++c) tile<kBits, R, 1>(p, row, panel + c);
}

using Rows = void (*)(const Problem&, int64_t, int64_t, int64_t);
template <int kBits, int... r>
Rows rows_of(int rows, std::integer_sequence<int, r...>) {
  static constexpr Rows table[] = {rows_of_item<kBits, r + 1>...};
  return table[rows - 1];
}

#ifdef HAS_SQUARES
// Number of activations of an instruction; the groups for which the squares serve have whole ones.
int64_t square_depth(int64_t group) { return std::min<int64_t>(group, kSquareDepth); }

// The first rows, in whole squares, for which these are faster.
int64_t rows_of_squares(const Problem& p) {
  const int64_t from = p.bits == 4 ? kSquaresFrom4 : kSquaresFrom8;
  if (p.m < from || p.group % square_depth(p.group) || !may_use_squares()) return 0;
  return p.m / 16 * 16;
}

// y for 16 rows and one panel. `codes` are the panel's, in eight bits.
template <bool is_plain>
void square(const Problem& p, int64_t row, int64_t panel, const uint8_t* codes) {
  Floats sum[16] = {};
  const int64_t depth = p.groups * p.group, step = square_depth(p.group);
  const int8_t* x = p.rounded + row * depth;
  const float *factor = p.factor + row * p.groups, *total = p.total + row * p.groups;
  const int32_t* initial = p.initial + row * p.groups;
  alignas(64) Ints products[2][16];
  // The next group is multiplied while the sums of this one are scaled.
  const auto multiply = [&](int64_t g, Ints* to) __attribute__((always_inline)) {
    const int8_t* a = x + g * p.group;
    const uint8_t* b = codes + g * p.group * kPanel;
    if (g % 2 == 0) multiply_square<0>(a, depth, b, step, p.group, to);
    else multiply_square<1>(a, depth, b, step, p.group, to);
  };
  multiply(0, products[0]);
  for (int64_t g = 0; g < p.groups; ++g) {
    if (g + 1 < p.groups) multiply(g + 1, products[(g + 1) % 2]);
    const Ints* acc = products[g % 2];
    const auto number = [&](int r) __attribute__((always_inline)) {
      return __builtin_convertvector(acc[r] + initial[r * p.groups + g], Floats);
    };
    if constexpr (is_plain) {
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r) sum[r] += number(r) * factor[r * p.groups + g];
    } else {
      const int64_t at = (panel * p.groups + g) * kPanel;
      const Floats scale = p.scales == nullptr ? Floats{} + 1.0f : scale_at(p, p.scales, at);
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r) {
        const Floats scaled = scale * factor[r * p.groups + g];
        sum[r] += number(r) * scaled;
      }
      if (p.minima != nullptr) {
        const Floats minimum = minimum_at(p, at, scale);
#pragma GCC unroll 16
        for (int r = 0; r < 16; ++r) sum[r] += minimum * total[r * p.groups + g];
      }
    }
  }
  const Floats channel = load(p.channels + panel * kPanel);
#pragma GCC unroll 16
  for (int r = 0; r < 16; ++r) {
    const Floats y = sum[r] * channel;
    std::memcpy(p.y + (p.rows[row + r] * p.panels + panel) * kPanel, &y, sizeof(y));
  }
}

// The first rows, whole squares, times the panels from `first` on.
void squares(const Problem& p, int64_t all_rows, int64_t first, int64_t panels) {
  const int64_t depth = p.groups * p.group, bytes = p.groups * p.group_bytes();
  const SquareConfig config(static_cast<int>(square_depth(p.group)));
  static thread_local std::vector<uint8_t> scratch;
  if (p.bits == 4 && scratch.size() < size_t(depth * kPanel + 64)) scratch.resize(depth * kPanel + 64);
  auto aligned = (reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64;
  uint8_t* decoded = reinterpret_cast<uint8_t*>(aligned);  // [depth / 4, kPanel, 4]
  const bool is_plain = p.scales == nullptr && p.minima == nullptr;
  for (int64_t panel = first; panel < first + panels; ++panel) {
    const uint8_t* codes = p.codes + panel * bytes;
    if (p.bits == 4) {
      for (int64_t i = 0; i < bytes; i += 64) {
        Codes4 low, high;
        codes4(codes + i, low, high);
        std::memcpy(decoded + 2 * i, &low, 64);
        std::memcpy(decoded + 2 * i + 64, &high, 64);
        __builtin_prefetch(codes + bytes + i, 0, 2);
      }
      codes = decoded;
    }
    for (int64_t row = 0; row < all_rows; row += 16)
      (is_plain ? square<true> : square<false>)(p, row, panel, codes);
  }
}
#endif

void product(const Problem& p, int64_t item) {
  constexpr auto counts = std::make_integer_sequence<int, kTile>();
  const int64_t first = item * p.width, panels = std::min(p.width, p.panels - first);
  int64_t done = 0;
#ifdef HAS_SQUARES
  done = rows_of_squares(p);
  if (done > 0) squares(p, done, first, panels);
#endif
  constexpr int64_t kTogether = 4;  // panels that stay in the cache while all rows go by
  for (int64_t c = 0; c < panels; c += kTogether) {
    const int64_t count = std::min(kTogether, panels - c);
    for (int64_t row = done; row < p.m; row += kTile) {
      const int rows = static_cast<int>(std::min<int64_t>(kTile, p.m - row));
      (p.bits == 8 ? rows_of<8>(rows, counts) : rows_of<4>(rows, counts))(p, row, first + c, count);
    }
  }
}

using Matrix = ffi::Buffer<ffi::F32, 2>;

ffi::Error quantised_matmul(ffi::ThreadPool pool, Matrix x,
                            ffi::Buffer<ffi::U8> codes, ffi::Buffer<ffi::F32> channels,
                            ffi::AnyBuffer scales, ffi::AnyBuffer minima, Computed computed,
                            ffi::Result<Matrix> y, int64_t bits, int64_t offset,
                            int64_t group) {
  Problem p{ComputedRows(computed, x.dimensions()[0])};
  p.x = x.typed_data();
  p.codes = codes.typed_data();
  p.channels = channels.typed_data();
  p.scales = scales.element_count() ? scales.untyped_data() : nullptr;
  p.minima = minima.element_count() ? minima.untyped_data() : nullptr;
  p.halves = scales.element_type() == ffi::F16;
  p.zero_bytes = minima.element_type() == ffi::U8 ? 1 : minima.element_type() == ffi::S16 ? 2 : 0;
  p.bits = static_cast<int>(bits);
  p.offset = static_cast<int>(offset);
  p.m = p.rows.count();
  p.k = x.dimensions()[1];
  p.panels = y->dimensions()[1] / kPanel;
  p.group = group;
  p.groups = (p.k + group - 1) / group;
  p.y = y->typed_data();
  p.rows.clear_others(p.y, p.panels * kPanel);

  static thread_local std::vector<float> scratch;
  const int64_t num_groups = p.m * p.groups;
  const size_t needed = 3 * num_groups + num_groups * group / 4;
  if (scratch.size() < needed) scratch.resize(needed);
  p.factor = scratch.data();
  p.total = p.factor + num_groups;
  p.initial = reinterpret_cast<int32_t*>(p.total + num_groups);
  p.rounded = reinterpret_cast<int8_t*>(p.initial + num_groups);

  const int64_t rows = std::max<int64_t>(1, kRoundsTogether / p.k);
  for_each_item(pool, (p.m + rows - 1) / rows, pool.num_threads(), [p, rows](int64_t item, const NextItem&) {
    for (int64_t row = item * rows; row < std::min(p.m, (item + 1) * rows); ++row) round_row(p, row);
  });
  const int64_t threads = std::min<int64_t>(
      pool.num_threads(), 1 + p.m * p.k * p.panels * kPanel / kWorthAThread);
  // Several items for each thread, since others may delay one of them.
  p.width = std::clamp<int64_t>(p.panels / (4 * threads) / 4 * 4, 4, 64);
  for_each_item(pool, (p.panels + p.width - 1) / p.width, threads,
                [p](int64_t item, const NextItem&) { product(p, item); });
  return ffi::Error::Success();
}

}  // namespace

HANDLER(QuantisedMatmul, quantised_matmul, "bits", "offset", "group")
