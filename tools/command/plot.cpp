#include "plot.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>

namespace nanlocator::command {
namespace {

constexpr std::size_t kDotsPerRow = 4;  // of a braille character

/// Logarithms of the finite values above zero: the limits of the axis.
struct LogAxis {
  double low = std::numeric_limits<double>::infinity();
  double high = -std::numeric_limits<double>::infinity();

  explicit LogAxis(std::span<const float> values) {
    for (const float value : values) {
      if (!std::isfinite(value) || value <= 0) continue;
      low = std::min(low, std::log(static_cast<double>(value)));
      high = std::max(high, std::log(static_cast<double>(value)));
    }
  }

  /// 0, the bottom, to `levels` - 1; empty for NaN.
  [[nodiscard]] std::optional<double> level_of(float value, std::size_t levels) const {
    if (!std::isfinite(value)) return std::nullopt;
    const double top = static_cast<double>(levels) - 1;
    if (value <= 0) return 0;
    if (high <= low) return top / 2;
    return (std::log(static_cast<double>(value)) - low) / (high - low) * top;
  }
};

float largest_in(std::span<const float> values, const ColumnRange& range) {
  float largest = std::numeric_limits<float>::quiet_NaN();
  for (std::size_t i = range.begin; i < range.end; ++i) {
    if (std::isnan(largest) || values[i] > largest) largest = values[i];
  }
  return largest;
}

/// U+2800 plus a bit for each dot; the bits of a column from the bottom dot up.
class BrailleCell {
 public:
  void set(std::size_t side, std::size_t dot) {
    static constexpr std::array<std::array<unsigned, kDotsPerRow>, 2> kBits = {
        {{0x40, 0x04, 0x02, 0x01}, {0x80, 0x20, 0x10, 0x08}}};
    bits_ |= kBits[side][dot];
  }
  [[nodiscard]] std::string text() const {
    if (bits_ == 0) return " ";
    const unsigned point = 0x2800 + bits_;
    return {static_cast<char>(0xe0 | (point >> 12)),
            static_cast<char>(0x80 | ((point >> 6) & 0x3f)),
            static_cast<char>(0x80 | (point & 0x3f))};
  }

 private:
  unsigned bits_ = 0;
};

std::vector<std::string> without_trailing_spaces(std::vector<std::string> lines) {
  for (auto& line : lines) line.erase(line.find_last_not_of(' ') + 1);
  return lines;
}

std::size_t nearest(double level) {
  return static_cast<std::size_t>(std::lround(level));
}

std::vector<std::string> draw_ascii(std::span<const float> curve, std::size_t rows,
                                    const LogAxis& axis) {
  std::vector<std::string> lines(rows, std::string(curve.size(), ' '));
  for (std::size_t column = 0; column < curve.size(); ++column) {
    if (const auto level = axis.level_of(curve[column], rows)) {
      lines[rows - 1 - nearest(*level)][column] = '*';
    }
  }
  return without_trailing_spaces(std::move(lines));
}

/// The left dot of a character is its value, the right one the midpoint to the next.
std::vector<std::string> draw_braille(std::span<const float> curve, std::size_t rows,
                                      const LogAxis& axis) {
  const std::size_t levels = rows * kDotsPerRow;
  std::vector<std::vector<BrailleCell>> cells(rows, std::vector<BrailleCell>(curve.size()));
  const auto set = [&](std::size_t column, std::size_t side, double level) {
    const std::size_t dot = nearest(level);
    cells[rows - 1 - dot / kDotsPerRow][column].set(side, dot % kDotsPerRow);
  };
  for (std::size_t column = 0; column < curve.size(); ++column) {
    const auto level = axis.level_of(curve[column], levels);
    if (!level) continue;
    set(column, 0, *level);
    if (column + 1 == curve.size()) continue;
    if (const auto next = axis.level_of(curve[column + 1], levels)) {
      set(column, 1, (*level + *next) / 2);
    }
  }
  std::vector<std::string> lines;
  for (const auto& row : cells) {
    auto& line = lines.emplace_back();
    for (const auto& cell : row) line += cell.text();
  }
  return without_trailing_spaces(std::move(lines));
}

}  // namespace

ColumnRange shown_in_column(std::size_t column, std::size_t columns, std::size_t count) {
  const std::size_t drawn = std::min(columns, count);
  return {column * count / drawn, (column + 1) * count / drawn};
}

std::vector<std::string> plot_curve(std::span<const float> values, std::size_t columns,
                                    std::size_t rows, PlotGlyphs glyphs) {
  std::vector<float> curve;
  for (std::size_t column = 0; column < std::min(columns, values.size()); ++column) {
    curve.push_back(largest_in(values, shown_in_column(column, columns, values.size())));
  }
  const LogAxis axis(values);
  return glyphs == PlotGlyphs::braille ? draw_braille(curve, rows, axis)
                                       : draw_ascii(curve, rows, axis);
}

}  // namespace nanlocator::command
