// Attention of a few queries over one tile of keys and values.
//
// Every token's slots are cut into tiles at fixed places, multiples of kTile, and each query's result
// is a fixed function of its tiles, in ascending order:
//
//     score = cap(scale * sum_d q[d] k[d]),  one chain of fused operations in ascending d
//     peak', weight = max(score), exp(score - peak'),  of the tile's slots that the query sees
//     total', output' = sum(weight), sum(weight v),  the latter one chain in ascending slots
//     peak, total, output  <-  both parts, each scaled by exp(its peak - the larger peak)
//
// Queries only share loaded keys and values: how many are taken together changes no bit. Slots that a
// query does not see are not multiplied by zero but left out, as they may hold anything.

constexpr int kTileVecs = kTile / Vec::kWidth;

// Vectors of a micro-kernel beside each other: its sums stay in registers.
constexpr int columns(int num_queries) {
  return Vec::kWidth == 16 || num_queries <= 3 ? 4 : 2;
}

// Where a tile's keys and values lie.
struct KVTile {
  const float* keys[kTileVecs];  // of each vector of slots: [head_dim][key_stride]
  int64_t key_stride;
  const float* values[kTile];  // of each slot: [padded_dim]
  int first_vec, last_vec;     // vectors that hold a slot somebody sees
  const KVTile* ahead;         // what to fetch meanwhile: the next tile, or this one
};

// Queries that are taken together, and what is known of their outputs.
struct Queries {
  const float* q;  // [query][head_dim]
  float* outputs;  // [query][padded_dim]
  float* totals;   // [query][vector]
  float* peaks;    // [query]
  float* scores;   // [query][kTile]: scores, then weights
  int first[kMaxQueries], last[kMaxQueries];  // slots of the tile that each sees
};

// What is known of some queries' outputs.
struct QueryState {
  float* outputs;  // [query][padded_dim]
  float* totals;   // [query][vector]
  float* peaks;    // [query]
};

struct HeadShape {
  int64_t head_dim;
  int64_t padded_dim;
  float scale;
  float soft_cap;
};

template <int Q, int C>
inline void tile_scores(const Queries& queries, const KVTile& tile, const HeadShape& shape, int vec) {
  Vec sums[Q][C];
  for (int i = 0; i < Q; ++i) {
    for (int c = 0; c < C; ++c) sums[i][c] = Vec::zero();
  }
  const float* q = queries.q;
  const KVTile& ahead = *tile.ahead;
  const int64_t dim = shape.head_dim;
  for (int64_t d = 0; d < dim; ++d) {
    Vec keys[C];
    for (int c = 0; c < C; ++c) {
      keys[c] = Vec::load(tile.keys[vec + c] + d * tile.key_stride);
      __builtin_prefetch(ahead.keys[vec + c] + d * ahead.key_stride);
    }
    for (int i = 0; i < Q; ++i) {
      const Vec x = Vec::broadcast(q[i * dim + d]);
      for (int c = 0; c < C; ++c) sums[i][c] = Vec::fma(x, keys[c], sums[i][c]);
    }
  }
  const Vec scale = Vec::broadcast(shape.scale);
  for (int i = 0; i < Q; ++i) {
    for (int c = 0; c < C; ++c) {
      (sums[i][c] * scale).store(queries.scores + i * kTile + (vec + c) * Vec::kWidth);
    }
  }
}

// cap * tanh(score / cap)
inline Vec cap_scores(Vec scores, float cap) {
  // tanh(|x|) = (1 - e) / (1 + e) with e = exp(-2 |x|)
  const Vec size = {scores.v < 0 ? -scores.v : scores.v};
  const Vec e = exp(size * Vec::broadcast(-2.0f / cap));
  const Vec capped = {cap * (1.0f - e.v) / (1.0f + e.v)};
  return {scores.v < 0 ? -capped.v : capped.v};
}

// Lanes [first, last) of x, -inf elsewhere.
inline Vec keep_lanes(Vec x, int first, int last) {
  float lanes[Vec::kWidth];
  for (int lane = 0; lane < Vec::kWidth; ++lane) {
    lanes[lane] = lane >= first && lane < last ? 0.0f : 1.0f;
  }
  return {Vec::load(lanes).v > 0.5f ? Vec::broadcast(-INFINITY).v : x.v};
}

inline float largest_lane(Vec x) {
  float lanes[Vec::kWidth];
  x.store(lanes);
  for (int width = Vec::kWidth / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] = std::max(lanes[i], lanes[i + width]);
  }
  return lanes[0];
}

// Turns a query's scores into weights; gives the tile's peak, and its total by lane.
inline float tile_weights(float* scores, int first, int last, float soft_cap, Vec& total) {
  const int begin = first / Vec::kWidth, end = (last + Vec::kWidth - 1) / Vec::kWidth;
  Vec largest = Vec::broadcast(-INFINITY);
  for (int v = begin; v < end; ++v) {
    Vec x = Vec::load(scores + v * Vec::kWidth);
    if (soft_cap > 0) x = cap_scores(x, soft_cap);
    const int slot = v * Vec::kWidth;
    if (slot < first || slot + Vec::kWidth > last) x = keep_lanes(x, first - slot, last - slot);
    x.store(scores + slot);
    largest = maximum(largest, x);
  }
  const float peak = largest_lane(largest);
  total = Vec::zero();
  for (int v = begin; v < end; ++v) {
    const Vec x = Vec::load(scores + v * Vec::kWidth);
    const Vec weight = exp({x.v - peak});
    weight.store(scores + v * Vec::kWidth);
    total = total + weight;
  }
  return peak;
}

// How the parts before and in the tile count for each query, by lane.
struct Rescale {
  float before[Vec::kWidth];
  float tile[Vec::kWidth];
};

