#include "nanlocator/record/ledger.hpp"

#include <algorithm>
#include <tuple>
#include <type_traits>
#include <utility>

#include "files/appended_file.hpp"
#include "files/checksum.hpp"
#include "map/coordinates_json.hpp"
#include "map/parameter_json.hpp"
#include "nanlocator/error.hpp"
#include "record/birth_json.hpp"
#include "record/history_json.hpp"
#include "record/line_notes.hpp"
#include "record/rerun_variant_json.hpp"

namespace nanlocator::inline record_room {

/// No pipeline is interleaved more finely; the reader's memory grows with chunks times ranks.
constexpr int kMostChunks = 1024;

constexpr auto json_fields(const ParameterRecord*) {
  using P = ParameterRecord;
  return std::tuple(
      JsonField("id", &P::id), JsonField("name", &P::name), JsonField("shape", &P::shape),
      JsonField("chunk", &P::chunk, 0, kMostChunks - 1),
      JsonField("may_be_untouched", &P::may_be_untouched),
      JsonField("is_tp_duplicate", &P::is_tp_duplicate), JsonField("is_tied", &P::is_tied),
      JsonField("shard", &P::shard), JsonOmitEmpty("shard_group", &P::shard_group),
      JsonOmitEmpty("reduce_dtype", &P::reduce_dtype));
}

constexpr auto json_fields(const Coverage*) {
  return std::tuple(JsonField("phase", &Coverage::phase),
                    JsonField("parameters", &Coverage::parameters),
                    JsonAdded(FloatsField<Coverage>{"absmax", &Coverage::absmax}));
}
void read_fields(const JsonObject& object, Coverage& coverage) {
  read_fields(object, coverage, json_fields(&coverage));
  if (!std::ranges::is_sorted(coverage.parameters)) {
    throw FormatError(object.where("parameters") + ": the ids are not in ascending order");
  }
  if (!coverage.absmax.empty() && coverage.absmax.size() != coverage.parameters.size()) {
    throw FormatError(object.where("absmax") + ": not one for each of the parameters");
  }
}

constexpr auto json_fields(const CrossingCoverage*) {
  using C = CrossingCoverage;
  return std::tuple(JsonField("group", &C::group), JsonField("members", &C::members),
                    JsonField("peer", &C::peer), JsonField("role", &C::role),
                    JsonAdded(JsonField("first", &C::first)), JsonField("count", &C::count),
                    JsonAdded(JsonField("not_looked_at", &C::not_scanned)),
                    JsonAdded(JsonField("is_unseen_by_member", &C::is_unseen_by_member)),
                    JsonAdded(JsonField("has_unwatched", &C::has_unwatched)),
                    JsonOmitEmpty("watches_weights", &C::watches_weights),
                    JsonOmitEmpty("watches_gradients", &C::watches_gradients));
}

constexpr auto json_fields(const Microbatch*) {
  using M = Microbatch;
  return std::tuple(JsonField("number", &M::number), JsonField("chunk", &M::chunk),
                    JsonField("tensors", &M::tensors));
}

constexpr auto json_fields(const OptimizerState*) {
  using S = OptimizerState;
  return std::tuple(JsonField("id", &S::parameter), JsonField("name", &S::name),
                    JsonField("stats", &S::stats));
}

constexpr auto json_fields(const UnorderedAccess*) {
  using A = UnorderedAccess;
  return std::tuple(JsonField("is_write", &A::is_write), JsonField("transfer", &A::transfer),
                    JsonAdded(JsonField("other", &A::other)), JsonField("operator", &A::op),
                    JsonOrNull("module", &A::module), JsonField("phase", &A::phase),
                    JsonField("microbatch", &A::microbatch), JsonOrNull("parameter", &A::parameter),
                    JsonField("transfer_code", &A::transfer_code), JsonField("code", &A::code),
                    JsonField("count", &A::count));
}

constexpr auto json_fields(const Rerun*) {
  using R = Rerun;
  return std::tuple(JsonField("reproduced", &R::reproduced),
                    JsonField("control_reproduced", &R::control_reproduced),
                    JsonField("gradients", &R::gradients), JsonField("changed", &R::changed),
                    JsonField("bad_parameters", &R::bad_parameters),
                    JsonField("not_restored", &R::not_restored),
                    JsonAdded(JsonField("without_reduction", &R::without_reduction)),
                    JsonAdded(JsonField("has_first_births", &R::has_first_births)),
                    JsonAdded(JsonField("variants", &R::variants)),
                    JsonAdded(JsonField("unordered", &R::unordered)),
                    JsonAdded(JsonField("concurrent", &R::concurrent)));
}

constexpr auto json_fields(const WeightValue*) {
  using W = WeightValue;
  return std::tuple(JsonField("parameter", &W::parameter), JsonField("element", &W::element),
                    JsonField("value", &W::value));
}

constexpr auto json_fields(const CollectiveResult*) {
  using R = CollectiveResult;
  return std::tuple(JsonField("phase", &R::phase), JsonField("microbatch", &R::microbatch),
                    JsonOrNull("module", &R::module), JsonField("operator", &R::op),
                    JsonField("crossing", &R::crossing), JsonField("fingerprint", &R::fingerprint),
                    JsonField("absmax", &R::absmax),
                    JsonField("sum_of_squares", &R::sum_of_squares), JsonField("zeros", &R::zeros));
}

constexpr auto json_fields(const PeerQuestion*) {
  using Q = PeerQuestion;
  return std::tuple(JsonField("rank", &Q::rank), JsonField("microbatch", &Q::microbatch),
                    JsonOrNull("parameter", &Q::parameter), JsonField("element", &Q::element));
}

std::string to_json(const PeerQuestion& question) {
  return one_line(fields_to_json(question));
}

PeerQuestion peer_question_from_json(const std::string& text, const std::string& source) {
  const auto json = parse_json(text, source);
  return fields_from_json<PeerQuestion>(JsonObject(json, source));
}

namespace {

using nlohmann::ordered_json;

constexpr int kLedgerVersion = 1;

/// The header's flag for whether the order of its parameters was observed.
struct BackwardOrderField {
  static constexpr const char* kKey = "backward_order";
  static constexpr std::string_view kObserved = "observed";
  static constexpr std::string_view kAssumed = "reverse_registration";

