// y = x·Wᵀ with weights in codes (codes.h). Included after math.inl, with what the instruction set
// says of codes: `Dot<bits>`, `signed_nibble`, `load_half_floats`, `widen_bytes`.
//
// For each output, piece after piece in the order of the inputs, and the same for any number of rows:
//
//   whole inputs   y = fma(sum of q * (code - zero), d * scale, y), the sum in whole numbers;
//                  y = fma(sum of q, d * minimum, y) where there are minima
//   float inputs   y = fma(sum of x * code, scale, y), a chain of multiply-adds, ascending;
//                  y = fma(sum of x, minimum, y) where there are minima or zeros
//
// Work is split over outputs only.

#include "codes_tiles.inl"
#include "codes_inputs.inl"

// So many pieces' numbers, or so many inputs' codes as floats, stay in the first-level cache.
constexpr int kPiecesAtOnce = 32;
constexpr int kInputsAtOnce = 192;

// Bytes of inputs that the panels pass by in one round: they stay in the second-level cache.
constexpr int64_t kCachedCodesInputs = 768 * 1024;
// So few inputs are readied faster than a second thread is told of them.
constexpr int64_t kInputsAlone = 16 * 1024;
// How far ahead weights are fetched, in bytes; but of a thread's share no more than this part, as
// another thread's share lies behind it.
constexpr int64_t kCodesAhead = 48 * 1024;
constexpr int64_t kShareAhead = 8;

// Rows that one round takes, cut into tiles of nearly equal heights.
struct CodesTiles {
  int64_t num_rows, num_tiles;
  int64_t row(int64_t tile) const { return num_rows * tile / num_tiles; }
  int height(int64_t tile) const { return static_cast<int>(row(tile + 1) - row(tile)); }
};

// The outputs that rows pass by together, whose vectors may lie in two panels. Where the last one is
// missing, the one before stands in for it.
class CodesSpan {
 public:
  // ahead: bytes from what is read to what is fetched meanwhile.
  CodesSpan(const CodedPanels& w, int64_t first, int64_t ahead)
      : w_(w), first_(first), num_outputs_(std::min<int64_t>(kSpanWidth, w.out_features - first)),
        ahead_(ahead) {}

  int num_vecs() const { return static_cast<int>((num_outputs_ + Vec::kWidth - 1) / Vec::kWidth); }

  // The numbers of some pieces' groups, [group][kSpanVecs].
  void load(const int32_t* groups, int num_pieces, CodedNumbers* out) const {
    switch (w_.offsets) {
      case Offsets::kConstant: return load<Offsets::kConstant>(groups, num_pieces, out);
      case Offsets::kWhole: return load<Offsets::kWhole>(groups, num_pieces, out);
      case Offsets::kFraction: return load<Offsets::kFraction>(groups, num_pieces, out);
      case Offsets::kMinima: return load<Offsets::kMinima>(groups, num_pieces, out);
      case Offsets::kMinimaHalf: return load<Offsets::kMinimaHalf>(groups, num_pieces, out);
    }
  }
  // The codes of a piece for a vector of outputs.
  const uint8_t* codes(int64_t piece, int v) const {
    const int64_t output = (first_ + v * Vec::kWidth) % kCodesWidth;
    return panel(v) + piece * w_.piece_bytes() + output * w_.output_bytes();
  }
  // From those to those of the next vector.
  int64_t vec_bytes(int v) const { return v + 1 < num_vecs() ? codes(0, v + 1) - codes(0, v) : 0; }
  int64_t ahead() const { return ahead_; }
  int64_t output(int v) const { return first_ + v * Vec::kWidth; }

