#include "netcheck/verdict.hpp"

#include <algorithm>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "files/text.hpp"
#include "nanlocator/error.hpp"
#include "nanlocator/map/rank_coordinates.hpp"
#include "netcheck/attribution.hpp"
#include "netcheck/fingerprints.hpp"
#include "netcheck/rank_result.hpp"
#include "netcheck/timing.hpp"

namespace nanlocator::netcheck {
namespace {

using Json = nlohmann::ordered_json;

// Clocks further apart have broken runs: certificates, time stamps of checkpoints, order of logs.
constexpr double kClockSeconds = 60;

struct Finding {
  std::string kind;
  std::vector<int> ranks{};
  bool is_separated = true;  // false: one of the ranks, or the network between them
  std::vector<std::string> evidence{};
  std::string action{};
};

// The first ones matter most: a faulty device has many operators wrong.
std::string list_of(const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 3;
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kShown); ++i) append_item(text, names[i]);
  if (names.size() > kShown) text += " and " + std::to_string(names.size() - kShown) + " more";
  return text;
}

std::string milliseconds_text(double seconds) {
  return number_text(seconds * 1e3, 3) + " ms";
}

class Explanation {
 public:
  explicit Explanation(const Json& results) : results_(results) {
    for (const auto& each : results.at("ranks")) ranks_.push_back(rank_result_of(each));
  }

  Json verdict() {
    compare_fingerprints();
    find_faulty_devices();
    find_hangs();
    find_wrong_results();
    find_version_skew();
    find_slow_links();
    return to_json();
  }

 private:
  [[nodiscard]] std::string name_of(int rank) const {
    const auto& host = ranks_.at(rank).host;
    return "rank " + std::to_string(rank) + (host.empty() ? "" : " on host " + host);
  }

  [[nodiscard]] static std::string where(const Place& place) {
    return place.step + (place.group.empty() ? "" : " on group " + place.group);
  }

  // ------------------------------------------------------------------------------ faulty device

  void compare_fingerprints() {
    for (const auto& found : compare_bits(ranks_)) {
      const auto what =
          list_of(found.operators) + (found.operators.size() == 1 ? " gives" : " give");
      if (found.most.empty()) {
        findings_.push_back(
            {.kind = "faulty device",
             .ranks = found.ranks,
             .is_separated = false,
             .evidence = {what + " different bits on " + ranks_text(found.ranks) +
                          ", though all compute with " + found.computes_with},
             .action = "One of these devices may be faulty: run the check again with a third "
                       "one of the same kind, which shows which one differs."});
      }
      for (const int rank : found.most.empty() ? std::vector<int>() : found.ranks) {
        ranks_.at(rank).device_failures.push_back(
            what + " other bits than on " + ranks_text(found.most) +
            (found.most.size() == 1 ? ", which computes" : ", which compute") + " with the same " +
            found.computes_with);
      }
    }
  }

  void find_faulty_devices() {
    for (const auto& rank : ranks_) {
      if (rank.device_failures.empty()) continue;
      Finding finding{.kind = "faulty device", .ranks = {rank.rank}};
      for (const auto& failure : rank.device_failures) {
        finding.evidence.push_back(name_of(rank.rank) + ", device " +
                                   std::to_string(rank.local_rank) + ": " + failure);
      }
      finding.action = "Take this device out of the job and send the evidence to its vendor.";
      findings_.push_back(std::move(finding));
    }
  }

  // --------------------------------------------------------------------------------------- hang

  void find_hangs() {
    const bool is_whole = std::ranges::all_of(ranks_, [](const RankResult& rank) {
      return rank.has_answered && rank.ended == "finished";
    });
    if (is_whole) return;
    if (blame_the_lost()) return;
    if (blame_own_errors()) return;
    std::vector<Position> positions;
    for (const auto& rank : ranks_) {
      if (rank.ended == "finished" || !rank.place) continue;
      positions.push_back({rank.rank, *rank.place, rank.has_answered});
    }
    for (const auto& holdup : find_holdups(positions)) {
      if (holdup.waiting.empty() && !was_late(holdup.ranks)) continue;  // stopped while it worked
      blame(holdup);
    }
    if (findings_.empty() || findings_.back().kind != "hang") blame_errors_of_all();
  }

