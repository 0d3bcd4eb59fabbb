// The C interface of int8 weights whose inputs are quantized to int8.

#include "abi.h"
#include "w8a8.h"

using pegboard::InputScaling;
using pegboard::Pool;
using pegboard::W8A8Weight;

// A weight that is still to be packed. sharing: inputs of a row that share a scale, 0: all; scale,
// zero: those of all inputs, where is_static. group_ends: [num_groups], inputs up to the end of each
// group, counted in `order`; order: [in_features], or null: as they come.
PEGBOARD_API W8A8Weight* pb_w8a8_create(int64_t out_features, int64_t in_features, int64_t sharing,
                                        int is_static, float scale, int zero, int64_t num_groups,
                                        const int32_t* group_ends, const int32_t* order,
                                        int has_zeros, int has_minima) {
  const InputScaling inputs = {sharing, is_static != 0, scale, zero};
  return new W8A8Weight(out_features, in_features, inputs, num_groups, group_ends, order,
                        has_zeros != 0, has_minima != 0);
}

// Bytes that it takes packed.
PEGBOARD_API int64_t pb_w8a8_size(const W8A8Weight* weight) { return weight->num_bytes(); }

// Packs into that many bytes, which begin at a cache line and are kept until the weight is destroyed.
PEGBOARD_API void pb_w8a8_pack(W8A8Weight* weight, Pool* pool, uint8_t* memory,
                               const int8_t* codes, int64_t stride, const float* scales,
                               const float* zeros, const float* minima) {
  weight->pack(*pool, memory, codes, stride, scales, zeros, minima);
}
