#include "nanlocator/files/atomic_file.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <iterator>
#include <thread>
#include <vector>

#include "limited_file_size.hpp"
#include "nanlocator/error.hpp"
#include "temporary_folder.hpp"

namespace nanlocator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::LimitedFileSize;
using testing::message_of;
using testing::TemporaryFolder;

/// Does not use the code under test.
std::string bytes_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

mode_t mode_of(const std::filesystem::path& path) {
  struct stat status {};
  EXPECT_EQ(::stat(path.c_str(), &status), 0);
  return status.st_mode & 07777;
}

TEST(AtomicFile, WritesEveryByteAndLeavesNoOtherFile) {
  const TemporaryFolder folder;
  std::string bytes;
  for (int i = 0; i < 300'000; ++i) bytes += static_cast<char>(i * 7);
  write_file_atomically(folder / "x.bin", bytes);
  EXPECT_EQ(bytes_of(folder / "x.bin"), bytes);
  EXPECT_THAT(folder.names(), ElementsAre("x.bin"));
}

TEST(AtomicFile, ReplacesAnOldFileAndItsPermissions) {
  const TemporaryFolder folder;
  folder.plant("x.json", "old and longer");
  write_file_atomically(folder / "x.json", "new", kPrivateFile);
  EXPECT_EQ(bytes_of(folder / "x.json"), "new");
  EXPECT_EQ(mode_of(folder / "x.json"), 0600U);
}

TEST(AtomicFile, AppliesTheUmask) {
  const TemporaryFolder folder;
  const mode_t before = ::umask(027);
  write_file_atomically(folder / "x.json", "{}");
  ::umask(before);
  EXPECT_EQ(mode_of(folder / "x.json"), 0640U);
}

TEST(AtomicFile, KeepsTheOldFileAndLeavesNothingBehindWhereTheDiskIsFull) {
  const TemporaryFolder folder;
  folder.plant("x.json", "old");
  const std::string message = message_of<IoError>([&] {
    const LimitedFileSize limit(1000);
    write_file_atomically(folder / "x.json", std::string(5000, 'n'));
  });
  EXPECT_THAT(message, HasSubstr((folder / "x.json").string()));
  EXPECT_THAT(message, HasSubstr("File too large"));  // EFBIG, from the limit above
  EXPECT_EQ(bytes_of(folder / "x.json"), "old");
  EXPECT_THAT(folder.names(), ElementsAre("x.json"));
}

TEST(AtomicFile, NamesThePathAndTheReasonWhereTheFolderIsMissing) {
  const TemporaryFolder folder;
  const auto path = folder / "missing/x.json";
  EXPECT_EQ(message_of<IoError>([&] { write_file_atomically(path, "x"); }),
            "cannot create " + path.string() + ": No such file or directory");
}

TEST(AtomicFile, LeavesNothingBehindWhereTheTargetIsAFolder) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder / "x.json");
  EXPECT_THROW(write_file_atomically(folder / "x.json", "x"), IoError);
  EXPECT_THAT(folder.names(), ElementsAre("x.json"));
}

TEST(AtomicFile, WritesAFileWhoseNameIsAsLongAsNamesMayBe) {
  const TemporaryFolder folder;
  const std::string name(255, 'n');
  write_file_atomically(folder / name, "x");
  EXPECT_THAT(folder.names(), ElementsAre(name));
}

TEST(AtomicFile, WritesIntoTheWorkingFolderWhereThePathNamesNone) {
  const TemporaryFolder folder;
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(folder.path());
  write_file_atomically("x.json", "x");
  std::filesystem::current_path(before);
  EXPECT_EQ(bytes_of(folder / "x.json"), "x");
}

TEST(AtomicFile, AReaderNeverSeesAMixtureOfTwoWriters) {
  const TemporaryFolder folder;
  const auto path = folder / "x";
  const std::string first(20'000, 'a');
  const std::string second(30'000, 'b');
  write_file_atomically(path, first);
  const auto write_often = [&](const std::string& bytes) {
    for (int i = 0; i < 30; ++i) write_file_atomically(path, bytes);
  };
  std::thread one(write_often, first);
  std::thread two(write_often, second);
  for (int i = 0; i < 200; ++i) {
    const std::string seen = bytes_of(path);
    ASSERT_TRUE(seen == first || seen == second) << seen.size() << " bytes";
  }
  one.join();
  two.join();
  EXPECT_THAT(folder.names(), ElementsAre("x"));
}

TEST(ReadFile, ReturnsEveryByteIncludingZeros) {
  const TemporaryFolder folder;
  const std::string bytes("a\0b\xff\n", 5);
  folder.plant("x", bytes);
  folder.plant("empty", "");
  EXPECT_EQ(read_file(folder / "x"), bytes);
  EXPECT_EQ(read_file(folder / "empty"), "");
}

TEST(ReadFile, ReadsAFileThatStatesNoSize) {
  EXPECT_THAT(read_file("/proc/self/status"), HasSubstr("VmPeak"));
}

TEST(ReadFile, AcceptsTheLimitAndRefusesOneByteMore) {
  const TemporaryFolder folder;
  folder.plant("x", "12345");
  EXPECT_EQ(read_file(folder / "x", 5), "12345");
  EXPECT_THAT(message_of<IoError>([&] { (void)read_file(folder / "x", 4); }),
              HasSubstr("larger than the 4 bytes"));
  EXPECT_THROW((void)read_file("/proc/self/status", 10), IoError);
}

TEST(ReadFile, RefusesWhatIsNotARegularFileInsteadOfWaitingForIt) {
  const TemporaryFolder folder;
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_THAT(message_of<IoError>([&] { (void)read_file(folder / "pipe"); }),
              HasSubstr("not a regular file"));
  EXPECT_THROW((void)read_file("/dev/zero"), IoError);
  EXPECT_THAT(message_of<IoError>([&] { (void)read_file(folder.path()); }),
              HasSubstr("Is a directory"));
  EXPECT_THAT(message_of<IoError>([&] { (void)read_file(folder / "none"); }),
              HasSubstr("No such file"));
}

}  // namespace
}  // namespace nanlocator
