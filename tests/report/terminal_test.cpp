#include "nanlocator/report/terminal.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

#include "files/printable.hpp"

namespace nanlocator {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

Verdict one_origin() {
  Verdict verdict;
  verdict.iteration = 1284;
  verdict.status = VerdictStatus::located;
  Origin origin;
  origin.coordinates = RankCoordinates{.rank = 5,
                                       .world_size = 8,
                                       .tp = {1, 2},
                                       .pp = {0, 2},
                                       .dp = {1, 2},
                                       .host = "a17",
                                       .device = "cuda:3 GPU-6f2e"};
  origin.candidates = {5};
  origin.parameter = "decoder.layers.3.self_attention.linear_qkv.weight";
  origin.tensor = OriginTensor{.role = "main_grad",
                               .shape = {192, 128},
                               .dtype = "bfloat16",
                               .nan = 3,
                               .first_bad = 17 * 128 + 3,
                               .first_bad_index = {17, 3}};
  origin.place_confidence = Confidence::high;
  origin.facts = {{.kind = FactKind::stated, .text = "the neighbours are clean"},
                  {.kind = FactKind::stated_action, .text = "arm the operator level"}};
  origin.action = Action::stated;
  verdict.origins = {origin};
  verdict.spread = {{0, 1, 2, 3, 4, 5, 6, 7}, std::vector<std::string>(41, "p"), Phase::grad_local};
  verdict.clean = {"decoder.layers.3.self_attention.linear_proj.weight"};
  return verdict;
}

TEST(FormatEvidence, TellsStepRankParameterElementAndSpread) {
  const std::string text = format_evidence(one_origin(), {.width = 200});
  EXPECT_THAT(text, StartsWith("step 1284: NaN in the gradients of rank 5 (tp1 pp0 dp1, host a17, "
                               "cuda:3 GPU-6f2e) before the data-parallel reduction\n"));
  EXPECT_THAT(text,
              HasSubstr("  parameter    decoder.layers.3.self_attention.linear_qkv.weight   first "
                        "bad element [17, 3] of [192, 128]; 3 NaN\n"));
  EXPECT_THAT(text, HasSubstr("  cause        not visible at this level\n"));
  EXPECT_THAT(text, HasSubstr("  certainty    place high, cause open"));
  EXPECT_THAT(text, Not(HasSubstr("  code "))) << "a gradient has no line of its own";
  EXPECT_THAT(text, HasSubstr("  action       arm the operator level\n"));
  EXPECT_THAT(text,
              HasSubstr("  spread       consequence: bad values or gradients of 41 parameters on 8 "
                        "ranks; the first scan that saw it: gradients before their reduction; "
                        "neighbours that stayed clean:\n               "
                        "decoder.layers.3.self_attention.linear_proj.weight\n"));
}

TEST(FormatEvidence, TheStateOfTheJobComesFirstAndStepsAreNumbered) {
  Verdict verdict = one_origin();
  verdict.job = {.on_bad = "stop", .are_weights_updated = false, .restart = Restart::latest};
  verdict.origins[0].action = Action::test_memory;
  verdict.origins[0].cause = Cause::memory_corruption;
  verdict.layout.emplace();
  verdict.layout->first_rank = {.rank = 0, .world_size = 8};
  verdict.layout->ranks_per_host = 8;
  const std::string text = format_evidence(verdict, {.width = 60});
  EXPECT_THAT(text, HasSubstr("\n  job          stops; nothing of step 1284"));
  EXPECT_THAT(text, HasSubstr("\n  restart      from the latest checkpoint"));
  EXPECT_LT(text.find("  restart"), text.find("  cause"));
  EXPECT_THAT(text, HasSubstr("\n  action       1. test the memory"));
  EXPECT_THAT(text, HasSubstr("\n               2. look for a kernel"));
  EXPECT_THAT(text, HasSubstr("\n               3. check the machine and its links:\n              "
                              " nanlocator netcheck "
                              "--nproc-per-node 8\n"))
      << "a command stands on a line of its own";
}

TEST(FormatEvidence, SaysInfWhereThereIsNoNan) {
  Verdict verdict = one_origin();
  verdict.origins[0].tensor->nan = 0;
  verdict.origins[0].tensor->neg_inf = 1;
  EXPECT_THAT(format_evidence(verdict), StartsWith("step 1284: -Inf in the gradients"));
  verdict.origins[0].tensor->pos_inf = 1;
  EXPECT_THAT(format_evidence(verdict), StartsWith("step 1284: Inf and -Inf in the gradients"));
}

TEST(FormatEvidence, ListsCandidatesCompactly) {
  Verdict verdict = one_origin();
  verdict.origins[0].coordinates.reset();
  verdict.origins[0].candidates = {0, 1, 2, 3};
  verdict.origins[0].data_parallel_replica = 1;
  EXPECT_THAT(format_evidence(verdict, {.width = 200}),
              HasSubstr("gradients of one of 4 ranks: 0-3 (dp1) before"));
  verdict.origins[0].is_on_every_candidate = true;
  EXPECT_THAT(format_evidence(verdict, {.width = 200}),
              HasSubstr("gradients of ranks 0-3 (dp1) before"));
}

TEST(FormatEvidence, NumbersSeveralOriginsAndStaysShort) {
  Verdict verdict = one_origin();
  verdict.origins.assign(12, verdict.origins.front());
  verdict.silent_ranks = {3};
  verdict.notes.assign(9, "a note");
  const std::string text = format_evidence(verdict, {.width = 120});
  EXPECT_THAT(text, StartsWith("step 1284: 12 origins, on rank 5\n"));
  EXPECT_THAT(text, HasSubstr("\n1. NaN in"));
  EXPECT_THAT(text, Not(HasSubstr("\n5. ")));
  EXPECT_THAT(text, HasSubstr("further origins in verdict.json"));
  EXPECT_THAT(text, HasSubstr("no answer from 1 rank: 3"));
  EXPECT_LE(std::ranges::count(text, '\n'), 25);
}

TEST(FormatEvidence, KeepsToTwentyFiveLines) {
  Verdict verdict = one_origin();
  verdict.origins[0].module = "decoder.layers.1.mlp";
  verdict.origins[0].op = "aten::log";
  verdict.origins[0].bundle = "bundles/step1284-forward-rank5-decoder.layers.1.mlp";
  const Fact sentence = {
      .kind = FactKind::stated,
      .text =
          "a sentence that is about as long as those of a birth are, with a few numbers in it: "
          "1.25, 3.5 and 17, and the name decoder.layers.1.mlp.linear_fc1.weight"};
  verdict.origins[0].facts.assign(12, sentence);
  verdict.origins[0].coordinates.reset();
  verdict.origins[0].candidates.clear();
  for (int rank = 0; rank < 16384; rank += 8) verdict.origins[0].candidates.push_back(rank);
  verdict.silent_ranks = verdict.origins[0].candidates;
  verdict.notes.assign(9, sentence.text);
  for (const int width : {80, 100, 160}) {
    const std::string text = format_evidence(verdict, {.width = width});
    EXPECT_LE(std::ranges::count(text, '\n'), 25) << text;
    EXPECT_THAT(text, HasSubstr("  evidence     a sentence"));
    EXPECT_THAT(text, HasSubstr("one of 2048 ranks: 0, 8, 16,"));
  }
  verdict.origins.assign(12, verdict.origins.front());
  EXPECT_LE(std::ranges::count(format_evidence(verdict, {.width = 120}), '\n'), 25);
}

TEST(FormatEvidence, WrapsOnWordsAtTheWidth) {
  Verdict verdict = one_origin();
  verdict.origins[0].facts.front().text = std::string(
      "a long sentence of short words that has to go over several lines of the page, and one "
      "\xe6\xbc\xa2\xe5\xad\x97\xe6\xbc\xa2\xe5\xad\x97 in between, to the very end of it");
  const std::string text = format_evidence(verdict, {.width = 60});
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const bool is_one_word = line.find(' ', line.find_first_not_of(' ')) == std::string::npos ||
                             line.find("decoder.") != std::string::npos;
    if (!is_one_word) {
      EXPECT_LE(columns_of(line), 60) << line;
    }
  }
  EXPECT_THAT(text, HasSubstr("  evidence     a long"));
  EXPECT_THAT(text, HasSubstr("\n               "));  // further lines are indented to the first
}

