// This program is linked like the ones that tools/corpus --collect runs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "nanlocator/locate/locate.hpp"
#include "nanlocator/record/ledger.hpp"
#include "temporary_folder.hpp"

namespace nanlocator {
namespace {

/// Ledgers of two ranks; on rank 0 the logarithm of a negative number has reached the loss.
std::vector<Ledger> ledgers_with_birth() {
  Birth birth;
  birth.kind = BirthKind::nan;
  birth.sighting = {.phase = Phase::forward, .module = "body", .op = "aten::log"};
  birth.sighting.stats.numel = 2;
  birth.sighting.stats.nan = 1;
  birth.reached = {{ReachedKind::loss, "loss"}};
  std::vector<Ledger> ledgers(2);
  for (int rank : {0, 1}) {
    ledgers[rank].coordinates = {.rank = rank, .world_size = 2, .dp = {rank, 2}};
  }
  ledgers[0].births = {birth};
  return ledgers;
}

std::string content_of(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

class Collecting : public ::testing::Test {
 protected:
  void SetUp() override { setenv("VERDICT_CORPUS", folder_.path().c_str(), 1); }
  void TearDown() override { unsetenv("VERDICT_CORPUS"); }
  testing::TemporaryFolder folder_;
};

TEST_F(Collecting, KeepsTheLedgersInTheirRanksOrderWithTestAndFacts) {
  std::vector<Ledger> ledgers = ledgers_with_birth();
  std::swap(ledgers[0], ledgers[1]);
  (void)locate(ledgers, 2);
  ASSERT_EQ(folder_.names().size(), 1u);
  const std::string text = content_of(folder_ / *folder_.names().begin());
  const std::size_t header = text.find('\n');
  EXPECT_EQ(ledgers_from_jsonl(text.substr(header), "kept"), ledgers_with_birth());
  const auto json = nlohmann::json::parse(text.substr(0, header));
  EXPECT_THAT(json["test"].get<std::string>(),
              ::testing::EndsWith("tests/corpus/collect_test.cpp::Collecting."
                                  "KeepsTheLedgersInTheirRanksOrderWithTestAndFacts"));
  EXPECT_EQ(json["ranks"], 2);
  EXPECT_EQ(json["facts"]["origins"][0]["operator"], "aten::log");
  EXPECT_EQ(json["facts"]["origins"][0]["rank"], 0);
}

TEST_F(Collecting, KeepsTheSameOnce) {
  const std::vector<Ledger> ledgers = ledgers_with_birth();
  for (int times = 0; times < 2; ++times) (void)locate(ledgers, 2);
  EXPECT_EQ(folder_.names().size(), 1u);
  (void)locate(std::span(ledgers).first(1), 2);
  EXPECT_EQ(folder_.names().size(), 2u);
}

TEST_F(Collecting, GivesTheVerdictWhereNothingCanBeKept) {
  setenv("VERDICT_CORPUS", "/nowhere", 1);
  EXPECT_EQ(locate(ledgers_with_birth(), 2).origins.size(), 1u);
}

}  // namespace
}  // namespace nanlocator
