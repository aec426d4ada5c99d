#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <nlohmann/json.hpp>

#include "command/run_command.hpp"
#include "record/planted_bundle.hpp"

namespace nanlocator {
namespace {

using namespace testing;  // the planted bundle, run_command
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

using Json = nlohmann::json;

class BundleCommand : public ::testing::Test {
 protected:
  std::string write(const PlantedBundle& planted) {
    BundleStore store(folder_ / "a0", {});
    return (folder_ / "a0" / store.write(planted.bundle, planted.contents)).string();
  }
  std::string write() { return write(planted_); }

  /// The element `value` of the list whose "name" or "what" is `name`.
  static Json named(const Json& list, const std::string& name, const char* key = "name") {
    const auto found =
        std::ranges::find_if(list, [&](const Json& entry) { return entry[key] == name; });
    if (found == list.end()) ADD_FAILURE() << name << " is not in " << list.dump();
    return found == list.end() ? Json() : *found;
  }

  PlantedBundle planted_;
  TemporaryFolder folder_;
};

// ---- ls ----

TEST_F(BundleCommand, ListsTheBundlesOfARunInTheOrderOfTheSteps) {
  const std::string later = write();
  PlantedBundle first;
  first.bundle.birth.sighting.iteration = 3;
  first.bundle.birth.sighting.phase = Phase::forward;
  const std::string earlier = write(first);
  for (const auto& directory :
       {folder_.path(), folder_ / "a0", folder_ / "a0/bundles", std::filesystem::path(earlier)}) {
    const auto result = run_command({"bundle", "ls", directory});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.err, "");
    EXPECT_THAT(result.out, HasSubstr(earlier));
    EXPECT_THAT(result.out, HasSubstr("3  forward"));
  }
  const auto json = json_of(run_command({"bundle", "ls", folder_.path(), "--json"}));
  EXPECT_EQ(json["version"], 1);
  ASSERT_EQ(json["bundles"].size(), 2U);
  EXPECT_EQ(json["bundles"][0]["path"], earlier);
  EXPECT_EQ(json["bundles"][1]["path"], later);
  EXPECT_EQ(json["bundles"][1]["iteration"], 12);
  EXPECT_EQ(json["bundles"][1]["rank"], 3);
  EXPECT_EQ(json["bundles"][1]["operator"], "aten::div.Tensor");
  EXPECT_EQ(json["bundles"][1]["kind"], "nan_from_inf");
}

TEST_F(BundleCommand, ListsReadableBundlesAndNamesTheOthers) {
  const std::string good = write();
  const std::string bad = write();
  std::ofstream(bad + "/bundle.json") << "{";
  std::filesystem::create_directory(folder_ / "a0/bundles/.partial-step1-7");
  const auto result = run_command({"bundle", "ls", folder_.path()});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.out, AllOf(HasSubstr(good), Not(HasSubstr(bad))));
  EXPECT_THAT(result.err, AllOf(HasSubstr("note: " + bad + "/bundle.json: cut off"),
                                HasSubstr(".partial-step1-7: left behind")));
}

TEST_F(BundleCommand, ListsNothingInAnEmptyFolder) {
  const auto result = run_command({"bundle", "ls", folder_.path()});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.out, StartsWith("no readable bundle in "));
  const auto missing = run_command({"bundle", "ls", folder_ / "missing"});
  EXPECT_EQ(missing.exit_code, 2);
  EXPECT_THAT(missing.err, HasSubstr("missing"));
}

// ---- show ----

