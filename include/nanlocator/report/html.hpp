// The report as one HTML page that opens offline.
//
// In: one bad step as read from a run's folder. Out: the whole file. Verdict, evidence, ranks by
// state and run facts are plain HTML and readable without JavaScript; the script draws grid,
// timeline, parameters, histories, heat map and ledgers from one JSON element. Cost: linear in the
// ledgers.
#pragma once

#include <cstddef>
#include <string>

#include "nanlocator/report/run_report.hpp"

namespace nanlocator::inline report_room {

/// The largest page. Data that does not fit is left out, each rank's latest sightings first, and
/// the page says how much.
inline constexpr std::size_t kLargestPage = 1'950'000;  // bytes

/// A self-contained page. The same report gives the same bytes, in any order of its ledgers and
/// histories. Names are untrusted: they are escaped in HTML and are text to the script. The
/// Content-Security-Policy allows only the page's own style and script, by hash.
[[nodiscard]] std::string format_html(const RunReport& report);

}  // namespace nanlocator::inline report_room
