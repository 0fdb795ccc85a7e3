// Devices, streams and events. Work is done when the call that asked for it returns, so waiting only counts.
#pragma once

#include "runtime.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>

namespace sim {

inline thread_local std::array<c10::StreamId, kMaxDevices> current_stream{};
inline std::atomic<c10::StreamId> next_stream{1};

struct Event {
  std::chrono::steady_clock::time_point time;
  bool timed;
  c10::DeviceIndex device; // where it was recorded last
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Device getDevice() const override {
    return {kType, current_device};
  }

  void setDevice(c10::Device device) const override {
    TORCH_INTERNAL_ASSERT(device.type() == kType);
    if (device.has_index() && device.index() != current_device) {
      check_index(device.index());
      current_device = device.index();
    }
  }

  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) {
      current_device = device.index();
    }
  }

  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(device_count.load());
  }

  c10::Stream getStream(c10::Device device) const override {
    device = resolve(device);
    return c10::Stream(c10::Stream::UNSAFE, device, current_stream[device.index()]);
  }

  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, resolve(device));
  }

  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }

  c10::Stream getNewStream(c10::Device device, int) const override {
    device = resolve(device);
    check_index(device.index());
    return c10::Stream(c10::Stream::UNSAFE, device, next_stream++);
  }

  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }

  bool queryStream(const c10::Stream& stream) const override {
    use(stream.device_index());
    return true;
  }

  void synchronizeStream(const c10::Stream& stream) const override {
    use(stream.device_index());
    count_synchronization();
  }

  void synchronizeDevice(const c10::DeviceIndex index) const override {
    use(index < 0 ? current_device : index);
    count_synchronization();
  }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag)
      const override {
    use(stream.device_index());
    if (*event == nullptr) {
      *event = new Event{{}, flag == c10::EventFlag::BACKEND_DEFAULT, stream.device_index()};
    }
    auto* recorded = static_cast<Event*>(*event);
    recorded->time = std::chrono::steady_clock::now();
    recorded->device = stream.device_index();
  }

  void block(void* event, const c10::Stream& stream) const override {
    use_device_of(event);
    if (event != nullptr) {
      use(stream.device_index());
    }
  }

  bool queryEvent(void* event) const override {
    use_device_of(event);
    return true;
  }

  void synchronizeEvent(void* event) const override {
    use_device_of(event);
    if (event != nullptr) {
      count_synchronization();
    }
  }

  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(
        first != nullptr && second != nullptr, "Both events must be recorded before calculating elapsed time.");
    use_device_of(first);
    use_device_of(second);
    const auto *start = static_cast<Event*>(first), *end = static_cast<Event*>(second);
    TORCH_CHECK(
        start->timed && end->timed, "Both events must be created with argument 'enable_timing=True'.");
    return std::chrono::duration<double, std::milli>(end->time - start->time).count();
  }

  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    return {}; // every dtype that the CPU has
  }

 private:
  static void use_device_of(void* event) { // one that was never recorded has none
    if (event != nullptr) {
      use(static_cast<Event*>(event)->device);
    }
  }
};

} // namespace sim
