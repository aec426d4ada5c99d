// A process group that waits like NCCL: if a peer is gone, its collectives neither return nor fail
// until the group is aborted. Runs on gloo. A process can be made to die at one of nanlocator's
// flag reductions, between two passes.
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <csignal>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

namespace {

/// The number of nanlocator's flags reduced so far, and the number at which this process dies; 0:
/// never.
std::atomic<int> flags = 0, last_flag = 0;

class PatientWork : public c10d::Work {
 public:
  PatientWork(c10::intrusive_ptr<c10d::Work> inner, std::shared_ptr<std::atomic<bool>> is_aborted)
      : inner_(std::move(inner)), is_aborted_(std::move(is_aborted)) {}

  bool isCompleted() override { return *is_aborted_ || inner_->isCompleted(); }
  bool wait(std::chrono::milliseconds timeout) override {
    bool has_failed = false;
    while (!*is_aborted_) {
      if (!has_failed && inner_->isCompleted()) {
        try {
          return inner_->wait(timeout);
        } catch (const std::exception&) {
          has_failed = true;
        }
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    throw std::runtime_error("the collective was aborted by ProcessGroup.abort");
  }

 private:
  c10::intrusive_ptr<c10d::Work> inner_;
  std::shared_ptr<std::atomic<bool>> is_aborted_;
};

class PatientGroup : public c10d::Backend {
 public:
  explicit PatientGroup(c10::intrusive_ptr<c10d::Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}

  const std::string getBackendName() const override { return "patient"; }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    const bool is_flag = options.reduceOp == c10d::ReduceOp::MAX && tensors[0].numel() == 1;
    if (is_flag && ++flags == last_flag) (void)std::raise(SIGKILL);
    return patient(inner_->allreduce(tensors, options));
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    return patient(inner_->broadcast(tensors, options));
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    return patient(inner_->barrier(options));
  }
  void abort() override { *is_aborted_ = true; }

 private:
  c10::intrusive_ptr<c10d::Work> patient(c10::intrusive_ptr<c10d::Work> work) const {
    return c10::make_intrusive<PatientWork>(std::move(work), is_aborted_);
  }

  c10::intrusive_ptr<c10d::Backend> inner_;
  std::shared_ptr<std::atomic<bool>> is_aborted_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace

PYBIND11_MODULE(patient_group, m) {
  m.def("patient", [](const c10::intrusive_ptr<c10d::Backend>& gloo) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<PatientGroup>(gloo));
  });
  m.def("flags", [] { return flags.load(); });
  m.def("die_at_flag", [](int number) { last_flag = number; });
}
