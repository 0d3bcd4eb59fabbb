// Operation `sample`: what its rows' logic (sample.cpp) and its loops over a vocabulary (sample.inl)
// share. The formula is in pegboard/interfaces/kernel.py.
#pragma once

#include <cstdint>

#include "pool.h"

namespace pegboard {

// Parameters, an entry a row of logits.
struct SampleRows {
  const float* temperature;
  const int64_t* top_k;
  const float* top_p;
  const float* min_p;
  const int64_t* seed;
  const int64_t* position;
  const int64_t* index;
};

// What a token id's noise is a function of, beside the id.
struct NoiseKey {
  uint32_t seed[2];
  uint32_t position;
  uint32_t index;
};

// The noise of the 32-bit word that Philox yields, as the formula rounds it.
float gumbel(uint32_t word);

// No noise is larger: that of the largest word is 33 ln 2.
constexpr float kMaxNoise = 22.9f;

// The token with the highest score so far, of those with the same score the lowest id.
class Winner {
 public:
  // Finite `score` of a token that takes part.
  Winner(float score, int32_t token) { take(score, token); }

  int32_t token() const { return token_; }
  // A score that is bounded by this, however it was rounded, does not win.
  float bound() const { return bound_; }

  void offer(float score, int32_t token) {
    if (score > score_ || (score == score_ && token < token_)) take(score, token);
  }

 private:
  void take(float score, int32_t token) {
    score_ = score;
    token_ = token;
    bound_ = score - 1e-3f - 1e-6f * (score < 0 ? -score : score);
  }

  float score_;
  float bound_;
  int32_t token_;
};

// Elements that `largest` has one entry for, and that a scaled row is a multiple of.
constexpr int64_t kBlock = 64;

// tokens[row] for each of logits [num_rows, vocab_size].
void sample(Pool& pool, int64_t num_rows, int64_t vocab_size, const float* logits,
            int64_t logits_stride, const SampleRows& rows, int64_t* tokens);

}  // namespace pegboard
