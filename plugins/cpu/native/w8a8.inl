// y = x·Wᵀ of whole numbers: int8 codes with inputs quantized to int8 (w8a8.h). Included after
// math.inl.
//
// Within a piece all sums are of 32 bits and exact, in any order. Then, in float32 and from piece to
// piece in ascending order, y = fma(sum, scale of the input * scale of the group, y), and the same
// with the sum of the inputs and the group's minimum. So bits depend on neither rows, threads nor
// instruction set.

// Tiles' rows of inputs that the panels pass by in one round: they stay in the second-level cache.
constexpr int64_t kCachedW8Inputs = 768 * 1024;

// How far ahead codes are fetched, in bytes.
constexpr int64_t kW8Ahead = 16 * 1024;

// `W8Dot`: sums of products for the 16 outputs of a block. Its inputs, four, take kBytes.
#if defined(__AVX512VNNI__)

struct W8Dot {
  static constexpr int kRows = 28;
  static constexpr int kBytes = kW8Inputs;

  static void put(const int8_t* q, uint8_t* inputs) { std::memcpy(inputs, q, kBytes); }

  using Codes = __m512i;
  static Codes load(const uint8_t* block) { return _mm512_load_si512(block); }

  void add(Codes codes, const uint8_t* inputs) {
    int32_t quad;
    std::memcpy(&quad, inputs, sizeof quad);
    sums = _mm512_dpbusd_epi32(sums, codes, _mm512_set1_epi32(quad));
  }

  void add_to(int32_t* out) const {
    _mm512_storeu_si512(out, _mm512_add_epi32(_mm512_loadu_si512(out), sums));
  }

  __m512i sums = _mm512_setzero_si512();
};

#elif defined(__AVX512F__) || defined(__AVX2__)

#if defined(__AVX512F__)
using CodeBytes = __m512i;
inline CodeBytes load_bytes(const uint8_t* p) { return _mm512_load_si512(p); }
inline CodeBytes even_bytes(CodeBytes a) { return _mm512_and_si512(a, _mm512_set1_epi16(0x00FF)); }
inline CodeBytes odd_bytes(CodeBytes a) { return _mm512_srli_epi16(a, 8); }
inline CodeBytes add_pairs(CodeBytes sum, CodeBytes a, int32_t pair) {
  return _mm512_add_epi32(sum, _mm512_madd_epi16(a, _mm512_set1_epi32(pair)));
}
#else
using CodeBytes = __m256i;
inline CodeBytes load_bytes(const uint8_t* p) {
  return _mm256_load_si256(reinterpret_cast<const CodeBytes*>(p));
}
inline CodeBytes even_bytes(CodeBytes a) { return _mm256_and_si256(a, _mm256_set1_epi16(0x00FF)); }
inline CodeBytes odd_bytes(CodeBytes a) { return _mm256_srli_epi16(a, 8); }
inline CodeBytes add_pairs(CodeBytes sum, CodeBytes a, int32_t pair) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(a, _mm256_set1_epi32(pair)));
}
#endif

// Products of 16 bits, added in pairs: of even inputs, and of odd ones. None can overflow.
struct W8Dot {
  static constexpr int kVecs = kW8Block / sizeof(CodeBytes);
  static constexpr int kRows = (Vec::kNumRegisters - 2 * kVecs - 2) / kVecs;  // codes, a pair, products
  static constexpr int kBytes = 8;

  static void put(const int8_t* q, uint8_t* inputs) {
    const int16_t pairs[4] = {q[0], q[2], q[1], q[3]};
    std::memcpy(inputs, pairs, sizeof pairs);
  }

  struct Codes {
    CodeBytes even[kVecs], odd[kVecs];
  };
  static Codes load(const uint8_t* block) {
    Codes codes;
    for (int v = 0; v < kVecs; ++v) {
      const CodeBytes bytes = load_bytes(block + v * sizeof(CodeBytes));
      codes.even[v] = even_bytes(bytes);
      codes.odd[v] = odd_bytes(bytes);
    }
    return codes;
  }

