#include "w8a8.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels.h"

namespace pegboard {
namespace {

constexpr int64_t kLine = 64;

int64_t lines(int64_t num_bytes) { return (num_bytes + kLine - 1) / kLine * kLine; }

// [group][kW8Width] from [output][group].
void transpose(const float* from, int64_t num_outputs, int64_t num_groups, uint8_t* to) {
  auto* target = reinterpret_cast<float*>(to);
  for (int64_t n = 0; n < num_outputs; ++n) {
    for (int64_t g = 0; g < num_groups; ++g) target[g * kW8Width + n] = from[n * num_groups + g];
  }
}

}  // namespace

W8A8Weight::W8A8Weight(int64_t out_features, int64_t in_features, const InputScaling& inputs,
                       int64_t num_groups, const int32_t* group_ends, const int32_t* order,
                       bool has_zeros, bool has_minima)
    : Weight(out_features, in_features), form_{} {
  form_.out_features = out_features;
  form_.in_features = in_features;
  form_.inputs = inputs;
  if (inputs.sharing == 0) form_.inputs.sharing = in_features;
  form_.num_groups = num_groups;
  if (order != nullptr) order_.assign(order, order + in_features);
  cut_pieces(group_ends);
  const int64_t a_group = num_groups * kW8Width * static_cast<int64_t>(sizeof(float));
  form_.scales_at = blocks_.back() * kW8Block;
  int64_t end = form_.scales_at + a_group;
  const auto take = [&end](int64_t num_bytes) { return std::exchange(end, end + num_bytes); };
  if (has_zeros) form_.zeros_at = take(a_group);
  if (has_minima) form_.minima_at = take(a_group);
  if (inputs.zero != 0) form_.sums_at = take(form_.num_pieces * kW8Width * sizeof(int32_t));
  form_.panel_bytes = lines(end);
}

void W8A8Weight::cut_pieces(const int32_t* group_ends) {
  const int64_t sharing = form_.inputs.is_static ? in_features : form_.inputs.sharing;
  int32_t start = 0, block = 0;
  for (int32_t g = 0; g < form_.num_groups; ++g) {
    while (start < group_ends[g]) {
      const int64_t scale = start / sharing;
      const int64_t end = std::min<int64_t>(group_ends[g], (scale + 1) * sharing);
      starts_.push_back(start);
      blocks_.push_back(block);
      groups_.push_back(g);
      scales_.push_back(static_cast<int32_t>(scale));
      block += static_cast<int32_t>((end - start + kW8Inputs - 1) / kW8Inputs);
      start = static_cast<int32_t>(end);
    }
  }
  form_.num_pieces = static_cast<int64_t>(groups_.size());
  form_.num_scales = (in_features + sharing - 1) / sharing;
  starts_.push_back(start);
  blocks_.push_back(block);
  form_.starts = starts_.data();
  form_.blocks = blocks_.data();
  form_.groups = groups_.data();
  form_.scales = scales_.data();
  form_.order = order_.empty() ? nullptr : order_.data();
}

void W8A8Weight::pack(Pool& pool, uint8_t* memory, const int8_t* codes, int64_t stride,
                      const float* scales, const float* zeros, const float* minima) {
  form_.panels = memory;
  pool.run(static_cast<int>(form_.num_panels()), [&](int p, int) {
    uint8_t* panel = memory + p * form_.panel_bytes;
    std::memset(panel, 0, form_.panel_bytes);
    const int64_t first = static_cast<int64_t>(p) * kW8Width;
    const int64_t num_outputs = std::min<int64_t>(kW8Width, out_features - first);
    for (int64_t n = 0; n < num_outputs; ++n) pack_codes(panel, n, codes + (first + n) * stride);
    const int64_t skip = first * form_.num_groups;
    transpose(scales + skip, num_outputs, form_.num_groups, panel + form_.scales_at);
    if (form_.zeros_at != 0) {
      transpose(zeros + skip, num_outputs, form_.num_groups, panel + form_.zeros_at);
    }
    if (form_.minima_at != 0) {
      transpose(minima + skip, num_outputs, form_.num_groups, panel + form_.minima_at);
    }
  });
}

void W8A8Weight::pack_codes(uint8_t* panel, int64_t output, const int8_t* row) const {
  auto* sums = reinterpret_cast<int32_t*>(panel + form_.sums_at);
  for (int64_t p = 0; p < form_.num_pieces; ++p) {
    uint8_t* piece = panel + static_cast<int64_t>(form_.blocks[p]) * kW8Block + output * kW8Inputs;
    int32_t sum = 0;
    for (int32_t i = form_.starts[p]; i < form_.starts[p + 1]; ++i) {
      const int code = row[input(i)];
      const int64_t place = i - form_.starts[p];
      piece[place / kW8Inputs * kW8Block + place % kW8Inputs] = static_cast<uint8_t>(code + 128);
      sum += code;
    }
    if (form_.sums_at != 0) sums[p * kW8Width + output] = sum;
  }
}

void W8A8Weight::multiply(Pool& pool, int64_t num_rows, const float* x, int64_t x_stride,
                          float* y) const {
  kernels().multiply_w8a8(pool, form_, num_rows, x, x_stride, y);
}

void W8A8Weight::gather(Pool& pool, int64_t num_rows, const int64_t* row_ids, float* out) const {
  pool.run(static_cast<int>(num_rows),
           [&](int row, int) { gather_row(row_ids[row], out + row * in_features); });
}

void W8A8Weight::gather_row(int64_t row, float* out) const {
  const uint8_t* panel = form_.panels + row / kW8Width * form_.panel_bytes;
  const int64_t n = row % kW8Width;
  const auto of_group = [&](int64_t at, int64_t g) {
    return at == 0 ? 0.0f : reinterpret_cast<const float*>(panel + at)[g * kW8Width + n];
  };
  for (int64_t p = 0; p < form_.num_pieces; ++p) {
    const int64_t g = form_.groups[p];
    const float scale = of_group(form_.scales_at, g), zero = of_group(form_.zeros_at, g);
    const float minimum = of_group(form_.minima_at, g);
    const uint8_t* piece = panel + static_cast<int64_t>(form_.blocks[p]) * kW8Block + n * kW8Inputs;
    for (int32_t i = form_.starts[p]; i < form_.starts[p + 1]; ++i) {
      const int64_t place = i - form_.starts[p];
      const int code = piece[place / kW8Inputs * kW8Block + place % kW8Inputs] - 128;
      const float value = (static_cast<float>(code) - zero) * scale;
      out[input(i)] = form_.minima_at == 0 ? value : value + minimum;
    }
  }
}

}  // namespace pegboard
