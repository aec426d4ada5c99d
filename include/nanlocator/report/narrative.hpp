// What a verdict says to the engineer on call: one block, which is the log message, the exception's
// text, torchrun's error file and the head of the page. Its words are in phrasebook.txt.
//
// It follows from the verdict alone. Names from the run are not escaped; the printing code makes
// them printable.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "nanlocator/verdict/verdict.hpp"

namespace nanlocator::inline report_room {

struct Narrative {
  std::string severity;  // "FATAL": goes on with bad weights; "ERROR": stopped; "WARNING"; "INFO"
  std::string code;      // one meaning each: `nanlocator explain CODE`
  std::string event;     // "2026-11-27 02:58 UTC job 88213 gpt-moe, step 2"
  std::string action;    // "LEAVE IT DOWN, PAGE THE MODEL AUTHOR"
  std::string restart;   // "NO", "YES", "ONCE", "ONLY TRACED"
  std::string hosts;     // "without a17", "none suspected"
  std::string load;      // "iter_0000900", "step 900 or older"
  std::string page;      // "model author", "nobody"
  std::string ticket;    // "cluster on-call", "none"
  /// In order: what, cause, state, checkpoint, check and its outcomes, more. Label and text.
  std::vector<std::pair<std::string, std::string>> rows;
  std::string audience;  // "for the model author"; "" if the rest is evidence for anybody
  std::string place;     // "model.py:515 in gate, forward, microbatch 1"
  std::string source;    // "515 |  return t / denominator"
  std::string
      marker;  // "    |         ^^^^^^^^^^^^^^^": below the source; "" if its call is unknown
  /// In order: here (operands), why, next, replay.
  std::vector<std::pair<std::string, std::string>> details;
};

/// `run_dir`: prefix of bundles' paths in commands.
[[nodiscard]] Narrative narrative_of(const Verdict& verdict, std::string_view run_dir = {});

/// The code of the origin that decides, "clean" or "incomplete".
[[nodiscard]] std::string error_code_of(const Verdict& verdict);

/// "rank 3 = a17:GPU3"; "rank 3 on a17" on a CPU.
[[nodiscard]] std::string rank_place_of(const RankCoordinates& coordinates);

/// Half a page on a code: what it means, how to confirm it, how it is mended, what it is not.
/// Throws UsageError for an unknown code.
[[nodiscard]] std::string explanation_of(std::string_view code);
/// The codes that have one, in the phrasebook's order.
[[nodiscard]] std::vector<std::string> explained_codes();

}  // namespace nanlocator::inline report_room
