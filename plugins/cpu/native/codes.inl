// y = x·Wᵀ with weights in codes (codes.h). Included after math.inl, with what the instruction set
// says of codes: `Dot<bits>`, `signed_nibble`, `load_half_floats`.
//
// For each output, piece after piece in the order of the inputs, and the same for any number of rows:
//
//   whole inputs   y = fma(sum of q * (code - zero), d * scale, y), the sum in whole numbers;
//                  y = fma(sum of q, d * minimum, y) where there are minima
//   float inputs   y = fma(sum of x * code, scale, y), a chain of multiply-adds, ascending;
//                  y = fma(sum of x, minimum, y) where there are minima or zeros
//
// Work is split over outputs only.

// Registers hold two sums for each row of a tile: of the piece and of all pieces.
constexpr int kCodesRows = Vec::kNumRegisters == 32 ? 12 : 4;
constexpr int kCodesParts = kCodesWidth / Vec::kWidth;

// Bytes of inputs that the panels pass by in one round: they stay in the second-level cache.
constexpr int64_t kCachedCodesInputs = 768 * 1024;
constexpr int64_t kPanelsAtOnce = 2;
// So few inputs are readied faster than a second thread is told of them.
constexpr int64_t kInputsAlone = 16 * 1024;

inline Ints load_ints(const void* p) {
  Ints ints;
  std::memcpy(&ints, p, sizeof ints);
  return ints;
}

inline Vec to_floats(Ints ints) { return {__builtin_convertvector(ints, decltype(Vec::v))}; }

inline float word_as_float(int32_t word) { return bits<float>(word); }

// A group's numbers for the outputs of a part: what is subtracted from a stored code of whole
// inputs, and what stands for that and the minimum otherwise.
struct CodedGroup {
  Vec scale, minimum;
  Ints zero;
};

inline Vec load_numbers(const uint8_t* from, int64_t first, bool half) {
  return half ? load_half_floats(from + 2 * first)
              : Vec::load(reinterpret_cast<const float*>(from) + first);
}

inline Ints load_shorts(const uint8_t* from, int64_t first) {
  using Shorts = int16_t __attribute__((vector_size(2 * Vec::kWidth)));
  Shorts shorts;
  std::memcpy(&shorts, from + 2 * first, sizeof shorts);
  return __builtin_convertvector(shorts, Ints);
}

inline CodedGroup load_group(const CodedPanels& w, const uint8_t* panel, int64_t group, int part) {
  const int64_t first = group * kCodesWidth + part * Vec::kWidth;
  const uint8_t* offsets = panel + w.offsets_at;
  const Ints bias = Ints{} + w.bias();
  CodedGroup g;
  g.scale = load_numbers(panel + w.scales_at, first, w.half_scales);
  g.zero = bias;
  g.minimum = Vec::zero();
  switch (w.offsets) {
    case Offsets::kConstant: g.zero = bias + w.zero; break;
    case Offsets::kWhole: g.zero = bias + load_shorts(offsets, first); break;
    case Offsets::kFraction:
      g.minimum = {-(load_numbers(offsets, first, false).v * g.scale.v)};
      break;
    case Offsets::kMinima: g.minimum = load_numbers(offsets, first, false); break;
    case Offsets::kMinimaHalf: g.minimum = load_numbers(offsets, first, true); break;
  }
  if (!w.whole_inputs) {
    g.minimum = Vec::fma({-to_floats(g.zero).v}, g.scale, g.minimum);
  }
  return g;
}

// What a product has to heed of a group, beside its scale.
struct CodedOffsets {
  explicit CodedOffsets(const CodedPanels& w) {
    const bool same = w.offsets == Offsets::kConstant, whole = w.offsets == Offsets::kWhole;
    zeros = w.whole_inputs && (whole || w.zero + w.bias() != 0);
    minima = w.whole_inputs ? !same && !whole : !same || w.zero + w.bias() != 0;
  }
  bool zeros, minima;
};

// Inputs quantized to int8. Words of a tile's piece: [quad][row] of four inputs each, then of each
// row the scale, minus the sum of the inputs as int16, and the sum as a float.
template <int Bits, int Rows>
struct WholePiece {
  static constexpr int kBlockInputs = 32 / Bits;
  static constexpr int kBlockWords = kBlockInputs / 4;
  static constexpr int kMoreWords = 3;

