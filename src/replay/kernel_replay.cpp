#include "nanlocator/replay/kernel_replay.hpp"

#include <ATen/Parallel.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <initializer_list>
#include <limits>
#include <set>
#include <utility>

#include "files/checksum.hpp"
#include "files/text.hpp"
#include "nanlocator/error.hpp"
#include "nanlocator/scan/dtype.hpp"
#include "replay/host_memory.hpp"
#include "replay/poison.hpp"
#include "replay/reference_work.hpp"
#include "replay/settings.hpp"
#include "replay/storage_ranges.hpp"
#include "replay/values.hpp"
#include "tensor/dtypes.hpp"
#include "tensor/extent.hpp"
#include "tensor/observed_tensor.hpp"
#include "tensor/own_work.hpp"
#include "tensor/tensor_access.hpp"

namespace nanlocator::inline replay_room {
namespace {

/// Bytes on both sides of every range of memory. A multiple of any alignment that allocators keep.
constexpr std::int64_t kGuard = std::int64_t{64} << 10;
constexpr std::int64_t kAlignment = 512;
/// 0.0115 in float32 and bfloat16, 1.06 in float16: a finite number that no kernel computes in all
/// its bytes.
constexpr std::uint8_t kConstantByte = 0x3C;

/// Deliberate changes in one execution: the byte with which it fills memory.
struct Variation {
  std::optional<std::uint8_t> allocated{};  // memory that the kernel allocates through Torch
  std::optional<std::uint8_t> written{};    // arguments that the kernel writes
  std::optional<std::uint8_t> outside{};    // memory outside the arguments' elements
  bool is_scaled = false;                   // scales the inputs to magnitudes of at most 1
};

// ---- tensors ----

at::Tensor on_host(const at::Tensor& tensor) {
  return tensor.detach().resolve_neg().resolve_conj().cpu().contiguous();
}

bool is_float(const at::Tensor& tensor) {
  return tensor.is_floating_point() || tensor.is_complex();
}

/// Its elements without the repetitions of an expand.
at::Tensor once_of(at::Tensor tensor) {
  for (std::int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1 && tensor.stride(d) == 0) tensor = tensor.narrow(d, 0, 1);
  }
  return tensor;
}

/// The elements in order, as real numbers of a dtype with comparison kernels.
at::Tensor comparable(const at::Tensor& tensor) {
  const at::Tensor real = as_real(tensor);
  return real.element_size() == 1 ? real.to(at::kFloat) : real;
}

at::Tensor bad_in(const at::Tensor& tensor) {
  return at::isfinite(comparable(tensor)).logical_not();
}

/// Marks elements all of whose bytes are `byte`, in the shape of `bad_in`.
at::Tensor filled_with(const at::Tensor& tensor, std::uint8_t byte) {
  const at::Tensor real = as_real(tensor);
  return real.reshape({-1})
      .view(at::kByte)
      .view({real.numel(), static_cast<std::int64_t>(real.element_size())})
      .eq(byte)
      .all(-1)
      .view(real.sizes());
}

std::int64_t count_of(const at::Tensor& mask) {
  return mask.sum().item<std::int64_t>();
}

bool is_subset(const at::Tensor& mask, const at::Tensor& of) {
  return count_of(mask.logical_and(of.logical_not())) == 0;
}

bool have_equal_bits(const at::Tensor& a, const at::Tensor& b, const at::Tensor& except) {
  const auto bytes = [](const at::Tensor& tensor) {
    const at::Tensor real = as_real(tensor);
    return real.reshape({-1}).view(at::kByte).view(
        {real.numel(), static_cast<std::int64_t>(real.element_size())});
  };
  if (a.sizes() != b.sizes()) return false;
  return is_subset(bytes(a).ne(bytes(b)).any(-1), except.reshape({-1}));
}

std::uint32_t checksum_of(const at::Tensor& host) {
  return crc32_of(std::string_view(static_cast<const char*>(host.const_data_ptr()), host.nbytes()));
}

void fill_elements(const at::Tensor& tensor, std::uint8_t byte) {
  const auto one = at::full({static_cast<std::int64_t>(tensor.element_size())}, byte, at::kByte)
                       .view(tensor.scalar_type())
                       .reshape({});
  tensor.copy_(one.to(tensor.device()).expand(tensor.sizes()));
}

double largest_of(at::ScalarType type) {
  return largest_finite(torch_name(type)).value_or(std::numeric_limits<float>::max());
}

/// How far a kernel in this dtype may differ from a float64 reference, relative to a value or to
/// the root of the mean square of all.
double tolerance_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
    case at::kComplexDouble:
      return 1e-6;
    case at::kFloat:
    case at::kComplexFloat:
      return 1e-3;
    case at::kHalf:
      return 1e-2;
    case at::kBFloat16:
      return 4e-2;
    default:
      return 0.2;  // 8-bit floats
  }
}

