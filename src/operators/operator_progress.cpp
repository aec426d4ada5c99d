#include "operators/operator_progress.hpp"

#include <mutex>
#include <utility>

namespace nanlocator::inline operators_room {
namespace {

// For the life of the process: a callback may still run on another thread after its owner is gone.
struct Noted {
  std::mutex mutex;
  OperatorProgress::Latest latest;
};

Noted& noted() {
  static Noted* const kept = new Noted;  // threads of autograd outlive static destructors
  return *kept;
}

void note(std::string op) {
  const std::lock_guard lock(noted().mutex);
  noted().latest = {std::move(op), std::chrono::steady_clock::now()};
}

std::unique_ptr<at::ObserverContext> on_begin(const at::RecordFunction& call) {
  note(call.name());
  return nullptr;
}

}  // namespace

OperatorProgress::OperatorProgress() {
  note("");
  callback_ = at::addGlobalCallback(
      at::RecordFunctionCallback(&on_begin).scopes({at::RecordScope::FUNCTION}));
}

OperatorProgress::~OperatorProgress() {
  at::removeCallback(callback_);
}

OperatorProgress::Latest OperatorProgress::latest() const {
  const std::lock_guard lock(noted().mutex);
  return noted().latest;
}

}  // namespace nanlocator::inline operators_room
