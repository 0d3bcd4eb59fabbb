// Operations on rows of activations, each row by itself. Included by kernels.inl.

// What a thread takes at a time: enough that handing it out costs little beside it.
constexpr int64_t kTaskElements = 16384;

// Calls work(row) for each row.
template <class Work>
void for_rows(Pool& pool, int64_t num_rows, int64_t width, const Work& work) {
  const int64_t step = 1 + kTaskElements / width;
  pool.run(static_cast<int>((num_rows + step - 1) / step), [&](int index, int) {
    for (int64_t row = index * step; row < (index + 1) * step && row < num_rows; ++row) work(row);
  });
}

// The sum of lanes in one order.
inline float sum_of_lanes(Vec v) {
  float lanes[Vec::kWidth];
  v.store(lanes);
  for (int width = Vec::kWidth / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

// x * weight / sqrt(mean_square + eps); out may be x.
inline void scale_row(const float* x, const float* weight, int64_t n, float sum_of_squares,
                      float eps, float* out) {
  const float scale = 1.0f / std::sqrt(sum_of_squares / static_cast<float>(n) + eps);
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

// Squares as the elements come: a whole vector to one of two sums, the last few to a third.
class SumOfSquares {
 public:
  void add(Vec v, bool odd) { sums_[odd] = Vec::fma(v, v, sums_[odd]); }
  void add(float x) { rest_ += x * x; }
  float total() const { return sum_of_lanes(sums_[0] + sums_[1]) + rest_; }

 private:
  Vec sums_[2] = {Vec::zero(), Vec::zero()};
  float rest_ = 0.0f;
};

void rms_norm(Pool& pool, const Heads& x, const float* weight, float eps, float* out) {
  const int64_t n = x.size;
  for_rows(pool, x.num_tokens * x.num_heads, n, [&](int64_t row) {
    const float* in = x.row(row);
    SumOfSquares squares;
    int64_t i = 0;
    for (; i + Vec::kWidth <= n; i += Vec::kWidth) {
      squares.add(Vec::load(in + i), i / Vec::kWidth % 2);
    }
    for (; i < n; ++i) squares.add(in[i]);
    scale_row(in, weight, n, squares.total(), eps, out + row * n);
  });
}

void add_rms_norm(Pool& pool, int64_t num_rows, int64_t n, float* x, int64_t x_stride,
                  float* residual, int64_t residual_stride, const float* weight, float eps) {
  for_rows(pool, num_rows, n, [&](int64_t row) {
    float* in = x + row * x_stride;
    float* total = residual + row * residual_stride;
    SumOfSquares squares;
    int64_t i = 0;
    for (; i + Vec::kWidth <= n; i += Vec::kWidth) {
      const Vec sum = Vec::load(in + i) + Vec::load(total + i);
      sum.store(total + i);
      squares.add(sum, i / Vec::kWidth % 2);
    }
    for (; i < n; ++i) {
      total[i] += in[i];
      squares.add(total[i]);
    }
    scale_row(total, weight, n, squares.total(), eps, in);
  });
}

// One head at one position: pairs (i, i + half) turn by the angles c and s, the rest stays.
inline void rotate_head(const float* __restrict a, int64_t size, int64_t half,
                        const float* __restrict c, const float* __restrict s,
                        float* __restrict to) {
  for (int64_t i = 0; i < half; ++i) {
    to[i] = a[i] * c[i] - a[half + i] * s[i];
    to[half + i] = a[half + i] * c[i] + a[i] * s[i];
  }
  for (int64_t i = 2 * half; i < size; ++i) to[i] = a[i];
}

void rotate(Pool& pool, const Heads& x, const int64_t* positions, int64_t half, const float* cos,
            const float* sin, float* out) {
  for_rows(pool, x.num_tokens * x.num_heads, x.size, [&](int64_t row) {
    const int64_t angle = positions[row / x.num_heads] * half;
    rotate_head(x.row(row), x.size, half, cos + angle, sin + angle, out + row * x.size);
  });
}

inline Vec silu_mul(Vec gate, Vec up) {
  const Vec e = exp(Vec{-gate.v});
  return {gate.v / (Vec::broadcast(1.0f) + e).v * up.v};
}

void silu_mul(Pool& pool, int64_t num_rows, int64_t width, const float* gate, int64_t gate_stride,
              const float* up, int64_t up_stride, float* out) {
  for_rows(pool, num_rows, width, [&](int64_t row) {
    const float* g = gate + row * gate_stride;
    const float* u = up + row * up_stride;
    float* o = out + row * width;
    int64_t i = 0;
    for (; i + Vec::kWidth <= width; i += Vec::kWidth) {
      silu_mul(Vec::load(g + i), Vec::load(u + i)).store(o + i);
    }
    float rest[3][Vec::kWidth] = {};
    const size_t size = static_cast<size_t>(width - i) * sizeof(float);
    std::memcpy(rest[0], g + i, size);
    std::memcpy(rest[1], u + i, size);
    silu_mul(Vec::load(rest[0]), Vec::load(rest[1])).store(rest[2]);
    std::memcpy(o + i, rest[2], size);
  });
}
