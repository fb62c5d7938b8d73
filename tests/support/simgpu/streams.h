// Streams and events: each stream is a queue that is worked off in order, asynchronous work by a thread
// of the device, a kernel by the thread that launches it, when its turn comes.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

namespace simgpu {

constexpr auto DEVICE = c10::DeviceType::PrivateUse1;
constexpr int MOST_DEVICES = 8;
using StreamKey = std::pair<int, int64_t>;  // device, stream

inline int device_count() {
  const char* visible = std::getenv("SIMGPU_DEVICES");  // what CUDA_VISIBLE_DEVICES would leave
  return visible ? std::min(MOST_DEVICES, std::atoi(visible)) : 4;
}

// What a thread has chosen; as on CUDA, a new thread starts on device 0 and its default stream.
inline thread_local int current_device = 0;
inline thread_local int64_t current_streams[MOST_DEVICES] = {0};
inline StreamKey current_stream() { return {current_device, current_streams[current_device]}; }

// Everything below lives until the process is gone: threads of the device may outlive `main`.
inline std::mutex& lock() {
  static auto* made = new std::mutex;
  return *made;
}
inline std::condition_variable& moved() {
  static auto* made = new std::condition_variable;
  return *made;
}

struct Event {
  int64_t recorded = 0;  // how often
  int64_t complete = 0;  // which of these times is over
  std::chrono::steady_clock::time_point at;
  void finish(int64_t version) {
    complete = std::max(complete, version);
    at = std::chrono::steady_clock::now();
  }
  bool over(int64_t version) const { return complete >= version; }
};

struct Item {
  std::function<bool()> ready;  // asked under the lock; none: at once
  std::function<void()> work;   // done without it; none: a thread waits for its turn
};

struct Queue {
  std::deque<std::shared_ptr<Item>> items;
  bool has_thread = false;
};
inline std::map<StreamKey, Queue>& queues() {
  static auto* made = new std::map<StreamKey, Queue>;
  return *made;
}

inline void work_off(Queue& queue) {
  std::unique_lock<std::mutex> held(lock());
  while (!queue.items.empty()) {
    auto item = queue.items.front();
    if (!item->work || (item->ready && !item->ready())) {
      moved().wait(held);
      continue;
    }
    held.unlock();
    item->work();
    held.lock();
    queue.items.pop_front();
    moved().notify_all();
  }
  queue.has_thread = false;
}

// The lock is held by the caller.
inline void serve(Queue& queue) {
  if (queue.has_thread) return;
  queue.has_thread = true;
  std::thread(work_off, std::ref(queue)).detach();
}

inline void enqueue(StreamKey stream, std::function<void()> work, std::function<bool()> ready = {}) {
  std::lock_guard<std::mutex> held(lock());
  auto& queue = queues()[stream];
  queue.items.push_back(std::make_shared<Item>(Item{std::move(ready), std::move(work)}));
  serve(queue);
  moved().notify_all();
}

// A kernel's turn on its stream. Kernels run in the thread that launches them, so a blocked stream
// holds that thread, where a real device would only hold the kernel.
class Turn {
 public:
  explicit Turn(StreamKey stream) : queue_(nullptr) {
    if (depth()++) return;  // a kernel made of kernels
    std::unique_lock<std::mutex> held(lock());
    queue_ = &queues()[stream];
    item_ = std::make_shared<Item>();
    queue_->items.push_back(item_);
    moved().wait(held, [&] { return queue_->items.front() == item_; });
  }
  // The kernel's result comes later: `work` is what the stream does next.
  void leave_late(std::function<void()> work) { late_ = std::move(work); }
  bool outermost() const { return queue_ != nullptr; }
  ~Turn() {
    --depth();
    if (!queue_) return;
    std::lock_guard<std::mutex> held(lock());
    queue_->items.pop_front();
    if (late_) {
      queue_->items.push_front(std::make_shared<Item>(Item{{}, std::move(late_)}));
      serve(*queue_);
    }
    moved().notify_all();
  }

 private:
  static int& depth() {
    static thread_local int entered = 0;
    return entered;
  }
  Queue* queue_;
  std::shared_ptr<Item> item_;
  std::function<void()> late_;
};

inline bool idle(StreamKey stream) { return queues()[stream].items.empty(); }  // under the lock

inline void synchronize(StreamKey stream) {
  std::unique_lock<std::mutex> held(lock());
  moved().wait(held, [&] { return idle(stream); });
}

inline void synchronize_device(int device) {
  std::unique_lock<std::mutex> held(lock());
  moved().wait(held, [&] {
    for (auto& [stream, queue] : queues())
      if (stream.first == device && !queue.items.empty()) return false;
    return true;
  });
}

inline void record(const std::shared_ptr<Event>& event, StreamKey stream) {
  int64_t version;
  {
    std::lock_guard<std::mutex> held(lock());
    version = ++event->recorded;
    if (idle(stream)) {
      event->finish(version);
      moved().notify_all();
      return;
    }
  }
  enqueue(stream, [event, version] {
    std::lock_guard<std::mutex> held(lock());
    event->finish(version);
  });
}

inline void wait_for(const std::shared_ptr<Event>& event, StreamKey stream) {
  int64_t version;
  {
    std::lock_guard<std::mutex> held(lock());
    version = event->recorded;
    if (event->over(version)) return;
  }
  enqueue(stream, [] {}, [event, version] { return event->over(version); });
}

inline int64_t new_number() {
  static int64_t last = 0;
  std::lock_guard<std::mutex> held(lock());
  return ++last;
}

// Gates: events that a test, or a communicator, opens by hand.
inline std::map<int64_t, std::shared_ptr<Event>>& gates() {
  static auto* made = new std::map<int64_t, std::shared_ptr<Event>>;
  return *made;
}

inline int64_t new_gate() {
  int64_t number = new_number();
  auto closed = std::make_shared<Event>();
  closed->recorded = 1;
  std::lock_guard<std::mutex> held(lock());
  gates()[number] = closed;
  return number;
}

inline void open_gate(int64_t number) {
  std::lock_guard<std::mutex> held(lock());
  auto found = gates().find(number);
  if (found == gates().end()) return;
  found->second->finish(1);
  gates().erase(found);
  moved().notify_all();
}

inline void block_stream(StreamKey stream, int64_t number) {
  std::shared_ptr<Event> gate;
  {
    std::lock_guard<std::mutex> held(lock());
    auto found = gates().find(number);
    if (found == gates().end()) return;  // open already
    gate = found->second;
  }
  wait_for(gate, stream);
}

}  // namespace simgpu
