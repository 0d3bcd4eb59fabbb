#include "attention.h"

#include <algorithm>
#include <cstring>

namespace pegboard {
namespace {

// One of a page's tensors: its bytes.
struct PageBytes {
  void copy(int64_t from, int64_t to) const {
    std::memmove(data + to * size, data + from * size, size);
  }
  char* data;
  int64_t size;
};

template <class Element>
PageBytes page_bytes(void* data, int64_t num_elements) {
  return {static_cast<char*>(data), num_elements * static_cast<int64_t>(sizeof(Element))};
}

// The tensors of a layer's pages.
template <class Element>
std::vector<PageBytes> tensors_of(const AttentionLayer& layer, const AttentionShape& shape) {
  const int64_t num_heads = shape.num_kv_heads * shape.block_size;
  std::vector<PageBytes> tensors = {
      page_bytes<Element>(layer.keys.data, num_heads * shape.head_dim),
      page_bytes<Element>(layer.values.data, num_heads * shape.padded_dim)};
  for (float* scales : {layer.keys.scales, layer.values.scales}) {
    if (scales != nullptr) tensors.push_back(page_bytes<float>(scales, num_heads));
  }
  return tensors;
}

template <class Element>
void move_tokens(const AttentionLayer& layer, const AttentionShape& shape, int64_t num_moves,
                 const int64_t* source, const int64_t* target) {
  Element* const keys = layer.keys.elements<Element>();
  Element* const values = layer.values.elements<Element>();
  const int64_t size = shape.head_dim + shape.padded_dim;
  std::vector<Element> held(num_moves * shape.num_kv_heads * size);
  std::vector<float> scales(num_moves * shape.num_kv_heads * 2);
  const auto for_each = [&](const int64_t* slots, const auto& move) {
    for (int64_t i = 0; i < num_moves * shape.num_kv_heads; ++i) {
      const int64_t slot = slots[i / shape.num_kv_heads], head = i % shape.num_kv_heads;
      move(HeadPlace(shape, slot / shape.block_size, slot % shape.block_size, head),
           held.data() + i * size, scales.data() + i * 2);
    }
  };
  for_each(source, [&](const HeadPlace& place, Element* token, float* scale) {
    for (int64_t d = 0; d < shape.head_dim; ++d) token[d] = keys[place.key + d * shape.block_size];
    std::copy_n(values + place.value, shape.padded_dim, token + shape.head_dim);
    if (layer.encoding == Encoding::kNone) return;
    scale[0] = layer.keys.scales[place.scale];
    scale[1] = layer.values.scales[place.scale];
  });
  for_each(target, [&](const HeadPlace& place, const Element* token, const float* scale) {
    for (int64_t d = 0; d < shape.head_dim; ++d) keys[place.key + d * shape.block_size] = token[d];
    std::copy_n(token + shape.head_dim, shape.padded_dim, values + place.value);
    if (layer.encoding == Encoding::kNone) return;
    layer.keys.scales[place.scale] = scale[0];
    layer.values.scales[place.scale] = scale[1];
  });
}

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
  values.grow(shape.padded_dim * kTile);
}

void Attention::copy_blocks(int64_t group, int64_t num_copies, const int64_t* source,
                            const int64_t* target) {
  const AttentionShape& shape = plans[group]->shape;
  for (const AttentionLayer& layer : layers) {
    if (layer.group != group) continue;
    const auto tensors = layer.encoding == Encoding::kNone ? tensors_of<float>(layer, shape)
                                                           : tensors_of<uint8_t>(layer, shape);
    for (int64_t i = 0; i < num_copies; ++i) {
      for (const PageBytes& tensor : tensors) tensor.copy(source[i], target[i]);
    }
  }
}

void Attention::move_slots(int64_t group, int64_t num_moves, const int64_t* source,
                           const int64_t* target) {
  const AttentionShape& shape = plans[group]->shape;
  for (const AttentionLayer& layer : layers) {
    if (layer.group != group) continue;
    if (layer.encoding == Encoding::kNone) {
      move_tokens<float>(layer, shape, num_moves, source, target);
    } else {
      move_tokens<uint8_t>(layer, shape, num_moves, source, target);
    }
  }
}

}  // namespace pegboard
