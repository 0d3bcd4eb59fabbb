#include "sample.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "kernels.h"

namespace pegboard {
namespace {

// An id among those of its row: ascending `order` is descending z, equal ones by ascending id.
struct Ranked {
  uint64_t order;
  double weight;
};

uint64_t order_of(float z, int32_t id) {
  z += 0.0f;  // -0 and 0 are equal
  uint32_t bits;
  std::memcpy(&bits, &z, sizeof bits);
  // Bits of positive numbers ascend with them, those of negative ones descend.
  bits = bits >> 31 ? bits : ~bits & 0x7FFFFFFF;
  return uint64_t{bits} << 32 | static_cast<uint32_t>(id);
}

// The order of the last entry of the shortest prefix, by ascending order, that weighs as much; of the
// last entry where rounding leaves all of them below. No entry weighs nothing. Those of one digit of
// the order are weighed at a time, most significant first, until few are left to sort; the other
// entries are taken out.
uint64_t prefix_end(std::vector<Ranked>& entries, double wanted) {
  constexpr int kDigitBits = 11, kNumDigits = 1 << kDigitBits;
  constexpr size_t kFew = 256;
  double before = 0.0;
  for (int shift = 64; entries.size() > kFew && shift > 0;) {
    shift = std::max(0, shift - kDigitBits);
    const auto digit_of = [shift](const Ranked& entry) {
      return static_cast<int>(entry.order >> shift) & (kNumDigits - 1);
    };
    double weights[kNumDigits] = {};
    for (const Ranked& entry : entries) weights[digit_of(entry)] += entry.weight;
    int digit = -1;
    for (int next = 0; next < kNumDigits; ++next) {
      if (weights[next] == 0.0) continue;
      if (digit >= 0) before += weights[digit];
      digit = next;
      if (before + weights[digit] >= wanted) break;
    }
    const auto other = [&](const Ranked& entry) { return digit_of(entry) != digit; };
    entries.erase(std::remove_if(entries.begin(), entries.end(), other), entries.end());
  }
  std::sort(entries.begin(), entries.end(),
            [](const Ranked& a, const Ranked& b) { return a.order < b.order; });
  for (const Ranked& entry : entries) {
    before += entry.weight;
    if (before >= wanted) return entry.order;
  }
  return entries.back().order;
}

// A row at work, in the memory of its thread.
class Row {
 public:
  int64_t sample(const float* logits, int64_t vocab_size, const SampleRows& rows, int64_t row);

 private:
  void collect(float bound);
  void drop_below(float bound);
  void keep_top_k(size_t top_k);
  void keep_top_p_of_ids(double top_p);
  void keep_top_p_of_all(double top_p);
  void keep_prefix(double wanted);
  void rank();
  double weigh();

  const Kernels& set_ = kernels();
  float peak_ = 0.0f;           // the largest z
  std::vector<float> z_;        // logits / temperature, in whole blocks
  std::vector<float> largest_;  // z of each block
  std::vector<int32_t> ids_;    // that are left, ascending
  std::vector<Ranked> ranked_;  // the same
  std::vector<float> some_z_;
  std::vector<double> weights_;
};

int64_t Row::sample(const float* logits, int64_t vocab_size, const SampleRows& rows, int64_t row) {
  const float temperature = rows.temperature[row];
  if (temperature == 0.0f) return set_.argmax(logits, vocab_size);
  largest_.resize((vocab_size + kBlock - 1) / kBlock);
  z_.resize(largest_.size() * kBlock);
  if (set_.scale_logits(logits, temperature, vocab_size, z_.data(), largest_.data())) return 0;
  const auto likeliest = static_cast<int32_t>(set_.argmax(z_.data(), vocab_size));
  peak_ = z_[likeliest];
  if (std::isinf(peak_)) return likeliest;

  const auto seed = static_cast<uint64_t>(rows.seed[row]);
  const NoiseKey key = {{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)},
                        static_cast<uint32_t>(rows.position[row]),
                        static_cast<uint32_t>(rows.index[row])};
  // The likeliest id passes all filters: ids that cannot reach its score need no noise.
  Winner winner = {std::numeric_limits<float>::lowest(), likeliest};
  set_.draw(key, z_.data(), &likeliest, 1, winner);
  float least = winner.bound() - kMaxNoise;
  const double min_p = rows.min_p[row], top_p = rows.top_p[row];
  if (min_p > 0.0) least = std::max(least, peak_ + static_cast<float>(std::log(min_p)));

