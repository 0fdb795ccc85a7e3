// How a CPU kernel computes on device memory: through CPU tensors that alias it, without a copy.
//
// A HostCall lives for one operator. Storages map one to one, so that a kernel's own overlap and aliasing checks see
// what they would see on a device. Results are new CPU memory, which the device takes over and accounts for.
#pragma once

#include "memory.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <c10/util/SmallVector.h>

namespace sim {

inline void release_storage(void* context) {
  c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(context));
}

inline at::Tensor make_tensor(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return tensor;
}

inline void check_dtype(c10::ScalarType dtype) {
  TORCH_CHECK_TYPE(
      !refuse_doubles || (dtype != c10::kDouble && !c10::isComplexType(dtype)),
      SIM_NAME " has no tensors of dtype ", dtype, ": use float32 or a narrower type");
}

class HostCall {
 public:
  explicit HostCall(c10::Device device) : device_(device) {}

  // A CPU tensor over the memory of `tensor`; CPU tensors and undefined ones pass.
  at::Tensor host(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != kType) {
      return tensor;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        tensor.layout() == c10::kStrided && !tensor.is_quantized(),
        "the simulated " SIM_NAME " device has dense tensors only (got layout ", tensor.layout(), ")");
    check_memory(tensor);
    for (const auto& [original, view] : tensors_) {
      if (original.is_same(tensor)) {
        return view; // the same tensor twice, as in an operation in place: kernels ask whether it is the same
      }
    }
    auto view = make_tensor(host_storage(tensor.storage()), c10::DispatchKey::CPU, tensor);
    view._set_conj(tensor.is_conj());
    view._set_neg(tensor.is_neg());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      view.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    tensors_.emplace_back(tensor, view);
    return view;
  }

  // The result of a CPU kernel as a device tensor.
  at::Tensor device(const at::Tensor& result) {
    if (!result.defined() || result.device().type() != c10::DeviceType::CPU) {
      return result;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        result.layout() == c10::kStrided && !result.is_quantized(),
        "the simulated " SIM_NAME " device has dense tensors only (this operator gives ",
        result.is_quantized() ? "quantized ones of " : "", "layout ", result.layout(), ")");
    check_dtype(result.scalar_type());
    c10::Storage storage;
    for (const auto& [original, view] : storages_) {
      if (view.unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl()) {
        storage = original; // a view of an input
      }
    }
    if (!storage) {
      storage = take_over(result.storage());
    }
    auto tensor = make_tensor(std::move(storage), kKey, result);
    tensor._set_conj(result.is_conj());
    tensor._set_neg(result.is_neg());
    return tensor;
  }

  // After a kernel has written to `view`: follow a resize, which gave the view memory of its own, and a kernel that
  // leaves its result conjugated.
  void write_back(const at::Tensor& tensor, const at::Tensor& view) {
    tensor._set_conj(view.is_conj());
    tensor._set_neg(view.is_neg());
    if (tensor.storage().data() == view.storage().data() && tensor.sizes() == view.sizes() &&
        tensor.strides() == view.strides()) {
      return;
    }
    auto* impl = tensor.unsafeGetTensorImpl();
    if (tensor.storage().data() != view.storage().data() || tensor.storage().nbytes() != view.storage().nbytes()) {
      const c10::DeviceGuard guard(tensor.device());
      const auto nbytes = view.storage().nbytes();
      auto fresh = device_allocator().allocate(nbytes);
      if (nbytes > 0) {
        std::memcpy(fresh.get(), view.storage().data(), nbytes);
      }
      tensor.storage().set_data_ptr_noswap(std::move(fresh));
      tensor.storage().set_nbytes(nbytes);
    }
    impl->set_sizes_and_strides(view.sizes(), view.strides(), view.storage_offset());
  }

 private:
  // Who frees a tensor's memory, as FSDP does with a parameter's, and uses the tensor again reads what is anybody's by
  // then. On hardware that goes unnoticed, or shows as wrong numbers.
  static void check_memory(const at::Tensor& tensor) {
    if (tensor.numel() == 0) {
      return;
    }
    const auto needed = at::detail::computeStorageNbytes(
        tensor.sizes(), tensor.strides(), tensor.dtype().itemsize(), tensor.storage_offset());
    const auto nbytes = tensor.storage().nbytes();
    TORCH_CHECK(
        needed <= nbytes,
        "the memory of this tensor (", needed, " bytes, for sizes ", tensor.sizes(), " on ", tensor.device(),
        ") has been freed or shrunk to ", nbytes, " bytes");
  }

  c10::Storage host_storage(const c10::Storage& storage) {
    for (const auto& [original, view] : storages_) {
      if (original.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) {
        return view;
      }
    }
    auto* impl = storage.unsafeGetStorageImpl();
    c10::raw::intrusive_ptr::incref(impl); // the view may outlive the call
    c10::Storage view(
        c10::Storage::use_byte_size_t(),
        storage.nbytes(),
        c10::DataPtr(storage.mutable_data(), impl, &release_storage, c10::kCPU),
        c10::GetAllocator(c10::kCPU),
        /*resizable=*/true);
    storages_.emplace_back(storage, view);
    return view;
  }

  c10::Storage take_over(const c10::Storage& host) {
    const auto nbytes = host.nbytes();
    const auto index = device_.index();
    c10::DataPtr data(nullptr, device_);
    if (nbytes > 0) {
      memory().take(index, nbytes);
      // The memory changes hands, not the storage: the kernel's own tensor may stay alive with it (a cached constant),
      // so it is shared ownership of the storage that the device keeps.
      auto* impl = host.unsafeGetStorageImpl();
      c10::raw::intrusive_ptr::incref(impl);
      data = make_block(index, nbytes, c10::DataPtr(host.mutable_data(), impl, &release_storage, c10::kCPU));
    }
    c10::Storage storage(
        c10::Storage::use_byte_size_t(), nbytes, std::move(data), &device_allocator(), /*resizable=*/true);
    storages_.emplace_back(storage, host); // a second result that shares this storage shares the device's too
    return storage;
  }

  c10::Device device_;
  c10::SmallVector<std::pair<c10::Storage, c10::Storage>, 8> storages_; // device, host
  c10::SmallVector<std::pair<at::Tensor, at::Tensor>, 8> tensors_; // device, host
};

} // namespace sim
