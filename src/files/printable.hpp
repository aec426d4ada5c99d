// Text from other programs made safe for a terminal or a shell; the width of text; counts.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace nanlocator::inline files_room {

/// `text` with everything escaped ("\x1b", "\u202e") that could move the cursor, change colours or
/// reorder the line: control characters, bidirectional and invisible format characters, and bytes
/// that are not UTF-8. Names of modules and hosts would otherwise reach terminals and logs
/// unchecked.
[[nodiscard]] std::string printable(std::string_view text);

/// The columns that printable UTF-8 `text` occupies: two for East Asian wide characters and emoji,
/// none for combining marks.
[[nodiscard]] int columns_of(std::string_view text);

/// One word for a shell, quoted if necessary.
[[nodiscard]] std::string shell_word(std::string_view text);

/// "3 ranks", "1 rank".
[[nodiscard]] std::string count_text(std::size_t count, std::string_view noun);

}  // namespace nanlocator::inline files_room
