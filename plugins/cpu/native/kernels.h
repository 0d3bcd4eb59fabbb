// The operations of one instruction set, and how the library chooses among the sets.
#pragma once

#include <cstdint>

#include "attention.h"
#include "codes.h"
#include "float8.h"
#include "pool.h"
#include "sample.h"
#include "w8a8.h"

namespace pegboard {

// Rows of activations: heads of tokens, [num_tokens, num_heads, size]. The last axis is dense, strides
// are in elements.
struct Heads {
  int64_t num_tokens, num_heads, size;
  const float* data;
  int64_t token_stride, head_stride;
  const float* row(int64_t index) const {
    return data + index / num_heads * token_stride + index % num_heads * head_stride;
  }
};

// The same operations, compiled for one instruction set: the files *.inl, each included by
// portable.cpp, avx2.cpp and avx512.cpp with that set's vector type.
struct Kernels {
  const char* name;
  void (*silu_mul)(Pool& pool, int64_t num_rows, int64_t width, const float* gate,
                   int64_t gate_stride, const float* up, int64_t up_stride, float* out);
  void (*rms_norm)(Pool& pool, const Heads& x, const float* weight, float eps, float* out);
  void (*add_rms_norm)(Pool& pool, int64_t num_rows, int64_t n, float* x, int64_t x_stride,
                       float* residual, int64_t residual_stride, const float* weight, float eps);
  void (*rotate)(Pool& pool, const Heads& x, const int64_t* positions, int64_t half,
                 const float* cos, const float* sin, float* out);
  void (*attend)(Attention& attention, int64_t layer, const AttentionCall& call);

  // Outputs of a packed weight's panel (linear.inl).
  int linear_panel_width;
  void (*linear_pack)(Pool& pool, int64_t out_features, int64_t in_features, const float* weight,
                      int64_t weight_stride, float* panels);
  void (*linear)(Pool& pool, int64_t num_rows, int64_t out_features, int64_t in_features,
                 const float* x, int64_t x_stride, const float* panels, float* y);
  void (*linear_gather)(Pool& pool, int64_t num_rows, int64_t in_features, const float* panels,
                        const int64_t* row_ids, float* out);

  // Weights in codes (codes.inl).
  void (*multiply_codes)(Pool& pool, const CodedPanels& weight, int64_t num_rows, const float* x,
                         int64_t x_stride, float* y);
  // The same with inputs in int8 (w8a8.inl), and with weights in float8 (float8.inl).
  void (*multiply_w8a8)(Pool& pool, const W8A8Panels& weight, int64_t num_rows, const float* x,
                        int64_t x_stride, float* y);
  void (*multiply_float8)(Pool& pool, const Float8Panels& weight, int64_t num_rows, const float* x,
                          int64_t x_stride, float* y);
  void (*gather_float8)(Pool& pool, const Float8Panels& weight, int64_t num_rows,
                        const int64_t* row_ids, float* out);

  // Loops over a row's vocabulary (sample.inl).
  int64_t (*argmax)(const float* x, int64_t n);
  bool (*scale_logits)(const float* logits, float temperature, int64_t n, float* z, float* largest);
  void (*weigh)(const float* z, int64_t n, float peak, double* weights);
  double (*total_weight)(const float* z, int64_t n, float peak);
  int64_t (*collect)(const float* z, int64_t n, float bound, int32_t* ids);
  void (*draw)(const NoiseKey& key, const float* z, const int32_t* ids, int64_t n, Winner& winner);
};

extern const Kernels kPortable;
#if defined(PEGBOARD_X86)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
extern const Kernels kAvx512Vnni;
#endif

// The best set that this processor has, or the one that PEGBOARD_CPU_ISA names.
const Kernels& kernels();

// Memory for that many floats, aligned to cache lines: the calling thread's, until its next call.
// Not of the instruction sets' files, where the standard library's templates would be compiled for
// one set and run on all.
float* scratch(int64_t num_floats);

}  // namespace pegboard
