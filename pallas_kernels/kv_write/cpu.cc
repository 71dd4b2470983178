// The write of a step into the paged cache on the CPU, as an XLA custom call whose pages are those
// that it gets: float32 queries, keys and values, pages in float32, bfloat16 or, with scales, in
// int8 or float8_e4m3fn. api.py states the contract.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "ffi.h"
#include "threads.h"
#include "vectors.h"

namespace {

constexpr int64_t kTogether = 1 << 14;  // numbers of an item

struct Problem {
  const float* qkv;            // [tokens, kv_heads, group + 2, head_dim]
  const float *cos, *sin;      // [tokens, half]
  const int32_t *page, *offset;  // [tokens]
  float* q;                    // [tokens, kv_heads, group, head_dim]
  void *k, *v;                 // [layers * pages, kv_heads, page_size, head_dim]
  float *k_scales, *v_scales;  // [layers * pages, kv_heads, page_size]; floats have none
  int64_t tokens, kv_heads, group, head_dim, half, first_page, num_pages, page_size;
};

// Rotates the first 2 * half numbers of a head, and copies the rest.
void rotate(const Problem& p, int64_t token, const float* __restrict x, float* __restrict y) {
  const float *cos = p.cos + token * p.half, *sin = p.sin + token * p.half;
  for (int64_t i = 0; i < p.half; ++i) {
    y[i] = x[i] * cos[i] - x[p.half + i] * sin[i];
    y[p.half + i] = x[p.half + i] * cos[i] + x[i] * sin[i];
  }
  std::copy(x + 2 * p.half, x + p.head_dim, y + 2 * p.half);
}

template <typename T>
constexpr float kLargest = std::is_same<T, int8_t>::value ? 127.0f : 448.0f;

inline void encode(float x, int8_t* to) {
  const float rounded = std::nearbyint(x);
  *to = std::isnan(x) ? 0 : static_cast<int8_t>(std::clamp(rounded, -128.0f, 127.0f));
}

// Rounds to the nearest, and to the even one of two that are equally near.
inline void encode(float x, Float8* to) {
  uint32_t bits;
  const float magnitude = std::fabs(x);
  std::memcpy(&bits, &magnitude, 4);
  uint32_t code;
  if (magnitude < 0x1p-6f) code = static_cast<uint32_t>(std::nearbyint(magnitude * 512.0f));
  else code = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
  if (!(magnitude < 480.0f)) code = 0x7f;  // NaN, or too large
  to->bits = static_cast<uint8_t>(code | (std::signbit(x) ? 0x80 : 0));
}

void put(const float* x, int64_t n, float* to, float*) { std::copy_n(x, n, to); }

// Rounds to the nearest, and to the even one of two that are equally near.
void put(const float* x, int64_t n, Bfloat16* to, float*) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    bits = is_nan ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
    to[i].bits = static_cast<uint16_t>(bits >> 16);
  }
}

// As quantize.py: a scale for the head, and what is left of its numbers in eight bits.
template <typename T>
void put(const float* x, int64_t n, T* to, float* scale) {
  float largest = 0.0f;
  bool is_nan = false;
  for (int64_t i = 0; i < n; ++i) {
    largest = std::max(largest, std::fabs(x[i]));
    is_nan |= x[i] != x[i];
  }
  // XLA divides by a constant so, and pages have the same bits whoever wrote them.
  *scale = is_nan ? __builtin_nanf("") : largest * (1.0f / kLargest<T>);
  const float by = *scale == 0.0f ? 1.0f : *scale;
  for (int64_t i = 0; i < n; ++i) encode(x[i] / by, to + i);
}