// ---- one execution ----

/// Copies of the arguments on their devices, each range of memory between guard zones.
class KernelArguments {
 public:
  KernelArguments(const RecordedKernelCall& call, const std::vector<at::Tensor>& before,
                  const Variation& variation, const std::vector<bool>& is_written)
      : call_(call), tensors_(before) {
    const OwnWork guard;
    ranges_ = storage_ranges(before);
    for (const auto& range : ranges_.ranges) {
      const auto bytes = bytes_of(range);
      const std::int64_t front = front_of(range);
      // Memory beside parts of packed tensors belongs to other tensors and proves nothing.
      const bool fills_gaps = variation.outside && is_own(range);
      fills_.push_back(fills_gaps ? *variation.outside : kConstantByte);
      const auto memory =
          at::full({front + bytes.numel() + kGuard}, fills_.back(), bytes.options());
      memories_.push_back(memory);
      const ByteRange reach{range.bytes.begin - front, range.bytes.end};
      for (const auto i : range.tensors) {
        tensors_[i] = view_like(before[i], memory, reach).detach();
        if (fills_gaps) once_of(tensors_[i]).copy_(once_of(before[i]));
      }
      if (!fills_gaps) memory.narrow(0, front, bytes.numel()).copy_(bytes);
    }
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      if (!is_float(tensors_[i])) continue;
      if (variation.is_scaled && !is_written[i]) scale(tensors_[i]);
      if (variation.written && is_written[i] && !overlaps_itself(tensors_[i])) {
        fill_elements(tensors_[i], *variation.written);
      }
    }
  }

  [[nodiscard]] const std::vector<at::Tensor>& tensors() const { return tensors_; }

  /// The argument whose guard zone, outside its storage, the kernel has written.
  [[nodiscard]] std::optional<std::size_t> written_outside() const {
    const OwnWork guard;
    for (std::size_t r = 0; r < memories_.size(); ++r) {
      const auto& range = ranges_.ranges[r];
      const bool is_all = std::ranges::all_of(
          range.tensors, [&](std::size_t i) { return call_.beside[i] == Beside::nothing; });
      if (!is_all) continue;
      const auto& memory = memories_[r];
      const auto is_intact = [&](std::int64_t begin, std::int64_t length) {
        return memory.narrow(0, begin, length).eq(fills_[r]).all().item<bool>();
      };
      if (is_intact(0, front_of(range)) && is_intact(memory.numel() - kGuard, kGuard)) continue;
      return range.tensors.front();
    }
    return std::nullopt;
  }

 private:
  static std::int64_t front_of(const StorageRange& range) {
    return kGuard + range.bytes.begin % kAlignment;
  }
  static bool overlaps_itself(const at::Tensor& tensor) {
    return once_of(tensor).numel() != tensor.numel();
  }
  static void scale(const at::Tensor& tensor) {
    if (overlaps_itself(tensor) || tensor.element_size() == 1 || tensor.numel() == 0) return;
    const auto largest = as_real(tensor).to(at::kDouble).abs().max().item<double>();
    if (largest > 1) tensor.copy_(tensor.div(largest));
  }
  /// The memory beside these arguments is not part of a packed tensor.
  [[nodiscard]] bool is_own(const StorageRange& range) const {
    return std::ranges::none_of(range.tensors,
                                [&](std::size_t i) { return call_.beside[i] == Beside::finite; });
  }

  const RecordedKernelCall& call_;
  StorageRanges ranges_;
  std::vector<at::Tensor> tensors_;
  std::vector<at::Tensor> memories_;
  std::vector<std::uint8_t> fills_;  // of the memory outside the copies
};

