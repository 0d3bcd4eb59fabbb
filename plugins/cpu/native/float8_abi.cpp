// The C interface of float8 weights.

#include "abi.h"
#include "float8.h"

using pegboard::Float8Inputs;
using pegboard::Float8Weight;
using pegboard::Pool;

// A weight that is still to be packed. inputs: a number of `Float8Inputs`; sharing: inputs of a row
// that share a scale, 0: all; groups: [in_features], the group of each input.
PEGBOARD_API Float8Weight* pb_float8_create(int64_t out_features, int64_t in_features, int inputs,
                                            int64_t sharing, float input_scale, int64_t num_groups,
                                            const int32_t* groups) {
  return new Float8Weight(out_features, in_features, static_cast<Float8Inputs>(inputs), sharing,
                          input_scale, num_groups, groups);
}

// Bytes that it takes packed.
PEGBOARD_API int64_t pb_float8_size(const Float8Weight* weight) { return weight->num_bytes(); }

// Packs into that many bytes, which begin at a cache line and are kept until the weight is destroyed.
PEGBOARD_API void pb_float8_pack(Float8Weight* weight, Pool* pool, uint8_t* memory,
                                 const uint8_t* codes, int64_t stride, const float* scales) {
  weight->pack(*pool, memory, codes, stride, scales);
}
