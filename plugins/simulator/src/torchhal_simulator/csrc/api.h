// What the Python side calls: operators without tensors, so that the library needs no Python of its own.
#pragma once

#include "generator.h"
#include "guard.h"
#include "kernels.h"
#include "memory.h"

#include <torch/library.h>

namespace sim::api {

inline void set_device_count(int64_t count) {
  TORCH_CHECK_VALUE(count >= 0 && count <= kMaxDevices, "the number of devices must be 0 to ", kMaxDevices);
  device_count = static_cast<int>(count);
  if (any_touched()) { // a device that was used when there were more has no first use any more
    Engine::ensure_threads(device_count);
  }
}

inline void set_memory_limit(int64_t device, int64_t nbytes) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().limit.at(device) = static_cast<size_t>(nbytes);
}

inline int64_t memory_limit(int64_t device) {
  check_index(static_cast<c10::DeviceIndex>(device));
  std::lock_guard<std::mutex> lock(memory().mutex);
  return static_cast<int64_t>(memory().limit.at(device));
}

// Of one device: bytes allocated now, at most, ever, and freed; allocations ever and freed; refusals.
inline std::vector<int64_t> memory_stats(int64_t device) {
  const auto stats = device_allocator().getDeviceStats(static_cast<c10::DeviceIndex>(device));
  const auto& bytes = stats.allocated_bytes[0];
  return {bytes.current, bytes.peak, bytes.allocated, bytes.freed, stats.num_device_alloc, stats.num_device_free,
          stats.num_ooms};
}

inline int64_t exchange_stream(int64_t device, int64_t stream) {
  check_index(static_cast<c10::DeviceIndex>(device));
  return std::exchange(current_stream.at(device), stream);
}

inline std::vector<int64_t> read_counters() {
  return {counters.operators, counters.h2d, counters.d2h, counters.d2d, counters.synchronizations};
}

inline int64_t exchange_device(int64_t index) {
  const auto before = current_device;
  check_index(static_cast<c10::DeviceIndex>(index));
  current_device = static_cast<c10::DeviceIndex>(index);
  return before;
}

// What `work` does with a device's generator, under its lock, which its methods leave to their callers.
template <typename Work>
auto with_generator(int64_t index, Work&& work) {
  at::Generator generator = default_generator(static_cast<c10::DeviceIndex>(index));
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return work(generator);
}

// For the process group's backend: a collective moves data without the copies to the host that staging through gloo
// costs here, so those are not counted.
inline at::Tensor stage(const at::Tensor& tensor) {
  use(tensor.device().index());
  HostCall host(tensor.device());
  return host.host(tensor).clone(at::MemoryFormat::Preserve);
}

inline void deliver(const at::Tensor& tensor, const at::Tensor& staged) {
  use(tensor.device().index());
  const c10::NoGradGuard no_grad;
  copy_memory(staged, tensor);
}

} // namespace sim::api

TORCH_LIBRARY(SIM_NAMESPACE, m) {
  using namespace sim;
  m.def("set_device_count(int count) -> ()", &api::set_device_count);
  m.def("device_count() -> int", []() -> int64_t { return device_count; });
  m.def("current_device() -> int", []() -> int64_t { return current_device; });
  m.def("exchange_device(int index) -> int", &api::exchange_device);
  m.def("exchange_stream(int device, int stream) -> int", &api::exchange_stream);
  m.def("current_stream(int device) -> int", [](int64_t device) -> int64_t {
    check_index(static_cast<c10::DeviceIndex>(device));
    return current_stream.at(device);
  });
  m.def("synchronize(int device) -> ()", [](int64_t device) {
    Guard().synchronizeDevice(static_cast<c10::DeviceIndex>(device));
  });
  m.def("stop_autograd_threads() -> ()", &Engine::stop_threads);
  m.def("is_in_bad_fork() -> bool", []() -> bool { return in_bad_fork; });
  m.def("is_initialized() -> bool", []() -> bool {
    return any_touched();
  });
  m.def("set_memory_limit(int device, int nbytes) -> ()", &api::set_memory_limit);
  m.def("memory_limit(int device) -> int", &api::memory_limit);
  m.def("memory_stats(int device) -> int[]", &api::memory_stats);
  m.def("reset_peak_memory_stats(int device) -> ()", [](int64_t device) {
    device_allocator().resetPeakStats(static_cast<c10::DeviceIndex>(device));
  });
  m.def("reset_accumulated_memory_stats(int device) -> ()", [](int64_t device) {
    device_allocator().resetAccumulatedStats(static_cast<c10::DeviceIndex>(device));
  });
  m.def("device_of(int address) -> int", [](int64_t address) -> int64_t {
    return device_of(reinterpret_cast<const void*>(address)).index();
  });
  m.def("set_poison(bool on) -> ()", [](bool on) { poison = on; });
  m.def("set_refuse_doubles(bool on) -> ()", [](bool on) { refuse_doubles = on; });
  m.def("set_narrow_longs(bool on) -> ()", [](bool on) { narrow_longs = on; });
  m.def("set_lost(int device, bool on) -> ()", [](int64_t device, bool on) { lost.at(device) = on; });
  m.def("is_lost(int device) -> bool", [](int64_t device) -> bool { return lost.at(device); });
  m.def("counters() -> int[]", &api::read_counters);
  m.def("manual_seed(int device, int seed) -> ()", [](int64_t device, int64_t seed) {
    api::with_generator(device, [&](at::Generator generator) {
      generator.set_current_seed(static_cast<uint64_t>(seed));
    });
  });
  m.def("seed(int device) -> int", [](int64_t device) {
    return api::with_generator(device, [](at::Generator generator) { return static_cast<int64_t>(generator.seed()); });
  });
  m.def("initial_seed(int device) -> int", [](int64_t device) {
    return api::with_generator(
        device, [](const at::Generator& generator) { return static_cast<int64_t>(generator.current_seed()); });
  });
  m.def("get_rng_state(int device) -> Tensor", [](int64_t device) {
    return api::with_generator(device, [](const at::Generator& generator) { return generator.get_state(); });
  });
  m.def("set_rng_state(int device, Tensor state) -> ()", [](int64_t device, const at::Tensor& state) {
    api::with_generator(device, [&](at::Generator generator) { generator.set_state(state); });
  });
  m.def("stage(Tensor tensor) -> Tensor");
  m.def("deliver(Tensor(a!) tensor, Tensor staged) -> ()");
}

TORCH_LIBRARY_IMPL(SIM_NAMESPACE, SIM_KEY, m) {
  m.impl("stage", &sim::api::stage);
  m.impl("deliver", &sim::api::deliver);
}
