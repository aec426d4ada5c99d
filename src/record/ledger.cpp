#include "nanlocator/record/ledger.hpp"

#include <algorithm>
#include <utility>

#include "files/appended_file.hpp"
#include "files/checksum.hpp"
#include "files/strict_json.hpp"
#include "map/coordinates_json.hpp"
#include "map/parameter_json.hpp"
#include "nanlocator/error.hpp"
#include "record/birth_json.hpp"
#include "record/history_json.hpp"
#include "record/keys.hpp"
#include "record/record_json.hpp"
#include "record/sighting_json.hpp"

namespace nanlocator {
namespace {

using nlohmann::ordered_json;

/// No pipeline is interleaved more finely; the reader's memory grows with chunks times ranks.
constexpr int kMostChunks = 1024;

/// A file of garbage must not fill the memory with remarks about its lines.
constexpr std::size_t kMostLineNotes = 20;

// ---- writing ----

ordered_json header_to_json(const Ledger& ledger) {
  ordered_json json;
  json[keys::kRecord] = keys::kRecordLedger;
  json[keys::kVersion] = keys::kLedgerVersion;
  json[keys::kRun] = ledger.run_id;
  json[keys::kAttempt] = ledger.attempt;
  json[keys::kIteration] = ledger.iteration;
  json[keys::kLevel] = ledger.level;
  json[keys::kOnBad] = ledger.on_bad;
  json[keys::kCoordinates] = coordinates_to_json(ledger.coordinates);
  json[keys::kBackwardOrder] =
      ledger.is_backward_order_observed ? keys::kObserved : keys::kReverseRegistration;
  json[keys::kGradientNorm] = number_or_null(ledger.gradient_norm);
  json[keys::kLossScale] = number_or_null(ledger.loss_scale);
  json[keys::kAbsmax] = number_or_null(ledger.absmax);
  json[keys::kAbsmaxParameter] = text_or_null(ledger.absmax_parameter);
  json[keys::kWeightsFiniteAfter] = value_or_null(ledger.weights_finite_after);
  return json;
}

ordered_json record_to_json(const ParameterRecord& parameter) {
  ordered_json json;
  json[keys::kRecord] = keys::kRecordParameter;
  json[keys::kId] = parameter.id;
  json[keys::kName] = parameter.name;
  json[keys::kShape] = parameter.shape;
  json[keys::kChunk] = parameter.chunk;
  json[keys::kMayBeUntouched] = parameter.may_be_untouched;
  json[keys::kIsTpDuplicate] = parameter.is_tp_duplicate;
  json[keys::kIsTied] = parameter.is_tied;
  json[keys::kShard] = shard_to_json(parameter.shard);
  return json;
}

ordered_json record_to_json(const Coverage& coverage) {
  ordered_json json;
  json[keys::kRecord] = keys::kRecordCoverage;
  json[keys::kPhase] = name_of(coverage.phase);
  json[keys::kParameters] = coverage.parameters;
  return json;
}

ordered_json record_to_json(const CrossingCoverage& crossings) {
  ordered_json json;
  json[keys::kRecord] = keys::kRecordCrossings;
  json[keys::kGroup] = crossings.group;
  json[keys::kMembers] = rank_list_to_json(crossings.members);
  json[keys::kPeer] = value_or_null(crossings.peer);
  json[keys::kRole] = crossings.role;
  json[keys::kCount] = crossings.count;
  return json;
}

ordered_json record_to_json(const Microbatch& microbatch) {
  ordered_json json;
  json[keys::kRecord] = keys::kRecordMicrobatch;
  json[keys::kNumber] = microbatch.number;
  json[keys::kChunk] = value_or_null(microbatch.chunk);
  json[keys::kTensors] = microbatch.tensors;
  return json;
}

ordered_json record_to_json(const Sighting& sighting) {
  ordered_json json;
  json[keys::kRecord] = keys::kRecordSighting;
  json.update(sighting_to_json(sighting));
  return json;
}

ordered_json record_to_json(const OptimizerState& state) {
  ordered_json json;
  json[keys::kRecord] = keys::kRecordOptimizerState;
  json[keys::kId] = state.parameter;
  json[keys::kName] = state.name;
  json[keys::kStats] = stats_to_json(state.stats);
  return json;
}

ordered_json record_to_json(const Birth& birth) {
  ordered_json json = {{keys::kRecord, keys::kRecordBirth}};
  json.update(birth_to_json(birth));
  return json;
}

ordered_json record_to_json(const Rerun& rerun) {
  ordered_json json;
  json[keys::kRecord] = keys::kRecordRerun;
  json[keys::kReproduced] = value_or_null(rerun.reproduced);
  json[keys::kControlReproduced] = value_or_null(rerun.control_reproduced);
  json[keys::kGradients] = rerun.gradients;
  json[keys::kChanged] = rerun.changed;
  json[keys::kBadParameters] = rerun.bad_parameters;
  json[keys::kNotRestored] = rerun.not_restored;
  return json;
}

ordered_json record_to_json(const HistorySummary& history) {
  ordered_json json = {{keys::kRecord, keys::kRecordHistory}};
  json.update(summary_to_json(history));
  return json;
}

// ---- reading ----

Rerun rerun_from_json(const JsonObject& object) {
  Rerun rerun;
  rerun.reproduced = object.optional_boolean(keys::kReproduced);
  rerun.control_reproduced = object.optional_boolean(keys::kControlReproduced);
  rerun.gradients = object.integer(keys::kGradients, 0);
  rerun.changed = object.integer(keys::kChanged, 0);
  rerun.bad_parameters = sizes_from_json(object, keys::kBadParameters);
  rerun.not_restored = texts_from_json(object, keys::kNotRestored);
  return rerun;
}

Ledger header_from_json(const JsonObject& object) {
  require_version(object, keys::kLedgerVersion);
  Ledger ledger;
  ledger.run_id = object.text(keys::kRun);
  ledger.attempt = object.small_integer(keys::kAttempt, 0);
  ledger.iteration = object.integer(keys::kIteration, 0);
  ledger.level = object.text(keys::kLevel);
  ledger.on_bad = object.text(keys::kOnBad);
  ledger.coordinates = coordinates_from_json(object.object(keys::kCoordinates));
  const std::string order = object.text(keys::kBackwardOrder);
  if (order != keys::kObserved && order != keys::kReverseRegistration) {
    throw_unexpected_json(object.where(keys::kBackwardOrder), object.member(keys::kBackwardOrder),
                          R"("observed" or "reverse_registration")");
  }
  ledger.is_backward_order_observed = order == keys::kObserved;
  ledger.gradient_norm = optional_number(object, keys::kGradientNorm);
  ledger.loss_scale = optional_number(object, keys::kLossScale);
  ledger.absmax = optional_number(object, keys::kAbsmax);
  ledger.absmax_parameter = text_or_empty(object, keys::kAbsmaxParameter);
  if (object.has(keys::kWeightsFiniteAfter)) {
    ledger.weights_finite_after = object.optional_integer(keys::kWeightsFiniteAfter, 0);
  }
  ledger.is_complete = false;  // until its last line is met
  return ledger;
}

ParameterRecord parameter_from_json(const JsonObject& object) {
  ParameterRecord parameter;
  parameter.id = object.integer(keys::kId, 0);
  parameter.name = object.text(keys::kName);
  parameter.shape = sizes_from_json(object, keys::kShape);
  parameter.chunk = static_cast<int>(
      json_integer(object.member(keys::kChunk), object.where(keys::kChunk), 0, kMostChunks - 1));
  parameter.may_be_untouched = object.boolean(keys::kMayBeUntouched);
  parameter.is_tp_duplicate = object.boolean(keys::kIsTpDuplicate);
  parameter.is_tied = object.boolean(keys::kIsTied);
  parameter.shard = shard_from_json(object);
  return parameter;
}

Coverage coverage_from_json(const JsonObject& object) {
  Coverage coverage;
  coverage.phase = phase_from_json(object, keys::kPhase);
  coverage.parameters = sizes_from_json(object, keys::kParameters);
  if (!std::ranges::is_sorted(coverage.parameters)) {
    throw FormatError(object.where(keys::kParameters) + ": the ids are not in ascending order");
  }
  return coverage;
}

CrossingCoverage crossings_from_json(const JsonObject& object) {
  CrossingCoverage crossings;
  crossings.group = object.text(keys::kGroup);
  crossings.members = rank_list_from_json(object, keys::kMembers);
  crossings.peer = object.optional_small_integer(keys::kPeer, 0);
  crossings.role = object.text(keys::kRole);
  crossings.count = object.integer(keys::kCount, 0);
  return crossings;
}

Microbatch microbatch_from_json(const JsonObject& object) {
  Microbatch microbatch;
  microbatch.number = object.small_integer(keys::kNumber, 0);
  microbatch.chunk = object.optional_small_integer(keys::kChunk, 0);
  microbatch.tensors = texts_from_json(object, keys::kTensors);
  return microbatch;
}

OptimizerState optimizer_state_from_json(const JsonObject& object) {
  OptimizerState state;
  state.parameter = object.integer(keys::kId, 0);
  state.name = object.text(keys::kName);
  state.stats = stats_from_json(object.object(keys::kStats));
  return state;
}

/// Takes lines one by one and keeps what can be kept.
class LedgerReader {
 public:
  explicit LedgerReader(std::string source) : source_(std::move(source)) {}

