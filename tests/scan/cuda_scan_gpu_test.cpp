// Tests of the CUDA slot scanner. Built twice: for a device, without which every test is skipped,
// and for the host with the kernels emulated (cuda_emulation/cuda_emulation.hpp), under the
// sanitizers.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "nanlocator/error.hpp"
#include "nanlocator/scan/slot_scanner.hpp"
#include "scan/cuda_test_tensors.hpp"
#include "scan/reference_scan.hpp"

namespace nanlocator::testing {
namespace {

#ifdef NANLOCATOR_EMULATED_CUDA_ARCH  // an element takes 100 ns there
constexpr std::int64_t kLargeNumel = 150'000;
constexpr int kManyRepeats = 4;
#else
constexpr std::int64_t kLargeNumel = 3'000'000;
constexpr int kManyRepeats = 20;
#endif

void succeeded(cudaError_t status) {
  ASSERT_EQ(status, cudaSuccess) << cudaGetErrorString(status);
}

/// A scan adds squares in another order than the reference; all else must be equal.
void expect_as_reference(const TensorView& on_host, const TensorStats& stats) {
  expect_stats(stats, reference_scan(on_host), on_host.dtype);
}

/// A copy of a RawTensor in device memory, at the same offset from a 16-byte boundary.
class DeviceTensor {
 public:
  explicit DeviceTensor(const RawTensor& tensor) : view_(tensor.view()) {
    const std::size_t offset = reinterpret_cast<std::uintptr_t>(tensor.data()) % 16;
    succeeded(cudaMalloc(&memory_, std::max<std::size_t>(offset + tensor.bytes(), 1)));
    auto* const data = static_cast<unsigned char*>(memory_) + offset;
    succeeded(cudaMemcpy(data, tensor.data(), tensor.bytes(), cudaMemcpyHostToDevice));
    succeeded(cudaDeviceSynchronize());  // the tests' stream does not wait for the default stream
    view_.data = data;
  }
  ~DeviceTensor() { (void)cudaFree(memory_); }
  DeviceTensor(const DeviceTensor&) = delete;
  DeviceTensor& operator=(const DeviceTensor&) = delete;

  [[nodiscard]] const TensorView& view() const { return view_; }
  void write(std::int64_t index, std::uint64_t bits) const {
    const std::size_t size = size_of(view_.dtype);
    auto* const data = static_cast<unsigned char*>(const_cast<void*>(view_.data));
    succeeded(cudaMemcpy(data + index * size, &bits, size, cudaMemcpyHostToDevice));
    succeeded(cudaDeviceSynchronize());
  }

