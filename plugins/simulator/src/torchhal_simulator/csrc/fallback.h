// Every operator without a kernel of its own: check where its arguments are, then run the CPU kernel on them.
//
// torch's own CPU fallback checks nothing: of 36 mixtures of CPU and device tensors that raise on CUDA, 16 pass there.
#pragma once

#include "generator.h"
#include "host_view.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <mutex>
#include <optional>
#include <string_view>

namespace sim {

// Arguments for which CUDA takes a number from the CPU, as a tensor of no dimension.
inline bool takes_cpu_number(const c10::OperatorHandle& op, std::string_view argument) {
  if (op.hasTag(at::Tag::pointwise)) {
    return argument != "mask"; // of masked_fill
  }
  const std::string_view name = op.schema().name();
  if (name.substr(0, 12) == "aten::_fused") {
    return argument == "lr"; // of optimizers
  }
  for (const std::string_view allowed :
       {"aten::index_put_", "aten::_index_put_impl_", "aten::index_fill_", "aten::masked_fill_"}) {
    if (name == allowed) {
      return argument == "value" || argument == "values";
    }
  }
  return false;
}

// Operators that take a list of indices, which CUDA lets be on the CPU.
inline bool is_indexing(const c10::OperatorHandle& op) {
  const std::string_view name = op.schema().name();
  return name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_" ||
      name == "aten::_unsafe_index" || name == "aten::_unsafe_index_put";
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), stack_(*stack), begin_(stack->size() - schema_.arguments().size()) {}

