// Whole files, written so that a reader sees the old content or the new one and never a half.
//
// Bytes go to a temporary file in the same folder, which is fsynced, renamed over the target, and
// the folder is fsynced: after write_file_atomically returns, a power cut keeps the new content.
// The cost is two fsyncs; call it where something was found, not in a healthy step. Any thread may
// call; two writers of the same path do not mix, the later rename wins.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace nanlocator::inline files_room {

/// Maps, verdicts and reports: what the umask leaves of 0666.
inline constexpr std::filesystem::perms kSharedFile =
    std::filesystem::perms::owner_read | std::filesystem::perms::owner_write |
    std::filesystem::perms::group_read | std::filesystem::perms::group_write |
    std::filesystem::perms::others_read | std::filesystem::perms::others_write;
/// What holds weights or training data (bundles): 0600.
inline constexpr std::filesystem::perms kPrivateFile =
    std::filesystem::perms::owner_read | std::filesystem::perms::owner_write;

/// Larger files are refused by read_file: no file of this project that is read whole comes near.
inline constexpr std::uint64_t kLargestWholeFile = std::uint64_t{4} << 30;

/// Replaces `path` by `bytes`; the umask is applied to `permissions`. Throws IoError with the path
/// and the system's reason (full disk, missing folder, no permission); the old file is then
/// unchanged and no temporary file is left.
void write_file_atomically(const std::filesystem::path& path, std::string_view bytes,
                           std::filesystem::perms permissions = kSharedFile);

/// All bytes of a regular file of at most `limit` bytes. Throws IoError with the path and the
/// reason; a folder, a pipe or a device is refused, because reading one may never end.
[[nodiscard]] std::string read_file(const std::filesystem::path& path,
                                    std::uint64_t limit = kLargestWholeFile);

}  // namespace nanlocator::inline files_room
