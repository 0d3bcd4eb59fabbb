// y = x·Wᵀ with weights in float8 (float8.h). Included by kernels.inl, after linear.inl and the codes
// of attention_codes.inl.
//
// The same chains of multiply-adds as on the dequantized weight in float32: not a bit differs.

// Inputs [0, n) rounded to float8 by a scale, and scaled back. NaN stays.
inline void to_float8(const float* x, int64_t n, float scale, float* out) {
  constexpr float kLargest = E4M3Codes::kLargest;
  for (int64_t i = 0; i < n; ++i) {
    const float y = scale == 0.0f ? 0.0f : x[i] / scale;
    const float within = y > kLargest ? kLargest : y < -kLargest ? -kLargest : y;
    out[i] = (y == y ? E4M3Codes::number(E4M3Codes::code(within)) : y) * scale;
  }
}

// A row as the product sees it.
inline void float8_inputs(const Float8Panels& w, const float* x, float* out) {
  switch (w.inputs) {
    case Float8Inputs::kFloat: std::memcpy(out, x, w.in_features * sizeof(float)); break;
    case Float8Inputs::kStatic: to_float8(x, w.in_features, w.input_scale, out); break;
    case Float8Inputs::kDynamic:
      for (int64_t start = 0; start < w.in_features; start += w.sharing) {
        const int64_t n = std::min(w.sharing, w.in_features - start);
        to_float8(x + start, n, largest(x + start, n) / E4M3Codes::kLargest, out + start);
      }
  }
}

// How far ahead codes are fetched, in bytes.
constexpr int64_t kFloat8Ahead = 16 * 1024;

// `input_blocks` (linear.inl) of rounded rows.
inline InputBlocks float8_blocks(Pool& pool, const Float8Panels& w, int64_t num_rows,
                                 const float* x, int64_t x_stride) {
  const int64_t num_blocks = (w.in_features + kBlockDepth - 1) / kBlockDepth;
  const int64_t block_stride = num_rows * kBlockStride;
  float* const values = scratch(num_blocks * block_stride + num_rows * w.in_features);
  float* const rounded = values + num_blocks * block_stride;
  pool.run(static_cast<int>(num_rows), [&](int row, int) {
    float* const whole = rounded + row * w.in_features;
    float8_inputs(w, x + row * x_stride, whole);
    for (int64_t start = 0; start < w.in_features; start += kBlockDepth) {
      std::memcpy(values + start / kBlockDepth * block_stride + row * kBlockStride, whole + start,
                  std::min(kBlockDepth, w.in_features - start) * sizeof(float));
    }
  });
  return {values, block_stride};
}

// A vector of a panel's outputs, dequantized, of input k.
inline Vec widen_float8(const Float8Panels& w, const uint8_t* panel, int64_t k, int v) {
  const int64_t first = v * Vec::kWidth;
  const auto* scales = reinterpret_cast<const float*>(panel + w.scales_at);
  return E4M3Codes::numbers(panel + k * kPanelWidth + first) *
         Vec::load(scales + w.groups[k] * kPanelWidth + first);
}

// All rows of y for one panel, `num_outputs` wide: of so few rows that codes are widened where they are used.
template <int Rows>
void float8_rows(const Float8Panels& w, const InputBlocks& x, int64_t, const uint8_t* panel,
                 int num_outputs, float* y) {
  Vec sum[Rows][kPanelVecs] = {};
  for (int64_t start = 0; start < w.in_features; start += kBlockDepth) {
    const float* rows = x.values + start / kBlockDepth * x.block_stride;
    const int64_t end = std::min(start + kBlockDepth, w.in_features);
    for (int64_t k = start; k < end; ++k, ++rows) {
      __builtin_prefetch(panel + k * kPanelWidth + kFloat8Ahead, 0, 2);
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVecs; ++v) {
        const Vec weight = widen_float8(w, panel, k, v);
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) {
          sum[r][v] = Vec::fma(Vec::broadcast(rows[r * kBlockStride]), weight, sum[r][v]);
        }
      }
    }
  }
  for (int r = 0; r < Rows; ++r) {
    float whole[kPanelWidth];
    for (int v = 0; v < kPanelVecs; ++v) sum[r][v].store(whole + v * Vec::kWidth);
    std::memcpy(y + r * w.out_features, whole, num_outputs * sizeof(float));
  }
}

