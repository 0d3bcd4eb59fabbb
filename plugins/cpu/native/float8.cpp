#include "float8.h"

#include <algorithm>
#include <cstring>

#include "kernels.h"

namespace pegboard {
namespace {

constexpr int64_t kLine = 64;

int64_t lines(int64_t num_bytes) { return (num_bytes + kLine - 1) / kLine * kLine; }

}  // namespace

Float8Weight::Float8Weight(int64_t out_features, int64_t in_features, Float8Inputs inputs,
                           int64_t sharing, float input_scale, int64_t num_groups,
                           const int32_t* groups)
    : Weight(out_features, in_features),
      form_{},
      num_groups_(num_groups),
      groups_(groups, groups + in_features) {
  form_.out_features = out_features;
  form_.in_features = in_features;
  form_.width = kernels().linear_panel_width;
  form_.inputs = inputs;
  form_.sharing = sharing == 0 ? in_features : sharing;
  form_.input_scale = input_scale;
  form_.groups = groups_.data();
  form_.scales_at = lines(in_features * form_.width);
  form_.panel_bytes =
      lines(form_.scales_at + num_groups * form_.width * static_cast<int64_t>(sizeof(float)));
}

int64_t Float8Weight::num_bytes() const {
  return (out_features + form_.width - 1) / form_.width * form_.panel_bytes;
}

void Float8Weight::pack(Pool& pool, uint8_t* memory, const uint8_t* codes, int64_t stride,
                        const float* scales) {
  form_.panels = memory;
  const int64_t width = form_.width;
  pool.run(static_cast<int>((out_features + width - 1) / width), [&](int p, int) {
    uint8_t* panel = memory + p * form_.panel_bytes;
    auto* panel_scales = reinterpret_cast<float*>(panel + form_.scales_at);
    std::memset(panel, 0, form_.panel_bytes);
    const int64_t num_outputs = std::min(width, out_features - p * width);
    for (int64_t n = 0; n < num_outputs; ++n) {
      const int64_t output = p * width + n;
      const uint8_t* row = codes + output * stride;
      for (int64_t k = 0; k < in_features; ++k) panel[k * width + n] = row[k];
      for (int64_t g = 0; g < num_groups_; ++g) {
        panel_scales[g * width + n] = scales[output * num_groups_ + g];
      }
    }
  });
}

void Float8Weight::multiply(Pool& pool, int64_t num_rows, const float* x, int64_t x_stride,
                            float* y) const {
  kernels().multiply_float8(pool, form_, num_rows, x, x_stride, y);
}

void Float8Weight::gather(Pool& pool, int64_t num_rows, const int64_t* row_ids, float* out) const {
  kernels().gather_float8(pool, form_, num_rows, row_ids, out);
}

}  // namespace pegboard
