// Weights of 4- and 8-bit codes: how they are packed, for all instruction sets alike.
//
// Inputs are cut into pieces: of one group of the weight, and within 32 that follow each other, which
// is how many share a scale where inputs are quantized. Where a map scatters the groups, inputs are
// taken in the order that sorts them. A panel of 16 outputs is one piece after another, each of
// blocks of 64 bytes with four bytes of each output:
//
//   8 bits: the codes of 4 inputs; for float inputs [4 inputs][16 outputs]
//   4 bits: the codes of 8 inputs, number i in byte i % 4, the first four in the lower halves
//
// A piece is filled up to 32 inputs, or to 16 where none is longer, and inputs of 0 go with that.
// Behind its codes a panel has the groups' scales, [group][16], and their offsets.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "weight.h"

namespace pegboard {

constexpr int kCodesWidth = 16;     // outputs of a panel
constexpr int kCodesBlock = 64;     // bytes, a cache line
constexpr int kSharedInputs = 32;   // that share a scale where inputs are quantized

// What a group has beside its scale. Python says which, by number.
enum class Offsets : int32_t {
  kConstant = 0,   // one zero for all: nothing is stored
  kWhole = 1,      // int16 zeros
  kFraction = 2,   // float32 zeros
  kMinima = 3,     // float32 minima: w = code * scale + minimum
  kMinimaHalf = 4  // the same in float16
};

// What the product of an instruction set reads: a packed weight without its ownership.
struct CodedPanels {
  int64_t out_features, in_features;
  int bits;             // of a code, 4 or 8
  bool whole_inputs;    // quantized to int8, else float
  bool half_scales;     // float16 rather than float32
  Offsets offsets;
  int32_t zero;         // of kConstant
  int64_t num_groups, num_pieces;
  int piece_inputs;            // 16 or 32, with the filling
  const int32_t* piece_starts; // [num_pieces + 1], counted in `order`
  const int32_t* piece_groups; // [num_pieces]
  const int32_t* order;        // [in_features]; null: as they come
  const uint8_t* panels;
  int64_t panel_bytes, scales_at, offsets_at;

  // A stored code is the code plus this: without sign for whole inputs, with it for float ones.
  int bias() const { return whole_inputs ? (bits == 8 ? 128 : 0) : (bits == 4 ? -8 : 0); }
  // Between the outputs of a block.
  int64_t output_bytes() const { return bits == 8 && !whole_inputs ? 1 : 4; }
  int64_t piece_bytes() const { return piece_inputs * bits / 8 * kCodesWidth; }
  int64_t num_panels() const { return (out_features + kCodesWidth - 1) / kCodesWidth; }
};

// Internal to each file, as each is compiled for an instruction set of its own.
static inline float half_to_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, rest = half & 0x7FFF;
  const uint32_t normal = (rest << 13) + ((127 - 15) << 23);
  const float subnormal = static_cast<float>(rest) * 0x1p-24f;
  uint32_t word;
  std::memcpy(&word, &subnormal, sizeof word);
  word = sign | (rest >= 0x7C00 ? normal + ((255 - 143) << 23) : rest >= 0x0400 ? normal : word);
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

class CodedWeight : public Weight {
 public:
  // group_ends: [num_groups], inputs up to the end of each, in `order`, which may be null.
  CodedWeight(CodedPanels form, const int32_t* group_ends, const int32_t* order);

  int64_t num_bytes() const { return form_.num_panels() * form_.panel_bytes; }

  // Into `memory`, num_bytes() that begin at a cache line. codes: [out_features, in_features], one
  // a byte, rows `stride` apart; scales and offsets: dense [out_features, num_groups].
  void pack(Pool& pool, uint8_t* memory, const uint8_t* codes, int64_t stride, const void* scales,
            const void* offsets);

  void multiply(Pool& pool, int64_t num_rows, const float* x, int64_t x_stride,
                float* y) const override;
  void gather(Pool& pool, int64_t num_rows, const int64_t* row_ids, float* out) const override;

 private:
  void pack_panel(uint8_t* panel, int64_t first, const uint8_t* codes, int64_t stride,
                  const void* scales, const void* offsets) const;
  void gather_row(int64_t row, float* out) const;

  CodedPanels form_;
  std::vector<int32_t> piece_starts_, piece_groups_, order_;
};

}  // namespace pegboard