TEST(FormatEvidence, ColoursOnlyOnRequest) {
  EXPECT_THAT(format_evidence(one_origin()), Not(HasSubstr("\033[")));
  EXPECT_THAT(format_evidence(one_origin(), {.colour = true}), HasSubstr("\033[1;31mstep 1284"));
}

TEST(FormatEvidence, NamesCannotWriteEscapeSequences) {
  Verdict verdict = one_origin();
  verdict.origins[0].parameter = "x\033[2J\r\nstep 1: clean\x9b\xe2\x80\xae";
  verdict.origins[0].coordinates->host = "evil\033]0;title\007";
  verdict.notes = {"\x1b[31mred", "bidi \xe2\x80\xae end"};
  const std::string text = format_evidence(verdict);
  for (const char byte : text) {
    EXPECT_TRUE(byte == '\n' || static_cast<unsigned char>(byte) >= 0x20) << static_cast<int>(byte);
  }
  EXPECT_THAT(text, Not(HasSubstr("\xe2\x80\xae")));
  EXPECT_THAT(text, HasSubstr("x\\x1b[2J\\x0d\\x0astep"));
  EXPECT_THAT(text, HasSubstr("\\u202e"));
}

TEST(FormatEvidence, ACleanAndAnEmptyPartialVerdictAreOneSentence) {
  Verdict verdict;
  verdict.iteration = 3;
  EXPECT_EQ(format_evidence(verdict), "step 3: no NaN or Inf in what was seen\n");
  verdict.status = VerdictStatus::partial;
  EXPECT_EQ(format_evidence(verdict), "step 3: no origin found; the evidence is incomplete\n");
}

TEST(Printable, EscapesBytesThatAreNotUtf8) {
  EXPECT_EQ(printable("a\xff\xc3"), "a\\xff\\xc3");
  EXPECT_EQ(printable("\xc3\xa9"), "\xc3\xa9");
}

TEST(Columns, CountWideAndCombiningCharacters) {
  EXPECT_EQ(columns_of("abc"), 3);
  EXPECT_EQ(columns_of("\xe6\xbc\xa2"), 2);  // U+6F22
  EXPECT_EQ(columns_of("e\xcc\x81"), 1);     // e with a combining acute accent
}

}  // namespace
}  // namespace nanlocator
