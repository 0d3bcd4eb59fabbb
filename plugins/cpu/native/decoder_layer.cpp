// Whole decoder layers: the operations of one after another, in memory that the next layer reuses.
// Each has the bits that it has alone.

#include <algorithm>

#include "abi.h"
#include "attention.h"
#include "kernels.h"
#include "weight.h"

using pegboard::Attention;
using pegboard::AttentionCall;
using pegboard::Kernels;

namespace pegboard {

struct DecoderLayer {
  int64_t layer;
  int64_t num_heads, num_kv_heads, head_dim;
  const Weight &qkv, &o, &gate_up, &down;
  const float* norm;
  const float* next_norm;
  float eps;
  RotaryAngles rotary;
};

struct Workspace {
  LineFloats qkv, attended, gate_up, product;
};

}  // namespace pegboard

using pegboard::DecoderLayer;
using pegboard::Weight;
using pegboard::Workspace;

namespace {

// After attention a row needs no other: so many go through the rest of the layer together that what
// lies between two operations stays in the cache.
constexpr int64_t kBlockRows = 128;

// One layer; `hidden` is read before it is written.
void run(const DecoderLayer& layer, Attention& attention, Workspace& workspace, int64_t num_tokens,
         float* hidden, float* residual) {
  const Kernels& k = pegboard::kernels();
  pegboard::Pool& pool = *attention.pool;
  const auto multiply = [&](const Weight& weight, int64_t num_rows, const float* x, float* y) {
    weight.multiply(pool, num_rows, x, weight.in_features, y);
  };
  const int64_t qkv_size = layer.qkv.out_features, mlp_size = layer.down.in_features;
  const int64_t hidden_size = layer.o.out_features, head_dim = layer.head_dim;
  const int64_t attended_size = layer.o.in_features;
  const int64_t block_rows = std::min(kBlockRows, num_tokens);
  workspace.qkv.grow(num_tokens * qkv_size);
  workspace.attended.grow(num_tokens * attended_size);
  workspace.gate_up.grow(block_rows * 2 * mlp_size);
  workspace.product.grow(block_rows * mlp_size);

  float* const q = workspace.qkv.data();
  float* const keys = q + layer.num_heads * head_dim;
  float* const values = keys + layer.num_kv_heads * head_dim;
  float* const attended = workspace.attended.data();
  multiply(layer.qkv, num_tokens, hidden, q);
  const AttentionCall call{{q, qkv_size, head_dim},
                           {keys, qkv_size, head_dim},
                           {values, qkv_size, head_dim},
                           layer.rotary,
                           attended,
                           nullptr};
  k.attend(attention, layer.layer, call);

  float* const gate = workspace.gate_up.data();
  float* const product = workspace.product.data();
  for (int64_t row = 0; row < num_tokens; row += kBlockRows) {
    const int64_t count = std::min(kBlockRows, num_tokens - row);
    float* const y = hidden + row * hidden_size;
    float* const sum = residual + row * hidden_size;
    const auto add_norm = [&](const float* norm) {
      k.add_rms_norm(pool, count, hidden_size, y, hidden_size, sum, hidden_size, norm, layer.eps);
    };
    multiply(layer.o, count, attended + row * attended_size, y);
    add_norm(layer.norm);
    multiply(layer.gate_up, count, y, gate);
    k.silu_mul(pool, count, mlp_size, gate, 2 * mlp_size, gate + mlp_size, 2 * mlp_size, product);
    multiply(layer.down, count, product, y);
    add_norm(layer.next_norm);
  }
}

}  // namespace

PEGBOARD_API Workspace* pb_workspace_create() { return new Workspace{}; }

PEGBOARD_API void pb_workspace_destroy(Workspace* workspace) { delete workspace; }

// Pointers are kept, not what they point to.
PEGBOARD_API DecoderLayer* pb_decoder_layer_create(
    int64_t layer, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, const Weight* qkv,
    const Weight* o, const Weight* gate_up, const Weight* down, const float* norm,
    const float* next_norm, float eps, const float* cos, const float* sin, int64_t num_pairs) {
  return new DecoderLayer{layer,    num_heads, num_kv_heads, head_dim,  *qkv, *o,
                          *gate_up, *down,     norm,         next_norm, eps,  {cos, sin, num_pairs}};
}

PEGBOARD_API void pb_decoder_layer_destroy(DecoderLayer* layer) { delete layer; }

// For each layer: residual += attention(hidden); residual += mlp(norm(residual)); hidden =
// next_norm(residual). Both are dense [num_tokens, hidden_size].
PEGBOARD_API void pb_decoder_layers(const DecoderLayer* const* layers, int64_t num_layers,
                                    Attention* attention, Workspace* workspace, int64_t num_tokens,
                                    float* hidden, float* residual) {
  for (int64_t i = 0; i < num_layers; ++i) {
    run(*layers[i], *attention, *workspace, num_tokens, hidden, residual);
  }
}
