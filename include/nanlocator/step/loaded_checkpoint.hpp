// The checkpoint that this process has loaded, for the orders of a verdict.
#pragma once

#include <string>

namespace nanlocator::inline step_room {

/// `path`: a file or folder that the program has loaded. The latest counts. Any thread.
void note_loaded_checkpoint(std::string path);

}  // namespace nanlocator::inline step_room
