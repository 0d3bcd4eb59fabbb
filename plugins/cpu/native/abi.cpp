// The C interface: what Python calls through ctypes. Pointers are to float32 in row-major memory
// whose last axis is dense; strides are in elements between rows.

#include <cstdlib>
#include <cstring>

#include "abi.h"
#include "kernels.h"

namespace pegboard {
namespace {

bool runs(const Kernels& set) {
#if defined(PEGBOARD_X86)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (&set == &kAvx2) return avx2;
  if (&set == &kAvx512) return avx512;
  if (&set == &kAvx512Vnni) return avx512 && __builtin_cpu_supports("avx512vnni");
#endif
  return &set == &kPortable;
}

const Kernels& choose() {
#if defined(PEGBOARD_X86)
  const Kernels* const sets[] = {&kAvx512Vnni, &kAvx512, &kAvx2, &kPortable};
#else
  const Kernels* const sets[] = {&kPortable};
#endif
  const char* named = std::getenv("PEGBOARD_CPU_ISA");
  for (const Kernels* set : sets) {
    if (runs(*set) && (named == nullptr || std::strcmp(named, set->name) == 0)) return *set;
  }
  return kPortable;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace pegboard

using pegboard::Heads;
using pegboard::kernels;
using pegboard::Pool;
using pegboard::sample;
using pegboard::SampleRows;

PEGBOARD_API const char* pb_instruction_set() { return kernels().name; }

PEGBOARD_API Pool* pb_pool_create(int num_threads) { return new Pool(num_threads); }

PEGBOARD_API void pb_pool_destroy(Pool* pool) { delete pool; }

// x: [num_tokens, num_heads, size], out: the same, dense.
PEGBOARD_API void pb_rms_norm(Pool* pool, int64_t num_tokens, int64_t num_heads, int64_t size,
                              const float* x, int64_t token_stride, int64_t head_stride,
                              const float* weight, float eps, float* out) {
  const Heads heads = {num_tokens, num_heads, size, x, token_stride, head_stride};
  kernels().rms_norm(*pool, heads, weight, eps, out);
}

// residual += x, x = rms_norm(residual), both [num_rows, size].
PEGBOARD_API void pb_add_rms_norm(Pool* pool, int64_t num_rows, int64_t size, float* x,
                                  int64_t x_stride, float* residual, int64_t residual_stride,
                                  const float* weight, float eps) {
  kernels().add_rms_norm(*pool, num_rows, size, x, x_stride, residual, residual_stride, weight,
                         eps);
}

// x as of pb_rms_norm; positions: [num_tokens]; cos, sin: [max_position, half]; out: dense.
PEGBOARD_API void pb_rotate(Pool* pool, int64_t num_tokens, int64_t num_heads, int64_t size,
                            const float* x, int64_t token_stride, int64_t head_stride,
                            const int64_t* positions, int64_t half, const float* cos,
                            const float* sin, float* out) {
  const Heads heads = {num_tokens, num_heads, size, x, token_stride, head_stride};
  kernels().rotate(*pool, heads, positions, half, cos, sin, out);
}

// out = gate / (1 + exp(-gate)) * up, [num_rows, width] each; out is dense and may be gate.
PEGBOARD_API void pb_silu_mul(Pool* pool, int64_t num_rows, int64_t width, const float* gate,
                              int64_t gate_stride, const float* up, int64_t up_stride, float* out) {
  kernels().silu_mul(*pool, num_rows, width, gate, gate_stride, up, up_stride, out);
}

// tokens: [num_rows] of logits [num_rows, vocab_size]; the other arrays have an entry a row.
PEGBOARD_API void pb_sample(Pool* pool, int64_t num_rows, int64_t vocab_size, const float* logits,
                            int64_t logits_stride, const float* temperature, const int64_t* top_k,
                            const float* top_p, const float* min_p, const int64_t* seed,
                            const int64_t* position, const int64_t* index, int64_t* tokens) {
  const SampleRows rows = {temperature, top_k, top_p, min_p, seed, position, index};
  sample(*pool, num_rows, vocab_size, logits, logits_stride, rows, tokens);
}
