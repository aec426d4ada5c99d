#include "nanlocator/record/safetensors.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <random>

#include "limited_file_size.hpp"
#include "nanlocator/error.hpp"
#include "run_program.hpp"
#include "temporary_folder.hpp"

namespace nanlocator {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::LimitedFileSize;
using testing::message_of;
using ::testing::Pair;
using testing::run_program;
using testing::TemporaryFolder;

/// A tensor written by hand: its bytes in hexadecimal.
struct PlantedTensor {
  std::string name;
  std::string torch_dtype;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::string hex;
};

std::string bytes_from_hex(const std::string& hex) {
  std::string bytes;
  for (std::size_t at = 0; at < hex.size(); at += 2) {
    bytes += static_cast<char>(std::stoi(hex.substr(at, 2), nullptr, 16));
  }
  return bytes;
}

const std::vector<PlantedTensor>& planted_tensors() {
  static const std::vector<PlantedTensor> tensors = {
      {"float64 with a NaN's payload", "float64", "F64", {2}, "000000000000f03fefbeadde0000f87f"},
      {"float32", "float32", "F32", {2, 1}, "0000803f0000807f"},  // 1, Inf
      {"float16", "float16", "F16", {3}, "003c007c0080"},         // 1, Inf, -0
      {"bfloat16", "bfloat16", "BF16", {1, 3}, "803fc07f80ff"},   // 1, NaN, -Inf
      {"e4m3", "float8_e4m3fn", "F8_E4M3", {3}, "387f80"},
      {"e5m2", "float8_e5m2", "F8_E5M2", {1}, "7c"},
      {"e4m3fnuz", "float8_e4m3fnuz", "F8_E4M3FNUZ", {1}, "80"},
      {"e5m2fnuz", "float8_e5m2fnuz", "F8_E5M2FNUZ", {1}, "80"},
      {"int64", "int64", "I64", {1}, "ffffffffffffff7f"},
      {"int32", "int32", "I32", {1}, "00000080"},
      {"int16", "int16", "I16", {1}, "0180"},
      {"int8", "int8", "I8", {5}, "ff00017f80"},
      {"uint64", "uint64", "U64", {1}, "ffffffffffffffff"},
      {"uint32", "uint32", "U32", {1}, "01020304"},
      {"uint16", "uint16", "U16", {1}, "0102"},
      {"uint8", "uint8", "U8", {7}, "01020304050607"},
      {"bool", "bool", "BOOL", {3}, "010001"},
      {"complex64", "complex64", "C64", {1}, "0000803f000000c0"},
      {"scalar", "float32", "F32", {}, "db0f4940"},
      {"empty", "float32", "F32", {0, 4}, ""},
      {"empty, of one byte", "bool", "BOOL", {2, 0}, ""},
      {"layer \"quoted\"\n\xc3\xa9 \xf0\x9f\x98\x80", "uint8", "U8", {1}, "2a"},
  };
  return tensors;
}

struct WritableTensors {
  std::vector<std::string> bytes;  // the memory that the entries view
  std::vector<SafetensorsEntry> entries;
};

WritableTensors writable(const std::vector<PlantedTensor>& tensors) {
  WritableTensors out;
  for (const auto& tensor : tensors) out.bytes.push_back(bytes_from_hex(tensor.hex));
  for (std::size_t index = 0; index < tensors.size(); ++index) {
    const auto& tensor = tensors[index];
    out.entries.push_back(
        {tensor.name, tensor.dtype, tensor.shape, std::as_bytes(std::span(out.bytes[index]))});
  }
  return out;
}

std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void expect_planted_tensors(const SafetensorsFile& file) {
  EXPECT_EQ(file.entries().size(), planted_tensors().size());
  for (const auto& tensor : planted_tensors()) {
    const auto& entry = file.at(tensor.name);
    EXPECT_EQ(entry.dtype, tensor.dtype);
    EXPECT_EQ(entry.shape, tensor.shape);
    EXPECT_EQ(text_of(entry.bytes), bytes_from_hex(tensor.hex)) << tensor.name;
  }
}

/// A file laid out as in the specification, from parts that may be wrong.
std::string file_of(const std::string& header, const std::string& data,
                    std::optional<std::uint64_t> stated_size = {}) {
  const std::uint64_t size = stated_size.value_or(header.size());
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &size, 8);
  return bytes + header + data;
}

SafetensorsFile read_text(const std::string& bytes) {
  return SafetensorsFile(std::as_bytes(std::span(bytes)), "x.safetensors");
}

