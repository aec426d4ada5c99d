#include "nanlocator/report/kernel_replay_text.hpp"

#include "files/json_fields.hpp"
#include "record/birth_json.hpp"
#include "report/fact_text.hpp"
#include "verdict/kernel_facts.hpp"

namespace nanlocator::inline report_room {

std::vector<std::string> sentences_of(const KernelReplay& replay, const std::string& kernel) {
  Facts facts;
  append_kernel_facts(facts, replay, kernel);
  std::vector<std::string> sentences;
  for (const Fact& fact : facts) sentences.push_back(fact_text(fact));
  return sentences;
}

std::string to_json(const KernelReplay& replay) {
  return one_line(fields_to_json(replay));
}

}  // namespace nanlocator::inline report_room
