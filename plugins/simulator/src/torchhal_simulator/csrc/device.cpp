// The simulated device, as one translation unit: torch's headers cost more to parse than all of this to compile.
#include "api.h"
#include "composed.h"
#include "fallback.h"
#include "hooks.h"
#include "kernels.h"

#include <ATen/autocast_mode.h>
#include <ATen/native/transformers/attention.h>
#include <torch/library.h>

#ifdef TORCHHAL_SIM_HPU
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#endif

namespace sim {

static const int registered = [] {
  c10::SetAllocator(kType, &device_allocator());
  at::setHostAllocator(kType, &pinned_allocator());
#ifndef TORCHHAL_SIM_HPU
  at::RegisterPrivateUse1HooksInterface(new Hooks);
#endif
  return 0;
}();

#ifdef TORCHHAL_SIM_HPU
// c10d has kernels for PrivateUse1 but none for HPU, where the vendor's bridge registers its own. A twin of the
// process group, with HPU's backend under PrivateUse1, lets those kernels do.
static void twin_process_group(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto arguments = op.schema().arguments().size();
  for (auto index = stack->size() - arguments; index < stack->size(); ++index) {
    auto& value = (*stack)[index];
    if (value.isCustomClass()) {
      if (const auto group = value.toCustomClass<c10d::ProcessGroup>()) {
        auto twin = c10::make_intrusive<c10d::ProcessGroup>(group->getRank(), group->getSize());
        twin->setBackend(
            c10::DeviceType::PrivateUse1, c10d::ProcessGroup::BackendType::CUSTOM,
            group->getBackend(c10::DeviceType::HPU));
        value = std::move(twin);
        break;
      }
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), stack);
}
#endif

static void dense_only(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "the simulated " SIM_NAME " device has dense tensors only (in ", op.operator_name(), ")");
}

} // namespace sim

C10_REGISTER_GUARD_IMPL(SIM_KEY, sim::Guard)

TORCH_LIBRARY_IMPL(_, SIM_KEY, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::fallback>());
}

#ifdef TORCHHAL_SIM_HPU
TORCH_LIBRARY_IMPL(c10d, HPU, m) {
  for (const auto& op :
       c10::Dispatcher::singleton().getRegistrationsForDispatchKey(c10::DispatchKey::PrivateUse1)) {
    if (op.name.compare(0, 6, "c10d::") == 0) {
      m.impl(c10::toString(op).c_str(), torch::CppFunction::makeFromBoxedFunction<&sim::twin_process_group>());
    }
  }
}
#endif

TORCH_LIBRARY_IMPL(_, SIM_SPARSE_KEY, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::dense_only>());
}
TORCH_LIBRARY_IMPL(_, SIM_SPARSE_CSR_KEY, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::dense_only>());
}
TORCH_LIBRARY_IMPL(_, SIM_QUANTIZED_KEY, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::dense_only>());
}

TORCH_LIBRARY_IMPL(aten, SIM_KEY, m) {
  using namespace sim;
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &sim::empty_strided);
  m.impl("_efficientzerotensor", &efficient_zero_tensor);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_empty);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("record_stream", &record_stream);
  m.impl("fill_.Tensor", &sim::fill_);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("_fused_sdp_choice", &sdp_choice);
#ifndef TORCHHAL_SIM_HPU // torch asks PrivateUse1 for the fused cells, as it does CUDA; HPU takes the composition
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
#endif
  m.impl("batch_norm_stats", &batch_norm_stats);
  m.impl("batch_norm_elemt", &batch_norm_elemt);
  m.impl("batch_norm_gather_stats_with_counts", &batch_norm_gather_stats);
  m.impl("batch_norm_backward_reduce", &batch_norm_backward_reduce);
  m.impl("batch_norm_backward_elemt", &batch_norm_backward_elemt);
  m.impl("native_dropout", &sim::native_dropout);
  // Straight to the CPU's kernels. For the losses torch would make an output of the wrong shape first, and warn; for
  // conj_physical_ and mode.values it has code that serves the devices that it knows only; for index.Tensor it would turn
  // masks to indices first, to know the shape, and then again; for the others it has a composition, which gives other
  // last digits than the kernel.
  for (const auto* name :
       {"addr", "addr.out", "conj_physical_", "index.Tensor", "mish_backward", "mode.values", "mse_loss",
        "native_group_norm", "native_layer_norm", "silu_backward", "smooth_l1_loss"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

// A copy reads the conjugate and negative bits itself. Resolving them first would ask for a copy, without end. Both
// flavours need this and share the keys: the first to be loaded registers it.
static bool copy_falls_through(c10::DispatchKey key) {
  const auto copy = c10::Dispatcher::singleton().findSchema({"aten::_copy_from", ""});
  return copy && copy->hasKernelForDispatchKey(key);
}
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  if (!copy_falls_through(c10::DispatchKey::Conjugate)) {
    m.impl("_copy_from", torch::CppFunction::makeFallthrough());
  }
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  if (!copy_falls_through(c10::DispatchKey::Negative)) {
    m.impl("_copy_from", torch::CppFunction::makeFallthrough());
  }
}

namespace at::native {
#ifdef TORCHHAL_SIM_HPU
REGISTER_HPU_DISPATCH(_fused_sdp_choice_stub, &sim::sdp_choice)
#else
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::sdp_choice)
#endif
} // namespace at::native

// -- autocast: CUDA's lists -----------------------------------------------------------------------------------

namespace sim {

static at::Tensor binary_cross_entropy_banned(
    const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, int64_t) {
  TORCH_CHECK(
      false,
      "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast on " SIM_NAME
      ": use binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss instead.");
}

} // namespace sim

#define SIM_LOWER(...) KERNEL(sim::kType, __VA_ARGS__, lower_precision_fp)
#define SIM_FP32(...) KERNEL(sim::kType, __VA_ARGS__, fp32)
#define SIM_FP32_SET_OPT_DTYPE(...) KERNEL(sim::kType, __VA_ARGS__, fp32_set_opt_dtype)
#define SIM_PROMOTE(...) KERNEL(sim::kType, __VA_ARGS__, promote)
#define SIM_DIFFERENT(...) KERNEL_DIFFERENT_REDISPATCH_SIGNATURE(sim::kType, __VA_ARGS__)

TORCH_LIBRARY_IMPL(_, SIM_AUTOCAST_KEY, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

namespace at { // the lists name its types

TORCH_LIBRARY_IMPL(aten, SIM_AUTOCAST_KEY, m) {
  AT_FORALL_LOWER_PRECISION_FP(SIM_LOWER)
  AT_FORALL_FP32(SIM_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIM_FP32_SET_OPT_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(SIM_DIFFERENT)
  AT_FORALL_PROMOTE(SIM_PROMOTE)
  m.impl("binary_cross_entropy", &sim::binary_cross_entropy_banned);
}

} // namespace at