  void start() {
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) dots[r].start();
  }
  void block(Ints stored, const int32_t* x) {
    if constexpr (Bits == 4) {
      const Ints low = stored & 0x0F0F0F0F, high = stored >> 4 & 0x0F0F0F0F;
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) dots[r].add(low, x + r);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) dots[r].add(high, x + Rows + r);
    } else {
      const auto codes = Dot<8>::codes(stored);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) dots[r].add(codes, x + r);
    }
  }
  void finish(const CodedGroup& g, const CodedOffsets& has, const int32_t* more, Vec* sum) const {
    if (has.zeros) add<true>(g, more, sum);
    else add<false>(g, more, sum);
    if (!has.minima) return;
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const Vec d = Vec::broadcast(word_as_float(more[r]));
      const Vec inputs = Vec::broadcast(word_as_float(more[2 * Rows + r]));
      sum[r] = Vec::fma(inputs, d * g.minimum, sum[r]);
    }
  }

  Dot<Bits> dots[Rows];

 private:
  template <bool Zeros>
  void add(const CodedGroup& g, const int32_t* more, Vec* sum) const {
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const Ints total = Zeros ? dots[r].total(g.zero, more + Rows + r) : dots[r].total();
      const Vec d = Vec::broadcast(word_as_float(more[r]));
      sum[r] = Vec::fma(to_floats(total), d * g.scale, sum[r]);
    }
  }
};

// Float inputs. Words of a tile's piece: [input][row], then of each row the sum of its inputs.
template <int Bits, int Rows>
struct FloatPiece {
  static constexpr int kBlockInputs = 32 / Bits;
  static constexpr int kBlockWords = kBlockInputs;
  static constexpr int kMoreWords = 1;

  void start() {
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) dots[r] = Vec::zero();
  }
  void block(Ints stored, const int32_t* x) {
    block(stored, x, std::make_integer_sequence<int, kBlockInputs>());
  }
  void finish(const CodedGroup& g, const CodedOffsets& has, const int32_t* more, Vec* sum) const {
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) sum[r] = Vec::fma(dots[r], g.scale, sum[r]);
    if (!has.minima) return;
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      sum[r] = Vec::fma(Vec::broadcast(word_as_float(more[r])), g.minimum, sum[r]);
    }
  }

  Vec dots[Rows];

 private:
  template <int... Input>
  void block(Ints stored, const int32_t* x, std::integer_sequence<int, Input...>) {
    (add(value<Input>(stored), x + Input * Rows), ...);
  }
  template <int Input>
  static Vec value(Ints stored) {
    if constexpr (Bits == 4) return signed_nibble<Input % 4 * 8 + Input / 4 * 4>(stored);
    else return to_floats(stored << (24 - 8 * Input) >> 24);
  }
  void add(Vec code, const int32_t* x) {
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      dots[r] = Vec::fma(Vec::broadcast(word_as_float(x[r])), code, dots[r]);
    }
  }
};

// The outputs of one part of a panel for the rows of a tile; fetches the next panel meanwhile.
template <class Piece, int Rows>
void codes_tile(const CodedPanels& w, const uint8_t* panel, int part, const int32_t* x, Vec* sum) {
  const int num_blocks = w.piece_inputs / Piece::kBlockInputs;
  const CodedOffsets has(w);
  const int64_t num_lines = w.panel_bytes / kCodesBlock;
  const uint8_t* codes = panel + part * Vec::kWidth * sizeof(int32_t);
  Vec totals[Rows];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) totals[r] = Vec::zero();
  int64_t s = 0, fetched = 0;
  for (int64_t g = 0; g < w.num_groups; ++g) {
    const CodedGroup group = load_group(w, panel, g, part);
    for (; s < w.group_ends[g]; ++s) {
      for (const int64_t until = num_lines * (s + 1) / w.num_pieces; fetched < until; ++fetched) {
        __builtin_prefetch(panel + w.panel_bytes + fetched * kCodesBlock, 0, 2);
      }
      Piece piece;
      piece.start();
      for (int b = 0; b < num_blocks; ++b) {
        piece.block(load_ints(codes), x);
        codes += kCodesBlock;
        x += Piece::kBlockWords * Rows;
      }
      piece.finish(group, has, x, totals);
      x += Piece::kMoreWords * Rows;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) sum[r] = totals[r];
}

using CodesTile = void (*)(const CodedPanels&, const uint8_t*, int, const int32_t*, Vec*);

template <template <int, int> class Piece, int Bits, int... Below>
constexpr std::array<CodesTile, sizeof...(Below)> codes_tiles(std::integer_sequence<int, Below...>) {
  return {codes_tile<Piece<Bits, Below + 1>, Below + 1>...};
}

// The tile of n rows is element n - 1.
inline const CodesTile* codes_tiles(const CodedPanels& w) {
  constexpr auto kHeights = std::make_integer_sequence<int, kCodesRows>();
  static constexpr auto kWhole4 = codes_tiles<WholePiece, 4>(kHeights);
  static constexpr auto kWhole8 = codes_tiles<WholePiece, 8>(kHeights);
  static constexpr auto kFloat4 = codes_tiles<FloatPiece, 4>(kHeights);
  static constexpr auto kFloat8 = codes_tiles<FloatPiece, 8>(kHeights);
  if (w.whole_inputs) return w.bits == 4 ? kWhole4.data() : kWhole8.data();
  return w.bits == 4 ? kFloat4.data() : kFloat8.data();
}

