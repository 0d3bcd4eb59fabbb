// Tiles of the product in codes.inl: some rows by some vectors of outputs. Included there.

// Registers hold the sums of a piece for each row of a tile and two vectors of outputs.
constexpr int kCodesRows = Vec::kNumRegisters == 32 ? 12 : 4;
// More rows of float inputs share codes that are made floats before; so few have registers for both.
constexpr int kRowsAlone = Vec::kNumRegisters / 4;
static_assert(kRowsAlone <= kCodesRows);

// Outputs that the rows pass by together, in vectors.
constexpr int kSpanWidth = 32;
constexpr int kSpanVecs = kSpanWidth / Vec::kWidth;

// Blocks of a piece are a multiple of this.
constexpr int kBlocksAtOnce = 2;

inline Ints load_ints(const void* p) {
  Ints ints;
  std::memcpy(&ints, p, sizeof ints);
  return ints;
}

inline Vec to_floats(Ints ints) { return {__builtin_convertvector(ints, decltype(Vec::v))}; }

inline float word_as_float(int32_t word) { return bits<float>(word); }

// What a product has to heed of a group, beside its scale.
struct CodedOffsets {
  explicit CodedOffsets(const CodedPanels& w) {
    const bool same = w.offsets == Offsets::kConstant, whole = w.offsets == Offsets::kWhole;
    zeros = w.whole_inputs && whole;
    minima = w.whole_inputs ? !same && !whole : !same || w.zero + w.bias() != 0;
  }
  bool zeros, minima;
};

// The numbers of a piece's group for a vector of outputs. With whole inputs, what all groups subtract
// from a stored code is with the inputs; with float ones, the minimum stands for any zero.
struct CodedNumbers {
  Vec scale, minimum;
  Ints zero;
};

inline Vec load_numbers(const uint8_t* from, int64_t first, bool half) {
  return half ? load_half_floats(from + 2 * first)
              : Vec::load(reinterpret_cast<const float*>(from) + first);
}

inline Ints load_shorts(const uint8_t* from, int64_t first) {
  Shorts shorts;
  std::memcpy(&shorts, from + 2 * first, sizeof shorts);
  return __builtin_convertvector(shorts, Ints);
}

// Only what a product heeds is written.
template <Offsets kOffsets>
void load_group(const CodedPanels& w, const uint8_t* panel, int64_t first, int64_t ahead,
                CodedNumbers& n) {
  constexpr int kBytes = kOffsets == Offsets::kWhole || kOffsets == Offsets::kMinimaHalf ? 2 : 4;
  const uint8_t *scales = panel + w.scales_at, *offsets = panel + w.offsets_at;
  __builtin_prefetch(scales + first * (w.half_scales ? 2 : 4) + ahead, 0, 2);
  n.scale = load_numbers(scales, first, w.half_scales);
  if (kOffsets != Offsets::kConstant) __builtin_prefetch(offsets + first * kBytes + ahead, 0, 2);
  if (kOffsets == Offsets::kMinima) n.minimum = load_numbers(offsets, first, false);
  if (kOffsets == Offsets::kMinimaHalf) n.minimum = load_numbers(offsets, first, true);
  if (kOffsets == Offsets::kFraction) {
    n.minimum = {-(load_numbers(offsets, first, false).v * n.scale.v)};
  }
  if (kOffsets == Offsets::kWhole) n.zero = load_shorts(offsets, first);
  if (w.whole_inputs) return;
  Ints zero = Ints{} + w.bias();
  if (kOffsets == Offsets::kConstant) zero += w.zero;
  if (kOffsets == Offsets::kWhole) zero += n.zero;
  if (kOffsets == Offsets::kConstant || kOffsets == Offsets::kWhole) n.minimum = Vec::zero();
  n.minimum = Vec::fma({-to_floats(zero).v}, n.scale, n.minimum);
}

// Of some pieces: the codes for kVecs vectors of outputs, `vec_bytes` apart, and the numbers of their
// groups, [group][kSpanVecs].
struct CodedPieces {
  const uint8_t* codes;
  int64_t vec_bytes;
  int64_t ahead;  // bytes to what is read later, which is fetched meanwhile
  const int32_t* groups;  // [num_pieces]
  const CodedNumbers* numbers;
  int num_pieces, piece_inputs;
  CodedOffsets has;
};

// Inputs quantized to int8. Words of a tile's piece: [quad][row] of four inputs each, then of each
// row the scale, what all codes have too much, and the sum of the inputs: minus it as int16 where
// there are zeros, else as a float.
template <int Bits, int Rows>
struct WholePiece {
  static constexpr int kVecs = Rows <= 2 ? 2 : 1;  // one sum alone would wait for itself
  static constexpr int kBlockInputs = 32 / Bits;
  static constexpr int kBlockBytes = kCodesBlock;
  static constexpr int kBlockWords = kBlockInputs / 4;
  static constexpr int kMoreWords = 3;

