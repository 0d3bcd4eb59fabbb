// Inputs of the product in codes.inl, as its tiles read them. Included there, after the tiles.

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
  CodesInputs(const CodedPanels& w, int64_t x_stride) : w_(w), has_(w), x_stride_(x_stride) {}

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
    const bool sums = has_.minima;
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

  void put(const QuantizedInputs& inputs, int num_words, int height, int32_t* words) const {
    const int32_t surplus = w_.bias() + w_.zero;
    int32_t quads[kSharedInputs / 4];
    std::memcpy(quads, inputs.codes, sizeof quads);
    for (int i = 0; i < num_words; ++i) words[i * height] = quads[i];
    words += num_words * height;
    words[0] = bits<int32_t>(inputs.scale);
    words[height] = -surplus * inputs.sum;
    words[2 * height] = has_.zeros ? static_cast<uint16_t>(-inputs.sum)
                                   : bits<int32_t>(static_cast<float>(inputs.sum));
  }

  const CodedPanels& w_;
  const CodedOffsets has_;
  int64_t x_stride_;
};

