#include "nanlocator/record/bundle.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <string>

#include "files/checksum.hpp"
#include "limited_file_size.hpp"
#include "nanlocator/error.hpp"
#include "record/bundle_json.hpp"
#include "record/planted_bundle.hpp"
#include "temporary_folder.hpp"

namespace nanlocator {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAre;
using namespace testing;  // the planted bundle, temporary folders

std::string bytes_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void replace_bytes(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

mode_t mode_of(const std::filesystem::path& path) {
  struct stat status {};
  EXPECT_EQ(::stat(path.c_str(), &status), 0);
  return status.st_mode & 07777;
}

std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    names.push_back(entry.path().filename());
  }
  return names;
}

class BundleFolder : public ::testing::Test {
 protected:
  std::filesystem::path write() {
    BundleStore store(folder_.path(), {});
    return folder_.path() / store.write(planted_.bundle, planted_.contents);
  }
  PlantedBundle planted_;
  TemporaryFolder folder_;
};

TEST_F(BundleFolder, IsReadBackAsItWasWritten) {
  const OpenBundle open(write());
  EXPECT_EQ(open.bundle(), planted_.bundle);
  EXPECT_THAT(open.verify(), IsEmpty());
  for (const auto& storage : planted_.contents.storages) {
    const auto& entry = open.tensors().at(storage.name);
    EXPECT_TRUE(std::ranges::equal(entry.bytes, storage.bytes)) << storage.name;
    EXPECT_EQ(entry.shape, storage.shape);
  }
}

TEST_F(BundleFolder, IsReadBackIfOnlyTheBirthIsKnown) {
  planted_.bundle = {};
  planted_.contents = {};
  const OpenBundle open(write());
  EXPECT_EQ(open.bundle(), Bundle{});
  EXPECT_THAT(open.verify(), IsEmpty());
}

TEST_F(BundleFolder, OfAKernelsCallIsReadBack) {
  planted_.bundle.kernel_call = planted_kernel_call();
  const auto path = write();
  EXPECT_EQ(OpenBundle(path).bundle(), planted_.bundle);
  auto json = nlohmann::json::parse(bytes_of(path / "bundle.json"));
  const auto refusal = [&](const std::string& key, const nlohmann::json& value) {
    auto changed = json;
    changed["kernel_call"][key] = value;
    replace_bytes(path / "bundle.json", changed.dump());
    return message_of<FormatError>([&] { OpenBundle{path}; });
  };
  EXPECT_THAT(refusal("source", "other.py"),
              HasSubstr("kernel_call.source: \"other.py\" is not among the bundle's files"));
  EXPECT_THAT(refusal("source", "../module.pickle"), HasSubstr("kernel_call.source"));
  EXPECT_THAT(refusal("beside", nlohmann::json::array({"far"})), HasSubstr("kernel_call.beside"));
  auto beyond = json["kernel_call"]["arguments"];
  beyond[0]["offset"] = 2;
  EXPECT_THAT(refusal("arguments", beyond),
              HasSubstr("kernel_call.arguments[0]: the view does not fit"));
}

// Relative, or a different file in each process that reads them.
constexpr const char* kForeignFiles[] = {
    "ops.py",           "../ops.py",         "/home/../ops.py", "/home/ops\n.py",
    "/proc/self/cwd/x", "//proc/self/cwd/x", "/./proc/1/cwd/x", "/proc",
    "/dev/fd/3",        "/dev/shm/ops.py",   "/sys/ops.py",     "/dev//shm/ops.py"};

