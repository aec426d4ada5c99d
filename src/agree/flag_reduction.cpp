#include "nanlocator/agree/flag_reduction.hpp"

#include <algorithm>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "agree/torch_versions.hpp"
#include "nanlocator/error.hpp"

namespace nanlocator::inline agree_room {
namespace {

class ProcessGroupReduction : public FlagReduction {
 public:
  explicit ProcessGroupReduction(c10::intrusive_ptr<c10d::ProcessGroup> group)
      : group_(std::move(group)) {}

  int rank() const override { return group_->getRank(); }
  int size() const override { return group_->getSize(); }

  bool reduces_on(at::DeviceType device) const override {
    const auto devices = group_->getDeviceTypes();
    return std::ranges::any_of(devices, [&](const auto& d) { return d.type() == device; });
  }

  void start(const at::Tensor& flag) override {
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::MAX;
    std::vector<at::Tensor> tensors{flag};
    pending_ = group_->allreduce(tensors, options);
  }

  void finish() override {
    if (!std::exchange(pending_, {})->wait()) {
      throw std::runtime_error("the collective was aborted");
    }
  }

  void check() override {}  // its backend's watchdog does that

  void abort() noexcept override {
    try {
      abort_group(*group_);
    } catch (...) {
      // This backend cannot abort; its own timeout ends the wait.
    }
  }

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  c10::intrusive_ptr<c10d::Work> pending_;
};

}  // namespace

std::unique_ptr<FlagReduction> flag_reduction_over(c10::intrusive_ptr<c10d::ProcessGroup> group) {
  if (!group) {
    throw UsageError(
        "Communicator: the process group is null. A single process passes no Communicator at all.");
  }
  return std::make_unique<ProcessGroupReduction>(std::move(group));
}

}  // namespace nanlocator::inline agree_room