 private:
  void* memory_ = nullptr;
  TensorView view_;
};

class CudaScan : public ::testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
      GTEST_SKIP() << "no CUDA device";
    }
    scanner_ = make_cuda_slot_scanner(0, make_cuda_memory());
    succeeded(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  void TearDown() override {
    if (stream_ != nullptr) succeeded(cudaStreamDestroy(stream_));
  }

  [[nodiscard]] StreamHandle stream() const { return {stream_}; }

  std::vector<TensorStats> scan(const ScanPlan& plan) {
    scanner_->enqueue(plan, stream());
    scanner_->enqueue_readback(stream());
    const auto slots = scanner_->wait();
    const auto first = slots.begin() + plan.first_slot();
    return {first, first + static_cast<std::ptrdiff_t>(plan.tensors().size())};
  }
  std::vector<TensorStats> scan(std::vector<TensorView> views) {
    return scan(*scanner_->plan(std::move(views), 0));
  }
  TensorStats scan(const RawTensor& tensor) {
    const DeviceTensor device(tensor);
    return scan(std::vector{device.view()})[0];
  }
  std::int32_t flag() {
    std::int32_t value = -1;
    succeeded(cudaMemcpyAsync(&value, scanner_->bad_flag(), sizeof(value), cudaMemcpyDeviceToHost,
                              stream_));
    succeeded(cudaStreamSynchronize(stream_));
    return value;
  }

  std::unique_ptr<SlotScanner> scanner_;
  cudaStream_t stream_ = nullptr;
};

class CudaScanOfDType : public CudaScan, public ::testing::WithParamInterface<DType> {};
INSTANTIATE_TEST_SUITE_P(AllDTypes, CudaScanOfDType, ::testing::ValuesIn(kAllDTypes),
                         [](const auto& dtype) { return std::string(name_of(dtype.param)); });

TEST_P(CudaScanOfDType, AnyBitsOfAnyLengthAtAnyAlignmentGiveTheReferencesStats) {
  std::mt19937_64 random(1);
  for (int repeat = 0; repeat < 100; ++repeat) {
    const auto numel = static_cast<std::int64_t>(random() % (repeat < 70 ? 70 : 50000));
    const std::size_t offset = random() % 16 / size_of(GetParam()) * size_of(GetParam());
    RawTensor tensor(GetParam(), numel, offset);
    if (repeat % 2 == 0) {
      tensor.fill_with_any_bits(random);
    } else {
      tensor.fill_with_ordinary_numbers(random);
    }
    SCOPED_TRACE("numel " + std::to_string(numel) + ", offset " + std::to_string(offset));
    expect_as_reference(tensor.view(), scan(tensor));
    if (HasFailure()) return;
  }
}

TEST_P(CudaScanOfDType, LengthsAroundEachBoundaryOfTheScanAtEachAlignmentGiveTheReferencesStats) {
  const auto size = static_cast<std::int64_t>(size_of(GetParam()));
  const NamedBits bits = named_bits(GetParam());
  std::mt19937_64 random(6);
  std::vector<std::int64_t> lengths = {1};
  for (const std::int64_t boundary :
       {std::int64_t{16} / size,                                         // a vector
        std::int64_t{16} * cuda::kThreads / size,                        // one of each thread
        std::int64_t{16} * cuda::kThreads * cuda::kBatchVectors / size,  // a batch of each
        std::int64_t{cuda::kChunkElements}}) {
    for (const int beyond : {-1, 0, 1}) lengths.push_back(boundary + beyond);
  }
  std::vector<RawTensor> tensors;
  std::vector<std::unique_ptr<DeviceTensor>> device;
  std::vector<TensorView> views;
  for (std::int64_t offset = 0; offset < 16; offset += size) {
    for (const std::int64_t numel : lengths) {
      RawTensor& tensor = tensors.emplace_back(GetParam(), numel, offset);
      tensor.fill_with_ordinary_numbers(random);
      switch (tensors.size() % 3) {
        case 1:
          tensor.set(0, bits.quiet_nan);
          break;
        case 2:
          tensor.set(numel - 1, bits.negative_nan);
          break;
      }
      views.push_back(device.emplace_back(std::make_unique<DeviceTensor>(tensor))->view());
    }
  }
  const std::vector<TensorStats> stats = scan(views);
  for (std::size_t i = 0; i < stats.size(); ++i) {
    SCOPED_TRACE("numel " + std::to_string(tensors[i].numel()) + ", offset " +
                 std::to_string(reinterpret_cast<std::uintptr_t>(tensors[i].data()) % 16));
    expect_as_reference(tensors[i].view(), stats[i]);
  }
}

TEST_P(CudaScanOfDType, ABadFirstMiddleOrLastElementIsFoundAmongSeveralChunks) {
  const std::int64_t numel = 5 * cuda::kChunkElements + 777;
  const NamedBits bits = named_bits(GetParam());
  std::mt19937_64 random(2);
  RawTensor tensor(GetParam(), numel);
  tensor.fill_with_ordinary_numbers(random);
  const DeviceTensor device(tensor);
  const auto plan = scanner_->plan({device.view()}, 0);
  EXPECT_TRUE(scan(*plan)[0].is_finite());
  EXPECT_EQ(flag(), 0);
  for (const std::int64_t place : {std::int64_t{0}, numel / 2, numel - 1}) {
    RawTensor broken = tensor;
    broken.set(place, bits.quiet_nan);
    device.write(place, bits.quiet_nan);
    TensorStats stats = scan(*plan)[0];
    EXPECT_EQ(stats.nan, 1);
    EXPECT_EQ(stats.first_bad, place);
    expect_as_reference(broken.view(), stats);
    if (bits.has_infinity) {
      device.write(place, bits.neg_inf);
      stats = scan(*plan)[0];
      EXPECT_EQ(stats.neg_inf, 1);
      EXPECT_EQ(stats.nan + stats.pos_inf, 0);
      EXPECT_EQ(stats.first_bad, place);
      device.write(place, bits.pos_inf);
      EXPECT_EQ(scan(*plan)[0].pos_inf, 1);
    }
    tensor.set(place, bits.one);
    device.write(place, bits.one);
    expect_as_reference(tensor.view(), scan(*plan)[0]);
  }
  EXPECT_EQ(flag(), 1) << "a clean scan does not take the flag back";
}

TEST_P(CudaScanOfDType, AStridedViewIsReadInItsLogicalOrder) {
  std::mt19937_64 random(3);
  RawTensor storage(GetParam(), 400000);
  storage.fill_with_any_bits(random);
  const DeviceTensor device(storage);
  const std::vector<std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>>> layouts = {
      {{500, 799}, {1, 500}},                                      // transposed
      {{400, 999}, {1000, 1}},                                     // narrowed
      {{3000, 50}, {0, 1}},                                        // broadcast
      {{2, 3, 2, 3, 2, 3, 2, 3}, {1, 7, 2, 31, 500, 11, 3, 200}},  // eight dimensions
  };
  for (const auto& [sizes, strides] : layouts) {
    TensorView on_host = storage.view();
    on_host.sizes = sizes;
    on_host.strides = strides;
    on_host.numel = 1;
    for (const std::int64_t size : sizes) on_host.numel *= size;
    TensorView on_device = on_host;
    on_device.data = device.view().data;
    expect_as_reference(on_host, scan(std::vector{on_device})[0]);
  }
}

TEST_F(CudaScan, ManyTensorsOfAllDTypesFillTheirSlotsInOnePlan) {
  std::mt19937_64 random(4);
  std::vector<RawTensor> tensors;
  std::vector<std::unique_ptr<DeviceTensor>> device;
  std::vector<TensorView> views;
  for (int i = 0; i < 300; ++i) {
    const DType dtype = kAllDTypes[i % kAllDTypes.size()];
    const auto numel = static_cast<std::int64_t>(i % 97 == 0 ? 150000 : random() % 300);
    RawTensor& tensor = tensors.emplace_back(dtype, numel, i % 2 * size_of(dtype));
    if (i % 10 == 0) {
      tensor.fill_with_any_bits(random);
    } else {
      tensor.fill_with_ordinary_numbers(random);
    }
    views.push_back(device.emplace_back(std::make_unique<DeviceTensor>(tensor))->view());
  }
  const auto plan = scanner_->plan(views, 900);  // into two segments of slots
  EXPECT_TRUE(plan->matches(views));
  const std::vector<TensorStats> stats = scan(*plan);
  ASSERT_EQ(stats.size(), views.size());
  for (std::size_t i = 0; i < stats.size(); ++i) {
    SCOPED_TRACE("tensor " + std::to_string(i));
    expect_as_reference(tensors[i].view(), stats[i]);
  }
  EXPECT_EQ(scanner_->wait()[0], TensorStats{}) << "no plan fills slot 0";
}

TEST_F(CudaScan, AnEmptyTensorEmptiesItsSlotAndAnEmptyPlanDoesNothing) {
  RawTensor tensor(DType::float32, 10);
  tensor.fill(named_bits(DType::float32).quiet_nan);
  const DeviceTensor device(tensor);
  EXPECT_EQ(scan(std::vector{device.view()})[0].nan, 10);
  EXPECT_EQ(scan(std::vector{TensorView{}})[0], TensorStats{});
  EXPECT_TRUE(scan(std::vector<TensorView>{}).empty());
}

TEST_F(CudaScan, TheFlagIsSetByABadScanAndClearedInStreamOrder) {
  RawTensor tensor(DType::bfloat16, 1000);
  tensor.set(999, named_bits(DType::bfloat16).pos_inf);
  const DeviceTensor bad(tensor);
  tensor.set(999, 0);
  const DeviceTensor good(tensor);
  const auto bad_plan = scanner_->plan({bad.view()}, 0);
  const auto good_plan = scanner_->plan({good.view()}, 1);
  EXPECT_EQ(flag(), 0);
  scanner_->enqueue(*bad_plan, stream());
  scanner_->enqueue(*good_plan, stream());
  EXPECT_EQ(flag(), 1);
  scanner_->enqueue_clear_flag(stream());
  scanner_->enqueue(*good_plan, stream());
  EXPECT_EQ(flag(), 0);
}

TEST_F(CudaScan, Float32AndBfloat16SquaresNeitherOverflowNorVanish) {
  const struct {
    DType dtype;
    std::uint64_t bits;
    double value;
  } cases[] = {
      {DType::float32, 0x6a000000, std::ldexp(1.0, 85)},
      {DType::float32, 0x15000000, std::ldexp(1.0, -85)},
      {DType::bfloat16, 0x6a00, std::ldexp(1.0, 85)},
      {DType::bfloat16, 0x1500, std::ldexp(1.0, -85)},
      {DType::float32, 0x69045951, 1e25f},
  };
  for (const auto& [dtype, bits, value] : cases) {
    RawTensor tensor(dtype, 200000);
    tensor.fill(bits);
    const TensorStats stats = scan(tensor);
    EXPECT_NEAR(stats.sum_of_squares / (200000 * value * value), 1.0, 1e-12);
    EXPECT_TRUE(stats.is_finite());
  }
}

TEST_F(CudaScan, RepeatedScansHaveTheSameBitsInEveryStatistic) {
  std::mt19937_64 random(5);
  std::vector<std::unique_ptr<DeviceTensor>> device;
  std::vector<TensorView> views;
  for (const DType dtype : kAllDTypes) {
    RawTensor tensor(dtype, kLargeNumel);
    tensor.fill_with_ordinary_numbers(random);
    views.push_back(device.emplace_back(std::make_unique<DeviceTensor>(tensor))->view());
  }
  const auto plan = scanner_->plan(views, 0);
  const std::vector<TensorStats> first = scan(*plan);
  for (int repeat = 0; repeat < kManyRepeats; ++repeat) {
    const std::vector<TensorStats> again = scan(*plan);
    for (std::size_t i = 0; i < again.size(); ++i) ASSERT_TRUE(same_bits(again[i], first[i]));
  }
  std::vector<TensorView> alone = {views[1]};
  EXPECT_EQ(scan(alone)[0], first[1]) << "the company of other tensors changes nothing";
}

TEST_F(CudaScan, ACapturedGraphScansWhatTheMemoryHoldsWhenItIsLaunched) {
  RawTensor tensor(DType::bfloat16, 100000);
  tensor.fill(named_bits(DType::bfloat16).one);
  const DeviceTensor device(tensor);
  const auto plan = scanner_->plan({device.view()}, 0);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  succeeded(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
  scanner_->enqueue_clear_flag(stream());
  scanner_->enqueue(*plan, stream());
  scanner_->enqueue_readback(stream());
  succeeded(cudaStreamEndCapture(stream_, &graph));
  succeeded(cudaGraphInstantiate(&executable, graph, 0));

  succeeded(cudaGraphLaunch(executable, stream_));
  EXPECT_EQ(scanner_->wait()[0].sum_of_squares, 100000.0);
  EXPECT_EQ(flag(), 0);
  device.write(77777, named_bits(DType::bfloat16).quiet_nan);
  succeeded(cudaGraphLaunch(executable, stream_));
  EXPECT_EQ(scanner_->wait()[0].first_bad, 77777);
  EXPECT_EQ(flag(), 1);

  // Slots that a later plan adds do not move those in the graph.
  const auto later = scanner_->plan({device.view()}, 5000);
  device.write(5, named_bits(DType::bfloat16).neg_inf);
  succeeded(cudaGraphLaunch(executable, stream_));
  scanner_->enqueue_readback(stream());
  EXPECT_EQ(scanner_->wait()[0].first_bad, 5);
  EXPECT_EQ(scanner_->wait()[5000], TensorStats{});
  succeeded(cudaGraphExecDestroy(executable));
  succeeded(cudaGraphDestroy(graph));
}

TEST_F(CudaScan, ReadsBackSomeSlotsAcrossTheSegmentsOfItsMemory) {
  RawTensor tensor(DType::float16, 100);
  const DeviceTensor device(tensor);
  const std::vector<TensorView> views(50, device.view());
  const auto low = scanner_->plan(views, 1000);
  const auto high = scanner_->plan(views, 2030);
  scanner_->reserve(3000);
  scanner_->enqueue(*low, stream());
  scanner_->enqueue(*high, stream());
  scanner_->enqueue_readback(990, 1100, stream());
  succeeded(cudaStreamSynchronize(stream_));
  EXPECT_TRUE(scanner_->is_ready());
  const auto slots = scanner_->wait(990, 1100);
  ASSERT_EQ(slots.size(), 1100u);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const std::size_t slot = 990 + i;
    const bool is_filled = (slot >= 1000 && slot < 1050) || (slot >= 2030 && slot < 2080);
    EXPECT_EQ(slots[i].zeros, is_filled ? 100 : 0) << slot;
  }
  EXPECT_THROW(scanner_->enqueue_readback(2000, 1001, stream()), UsageError);
  EXPECT_THROW((void)scanner_->wait(3000, 1), UsageError);
}

TEST_F(CudaScan, AReadbackIsReadyOnceItHasArrivedAndShowsTheSlotsAsTheyWereThen) {
  RawTensor tensor(DType::float16, 100);
  const DeviceTensor device(tensor);
  const auto plan = scanner_->plan({device.view()}, 0);
  scanner_->enqueue(*plan, stream());
  EXPECT_EQ(scanner_->wait()[0], TensorStats{}) << "nothing was read back yet";
  scanner_->enqueue_readback(stream());
  succeeded(cudaStreamSynchronize(stream_));
  EXPECT_TRUE(scanner_->is_ready());
  EXPECT_EQ(scanner_->wait()[0].zeros, 100);
  device.write(0, named_bits(DType::float16).one);
  scanner_->enqueue(*plan, stream());
  succeeded(cudaStreamSynchronize(stream_));
  EXPECT_EQ(scanner_->wait()[0].zeros, 100);
}

TEST_F(CudaScan, PlansMadeAndDroppedEveryStepScanTheirOwnTensors) {
  for (int step = 0; step < 50; ++step) {
    RawTensor tensor(DType::float32, 100 + step * 1000);
    tensor.fill(named_bits(DType::float32).one);
    EXPECT_EQ(scan(tensor).sum_of_squares, 100.0 + step * 1000);
  }
}

TEST_F(CudaScan, OneTensorWithoutAPlanHasTheBitsThatItsPlanGives) {
  std::mt19937_64 random(9);
  scanner_->reserve(6);
  for (const DType dtype : kAllDTypes) {
    RawTensor tensor(dtype, 3 * 65536 + 12345);
    tensor.fill_with_ordinary_numbers(random);
    tensor.set(70000, named_bits(dtype).quiet_nan);
    const DeviceTensor device(tensor);
    const TensorStats planned = scan(std::vector{device.view()})[0];
    scanner_->enqueue_one(device.view(), 5, {nullptr});
    scanner_->enqueue_readback({nullptr});
    const TensorStats stats = scanner_->wait()[5];
    EXPECT_TRUE(same_bits(stats, planned)) << name_of(dtype);
    EXPECT_EQ(stats.first_bad, 70000);
  }
}

TEST_F(CudaScan, ScansOnSeveralStreamsMayOverlap) {
  constexpr std::uint32_t kStreams = 3;
  RawTensor tensor(DType::bfloat16, 3 * cuda::kChunkElements + 5);
  tensor.set(70000, named_bits(DType::bfloat16).pos_inf);
  const DeviceTensor device(tensor);
  cudaStream_t streams[kStreams];
  for (cudaStream_t& each : streams) {
    succeeded(cudaStreamCreateWithFlags(&each, cudaStreamNonBlocking));
  }
  scanner_->reserve(kStreams);
  for (int repeat = 0; repeat < 5; ++repeat) {
    for (std::uint32_t i = 0; i < kStreams; ++i) {
      scanner_->enqueue_one(device.view(), i, {streams[i]});
    }
  }
  for (cudaStream_t each : streams) succeeded(cudaStreamSynchronize(each));
  scanner_->enqueue_readback(stream());
  const auto slots = scanner_->wait();
  for (const TensorStats& stats : slots) expect_as_reference(tensor.view(), stats);
  EXPECT_EQ(flag(), 1);
  for (cudaStream_t each : streams) succeeded(cudaStreamDestroy(each));
}

TEST_F(CudaScan, AnAddressThatTheKernelCannotReadIsRefused) {
  RawTensor tensor(DType::float32, 10);
  EXPECT_THROW((void)scanner_->plan({tensor.view()}, 0), UsageError);
  EXPECT_THROW((void)make_cuda_slot_scanner(12345, make_cuda_memory()), UsageError);
  EXPECT_THROW((void)make_cuda_slot_scanner(-1, make_cuda_memory()), UsageError);
}

/// Gives as many blocks as the test allows, and counts the ones in use.
class LimitedMemory final : public DeviceMemory {
 public:
  void* allocate(std::size_t bytes) override {
    if (left == 0) throw CudaError("no block is left");
    --left;
    ++out;
    return memory_->allocate(bytes);
  }
  void free(void* memory) noexcept override {
    --out;
    memory_->free(memory);
  }

