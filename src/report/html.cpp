#include "nanlocator/report/html.hpp"
#include "files/text.hpp"

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <string_view>
#include <vector>

#include "files/printable.hpp"
#include "nanlocator/report/narrative.hpp"
#include "nanlocator/report/sentences.hpp"
#include "nanlocator/report/terminal.hpp"
#include "report/assets.hpp"
#include "report/page_data.hpp"
#include "report/page_text.hpp"
#include "report/words.hpp"

namespace nanlocator::inline report_room {
namespace {

// These limits keep the page below kLargestPage even if all texts consist of quotes (six bytes each
// when escaped).
constexpr std::size_t kMostOriginsShown = 16;
constexpr std::size_t kMostEvidenceOfOne = 30;
constexpr std::size_t kMostEvidenceOfSeveral = 10;
constexpr std::size_t kMostLinesOfAList = 30;
constexpr std::size_t kMostFacts = 40;
constexpr std::size_t kLongText = 600;  // bytes

std::string escaped(std::string_view raw) {
  return html_escaped(page_text(raw, kLongText));
}

/// "<tag attributes>text</tag>"; `attributes` come from the page, not from the run.
std::string element(std::string_view tag, std::string_view attributes, std::string_view raw) {
  std::string html = "<" + std::string(tag);
  if (!attributes.empty()) html += " " + std::string(attributes);
  return html + ">" + escaped(raw) + "</" + std::string(tag) + ">";
}

struct StatusText {
  std::string_view mark;  // shown beside the colour
  std::string_view text;
};

StatusText status_text(VerdictStatus status) {
  switch (status) {
    case VerdictStatus::clean:
      return {"\xe2\x9c\x93", "Clean: nothing bad was seen"};
    case VerdictStatus::benign:
      return {"\xe2\x9c\x93", "Benign: explained and harmless"};
    case VerdictStatus::located:
      return {"\xe2\x97\x86", "Located: the evidence is complete"};
    case VerdictStatus::partial:
      return {"\xe2\x97\x87", "Partial: some evidence is missing"};
  }
  return {"", ""};
}

std::string where_in(const OriginTensor& tensor) {
  std::string text;
  if (!tensor.first_bad_index.empty())
    text = "first bad element " + describe_shape(tensor.first_bad_index);
  if (tensor.absmax_finite) {
    append_item(text, "largest finite magnitude " + number_text(*tensor.absmax_finite), "; ");
  }
  return text;
}

std::string place_in_step(const Origin& origin) {
  std::string text(name_of(origin.phase));
  if (origin.direction && *origin.direction != Direction::none &&
      name_of(*origin.direction) != name_of(origin.phase)) {
    text += " (" + std::string(name_of(*origin.direction)) + ")";
  }
  if (origin.microbatch) text += ", microbatch " + std::to_string(*origin.microbatch);
  if (origin.chunk) text += ", model chunk " + std::to_string(*origin.chunk);
  return text;
}

/// "rank 5 (tp1 pp0 dp1)", or the candidates; the page shows host and device below.
std::string place_of_birth(Origin origin) {
  if (origin.coordinates) {
    origin.coordinates->host.clear();
    origin.coordinates->device.clear();
  }
  return who_of(origin);
}

std::string machine_of(const Origin& origin) {
  if (!origin.coordinates) return "";
  std::string text = origin.coordinates->host.empty() ? "" : "host " + origin.coordinates->host;
  if (!origin.coordinates->device.empty())
    text += (text.empty() ? "" : ", ") + origin.coordinates->device;
  return text;
}

/// Allows line breaks after the dots of names, but not within "3.21".
std::string breakable(std::string_view raw) {
  const std::string plain = escaped(raw);
  std::string html;
  for (std::size_t i = 0; i < plain.size(); ++i) {
    html += plain[i];
    const bool is_in_a_name =
        i > 0 && plain[i] == '.' && (plain[i - 1] < '0' || plain[i - 1] > '9');
    if (is_in_a_name) html += "<wbr>";
  }
  return html;
}

class StaticParts {
 public:
  StaticParts(const RunReport& report, const PagePictures& pictures)
      : report_(report), verdict_(report.verdict), pictures_(pictures) {}

  [[nodiscard]] std::string title() const {
    return escaped("nanlocator: step " + std::to_string(verdict_.iteration));
  }

  [[nodiscard]] std::string masthead() const {
    std::string html = element("span", "class=\"brand\"", "nanlocator");
    if (!verdict_.run_id.empty()) html += element("span", "class=\"run\"", verdict_.run_id);
    if (report_.run && report_.run->attempt > 0)
      html += element("span", "", "attempt " + std::to_string(report_.run->attempt));
    return html + element("span", "", "step " + std::to_string(verdict_.iteration));
  }

