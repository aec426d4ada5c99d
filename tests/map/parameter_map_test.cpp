#include "nanlocator/map/parameter_map.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "map/parameter_json.hpp"
#include "nanlocator/error.hpp"
#include "temporary_folder.hpp"

namespace nanlocator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using testing::TemporaryFolder;

RankCoordinates coordinates() {
  RankCoordinates place;
  place.rank = 1;
  place.world_size = 2;
  place.tp = {.rank = 1, .size = 2};
  place.host = "a17";
  place.local_rank = 1;
  place.device = "cpu";
  return place;
}

ParameterInfo parameter(std::int64_t id, std::string name) {
  ParameterInfo info;
  info.id = id;
  info.name = std::move(name);
  info.raw_name = "module." + info.name;
  info.shape = {4, 8};
  info.dtype = "bfloat16";
  return info;
}

ParameterInfo expert() {
  ParameterInfo info = parameter(1, "experts.7.weight");
  info.shape = {};
  info.dtype = "float32";
  info.layer = 3;
  info.chunk = 1;
  info.bucket = 2;
  info.bucket_offset = 640;
  info.shard = ElementRange{.begin = 0, .end = 1};
  info.is_expert = true;
  info.may_be_untouched = true;
  return info;
}

constexpr const char* kManifest = R"({
"version": 1,
"run_id": "monday",
"coordinates": {"rank":1,"world_size":2,"tp":{"rank":1,"size":2},"pp":{"rank":0,"size":1},"dp":{"rank":0,"size":1},"cp":{"rank":0,"size":1},"ep":{"rank":0,"size":1},"host":"a17","local_rank":1,"device":"cpu"},
"parameters": [
{"id":0,"name":"head.weight","raw_name":"module.head.weight","shape":[4,8],"dtype":"bfloat16","layer":null,"chunk":0,"bucket":null,"bucket_offset":null,"shard":null,"is_expert":false,"is_shared":false,"is_tp_duplicate":false,"is_tied":false,"may_be_untouched":false},
{"id":1,"name":"experts.7.weight","raw_name":"module.experts.7.weight","shape":[],"dtype":"float32","layer":3,"chunk":1,"bucket":2,"bucket_offset":640,"shard":{"begin":0,"end":1},"is_expert":true,"is_shared":false,"is_tp_duplicate":false,"is_tied":false,"may_be_untouched":true}
]
}
)";

ParameterMap monday() {
  return {coordinates(), {parameter(0, "head.weight"), expert()}, "monday"};
}

/// The manifest above with one part replaced; the part must occur.
std::string manifest_with(const std::string& old_text, const std::string& new_text) {
  std::string text = kManifest;
  const auto at = text.find(old_text);
  EXPECT_NE(at, std::string::npos) << old_text;
  return text.replace(at, old_text.size(), new_text);
}

std::string manifest_error(const std::string& text) {
  return message_of<FormatError>([&] { (void)ParameterMap::from_manifest_json(text, "m.json"); });
}

// The expected strings were printed by CPython 3.11's json.dumps.
TEST(IdNameJson, IsByteForByteWhatPythonWrites) {
  const std::pair<std::string, std::string> expected[] = {
      {std::string("decoder.layers.0.weight", 23), R"py("decoder.layers.0.weight")py"},
      {std::string("say \"hi\"", 8), R"py("say \"hi\"")py"},
      {std::string("back\\slash", 10), R"py("back\\slash")py"},
      {std::string("tab\011new\012line\015return", 19), R"py("tab\tnew\nline\rreturn")py"},
      {std::string("\000\001\037", 3), R"py("\u0000\u0001\u001f")py"},
      {std::string("\010\014", 2), R"py("\b\f")py"},
      {std::string("\177", 1), R"py("\u007f")py"},
      {std::string("\303\251", 2), R"py("\u00e9")py"},
      {std::string("\337\277\340\240\200", 5), R"py("\u07ff\u0800")py"},
      {std::string("\360\237\230\200", 4), R"py("\ud83d\ude00")py"},
      {std::string("\364\217\277\277", 4), R"py("\udbff\udfff")py"},
      {std::string("\355\237\277\356\200\200\357\277\277", 9), R"py("\ud7ff\ue000\uffff")py"},
      {std::string("</script>", 9), R"py("</script>")py"},
      {std::string("\342\200\250", 3), R"py("\u2028")py"},
      {std::string("~ !", 3), R"py("~ !")py"},
      {std::string("\346\227\245\346\234\254\350\252\236.weight", 16),
       R"py("\u65e5\u672c\u8a9e.weight")py"},
  };
  for (const auto& [name, json] : expected) EXPECT_EQ(to_python_json_string(name), json);
}

TEST(IdNameJson, SeparatesAsPythonDoesAndEndsWithoutANewline) {
  const ParameterMap map(coordinates(), {parameter(0, "a"), parameter(1, "\303\251\""),
                                         parameter(2, "\360\237\230\200")});
  EXPECT_EQ(map.to_id_name_json(), R"({"0": "a", "1": "\u00e9\"", "2": "\ud83d\ude00"})");
  EXPECT_EQ(ParameterMap().to_id_name_json(), "{}");
}

