#include "pool.h"

#include <chrono>

#if defined(PEGBOARD_X86)
#include <immintrin.h>
#endif

namespace pegboard {
namespace {

constexpr auto kSpin = std::chrono::microseconds(50);

void pause() {
#if defined(PEGBOARD_X86)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// Spins until ready() or for some microseconds; says whether it is ready.
template <class Ready>
bool spin(const Ready& ready) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 64; ++i) {
      if (ready()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return ready();
}

}  // namespace

Pool::Pool(int num_threads) {
  for (int thread = 1; thread < num_threads; ++thread) {
    workers_.emplace_back([this, thread] { work(thread); });
  }
}

Pool::~Pool() {
  closing_.store(true);
  {
    std::lock_guard<std::mutex> lock(sleep_);
    wake_.notify_all();
  }
  for (auto& worker : workers_) worker.join();
}

void Pool::dispatch(int num_tasks, const void* task, Call call) {
  std::lock_guard<std::mutex> alone(callers_);
  if (static_cast<uint64_t>(num_tasks) + num_threads() >= Ticket::kMask) {  // more than one can count
    for (int index = 0; index < num_tasks; ++index) call(task, index, 0);
    return;
  }
  task_ = task;
  call_ = call;
  num_unfinished_.store(num_tasks);
  ticket_.store(uint64_t(num_tasks) << Ticket::kBits);
  if (num_sleeping_.load() > 0) {
    std::lock_guard<std::mutex> lock(sleep_);
    wake_.notify_all();
  }
  take_tasks(0);
  const auto done = [this] { return num_unfinished_.load() == 0; };
  if (spin(done)) return;
  std::unique_lock<std::mutex> lock(sleep_);
  caller_sleeps_.store(true);
  done_.wait(lock, done);
  caller_sleeps_.store(false);
}

void Pool::work(int thread) {
  while (await_tasks()) take_tasks(thread);
}

void Pool::take_tasks(int thread) {
  while (ticket().is_open()) {
    const Ticket claimed{ticket_.fetch_add(1)};
    if (!claimed.is_open()) return;
    call_(task_, claimed.next(), thread);
    if (num_unfinished_.fetch_sub(1) == 1 && caller_sleeps_.load()) {
      std::lock_guard<std::mutex> lock(sleep_);
      done_.notify_one();
    }
  }
}

// Waits for a task; false: the pool closes.
bool Pool::await_tasks() {
  const auto called = [this] { return ticket().is_open() || closing_.load(); };
  if (!spin(called)) {
    std::unique_lock<std::mutex> lock(sleep_);
    num_sleeping_.fetch_add(1);
    wake_.wait(lock, called);
    num_sleeping_.fetch_sub(1);
  }
  return !closing_.load();
}

}  // namespace pegboard
