// The operators that no CPU kernel can stand in for: memory, views, copies, and what torch hands to backends only.
#pragma once

#include "generator.h"
#include "host_view.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/GradMode.h>

namespace sim {

// -- memory ---------------------------------------------------------------------------------------------------

inline c10::Device checked_device(
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  TORCH_CHECK_NOT_IMPLEMENTED(
      layout.value_or(c10::kStrided) == c10::kStrided,
      "the simulated " SIM_NAME " device has dense tensors only (got layout ", *layout, ")");
  const auto where = resolve(device.value_or(c10::Device(kType)));
  check_index(where.index());
  return where;
}

inline at::Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pin_memory,
    std::optional<c10::MemoryFormat> memory_format) {
  check_dtype(c10::dtype_or_default(dtype));
  const c10::DeviceGuard guard(checked_device(layout, device, pin_memory));
  return at::detail::empty_generic(
      size, &device_allocator(), c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype), memory_format);
}

inline at::Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pin_memory) {
  check_dtype(c10::dtype_or_default(dtype));
  const c10::DeviceGuard guard(checked_device(layout, device, pin_memory));
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator(), c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype));
}

struct NoMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t) override {
    return {nullptr, c10::Device(kType, current_device)};
  }

  void copy_data(void*, const void*, size_t) const override {}
};

// A tensor of zeros without memory, which autograd makes and torch's ZeroTensor key handles.
inline at::Tensor efficient_zero_tensor(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pin_memory) {
  static NoMemory no_memory;
  const c10::DeviceGuard guard(checked_device(layout, device, pin_memory));
  return at::detail::empty_generic(
      size, &no_memory, c10::DispatchKeySet(kKey) | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor),
      c10::dtype_or_default(dtype), std::nullopt);
}

inline const at::Tensor& resize_(
    const at::Tensor& self, at::IntArrayRef size, std::optional<c10::MemoryFormat> memory_format) {
  const c10::DeviceGuard guard(self.device());
  const auto sizes = self.sizes().vec(), strides = self.strides().vec();
  try {
    return at::native::resize_(self, size, memory_format);
  } catch (...) { // torch sets the sizes first, and they must not outgrow the memory when there is no more
    self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, self.storage_offset());
    throw;
  }
}

inline at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  TORCH_CHECK(
      source.device() == self.device(),
      "Attempted to set the storage of a tensor on device \"", self.device(),
      "\" to a storage on different device \"", source.device(), "\".");
  const c10::DeviceGuard guard(self.device());
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

inline at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto elements = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(source), 0, {elements}, {});
}

inline at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  if (self.is_same(source)) {
    return self;
  }
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

inline at::Tensor& set_empty(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, &device_allocator(), /*resizable=*/true);
  return set_storage(self, std::move(storage), 0, {0}, {});
}

// -- copies ---------------------------------------------------------------------------------------------------

inline void count_copy(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const bool from_device = source.device().type() == kType;
  const bool to_device = target.device().type() == kType;
  if (from_device && to_device) {
    ++counters.d2d;
    return;
  }
  ++(to_device ? counters.h2d : counters.d2h);
  // As on CUDA: a blocking copy waits for the stream; so does one into memory that isn't pinned, whatever was asked.
  if (!non_blocking || (from_device && !PinnedMemoryAllocator::is_pinned(target.storage().data()))) {
    count_synchronization();
  }
}

inline void copy_memory(const at::Tensor& source, const at::Tensor& target) {
  const auto device = source.device().type() == kType ? source.device() : target.device();
  HostCall host(device);
  auto view = host.host(target);
  const auto from = host.host(source);
  TORCH_CHECK(
      from.is_cpu() && view.is_cpu(), "a copy between ", source.device(), " and ", target.device(), " is not simulated");
  if (narrow_longs && source.is_cpu() && target.scalar_type() == at::kLong) {
    view.copy_(from.to(at::kInt));
  } else {
    view.copy_(from);
  }
}

inline at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  for (const auto& tensor : {self, target}) {
    if (tensor.device().type() == kType) {
      use(tensor.device().index());
    }
  }
  ++counters.operators;
  count_copy(self, target, non_blocking);
  const c10::NoGradGuard no_grad;
  copy_memory(self, target);
  return target;
}

