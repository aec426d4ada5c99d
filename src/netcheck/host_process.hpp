// The process of another rank on this host.
#pragma once

#include <string>

namespace nanlocator::netcheck {

/// From /proc/PID/stat (proc_pid_stat(5)).
struct HostProcess {
  char state = 'X';
  int parent = 0;

  [[nodiscard]] bool is_stopped() const { return state == 'T' || state == 't'; }
  [[nodiscard]] bool has_ended() const { return state == 'Z' || state == 'X'; }
  /// "ended", "stopped" or, if it runs, "".
  [[nodiscard]] std::string fate() const;
};

/// A process that does not exist has ended.
[[nodiscard]] HostProcess read_process(int process);

}  // namespace nanlocator::netcheck
