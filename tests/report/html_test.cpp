#include "nanlocator/report/html.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "files/printable.hpp"
#include "files/utf8.hpp"
#include "report/page_text.hpp"
#include "report/parameter_picture.hpp"
#include "report/rank_picture.hpp"
#include "report/sample_reports.hpp"
#include "report/timeline_picture.hpp"

namespace nanlocator {
namespace {

using nanlocator::testing::SampleIncident;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

constexpr std::size_t kTwoMegabytes = 2'000'000;

std::string data_text(const std::string& page) {
  const std::string begin = "<script type=\"application/json\" id=\"data\">";
  const std::size_t start = page.find(begin) + begin.size();
  return page.substr(start, page.find("</script>", start) - start);
}

nlohmann::json data_of(const std::string& page) {
  return nlohmann::json::parse(data_text(page));
}

std::size_t count_of(const std::string& text, const std::string& what) {
  std::size_t count = 0;
  for (std::size_t at = text.find(what); at != text.npos; at = text.find(what, at + 1)) ++count;
  return count;
}

std::map<int, RankState> states_of(const RunReport& report) {
  std::map<int, RankState> states;
  for (const PageRank& rank : picture_ranks(report).ranks) states[rank.rank] = rank.state;
  return states;
}

TEST(FormatHtml, TellsTheVerdictWithoutTheScript) {
  const std::string page = format_html(testing::located_report());
  const std::string html = page.substr(0, page.find("<script"));
  EXPECT_THAT(
      html,
      HasSubstr(
          "<h2 class=\"found\">NaN and Inf born in backward of aten::sqrt on rank 5 (tp1 pp1 dp0, "
          "host a17, "));
  EXPECT_THAT(html, HasSubstr("<h1 id=\"headline\">LEAVE IT DOWN, PAGE THE MODEL AUTHOR</h1>"));
  EXPECT_THAT(html, HasSubstr("<li><span>restart</span> <b>NO</b></li>"));
  EXPECT_THAT(html, HasSubstr("<li>the step was re-run and came out bit-identical"));
  EXPECT_THAT(html, HasSubstr("<p>the call executed from its bundle in float64 comes out finite"));
  EXPECT_THAT(html, HasSubstr("<li>the slope of torch.sqrt is infinite at 0"));
  const auto bundle =
      std::filesystem::absolute("nanlocator_run/a0/bundles/step1284-backward-rank5-q_layernorm");
  EXPECT_THAT(html, HasSubstr("nanlocator replay " + html_escaped(shell_word(bundle.string())) +
                              "</code>"));
  EXPECT_THAT(html, HasSubstr("place high"));
  EXPECT_THAT(html, HasSubstr("born<small>"));
  EXPECT_THAT(html, HasSubstr("<dt>torch</dt><dd>2.11.0</dd>"));
}

TEST(FormatHtml, LetsNoNameIntoTheMarkup) {
  const std::string page = format_html(testing::hostile_report());
  EXPECT_EQ(count_of(page, "<script"), 2U);  // the data and the page's own
  EXPECT_EQ(count_of(page, "</script"), 2U);
  EXPECT_EQ(count_of(page, "<img"), 0U);
  EXPECT_EQ(data_text(page).find_first_of("<>&"), std::string::npos);
  EXPECT_TRUE(is_utf8(page));
  EXPECT_THAT(page, Not(HasSubstr("\xe2\x80\xa8")));    // a line separator
  EXPECT_THAT(page, Not(HasSubstr("\xe2\x80\xae")));    // turns the reading direction
  EXPECT_THAT(page, HasSubstr("{{data}} {{script}}"));  // a name, left unfilled
  const auto strings = data_of(page).at("strings").get<std::vector<std::string>>();
  EXPECT_THAT(strings, ::testing::Contains("</script><script>document.title='owned'</script>"));
}

TEST(FormatHtml, QuotesTheCommandThatIsCopied) {
  const std::string page = format_html(testing::hostile_report());
  EXPECT_THAT(page, HasSubstr(html_escaped("/run'\\''; touch owned; "
                                           "'\\''/bundles/$(touch owned)`touch owned`'")));
  EXPECT_EQ(shell_word("a0/bundles/step3-x_1.y"), "a0/bundles/step3-x_1.y");
  EXPECT_EQ(shell_word("--help"), "'./--help'");
  EXPECT_EQ(shell_word(""), "''");
}

TEST(FormatHtml, AllowsNothingButItsOwnStyleAndScript) {
  const std::string page = format_html(testing::located_report());
  EXPECT_THAT(page, HasSubstr("content=\"default-src 'none'; style-src 'sha256-"));
  EXPECT_THAT(page, Not(HasSubstr("unsafe-inline")));
  const std::string html =
      page.substr(page.find("</style>"), page.find("<script") - page.find("</style>"));
  EXPECT_THAT(html, Not(HasSubstr(" style=")));
  EXPECT_THAT(html, Not(HasSubstr("src=")));
  EXPECT_THAT(html, Not(HasSubstr("http")));
}

TEST(FormatHtml, HoldsEverySightingOf1024RanksInTwoMegabytes) {
  const RunReport report = testing::large_report(8, 16, 8);
  std::size_t sightings = 0;
  for (const Ledger& ledger : report.ledgers) sightings += ledger.sightings.size();
  ASSERT_GE(sightings, 1024U * 50U);
  const std::string page = format_html(report);
  EXPECT_LT(page.size(), kTwoMegabytes);
  const auto data = data_of(page).at("sightings");
  EXPECT_EQ(data.at("place").size(), sightings);
  EXPECT_EQ(data.at("left_out"), 0);
}

TEST(FormatHtml, LeavesOutTheLatestSightingsOfEachRankWhereAllWouldBeTooMany) {
  const RunReport report = testing::large_report(8, 8, 64);
  const std::string page = format_html(report);
  EXPECT_LE(page.size(), kLargestPage);
  const auto data = data_of(page).at("sightings");
  const auto shown = data.at("shown").get<std::vector<int>>();
  ASSERT_EQ(shown.size(), 4096U);
  EXPECT_GT(shown.front(), 0);
  EXPECT_EQ(*std::ranges::min_element(shown), *std::ranges::max_element(shown));
  EXPECT_GT(data.at("left_out"), 0);
}

TEST(FormatHtml, StaysSmallWhateverTheTexts) {
  RunReport report = testing::located_report();
  const std::string quotes(20'000, '"');
  report.verdict.origins.assign(256, report.verdict.origins.front());
  for (Origin& origin : report.verdict.origins) {
    origin.facts.assign(100, {.kind = FactKind::stated, .text = quotes});
    origin.module = quotes;
  }
  report.verdict.notes.assign(100, quotes);
  report.run->options.assign(1000, {quotes, quotes});
  int number = 0;
  for (Ledger& ledger : report.ledgers) {
    ledger.coordinates.host = quotes;
    for (Sighting& seen : ledger.sightings) seen.module = std::to_string(++number) + quotes;
  }
  EXPECT_LE(format_html(report).size(), kLargestPage);
}

TEST(FormatHtml, DoesNotDependOnTheOrderOfTheLedgers) {
  RunReport report = testing::several_origins_report();
  report.histories.push_back(report.histories.front());
  report.histories.back().coordinates.rank = 2;
  const std::string page = format_html(report);
  std::ranges::reverse(report.ledgers);
  std::ranges::reverse(report.histories);
  EXPECT_EQ(format_html(report), page);
}

TEST(FormatHtml, SaysThatNothingBadWasSeen) {
  const std::string page = format_html(testing::clean_report());
  EXPECT_THAT(page, HasSubstr(">no NaN or Inf in what was seen</h1>"));
  EXPECT_THAT(page, HasSubstr("status-clean"));
  EXPECT_THAT(format_html(RunReport{}), HasSubstr("No rank is known."));
}

TEST(FormatHtml, NamesWhatIsMissing) {
  const std::string page = format_html(testing::partial_report());
  EXPECT_THAT(page, HasSubstr("Partial: some evidence is missing"));
  EXPECT_THAT(page, HasSubstr("No answer from 2 ranks: 5, 7"));
  EXPECT_THAT(page, HasSubstr("<li>ledger_tp0pp0dp1.jsonl: cut off in line 41</li>"));
}

TEST(FormatHtml, ListsEveryOriginOpenTheFirst) {
  const std::string page = format_html(testing::several_origins_report());
  EXPECT_THAT(page, HasSubstr("<dd>2 other places with a fault of its own"));
  EXPECT_EQ(count_of(page, "<details class=\"origin\""), 3U);
  EXPECT_EQ(count_of(page, "<details class=\"origin\" open>"), 1U);
  EXPECT_THAT(page, HasSubstr("<h2>one of 2 ranks: 18, 34 (dp0) received NaN and Inf in "));
}

TEST(FormatHtml, PlotsWhatWasSeenAndLeavesGaps) {
  const auto curves = data_of(format_html(testing::located_report())).at("curves");
  ASSERT_GE(curves.size(), 2U);
  EXPECT_TRUE(curves[0].at("is_origin"));
  EXPECT_TRUE(curves[0].at("norm")[20].is_null());
  EXPECT_EQ(curves[0].at("bad").back(), 17);
  // The climbing one: exp(0.25 * 23) over the median.
  const auto strings = data_of(format_html(testing::located_report())).at("strings");
  EXPECT_EQ(strings[curves[1].at("parameter").get<std::size_t>()],
            "decoder.layers.3.pre_mlp_layernorm.weight");
  EXPECT_GT(curves[1].at("growth"), 100);
}

TEST(FormatHtml, KeepsNanAndInfApartInTheWindow) {
  RunReport report = testing::located_report();
  const auto window = data_of(format_html(report)).at("windows")[0];
  EXPECT_EQ(window.at("values")[9 * 32 + 9], "nan");
  EXPECT_EQ(window.at("values")[9 * 32 + 12], "inf");
  EXPECT_EQ(window.at("values")[12 * 32 + 20], "-inf");
  report.windows.front().windows.front().rows = std::int64_t{1} << 62;
  EXPECT_THAT(data_of(format_html(report)).at("windows"), IsEmpty());
}

TEST(FormatHtml, SurvivesNumbersThatNoRunHas) {
  RunReport report = testing::located_report();
  report.run->world_size = std::numeric_limits<int>::max();
  Ledger& ledger = report.ledgers.front();
  ledger.coordinates.rank = std::numeric_limits<int>::max();
  ledger.coordinates.world_size = std::numeric_limits<int>::max();
  ledger.coordinates.tp = {-3, 0};
  ledger.coordinates.dp = {7, std::numeric_limits<int>::min()};
  ledger.coordinates.ep = {0, -1};
  ledger.microbatches.front().number = std::numeric_limits<int>::max();
  ledger.sightings.front().microbatch = std::numeric_limits<int>::max();
  ledger.sightings.front().stats.absmax = std::numeric_limits<double>::infinity();
  report.verdict.silent_ranks = {-5, 3};
  report.ledgers.push_back(report.ledgers[1]);  // two ledgers of one rank
  const std::string page = format_html(report);
  EXPECT_LE(page.size(), kLargestPage);
  EXPECT_THAT(page, HasSubstr("rank 1 has two ledgers"));
  EXPECT_NO_THROW(data_of(page));
}

TEST(RankPicture, TellsReceiversBeforeTheReductionFromThoseAfterIt) {
  // Rank 5 is tp1 pp1 dp0; ranks 0, 1 and 4 are its replica, the others share its gradients.
  EXPECT_THAT(states_of(testing::located_report()),
              ElementsAre(Pair(0, RankState::received), Pair(1, RankState::received),
                          Pair(2, RankState::reduced), Pair(3, RankState::reduced),
                          Pair(4, RankState::received), Pair(5, RankState::born),
                          Pair(6, RankState::reduced), Pair(7, RankState::reduced)));
}

TEST(RankPicture, TellsSilentCutOffAndCandidateRanks) {
  const auto states = states_of(testing::partial_report());
  EXPECT_EQ(states.at(5), RankState::candidate);  // and it is silent
  EXPECT_EQ(states.at(4), RankState::candidate);
  EXPECT_EQ(states.at(7), RankState::silent);
  EXPECT_EQ(states.at(2), RankState::unknown);
}

TEST(RankPicture, PlacesSilentRanksWhereTheOthersLeaveNoDoubt) {
  const RunReport report = testing::partial_report();
  const RankPicture picture = picture_ranks(report);
  ASSERT_TRUE(picture.ranks[7].coordinates);
  EXPECT_EQ(picture.ranks[7].coordinates->file_suffix(), "tp1pp1dp1");
  EXPECT_EQ(picture.ranks[7].coordinates->host, "");
}

TEST(RankPicture, LeavesSilentRanksUnplacedWhereTwoNumberingsFit) {
  RunReport report = testing::partial_report();
  // Without ranks 2 to 5, dp before pp cannot be told from pp before dp.
  std::erase_if(report.ledgers, [](const Ledger& ledger) {
    return ledger.coordinates.rank >= 2 && ledger.coordinates.rank <= 5;
  });
  const RankPicture picture = picture_ranks(report);
  ASSERT_EQ(picture.ranks.size(), 8U);
  EXPECT_FALSE(picture.ranks[3].coordinates);
  EXPECT_TRUE(picture.ranks[7].coordinates);  // the same in both orders
}

TEST(ParameterPicture, CountsRanksByPhaseInBackwardOrderOfTheWholeModel) {
  const RunReport report = testing::located_report();
  const auto parameters = picture_parameters(picture_ranks(report).ranks).parameters;
  ASSERT_EQ(parameters.size(), 24U);
  EXPECT_EQ(parameters[0].name, "decoder.layers.3.mlp.linear_fc2.weight");
  EXPECT_EQ(parameters[23].name, "decoder.layers.0.input_layernorm.weight");
  const PageParameter& origin = parameters[4];
  EXPECT_EQ(origin.name, "decoder.layers.3.self_attention.linear_qkv.weight");
  EXPECT_THAT(origin.bad, ElementsAre(0, 2, 4, 0, 0));  // the replica's tp ranks, then all ranks
  EXPECT_THAT(origin.covered, ElementsAre(0, 4, 4, 0, 0));
  EXPECT_FALSE(parameters[3].is_bad());
}

TEST(ParameterPicture, PutsExpertsOfOtherRanksWhereTheyBelong) {
  std::vector<Ledger> ledgers(2);
  const auto add = [](Ledger& ledger, const char* name) {
    ledger.backward_order.push_back(
        {.id = static_cast<std::int64_t>(ledger.backward_order.size()), .name = name, .shape = {}});
  };
  for (const char* name : {"head", "experts.0", "router", "embedding"}) add(ledgers[0], name);
  for (const char* name : {"head", "experts.1", "router", "embedding"}) add(ledgers[1], name);
  std::vector<PageRank> ranks(2);
  ranks[0].ledger = &ledgers[0];
  ranks[1].ledger = &ledgers[1];
  std::vector<std::string> names;
  for (const auto& parameter : picture_parameters(ranks).parameters)
    names.push_back(parameter.name);
  EXPECT_THAT(names, ElementsAre("head", "experts.1", "experts.0", "router", "embedding"));
}

std::set<std::pair<int, int>> first_arrows(const RunReport& report) {
  const RankPicture ranks = picture_ranks(report);
  const TimelinePicture timeline = picture_timeline(report, ranks);
  const auto rank_of = [&](std::size_t row) { return ranks.ranks[timeline.rows[row].rank].rank; };
  std::set<std::pair<int, int>> arrows;
  for (const TimelineArrow& arrow : timeline.arrows) {
    EXPECT_LT(timeline.rows[arrow.from_row].marks[arrow.from_mark].clock,
              timeline.rows[arrow.to_row].marks[arrow.to_mark].clock);
    if (arrow.is_first) arrows.emplace(rank_of(arrow.from_row), rank_of(arrow.to_row));
  }
  return arrows;
}

TEST(TimelinePicture, FollowsTheFaultFromRankToRank) {
  // Born on 5, summed with 4 over tensor-parallel ranks, sent down the pipeline to 0 and 1.
  EXPECT_THAT(first_arrows(testing::located_report()),
              UnorderedElementsAre(Pair(5, 4), Pair(4, 0), Pair(5, 1)));
}

TEST(TimelinePicture, ShowsOriginsFirstAndSaysHowManyRanksHaveNoRow) {
  const RunReport report = testing::large_report(8, 16, 8);
  const RankPicture ranks = picture_ranks(report);
  const TimelinePicture timeline = picture_timeline(report, ranks);
  ASSERT_EQ(timeline.rows.size(), kMostTimelineRows);
  EXPECT_EQ(ranks.ranks[timeline.rows[0].rank].state, RankState::born);
  int further = 0;
  for (const auto& [column, count] : timeline.further_ranks) further += count;
  EXPECT_EQ(further, 1024 - static_cast<int>(kMostTimelineRows));
}

TEST(TimelinePicture, EndsWhereLedgersWaitForEachOther) {
  RunReport report = testing::located_report();
  report.ledgers.resize(2);
  for (Ledger& ledger : report.ledgers) {
    const int other = 1 - ledger.coordinates.rank;
    Sighting received{.iteration = 1284, .phase = Phase::forward, .role = "received"};
    received.stats.nan = 1;
    received.crossing = Crossing{.group = "pp", .members = {0, 1}, .peer = other, .sequence = 0};
    Sighting sent = received;
    sent.role = "sent";
    ledger.sightings = {received, sent};
  }
  const RankPicture ranks = picture_ranks(report);
  EXPECT_EQ(picture_timeline(report, ranks).rows.size(), ranks.ranks.size());
}

TEST(PageText, CutsBetweenCharacters) {
  const std::string text = "0123456789\xc3\xa9\xc3\xa9";  // two-byte characters
  EXPECT_EQ(page_text(text, 14), text);
  EXPECT_EQ(page_text(text, 13), "0123456789...");
  EXPECT_EQ(page_text(text, 12), "012345678...");
  EXPECT_EQ(page_text("a\x01z", 600), "a\\x01z");
}

}  // namespace
}  // namespace nanlocator