  const int64_t top_k = rows.top_k[row];
  const bool limited = top_k > 0 && top_k < vocab_size;
  if (limited) keep_top_k(top_k);
  if (top_p < 1.0) limited ? keep_top_p_of_ids(top_p) : keep_top_p_of_all(top_p);
  if (limited || top_p < 1.0) {
    drop_below(least);
  } else {
    collect(least);
  }
  set_.draw(key, z_.data(), ids_.data(), static_cast<int64_t>(ids_.size()), winner);
  return winner.token();
}

// The ids of z >= bound, but never of -inf.
void Row::collect(float bound) {
  ids_.resize(z_.size());
  const float below = std::nextafter(bound, -INFINITY);
  ids_.resize(set_.collect(z_.data(), static_cast<int64_t>(z_.size()), below, ids_.data()));
}

void Row::drop_below(float bound) {
  const auto below = [&](int32_t id) { return z_[id] < bound; };
  ids_.erase(std::remove_if(ids_.begin(), ids_.end(), below), ids_.end());
}

void Row::keep_top_k(size_t top_k) {
  float bound = -INFINITY;
  if (top_k <= largest_.size()) {
    // As many blocks have an element that is no smaller: the top k are among those.
    const auto last = largest_.begin() + static_cast<ptrdiff_t>(top_k) - 1;
    std::nth_element(largest_.begin(), last, largest_.end(), std::greater<float>());
    bound = *last;
  }
  collect(bound);
  rank();
  keep_prefix(static_cast<double>(std::min(top_k, ids_.size())));
}

void Row::keep_top_p_of_ids(double top_p) {
  rank();
  keep_prefix(top_p * weigh());
}

void Row::keep_top_p_of_all(double top_p) {
  const auto size = static_cast<int64_t>(z_.size());
  const double total = set_.total_weight(z_.data(), size, peak_);
  // All ids that lie further than this below the peak weigh less than what the prefix leaves out.
  const double depth = std::log(static_cast<double>(size) / ((1.0 - top_p) * total)) + 0.01;
  collect(std::nextafter(static_cast<float>(peak_ - depth), -INFINITY));
  rank();
  weigh();
  keep_prefix(top_p * total);
}

// Ranks the ids, each of weight 1.
void Row::rank() {
  ranked_.resize(ids_.size());
  for (size_t i = 0; i < ids_.size(); ++i) ranked_[i] = {order_of(z_[ids_[i]], ids_[i]), 1.0};
}

// Gives the ranked ids their weights in the softmax, that of the peak being 1. Returns the sum.
double Row::weigh() {
  const size_t size = (ids_.size() + kBlock - 1) / kBlock * kBlock;
  some_z_.assign(size, peak_);
  weights_.resize(size);
  for (size_t i = 0; i < ids_.size(); ++i) some_z_[i] = z_[ids_[i]];
  set_.weigh(some_z_.data(), static_cast<int64_t>(size), peak_, weights_.data());
  double total = 0.0;
  for (size_t i = 0; i < ids_.size(); ++i) total += ranked_[i].weight = weights_[i];
  return total;
}

void Row::keep_prefix(double wanted) {
  const uint64_t end = prefix_end(ranked_, wanted);
  const auto beyond = [&](int32_t id) { return order_of(z_[id], id) > end; };
  ids_.erase(std::remove_if(ids_.begin(), ids_.end(), beyond), ids_.end());
}

}  // namespace

float gumbel(uint32_t word) {
  return -static_cast<float>(std::log(-std::log((word + 0.5) * 0x1p-32)));
}

void sample(Pool& pool, int64_t num_rows, int64_t vocab_size, const float* logits,
            int64_t logits_stride, const SampleRows& rows, int64_t* tokens) {
  pool.run(static_cast<int>(num_rows), [&](int row, int) {
    thread_local Row at_work;
    tokens[row] = at_work.sample(logits + row * logits_stride, vocab_size, rows, row);
  });
}

}  // namespace pegboard
