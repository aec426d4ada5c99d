// fuzz_seeds DIR: writes the inputs from which the fuzzers start, DIR/<reader>/<n>.
#include <cstdint>
#include <cstring>
#include <exception>
#include <filesystem>
#include <iostream>
#include <string>

#include "nanlocator/files/atomic_file.hpp"
#include "nanlocator/map/parameter_map.hpp"
#include "nanlocator/record/history.hpp"
#include "nanlocator/record/ledger.hpp"
#include "nanlocator/report/verdict_json.hpp"
#include "record/planted_bundle.hpp"
#include "report/sample_reports.hpp"

namespace nanlocator {
namespace {

namespace fs = std::filesystem;

void add_seed(const fs::path& folder, const std::string& bytes) {
  fs::create_directories(folder);
  const auto count = std::distance(fs::directory_iterator(folder), fs::directory_iterator());
  write_file_atomically(folder / std::to_string(count), bytes);
}

/// As bundle_fuzz.cpp takes it apart.
std::string joined(const std::string& tensors, const std::string& json) {
  const auto size = static_cast<std::uint32_t>(tensors.size());
  std::string bytes(sizeof size, '\0');
  std::memcpy(bytes.data(), &size, sizeof size);
  return bytes + tensors + json;
}

void add_bundle(const fs::path& corpus, const Bundle& bundle, const BundleContents& contents) {
  const fs::path scratch = corpus / "scratch";
  const fs::path folder = scratch / BundleStore(scratch, {}).write(bundle, contents);
  const std::string tensors = read_file(folder / "tensors.safetensors");
  add_seed(corpus / "safetensors", tensors);
  add_seed(corpus / "bundle", joined(tensors, read_file(folder / "bundle.json")));
  fs::remove_all(scratch);
}

Ledger planted_ledger() {
  Ledger ledger;
  ledger.run_id = "run-1";
  ledger.iteration = 12;
  ledger.coordinates.host = "a17";
  ledger.backward_order = {{.id = 1, .name = "b", .shape = {2, 2}}, {.id = 0, .name = "a"}};
  ledger.coverage = {{Phase::grad_local, {0, 1}}, {Phase::grad_norm, {}}};
  ledger.sightings = {testing::planted_sighting()};
  ledger.births = {testing::planted_birth()};
  ledger.notes = {"a note"};
  return ledger;
}

/// As run_fuzz.cpp takes it apart.
std::string file(const std::string& name, const std::string& content) {
  return "\n%%FILE " + name + "\n" + content;
}

std::string planted_map() {
  RankCoordinates coordinates;
  coordinates.host = "a17";
  std::vector<ParameterInfo> parameters(2);
  parameters[0].name = parameters[0].raw_name = "decoder.layers.0.weight";
  parameters[0].dtype = "float32";
  parameters[0].shape = {2, 2};
  parameters[1].id = 1;
  parameters[1].name = parameters[1].raw_name = "decoder.layers.0.bias";
  return ParameterMap(coordinates, parameters, "run-1").to_manifest_json();
}

/// With the verdict that the run recorded, and with that which its ledgers give.
void add_runs(const fs::path& corpus, const RunReport& report) {
  std::string ledgers;
  for (std::size_t i = 0; i < report.ledgers.size() && i < 4; ++i) {
    ledgers += file("ledger_tp" + std::to_string(i) + "pp0dp0.jsonl", to_jsonl(report.ledgers[i]));
  }
  for (const History& each : report.histories) {
    ledgers += file("history_tp0pp0dp0.jsonl", to_jsonl(each));
    add_seed(corpus / "history", to_jsonl(each));
  }
  ledgers += file("param_manifest_tp0pp0dp0.json", planted_map());
  const std::string verdict = to_json(report.verdict);
  add_seed(corpus / "run", ledgers);
  add_seed(corpus / "run", file("verdict.json", verdict));
  add_seed(corpus / "message", "v" + verdict);
}

void write_seeds(const fs::path& corpus) {
  const testing::PlantedBundle planted;
  add_bundle(corpus, planted.bundle, planted.contents);
  Bundle without_module = planted.bundle;
  without_module.module_call.reset();
  add_bundle(corpus, without_module, planted.contents);
  add_bundle(corpus, {}, {});
  const std::string ledger = to_jsonl(planted_ledger());
  add_seed(corpus / "ledger", ledger);
  add_seed(corpus / "ledger", to_jsonl(Ledger{}) + ledger);
  add_seed(corpus / "message", "m" + planted_map());
  add_seed(corpus / "message", "q" + to_json(PeerQuestion{.parameter = "decoder.layers.0.weight"}));
  add_seed(corpus / "run", file("ledger_tp0pp0dp0.jsonl", ledger));
  // Of few ranks and layers, so that one page takes milliseconds.
  testing::SampleIncident incident(
      {.tp = 1, .pp = 1, .dp = 2, .layers_per_stage = 1, .microbatches = 1});
  add_runs(corpus, incident.report(0, 0, 0));
  for (const RunReport& each :
       {testing::partial_report(), testing::several_origins_report(), testing::hostile_report()}) {
    add_seed(corpus / "message", "v" + to_json(each.verdict));
  }
}

}  // namespace
}  // namespace nanlocator

int main(int argument_count, char** arguments) {
  if (argument_count != 2) {
    std::cerr << "usage: fuzz_seeds DIR\n";
    return 2;
  }
  try {
    nanlocator::write_seeds(arguments[1]);
  } catch (const std::exception& error) {
    std::cerr << "fuzz_seeds: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
