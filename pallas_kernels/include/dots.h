// Products of codes of eight and four bits with int8 activations, on each instruction set.
//
// W: int32 lanes of a vector. Codes8, Codes4: what 4 W codes become before they are multiplied.
// dot: adds to each lane of acc the products of its 4 codes with the 4 activations in x.
// kSigned: codes of eight bits are shifted to -128 .. 127 on their way; else they are 0 .. 255.
// PORTABLE: plain C++, as on a machine with none of these instruction sets.

#ifndef PALLAS_KERNELS_DOTS_H_
#define PALLAS_KERNELS_DOTS_H_

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512VNNI__) && !defined(PORTABLE)
constexpr int W = 16;
constexpr bool kSigned = false;
typedef int32_t Ints __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(64)));
typedef __m512i Codes8;
typedef __m512i Codes4;
inline Codes8 codes8(const uint8_t* from) { return _mm512_loadu_si512(from); }
inline void codes4(const uint8_t* from, Codes4& low, Codes4& high) {
  const __m512i both = _mm512_loadu_si512(from), mask = _mm512_set1_epi8(15);
  low = _mm512_and_si512(both, mask);
  high = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
}
inline Ints dot(Ints acc, __m512i codes, int32_t x) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)acc, codes, _mm512_set1_epi32(x));
}
inline Floats half(const uint16_t* from) {
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
}

#elif defined(__AVX2__) && defined(__F16C__) && !defined(PORTABLE)
constexpr int W = 8;
typedef int32_t Ints __attribute__((vector_size(32)));
typedef float Floats __attribute__((vector_size(32)));
typedef __m256i Codes4;
inline void codes4(const uint8_t* from, Codes4& low, Codes4& high) {
  const __m256i both = _mm256_loadu_si256((const __m256i*)from), mask = _mm256_set1_epi8(15);
  low = _mm256_and_si256(both, mask);
  high = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
}
inline Floats half(const uint16_t* from) {
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
}
#if defined(__AVXVNNI__)
constexpr bool kSigned = false;
typedef __m256i Codes8;
inline Codes8 codes8(const uint8_t* from) { return _mm256_loadu_si256((const __m256i*)from); }
inline Ints dot(Ints acc, __m256i codes, int32_t x) {
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)acc, codes, _mm256_set1_epi32(x));
}
#else
constexpr bool kSigned = true;
// maddubs adds two products in 16 bits. With magnitudes up to 128 they fit: 2 * 128 * 127 < 2^15.
struct Codes8 {
  __m256i magnitude, value;
};
inline Codes8 codes8(const uint8_t* from) {
  const __m256i bytes = _mm256_loadu_si256((const __m256i*)from);
  const __m256i value = _mm256_xor_si256(bytes, _mm256_set1_epi8(-128));
  return {_mm256_abs_epi8(value), value};
}
inline Ints add_pairs(Ints acc, __m256i magnitude, __m256i x) {
  const __m256i pairs = _mm256_maddubs_epi16(magnitude, x);
  return acc + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
inline Ints dot(Ints acc, const Codes8& codes, int32_t x) {
  return add_pairs(acc, codes.magnitude, _mm256_sign_epi8(_mm256_set1_epi32(x), codes.value));
}
inline Ints dot(Ints acc, __m256i codes, int32_t x) {
  return add_pairs(acc, codes, _mm256_set1_epi32(x));
}
#endif

#elif defined(__ARM_FEATURE_DOTPROD) && !defined(PORTABLE)
constexpr int W = 4;
constexpr bool kSigned = true;
typedef int32_t Ints __attribute__((vector_size(16)));
typedef float Floats __attribute__((vector_size(16)));
typedef int8x16_t Codes8;
typedef int8x16_t Codes4;
inline Codes8 codes8(const uint8_t* from) {
  return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(from), vdupq_n_u8(128)));
}
inline void codes4(const uint8_t* from, Codes4& low, Codes4& high) {
  const uint8x16_t both = vld1q_u8(from);
  low = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
  high = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
}
inline Ints dot(Ints acc, int8x16_t codes, int32_t x) {
  return (Ints)vdotq_s32((int32x4_t)acc, codes, vreinterpretq_s8_s32(vdupq_n_s32(x)));
}
inline Floats half(const uint16_t* from) {
  return (Floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
}

#else
constexpr int W = 4;
constexpr bool kSigned = false;
typedef int32_t Ints __attribute__((vector_size(16)));
typedef float Floats __attribute__((vector_size(16)));
struct Codes8 {
  uint8_t code[16];
};
typedef Codes8 Codes4;
inline Codes8 codes8(const uint8_t* from) {
  Codes8 codes;
  std::memcpy(codes.code, from, 16);
  return codes;
}
inline void codes4(const uint8_t* from, Codes4& low, Codes4& high) {
  for (int i = 0; i < 16; ++i) low.code[i] = from[i] & 15, high.code[i] = from[i] >> 4;
}
inline Ints dot(Ints acc, const Codes8& codes, int32_t x) {
  int8_t each[4];
  std::memcpy(each, &x, 4);
  for (int lane = 0; lane < 4; ++lane)
    for (int i = 0; i < 4; ++i) acc[lane] += codes.code[4 * lane + i] * each[i];
  return acc;
}
inline Floats half(const uint16_t* from) {
  Floats out;
  for (int i = 0; i < 4; ++i) {
    const uint32_t sign = (from[i] & 0x8000u) << 16, magnitude = from[i] & 0x7fffu;
    // As if it had float32's exponent, then scaled by 2^112, which also serves subnormal numbers.
    uint32_t bits = magnitude << 13;
    float value;
    std::memcpy(&value, &bits, 4);
    value *= 0x1p112f;
    std::memcpy(&bits, &value, 4);
    if (magnitude >= 0x7c00u) bits = 0x7f800000u | (magnitude & 0x3ffu) << 13;
    bits |= sign;
    std::memcpy(&value, &bits, 4);
    out[i] = value;
  }
  return out;
}
#endif

#endif  // PALLAS_KERNELS_DOTS_H_