/// Checksums of every output of one execution, and the judged output.
struct Execution {
  std::vector<std::uint32_t> checksums;
  at::Tensor judged;  // in host memory
  std::optional<std::size_t> written_outside;
};

/// Hides the kernel's own operators from observers and autograd.
struct Unobserved {
  at::RecordFunctionGuard observers{false};
  at::NoGradGuard no_grad;
};

class Replay {
 public:
  Replay(const RecordedKernelCall& call, const ExecuteKernel& execute,
         const std::vector<KernelReference>& references, const KernelReplayOptions& options)
      : call_(call),
        execute_(execute),
        references_(references),
        options_(options),
        is_written_(call.before.size(), false) {}

  KernelReplay run() {
    prepare();
    if (report_.problem.empty()) executions();
    return std::move(report_);
  }

 private:
  // ---- preparation ----

  void prepare() {
    const OwnWork guard;
    for (std::size_t i = 0; i < call_.before.size(); ++i) {
      if (const auto why = why_not_plain(call_.before[i]); !why.empty()) {
        report_.problem = "its argument " + call_.names[i] + " cannot be copied: " + why;
        return;
      }
    }
    auto all = call_.before;
    all.insert(all.end(), call_.results.begin(), call_.results.end());
    const auto bytes = nanlocator::bytes_of(all);
    const auto most = std::min(options_.bytes.value_or(std::numeric_limits<std::uint64_t>::max()),
                               free_host_memory() / 6);
    if (bytes > most) {
      report_.problem = "its arguments and results take " + std::to_string(bytes) +
                        " bytes, more than the limit of " + std::to_string(most);
      return;
    }
    before_ = bring_back(call_.before, call_.came_from);
    for (const auto& tensor : before_) {
      if (!tensor.is_cpu()) device_ = tensor.device();
    }
    std::vector<at::Tensor> seen = call_.after;
    seen.resize(call_.before.size());
    seen.insert(seen.end(), call_.results.begin(), call_.results.end());
    choose_output(seen);
    if (judged_ < 0) {
      report_.problem =
          "none of its outputs was bad, and the bad one of the record is not among them";
      return;
    }
    trained_ = on_host(seen[static_cast<std::size_t>(judged_)]);
    bad_ = bad_in(trained_);
    report_.output = name_of_output(static_cast<std::size_t>(judged_));
    report_.shape = trained_.sizes().vec();
    const auto judged = static_cast<std::size_t>(judged_);
    if (judged < is_written_.size()) is_written_[judged] = true;
    for (std::size_t i = 0; i < is_written_.size(); ++i) {
      before_checksums_.push_back(checksum_of(on_host(call_.before[i])));
      const bool is_known = seen[i].defined() && seen[i].sizes() == call_.before[i].sizes();
      if (is_known && before_checksums_[i] != checksum_of(on_host(seen[i]))) is_written_[i] = true;
    }
  }

  std::string name_of_output(std::size_t i) const {
    if (i < call_.names.size()) return call_.names[i];
    return "output[" + std::to_string(i - call_.names.size()) + "]";
  }

  void choose_output(const std::vector<at::Tensor>& seen) {
    const auto fits = [&](std::size_t i) {
      return seen[i].defined() && why_not_plain(seen[i]).empty() && is_float(seen[i]) &&
             seen[i].numel() > 0;
    };
    for (std::size_t i = 0; i < seen.size(); ++i) {
      if (fits(i) && name_of_output(i) == options_.role) judged_ = static_cast<int>(i);
    }
    for (std::size_t i = 0; judged_ < 0 && i < seen.size(); ++i) {
      if (fits(i) && count_of(bad_in(on_host(seen[i]))) > 0) judged_ = static_cast<int>(i);
    }
  }

  // ---- executions ----