TEST_F(BundleFolder, OfAKernelNamesOnlyAllowedVariablesAndPlainPaths) {
  planted_.bundle.operator_call.reset();
  planted_.bundle.kernel_call = planted_kernel_call();
  planted_.bundle.kernel_call->environment = {{"NVTE_FLASH_ATTN", "1"},
                                              {"CUBLAS_WORKSPACE_CONFIG", ":4096:8"}};
  const auto path = write();
  EXPECT_EQ(OpenBundle(path).bundle(), planted_.bundle);
  const auto json = nlohmann::json::parse(bytes_of(path / "bundle.json"));
  const auto refusal = [&](const char* key, const nlohmann::json& value) {
    auto changed = json;
    changed["kernel_call"][key] = value;
    replace_bytes(path / "bundle.json", changed.dump());
    return message_of<FormatError>([&] { OpenBundle{path}; });
  };
  for (const char* name :
       {"LD_PRELOAD", "PATH", "PYTHONPATH", "triton_interpret", "", "XTRITON_"}) {
    EXPECT_THAT(refusal("environment", {{name, "1"}}),
                HasSubstr("kernel_call.environment: \"" + std::string(name) +
                          "\" is not a variable of a kernel library"));
  }
  for (const char* file : kForeignFiles) {
    EXPECT_THAT(refusal("file", file), HasSubstr("kernel_call.file: "));
  }
}

TEST_F(BundleFolder, OfACustomOperatorNamesWhatRegisteredIt) {
  planted_.bundle.operator_call->registered_by = {
      {.module = "", .file = "/home/me/libops.so", .source = ""},
      {.module = "my.ops", .file = "/home/me/my/ops.py", .source = "module.pickle"},
      {.module = "__main__", .file = "", .source = ""}};
  const auto path = write();
  EXPECT_EQ(OpenBundle(path).bundle(), planted_.bundle);
  const auto json = nlohmann::json::parse(bytes_of(path / "bundle.json"));
  const auto refusal = [&](const char* key, const nlohmann::json& value) {
    auto changed = json;
    changed["operator_call"]["registered_by"][1][key] = value;
    replace_bytes(path / "bundle.json", changed.dump());
    return message_of<FormatError>([&] { OpenBundle{path}; });
  };
  for (const char* name : {"os;x", "a..b", ".a", "a.", "1a", "a b", "a/b", "__import__('os')"}) {
    EXPECT_THAT(refusal("module", name), HasSubstr("registered_by[1].module: \"" +
                                                   std::string(name) + "\" is not a module name"));
  }
  // C1 control characters, which terminals obey, and one that reorders the line.
  for (const char* name : {"a\u009b31m", "a\u0080", "\u009f", "a\u202eb"}) {
    EXPECT_THAT(refusal("module", name), HasSubstr("is not a module name"));
  }
  for (const char* file : kForeignFiles) {
    EXPECT_THAT(refusal("file", file), HasSubstr("registered_by[1].file"));
  }
  for (const char* file : {"/home/proc/ops.py", "/process/ops.py", "/home/dev/ops.py"}) {
    auto changed = json;
    changed["operator_call"]["registered_by"][1]["file"] = file;
    replace_bytes(path / "bundle.json", changed.dump());
    EXPECT_EQ(OpenBundle(path).bundle().operator_call->registered_by[1].file, file);
  }
  EXPECT_THAT(refusal("source", "../module.pickle"), HasSubstr("is not among the bundle's files"));
  auto nobody = json;
  nobody["operator_call"]["registered_by"][2]["module"] = nullptr;
  replace_bytes(path / "bundle.json", nobody.dump());
  EXPECT_THAT(message_of<FormatError>([&] { OpenBundle{path}; }),
              HasSubstr("registered_by[2]: neither a module nor a file"));
}

TEST_F(BundleFolder, WrittenBeforeKernelsExistedIsStillRead) {
  const auto path = write();
  auto json = nlohmann::json::parse(bytes_of(path / "bundle.json"));
  ASSERT_EQ(json.erase("kernel_call"), 1U);
  ASSERT_EQ(json["operator_call"].erase("registered_by"), 1U);
  ASSERT_EQ(json["birth"].erase("kernel_call") + json["birth"].erase("kernel_replay"), 2U);
  replace_bytes(path / "bundle.json", json.dump());
  EXPECT_EQ(OpenBundle(path).bundle(), planted_.bundle);
}

