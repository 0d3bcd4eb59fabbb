#include "attention.h"

#include <algorithm>
#include <cstring>

namespace pegboard {
namespace {

// One token's keys and values in a layer's pages; slot is page * block_size + offset.
struct TokenPlace {
  TokenPlace(const AttentionLayer& layer, const AttentionShape& shape, int64_t slot, int64_t head) {
    const int64_t page = slot / shape.block_size * shape.num_kv_heads + head;
    const int64_t offset = slot % shape.block_size;
    keys = layer.keys + page * shape.head_dim * shape.block_size + offset;
    values = layer.values + (page * shape.block_size + offset) * shape.padded_dim;
  }
  float* keys;  // an element every block_size
  float* values;
};

}  // namespace

void LineFloats::grow(int64_t num_floats) {
  const auto num_lines = static_cast<size_t>((num_floats + 15) / 16);
  if (lines_.size() < num_lines) lines_.resize(num_lines);
}

void AttentionScratch::grow(const AttentionShape& shape, int64_t num_queries) {
  queries.grow(num_queries * shape.head_dim);
  outputs.grow(num_queries * shape.padded_dim);
  totals.grow(num_queries * kMaxVector);
  peaks.grow(num_queries);
  scores.grow(kMaxQueries * kTile);
  keys.grow(shape.head_dim * kTile);
}

void Attention::copy_pages(int64_t group, int64_t num_copies, const int64_t* source,
                           const int64_t* target) {
  const AttentionShape& shape = plans[group]->shape;
  const int64_t num_keys = shape.num_kv_heads * shape.head_dim * shape.block_size;
  const int64_t num_values = shape.num_kv_heads * shape.padded_dim * shape.block_size;
  for (const AttentionLayer& layer : layers) {
    if (layer.group != group) continue;
    for (int64_t i = 0; i < num_copies; ++i) {
      const int64_t from = source[i], to = target[i];
      std::memmove(layer.keys + to * num_keys, layer.keys + from * num_keys,
                   num_keys * sizeof(float));
      std::memmove(layer.values + to * num_values, layer.values + from * num_values,
                   num_values * sizeof(float));
    }
  }
}

void Attention::move_slots(int64_t group, int64_t num_moves, const int64_t* source,
                           const int64_t* target) {
  const AttentionShape& shape = plans[group]->shape;
  const int64_t size = shape.head_dim + shape.padded_dim;
  std::vector<float> held(num_moves * shape.num_kv_heads * size);
  const auto for_each = [&](const AttentionLayer& layer, const int64_t* slots, const auto& move) {
    float* token = held.data();
    for (int64_t i = 0; i < num_moves; ++i) {
      for (int64_t head = 0; head < shape.num_kv_heads; ++head, token += size) {
        move(token, TokenPlace(layer, shape, slots[i], head));
      }
    }
  };
  for (const AttentionLayer& layer : layers) {
    if (layer.group != group) continue;
    for_each(layer, source, [&](float* token, const TokenPlace& place) {
      for (int64_t d = 0; d < shape.head_dim; ++d) token[d] = place.keys[d * shape.block_size];
      std::copy_n(place.values, shape.padded_dim, token + shape.head_dim);
    });
    for_each(layer, target, [&](const float* token, const TokenPlace& place) {
      for (int64_t d = 0; d < shape.head_dim; ++d) place.keys[d * shape.block_size] = token[d];
      std::copy_n(token + shape.head_dim, shape.padded_dim, place.values);
    });
  }
}

}  // namespace pegboard
