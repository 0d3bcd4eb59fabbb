#include "attention_plan.h"

#include <algorithm>

namespace pegboard {
namespace {

// Queries enough to make the loading of a tile cheap, few enough to stay in the cache beside it.
constexpr int64_t kBlockQueries = 64;

constexpr int64_t kPlain = INT64_MAX;

}  // namespace

AttentionPlan::AttentionPlan(const AttentionShape& shape)
    : shape(shape), max_tokens(std::max<int64_t>(1, kBlockQueries / shape.max_group)) {}

void AttentionPlan::fill(const AttentionStep& next) {
  step = next;
  tokens.clear();
  blocks.clear();
  scattered.clear();
  for (int64_t row = 0; row < step.num_rows; ++row) add_row(row);
  // Threads take blocks in this order: with the longest first, they end at about the same time.
  std::sort(blocks.begin(), blocks.end(), [](const AttentionBlock& a, const AttentionBlock& b) {
    return a.num_tiles != b.num_tiles ? a.num_tiles > b.num_tiles : a.first_token < b.first_token;
  });
}

void AttentionPlan::add_row(int64_t row) {
  const int64_t begin = step.query_starts[row], end = step.query_starts[row + 1];
  const int64_t num_computed = step.num_computed[row];
  for (int64_t t = begin; t < end; ++t) {
    const int64_t own = num_computed + t - begin;
    AttentionToken token{};
    token.row = static_cast<int32_t>(row);
    token.position = step.positions[t];
    token.end = own + 1;
    token.plain = kPlain;
    token.page = page(row, own / shape.block_size);
    token.offset = own % shape.block_size;
    if (step.ancestors != nullptr) {
      see_ancestors(token, step.ancestors + t * step.ancestors_stride, num_computed, end - begin);
    }
    token.first = shape.skipped;
    if (shape.window > 0) token.first = std::max(token.first, token.end - shape.window);
    tokens.push_back(token);
  }
  for (int64_t t = begin; t < end; t += max_tokens) add_block(t, std::min(max_tokens, end - t));
}

void AttentionPlan::add_block(int64_t first_token, int64_t num_tokens) {
  int64_t first = INT64_MAX, end = 0, alike = kPlain;
  for (int64_t t = first_token; t < first_token + num_tokens; ++t) {
    first = std::min(first, tokens[t].first);
    end = std::max(end, tokens[t].end);
    alike = std::min(alike, tokens[t].plain);
  }
  const int64_t first_place = first / kTile * kTile;
  const int64_t num_tiles = (end - first_place + kTile - 1) / kTile;
  blocks.push_back({first_token, num_tokens, first_place, num_tiles, alike});
}

void AttentionPlan::see_ancestors(AttentionToken& token, const uint8_t* sees, int64_t num_computed,
                                  int64_t length) {
  int64_t prefix = 0;
  while (prefix < length && sees[prefix]) ++prefix;
  token.scattered = static_cast<int64_t>(scattered.size());
  for (int64_t j = prefix; j < length; ++j) {
    if (sees[j]) scattered.push_back(num_computed + j);
  }
  const int64_t num_scattered = static_cast<int64_t>(scattered.size()) - token.scattered;
  token.end = num_computed + prefix + num_scattered;
  if (num_scattered > 0) token.plain = num_computed + prefix;
}

}  // namespace pegboard
