// Vectors beside `Vec`, and exponentials: in every lane the same steps, so that a number's place in
// a row never changes its bits. Included by kernels.inl.

constexpr int kHalf = Vec::kWidth / 2;

using Ints = int32_t __attribute__((vector_size(4 * Vec::kWidth)));
using Halves = float __attribute__((vector_size(4 * kHalf)));
using Doubles = double __attribute__((vector_size(8 * kHalf)));

inline Words widen(const int32_t* p) {
  using Narrow = int32_t __attribute__((vector_size(4 * kHalf)));
  Narrow narrow;
  std::memcpy(&narrow, p, sizeof narrow);
  return __builtin_convertvector(narrow, Words);
}

template <class To, class From>
To bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline Halves load_halves(const float* p) {
  Halves halves;
  std::memcpy(&halves, p, sizeof halves);
  return halves;
}

using Shorts = int16_t __attribute__((vector_size(2 * Vec::kWidth)));

// The largest magnitude of n numbers; NaN where there is one: as whole numbers, floats without sign
// have their order, and NaN is above all.
inline float largest(const float* x, int64_t n) {
  int32_t most = 0;
  for (int64_t i = 0; i < n; ++i) most = std::max(most, bits<int32_t>(x[i]) & 0x7FFFFFFF);
  return bits<float>(most);
}

// 2^n for the n that was rounded by adding 1.5 * 2^23: its bits are the sum's lowest.
inline Vec power_of_two(Vec shifted) {
  return bits<Vec>((bits<Ints>(shifted) << 23) + (127 << 23));
}

// e^x, to two units in the last place; 0 below -87, infinite above 88, NaN of NaN.
inline Vec exp(Vec x) {
  const Vec least = Vec::broadcast(-87.0f), most = Vec::broadcast(88.0f);
  const Vec clamped = minimum(most, maximum(least, x)), shift = Vec::broadcast(0x1.8p23f);
  // x = n ln 2 + r; the larger part of ln 2 has few bits, so that n times it is exact
  const Vec shifted = Vec::fma(clamped, Vec::broadcast(0x1.715476p0f), shift);
  const Vec n = {shifted.v - shift.v};
  Vec r = Vec::fma(n, Vec::broadcast(-0x1.62e4p-1f), clamped);
  r = Vec::fma(n, Vec::broadcast(-0x1.7f7d1cp-20f), r);
  // the series of e^r: what follows is below half a unit for |r| <= ln(2) / 2
  Vec sum = Vec::broadcast(1.0f / 5040);
  for (float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
    sum = Vec::fma(sum, r, Vec::broadcast(term));
  }
  const Vec power = sum * power_of_two(shifted);
  return {x.v < least.v ? Vec::zero().v : x.v > most.v ? Vec::broadcast(INFINITY).v : power.v};
}

// e^x for x <= 0, to two units in the last place of a double; above 0 for x below -708.
inline Doubles exp(Doubles x) {
  const Doubles least = Doubles{} - 708.0, shift = Doubles{} + 0x1.8p52;
  x = x < least ? least : x;
  const Doubles shifted = x * 0x1.71547652b82fep0 + shift;
  const Doubles n = shifted - shift;
  const Doubles r = x - n * 0x1.62e42fep-1 - n * 0x1.f473de6af278fp-30;
  Doubles sum = Doubles{} + 1.0 / 6227020800;
  for (double term : {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320,
                      1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0}) {
    sum = sum * r + term;
  }
  const Words power = (bits<Words>(shifted) << 52) + (uint64_t{1023} << 52);
  return sum * bits<Doubles>(power);
}
