#include "step/birth_bundles.hpp"

#include <exception>
#include <set>
#include <sstream>
#include <tuple>

#include "nanlocator/replay/replay.hpp"

namespace nanlocator::inline step_room {
namespace {

/// True for computations, which alone are replayed: data, weights and memory were bad before any
/// operator ran.
bool is_computed(BirthKind kind) {
  return kind == BirthKind::nan || kind == BirthKind::nan_from_inf || kind == BirthKind::inf;
}

bool is_root(const Explanation& explanation, const Birth& birth) {
  if (birth.kind == BirthKind::literal) return false;
  if (!birth.parent) return true;
  const auto parent = static_cast<std::size_t>(*birth.parent);
  return parent >= explanation.births.size() ||
         explanation.births[parent].birth.kind == BirthKind::literal;
}

void add_replay(const OperatorCall& call, Birth& birth) {
  try {
    const auto report = replay(call);
    birth.replay = report.conclusion;
    birth.replay_lines = report.sentences;
  } catch (const std::exception& error) {
    birth.replay_lines.push_back(std::string("the call could not be replayed: ") + error.what());
  }
}

void add_kernel_replay(const KeptKernelCall& call, Birth& birth) {
  birth.kernel_replay.emplace().problem = call.why_not_replayed;
  if (!call.why_not_replayed.empty()) return;
  try {
    birth.kernel_replay = replay_kernel(call.recorded, call.execute, call.references,
                                        {.role = birth.sighting.role.text()});
  } catch (const std::exception& error) {
    birth.kernel_replay->problem = error.what();
  }
}

std::vector<std::string> lines_of(const c10::Backtrace& stack) {
  std::vector<std::string> lines;
  if (!stack) return lines;
  std::istringstream text(stack->get());
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  return lines;
}

Bundle bundle_of(const Birth& birth, const c10::Backtrace& cpp_stack,
                 const GradientLocator& locator) {
  Bundle bundle;
  bundle.run_id = locator.run_id();
  bundle.coordinates = locator.map().coordinates();
  bundle.birth = birth;
  bundle.birth.reached.clear();
  bundle.birth.replay = ReplayConclusion::not_replayed;
  bundle.birth.replay_lines.clear();
  bundle.birth.kernel_replay.reset();
  bundle.birth.parent.reset();
  bundle.cpp_stack = lines_of(cpp_stack);
  return bundle;
}

}  // namespace

std::vector<Birth> births_with_calls(const Explanation& explanation) {
  std::vector<Birth> births;
  for (const auto& traced : explanation.births) {
    const Birth& birth = traced.birth;
    const bool is_made = is_computed(birth.kind) || birth.kind == BirthKind::user_hook;
    if (is_made && is_root(explanation, birth)) births.push_back(birth);
  }
  return births;
}

std::vector<Birth> births_of_kernels(const Explanation& explanation) {
  std::vector<Birth> births;
  for (const auto& traced : explanation.births) {
    const Birth& birth = traced.birth;
    if (birth.kernel_call && is_root(explanation, birth)) births.push_back(birth);
  }
  return births;
}

std::vector<Birth> keep_births(const Explanation& explanation, GradientLocator& locator,
                               std::int64_t iteration, Framework& framework) {
  std::vector<Birth> births;
  std::set<std::tuple<BirthKind, Phase, std::string, std::string, std::string>> kept;
  for (const auto& [traced, call, cpp_stack] : explanation.births) {
    Birth birth = traced;
    birth.sighting.iteration = iteration;
    const auto& place = birth.sighting;
    // One module in a loop may give birth a thousand times: only the first call is kept.
    const bool is_new =
        is_root(explanation, birth) &&
        kept.emplace(birth.kind, place.phase, place.module, place.op, place.parameter).second;
    const auto kernel =
        is_new && birth.kernel_call ? framework.take_kernel_call(birth) : std::nullopt;
    if (is_new && call && is_computed(birth.kind)) add_replay(*call, birth);
    if (kernel) add_kernel_replay(*kernel, birth);
    if (is_new && (call || kernel)) {
      try {
        auto bundle = bundle_of(birth, cpp_stack, locator);
        const auto storages = std::make_shared<StorageCollector>();
        BundleContents further;
        if (call) add_to_bundle(*call, bundle, *storages);
        if (kernel) kernel->add_to_bundle(bundle, *storages, further);
        framework.add_module_call(birth, bundle, *storages, further);
        auto contents = storages->finish(bundle);
        contents.files = std::move(further.files);
        birth.bundle = locator.keep_bundle(bundle, std::move(contents), storages);
      } catch (const std::exception& error) {
        locator.add_note("The bundle of " + place.op + " could not be made: " + error.what());
      }
    }
    births.push_back(std::move(birth));
  }
  for (const auto& note : explanation.notes) locator.add_note(note);
  return births;
}

}  // namespace nanlocator::inline step_room
