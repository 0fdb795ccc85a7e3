// Operators that exist for accelerators only, so that no CPU kernel computes them: the cells of LSTM and GRU, and the
// five steps of SyncBatchNorm. Formulas and argument orders are those of torch's own CUDA kernels.
#pragma once

#include "kernels.h"

#include <ATen/AccumulateType.h>

namespace sim {

using Tensors2 = std::tuple<at::Tensor, at::Tensor>;
using Tensors3 = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Tensors4 = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using Tensors5 = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// -- recurrent cells ------------------------------------------------------------------------------------------

inline at::Tensor plus(const at::Tensor& value, const at::Tensor& bias) {
  return bias.defined() ? value + bias : value;
}

// gates: (batch, 4 * hidden), in the order input, forget, cell, output. Returns the hidden and the cell state and the
// activated gates for the backward.
inline Tensors3 lstm_cell(
    const at::Tensor& input_gates,
    const at::Tensor& hidden_gates,
    const at::Tensor& cx,
    const std::optional<at::Tensor>& input_bias_,
    const std::optional<at::Tensor>& hidden_bias_) {
  const auto input_bias = or_undefined(input_bias_), hidden_bias = or_undefined(hidden_bias_);
  HostCall host(same_device("_thnn_fused_lstm_cell", {input_gates, hidden_gates, cx, input_bias, hidden_bias}));
  const auto gates = plus(host.host(input_gates), host.host(input_bias)) +
      plus(host.host(hidden_gates), host.host(hidden_bias));
  const auto part = gates.chunk(4, 1);
  const auto in = part[0].sigmoid(), forget = part[1].sigmoid(), cell = part[2].tanh(), out = part[3].sigmoid();
  const auto cy = forget * host.host(cx) + in * cell;
  return {
      host.device(out * cy.tanh()), host.device(cy), host.device(at::cat({in, forget, cell, out}, 1))};
}

inline Tensors3 lstm_cell_backward(
    const std::optional<at::Tensor>& grad_hy_,
    const std::optional<at::Tensor>& grad_cy_,
    const at::Tensor& cx,
    const at::Tensor& cy,
    const at::Tensor& workspace,
    bool has_bias) {
  const auto grad_hy = or_undefined(grad_hy_), grad_cy = or_undefined(grad_cy_);
  if (!grad_hy.defined() && !grad_cy.defined()) {
    return {};
  }
  HostCall host(same_device("_thnn_fused_lstm_cell_backward", {grad_hy, grad_cy, cx, cy, workspace}));
  const auto part = host.host(workspace).chunk(4, 1);
  const auto &in = part[0], &forget = part[1], &cell = part[2], &out = part[3];
  const auto squashed = host.host(cy).tanh();
  auto grad_cell_state = grad_cy.defined() ? host.host(grad_cy) : at::zeros_like(squashed);
  auto grad_out = at::zeros_like(squashed);
  if (grad_hy.defined()) {
    const auto grad = host.host(grad_hy);
    grad_cell_state = grad_cell_state + grad * out * (1 - squashed * squashed);
    grad_out = grad * squashed * out * (1 - out);
  }
  const auto grad_gates = at::cat(
      {grad_cell_state * cell * in * (1 - in),
       grad_cell_state * host.host(cx) * forget * (1 - forget),
       grad_cell_state * in * (1 - cell * cell),
       grad_out},
      1);
  return {
      host.device(grad_gates),
      host.device(grad_cell_state * forget),
      has_bias ? host.device(grad_gates.sum(0)) : at::Tensor()};
}

// gates: (batch, 3 * hidden), in the order reset, update, new. The workspace keeps five parts for the backward: reset,
// update, new, the previous state, and the hidden share of the new gate.
inline Tensors2 gru_cell(
    const at::Tensor& input_gates,
    const at::Tensor& hidden_gates,
    const at::Tensor& hx,
    const std::optional<at::Tensor>& input_bias_,
    const std::optional<at::Tensor>& hidden_bias_) {
  const auto input_bias = or_undefined(input_bias_), hidden_bias = or_undefined(hidden_bias_);
  HostCall host(same_device("_thnn_fused_gru_cell", {input_gates, hidden_gates, hx, input_bias, hidden_bias}));
  const auto from_input = plus(host.host(input_gates), host.host(input_bias)).chunk(3, 1);
  const auto from_hidden = plus(host.host(hidden_gates), host.host(hidden_bias)).chunk(3, 1);
  const auto before = host.host(hx);
  const auto reset = (from_input[0] + from_hidden[0]).sigmoid(), update = (from_input[1] + from_hidden[1]).sigmoid();
  const auto fresh = (from_input[2] + reset * from_hidden[2]).tanh();
  return {
      host.device(fresh + update * (before - fresh)),
      host.device(at::cat({reset, update, fresh, before, from_hidden[2]}, 1))};
}

inline Tensors5 gru_cell_backward(const at::Tensor& grad_hy, const at::Tensor& workspace, bool has_bias) {
  HostCall host(same_device("_thnn_fused_gru_cell_backward", {grad_hy, workspace}));
  const auto part = host.host(workspace).chunk(5, 1);
  const auto &reset = part[0], &update = part[1], &fresh = part[2], &before = part[3], &hidden = part[4];
  const auto grad = host.host(grad_hy);
  const auto grad_update = grad * (before - fresh) * (1 - update) * update;
  const auto grad_fresh = grad * (1 - update) * (1 - fresh * fresh);
  const auto grad_reset = grad_fresh * hidden * (1 - reset) * reset;
  const auto grad_input_gates = at::cat({grad_reset, grad_update, grad_fresh}, 1);
  const auto grad_hidden_gates = at::cat({grad_reset, grad_update, grad_fresh * reset}, 1);
  return {
      host.device(grad_input_gates),
      host.device(grad_hidden_gates),
      host.device(grad * update),
      has_bias ? host.device(grad_input_gates.sum(0)) : at::Tensor(),
      has_bias ? host.device(grad_hidden_gates.sum(0)) : at::Tensor()};
}

// -- SyncBatchNorm --------------------------------------------------------------------------------------------

inline std::vector<int64_t> all_but_channels(const at::Tensor& input) {
  std::vector<int64_t> dims{0};
  for (int64_t dim = 2; dim < input.dim(); ++dim) {
    dims.push_back(dim);
  }
  return dims;
}

// A vector over the channels, shaped to broadcast over (batch, channels, ...).
inline at::Tensor over_channels(const at::Tensor& vector, const at::Tensor& like) {
  std::vector<int64_t> shape(like.dim(), 1);
  shape[1] = vector.numel();
  return vector.reshape(shape);
}

inline at::ScalarType statistics_dtype(const at::Tensor& input) {
  return at::toAccumulateType(input.scalar_type(), /*is_cuda=*/true);
}

inline Tensors2 batch_norm_stats(const at::Tensor& input_, double eps) {
  HostCall host(same_device("batch_norm_stats", {input_}));
  const auto input = host.host(input_).to(statistics_dtype(input_));
  const auto dims = all_but_channels(input);
  const auto mean = input.mean(dims);
  return {host.device(mean), host.device((input.var(dims, /*unbiased=*/false) + eps).rsqrt())};
}

inline at::Tensor batch_norm_elemt(
    const at::Tensor& input_,
    const std::optional<at::Tensor>& weight_,
    const std::optional<at::Tensor>& bias_,
    const at::Tensor& mean,
    const at::Tensor& invstd,
    double) {
  const auto weight = or_undefined(weight_), bias = or_undefined(bias_);
  HostCall host(same_device("batch_norm_elemt", {input_, weight, bias, mean, invstd}));
  const auto input = host.host(input_);
  auto result = (input - over_channels(host.host(mean), input)) * over_channels(host.host(invstd), input);
  if (weight.defined()) {
    result = result * over_channels(host.host(weight), input);
  }
  if (bias.defined()) {
    result = result + over_channels(host.host(bias), input);
  }
  return host.device(result.to(input.scalar_type()));
}

// mean, invstd: (ranks, channels), counts: (ranks,). Updates the running statistics in place.
inline Tensors2 batch_norm_gather_stats(
    const at::Tensor& input,
    const at::Tensor& mean_,
    const at::Tensor& invstd_,
    const std::optional<at::Tensor>& running_mean_,
    const std::optional<at::Tensor>& running_var_,
    double momentum,
    double eps,
    const at::Tensor& counts_) {
  const auto running_mean = or_undefined(running_mean_), running_var = or_undefined(running_var_);
  HostCall host(same_device(
      "batch_norm_gather_stats_with_counts", {input, mean_, invstd_, running_mean, running_var, counts_}));
  const auto means = host.host(mean_), counts = host.host(counts_).to(means.scalar_type()).unsqueeze(1);
  const auto total = counts.sum();
  const auto mean = (means * counts).sum(0) / total;
  const auto variances = host.host(invstd_).pow(-2) - eps;
  const auto variance = ((variances + (means - mean).square()) * counts).sum(0) / total;
  if (running_mean.defined()) {
    auto running = host.host(running_mean);
    running.mul_(1 - momentum).add_(mean, momentum);
  }
  if (running_var.defined()) {
    auto running = host.host(running_var);
    running.mul_(1 - momentum).add_(variance * (total / (total - 1)), momentum);
  }
  return {host.device(mean), host.device((variance + eps).rsqrt())};
}

inline Tensors4 batch_norm_backward_reduce(
    const at::Tensor& grad_output,
    const at::Tensor& input_,
    const at::Tensor& mean,
    const at::Tensor& invstd,
    const std::optional<at::Tensor>& weight_,
    bool input_g,
    bool weight_g,
    bool bias_g) {
  const auto weight = or_undefined(weight_);
  HostCall host(same_device("batch_norm_backward_reduce", {grad_output, input_, mean, invstd, weight}));
  const auto dtype = statistics_dtype(input_);
  const auto grad = host.host(grad_output).to(dtype), input = host.host(input_).to(dtype);
  const auto dims = all_but_channels(input);
  const auto sum_dy = grad.sum(dims);
  const auto sum_dy_xmu = (grad * (input - over_channels(host.host(mean), input))).sum(dims);
  const auto parameter_dtype = weight.defined() ? weight.scalar_type() : dtype;
  const auto grad_weight = (sum_dy_xmu * host.host(invstd)).to(parameter_dtype);
  const auto grad_bias = sum_dy.to(parameter_dtype, /*non_blocking=*/false, /*copy=*/true);
  return {
      input_g ? host.device(sum_dy) : at::Tensor(),
      input_g ? host.device(sum_dy_xmu) : at::Tensor(),
      weight_g ? host.device(grad_weight) : at::Tensor(),
      bias_g ? host.device(grad_bias) : at::Tensor()};
}

inline at::Tensor batch_norm_backward_elemt(
    const at::Tensor& grad_output,
    const at::Tensor& input_,
    const at::Tensor& mean_,
    const at::Tensor& invstd_,
    const std::optional<at::Tensor>& weight_,
    const at::Tensor& sum_dy,
    const at::Tensor& sum_dy_xmu,
    const at::Tensor& count) {
  const auto weight = or_undefined(weight_);
  HostCall host(same_device(
      "batch_norm_backward_elemt", {grad_output, input_, mean_, invstd_, weight, sum_dy, sum_dy_xmu, count}));
  const auto dtype = statistics_dtype(input_);
  const auto grad = host.host(grad_output).to(dtype), input = host.host(input_).to(dtype);
  const auto total = host.host(count).sum().to(dtype);
  const auto invstd = over_channels(host.host(invstd_), input);
  const auto mean_dy = over_channels(host.host(sum_dy) / total, input);
  const auto mean_dy_xmu = over_channels(host.host(sum_dy_xmu) / total, input);
  const auto centred = input - over_channels(host.host(mean_), input);
  auto result = (grad - mean_dy - centred * invstd * invstd * mean_dy_xmu) * invstd;
  if (weight.defined()) {
    result = result * over_channels(host.host(weight).to(dtype), input);
  }
  return host.device(result.to(input_.scalar_type()));
}

} // namespace sim
