// Any processor: vectors by the compiler's own type.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "kernels.h"

namespace pegboard {
namespace portable {

struct Vec {
  static constexpr int kWidth = 8;
  static constexpr int kNumRegisters = 8;
  using Raw = float __attribute__((vector_size(32)));
  Raw v;

  static Vec zero() { return {Raw{}}; }
  static Vec broadcast(float x) { return {Raw{} + x}; }
  static Vec load(const float* p) {
    Vec r;
    std::memcpy(&r.v, p, sizeof r.v);
    return r;
  }
  void store(float* p) const { std::memcpy(p, &v, sizeof v); }
  // a * b + c in two roundings: this set has no fused operation.
  static Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
  // Of all lanes; false where one is NaN.
  static bool all_at_most(Vec a, Vec b) {
    bool all = true;
    for (int lane = 0; lane < kWidth; ++lane) all &= a.v[lane] <= b.v[lane];
    return all;
  }
  // The second where one is NaN.
  friend Vec maximum(Vec a, Vec b) { return {a.v > b.v ? a.v : b.v}; }
  friend Vec minimum(Vec a, Vec b) { return {a.v < b.v ? a.v : b.v}; }
  friend Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
  friend Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
};

using Words = uint64_t __attribute__((vector_size(32)));

// The products of lanes' lower halves.
inline Words multiply_low(Words a, Words b) {
  return (a & uint64_t{0xFFFFFFFF}) * (b & uint64_t{0xFFFFFFFF});
}

using Ints = int32_t __attribute__((vector_size(32)));

// Bytes as whole numbers.
inline Ints widen_bytes(const int8_t* p) {
  using Bytes = int8_t __attribute__((vector_size(Vec::kWidth)));
  Bytes bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(bytes, Ints);
}
inline Ints widen_bytes(const uint8_t* p) {
  using Bytes = uint8_t __attribute__((vector_size(Vec::kWidth)));
  Bytes bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(bytes, Ints);
}

inline Vec load_half_floats(const void* p) {
  uint16_t halves[Vec::kWidth];
  float floats[Vec::kWidth];
  std::memcpy(halves, p, sizeof halves);
  for (int lane = 0; lane < Vec::kWidth; ++lane) floats[lane] = half_to_float(halves[lane]);
  return Vec::load(floats);
}

// Four bits of each lane, from kBit on, as a number of two's complement.
template <int kBit>
Vec signed_nibble(Ints lanes) {
  return {__builtin_convertvector(lanes << (28 - kBit) >> 28, Vec::Raw)};
}

// Dots of codes without sign and int8 inputs.
template <int Bits>
struct Dot {
  Ints sums;

  static Ints codes(Ints stored) { return stored; }
  void start(int32_t surplus) { sums = Ints{} + surplus; }
  void add(Ints codes, const int32_t* inputs) {
    for (int byte = 0; byte < 32; byte += 8) {
      sums += (codes >> byte & 0xFF) * (*inputs << (24 - byte) >> 24);
    }
  }
  Ints total(int32_t) const { return sums; }
  // Of code - zero; negative: minus the sum of all inputs, in the lower half of each lane.
  Ints total(int32_t, Ints zero, const int32_t* negative) const {
    return sums + zero * static_cast<int16_t>(*negative);
  }
};

#include "kernels.inl"

}  // namespace portable

const Kernels kPortable = {
    "portable",
    portable::silu_mul,
    portable::rms_norm,
    portable::add_rms_norm,
    portable::rotate,
    portable::attend,
    portable::kPanelWidth,
    portable::linear_pack,
    portable::linear,
    portable::linear_gather,
    portable::multiply_codes,
    portable::multiply_w8a8,
    portable::multiply_float8,
    portable::gather_float8,
    portable::argmax,
    portable::scale_logits,
    portable::weigh,
    portable::total_weight,
    portable::collect,
    portable::draw,
};

}  // namespace pegboard
