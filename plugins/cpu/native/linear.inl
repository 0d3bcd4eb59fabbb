// y = x·Wᵀ with packed weights. Included by kernels.inl.
//
// W is packed into panels [in_features][kPanelWidth] of kPanelWidth outputs each, in the order in
// which the product reads them; the last panel is filled up with zeros.
//
// Each output is one chain of multiply-adds over the inputs in ascending order, from zero. What a
// block of the input axis leaves behind waits in y, which is exact, and work is split over outputs
// only: so an output's bits depend neither on the other rows nor on the threads.

// A tile of kTileRows rows by one panel fills the registers, with room for a row of the panel.
constexpr int kPanelVecs = 2;
constexpr int kPanelWidth = kPanelVecs * Vec::kWidth;
constexpr int kTileRows = (Vec::kNumRegisters - 4) / kPanelVecs;

constexpr int64_t kLineBytes = 64;

// Inputs of a block: a panel's block and a tile's rows of x fit the first-level cache together.
constexpr int64_t kBlockDepth = 192;
// Between the rows of a block of x: known to the compiler, so that one register addresses all
// rows of a tile, and an odd number of cache lines, so that rows never compete for one set.
constexpr int64_t kBlockStride = kBlockDepth + 16;
// Rows that the panels pass by in one round, so that their inputs (so many floats) and what is
// under way of their outputs stay in the second-level cache; no less than pays for the passage.
constexpr int64_t kMostRows = 128;
constexpr int64_t kLeastRows = 4 * kTileRows;
constexpr int64_t kCachedInputs = 192 * 1024;

// Rows of x, cut into blocks [num_rows][kBlockStride] of kBlockDepth inputs.
struct InputBlocks {
  const float* values;
  int64_t block_stride;
};

// y[r][0..kPanelWidth) (+)= x[r]·w for Rows rows of a block; fetches `ahead` meanwhile.
template <int Rows>
void tile(const float* x, const float* w, int64_t depth, bool is_first, float* y, int64_t y_stride,
          const char* ahead, int64_t ahead_step) {
  Vec sum[Rows][kPanelVecs];
#pragma GCC unroll 32
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVecs; ++v) {
      sum[r][v] = is_first ? Vec::zero() : Vec::load(y + r * y_stride + v * Vec::kWidth);
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    __builtin_prefetch(ahead, 0, 2);
    if (ahead_step > kLineBytes) __builtin_prefetch(ahead + kLineBytes, 0, 2);
    ahead += ahead_step;
    Vec weight[kPanelVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVecs; ++v) weight[v] = Vec::load(w + v * Vec::kWidth);
    w += kPanelWidth;
#pragma GCC unroll 32
    for (int r = 0; r < Rows; ++r) {
      const Vec input = Vec::broadcast(x[r * kBlockStride]);
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVecs; ++v) sum[r][v] = Vec::fma(input, weight[v], sum[r][v]);
    }
    ++x;
  }
#pragma GCC unroll 32
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVecs; ++v) sum[r][v].store(y + r * y_stride + v * Vec::kWidth);
  }
}

using Tile = void (*)(const float*, const float*, int64_t, bool, float*, int64_t, const char*,
                      int64_t);

template <int... Below>
constexpr std::array<Tile, sizeof...(Below)> tiles(std::integer_sequence<int, Below...>) {
  return {tile<Below + 1>...};
}

// kTiles[n - 1] computes n rows.
constexpr auto kTiles = tiles(std::make_integer_sequence<int, kTileRows>());

// The last panel's tile: only the outputs that exist are read and written.
void edge_tile(int num_rows, int num_outputs, const float* x, const float* w, int64_t depth,
               bool is_first, float* y, int64_t y_stride) {
  float whole[kTileRows * kPanelWidth];
  const size_t num_bytes = num_outputs * sizeof(float);
  std::memset(whole, 0, sizeof whole);
  for (int r = 0; r < num_rows && !is_first; ++r) {
    std::memcpy(whole + r * kPanelWidth, y + r * y_stride, num_bytes);
  }
  kTiles[num_rows - 1](x, w, depth, is_first, whole, kPanelWidth,
                       reinterpret_cast<const char*>(w), 0);
  for (int r = 0; r < num_rows; ++r) {
    std::memcpy(y + r * y_stride, whole + r * kPanelWidth, num_bytes);
  }
}