  [[nodiscard]] std::string verdict() const {
    const StatusText status = status_text(verdict_.status);
    std::string html = "<div class=\"status status-" + std::string(name_of(verdict_.status)) +
                       (verdict_.origins.empty() ? " no-origin" : "") + "\">";
    html += "<p class=\"badge\"><span aria-hidden=\"true\">" + std::string(status.mark) +
            "</span> " + std::string(status.text) + "</p>";
    html += block() + "</div>";
    const auto& origins = verdict_.origins;
    if (origins.size() == 1) {
      html += element("h2", "class=\"found\"", headline_of(verdict_, origins.front())) +
              origin_body(origins.front(), 0);
    } else {
      for (std::size_t i = 0; i < std::min(origins.size(), kMostOriginsShown); ++i) {
        html += "<details class=\"origin\"" + std::string(i == 0 ? " open" : "") + "><summary>";
        html += element("span", "class=\"number\"", std::to_string(i + 1));
        html += "<h2>" + escaped(headline_of(verdict_, origins[i])) + "</h2>";
        html += element("span", "class=\"chip\"", title_of(origins[i])) + "</summary>";
        html += origin_body(origins[i], i) + "</details>";
      }
      if (origins.size() > kMostOriginsShown) {
        html += element(
            "p", "class=\"more\"",
            count_text(origins.size() - kMostOriginsShown, "further origin") + " in verdict.json");
      }
    }
    return html + spread() + as_text();
  }

  /// The number and list of ranks in each state: the grid as text for screen readers.
  [[nodiscard]] std::string rank_summary() const {
    static constexpr std::array<std::string_view, 7> kMeanings = {
        "an origin's rank",
        "one of several that may be the origin",
        "no ledger arrived",
        "met it; the origin is elsewhere",
        "met it in the reduced gradients only",
        "cut-off ledger, or it scanned nothing",
        "nothing bad in what it scanned"};
    static constexpr std::array<std::string_view, 7> kLetters = {"B", "?", "S", "R", "r", "-", "C"};
    std::map<RankState, std::vector<int>> by_state;
    for (const PageRank& rank : pictures_.ranks.ranks) by_state[rank.state].push_back(rank.rank);
    if (by_state.empty()) return element("p", "", "No rank is known.");
    std::string html =
        "<table class=\"summary\"><caption class=\"visually-hidden\">Ranks by state</caption>"
        "<thead><tr><th scope=\"col\">state</th><th scope=\"col\" class=\"number\">ranks</th>"
        "<th scope=\"col\">which</th></tr></thead><tbody>";
    for (const auto& [state, ranks] : by_state) {
      const auto index = static_cast<std::size_t>(state);
      html += "<tr><th scope=\"row\"><span class=\"key s" + std::to_string(index) +
              "\" aria-hidden=\"true\">" + std::string(kLetters[index]) + "</span> " +
              std::string(kRankStateNames[index]) + "<small>" + std::string(kMeanings[index]) +
              "</small></th><td class=\"number\">" + std::to_string(ranks.size()) + "</td>" +
              "<td>" + html_escaped(page_text(describe_ranks(ranks), 300)) + "</td></tr>";
    }
    return html + "</tbody></table>";
  }

  [[nodiscard]] std::string run_facts() const {
    std::vector<std::pair<std::string, std::string>> facts;
    const auto add = [&](const char* name, const std::string& value) {
      if (!value.empty()) facts.emplace_back(name, value);
    };
    add("run", verdict_.run_id);
    add("folder", report_.run_dir);
    if (const auto& run = report_.run) {
      add("attempt", std::to_string(run->attempt));
      add("started", run->started);
      add("ranks", std::to_string(run->world_size));
      add("host of rank 0", run->host);
      add("level", run->level);
      add("integration", run->integration);
      add("nanlocator", run->nanlocator_version);
      add("torch", run->torch_version);
      for (const auto& [name, value] : run->options) {
        if (facts.size() == kMostFacts) break;
        facts.emplace_back("option " + name, value);
      }
    }
    add("re-run of the step", rerun_text());
    std::string html = "<dl class=\"facts\">";
    for (const auto& [name, value] : facts) {
      html += "<div>" + element("dt", "", name) + element("dd", "", value) + "</div>";
    }
    return html + "</dl>" + list("What this configuration does not see", not_covered()) +
           list("Not restored before the re-run", verdict_.rerun.not_restored) +
           list("Notes", notes());
  }

