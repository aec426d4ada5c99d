#include "agree/torch_versions.hpp"

#include <torch/version.h>

#include "nanlocator/error.hpp"

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 7
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace nanlocator::inline agree_room {
namespace {

class Prefix : public c10d::PrefixStore {
 public:
  static const std::string& of(const c10d::PrefixStore& store) {
    return store.*(&Prefix::prefix_);  // Torch 2.6 has no accessor for it
  }
};

}  // namespace

c10::intrusive_ptr<c10d::Store> clone_of(const c10::intrusive_ptr<c10d::Store>& store) {
  if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get())) {
    return c10::make_intrusive<c10d::PrefixStore>(Prefix::of(*prefixed),
                                                  clone_of(prefixed->getUnderlyingStore()));
  }
  const auto* server = dynamic_cast<const c10d::TCPStore*>(store.get());
  if (server == nullptr) throw UnsupportedError("Torch before 2.7 cannot clone this Store");
  c10d::TCPStoreOptions options;
  options.port = server->getPort();
  options.waitWorkers = false;
  options.timeout = server->getTimeout();
  options.useLibUV = server->isLibUvBackend();
  return c10::make_intrusive<c10d::TCPStore>(server->getHost(), options);
}

void abort_group(c10d::ProcessGroup& /*group*/) {
  throw UnsupportedError("Torch before 2.7 cannot abort a process group");
}

}  // namespace nanlocator::inline agree_room

#else

namespace nanlocator::inline agree_room {

c10::intrusive_ptr<c10d::Store> clone_of(const c10::intrusive_ptr<c10d::Store>& store) {
  return store->clone();
}

void abort_group(c10d::ProcessGroup& group) {
  group.abort();
}

}  // namespace nanlocator::inline agree_room

#endif