// All rows of y for one panel, `num_outputs` wide.
void panel_product(const InputBlocks& x, int64_t num_rows, int64_t in_features, const float* panel,
                   int num_outputs, float* y, int64_t y_stride) {
  const int64_t num_tiles = (num_rows + kTileRows - 1) / kTileRows;
  // The tiles of a block share out the fetching of the next one.
  const int64_t ahead_step = kPanelWidth * sizeof(float) / num_tiles;
  for (int64_t start = 0; start < in_features; start += kBlockDepth) {
    const int64_t depth = std::min(kBlockDepth, in_features - start);
    const float* block = x.values + start / kBlockDepth * x.block_stride;
    const float* w = panel + start * kPanelWidth;
    const char* ahead = reinterpret_cast<const char*>(w + kBlockDepth * kPanelWidth);
    for (int64_t t = 0; t < num_tiles; ++t) {
      // Tiles of nearly equal heights: a short last one would waste its multiply-adds' latency.
      const int64_t row = num_rows * t / num_tiles;
      const int height = static_cast<int>(num_rows * (t + 1) / num_tiles - row);
      const float* rows = block + row * kBlockStride;
      float* out = y + row * y_stride;
      if (num_outputs == kPanelWidth) {
        kTiles[height - 1](rows, w, depth, start == 0, out, y_stride,
                           ahead + t * depth * ahead_step, ahead_step);
      } else {
        edge_tile(height, num_outputs, rows, w, depth, start == 0, out, y_stride);
      }
    }
  }
}

// Copies rows of x into blocks; the memory is the calling thread's, valid until its next call.
InputBlocks input_blocks(Pool& pool, int64_t num_rows, int64_t in_features, const float* x,
                         int64_t x_stride) {
  if (num_rows == 1) return {x, kBlockDepth};
  constexpr int64_t kRowsPerTask = 32;
  const int64_t num_blocks = (in_features + kBlockDepth - 1) / kBlockDepth;
  const int64_t block_stride = num_rows * kBlockStride;
  float* const values = scratch(num_blocks * block_stride);
  const int num_tasks = static_cast<int>((num_rows + kRowsPerTask - 1) / kRowsPerTask);
  pool.run(num_tasks, [=](int task, int) {
    const int64_t end = std::min(num_rows, (task + 1) * kRowsPerTask);
    for (int64_t row = task * kRowsPerTask; row < end; ++row) {
      for (int64_t start = 0; start < in_features; start += kBlockDepth) {
        std::memcpy(values + start / kBlockDepth * block_stride + row * kBlockStride,
                    x + row * x_stride + start,
                    std::min(kBlockDepth, in_features - start) * sizeof(float));
      }
    }
  });
  return {values, block_stride};
}

// `linear` for as many rows as the cache holds.
void cached_linear(Pool& pool, int64_t num_rows, int64_t out_features, int64_t in_features,
                   const float* x, int64_t x_stride, const float* panels, float* y) {
  const int64_t num_panels = (out_features + kPanelWidth - 1) / kPanelWidth;
  const int64_t panel_size = in_features * kPanelWidth;
  const InputBlocks blocks = input_blocks(pool, num_rows, in_features, x, x_stride);
  pool.run_along(num_panels, [&](int64_t p, int) {
    const int64_t output = p * kPanelWidth;
    const int width = static_cast<int>(std::min<int64_t>(kPanelWidth, out_features - output));
    panel_product(blocks, num_rows, in_features, panels + p * panel_size, width, y + output,
                  out_features);
  });
}

void linear(Pool& pool, int64_t num_rows, int64_t out_features, int64_t in_features, const float* x,
            int64_t x_stride, const float* panels, float* y) {
  const int64_t most = std::clamp(kCachedInputs / in_features, kLeastRows, kMostRows);
  const int64_t num_parts = (num_rows + most - 1) / most;
  for (int64_t part = 0; part < num_parts; ++part) {
    const int64_t row = num_rows * part / num_parts;
    const int64_t count = num_rows * (part + 1) / num_parts - row;
    cached_linear(pool, count, out_features, in_features, x + row * x_stride, x_stride, panels,
                  y + row * out_features);
  }
}

void linear_pack(Pool& pool, int64_t out_features, int64_t in_features, const float* weight,
                 int64_t weight_stride, float* panels) {
  constexpr int64_t kLine = kLineBytes / sizeof(float);
  constexpr int64_t kLinesAhead = 8;
  const int64_t num_panels = (out_features + kPanelWidth - 1) / kPanelWidth;
  pool.run(static_cast<int>(num_panels), [=](int p, int) {
    float* panel = panels + p * in_features * kPanelWidth;
    const int64_t width = std::min<int64_t>(kPanelWidth, out_features - p * kPanelWidth);
    if (width < kPanelWidth) std::memset(panel, 0, in_features * kPanelWidth * sizeof(float));
    for (int64_t start = 0; start < in_features; start += kLine) {
      const int64_t end = std::min(start + kLine, in_features);
      for (int64_t n = 0; n < width; ++n) {
        const float* row = weight + (p * kPanelWidth + n) * weight_stride;
        // More rows at once than a processor follows by itself.
        __builtin_prefetch(row + start + kLinesAhead * kLine);
        for (int64_t k = start; k < end; ++k) panel[k * kPanelWidth + n] = row[k];
      }
    }
  });
}

void linear_gather(Pool& pool, int64_t num_rows, int64_t in_features, const float* panels,
                   const int64_t* row_ids, float* out) {
  pool.run(static_cast<int>(num_rows), [=](int row, int) {
    const int64_t id = row_ids[row];
    const float* column = panels + id / kPanelWidth * in_features * kPanelWidth + id % kPanelWidth;
    for (int64_t k = 0; k < in_features; ++k) out[row * in_features + k] = column[k * kPanelWidth];
  });
}
