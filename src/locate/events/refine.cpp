#include "locate/events/events.hpp"
namespace nanlocator::inline locate_room::events {
std::vector<Origin> refine(const Incident& incident, std::vector<Source> sources,
                                         std::vector<BornOrigin>, const RerunOutcome& rerun) {
  std::vector<Origin> o;
  for (auto& s : sources) { for (auto f : facts_of_rerun(incident, rerun)) s.origin.facts.push_back(f); o.push_back(std::move(s.origin)); }
  return o;
}
}  // namespace nanlocator::inline locate_room::events