  void read_line(std::string_view line, std::size_t number) {
    const std::string where = source_ + ": line " + std::to_string(number);
    line_ = line;
    try {
      const nlohmann::json json = parse_json(line, where);
      take(JsonObject(json, where), number);
    } catch (const FormatError& error) {
      skip_line(error.what());
    }
  }

  std::vector<Ledger> finish() {
    close(std::string("the text ends before the ledger's last line"));
    if (ledgers_.empty()) {
      throw FormatError(orphans_.empty() ? source_ +
                                               ": empty, expected a ledger, whose first line is "
                                               R"({"record": "ledger", ...})"
                                         : orphans_.front());
    }
    for (std::string& orphan : orphans_) ledgers_.front().notes.push_back(std::move(orphan));
    return std::move(ledgers_);
  }

 private:
  void take(const JsonObject& object, std::size_t number) {
    const std::string record = object.text(keys::kRecord);
    if (record == keys::kRecordLedger) {
      close("line " + std::to_string(number) + " starts another ledger before its last line");
      is_open_ = false;  // also where this header cannot be read: its lines belong to nobody
      ledgers_.push_back(header_from_json(object));
      is_open_ = true;
      begin_ = line_.data();
      lines_ = 0;
      line_notes_ = 0;
      has_lost_lines_ = false;
      return;
    }
    if (!is_open_) {
      add_orphan(object.where() + ": skipped, as it belongs to no ledger that could be read");
      return;
    }
    Ledger& ledger = ledgers_.back();
    if (record == keys::kRecordEnd) {
      const std::int64_t expected = object.integer(keys::kLines, 0);
      if (expected != lines_) {
        has_lost_lines_ = true;
        ledger.notes.push_back(object.where() + ": the ledger has " + std::to_string(lines_) +
                               " readable lines of " + std::to_string(expected));
      }
      // A damaged digit makes another number, not a line that cannot be read.
      const std::string_view lines(begin_, static_cast<std::size_t>(line_.data() - begin_));
      if (crc32_of(lines) != checksum_from_json(object) && !has_lost_lines_) {
        has_lost_lines_ = true;
        ledger.notes.push_back(object.where(keys::kCrc32) +
                               ": the ledger's bytes have changed since it was written");
      }
      ledger.is_complete = !has_lost_lines_;
      is_open_ = false;
      return;
    }
    if (record == keys::kRecordParameter) {
      ledger.backward_order.push_back(parameter_from_json(object));
    } else if (record == keys::kRecordCoverage) {
      take_coverage(coverage_from_json(object), object);
    } else if (record == keys::kRecordCrossings) {
      ledger.crossings.push_back(crossings_from_json(object));
    } else if (record == keys::kRecordMicrobatch) {
      ledger.microbatches.push_back(microbatch_from_json(object));
    } else if (record == keys::kRecordSighting) {
      ledger.sightings.push_back(sighting_from_json(object));
    } else if (record == keys::kRecordOptimizerState) {
      ledger.optimizer_states.push_back(optimizer_state_from_json(object));
    } else if (record == keys::kRecordBirth) {
      ledger.births.push_back(birth_from_json(object));
    } else if (record == keys::kRecordRerun) {
      ledger.rerun = rerun_from_json(object);
    } else if (record == keys::kRecordHistory) {
      ledger.history = summary_from_json(object);
    } else if (record == keys::kRecordNote) {
      ledger.notes.push_back(object.text(keys::kText));
    } else {
      throw FormatError(object.where(keys::kRecord) + ": unknown record");
    }
    ++lines_;
  }

