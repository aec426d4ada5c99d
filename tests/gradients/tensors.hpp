// Maps and tensors for the tests of this room.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/randn.h>

#include <limits>
#include <string>
#include <vector>

#include "nanlocator/map/parameter_map.hpp"

namespace nanlocator::testing {

inline constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

inline const std::vector<at::ScalarType> kScannedTypes = {
    at::kDouble,      at::kFloat,       at::kHalf,         at::kBFloat16,      at::kFloat8_e4m3fn,
    at::kFloat8_e5m2, at::kComplexHalf, at::kComplexFloat, at::kComplexDouble,
};

inline std::string test_name(at::ScalarType type) {
  return c10::toString(type);
}

inline RankCoordinates single_rank() {
  RankCoordinates coordinates;
  coordinates.host = "here";
  coordinates.device = "cpu";
  return coordinates;
}

inline RankCoordinates data_parallel_rank(int rank, int size) {
  auto coordinates = single_rank();
  coordinates.rank = coordinates.dp.rank = coordinates.local_rank = rank;
  coordinates.world_size = coordinates.dp.size = size;
  return coordinates;
}

/// Parameters "p0", "p1", ... of these shapes.
inline ParameterMap map_of(std::vector<std::vector<std::int64_t>> shapes,
                           RankCoordinates coordinates = single_rank()) {
  std::vector<ParameterInfo> infos;
  for (auto& shape : shapes) {
    ParameterInfo info;
    info.id = static_cast<std::int64_t>(infos.size());
    info.name = info.raw_name = std::string("p").append(std::to_string(infos.size()));
    info.shape = std::move(shape);
    info.dtype = "float32";
    infos.push_back(std::move(info));
  }
  return {std::move(coordinates), std::move(infos)};
}

}  // namespace nanlocator::testing
