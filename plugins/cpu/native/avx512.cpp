// x86 with AVX512.

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "kernels.h"

namespace pegboard {
namespace avx512 {

struct Vec {
  static constexpr int kWidth = 16;
  static constexpr int kNumRegisters = 32;
  __m512 v;

  static Vec zero() { return {_mm512_setzero_ps()}; }
  static Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  static Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  // Of all lanes; false where one is NaN.
  static bool all_at_most(Vec a, Vec b) {
    return _mm512_cmp_ps_mask(a.v, b.v, _CMP_NLE_UQ) == 0;
  }
  friend Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
  friend Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
};

using Words = uint64_t __attribute__((vector_size(64)));

// The products of lanes' lower halves.
inline Words multiply_low(Words a, Words b) {
  return reinterpret_cast<Words>(
      _mm512_mul_epu32(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
}

#include "kernels.inl"

}  // namespace avx512

const Kernels kAvx512 = {
    "avx512",
    avx512::silu_mul,
    avx512::rms_norm,
    avx512::add_rms_norm,
    avx512::rotate,
    avx512::attend,
    avx512::kPanelWidth,
    avx512::linear_pack,
    avx512::linear,
    avx512::linear_gather,
    avx512::argmax,
    avx512::scale_logits,
    avx512::weigh,
    avx512::total_weight,
    avx512::collect,
    avx512::draw,
};

}  // namespace pegboard
