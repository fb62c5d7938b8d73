// The device's operations: the host's kernels, behind the checks and the order of a device of its own.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <limits>

#include "guard.h"

namespace simgpu {

using at::Tensor;
using Sizes = c10::SymIntArrayRef;

// How long a result is on its way, in microseconds; until then its memory holds garbage.
inline std::atomic<int64_t> late_copies{0};   // copies that do not block the host
inline std::atomic<int64_t> late_kernels{0};  // everything else
inline void pass(int64_t microseconds) { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); }

class OnDevice {
 public:
  explicit OnDevice(int device) : before_(current_device) { current_device = device; }
  ~OnDevice() { current_device = before_; }

 private:
  int before_;
};

inline StreamKey stream_of(int device) { return {device, current_streams[device]}; }

// The same elements as a tensor of the host, which does not keep their memory.
inline Tensor on_host(const Tensor& tensor) {
  if (!tensor.is_privateuseone()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

inline void spoil(const Tensor& host) {
  if (host.is_floating_point() || host.is_complex()) host.fill_(std::numeric_limits<double>::quiet_NaN());
  else host.fill_(host.scalar_type() == at::kBool ? 1 : 0x5B);
}

// Keeps what asynchronous work touches: a block of the device knows its users, the host's memory is held.
class InUse {
 public:
  InUse(const Tensor& tensor, int64_t stream) : stream_(stream) {
    if (tensor.is_privateuseone()) block_ = static_cast<Block*>(tensor.storage().data_ptr().get_context());
    else storage_ = tensor.storage();
    if (block_) begin_use(block_, stream_);
  }
  void over() {
    if (block_) end_use(block_, stream_);
    storage_ = c10::Storage();
  }

 private:
  int64_t stream_;
  Block* block_ = nullptr;
  c10::Storage storage_;
};

// --- memory and views

inline int device_of(std::optional<c10::Device> device) {
  return checked_index(device && device->has_index() ? device->index() : current_device);
}
inline const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

inline Tensor empty(Sizes size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<c10::Device> device,
                    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice on(device_of(device));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_memory, KEYS, c10::dtype_or_default(dtype), format);
}
inline Tensor empty_strided(Sizes size, Sizes stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                            std::optional<c10::Device> device, std::optional<bool>) {
  OnDevice on(device_of(device));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_memory, KEYS,
                                           c10::dtype_or_default(dtype));
}
inline const Tensor& resize(const Tensor& self, Sizes size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  size_t needed = (impl->storage_offset() + impl->numel()) * impl->itemsize();
  auto storage = impl->storage();
  if (storage.nbytes() < needed) {
    OnDevice on(self.get_device());
    auto larger = device_memory.allocate(needed);
    if (storage.nbytes()) std::memcpy(larger.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(larger));
    storage.set_nbytes(needed);
  }
  return self;
}
inline Tensor view(const Tensor& self, Sizes size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }
inline Tensor as_strided(const Tensor& self, Sizes size, Sizes stride, std::optional<c10::SymInt> offset) {
  auto start = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}
inline Tensor reshape_alias(const Tensor& self, Sizes size, Sizes stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
inline Tensor& set_storage(Tensor& self, at::Storage source, c10::SymInt offset, Sizes size, Sizes stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset.expect_int());
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return self;
}
inline Tensor& set_whole(Tensor& self, at::Storage source) {
  c10::SymInt count = source.nbytes() / self.itemsize(), one = 1;
  return set_storage(self, std::move(source), 0, Sizes(&count, 1), Sizes(&one, 1));
}
inline void record_stream(Tensor& self, c10::Stream stream) {
  device_memory.recordStream(self.storage().data_ptr(), stream);
}

// --- copies

// A copy that its stream carries out later: neither side may be touched meanwhile. Pageable memory of the
// host is read at once, and written before the host goes on, as CUDA does.
inline void copy_later(const Tensor& from, const Tensor& to, StreamKey stream) {
  bool staged = from.is_cpu() && !from.is_pinned();
  Tensor source = staged ? from.clone() : from;
  InUse reads(source, stream.second), writes(to, stream.second);
  Tensor host_to = at::from_blob(to.data_ptr(), to.sizes(), to.strides(), to.options().device(at::kCPU).pinned_memory(false));
  Tensor host_from = at::from_blob(source.data_ptr(), source.sizes(), source.strides(),
                                   source.options().device(at::kCPU).pinned_memory(false));
  enqueue(stream, [host_from, host_to, reads, writes]() mutable {
    if (late_copies) {
      spoil(host_to);
      pass(late_copies);
    }
    host_to.copy_(host_from);
    reads.over();
    writes.over();
  });
}
inline Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  touch();
  auto stream = stream_of(self.is_privateuseone() ? self.get_device() : to.get_device());
  bool between = self.is_privateuseone() && to.is_privateuseone();
  if (non_blocking && !between && (self.is_cpu() || to.is_pinned())) {
    copy_later(self, to, stream);
    return to;
  }
  if (between && to.get_device() != self.get_device()) synchronize(stream_of(to.get_device()));
  Turn turn(stream);
  on_host(to).copy_(on_host(self));
  return to;
}
inline Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  return copy_from(self, to, false);
}
inline at::Scalar local_scalar(const Tensor& self) {
  Turn turn(stream_of(self.get_device()));
  return on_host(self).item();
}

// --- kernels

