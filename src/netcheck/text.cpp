#include "netcheck/text.hpp"

#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "files/printable.hpp"
#include "files/text.hpp"
#include "nanlocator/error.hpp"

namespace nanlocator::netcheck {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kRed = "\x1b[1;31m";
constexpr const char* kGreen = "\x1b[1;32m";
constexpr const char* kPlain = "\x1b[0m";

std::string text_of(const Json& json) {
  return printable(json.get<std::string>());
}

std::string coloured(const std::string& text, const char* colour, const TextStyle& style) {
  return style.colour ? colour + text + kPlain : text;
}

template <typename... Values>
std::string format(const char* pattern, Values... values) {
  std::array<char, 200> text{};
  std::snprintf(text.data(), text.size(), pattern, values...);
  return text.data();
}

std::string rate_text(double bytes_per_second) {
  return bytes_per_second >= 1e9 ? format("%.3g GB/s", bytes_per_second / 1e9)
                                 : format("%.3g MB/s", bytes_per_second / 1e6);
}

// The lines of torch-distributed-gpu-test.py, which existing scripts parse.
std::string rank_lines(const Json& verdict, const TextStyle& style) {
  std::string text;
  for (const auto& rank : verdict.at("per_rank")) {
    const bool is_ok = rank.at("is_ok");
    const std::string state =
        is_ok ? coloured("OK", kGreen, style)
              : coloured("broken", kRed, style) + ": " + text_of(rank.at("why"));
    text +=
        "[" + text_of(rank.at("host")) + "-" + std::to_string(rank.at("local_rank").get<int>()) +
        "] is " + state + " (global rank: " + std::to_string(rank.at("rank").get<int>()) + "/" +
        std::to_string(verdict.at("world_size").get<int>()) + ")" +
        (is_ok && !rank.at("checked_all").get<bool>() ? ", as far as it was checked" : "") + "\n";
  }
  return text;
}

std::string collectives_table(const Json& verdict) {
  const auto& rows = verdict.at("collectives");
  if (rows.empty()) return "";
  const auto& dtype = rows.front().at("dtype");  // only the first dtype; all are in the JSON
  std::string text = "\n" +
                     format("%-17s %-8s %-6s %10s %12s %13s", "collective", "group", "dtype",
                            "latency", "size", "bus bandwidth") +
                     "\n";
  for (const auto& row : rows) {
    if (row.at("dtype") != dtype) continue;
    text += format("%-17s %-8s %-6s %7.1f us %12s %13s", text_of(row.at("collective")).c_str(),
                   text_of(row.at("group")).c_str(), text_of(row.at("dtype")).c_str(),
                   row.at("latency_seconds").get<double>() * 1e6,
                   size_text(row.at("largest_bytes").get<double>()).c_str(),
                   rate_text(row.at("bus_bytes_per_second").get<double>()).c_str());
    if (!row.at("outliers").empty()) text += "  slow: ranks " + row.at("outliers").dump();
    text += '\n';
  }
  return text;
}

}  // namespace

std::string format_verdict(std::string_view verdict_json, const TextStyle& style) {
  try {
    const auto verdict = Json::parse(verdict_json);
    auto text = rank_lines(verdict, style) + collectives_table(verdict);
    for (const auto& what : verdict.at("unsupported"))
      text += "not checked: " + text_of(what) + "\n";
    const auto kind = verdict.at("verdict").get<std::string>();
    text += "\nverdict: " + coloured(kind, kind == "healthy" ? kGreen : kRed, style) +
            format(" (%zu ranks, %s, %.1f s)", verdict.at("world_size").get<std::size_t>(),
                   verdict.at("backend").get<std::string>().c_str(),
                   verdict.at("seconds").get<double>()) +
            "\n";
    for (const auto& finding : verdict.at("findings")) {
      for (const auto& evidence : finding.at("evidence")) {
        text += "  " + finding.at("kind").get<std::string>() + ": " + text_of(evidence) + "\n";
      }
      text += "  action: " + text_of(finding.at("action")) + "\n";
    }
    for (const auto& note : verdict.at("notes")) text += "  note: " + text_of(note) + "\n";
    for (const auto& hint : verdict.at("hints")) text += "  hint: " + text_of(hint) + "\n";
    std::string hosts;
    for (const auto& host : verdict.at("hosts"))
      hosts += (hosts.empty() ? "" : " ") + text_of(host);
    if (!hosts.empty()) text += "  hosts to exclude: " + hosts + "\n";
    return text;
  } catch (const nlohmann::json::exception& error) {
    throw FormatError(std::string("the verdict of a network check cannot be read: ") +
                      error.what());
  }
}

}  // namespace nanlocator::netcheck
