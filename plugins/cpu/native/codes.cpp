#include "codes.h"

#include <algorithm>

#include "kernels.h"

namespace pegboard {
namespace {

constexpr int64_t kLine = 64;

int64_t lines(int64_t num_bytes) { return (num_bytes + kLine - 1) / kLine * kLine; }

int64_t offset_bytes(Offsets offsets) {
  switch (offsets) {
    case Offsets::kConstant: return 0;
    case Offsets::kWhole: case Offsets::kMinimaHalf: return 2;
    case Offsets::kFraction: case Offsets::kMinima: return 4;
  }
  return 0;
}

// Where a code lies within its piece: a byte, and a shift within it.
struct Place {
  Place(const CodedPanels& form, int64_t input, int64_t output) {
    const int64_t a_block = form.bits == 8 ? 4 : 8, output_bytes = form.output_bytes();
    byte = input / a_block * kCodesBlock + output * output_bytes +
           input % 4 * (output_bytes == 1 ? kCodesWidth : 1);
    shift = input % a_block >= 4 ? 4 : 0;
  }
  int64_t byte;
  int shift;
};

// [group][kCodesWidth] from [output][group], of numbers of `size` bytes.
void transpose(const void* from, int64_t num_outputs, int64_t num_groups, int64_t size,
               uint8_t* to) {
  const auto* source = static_cast<const uint8_t*>(from);
  for (int64_t n = 0; n < num_outputs; ++n) {
    for (int64_t g = 0; g < num_groups; ++g) {
      std::memcpy(to + (g * kCodesWidth + n) * size, source + (n * num_groups + g) * size, size);
    }
  }
}

template <class Number>
Number read(const uint8_t* from, int64_t index) {
  Number number;
  std::memcpy(&number, from + index * sizeof number, sizeof number);
  return number;
}

}  // namespace

CodedWeight::CodedWeight(CodedPanels form, const int32_t* group_ends, const int32_t* order)
    : Weight(form.out_features, form.in_features), form_(form) {
  int32_t start = 0, longest = 0;
  for (int32_t g = 0; g < form.num_groups; ++g) {
    while (start < group_ends[g]) {
      piece_starts_.push_back(start);
      piece_groups_.push_back(g);
      const int32_t end = std::min(group_ends[g], (start / kSharedInputs + 1) * kSharedInputs);
      longest = std::max(longest, end - start);
      start = end;
    }
  }
  form_.num_pieces = static_cast<int64_t>(piece_groups_.size());
  piece_starts_.push_back(start);
  if (order != nullptr) order_.assign(order, order + form.in_features);
  form_.piece_inputs = longest <= kSharedInputs / 2 ? kSharedInputs / 2 : kSharedInputs;
  form_.piece_starts = piece_starts_.data();
  form_.piece_groups = piece_groups_.data();
  form_.order = order == nullptr ? nullptr : order_.data();
  const int64_t a_group = form.num_groups * kCodesWidth;
  form_.scales_at = form_.num_pieces * form_.piece_bytes();
  form_.offsets_at = lines(form_.scales_at + a_group * (form.half_scales ? 2 : 4));
  form_.panel_bytes = lines(form_.offsets_at + a_group * offset_bytes(form.offsets));
}

void CodedWeight::pack(Pool& pool, uint8_t* memory, const uint8_t* codes, int64_t stride,
                       const void* scales, const void* offsets) {
  form_.panels = memory;
  pool.run(static_cast<int>(form_.num_panels()), [&](int p, int) {
    pack_panel(memory + p * form_.panel_bytes, p * kCodesWidth, codes, stride, scales, offsets);
  });
}

void CodedWeight::pack_panel(uint8_t* panel, int64_t first, const uint8_t* codes, int64_t stride,
                             const void* scales, const void* offsets) const {
  const int64_t num_outputs = std::min<int64_t>(kCodesWidth, out_features - first);
  const int mask = (1 << form_.bits) - 1;
  std::memset(panel, 0, form_.panel_bytes);
  for (int64_t n = 0; n < num_outputs; ++n) {
    const uint8_t* row = codes + (first + n) * stride;
    for (int64_t s = 0; s < form_.num_pieces; ++s) {
      uint8_t* piece = panel + s * form_.piece_bytes();
      const int32_t start = form_.piece_starts[s], end = form_.piece_starts[s + 1];
      for (int32_t i = start; i < end; ++i) {
        const int code = row[form_.order == nullptr ? i : form_.order[i]];
        const Place place(form_, i - start, n);
        piece[place.byte] |= static_cast<uint8_t>(((code + form_.bias()) & mask) << place.shift);
      }
    }
  }
  const int64_t a_row = form_.num_groups, scale_bytes = form_.half_scales ? 2 : 4;
  const int64_t more_bytes = offset_bytes(form_.offsets);
  const auto skip = [&](const void* numbers, int64_t size) {
    return static_cast<const uint8_t*>(numbers) + first * a_row * size;
  };
  transpose(skip(scales, scale_bytes), num_outputs, a_row, scale_bytes, panel + form_.scales_at);
  if (more_bytes > 0) {
    transpose(skip(offsets, more_bytes), num_outputs, a_row, more_bytes, panel + form_.offsets_at);
  }
}

void CodedWeight::multiply(Pool& pool, int64_t num_rows, const float* x, int64_t x_stride,
                           float* y) const {
  kernels().multiply_codes(pool, form_, num_rows, x, x_stride, y);
}

void CodedWeight::gather(Pool& pool, int64_t num_rows, const int64_t* row_ids, float* out) const {
  pool.run(static_cast<int>(num_rows), [&](int row, int) {
    gather_row(row_ids[row], out + row * in_features);
  });
}

void CodedWeight::gather_row(int64_t row, float* out) const {
  const uint8_t* panel = form_.panels + row / kCodesWidth * form_.panel_bytes;
  const int64_t n = row % kCodesWidth;
  const uint8_t *scales = panel + form_.scales_at, *offsets = panel + form_.offsets_at;
  const int mask = (1 << form_.bits) - 1, sign = form_.bits == 8 ? 128 : 0;
  for (int64_t s = 0; s < form_.num_pieces; ++s) {
    const int64_t at = form_.piece_groups[s] * kCodesWidth + n;
    const float scale = form_.half_scales ? half_to_float(read<uint16_t>(scales, at))
                                          : read<float>(scales, at);
    float zero = static_cast<float>(form_.zero), minimum = 0.0f;
    const bool has_minima =
        form_.offsets == Offsets::kMinima || form_.offsets == Offsets::kMinimaHalf;
    if (form_.offsets == Offsets::kWhole) zero = read<int16_t>(offsets, at);
    if (form_.offsets == Offsets::kFraction) zero = read<float>(offsets, at);
    if (form_.offsets == Offsets::kMinima) minimum = read<float>(offsets, at);
    if (form_.offsets == Offsets::kMinimaHalf) minimum = half_to_float(read<uint16_t>(offsets, at));
    const uint8_t* piece = panel + s * form_.piece_bytes();
    const int32_t start = form_.piece_starts[s], end = form_.piece_starts[s + 1];
    for (int32_t i = start; i < end; ++i) {
      const Place place(form_, i - start, n);
      const int stored = piece[place.byte] >> place.shift & mask;
      const int code = ((stored - form_.bias() + sign) & mask) - sign;
      const float value = (static_cast<float>(code) - zero) * scale;
      out[form_.order == nullptr ? i : form_.order[i]] = has_minima ? value + minimum : value;
    }
  }
}

}  // namespace pegboard
