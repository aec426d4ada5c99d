#include "netcheck/conclusion.hpp"

#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <thread>
#include <vector>

#include "nanlocator/files/atomic_file.hpp"
#include "netcheck/host_process.hpp"
#include "netcheck/text.hpp"
#include "netcheck/verdict.hpp"
#include "netcheck/write_all.hpp"

namespace nanlocator::netcheck {
namespace {

using Json = nlohmann::ordered_json;
using std::chrono::milliseconds;

constexpr milliseconds kPeersLook{50};
// The time, from the first request for the end, in which the surviving ranks write their results,
// even on a busy machine. With the report it is far below the 30 s that torchrun allows after
// SIGTERM.
constexpr milliseconds kGrace{6'000};
constexpr milliseconds kConfirmDeath{600};  // a result may be on its way
constexpr milliseconds kUntilAllHaveLeft{10'000};

Json to_json(const Report& report) {
  return {
      {"exit_code", report.exit_code}, {"headline", report.headline}, {"missing", report.missing}};
}

Report report_from(const std::string& text) {
  const auto json = Json::parse(text);
  return {json.at("exit_code"), json.at("headline"), json.at("missing").get<std::vector<int>>()};
}

std::string dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace

Conclusion::Conclusion(CheckStore& store, const RankCheckOptions& options,
                       const std::atomic<int>& signal)
    : store_(store), options_(options), signal_(signal) {}

void Conclusion::put_place(const Json& place) {
  store_.put(of_rank("place", options_.rank), dump(place));
}

void Conclusion::request_end() {
  store_.put("end", "");
}

bool Conclusion::is_end_requested() {
  if (requested_ == Clock::time_point::max() && store_.has("end")) requested_ = Clock::now();
  return requested_ != Clock::time_point::max();
}

bool Conclusion::has_been_requested_for(Clock::duration time) {
  return is_end_requested() && Clock::now() > requested_ + time;
}

Report Conclusion::conclude(const std::string& result, bool requests_end) {
  store_.put(of_rank("result", options_.rank), result);
  if (requests_end) request_end();
  bool has_lost_the_turn = false;
  for (;; std::this_thread::sleep_for(kPeersLook)) {
    if (store_.has("report")) return report_from(store_.get("report"));
    if (!has_lost_the_turn && is_my_turn()) {
      if (store_.is_first_to_put("reporter")) return report(gather_results());
      has_lost_the_turn = true;
    }
    if (has_lost_the_turn && has_been_requested_for(3 * kGrace)) {
      throw Error("the reporting rank wrote no report");
    }
  }
}

// True for the lowest surviving rank: lower ones are gone, or had time enough.
bool Conclusion::is_my_turn() {
  if (options_.rank == 0) return true;
  if (!is_end_requested()) return false;
  if (has_been_requested_for(2 * kGrace)) return true;
  std::set<int> below;
  for (int rank = 0; rank < options_.rank; ++rank) {
    if (store_.has(of_rank("result", rank))) return false;
    below.insert(rank);
  }
  return gone_ranks(below) == below;
}

// The members of `missing` whose process on this host has ended or is stopped.
std::set<int> Conclusion::gone_ranks(const std::set<int>& missing) {
  std::set<int> gone;
  for (const int rank : missing) {
    if (!result_of_missing(rank).at("process").get<std::string>().empty()) gone.insert(rank);
  }
  return gone;
}

Json Conclusion::result_of_missing(int rank) {
  Json known_of = {{"rank", rank}, {"answered", false}, {"ended", ""}, {"process", ""}};
  if (!store_.has(of_rank("place", rank))) return known_of;
  const auto known = Json::parse(store_.get(of_rank("place", rank)));
  for (const char* name : {"host", "local_rank", "place"}) known_of[name] = known.at(name);
  if (known.at("host") == options_.host) {
    known_of["process"] = read_process(known.at("process")).fate();
  }
  return known_of;
}

Json Conclusion::gather_results() {
  std::set<int> missing;
  for (int rank = 0; rank < options_.world_size; ++rank) missing.insert(rank);
  std::vector<Json> results(options_.world_size);
  for (; !missing.empty(); std::this_thread::sleep_for(kPeersLook)) {
    std::erase_if(missing, [&](int rank) {
      if (!store_.has(of_rank("result", rank))) return false;
      results[rank] = Json::parse(store_.get(of_rank("result", rank)));
      return true;
    });
    if (!is_end_requested() && signal_ != 0) request_end();
    if (has_been_requested_for(kGrace)) break;
    if (has_been_requested_for(kConfirmDeath) && gone_ranks(missing) == missing) break;
  }
  for (const int rank : missing) results[rank] = result_of_missing(rank);
  Json all = {{"world_size", options_.world_size}, {"backend", options_.backend}};
  all["seconds"] = std::chrono::duration<double>(Clock::now() - start_).count();
  all["differences"] = Json::array();
  for (const auto& each : results) {
    for (const auto& difference : each.value("differences", Json::array())) {
      all["differences"].push_back(difference);
    }
  }
  all["ranks"] = std::move(results);
  return all;
}

Report Conclusion::report(const Json& results) {
  const auto verdict = make_verdict(dump(results));
  Report report{.headline = headline_of(verdict)};
  if (const auto lost = write(verdict); !lost.empty()) {
    report.headline += " (" + lost + ")";
  } else if (Json::parse(verdict).at("verdict") == "healthy") {
    report.exit_code = kHealthy;
  }
  for (const auto& each : results.at("ranks")) {
    if (!each.at("answered").get<bool>()) report.missing.push_back(each.at("rank"));
  }
  store_.put("report", dump(to_json(report)));
  wait_until_all_have_left();
  return report;
}

// What could not be written, or "". The verdict survives the loss of its file or standard output.
std::string Conclusion::write(const std::string& verdict) const {
  std::string lost;
  const auto text =
      options_.as_json ? verdict + "\n" : format_verdict(verdict, {.colour = options_.colour});
  if (!write_all(options_.terminal, text)) {
    lost = std::string("cannot write to standard output: ") + std::strerror(errno);
    write_all(STDERR_FILENO, text);
  }
  try {
    if (!options_.output.empty()) write_file_atomically(options_.output, verdict + "\n");
  } catch (const std::exception& error) {
    lost = error.what();
  }
  if (!lost.empty()) write_all(STDERR_FILENO, "netcheck: " + lost + "\n");
  return lost;
}

// The Store may live in this process, so it exits after all ranks that still answer.
void Conclusion::wait_until_all_have_left() {
  const auto until = Clock::now() + kUntilAllHaveLeft;
  for (int rank = 0; rank < options_.world_size; ++rank) {
    if (rank == options_.rank || !store_.has(of_rank("result", rank))) continue;
    while (!store_.has(of_rank("left", rank)) && Clock::now() < until) {
      std::this_thread::sleep_for(kPeersLook / 5);
    }
  }
}

void Conclusion::leave(const Report& report) {
  try {
    for (const int rank : report.missing) end_if_stopped(rank);
    store_.put(of_rank("left", options_.rank), "");
  } catch (const StoreLost&) {
    // The rank that hosts the Store may have left first. The report has been read.
  }
}

// torchrun waits 30 s for a stopped process, which cannot receive SIGTERM. Only ends siblings,
// which the same launcher started.
void Conclusion::end_if_stopped(int rank) {
  if (!store_.has(of_rank("place", rank))) return;
  const auto known = Json::parse(store_.get(of_rank("place", rank)));
  if (known.at("host") != options_.host) return;
  const int process = known.at("process");
  const auto found = read_process(process);
  if (found.is_stopped() && found.parent == ::getppid()) ::kill(process, SIGKILL);
}

}  // namespace nanlocator::netcheck
