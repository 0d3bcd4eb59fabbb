// A pool of threads that share out the outputs of one operation.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace pegboard {

// Numbers [first, end) that are taken from both ends.
class alignas(64) Span {
 public:
  void fill(int64_t first, int64_t end) { word_ = static_cast<uint64_t>(first) << 32 | end; }
  // -1: none is left.
  int64_t take_first() {
    const uint64_t word = take(uint64_t{1} << 32);
    return first(word) < end(word) ? first(word) : -1;
  }
  int64_t take_last() {
    const uint64_t word = take(~uint64_t{0});
    return first(word) < end(word) ? end(word) - 1 : -1;
  }

 private:
  static int64_t first(uint64_t word) { return static_cast<int64_t>(word >> 32); }
  static int64_t end(uint64_t word) { return static_cast<int64_t>(word & 0xffffffff); }
  // Adds to the word if a number is left, and returns what it was before.
  uint64_t take(uint64_t change) {
    uint64_t word = word_.load(std::memory_order_relaxed);
    while (first(word) < end(word) && !word_.compare_exchange_weak(word, word + change)) {
    }
    return word;
  }

  std::atomic<uint64_t> word_{0};
};

// Tasks are handed out one by one, so that a thread that other work holds up delays nobody for
// long. Which thread does a task never changes a result: tasks write disjoint outputs.
//
// Threads wait by spinning for some microseconds, as the next operation of a layer comes soon,
// and then sleep: on a machine at rest the pool costs nothing.
class Pool {
 public:
  explicit Pool(int num_threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls task(index, thread) for each index below num_tasks, and returns when all are done.
  // thread is below num_threads(): scratch memory may be kept for each. The caller is thread 0.
  // Calls from several threads at once wait for each other.
  template <class Task>
  void run(int num_tasks, const Task& task) {
    if (num_tasks <= 0) return;
    if (num_tasks == 1 || workers_.empty()) {
      std::lock_guard<std::mutex> alone(callers_);
      for (int index = 0; index < num_tasks; ++index) task(index, 0);
      return;
    }
    dispatch(num_tasks, &task, [](const void* f, int index, int thread) {
      (*static_cast<const Task*>(f))(index, thread);
    });
  }

  // The same, where what follows an index in memory is fetched along with it: a thread takes indices
  // that follow each other, and those of a thread that other work holds up from their end.
  template <class Task>
  void run_along(int64_t num_tasks, const Task& task) {
    const int num_spans = static_cast<int>(std::min<int64_t>(num_threads(), num_tasks));
    if (num_spans == 0) return;
    std::vector<Span> spans(num_spans);
    for (int i = 0; i < num_spans; ++i) {
      spans[i].fill(num_tasks * i / num_spans, num_tasks * (i + 1) / num_spans);
    }
    run(num_spans, [&](int own, int thread) {
      for (int64_t i; (i = spans[own].take_first()) >= 0;) task(i, thread);
      for (int k = 1; k < num_spans; ++k) {
        Span& other = spans[(own + k) % num_spans];
        for (int64_t i; (i = other.take_last()) >= 0;) task(i, thread);
      }
    });
  }

 private:
  using Call = void (*)(const void*, int, int);

  // One word that a thread claims a task from: the number of tasks of the round, and the next one.
  // A claimed task keeps its round from ending, so that what belongs to the round stays valid. A
  // thread that comes late finds nothing to claim, and nobody waits for it.
  struct Ticket {
    static constexpr int kBits = 20;
    static constexpr uint64_t kMask = (uint64_t{1} << kBits) - 1;
    uint64_t word;
    int num_tasks() const { return static_cast<int>(word >> kBits & kMask); }
    int next() const { return static_cast<int>(word & kMask); }
    bool is_open() const { return next() < num_tasks(); }
  };

  void dispatch(int num_tasks, const void* task, Call call);
  void work(int thread);
  void take_tasks(int thread);
  bool await_tasks();
  Ticket ticket() const { return {ticket_.load()}; }

  std::vector<std::thread> workers_;
  std::mutex callers_;
  const void* task_ = nullptr;
  Call call_ = nullptr;
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int> num_unfinished_{0};
  std::atomic<bool> closing_{false};

  std::mutex sleep_;
  std::condition_variable wake_;
  std::condition_variable done_;
  std::atomic<int> num_sleeping_{0};
  std::atomic<bool> caller_sleeps_{false};
};

}  // namespace pegboard