  void write(ordered_json& json, const Ledger& ledger) const {
    json[kKey] = ledger.is_backward_order_observed ? kObserved : kAssumed;
  }
  void read(const JsonObject& object, Ledger& ledger) const {
    const JsonMember order(object, kKey);
    ledger.is_backward_order_observed = order.text() == kObserved;
    if (!ledger.is_backward_order_observed && order.text() != kAssumed) {
      order.throw_unexpected(R"("observed" or "reverse_registration")");
    }
  }
};

using L = Ledger;
constexpr auto kLedgerFields =
    std::tuple(JsonField("run", &L::run_id), JsonField("attempt", &L::attempt),
               JsonField("iteration", &L::iteration), JsonField("level", &L::level),
               JsonField("on_bad", &L::on_bad), JsonField("coordinates", &L::coordinates),
               BackwardOrderField(), JsonField("gradient_norm", &L::gradient_norm),
               JsonField("loss_scale", &L::loss_scale), JsonField("absmax", &L::absmax),
               JsonOrNull("absmax_parameter", &L::absmax_parameter),
               JsonAdded(JsonField("weights_finite_after", &L::weights_finite_after)),
               JsonAdded(JsonOrNull("no_rerun", &L::no_rerun)),
               JsonAdded(JsonField("gradients_left_by", &L::gradients_left_by)),
               JsonAdded(JsonField("framework_skips_update", &L::framework_skips_update)),
               JsonAdded(JsonField("is_discarded", &L::is_discarded)),
               JsonAdded(JsonField("began_unrecorded", &L::began_unrecorded)));

/// The lines after the header, in file order: their names and their members, vectors or optionals.
constexpr auto kRecords = std::tuple(
    std::pair("parameter", &L::backward_order), std::pair("coverage", &L::coverage),
    std::pair("crossings", &L::crossings), std::pair("microbatch", &L::microbatches),
    std::pair("sighting", &L::sightings), std::pair("optimizer_state", &L::optimizer_states),
    std::pair("birth", &L::births), std::pair("rerun", &L::rerun),
    std::pair("weight_value", &L::weight_values),
    std::pair("collective_result", &L::collective_results), std::pair("history", &L::history));

template <typename Use>
void for_each_record(Use use) {
  std::apply([&](const auto&... record) { (use(record.first, record.second), ...); }, kRecords);
}

Ledger ledger_from_json(const JsonObject& object) {
  require_version(object, kLedgerVersion);
  Ledger ledger;
  read_fields(object, ledger, kLedgerFields);
  ledger.is_complete = false;  // until its last line is read
  return ledger;
}

/// Takes lines one by one and keeps what it can.
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
    const std::string record = object.text("record");
    if (record == "ledger") {
      close("line " + std::to_string(number) + " starts another ledger before its last line");
      is_open_ = false;  // even if this header cannot be read: its lines belong to no ledger
      ledgers_.push_back(ledger_from_json(object));
      is_open_ = true;
      begin_ = line_.data();
      lines_ = 0;
      line_notes_ = LineNotes(source_);
      has_lost_lines_ = false;
      return;
    }
    if (!is_open_) {
      add_orphan(object.where() + ": skipped, because it belongs to no readable ledger");
      return;
    }
    Ledger& ledger = ledgers_.back();
    if (record == "end") {
      const std::int64_t expected = object.integer("lines", 0);
      if (expected != lines_) {
        has_lost_lines_ = true;
        ledger.notes.push_back(object.where() + ": the ledger has " + std::to_string(lines_) +
                               " readable lines of " + std::to_string(expected));
      }
      // A damaged digit gives another number, not an unreadable line.
      const std::string_view lines(begin_, static_cast<std::size_t>(line_.data() - begin_));
      if (crc32_of(lines) != member_from_json<std::uint32_t>(object, "crc32") && !has_lost_lines_) {
        has_lost_lines_ = true;
        ledger.notes.push_back(object.where("crc32") +
                               ": the ledger's bytes have changed since it was written");
      }
      ledger.is_complete = !has_lost_lines_;
      is_open_ = false;
      return;
    }
    if (record == "note") {
      ledger.notes.push_back(object.text("text"));
    } else if (!take_record(record, object)) {
      throw FormatError(object.where("record") + ": unknown record");
    }
    ++lines_;
  }

