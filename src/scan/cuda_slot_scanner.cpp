// The CUDA backend of SlotScanner: memory, readback and errors. The scan itself is in
// cuda_kernels.cu.
//
// Slots live in segments that are neither moved nor freed while the scanner lives: `plan` may add
// segments, while graphs captured earlier still write into the old ones.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "nanlocator/error.hpp"
#include "nanlocator/scan/slot_scanner.hpp"
#include "scan/chunk_table.hpp"
#include "scan/cuda_kernels.hpp"

namespace nanlocator::cuda {
namespace {

void check(cudaError_t status, const char* call, int device) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();  // reported here; the training's next launch check must not find it
  throw CudaError(std::string(call) + " failed on CUDA device " + std::to_string(device) + ": " +
                  cudaGetErrorName(status) + ", " + cudaGetErrorString(status));
}

/// Makes a device current and restores the caller's.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&previous_), "cudaGetDevice", device);
    if (previous_ == device) {
      previous_ = kUnchanged;
    } else {
      check(cudaSetDevice(device), "cudaSetDevice", device);
    }
  }
  ~DeviceGuard() {
    if (previous_ != kUnchanged) (void)cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;  // restores once
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  static constexpr int kUnchanged = -1;
  int previous_ = kUnchanged;
};

class CudaMemory final : public DeviceMemory {
 public:
  void* allocate(std::size_t bytes) override {
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice", device);
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes), "cudaMalloc", device);
    return memory;
  }
  void free(void* memory) noexcept override { (void)cudaFree(memory); }
};

/// Frees blocks after the device has finished its work. Errors are dropped: the context may be
/// gone.
void free_all(DeviceMemory& memory, int device, std::span<void* const> blocks) noexcept {
  if (blocks.empty()) return;
  try {
    const DeviceGuard guard(device);
    (void)cudaDeviceSynchronize();
    for (void* block : blocks) memory.free(block);
  } catch (const CudaError&) {
  }
}

/// Device memory for the plans' tables. Blocks of destroyed plans are kept for later plans, because
/// allocating and freeing may stop the whole device, and a training loop whose gradients move makes
/// a plan every step.
class TableMemory {
 public:
  TableMemory(int device, std::shared_ptr<DeviceMemory> memory)
      : device_(device), memory_(std::move(memory)) {}
  ~TableMemory() {
    std::vector<void*> blocks;
    for (const auto& [bytes, block] : unused_) blocks.push_back(block);
    free_all(*memory_, device_, blocks);
  }
  TableMemory(const TableMemory&) = delete;  // owns its blocks
  TableMemory& operator=(const TableMemory&) = delete;

  /// Returns at least `bytes`, rounded up to a power of two, which is stored in `bytes`.
  void* take(std::size_t& bytes) {
    bytes = std::bit_ceil(std::max<std::size_t>(bytes, 4096));
    if (const auto found = unused_.find(bytes); found != unused_.end()) {
      void* block = found->second;
      unused_.erase(found);
      return block;
    }
    return memory_->allocate(bytes);
  }
  void give_back(void* block, std::size_t bytes) { unused_.emplace(bytes, block); }

 private:
  int device_;
  std::shared_ptr<DeviceMemory> memory_;
  std::multimap<std::size_t, void*> unused_;
};

class CudaScanPlan final : public ScanPlan {
 public:
  CudaScanPlan(std::vector<TensorView> tensors, std::uint32_t first_slot, ScanTables tables,
               std::shared_ptr<TableMemory> memory, void* block, std::size_t bytes)
      : ScanPlan(std::move(tensors), first_slot),
        tables_(tables),
        memory_(std::move(memory)),
        block_(block),
        bytes_(bytes) {}
  ~CudaScanPlan() override { memory_->give_back(block_, bytes_); }

  [[nodiscard]] const ScanTables& tables() const noexcept { return tables_; }

 private:
  ScanTables tables_;
  std::shared_ptr<TableMemory> memory_;
  void* block_;
  std::size_t bytes_;
};

/// Refuses an address that the kernel cannot read: that would destroy the CUDA context.
void check_address(const TensorView& tensor, std::size_t position, int device) {
  if (tensor.numel == 0) return;
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, tensor.data), "cudaPointerGetAttributes", device);
  const std::string name = "tensor " + std::to_string(position) + " of the scan plan";
  if (attributes.type == cudaMemoryTypeUnregistered) {
    throw UsageError(name + " is in host memory; scan it with the CPU scanner");
  }
  if (attributes.type == cudaMemoryTypeDevice && attributes.device != device) {
    throw UsageError(name + " is on CUDA device " + std::to_string(attributes.device) +
                     ", but this scanner serves device " + std::to_string(device) +
                     "; use one scanner for each device");
  }
}

