#include "netcheck/memory_check.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "nanlocator/error.hpp"

namespace nanlocator::netcheck {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr double kLong = 600;  // seconds; a check that is done does not wait for them

/// Flips bit 41 of word 12345 of the first chunk before `test` reads it.
AfterWrite flipped(const std::string& test) {
  return [test](const std::string& now, const std::vector<at::Tensor>& chunks) {
    if (now == test) chunks.front()[12345].bitwise_xor_(std::int64_t{1} << 41);
  };
}

TEST(MemoryCheck, RunsEveryTestOverTheWholeMemoryOnThisMachine) {
  std::vector<std::string> ran;
  std::int64_t words = 0;
  const auto outcome = check_memory(
      at::kCPU, 0, kLong, [&](const std::string& test, const std::vector<at::Tensor>& chunks) {
        ran.push_back(test);
        words = chunks.front().numel();
      });
  EXPECT_THAT(outcome.failures, ElementsAre());
  EXPECT_EQ(ran.size(), 8u);
  EXPECT_EQ(outcome.completed, ran);
  EXPECT_EQ(outcome.bytes, static_cast<std::uint64_t>(words) * 8);
  EXPECT_EQ(words, 64 << 17);
}

TEST(MemoryCheck, NamesTheWordThatWasFlipped) {
  const auto outcome = check_memory(at::kCPU, 0, kLong, flipped("pattern 0x55"));
  EXPECT_THAT(outcome.failures,
              ElementsAre("memory, pattern 0x55: chunk 0, byte 98760: written 0x5555555555555555, "
                          "read 0x5555575555555555, XOR 0x0000020000000000; 1 of the 524288 words "
                          "around it are wrong"));
  EXPECT_EQ(outcome.completed.size(), 7u);
}

TEST(MemoryCheck, FindsTheFlipInEveryTest) {
  for (const auto* test :
       {"own address", "own address, inverted", "pattern 0x00", "pattern 0xff", "pattern 0xaa",
        "moving inversions, ones and zeros", "moving inversions, 8-bit pattern"}) {
    const auto outcome = check_memory(at::kCPU, 0, kLong, flipped(test));
    ASSERT_EQ(outcome.failures.size(), 1u) << test;
    EXPECT_THAT(outcome.failures.front(),
                AllOf(HasSubstr(std::string("memory, ") + test + ": chunk 0, byte 98760: written"),
                      HasSubstr("XOR 0x0000020000000000")));
  }
}

TEST(MemoryCheck, FindsTwoAddressesThatShareACell) {
  const auto outcome = check_memory(
      at::kCPU, 0, kLong, [](const std::string& test, const std::vector<at::Tensor>& chunks) {
        if (test == "own address") chunks.front()[7].copy_(chunks.front()[4096 + 7]);
      });
  ASSERT_EQ(outcome.failures.size(), 1u);
  EXPECT_THAT(outcome.failures.front(),
              HasSubstr("byte 56: written 0x0000000000000007, read 0x0000000000001007, XOR "
                        "0x0000000000001000"));
}

TEST(MemoryCheck, StopsInTimeAndSaysHowFarItGot) {
  const auto outcome = check_memory(at::kCPU, 0, 0.001);
  EXPECT_TRUE(outcome.is_right());
  EXPECT_THAT(outcome.completed, ElementsAre());
  EXPECT_LT(outcome.bytes, 64u << 20);
}

TEST(MemoryCheck, AnErrorOfTheDeviceIsAFailure) {
  const auto outcome =
      check_memory(at::kCPU, 0, kLong, [](const std::string&, const std::vector<at::Tensor>&) {
        throw Error("uncorrectable ECC error encountered\nand more");
      });
  EXPECT_THAT(outcome.failures, ElementsAre("memory, checking 64 MiB of cpu failed: uncorrectable "
                                            "ECC error encountered"));
}

TEST(MemoryCheck, RefusesInvalidArguments) {
  EXPECT_THROW((void)check_memory(at::kCPU, -0.1, kLong), UsageError);
  EXPECT_THROW((void)check_memory(at::kCPU, 0.96, kLong), UsageError);
  EXPECT_THROW((void)check_memory(at::kCPU, 0, 0), UsageError);
  EXPECT_THROW((void)check_memory(at::Device(at::kMeta), 0, kLong), UsageError);
}

}  // namespace
}  // namespace nanlocator::netcheck
