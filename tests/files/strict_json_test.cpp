#include "files/strict_json.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "files/utf8.hpp"
#include "nanlocator/error.hpp"
#include "temporary_folder.hpp"

namespace nanlocator {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using ::testing::StartsWith;

std::string parse_error_of(const std::string& text) {
  return message_of<FormatError>([&] { (void)parse_json(text, "x.json"); });
}

TEST(StrictJson, ParsesWhatIsWellFormed) {
  const auto json = parse_json(R"({"a": [1, -2.5, "é", null, true]})", "x.json");
  EXPECT_EQ(json["a"][0], 1);
  EXPECT_EQ(json["a"][2], "\xc3\xa9");
}

TEST(StrictJson, SaysThatATruncatedFileIsCutOffAndAtWhichByte) {
  const std::string whole = R"({"a": [1, 22, {"b": "text"}], "c": true})";
  for (std::size_t length = 0; length < whole.size(); ++length) {
    EXPECT_THAT(parse_error_of(whole.substr(0, length)),
                StartsWith("x.json: cut off: it ends after byte " + std::to_string(length)));
  }
}

TEST(StrictJson, NamesTheByteOfASyntaxError) {
  EXPECT_THAT(parse_error_of(R"({"a": 1,, "b": 2})"), StartsWith("x.json: byte 9: not valid JSON"));
  EXPECT_THAT(parse_error_of("{} {}"), StartsWith("x.json: byte 4: not valid JSON"));
}

TEST(StrictJson, RefusesTextThatIsNotJson) {
  for (const std::string text : {"{'a': 1}", "{\"a\": NaN}", "{\"a\": Infinity}", "[1,]", "// x\n1",
                                 "[01]", "\"a\nb\"", "\"\\ud800\"", "[1e999]"}) {
    EXPECT_THAT(parse_error_of(text), HasSubstr("x.json")) << text;
  }
}

TEST(StrictJson, RefusesTextThatIsNotUtf8) {
  EXPECT_THAT(parse_error_of("[\"ab\xff\"]"), StartsWith("x.json: byte 5: "));
  EXPECT_THAT(parse_error_of("[\"\xc0\xaf\"]"), StartsWith("x.json: byte "));
}

TEST(StrictJson, RefusesANulByteThatCouldHideTheRest) {
  const std::string text("{\"a\": 1}\0{\"a\": 2}", 17);
  EXPECT_THAT(message_of<FormatError>([&] { (void)parse_json(text, "x.json"); }),
              HasSubstr("x.json: byte 9: a NUL byte"));
}

TEST(StrictJson, RefusesARepeatedKeyInOneObjectOnly) {
  EXPECT_THAT(parse_error_of(R"({"a": {"k": 1, "b": 2, "k": 3}})"),
              HasSubstr("\"k\" occurs twice"));
  EXPECT_NO_THROW((void)parse_json(R"({"k": {"k": 1}, "l": [{"k": 1}, {"k": 2}]})", "x.json"));
}

TEST(StrictJson, ReadsThirtyTwoLevelsAndRefusesMore) {
  const auto nested = [](std::size_t levels) {
    return std::string(levels, '[') + std::string(levels, ']');
  };
  EXPECT_NO_THROW((void)parse_json(nested(32), "x.json"));
  EXPECT_THAT(parse_error_of(nested(33)), HasSubstr("nested deeper than 32 levels"));
  EXPECT_THAT(parse_error_of(std::string(5'000'000, '[')), HasSubstr("nested deeper"));
}

TEST(StrictJson, KeepsTheMessageShortWhereTheFaultyTokenIsLong) {
  EXPECT_LT(parse_error_of("[" + std::string(100'000, '1') + "x]").size(), 400U);
}

TEST(JsonObject, NamesTheFileAndThePathOfAWrongMember) {
  const auto json = parse_json(R"({"a": {"b": "text", "n": -1, "big": 3000000000}})", "x.json");
  const JsonObject a = JsonObject(json, "x.json").object("a");
  EXPECT_EQ(message_of<FormatError>([&] { (void)a.integer("b", 0); }),
            "x.json: a.b: found the string \"text\", expected an integer of at least 0");
  EXPECT_EQ(message_of<FormatError>([&] { (void)a.integer("n", 0); }),
            "x.json: a.n: found -1, expected an integer of at least 0");
  EXPECT_EQ(message_of<FormatError>([&] { (void)a.text("c"); }), "x.json: a.c: the key is missing");
  EXPECT_THAT(message_of<FormatError>([&] { (void)a.small_integer("big", 0); }),
              HasSubstr("at most 2147483647"));
  EXPECT_EQ(a.integer("big", 0), 3'000'000'000);
}

TEST(JsonObject, AcceptsNoFloatNoBooleanAndNoHugeNumberAsAnInteger) {
  const auto json = parse_json(
      R"({"f": 1.0, "b": true, "u": 9223372036854775808, "m": 9223372036854775807})", "x.json");
  const JsonObject object(json, "x.json");
  for (const char* key : {"f", "b", "u"}) {
    EXPECT_THROW((void)object.integer(key, 0), FormatError) << key;
  }
  EXPECT_EQ(object.integer("m", 0), 9'223'372'036'854'775'807);
  EXPECT_THROW((void)object.boolean("f"), FormatError);
  EXPECT_THROW((void)object.text("b"), FormatError);
}

TEST(RequireVersion, SaysWhichVersionWasFoundAndWhichIsRead) {
  const auto json = parse_json(R"({"version": 2})", "x.json");
  const std::string message =
      message_of<FormatError>([&] { require_version(JsonObject(json, "x.json"), 1); });
  EXPECT_THAT(message, StartsWith("x.json: version: found 2, this build reads version 1"));
}

TEST(Utf8, AcceptsTheLimitsOfEveryLengthAndRefusesAllBeyond) {
  for (const char* text :
       {"", "a", "\x7f", "\xc2\x80", "\xdf\xbf", "\xe0\xa0\x80", "\xed\x9f\xbf", "\xee\x80\x80",
        "\xef\xbf\xbf", "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf"}) {
    EXPECT_TRUE(is_utf8(text)) << text;
  }
  for (const char* text :
       {"\x80", "\xc0\xaf", "\xc1\xbf", "\xe0\x9f\xbf", "\xed\xa0\x80", "\xed\xbf\xbf",
        "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff", "\xc3", "\xe2\x82",
        "\xf0\x9f\x98", "\xc3(", "a\xe2(\xa1"}) {
    EXPECT_FALSE(is_utf8(text)) << text;
  }
}

}  // namespace
}  // namespace nanlocator