inline at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  if (self.sizes() != target.sizes()) {
    target.resize_(self.sizes());
  }
  return copy_from(self, target, /*non_blocking=*/false);
}

inline at::Scalar local_scalar_dense(const at::Tensor& self) {
  use(self.device().index());
  ++counters.operators;
  ++counters.d2h;
  count_synchronization();
  HostCall host(self.device());
  return at::native::_local_scalar_dense_cpu(host.host(self));
}

inline void record_stream(at::Tensor& self, c10::Stream stream) {
  TORCH_CHECK(
      stream.device() == self.device(), "the stream of ", stream.device(), " can't use a tensor on ", self.device());
}

// -- arguments of kernels with a body of their own ------------------------------------------------------------

inline c10::Device same_device(const char* op, std::initializer_list<std::reference_wrapper<const at::Tensor>> tensors) {
  std::optional<c10::Device> device;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) {
      continue;
    }
    if (!device) {
      device = tensor.device();
    }
    TORCH_CHECK(
        tensor.device() == *device && tensor.device().type() == kType,
        "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
        tensor.device(), "! (when checking an argument of ", op, ")");
  }
  use(device->index());
  ++counters.operators;
  return *device;
}

inline at::Tensor or_undefined(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() ? *tensor : at::Tensor();
}

// The value may be on any device, as on CUDA: it is read first.
inline at::Tensor& fill_(at::Tensor& self, const at::Tensor& value) {
  TORCH_CHECK(
      value.dim() == 0, "fill_ only supports 0-dimension value tensor but got tensor with ", value.dim(),
      " dimensions.");
  if (self.device() != value.device()) {
    return self.fill_(value.item());
  }
  HostCall host(same_device("fill_", {self, value}));
  auto view = host.host(self);
  view.fill_(host.host(value));
  return self;
}

// -- convolution: torch gives these two to backends that it does not know -------------------------------------

inline at::Tensor convolution(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias_,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation,
    bool transposed,
    at::IntArrayRef output_padding,
    int64_t groups) {
  const auto bias = or_undefined(bias_);
  HostCall host(same_device("convolution", {input, weight, bias}));
  return host.device(at::convolution(
      host.host(input), host.host(weight), host.host(bias), stride, padding, dilation, transposed, output_padding,
      groups));
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad_output,
    const at::Tensor& input,
    const at::Tensor& weight,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation,
    bool transposed,
    at::IntArrayRef output_padding,
    int64_t groups,
    std::array<bool, 3> output_mask) {
  HostCall host(same_device("convolution_backward", {grad_output, input, weight}));
  const std::array<int64_t, 1> bias_sizes{grad_output.size(1)};
  auto [grad_input, grad_weight, grad_bias] = at::convolution_backward(
      host.host(grad_output), host.host(input), host.host(weight), at::IntArrayRef(bias_sizes), stride, padding,
      dilation, transposed, output_padding, groups, output_mask);
  return {host.device(grad_input), host.device(grad_weight), host.device(grad_bias)};
}

// -- dropout: torch's own kernel for the CPU takes no generator -----------------------------------------------

inline std::tuple<at::Tensor, at::Tensor> native_dropout(
    const at::Tensor& input, double p, std::optional<bool> train) {
  HostCall host(same_device("native_dropout", {input}));
  const auto from = host.host(input);
  if (from.numel() == 0 || !train.value_or(true)) { // nothing is drawn
    auto [output, mask] = at::native_dropout(from, p, /*train=*/false);
    return {host.device(output), host.device(mask)};
  }
  auto generator = host_generator(default_generator(input.device().index()));
  const double keep = 1 - p;
  const auto mask = at::empty_like(from, at::kBool).bernoulli_(keep, generator);
  const auto output = from.mul(mask).mul_(keep == 0 ? 0. : 1. / keep);
  return {host.device(output), host.device(mask)};
}

// -- attention: no fused kernel, so the composition of matmuls ------------------------------------------------

inline int64_t sdp_choice(
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const std::optional<at::Tensor>&,
    double,
    bool,
    std::optional<double>,
    bool) {
  return 0; // SDPBackend::math
}

} // namespace sim
