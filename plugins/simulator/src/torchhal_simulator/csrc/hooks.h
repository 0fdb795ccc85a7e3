// What torch asks about the device from code that knows no device: torch.accelerator, pinned memory, generators.
#pragma once

#include "generator.h"
#include "guard.h"
#include "memory.h"

#include <ATen/native/Resize.h>
#ifdef TORCHHAL_SIM_HPU
#include <ATen/detail/HPUHooksInterface.h>
#else
#include <ATen/detail/PrivateUse1HooksInterface.h>
#endif

namespace sim {

#ifdef TORCHHAL_SIM_HPU
using HooksInterface = at::HPUHooksInterface;
#else
using HooksInterface = at::PrivateUse1HooksInterface;
#endif

struct Hooks final : HooksInterface {
#ifdef TORCHHAL_SIM_HPU
  explicit Hooks(at::HPUHooksArgs) {}

  bool hasHPU() const override {
    return true;
  }
#else
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    const c10::DeviceGuard guard(storage.device());
    if (nbytes == 0) { // torch's own way leaves a pointer on the CPU: FSDP frees a parameter so, and then sets another
      storage.unsafeGetStorageImpl()->set_data_ptr_noswap(device_allocator().allocate(0));
      storage.unsafeGetStorageImpl()->set_nbytes(0);
      return;
    }
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), nbytes); // allocates through our allocator
  }
#endif

  void init() const override {}

  bool isBuilt() const override {
    return true;
  }

  bool isAvailable() const override {
    return device_count > 0;
  }

  bool hasPrimaryContext(c10::DeviceIndex index) const override {
    check_index(index);
    return touched[index];
  }

  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(device_count.load());
  }

  void setCurrentDevice(c10::DeviceIndex index) const override {
    check_index(index);
    current_device = index;
  }

  c10::DeviceIndex getCurrentDevice() const override {
    return current_device;
  }

  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = current_device;
    setCurrentDevice(index);
    return before;
  }

  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current_device : exchangeDevice(index);
  }

  bool isPinnedPtr(const void* data) const override {
    return PinnedMemoryAllocator::is_pinned(data);
  }

  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator();
  }

  c10::Device getDeviceFromPtr(void* data) const override {
    return device_of(data);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }

  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return new_generator(index);
  }
};

} // namespace sim

#ifdef TORCHHAL_SIM_HPU
namespace at {
using SimHPUHooks = sim::Hooks;
C10_REGISTER_CLASS(HPUHooksRegistry, HPUHooks, SimHPUHooks)
} // namespace at
#endif
