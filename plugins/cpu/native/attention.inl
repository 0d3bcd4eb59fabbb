// Paged attention of a step: keys and values into their pages, then each block of queries over its
// tiles. Included by kernels.inl.

// Tokens whose keys and values one thread writes at a time: fewer are not worth waking another.
constexpr int64_t kWriteTokens = 16;

// Tiles of a block that one thread takes where there are too few blocks.
constexpr int64_t kPartTiles = 2;

inline void rotate_to(const float* x, int64_t head_dim, const RotaryAngles& rotary,
                      int64_t position, float* out) {
  const int64_t angle = position * rotary.num_pairs;
  rotate_head(x, head_dim, rotary.num_pairs, rotary.cos + angle, rotary.sin + angle, out);
}

inline void write_head(const AttentionShape& shape, const AttentionLayer& layer,
                       const HeadPlace& place, const float* key, const float* value) {
  float* keys = layer.keys.elements<float>() + place.key;
  float* values = layer.values.elements<float>() + place.value;
  for (int64_t d = 0; d < shape.head_dim; ++d) keys[d * shape.block_size] = key[d];
  std::memcpy(values, value, shape.head_dim * sizeof(float));
  std::memset(values + shape.head_dim, 0, (shape.padded_dim - shape.head_dim) * sizeof(float));
}

inline void encode_head(const AttentionShape& shape, const AttentionLayer& layer,
                        const HeadPlace& place, int64_t head, const float* key,
                        const float* value) {
  uint8_t* keys = layer.keys.elements<uint8_t>() + place.key;
  uint8_t* values = layer.values.elements<uint8_t>() + place.value;
  const auto fixed = [&](const KVPages& pages) {
    return pages.fixed == nullptr ? nullptr : pages.fixed + head;
  };
  with_codes(layer.encoding, [&](auto codes) {
    using Codes = decltype(codes);
    layer.keys.scales[place.scale] =
        encode_numbers<Codes>(key, shape.head_dim, fixed(layer.keys), keys, shape.block_size);
    layer.values.scales[place.scale] =
        encode_numbers<Codes>(value, shape.head_dim, fixed(layer.values), values, 1);
  });
  std::memset(values + shape.head_dim, 0, shape.padded_dim - shape.head_dim);
}

inline void write_token(const AttentionPlan& plan, const AttentionLayer& layer,
                        const AttentionCall& call, int64_t t, float* rotated) {
  const AttentionShape& shape = plan.shape;
  const AttentionToken& token = plan.tokens[t];
  for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
    const HeadPlace place(shape, token.page, token.offset, head);
    rotate_to(call.k.at(t, head), shape.head_dim, call.rotary, token.position, rotated);
    if (layer.encoding == Encoding::kNone) {
      write_head(shape, layer, place, rotated, call.v.at(t, head));
    } else {
      encode_head(shape, layer, place, head, rotated, call.v.at(t, head));
    }
  }
}

// One block of a row's tokens and the query heads of one KV head.
class BlockAttention {
 public:
  BlockAttention(const AttentionPlan& plan, const AttentionLayer& layer, const AttentionCall& call,
                 const AttentionBlock& block, int64_t kv_head, AttentionScratch& scratch)
      : plan_(plan), layer_(layer), call_(call), block_(block), kv_head_(kv_head),
        scratch_(scratch), group_(layer.num_heads / plan.shape.num_kv_heads),
        head_{plan.shape.head_dim, plan.shape.padded_dim, layer.scale, layer.soft_cap},
        state_{scratch.outputs.data(), scratch.totals.data(), scratch.peaks.data()} {}

  void run() {
    load_queries();
    reset();
    for (int64_t tile = 0; tile < block_.num_tiles; ++tile) attend_tile_of_block(tile);
    finish();
  }

  // Tiles [first, last), each into a state of its own: states(tile).
  template <class States>
  void run_tiles(int64_t first, int64_t last, const States& states) {
    load_queries();
    for (int64_t tile = first; tile < last; ++tile) {
      state_ = states(tile);
      reset();
      attend_tile_of_block(tile);
    }
  }

  // The same as `run`, from the tiles' states.
  template <class States>
  void join_tiles(const States& states) {
    reset();
    for (int64_t tile = 0; tile < block_.num_tiles; ++tile) {
      join_states(states(tile), num_queries(), head_.padded_dim, state_);
    }
    finish();
  }