template <typename T>
void write_token(const Problem& p, int64_t token, float* head) {
  const int64_t page = p.page[token], offset = p.offset[token];
  const bool is_inside =
      page >= 0 && page < p.num_pages && offset >= 0 && offset < p.page_size;
  for (int64_t h = 0; h < p.kv_heads; ++h) {
    const float* from = p.qkv + (token * p.kv_heads + h) * (p.group + 2) * p.head_dim;
    float* q = p.q + (token * p.kv_heads + h) * p.group * p.head_dim;
    for (int64_t g = 0; g < p.group; ++g, from += p.head_dim, q += p.head_dim)
      rotate(p, token, from, q);
    if (!is_inside) continue;
    const int64_t at = ((p.first_page + page) * p.kv_heads + h) * p.page_size + offset;
    rotate(p, token, from, head);
    put(head, p.head_dim, static_cast<T*>(p.k) + at * p.head_dim, p.k_scales + at);
    put(from + p.head_dim, p.head_dim, static_cast<T*>(p.v) + at * p.head_dim, p.v_scales + at);
  }
}

template <typename T>
void write_tokens(ffi::ThreadPool& pool, const Problem& p) {
  const int64_t width = p.kv_heads * (p.group + 2) * p.head_dim;
  const int64_t together = std::max<int64_t>(1, kTogether / width);
  const int64_t items = (p.tokens + together - 1) / together;
  for_each_item(pool, items, items, [p, together](int64_t item, const NextItem&) {
    std::vector<float> head(p.head_dim);
    const int64_t end = std::min(p.tokens, (item + 1) * together);
    for (int64_t token = item * together; token < end; ++token)
      write_token<T>(p, token, head.data());
  });
}

using Heads = ffi::Buffer<ffi::F32, 4>;
using Scalar = ffi::Buffer<ffi::S32, 0>;
using Floats = ffi::Buffer<ffi::F32>;
using Table = ffi::Buffer<ffi::F32, 2>;
using Ints = ffi::Buffer<ffi::S32, 1>;

// Returns the output with the contents of the input, which it mostly shares memory with.
template <typename Buffer>
auto* in_place(const Buffer& from, ffi::Result<Buffer>& to) {
  if (to->untyped_data() != from.untyped_data() && from.size_bytes() > 0)
    std::memcpy(to->untyped_data(), from.untyped_data(), from.size_bytes());
  return to->untyped_data();
}

ffi::Error rotate_and_write(ffi::ThreadPool pool, Heads qkv, Table cos, Table sin, Scalar layer,
                            Ints page, Ints offset,
                            ffi::AnyBuffer k, ffi::AnyBuffer v, Floats k_scales, Floats v_scales,
                            ffi::Result<Floats> q, ffi::Result<ffi::AnyBuffer> k_out,
                            ffi::Result<ffi::AnyBuffer> v_out, ffi::Result<Floats> k_scales_out,
                            ffi::Result<Floats> v_scales_out) {
  const auto cache = k.dimensions();  // [layers, pages, kv_heads, page_size, head_dim]
  const int64_t at = *layer.typed_data();
  if (at < 0 || at >= cache[0])
    return ffi::Error::InvalidArgument("rotate_and_write: layer out of range");
  Problem p;
  p.qkv = qkv.typed_data();
  p.cos = cos.typed_data();
  p.sin = sin.typed_data();
  p.page = page.typed_data();
  p.offset = offset.typed_data();
  p.q = q->typed_data();
  p.k = in_place(k, k_out);
  p.v = in_place(v, v_out);
  p.k_scales = static_cast<float*>(in_place(k_scales, k_scales_out));
  p.v_scales = static_cast<float*>(in_place(v_scales, v_scales_out));
  p.tokens = qkv.dimensions()[0];
  p.kv_heads = cache[2];
  p.group = qkv.dimensions()[2] - 2;
  p.head_dim = cache[4];
  p.half = cos.dimensions()[1];
  p.num_pages = cache[1];
  p.page_size = cache[3];
  p.first_page = at * p.num_pages;
  if (k.element_type() == ffi::F32) write_tokens<float>(pool, p);
  else if (k.element_type() == ffi::BF16) write_tokens<Bfloat16>(pool, p);
  else if (k.element_type() == ffi::S8) write_tokens<int8_t>(pool, p);
  else if (k.element_type() == ffi::F8E4M3FN) write_tokens<Float8>(pool, p);
  else return ffi::Error::InvalidArgument("rotate_and_write: dtype of pages is not supported");
  return ffi::Error::Success();
}

}  // namespace

HANDLER(RotateAndWrite, rotate_and_write)
