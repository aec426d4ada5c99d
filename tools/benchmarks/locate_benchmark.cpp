// Measures time and memory of a verdict over many ranks: `tools/bench locate`.
//
// Full-spread incidents at level boundaries from the tests' simulator, tp 8 x pp 16 x dp:
//   one fault       a NaN born in forward on one rank: its replica passed it on, and every rank got
//                   it out of the reduction of gradients
//   every replica   the loss of each replica is 0/0: as many origins as replicas
// Each size runs in its own process, so that memory is separate. Ledgers are written as text, rank
// by rank, and read back: the measurements cover the reader and locate(), not the simulator.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <string>
#include <vector>

#include "locate/crossing_simulator/pass.hpp"
#include "nanlocator/locate/locate.hpp"
#include "nanlocator/report/terminal.hpp"
#include "nanlocator/report/verdict_json.hpp"

namespace {

using nanlocator::Ledger;
using nanlocator::Sighting;
using nanlocator::pipeline::Fault;
using nanlocator::pipeline::Pass;
using nanlocator::pipeline::Plant;
using nanlocator::simulator::Layout;

constexpr int kDefaultSizes[] = {1024, 2048, 4096, 8192, 16384};
constexpr int kRounds = 3;

Layout layout_of(int world) {
  return {.tp = 8, .pp = 16, .dp = world / (8 * 16), .has_biases = true};
}

std::vector<Fault> faults_of(const Layout& layout, bool is_everywhere) {
  if (!is_everywhere) return {{.plant = Plant::operator_forward, .tp = 3, .stage = 5}};
  std::vector<Fault> faults;
  for (int dp = 0; dp < layout.dp; ++dp) {
    faults.push_back({.plant = Plant::empty_loss, .dp = dp, .stage = layout.stages() - 1});
  }
  return faults;
}

/// CPU time of this process, which has one thread, so that other load does not count.
double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// Memory of this process, in MiB: "VmRSS:" now, "VmHWM:" at its peak since `forget_peak`.
double memory(const char* field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(field)) return std::atof(line.c_str() + std::strlen(field)) / 1024;
  }
  return 0;
}
void forget_peak() {
  std::ofstream("/proc/self/clear_refs") << "5";  // proc(5): resets the peak to the current value
}

struct Reading {
  std::vector<Ledger> ledgers;
  double seconds = 0;
  double megabytes = 0;
};

Reading read_ledgers(const Layout& layout, bool is_everywhere) {
  const Pass pass(layout, faults_of(layout, is_everywhere), 1);
  Reading reading;
  reading.ledgers.reserve(static_cast<std::size_t>(layout.world()));
  for (int rank = 0; rank < layout.world(); ++rank) {
    const std::string text = to_jsonl(pass.ledger_of(rank));
    const double start = cpu_seconds();
    reading.ledgers.push_back(std::move(nanlocator::ledgers_from_jsonl(text, "text").front()));
    reading.seconds += cpu_seconds() - start;
    reading.megabytes += static_cast<double>(text.size()) / 1e6;
  }
  return reading;
}

void measure(int world, bool is_everywhere) {
  const Layout layout = layout_of(world);
  const Reading reading = read_ledgers(layout, is_everywhere);
  std::size_t sightings = 0;
  for (const Ledger& ledger : reading.ledgers) sightings += ledger.sightings.size();

  forget_peak();
  const double held = memory("VmRSS:");
  std::vector<double> seconds;
  nanlocator::Verdict verdict;
  for (int round = 0; round < kRounds; ++round) {
    const double start = cpu_seconds();
    verdict = locate(reading.ledgers, world);
    seconds.push_back(cpu_seconds() - start);
  }
  const double peak = memory("VmHWM:");
  std::ranges::sort(seconds);
  const double median = seconds[kRounds / 2];
  const std::string text = format_verdict(verdict, {});
  std::printf("| %s | %d | %.0f | %.0f | %.2f | %.3f | %.1f | %.0f | %.0f | %zu | %td | %.0f |\n",
              is_everywhere ? "every replica" : "one fault", world,
              static_cast<double>(sightings) / world, reading.megabytes, reading.seconds, median,
              1e6 * median / world, held, peak, verdict.origins.size(),
              std::ranges::count(text, '\n'), static_cast<double>(to_json(verdict).size()) / 1e3);
}

/// True if the process succeeded.
bool measure_in_own_process(int world, bool is_everywhere) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    measure(world, is_everywhere);
    std::fflush(stdout);
    _exit(0);
  }
  int status = 0;
  return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) &&
         WEXITSTATUS(status) == 0;
}

}  // namespace

int main(int count, char** arguments) {
  std::vector<int> sizes;
  for (int i = 1; i < count; ++i) {
    const int world = std::atoi(arguments[i]);
    if (world < 128 || world % 128 != 0) {
      const bool is_help = std::string(arguments[i]) == "--help";
      std::fprintf(is_help ? stdout : stderr,
                   "tools/bench locate [RANKS ...]   multiples of 128; 1024 to 16384 by default\n"
                   "example: tools/bench locate 1024 16384\n");
      return is_help ? 0 : 2;
    }
    sizes.push_back(world);
  }
  if (sizes.empty()) sizes.assign(std::begin(kDefaultSizes), std::end(kDefaultSizes));
  std::printf(
      "| incident | ranks | sightings a rank | text, MB | reading, s | locate, s | locate, µs a "
      "rank "
      "| ledgers, MiB | peak with locate, MiB | origins | lines | verdict.json, kB |\n"
      "|---|---|---|---|---|---|---|---|---|---|---|---|\n");
  bool is_well = true;
  for (const bool is_everywhere : {false, true}) {
    for (const int world : sizes) is_well &= measure_in_own_process(world, is_everywhere);
  }
  return is_well ? 0 : 1;
}
