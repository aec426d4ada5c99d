// `nanlocator report --watch`: prints a running job's verdicts as they appear.
#pragma once

#include <chrono>
#include <filesystem>

namespace nanlocator::command {

/// Reads the run's folder every `interval`, even before it exists. Prints each new verdict once,
/// and one line with the run's status, which a terminal refreshes in place. Returns kFindings or
/// kClean when the run has stopped, or on SIGINT and SIGTERM. Reads the run's records (status.json,
/// verdicts), not the ledgers, so it hardly loads the shared disk.
[[nodiscard]] int watch(const std::filesystem::path& directory, std::chrono::milliseconds interval);

}  // namespace nanlocator::command
