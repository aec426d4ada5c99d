#include "netcheck/host_process.hpp"

#include <fstream>
#include <sstream>

namespace nanlocator::netcheck {

std::string HostProcess::fate() const {
  return is_stopped() ? "stopped" : has_ended() ? "ended" : "";
}

HostProcess read_process(int process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string line;
  HostProcess found;
  if (!std::getline(file, line)) return found;
  line.erase(0, line.find_last_of(')') + 1);  // the name before may contain parentheses
  std::istringstream(line) >> found.state >> found.parent;
  return found;
}

}  // namespace nanlocator::netcheck