std::string refusal_of(const std::string& bytes) {
  return message_of<FormatError>([&] { (void)read_text(bytes); });
}

// ---- written files are read back ----

TEST(Safetensors, WritesAndReadsEveryDtype) {
  const TemporaryFolder folder;
  const auto tensors = writable(planted_tensors());
  write_safetensors(folder / "x", tensors.entries, {{"a", "b"}});
  const SafetensorsFile file(folder / "x");
  expect_planted_tensors(file);
  EXPECT_THAT(file.metadata(), ElementsAre(Pair("a", "b")));
}

TEST(Safetensors, EveryTensorInTheFileIsAlignedToItsElements) {
  const TemporaryFolder folder;
  const auto tensors = writable(planted_tensors());
  write_safetensors(folder / "x", tensors.entries);
  const SafetensorsFile file(folder / "x");  // mapped at the start of a page
  for (const auto& entry : file.entries()) {
    const auto address = reinterpret_cast<std::uintptr_t>(entry.bytes.data());
    EXPECT_EQ(address % safetensors_element_size(entry.dtype), 0U) << entry.name;
  }
}

TEST(Safetensors, AFileWithoutTensorsIsAFile) {
  const TemporaryFolder folder;
  write_safetensors(folder / "x", {}, {{"only", "metadata"}});
  EXPECT_THAT(SafetensorsFile(folder / "x").entries(), IsEmpty());
}

