// The C interface of float weights, float32 [out_features, in_features].

#include "abi.h"
#include "kernels.h"
#include "weight.h"

using pegboard::kernels;
using pegboard::Pool;
using pegboard::Weight;

namespace {

class FloatWeight : public Weight {
 public:
  FloatWeight(int64_t out_features, int64_t in_features, const float* panels)
      : Weight(out_features, in_features), panels_(panels) {}

  void multiply(Pool& pool, int64_t num_rows, const float* x, int64_t x_stride,
                float* y) const override {
    kernels().linear(pool, num_rows, out_features, in_features, x, x_stride, panels_, y);
  }
  void gather(Pool& pool, int64_t num_rows, const int64_t* row_ids, float* out) const override {
    kernels().linear_gather(pool, num_rows, in_features, panels_, row_ids, out);
  }

 private:
  const float* panels_;
};

}  // namespace

// Floats that a packed weight takes.
PEGBOARD_API int64_t pb_linear_packed_size(int64_t out_features, int64_t in_features) {
  const int64_t width = kernels().linear_panel_width;
  return (out_features + width - 1) / width * width * in_features;
}

// Packs into that many floats, which are kept until the weight is destroyed.
PEGBOARD_API Weight* pb_linear_pack(Pool* pool, int64_t out_features, int64_t in_features,
                                    const float* weight, int64_t weight_stride, float* packed) {
  kernels().linear_pack(*pool, out_features, in_features, weight, weight_stride, packed);
  return new FloatWeight(out_features, in_features, packed);
}
