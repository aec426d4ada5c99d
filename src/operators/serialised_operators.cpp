#include "nanlocator/operators/serialised_operators.hpp"

#include <ATen/detail/CUDAHooksInterface.h>

#include <memory>
#include <mutex>
#include <utility>

#include "tensor/tensor_access.hpp"

namespace nanlocator::inline operators_room {
namespace {

using Wait = std::function<void()>;

struct Waiting {
  std::mutex mutex;
  std::shared_ptr<const Wait> wait;  // null: not serialising
};

Waiting& waiting() {
  static auto& waiting = *new Waiting;  // operators may run while the process ends
  return waiting;
}

void set_wait(std::shared_ptr<const Wait> wait) {
  Waiting& now = waiting();
  const std::lock_guard lock(now.mutex);
  now.wait = std::move(wait);
}

std::unique_ptr<at::ObserverContext> ignore_start(const at::RecordFunction&) {
  return nullptr;
}

void wait_at_end(const at::RecordFunction&, at::ObserverContext*) {
  std::shared_ptr<const Wait> wait;
  {
    Waiting& now = waiting();
    const std::lock_guard lock(now.mutex);
    wait = now.wait;
  }
  if (wait) (*wait)();
}

}  // namespace

void wait_for_current_device() {
  const auto& hooks = at::detail::getCUDAHooks();
  const c10::DeviceIndex device = hooks.hasCUDA() ? hooks.getCurrentDevice() : -1;
  if (device < 0 || !hooks.hasPrimaryContext(device)) return;
  if (!is_captured(at::Device(at::kCUDA, device))) hooks.deviceSynchronize(device);
}

SerialisedOperators::SerialisedOperators(std::function<void()> wait) {
  set_wait(std::make_shared<const Wait>(std::move(wait)));
  callback_ = at::addGlobalCallback(
      at::RecordFunctionCallback(&ignore_start, &wait_at_end).scopes({at::RecordScope::FUNCTION}));
}

SerialisedOperators::~SerialisedOperators() {
  at::removeCallback(callback_);
  set_wait(nullptr);  // callbacks of other threads may still be running
}

}  // namespace nanlocator::inline operators_room