  [[nodiscard]] double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began_).count();
  }
  [[nodiscard]] bool is_out_of_time() const {
    return options_.seconds && seconds() > *options_.seconds;
  }

  /// Checked before an execution. The first one may have compiled its kernel; the second one shows
  /// how long one takes.
  [[nodiscard]] std::string why_no_time() const {
    if (is_out_of_time()) return "no time was left for further executions";
    const bool is_known = executed_ >= 2 && options_.seconds;
    const double most = options_.seconds.value_or(0);
    if (!is_known || seconds() + latest_seconds_ * (planned() - executed_) <= most) return "";
    return "one execution takes " + number_text(latest_seconds_, 2) + " s, " +
           std::to_string(planned()) + " are needed, and the limit is " + number_text(most, 2) +
           " s";
  }
  /// As recorded, and with memory filled.
  [[nodiscard]] int planned() const { return options_.repeats + 6; }

  std::optional<Execution> execute(const Variation& variation) {
    if (auto why = why_no_time(); !why.empty()) {
      report_.problem = std::move(why);
      return std::nullopt;
    }
    const double before = seconds();
    auto execution = executed(variation);
    latest_seconds_ = seconds() - before;
    ++executed_;
    return execution;
  }

  std::optional<Execution> executed(const Variation& variation) {
    try {
      const KernelArguments arguments(call_, before_, variation, is_written_);
      std::vector<at::Tensor> results;
      {
        const Unobserved unobserved;
        const ScopedSettings settings(call_.settings);
        std::optional<PoisonedAllocations> poison;
        if (variation.allocated) poison.emplace(device_, *variation.allocated);
        results = execute_(arguments.tensors());
        if (device_.is_cuda()) at::detail::getCUDAHooks().deviceSynchronize(device_.index());
      }
      const OwnWork guard;
      Execution execution;
      execution.written_outside = arguments.written_outside();
      auto outputs = arguments.tensors();
      outputs.insert(outputs.end(), results.begin(), results.end());
      for (std::size_t i = 0; i < outputs.size(); ++i) {
        const bool is_known = outputs[i].defined() && why_not_plain(outputs[i]).empty();
        const at::Tensor host = is_known ? on_host(outputs[i]) : at::Tensor();
        execution.checksums.push_back(is_known ? checksum_of(host) : 0);
        if (static_cast<int>(i) == judged_) execution.judged = host;
      }
      if (!execution.judged.defined() || execution.judged.sizes() != trained_.sizes() ||
          execution.judged.scalar_type() != trained_.scalar_type()) {
        report_.problem = "its " + report_.output + " has another shape or dtype than in training";
        return std::nullopt;
      }
      return execution;
    } catch (const c10::Error& error) {
      report_.problem = error.what_without_backtrace();
    } catch (const std::exception& error) {
      report_.problem = error.what();
    }
    report_.problem = report_.problem.substr(0, report_.problem.find('\n'));
    return std::nullopt;
  }

  void executions() {
    std::vector<Execution> recorded;
    for (int i = 0; i < options_.repeats; ++i) {
      auto once = execute({});
      if (!once) return;
      ++report_.executions;
      for (std::size_t a = 0; a < is_written_.size(); ++a) {
        if (once->checksums[a] != before_checksums_[a]) is_written_[a] = true;
      }
      if (i > 0 && once->checksums != recorded.front().checksums) report_.has_same_bits = false;
      recorded.push_back(std::move(*once));
    }
    if (recorded.size() > 1 && !report_.has_same_bits) report_.has_same_bits = true;
    const auto run = [&](const Variation& variation) { return execute(variation); };
    const auto nan_written = run({.allocated = kNanByte, .written = kNanByte});
    if (!nan_written) return;
    const auto constant_written = run({.allocated = kConstantByte, .written = kConstantByte});
    if (!constant_written) return;
    const auto nan_allocated = run({.allocated = kNanByte});
    if (!nan_allocated) return;
    const auto constant_allocated = run({.allocated = kConstantByte});
    if (!constant_allocated) return;
    // The kernel may allocate memory that held NaN before. It is filled, so that any difference
    // comes from memory outside.
    const auto nan_outside = run({.allocated = kConstantByte, .outside = kNanByte});
    if (!nan_outside) return;
    const auto constant_outside = run({.allocated = kConstantByte, .outside = kConstantByte});
    if (!constant_outside) return;

    const Unobserved unobserved;  // references compute with autograd
    first_ = recorded.front().judged;
    unwritten_ = filled_with(nan_written->judged, kNanByte)
                     .logical_and(filled_with(constant_written->judged, kConstantByte));
    if (count_of(bad_) == 0) {  // the values in never-written memory were finite in training
      bad_ = unwritten_;
      if (count_of(bad_) == 0) {
        bad_ = bad_in(nan_allocated->judged)
                   .logical_and(bad_in(constant_allocated->judged).logical_not());
      }
    }
    are_written_read_ = !have_equal_bits(nan_written->judged, constant_written->judged, unwritten_);
    for (const Execution* each : std::initializer_list<const Execution*>{
             &recorded.front(), &*nan_outside, &*constant_outside}) {
      if (!each->written_outside) continue;
      report_.argument = call_.names[*each->written_outside];
      return conclude(KernelConclusion::writes_outside);
    }
    if (count_of(bad_) == 0) return conclude(KernelConclusion::not_bad_again);
    const auto is_bad_in = [&](const Execution& run_) {
      return is_subset(bad_, bad_in(run_.judged));
    };
    const auto is_finite_in = [&](const Execution& run_) {
      return count_of(bad_.logical_and(bad_in(run_.judged))) == 0;
    };
    if (is_subset(bad_, unwritten_)) {
      bad_ = unwritten_;
      judge_by_references();
      return conclude(KernelConclusion::leaves_unwritten);
    }
    if (is_bad_in(*nan_outside) && is_finite_in(*constant_outside)) {
      return conclude(KernelConclusion::reads_outside);
    }
    if (is_bad_in(*nan_allocated) && is_finite_in(*constant_allocated)) {
      return conclude(KernelConclusion::reads_unwritten);
    }
    const auto is_bad_again = [&](const Execution& each) {
      return bad_.equal(bad_in(each.judged));
    };
    const bool is_always = std::ranges::all_of(recorded, is_bad_again);
    if (!is_always) {
      const bool is_never = std::ranges::all_of(
          recorded, [&](const Execution& each) { return count_of(bad_in(each.judged)) == 0; });
      return conclude(is_never ? KernelConclusion::not_bad_again : KernelConclusion::varies);
    }
    if (const auto by_reference = judge_by_references()) return conclude(*by_reference);
    for (std::size_t i = 0; i < before_.size(); ++i) {
      const bool is_read = !is_written_[i] || are_written_read_;
      if (!is_read || !is_float(before_[i]) || count_of(bad_in(on_host(before_[i]))) == 0) continue;
      report_.argument = call_.names[i];
      return conclude(KernelConclusion::given_bad);
    }
    conclude(KernelConclusion::bad_again);
  }

  void conclude(KernelConclusion conclusion) {
    report_.conclusion = conclusion;
    report_.problem = report_.reference.empty() ? reference_left_out_ : "";
    report_.bad = count_of(bad_);
    const at::Tensor shown =
        at::where(bad_, std::numeric_limits<float>::quiet_NaN(), 0.0F).to(at::kFloat);
    report_.extent = extent_of(shown, report_.bad);
  }

  // ---- references ----

  static std::string no_time_for(const KernelReference& reference) {
    return "no time was left for " + reference.family;
  }

  /// "" if one execution is within the limits.
  [[nodiscard]] std::string why_left_out(const KernelReference& reference) const {
    if (is_out_of_time()) return no_time_for(reference);
    if (!options_.reference_limit) return "";
    const auto& limit = *options_.reference_limit;
    const Work work = work_of_reference(reference, before_);
    const auto exceeds = [&](double amount, double most, const char* verb, const char* unit) {
      return reference.family + " would " + verb + " " + number_text(amount, 2) + " " + unit +
             ", more than the limit of " + number_text(most, 2);
    };
    const double most_flops = device_.is_cpu() ? limit.flops_on_host : limit.flops_on_device;
    if (work.flops > most_flops) return exceeds(work.flops, most_flops, "compute", "FLOPs");
    // On the host: both outputs, their masks, the elements in which they agree.
    constexpr double kCompared = 6;
    const double compared = kCompared * 8 * static_cast<double>(bad_.numel());
    const double most_bytes = std::min(limit.bytes, static_cast<double>(free_host_memory()) / 2);
    const double bytes = work.bytes + compared;
    return bytes > most_bytes ? exceeds(bytes, most_bytes, "take", "bytes") : "";
  }

  /// A reference's values that may be the judged output, in float64 and its shape.
  std::vector<at::Tensor> values_of(const KernelReference& reference,
                                    const std::vector<at::Tensor>& inputs, at::ScalarType type) {
    std::vector<at::Tensor> converted = inputs;
    for (auto& tensor : converted) {
      tensor = is_float(tensor)
                   ? tensor.detach().to(tensor.is_complex() ? at::toComplexType(type) : type)
                   : tensor;
    }
    std::vector<at::Tensor> values;
    {
      const at::RecordFunctionGuard unobserved{false};
      const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
      values = reference.values(converted);
    }
    const auto numel = bad_.numel();
    for (auto& value : values) {
      if (!value.defined()) continue;
      value = comparable(on_host(value)).to(at::kDouble);
      value = value.numel() == numel ? value.view(bad_.sizes()) : at::Tensor();
    }
    return values;
  }

  struct Agreement {
    std::int64_t compared = 0;
    std::int64_t agreeing = 0;
    /// A proof needs agreement on nearly all of a sufficient share of the elements, which must
    /// differ.
    bool is_proof = false;
  };

  Agreement agreement(const at::Tensor& output, const at::Tensor& value,
                      const at::Tensor& left_out) const {
    constexpr std::int64_t kFewest = 8;
    constexpr double kShare = 0.95;
    const at::Tensor seen = comparable(output).to(at::kDouble);
    const at::Tensor is_compared = at::isfinite(seen).logical_and(left_out.logical_not());
    Agreement result;
    result.compared = count_of(is_compared);
    if (result.compared == 0) return result;
    const at::Tensor a = seen.masked_select(is_compared);
    const at::Tensor b = value.masked_select(is_compared);
    const double tolerance = tolerance_of(output.scalar_type());
    const at::Tensor finite = b.masked_select(at::isfinite(b));
    if (finite.numel() == 0) return result;
    const double scale = finite.square().mean().sqrt().item<double>();
    const at::Tensor is_close = a.sub(b).abs().le(b.abs().add(scale).mul(tolerance));
    result.agreeing = count_of(is_close);
    const double spread = finite.max().item<double>() - finite.min().item<double>();
    const auto close = static_cast<double>(result.agreeing);
    result.is_proof = result.compared >= kFewest && 4 * result.compared >= output.numel() &&
                      close >= kShare * static_cast<double>(result.compared) &&
                      spread > tolerance * scale;
    return result;
  }

  /// Whether this value fits the output's dtype at every bad element.
  [[nodiscard]] bool fits_at_bad(const at::Tensor& value) const {
    const at::Tensor at_bad = value.masked_select(bad_);
    return at_bad.abs().le(largest_of(trained_.scalar_type())).all().item<bool>();
  }

  /// Chooses the reference that judges, and applies it to the bad elements.
  std::optional<KernelConclusion> judge_by_references() {
    const std::vector<at::Tensor>& inputs = before_;
    const at::Tensor left_out = bad_.logical_or(unwritten_);
    std::optional<std::vector<at::Tensor>> scaled_inputs;
    std::optional<Execution> scaled;
    for (const auto& reference : references_) {
      if (auto why = why_left_out(reference); !why.empty()) {
        reference_left_out_ = std::move(why);
        continue;
      }
      try {
        const auto values = values_of(reference, inputs, at::kDouble);
        std::optional<std::size_t> chosen;
        Agreement best;
        for (std::size_t i = 0; i < values.size(); ++i) {
          if (!values[i].defined()) continue;
          const Agreement found = agreement(first_, values[i], left_out);
          if (found.is_proof && found.agreeing > best.agreeing) {
            best = found;
            chosen = i;
          }
        }
        if (!chosen) {  // nearly all of it is bad: compares smaller inputs instead
          if (!scaled_inputs) {
            const KernelArguments arguments(call_, before_, {.is_scaled = true}, is_written_);
            scaled_inputs = arguments.tensors();
            for (auto& tensor : *scaled_inputs) tensor = tensor.clone();
            scaled = execute({.is_scaled = true});
          }
          if (is_out_of_time()) reference_left_out_ = no_time_for(reference);
          if (!scaled || is_out_of_time()) continue;
          const auto smaller = values_of(reference, *scaled_inputs, at::kDouble);
          for (std::size_t i = 0; i < smaller.size(); ++i) {
            if (!smaller[i].defined() || !values[i].defined()) continue;
            const Agreement found = agreement(scaled->judged, smaller[i], unwritten_);
            if (found.is_proof && found.agreeing > best.agreeing) {
              best = found;
              chosen = i;
              report_.is_compared_scaled = true;
            }
          }
        }
        if (!chosen) continue;
        report_.reference = reference.family;
        report_.compared = best.compared;
        report_.agreeing = best.agreeing;
        return judged_by(reference, inputs, *chosen, values[*chosen]);
      } catch (const std::exception&) {
        // The reference does not accept these arguments.
      }
    }
    report_.problem.clear();
    return std::nullopt;
  }

  std::optional<KernelConclusion> judged_by(const KernelReference& reference,
                                            const std::vector<at::Tensor>& inputs,
                                            std::size_t which, const at::Tensor& in_float64) {
    const at::Tensor at_bad = in_float64.masked_select(bad_);
    if (at::isfinite(at_bad).logical_not().all().item<bool>()) return KernelConclusion::undefined;
    constexpr double kFarOff = 0.1;
    const double largest = largest_of(trained_.scalar_type());
    if (at_bad.abs().gt(largest).all().item<bool>()) return KernelConclusion::overflows;
    if (!fits_at_bad(in_float64)) return std::nullopt;  // of both kinds
    for (const at::ScalarType type : {at::kFloat, trained_.scalar_type()}) {
      if (!at::isFloatingType(type) || c10::elementSize(type) < 2) continue;
      if (is_out_of_time()) return std::nullopt;
      try {
        const at::Tensor value = values_of(reference, inputs, type).at(which);
        if (!fits_at_bad(value)) return KernelConclusion::overflows;
        // An intermediate infinity may become zero.
        const at::Tensor difference = value.masked_select(bad_).sub(at_bad).abs();
        const double scale = at_bad.square().mean().sqrt().item<double>();
        const at::Tensor bound = at_bad.abs().add(scale).mul(kFarOff);
        if (type == at::kFloat && difference.gt(bound).any().item<bool>()) {
          return KernelConclusion::overflows;
        }
      } catch (const std::exception&) {
        if (type == at::kFloat) return std::nullopt;
      }
    }
    report_.is_reference_finite = true;
    return KernelConclusion::wrong_values;
  }

  const RecordedKernelCall& call_;
  const ExecuteKernel& execute_;
  const std::vector<KernelReference>& references_;
  const KernelReplayOptions& options_;
  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  std::string reference_left_out_;  // which one, and why
  int executed_ = 0;
  double latest_seconds_ = 0;  // of one execution
  KernelReplay report_;
  std::vector<at::Tensor> before_;  // on their original devices
  std::vector<std::uint32_t> before_checksums_;
  at::Device device_ = at::kCPU;
  std::vector<bool> is_written_;  // of the arguments
  bool are_written_read_ = false;
  int judged_ = -1;     // index among arguments, then results
  at::Tensor trained_;  // the judged output in training, in host memory
  at::Tensor first_;    // of the first execution
  at::Tensor bad_;      // the elements that the conclusion is about, in the shape of real numbers
  at::Tensor unwritten_;
};

}  // namespace