  int left = 0;
  int out = 0;

 private:
  std::shared_ptr<DeviceMemory> memory_ = make_cuda_memory();
};

TEST_F(CudaScan, FailedAllocationsLeaveTheScannerUnchangedAndUsable) {
  const auto memory = std::make_shared<LimitedMemory>();
  EXPECT_THROW((void)make_cuda_slot_scanner(0, memory), CudaError);
  EXPECT_EQ(memory->out, 0);
  memory->left = 1;  // the flag
  scanner_ = make_cuda_slot_scanner(0, memory);
  RawTensor tensor(DType::float32, 1000);
  tensor.set(7, ElementBits<DType::float32>::infinity);
  const DeviceTensor device(tensor);
  for (int blocks = 0; blocks < 2; ++blocks) {  // slots, then the tables of the plan
    memory->left = blocks;
    EXPECT_THROW((void)scanner_->plan({device.view()}, 0), CudaError);
  }
  memory->left = 1;
  EXPECT_EQ(scan(std::vector{device.view()})[0].first_bad, 7);
  EXPECT_THROW(scanner_->enqueue_one(device.view(), 0, stream()), CudaError);  // scratch
  memory->left = 1;
  scanner_->enqueue_one(device.view(), 0, stream());
  scanner_->enqueue_readback(0, 1, stream());
  EXPECT_EQ(scanner_->wait(0, 1)[0].pos_inf, 1);
  scanner_.reset();
  EXPECT_EQ(memory->out, 0);
}

TEST_F(CudaScan, TheCallersCurrentDeviceIsRestored) {
  int devices = 0;
  succeeded(cudaGetDeviceCount(&devices));
  if (devices < 2) GTEST_SKIP() << "needs two CUDA devices";
  succeeded(cudaSetDevice(1));
  RawTensor tensor(DType::float32, 10);
  succeeded(cudaSetDevice(0));
  const DeviceTensor device(tensor);
  succeeded(cudaSetDevice(1));
  const auto plan = scanner_->plan({device.view()}, 0);
  scanner_->enqueue(*plan, {nullptr});
  scanner_->enqueue_readback({nullptr});
  EXPECT_EQ(scanner_->wait()[0].zeros, 10);
  int current = -1;
  succeeded(cudaGetDevice(&current));
  EXPECT_EQ(current, 1);
  succeeded(cudaSetDevice(0));
}

TEST_F(CudaScan, ATensorOfMoreThanTwoToThe31ElementsIsIndexedIn64Bits) {
  const std::int64_t numel = (std::int64_t{1} << 31) + 70001;
  void* memory = nullptr;
  if (cudaMalloc(&memory, numel) != cudaSuccess) {
    (void)cudaGetLastError();
    GTEST_SKIP() << "needs 2 GiB of device memory";
  }
  succeeded(cudaMemset(memory, 0x38, numel));  // 1.0
  TensorView view;
  view.data = memory;
  view.numel = numel;
  view.dtype = DType::float8_e4m3fn;
  succeeded(cudaMemset(static_cast<unsigned char*>(memory) + numel - 3, 0x7f, 1));
  succeeded(cudaDeviceSynchronize());
  const TensorStats stats = scan(std::vector{view})[0];
  succeeded(cudaFree(memory));
  EXPECT_EQ(stats.nan, 1);
  EXPECT_EQ(stats.first_bad, numel - 3);
  EXPECT_EQ(stats.sum_of_squares, static_cast<double>(numel - 1));
}

}  // namespace
}  // namespace nanlocator::testing
