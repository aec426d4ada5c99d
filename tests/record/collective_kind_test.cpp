#include "nanlocator/record/collective_kind.hpp"

#include <gtest/gtest.h>

namespace nanlocator {
namespace {

using Kind = CollectiveKind;

TEST(CollectiveKind, OfEachFamilyOfOperators) {
  for (const auto* op :
       {"c10d::allreduce_", "c10d::_reduce_scatter_base_", "c10d::reduce_",
        "_c10d_functional::reduce_scatter_tensor", "_c10d_functional_autograd::all_reduce"}) {
    EXPECT_EQ(collective_kind_of(op), Kind::reduction) << op;
  }
  EXPECT_EQ(collective_kind_of("c10d::broadcast_"), Kind::from_root);
  EXPECT_EQ(collective_kind_of("c10d::scatter_"), Kind::from_root);
  EXPECT_EQ(collective_kind_of("c10d::_allgather_base_"), Kind::exchange);
  EXPECT_EQ(collective_kind_of("c10d::alltoall_base_"), Kind::exchange);
  EXPECT_EQ(collective_kind_of("c10d::send"), Kind::send);
  EXPECT_EQ(collective_kind_of("c10d::recv_any_source_"), Kind::receive);
  EXPECT_EQ(collective_kind_of("_c10d_functional::wait_tensor"), Kind::wait);
}

TEST(CollectiveKind, OfAnythingElseIsNone) {
  for (const auto* op : {"aten::scatter_reduce", "", "mylib::allreduce"}) {
    EXPECT_EQ(collective_kind_of(op), std::nullopt) << op;
  }
}

}  // namespace
}  // namespace nanlocator
