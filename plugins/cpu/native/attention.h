// Paged attention: what the C interface and the instruction sets' kernels share.
#pragma once

#include <memory>
#include <vector>

#include "attention_plan.h"
#include "pool.h"

namespace pegboard {

constexpr int kMaxQueries = 6;        // queries of a micro-kernel
constexpr int64_t kMaxVector = 16;    // elements of the widest vector

// How pages hold numbers: as floats, or as codes of a byte with a scale a token and head.
enum class Encoding : int64_t { kNone, kInt8, kE4M3 };

// The keys, or the values, of a layer. Where codes are, a scale is beside each token's head.
struct KVPages {
  template <class Element>
  Element* elements() const {
    return static_cast<Element*>(data);
  }

  void* data;                    // keys [num_pages][kv_head][head_dim][block_size], or
                                 // values [num_pages][kv_head][block_size][padded_dim]
  float* scales = nullptr;       // [num_pages][kv_head][block_size]
  const float* fixed = nullptr;  // [kv_head]: scales to write; null: a token's own
};

// A decoder layer.
struct AttentionLayer {
  int64_t group;
  int64_t num_heads;
  float scale;
  float soft_cap;  // 0: none
  KVPages keys, values;
  Encoding encoding = Encoding::kNone;
};

// Where a token's head lies in pages, in elements.
struct HeadPlace {
  HeadPlace(const AttentionShape& shape, int64_t page, int64_t offset, int64_t head)
      : scale((page * shape.num_kv_heads + head) * shape.block_size + offset),
        key((scale - offset) * shape.head_dim + offset), value(scale * shape.padded_dim) {}
  int64_t scale;
  int64_t key;  // an element every block_size
  int64_t value;
};

// [num_tokens, heads, head_dim], the last axis dense; strides in elements.
struct HeadsView {
  const float* data;
  int64_t token_stride;
  int64_t head_stride;
  const float* at(int64_t token, int64_t head) const {
    return data + token * token_stride + head * head_stride;
  }
};

// Angles of each position: the element pairs (i, i + num_pairs) of a head turn by them.
struct RotaryAngles {
  const float* cos;  // [max_position, num_pairs]
  const float* sin;
  int64_t num_pairs;  // 0: no rotation
};

struct AttentionCall {
  HeadsView q, k, v;
  RotaryAngles rotary;
  float* out;  // [num_tokens, num_heads, head_dim]
  float* lse;  // [num_tokens, num_heads]; null: not wanted
};

// Memory that begins at a cache line, as no vector within then lies in two.
class LineFloats {
 public:
  float* data() { return lines_.data()->floats; }
  void grow(int64_t num_floats);

 private:
  struct alignas(64) Line {
    float floats[16];
  };
  std::vector<Line> lines_;
};

// Memory that one thread works in: the queries of a block and what is known of their outputs.
struct AttentionScratch {
  void grow(const AttentionShape& shape, int64_t num_queries);

  LineFloats queries;  // [query][head_dim], rotated
  LineFloats outputs;  // [query][padded_dim], sums of values so far
  LineFloats totals;   // [query][vector], sums of weights so far, by lane
  LineFloats peaks;    // [query], largest score so far
  LineFloats scores;   // [query of a micro-kernel][slot of a tile]
  LineFloats keys;     // [head_dim][slot of a tile], where pages do not serve as they are
  LineFloats values;   // [slot of a tile][padded_dim], of codes
};

struct Attention {
  void copy_blocks(int64_t group, int64_t num_copies, const int64_t* source, const int64_t* target);
  void move_slots(int64_t group, int64_t num_moves, const int64_t* source, const int64_t* target);

  Pool* pool;
  std::vector<std::unique_ptr<AttentionPlan>> plans;  // of each KV group
  std::vector<AttentionLayer> layers;
  std::vector<AttentionScratch> scratch;  // of each thread
  LineFloats parts;  // outputs, totals and peaks of tiles that several threads share out
};

}  // namespace pegboard
