// The "driver": how many devices there are, which one is current, what has been counted, what is broken on purpose.
#pragma once

#include "engine.h"
#include "flavour.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>

namespace sim {

struct Counters {
  std::atomic<int64_t> operators{0};
  std::atomic<int64_t> h2d{0};
  std::atomic<int64_t> d2h{0};
  std::atomic<int64_t> d2d{0};
  std::atomic<int64_t> synchronizations{0};
};

inline Counters counters;
inline std::atomic<int> device_count{0}; // the Python side sets it before anybody can ask
inline std::array<std::atomic<bool>, kMaxDevices> touched{}; // has anything been allocated or run there
inline std::array<std::atomic<bool>, kMaxDevices> lost{};
inline std::atomic<bool> in_bad_fork{false};
inline std::atomic<bool> poison{false};
inline std::atomic<bool> refuse_doubles{false}; // float64 and complex numbers, which some hardware lacks
inline std::atomic<bool> narrow_longs{false}; // int64 that comes from the host keeps the lower 32 bits
inline thread_local c10::DeviceIndex current_device = 0;

inline bool any_touched() {
  return std::any_of(touched.begin(), touched.end(), [](const auto& device) { return device.load(); });
}

inline void after_fork_in_child() {
  if (any_touched()) {
    in_bad_fork = true;
  }
}

inline const int at_fork_registered = pthread_atfork(nullptr, nullptr, after_fork_in_child);

inline void check_index(c10::DeviceIndex index) {
  TORCH_CHECK(
      index >= 0 && index < device_count,
      SIM_NAME " error: invalid device ordinal ", static_cast<int>(index), ": this simulator has ",
      device_count.load(), " device(s)");
}

// Before anything is run on, copied from or allocated on a device.
inline void use(c10::DeviceIndex index) {
  check_index(index);
  TORCH_CHECK(
      !in_bad_fork,
      "Cannot use the simulated " SIM_NAME " device in a forked subprocess whose parent has used it. "
      "Start the process with the 'spawn' method.");
  TORCH_CHECK(
      !lost[index],
      SIM_NAME " error: device ", static_cast<int>(index), " was lost (this simulator was told to lose it)");
  if (!touched[index].exchange(true)) {
    Engine::ensure_threads(device_count);
  }
}

inline c10::Device resolve(c10::Device device) {
  return device.has_index() ? device : c10::Device(kType, current_device);
}

inline void count_synchronization() {
  ++counters.synchronizations;
}

} // namespace sim
