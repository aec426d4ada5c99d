#include "step/gradient_locator_impl.hpp"

#include <nlohmann/json.hpp>

#include "nanlocator/files/atomic_file.hpp"
#include "step/rank_logs.hpp"

namespace nanlocator::inline step_room {

at::DeviceType choose_flag_device(const RankCoordinates& coordinates,
                                  const Communicator* communicator) {
  const auto home = coordinates.device.starts_with("cuda") ? at::kCUDA : at::kCPU;
  if (communicator == nullptr || communicator->reduces_on(home)) return home;
  const auto other = home == at::kCPU ? at::kCUDA : at::kCPU;
  return communicator->reduces_on(other) ? other : home;
}

void GradientLocator::Impl::agree_on_options(Deadline deadline) {
  if (!communicator) return;
  const auto& coordinates = map.coordinates();
  if (coordinates.rank != communicator->rank() || coordinates.world_size != communicator->size()) {
    throw UsageError("The map's coordinates say rank " + std::to_string(coordinates.rank) + " of " +
                     std::to_string(coordinates.world_size) + ", the communicator rank " +
                     std::to_string(communicator->rank()) + " of " +
                     std::to_string(communicator->size()) +
                     ". The communicator's group must hold all ranks of the job.");
  }
  communicator->handshake(agreed_options_json(options, c10::DeviceTypeName(flag_type, true)),
                          deadline);
}

void GradientLocator::Impl::open_run(Deadline deadline) {
  // Rank 0's decision or its error, so that every rank acts alike.
  nlohmann::json opened;
  if (rank() == 0) {
    try {
      run = start_run(options.output_dir);
      opened = {{"run", run.id}, {"attempt", run.attempt}, {"error", ""}};
    } catch (const IoError& error) {
      opened = {{"run", ""}, {"attempt", 0}, {"error", error.what()}};
    }
  }
  if (communicator) {
    const auto text = opened.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    opened = nlohmann::json::parse(communicator->broadcast("run", text, deadline));
  }
  if (const auto error = opened.at("error").get<std::string>(); !error.empty()) {
    throw IoError(error);
  }
  run = {opened.at("run").get<std::string>(), opened.at("attempt").get<int>()};
  directory = run_directory(options.output_dir, run.attempt);
  begin_log();
  bundles = std::make_unique<BundleStore>(
      directory, BundleBudget{.bytes = options.bundle_bytes, .count = options.bundle_count});

  // A rank that cannot write informs the others, which would otherwise hang in training's first
  // collective.
  std::string outcome = "written";
  try {
    ensure_directory(directory);
    write_files();
  } catch (const IoError& error) {
    outcome = error.what();
  }
  if (communicator) {
    const nlohmann::json statement = {{"files", outcome}};
    try {
      communicator->handshake(
          statement.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace), deadline);
    } catch (const AgreementError&) {
      if (outcome == "written") throw;
    }
  }
  if (outcome != "written") throw IoError(outcome);
}

void GradientLocator::Impl::write_files() {
  map = with_run_id(map, run.id);
  map.write(directory);
  write_run_file();
}

void GradientLocator::Impl::write_run_file() const {
  if (rank() != 0) return;
  write_file_atomically(directory / "run.json", run_json(run, started, options, map.coordinates()));
}

void GradientLocator::Impl::use_map(ParameterMap new_map) {
  scanner.reset();
  map = std::move(new_map);
  scanner = std::make_unique<GradientScanner>(map, options.threads);
  order = std::make_unique<BackwardOrder>(map.size());
}

// The monitor's thread must not outlive the locator: ~GradientLocator stops it.
void GradientLocator::Impl::watch_ranks() {
  files = std::make_unique<VerdictFiles>(run, directory, map.coordinates());
  if (!communicator || world_size() == 1) return;
  communicator->watch_ranks(place_of_this_rank(map.coordinates()),
                            MonitorTimes::for_deadline(options.gather_deadline),
                            [this](const std::vector<LostRank>& lost) { files->write_lost(lost); });
  last_words.emplace([this] { write_last_words(); });
}

}  // namespace nanlocator::inline step_room
