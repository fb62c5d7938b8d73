// What torch asks of an accelerator: devices, streams and events, generators, pinned memory.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>

#include "memory.h"

namespace simgpu {

inline int checked_index(int index) {
  TORCH_CHECK(index < device_count(), "simgpu error: invalid device ordinal");
  return index < 0 ? current_device : index;
}
inline StreamKey key(const c10::Stream& stream) { return {checked_index(stream.device_index()), stream.id()}; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Handle = std::shared_ptr<Event>;  // an event of torch points to one

  c10::DeviceType type() const override { return DEVICE; }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }
  c10::Device getDevice() const override { return {DEVICE, c10::DeviceIndex(current_device)}; }
  void setDevice(c10::Device device) const override { current_device = checked_index(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }

  static c10::Stream made(c10::Device device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(DEVICE, checked_index(device.index())), id);
  }
  c10::Stream getStream(c10::Device device) const override {
    return made(device, current_streams[checked_index(device.index())]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return made(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override { return made(device, new_number()); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_streams[checked_index(stream.device_index())] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const c10::Stream& stream) const override {
    std::lock_guard<std::mutex> held(lock());
    return idle(key(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(key(stream)); }
  void synchronizeDevice(const c10::DeviceIndex device) const override { synchronize_device(checked_index(device)); }

  static Handle& event_of(void* event) { return *static_cast<Handle*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    touch();
    if (!*event) *event = new Handle(std::make_shared<Event>());
    simgpu::record(event_of(*event), key(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) wait_for(event_of(event), key(stream));
  }
  bool queryEvent(void* event) const override {
    std::lock_guard<std::mutex> held(lock());
    return !event || event_of(event)->over(event_of(event)->recorded);
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    std::unique_lock<std::mutex> held(lock());
    auto waited = event_of(event);
    moved().wait(held, [&, version = waited->recorded] { return waited->over(version); });
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Handle*>(event); }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    std::lock_guard<std::mutex> held(lock());
    return std::chrono::duration<double, std::milli>(event_of(to)->at - event_of(from)->at).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_memory.recordStream(data, stream);
  }
};

// A generator of the device: draws as the host's does, with a state of its own.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(int device, at::Generator host = at::detail::createCPUGenerator())
      : c10::GeneratorImpl(c10::Device(DEVICE, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(std::move(host)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "generators of simgpu have no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "generators of simgpu have no offset"); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(device_.index(), host.clone()); }

  at::Generator host;
};

inline const at::Generator& generator_of(int device) {
  static auto* made = [] {
    auto* all = new std::array<at::Generator, MOST_DEVICES>;
    for (int i = 0; i < MOST_DEVICES; ++i) (*all)[i] = at::make_generator<Generator>(i);
    return all;
  }();
  return (*made)[checked_index(device)];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return in_use; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = checked_index(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    c10::DeviceIndex before = current_device;
    if (device >= 0) current_device = checked_index(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return generator_of(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(checked_index(device));
  }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
};

}  // namespace simgpu
