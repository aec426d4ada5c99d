#include "netcheck/rank_result.hpp"

namespace nanlocator::netcheck {
namespace {

using Json = nlohmann::ordered_json;

Place place_of(const Json& json) {
  static const std::map<std::string, State> states = {
      {"entered", State::entered}, {"launched", State::launched}, {"finished", State::finished}};
  Place place;
  place.stage = json.at("stage");
  place.step = json.at("step");
  place.group = json.at("group");
  place.ranks = json.at("ranks").get<std::vector<int>>();
  place.sequence = json.at("sequence");
  place.state = states.at(json.at("state"));
  place.launches = json.value("launches", 0);
  return place;
}

}  // namespace

RankResult rank_result_of(const Json& json) {
  RankResult result;
  result.rank = json.at("rank");
  result.host = json.value("host", "");
  result.local_rank = json.value("local_rank", 0);
  result.has_answered = json.at("answered");
  result.process = json.value("process", "");
  result.ended = json.value("ended", "");
  result.error = json.value("error", "");
  if (json.contains("place") && !json["place"].is_null()) result.place = place_of(json["place"]);
  result.device_failures = json.value("device_failures", std::vector<std::string>());
  result.memory_tests_cut = json.value("memory_tests_cut", 0);
  result.computes_with = json.value("computes_with", "");
  result.fingerprints = json.value("fingerprints", std::map<std::string, std::string>());
  if (json.contains("own_seconds") && !json["own_seconds"].is_null()) {
    result.own_seconds = json["own_seconds"].get<double>();
  }
  return result;
}

}  // namespace nanlocator::netcheck
