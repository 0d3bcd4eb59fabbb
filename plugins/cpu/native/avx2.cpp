// x86 with AVX2.

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "kernels.h"

namespace pegboard {
namespace avx2 {

struct Vec {
  static constexpr int kWidth = 8;
  static constexpr int kNumRegisters = 16;
  __m256 v;

  static Vec zero() { return {_mm256_setzero_ps()}; }
  static Vec broadcast(float x) { return {_mm256_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
  static Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
  // Of all lanes; false where one is NaN.
  static bool all_at_most(Vec a, Vec b) {
    return _mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_NLE_UQ)) == 0;
  }
  // The second where one is NaN.
  friend Vec maximum(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
  friend Vec minimum(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
  friend Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
  friend Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
};

using Words = uint64_t __attribute__((vector_size(32)));

// The products of lanes' lower halves.
inline Words multiply_low(Words a, Words b) {
  return reinterpret_cast<Words>(
      _mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
}

using Ints = int32_t __attribute__((vector_size(32)));

// Bytes as whole numbers.
inline Ints widen_bytes(const int8_t* p) {
  return reinterpret_cast<Ints>(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline Ints widen_bytes(const uint8_t* p) {
  return reinterpret_cast<Ints>(
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

inline Vec load_half_floats(const void* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p)))};
}

// Four bits of each lane, from kBit on, as a number of two's complement.
template <int kBit>
Vec signed_nibble(Ints lanes) {
  return {_mm256_cvtepi32_ps(reinterpret_cast<__m256i>(lanes << (28 - kBit) >> 28))};
}

inline Ints multiply_pairs(Ints a, Ints b) {
  return reinterpret_cast<Ints>(
      _mm256_maddubs_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
}
inline Ints add_shorts(Ints a, Ints b) {
  return reinterpret_cast<Ints>(
      _mm256_add_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
}
inline Ints sum_pairs(Ints a, Ints b) {
  return reinterpret_cast<Ints>(
      _mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
}

#include "codes_pairs.inl"

#include "kernels.inl"

}  // namespace avx2

const Kernels kAvx2 = {
    "avx2",
    avx2::silu_mul,
    avx2::rms_norm,
    avx2::add_rms_norm,
    avx2::rotate,
    avx2::attend,
    avx2::kPanelWidth,
    avx2::linear_pack,
    avx2::linear,
    avx2::linear_gather,
    avx2::multiply_codes,
    avx2::multiply_w8a8,
    avx2::multiply_float8,
    avx2::gather_float8,
    avx2::argmax,
    avx2::scale_logits,
    avx2::weigh,
    avx2::total_weight,
    avx2::collect,
    avx2::draw,
};

}  // namespace pegboard
