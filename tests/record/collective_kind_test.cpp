#include "nanlocator/record/collective_kind.hpp"

#include <gtest/gtest.h>

#include <utility>

namespace nanlocator {
namespace {

using Kind = CollectiveKind;

TEST(CollectiveKind, IsKnownForEachFamilyOfOperators) {
  const std::pair<const char*, Kind> known[] = {
      {"c10d::allreduce_", Kind::all_reduce},
      {"_c10d_functional_autograd::all_reduce", Kind::all_reduce},
      {"c10d::_reduce_scatter_base_", Kind::reduce_scatter},
      {"_c10d_functional::reduce_scatter_tensor", Kind::reduce_scatter},
      {"c10d::reduce_", Kind::reduce},
      {"c10d::broadcast_", Kind::broadcast},
      {"c10d::scatter_", Kind::scatter},
      {"c10d::_allgather_base_", Kind::all_gather},
      {"_c10d_functional::all_gather_into_tensor", Kind::all_gather},
      {"c10d::gather_", Kind::exchange},
      {"c10d::alltoall_base_", Kind::exchange},
      {"c10d::send", Kind::send},
      {"c10d::recv_any_source_", Kind::receive},
      {"_c10d_functional::wait_tensor", Kind::wait},
  };
  for (const auto& [op, kind] : known) EXPECT_EQ(collective_kind_of(op), kind) << op;
}

TEST(CollectiveKind, OnlyReductionsMayOverflowAndOnlyTheRootsMemoryIsRead) {
  EXPECT_TRUE(is_reduction(Kind::all_reduce) && is_reduction(Kind::reduce_scatter) &&
              is_reduction(Kind::reduce));
  EXPECT_FALSE(is_reduction(Kind::all_gather) || is_reduction(Kind::scatter) ||
               is_reduction(Kind::exchange));
  EXPECT_TRUE(is_from_root(Kind::broadcast) && is_from_root(Kind::scatter));
  EXPECT_FALSE(is_from_root(Kind::reduce) || is_from_root(Kind::send));
  EXPECT_FALSE(gives_all_members_the_same(Kind::reduce_scatter) ||
               gives_all_members_the_same(Kind::reduce));
}

TEST(CollectiveKind, IsEmptyForAnythingElse) {
  for (const auto* op : {"aten::scatter_reduce", "", "mylib::allreduce"}) {
    EXPECT_EQ(collective_kind_of(op), std::nullopt) << op;
  }
}

}  // namespace
}  // namespace nanlocator
