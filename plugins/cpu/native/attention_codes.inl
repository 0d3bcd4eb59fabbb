// Keys and values in codes of a byte: a number is its code times the scale of its token and head.
//
//     scale = amax / kLargest of the token's head, or what the checkpoint says
//     code = x / scale, rounded to the nearest one, ties to even, at most kLargest; 0 if scale is 0
//
// A head that holds NaN or an infinity has NaN for its scale, and so is NaN when it is read. Included by
// kernels.inl.

struct Int8Codes {
  static constexpr float kLargest = 127.0f;

  // Adding 1.5 * 2^23 rounds to a whole number, which is then in the lowest bits.
  static uint8_t code(float x) { return static_cast<uint8_t>(bits<uint32_t>(x + 0x1.8p23f)); }

  static Vec numbers(const uint8_t* codes) {
    const Ints numbers = widen_bytes(reinterpret_cast<const int8_t*>(codes));
    return {__builtin_convertvector(numbers, decltype(Vec::v))};
  }
  static float number(uint8_t code) { return static_cast<float>(static_cast<int8_t>(code)); }
};

// A sign, four bits of exponent and three of mantissa: steps of 2^-9 below 2^-6, of an eighth of a
// power of two above.
struct E4M3Codes {
  static constexpr float kLargest = 448.0f;
  static constexpr int32_t kBias = (127 - 7) << 23;  // between the exponents of the two

  static uint8_t code(float x) {
    const uint32_t word = bits<uint32_t>(x), size = word & 0x7FFFFFFF;
    const uint32_t rounded = (size + 0x7FFFF + (size >> 20 & 1)) >> 20;
    // The sum's last place is 2^-9.
    const uint32_t steps = bits<uint32_t>(bits<float>(size) + 0x1p14f) - bits<uint32_t>(0x1p14f);
    const uint32_t is_small = bits<float>(size) < 0x1p-6f;
    return static_cast<uint8_t>((is_small ? steps : rounded - (kBias >> 20)) | (word >> 24 & 0x80));
  }

  static Vec numbers(const uint8_t* codes) {
    return number_of<Vec, Ints>(widen_bytes(reinterpret_cast<const int8_t*>(codes)));
  }
  static float number(uint8_t code) {
    return number_of<float, int32_t>(static_cast<int8_t>(code));
  }

 private:
  template <class Number, class Int>
  static Number number_of(Int code) {
    const Number size = size_of(bits<Number>((code << 20 & 0x07F00000) + kBias));
    return bits<Number>(bits<Int>(size) | (code & INT32_MIN));
  }
  // y: what a normal number with the same bits is. A smaller one has no leading one, and its last place
  // is of the next exponent: so it is the second, which of normal numbers is never the lesser.
  static float size_of(float y) { return std::min(y, y + y - 0x1p-6f); }
  static Vec size_of(Vec y) {
    return minimum(y, Vec::fma(y, Vec::broadcast(2.0f), Vec::broadcast(-0x1p-6f)));
  }
};

// Calls work with the encoding's codes.
template <class Work>
void with_codes(Encoding encoding, const Work& work) {
  if (encoding == Encoding::kInt8) {
    work(Int8Codes{});
  } else {
    work(E4M3Codes{});
  }
}

// A token's head into codes that lie `stride` apart; gives the scale. `fixed`: the scale to take, or
// null.
template <class Codes>
float encode_numbers(const float* x, int64_t n, const float* fixed, uint8_t* codes, int64_t stride) {
  const float size = largest(x, n);
  const float scale = !(size < INFINITY) ? NAN : fixed != nullptr ? *fixed : size / Codes::kLargest;
  for (int64_t i = 0; i < n; ++i) {
    float y = scale > 0 ? x[i] / scale : 0.0f;
    y = y < Codes::kLargest ? y : Codes::kLargest;
    y = y > -Codes::kLargest ? y : -Codes::kLargest;
    codes[i * stride] = Codes::code(y);
  }
  return scale;
}

// Keys of consecutive slots of a page, as numbers: codes [head_dim][block_size], scales [slot], out
// [head_dim][kTile].
template <class Codes>
void decode_keys(const uint8_t* codes, const float* scales, int64_t num_slots, int64_t head_dim,
                 int64_t block_size, float* out) {
  int64_t s = 0;
  for (; s + Vec::kWidth <= num_slots; s += Vec::kWidth) {
    const Vec scale = Vec::load(scales + s);
    for (int64_t d = 0; d < head_dim; ++d) {
      (Codes::numbers(codes + d * block_size + s) * scale).store(out + d * kTile + s);
    }
  }
  for (; s < num_slots; ++s) {
    for (int64_t d = 0; d < head_dim; ++d) {
      out[d * kTile + s] = Codes::number(codes[d * block_size + s]) * scales[s];
    }
  }
}

// Values of consecutive slots of a page: codes and out [slot][padded_dim], scales [slot].
template <class Codes>
void decode_values(const uint8_t* codes, const float* scales, int64_t num_slots, int64_t padded_dim,
                   float* out) {
  for (int64_t s = 0; s < num_slots; ++s, codes += padded_dim, out += padded_dim) {
    const Vec scale = Vec::broadcast(scales[s]);
    for (int64_t d = 0; d < padded_dim; d += Vec::kWidth) {
      (Codes::numbers(codes + d) * scale).store(out + d);
    }
  }
}