  void add(const Codes& codes, const uint8_t* inputs) {
    int32_t pairs[2];
    std::memcpy(pairs, inputs, sizeof pairs);
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) {
      sums[v] = add_pairs(sums[v], codes.even[v], pairs[0]);
      sums[v] = add_pairs(sums[v], codes.odd[v], pairs[1]);
    }
  }

  void add_to(int32_t* out) const {
    for (int v = 0; v < kVecs; ++v) {
      int32_t some[sizeof(CodeBytes) / sizeof(int32_t)];
      std::memcpy(some, &sums[v], sizeof some);
      for (size_t i = 0; i < std::size(some); ++i) out[v * std::size(some) + i] += some[i];
    }
  }

  CodeBytes sums[kVecs] = {};
};

#else

struct W8Dot {
  static constexpr int kRows = 4;
  static constexpr int kBytes = kW8Inputs;

  static void put(const int8_t* q, uint8_t* inputs) { std::memcpy(inputs, q, kBytes); }

  using Codes = const uint8_t*;
  static Codes load(const uint8_t* block) { return block; }

  void add(Codes codes, const uint8_t* inputs) {
    int8_t q[kBytes];
    std::memcpy(q, inputs, sizeof q);
    for (int n = 0; n < kW8Width; ++n) {
      for (int i = 0; i < kW8Inputs; ++i) sums[n] += q[i] * codes[n * kW8Inputs + i];
    }
  }

  void add_to(int32_t* out) const {
    for (int n = 0; n < kW8Width; ++n) out[n] += sums[n];
  }

  int32_t sums[kW8Width] = {};
};

#endif

// Quantized rows, cut into tiles: [block][row of the tile] of kBytes each.
struct W8Rows {
  int64_t num_rows, num_tiles;
  int64_t row_bytes;
  uint8_t* inputs;
  float* scales;    // [num_rows][num_scales]
  int32_t* totals;  // [num_rows][num_pieces], sums of the inputs' codes

  int64_t row(int64_t tile) const { return num_rows * tile / num_tiles; }
  int height(int64_t tile) const { return static_cast<int>(row(tile + 1) - row(tile)); }
};

// Whole numbers near x / scale + zero, ties to even, within [least, 127]; of NaN any.
inline void to_whole(const float* x, int64_t n, float scale, float zero, float least, int8_t* q) {
  const float shift = 0x1.8p23f;  // to it whole numbers are added exactly, others rounded
  for (int64_t i = 0; i < n; ++i) {
    float value = x[i] / scale + zero;
    value = value > least ? value : least;
    value = value < 127.0f ? value : 127.0f;
    q[i] = static_cast<int8_t>(bits<int32_t>(value + shift) & 0xFF);
  }
}

// Whole numbers of a row that lies in the weight's order, and their scales.
inline void quantize_row(const W8A8Panels& w, const float* x, int8_t* q, float* scales) {
  const InputScaling& form = w.inputs;
  if (form.is_static) {
    const float most = largest(x, w.in_features);
    scales[0] = most == most ? form.scale : most;  // NaN stays
    to_whole(x, w.in_features, form.scale, static_cast<float>(form.zero), -128.0f, q);
    return;
  }
  for (int64_t s = 0; s < w.num_scales; ++s) {
    const int64_t start = s * form.sharing, n = std::min(form.sharing, w.in_features - start);
    scales[s] = largest(x + start, n) / 127.0f;
    if (scales[s] == 0.0f) {
      std::memset(q + start, 0, n);
    } else {
      to_whole(x + start, n, scales[s], 0.0f, -127.0f, q + start);
    }
  }
}

// A row's whole numbers in the place of their tile, whose blocks are `stride` bytes apart.
inline void place_row(const W8A8Panels& w, const int8_t* q, uint8_t* inputs, int64_t stride,
                      int32_t* totals) {
  for (int64_t p = 0; p < w.num_pieces; ++p) {
    const int32_t start = w.starts[p], end = w.starts[p + 1];
    int32_t total = 0;
    for (int32_t i = start; i < end; ++i) total += q[i];
    totals[p] = total;
    int32_t i = start;
    for (; i + kW8Inputs <= end; i += kW8Inputs, inputs += stride) W8Dot::put(q + i, inputs);
    if (i < end) {
      int8_t some[kW8Inputs] = {};
      std::memcpy(some, q + i, end - i);
      W8Dot::put(some, inputs);
      inputs += stride;
    }
  }
}

