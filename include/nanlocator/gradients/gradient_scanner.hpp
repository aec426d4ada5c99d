// Scans the gradients of a step and returns sightings.
//
// In: gradients (or parameters) of one phase, grouped as the framework passes them (a bucket, a
// model chunk). Out: a device flag at once, sightings when the step ends. `scan` enqueues on the
// current stream of each tensor's device and does not wait; `collect` waits. Plans are kept per
// (phase, group) and remade only if a storage has moved. Cost: one read of the memory. CPU and CUDA
// tensors use nanlocator's kernels, other devices ATen operators. One thread at a time.
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

/// A tensor to be scanned for a parameter. Floating-point or complex; dense with any strides, or
/// sparse COO (its values are scanned).
struct GradientView {
  std::int64_t parameter = 0;  // id
  /// Not kept: it may be freed after `scan` (on CUDA the allocator knows which stream reads it).
  /// For a sparse tensor, the indices are kept until the next scan of its group or `begin_step`.
  at::Tensor tensor;
  /// The index of the tensor's first element in the flattened parameter. If it is 0 and the tensor
  /// has fewer elements than the parameter, the tensor is this rank's shard, whose position is in
  /// the map.
  std::int64_t element_offset = 0;
  /// For a tensor without memory of its own (a wrapper subclass): computes its values, in its
  /// shape. `scan` calls it for one view at a time. If it is empty or throws, the tensor is omitted
  /// from the scan and its coverage.
  std::function<at::Tensor()> dequantize{};
};

/// A loss of the step.
struct LossView {
  at::Tensor tensor;
  std::optional<int> microbatch;  // counted from 0
  std::optional<int> chunk;
  at::Tensor valid_labels;  // integer scalar: the number of labels in it; kept, and read if the
                            // loss is bad. May be undefined.
};

class GradientScanner {
 public:
  /// `map` supplies the sightings' names and shapes and must outlive the scanner. `threads`: for
  /// tensors in host memory.
  explicit GradientScanner(const ParameterMap& map, int threads = 1);
  ~GradientScanner();
  GradientScanner(const GradientScanner&) = delete;  // owns device slots
  GradientScanner& operator=(const GradientScanner&) = delete;

  /// Adds the slots read by `remember` to the history, forgets the previous step and clears the
  /// flags.
  void begin_step();

  /// Scans `views` as part of `phase`. `group` separates the calls of one phase (bucket number,
  /// chunk number); the same group again within a step is a second pass, kept beside the first.
  /// `role`: "main_grad", "grad", "weight". Throws UnsupportedError for a dtype or layout that
  /// cannot be scanned, UsageError for an id that the map lacks; then nothing of this call has been
  /// scanned. A tensor without memory of its own is not an error: see GradientView::dequantize.
  void scan(Phase phase, std::uint64_t group, std::string_view role,
            std::span<const GradientView> views);

  /// Scans the step's losses (phase loss): floating-point tensors of any shape and device; others
  /// are skipped. Keeps them only until the scan has run.
  void scan_losses(std::span<const LossView> losses);

  /// int32 [1] on `device`, in stream order: nonzero once a scan of this step found a NaN or Inf.
  /// Combines the flags of other devices by copies between devices; the host waits only if a CPU
  /// flag combines another device's.
  [[nodiscard]] at::Tensor flag(at::Device device);

  /// Records norm, largest magnitude and count of NaN and Inf of this step's gradients for the
  /// history, at their earliest scanned phase: enqueues a readback, which the next `begin_step`
  /// collects if it has arrived. Once a step, after the scans; a later call does nothing. Does not
  /// wait; allocates in the first step only.
  void remember(std::int64_t iteration);
  /// The factor of the running step's gradients, by which the history's numbers are divided. If it
  /// is not called, they are as scanned. Throws UsageError unless it is positive.
  void set_loss_scale(double loss_scale);
  /// The last kHistorySteps steps that were remembered, without run and coordinates. On devices
  /// other than CPU and CUDA, only collected steps were seen.
  [[nodiscard]] History history() const;
  /// The same for the weights before the step, in steps that scanned them before `remember` or
  /// `collect`.
  [[nodiscard]] History weight_history() const;

  struct Collected {
    std::vector<Sighting> sightings;  // bad ones, in scan order
    std::vector<Coverage> coverage;
    std::vector<std::string> notes;  // about tensors without memory of their own
    std::optional<double>
        absmax;  // largest finite magnitude at the latest gradient phase, and its parameter
    std::string absmax_parameter;
  };
  /// Everything about this step; also adds it to the history. Waits for the devices.
  [[nodiscard]] Collected collect(std::int64_t iteration);

  /// Ids of the parameters that a scan of `phase` found bad, in scan order, without repetitions;
  /// waits for the devices.
  [[nodiscard]] std::vector<std::int64_t> bad_parameters(Phase phase);

  struct Scanned {
    std::int64_t parameter = 0;
    std::uint64_t fingerprint = 0;  // of the bits; see scan/fingerprint.hpp
    bool is_finite = true;
    double sum_of_squares = 0;  // of its finite elements
  };
  /// The gradients of this step at the latest scanned phase, in scan order, for comparison with
  /// another execution of the step; waits for the devices.
  [[nodiscard]] std::vector<Scanned> scanned_gradients();

 private:
  void scan_dequantized(Phase phase, std::string_view role, const GradientView& view);

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace nanlocator::inline gradients_room
