// Weights of float8 codes (e4m3: a sign, 4 bits of exponent, 3 of mantissa).
//
// Their products are those of the dequantized weight: the codes of a panel are widened a block at a
// time, and go through the float kernel's tiles (linear.inl). A panel, of that kernel's width, is the
// codes [in_features][width], then the scales [group][width].
#pragma once

#include <cstdint>
#include <vector>

#include "weight.h"

namespace pegboard {

// How inputs are rounded to float8 before the product.
enum class Float8Inputs : int32_t {
  kFloat = 0,    // not at all
  kStatic = 1,   // by one scale for all
  kDynamic = 2,  // by a scale of each row and `sharing` inputs
};

// What the product of an instruction set reads: a packed weight without its ownership.
struct Float8Panels {
  int64_t out_features, in_features, width;
  Float8Inputs inputs;
  int64_t sharing;
  float input_scale;
  const int32_t* groups;  // [in_features], of each input
  const uint8_t* panels;
  int64_t panel_bytes, scales_at;
};

class Float8Weight : public Weight {
 public:
  Float8Weight(int64_t out_features, int64_t in_features, Float8Inputs inputs, int64_t sharing,
               float input_scale, int64_t num_groups, const int32_t* groups);

  int64_t num_bytes() const;

  // Into `memory`, num_bytes() that begin at a cache line. codes: [out_features, in_features], rows
  // `stride` apart; scales: dense [out_features, num_groups].
  void pack(Pool& pool, uint8_t* memory, const uint8_t* codes, int64_t stride, const float* scales);

  void multiply(Pool& pool, int64_t num_rows, const float* x, int64_t x_stride,
                float* y) const override;
  void gather(Pool& pool, int64_t num_rows, const int64_t* row_ids, float* out) const override;

 private:
  Float8Panels form_;
  int64_t num_groups_;
  std::vector<int32_t> groups_;
};

}  // namespace pegboard
