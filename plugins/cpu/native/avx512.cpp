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

#include "avx512.inl"

inline Ints multiply_pairs(Ints a, Ints b) {
  return reinterpret_cast<Ints>(
      _mm512_maddubs_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
}
inline Ints add_shorts(Ints a, Ints b) {
  return reinterpret_cast<Ints>(
      _mm512_add_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
}
inline Ints sum_pairs(Ints a, Ints b) {
  return reinterpret_cast<Ints>(
      _mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
}

#include "codes_pairs.inl"
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
    avx512::multiply_codes,
    avx512::multiply_w8a8,
    avx512::multiply_float8,
    avx512::gather_float8,
    avx512::argmax,
    avx512::scale_logits,
    avx512::weigh,
    avx512::total_weight,
    avx512::collect,
    avx512::draw,
};

}  // namespace pegboard