// One row's inputs that share a scale, as whole numbers.
struct QuantizedInputs {
  int8_t codes[kSharedInputs];
  int32_t sum;  // of the codes
  float scale;
};

// d = amax / 127 and the even whole numbers nearest to x / d, which are within 127 (for a d that has
// few bits, by force), and 0 where d is 0. NaN and infinity make d so.
inline void quantize(const float* x, QuantizedInputs& out) {
  constexpr int kVecs = kSharedInputs / Vec::kWidth;
  Ints largest = Ints{};
  for (int v = 0; v < kVecs; ++v) {
    // as whole numbers, floats without sign have their order, and NaN is above all
    const Ints size = load_ints(x + v * Vec::kWidth) & 0x7FFFFFFF;
    largest = size > largest ? size : largest;
  }
  int32_t lanes[Vec::kWidth], most = 0;
  Ints sum = Ints{};
  std::memcpy(lanes, &largest, sizeof lanes);
  for (int lane = 0; lane < Vec::kWidth; ++lane) most = std::max(most, lanes[lane]);
  out.scale = word_as_float(most) / 127.0f;
  const Vec divisor = Vec::broadcast(out.scale == 0.0f ? INFINITY : out.scale);
  const Vec shift = Vec::broadcast(0x1.8p23f), bound = Vec::broadcast(127.0f);
  for (int v = 0; v < kVecs; ++v) {
    const Vec ratio = {Vec::load(x + v * Vec::kWidth).v / divisor.v};
    const Vec within = minimum(maximum(ratio, Vec{-bound.v}), bound);
    const Ints whole = bits<Ints>(within + shift) - bits<Ints>(shift);
    using Narrow = int8_t __attribute__((vector_size(Vec::kWidth)));
    const Narrow narrow = __builtin_convertvector(whole, Narrow);
    sum += whole;
    std::memcpy(out.codes + v * Vec::kWidth, &narrow, sizeof narrow);
  }
  std::memcpy(lanes, &sum, sizeof lanes);
  out.sum = 0;
  for (int lane = 0; lane < Vec::kWidth; ++lane) out.sum += lanes[lane];
}

// The sum in one order, on all instruction sets.
inline float sum_of_shared(const float* x) {
  float sums[kSharedInputs];
  std::memcpy(sums, x, sizeof sums);
  for (int width = kSharedInputs / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) sums[i] += sums[i + width];
  }
  return sums[0];
}

// Readies rows for a tile: words of a piece as its product reads them, `height` rows side by side.
class CodesInputs {
 public:
  CodesInputs(const CodedPanels& w, int64_t x_stride) : w_(w), x_stride_(x_stride) {}

  int64_t piece_words() const {
    return w_.whole_inputs ? w_.piece_inputs / 4 + 3 : w_.piece_inputs + 1;
  }
  int64_t row_words() const { return w_.num_pieces * piece_words(); }

  void ready(const float* x, int height, int32_t* words) const {
    for (int r = 0; r < height; ++r) {
      if (w_.whole_inputs) ready_whole(x + r * x_stride_, height, words + r);
      else ready_floats(x + r * x_stride_, height, words + r);
    }
  }

 private:
  // kSharedInputs of x from `start` on, in order: in place, or in `memory` where they are scattered,
  // or fewer, with zeros behind.
  const float* collect(const float* x, int64_t start, int64_t end, float* memory) const {
    if (w_.order == nullptr && end - start == kSharedInputs) return x + start;
    std::memset(memory, 0, kSharedInputs * sizeof(float));
    for (int64_t i = start; i < end; ++i) {
      memory[i - start] = x[w_.order == nullptr ? i : w_.order[i]];
    }
    return memory;
  }

  void ready_floats(const float* x, int height, int32_t* words) const {
    const bool sums = CodedOffsets(w_).minima;
    for (int64_t s = 0; s < w_.num_pieces; ++s) {
      float memory[kSharedInputs];
      const float* inputs = collect(x, w_.piece_starts[s], w_.piece_starts[s + 1], memory);
      for (int i = 0; i < w_.piece_inputs; ++i) words[i * height] = bits<int32_t>(inputs[i]);
      words += w_.piece_inputs * height;
      if (sums) *words = bits<int32_t>(sum_of_shared(inputs));
      words += height;
    }
  }