  [[nodiscard]] bool was_late(const std::vector<int>& ranks) const {
    return std::ranges::any_of(ranks, [&](int r) { return ranks_[r].ended == "deadline"; });
  }

  // Ranks that no longer answer: all other errors and waits are their consequence.
  bool blame_the_lost() {
    std::vector<int> waiting;
    for (const auto& rank : ranks_) {
      if (rank.has_answered && rank.ended != "finished") waiting.push_back(rank.rank);
    }
    bool is_any = false;
    for (const auto& rank : ranks_) {
      if (rank.has_answered) continue;
      is_any = true;
      Finding finding{.kind = "hang", .ranks = {rank.rank}};
      finding.evidence.push_back(how_it_was_lost(rank));
      if (!waiting.empty()) finding.evidence.push_back("Waiting for it: " + ranks_text(waiting));
      finding.action = rank.process == "stopped"
                           ? "Find out who stopped the process (a debugger, SIGSTOP, a frozen "
                             "container); its host answers otherwise."
                           : "Read the log of that rank and its host's kernel log (out of "
                             "memory, Xid), and restart without that host.";
      findings_.push_back(std::move(finding));
    }
    return is_any;
  }

  [[nodiscard]] std::string how_it_was_lost(const RankResult& rank) const {
    const std::string what = rank.process == "ended"     ? " has ended"
                             : rank.process == "stopped" ? " is stopped"
                                                         : " no longer answers";
    if (!rank.place) return name_of(rank.rank) + (rank.process.empty() ? " never arrived" : what);
    static const std::map<State, std::string> states = {{State::entered, " before it launched "},
                                                        {State::launched, " inside "},
                                                        {State::finished, " after "}};
    return name_of(rank.rank) + what + states.at(rank.place->state) + where(*rank.place);
  }

  // An exception that is not about a peer: that rank left, and the others wait for it.
  bool blame_own_errors() {
    bool is_any = false;
    for (const auto& rank : ranks_) {
      if (rank.ended != "failed") continue;
      is_any = true;
      Finding finding{.kind = "hang", .ranks = {rank.rank}};
      finding.evidence.push_back(name_of(rank.rank) + " left " +
                                 (rank.place ? where(*rank.place) : std::string("the check")) +
                                 " with an error: " + rank.error);
      finding.action = "Fix this error on that rank, and run the check again.";
      findings_.push_back(std::move(finding));
    }
    return is_any;
  }

  void blame(const Holdup& holdup) {
    const auto& place = *ranks_[holdup.ranks.front()].place;
    Finding finding{.kind = "hang", .ranks = holdup.ranks};
    finding.is_separated = holdup.ranks.size() == 1;
    if (place.ranks.empty()) {
      finding.evidence.push_back(name_of(holdup.ranks.front()) + " entered " + where(place) +
                                 " and was still in it at the deadline");
    } else if (place.state == State::entered) {
      finding.evidence.push_back(name_of(holdup.ranks.front()) + " reached " + where(place) +
                                 " and never launched it");
    } else if (finding.is_separated) {
      finding.evidence.push_back(name_of(holdup.ranks.front()) + " entered " + where(place) +
                                 " and never returned");
    } else {
      finding.evidence.push_back(
          ranks_text(holdup.ranks) + " all entered " + where(place) +
          ", and none returned: the fault is in one of them or in the network "
          "between them");
    }
    for (const int rank : holdup.ranks) {
      if (const auto& error = ranks_[rank].error; !error.empty()) {
        finding.evidence.push_back(name_of(rank) + ": " + error);
        break;
      }
    }
    if (!holdup.waiting.empty()) {
      finding.evidence.push_back(ranks_text(holdup.waiting) +
                                 (holdup.waiting.size() == 1 ? " waits for " : " wait for ") +
                                 (finding.is_separated ? "it" : "them"));
    }
    finding.action =
        finding.is_separated
            ? "Look at that rank's process (py-spy dump, gdb) and its host's kernel log; restart "
              "without that host."
            : "Check the network between these ranks; --pairs tries every connection.";
    findings_.push_back(std::move(finding));
  }

