// The C interface of packed weights of any format.

#include "abi.h"
#include "weight.h"

using pegboard::Pool;
using pegboard::Weight;

PEGBOARD_API void pb_weight_destroy(Weight* weight) { delete weight; }

// y = x·Wᵀ, x: [num_rows, in_features], y: dense [num_rows, out_features].
PEGBOARD_API void pb_weight_multiply(const Weight* weight, Pool* pool, int64_t num_rows,
                                     const float* x, int64_t x_stride, float* y) {
  weight->multiply(*pool, num_rows, x, x_stride, y);
}

// out = W[row_ids], dense; 0, and nothing written: an id is not a row of W.
PEGBOARD_API int pb_weight_gather(const Weight* weight, Pool* pool, int64_t num_rows,
                                  const int64_t* row_ids, float* out) {
  for (int64_t row = 0; row < num_rows; ++row) {
    if (row_ids[row] < 0 || row_ids[row] >= weight->out_features) return 0;
  }
  weight->gather(*pool, num_rows, row_ids, out);
  return 1;
}