 private:
  const AttentionToken& token(int64_t i) const { return plan_.tokens[block_.first_token + i]; }
  int64_t num_queries() const { return block_.num_tokens * group_; }

  void load_queries() {
    for (int64_t query = 0; query < num_queries(); ++query) {
      const int64_t i = query / group_;
      const float* q = call_.q.at(block_.first_token + i, kv_head_ * group_ + query % group_);
      rotate_to(q, head_.head_dim, call_.rotary, token(i).position,
                scratch_.queries.data() + query * head_.head_dim);
    }
  }

  void reset() {
    std::fill_n(state_.outputs, num_queries() * head_.padded_dim, 0.0f);
    std::fill_n(state_.totals, num_queries() * Vec::kWidth, 0.0f);
    std::fill_n(state_.peaks, num_queries(), -INFINITY);
  }

  void attend_tile_of_block(int64_t tile) {
    const int64_t place = block_.first_place + tile * kTile;
    if (place + kTile <= block_.alike) {
      attend(place, 0, block_.num_tokens);
    } else {
      for (int64_t i = 0; i < block_.num_tokens; ++i) attend(place, i, i + 1);
    }
  }

  bool sees(int64_t i, int64_t place) const {
    return token(i).first < place + kTile && token(i).end > place;
  }

  // The tile at `place`, which lies alike for tokens [i, end).
  void attend(int64_t place, int64_t i, int64_t end) {
    while (i < end) {
      if (!sees(i, place)) {
        ++i;
        continue;
      }
      int64_t last = i + 1;
      while (last < end && sees(last, place)) ++last;
      attend_seeing(place, i, last);
      i = last;
    }
  }

  void attend_seeing(int64_t place, int64_t i, int64_t end) {
    int64_t first_slot = kTile, last_slot = 0;
    for (int64_t t = i; t < end; ++t) {
      first_slot = std::min(first_slot, std::max<int64_t>(0, token(t).first - place));
      last_slot = std::max(last_slot, std::min<int64_t>(kTile, token(t).end - place));
    }
    KVTile tile = locate(token(i), place, first_slot, last_slot);
    const KVTile next = locate_ahead(token(i), place + kTile, tile);
    tile.ahead = &next;
    const int64_t num_queries = (end - i) * group_;
    const int64_t num_parts = (num_queries + kMaxQueries - 1) / kMaxQueries;
    int64_t query = i * group_;
    for (int64_t part = 0; part < num_parts; ++part) {
      const int64_t stop = i * group_ + num_queries * (part + 1) / num_parts;
      const Queries queries = queries_from(query, place, static_cast<int>(stop - query));
      kAttendTile[stop - query - 1](queries, tile, head_);
      query = stop;
      tile.ahead = &tile;
    }
  }

  Queries queries_from(int64_t query, int64_t place, int count) {
    Queries queries;
    queries.q = scratch_.queries.data() + query * head_.head_dim;
    queries.outputs = state_.outputs + query * head_.padded_dim;
    queries.totals = state_.totals + query * Vec::kWidth;
    queries.peaks = state_.peaks + query;
    queries.scores = scratch_.scores.data();
    for (int j = 0; j < count; ++j) {
      const AttentionToken& owner = token((query + j) / group_);
      queries.first[j] = static_cast<int>(std::max<int64_t>(0, owner.first - place));
      queries.last[j] = static_cast<int>(std::min<int64_t>(kTile, owner.end - place));
    }
    return queries;
  }

  // Slots [first, last) of the tile at `place`, as `seen_by` sees them. Only those are read: block
  // table entries beside them may be anything.
  KVTile locate(const AttentionToken& seen_by, int64_t place, int64_t first, int64_t last) {
    KVTile tile{};
    tile.first_vec = static_cast<int>(first / Vec::kWidth);
    tile.last_vec = static_cast<int>((last + Vec::kWidth - 1) / Vec::kWidth);
    if (layer_.encoding == Encoding::kNone) {
      locate_floats(seen_by, place, first, last, tile);
    } else {
      with_codes(layer_.encoding, [&](auto codes) {
        decode<decltype(codes)>(seen_by, place, first, last, tile);
      });
    }
    return tile;
  }