  void blame_errors_of_all() {
    Finding finding{.kind = "hang"};
    for (const auto& rank : ranks_) {
      if (rank.error.empty()) continue;
      finding.ranks.push_back(rank.rank);
      finding.evidence.push_back(name_of(rank.rank) + " in " +
                                 (rank.place ? where(*rank.place) : std::string("the start")) +
                                 ": " + rank.error);
    }
    if (finding.ranks.empty()) return;
    finding.is_separated = finding.ranks.size() == 1;
    finding.action = "Check the network of these ranks' hosts, starting with the first error.";
    findings_.push_back(std::move(finding));
  }

  // ------------------------------------------------------------------------------- wrong result

  struct WrongElement {
    std::set<int> senders;
    std::set<int> receivers;
    std::set<int> wrong;
  };

  void find_wrong_results() {
    // By (step, element): the same element on several receivers is one observation.
    std::map<std::pair<int, std::int64_t>, WrongElement> elements;
    std::map<int, std::vector<std::string>> said_by;
    for (const auto& rank : results_.at("ranks")) {
      for (const auto& wrong : rank.value("wrong", Json::array())) {
        auto& element = elements[{wrong.at("sequence"), wrong.at("element")}];
        element.senders = wrong.at("senders").get<std::set<int>>();
        element.receivers = wrong.at("receivers").get<std::set<int>>();
        element.wrong.insert(rank.at("rank").get<int>());
        said_by[rank.at("rank")].push_back(wrong.at("text"));
      }
    }
    std::vector<Candidates> observations;
    for (const auto& [key, element] : elements) {
      for (auto& suspects : suspects_of(element.senders, element.receivers, element.wrong)) {
        observations.push_back(std::move(suspects));
      }
    }
    for (const auto& fault : explain(observations)) {
      Finding finding{.kind = "wrong result", .ranks = {fault.begin(), fault.end()}};
      finding.is_separated = fault.size() == 1;
      const auto count = std::ranges::count_if(observations, [&](const Candidates& candidates) {
        return candidates.contains(*fault.begin());
      });
      const int witness =
          said_by.contains(*fault.begin()) ? *fault.begin() : said_by.begin()->first;
      finding.evidence.push_back(name_of(witness) + " " + said_by.at(witness).front());
      finding.evidence.push_back(
          std::to_string(count) + (count == 1 ? " wrong element" : " wrong elements") + " of " +
          std::to_string(observations.size()) + " are explained by " + ranks_text(finding.ranks) +
          (finding.is_separated ? "" : " or the network between them"));
      finding.action = "Data is corrupted here: exclude the host, then check its memory and links.";
      findings_.push_back(std::move(finding));
    }
  }

  // ------------------------------------------------------------------------------- version skew

  static std::string text_of(const Json& difference) {
    auto text = difference.at("what").get<std::string>() + " is ";
    const char* separator = "";
    for (const auto& [value, holders] : difference.at("values").items()) {
      text += separator + value + " on " + ranks_text(holders.get<std::vector<int>>());
      separator = ", ";
    }
    return text;
  }

  static bool is_small_clock_difference(const Json& difference) {
    return difference.at("what") == "clock" && difference.value("seconds", 0.0) <= kClockSeconds;
  }

  // Differences that are no fault.
  [[nodiscard]] std::vector<std::string> notes() const {
    std::vector<std::string> notes;
    for (const auto& difference : results_.value("differences", Json::array())) {
      if (is_small_clock_difference(difference)) notes.push_back(text_of(difference));
    }
    std::vector<int> cut;
    for (const auto& rank : ranks_) {
      if (rank.memory_tests_cut > 0 && rank.device_failures.empty()) cut.push_back(rank.rank);
    }
    if (!cut.empty()) {
      notes.push_back(
          "the time (half a second with --quick, else 20 s) was too short for all memory "
          "tests on " +
          ranks_text(cut));
    }
    return notes;
  }