 private:
  [[nodiscard]] std::string origin_body(const Origin& origin, std::size_t index) const {
    std::string html = "<dl class=\"tiles\">";
    const auto tile = [&](const char* name, const std::string& value,
                          const std::vector<std::string>& below) {
      if (value.empty()) return;
      html += "<div>" + element("dt", "", name) + "<dd>" + breakable(value);
      for (const std::string& line : below) {
        if (!line.empty()) html += "<small>" + breakable(line) + "</small>";
      }
      html += "</dd></div>";
    };
    tile("Where", place_of_birth(origin), {machine_of(origin), place_in_step(origin)});
    const std::string module = origin.module.empty() ? "" : "module " + origin.module;
    tile(origin.op.empty() ? "Module" : "Operator", origin.op.empty() ? origin.module : origin.op,
         {origin.op.empty() ? "" : module});
    tile("Cause", title_of(origin),
         {origin.cause == Cause::unknown ? "" : std::string(name_of(origin.cause)),
          certainty_of(origin)});
    tile("Code", code_of(origin), {});
    tile("Owner", owner_of(origin), {});
    tile("Link", link_of(verdict_, origin), {});
    tile("Parameter", origin.parameter, {between(origin)});
    if (origin.tensor) {
      const OriginTensor& tensor = *origin.tensor;
      tile("Tensor",
           std::to_string(tensor.nan) + " NaN, " + std::to_string(tensor.pos_inf + tensor.neg_inf) +
               " Inf",
           {tensor.role.text() + " " + tensor.dtype + " " + describe_shape(tensor.shape),
            where_in(tensor)});
    }
    html += "</dl>";
    html += steps(origin, index);
    if (!origin.bundle.empty()) html += replay(origin, index);
    html += list("Evidence", evidence_of(verdict_, origin),
                 verdict_.origins.size() == 1 ? kMostEvidenceOfOne : kMostEvidenceOfSeveral);
    html += "<div class=\"refuted\"><h3>What would refute it</h3>" +
            element("p", "", refutation_of(origin)) + "</div>";
    return html;
  }

  [[nodiscard]] std::string steps(const Origin& origin, std::size_t index) const {
    const std::vector<Step> steps = steps_of(verdict_, origin);
    if (steps.empty()) return "";
    std::string html = "<div class=\"action\"><h3>Do next</h3><ol>";
    for (const Step& step : steps) {
      html += "<li>" + escaped(step.text);
      if (!step.command.empty()) html += command("check-" + std::to_string(index), step.command);
      html += "</li>";
    }
    return html + "</ol></div>";
  }

  /// The command with a button that copies it.
  static std::string command(const std::string& id, const std::string& text) {
    return "<div class=\"command\">" + element("code", "id=\"" + id + "\" tabindex=\"0\"", text) +
           "<button type=\"button\" data-copy=\"" + id + "\" hidden>Copy</button></div>";
  }

  static std::string between(const Origin& origin) {
    if (origin.clean_before.empty() && origin.clean_after.empty()) return "";
    if (origin.clean_after.empty()) return "clean before it: " + origin.clean_before;
    if (origin.clean_before.empty()) return "clean after it: " + origin.clean_after;
    return "clean on both sides: " + origin.clean_before + " and " + origin.clean_after;
  }

  [[nodiscard]] std::string replay(const Origin& origin, std::size_t index) const {
    return "<div class=\"replay\"><h3>See it again</h3>" +
           command("replay-" + std::to_string(index),
                   replay_command(report_.run_dir, origin.bundle)) +
           "</div>";
  }

  /// The block's rows, as in the log.
  [[nodiscard]] std::string block() const {
    const Narrative told = narrative_of(verdict_, report_.run_dir);
    std::string html =
        element("p", "class=\"event\"", told.severity + "[" + told.code + "] " + told.event) +
        element("h1", "id=\"headline\"",
                told.severity == "INFO" ? outcome_of(verdict_) : told.action);
    if (told.severity != "INFO") {
      html += "<ul class=\"five\">";
      for (const auto& [name, value] :
           {std::pair("restart", told.restart), std::pair("hosts", told.hosts),
            std::pair("load", told.load), std::pair("page", told.page),
            std::pair("ticket", told.ticket)}) {
        html += "<li>" + element("span", "", name) + " " + element("b", "", value) + "</li>";
      }
      html += "</ul>";
    }
    html += "<dl class=\"job\">";
    for (const auto& [name, text] : told.rows) {
      html += "<div>" + element("dt", "", name) + "<dd>" + breakable(text) + "</dd></div>";
    }
    return html + "</dl>";
  }

