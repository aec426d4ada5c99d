#include "files/json_fields.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "nanlocator/error.hpp"
#include "temporary_folder.hpp"

namespace nanlocator::fields_test {

struct Wheel {
  int spokes = 0;
};

struct Bicycle {
  std::string name;
  bool is_new = false;
  std::int64_t serial = 0;
  std::optional<int> gears;
  std::optional<Wheel> spare;
  Wheel front;
};

constexpr auto json_fields(const Wheel*) {
  return std::tuple(JsonField("spokes", &Wheel::spokes, 1));
}

constexpr auto json_fields(const Bicycle*) {
  return std::tuple(JsonField("name", &Bicycle::name), JsonField("is_new", &Bicycle::is_new),
                    JsonField("serial", &Bicycle::serial), JsonField("gears", &Bicycle::gears, 1),
                    JsonField("spare", &Bicycle::spare), JsonField("front", &Bicycle::front));
}

namespace {

using testing::message_of;

constexpr const char* kText =
    R"({"name":"red","is_new":true,"serial":9000000000,"gears":null,"spare":{"spokes":36},)"
    R"("front":{"spokes":32}})";

Bicycle read(const std::string& text) {
  const auto json = parse_json(text, "x.json");
  Bicycle bicycle;
  bicycle.gears = 5;  // what was there before is not kept
  read_fields(JsonObject(json, "x.json"), bicycle);
  return bicycle;
}

std::string error_of(std::string text, const std::string& part, const std::string& other) {
  text.replace(text.find(part), part.size(), other);
  return message_of<FormatError>([&] { (void)read(text); });
}

TEST(JsonFields, WriteAStructInTheOrderOfItsTable) {
  const Bicycle bicycle{"red", true, 9'000'000'000, std::nullopt, Wheel{36}, {32}};
  EXPECT_EQ(fields_to_json(bicycle).dump(), kText);
}

TEST(JsonFields, ReadWhatTheyWrote) {
  const Bicycle bicycle = read(kText);
  EXPECT_EQ(bicycle.name, "red");
  EXPECT_TRUE(bicycle.is_new);
  EXPECT_EQ(bicycle.serial, 9'000'000'000);
  EXPECT_EQ(bicycle.gears, std::nullopt);
  EXPECT_EQ(bicycle.spare->spokes, 36);
  EXPECT_EQ(bicycle.front.spokes, 32);
}

TEST(JsonFields, NameTheKeyThatIsMissingOrOfAnotherTypeOrTooSmall) {
  EXPECT_EQ(error_of(kText, "\"is_new\":true,", ""), "x.json: is_new: the key is missing");
  EXPECT_EQ(error_of(kText, "null", "\"five\""),
            "x.json: gears: found the string \"five\", expected an integer of at least 1 and at "
            "most 2147483647");
  EXPECT_EQ(error_of(kText, "32", "0"),
            "x.json: front.spokes: found 0, expected an integer of at least 1 and at most "
            "2147483647");
}

}  // namespace
}  // namespace nanlocator::fields_test
