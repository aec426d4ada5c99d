// Memory, streams, events and graphs of cuda_runtime_api.h.
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "cuda_emulation.hpp"
#include "cuda_runtime_api.h"

struct EmulatedEvent {
  std::mutex mutex;
  std::condition_variable changed;
  int pending = 0;  // records that the streams have not reached

  void change(int by) {
    const std::lock_guard lock(mutex);
    pending += by;
    changed.notify_all();
  }
};

struct Work {
  std::function<void()> run;
  EmulatedEvent* event = nullptr;  // recorded after it
};

struct EmulatedGraph {
  std::vector<Work> work;
};

struct EmulatedStream {
 public:
  EmulatedStream() : thread_([this] { work_until_stopped(); }) {}
  ~EmulatedStream() {
    {
      const std::lock_guard lock(mutex_);
      stopped_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }

  void add(Work work) {
    if (capture) {
      capture->work.push_back(std::move(work));
      return;
    }
    if (work.event != nullptr) work.event->change(+1);
    const std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
    changed_.notify_all();
  }

  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return work_.empty(); });
  }

  std::unique_ptr<EmulatedGraph> capture;

 private:
  void work_until_stopped() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return stopped_ || !work_.empty(); });
      if (work_.empty()) return;
      const Work work = work_.front();
      lock.unlock();
      if (work.run) work.run();
      if (work.event != nullptr) work.event->change(-1);
      lock.lock();
      work_.pop_front();
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> work_;  // the first one is running
  bool stopped_ = false;
  std::thread thread_;
};

namespace {

constexpr int kDevices = 2;
constexpr std::size_t kDeviceBytes = std::size_t{1} << 28;  // limit of one allocation
thread_local int current_device = 0;

struct Allocation {
  std::size_t bytes;
  cudaPointerAttributes attributes;
};
std::mutex allocations_mutex;
std::map<const char*, Allocation> allocations;

/// Aligned like CUDA's, of exactly `bytes`, so that the address sanitizer catches an overrun of one
/// byte.
cudaError_t allocate(void** memory, std::size_t bytes, cudaMemoryType type) {
  *memory = nullptr;
  if (bytes == 0) return cudaSuccess;
  if (bytes > kDeviceBytes || posix_memalign(memory, 256, bytes) != 0) {
    return cudaErrorMemoryAllocation;
  }
  std::memset(*memory, 0xa5, bytes);
  const std::lock_guard lock(allocations_mutex);
  allocations[static_cast<char*>(*memory)] = {bytes, {type, current_device}};
  return cudaSuccess;
}

void release(void* memory) {
  const std::lock_guard lock(allocations_mutex);
  allocations.erase(static_cast<char*>(memory));
  std::free(memory);
}

std::mutex streams_mutex;
std::set<EmulatedStream*> streams;

EmulatedStream& stream_of(cudaStream_t handle) {
  static EmulatedStream default_stream;
  return handle != nullptr ? *handle : default_stream;
}

}  // namespace

namespace cuda_emulation {

void launch(std::function<void()> kernel, unsigned int grid, unsigned int threads,
            cudaStream_t stream) {
  stream_of(stream).add({[kernel, grid, threads] { run(kernel, grid, threads); }});
}

}  // namespace cuda_emulation

cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaSuccess ? "cudaSuccess" : "cudaError";
}
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "an error of the emulation";
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = kDevices;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kDevices) return cudaErrorInvalidDevice;
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = cuda_emulation::kMultiprocessors;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  stream_of(nullptr).wait();
  const std::lock_guard lock(streams_mutex);
  for (EmulatedStream* stream : streams) stream->wait();
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  return allocate(memory, bytes, cudaMemoryTypeDevice);
}
cudaError_t cudaFree(void* memory) {
  (void)cudaDeviceSynchronize();
  release(memory);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned int) {
  return allocate(memory, bytes, cudaMemoryTypeHost);
}
cudaError_t cudaFreeHost(void* memory) {
  return cudaFree(memory);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  *attributes = {cudaMemoryTypeUnregistered, -1};
  const std::lock_guard lock(allocations_mutex);
  const auto* const place = static_cast<const char*>(address);
  auto next = allocations.upper_bound(place);
  if (next == allocations.begin()) return cudaSuccess;
  const auto& [begin, allocation] = *--next;
  if (place < begin + allocation.bytes) *attributes = allocation.attributes;
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  stream_of(stream).add({[=] {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }});
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  (void)cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  return cudaStreamSynchronize(nullptr);
}
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  stream_of(stream).add({[=] { std::memset(to, value, bytes); }});
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, std::size_t bytes) {
  return cudaMemsetAsync(to, value, bytes, nullptr);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int) {
  *stream = new EmulatedStream;
  const std::lock_guard lock(streams_mutex);
  streams.insert(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  {
    const std::lock_guard lock(streams_mutex);
    streams.erase(stream);
  }
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  stream_of(stream).wait();
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  *event = new EmulatedEvent;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  (void)cudaEventSynchronize(event);
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int flags) {
  const bool captured = stream_of(stream).capture != nullptr;
  if (captured != (flags == cudaEventRecordExternal)) return cudaErrorInvalidValue;
  stream_of(stream).add({{}, event});
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const std::lock_guard lock(event->mutex);
  return event->pending == 0 ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  std::unique_lock lock(event->mutex);
  event->changed.wait(lock, [&] { return event->pending == 0; });
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = stream_of(stream).capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  stream->capture = std::make_unique<EmulatedGraph>();
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = stream->capture.release();
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                 unsigned long long) {
  *executable = new EmulatedGraph(*graph);
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  for (const Work& work : executable->work) stream_of(stream).add(work);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete executable;
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
