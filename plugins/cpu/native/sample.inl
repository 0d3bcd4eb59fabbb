// Loops over a vocabulary for sample.cpp. Included by kernels.inl.

// Index of the largest, ties to the lower one; the first NaN where there is one.
int64_t argmax(const float* x, int64_t n) {
  int64_t best = 0;
  if (x[0] != x[0]) return best;
  for (int64_t i = 0; i < n; i += Vec::kWidth) {
    const int64_t end = i + Vec::kWidth;
    if (end <= n && Vec::all_at_most(Vec::load(x + i), Vec::broadcast(x[best]))) continue;
    for (int64_t j = i; j < end && j < n; ++j) {
      if (x[j] <= x[best]) continue;
      best = j;
      if (x[j] != x[j]) return best;
    }
  }
  return best;
}

// z = logits / temperature, filled up to whole blocks with -inf; the largest of each block. Returns
// whether one is NaN.
bool scale_logits(const float* logits, float temperature, int64_t n, float* z, float* largest) {
  const int64_t filled = (n + kBlock - 1) / kBlock * kBlock;
  for (int64_t i = 0; i < n; ++i) z[i] = logits[i] / temperature;
  for (int64_t i = n; i < filled; ++i) z[i] = -INFINITY;
  bool nan = false;
  for (int64_t first = 0; first < filled; first += kBlock) {
    Vec most = Vec::load(z + first);
    auto wrong = most.v != most.v;
    for (int64_t i = Vec::kWidth; i < kBlock; i += Vec::kWidth) {
      const Vec next = Vec::load(z + first + i);
      most.v = next.v > most.v ? next.v : most.v;
      wrong |= next.v != next.v;
    }
    float& most_of_all = largest[first / kBlock];
    most_of_all = most.v[0];
    for (int lane = 0; lane < Vec::kWidth; ++lane) {
      nan |= wrong[lane] != 0;
      if (most.v[lane] > most_of_all) most_of_all = most.v[lane];
    }
  }
  return nan;
}

inline Doubles weights_at(const float* z, double peak) {
  return exp(__builtin_convertvector(load_halves(z), Doubles) - peak);
}

// exp(z - peak). Like all loops below over n elements: n is a multiple of kBlock.
void weigh(const float* z, int64_t n, float peak, double* weights) {
  for (int64_t i = 0; i < n; i += kHalf) {
    const Doubles some = weights_at(z + i, peak);
    std::memcpy(weights + i, &some, sizeof some);
  }
}

// The sum of what `weigh` yields.
double total_weight(const float* z, int64_t n, float peak) {
  constexpr int kSums = 4;
  Doubles sums[kSums] = {};
  for (int64_t i = 0; i < n; i += kSums * kHalf) {
    for (int sum = 0; sum < kSums; ++sum) sums[sum] += weights_at(z + i + sum * kHalf, peak);
  }
  const Doubles lanes = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  double total = 0;
  for (int lane = 0; lane < kHalf; ++lane) total += lanes[lane];
  return total;
}

// The ids whose z is above the bound, in order. Returns their number.
int64_t collect(const float* z, int64_t n, float bound, int32_t* ids) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += Vec::kWidth) {
    if (Vec::all_at_most(Vec::load(z + i), Vec::broadcast(bound))) continue;
    for (int64_t j = i; j < i + Vec::kWidth; ++j) {
      ids[count] = static_cast<int32_t>(j);
      count += z[j] > bound;
    }
  }
  return count;
}

// Vectors of ids that are worked on side by side, so that one's products hide the others' latency.
constexpr int kChains = 4;
constexpr int kGroup = kChains * kHalf;

// First words of Philox4x32-10 (Salmon et al. 2011), in place of token ids. Only lower halves of
// lanes count on the way.
inline void philox(const NoiseKey& key, Words (&c0)[kChains]) {
  Words c1[kChains], c2[kChains], c3[kChains];
  for (int i = 0; i < kChains; ++i) {
    c1[i] = Words{} + key.position;
    c2[i] = Words{} + key.index;
    c3[i] = Words{};
  }
  uint32_t k0 = key.seed[0], k1 = key.seed[1];
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < kChains; ++i) {
      const Words product0 = multiply_low(c0[i], Words{} + uint64_t{0xD2511F53});
      const Words product1 = multiply_low(c2[i], Words{} + uint64_t{0xCD9E8D57});
      c0[i] = product1 >> 32 ^ c1[i] ^ uint64_t{k0};
      c2[i] = product0 >> 32 ^ c3[i] ^ uint64_t{k1};
      c1[i] = product1;
      c3[i] = product0;
    }
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  for (int i = 0; i < kChains; ++i) c0[i] &= uint64_t{0xFFFFFFFF};
}

// Not below the noise of the words, but for rounding. With v = 1 - u, u the word's uniform number,
// -ln(-ln(u)) <= -ln(v), and log2(v) is at least what v's exponent and fraction make as one number.
inline Halves noise_bound(Words words) {
  const Words exponent_of_2_52 = Words{} + (uint64_t{1023 + 52} << 52);
  const Doubles word = bits<Doubles>(words | exponent_of_2_52) - 0x1p52;
  const Words v = bits<Words>(0x1p32 - 0.5 - word);
  const Doubles high_bits = bits<Doubles>(v >> 20 | exponent_of_2_52) - 0x1p52;
  constexpr double kLn2 = 0x1.62e42fefa39efp-1;
  return __builtin_convertvector(kLn2 * (1023 + 32) - kLn2 * 0x1p-32 * high_bits, Halves);
}

inline void draw_group(const NoiseKey& key, const float* z, const int32_t* ids, Winner& winner) {
  Words words[kChains];
  float scaled[kGroup], bounds[kGroup];
  for (int i = 0; i < kGroup; ++i) scaled[i] = z[ids[i]];
  for (int i = 0; i < kChains; ++i) words[i] = widen(ids + i * kHalf);
  philox(key, words);
  for (int i = 0; i < kChains; ++i) {
    const Halves bound = load_halves(scaled + i * kHalf) + noise_bound(words[i]);
    std::memcpy(bounds + i * kHalf, &bound, sizeof bound);
  }
  for (int i = 0; i < kGroup; i += Vec::kWidth) {
    if (Vec::all_at_most(Vec::load(bounds + i), Vec::broadcast(winner.bound()))) continue;
    for (int j = i; j < i + Vec::kWidth; ++j) {
      if (bounds[j] <= winner.bound()) continue;
      const auto word = static_cast<uint32_t>(words[j / kHalf][j % kHalf]);
      winner.offer(scaled[j] + gumbel(word), ids[j]);
    }
  }
}

// Offers z + noise of n ids to the winner. Noise is evaluated only where its bound lets it win.
void draw(const NoiseKey& key, const float* z, const int32_t* ids, int64_t n, Winner& winner) {
  int64_t first = 0;
  for (; first + kGroup <= n; first += kGroup) draw_group(key, z, ids + first, winner);
  if (first == n) return;
  int32_t rest[kGroup];
  for (int i = 0; i < kGroup; ++i) rest[i] = ids[first + i < n ? first + i : n - 1];
  draw_group(key, z, rest, winner);
}