  void find_version_skew() {
    Finding finding{.kind = "version skew"};
    std::set<int> ranks;
    for (const auto& difference : results_.value("differences", Json::array())) {
      if (is_small_clock_difference(difference)) continue;  // a note
      std::size_t most = 0;
      std::size_t with_most = 0;
      for (const auto& [value, holders] : difference.at("values").items()) {
        with_most = holders.size() == most ? with_most + 1 : holders.size() > most ? 1 : with_most;
        most = std::max(most, holders.size());
      }
      for (const auto& [value, holders] : difference.at("values").items()) {
        if (holders.size() == most && with_most == 1) continue;  // the majority's value
        for (const int rank : holders) ranks.insert(rank);
      }
      finding.evidence.push_back(text_of(difference));
    }
    if (finding.evidence.empty()) return;
    finding.ranks.assign(ranks.begin(), ranks.end());
    finding.action = "Give all ranks the same installation (one image), then run the check again.";
    findings_.push_back(std::move(finding));
  }

  // ---------------------------------------------------------------------------------- slow link

  void find_slow_links() {
    std::vector<Candidates> observations;
    std::vector<std::string> texts;
    for (const auto& rank : ranks_) {
      if (!rank.own_seconds) continue;
      std::vector<double> others;
      for (const auto& other : ranks_) {
        if (other.rank != rank.rank && other.own_seconds) others.push_back(*other.own_seconds);
      }
      if (others.empty() || !is_slow(*rank.own_seconds, median_of(others))) continue;
      observations.push_back({rank.rank});
      texts.push_back(
          name_of(rank.rank) + " takes at least " + milliseconds_text(*rank.own_seconds) +
          " to launch a collective, the others " + milliseconds_text(median_of(others)));
    }
    std::map<std::pair<int, int>, double> edges;
    for (const auto& rank : results_.at("ranks")) {
      for (const auto& edge : rank.value("edges", Json::array())) {
        edges[{edge.at("from"), edge.at("to")}] = edge.at("seconds");
      }
    }
    std::vector<double> all;
    for (const auto& [ends, seconds] : edges) all.push_back(seconds);
    for (const auto& [ends, seconds] : edges) {
      if (!is_slow(seconds, median_of(all))) continue;
      observations.push_back({ends.first, ends.second});
      texts.push_back("ranks " + std::to_string(ends.first) + " and " +
                      std::to_string(ends.second) + " need " + milliseconds_text(seconds) +
                      " for an exchange, the other neighbours " +
                      milliseconds_text(median_of(all)));
    }
    for (const auto& fault : explain(observations)) {
      Finding finding{.kind = "slow link", .ranks = {fault.begin(), fault.end()}};
      finding.is_separated = fault.size() == 1;
      for (std::size_t i = 0; i < observations.size(); ++i) {
        if (observations[i].contains(*fault.begin())) finding.evidence.push_back(texts[i]);
      }
      finding.action =
          finding.is_separated
              ? "Look at that host's load, clocks and network card; every step waits for it."
              : "Look at the link between these ranks.";
      findings_.push_back(std::move(finding));
    }
  }

  // -------------------------------------------------------------------------------------- JSON

