// Guards around tensor work of nanlocator's own.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace nanlocator::inline tensor_room {

/// While one lives, operators on this thread are hidden from observers, autograd, autocast and
/// Python's dispatch modes.
struct OwnWork {
  OwnWork()
      : excluded(
            c10::autocast_dispatch_keyset |
            c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})) {}
  at::RecordFunctionGuard observers{false};
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard excluded;
};

}  // namespace nanlocator::inline tensor_room
