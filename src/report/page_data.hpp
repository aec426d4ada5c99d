// The data that the page's script draws, as one JSON value. script.js reads its keys.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>

#include "report/parameter_picture.hpp"
#include "report/rank_picture.hpp"
#include "report/timeline_picture.hpp"

namespace nanlocator::inline report_room {

/// Limits on the ledgers' data in the page.
struct PageLimits {
  std::size_t sightings = 60'000;  // divided evenly among the ranks
  std::size_t parameters = 6'000;  // bad ones first
  std::size_t name_bytes = 400;    // per name
  std::size_t births = 64;
  std::size_t curves = 12;
  std::size_t windows = 8;
  bool has_hosts = true;  // host and device names of every rank
  [[nodiscard]] PageLimits halved() const {
    return {sightings / 2,    parameters / 2, std::max<std::size_t>(40, name_bytes / 2),
            births / 2,       curves / 2,     windows / 2,
            sightings > 4'000};
  }
};

struct PagePictures {
  RankPicture ranks;
  ParameterPicture parameters;
  TimelinePicture timeline;
};

/// Columns of numbers and one table of strings: rows of objects would take four times the bytes.
[[nodiscard]] nlohmann::ordered_json page_data(const RunReport& report,
                                               const PagePictures& pictures,
                                               const PageLimits& limits);

}  // namespace nanlocator::inline report_room
