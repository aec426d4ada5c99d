// Torch tensors into the scan room and sightings out of it.
//
// In: gradients (or parameters) of one phase, grouped as the framework passes them (a bucket, a
// model chunk). Out: a device flag at once, sightings when the step ends. `scan` enqueues on the
// current stream of each tensor's device and does not wait; `collect` waits. Plans are kept per
// (phase, group) and made again only when a storage has moved. Cost: one read of the memory.
// CPU and CUDA tensors use nanlocator's kernels, other devices ATen operators. One thread at a
// time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "nanlocator/map/parameter_map.hpp"
#include "nanlocator/record/history.hpp"
#include "nanlocator/record/ledger.hpp"

namespace nanlocator::inline gradients_room {

/// A tensor that is scanned on behalf of a parameter. Floating-point or complex; dense with any
/// strides, or sparse COO (its values are scanned).
struct GradientView {
  std::int64_t parameter = 0;  // id
  /// Not kept: it may be freed after `scan` (on CUDA the allocator knows the stream that reads
  /// it). Of a sparse one the indices are kept until the next scan of its group or `begin_step`.
  at::Tensor tensor;
  /// Of tensor's first element in the flattened parameter. 0: of fewer elements than the parameter
  /// has, it is this rank's shard of it, as the map says where.
  std::int64_t element_offset = 0;
  /// Of a tensor without memory of its own (a wrapper subclass): makes its values, in its shape.
  /// `scan` calls it for one view at a time. Where it is empty or throws, the tensor is left out of
  /// the scan, and of its coverage.
  std::function<at::Tensor()> dequantize{};
};

/// A loss of the step.
struct LossView {
  at::Tensor tensor;
  std::optional<int> microbatch;  // counted from 0
  std::optional<int> chunk;
  at::Tensor valid_labels;  // integer scalar: how many labels it counts; kept, and read where the
                            // loss is bad. May be undefined.
};

class GradientScanner {
 public:
  /// `map` gives names and shapes to the sightings and must outlive the scanner. `threads`: for
  /// tensors in host memory.
  explicit GradientScanner(const ParameterMap& map, int threads = 1);
  ~GradientScanner();
  GradientScanner(const GradientScanner&) = delete;  // owns device slots
  GradientScanner& operator=(const GradientScanner&) = delete;

  /// Takes what `remember` has asked for into the history, forgets the step before and clears the
  /// flags.
  void begin_step();

  /// Scans `views` as part of `phase`. `group` separates the calls of one phase (bucket number,
  /// chunk number); the same group again within a step is a second
  /// pass and is kept beside the first. `role`: "main_grad", "grad",
  /// "weight". Throws UnsupportedError for a dtype or layout that cannot be scanned, UsageError for
  /// an id that the map lacks; then nothing of this call has been scanned. A tensor without memory
  /// of its own is no error: see GradientView::dequantize.
  void scan(Phase phase, std::uint64_t group, std::string_view role,
            std::span<const GradientView> views);

  /// Scans the step's losses, phase loss: floating-point tensors of any shape and device; others
  /// are skipped. Kept until the scan has run, not longer.
  void scan_losses(std::span<const LossView> losses);

  /// int32 [1], non-zero once any scan of this step met a NaN or Inf; on `device`, in stream order.
  /// Flags of other devices are folded in: a copy between devices; the host waits only for a flag
  /// of the CPU that folds in another device's.
  [[nodiscard]] at::Tensor flag(at::Device device);

  /// Keeps norm, largest magnitude and count of NaN and Inf of this step's gradients for the
  /// history, at the earliest phase of them that was scanned: enqueues their readback, which the
  /// next `begin_step` takes up where it has arrived. Once a step, after the scans; a later call
  /// does nothing. Does not wait; allocates in the first step only.
  void remember(std::int64_t iteration);
  /// What the gradients of the step that runs now were multiplied by; the history's numbers are
  /// divided by it. Not called: they are as scanned. Throws UsageError unless it is positive.
  void set_loss_scale(double loss_scale);
  /// The latest kHistorySteps steps that were remembered, without run and coordinates. On devices
  /// other than CPU and CUDA only those that were collected were seen.
  [[nodiscard]] History history() const;
  /// The same of the weights before the step, of steps in which they were scanned before `remember`
  /// or `collect`.
  [[nodiscard]] History weight_history() const;

  struct Collected {
    std::vector<Sighting> sightings;  // bad ones, in the order of the scans
    std::vector<Coverage> coverage;
    std::vector<std::string> notes;  // on tensors without memory of their own
    std::optional<double>
        absmax;  // largest finite magnitude at the latest gradient phase, and whose
    std::string absmax_parameter;
  };
  /// Everything of this step, which it also takes into the history; waits for the devices.
  [[nodiscard]] Collected collect(std::int64_t iteration);

  /// Ids of the parameters that a scan of `phase` found bad, in the order of the scans, each once;
  /// waits for the devices.
  [[nodiscard]] std::vector<std::int64_t> bad_parameters(Phase phase);

  struct Scanned {
    std::int64_t parameter = 0;
    std::uint64_t fingerprint = 0;  // of the bits; see scan/fingerprint.hpp
    bool is_finite = true;
  };
  /// The gradients of this step at the latest phase that was scanned, in the order of the scans, to
  /// be compared with another execution of the step; waits for the devices.
  [[nodiscard]] std::vector<Scanned> scanned_gradients();

 private:
  void scan_dequantized(Phase phase, std::string_view role, const GradientView& view);

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace nanlocator::inline gradients_room
