#include "operators/torch_versions.hpp"

#include <algorithm>
#include <array>
#include <string_view>

#if NANLOCATOR_TORCH_BEFORE(2, 11)
#include <dlfcn.h>
#include <execinfo.h>
#else
#include <pthread.h>
#endif

namespace nanlocator::inline operators_room {

#if NANLOCATOR_TORCH_BEFORE(2, 11)

bool is_thread_of_gloo() noexcept {
  std::array<void*, 128> calls{};
  const int depth = backtrace(calls.data(), static_cast<int>(calls.size()));
  return std::any_of(calls.begin(), calls.begin() + depth, [](const void* address) {
    Dl_info function{};
    return dladdr(address, &function) != 0 && function.dli_sname != nullptr &&
           std::string_view(function.dli_sname).find("ProcessGroupGloo7runLoop") !=
               std::string_view::npos;
  });
}

#else

bool is_thread_of_gloo() noexcept {
  std::array<char, 16> name{};  // Linux's maximum
  return pthread_getname_np(pthread_self(), name.data(), name.size()) == 0 &&
         std::string_view(name.data()) == "pt_gloo_runloop";
}

#endif

}  // namespace nanlocator::inline operators_room