  // Pages of floats serve as they are, but for keys whose vectors do not lie in one piece.
  void locate_floats(const AttentionToken& seen_by, int64_t place, int64_t first, int64_t last,
                     KVTile& tile) {
    const float* keys[kTile];
    for (int64_t s = first; s < last;) {
      const PageRun run = run_from(seen_by, place, s, last);
      const float* key = layer_.keys.elements<float>() + run.place.key;
      const float* value = layer_.values.elements<float>() + run.place.value;
      for (; s < run.end; ++s, ++key, value += head_.padded_dim) {
        keys[s] = key;
        tile.values[s] = value;
      }
    }
    const int64_t block_size = plan_.shape.block_size;
    if (block_size % Vec::kWidth == 0 && place + last <= seen_by.plain) {
      tile.key_stride = block_size;
      for (int v = tile.first_vec; v < tile.last_vec; ++v) {
        // Of the vector's slots at least one is seen, and all lie in its page.
        const int64_t seen = std::max<int64_t>(first, v * Vec::kWidth);
        tile.keys[v] = keys[seen] - (seen - v * Vec::kWidth);
      }
      return;
    }
    float* gathered = scratch_.keys.data();
    for (int64_t d = 0; d < head_.head_dim; ++d) {
      for (int64_t s = first; s < last; ++s) gathered[d * kTile + s] = keys[s][d * block_size];
    }
    take_gathered_keys(tile);
  }

  // Pages of codes, as the numbers that they stand for.
  template <class Codes>
  void decode(const AttentionToken& seen_by, int64_t place, int64_t first, int64_t last,
              KVTile& tile) {
    float* const keys = scratch_.keys.data();
    float* const values = scratch_.values.data();
    for (int64_t s = first; s < last;) {
      const PageRun run = run_from(seen_by, place, s, last);
      decode_keys<Codes>(layer_.keys.elements<uint8_t>() + run.place.key,
                         layer_.keys.scales + run.place.scale, run.end - s, head_.head_dim,
                         plan_.shape.block_size, keys + s);
      decode_values<Codes>(layer_.values.elements<uint8_t>() + run.place.value,
                           layer_.values.scales + run.place.scale, run.end - s, head_.padded_dim,
                           values + s * head_.padded_dim);
      for (; s < run.end; ++s) tile.values[s] = values + s * head_.padded_dim;
    }
    take_gathered_keys(tile);
  }

  void take_gathered_keys(KVTile& tile) {
    tile.key_stride = kTile;
    for (int v = tile.first_vec; v < tile.last_vec; ++v) {
      tile.keys[v] = scratch_.keys.data() + v * Vec::kWidth;
    }
  }

  // Consecutive slots of a tile in one page.
  struct PageRun {
    HeadPlace place;  // of the first
    int64_t end;      // the slot of the tile after the last
  };

  PageRun run_from(const AttentionToken& seen_by, int64_t place, int64_t s, int64_t last) const {
    const AttentionShape& shape = plan_.shape;
    const int64_t slot = plan_.slot(seen_by, place + s);
    const int64_t block = slot / shape.block_size, offset = slot - block * shape.block_size;
    const int64_t num_plain = std::max<int64_t>(1, seen_by.plain - (place + s));
    const int64_t end = s + std::min(std::min(last - s, shape.block_size - offset), num_plain);
    return {HeadPlace(shape, plan_.page(seen_by.row, block), offset, kv_head_), end};
  }

  // The tile at `place`, if it is whole and needs no gathering; else `tile`.
  KVTile locate_ahead(const AttentionToken& seen_by, int64_t place, const KVTile& tile) {
    const bool is_whole = place + kTile <= std::min(seen_by.end, seen_by.plain);
    const bool is_gathered =
        layer_.encoding != Encoding::kNone || plan_.shape.block_size % Vec::kWidth != 0;
    if (!is_whole || is_gathered) return tile;
    return locate(seen_by, place, 0, kTile);
  }

  void finish() {
    for (int64_t query = 0; query < num_queries(); ++query) {
      const int64_t t = block_.first_token + query / group_;
      const int64_t head = t * layer_.num_heads + kv_head_ * group_ + query % group_;
      float total = 0;
      for (int lane = 0; lane < Vec::kWidth; ++lane) {
        total += state_.totals[query * Vec::kWidth + lane];
      }
      const float* sums = state_.outputs + query * head_.padded_dim;
      float* out = call_.out + head * head_.head_dim;
      for (int64_t d = 0; d < head_.head_dim; ++d) out[d] = sums[d] / total;
      if (call_.lse != nullptr) call_.lse[head] = state_.peaks[query] + std::log(total);
    }
  }

