// The checkpoints that this process has loaded and saved, for the orders of a verdict.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace nanlocator::inline step_room {

/// `path`: a file or folder that the program has loaded. The latest counts. Any thread.
void note_loaded_checkpoint(std::string path);

/// `path`: a file that the program has saved. `updates`: the number of the last step whose update
/// was in it, if known. The latest counts whose name, or whose folder's, has the number of a step.
/// Any thread.
void note_saved_checkpoint(std::string path, std::optional<std::int64_t> updates);
/// Another training begins in this process.
void forget_saved_checkpoints();

}  // namespace nanlocator::inline step_room