// In the calling thread's memory, valid until its next call.
inline W8Rows w8_rows(Pool& pool, const W8A8Panels& w, int64_t num_rows, const float* x,
                      int64_t x_stride) {
  const int64_t num_tiles = (num_rows + W8Dot::kRows - 1) / W8Dot::kRows;
  const int64_t row_bytes = static_cast<int64_t>(w.blocks[w.num_pieces]) * W8Dot::kBytes;
  const int64_t row_floats = row_bytes / 4 + w.num_scales + w.num_pieces;
  const int64_t spare_floats = 2 * w.in_features;  // of a tile: a row in order, its whole numbers
  float* const memory = scratch(num_rows * row_floats + num_tiles * spare_floats);
  float* const scales = memory + num_rows * row_bytes / 4;
  const W8Rows rows = {num_rows, num_tiles, row_bytes, reinterpret_cast<uint8_t*>(memory), scales,
                       reinterpret_cast<int32_t*>(scales + num_rows * w.num_scales)};
  pool.run(static_cast<int>(num_tiles), [&](int t, int) {
    float* const ordered = memory + num_rows * row_floats + t * spare_floats;
    auto* const q = reinterpret_cast<int8_t*>(ordered + w.in_features);
    uint8_t* inputs = rows.inputs + rows.row(t) * row_bytes;
    for (int64_t row = rows.row(t); row < rows.row(t + 1); ++row, inputs += W8Dot::kBytes) {
      const float* from = x + row * x_stride;
      if (w.order != nullptr) {
        for (int64_t i = 0; i < w.in_features; ++i) ordered[i] = from[w.order[i]];
        from = ordered;
      }
      quantize_row(w, from, q, rows.scales + row * w.num_scales);
      place_row(w, q, inputs, rows.height(t) * W8Dot::kBytes, rows.totals + row * w.num_pieces);
    }
  });
  return rows;
}

// out[r] += sum over the blocks of a piece, for Rows rows. Few rows take several sums each, as one
// would wait for itself.
template <int Rows>
void w8_sums(const uint8_t* inputs, const uint8_t* codes, int64_t num_blocks,
             int32_t (*out)[kW8Width]) {
  constexpr int kChains = Rows < 3 ? 4 / Rows : 1;
  constexpr int kStride = Rows * W8Dot::kBytes;
  W8Dot sums[kChains][Rows];
  int64_t block = 0;
  for (; block + kChains <= num_blocks; block += kChains) {
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) {
      __builtin_prefetch(codes + c * kW8Block + kW8Ahead, 0, 2);
      const typename W8Dot::Codes some = W8Dot::load(codes + c * kW8Block);
#pragma GCC unroll 32
      for (int r = 0; r < Rows; ++r) {
        sums[c][r].add(some, inputs + c * kStride + r * W8Dot::kBytes);
      }
    }
    codes += kChains * kW8Block;
    inputs += kChains * kStride;
  }
  for (; block < num_blocks; ++block, codes += kW8Block, inputs += kStride) {
    const typename W8Dot::Codes some = W8Dot::load(codes);
#pragma GCC unroll 32
    for (int r = 0; r < Rows; ++r) sums[0][r].add(some, inputs + r * W8Dot::kBytes);
  }
#pragma GCC unroll 4
  for (int c = 0; c < kChains; ++c) {
#pragma GCC unroll 32
    for (int r = 0; r < Rows; ++r) sums[c][r].add_to(out[r]);
  }
}

using W8Sums = void (*)(const uint8_t*, const uint8_t*, int64_t, int32_t (*)[kW8Width]);

template <int... Below>
constexpr std::array<W8Sums, sizeof...(Below)> all_w8_sums(std::integer_sequence<int, Below...>) {
  return {w8_sums<Below + 1>...};
}

// kW8Sums[n - 1] is for n rows.
constexpr auto kW8Sums = all_w8_sums(std::make_integer_sequence<int, W8Dot::kRows>());

