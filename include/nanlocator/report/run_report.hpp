// Everything readable that a run wrote about one bad step: the input of the page.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "nanlocator/record/history.hpp"
#include "nanlocator/record/ledger.hpp"
#include "nanlocator/verdict/verdict.hpp"

namespace nanlocator::inline report_room {

/// run.json for display: values as printed text.
struct RunDescription {
  std::string run_id;
  int attempt = 0;
  std::string started;  // UTC
  std::string nanlocator_version;
  std::string torch_version;
  std::string integration;
  std::string level;
  std::string host;  // of rank 0
  int world_size = 0;
  std::vector<std::pair<std::string, std::string>> options;
  std::vector<std::string> not_covered;
};

/// Elements of a two-dimensional cut through a tensor around its first bad element.
struct TensorWindow {
  std::string name;  // "output[0]"
  std::string dtype;
  std::vector<std::int64_t> shape;  // of the whole tensor
  std::vector<std::int64_t> fixed;  // indices of the leading dimensions that the cut fixes
  std::int64_t first_row = 0;       // of the window's first element, in the last two dimensions
  std::int64_t first_column = 0;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::vector<double> values;           // row-major, rows * columns; NaN and Inf included
  std::vector<std::int64_t> first_bad;  // index per dimension
};

/// The windows of the origin at position `origin` of the verdict.
struct OriginWindows {
  std::size_t origin = 0;
  std::vector<TensorWindow> windows;
};

struct RunReport {
  Verdict verdict;
  std::string run_dir;  // as the user named it; printed commands are relative to it
  std::optional<RunDescription> run;
  std::vector<Ledger> ledgers;     // of the verdict's iteration, by rank; ranks may be missing
  std::vector<History> histories;  // by rank; may be empty
  std::vector<OriginWindows> windows;
  std::vector<std::string> notes;  // files and records that could not be read
};

}  // namespace nanlocator::inline report_room
