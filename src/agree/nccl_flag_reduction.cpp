#include "nanlocator/agree/nccl_flag_reduction.hpp"

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <nccl.h>

#include <chrono>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>

#include "nanlocator/error.hpp"

namespace nanlocator::inline agree_room {
namespace {

/// For a nonblocking communicator: the time in which NCCL must accept the launch.
constexpr std::chrono::seconds kLaunchPatience{60};
constexpr std::chrono::milliseconds kLaunchPause{1};

void require(ncclResult_t result, ncclComm_t communicator, const char* call) {
  if (result == ncclSuccess) return;
  throw std::runtime_error(std::string(call) + ": NCCL: " + ncclGetErrorString(result) + "; " +
                           ncclGetLastError(communicator));
}

template <typename Query>
int asked(ncclComm_t communicator, const char* call, Query query) {
  int value = 0;
  require(query(communicator, &value), communicator, call);
  return value;
}

class NcclReduction : public FlagReduction {
 public:
  NcclReduction(ncclComm_t communicator, cudaStream_t stream)
      : communicator_(communicator),
        stream_(stream),
        rank_(asked(communicator, "ncclCommUserRank", ncclCommUserRank)),
        size_(asked(communicator, "ncclCommCount", ncclCommCount)) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool reduces_on(at::DeviceType device) const override { return device == at::kCUDA; }

  void start(const at::Tensor& flag) override {
    if (!flag.is_cuda()) return launch(flag, nullptr);  // NCCL reports the error
    const c10::cuda::CUDAGuard guard(flag.device());
    const auto current = c10::cuda::getCurrentCUDAStream();
    const auto stream = stream_on(flag.device());
    if (stream != current) {
      ready_.record(current);
      ready_.block(stream);
      c10::cuda::CUDACachingAllocator::recordStream(flag.storage().data_ptr(), stream);
    }
    launch(flag, stream.stream());
    done_.record(stream);
    device_ = flag.device();
  }

  void finish() override {
    check();
    if (device_) done_.block(c10::cuda::getCurrentCUDAStream(device_->index()));
  }

  void check() override {
    ncclResult_t state = ncclSuccess;
    require(ncclCommGetAsyncError(communicator_, &state), communicator_, "ncclCommGetAsyncError");
    if (state != ncclInProgress) require(state, communicator_, "ncclAllReduce");
  }

  void abort() noexcept override {}  // the communicator is the caller's

 private:
  c10::cuda::CUDAStream stream_on(at::Device device) {
    if (stream_ != nullptr) return c10::cuda::getStreamFromExternal(stream_, device.index());
    if (!own_stream_) own_stream_ = c10::cuda::getStreamFromPool(false, device.index());
    return *own_stream_;
  }

  void launch(const at::Tensor& flag, cudaStream_t stream) {
    auto* const value = flag.mutable_data_ptr<std::int32_t>();
    auto state = ncclAllReduce(value, value, 1, ncclInt32, ncclMax, communicator_, stream);
    const auto deadline = std::chrono::steady_clock::now() + kLaunchPatience;
    while (state == ncclInProgress && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(kLaunchPause);
      require(ncclCommGetAsyncError(communicator_, &state), communicator_, "ncclCommGetAsyncError");
    }
    require(state, communicator_, "ncclAllReduce");
  }

  ncclComm_t communicator_;
  cudaStream_t stream_;  // the caller's, or null
  int rank_;
  int size_;
  std::optional<c10::cuda::CUDAStream> own_stream_;
  at::cuda::CUDAEvent ready_, done_;
  std::optional<at::Device> device_;  // of the latest flag
};

}  // namespace

std::unique_ptr<FlagReduction> flag_reduction_over_nccl(ncclComm* communicator,
                                                        CUstream_st* stream) {
  if (communicator == nullptr) {
    throw UsageError(
        "flag_reduction_over_nccl: the communicator is null. Pass one made by ncclCommInitRank.");
  }
  try {
    return std::make_unique<NcclReduction>(communicator, stream);
  } catch (const std::runtime_error& error) {
    throw UsageError(std::string("flag_reduction_over_nccl: this is not a communicator: ") +
                     error.what());
  }
}

}  // namespace nanlocator::inline agree_room
