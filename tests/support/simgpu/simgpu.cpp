// `simgpu`: a device type of its own (torch's PrivateUse1) whose memory and kernels are the host's. For tests.
#include <ATen/autocast_mode.h>

#include "kernels.h"

using namespace simgpu;

REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &device_memory)
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(simgpu::empty));
  m.impl("empty_strided", TORCH_FN(simgpu::empty_strided));
  m.impl("resize_", TORCH_FN(simgpu::resize));
  m.impl("view", TORCH_FN(simgpu::view));
  m.impl("as_strided", TORCH_FN(simgpu::as_strided));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Storage", TORCH_FN(set_whole));
  m.impl("record_stream", TORCH_FN(simgpu::record_stream));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  m.impl("native_dropout", TORCH_FN(simgpu::native_dropout));
  m.impl("mse_loss", TORCH_FN(simgpu::mse_loss));
  m.impl("_fused_sdp_choice", TORCH_FN(sdp_choice));
  m.impl("convolution_overrideable", TORCH_FN(simgpu::convolution));
  m.impl("convolution_backward_overrideable", TORCH_FN(simgpu::convolution_backward));
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
  KERNEL_PRIVATEUSEONE(nll_loss, fp32)
}

TORCH_LIBRARY(simgpu, m) {
  m.def("install() -> ()", [] {
    static auto* hooks = new Hooks;
    at::RegisterPrivateUse1HooksInterface(hooks);
  });
  m.def("device_count() -> int", [] { return int64_t(device_count()); });
  m.def("in_use() -> bool", [] { return bool(in_use); });
  m.def("forked_after_use() -> bool", [] { return forked_after_use; });
  m.def("new_gate() -> int", &new_gate);
  m.def("open_gate(int gate) -> ()", &open_gate);
  m.def("block_stream(int device, int stream, int gate) -> ()",
        [](int64_t device, int64_t stream, int64_t gate) { block_stream({checked_index(device), stream}, gate); });
  m.def("set_late(int copies, int kernels) -> ()", [](int64_t copies, int64_t kernels) {
    late_copies = copies;
    late_kernels = kernels;
  });
  m.def("host_view(Tensor t) -> Tensor", [](const Tensor& tensor) { return on_host(tensor); });
  m.def("spoil(Tensor t) -> ()", [](const Tensor& tensor) { spoil(on_host(tensor)); });
  m.def("get_rng_state(int device) -> Tensor", [](int64_t device) { return generator_of(device).get_state(); });
  m.def("set_rng_state(int device, Tensor state) -> ()",
        [](int64_t device, const Tensor& state) { at::Generator(generator_of(device)).set_state(state); });
  m.def("manual_seed(int device, int seed) -> ()",
        [](int64_t device, int64_t seed) { at::Generator(generator_of(device)).set_current_seed(seed); });
  m.def("initial_seed(int device) -> int", [](int64_t device) { return int64_t(generator_of(device).current_seed()); });
}