// What a kernel wrote arrives later; until then there is garbage in its place.
inline void arrive_late(Turn& turn, const std::vector<Tensor>& written, int64_t stream) {
  if (!late_kernels || !turn.outermost()) return;
  std::vector<std::tuple<Tensor, Tensor, InUse>> results;
  for (const Tensor& tensor : written) {
    if (!tensor.defined() || !tensor.is_privateuseone() || !tensor.numel()) continue;
    Tensor host = on_host(tensor);
    results.emplace_back(host, host.clone(), InUse(tensor, stream));
    spoil(host);
  }
  if (results.empty()) return;
  turn.leave_late([results]() mutable {
    pass(late_kernels);
    for (auto& [host, result, in_use] : results) {
      host.copy_(result);
      in_use.over();
    }
  });
}

inline void collect(const c10::IValue& value, std::vector<Tensor>& found) {
  if (value.isTensor()) found.push_back(value.toTensor());
  else if (value.isList())
    for (const c10::IValue& part : value.toListRef()) collect(part, found);
}

// The device of all arguments; a number of the host may take part, and so may indices, as on CUDA.
inline int common_device(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  bool indexes = schema.name().find("index") != std::string::npos;
  std::vector<Tensor> tensors;
  for (const auto& value : torch::jit::last(stack, schema.arguments().size()))
    if (value.isTensor() || value.isTensorList() || (value.isList() && !indexes)) collect(value, tensors);
  std::optional<c10::Device> first;
  for (const Tensor& tensor : tensors)
    if (tensor.defined() && tensor.is_privateuseone() && !first) first = tensor.device();
  for (const Tensor& tensor : tensors) {
    if (!tensor.defined() || !first || tensor.device() == *first || (tensor.is_cpu() && !tensor.dim())) continue;
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", *first, " and ",
                tensor.device(), "! (", schema.name(), ")");
  }
  return first ? first->index() : current_device;
}

// The host's kernels draw from the host's generators.
inline void give_generator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  bool takes = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto type = arguments[i].type();
    auto optional = type->cast<c10::OptionalType>();
    if ((optional ? optional->getElementType() : type)->kind() != c10::TypeKind::GeneratorType) continue;
    takes = true;
    auto& value = (*stack)[stack->size() - arguments.size() + i];
    at::Generator given = value.isGenerator() ? value.toGenerator() : generator_of(current_device);
    if (given.device().type() != DEVICE) TORCH_CHECK(false, "Expected a '", DEVICE, "' device type for generator but found '", given.device().type(), "'");
    value = static_cast<Generator*>(given.unsafeGetGeneratorImpl())->host;
  }
  TORCH_CHECK(takes || !op.hasTag(at::Tag::nondeterministic_seeded), "simgpu draws no numbers in ", op.schema().name());
}

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  touch();
  const auto& schema = op.schema();
  OnDevice on(common_device(schema, *stack));
  give_generator(op, stack);
  std::vector<Tensor> written;
  auto given = torch::jit::last(*stack, schema.arguments().size());
  for (size_t i = 0; i < schema.arguments().size(); ++i)
    if (auto* alias = schema.arguments()[i].alias_info(); alias && alias->isWrite()) collect(given[i], written);
  Turn turn(current_stream());
  at::native::cpu_fallback(op, stack);
  if (written.empty())
    for (const auto& value : torch::jit::last(*stack, schema.returns().size())) collect(value, written);
  arrive_late(turn, written, current_stream().second);
}

inline std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if ((train.has_value() && !*train) || !input.numel()) return {input.clone(), at::ones_like(input, at::kBool)};
  double kept = 1.0 - p;
  Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(kept);
  return {input.mul(mask).mul(kept > 0.0 ? 1.0 / kept : 0.0), mask};
}
inline int64_t sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                          std::optional<double>, bool) {
  return 0;  // made of plain operations
}
inline void check_same(const Tensor& a, const Tensor& b) {
  TORCH_CHECK(a.device() == b.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
              a.device(), " and ", b.device(), "!");
}
// The fallback would resize a result that it made too small, and warn of that.
inline Tensor mse_loss(const Tensor& input, const Tensor& target, int64_t reduction) {
  check_same(input, target);
  OnDevice on(input.get_device());
  Turn turn(current_stream());
  Tensor result = at::mse_loss(on_host(input), on_host(target), reduction).to(input.device());
  arrive_late(turn, {result}, current_stream().second);
  return result;
}
inline Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, at::IntArrayRef stride,
                          at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
                          int64_t groups) {
  check_same(input, weight);
  OnDevice on(input.get_device());
  Turn turn(current_stream());
  auto host_bias = bias && bias->defined() ? std::optional<Tensor>(on_host(*bias)) : std::nullopt;
  Tensor result = at::convolution(on_host(input), on_host(weight), host_bias, stride, padding, dilation, transposed, output_padding, groups)
                      .to(input.device());
  arrive_late(turn, {result}, current_stream().second);
  return result;
}
inline std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                               at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                                                               bool transposed, at::IntArrayRef output_padding, int64_t groups,
                                                               std::array<bool, 3> mask) {
  OnDevice on(input.get_device());
  Turn turn(current_stream());
  std::vector<int64_t> bias_size{weight.size(transposed ? 1 : 0) * (transposed ? groups : 1)};
  auto bias = mask[2] ? at::OptionalIntArrayRef(bias_size) : std::nullopt;
  auto [a, b, c] = at::convolution_backward(on_host(grad), on_host(input), on_host(weight), bias, stride, padding, dilation, transposed,
                                            output_padding, groups, mask);
  auto back = [&](const Tensor& host) { return host.defined() ? host.to(input.device()) : host; };
  std::tuple<Tensor, Tensor, Tensor> results{back(a), back(b), back(c)};
  arrive_late(turn, {std::get<0>(results), std::get<1>(results), std::get<2>(results)}, current_stream().second);
  return results;
}

}  // namespace simgpu