  const AttentionPlan& plan_;
  const AttentionLayer& layer_;
  const AttentionCall& call_;
  const AttentionBlock& block_;
  const int64_t kv_head_;
  AttentionScratch& scratch_;
  const int64_t group_;
  const HeadShape head_;
  QueryState state_;
};

void write_tokens(Attention& attention, const AttentionPlan& plan, const AttentionLayer& layer,
                  const AttentionCall& call) {
  const int64_t num_tokens = static_cast<int64_t>(plan.tokens.size());
  const int64_t num_tasks = (num_tokens + kWriteTokens - 1) / kWriteTokens;
  attention.pool->run(static_cast<int>(num_tasks), [&](int index, int thread) {
    const int64_t end = std::min(num_tokens, (index + 1) * kWriteTokens);
    float* rotated = attention.scratch[thread].queries.data();
    for (int64_t t = index * kWriteTokens; t < end; ++t) {
      write_token(plan, layer, call, t, rotated);
    }
  });
}

// Attention of so few blocks that threads share out a block's tiles. One thread then puts these
// together in their order, which gives the bits of `BlockAttention::run`.
void attend_in_parts(Attention& attention, const AttentionPlan& plan, const AttentionLayer& layer,
                     const AttentionCall& call) {
  const AttentionShape& shape = plan.shape;
  const int64_t num_kv_heads = shape.num_kv_heads;
  const int64_t num_tasks = static_cast<int64_t>(plan.blocks.size()) * num_kv_heads;
  const int64_t num_tiles = plan.blocks[0].num_tiles;  // of the longest
  const int64_t num_parts = (num_tiles + kPartTiles - 1) / kPartTiles;
  const int64_t group = layer.num_heads / num_kv_heads;
  const int64_t outputs = group * shape.padded_dim, totals = group * kMaxVector;
  const int64_t size = outputs + totals + (group + 15) / 16 * 16;
  attention.parts.grow(num_tasks * num_tiles * size);
  float* parts = attention.parts.data();
  const auto states_of = [&](int64_t task) {
    return [=](int64_t tile) -> QueryState {
      float* state = parts + (task * num_tiles + tile) * size;
      return {state, state + outputs, state + outputs + totals};
    };
  };
  const auto block_of = [&](int64_t task, int thread) {
    return BlockAttention(plan, layer, call, plan.blocks[task / num_kv_heads],
                          task % num_kv_heads, attention.scratch[thread]);
  };
  attention.pool->run(static_cast<int>(num_tasks * num_parts), [&](int index, int thread) {
    const int64_t task = index / num_parts, first = index % num_parts * kPartTiles;
    const int64_t last = std::min(first + kPartTiles, plan.blocks[task / num_kv_heads].num_tiles);
    if (first < last) block_of(task, thread).run_tiles(first, last, states_of(task));
  });
  for (int64_t task = 0; task < num_tasks; ++task) block_of(task, 0).join_tiles(states_of(task));
}

// Whether whole blocks would leave threads without work.
inline bool needs_parts(const AttentionPlan& plan, const Pool& pool) {
  if (pool.num_threads() == 1 || plan.blocks.empty()) return false;
  const int64_t num_tasks = static_cast<int64_t>(plan.blocks.size()) * plan.shape.num_kv_heads;
  return plan.tokens.size() == plan.blocks.size() && plan.blocks[0].num_tiles > kPartTiles &&
         num_tasks < 4 * pool.num_threads();
}

void attend(Attention& attention, int64_t layer_index, const AttentionCall& call) {
  const AttentionLayer& layer = attention.layers[layer_index];
  const AttentionPlan& plan = *attention.plans[layer.group];
  write_tokens(attention, plan, layer, call);
  if (needs_parts(plan, *attention.pool)) return attend_in_parts(attention, plan, layer, call);
  const int64_t num_kv_heads = plan.shape.num_kv_heads;
  const int64_t num_tasks = static_cast<int64_t>(plan.blocks.size()) * num_kv_heads;
  attention.pool->run(static_cast<int>(num_tasks), [&](int index, int thread) {
    const AttentionBlock& block = plan.blocks[index / num_kv_heads];
    BlockAttention(plan, layer, call, block, index % num_kv_heads, attention.scratch[thread]).run();
  });
}
