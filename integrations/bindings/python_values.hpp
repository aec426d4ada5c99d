// Conversion of Python values for a bundle.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <string>
#include <vector>

#include "nanlocator/record/bundle.hpp"
#include "nanlocator/replay/operator_call.hpp"

namespace nanlocator {

/// Keeps tensors, numbers, texts, None, tuples, lists, dictionaries with text keys, dataclasses and
/// ModelOutputs; everything else is `unsupported`, with its repr. Tensors are collected in the
/// order of their names: "argument.0", "argument.attention_mask". Needs the GIL.
class ValueConverter {
 public:
  explicit ValueConverter(StorageCollector& storages) : storages_(storages) {}

  BundleValue value(const pybind11::handle& object, const std::string& name, int depth = 0);
  /// Converts each item; empty for None.
  std::vector<BundleValue> values(const pybind11::object& sequence, const std::string& name);

 private:
  void dictionary(const pybind11::dict& items, const std::string& name, int depth,
                  BundleValue& result);

  StorageCollector& storages_;
};

}  // namespace nanlocator
