// The tensors of an origin around its first bad element, out of its bundle.
#pragma once

#include <vector>

#include "nanlocator/record/bundle.hpp"
#include "nanlocator/report/run_report.hpp"

namespace nanlocator::inline report_room {

/// Of the operator call (where none was kept, of the module call): its first outputs with a bad
/// element, and the inputs it may come from, each a cut of at most 32 x 48 around that element. An
/// input that is finite, of the output's shape, is cut at the output's element: it is what that
/// was made of. Tensors of integers are not outputs that can be bad, but inputs. Left out are
/// tensors without elements and types whose values are not known here.
[[nodiscard]] std::vector<TensorWindow> windows_of(const OpenBundle& bundle);

}  // namespace nanlocator::inline report_room