  void start(const int32_t* more) {
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      for (int v = 0; v < kVecs; ++v) dots[r][v].start(more[Rows + r]);
    }
  }
  void block(const uint8_t* codes, int64_t vec_bytes, const int32_t* x) {
    for (int v = 0; v < kVecs; ++v) {
      const Ints stored = load_ints(codes + v * vec_bytes);
      if constexpr (Bits == 4) {
        add(stored & 0x0F0F0F0F, x, v);
        add(stored >> 4 & 0x0F0F0F0F, x + Rows, v);
      } else {
        add(Dot<8>::codes(stored), x, v);
      }
    }
  }
  void finish(const CodedNumbers* n, const CodedOffsets& has, const int32_t* more,
              Vec (*sum)[kVecs]) const {
    if (has.zeros) add_total<true>(n, more, sum);
    else add_total<false>(n, more, sum);
    if (!has.minima) return;
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const Vec d = Vec::broadcast(word_as_float(more[r]));
      const Vec inputs = Vec::broadcast(word_as_float(more[2 * Rows + r]));
      for (int v = 0; v < kVecs; ++v) sum[r][v] = Vec::fma(inputs, d * n[v].minimum, sum[r][v]);
    }
  }

  Dot<Bits> dots[Rows][kVecs];

 private:
  template <class Codes>
  void add(const Codes& codes, const int32_t* x, int v) {
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) dots[r][v].add(codes, x + r);
  }
  template <bool Zeros>
  void add_total(const CodedNumbers* n, const int32_t* more, Vec (*sum)[kVecs]) const {
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const int32_t surplus = more[Rows + r];
      const Vec d = Vec::broadcast(word_as_float(more[r]));
      for (int v = 0; v < kVecs; ++v) {
        const Ints total = Zeros ? dots[r][v].total(surplus, n[v].zero, more + 2 * Rows + r)
                                 : dots[r][v].total(surplus);
        sum[r][v] = Vec::fma(to_floats(total), d * n[v].scale, sum[r][v]);
      }
    }
  }
};

// Float inputs. Words of a tile's piece: [input][row], then of each row the sum of its inputs. Codes of
// 32 bits are those that were made floats before, [input][kSpanWidth].
template <int Bits, int Rows>
struct FloatPiece {
  static constexpr int kVecs = 2;
  static constexpr int kBlockInputs = 32 / Bits;
  static constexpr int kBlockBytes = Bits == 32 ? kSpanWidth * sizeof(float) : kCodesBlock;
  static constexpr int kBlockWords = kBlockInputs;
  static constexpr int kMoreWords = 1;

  void start(const int32_t*) {
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      for (int v = 0; v < kVecs; ++v) dots[r][v] = Vec::zero();
    }
  }
  void block(const uint8_t* codes, int64_t vec_bytes, const int32_t* x) {
    const auto first = values(codes), second = values(codes + vec_bytes);
#pragma GCC unroll 8
    for (int i = 0; i < kBlockInputs; ++i) add(first[i], second[i], x + i * Rows);
  }
  void finish(const CodedNumbers* n, const CodedOffsets& has, const int32_t* more,
              Vec (*sum)[kVecs]) const {
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      for (int v = 0; v < kVecs; ++v) sum[r][v] = Vec::fma(dots[r][v], n[v].scale, sum[r][v]);
    }
    if (!has.minima) return;
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const Vec inputs = Vec::broadcast(word_as_float(more[r]));
      for (int v = 0; v < kVecs; ++v) sum[r][v] = Vec::fma(inputs, n[v].minimum, sum[r][v]);
    }
  }

  // A block's codes for a vector of outputs, of each of its inputs.
  static std::array<Vec, kBlockInputs> values(const uint8_t* codes) {
    if constexpr (Bits == 32) {
      return {Vec::load(reinterpret_cast<const float*>(codes))};
    } else if constexpr (Bits == 8) {
      const auto* bytes = reinterpret_cast<const int8_t*>(codes);
      return {to_floats(widen_bytes(bytes)), to_floats(widen_bytes(bytes + kCodesWidth)),
              to_floats(widen_bytes(bytes + 2 * kCodesWidth)),
              to_floats(widen_bytes(bytes + 3 * kCodesWidth))};
    } else {
      const Ints c = load_ints(codes);
      return {signed_nibble<0>(c), signed_nibble<8>(c), signed_nibble<16>(c), signed_nibble<24>(c),
              signed_nibble<4>(c), signed_nibble<12>(c), signed_nibble<20>(c), signed_nibble<28>(c)};
    }
  }

  Vec dots[Rows][kVecs];

 private:
  void add(Vec first, Vec second, const int32_t* x) {
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const Vec input = Vec::broadcast(word_as_float(x[r]));
      dots[r][0] = Vec::fma(input, first, dots[r][0]);
      dots[r][1] = Vec::fma(input, second, dots[r][1]);
    }
  }
};

