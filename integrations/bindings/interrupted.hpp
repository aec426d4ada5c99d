// Carries KeyboardInterrupt and SystemExit through the engine, which catches only std::exception,
// so that they end a re-run at once.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <utility>

namespace nanlocator {

struct Interrupted {
  pybind11::error_already_set error;
};

/// Runs `work` without the GIL.
template <typename Work>
auto released(const Work& work) {
  try {
    const pybind11::gil_scoped_release no_gil;
    return work();
  } catch (Interrupted& interrupted) {
    throw std::move(interrupted.error);
  }
}

}  // namespace nanlocator
