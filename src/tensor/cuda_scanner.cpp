#include "tensor/cuda_scanner.hpp"

#ifdef NANLOCATOR_CUDA

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include <string>

#include "nanlocator/error.hpp"

namespace nanlocator::inline tensor_room {
namespace {

class TorchMemory final : public DeviceMemory {
 public:
  void* allocate(std::size_t bytes) override {
    try {
      const auto stream = c10::cuda::getCurrentCUDAStream();
      void* const memory =
          c10::cuda::CUDACachingAllocator::raw_alloc_with_stream(bytes, stream.stream());
      // The block may have been another tensor's, whose kernels still wait on this stream.
      stream.synchronize();
      return memory;
    } catch (const c10::Error& error) {
      throw CudaError("no device memory for " + std::to_string(bytes) +
                      " bytes of a scan's slots and tables: " + error.what_without_backtrace());
    }
  }

  void free(void* memory) noexcept override {
    try {
      c10::cuda::CUDACachingAllocator::raw_delete(memory);
    } catch (const c10::Error&) {  // the process ends, and CUDA ended before it
    }
  }
};

}  // namespace

std::unique_ptr<SlotScanner> make_torch_cuda_scanner(at::Device device) {
  return make_cuda_slot_scanner(device.index(), std::make_shared<TorchMemory>());
}

}  // namespace nanlocator::inline tensor_room

#endif