template <int Q>
inline Rescale tile_softmax(const Queries& queries, const HeadShape& shape) {
  Rescale rescale{};
  Vec totals[Q];
  for (int i = 0; i < Q; ++i) {
    const float peak = tile_weights(queries.scores + i * kTile, queries.first[i], queries.last[i],
                                    shape.soft_cap, totals[i]);
    const float largest = peak > queries.peaks[i] ? peak : queries.peaks[i];
    rescale.before[i] = queries.peaks[i] - largest;
    rescale.tile[i] = peak - largest;
    queries.peaks[i] = largest;
  }
  exp(Vec::load(rescale.before)).store(rescale.before);
  exp(Vec::load(rescale.tile)).store(rescale.tile);
  for (int i = 0; i < Q; ++i) {
    float* all = queries.totals + i * Vec::kWidth;
    const Vec before = Vec::load(all) * Vec::broadcast(rescale.before[i]);
    Vec::fma(totals[i], Vec::broadcast(rescale.tile[i]), before).store(all);
  }
  return rescale;
}

// Adds what is known of one tile to what is known of those before, as an `attend_tile` of all does.
inline void join_states(const QueryState& tile, int64_t num_queries, int64_t padded_dim,
                        const QueryState& all) {
  for (int64_t i = 0; i < num_queries; ++i) {
    const float largest = tile.peaks[i] > all.peaks[i] ? tile.peaks[i] : all.peaks[i];
    const Vec scale_all = exp(Vec::broadcast(all.peaks[i] - largest));
    const Vec scale_tile = exp(Vec::broadcast(tile.peaks[i] - largest));
    all.peaks[i] = largest;
    const auto join = [&](const float* from, float* to) {
      Vec::fma(Vec::load(from), scale_tile, Vec::load(to) * scale_all).store(to);
    };
    join(tile.totals + i * Vec::kWidth, all.totals + i * Vec::kWidth);
    for (int64_t d = i * padded_dim; d < (i + 1) * padded_dim; d += Vec::kWidth) {
      join(tile.outputs + d, all.outputs + d);
    }
  }
}

template <int C>
inline void add_values(const float* weights, const KVTile& tile, int64_t column, int begin, int end,
                       Vec (&sums)[C]) {
  for (int s = begin; s < end; ++s) {
    const Vec weight = Vec::broadcast(weights[s]);
    for (int c = 0; c < C; ++c) {
      sums[c] = Vec::fma(weight, Vec::load(tile.values[s] + column + c * Vec::kWidth), sums[c]);
    }
  }
}

template <int Q, int C>
inline void tile_values(const Queries& queries, const KVTile& tile, const HeadShape& shape,
                        const Rescale& rescale, int64_t column) {
  // All queries see [begin, end); what each sees before and after, it takes alone.
  int begin = 0, end = kTile;
  for (int i = 0; i < Q; ++i) {
    if (queries.first[i] > begin) begin = queries.first[i];
    if (queries.last[i] < end) end = queries.last[i];
  }
  if (begin > end) begin = end = 0;
  Vec sums[Q][C];
  for (int i = 0; i < Q; ++i) {
    for (int c = 0; c < C; ++c) sums[i][c] = Vec::zero();
    const int last = begin == end ? queries.last[i] : begin;
    add_values<C>(queries.scores + i * kTile, tile, column, queries.first[i], last, sums[i]);
  }
  for (int s = begin; s < end; ++s) {
    Vec values[C];
    for (int c = 0; c < C; ++c) {
      values[c] = Vec::load(tile.values[s] + column + c * Vec::kWidth);
      __builtin_prefetch(tile.ahead->values[s] + column + c * Vec::kWidth);
    }
    for (int i = 0; i < Q; ++i) {
      const Vec weight = Vec::broadcast(queries.scores[i * kTile + s]);
      for (int c = 0; c < C; ++c) sums[i][c] = Vec::fma(weight, values[c], sums[i][c]);
    }
  }
  for (int i = 0; i < Q; ++i) {
    if (begin != end) {
      add_values<C>(queries.scores + i * kTile, tile, column, end, queries.last[i], sums[i]);
    }
    for (int c = 0; c < C; ++c) {
      float* output = queries.outputs + i * shape.padded_dim + column + c * Vec::kWidth;
      const Vec before = Vec::load(output) * Vec::broadcast(rescale.before[i]);
      Vec::fma(sums[i][c], Vec::broadcast(rescale.tile[i]), before).store(output);
    }
  }
}

template <int Q>
void attend_tile(const Queries& queries, const KVTile& tile, const HeadShape& shape) {
  constexpr int C = columns(Q);
  int vec = tile.first_vec;
  for (; vec + C <= tile.last_vec; vec += C) tile_scores<Q, C>(queries, tile, shape, vec);
  for (; vec < tile.last_vec; ++vec) tile_scores<Q, 1>(queries, tile, shape, vec);
  const Rescale rescale = tile_softmax<Q>(queries, shape);
  constexpr int64_t kStep = C * Vec::kWidth;
  int64_t column = 0;
  for (; column + kStep <= shape.padded_dim; column += kStep) {
    tile_values<Q, C>(queries, tile, shape, rescale, column);
  }
  for (; column < shape.padded_dim; column += Vec::kWidth) {
    tile_values<Q, 1>(queries, tile, shape, rescale, column);
  }
}

using AttendTile = void (*)(const Queries&, const KVTile&, const HeadShape&);
constexpr AttendTile kAttendTile[kMaxQueries] = {attend_tile<1>, attend_tile<2>, attend_tile<3>,
                                                 attend_tile<4>, attend_tile<5>, attend_tile<6>};
