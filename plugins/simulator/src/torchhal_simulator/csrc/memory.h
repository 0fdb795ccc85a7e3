// Device memory with statistics and a limit, and pinned host memory. Nothing is cached: reserved equals allocated.
#pragma once

#include "runtime.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/alignment.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace sim {

constexpr size_t kBlock = 512; // allocations are rounded up to this, as CUDA's are

inline size_t rounded(size_t nbytes) {
  return (nbytes + kBlock - 1) / kBlock * kBlock;
}

inline void* aligned_malloc(size_t nbytes) {
  void* data = nullptr;
  TORCH_CHECK_WITH(
      OutOfMemoryError,
      posix_memalign(&data, c10::gAlignment, nbytes) == 0,
      "the host that simulates " SIM_NAME " has no ", nbytes, " bytes left");
  return data;
}

// One block on a device. It owns its memory or, for the result of a CPU kernel, the CPU memory it took over.
struct Block {
  c10::DeviceIndex device;
  size_t nbytes;
  c10::DataPtr memory;
};

struct Memory {
  std::mutex mutex;
  std::array<c10::CachingDeviceAllocator::DeviceStats, kMaxDevices> stats;
  std::array<size_t, kMaxDevices> limit{};
  // By address, for getDeviceFromPtr. Several blocks may share one: a kernel may give the same memory twice.
  std::multimap<uintptr_t, const Block*> blocks;

  void take(c10::DeviceIndex device, size_t nbytes) {
    const size_t size = rounded(nbytes);
    std::lock_guard<std::mutex> lock(mutex);
    auto& stat = stats[device];
    const auto used = static_cast<size_t>(stat.allocated_bytes[0].current);
    if (used + size > limit[device]) {
      ++stat.num_ooms;
      const size_t available = limit[device] > used ? limit[device] - used : 0;
      TORCH_CHECK_WITH(
          OutOfMemoryError,
          false,
          SIM_NAME " out of memory. Tried to allocate ", c10::CachingAllocator::format_size(size), ". Simulated device ",
          static_cast<int>(device), " has a total capacity of ", c10::CachingAllocator::format_size(limit[device]),
          " of which ", c10::CachingAllocator::format_size(available), " is free; ",
          c10::CachingAllocator::format_size(used), " is allocated by this process.");
    }
    for (auto* array : {&stat.allocated_bytes, &stat.reserved_bytes, &stat.active_bytes}) {
      (*array)[0].increase(size);
    }
    stat.requested_bytes[0].increase(nbytes);
    for (auto* array : {&stat.allocation, &stat.segment, &stat.active}) {
      (*array)[0].increase(1);
    }
    ++stat.num_device_alloc;
  }

  void give_back(c10::DeviceIndex device, size_t nbytes) {
    std::lock_guard<std::mutex> lock(mutex);
    auto& stat = stats[device];
    for (auto* array : {&stat.allocated_bytes, &stat.reserved_bytes, &stat.active_bytes}) {
      (*array)[0].decrease(rounded(nbytes));
    }
    stat.requested_bytes[0].decrease(nbytes);
    for (auto* array : {&stat.allocation, &stat.segment, &stat.active}) {
      (*array)[0].decrease(1);
    }
    ++stat.num_device_free;
  }
};

inline Memory& memory() {
  static Memory* instance = new Memory; // leaked: tensors may be freed after static destructors have run
  return *instance;
}

inline void delete_block(void* context) {
  auto* block = static_cast<Block*>(context);
  auto& state = memory();
  if (block->memory) {
    std::lock_guard<std::mutex> lock(state.mutex);
    const auto [first, last] = state.blocks.equal_range(reinterpret_cast<uintptr_t>(block->memory.get()));
    const auto found = std::find_if(first, last, [&](const auto& entry) { return entry.second == block; });
    if (found != last) {
      state.blocks.erase(found);
    }
  }
  state.give_back(block->device, block->nbytes);
  delete block;
}

// Make host memory a block on the device: `take` has accounted for it.
inline c10::DataPtr make_block(c10::DeviceIndex device, size_t nbytes, c10::DataPtr host) {
  void* data = host.get();
  auto* block = new Block{device, nbytes, std::move(host)};
  if (data != nullptr) {
    auto& state = memory();
    std::lock_guard<std::mutex> lock(state.mutex);
    state.blocks.emplace(reinterpret_cast<uintptr_t>(data), block);
  }
  return {data, block, delete_block, c10::Device(kType, device)};
}

