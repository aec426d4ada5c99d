// Writes whole files atomically: a reader sees the old content or the new one, never a mixture.
//
// Bytes go to a temporary file in the same folder, which is fsynced and renamed over the target;
// then the folder is fsynced. Once write_file_atomically returns, the new content survives a power
// cut. Cost: two fsyncs, so call it for findings, not in a healthy step. Any thread may call. If
// two writers share a path, the later rename wins.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace nanlocator::inline files_room {

/// Maps, verdicts and reports: 0666 less the umask.
inline constexpr std::filesystem::perms kSharedFile =
    std::filesystem::perms::owner_read | std::filesystem::perms::owner_write |
    std::filesystem::perms::group_read | std::filesystem::perms::group_write |
    std::filesystem::perms::others_read | std::filesystem::perms::others_write;
/// Files that hold weights or training data (bundles): 0600.
inline constexpr std::filesystem::perms kPrivateFile =
    std::filesystem::perms::owner_read | std::filesystem::perms::owner_write;

/// read_file refuses larger files; no file that this project reads whole comes near.
inline constexpr std::uint64_t kLargestWholeFile = std::uint64_t{4} << 30;

/// Replaces `path` by `bytes`; the umask is applied to `permissions`. Throws IoError with the path
/// and the system's reason (full disk, missing folder, no permission), leaving the old file
/// unchanged and no temporary file behind.
void write_file_atomically(const std::filesystem::path& path, std::string_view bytes,
                           std::filesystem::perms permissions = kSharedFile);

/// All bytes of a regular file of at most `limit` bytes. Throws IoError with the path and the
/// reason. Refuses a folder, a pipe or a device, because reading one may never end.
[[nodiscard]] std::string read_file(const std::filesystem::path& path,
                                    std::uint64_t limit = kLargestWholeFile);

}  // namespace nanlocator::inline files_room