TEST(ParameterManifest, HasTheDocumentedFormWithOneParameterPerLine) {
  EXPECT_EQ(monday().to_manifest_json(), kManifest);
}

TEST(ParameterManifest, IsReadIntoTheParametersThatItStates) {
  const auto map = ParameterMap::from_manifest_json(kManifest, "m.json");
  EXPECT_EQ(map.coordinates(), coordinates());
  EXPECT_EQ(map.run_id(), "monday");
  EXPECT_THAT(map.parameters(), ElementsAre(parameter(0, "head.weight"), expert()));
}

TEST(ParameterManifest, RoundTripsNamesThatNeedEscapes) {
  ParameterInfo odd = parameter(0, "\"\\\n\303\251\360\237\230\200");
  odd.dtype.clear();
  odd.shape.clear();
  const ParameterMap map({}, {odd}, "\001");
  const auto read = ParameterMap::from_manifest_json(map.to_manifest_json(), "m.json");
  EXPECT_EQ(read.parameters(), map.parameters());
  EXPECT_EQ(read.run_id(), "\001");
}

TEST(ParameterManifest, WithoutParametersIsReadToo) {
  const auto read = ParameterMap::from_manifest_json(ParameterMap().to_manifest_json(), "m.json");
  EXPECT_EQ(read.size(), 0U);
}

TEST(ParameterManifest, CutAtAnyByteIsAFormatErrorThatNamesTheFile) {
  const std::string whole = kManifest;
  // Without its last newline it is still whole.
  for (std::size_t length = 0; length + 1 < whole.size(); ++length) {
    ASSERT_THAT(manifest_error(whole.substr(0, length)), HasSubstr("m.json: cut off")) << length;
  }
}

