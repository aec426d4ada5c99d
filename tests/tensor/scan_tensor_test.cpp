#include "nanlocator/tensor/scan_tensor.hpp"

#include <ATen/ops/ones.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "gradients/tensors.hpp"
#include "nanlocator/error.hpp"
#include "temporary_folder.hpp"
#include "tensor/tensor_access.hpp"

namespace nanlocator::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(ViewOf, DescribesTheTensorsOwnMemory) {
  const auto tensor = at::ones({3, 4}, at::kBFloat16);
  const auto whole = view_of(tensor);
  EXPECT_EQ(whole.data, tensor.const_data_ptr());
  EXPECT_EQ(whole.numel, 12);
  EXPECT_EQ(whole.dtype, DType::bfloat16);
  EXPECT_TRUE(whole.is_contiguous());
  const auto column = view_of(tensor.select(1, 2));
  EXPECT_EQ(column.data, static_cast<const char*>(tensor.const_data_ptr()) + 2 * 2);
  EXPECT_THAT(column.sizes, ElementsAre(3));
  EXPECT_THAT(column.strides, ElementsAre(4));
}

TEST(ViewOf, SeesAComplexTensorAsItsParts) {
  const auto view = view_of(at::ones({5}, at::kComplexDouble));
  EXPECT_EQ(view.numel, 10);
  EXPECT_EQ(view.dtype, DType::float64);
}

TEST(ViewOf, RefusesAPendingConjugationWhichHasNoMemoryOfItsOwn) {
  EXPECT_THAT(
      message_of<UnsupportedError>([] { (void)view_of(at::ones({5}, at::kComplexFloat).conj()); }),
      HasSubstr("resolve_conj"));
}

TEST(ScanTensors, CountsThePendingConjugate) {
  auto tensor = at::ones({3}, at::kComplexFloat);
  at::view_as_real(tensor)[1][1] = kInfinity;
  EXPECT_EQ(scan_tensors({tensor}).at(0).pos_inf, 1);
  EXPECT_EQ(scan_tensors({tensor.conj()}).at(0).neg_inf, 1);
}

TEST(ScanTensors, RefusesIntegersSparseLayoutsAndOtherMemory) {
  const auto refusal = [](const at::Tensor& tensor) {
    return message_of<UnsupportedError>([&] { (void)scan_tensors({at::ones({1}), tensor}); });
  };
  EXPECT_THAT(refusal(at::zeros({2}, at::kInt)), HasSubstr("tensor 1 (int32"));
  EXPECT_THAT(refusal(at::ones({2, 2}).to_sparse()), HasSubstr("not strided"));
  EXPECT_THAT(refusal(at::ones({2}, at::TensorOptions().device(at::kMeta))),
              HasSubstr("no memory"));
}

TEST(ScanTensors, RefusesMemoryThatWasFreedUnderATensor) {
  auto whole = at::ones({8});
  const at::Tensor rows[] = {whole.slice(0, 4), whole.view({2, 4}).t(), whole.slice(0, 0, 2)};
  whole.storage().unsafeGetStorageImpl()->set_nbytes(2 * sizeof(float));
  EXPECT_FALSE(has_memory(whole));
  EXPECT_FALSE(has_memory(rows[0]));
  EXPECT_FALSE(has_memory(rows[1]));
  EXPECT_TRUE(has_memory(rows[2]));
  EXPECT_THAT(message_of<UnsupportedError>([&] { (void)scan_tensors({rows[0]}); }),
              HasSubstr("no memory"));
}

TEST(ScanTensors, TakesAnEmptyList) {
  EXPECT_THAT(scan_tensors({}), IsEmpty());
}

}  // namespace
}  // namespace nanlocator::testing