  void run() {
    const auto device = find_device();
    use(device.index());
    ++counters.operators;
    count_hidden_waits();
    TORCH_CHECK_NOT_IMPLEMENTED(
        op_.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU),
        "the simulated " SIM_NAME " device has no kernel for ", op_.operator_name(),
        ": it computes with torch's CPU kernels, and there is none for this operator");
    HostCall host(device);
    for (const auto index : c10::irange(schema_.arguments().size())) {
      to_host(host, index, device);
    }
    if (op_.hasTag(at::Tag::nondeterministic_seeded) && !has_generator_argument_) {
      Borrow borrow(device.index());
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
    } else {
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
    }
    for (const auto& [original, view] : written_) {
      host.write_back(original, view);
    }
    results_to_device(host);
  }

 private:
  // Operators that draw random numbers without a generator argument use torch's default CPU generator, so for the call
  // that one gets the device's seed. One call at a time: autograd has a thread for each device. Against a thread that
  // draws or seeds on the CPU meanwhile nothing helps, so torch's own operator of this kind, the dropout, has a kernel
  // that borrows nothing, and this is left to those that others register.
  struct Borrow {
    explicit Borrow(c10::DeviceIndex index) : alone(mutex()), cpu(at::detail::getDefaultCPUGenerator()) {
      const auto seed = next_seed(default_generator(index));
      const std::lock_guard<std::mutex> lock(cpu.mutex());
      kept = cpu.get_state();
      cpu.set_current_seed(seed);
    }
    ~Borrow() {
      const std::lock_guard<std::mutex> lock(cpu.mutex());
      cpu.set_state(kept);
    }
    static std::mutex& mutex() {
      static auto* instance = new std::mutex;
      return *instance;
    }
    std::lock_guard<std::mutex> alone;
    at::Generator cpu;
    at::Tensor kept;
  };

  // What makes the host wait for the device on CUDA, although nobody has asked for a copy.
  void count_hidden_waits() const {
    if (is_indexing(op_)) {
      count_waits_of_indexing();
    } else if (op_.hasTag(at::Tag::dynamic_output_shape) || op_.hasTag(at::Tag::data_dependent_output)) {
      if (!is_known_without_the_data()) {
        count_read(); // the host has to see the data before it can go on
      }
    }
  }

  static void count_read(int64_t times = 1) {
    counters.d2h += times;
    counters.synchronizations += times;
  }

  // Whether an operator that looks at the data, as its tag says, needs not with these arguments.
  bool is_known_without_the_data() const {
    const std::string_view name = schema_.name();
    if (name == "aten::repeat_interleave") {
      const auto output_size = schema_.argumentIndexWithName("output_size");
      return output_size && !stack_[begin_ + *output_size].isNone();
    }
    if (name == "aten::equal") { // as CUDA's: different shapes, nothing to compare, or the same memory
      const auto &left = stack_[begin_].toTensor(), &right = stack_[begin_ + 1].toTensor();
      return left.sizes() != right.sizes() || left.numel() == 0 ||
          (left.is_alias_of(right) && left.storage_offset() == right.storage_offset() &&
           left.strides() == right.strides());
    }
    return false;
  }

  // A mask becomes indices by nonzero, which waits for the number of them; indices on the CPU are copied first.
  void count_waits_of_indexing() const {
    const auto at = schema_.argumentIndexWithName("indices");
    if (!at || becomes_masked_fill(*at)) {
      return;
    }
    for (const std::optional<at::Tensor>& index : stack_[begin_ + *at].toOptionalTensorList()) {
      if (!index.has_value() || !index->defined()) {
        continue;
      }
      if (!index->is_cpu()) {
        count_read(is_mask(*index) ? 1 : 0);
        continue;
      }
      const auto copies = is_mask(*index) ? index->dim() : 1; // of a mask, the indices in each dimension
      counters.h2d += copies;
      counters.synchronizations += copies;
    }
  }

  static bool is_mask(const at::Tensor& index) {
    return index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
  }

  // x[mask] = number is a masked_fill on CUDA, which waits for nothing. CUDA is given such a number as a tensor on the
  // CPU, any other device as one of its own; but that tensor was made by torch's C++ and no Python object knows it.
  bool becomes_masked_fill(size_t indices) const {
    const auto at = schema_.argumentIndexWithName("values");
    const auto accumulate = schema_.argumentIndexWithName("accumulate");
    if (!at || !accumulate || stack_[begin_ + *accumulate].toBool()) {
      return false;
    }
    const auto& value = stack_[begin_ + *at].toTensor();
    const bool is_number = value.is_cpu()
        ? value.numel() == 1
        : value.dim() == 0 && value.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj() == nullptr;
    int masks = 0;
    for (const std::optional<at::Tensor>& index : stack_[begin_ + indices].toOptionalTensorList()) {
      if (index.has_value() && index->defined()) {
        if (!is_mask(*index) || ++masks > 1) {
          return false;
        }
      }
    }
    return is_number && masks == 1;
  }

  bool is_written(size_t index) const {
    const auto* alias = schema_.arguments()[index].alias_info();
    return alias != nullptr && alias->isWrite();
  }

  template <typename Visit>
  void each_tensor(Visit&& visit) const {
    for (const auto index : c10::irange(schema_.arguments().size())) {
      const auto& value = stack_[begin_ + index];
      if (value.isTensor()) {
        visit(value.toTensor(), index, /*in_list=*/false);
      } else if (value.isTensorList()) {
        for (const at::Tensor& tensor : value.toTensorList()) {
          visit(tensor, index, true);
        }
      } else if (value.isOptionalTensorList()) {
        for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
          if (tensor.has_value()) {
            visit(*tensor, index, true);
          }
        }
      }
    }
  }

  c10::Device find_device() const {
    std::optional<c10::Device> device;
    each_tensor([&](const at::Tensor& tensor, size_t, bool) {
      if (!device && tensor.defined() && tensor.device().type() == kType) {
        device = tensor.device();
      }
    });
    if (device) {
      check(*device);
      return *device;
    }
    std::optional<at::Generator> generator;
    for (const auto index : c10::irange(schema_.arguments().size())) { // a factory function
      const auto& value = stack_[begin_ + index];
      if (value.isDevice() && value.toDevice().type() == kType) {
        return resolve(value.toDevice());
      }
      if (value.isGenerator()) {
        generator = value.toGenerator();
      }
    }
    TORCH_CHECK( // nothing but the generator has brought the call here
        !generator || generator->device().type() != kType,
        "Expected a 'cpu' device type for generator but found '", kType, "'");
    return {kType, current_device};
  }

  void check(c10::Device device) const {
    each_tensor([&](const at::Tensor& tensor, size_t index, bool in_list) {
      if (!tensor.defined() || tensor.device() == device) {
        return;
      }
      if (tensor.is_cpu() && !is_written(index)) {
        if (tensor.dim() == 0 && !in_list && takes_cpu_number(op_, schema_.arguments()[index].name())) {
          return;
        }
        if (tensor.dim() == 0 && tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
          return;
        }
        if (in_list && is_indexing(op_)) {
          return;
        }
      }
      TORCH_CHECK(
          false,
          "Expected all tensors to be on the same device, but found at least two devices, ", device, " and ",
          tensor.device(), "! (when checking argument ", schema_.arguments()[index].name(), " of ",
          op_.operator_name(), ")");
    });
  }

  void to_host(HostCall& host, size_t index, c10::Device device) {
    auto& value = stack_[begin_ + index];
    if (value.isTensor()) {
      const at::Tensor tensor = value.toTensor();
      const at::Tensor view = host.host(tensor);
      if (is_written(index)) {
        written_.emplace_back(tensor, view);
      }
      value = view;
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> views;
      for (const at::Tensor tensor : value.toTensorList()) {
        views.push_back(host.host(tensor));
        if (is_written(index)) {
          written_.emplace_back(tensor, views.get(views.size() - 1));
        }
      }
      value = std::move(views);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> views;
      for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
        views.push_back(tensor.has_value() ? std::optional<at::Tensor>(host.host(*tensor)) : std::nullopt);
      }
      value = std::move(views);
    } else if (value.isDevice()) {
      value = c10::Device(c10::kCPU);
    } else if (is_generator_argument(index)) {
      has_generator_argument_ = true;
      value = host_generator(value.isNone() ? default_generator(device.index()) : check_generator(value, device));
    }
  }

  bool is_generator_argument(size_t index) const {
    auto type = schema_.arguments()[index].type();
    if (const auto optional = type->cast<c10::OptionalType>()) {
      type = optional->getElementType();
    }
    return type->kind() == c10::TypeKind::GeneratorType;
  }

  static at::Generator check_generator(const c10::IValue& value, c10::Device device) {
    auto generator = value.toGenerator();
    TORCH_CHECK(
        generator.device().type() == kType,
        "Expected a '", device.type(), "' device type for generator but found '", generator.device().type(), "'");
    return generator;
  }

  void results_to_device(HostCall& host) {
    const auto count = schema_.returns().size();
    const auto first = stack_.size() - count;
    for (const auto index : c10::irange(count)) {
      auto& value = stack_[first + index];
      if (value.isTensor()) {
        value = result(host, value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> results;
        for (const at::Tensor tensor : value.toTensorList()) {
          results.push_back(result(host, tensor));
        }
        value = std::move(results);
      }
    }
  }

  at::Tensor result(HostCall& host, const at::Tensor& tensor) const {
    for (const auto& [original, view] : written_) {
      if (view.is_same(tensor)) {
        return original; // in place, or out=
      }
    }
    return host.device(tensor);
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack& stack_;
  size_t begin_;
  bool has_generator_argument_ = false;
  c10::SmallVector<std::pair<at::Tensor, at::Tensor>, 4> written_; // on the device, its view on the host
};

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, stack).run();
}

} // namespace sim
