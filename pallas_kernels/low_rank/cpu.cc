// Low-rank changes of products on the CPU, as an XLA custom call in float32. The matrices of adapters
// are float32 or bfloat16, which is widened when it is loaded.
//
// Tokens are put in the order of their adapters and cut into chunks of one adapter. A thread takes
// a chunk and a strip of columns: it computes the inner products of the chunk with a, and goes down
// the strip of b once for all tokens of the chunk. Where there are few chunks, they have several
// strips, and each computes the inner products again, which are small. Columns of b go with the inner
// products of their own change.
//
// Each inner and each output number is one chain of fused multiply-adds in the order of the inner
// dimension: its bits depend neither on the other tokens nor on how the work is cut.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "ffi.h"
#include "threads.h"
#include "vectors.h"

namespace {

constexpr int W = kWide;
constexpr int kTokens = 8;                 // maximum of a chunk
constexpr int kAbreast = 4;                // rows of b that are read together
constexpr int64_t kColumns = 1024;         // maximum of a strip
constexpr int64_t kWorthAThread = 1 << 16;  // multiply-adds per additional thread

template <typename Number>  // float or Bfloat16
struct Problem {
  const float* x;      // [tokens, in]
  const Number* a;     // [adapters, in, ranks]
  const Number* b;     // [adapters, rank, out]
  const float* scale;  // [adapters]
  float* y;            // [tokens, out], to which is added
  int64_t in, ranks, rank, out;
  ffi::Span<const int64_t> spans;  // of columns: the number of their change, and how many they are
};

// Tokens of one adapter.
struct Chunk {
  int64_t adapter;
  int count;
  int64_t token[kTokens];
};

inline float widened(float x) { return x; }
inline float widened(Bfloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof(y));
  return y;
}

// inner[t][r] = scale * sum over i of x[t][i] * a[i][r].
template <int T, typename Number>
void contract(const Problem<Number>& p, const Chunk& chunk, float* inner) {
  const Number* a = p.a + chunk.adapter * p.in * p.ranks;
  const float scale = p.scale[chunk.adapter];
  const float* x[T];
  for (int t = 0; t < T; ++t) x[t] = p.x + chunk.token[t] * p.in;
  int64_t r = 0;
  for (; r + W <= p.ranks; r += W) {
    Float<W> sum[T] = {};
    for (int64_t i = 0; i < p.in; ++i) {
      const Float<W> row = load<W>(a + i * p.ranks + r);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) sum[t] += (x[t][i] - Float<W>{}) * row;
    }
    for (int t = 0; t < T; ++t) store(inner + t * p.ranks + r, sum[t] * (scale - Float<W>{}));
  }
  for (; r < p.ranks; ++r)
    for (int t = 0; t < T; ++t) {
      float sum = 0.0f;
      for (int64_t i = 0; i < p.in; ++i)
        sum = __builtin_fmaf(x[t][i], widened(a[i * p.ranks + r]), sum);
      inner[t * p.ranks + r] = sum * scale;
    }
}

// y[t][c] += sum over r of inner[t][r] * b[r][c], for a strip of columns of one change, which `inner`
// begins with.
template <int T, typename Number>
void expand(const Problem<Number>& p, const Chunk& chunk, const float* inner, int64_t first,
            int64_t columns) {
  alignas(64) float total[T][kColumns];
  for (int t = 0; t < T; ++t) std::fill_n(total[t], columns, 0.0f);
  const auto add_rows = [&](auto depth, int64_t r0) __attribute__((always_inline)) {
    const Number* b = p.b + (chunk.adapter * p.rank + r0) * p.out + first;
    Float<W> own[T][depth], row[depth];
    for (int t = 0; t < T; ++t)
      for (int i = 0; i < depth; ++i) own[t][i] = inner[t * p.ranks + r0 + i] - Float<W>{};
    int64_t c = 0;
    for (; c + W <= columns; c += W) {
#pragma GCC unroll 4
      for (int i = 0; i < depth; ++i) {
        __builtin_prefetch(b + (i + depth) * p.out + c, 0, 2);
        row[i] = load<W>(b + i * p.out + c);
      }
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        Float<W> sum = load<W>(total[t] + c);
#pragma GCC unroll 4
        for (int i = 0; i < depth; ++i) sum += own[t][i] * row[i];
        store(total[t] + c, sum);
      }
    }
    for (; c < columns; ++c)
      for (int t = 0; t < T; ++t)
        for (int i = 0; i < depth; ++i)
          total[t][c] = __builtin_fmaf(own[t][i][0], widened(b[i * p.out + c]), total[t][c]);
  };
  int64_t r = 0;
  for (; r + kAbreast <= p.rank; r += kAbreast)
    add_rows(std::integral_constant<int, kAbreast>(), r);
  for (; r < p.rank; ++r) add_rows(std::integral_constant<int, 1>(), r);
  for (int t = 0; t < T; ++t) {
    float* y = p.y + chunk.token[t] * p.out + first;
    for (int64_t c = 0; c < columns; ++c) y[c] += total[t][c];
  }
}