  Json to_json() {
    Json verdict;
    verdict["version"] = 1;
    verdict["verdict"] = !findings_.empty() ? findings_.front().kind
                         : is_whole()       ? "healthy"
                                            : "interrupted";  // by a signal from outside
    verdict["world_size"] = ranks_.size();
    verdict["backend"] = results_.value("backend", "");
    verdict["seconds"] = results_.value("seconds", 0.0);
    std::set<std::string> hosts;
    verdict["ranks"] = findings_.empty() ? std::vector<int>() : findings_.front().ranks;
    verdict["hosts"] = Json::array();
    verdict["findings"] = Json::array();
    for (const auto& finding : findings_) {
      for (const int rank : finding.ranks) {
        const auto& host = ranks_.at(rank).host;
        if (finding.kind == "version skew") continue;  // its host only needs another installation
        if (!host.empty() && hosts.insert(host).second) verdict["hosts"].push_back(host);
      }
      verdict["findings"].push_back({{"kind", finding.kind},
                                     {"ranks", finding.ranks},
                                     {"separated", finding.is_separated},
                                     {"evidence", finding.evidence},
                                     {"action", finding.action}});
    }
    verdict["hints"] = hints();
    verdict["notes"] = notes();
    verdict["per_rank"] = Json::array();
    for (const auto& rank : ranks_) verdict["per_rank"].push_back(line_of(rank));
    verdict["collectives"] = timing_table(results_.at("ranks"));
    verdict["edges"] = Json::array();
    std::set<std::string> unsupported;
    for (const auto& rank : results_.at("ranks")) {
      for (const auto& edge : rank.value("edges", Json::array())) verdict["edges"].push_back(edge);
      for (const auto& text : rank.value("unsupported", Json::array())) unsupported.insert(text);
    }
    verdict["unsupported"] = unsupported;
    verdict["hardware"] = Json::array();
    for (const auto& rank : results_.at("ranks")) {
      if (rank.contains("hardware") && !rank["hardware"].empty()) {
        verdict["hardware"].push_back({{"rank", rank.at("rank")}, {"facts", rank["hardware"]}});
      }
    }
    return verdict;
  }

  // Suggestions from NCCL's documentation (Environment Variables) for further diagnosis.
  [[nodiscard]] std::vector<std::string> hints() const {
    const bool is_nccl_error = std::ranges::any_of(ranks_, [](const RankResult& rank) {
      return rank.error.find("NCCL") != std::string::npos;
    });
    const bool hangs_in_nccl = results_.value("backend", "") == "nccl" && !findings_.empty() &&
                               findings_.front().kind == "hang";
    if (!is_nccl_error && !hangs_in_nccl) return {};
    return {
        "NCCL_DEBUG=INFO prints what NCCL chose: interfaces, transports, topology",
        "NCCL_SOCKET_IFNAME=eth0 (the interface between the hosts; `ip addr` lists them) where it "
        "took a wrong one",
        "NCCL_IB_DISABLE=1 disables InfiniBand, NCCL_P2P_DISABLE=1 the paths between the GPUs of "
        "a host: if that helps, they are at fault"};
  }

  [[nodiscard]] bool is_whole() const {
    return std::ranges::all_of(ranks_,
                               [](const RankResult& rank) { return rank.ended == "finished"; });
  }

  [[nodiscard]] Json line_of(const RankResult& rank) const {
    std::string why;
    for (const auto& finding : findings_) {
      if (std::ranges::find(finding.ranks, rank.rank) == finding.ranks.end()) continue;
      why += (why.empty() ? "" : "; ") + finding.kind;
    }
    return {{"rank", rank.rank},
            {"host", rank.host},
            {"local_rank", rank.local_rank},
            {"is_ok", why.empty()},
            {"checked_all", rank.ended == "finished"},
            {"why", why},
            {"memory_tests_cut", rank.memory_tests_cut},
            {"own_seconds", rank.own_seconds ? Json(*rank.own_seconds) : Json(nullptr)}};
  }

  const Json& results_;
  std::vector<RankResult> ranks_;
  std::vector<Finding> findings_;
};

}  // namespace

std::string make_verdict(std::string_view results) {
  try {
    const auto json = Json::parse(results);
    return Explanation(json).verdict().dump(2, ' ', false, Json::error_handler_t::replace);
  } catch (const nlohmann::json::exception& error) {
    throw FormatError(std::string("the results of a network check cannot be read: ") +
                      error.what());
  } catch (const std::out_of_range&) {
    throw FormatError("the results of a network check name a rank or a state that does not exist");
  }
}

std::string headline_of(std::string_view verdict) {
  const auto json = Json::parse(verdict);
  auto text = "netcheck: " + json.at("verdict").get<std::string>();
  if (!json.at("findings").empty()) {
    text += ": " + json["findings"][0].at("evidence").at(0).get<std::string>();
  }
  return text;
}

}  // namespace nanlocator::netcheck
