#include "operators/lineage.hpp"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>

namespace nanlocator {
namespace {

using enum MemoryState;

class LineageTest : public ::testing::Test {
 protected:
  LineageTest() { lineage.note_allocation(buffer, ++clock, &empty, nullptr); }

  at::Tensor part(std::int64_t begin, std::int64_t end) const {
    return buffer.slice(0, begin, end);
  }
  void write_finite(const at::Tensor& tensor) {
    lineage.note_finite_write(tensor, ++clock, &add, false);
  }
  void write_bad(const at::Tensor& tensor, BirthId birth) {
    lineage.note_bad_write(tensor, ++clock, &log, {birth}, Content::nan);
  }
  void receive(const at::Tensor& tensor) {
    lineage.note_received(tensor, ++clock, &gather, nullptr, {});
  }

  const std::string empty = "aten::empty", add = "aten::add", log = "aten::log",
                    gather = "c10d::allgather_";
  at::Tensor buffer = at::zeros({12});
  std::uint64_t clock = 0;
  Lineage lineage;
};

TEST_F(LineageTest, EachPartHasItsOwnState) {
  write_finite(part(0, 4));
  receive(part(4, 8));
  EXPECT_EQ(lineage.state_of(part(0, 4)), finite);
  EXPECT_EQ(lineage.state_of(part(5, 7)), received);
  EXPECT_EQ(lineage.state_of(part(8, 12)), allocated);
  EXPECT_EQ(*lineage.known_of(part(1, 2)).writer, add);
  EXPECT_EQ(*lineage.known_of(part(9, 10)).writer, empty);
  EXPECT_EQ(lineage.state_of(at::zeros({2})), unknown);
}

TEST_F(LineageTest, WhatNobodyScannedDecidesForTheWhole) {
  write_finite(part(0, 4));
  receive(part(4, 8));
  write_finite(part(8, 12));
  EXPECT_EQ(lineage.state_of(buffer), received);
  write_finite(part(4, 8));
  EXPECT_EQ(lineage.state_of(buffer), finite);
  lineage.note_bytes(part(2, 3), ++clock, &add, nullptr);
  EXPECT_EQ(lineage.state_of(part(0, 4)), bytes);
}

TEST_F(LineageTest, AWriteTakesTheBirthsOfItsBytesAndNoOthers) {
  write_bad(part(0, 8), 3);
  write_finite(part(2, 4));
  EXPECT_EQ(lineage.births_in(part(0, 2)), BirthIds{3});
  EXPECT_EQ(lineage.births_in(part(2, 4)), BirthIds{});
  EXPECT_EQ(lineage.births_in(part(4, 8)), BirthIds{3});
  EXPECT_EQ(lineage.state_of(part(2, 4)), finite);
  EXPECT_EQ(lineage.state_of(part(0, 4)), written);
}

TEST_F(LineageTest, ANanIsKnownOnlyWhereAllOfItsPieceIsRead) {
  write_bad(part(0, 8), 3);
  EXPECT_TRUE(lineage.is_known_to_have_nan(part(0, 8)));
  EXPECT_FALSE(lineage.is_known_to_have_nan(part(0, 4)));
  write_finite(part(0, 2));  // the NaN may have been there
  EXPECT_FALSE(lineage.is_known_to_have_nan(part(0, 8)));
}

TEST_F(LineageTest, AViewWithGapsLeavesWhatIsBetween) {
  const at::Tensor grid = buffer.view({4, 3});
  write_finite(buffer);
  write_bad(grid.select(1, 0), 1);
  EXPECT_EQ(lineage.births_in(buffer), BirthIds{1});
  write_finite(grid.select(1, 1));  // another column
  EXPECT_EQ(lineage.births_in(buffer), BirthIds{1});
  write_finite(buffer);
  EXPECT_EQ(lineage.births_in(buffer), BirthIds{});
  EXPECT_EQ(lineage.state_of(buffer), finite);
  receive(buffer);
  write_finite(grid.select(1, 0));
  EXPECT_EQ(lineage.state_of(buffer), written);  // which of both it is, nobody knows
}

TEST_F(LineageTest, DenseWritesCutEachViewWithGaps) {
  const at::Tensor grid = buffer.view({4, 3});
  write_bad(grid.select(1, 0), 1);
  write_bad(grid.select(1, 1), 2);
  write_finite(part(3, 9));
  EXPECT_EQ(lineage.births_in(part(0, 3)), (BirthIds{1, 2}));
  EXPECT_EQ(lineage.births_in(part(3, 9)), BirthIds{});
  EXPECT_EQ(lineage.births_in(part(9, 12)), (BirthIds{1, 2}));
}

TEST_F(LineageTest, TheLastFrameWithAccessCountsUntilTheBytesAreWritten) {
  const auto first = std::make_shared<const Place>(), second = std::make_shared<const Place>();
  write_finite(part(0, 6));
  lineage.note_touch(buffer, first);
  lineage.note_touch(part(4, 8), second);
  EXPECT_EQ(lineage.known_of(part(0, 4)).touched_by, first);
  EXPECT_EQ(lineage.known_of(part(3, 5)).touched_by, second);
  write_finite(part(0, 5));
  EXPECT_EQ(lineage.known_of(part(0, 5)).touched_by, nullptr);
  EXPECT_EQ(lineage.known_of(part(5, 6)).touched_by, second);
  EXPECT_EQ(lineage.state_of(part(5, 6)), finite);
}

TEST_F(LineageTest, MemoryThatIsWrittenInPartIsNotUnwritten) {
  EXPECT_TRUE(lineage.known_of(buffer).is_unwritten());
  write_bad(part(0, 4), 2);
  EXPECT_EQ(lineage.state_of(buffer), allocated);
  EXPECT_FALSE(lineage.known_of(buffer).is_unwritten());
  EXPECT_TRUE(lineage.known_of(part(4, 8)).is_unwritten());
}

TEST_F(LineageTest, AnAllocationAndWhatIsReceivedMayHaveOneClock) {
  lineage.note_received(part(0, 4), clock, &gather, nullptr, {});
  EXPECT_EQ(lineage.state_of(buffer), received);
}

TEST_F(LineageTest, AnAccessToOneColumnLeavesTheEarlierOneToAll) {
  const auto all = std::make_shared<const Place>(), column = std::make_shared<const Place>();
  const at::Tensor grid = buffer.view({4, 3});
  write_finite(buffer);
  lineage.note_touch(buffer, all);
  lineage.note_touch(grid.select(1, 0), column);
  EXPECT_EQ(lineage.known_of(buffer).touched_by, column);
  write_finite(grid.select(1, 0));
  EXPECT_EQ(lineage.known_of(buffer).touched_by, all);
}

TEST_F(LineageTest, WhatAViewWithGapsHoldsIsNotFinite) {
  write_finite(buffer);
  lineage.note_bad_content(buffer.view({4, 3}).select(1, 0), {5});
  EXPECT_EQ(lineage.state_of(buffer), written);
  EXPECT_EQ(lineage.known_of(buffer).births, BirthIds{5});
}

TEST_F(LineageTest, EachViewOfForeignMemoryIsForeign) {
  const at::Tensor workspace = at::zeros({8});
  lineage.note_foreign(workspace.slice(0, 0, 4), nullptr);
  lineage.note_foreign(workspace.slice(0, 4, 8), nullptr);
  EXPECT_EQ(lineage.state_of(workspace.slice(0, 4, 8)), foreign);
  EXPECT_FALSE(lineage.has_been_used(workspace));
  EXPECT_TRUE(lineage.has_been_used(buffer));
}

TEST_F(LineageTest, WhatWasFoundBadOnReadingKeepsItsState) {
  receive(part(0, 4));
  lineage.note_bad_content(part(2, 6), {7});
  EXPECT_EQ(lineage.births_in(part(0, 2)), BirthIds{});
  EXPECT_EQ(lineage.births_in(part(2, 3)), BirthIds{7});
  EXPECT_EQ(lineage.state_of(part(2, 4)), received);
  EXPECT_EQ(lineage.state_of(part(4, 6)), allocated);
}

TEST_F(LineageTest, BytesWithoutAnyNoteAreUnknown) {
  const at::Tensor data = at::zeros({8});
  lineage.note_finite_write(data.slice(0, 0, 2), ++clock, &add, false);
  EXPECT_EQ(lineage.state_of(data.slice(0, 0, 2)), finite);
  EXPECT_EQ(lineage.state_of(data.slice(0, 4, 6)), unknown);
  EXPECT_EQ(lineage.state_of(data), unknown);
  lineage.note_touch(data, std::make_shared<const Place>());
  EXPECT_NE(lineage.known_of(data.slice(0, 4, 6)).touched_by, nullptr);
}

TEST_F(LineageTest, AnArrivalReplacesOnlyWhatOperatorsWrote) {
  write_finite(part(0, 4));
  const auto* const storage = buffer.storage().unsafeGetStorageImpl();
  lineage.note_arrival(storage, range_of(part(0, 4)), ++clock, &gather);
  lineage.note_arrival(storage, range_of(part(4, 8)), ++clock, &gather);
  EXPECT_EQ(lineage.state_of(part(0, 4)), received);
  EXPECT_EQ(lineage.state_of(part(4, 8)), allocated);
}

TEST_F(LineageTest, MemoryThatHasGrownIsUnwrittenInItsNewPart) {
  write_finite(buffer);
  const auto bytes_before = static_cast<std::int64_t>(buffer.storage().nbytes());
  (void)buffer.resize_({20});
  lineage.note_growth(buffer, bytes_before, ++clock, &empty, nullptr);
  EXPECT_EQ(lineage.state_of(part(0, 12)), finite);
  EXPECT_EQ(lineage.state_of(part(12, 20)), allocated);
}

}  // namespace
}  // namespace nanlocator