Beside beside_of(const at::Tensor& tensor) {
  const OwnWork guard;
  if (!has_plain_memory(tensor)) return Beside::finite;
  const auto reach = reach_of(tensor);
  const auto whole_bytes = static_cast<std::int64_t>(tensor.storage().nbytes());
  if (tensor.is_non_overlapping_and_dense() && reach.begin == 0 && reach.end == whole_bytes) {
    return Beside::nothing;
  }
  if (!is_plainly_observable(tensor)) return Beside::finite;
  const auto item = static_cast<std::int64_t>(tensor.element_size());
  auto whole = at::empty({0}, tensor.options());
  whole.set_(tensor.storage(), 0, {whole_bytes / item}, {1});
  const auto bad = [](const at::Tensor& each) {
    return stats_of(each, at::get_num_threads()).nonfinite();
  };
  const auto in_whole = bad(whole);
  return in_whole > 0 && in_whole > bad(once_of(tensor)) ? Beside::bad : Beside::finite;
}

KernelReplay replay_kernel(const RecordedKernelCall& call, const ExecuteKernel& execute,
                           const std::vector<KernelReference>& references,
                           const KernelReplayOptions& options) {
  if (options.repeats < 1) {
    throw UsageError("replay: " + std::to_string(options.repeats) +
                     " repeats; at least 1 is needed");
  }
  return Replay(call, execute, references, options).run();
}

}  // namespace nanlocator::inline replay_room