class CudaSlotScanner final : public SlotScanner {
 public:
  CudaSlotScanner(int device, std::shared_ptr<DeviceMemory> memory)
      : device_(device), memory_(std::move(memory)) {
    int count = 0;
    check(cudaGetDeviceCount(&count), "cudaGetDeviceCount", device);
    if (device < 0 || device >= count) {
      throw UsageError("there is no CUDA device " + std::to_string(device) +
                       ": this process sees " + std::to_string(count) +
                       " (see CUDA_VISIBLE_DEVICES)");
    }
    const DeviceGuard guard(device);
    try {
      check(count_resident_blocks(device, blocks_), "querying the scan kernel's occupancy", device);
      check(cudaStreamCreateWithFlags(&upload_stream_, cudaStreamNonBlocking),
            "cudaStreamCreateWithFlags", device);
      check(cudaEventCreateWithFlags(&readback_done_, cudaEventDisableTiming),
            "cudaEventCreateWithFlags", device);
      bad_flag_ = static_cast<std::int32_t*>(allocate(sizeof(std::int32_t)));
      check(cudaMemsetAsync(bad_flag_, 0, sizeof(std::int32_t), upload_stream_),
            "cudaMemsetAsync (flag)", device);
      check(cudaStreamSynchronize(upload_stream_), "cudaStreamSynchronize", device);
      table_memory_ = std::make_shared<TableMemory>(device, memory_);
    } catch (...) {
      release();
      throw;
    }
  }
  ~CudaSlotScanner() override { release(); }

  std::unique_ptr<ScanPlan> plan(std::vector<TensorView> tensors,
                                 std::uint32_t first_slot) override {
    if (tensors.size() > std::numeric_limits<std::uint32_t>::max() - first_slot) {
      throw UsageError("a plan of " + std::to_string(tensors.size()) + " tensors from slot " +
                       std::to_string(first_slot) + " needs slot numbers beyond 32 bits");
    }
    ChunkTable table = make_chunk_table(tensors);
    const DeviceGuard guard(device_);
    for (std::size_t i = 0; i < tensors.size(); ++i) check_address(tensors[i], i, device_);
    reserve_slots(first_slot + tensors.size());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const std::size_t slot = first_slot + i;
      table.tensors[i].slot = segments_[slot / kSegmentSlots].device + slot % kSegmentSlots;
    }

