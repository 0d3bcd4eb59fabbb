// A pool of threads that share out the outputs of one operation.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace pegboard {

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
