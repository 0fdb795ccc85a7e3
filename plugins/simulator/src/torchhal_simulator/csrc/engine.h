// torch's autograd engine makes one thread per device at the first backward of a process, for the devices that there
// are then. A device library that loads after a backward on the CPU, or a machine that is given more devices, would never
// get one, and a backward there would end in an internal assertion. So the threads that are missing are made at a
// device's first use, and when the number of devices grows.
#pragma once

#include <torch/csrc/autograd/engine.h>

#include "flavour.h"

#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace sim {

struct Engine final : torch::autograd::Engine {
  // End the threads while the interpreter is whole. A thread that lets go of a Python object later, when there is no
  // GIL to take any more, is ended by Python in a way that aborts the process.
  static void stop_threads() {
    auto& engine = get_default_engine();
    if ((engine.*&Engine::device_ready_queues_).empty()) {
      return;
    }
    engine.stop();
    // A thread counts itself out before its last act, which takes the GIL and lets go of it.
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }

  static void ensure_threads(int devices) {
    static auto* mutex = new std::mutex; // leaked: devices are used until the process ends
    const std::lock_guard<std::mutex> lock(*mutex);
    auto& engine = get_default_engine();
    if (!(engine.*&Engine::thread_pool_shared_)) {
      return; // it has not started, and will count the devices itself
    }
    auto& queues = engine.*&Engine::device_ready_queues_;
    if (static_cast<int>(queues.size()) >= devices) {
      return;
    }
    engine.initialize_device_threads_pool(); // another thread may be in it: this waits for its end
    if (queues.capacity() < kMaxDevices) {
      // A backward that runs reads the queues without a lock. So they move only once, to where there is room for all,
      // and the place that they leave is never freed.
      auto* roomy = new std::vector<std::shared_ptr<torch::autograd::ReadyQueue>>;
      roomy->reserve(kMaxDevices);
      roomy->assign(queues.begin(), queues.end());
      queues.swap(*roomy);
    }
    while (static_cast<int>(queues.size()) < devices) {
      const auto index = static_cast<int>(queues.size());
      queues.push_back(std::make_shared<torch::autograd::ReadyQueue>());
      std::thread(&torch::autograd::Engine::thread_init, &engine, index, queues.back(), true).detach();
    }
  }
};

} // namespace sim
