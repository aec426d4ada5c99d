#include "files/plain_json.hpp"

#include <gtest/gtest.h>

#include <random>
#include <string>

namespace nanlocator {
namespace {

using nlohmann::json;

const char* const kPlain[] = {
    "{}",
    "[]",
    " { \"a\" : [ 1 , -2 , 3.5e-3 , true , false , null , \"x\" ] }\r\n",
    R"({"record":"sighting","iteration":7,"stats":{"nan":1,"absmax":0.1,"sum":1e300},"shape":[64,2]})",
    "0",
    "-0",
    "-1",
    "1.0",
    "-0.0",
    "1E+5",
    "18446744073709551615",
    "-9223372036854775808",
    "5e-324",
    "1.7976931348623157e308",
    "0.1000000000000000055511151231257827",
    "\"\"",
    "\"\x7f\""};

/// Compares types as well as values: 1 is not 1.0, and 0.0 is not -0.0.
void expect_same(const json& found, const json& expected, const std::string& text) {
  ASSERT_EQ(found.type(), expected.type()) << text;
  ASSERT_EQ(found.dump(), expected.dump()) << text;
}

TEST(PlainJson, GivesTheValuesOfTheStrictParser) {
  for (const char* text : kPlain) {
    const auto found = parse_plain_json(text);
    ASSERT_TRUE(found) << text;
    expect_same(*found, json::parse(text), text);
  }
}

TEST(PlainJson, LeavesTextThatIsNotPlainToTheStrictParser) {
  for (const char* text : {"",
                           " ",
                           "{",
                           "[1",
                           "[1,]",
                           "{\"a\":1,}",
                           "{\"a\" 1}",
                           "{1:2}",
                           "01",
                           "-",
                           "1.",
                           ".5",
                           "1e",
                           "+1",
                           "nul",
                           "tru",
                           "nan",
                           "1 2",
                           "\"a",
                           "\"\\n\"",
                           "\"\xc3\xa9\"",
                           "\"\t\"",
                           "{\"a\":1,\"a\":2}",
                           "18446744073709551616",
                           "-9223372036854775809",
                           "1e400",
                           "[1]]",
                           "'a'"}) {
    EXPECT_FALSE(parse_plain_json(text)) << text;
  }
  EXPECT_FALSE(parse_plain_json(std::string(33, '[') + std::string(33, ']')));
  EXPECT_TRUE(parse_plain_json(std::string(32, '[') + std::string(32, ']')));
}

TEST(PlainJson, NeverDiffersFromTheStrictParserOnDamagedText) {
  std::mt19937 random(1);
  const std::string seeds[] = {kPlain[2], kPlain[3]};
  int read = 0;
  for (int round = 0; round < 200'000; ++round) {
    std::string text = seeds[round % 2];
    for (int edits = 1 + static_cast<int>(random() % 3); edits > 0; --edits) {
      constexpr std::string_view kBytes = "{}[]\",:0123456789.eE+-truefalsn \\\n\x80";
      text[random() % text.size()] = kBytes[random() % kBytes.size()];
    }
    const auto found = parse_plain_json(text);
    if (!found) continue;
    ++read;
    const json expected = json::parse(text, nullptr, false);
    ASSERT_FALSE(expected.is_discarded()) << text;
    expect_same(*found, expected, text);
  }
  EXPECT_GT(read, 1000);  // else nothing was compared
}

}  // namespace
}  // namespace nanlocator