// y plus a piece's part for one row: `sums` of the inputs' codes times code + 128.
inline void add_piece(const W8A8Panels& w, const uint8_t* panel, int64_t piece, int32_t total,
                      float scale, const int32_t* sums, float* y) {
  const int64_t at = w.groups[piece] * kW8Width;
  const auto* scales = reinterpret_cast<const float*>(panel + w.scales_at) + at;
  const uint32_t bias = 128u * static_cast<uint32_t>(total);
  int32_t whole[kW8Width];
  // in 32 bits that may wrap on the way, as the last result fits
  for (int n = 0; n < kW8Width; ++n) whole[n] = static_cast<int32_t>(sums[n] - bias);
  if (w.sums_at != 0) {
    const auto* of_codes = reinterpret_cast<const int32_t*>(panel + w.sums_at) + piece * kW8Width;
    const uint32_t zero = static_cast<uint32_t>(w.inputs.zero);
    for (int n = 0; n < kW8Width; ++n) whole[n] -= static_cast<int32_t>(zero * of_codes[n]);
    total -= (w.starts[piece + 1] - w.starts[piece]) * w.inputs.zero;
  }
  float parts[kW8Width];
  for (int n = 0; n < kW8Width; ++n) parts[n] = static_cast<float>(whole[n]);
  if (w.zeros_at != 0) {
    const auto* zeros = reinterpret_cast<const float*>(panel + w.zeros_at) + at;
    for (int n = 0; n < kW8Width; ++n) {
      parts[n] = static_cast<float>(whole[n] - static_cast<double>(total) * zeros[n]);
    }
  }
  for (int n = 0; n < kW8Width; ++n) y[n] = __builtin_fmaf(parts[n], scale * scales[n], y[n]);
  if (w.minima_at != 0) {
    const auto* minima = reinterpret_cast<const float*>(panel + w.minima_at) + at;
    const float inputs = static_cast<float>(total);
    for (int n = 0; n < kW8Width; ++n) y[n] = __builtin_fmaf(inputs, scale * minima[n], y[n]);
  }
}

// A tile's rows of y for one panel.
inline void w8_tile(const W8A8Panels& w, const W8Rows& rows, int64_t tile, const uint8_t* panel,
                    int num_outputs, float* y) {
  const int height = rows.height(tile);
  const uint8_t* inputs = rows.inputs + rows.row(tile) * rows.row_bytes;
  float out[W8Dot::kRows][kW8Width];
  std::memset(out, 0, height * sizeof out[0]);
  for (int64_t p = 0; p < w.num_pieces; ++p) {
    int32_t sums[W8Dot::kRows][kW8Width];
    std::memset(sums, 0, height * sizeof sums[0]);
    const int64_t block = w.blocks[p];
    kW8Sums[height - 1](inputs + block * height * W8Dot::kBytes, panel + block * kW8Block,
                        w.blocks[p + 1] - block, sums);
    for (int r = 0; r < height; ++r) {
      const int64_t row = rows.row(tile) + r;
      add_piece(w, panel, p, rows.totals[row * w.num_pieces + p],
                rows.scales[row * w.num_scales + w.scales[p]], sums[r], out[r]);
    }
  }
  for (int r = 0; r < height; ++r) {
    std::memcpy(y + r * w.out_features, out[r], num_outputs * sizeof(float));
  }
}

// `multiply_w8a8` for as many rows as the cache holds.
inline void cached_w8a8(Pool& pool, const W8A8Panels& w, int64_t num_rows, const float* x,
                        int64_t x_stride, float* y) {
  const W8Rows rows = w8_rows(pool, w, num_rows, x, x_stride);
  pool.run_along(w.num_panels(), [&](int64_t p, int) {
    const int64_t output = p * kW8Width;
    const int width = static_cast<int>(std::min<int64_t>(kW8Width, w.out_features - output));
    for (int64_t t = 0; t < rows.num_tiles; ++t) {
      w8_tile(w, rows, t, w.panels + p * w.panel_bytes, width,
              y + rows.row(t) * w.out_features + output);
    }
  });
}

void multiply_w8a8(Pool& pool, const W8A8Panels& w, int64_t num_rows, const float* x,
                   int64_t x_stride, float* y) {
  const int64_t row_bytes = static_cast<int64_t>(w.blocks[w.num_pieces]) * W8Dot::kBytes;
  const int64_t most = std::max<int64_t>(4 * W8Dot::kRows, kCachedW8Inputs / row_bytes);
  const int64_t num_rounds = (num_rows + most - 1) / most;
  for (int64_t round = 0; round < num_rounds; ++round) {
    const int64_t row = num_rows * round / num_rounds;
    const int64_t count = num_rows * (round + 1) / num_rounds - row;
    cached_w8a8(pool, w, count, x + row * x_stride, x_stride, y + row * w.out_features);
  }
}
