// The C interface of weights in codes.

#include "abi.h"
#include "codes.h"

using pegboard::CodedPanels;
using pegboard::CodedWeight;
using pegboard::Offsets;
using pegboard::Pool;

// A weight that is still to be packed. group_ends: [num_groups], inputs up to the end of each group,
// counted in `order`; order: [in_features], or null: as they come; offsets: a number of `Offsets`;
// zero: of all codes, where those are constant.
PEGBOARD_API CodedWeight* pb_codes_create(int64_t out_features, int64_t in_features, int64_t bits,
                                          int whole_inputs, int64_t num_groups,
                                          const int32_t* group_ends, const int32_t* order,
                                          int half_scales, int64_t offsets, int64_t zero) {
  CodedPanels form{};
  form.out_features = out_features;
  form.in_features = in_features;
  form.bits = static_cast<int>(bits);
  form.whole_inputs = whole_inputs != 0;
  form.half_scales = half_scales != 0;
  form.offsets = static_cast<Offsets>(offsets);
  form.zero = static_cast<int32_t>(zero);
  form.num_groups = num_groups;
  return new CodedWeight(form, group_ends, order);
}

// Bytes that it takes packed.
PEGBOARD_API int64_t pb_codes_size(const CodedWeight* weight) { return weight->num_bytes(); }

// Packs into that many bytes, which begin at a cache line and are kept until the weight is destroyed.
PEGBOARD_API void pb_codes_pack(CodedWeight* weight, Pool* pool, uint8_t* memory,
                                const uint8_t* codes, int64_t stride, const void* scales,
                                const void* offsets) {
  weight->pack(*pool, memory, codes, stride, scales, offsets);
}