TEST_F(BundleCommand, ShowsEveryArgumentWithItsBadElements) {
  const std::string path = write();
  const auto json = json_of(run_command({"bundle", "show", path, "--json"}));
  const auto& values = json["operator_values"];
  // Elements 2, 3, 6, 7 of 1 2 Inf 4 5 6 7 8, transposed: [Inf 7; 4 8].
  const auto self = named(values, "argument[0]");
  EXPECT_EQ(self["dtype"], "float32");
  EXPECT_EQ(self["shape"], Json({2, 2}));
  EXPECT_EQ(self["strides"], Json({1, 4}));
  EXPECT_EQ(self["stats"]["pos_inf"], 1);
  EXPECT_EQ(self["stats"]["nan"], 0);
  EXPECT_EQ(self["stats"]["first_bad"], 0);
  EXPECT_EQ(self["stats"]["absmax"], 8.0);
  // Complex numbers 1 + 2i and 5 + 6i: the second begins at float 4.
  EXPECT_EQ(named(values, "argument[2]")["stats"]["absmax"], 6.0);
  EXPECT_EQ(named(values, "argument[3]")["stats"]["absmax"], 2.0);
  EXPECT_EQ(named(values, "argument[3]")["stats"]["numel"], 2'000'000);
  EXPECT_EQ(named(values, "argument[4]")["stats"]["numel"], 0);
  EXPECT_EQ(named(values, "argument[5]")["value"], "none");
  EXPECT_EQ(named(values, "argument[12]")["value"], "1e-05");
  EXPECT_EQ(named(values, "argument[17]")["value"], "[1, []]");
  EXPECT_EQ(named(values, "output[0]")["stats"]["nan"], 1);
  EXPECT_EQ(named(values, "output[0]")["stats"]["first_bad"], 1);
  EXPECT_EQ(named(values, "generator cpu")["stats"], nullptr);
  EXPECT_EQ(named(json["module_values"], "keyword cache.z")["shape"], Json({4}));
  EXPECT_EQ(named(json["module_values"], "input[0][0]")["stats"]["nan"], 1);
  EXPECT_EQ(named(json["module_values"], "weight bias")["stats"]["nan"], 1);
  EXPECT_EQ(named(json["module_values"], "output.last_hidden_state")["stats"]["nan"], 1);
  EXPECT_EQ(json["bundle"]["settings"]["threads"], "2");
  EXPECT_EQ(json["replay"], "nanlocator replay " + path);
}

TEST_F(BundleCommand, ShowsNamesOfTheSchemaInATable) {
  planted_.bundle.operator_call->schema =
      "aten::addcdiv(Tensor(a!) self, Tensor[] tensors=[1, 2], *, Scalar value=1, "
      "str mode=\"a, b\") -> Tensor";
  planted_.bundle.operator_call->arguments = {
      planted_.bundle.operator_call->arguments[0],
      items_value(BundleValueKind::list, {planted_.bundle.operator_call->outputs[0]}),
      real_value(2.5), value_of_kind(BundleValueKind::text, "x")};
  const auto result = run_command({"bundle", "show", write()});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  const std::string& out = result.out;
  EXPECT_THAT(out, HasSubstr("\n  self           float32  [2, 2]  [1, 4]     0    1  [0, 0]"));
  EXPECT_THAT(out, HasSubstr("\n  tensors[0]     float32  [2, 2]  [2, 1]     1    0  [0, 1]"));
  EXPECT_THAT(out, HasSubstr("\n  value          2.5"));
  EXPECT_THAT(out, HasSubstr("\n  mode           \"x\""));
  EXPECT_THAT(out, HasSubstr("nan_from_inf in backward of step 12, microbatch 1: output[0] float32 "
                             "[2, 2], 1 NaN, 0 Inf, first at [0, 1]\n"));
  EXPECT_THAT(out, HasSubstr("aten::div.Tensor in SqrtBackward0, the derivative of aten::sqrt"));
  EXPECT_THAT(out, HasSubstr("module decoder.layers.3.q_layernorm (inferred"));
  EXPECT_THAT(out, HasSubstr("\nsettings\n  autocast: cpu bfloat16\n  threads: 2\n"));
  EXPECT_THAT(out, HasSubstr("\n  model.py:12 in forward\n"));
  EXPECT_THAT(out, HasSubstr("\n  the gradients were not seen\n"));
  EXPECT_THAT(out, HasSubstr("run it again\n  nanlocator replay "));
}