// kFloat8Rows[n - 1] is for n rows.
constexpr std::array kFloat8Rows = {float8_rows<1>, float8_rows<2>, float8_rows<3>, float8_rows<4>};

// The same for any number of rows.
inline void float8_panel(const Float8Panels& w, const InputBlocks& x, int64_t num_rows,
                         const uint8_t* panel, int num_outputs, float* y) {
  const int64_t num_tiles = (num_rows + kTileRows - 1) / kTileRows;
  alignas(kLineBytes) float values[kBlockDepth * kPanelWidth];
  for (int64_t start = 0; start < w.in_features; start += kBlockDepth) {
    const int64_t depth = std::min(kBlockDepth, w.in_features - start);
    const float* block = x.values + start / kBlockDepth * x.block_stride;
    for (int64_t k = 0; k < depth; ++k) {
      for (int v = 0; v < kPanelVecs; ++v) {
        widen_float8(w, panel, start + k, v).store(values + k * kPanelWidth + v * Vec::kWidth);
      }
    }
    // The tiles of a block share out the fetching of one that follows.
    const char* ahead = reinterpret_cast<const char*>(panel + start * kPanelWidth + kFloat8Ahead);
    const int64_t ahead_step = kPanelWidth / num_tiles;
    for (int64_t t = 0; t < num_tiles; ++t) {
      const int64_t row = num_rows * t / num_tiles;
      const int height = static_cast<int>(num_rows * (t + 1) / num_tiles - row);
      const float* rows = block + row * kBlockStride;
      float* out = y + row * w.out_features;
      if (num_outputs == kPanelWidth) {
        kTiles[height - 1](rows, values, depth, start == 0, out, w.out_features,
                           ahead + t * depth * ahead_step, ahead_step);
      } else {
        edge_tile(height, num_outputs, rows, values, depth, start == 0, out, w.out_features);
      }
    }
  }
}

// `multiply_float8` for as many rows as the cache holds.
inline void cached_float8(Pool& pool, const Float8Panels& w, int64_t num_rows, const float* x,
                          int64_t x_stride, float* y) {
  const int64_t num_panels = (w.out_features + kPanelWidth - 1) / kPanelWidth;
  const InputBlocks blocks = float8_blocks(pool, w, num_rows, x, x_stride);
  const bool few = num_rows <= static_cast<int64_t>(kFloat8Rows.size());
  const auto multiply = few ? kFloat8Rows[num_rows - 1] : float8_panel;
  pool.run_along(num_panels, [&](int64_t p, int) {
    const int64_t output = p * kPanelWidth;
    const int width = static_cast<int>(std::min<int64_t>(kPanelWidth, w.out_features - output));
    multiply(w, blocks, num_rows, w.panels + p * w.panel_bytes, width, y + output);
  });
}

void multiply_float8(Pool& pool, const Float8Panels& w, int64_t num_rows, const float* x,
                     int64_t x_stride, float* y) {
  const int64_t most = std::clamp(kCachedInputs / w.in_features, kLeastRows, kMostRows);
  const int64_t num_parts = (num_rows + most - 1) / most;
  for (int64_t part = 0; part < num_parts; ++part) {
    const int64_t row = num_rows * part / num_parts;
    const int64_t count = num_rows * (part + 1) / num_parts - row;
    cached_float8(pool, w, count, x + row * x_stride, x_stride, y + row * w.out_features);
  }
}

void gather_float8(Pool& pool, const Float8Panels& w, int64_t num_rows, const int64_t* row_ids,
                   float* out) {
  pool.run(static_cast<int>(num_rows), [&](int row, int) {
    const uint8_t* panel = w.panels + row_ids[row] / kPanelWidth * w.panel_bytes;
    const int64_t n = row_ids[row] % kPanelWidth;
    const auto* scales = reinterpret_cast<const float*>(panel + w.scales_at);
    for (int64_t k = 0; k < w.in_features; ++k) {
      out[row * w.in_features + k] =
          E4M3Codes::number(panel[k * kPanelWidth + n]) * scales[w.groups[k] * kPanelWidth + n];
    }
  });
}