TEST_F(BundleFolder, IsOpenedByItsJsonFileToo) {
  const auto path = write();
  EXPECT_EQ(OpenBundle(path / "bundle.json").path(), path);
}

TEST_F(BundleFolder, IsPrivate) {
  const auto path = write();
  EXPECT_EQ(mode_of(path), 0700U);
  for (const char* name : {"bundle.json", "tensors.safetensors", "module.pickle"}) {
    EXPECT_EQ(mode_of(path / name), 0600U) << name;
  }
  EXPECT_THAT(names_in(path),
              UnorderedElementsAre("bundle.json", "tensors.safetensors", "module.pickle"));
}

TEST_F(BundleFolder, ChecksumsAreThoseOfZlib) {
  const auto json = nlohmann::json::parse(bytes_of(write() / "bundle.json"));
  const auto crc = crc32_of(std::as_bytes(std::span(planted_.generator).first(5)));
  char text[9];
  std::snprintf(text, sizeof text, "%08x", crc);
  EXPECT_EQ(json["storages"]["generator.cpu"]["crc32"], text);
}

TEST_F(BundleFolder, NamesStepPhaseRankAndModule) {
  EXPECT_EQ(write().filename(), "step12-backward-rank3-decoder.layers.3.q_layernorm");
  planted_.bundle.birth.sighting.module.clear();
  EXPECT_EQ(write().filename(), "step12-backward-rank3-aten__div.Tensor");
  planted_.bundle.birth.sighting.op.clear();
  EXPECT_EQ(write().filename(), "step12-backward-rank3");
}

TEST_F(BundleFolder, NamesAreSafeOnEveryFileSystemAndNotTooLong) {
  planted_.bundle.birth.sighting.module = "../../etc/passwd \n\xff$(rm)";
  EXPECT_EQ(write().filename(), "step12-backward-rank3-.._.._etc_passwd_____rm_");
  planted_.bundle.birth.sighting.module = std::string(500, 'm') + ".end";
  EXPECT_EQ(write().filename(), "step12-backward-rank3-" + std::string(76, 'm') + ".end");
}

TEST_F(BundleFolder, ASecondOneOfTheSameNameGetsANumber) {
  const std::string name = "step12-backward-rank3-decoder.layers.3.q_layernorm";
  EXPECT_EQ(write().filename(), name);
  EXPECT_EQ(write().filename(), name + "-2");
  std::filesystem::create_directory(folder_ / ("bundles/" + name + "-3"));  // made by someone else
  EXPECT_EQ(write().filename(), name + "-4");
  EXPECT_THAT(OpenBundle(folder_ / ("bundles/" + name)).verify(), IsEmpty());
}