  [[nodiscard]] std::string spread() const {
    std::string text = spread_of(verdict_);
    if (!text.empty()) text += ".";
    if (!verdict_.silent_ranks.empty()) {
      text += (text.empty() ? "" : " ") + std::string("No answer from ") +
              count_text(verdict_.silent_ranks.size(), "rank") + ": " +
              page_text(describe_ranks(verdict_.silent_ranks), 300) +
              "; what they saw is not in this verdict.";
    }
    return text.empty() ? "" : element("p", "class=\"spread\"", text);
  }

  [[nodiscard]] std::string as_text() const {
    const std::string text = format_verdict(verdict_, {.run_dir = report_.run_dir});
    // format_verdict has made each line printable.
    return "<details class=\"as-text\"><summary>The verdict as text</summary><pre id=\"as-text\" "
           "tabindex=\"0\">" +
           html_escaped(text.substr(0, 20'000)) +
           "</pre><button type=\"button\" data-copy=\"as-text\" hidden>Copy</button></details>";
  }

  static std::string list(const char* heading, const std::vector<std::string>& lines,
                          std::size_t most = kMostLinesOfAList) {
    if (lines.empty()) return "";
    std::string html = "<div class=\"lines\">" + element("h3", "", heading) + "<ul>";
    for (std::size_t i = 0; i < std::min(lines.size(), most); ++i) {
      html += element("li", "", lines[i]);
    }
    if (lines.size() > most)
      html += element("li", "", std::to_string(lines.size() - most) + " more");
    return html + "</ul></div>";
  }

  [[nodiscard]] std::string rerun_text() const {
    if (!verdict_.rerun.done) return "not done";
    if (!verdict_.rerun.reproduced) return "started; it did not complete on every rank";
    return *verdict_.rerun.reproduced ? "done; bad again" : "done; clean";
  }

  [[nodiscard]] std::vector<std::string> not_covered() const {
    return report_.run ? report_.run->not_covered : std::vector<std::string>{};
  }

  [[nodiscard]] std::vector<std::string> notes() const {
    std::vector<std::string> all = notes_of(verdict_);
    const auto append = [&](const std::vector<std::string>& more) {
      all.insert(all.end(), more.begin(), more.end());
    };
    append(report_.notes);
    append(pictures_.ranks.notes);
    return all;
  }

  const RunReport& report_;
  const Verdict& verdict_;
  const PagePictures& pictures_;
};

/// Fills in the names in one pass: filled-in text is not searched again.
std::string filled(std::string_view page,
                   const std::function<std::string(std::string_view)>& value_of) {
  std::string out;
  while (true) {
    const std::size_t begin = page.find("{{");
    const std::size_t end = begin == page.npos ? page.npos : page.find("}}", begin);
    if (end == page.npos) return out.append(page);
    out.append(page.substr(0, begin)).append(value_of(page.substr(begin + 2, end - begin - 2)));
    page.remove_prefix(end + 2);
  }
}

std::string format_page(const RunReport& report, const PagePictures& pictures,
                        const PageLimits& limits) {
  const StaticParts parts(report, pictures);
  const std::map<std::string_view, std::function<std::string()>> values = {
      {"style", [] { return std::string(assets::kStyle); }},
      {"script", [] { return std::string(assets::kScript); }},
      {"style_hash", [] { return std::string(assets::kStyleHash); }},
      {"script_hash", [] { return std::string(assets::kScriptHash); }},
      {"title", [&] { return parts.title(); }},
      {"masthead", [&] { return parts.masthead(); }},
      {"verdict", [&] { return parts.verdict(); }},
      {"rank_summary", [&] { return parts.rank_summary(); }},
      {"run_facts", [&] { return parts.run_facts(); }},
      {"data", [&] { return script_json(page_data(report, pictures, limits)); }}};
  return filled(assets::kTemplate, [&](std::string_view name) { return values.at(name)(); });
}

}  // namespace

std::string format_html(const RunReport& report) {
  PagePictures pictures;
  pictures.ranks = picture_ranks(report);
  pictures.parameters = picture_parameters(pictures.ranks.ranks);
  pictures.timeline = picture_timeline(report, pictures.ranks);
  PageLimits limits;
  std::string page = format_page(report, pictures, limits);
  while (page.size() > kLargestPage && limits.sightings > 0) {
    limits = limits.halved();
    page = format_page(report, pictures, limits);
  }
  return page;
}

}  // namespace nanlocator::inline report_room
