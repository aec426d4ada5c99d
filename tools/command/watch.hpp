// `nanlocator report --watch`: a running job's verdicts, as they come.
#pragma once

#include <chrono>
#include <filesystem>

namespace nanlocator::command {

/// Looks at the run's folder every `interval`, also before it is there, and prints each new verdict
/// once and one line on how the run stands, which a terminal refreshes in place. Returns kFindings
/// or kClean when the run has stopped, or on SIGINT and SIGTERM. Reads what the run records
/// (status.json, verdicts), not the ledgers: it costs the shared disk next to nothing.
[[nodiscard]] int watch(const std::filesystem::path& directory, std::chrono::milliseconds interval);

}  // namespace nanlocator::command
