// The report as one HTML page: opens from a laptop, needs no network.
//
// In: what a run left behind about one bad step. Out: the whole file. Verdict, evidence, ranks by
// state and run facts are plain HTML and can be read without JavaScript; grid, timeline,
// parameters, histories, heat map and ledgers are drawn from one JSON element. Cost: linear in the
// ledgers.
#pragma once

#include <cstddef>
#include <string>

#include "nanlocator/report/run_report.hpp"

namespace nanlocator::inline report_room {

/// No page is larger. What does not fit is left out, the latest sightings of each rank first, and
/// the page says how much.
inline constexpr std::size_t kLargestPage = 1'950'000;  // bytes

/// A page that needs nothing else. The same report gives the same bytes, in whatever order its
/// ledgers and histories come. Names are hostile: they are escaped where they are HTML, and are
/// text to the script; the Content-Security-Policy allows the page's own style and script (by hash)
/// and nothing else.
[[nodiscard]] std::string format_html(const RunReport& report);

}  // namespace nanlocator::inline report_room