TEST(Safetensors, IsPrivateByDefaultAndReplacesNothing) {
  const TemporaryFolder folder;
  const auto tensors = writable(planted_tensors());
  write_safetensors(folder / "x", tensors.entries);
  struct stat status {};
  ASSERT_EQ(::stat((folder / "x").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0600U);
  EXPECT_THAT(message_of<IoError>([&] { write_safetensors(folder / "x", tensors.entries); }),
              AllOf(HasSubstr((folder / "x").string()), HasSubstr("File exists")));
  expect_planted_tensors(SafetensorsFile(folder / "x"));
}

TEST(Safetensors, AFullDiskLeavesNoFile) {
  const TemporaryFolder folder;
  const std::string bytes(100'000, 'x');
  const std::vector<SafetensorsEntry> entries = {
      {"big", "U8", {100'000}, std::as_bytes(std::span(bytes))}};
  EXPECT_THAT(message_of<IoError>([&] {
                const LimitedFileSize limit(50'000);
                write_safetensors(folder / "x", entries);
              }),
              AllOf(HasSubstr("cannot write"), HasSubstr((folder / "x").string())));
  EXPECT_THAT(folder.names(), IsEmpty());
}

TEST(Safetensors, RefusesToWriteAFileThatAReaderWouldRefuse) {
  const TemporaryFolder folder;
  const std::string four = "1234";
  const auto bytes = std::as_bytes(std::span(four));
  const auto refusal = [&](const std::vector<SafetensorsEntry>& entries) {
    return message_of<UsageError>([&] { write_safetensors(folder / "x", entries); });
  };
  EXPECT_THAT(refusal({{"a", "F32", {2}, bytes}}), HasSubstr("dtype and shape make 8"));
  EXPECT_THAT(refusal({{"a", "F32", {-1}, bytes}}), HasSubstr("\"a\""));
  EXPECT_THAT(refusal({{"a", "F32", {std::int64_t{1} << 62, 4}, bytes}}), HasSubstr("2^63"));
  EXPECT_THAT(refusal({{"a", "Q8", {4}, bytes}}), HasSubstr("no dtype \"Q8\""));
  EXPECT_THAT(refusal({{"a", "U8", {4}, bytes}, {"a", "U8", {4}, bytes}}), HasSubstr("twice"));
  EXPECT_THAT(refusal({{"__metadata__", "U8", {4}, bytes}}), HasSubstr("reserved by the format"));
  EXPECT_THAT(refusal({{"\xff", "U8", {4}, bytes}}), HasSubstr("not UTF-8"));
  EXPECT_THAT(folder.names(), IsEmpty());
}

TEST(Safetensors, DtypesHaveTorchsNames) {
  EXPECT_EQ(safetensors_dtype("bfloat16"), "BF16");
  EXPECT_EQ(torch_dtype("F8_E4M3"), "float8_e4m3fn");
  EXPECT_EQ(safetensors_dtype("complex128"), "");  // the format lacks it
  EXPECT_EQ(safetensors_dtype("quint8"), "");
  EXPECT_EQ(torch_dtype(""), "");
  EXPECT_EQ(safetensors_element_size("C64"), 8U);
  EXPECT_EQ(safetensors_element_size("float32"), 0U);
}

// ---- Python's implementation ----

class SafetensorsOfPython : public ::testing::Test {
 protected:
  void SetUp() override {
#ifndef NANLOCATOR_PYTHON
    GTEST_SKIP() << "the build found no Python";
#else
    const auto check = run_program(NANLOCATOR_PYTHON, {"-c",
                                                       "import sys, importlib.util as util\n"
                                                       "sys.exit(not (util.find_spec('safetensors')"
                                                       " and util.find_spec('torch')))"});
    if (check.exit_code != 0) GTEST_SKIP() << NANLOCATOR_PYTHON " lacks safetensors or torch";
#endif
  }
  static void run(std::vector<std::string> arguments, std::string& out) {
#ifdef NANLOCATOR_PYTHON
    arguments.insert(arguments.begin(), NANLOCATOR_TESTS_SOURCE "/record/safetensors_by_python.py");
    const auto result = run_program(NANLOCATOR_PYTHON, std::move(arguments));
    ASSERT_EQ(result.exit_code, 0) << result.err;
    out = result.out;
#endif
  }
  static nlohmann::json description() {
    nlohmann::json tensors;
    for (const auto& tensor : planted_tensors()) {
      tensors[tensor.name] = {tensor.torch_dtype, tensor.shape, tensor.hex};
    }
    return {{"metadata", {{"key", "v\xc3\xa4lue"}}}, {"tensors", tensors}};
  }
  TemporaryFolder folder_;
};

TEST_F(SafetensorsOfPython, ReadsWhatIsWrittenHere) {
  const auto tensors = writable(planted_tensors());
  write_safetensors(folder_ / "x", tensors.entries, {{"key", "v\xc3\xa4lue"}});
  std::string out;
  ASSERT_NO_FATAL_FAILURE(run({"read", folder_ / "x"}, out));
  EXPECT_EQ(nlohmann::json::parse(out), description());
}

TEST_F(SafetensorsOfPython, ReadsAFileWithoutTensors) {
  write_safetensors(folder_ / "x", {}, {{"only", "metadata"}});
  std::string out;
  ASSERT_NO_FATAL_FAILURE(run({"read", folder_ / "x"}, out));
  EXPECT_EQ(nlohmann::json::parse(out)["tensors"], nlohmann::json::object());
}

TEST_F(SafetensorsOfPython, WritesWhatIsReadHere) {
  folder_.plant("description", description().dump());
  std::string out;
  ASSERT_NO_FATAL_FAILURE(run({"write", folder_ / "x", folder_ / "description"}, out));
  const SafetensorsFile file(folder_ / "x");
  expect_planted_tensors(file);
  EXPECT_THAT(file.metadata(), ElementsAre(Pair("key", "v\xc3\xa4lue")));
}

// ---- hostile files ----

const std::string kGood = R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
                          R"("b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})";

std::string header_with(const std::string& dtype, const std::string& shape,
                        const std::string& offsets) {
  return R"({"a":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets +
         "}}";
}

TEST(SafetensorsReader, AcceptsTheSmallestFiles) {
  EXPECT_THAT(read_text(file_of("{}", "")).entries(), IsEmpty());
  EXPECT_EQ(text_of(read_text(file_of(kGood, "abcd")).at("b").bytes), "cd");
  EXPECT_EQ(text_of(read_text(file_of(kGood + "   ", "abcd")).at("a").bytes), "ab");
}

TEST(SafetensorsReader, RefusesAFileThatIsCutOff) {
  EXPECT_THAT(refusal_of(""), AllOf(HasSubstr("x.safetensors"), HasSubstr("cut off: 0 bytes")));
  EXPECT_THAT(refusal_of("1234567"), HasSubstr("cut off: 7 bytes"));
  const std::string whole = file_of(kGood, "abcd");
  for (std::size_t length = 0; length < whole.size(); ++length) {
    EXPECT_THROW((void)read_text(whole.substr(0, length)), FormatError) << length;
  }
  EXPECT_THAT(refusal_of(whole.substr(0, whole.size() - 1)),
              AllOf(HasSubstr("x.safetensors: \"b\".data_offsets"), HasSubstr("3 bytes of data")));
}

TEST(SafetensorsReader, RefusesAHugeHeaderBeforeItReadsIt) {
  EXPECT_THAT(refusal_of(file_of("{}", "", 100'000'001)),
              HasSubstr("x.safetensors: header size: 100000001 bytes"));
  EXPECT_THAT(refusal_of(file_of("{}", "", ~std::uint64_t{0})), HasSubstr("header size"));
  EXPECT_THAT(refusal_of(file_of("{}", "", 100'000'000)), HasSubstr("only 2 follow"));
}

TEST(SafetensorsReader, RefusesHeadersThatAreNotStrictJson) {
  EXPECT_THAT(refusal_of(file_of("", "")), HasSubstr("x.safetensors: header: cut off"));
  EXPECT_THAT(refusal_of(file_of("{}{}", "")), HasSubstr("x.safetensors: header: byte"));
  EXPECT_THAT(refusal_of(file_of("{'a': 1}", "")), HasSubstr("not valid JSON"));
  EXPECT_THAT(refusal_of(file_of("{\"\xff\": 1}", "")), HasSubstr("not valid JSON"));
  EXPECT_THAT(refusal_of(file_of("[]", "")), HasSubstr("expected an object"));
  EXPECT_THAT(refusal_of(file_of(std::string(10'000, '['), "")), HasSubstr("nested deeper"));
  EXPECT_THAT(refusal_of(file_of(R"({"a":7})", "")), HasSubstr("x.safetensors: \"a\": found 7"));
}

TEST(SafetensorsReader, RefusesDuplicateNames) {
  const std::string twice = R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                            R"("a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})";
  EXPECT_THAT(refusal_of(file_of(twice, "xy")), HasSubstr("\"a\" occurs twice"));
}

TEST(SafetensorsReader, RefusesAnUnknownDtype) {
  for (const char* dtype : {R"("F33")", R"("")", R"("F4")", R"("f32")", R"("float32")"}) {
    EXPECT_THAT(refusal_of(file_of(header_with(dtype, "[1]", "[0,1]"), "x")),
                HasSubstr("x.safetensors: \"a\".dtype: unknown dtype"));
  }
  EXPECT_THAT(refusal_of(file_of(header_with("8", "[1]", "[0,1]"), "x")),
              HasSubstr("\"a\".dtype: found 8, expected a string"));
}

TEST(SafetensorsReader, RefusesAbsurdShapes) {
  const auto refusal = [](const std::string& shape) {
    return refusal_of(file_of(header_with(R"("F64")", shape, "[0,8]"), "12345678"));
  };
  EXPECT_THAT(refusal("[9223372036854775807]"), HasSubstr("\"a\".shape: more than 2^63 - 1"));
  EXPECT_THAT(refusal("[4294967296,4294967296]"), HasSubstr("\"a\".shape: more than 2^63 - 1"));
  // In 64 bits this product would wrap to 8 bytes.
  EXPECT_THAT(refusal("[2305843009213693953]"), HasSubstr("\"a\".shape: more than 2^63 - 1"));
  EXPECT_THAT(refusal("[0,4294967296,4294967296]"), HasSubstr("\"a\".shape"));
  EXPECT_THAT(refusal("[-1]"), HasSubstr("\"a\".shape[0]: found -1"));
  EXPECT_THAT(refusal("[1.0]"), HasSubstr("\"a\".shape[0]: found 1.0"));
  EXPECT_THAT(refusal("[99999999999999999999]"), HasSubstr("\"a\".shape[0]"));
  EXPECT_THAT(refusal("8"), HasSubstr("\"a\".shape: found 8"));
  EXPECT_THAT(refusal("[2]"), HasSubstr("are 8 bytes, but dtype and shape make 16"));
}

TEST(SafetensorsReader, RefusesOffsetsThatAreOutOfRangeOverlapOrLeaveGaps) {
  const auto refusal = [](const std::string& offsets) {
    return refusal_of(file_of(header_with(R"("U8")", "[2]", offsets), "abcd"));
  };
  EXPECT_THAT(refusal("[3,5]"), HasSubstr("\"a\".data_offsets: 3 to 5 lies beyond the file's 4"));
  EXPECT_THAT(refusal("[2,0]"), HasSubstr("ends before it begins"));
  EXPECT_THAT(refusal("[9223372036854775805,9223372036854775807]"), HasSubstr("lies beyond"));
  EXPECT_THAT(refusal("[-2,0]"), HasSubstr("\"a\".data_offsets[0]: found -2"));
  EXPECT_THAT(refusal("[0]"), HasSubstr("expected two integers"));
  EXPECT_THAT(refusal("[0,1,2]"), HasSubstr("expected two integers"));
  EXPECT_THAT(refusal("[0,2]"), HasSubstr("2 bytes of data at the end belong to no tensor"));
  EXPECT_THAT(refusal("[1,3]"), HasSubstr("\"a\".data_offsets: begins at byte 1, which leaves"));

  const std::string overlapping = R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)"
                                  R"("b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})";
  EXPECT_THAT(refusal_of(file_of(overlapping, "abcd")),
              HasSubstr("\"b\".data_offsets: begins at byte 2, where the tensor before it"));
  const std::string same = R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                           R"("b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})";
  EXPECT_THAT(refusal_of(file_of(same, "abcd")), HasSubstr("overlaps"));
}

TEST(SafetensorsReader, RefusesMetadataThatIsNotText) {
  EXPECT_THAT(refusal_of(file_of(R"({"__metadata__":{"k":1}})", "")),
              HasSubstr("x.safetensors: __metadata__.\"k\": found 1, expected a string"));
  EXPECT_THAT(refusal_of(file_of(R"({"__metadata__":[]})", "")),
              HasSubstr("x.safetensors: __metadata__: found an array"));
}

TEST(SafetensorsReader, NamesTheMissingKeyOrTensor) {
  EXPECT_THAT(refusal_of(file_of(R"({"a":{"dtype":"U8","shape":[1]}})", "x")),
              HasSubstr("x.safetensors: \"a\".data_offsets: the key is missing"));
  EXPECT_THAT(message_of<FormatError>([] { (void)read_text(file_of("{}", "")).at("a"); }),
              HasSubstr("x.safetensors: it has no tensor \"a\""));
}

TEST(SafetensorsReader, AnErrorAboutAnEndlessNameIsShort) {
  const std::string name(1'000'000, 'n');
  EXPECT_LT(refusal_of(file_of("{\"" + name + "\":7}", "")).size(), 1000U);
}

TEST(SafetensorsReader, RandomDamageNeverDoesMoreThanAFormatError) {
  const TemporaryFolder folder;
  const auto tensors = writable(planted_tensors());
  write_safetensors(folder / "x", tensors.entries, {{"a", "b"}});
  std::ifstream stream(folder / "x", std::ios::binary);
  const std::string whole(std::istreambuf_iterator<char>(stream), {});
  std::mt19937 random(1);
  int refused = 0;
  for (int round = 0; round < 3000; ++round) {
    std::string damaged = whole;
    for (int strokes = 1 + static_cast<int>(random() % 4); strokes > 0; --strokes) {
      const std::size_t at = random() % damaged.size();
      switch (random() % 3) {
        case 0:
          damaged[at] = static_cast<char>(random());
          break;
        case 1:
          damaged.erase(at, 1 + random() % 40);
          break;
        case 2:
          damaged.insert(at, damaged.substr(random() % damaged.size(), random() % 40));
          break;
      }
      if (damaged.empty()) damaged = "x";
    }
    try {
      std::size_t bytes = 0;
      const SafetensorsFile file = read_text(damaged);
      for (const auto& entry : file.entries()) {
        for (const std::byte byte : entry.bytes) bytes += std::to_integer<std::size_t>(byte);
      }
      EXPECT_GE(bytes, 0U);
    } catch (const FormatError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 2000);  // the others changed only a name or an element
}

TEST(SafetensorsReader, ACopiedFileMayBeTruncatedAfterItWasOpened) {
  const TemporaryFolder folder;
  const auto path = folder / "tensors.safetensors";
  const std::vector<float> values(1 << 14, 2.5F);  // more than a page
  write_safetensors(path, std::vector<SafetensorsEntry>{
                              {"values", "F32", {1 << 14}, std::as_bytes(std::span(values))}});
  const SafetensorsFile file(path, FileAccess::copy);
  std::filesystem::resize_file(path, 16);  // a mapping would end the process at the next access
  const auto bytes = file.at("values").bytes;
  EXPECT_EQ(std::memcmp(bytes.data(), values.data(), bytes.size()), 0);
  EXPECT_THAT(message_of<FormatError>([&] { SafetensorsFile(path, FileAccess::copy); }),
              HasSubstr("cut off"));
}

TEST(SafetensorsReader, FilesThatAreNotRegularAreIoErrors) {
  const TemporaryFolder folder;
  EXPECT_THROW((void)SafetensorsFile(folder / "missing"), IoError);
  EXPECT_THROW((void)SafetensorsFile(folder.path()), IoError);
  EXPECT_THROW((void)SafetensorsFile(std::filesystem::path("/dev/zero")), IoError);
  folder.plant("empty", "");
  EXPECT_THROW((void)SafetensorsFile(folder / "empty"), FormatError);
}

}  // namespace
}  // namespace nanlocator