  void take_coverage(Coverage coverage, const JsonObject& object) {
    auto& known = ledgers_.back().coverage;
    if (std::ranges::find(known, coverage.phase, &Coverage::phase) != known.end()) {
      throw FormatError(object.where() + ": the coverage of this phase stands twice");
    }
    known.push_back(std::move(coverage));
  }

  void skip_line(const std::string& reason) {
    if (!is_open_) {
      add_orphan(reason);
      return;
    }
    has_lost_lines_ = true;
    add_note(reason + "; the line is skipped");
  }

  /// A remark about a line that belongs to no ledger: kept by the first one that can be read.
  void add_orphan(std::string note) {
    if (orphans_.size() < kMostLineNotes) orphans_.push_back(std::move(note));
  }

  void add_note(std::string note) {
    auto& notes = ledgers_.back().notes;
    if (line_notes_ < kMostLineNotes) notes.push_back(std::move(note));
    if (line_notes_ == kMostLineNotes) {
      notes.push_back(source_ + ": further lines that cannot be read are not listed");
    }
    ++line_notes_;
  }

  void close(const std::string& reason) {
    if (!is_open_) return;
    ledgers_.back().notes.push_back(source_ + ": cut off: " + reason);
    is_open_ = false;
  }

  std::string source_;
  std::string_view line_;        // the one that is being read
  const char* begin_ = nullptr;  // of the open ledger; all lines are of one text
  std::vector<Ledger> ledgers_;
  std::vector<std::string> orphans_;
  bool is_open_ = false;
  bool has_lost_lines_ = false;
  std::int64_t lines_ = 0;  // of the open ledger, without its first and its last
  std::size_t line_notes_ = 0;
};

}  // namespace

std::string to_jsonl(const Ledger& ledger) {
  std::string text = one_line(header_to_json(ledger)) + "\n";
  std::int64_t lines = 0;
  const auto add = [&](const ordered_json& json) {
    text += one_line(json) + "\n";
    ++lines;
  };
  for (const auto& parameter : ledger.backward_order) add(record_to_json(parameter));
  for (const auto& coverage : ledger.coverage) add(record_to_json(coverage));
  for (const auto& crossings : ledger.crossings) add(record_to_json(crossings));
  for (const auto& microbatch : ledger.microbatches) add(record_to_json(microbatch));
  for (const auto& sighting : ledger.sightings) add(record_to_json(sighting));
  for (const auto& state : ledger.optimizer_states) add(record_to_json(state));
  for (const auto& birth : ledger.births) add(record_to_json(birth));
  if (ledger.rerun) add(record_to_json(*ledger.rerun));
  if (ledger.history) add(record_to_json(*ledger.history));
  for (const auto& note : ledger.notes) {
    add({{keys::kRecord, keys::kRecordNote}, {keys::kText, note}});
  }
  // A ledger that was read from a cut-off text stays recognisable as one.
  if (ledger.is_complete) {
    text += one_line({{keys::kRecord, keys::kRecordEnd},
                      {keys::kLines, lines},
                      {keys::kCrc32, checksum_text(crc32_of(text))}}) +
            "\n";
  }
  return text;
}

std::vector<Ledger> ledgers_from_jsonl(std::string_view text, const std::string& source) {
  LedgerReader reader(source);
  for (std::size_t number = 1; !text.empty(); ++number) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line.find_first_not_of(" \t\r") != std::string_view::npos) reader.read_line(line, number);
  }
  return reader.finish();
}

void append_ledger(const std::filesystem::path& directory, const Ledger& ledger) {
  AppendedFile file(directory / ("ledger_" + ledger.coordinates.file_suffix() + ".jsonl"));
  file.append_lines(to_jsonl(ledger));
}

}  // namespace nanlocator