  void ready_whole(const float* x, int height, int32_t* words) const {
    QuantizedInputs shared{};
    int64_t end = 0;
    for (int64_t s = 0; s < w_.num_pieces; ++s) {
      const int64_t start = w_.piece_starts[s], size = w_.piece_starts[s + 1] - start;
      if (start == end) {
        float memory[kSharedInputs];
        end = std::min<int64_t>(start + kSharedInputs, w_.in_features);
        quantize(collect(x, start, end, memory), shared);
      }
      if (size == kSharedInputs) {
        put(shared, kSharedInputs / 4, height, words);
      } else {
        QuantizedInputs own = {{}, 0, shared.scale};
        for (int64_t i = 0; i < size; ++i) {
          own.codes[i] = shared.codes[start % kSharedInputs + i];
          own.sum += own.codes[i];
        }
        put(own, w_.piece_inputs / 4, height, words);
      }
      words += piece_words() * height;
    }
  }

  static void put(const QuantizedInputs& inputs, int num_words, int height, int32_t* words) {
    int32_t quads[kSharedInputs / 4];
    std::memcpy(quads, inputs.codes, sizeof quads);
    for (int i = 0; i < num_words; ++i) words[i * height] = quads[i];
    words += num_words * height;
    words[0] = bits<int32_t>(inputs.scale);
    words[height] = static_cast<uint16_t>(-inputs.sum);
    words[2 * height] = bits<int32_t>(static_cast<float>(inputs.sum));
  }

  const CodedPanels& w_;
  int64_t x_stride_;
};

// Rows that one round takes, cut into tiles of nearly equal heights.
struct CodesTiles {
  int64_t num_rows, num_tiles;
  int64_t row(int64_t tile) const { return num_rows * tile / num_tiles; }
  int height(int64_t tile) const { return static_cast<int>(row(tile + 1) - row(tile)); }
};

inline void store_tile(const Vec* sum, int height, int64_t num_outputs, float* y,
                       int64_t y_stride) {
  for (int r = 0; r < height; ++r) {
    if (num_outputs >= Vec::kWidth) {
      sum[r].store(y + r * y_stride);
    } else {
      float whole[Vec::kWidth];
      sum[r].store(whole);
      std::memcpy(y + r * y_stride, whole, num_outputs * sizeof(float));
    }
  }
}

// `multiply_codes` for as many rows as the cache holds.
inline void multiply_cached(Pool& pool, const CodedPanels& w, int64_t num_rows, const float* x,
                            int64_t x_stride, float* y) {
  const CodesInputs inputs(w, x_stride);
  const CodesTiles tiles = {num_rows, (num_rows + kCodesRows - 1) / kCodesRows};
  const int64_t row_words = inputs.row_words();
  auto* const words = reinterpret_cast<int32_t*>(scratch(num_rows * row_words));
  const auto ready = [&](int64_t t) {
    inputs.ready(x + tiles.row(t) * x_stride, tiles.height(t), words + tiles.row(t) * row_words);
  };
  if (num_rows * w.in_features <= kInputsAlone) {
    for (int64_t t = 0; t < tiles.num_tiles; ++t) ready(t);
  } else {
    pool.run(static_cast<int>(tiles.num_tiles), [&](int t, int) { ready(t); });
  }
  const CodesTile* const products = codes_tiles(w);
  const auto multiply = [&](int64_t p, int part, int64_t t) {
    const int64_t row = tiles.row(t), output = p * kCodesWidth + part * Vec::kWidth;
    if (output >= w.out_features) return;
    Vec sum[kCodesRows];
    products[tiles.height(t) - 1](w, w.panels + p * w.panel_bytes, part, words + row * row_words,
                                  sum);
    store_tile(sum, tiles.height(t), w.out_features - output, y + row * w.out_features + output,
               w.out_features);
  };
  // A tile's inputs serve some panels while they are in the first-level cache.
  const int64_t at_once = tiles.num_tiles > 1 ? kPanelsAtOnce : 1;
  pool.run_along((w.num_panels() + at_once - 1) / at_once, [&](int64_t i, int) {
    const int64_t end = std::min((i + 1) * at_once, w.num_panels());
    for (int64_t t = 0; t < tiles.num_tiles; ++t) {
      for (int64_t p = i * at_once; p < end; ++p) {
        for (int part = 0; part < kCodesParts; ++part) multiply(p, part, t);
      }
    }
  });
}

void multiply_codes(Pool& pool, const CodedPanels& w, int64_t num_rows, const float* x,
                    int64_t x_stride, float* y) {
  const int64_t row_bytes = CodesInputs(w, x_stride).row_words() * sizeof(int32_t);
  const int64_t most = std::max<int64_t>(2 * kCodesRows, kCachedCodesInputs / row_bytes);
  const int64_t num_rounds = (num_rows + most - 1) / most;
  for (int64_t round = 0; round < num_rounds; ++round) {
    const int64_t row = num_rows * round / num_rounds;
    const int64_t count = num_rows * (round + 1) / num_rounds - row;
    multiply_cached(pool, w, count, x + row * x_stride, x_stride, y + row * w.out_features);
  }
}
