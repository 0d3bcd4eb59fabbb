#include <cstdlib>
#include <memory>

#include "kernels.h"

namespace pegboard {
namespace {

constexpr int64_t kLineFloats = 16;

struct Free {
  void operator()(float* memory) const { std::free(memory); }
};

}  // namespace

float* scratch(int64_t num_floats) {
  thread_local std::unique_ptr<float, Free> memory;
  thread_local int64_t capacity = 0;
  if (num_floats > capacity) {
    memory.reset();
    capacity = (num_floats + kLineFloats - 1) / kLineFloats * kLineFloats;
    const size_t line_bytes = kLineFloats * sizeof(float);
    memory.reset(static_cast<float*>(std::aligned_alloc(line_bytes, capacity * sizeof(float))));
  }
  return memory.get();
}

}  // namespace pegboard