TEST_F(BundleFolder, AFullDiskLeavesNoPartialFolder) {
  const std::vector<float> large(20'000, 1.0F);
  planted_.contents.storages.push_back({"large", "F32", {20'000}, std::as_bytes(std::span(large))});
  BundleStore store(folder_.path(), {});
  EXPECT_THAT(message_of<IoError>([&] {
                const LimitedFileSize limit(40'000);
                (void)store.write(planted_.bundle, planted_.contents);
              }),
              AllOf(HasSubstr("tensors.safetensors"), HasSubstr("File too large")));
  EXPECT_THAT(names_in(folder_ / "bundles"), IsEmpty());
  EXPECT_EQ(store.bytes_written(), 0U);
  // Room again: the next one is written as usual.
  EXPECT_EQ(store.write(planted_.bundle, planted_.contents),
            "bundles/step12-backward-rank3-decoder.layers.3.q_layernorm");
}

TEST_F(BundleFolder, AFullDiskAtALaterFileLeavesNoPartialFolder) {
  planted_.contents.files = {{"module.pickle", std::string(100'000, 'p')}};
  BundleStore store(folder_.path(), {});
  EXPECT_THAT(message_of<IoError>([&] {
                const LimitedFileSize limit(50'000);
                (void)store.write(planted_.bundle, planted_.contents);
              }),
              HasSubstr("module.pickle"));
  EXPECT_THAT(names_in(folder_ / "bundles"), IsEmpty());
}

TEST_F(BundleFolder, ARunFolderThatCannotBeMadeIsAnIoError) {
  folder_.plant("file", "");
  BundleStore store(folder_ / "file/run", {});
  EXPECT_THAT(message_of<IoError>([&] { (void)store.write(planted_.bundle, planted_.contents); }),
              HasSubstr("file/run/bundles"));
}

TEST_F(BundleFolder, RemainsOfAKilledProcessDoNoHarm) {
  const auto stale = folder_ / ("bundles/.partial-step12-backward-rank3-decoder.layers.3."
                                "q_layernorm-" +
                                std::to_string(::getpid()));
  std::filesystem::create_directories(stale);
  replace_bytes(stale / "bundle.json", "{");
  EXPECT_THAT(OpenBundle(write()).verify(), IsEmpty());
  EXPECT_THAT(names_in(folder_ / "bundles"), SizeIs(1));
}

// ---- the budget ----

constexpr std::uint64_t kPlantedBytes = 32 + 5 + 16 + 9;

TEST_F(BundleFolder, TheFirstBundlesWinTheBudgetAndTheOthersAreNamed) {
  BundleStore store(folder_.path(), {.bytes = 100'000, .count = 2});
  EXPECT_NE(store.write(planted_.bundle, planted_.contents), "");
  EXPECT_NE(store.write(planted_.bundle, planted_.contents), "");
  EXPECT_THAT(store.dropped(), IsEmpty());
  EXPECT_EQ(store.write(planted_.bundle, planted_.contents), "");
  EXPECT_THAT(store.dropped(),
              ElementsAre(AllOf(HasSubstr("step12-backward-rank3"),
                                HasSubstr(std::to_string(kPlantedBytes) + " bytes"),
                                HasSubstr("3 bundles would keep it"))));
  EXPECT_THAT(names_in(folder_ / "bundles"), SizeIs(2));
}

TEST_F(BundleFolder, TheBudgetCountsEveryByteOfTheFiles) {
  BundleStore store(folder_.path(), {.bytes = kPlantedBytes, .count = 9});
  const auto path = folder_.path() / store.write(planted_.bundle, planted_.contents);
  EXPECT_EQ(store.bytes_written(),
            kPlantedBytes + std::filesystem::file_size(path / "bundle.json"));
  EXPECT_EQ(store.write(planted_.bundle, planted_.contents), "");
}

TEST_F(BundleFolder, ABundleLargerThanTheBudgetIsDroppedAndASmallerOneIsStillWritten) {
  BundleStore store(folder_.path(), {.bytes = kPlantedBytes - 1, .count = 9});
  EXPECT_EQ(store.write(planted_.bundle, planted_.contents), "");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "bundles"));
  EXPECT_NE(store.write({}, {}), "");
}

// ---- contents that do not belong to the bundle ----

TEST_F(BundleFolder, RefusesToWriteABundleThatCouldNotBeOpened) {
  BundleStore store(folder_.path(), {});
  const auto refusal = [&](const std::function<void(PlantedBundle&)>& spoil) {
    PlantedBundle spoilt;
    spoil(spoilt);
    return message_of<UsageError>([&] { (void)store.write(spoilt.bundle, spoilt.contents); });
  };
  EXPECT_THAT(refusal([](auto& it) { it.contents.storages.pop_back(); }),
              HasSubstr("operator_call.outputs[0].storage: there is no tensor \"output.0\""));
  EXPECT_THAT(
      refusal([](auto& it) { it.bundle.module_call->weights[0].second.offset = 1; }),
      HasSubstr("module_call.weights[0].tensor: the view does not fit: it reaches byte 20 of a "
                "storage of 16 bytes"));
  EXPECT_THAT(refusal([](auto& it) { it.contents.files.clear(); }),
              HasSubstr("module_call.pickle \"module.pickle\""));
  for (const char* name : {"../x", "a/b", ".hidden", "", "..", "bundle.json", "module.pickle"}) {
    EXPECT_THAT(refusal([&](auto& it) { it.contents.files.emplace_back(name, ""); }),
                HasSubstr("\"" + std::string(name) + "\""));
  }
  EXPECT_THAT(refusal([](auto& it) { it.bundle.module_call->outputs.names.clear(); }),
              HasSubstr("module_call.outputs: 0 names for 1 items"));
  EXPECT_THAT(refusal([](auto& it) {
                BundleValue deep;
                for (int level = 0; level < 20; ++level) {
                  deep = items_value(BundleValueKind::tuple, {deep});
                }
                it.bundle.operator_call->arguments = {deep};
              }),
              HasSubstr("nested deeper than 12 levels"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "bundles") &&
               !names_in(folder_ / "bundles").empty());
}

TEST_F(BundleFolder, ValuesAsDeepAsAllowedCanBeRead) {
  BundleValue deep = tensor_value(planted_tensor("output.0", {4}, {1}));
  for (int level = 0; level < 12; ++level) deep = items_value(BundleValueKind::tuple, {deep});
  planted_.bundle.module_call->keywords = {{"deep", deep}};
  EXPECT_EQ(OpenBundle(write()).bundle(), planted_.bundle);
}

// ---- damage that verify detects ----

class BundleVerify : public BundleFolder {
 protected:
  /// Flips one bit of a file.
  static void damage(const std::filesystem::path& file, std::size_t at) {
    std::string bytes = bytes_of(file);
    bytes.at(at) ^= 1;
    replace_bytes(file, bytes);
  }
};

TEST_F(BundleVerify, NamesTheStorageWhoseBytesChanged) {
  const auto path = write();
  const auto file = path / "tensors.safetensors";
  damage(file, bytes_of(file).size() - 1);  // the odd number of bytes comes last
  EXPECT_THAT(OpenBundle(path).verify(),
              ElementsAre(AllOf(HasSubstr("tensors.safetensors: generator.cpu"),
                                HasSubstr("have changed"))));
}

TEST_F(BundleVerify, NamesAChangedBundleJson) {
  const auto path = write();
  std::string json = bytes_of(path / "bundle.json");
  json.replace(json.find("cpu bfloat16"), 12, "cpu bfloat17");
  replace_bytes(path / "bundle.json", json);
  EXPECT_THAT(OpenBundle(path).verify(), ElementsAre(HasSubstr("bundle.json: its bytes")));
}

TEST_F(BundleVerify, NamesAFileThatChangedOrIsGone) {
  const auto path = write();
  damage(path / "module.pickle", 4);
  EXPECT_THAT(OpenBundle(path).verify(), ElementsAre(HasSubstr("module.pickle: its bytes")));
  std::filesystem::remove(path / "module.pickle");
  EXPECT_THAT(OpenBundle(path).verify(),
              ElementsAre(AllOf(HasSubstr("module.pickle"), HasSubstr("No such file"))));
}

TEST_F(BundleVerify, EveryFlippedBitIsNoticed) {
  const auto path = write();
  for (const char* name : {"bundle.json", "tensors.safetensors", "module.pickle"}) {
    const std::string whole = bytes_of(path / name);
    const std::size_t step = whole.size() > 2000 ? 7 : 1;  // enough, and quick
    for (std::size_t at = 0; at < whole.size(); at += step) {
      std::string damaged = whole;
      damaged[at] ^= static_cast<char>(1 << (at % 8));
      replace_bytes(path / name, damaged);
      bool is_noticed = false;
      try {
        is_noticed = !OpenBundle(path).verify().empty();
      } catch (const FormatError&) {
        is_noticed = true;
      }
      EXPECT_TRUE(is_noticed) << name << ", byte " << at;
    }
    replace_bytes(path / name, whole);
  }
}

// ---- hostile bundles ----

class HostileBundle : public BundleFolder {
 protected:
  HostileBundle() : path_(write()), json_(nlohmann::json::parse(bytes_of(path_ / "bundle.json"))) {}

  /// The error for a bundle whose bundle.json was changed by `change`.
  std::string refusal(const std::function<void(nlohmann::json&)>& change) {
    auto json = json_;
    change(json);
    replace_bytes(path_ / "bundle.json", json.dump());
    const std::string message = message_of<FormatError>([&] { OpenBundle{path_}; });
    EXPECT_THAT(message, HasSubstr("bundle.json: ")) << "names no file";
    return message;
  }
  std::filesystem::path path_;
  nlohmann::json json_;
};

TEST_F(HostileBundle, PathTricksInNamesAreRefused) {
  for (const std::string name : {"../../etc/passwd", "/etc/passwd", "..", ".", ".hidden", "a/b",
                                 "a\\b", "", "line\nbreak"}) {
    EXPECT_THAT(refusal([&](auto& json) {
                  json["files"][name] = {{"crc32", "00000000"}};
                }),
                HasSubstr("files: \""));
  }
  const std::string with_nul("module.pickle\0x", 15);
  EXPECT_THAT(refusal([&](auto& json) {
                json["files"][with_nul] = {{"crc32", "00000000"}};
              }),
              AllOf(HasSubstr("module.pickle\\u0000x"), HasSubstr("not a plain file name")));
  EXPECT_THAT(refusal([](auto& json) { json["module_call"]["pickle"] = "../module.pickle"; }),
              HasSubstr("module_call.pickle"));
  EXPECT_THAT(refusal([](auto& json) { json["module_call"]["pickle"] = "tensors.safetensors"; }),
              HasSubstr("not among the bundle's files"));
}

TEST_F(HostileBundle, ViewsBeyondTheirStorageAreRefused) {
  const auto refusal_of_view = [&](const std::vector<std::int64_t>& sizes,
                                   const std::vector<std::int64_t>& strides, std::int64_t offset) {
    const std::string message = refusal([&](auto& json) {
      auto& view = json["operator_call"]["arguments"][0];
      view["sizes"] = sizes;
      view["strides"] = strides;
      view["offset"] = offset;
    });
    EXPECT_THAT(message, HasSubstr("operator_call.arguments[0]"));
    return message;
  };
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  EXPECT_THAT(refusal_of_view({8}, {1}, 1), HasSubstr("reaches byte 36 of a storage of 32"));
  EXPECT_THAT(refusal_of_view({2}, {8}, 0), HasSubstr("reaches byte 36"));
  EXPECT_THAT(refusal_of_view({0}, {1}, 9), HasSubstr("reaches byte 36"));
  EXPECT_THAT(refusal_of_view({}, {}, 8), HasSubstr("reaches byte 36"));
  EXPECT_THAT(refusal_of_view({2}, {kMost}, 1), HasSubstr("beyond 2^63"));
  EXPECT_THAT(refusal_of_view({3}, {kMost}, 0), HasSubstr("beyond 2^63"));
  EXPECT_THAT(refusal_of_view({1}, {1}, kMost), HasSubstr("beyond 2^63"));
  EXPECT_THAT(refusal_of_view({}, {}, kMost), HasSubstr("beyond 2^63"));
  // 2^62 elements of 4 bytes: an expanded tensor whose size in bytes would wrap to 0.
  EXPECT_THAT(refusal_of_view({std::int64_t{1} << 62}, {0}, 0), HasSubstr("beyond 2^63"));
  EXPECT_THAT(refusal_of_view({kMost, kMost}, {0, 0}, 0), HasSubstr("beyond 2^63"));
  EXPECT_THAT(refusal_of_view({kMost, kMost, 0}, {0, 0, 0}, 0), HasSubstr("beyond 2^63"));
  EXPECT_THAT(refusal_of_view({1, 1}, {1}, 0), HasSubstr("2 sizes, but 1 strides"));
  EXPECT_THAT(refusal_of_view({-1}, {1}, 0), HasSubstr("sizes[0]: found -1"));
  EXPECT_THAT(refusal_of_view({1}, {-1}, 0), HasSubstr("strides[0]: found -1"));
  EXPECT_THAT(refusal_of_view({1}, {1}, -1), HasSubstr("offset: found -1"));
  const std::vector<std::int64_t> many(65, 1);
  EXPECT_THAT(refusal_of_view(many, many, 0), HasSubstr("more than 64 dimensions"));
}

TEST_F(HostileBundle, UnknownWordsAreRefused) {
  const auto argument = [](auto& json, int index) -> auto& {
    return json["operator_call"]["arguments"][index];
  };
  EXPECT_THAT(refusal([&](auto& json) { argument(json, 0)["dtype"] = "float33"; }),
              HasSubstr("arguments[0]: the view does not fit: unknown dtype \"float33\""));
  EXPECT_THAT(refusal([&](auto& json) { argument(json, 0)["flags"] = {"odd"}; }),
              HasSubstr("arguments[0].flags: unknown flag \"odd\""));
  EXPECT_THAT(refusal([&](auto& json) { argument(json, 0)["storage"] = "nowhere"; }),
              AllOf(HasSubstr("arguments[0].storage"), HasSubstr("no tensor \"nowhere\"")));
  EXPECT_THAT(refusal([&](auto& json) { argument(json, 0)["kind"] = "matrix"; }),
              HasSubstr("arguments[0].kind: found the string \"matrix\""));
  EXPECT_THAT(refusal([&](auto& json) { argument(json, 0) = 1.5; }),
              HasSubstr("arguments[0]: found 1.5"));
  EXPECT_THAT(refusal([&](auto& json) { argument(json, 8) = 18446744073709551615ULL; }),
              HasSubstr("arguments[8]"));
  EXPECT_THAT(refusal([&](auto& json) { argument(json, 12)["bits"] = "3ff"; }),
              HasSubstr("arguments[12].bits"));
  EXPECT_THAT(refusal([](auto& json) { json["birth"]["kind"] = "odd"; }),
              HasSubstr("birth.kind: found the string \"odd\""));
  EXPECT_THAT(refusal([](auto& json) { json["birth"]["replay"] = "odd"; }),
              HasSubstr("birth.replay"));
  EXPECT_THAT(refusal([](auto& json) { json["birth"]["parent"] = -1; }), HasSubstr("birth.parent"));
  EXPECT_THAT(refusal([](auto& json) { json["birth"]["sighting"]["phase"] = "odd"; }),
              HasSubstr("birth.sighting.phase"));
  EXPECT_THAT(refusal([](auto& json) { json["version"] = 2; }), HasSubstr("version: found 2"));
  EXPECT_THAT(refusal([](auto& json) { json["settings"]["threads"] = 2; }),
              HasSubstr("settings.threads: found 2"));
  EXPECT_THAT(refusal([](auto& json) {
                json["module_call"]["outputs"]["names"] = {"a", "b"};
              }),
              HasSubstr("module_call.outputs: 2 names for 1 items"));
}

TEST_F(HostileBundle, ListsNestedTooDeeplyAreRefused) {
  const auto nested = [](int levels) {
    nlohmann::json list = nlohmann::json::array();
    for (; levels > 1; --levels) list = nlohmann::json::array({list});
    return list;
  };
  EXPECT_THAT(refusal([&](auto& json) { json["operator_call"]["arguments"][5] = nested(14); }),
              HasSubstr("arguments[5][0][0]"));
  EXPECT_THAT(refusal([&](auto& json) { json["operator_call"]["arguments"][5] = nested(40); }),
              HasSubstr("nested deeper than 32 levels"));
}

TEST_F(HostileBundle, EveryMissingKeyIsNamed) {
  // Keys that earlier versions lack.
  const std::set<std::string> added = {"allocated_at", "group",         "is_in_hook",
                                       "kernel_call",  "kernel_replay", "largest_sent",
                                       "members",      "registered_by"};
  for (const auto& [key, value] : json_.items()) {
    if (added.contains(key)) continue;
    EXPECT_THAT(refusal([&](auto& json) { json.erase(key); }),
                HasSubstr("bundle.json: " + key + ": the key is missing"));
  }
  for (const char* part : {"birth", "operator_call", "module_call"}) {
    for (const auto& [key, value] : json_[part].items()) {
      if (added.contains(key)) continue;
      EXPECT_THAT(refusal([&](auto& json) { json[part].erase(key); }),
                  HasSubstr(std::string(part) + "." + key + ": the key is missing"));
    }
  }
}

TEST_F(HostileBundle, StoragesThatAreNotThoseOfTheTensorFileAreRefused) {
  EXPECT_THAT(refusal([](auto& json) { json["storages"].erase("output.0"); }),
              HasSubstr("storages.output.0: missing"));
  EXPECT_THAT(refusal([](auto& json) { json["storages"]["more"] = json["storages"]["output.0"]; }),
              HasSubstr("storages: 4 storages, but tensors.safetensors has 3"));
  EXPECT_THAT(refusal([](auto& json) { json["storages"]["output.0"]["shape"] = {4}; }),
              HasSubstr("storages.output.0: dtype or shape"));
  EXPECT_THAT(refusal([](auto& json) { json["storages"]["output.0"]["crc32"] = "12345"; }),
              HasSubstr("storages.output.0.crc32"));
}

TEST_F(HostileBundle, ATensorFileThatIsDamagedIsNamed) {
  replace_bytes(path_ / "tensors.safetensors", "1234");
  EXPECT_THAT(message_of<FormatError>([&] { OpenBundle{path_}; }),
              HasSubstr("tensors.safetensors: cut off"));
  std::filesystem::remove(path_ / "tensors.safetensors");
  EXPECT_THAT(message_of<IoError>([&] { OpenBundle{path_}; }), HasSubstr("tensors.safetensors"));
  EXPECT_THAT(message_of<IoError>([&] { OpenBundle{folder_ / "nothing"}; }),
              HasSubstr("nothing/tensors.safetensors: No such file"));
}

TEST_F(HostileBundle, CutOffAtEveryByteIsRefused) {
  const std::string whole = bytes_of(path_ / "bundle.json");
  for (std::size_t length = 0; length < whole.size() - 2; length += 7) {
    replace_bytes(path_ / "bundle.json", whole.substr(0, length));
    EXPECT_THROW(OpenBundle{path_}, FormatError) << length;
  }
}

TEST_F(HostileBundle, RandomDamageNeverDoesMoreThanAFormatError) {
  const std::string whole = bytes_of(path_ / "bundle.json");
  const SafetensorsFile tensors(path_ / "tensors.safetensors");
  std::mt19937 random(1);
  int refused = 0;
  for (int round = 0; round < 1500; ++round) {
    std::string damaged = whole;
    for (int strokes = 1 + static_cast<int>(random() % 4); strokes > 0; --strokes) {
      const std::size_t at = random() % damaged.size();
      const std::size_t length = 1 + random() % 30;
      if (random() % 2 == 0) {
        damaged[at] = static_cast<char>(random());
      } else {
        damaged.replace(at, length, damaged.substr(random() % damaged.size(), length));
      }
    }
    try {
      (void)read_bundle_json(damaged, "bundle.json", tensors);
    } catch (const FormatError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace nanlocator
