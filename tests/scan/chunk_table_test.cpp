#include "scan/chunk_table.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "nanlocator/error.hpp"

namespace nanlocator::cuda {
namespace {

// Tables are built from addresses alone, so tensors of any size can be planned without memory.
const void* at(std::uintptr_t address) {
  return reinterpret_cast<const void*>(address);
}

TensorView contiguous(DType dtype, std::int64_t numel, std::uintptr_t address = 0x1000) {
  return {.data = at(address), .numel = numel, .dtype = dtype, .sizes = {}, .strides = {}};
}

TensorView strided(std::vector<std::int64_t> sizes, std::vector<std::int64_t> strides) {
  std::int64_t numel = 1;
  for (const std::int64_t size : sizes) numel *= size;
  return {.data = at(0x1000),
          .numel = numel,
          .dtype = DType::float32,
          .sizes = std::move(sizes),
          .strides = std::move(strides)};
}

TEST(ChunkTable, ChunksOfATensorCoverItOnceInOrderBeyondTwoToThe32Elements) {
  const std::int64_t numel = (std::int64_t{1} << 33) + 5;
  const ChunkTable table =
      make_chunk_table(std::vector{contiguous(DType::bfloat16, numel, 0x7000)});
  ASSERT_EQ(table.tensors.size(), 1u);
  EXPECT_EQ(table.tensors[0].chunk_count, (1u << 17) + 1);
  std::vector<ChunkEntry> in_order = table.chunks;
  std::ranges::sort(in_order, {}, &ChunkEntry::partial);
  std::uint64_t next = 0;
  for (std::uint32_t i = 0; i < in_order.size(); ++i) {
    ASSERT_EQ(in_order[i].partial, i);
    ASSERT_EQ(in_order[i].first_element, next);
    ASSERT_EQ(reinterpret_cast<std::uintptr_t>(in_order[i].data), 0x7000 + 2 * next);
    next += in_order[i].numel;
  }
  EXPECT_EQ(next, static_cast<std::uint64_t>(numel));
}

TEST(ChunkTable, ChunksWithMoreBytesComeFirstAndEachNamesItsTensor) {
  const ChunkTable table = make_chunk_table(std::vector{
      contiguous(DType::float8_e5m2, 100), contiguous(DType::bfloat16, kChunkElements + 1),
      contiguous(DType::float32, 0), contiguous(DType::float32, kChunkElements)});
  ASSERT_EQ(table.chunks.size(), 5u);
  const auto bytes = [&](const ChunkEntry& chunk) {
    return chunk.numel * size_of(table.tensors[chunk.tensor].dtype);
  };
  EXPECT_TRUE(std::ranges::is_sorted(table.chunks, std::greater{}, bytes));
  EXPECT_EQ(table.chunks[0].tensor, 3u);
  EXPECT_EQ(table.chunks[1].tensor, 1u);
  EXPECT_EQ(table.chunks[2].tensor, 0u);
  EXPECT_EQ(table.tensors[1].first_partial, 1u);
  EXPECT_EQ(table.tensors[1].chunk_count, 2u);
}

TEST(ChunkTable, AnEmptyTensorHasOneEmptyChunk) {
  const ChunkTable table = make_chunk_table(std::vector{TensorView{}, strided({0, 5}, {5, 1})});
  ASSERT_EQ(table.chunks.size(), 2u);
  EXPECT_EQ(table.tensors[0].chunk_count, 1u);
  EXPECT_EQ(table.chunks[0].numel, 0u);
  EXPECT_EQ(table.chunks[1].numel, 0u);
  EXPECT_EQ(table.tensors[1].dims, 0);
}

TEST(ChunkTable, ContiguousDimensionsAreJoined) {
  const auto dims_of = [](const TensorView& view) {
    return make_chunk_table(std::vector{view}).tensors[0];
  };
  EXPECT_EQ(dims_of(strided({4, 5, 6}, {30, 6, 1})).dims, 0);
  EXPECT_EQ(dims_of(strided({4, 1, 6}, {6, 777, 1})).dims, 0);
  EXPECT_EQ(dims_of(strided({1}, {9})).dims, 0);
  const TensorEntry rows = dims_of(strided({4, 5, 6}, {60, 12, 1}));  // narrowed rows
  ASSERT_EQ(rows.dims, 2);
  EXPECT_EQ(rows.sizes[0], 20);
  EXPECT_EQ(rows.strides[0], 12);
  EXPECT_EQ(rows.sizes[1], 6);
  const TensorEntry every_third = dims_of(strided({10, 2}, {6, 3}));
  ASSERT_EQ(every_third.dims, 1);
  EXPECT_EQ(every_third.sizes[0], 20);
  EXPECT_EQ(every_third.strides[0], 3);
  EXPECT_EQ(dims_of(strided({3, 4}, {0, 0})).dims, 1);
}

TEST(ChunkTable, ChunksOfAStridedTensorKeepTheTensorsAddress) {
  const ChunkTable table = make_chunk_table(std::vector{strided({1000, 1000}, {1, 1000})});
  ASSERT_EQ(table.chunks.size(), 16u);
  for (const ChunkEntry& chunk : table.chunks) EXPECT_EQ(chunk.data, at(0x1000));
}

TEST(ChunkTable, MoreThanEightDimensionsThatCannotBeJoinedAreUnsupported) {
  const std::vector<std::int64_t> eight(8, 2);
  const std::vector<std::int64_t> nine(9, 2);
  const std::vector<std::int64_t> strides = {1, 10, 3, 40, 5, 60, 7, 80, 9};
  EXPECT_NO_THROW(
      (void)make_chunk_table(std::vector{strided(eight, {strides.begin(), strides.begin() + 8})}));
  EXPECT_THROW((void)make_chunk_table(std::vector{strided(nine, strides)}), UnsupportedError);
}

TEST(ChunkTable, AnInconsistentOrMisalignedViewIsRefused) {
  const auto make = [](const TensorView& view) {
    (void)make_chunk_table(std::vector{TensorView{}, view});
  };
  EXPECT_NO_THROW(make(contiguous(DType::float32, 8, 0x1004)));
  EXPECT_THROW(make(contiguous(DType::float32, 8, 0x1002)), UsageError);
  EXPECT_THROW(make(contiguous(DType::float64, 8, 0x1004)), UsageError);
  EXPECT_THROW(make(contiguous(DType::float32, 8, 0)), UsageError);
  EXPECT_THROW(make(strided({3, 3}, {-3, 1})), UsageError);
  TensorView wrong_count = strided({3, 3}, {1, 3});
  wrong_count.numel = 8;
  EXPECT_THROW(make(wrong_count), UsageError);
}

TEST(ChunkTable, ASlotThatWasNeverFilledHasEmptyStats) {
  EXPECT_EQ(stats_of(RawSlot{}), TensorStats{});
}

}  // namespace
}  // namespace nanlocator::cuda
