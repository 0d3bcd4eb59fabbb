// The C interface of paged attention.

#include "abi.h"
#include "attention.h"
#include "kernels.h"

using pegboard::Attention;
using pegboard::AttentionCall;
using pegboard::AttentionLayer;
using pegboard::AttentionPlan;
using pegboard::AttentionScratch;
using pegboard::AttentionShape;
using pegboard::Encoding;
using pegboard::Pool;

PEGBOARD_API Attention* pb_attention_create(Pool* pool) {
  auto* attention = new Attention{};
  attention->pool = pool;
  attention->scratch.resize(pool->num_threads());
  return attention;
}

PEGBOARD_API void pb_attention_destroy(Attention* attention) { delete attention; }

PEGBOARD_API void pb_attention_add_group(Attention* attention, int64_t num_kv_heads,
                                         int64_t head_dim, int64_t padded_dim, int64_t block_size,
                                         int64_t window, int64_t max_group, int64_t skipped) {
  const AttentionShape shape{num_kv_heads, head_dim,  padded_dim, block_size,
                             window,       max_group, skipped};
  attention->plans.push_back(std::make_unique<AttentionPlan>(shape));
  const int64_t num_queries = attention->plans.back()->max_tokens * max_group;
  for (AttentionScratch& scratch : attention->scratch) scratch.grow(shape, num_queries);
}

PEGBOARD_API void pb_attention_add_layer(Attention* attention, int64_t group, int64_t num_heads,
                                         float scale, float soft_cap, void* keys, void* values) {
  attention->layers.push_back({group, num_heads, scale, soft_cap, {keys}, {values}});
}

// Makes the pages of the layer that was added last codes: 1: int8, 2: e4m3. Scales are
// [num_pages, num_kv_heads, block_size]; the fixed ones [num_kv_heads], kept and not copied, or null.
PEGBOARD_API void pb_attention_encode_layer(Attention* attention, int64_t encoding,
                                            float* key_scales, float* value_scales,
                                            const float* fixed_keys, const float* fixed_values) {
  AttentionLayer& layer = attention->layers.back();
  layer.encoding = static_cast<Encoding>(encoding);
  layer.keys = {layer.keys.data, key_scales, fixed_keys};
  layer.values = {layer.values.data, value_scales, fixed_values};
}

// A group's part of a step; the arrays stay valid until the next step.
PEGBOARD_API void pb_attention_prepare(Attention* attention, int64_t group, int64_t num_rows,
                                       const int64_t* positions, const int64_t* query_starts,
                                       const int64_t* num_computed, const int32_t* block_table,
                                       int64_t table_stride, const uint8_t* ancestors,
                                       int64_t ancestors_stride) {
  attention->plans[group]->fill({num_rows, positions, query_starts, num_computed, block_table,
                                 table_stride, ancestors, ancestors_stride});
}

// Strides in elements; rotary tables [max_position, num_pairs], dense.
PEGBOARD_API void pb_attention_forward(Attention* attention, int64_t layer, const float* q,
                                       int64_t q_token, int64_t q_head, const float* k,
                                       int64_t k_token, int64_t k_head, const float* v,
                                       int64_t v_token, int64_t v_head, const float* cos,
                                       const float* sin, int64_t num_pairs, float* out,
                                       float* lse) {
  const AttentionCall call{{q, q_token, q_head}, {k, k_token, k_head}, {v, v_token, v_head},
                           {cos, sin, num_pairs}, out, lse};
  pegboard::kernels().attend(*attention, layer, call);
}

// Copies whole blocks of a group's layers, one after another.
PEGBOARD_API void pb_attention_copy_blocks(Attention* attention, int64_t group, int64_t num_copies,
                                           const int64_t* source, const int64_t* target) {
  attention->copy_blocks(group, num_copies, source, target);
}

// Moves tokens' keys and values to other slots, block * block_size + offset; all are read before any
// is written.
PEGBOARD_API void pb_attention_move_slots(Attention* attention, int64_t group, int64_t num_moves,
                                          const int64_t* source, const int64_t* target) {
  attention->move_slots(group, num_moves, source, target);
}