// Changes the columns from `first` to `last` of a chunk's tokens.
template <int T, typename Number>
void change(const Problem<Number>& p, const Chunk& chunk, int64_t first, int64_t last) {
  static thread_local std::vector<float> inner;
  if (static_cast<int64_t>(inner.size()) < T * p.ranks) inner.resize(T * p.ranks);
  contract<T>(p, chunk, inner.data());
  int64_t end = 0;  // of a span
  for (int64_t i = 0; i < p.spans.size(); i += 2) {
    const int64_t begin = std::max(first, end);
    end += p.spans[i + 1];
    const float* own = inner.data() + p.spans[i] * p.rank;
    for (int64_t c = begin; c < std::min(last, end); c += kColumns)
      expand<T>(p, chunk, own, c, std::min(kColumns, std::min(last, end) - c));
  }
}

template <typename Number, int... t>
auto change_of(int count, std::integer_sequence<int, t...>) {
  static constexpr decltype(&change<1, Number>) table[] = {change<t + 1, Number>...};
  return table[count - 1];
}

// The tokens in the order of their adapters, in chunks.
std::vector<Chunk> chunks_of(const int32_t* adapter, int64_t tokens, int64_t adapters) {
  std::vector<int64_t> order;
  for (int64_t t = 0; t < tokens; ++t)
    if (adapter[t] >= 0 && adapter[t] < adapters) order.push_back(t);
  std::stable_sort(order.begin(), order.end(),
                   [adapter](int64_t one, int64_t other) { return adapter[one] < adapter[other]; });
  std::vector<Chunk> chunks;
  for (const int64_t t : order) {
    if (chunks.empty() || chunks.back().count == kTokens || chunks.back().adapter != adapter[t])
      chunks.push_back({adapter[t], 0, {}});
    chunks.back().token[chunks.back().count++] = t;
  }
  return chunks;
}

using Vector = ffi::Buffer<ffi::F32, 1>;
using Matrix = ffi::Buffer<ffi::F32, 2>;
using Numbers = ffi::Buffer<ffi::S32, 1>;

template <typename Number>
void add(ffi::ThreadPool& pool, const Problem<Number>& p, std::vector<Chunk> chunks) {
  int64_t tokens = 0;
  for (const Chunk& chunk : chunks) tokens += chunk.count;
  const int64_t work = tokens * (p.in * p.ranks + p.rank * p.out);
  const int64_t threads = std::min<int64_t>(1 + work / kWorthAThread, pool.num_threads());
  const int64_t num = static_cast<int64_t>(chunks.size());
  const int64_t strips = num >= 2 * threads ? 1 : threads;
  const int64_t width = ((p.out + strips - 1) / strips + W - 1) / W * W;
  for_each_item(pool, num * strips, threads,
                [p, width, strips, chunks = std::move(chunks)](int64_t item, const NextItem&) {
                  const Chunk& chunk = chunks[item / strips];
                  const int64_t first = item % strips * width;
                  const int64_t last = std::min(p.out, first + width);
                  if (first >= last) return;
                  constexpr auto counts = std::make_integer_sequence<int, kTokens>();
                  change_of<Number>(chunk.count, counts)(p, chunk, first, last);
                });
}

ffi::Error add_low_rank(ffi::ThreadPool pool, Matrix out, Matrix x, ffi::AnyBuffer a,
                        ffi::AnyBuffer b, Vector scale, Numbers adapter, ffi::Result<Matrix> y,
                        ffi::Span<const int64_t> spans) {
  if (y->typed_data() != out.typed_data())
    std::copy_n(out.typed_data(), out.element_count(), y->typed_data());
  auto chunks = chunks_of(adapter.typed_data(), x.dimensions()[0], a.dimensions()[0]);
  if (chunks.empty()) return ffi::Error::Success();
  const auto add_as = [&](auto number) {
    using Number = decltype(number);
    const Problem<Number> p = {x.typed_data(),
                               static_cast<const Number*>(a.untyped_data()),
                               static_cast<const Number*>(b.untyped_data()),
                               scale.typed_data(),
                               y->typed_data(),
                               a.dimensions()[1],
                               a.dimensions()[2],
                               b.dimensions()[1],
                               b.dimensions()[2],
                               spans};
    add(pool, p, std::move(chunks));
  };
  a.element_type() == ffi::BF16 ? add_as(Bfloat16{}) : add_as(0.0f);
  return ffi::Error::Success();
}

}  // namespace

HANDLER(AddLowRank, add_low_rank, "spans")