  /// False if there is no such record.
  bool take_record(const std::string& name, const JsonObject& object) {
    bool is_known = false;
    for_each_record([&](const char* known, auto member) {
      if (name != known) return;
      is_known = true;
      auto& place = ledgers_.back().*member;
      using Record = typename std::remove_reference_t<decltype(place)>::value_type;
      auto record = fields_from_json<Record>(object);
      if constexpr (std::is_same_v<Record, Coverage>) {
        if (std::ranges::find(place, record.phase, &Coverage::phase) != place.end()) {
          throw FormatError(object.where() + ": the coverage of this phase occurs twice");
        }
      }
      if constexpr (requires { place.push_back(record); }) {
        place.push_back(std::move(record));
      } else {
        place = std::move(record);
      }
    });
    return is_known;
  }

  void skip_line(const std::string& reason) {
    if (!is_open_) {
      add_orphan(reason);
      return;
    }
    has_lost_lines_ = true;
    add_note(reason + "; the line is skipped");
  }

  /// A note about a line that belongs to no ledger: the first readable ledger keeps it.
  void add_orphan(std::string note) {
    if (orphans_.size() < LineNotes::kMost) orphans_.push_back(std::move(note));
  }

  void add_note(std::string note) { line_notes_.add(std::move(note), ledgers_.back().notes); }

  void close(const std::string& reason) {
    if (!is_open_) return;
    ledgers_.back().notes.push_back(source_ + ": cut off: " + reason);
    is_open_ = false;
  }

  std::string source_;
  std::string_view line_;        // the current line
  const char* begin_ = nullptr;  // of the open ledger; all lines are of one text
  std::vector<Ledger> ledgers_;
  std::vector<std::string> orphans_;
  bool is_open_ = false;
  bool has_lost_lines_ = false;
  std::int64_t lines_ = 0;         // of the open ledger, without its first and its last
  LineNotes line_notes_{source_};  // of the open ledger
};

}  // namespace

std::string to_jsonl(const Ledger& ledger) {
  ordered_json header = {{"record", "ledger"}, {"version", kLedgerVersion}};
  write_fields(header, ledger, kLedgerFields);
  std::string text = one_line(header) + "\n";
  std::int64_t lines = 0;
  const auto add = [&](const ordered_json& json) {
    text += one_line(json) + "\n";
    ++lines;
  };
  for_each_record([&](const char* name, auto member) {
    const auto add_record = [&](const auto& record) {
      ordered_json json = {{"record", name}};
      write_fields(json, record, json_fields(&record));
      add(json);
    };
    const auto& records = ledger.*member;
    if constexpr (requires { records.begin(); }) {
      for (const auto& record : records) add_record(record);
    } else if (records) {
      add_record(*records);
    }
  });
  for (const auto& note : ledger.notes) add({{"record", "note"}, {"text", note}});
  // A ledger that was read from a truncated text is written as truncated again.
  if (ledger.is_complete) {
    text += one_line({{"record", "end"},
                      {"lines", lines},
                      {"crc32", nanlocator::value_to_json(crc32_of(text))}}) +
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

}  // namespace nanlocator::inline record_room
