// The device's random numbers: drawn by counter, as CUDA's are, each call from a CPU generator of its own.
//
// A state is a seed and an offset, 16 bytes. DTensor counts on that: it moves the offset so that every shard draws other
// numbers, and every replica the same.
#pragma once

#include "runtime.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Generator.h>

#include <cstring>
#include <mutex>
#include <vector>

namespace sim {

// As with torch's own generators, all methods but `next` leave it to the caller to hold the mutex.
struct GeneratorImpl final : c10::GeneratorImpl {
  explicit GeneratorImpl(c10::DeviceIndex index)
      : c10::GeneratorImpl(c10::Device(kType, index), c10::DispatchKeySet(kKey)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  uint64_t current_seed() const override {
    return seed_;
  }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(/*is_cuda=*/true));
    return seed_;
  }
  void set_offset(uint64_t offset) override {
    offset_ = offset;
  }
  uint64_t get_offset() const override {
    return offset_;
  }
  void set_state(const c10::TensorImpl& state) override {
    at::detail::check_rng_state(state);
    TORCH_CHECK(state.numel() == kStateSize, "RNG state is wrong size");
    const auto* bytes = static_cast<const uint8_t*>(state.data());
    std::memcpy(&seed_, bytes, sizeof(seed_));
    std::memcpy(&offset_, bytes + sizeof(seed_), sizeof(offset_));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({kStateSize}, at::kByte);
    auto* bytes = state.data_ptr<uint8_t>();
    std::memcpy(bytes, &seed_, sizeof(seed_));
    std::memcpy(bytes + sizeof(seed_), &offset_, sizeof(offset_));
    return state.getIntrusivePtr();
  }

  // The seed of the CPU generator for one call, whatever that draws: the seed and the offset, well mixed. The first call
  // after seeding draws what the CPU would, so that single operators can be compared; but the CPU takes the low half of
  // a seed only, so one that has a high half is mixed even then.
  uint64_t next() {
    std::lock_guard<std::mutex> lock(mutex_);
    const bool as_the_cpu = offset_ == 0 && seed_ >> 32 == 0;
    const auto mixed = as_the_cpu ? seed_ : mix(mix(seed_) + offset_);
    offset_ += 4; // as CUDA's, which go up in fours at least
    return mixed;
  }

 private:
  static constexpr int64_t kStateSize = 2 * sizeof(uint64_t);

  static uint64_t mix(uint64_t value) { // splitmix64
    value += 0x9e3779b97f4a7c15;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
    value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
    return value ^ (value >> 31);
  }

  GeneratorImpl* clone_impl() const override {
    auto* clone = new GeneratorImpl(device().index());
    clone->seed_ = seed_;
    clone->offset_ = offset_;
    return clone;
  }

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

inline const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* generators = [] {
    auto* made = new std::vector<at::Generator>;
    for (int device = 0; device < kMaxDevices; ++device) {
      made->push_back(at::make_generator<GeneratorImpl>(static_cast<c10::DeviceIndex>(device)));
    }
    return made;
  }();
  const auto device = index < 0 ? current_device : index;
  check_index(device);
  return (*generators)[device];
}

inline at::Generator new_generator(c10::DeviceIndex index) {
  const auto device = index < 0 ? current_device : index;
  check_index(device);
  return at::make_generator<GeneratorImpl>(device);
}

inline uint64_t next_seed(const at::Generator& generator) {
  return static_cast<GeneratorImpl*>(generator.unsafeGetGeneratorImpl())->next();
}

// The CPU generator that does the work of a device's, for one call.
inline at::Generator host_generator(const at::Generator& generator) {
  return at::detail::createCPUGenerator(next_seed(generator));
}

} // namespace sim
