// Which of torch's devices this library simulates: one source, two flavours.
//
// "sim" is torch's PrivateUse1, renamed, with as many indices as asked. "hpu" is torch's in-tree HPU device, because
// the vendor's bridge uses that one; it has one index per process, as the bridge has.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DispatchKeySet.h>

#ifdef TORCHHAL_SIM_HPU
#define SIM_KEY HPU
#define SIM_AUTOCAST_KEY AutocastHPU
#define SIM_SPARSE_KEY SparseHPU
#define SIM_SPARSE_CSR_KEY SparseCsrHPU
#define SIM_QUANTIZED_KEY QuantizedHPU
#define SIM_NAMESPACE simhpu
#define SIM_NAME "hpu"
#else
#define SIM_KEY PrivateUse1
#define SIM_AUTOCAST_KEY AutocastPrivateUse1
#define SIM_SPARSE_KEY SparsePrivateUse1
#define SIM_SPARSE_CSR_KEY SparseCsrPrivateUse1
#define SIM_QUANTIZED_KEY QuantizedPrivateUse1
#define SIM_NAMESPACE simdev
#define SIM_NAME "sim"
#endif

namespace sim {

constexpr c10::DeviceType kType = c10::DeviceType::SIM_KEY;
constexpr c10::DispatchKey kKey = c10::DispatchKey::SIM_KEY;
constexpr int kMaxDevices = 64;

} // namespace sim
