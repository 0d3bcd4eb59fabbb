// What one step's attention has to do, for all layers of a KV group.
#pragma once

#include <cstdint>
#include <vector>

namespace pegboard {

constexpr int kTile = 64;  // slots of a tile

// A KV group's attention. Pages are [kv_head][head_dim][block_size] of keys, so that the scores of
// consecutive slots are a vector, and [kv_head][block_size][padded_dim] of values.
struct AttentionShape {
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t padded_dim;  // head_dim rounded up to whole vectors of any instruction set
  int64_t block_size;
  int64_t window;     // 0: none
  int64_t max_group;  // most query heads that share a KV head, over the group's layers
  int64_t skipped;    // a row's first slots, which hold no keys
};

// A step's metadata as the engine gives it; the memory stays valid until the next step.
struct AttentionStep {
  int64_t num_rows;
  const int64_t* positions;      // [num_tokens]
  const int64_t* query_starts;   // [num_rows + 1]
  const int64_t* num_computed;   // [num_rows]
  const int32_t* block_table;    // [num_rows, table_stride]
  int64_t table_stride;
  const uint8_t* ancestors;      // [num_tokens, ancestors_stride]; null: no trees
  int64_t ancestors_stride;
};

// A token sees the *places* [first, end): its row's slots as they would be numbered had the token
// been decoded plainly. Places below `plain` are the slots of that number; those from there on, of
// a draft node whose ancestors are scattered, are the slots in `scattered`.
struct AttentionToken {
  int32_t row;
  int64_t position;
  int64_t first;
  int64_t end;
  int64_t plain;
  int64_t scattered;  // where the token's slots begin in AttentionPlan::scattered
  int64_t page;       // where its own key and value go
  int64_t offset;
};

// Consecutive tokens of a row whose queries share each loaded tile of keys and values.
struct AttentionBlock {
  int64_t first_token;
  int64_t num_tokens;
  int64_t first_place;  // of the first tile, a multiple of kTile
  int64_t num_tiles;
  int64_t alike;  // tiles that end up to here lie alike for all tokens
};

class AttentionPlan {
 public:
  explicit AttentionPlan(const AttentionShape& shape);

  void fill(const AttentionStep& step);

  int64_t slot(const AttentionToken& token, int64_t place) const {
    return place < token.plain ? place : scattered[token.scattered + place - token.plain];
  }
  int64_t page(int64_t row, int64_t block) const {
    return step.block_table[row * step.table_stride + block];
  }

  const AttentionShape shape;
  const int64_t max_tokens;  // of a block
  AttentionStep step{};
  std::vector<AttentionToken> tokens;
  std::vector<AttentionBlock> blocks;
  std::vector<int64_t> scattered;

 private:
  void add_row(int64_t row);
  void add_block(int64_t first_token, int64_t num_tokens);
  void see_ancestors(AttentionToken& token, const uint8_t* sees, int64_t num_computed,
                     int64_t length);
};

}  // namespace pegboard
