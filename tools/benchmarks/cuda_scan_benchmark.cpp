// Compares the CUDA scan with memory bandwidth: 1e9 elements in 400 tensors, per dtype, beside a
// cudaMemcpy with the same traffic.
//
//   cuda_scan_benchmark [--benchmark_filter=bfloat16]
//
// "bytes_per_second" counts bytes read for the scan, and bytes read plus bytes written for the
// copy: both are memory traffic, and a scan at the rate of the copy is as fast as the memory
// allows. Times are from CUDA events around one plan.
#include <benchmark/benchmark.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "nanlocator/scan/slot_scanner.hpp"

namespace {

using nanlocator::DType;

constexpr std::int64_t kElements = 1'000'000'000;
constexpr int kTensors = 400;

void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", call, cudaGetErrorString(status));
  std::exit(2);
}

class DeviceBuffer {
 public:
  explicit DeviceBuffer(std::size_t bytes) : bytes_(bytes) {
    check(cudaMalloc(&memory_, bytes), "cudaMalloc");
  }
  ~DeviceBuffer() { (void)cudaFree(memory_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  [[nodiscard]] unsigned char* data() const { return static_cast<unsigned char*>(memory_); }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

 private:
  void* memory_ = nullptr;
  std::size_t bytes_;
};

class Stopwatch {
 public:
  Stopwatch() {
    check(cudaEventCreate(&start_), "cudaEventCreate");
    check(cudaEventCreate(&stop_), "cudaEventCreate");
  }
  ~Stopwatch() {
    (void)cudaEventDestroy(start_);
    (void)cudaEventDestroy(stop_);
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  template <class Work>
  double seconds(Work work) {
    check(cudaEventRecord(start_), "cudaEventRecord");
    work();
    check(cudaEventRecord(stop_), "cudaEventRecord");
    check(cudaEventSynchronize(stop_), "cudaEventSynchronize");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, start_, stop_), "cudaEventElapsedTime");
    return milliseconds * 1e-3;
  }

 private:
  cudaEvent_t start_ = nullptr;
  cudaEvent_t stop_ = nullptr;
};

template <class Work>
void measure(benchmark::State& state, std::int64_t traffic, Work work) {
  Stopwatch stopwatch;
  for (int i = 0; i < 3; ++i) (void)stopwatch.seconds(work);
  for (auto _ : state) state.SetIterationTime(stopwatch.seconds(work));
  state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations()) * traffic);
}

/// Tensors that divide the buffer equally, each starting at a multiple of 256 bytes, as Torch's do.
std::vector<nanlocator::TensorView> divide(const DeviceBuffer& buffer, DType dtype) {
  const std::size_t size = nanlocator::size_of(dtype);
  const std::size_t bytes = buffer.bytes() / kTensors / 256 * 256;
  std::vector<nanlocator::TensorView> views(kTensors);
  for (int i = 0; i < kTensors; ++i) {
    views[i].data = buffer.data() + i * bytes;
    views[i].numel = static_cast<std::int64_t>(bytes / size);
    views[i].dtype = dtype;
  }
  return views;
}

/// Random bytes below 0x40, which are finite numbers below two in all six formats.
void fill_with_numbers(const DeviceBuffer& buffer) {
  std::vector<std::uint32_t> words(1 << 20);
  std::mt19937 generator(0);
  for (std::uint32_t& word : words) word = static_cast<std::uint32_t>(generator()) & 0x3f3f3f3fu;
  const std::size_t size = words.size() * sizeof(std::uint32_t);
  for (std::size_t done = 0; done < buffer.bytes(); done += size) {
    check(cudaMemcpy(buffer.data() + done, words.data(), std::min(size, buffer.bytes() - done),
                     cudaMemcpyHostToDevice),
          "cudaMemcpy");
  }
}

void scan(benchmark::State& state, DType dtype) {
  const DeviceBuffer buffer(kElements * nanlocator::size_of(dtype));
  fill_with_numbers(buffer);
  const auto scanner = nanlocator::make_cuda_slot_scanner(0, nanlocator::make_cuda_memory());
  const std::vector<nanlocator::TensorView> views = divide(buffer, dtype);
  const auto plan = scanner->plan(views, 0);
  const auto traffic =
      static_cast<std::int64_t>(views.size() * views[0].numel * nanlocator::size_of(dtype));
  measure(state, traffic, [&] { scanner->enqueue(*plan, {nullptr}); });
  scanner->enqueue_readback({nullptr});
  if (!scanner->wait()[kTensors - 1].is_finite()) state.SkipWithError("the scan found a NaN");
}

void copy(benchmark::State& state, DType dtype) {
  const DeviceBuffer from(kElements * nanlocator::size_of(dtype) / 2);
  const DeviceBuffer to(from.bytes());
  measure(state, static_cast<std::int64_t>(2 * from.bytes()), [&] {
    check(cudaMemcpyAsync(to.data(), from.data(), from.bytes(), cudaMemcpyDeviceToDevice),
          "cudaMemcpyAsync");
  });
}

}  // namespace

int main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "cuda_scan_benchmark needs a CUDA device, and this process sees none\n");
    return 2;
  }
  for (int i = 0; i < nanlocator::kDTypeCount; ++i) {
    const auto dtype = static_cast<DType>(i);
    const std::string name(nanlocator::name_of(dtype));
    for (const auto& [kind, function] : {std::pair{"scan/", &scan}, {"copy/", &copy}}) {
      benchmark::RegisterBenchmark((kind + name).c_str(), function, dtype)
          ->UseManualTime()
          ->Unit(benchmark::kMillisecond);
    }
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
