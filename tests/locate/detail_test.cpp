#include "locate/detail.hpp"

#include <gtest/gtest.h>

#include "record/planted_operand.hpp"

namespace nanlocator {
namespace {

Birth birth_of(const std::string& op, std::vector<std::pair<std::string, double>> values) {
  Birth birth;
  birth.sighting.phase = Phase::forward;
  birth.sighting.op = op;
  for (auto& [name, value] : values) birth.operands.push_back(operand_at_first_bad(name, value));
  return birth;
}

TEST(Detail, IsReadOffTheOperatorAndItsOperands) {
  EXPECT_EQ(detail_of(birth_of("aten::sqrt", {{"self", -0.131}})), Detail::sqrt_of_negative);
  EXPECT_EQ(detail_of(birth_of("aten::rsqrt", {{"self", 0}})), Detail::division_by_zero);
  EXPECT_EQ(detail_of(birth_of("aten::log_", {{"self", 0}})), Detail::log_of_zero);
  EXPECT_EQ(detail_of(birth_of("aten::log2", {{"self", -1}})), Detail::log_of_negative);
  EXPECT_EQ(detail_of(birth_of("aten::log1p", {{"self", -1}})), Detail::log_of_zero);
  EXPECT_EQ(detail_of(birth_of("aten::div.Tensor", {{"self", 1}, {"other", 0}})),
            Detail::division_by_zero);
  EXPECT_EQ(detail_of(birth_of("aten::div.Tensor", {{"self", 0}, {"other", 0}})),
            Detail::zero_over_zero);
  EXPECT_EQ(detail_of(birth_of("aten::reciprocal", {{"self", 0}})), Detail::division_by_zero);
  EXPECT_EQ(detail_of(birth_of("aten::pow.Tensor_Scalar", {{"self", 0}, {"exponent", -1}})),
            Detail::power_of_zero);
  EXPECT_EQ(detail_of(birth_of("aten::pow.Tensor_Scalar", {{"self", -2}, {"exponent", 0.5}})),
            Detail::power_of_negative);
  EXPECT_EQ(detail_of(birth_of("aten::acos", {{"self", 1.5}})), Detail::outside_domain);
  EXPECT_EQ(detail_of(birth_of("aten::atanh", {{"self", -1}})), Detail::outside_domain);
  EXPECT_EQ(detail_of(birth_of("aten::erfinv", {{"self", 1}})), Detail::outside_domain);
  EXPECT_EQ(detail_of(birth_of("aten::logit", {{"self", 0}})), Detail::outside_domain);
  EXPECT_EQ(detail_of(birth_of("aten::special_entr", {{"self", -1}})), Detail::outside_domain);
  EXPECT_EQ(detail_of(birth_of("aten::lgamma", {{"self", -2}})), Detail::outside_domain);
  EXPECT_EQ(detail_of(birth_of("aten::lgamma", {{"self", -1.5}})), Detail::none);
  EXPECT_EQ(detail_of(birth_of("aten::xlogy.Tensor", {{"self", 2}, {"other", 0}})),
            Detail::log_of_zero);
  EXPECT_EQ(detail_of(birth_of("aten::fmod.Tensor", {{"self", 2}, {"other", 0}})),
            Detail::division_by_zero);
}

TEST(Detail, ALargeNumberOutsideOfTheDomainIsNoOverflow) {
  Birth birth = birth_of("aten::lgamma", {{"self", -1e4}});
  birth.replay = ReplayConclusion::deterministic_overflow;  // infinite in float64, too
  EXPECT_EQ(detail_of(birth), Detail::outside_domain);
  birth = birth_of("aten::lgamma", {{"self", 3e38}});
  birth.replay = ReplayConclusion::deterministic_overflow;
  EXPECT_EQ(detail_of(birth), Detail::exceeds_range);
}

TEST(Detail, ADeviationOfNoMoreElementsThanItsCorrectionIsOfTooFew) {
  const auto deviation = [](std::vector<std::int64_t> of, std::vector<std::int64_t> to,
                            std::optional<double> correction) {
    Birth birth = birth_of("aten::std.correction", {});
    birth.sighting.shape = std::move(to);
    Operand self;
    self.name = "self";
    self.shape = std::move(of);
    birth.operands.push_back(std::move(self));
    Operand number;
    number.name = "correction";
    number.number = correction;
    if (correction) birth.operands.push_back(std::move(number));
    return detail_of(birth);
  };
  EXPECT_EQ(deviation({1}, {}, {}), Detail::too_few_elements);
  EXPECT_EQ(deviation({8, 1}, {8, 1}, {}), Detail::too_few_elements);
  EXPECT_EQ(deviation({8, 2}, {8}, 2), Detail::too_few_elements);
  EXPECT_EQ(deviation({8, 2}, {8}, 1), Detail::none);
  EXPECT_EQ(deviation({1}, {}, 0), Detail::none);
}

TEST(Detail, NanOfAnInfThatWasThereIsNoFaultOfACustomOperator) {
  Birth birth = birth_of("aten::mul.Tensor", {{"self", 0}});
  birth.kind = BirthKind::nan_from_inf;
  birth.is_custom_operator = true;
  EXPECT_EQ(detail_of(birth), Detail::from_infinity);
  birth.sighting.op = "aten::_softmax";
  EXPECT_EQ(detail_of(birth), Detail::masked_row);
}

TEST(Detail, IsNoneWhereTheOperandsExplainNothing) {
  EXPECT_EQ(detail_of(birth_of("aten::sqrt", {})), Detail::none);
  EXPECT_EQ(detail_of(birth_of("aten::sqrt", {{"self", 4}})), Detail::none);
  EXPECT_EQ(detail_of(birth_of("aten::atanh", {{"self", 0.5}})), Detail::none);
  EXPECT_EQ(detail_of(birth_of("aten::div.Tensor", {{"self", 1}, {"other", 2}})), Detail::none);
  EXPECT_EQ(detail_of(birth_of("aten::mm", {{"self", 0}})), Detail::none);
  Birth weight = birth_of("aten::log", {{"self", 0}});
  weight.kind = BirthKind::weight;  // the operator only read the weight
  EXPECT_EQ(detail_of(weight), Detail::none);
}

TEST(Detail, InBackwardThePoleIsThatOfTheForwardOperatorsSlope) {
  Birth birth = birth_of("aten::div.Tensor", {{"self", 1}, {"other", 0}});
  birth.sighting.phase = Phase::backward;
  birth.forward_op = "aten::sqrt";
  EXPECT_EQ(detail_of(birth), Detail::derivative_at_pole);
  birth.forward_op = "aten::div.Tensor";
  EXPECT_EQ(detail_of(birth), Detail::division_by_zero);
}

TEST(Detail, InBackwardARootOfANegativeNumberIsOfAnArgumentOutsideOfTheDomain) {
  Birth birth = birth_of("aten::rsqrt", {{"self", -3}});  // of 1 - x^2
  birth.sighting.phase = Phase::backward;
  birth.forward_op = "aten::acos";
  EXPECT_EQ(detail_of(birth), Detail::outside_domain);
  birth.operands.front().at_first_bad = 0;
  EXPECT_EQ(detail_of(birth), Detail::derivative_at_pole);
}

TEST(Detail, OfAnotherLibrarysCodeNothingIsSaidOfItsMathematics) {
  Birth birth = birth_of("mylib::div", {{"self", 1}, {"other", 0}});
  birth.is_custom_operator = true;
  EXPECT_EQ(detail_of(birth), Detail::custom_code);
}

}  // namespace
}  // namespace nanlocator
