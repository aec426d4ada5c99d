// fuzz_seeds DIR: writes the inputs from which the fuzzers start, DIR/<reader>/<n>.
#include <cstdint>
#include <cstring>
#include <exception>
#include <filesystem>
#include <iostream>
#include <string>

#include "nanlocator/files/atomic_file.hpp"
#include "nanlocator/record/ledger.hpp"
#include "record/planted_bundle.hpp"

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

void write_seeds(const fs::path& corpus) {
  const testing::PlantedBundle planted;
  add_bundle(corpus, planted.bundle, planted.contents);
  Bundle without_module = planted.bundle;
  without_module.module_call.reset();
  add_bundle(corpus, without_module, planted.contents);
  add_bundle(corpus, {}, {});
  const std::string ledger = to_jsonl(planted_ledger());
  add_seed(corpus / "ledger", ledger);
  add_seed(corpus / "ledger", to_jsonl({}) + ledger);
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
