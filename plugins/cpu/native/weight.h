// A packed weight of any format: what a product and a whole layer call, whatever is in it.
#pragma once

#include <cstdint>

#include "pool.h"

namespace pegboard {

// [out_features, in_features]. A format's weight derives from this. Memory that is as large as the
// weight belongs to the caller, who keeps it until the weight is destroyed.
struct Weight {
  Weight(int64_t out_features, int64_t in_features)
      : out_features(out_features), in_features(in_features) {}
  virtual ~Weight() = default;

  // y = x·Wᵀ, x: [num_rows, in_features] whose rows are x_stride apart, y: dense.
  virtual void multiply(Pool& pool, int64_t num_rows, const float* x, int64_t x_stride,
                        float* y) const = 0;

  // out = W[row_ids], dense, by the formula of a dequantized weight; all ids are rows of W.
  virtual void gather(Pool& pool, int64_t num_rows, const int64_t* row_ids, float* out) const = 0;

  const int64_t out_features, in_features;
};

}  // namespace pegboard
