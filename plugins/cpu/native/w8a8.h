// Weights of int8 codes for inputs that are quantized to int8: how they are packed, for all
// instruction sets alike.
//
// Inputs are cut into pieces: of one group of the weight, and of one scale of the input. Where a map
// scatters the groups, inputs are taken in the order that sorts them. A panel of 16 outputs is one
// piece after another, each of blocks of 64 bytes with the codes of 4 inputs for each output; codes
// are stored as code + 128. What fills a piece up goes with inputs of 0. Behind its codes a panel has
// numbers of each group, [group][16], and of each piece.
#pragma once

#include <cstdint>
#include <vector>

#include "weight.h"

namespace pegboard {

constexpr int kW8Width = 16;   // outputs of a panel
constexpr int kW8Inputs = 4;   // of a block
constexpr int kW8Block = kW8Width * kW8Inputs;

// How the inputs are quantized: by a scale of each row and `sharing` inputs, or by one for all.
struct InputScaling {
  int64_t sharing;  // 0: all of a row
  bool is_static;
  float scale;
  int32_t zero;
};

// What the product of an instruction set reads: a packed weight without its ownership.
struct W8A8Panels {
  int64_t out_features, in_features;
  InputScaling inputs;
  int64_t num_groups, num_pieces, num_scales;  // of the weight, of both, of a row of inputs
  const int32_t* starts;  // [num_pieces + 1], inputs in `order`
  const int32_t* blocks;  // [num_pieces + 1], where the pieces' blocks start
  const int32_t* groups;  // [num_pieces]
  const int32_t* scales;  // [num_pieces], which one of the row's
  const int32_t* order;   // [in_features]; null: as they come
  const uint8_t* panels;
  int64_t panel_bytes, scales_at;
  int64_t zeros_at, minima_at;  // 0: there are none
  int64_t sums_at;              // int32 sums of a piece's codes; 0: the inputs have no zero

  int64_t num_panels() const { return (out_features + kW8Width - 1) / kW8Width; }
};

class W8A8Weight : public Weight {
 public:
  // group_ends: [num_groups], inputs up to the end of each, in `order`, which may be null.
  W8A8Weight(int64_t out_features, int64_t in_features, const InputScaling& inputs,
             int64_t num_groups, const int32_t* group_ends, const int32_t* order, bool has_zeros,
             bool has_minima);

  int64_t num_bytes() const { return form_.num_panels() * form_.panel_bytes; }

  // Into `memory`, num_bytes() that begin at a cache line. codes: [out_features, in_features], rows
  // `stride` apart; scales, zeros, minima: dense [out_features, num_groups].
  void pack(Pool& pool, uint8_t* memory, const int8_t* codes, int64_t stride, const float* scales,
            const float* zeros, const float* minima);

  void multiply(Pool& pool, int64_t num_rows, const float* x, int64_t x_stride,
                float* y) const override;
  void gather(Pool& pool, int64_t num_rows, const int64_t* row_ids, float* out) const override;

 private:
  void cut_pieces(const int32_t* group_ends);
  void pack_codes(uint8_t* panel, int64_t output, const int8_t* row) const;
  void gather_row(int64_t row, float* out) const;
  int64_t input(int64_t index) const { return order_.empty() ? index : order_[index]; }

  W8A8Panels form_;
  std::vector<int32_t> starts_, blocks_, groups_, scales_, order_;
};

}  // namespace pegboard