TEST(ParameterManifest, EveryChangedByteGivesAMapOrAFormatError) {
  const std::string whole = kManifest;
  std::size_t refused = 0;
  for (std::size_t at = 0; at < whole.size(); ++at) {
    for (const char byte : {'\0', '"', '}', '9', '-', '\xff'}) {
      std::string text = whole;
      text[at] = byte;
      try {
        (void)ParameterMap::from_manifest_json(text, "m.json");
      } catch (const FormatError& error) {
        ASSERT_THAT(error.what(), HasSubstr("m.json")) << at;
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, whole.size());
}

TEST(ParameterManifest, ErrorsNameTheKeyAndWhatWasExpected) {
  const struct {
    const char* old_text;
    const char* new_text;
    const char* message;
  } cases[] = {
      {"\"version\": 1", "\"version\": 2", "version: found 2, this build reads version 1"},
      {"\"version\": 1,\n", "", "version: the key is missing"},
      {"\"monday\"", "7", "run_id: found 7, expected a string"},
      {"\"id\":1", "\"id\":-1", "parameters[1].id: found -1, expected an integer of at least 0"},
      {"\"id\":1", "\"id\":5", "found 5 at position 1"},
      {"\"id\":1", "\"id\":0", "found 0 at position 1"},
      {"\"id\":1", "\"id\":1.0", "parameters[1].id: found 1.0"},
      {"\"id\":1", "\"id\":\"1\"", "parameters[1].id: found the string \"1\""},
      {"\"id\":1", "\"id\":1e400", "not valid JSON"},
      {"[4,8]", "[4,-8]", "parameters[0].shape[1]: found -8"},
      {"[4,8]", "[4,\"8\"]", "parameters[0].shape[1]: found the string \"8\""},
      {"[4,8]", "{}", "parameters[0].shape: found an object, expected an array of integers"},
      {"[4,8]", "[4294967296,4294967296]", "more elements than 2^63 - 1"},
      {"[4,8]", "[18446744073709551615]", "parameters[0].shape[0]"},
      {"\"bfloat16\"", "\"\"", "parameters[0].dtype: found an empty string"},
      {"\"bfloat16\"", "null", "parameters[0].dtype: found null"},
      {"\"experts.7.weight\"", "\"head.weight\"",
       "parameters 0 and 1 have the same name head.weight"},
      {"\"experts.7.weight\"", "\"\"", "parameter 1 has an empty name"},
      {"\"begin\":0,\"end\":1", "\"begin\":0,\"end\":2",
       "the shard 0..2 is not a range within its 1 elements"},
      {"\"begin\":0,\"end\":1", "\"begin\":1,\"end\":0", "the shard 1..0"},
      {"\"is_expert\":true", "\"is_expert\":1",
       "parameters[1].is_expert: found 1, expected true or false"},
      {"\"layer\":3", "\"layer\":99999999999", "parameters[1].layer"},
      {"\"is_tied\":false", "\"is_tied\":false,\"is_tied\":true", "\"is_tied\" occurs twice"},
      {"\"tp\":{\"rank\":1,\"size\":2}", "\"tp\":{\"rank\":2,\"size\":2}",
       "coordinates: tp rank 2"},
      {"\"world_size\":2", "\"world_size\":0", "coordinates.world_size: found 0"},
      {"head",
       "he\xff"
       "d",
       "not valid JSON"},
      {"[4,8]", "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]",
       "nested deeper"},
  };
  for (const auto& [old_text, new_text, message] : cases) {
    const std::string found = manifest_error(manifest_with(old_text, new_text));
    EXPECT_THAT(found, HasSubstr(message)) << new_text;
    EXPECT_THAT(found, HasSubstr("m.json: ")) << new_text;
  }
  EXPECT_THAT(manifest_error("[1, 2]"), HasSubstr("m.json: found an array, expected an object"));
}

TEST(ParameterManifest, KeysThatThisVersionDoesNotKnowAreIgnored) {
  const auto map = ParameterMap::from_manifest_json(
      manifest_with("\"run_id\"", "\"written_by\": {\"x\": [1]}, \"run_id\""), "m.json");
  EXPECT_EQ(map.size(), 2U);
}

TEST(ParameterMap, FindsParametersByIdAndByName) {
  const ParameterMap map = monday();
  EXPECT_EQ(map.at(1).name, "experts.7.weight");
  ASSERT_NE(map.find("head.weight"), nullptr);
  EXPECT_EQ(map.find("head.weight")->id, 0);
  EXPECT_EQ(map.find("head"), nullptr);
  EXPECT_EQ(map.find(""), nullptr);
  EXPECT_EQ(ParameterMap().find("head.weight"), nullptr);
  EXPECT_THROW((void)map.at(2), UsageError);
  EXPECT_THROW((void)map.at(-1), UsageError);
}

/// A weight in shards of columns: [4, 8], of which this rank keeps columns 4 to 7.
ParameterInfo in_columns() {
  ParameterInfo info = parameter(0, "a");
  info.shard = ElementRange{.begin = 4, .end = 8, .row = 8};
  info.shard_group = {0, 2};
  info.placements = {"dp: Shard(dim=1)"};
  return info;
}

TEST(ParameterMap, KeepsThePositionOfAShard) {
  const ParameterMap map({}, {in_columns()});
  EXPECT_EQ(ParameterMap::from_manifest_json(map.to_manifest_json(), "x").at(0), in_columns());
  const ElementRange shard = *in_columns().shard;
  EXPECT_EQ(shard.element_at(0), 4);
  EXPECT_EQ(shard.element_at(5), 13);
  EXPECT_TRUE(shard.contains(13));
  EXPECT_FALSE(shard.contains(16));
}

TEST(ParameterMap, RefusesInconsistentParameters) {
  const auto refused = [](const ParameterInfo& info) {
    EXPECT_THROW((ParameterMap({}, {info})), UsageError);
  };
  ParameterInfo info = parameter(0, "a");
  info.shape = {-1};
  refused(info);
  info = parameter(0, "a");
  info.shard = ElementRange{.begin = 0, .end = 33};
  refused(info);
  info = in_columns();
  info.shard->end = 9;
  refused(info);
  info = in_columns();
  info.shard->row = 7;
  refused(info);
  info = in_columns();
  info.shard.reset();
  refused(info);
  info = parameter(0, "a");
  info.dtype.clear();
  refused(info);
  info = parameter(0, "a");
  info.bucket_offset = -1;
  refused(info);
  refused(parameter(0, "\xff"));
  refused(parameter(0, ""));
  refused(parameter(1, "a"));
  EXPECT_THROW((ParameterMap({}, {parameter(0, "a"), parameter(1, "a")})), UsageError);
  RankCoordinates outside;
  outside.pp = {.rank = 1, .size = 1};
  EXPECT_THROW((ParameterMap(outside, {})), UsageError);
}

TEST(ParameterInfo, CountsElementsAndSaturates) {
  ParameterInfo info;
  EXPECT_EQ(info.numel(), 1);
  info.shape = {3, 5, 7};
  EXPECT_EQ(info.numel(), 105);
  info.shape = {3, 0};
  EXPECT_EQ(info.numel(), 0);
  info.shape = {std::int64_t{1} << 40, std::int64_t{1} << 40};
  EXPECT_EQ(info.numel(), std::numeric_limits<std::int64_t>::max());
}

TEST(ParameterMap, WritesItsTwoFilesUnderTheNamesOfTheRecipe) {
  const TemporaryFolder folder;
  monday().write(folder.path());
  EXPECT_THAT(folder.names(),
              ElementsAre("param_id_name_map_tp1pp0dp0.json", "param_manifest_tp1pp0dp0.json"));
  std::ifstream file(folder / "param_id_name_map_tp1pp0dp0.json");
  std::string line;
  std::getline(file, line);
  EXPECT_EQ(line, R"({"0": "head.weight", "1": "experts.7.weight"})");
  EXPECT_THROW(monday().write(folder / "missing"), IoError);
}

}  // namespace
}  // namespace nanlocator
