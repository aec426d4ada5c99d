// A curve over steps as lines of text, on a logarithmic axis.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace nanlocator::command {

enum class PlotGlyphs {
  braille,  // eight dots a character, for terminals
  ascii,    // for files and pipes
};

/// `rows` lines of at most `columns` characters, top line first, without trailing spaces. One
/// character per value; if there are more values than columns, the largest of several. Zero is at
/// the bottom, NaN leaves a gap. A curve of equal values is in the middle.
[[nodiscard]] std::vector<std::string> plot_curve(std::span<const float> values,
                                                  std::size_t columns, std::size_t rows,
                                                  PlotGlyphs glyphs);

/// Column `c` of `columns` shows the entries [begin, end) of `count`.
struct ColumnRange {
  std::size_t begin = 0;
  std::size_t end = 0;
};
[[nodiscard]] ColumnRange shown_in_column(std::size_t column, std::size_t columns,
                                          std::size_t count);

}  // namespace nanlocator::command
