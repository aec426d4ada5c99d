// Another rank's process, where it is on this host.
#pragma once

#include <string>

namespace nanlocator::netcheck {

/// As /proc/PID/stat has it (proc_pid_stat(5)).
struct HostProcess {
  char state = 'X';
  int parent = 0;

  [[nodiscard]] bool is_stopped() const { return state == 'T' || state == 't'; }
  [[nodiscard]] bool has_ended() const { return state == 'Z' || state == 'X'; }
  /// "ended", "stopped" or, where it runs, "".
  [[nodiscard]] std::string what_became() const;
};

/// A process that does not exist has ended.
[[nodiscard]] HostProcess look_at_process(int process);

}  // namespace nanlocator::netcheck