 private:
  template <Offsets kOffsets>
  void load(const int32_t* groups, int num_pieces, CodedNumbers* out) const {
    for (int v = 0; v < num_vecs(); ++v) {
      const int64_t output = (first_ + v * Vec::kWidth) % kCodesWidth;
      const uint8_t* from = panel(v);
      CodedNumbers* to = out + v;
      for (int s = 0; s < num_pieces; ++s) {
        if (s > 0 && groups[s] == groups[s - 1]) continue;
        load_group<kOffsets>(w_, from, groups[s] * kCodesWidth + output, ahead_, *to);
        to += kSpanVecs;
      }
    }
  }
  const uint8_t* panel(int v) const {
    return w_.panels + (first_ + v * Vec::kWidth) / kCodesWidth * w_.panel_bytes;
  }

  const CodedPanels& w_;
  const int64_t first_, num_outputs_, ahead_;
};

// Codes of some pieces as floats: out [input][kSpanWidth].
template <int Bits>
void codes_to_floats(const CodesSpan& span, int64_t piece, int64_t num_blocks, float* out) {
  for (int v = 0; v < span.num_vecs(); ++v) {
    const uint8_t* codes = span.codes(piece, v);
    float* to = out + v * Vec::kWidth;
    for (int64_t b = 0; b < num_blocks; ++b, codes += kCodesBlock) {
      __builtin_prefetch(codes + span.ahead(), 0, 2);
      for (const Vec& values : FloatPiece<Bits, 1>::values(codes)) {
        values.store(to);
        to += kSpanWidth;
      }
    }
  }
}

// All rows of y for a span of outputs. words: the readied rows.
inline void multiply_span(const CodedPanels& w, const CodesSpan& span, const CodesTiles& tiles,
                          const int32_t* words, float* y) {
  const bool are_floats = !w.whole_inputs && tiles.num_rows > kRowsAlone;
  const CodesTile* const products = codes_tiles(w, are_floats);
  const int64_t piece_words = CodesInputs(w, 0).piece_words();
  const int most = are_floats ? kInputsAtOnce / w.piece_inputs : kPiecesAtOnce;
  const CodedOffsets has(w);
  CodedNumbers numbers[kPiecesAtOnce * kSpanVecs];
  alignas(kCodesBlock) float floats[kInputsAtOnce * kSpanWidth];
  for (int64_t s = 0; s < w.num_pieces; s += most) {
    const int num_pieces = static_cast<int>(std::min<int64_t>(most, w.num_pieces - s));
    const int32_t* groups = w.piece_groups + s;
    span.load(groups, num_pieces, numbers);
    if (are_floats) {
      const int64_t num_blocks = num_pieces * w.piece_bytes() / kCodesBlock;
      (w.bits == 4 ? codes_to_floats<4> : codes_to_floats<8>)(span, s, num_blocks, floats);
    }
    for (int64_t t = 0; t < tiles.num_tiles; ++t) {
      const CodesTile& tile = products[tiles.height(t) - 1];
      const int32_t* x = words + (tiles.row(t) * w.num_pieces + s * tiles.height(t)) * piece_words;
      for (int v = 0; v < span.num_vecs(); v += tile.num_vecs) {
        CodedPieces pieces{span.codes(s, v), span.vec_bytes(v), span.ahead(), groups, numbers + v,
                           num_pieces, w.piece_inputs, has};
        if (are_floats) {
          pieces.codes = reinterpret_cast<const uint8_t*>(floats + v * Vec::kWidth);
          pieces.vec_bytes = sizeof(Vec);
        }
        const int64_t output = span.output(v);
        tile.add(pieces, x, {y + tiles.row(t) * w.out_features + output, w.out_features,
                             w.out_features - output, s == 0});
      }
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
  const int64_t span_bytes = kSpanWidth / kCodesWidth * w.panel_bytes;
  const int64_t share = w.num_panels() * w.panel_bytes / pool.num_threads();
  const int64_t least = std::min(kCodesAhead, share / kShareAhead);
  const int64_t ahead = (least + span_bytes - 1) / span_bytes * span_bytes;
  pool.run_along((w.out_features + kSpanWidth - 1) / kSpanWidth, [&](int64_t i, int) {
    multiply_span(w, CodesSpan(w, i * kSpanWidth, ahead), tiles, words, y);
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