TEST_F(BundleCommand, ATextInABundleCannotSteerTheTerminal) {
  const std::string evil = "\x1b[2Jevil\u202e\nline";
  planted_.bundle.birth.sighting.module = evil;
  planted_.bundle.module_call->name = evil;
  planted_.bundle.module_call->class_name = evil;
  planted_.bundle.operator_call->op = evil;
  planted_.bundle.operator_call->schema = evil;
  planted_.bundle.operator_call->arguments[14].text = evil;
  planted_.bundle.settings = {{evil, evil}};
  planted_.bundle.notes = {evil};
  planted_.bundle.birth.stack = {evil};
  planted_.bundle.module_call->weights[0].first = evil;
  const std::string path = write();
  PlantedBundle other;
  for (const auto& result :
       {run_command({"bundle", "show", path}), run_command({"bundle", "ls", folder_.path()}),
        run_command({"bundle", "diff", path, write(other)})}) {
    EXPECT_THAT(result.out, HasSubstr("\\x1b[2Jevil\\u202e\\x0aline"));
    EXPECT_THAT(result.out, Not(HasSubstr("\x1b")));
    EXPECT_THAT(result.out, Not(HasSubstr("\u202e")));
    EXPECT_THAT(result.out, Not(HasSubstr("\nline")));
  }
}

TEST_F(BundleCommand, AViewThatClaimsTooManyElementsIsNotScanned) {
  planted_.bundle.operator_call->arguments = {
      tensor_value(planted_tensor("output.0", {std::int64_t{1} << 40, 4}, {0, 1}))};
  const std::string path = write();
  const auto json = json_of(run_command({"bundle", "show", path, "--json"}));
  EXPECT_EQ(named(json["operator_values"], "argument[0]")["stats"], nullptr);
  EXPECT_EQ(run_command({"bundle", "show", path}).exit_code, 0);
}

TEST_F(BundleCommand, ShowsAComplexTensorWhateverTheStrideOfAnAxisWithOneElement) {
  planted_.bundle.operator_call->arguments[0].tensor =
      planted_tensor("argument.0.self", {1, 4}, {std::int64_t{1} << 62, 1}, 0, "complex64");
  const auto values =
      json_of(run_command({"bundle", "show", write(), "--json"}))["operator_values"];
  EXPECT_EQ(named(values, "argument[0]")["stats"]["pos_inf"], 1);
}

TEST_F(BundleCommand, AFolderWithoutABundleIsWrongUse) {
  for (const std::string path : {std::string("missing"), folder_.path().string()}) {
    const auto result = run_command({"bundle", "show", path});
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_EQ(result.out, "");
    EXPECT_THAT(result.err, AllOf(StartsWith("nanlocator: "), HasSubstr(path)));
  }
  EXPECT_EQ(run_command({"bundle"}).exit_code, 2);
  EXPECT_EQ(run_command({"bundle", "show"}).exit_code, 2);
  EXPECT_EQ(run_command({"bundle", "diff", "one"}).exit_code, 2);
  EXPECT_THAT(run_command({"bundle", "diff", "--help"}).out, HasSubstr("Example"));
}

// ---- verify ----

TEST_F(BundleCommand, VerifyDistinguishesGoodFromDamagedBundles) {
  const std::string good = write();
  EXPECT_EQ(run_command({"bundle", "verify", good}).out, good + ": intact\n");
  const std::string bad = write();
  std::ofstream(bad + "/module.pickle", std::ios::app) << "x";
  const std::string broken = write();
  std::filesystem::resize_file(broken + "/tensors.safetensors", 20);
  const auto result = run_command({"bundle", "verify", good, bad, broken});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.out, AllOf(HasSubstr(good + ": intact\n"),
                                HasSubstr(bad + "/module.pickle: its bytes have changed"),
                                HasSubstr(broken + "/tensors.safetensors: header: cut off")));
  const auto json = json_of(run_command({"bundle", "verify", good, bad, "--json"}));
  EXPECT_EQ(json["bundles"][0]["ok"], true);
  EXPECT_EQ(json["bundles"][1]["ok"], false);
  EXPECT_EQ(json["bundles"][1]["problems"].size(), 1U);
  EXPECT_EQ(run_command({"bundle", "verify", "missing"}).exit_code, 2);
}

