// Memory of the device and pinned memory of the host. Both are the host's; what differs is who may touch
// them when, and what a program finds that touches them at the wrong time.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>
#include <pthread.h>

#include <atomic>
#include <cstring>
#include <set>

#include "streams.h"

namespace simgpu {

inline std::atomic<bool> in_use{false};
inline bool forked_after_use = false;

// Whatever uses the device comes by here.
inline void touch() {
  TORCH_CHECK(!forked_after_use, "Cannot re-initialize simgpu in forked subprocess");
  if (!in_use.exchange(true)) pthread_atfork(nullptr, nullptr, [] { forked_after_use = true; });
}

constexpr int FRESH = 0xCB;  // nobody may rely on zeros
constexpr int GONE = 0xDD;   // memory that another stream still used when it was freed

struct Block {
  void* memory;
  size_t size;
  int device;
  int64_t stream;                 // that was current when it was made
  std::set<int64_t> recorded;     // `record_stream`
  std::multiset<int64_t> users;   // streams with work under way that touches it
  bool freed = false;
};

inline int64_t allocated[MOST_DEVICES] = {0};
inline int64_t most_allocated[MOST_DEVICES] = {0};

inline void give_back(Block* block) {
  std::free(block->memory);
  delete block;
}

// As with CUDA's caching allocator, freed memory serves the stream it was made on at once, so another
// stream that still works on it has to be known, by `record_stream`.
inline void release(void* context) {
  auto* block = static_cast<Block*>(context);
  if (forked_after_use) return;  // the lock may be held by a thread that is not there
  std::lock_guard<std::mutex> held(lock());
  allocated[block->device] -= block->size;
  if (block->users.empty()) return give_back(block);
  block->freed = true;
  for (int64_t user : block->users)
    if (user != block->stream && !block->recorded.count(user)) std::memset(block->memory, GONE, block->size);
}

inline void begin_use(Block* block, int64_t stream) {
  std::lock_guard<std::mutex> held(lock());
  block->users.insert(stream);
}

inline void end_use(Block* block, int64_t stream) {
  std::lock_guard<std::mutex> held(lock());
  block->users.erase(block->users.find(stream));
  if (block->freed && block->users.empty()) give_back(block);
}

inline int64_t memory_limit() {
  const char* limit = std::getenv("SIMGPU_MEMORY_BYTES");
  return limit ? std::atoll(limit) : int64_t{1} << 40;
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    touch();
    void* memory = nullptr;
    {
      std::lock_guard<std::mutex> held(lock());
      TORCH_CHECK_WITH(OutOfMemoryError, allocated[current_device] + int64_t(size) <= memory_limit(),
                       "simgpu out of memory: tried to allocate ", size, " bytes on device ", current_device);
      allocated[current_device] += size;
      most_allocated[current_device] = std::max(most_allocated[current_device], allocated[current_device]);
    }
    if (size) {
      TORCH_CHECK(posix_memalign(&memory, 512, size) == 0, "the host of simgpu is out of memory");
      std::memset(memory, FRESH, size);
    }
    auto* block = new Block{memory, size, current_device, current_stream().second, {}, {}};
    return {memory, block, &release, c10::Device(DEVICE, current_device)};
  }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  bool initialized() override { return in_use; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    std::lock_guard<std::mutex> held(lock());
    if (auto* block = static_cast<Block*>(data.get_context())) block->recorded.insert(stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> held(lock());
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* kind : {&stats.allocated_bytes, &stats.reserved_bytes}) {
      (*kind)[0].current = allocated[device];
      (*kind)[0].peak = most_allocated[device];
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> held(lock());
    most_allocated[device] = allocated[device];
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> held(lock());
    return {memory_limit() - allocated[device], memory_limit()};
  }
};
inline DeviceMemory device_memory;

inline std::map<const char*, size_t>& pinned_ranges() {
  static auto* made = new std::map<const char*, size_t>;
  return *made;
}

inline bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> held(lock());
  auto after = pinned_ranges().upper_bound(static_cast<const char*>(pointer));
  if (after == pinned_ranges().begin()) return false;
  auto [start, size] = *std::prev(after);
  return static_cast<const char*>(pointer) < start + size;
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    touch();
    void* memory = nullptr;
    TORCH_CHECK(posix_memalign(&memory, 512, std::max<size_t>(size, 1)) == 0, "out of host memory");
    std::memset(memory, FRESH, size);
    std::lock_guard<std::mutex> held(lock());
    pinned_ranges()[static_cast<char*>(memory)] = std::max<size_t>(size, 1);
    return {memory, memory, &unpin, c10::Device(c10::kCPU)};
  }
  static void unpin(void* memory) {
    if (forked_after_use) return;
    {
      std::lock_guard<std::mutex> held(lock());
      pinned_ranges().erase(static_cast<char*>(memory));
    }
    std::free(memory);
  }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
};
inline PinnedMemory pinned_memory;

}  // namespace simgpu
