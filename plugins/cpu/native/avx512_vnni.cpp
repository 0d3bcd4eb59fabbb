// x86 with AVX512 and its dot products of bytes: what they serve; all else is that of AVX512.

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "kernels.h"

namespace pegboard {
namespace avx512_vnni {

#include "avx512.inl"

// Dots of codes without sign and int8 inputs.
template <int Bits>
struct Dot {
  __m512i sums;

  static Ints codes(Ints stored) { return stored; }
  void start(int32_t surplus) { sums = _mm512_set1_epi32(surplus); }
  // Written out, as the compiler would load the inputs to a register of their own.
  void add(Ints codes, const int32_t* inputs) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(codes), "m"(*inputs));
  }
  Ints total(int32_t) const { return reinterpret_cast<Ints>(sums); }
  // Of code - zero; negative: minus the sum of all inputs, in the lower half of each lane.
  Ints total(int32_t, Ints zero, const int32_t* negative) const {
    __m512i total = sums;
    asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(total) : "v"(zero), "m"(*negative));
    return reinterpret_cast<Ints>(total);
  }
};

#include "math.inl"

#include "codes.inl"
#include "w8a8.inl"

}  // namespace avx512_vnni

namespace {

Kernels with_dots() {
  Kernels kernels = kAvx512;
  kernels.name = "avx512_vnni";
  kernels.multiply_codes = avx512_vnni::multiply_codes;
  kernels.multiply_w8a8 = avx512_vnni::multiply_w8a8;
  return kernels;
}

}  // namespace

const Kernels kAvx512Vnni = with_dots();

}  // namespace pegboard