// A row of y, of which `count` numbers exist from here on.
inline Vec load_part(const float* y, int64_t count) {
  if (count >= Vec::kWidth) return Vec::load(y);
  float whole[Vec::kWidth] = {};
  if (count > 0) std::memcpy(whole, y, count * sizeof(float));
  return Vec::load(whole);
}

inline void store_part(Vec part, int64_t count, float* y) {
  if (count >= Vec::kWidth) return part.store(y);
  float whole[Vec::kWidth];
  part.store(whole);
  if (count > 0) std::memcpy(y, whole, count * sizeof(float));
}

// Where a tile's sums are: rows `stride` apart, of which `count` outputs exist.
struct CodedSums {
  float* y;
  int64_t stride, count;
  bool are_new;
};

// Adds some pieces to a tile's outputs, kVecs vectors wide.
template <class Piece, int Rows>
void codes_tile(const CodedPieces& p, const int32_t* x, const CodedSums& sums) {
  constexpr int kVecs = Piece::kVecs;
  const int num_blocks = p.piece_inputs / Piece::kBlockInputs;
  const uint8_t* codes = p.codes;
  const CodedNumbers* numbers = p.numbers;
  const int64_t vec_bytes = p.vec_bytes, ahead = p.ahead;
  Vec totals[Rows][kVecs];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < kVecs; ++v) {
      const float* y = sums.y + r * sums.stride + v * Vec::kWidth;
      totals[r][v] = sums.are_new ? Vec::zero() : load_part(y, sums.count - v * Vec::kWidth);
    }
  }
  for (int s = 0; s < p.num_pieces; ++s) {
    if (s > 0 && p.groups[s] != p.groups[s - 1]) numbers += kSpanVecs;
    const int32_t* more = x + num_blocks * Piece::kBlockWords * Rows;
    Piece piece;
    piece.start(more);
    while (x < more) {
#pragma GCC unroll 2
      for (int b = 0; b < kBlocksAtOnce; ++b) {
        for (int v = 0; v < kVecs && Piece::kBlockBytes == kCodesBlock; ++v) {
          __builtin_prefetch(codes + v * vec_bytes + ahead, 0, 2);
        }
        piece.block(codes, vec_bytes, x);
        x += Piece::kBlockWords * Rows;
        codes += Piece::kBlockBytes;
      }
    }
    piece.finish(numbers, p.has, more, totals);
    x += Piece::kMoreWords * Rows;
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < kVecs; ++v) {
      float* y = sums.y + r * sums.stride + v * Vec::kWidth;
      store_part(totals[r][v], sums.count - v * Vec::kWidth, y);
    }
  }
}

struct CodesTile {
  void (*add)(const CodedPieces&, const int32_t*, const CodedSums&);
  int num_vecs;
};

template <template <int, int> class Piece, int Bits, int... Below>
constexpr std::array<CodesTile, sizeof...(Below)> codes_tiles(std::integer_sequence<int, Below...>) {
  return {CodesTile{codes_tile<Piece<Bits, Below + 1>, Below + 1>, Piece<Bits, Below + 1>::kVecs}...};
}

// The tile of n rows is element n - 1.
inline const CodesTile* codes_tiles(const CodedPanels& w, bool are_floats) {
  constexpr auto kHeights = std::make_integer_sequence<int, kCodesRows>();
  constexpr auto kFewHeights = std::make_integer_sequence<int, kRowsAlone>();
  static constexpr auto kWhole4 = codes_tiles<WholePiece, 4>(kHeights);
  static constexpr auto kWhole8 = codes_tiles<WholePiece, 8>(kHeights);
  static constexpr auto kFloat4 = codes_tiles<FloatPiece, 4>(kFewHeights);
  static constexpr auto kFloat8 = codes_tiles<FloatPiece, 8>(kFewHeights);
  static constexpr auto kFloats = codes_tiles<FloatPiece, 32>(kHeights);
  if (are_floats) return kFloats.data();
  if (w.whole_inputs) return w.bits == 4 ? kWhole4.data() : kWhole8.data();
  return w.bits == 4 ? kFloat4.data() : kFloat8.data();
}

