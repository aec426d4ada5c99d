#include "locate/rerun_facts.hpp"

#include <algorithm>
#include <optional>
#include <set>
#include <string>

namespace nanlocator::inline locate_room {

RerunOutcome rerun_of(const Incident& incident) {
  RerunOutcome outcome;
  std::set<std::string> not_restored;
  bool is_known_everywhere = true;
  for (const RankEvidence& rank : incident.ranks()) {
    const auto& rerun = rank.ledger().rerun;
    if (outcome.why_not.empty()) outcome.why_not = rank.ledger().no_rerun;
    if (!rerun) continue;
    outcome.done = true;
    not_restored.insert(rerun->not_restored.begin(), rerun->not_restored.end());
    if (outcome.variants.size() < rerun->variants.size()) outcome.variants = rerun->variants;
    if (!rerun->reproduced) {
      is_known_everywhere = false;
    } else {
      outcome.reproduced = outcome.reproduced.value_or(false) || *rerun->reproduced;
    }
  }
  // Only all ranks together can say that the fault was gone.
  if (!is_known_everywhere && outcome.reproduced == false) outcome.reproduced.reset();
  outcome.not_restored.assign(not_restored.begin(), not_restored.end());
  return outcome;
}

Facts facts_of_rerun(const Incident& incident, const RerunOutcome& outcome) {
  if (!outcome.done) return {};
  std::int64_t gradients = 0;
  std::int64_t changed = 0;
  std::optional<bool> control;
  bool is_without_reduction = false;
  for (const RankEvidence& rank : incident.ranks()) {
    const auto& rerun = rank.ledger().rerun;
    if (!rerun) continue;
    gradients += rerun->gradients;
    is_without_reduction = is_without_reduction || rerun->without_reduction;
    changed += rerun->changed;
    if (rerun->control_reproduced) control = control.value_or(false) || *rerun->control_reproduced;
  }
  const bool is_of_same_pass = outcome.variants.empty() ||
                               outcome.variants.front().variant == RerunVariant::constant_memory ||
                               outcome.variants.front().variant == RerunVariant::serialised ||
                               outcome.variants.front().variant == RerunVariant::reordered;
  Facts facts;
  if (!outcome.reproduced) {
    facts.push_back({.kind = FactKind::rerun_not_completed});
  } else if (*outcome.reproduced && !is_of_same_pass) {
    // The re-run executed the step in another way than the first pass: its results are not
    // compared.
  } else if (*outcome.reproduced && changed == 0) {
    facts.push_back({.kind = FactKind::rerun_identical, .count = gradients});
  } else if (*outcome.reproduced) {
    facts.push_back({.kind = FactKind::rerun_differs, .count = changed, .of = gradients});
  } else {
    facts.push_back({.kind = FactKind::rerun_clean, .names = outcome.not_restored});
    if (control) {
      facts.push_back({.kind = *control ? FactKind::control_bad : FactKind::control_clean});
    }
  }
  for (std::size_t i = 0; i < outcome.variants.size(); ++i) {
    const auto& [variant, is_bad] = outcome.variants[i];
    if (i > 0 && outcome.variants[i] == outcome.variants[i - 1]) {
      facts.back().count = facts.back().count.value_or(1) + 1;
      continue;
    }
    facts.push_back({.kind = is_bad ? FactKind::variant_bad : FactKind::variant_finite,
                     .variant = std::string(name_of(variant))});
  }
  if (is_without_reduction && outcome.reproduced == false) {
    facts.push_back({.kind = FactKind::reduction_not_repeated});
  }
  if (!outcome.not_restored.empty()) {
    facts.push_back({.kind = FactKind::not_restored, .names = outcome.not_restored});
  }
  return facts;
}

}  // namespace nanlocator::inline locate_room
