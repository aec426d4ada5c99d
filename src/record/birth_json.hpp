// Births as JSON, the same in ledgers and bundles: docs/formats.md, "Births".
#pragma once

#include <tuple>

#include "map/rank_list_json.hpp"
#include "nanlocator/record/birth.hpp"
#include "record/history_json.hpp"
#include "record/sighting_json.hpp"

namespace nanlocator::inline record_room {

constexpr auto json_fields(const Expression*) {
  using E = Expression;
  return std::tuple(JsonField("begin", &E::begin), JsonField("end", &E::end),
                    JsonField("call", &E::call), JsonField("arguments", &E::arguments));
}

constexpr auto json_fields(const CodeLine*) {
  using C = CodeLine;
  return std::tuple(JsonField("file", &C::file), JsonField("line", &C::line),
                    JsonField("function", &C::function), JsonOrNull("text", &C::text),
                    JsonAdded(JsonField("expression", &C::expression)));
}

constexpr auto json_fields(const Operand*) {
  using O = Operand;
  return std::tuple(JsonField("name", &O::name), JsonField("element", &O::element),
                    JsonOrNull("dtype", &O::dtype), JsonField("shape", &O::shape),
                    JsonField("stats", &O::stats), JsonField("negatives", &O::negatives),
                    JsonAdded(JsonField("ignored", &O::ignored)), JsonField("number", &O::number),
                    JsonField("at_first_bad", &O::at_first_bad),
                    JsonAdded(JsonField("requires_grad", &O::requires_grad)));
}

constexpr auto json_fields(const BadExtent::Indices*) {
  using I = BadExtent::Indices;
  return std::tuple(JsonField("first", &I::first), JsonField("last", &I::last),
                    JsonField("count", &I::count, 1));
}
/// Also throws FormatError for more indices than from first to last.
void read_fields(const JsonObject& object, BadExtent::Indices& indices);

constexpr auto json_fields(const BadExtent*) {
  return std::tuple(JsonField("dimensions", &BadExtent::dimensions),
                    JsonField("is_block", &BadExtent::is_block));
}

constexpr auto json_fields(const KernelReplay*) {
  using K = KernelReplay;
  return std::tuple(JsonField("conclusion", &K::conclusion), JsonOrNull("problem", &K::problem),
                    JsonOrNull("output", &K::output), JsonField("executions", &K::executions),
                    JsonField("has_same_bits", &K::has_same_bits), JsonField("bad", &K::bad),
                    JsonField("shape", &K::shape), JsonField("extent", &K::extent),
                    JsonOrNull("argument", &K::argument), JsonOrNull("reference", &K::reference),
                    JsonField("compared", &K::compared), JsonField("agreeing", &K::agreeing),
                    JsonField("is_reference_finite", &K::is_reference_finite),
                    JsonField("is_compared_scaled", &K::is_compared_scaled));
}

constexpr auto json_fields(const Magnitude*) {
  return std::tuple(JsonField("parameter", &Magnitude::parameter),
                    JsonField("absmax", &Magnitude::absmax),
                    JsonAdded(JsonField("before", &Magnitude::before)),
                    JsonAdded(JsonField("gradient_before", &Magnitude::gradient_before)));
}

constexpr auto json_fields(const Reached*) {
  return std::tuple(JsonField("kind", &Reached::kind), JsonOrNull("name", &Reached::name));
}

constexpr auto json_fields(const Birth*) {
  using B = Birth;
  return std::tuple(
      JsonField("kind", &B::kind), JsonField("sighting", &B::sighting),
      JsonField("is_module_inferred", &B::is_module_inferred),
      JsonField("is_custom_operator", &B::is_custom_operator), JsonOrNull("node", &B::node),
      JsonAdded(JsonField("is_in_hook", &B::is_in_hook)),
      JsonOrNull("forward_operator", &B::forward_op),
      JsonOrNull("custom_function", &B::custom_function), JsonField("parent", &B::parent),
      JsonOrNull("literal_operator", &B::literal_op),
      JsonAdded(JsonField("allocated_at", &B::allocated_at)), JsonField("code", &B::code),
      JsonField("framework_code", &B::framework_code), JsonField("operands", &B::operands),
      JsonField("extent", &B::extent), JsonField("weights", &B::weights),
      JsonOrNull("reader", &B::reader), JsonOrNull("writer", &B::writer),
      JsonField("last_seen", &B::last_seen), JsonAdded(JsonField("largest_sent", &B::largest_sent)),
      JsonOrNull("inside", &B::inside), JsonField("stack", &B::stack),
      JsonField("reached", &B::reached), JsonOrNull("bundle", &B::bundle),
      JsonField("replay", &B::replay), JsonField("replay_lines", &B::replay_lines),
      JsonAdded(JsonOrNull("group", &B::group)), JsonAdded(JsonField("members", &B::members)),
      JsonAdded(JsonField("kernel_call", &B::kernel_call)),
      JsonAdded(JsonField("kernel_replay", &B::kernel_replay)));
}
/// Also reads births that were written before births had operands.
void read_fields(const JsonObject& object, Birth& birth);

}  // namespace nanlocator::inline record_room
