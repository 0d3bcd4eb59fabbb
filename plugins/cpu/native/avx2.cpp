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
  friend Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
  friend Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
};

using Words = uint64_t __attribute__((vector_size(32)));

// The products of lanes' lower halves.
inline Words multiply_low(Words a, Words b) {
  return reinterpret_cast<Words>(
      _mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
}

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
    avx2::argmax,
    avx2::scale_logits,
    avx2::weigh,
    avx2::total_weight,
    avx2::collect,
    avx2::draw,
};

}  // namespace pegboard
