#include "files/json_fields.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "nanlocator/error.hpp"
#include "temporary_folder.hpp"

namespace nanlocator::fields_test {

struct Wheel {
  int spokes = 0;
  friend bool operator==(const Wheel&, const Wheel&) = default;
};

enum class Brake { none, rim, disc };

struct Bicycle {
  std::string name;
  bool is_new = false;
  std::int64_t serial = 0;
  std::optional<int> gears;
  std::optional<Wheel> spare;
  Wheel front;
  Brake brake = Brake::none;
  std::string owner;
  std::vector<double> gear_ratios;
  std::map<std::string, std::string> notes;
  std::uint32_t frame_number = 0;
  std::optional<int> kilometres;
  friend bool operator==(const Bicycle&, const Bicycle&) = default;
};

[[nodiscard]] constexpr auto names_of(Brake) {
  return std::to_array<std::string_view>({"none", "rim", "disc"});
}

constexpr auto json_fields(const Wheel*) {
  return std::tuple(JsonField("spokes", &Wheel::spokes, 1));
}

constexpr auto json_fields(const Bicycle*) {
  return std::tuple(JsonField("name", &Bicycle::name), JsonField("is_new", &Bicycle::is_new),
                    JsonField("serial", &Bicycle::serial), JsonField("gears", &Bicycle::gears, 1),
                    JsonField("spare", &Bicycle::spare), JsonField("front", &Bicycle::front),
                    JsonField("brake", &Bicycle::brake), JsonOrNull("owner", &Bicycle::owner),
                    JsonField("gear_ratios", &Bicycle::gear_ratios),
                    JsonField("notes", &Bicycle::notes),
                    JsonField("frame_number", &Bicycle::frame_number),
                    JsonAdded(JsonField("kilometres", &Bicycle::kilometres)));
}

namespace {

using testing::message_of;

constexpr const char* kText =
    R"({"name":"red","is_new":true,"serial":9000000000,"gears":null,"spare":{"spokes":36},)"
    R"("front":{"spokes":32},"brake":"disc","owner":null,"gear_ratios":[0.5,"inf"],)"
    R"("notes":{"saddle":"worn"},"frame_number":"00abcdef","kilometres":12})";

Bicycle red_bicycle() {
  return {.name = "red",
          .is_new = true,
          .serial = 9'000'000'000,
          .spare = Wheel{36},
          .front = {32},
          .brake = Brake::disc,
          .gear_ratios = {0.5, std::numeric_limits<double>::infinity()},
          .notes = {{"saddle", "worn"}},
          .frame_number = 0xabcdef,
          .kilometres = 12};
}

Bicycle read(const std::string& text) {
  const auto json = parse_json(text, "x.json");
  Bicycle bicycle;
  bicycle.gears = 5;  // the old value is not kept
  bicycle.kilometres = 5;
  read_fields(JsonObject(json, "x.json"), bicycle);
  return bicycle;
}

std::string error_of(std::string text, const std::string& part, const std::string& other) {
  text.replace(text.find(part), part.size(), other);
  return message_of<FormatError>([&] { (void)read(text); });
}

TEST(JsonFields, WriteAStructInTheOrderOfItsTable) {
  EXPECT_EQ(fields_to_json(red_bicycle()).dump(), kText);
}

TEST(JsonFields, ReadWhatTheyWrote) {
  Bicycle with_owner = red_bicycle();
  with_owner.owner = "Ada";
  for (const Bicycle& bicycle : {red_bicycle(), with_owner}) {
    EXPECT_EQ(read(fields_to_json(bicycle).dump()), bicycle);
  }
}

TEST(JsonFields, OnlyAMemberThatEarlierFilesLackMayBeMissing) {
  std::string text = kText;
  text.replace(text.find(",\"kilometres\":12"), 16, "");
  EXPECT_EQ(read(text).kilometres, 5);
  EXPECT_EQ(error_of(kText, "\"owner\":null,", ""), "x.json: owner: the key is missing");
}

TEST(JsonFields, AnOptionalNumberThatTheReaderWouldRejectIsWrittenAsUnknown) {
  Bicycle bicycle = red_bicycle();
  bicycle.gears = 0;
  EXPECT_TRUE(fields_to_json(bicycle)["gears"].is_null());
}

TEST(JsonFields, NameTheKeyThatIsMissingOrTooSmallOrHasAnotherType) {
  EXPECT_EQ(error_of(kText, "\"is_new\":true,", ""), "x.json: is_new: the key is missing");
  EXPECT_EQ(error_of(kText, "null", "\"five\""),
            "x.json: gears: found the string \"five\", expected an integer of at least 1 and at "
            "most 2147483647");
  EXPECT_EQ(error_of(kText, "32", "0"),
            "x.json: front.spokes: found 0, expected an integer of at least 1 and at most "
            "2147483647");
  EXPECT_EQ(error_of(kText, "\"disc\"", "\"drum\""),
            "x.json: brake: found the string \"drum\", expected one of none, rim, disc");
  EXPECT_EQ(error_of(kText, "0.5", "\"0.5\""),
            "x.json: gear_ratios[0]: found the string \"0.5\", expected a number, \"nan\", "
            "\"inf\" or \"-inf\"");
  EXPECT_EQ(error_of(kText, "\"worn\"", "3"), "x.json: notes.saddle: found 3, expected a string");
  EXPECT_EQ(error_of(kText, "00abcdef", "abcdef"),
            "x.json: frame_number: found the string \"abcdef\", expected 8 hexadecimal digits");
}

}  // namespace
}  // namespace nanlocator::fields_test
