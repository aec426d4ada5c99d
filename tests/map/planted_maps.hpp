// Map files written by hand, not by ParameterMap::write, to test the readers.
#pragma once

#include <string>
#include <vector>

#include "temporary_folder.hpp"

namespace nanlocator::testing {

struct PlantedParameter {
  std::string name;
  std::string shape = "[4,8]";
  std::string shard = "null";       // or {"begin":0,"end":16}
  std::string flags_that_are_true;  // "is_expert is_tied"
};

struct PlantedRank {
  int rank = 0;
  int world = 1;
  int tp = 0, tp_size = 1;
  int pp = 0, pp_size = 1;
  int dp = 0, dp_size = 1;
  std::string run = "monday";
};

inline std::string suffix_of(const PlantedRank& place) {
  return "tp" + std::to_string(place.tp) + "pp" + std::to_string(place.pp) + "dp" +
         std::to_string(place.dp) + ".json";
}

inline std::string manifest_of(const PlantedRank& place,
                               const std::vector<PlantedParameter>& parameters) {
  const auto axis = [](const char* name, int rank, int size) {
    return std::string("\"") + name + "\":{\"rank\":" + std::to_string(rank) +
           ",\"size\":" + std::to_string(size) + "},";
  };
  std::string text = R"({"version":1,"run_id":")" + place.run + R"(","coordinates":{"rank":)" +
                     std::to_string(place.rank) + ",\"world_size\":" + std::to_string(place.world) +
                     ",";
  text += axis("tp", place.tp, place.tp_size) + axis("pp", place.pp, place.pp_size) +
          axis("dp", place.dp, place.dp_size) + axis("cp", 0, 1) + axis("ep", 0, 1) +
          R"("host":"a17","local_rank":0,"device":"cpu"},"parameters":[)";
  for (std::size_t id = 0; id < parameters.size(); ++id) {
    const auto& parameter = parameters[id];
    if (id > 0) text += ",";
    text +=
        R"({"id":)" + std::to_string(id) + R"(,"name":")" + parameter.name +
        R"(","raw_name":"","shape":)" + parameter.shape +
        R"(,"dtype":"float32","layer":null,"chunk":0,"bucket":null,"bucket_offset":null,"shard":)" +
        parameter.shard;
    for (const std::string flag :
         {"is_expert", "is_shared", "is_tp_duplicate", "is_tied", "may_be_untouched"}) {
      const bool is_set = parameter.flags_that_are_true.find(flag) != std::string::npos;
      text += ",\"" + flag + "\":" + (is_set ? "true" : "false");
    }
    text += "}";
  }
  return text + "]}";
}

inline std::string id_name_of(const std::vector<PlantedParameter>& parameters) {
  std::string text;
  for (std::size_t id = 0; id < parameters.size(); ++id) {
    if (id > 0) text += ", ";
    text += '"' + std::to_string(id) + "\": \"" + parameters[id].name + '"';
  }
  return "{" + text + "}";
}

inline void plant_rank(const TemporaryFolder& folder, const PlantedRank& place,
                       const std::vector<PlantedParameter>& parameters) {
  folder.plant("param_manifest_" + suffix_of(place), manifest_of(place, parameters));
  folder.plant("param_id_name_map_" + suffix_of(place), id_name_of(parameters));
}

/// tp 2, pp 2, dp 2 in Megatron's order (tp fastest, pp slowest), with a distributed optimizer:
/// each stage has a tensor-parallel weight and a duplicated norm, of which dp 0 owns the first
/// half.
inline void plant_eight_ranks(const TemporaryFolder& folder, const std::string& run = "monday") {
  for (int rank = 0; rank < 8; ++rank) {
    const PlantedRank place{rank, 8, rank % 2, 2, rank / 4, 2, rank / 2 % 2, 2, run};
    const std::string layer = "decoder.layers." + std::to_string(place.pp);
    const bool is_first_half = place.dp == 0;
    plant_rank(
        folder, place,
        {{layer + ".qkv.weight", "[4,8]",
          is_first_half ? R"({"begin":0,"end":16})" : R"({"begin":16,"end":32})"},
         {layer + ".norm.weight", "[8]",
          is_first_half ? R"({"begin":0,"end":8})" : R"({"begin":8,"end":8})", "is_tp_duplicate"}});
  }
}

}  // namespace nanlocator::testing