// ---- diff ----

TEST_F(BundleCommand, DiffOfOneCallRecordedTwiceIsClean) {
  const auto result = run_command({"bundle", "diff", write(), write()});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out, "no difference: the same call, bit for bit\n");
}

TEST_F(BundleCommand, DiffCountsDifferingElementsAndShowsTheFirst) {
  PlantedBundle other;
  other.self[3] = -4;   // element [1, 0] of the transposed argument 0
  other.self[7] = 8.5;  // its element [1, 1], and argument 1
  const auto result = run_command({"bundle", "diff", write(), write(other), "--json"});
  EXPECT_EQ(result.exit_code, 1);
  const auto differences = json_of(result)["differences"];
  const auto self = named(differences, "argument[0]", "what");
  EXPECT_EQ(self["differing_elements"], 2);
  EXPECT_EQ(self["first_index"], Json({1, 0}));
  EXPECT_EQ(self["left"], "4");
  EXPECT_EQ(self["right"], "-4");
  EXPECT_EQ(named(differences, "argument[1]", "what")["differing_elements"], 1);
  EXPECT_EQ(differences.size(), 2U);
}

TEST_F(BundleCommand, DiffSeesThroughStridesButNamesThem) {
  PlantedBundle dense;  // the same [Inf 7; 4 8], row by row
  dense.self[2] = std::numeric_limits<float>::infinity();
  dense.self[3] = 7;
  dense.self[4] = 4;
  dense.self[5] = 8;
  dense.bundle.operator_call->arguments = {
      tensor_value(planted_tensor("argument.0.self", {2, 2}, {2, 1}, 2))};
  planted_.bundle.operator_call->arguments.resize(1);
  const auto result = run_command({"bundle", "diff", write(), write(dense), "--json"});
  const auto differences = json_of(result)["differences"];
  ASSERT_EQ(differences.size(), 1U) << differences.dump();
  EXPECT_EQ(differences[0]["what"], "argument[0], strides");
  EXPECT_EQ(differences[0]["left"], "[1, 4]");
}

TEST_F(BundleCommand, DiffDistinguishesNanPayloads) {
  PlantedBundle other;
  other.output[1] = std::bit_cast<float>(0x7fc00001U);
  const auto result = run_command({"bundle", "diff", write(), write(other)});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.out, AllOf(HasSubstr("nan 0x7fc00000"), HasSubstr("nan 0x7fc00001")));
}

TEST_F(BundleCommand, DiffNamesSettingsVersionsAndArgumentsThatDiffer) {
  PlantedBundle other;
  other.bundle.settings = {{"threads", "4"}, {"tf32", "on"}};
  other.bundle.versions["torch"] = "2.12.0";
  other.bundle.operator_call->arguments[8] = integer_value(5);
  other.bundle.operator_call->arguments[0].tensor.sizes = {2, 1};
  other.bundle.operator_call->arguments.pop_back();
  other.bundle.module_call->is_training = true;
  const auto result = run_command({"bundle", "diff", write(), write(other), "--json"});
  const auto differences = json_of(result)["differences"];
  const auto expect = [&](const char* what, const Json& left, const Json& right) {
    const auto found = named(differences, what, "what");
    EXPECT_EQ(found["left"], left) << what;
    EXPECT_EQ(found["right"], right) << what;
  };
  expect("setting autocast", "cpu bfloat16", nullptr);
  expect("setting threads", "2", "4");
  expect("setting tf32", nullptr, "on");
  expect("version torch", "2.11.0", "2.12.0");
  expect("argument[8]", "-9223372036854775808", "5");
  expect("argument[0]", "float32 [2, 2]", "float32 [2, 1]");
  expect("argument[18]", "not kept: a sparse tensor", nullptr);
  expect("module mode", "evaluating", "training");
  EXPECT_EQ(differences.size(), 8U) << differences.dump(1);
}

}  // namespace
}  // namespace nanlocator
