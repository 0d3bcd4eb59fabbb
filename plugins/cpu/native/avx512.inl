// Vectors of AVX512, and what they do with codes beside dots.

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
  // The second where one is NaN.
  friend Vec maximum(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
  friend Vec minimum(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
  friend Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
  friend Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
};

using Words = uint64_t __attribute__((vector_size(64)));

// The products of lanes' lower halves.
inline Words multiply_low(Words a, Words b) {
  return reinterpret_cast<Words>(
      _mm512_mul_epu32(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
}

using Ints = int32_t __attribute__((vector_size(64)));

// Bytes as whole numbers.
inline Ints widen_bytes(const int8_t* p) {
  return reinterpret_cast<Ints>(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline Ints widen_bytes(const uint8_t* p) {
  return reinterpret_cast<Ints>(
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

inline Vec load_half_floats(const void* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)))};
}

// Four bits of each lane, from kBit on, as a number of two's complement. A look-up heeds the lowest
// four bits alone.
template <int kBit>
Vec signed_nibble(Ints lanes) {
  const __m512 values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
  return {_mm512_permutexvar_ps(reinterpret_cast<__m512i>(lanes >> kBit), values)};
}