    // One block: chunks, then tensors, then room for the partials; all sizes are multiples of 8
    // bytes.
    const std::size_t chunk_bytes = table.chunks.size() * sizeof(ChunkEntry);
    const std::size_t tensor_bytes = table.tensors.size() * sizeof(TensorEntry);
    std::size_t bytes = chunk_bytes + tensor_bytes + table.chunks.size() * sizeof(SlotPartial);
    auto* const block = static_cast<unsigned char*>(table_memory_->take(bytes));
    ScanTables tables{};
    tables.chunks = reinterpret_cast<const ChunkEntry*>(block);
    tables.chunk_count = static_cast<std::uint32_t>(table.chunks.size());
    tables.tensors = reinterpret_cast<TensorEntry*>(block + chunk_bytes);
    tables.partials = reinterpret_cast<SlotPartial*>(block + chunk_bytes + tensor_bytes);
    tables.bad_flag = bad_flag_;
    auto result = std::make_unique<CudaScanPlan>(std::move(tensors), first_slot, tables,
                                                 table_memory_, block, bytes);
    check(cudaMemcpyAsync(block, table.chunks.data(), chunk_bytes, cudaMemcpyHostToDevice,
                          upload_stream_),
          "cudaMemcpyAsync (chunks)", device_);
    check(cudaMemcpyAsync(tables.tensors, table.tensors.data(), tensor_bytes,
                          cudaMemcpyHostToDevice, upload_stream_),
          "cudaMemcpyAsync (tensors)", device_);
    check(cudaStreamSynchronize(upload_stream_), "cudaStreamSynchronize", device_);
    return result;
  }

  void enqueue(const ScanPlan& plan, StreamHandle stream) override {
    const ScanTables& tables = static_cast<const CudaScanPlan&>(plan).tables();
    if (tables.chunk_count == 0) return;
    const DeviceGuard guard(device_);
    check(launch_scan(tables, blocks_, cuda_stream(stream)), "launching the scan kernel", device_);
  }

  void reserve(std::uint32_t count) override {
    if (count <= slot_count_) return;
    const DeviceGuard guard(device_);
    reserve_slots(count);
  }

  void enqueue_one(const TensorView& tensor, std::uint32_t slot, StreamHandle stream) override {
    if (slot >= slot_count_) {
      throw UsageError("enqueue_one: there is no slot " + std::to_string(slot) +
                       ", this scanner has " + std::to_string(slot_count_) + "; reserve it");
    }
    TensorEntry entry = make_tensor_entry(tensor);
    const DeviceGuard guard(device_);
    check_address(tensor, 0, device_);
    entry.slot = segments_[slot / kSegmentSlots].device + slot % kSegmentSlots;
    check(launch_single_scan(entry, tensor.data, scratch_of(cuda_stream(stream)), bad_flag_,
                             blocks_, cuda_stream(stream)),
          "launching the scan of one tensor", device_);
  }

  std::int32_t* bad_flag() noexcept override { return bad_flag_; }

  void enqueue_clear_flag(StreamHandle stream) override {
    const DeviceGuard guard(device_);
    check(cudaMemsetAsync(bad_flag_, 0, sizeof(std::int32_t), cuda_stream(stream)),
          "cudaMemsetAsync (flag)", device_);
  }

  void enqueue_readback(StreamHandle stream) override {
    enqueue_readback(0, static_cast<std::uint32_t>(slot_count_), stream);
    readback_count_ = slot_count_;
  }

  void enqueue_readback(std::uint32_t first, std::uint32_t count, StreamHandle stream) override {
    check_slots(first, count);
    const DeviceGuard guard(device_);
    const std::size_t end = std::size_t{first} + count;
    for (std::size_t slot = first; slot < end;) {
      const Segment& segment = segments_[slot / kSegmentSlots];
      const std::size_t place = slot % kSegmentSlots;
      const std::size_t slots = std::min(kSegmentSlots - place, end - slot);
      check(cudaMemcpyAsync(segment.host + place, segment.device + place, slots * sizeof(RawSlot),
                            cudaMemcpyDeviceToHost, cuda_stream(stream)),
            "cudaMemcpyAsync (readback)", device_);
      slot += slots;
    }
    // In a captured graph every launch must record the event, not this call alone.
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(cuda_stream(stream), &capture), "cudaStreamIsCapturing", device_);
    const unsigned int flags =
        capture == cudaStreamCaptureStatusActive ? cudaEventRecordExternal : cudaEventRecordDefault;
    check(cudaEventRecordWithFlags(readback_done_, cuda_stream(stream), flags),
          "cudaEventRecordWithFlags", device_);
  }

  bool is_ready() const override {
    const DeviceGuard guard(device_);
    const cudaError_t status = cudaEventQuery(readback_done_);
    if (status == cudaErrorNotReady) {
      (void)cudaGetLastError();  // an answer, but CUDA records it as an error
      return false;
    }
    check(status, "cudaEventQuery (readback)", device_);
    return true;
  }

  std::span<const TensorStats> wait() override {
    const DeviceGuard guard(device_);
    check(cudaEventSynchronize(readback_done_), "cudaEventSynchronize (readback)", device_);
    stats_.assign(slot_count_, TensorStats{});
    for (std::size_t slot = 0; slot < readback_count_; ++slot) {
      stats_[slot] = stats_of(segments_[slot / kSegmentSlots].host[slot % kSegmentSlots]);
    }
    return stats_;
  }

  std::span<const TensorStats> wait(std::uint32_t first, std::uint32_t count) override {
    check_slots(first, count);
    const DeviceGuard guard(device_);
    check(cudaEventSynchronize(readback_done_), "cudaEventSynchronize (readback)", device_);
    stats_.resize(std::max<std::size_t>(stats_.size(), slot_count_));
    for (std::size_t slot = first; slot < std::size_t{first} + count; ++slot) {
      stats_[slot] = stats_of(segments_[slot / kSegmentSlots].host[slot % kSegmentSlots]);
    }
    return std::span(stats_).subspan(first, count);
  }

 private:
  // 112 KiB: a run of a thousand parameters needs one or a few.
  static constexpr std::size_t kSegmentSlots = 1024;
  struct Segment {
    RawSlot* device = nullptr;
    RawSlot* host = nullptr;  // pinned
  };

  static cudaStream_t cuda_stream(StreamHandle stream) {
    return static_cast<cudaStream_t>(stream.handle);
  }

  void check_slots(std::uint32_t first, std::uint32_t count) const {
    if (std::size_t{first} + count <= slot_count_) return;
    throw UsageError("slots " + std::to_string(first) + " to " +
                     std::to_string(std::size_t{first} + count) +
                     " cannot be read back, this scanner has " + std::to_string(slot_count_));
  }

  void reserve_slots(std::size_t count) {
    constexpr std::size_t bytes = kSegmentSlots * sizeof(RawSlot);
    while (segments_.size() * kSegmentSlots < count) {
      Segment& segment = segments_.emplace_back();
      try {
        void* host = nullptr;
        check(cudaHostAlloc(&host, bytes, cudaHostAllocDefault), "cudaHostAlloc (slots)", device_);
        segment.host = static_cast<RawSlot*>(host);
        segment.device = static_cast<RawSlot*>(allocate(bytes));
        check(cudaMemsetAsync(segment.device, 0, bytes, upload_stream_), "cudaMemsetAsync (slots)",
              device_);
        check(cudaStreamSynchronize(upload_stream_), "cudaStreamSynchronize", device_);
      } catch (...) {
        (void)cudaFreeHost(segment.host);
        segments_.pop_back();
        throw;
      }
    }
    slot_count_ = std::max(slot_count_, count);
  }

  /// A stream orders its scans, so they share scratch; scans on other streams may overlap.
  SingleScratch* scratch_of(cudaStream_t stream) {
    const auto known = scratch_.find(stream);
    if (known != scratch_.end()) return known->second;
    constexpr std::size_t kStreamsPerBlock = 16;  // 1.3 MB
    if (scratch_.size() == scratch_blocks_.size() * kStreamsPerBlock) {
      constexpr std::size_t bytes = kStreamsPerBlock * sizeof(SingleScratch);
      void* const memory = allocate(bytes);
      scratch_blocks_.push_back(memory);
      check(cudaMemsetAsync(memory, 0, bytes, upload_stream_), "cudaMemsetAsync (scratch)",
            device_);
      check(cudaStreamSynchronize(upload_stream_), "cudaStreamSynchronize", device_);
    }
    auto* const block = static_cast<SingleScratch*>(scratch_blocks_.back());
    return scratch_.emplace(stream, block + scratch_.size() % kStreamsPerBlock).first->second;
  }

  /// Freed with the scanner.
  void* allocate(std::size_t bytes) {
    blocks_of_memory_.reserve(blocks_of_memory_.size() + 1);
    return blocks_of_memory_.emplace_back(memory_->allocate(bytes));
  }

  /// Errors are dropped: this runs in the destructor, perhaps after the context is gone.
  void release() noexcept {
    free_all(*memory_, device_, blocks_of_memory_);
    for (const Segment& segment : segments_) (void)cudaFreeHost(segment.host);
    if (readback_done_ != nullptr) (void)cudaEventDestroy(readback_done_);
    if (upload_stream_ != nullptr) (void)cudaStreamDestroy(upload_stream_);
  }

  int device_;
  std::uint32_t blocks_ = 0;
  cudaStream_t upload_stream_ =
      nullptr;  // separate, so that `plan` does not wait for the training step
  cudaEvent_t readback_done_ = nullptr;
  std::int32_t* bad_flag_ = nullptr;
  std::shared_ptr<DeviceMemory> memory_;
  std::vector<void*> blocks_of_memory_;
  std::shared_ptr<TableMemory> table_memory_;
  std::map<cudaStream_t, SingleScratch*> scratch_;
  std::vector<void*> scratch_blocks_;
  std::vector<Segment> segments_;
  std::size_t slot_count_ = 0;
  std::size_t readback_count_ = 0;
  std::vector<TensorStats> stats_;
};

}  // namespace
}  // namespace nanlocator::cuda

namespace nanlocator::inline scan_room {

std::shared_ptr<DeviceMemory> make_cuda_memory() {
  return std::make_shared<cuda::CudaMemory>();
}

std::unique_ptr<SlotScanner> make_cuda_slot_scanner(int device,
                                                    std::shared_ptr<DeviceMemory> memory) {
  return std::make_unique<cuda::CudaSlotScanner>(device, std::move(memory));
}

}  // namespace nanlocator::inline scan_room