struct DeviceMemoryAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    const auto device = current_device;
    use(device);
    if (nbytes == 0) {
      return {nullptr, c10::Device(kType, device)};
    }
    auto& state = memory();
    state.take(device, nbytes);
    void* data = nullptr;
    try {
      data = aligned_malloc(nbytes);
    } catch (...) {
      state.give_back(device, nbytes);
      throw;
    }
    if (poison) {
      std::memset(data, 0xff, nbytes); // NaN in every floating-point format
    }
    return make_block(device, nbytes, c10::DataPtr(data, data, &std::free, c10::kCPU));
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr; // the context of a block is not its address
  }

  void copy_data(void* destination, const void* source, size_t count) const override {
    std::memcpy(destination, source, count);
  }

  bool initialized() override {
    return true;
  }

  void emptyCache(c10::MempoolId_t) override {}

  void recordStream(const c10::DataPtr&, c10::Stream) override {}

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    check_index(device);
    std::lock_guard<std::mutex> lock(memory().mutex);
    return memory().stats[device];
  }

  template <typename Reset>
  void reset(c10::DeviceIndex device, Reset&& reset_one) {
    check_index(device);
    std::lock_guard<std::mutex> lock(memory().mutex);
    auto& stat = memory().stats[device];
    for (auto* array :
         {&stat.allocated_bytes, &stat.reserved_bytes, &stat.active_bytes, &stat.requested_bytes, &stat.allocation,
          &stat.segment, &stat.active}) {
      reset_one((*array)[0]);
    }
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    reset(device, [](auto& stat) { stat.reset_accumulated(); });
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    reset(device, [](auto& stat) { stat.reset_peak(); });
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    check_index(device);
    std::lock_guard<std::mutex> lock(memory().mutex);
    const auto used = static_cast<size_t>(memory().stats[device].allocated_bytes[0].current);
    const auto total = memory().limit[device];
    return {total > used ? total - used : 0, total};
  }
};

inline DeviceMemoryAllocator& device_allocator() {
  static auto* instance = new DeviceMemoryAllocator;
  return *instance;
}

inline c10::Device device_of(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  auto& state = memory();
  std::lock_guard<std::mutex> lock(state.mutex);
  auto next = state.blocks.upper_bound(address);
  if (next != state.blocks.begin()) {
    const auto& [start, block] = *std::prev(next);
    if (address < start + block->nbytes) {
      return c10::Device(kType, block->device);
    }
  }
  TORCH_CHECK(false, "the pointer does not belong to a simulated " SIM_NAME " device");
}

// Page-locked host memory: ordinary memory that is remembered, since a simulator has no DMA engine to lock it for.
struct PinnedMemoryAllocator final : at::HostAllocator {
  static std::mutex& mutex() {
    static auto* instance = new std::mutex;
    return *instance;
  }

  static std::map<uintptr_t, size_t>& ranges() {
    static auto* instance = new std::map<uintptr_t, size_t>;
    return *instance;
  }

  static void release(void* data) {
    {
      std::lock_guard<std::mutex> lock(mutex());
      auto found = ranges().find(reinterpret_cast<uintptr_t>(data));
      if (found != ranges().end()) {
        bytes().decrease(found->second);
        ranges().erase(found);
      }
    }
    std::free(data);
  }

  static at::Stat& bytes() {
    static auto* instance = new at::Stat;
    return *instance;
  }

  static bool is_pinned(const void* data) {
    const auto address = reinterpret_cast<uintptr_t>(data);
    std::lock_guard<std::mutex> lock(mutex());
    auto next = ranges().upper_bound(address);
    return next != ranges().begin() && address < std::prev(next)->first + std::prev(next)->second;
  }

  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) {
      return {nullptr, c10::kCPU};
    }
    void* data = aligned_malloc(nbytes);
    std::lock_guard<std::mutex> lock(mutex());
    ranges()[reinterpret_cast<uintptr_t>(data)] = nbytes;
    bytes().increase(nbytes);
    return {data, data, &release, c10::kCPU};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* destination, const void* source, size_t count) const override {
    std::memcpy(destination, source, count);
  }

  bool record_event(void*, void*, c10::Stream) override {
    return true;
  }

  void empty_cache() override {}

  at::HostStats get_stats() override {
    std::lock_guard<std::mutex> lock(mutex());
    at::HostStats stats;
    stats.active_bytes = stats.allocated_bytes = bytes();
    return stats;
  }

  void reset_accumulated_stats() override {
    std::lock_guard<std::mutex> lock(mutex());
    bytes().reset_accumulated();
  }

  void reset_peak_stats() override {
    std::lock_guard<std::mutex> lock(mutex());
    bytes().reset_peak();
  }
};

inline PinnedMemoryAllocator& pinned_allocator() {
  static auto* instance = new PinnedMemoryAllocator;
  return *instance;
}

} // namespace sim
