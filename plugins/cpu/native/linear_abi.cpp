// The C interface of linear layers. Weights are float32 [out_features, in_features].

#include "abi.h"
#include "kernels.h"

using pegboard::kernels;
using pegboard::Pool;

// Floats that a packed weight takes.
PEGBOARD_API int64_t pb_linear_packed_size(int64_t out_features, int64_t in_features) {
  const int64_t width = kernels().linear_panel_width;
  return (out_features + width - 1) / width * width * in_features;
}

PEGBOARD_API void pb_linear_pack(Pool* pool, int64_t out_features, int64_t in_features,
                                 const float* weight, int64_t weight_stride, float* packed) {
  kernels().linear_pack(*pool, out_features, in_features, weight, weight_stride, packed);
}

// y = x·Wᵀ, x: [num_rows, in_features], y: dense [num_rows, out_features].
PEGBOARD_API void pb_linear(Pool* pool, int64_t num_rows, int64_t out_features, int64_t in_features,
                            const float* x, int64_t x_stride, const float* packed, float* y) {
  kernels().linear(*pool, num_rows, out_features, in_features, x, x_stride, packed, y);
}

// out = W[row_ids], dense; 0, and nothing written: an id is not a row of W.
PEGBOARD_API int pb_linear_gather(Pool* pool, int64_t num_rows, int64_t out_features,
                                  int64_t in_features, const float* packed, const int64_t* row_ids,
                                  float* out) {
  for (int64_t row = 0; row < num_rows; ++row) {
    if (row_ids[row] < 0 || row_ids[row] >= out_features) return 0;
  }
  kernels().linear_gather(*pool, num_rows, in_features, packed, row_ids, out);
  return 1;
}
