#include "command/arguments.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <sstream>

#include "nanlocator/error.hpp"

namespace nanlocator::command {
namespace {

using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::IsEmpty;
using ::testing::StartsWith;

constexpr Option kSearchOptions[] = {
    {.name = "FROM", .least = 1, .help = "Where to begin"},
    {.name = "TO", .help = "Where to end"},
    {.name = "--all", .help = "Everything"},
    {.name = "--depth",
     .value = "N",
     .type = Type::integer,
     .default_value = "3",
     .low = 1,
     .help = "How deep"},
    {.name = "--label", .value = "TEXT", .help = "Its name"},
    {.name = "--page", .value = "FILE", .has_optional_value = true, .help = "Write a page"},
    {.name = "--every",
     .value = "SECONDS",
     .type = Type::number,
     .default_value = "2",
     .has_optional_value = true,
     .low = 0.5,
     .high = 10,
     .expected = "seconds from 0.5 to 10",
     .help = "Again and again"},
    {.name = "--skip-list", .value = "FILE", .most = kMany, .help = "Left out"},
    {.name = "--even",
     .value = "N",
     .most = kMany,
     .accepts =
         [](std::string_view text) {
           const auto number = integer_from(text);
           return number && *number % 2 == 0;
         },
     .expected = "an even number",
     .help = "Even numbers"},
    {.name = "--colour",
     .default_value = "red",
     .choices = "red|green|blue",
     .help = "Of the line",
     .heading = "Looks"},
};
constexpr Option kJoinOptions[] = {
    {.name = "PART", .least = 2, .most = kMany, .help = "What is joined"},
};
constexpr Command kToolsBelow[] = {
    {.name = "search",
     .summary = "Look for something",
     .options = kSearchOptions,
     .details =
         "It looks at everything that is there, then at what is not there, and in the end it "
         "says which of the two is larger.",
     .exit_codes = "0 found, 1 not found",
     .examples = "tool search here"},
    {.name = "join", .summary = "Put parts together", .options = kJoinOptions, .examples = "x"},
};
constexpr Command kTools[] = {
    {.name = "do", .summary = "Do something", .examples = "tool do", .commands = kToolsBelow}};
constexpr Command kTool = {
    .name = "tool", .summary = "A tool", .examples = "tool do", .commands = kTools};

Arguments read(const std::vector<std::string>& words) {
  return parse(kTool, "tool", words);
}

Arguments search(std::vector<std::string> words) {
  words.insert(words.begin(), {"do", "search"});
  return read(words);
}

/// The message, without the end that all have.
std::string refusal(const std::function<Arguments()>& call, const std::string& name) {
  try {
    (void)call();
  } catch (const UsageError& error) {
    const std::string message = error.what();
    const std::string end = "; see " + name + " --help";
    EXPECT_THAT(message, EndsWith(end));
    return message.substr(0, message.size() - std::min(end.size(), message.size()));
  }
  return "accepted";
}

std::string refusal_of_search(const std::vector<std::string>& words) {
  return refusal([&] { return search(words); }, "tool do search");
}

// --- commands -----------------------------------------------------------------------------------

TEST(ArgumentsOfACommand, ACommandIsFoundBelowAnother) {
  const auto given = read({"do", "join", "a", "b", "c"});
  EXPECT_EQ(given.command, &kToolsBelow[1]);
  EXPECT_EQ(given.name, "tool do join");
  EXPECT_THAT(given.texts("PART"), ElementsAre("a", "b", "c"));
  EXPECT_THAT(given.words, ElementsAre("a", "b", "c"));
}

TEST(ArgumentsOfACommand, AWrongCommandIsNamedWithTheNearestOne) {
  const auto refused = [](const std::vector<std::string>& words, const std::string& name) {
    return refusal([&] { return read(words); }, name);
  };
  EXPECT_EQ(refused({"doo"}, "tool"), "unknown command \"doo\" (did you mean do?)");
  EXPECT_EQ(refused({"do", "serach"}, "tool do"),
            "unknown command \"serach\" (did you mean search?)");
  EXPECT_EQ(refused({"do", "--join"}, "tool do"),
            "unknown command \"--join\" (did you mean join?)");
  EXPECT_EQ(refused({"do", "paint"}, "tool do"), "unknown command \"paint\"");
  EXPECT_EQ(refused({"do"}, "tool do"), "a command is required: search or join");
}

TEST(ArgumentsOfACommand, HelpIsAskedForAtEveryLevel) {
  for (const std::vector<std::string>& words : std::vector<std::vector<std::string>>{
           {"--help"},
           {"-h"},
           {"do", "--help"},
           {"do", "search", "-h"},
           {"do", "search", "a", "--depth", "2", "--help", "--wrong"}}) {
    EXPECT_TRUE(read(words).asks_for_help);
  }
  EXPECT_EQ(read({"do", "--help"}).command, &kTools[0]);
  EXPECT_FALSE(search({"--", "--help"}).asks_for_help);
}

// --- options ------------------------------------------------------------------------------------

TEST(ArgumentsOfACommand, OptionsMayComeBeforeBetweenAndAfterPositionals) {
  for (const auto& given :
       {search({"--all", "--label", "x", "a", "b"}), search({"a", "--label=x", "b", "--all"}),
        search({"a", "b", "--all", "--label", "x"})}) {
    EXPECT_EQ(given.text("FROM"), "a");
    EXPECT_EQ(given.text("TO"), "b");
    EXPECT_EQ(given.text("--label"), "x");
    EXPECT_TRUE(given.has("--all"));
  }
}

TEST(ArgumentsOfACommand, TwoDashesEndTheOptions) {
  const auto given = search({"--all", "--", "--label", "--under_score"});
  EXPECT_EQ(given.text("FROM"), "--label");
  EXPECT_EQ(given.text("TO"), "--under_score");
  EXPECT_FALSE(given.has("--label"));
  EXPECT_EQ(search({"-"}).text("FROM"), "-");
}

TEST(ArgumentsOfACommand, AnOptionThatIsNotGivenHasItsDefault) {
  const auto given = search({"a"});
  EXPECT_FALSE(given.has("--depth"));
  EXPECT_EQ(given.integer("--depth"), 3);
  EXPECT_EQ(given.text("--colour"), "red");
  EXPECT_EQ(given.text("--label"), "");
  EXPECT_EQ(given.text("TO"), "");
  EXPECT_THAT(given.texts("--skip-list"), IsEmpty());
  EXPECT_FALSE(given.has("--page"));
}

TEST(ArgumentsOfACommand, TheLastOneCountsUnlessTheOptionMayBeRepeated) {
  const auto given = search(
      {"a", "--depth", "5", "--depth=7", "--skip-list", "x", "--all", "--skip-list=y", "--all"});
  EXPECT_EQ(given.integer("--depth"), 7);
  EXPECT_THAT(given.texts("--skip-list"), ElementsAre("x", "y"));
}

TEST(ArgumentsOfACommand, AnUnderscoreInANameIsADash) {
  EXPECT_EQ(search({"a", "--skip_list", "x_y"}).text("--skip-list"), "x_y");
  EXPECT_EQ(search({"a", "--skip_list=x_y"}).text("--skip-list"), "x_y");
}

TEST(ArgumentsOfACommand, AWrongOptionIsNamedWithTheNearestOne) {
  EXPECT_EQ(refusal_of_search({"a", "--dept", "3"}),
            "unknown option --dept (did you mean --depth?)");
  EXPECT_EQ(refusal_of_search({"a", "--lable=x"}),
            "unknown option --lable (did you mean --label?)");
  EXPECT_EQ(refusal_of_search({"a", "-all"}), "unknown option -all (did you mean --all?)");
  EXPECT_EQ(refusal_of_search({"a", "--xyzzy"}), "unknown option --xyzzy");
  EXPECT_EQ(refusal_of_search({"a", "-x"}), "unknown option -x");
  EXPECT_EQ(refusal_of_search({"-3"}), "unknown option -3");
}

// getopt_long itself accepts an unambiguous abbreviation.
TEST(ArgumentsOfACommand, AnAbbreviationIsRefusedEvenIfItIsUnambiguous) {
  EXPECT_EQ(refusal_of_search({"a", "--al"}), "unknown option --al (did you mean --all?)");
  EXPECT_EQ(refusal_of_search({"a", "--col=red"}), "unknown option --col (did you mean --colour?)");
  EXPECT_EQ(refusal_of_search({"--he"}), "unknown option --he (did you mean --help?)");
  EXPECT_THAT(refusal_of_search({"a", "--e"}),
              StartsWith("unknown option --e "));  // ambiguous, too
}

TEST(ArgumentsOfACommand, AFlagTakesNoValue) {
  EXPECT_EQ(refusal_of_search({"a", "--all=yes"}), "--all takes no value");
  EXPECT_EQ(refusal_of_search({"a", "--help=yes"}), "--help takes no value");
}

TEST(ArgumentsOfACommand, AMissingValueIsNotTakenFromTheNextOption) {
  EXPECT_EQ(refusal_of_search({"a", "--label"}), "--label needs a value: --label TEXT");
  EXPECT_EQ(refusal_of_search({"a", "--label", "--all"}), "--label needs a value: --label TEXT");
  EXPECT_EQ(search({"a", "--label=--all"}).text("--label"), "--all");
  EXPECT_EQ(search({"a", "--label", "-x"}).text("--label"), "-x");
  EXPECT_EQ(search({"a", "--label="}).text("--label"), "");
}

TEST(ArgumentsOfACommand, ANumberIsWholeAndWithinItsRange) {
  EXPECT_EQ(search({"a", "--depth", "2147483647"}).integer("--depth"), 2147483647);
  for (const char* wrong :
       {"0", "-1", "x", "", "3x", "1.5", "2147483648", "99999999999999999999"}) {
    EXPECT_EQ(refusal_of_search({"a", "--depth", wrong}),
              "--depth " + std::string(wrong) + ": expected a whole number of at least 1");
  }
  EXPECT_EQ(search({"a", "--every=0.5"}).number("--every"), 0.5);
  EXPECT_EQ(search({"a", "--every=10"}).number("--every"), 10);
  for (const char* wrong : {"0.4", "10.1", "nan", "inf", "soon"}) {
    EXPECT_EQ(refusal_of_search({"a", "--every=" + std::string(wrong)}),
              "--every=" + std::string(wrong) + ": expected seconds from 0.5 to 10");
  }
}

TEST(ArgumentsOfACommand, AChoiceIsOneOfItsWords) {
  EXPECT_EQ(search({"a", "--colour", "blue"}).text("--colour"), "blue");
  EXPECT_EQ(refusal_of_search({"a", "--colour", "gren"}),
            "--colour gren: expected red, green or blue (did you mean green?)");
  EXPECT_EQ(refusal_of_search({"a", "--colour", "octarine"}),
            "--colour octarine: expected red, green or blue");
}

TEST(ArgumentsOfACommand, AnOptionalValueFollowsAnEqualsSign) {
  const auto bare = search({"--page", "a"});
  EXPECT_TRUE(bare.has("--page"));
  EXPECT_EQ(bare.text("--page"), "");
  EXPECT_EQ(bare.text("FROM"), "a");
  EXPECT_EQ(search({"--page=x", "a"}).text("--page"), "x");
  EXPECT_EQ(search({"--page=", "a"}).text("--page"), "");
  EXPECT_EQ(search({"--every", "a"}).number("--every"), 2);
}

TEST(ArgumentsOfACommand, AnOptionalValueWithoutTheSignIsRefusedWithWhatToType) {
  EXPECT_EQ(refusal_of_search({"--page", "x.html", "a", "b"}),
            "unexpected argument \"b\" (did you mean --page=x.html?)");
  EXPECT_EQ(refusal_of_search({"a", "b", "--page", "x.html"}),
            "unexpected argument \"x.html\" (did you mean --page=x.html?)");
  // A number is not a folder, even if it is the only argument.
  EXPECT_EQ(refusal_of_search({"--every", "1"}),
            "unexpected argument \"1\" (did you mean --every=1?)");
  EXPECT_EQ(search({"--every", "--", "1"}).text("FROM"), "1");
  EXPECT_EQ(search({"--page=y", "a", "b"}).text("TO"), "b");
}

TEST(ArgumentsOfACommand, ARepeatedOptionTakesTheFollowingValidWords) {
  const auto given = search({"a", "--even", "2", "4", "b", "--even=6", "8"});
  EXPECT_THAT(given.texts("--even"), ElementsAre("2", "4", "6", "8"));
  EXPECT_EQ(given.text("TO"), "b");
  EXPECT_EQ(refusal_of_search({"a", "--even", "3"}), "--even 3: expected an even number");
  EXPECT_EQ(search({"--even", "2", "3"}).text("FROM"), "3");
  EXPECT_THAT(search({"--even", "2", "--", "4"}).texts("--even"), ElementsAre("2"));
}

// --- positional arguments -----------------------------------------------------------------------

TEST(ArgumentsOfACommand, PositionalsAreCounted) {
  EXPECT_EQ(refusal_of_search({}), "FROM is required");
  EXPECT_EQ(refusal_of_search({"a", "b", "c"}), "unexpected argument \"c\"");
  EXPECT_EQ(refusal(
                [] {
                  return read({"do", "join", "a"});
                },
                "tool do join"),
            "PART is required 2 times");
  EXPECT_EQ(search({""}).texts("FROM").size(), 1U);
}

TEST(ArgumentsOfACommand, ACommandLineLeavesNothingBehindForTheNext) {
  EXPECT_EQ(refusal_of_search({"a", "--label"}), "--label needs a value: --label TEXT");
  EXPECT_EQ(search({"b", "--label", "x"}).text("FROM"), "b");
  EXPECT_TRUE(search({"--help", "c"}).asks_for_help);
  EXPECT_EQ(search({"d"}).text("FROM"), "d");
}

TEST(ArgumentsOfACommand, ANameThatIsNotInTheTableIsALogicError) {
  EXPECT_THROW((void)search({"a"}).has("--none"), std::logic_error);
  EXPECT_THROW((void)search({"a"}).text("--none"), std::logic_error);
}

// --- help ---------------------------------------------------------------------------------------

TEST(ArgumentsOfACommand, HelpIsMadeFromTheTable) {
  EXPECT_EQ(help_of(kToolsBelow[0], "tool do search", 60),
            "Usage: tool do search FROM [TO] [options]\n"
            "\n"
            "Look for something\n"
            "\n"
            "Arguments:\n"
            "  FROM                     Where to begin\n"
            "  TO                       Where to end\n"
            "\n"
            "Options:\n"
            "  -h, --help               Print this help\n"
            "  --all                    Everything\n"
            "  --depth N                How deep (default: 3)\n"
            "  --label TEXT             Its name\n"
            "  --page[=FILE]            Write a page\n"
            "  --every[=SECONDS]        Again and again (default: 2)\n"
            "  --skip-list FILE         Left out\n"
            "  --even N...              Even numbers\n"
            "\n"
            "Looks:\n"
            "  --colour red|green|blue  Of the line (default: red)\n"
            "\n"
            "It looks at everything that is there, then at what is not\n"
            "there, and in the end it says which of the two is larger.\n"
            "\n"
            "Exit codes: 0 found, 1 not found.\n"
            "\n"
            "Examples:\n"
            "  tool search here\n");
}

TEST(ArgumentsOfACommand, HelpListsTheCommandsBelow) {
  EXPECT_EQ(help_of(kTools[0], "tool do", 80),
            "Usage: tool do COMMAND\n"
            "\n"
            "Do something\n"
            "\n"
            "Commands:\n"
            "  search      Look for something\n"
            "  join        Put parts together\n"
            "\n"
            "Options:\n"
            "  -h, --help  Print this help\n"
            "\n"
            "Examples:\n"
            "  tool do\n");
}

TEST(ArgumentsOfACommand, UsageShowsHowManyPositionalsThereAre) {
  const auto usage = [](int least, int most) {
    const Option rows[] = {{.name = "DIR", .least = least, .most = most}};
    const Command command{.name = "x", .options = rows};
    const std::string help = help_of(command, "x", 80);
    return help.substr(0, help.find('\n'));
  };
  EXPECT_EQ(usage(0, 1), "Usage: x [DIR] [options]");
  EXPECT_EQ(usage(1, 1), "Usage: x DIR [options]");
  EXPECT_EQ(usage(1, 2), "Usage: x DIR [DIR] [options]");
  EXPECT_EQ(usage(2, 2), "Usage: x DIR DIR [options]");
  EXPECT_EQ(usage(1, kMany), "Usage: x DIR... [options]");
}

TEST(ArgumentsOfACommand, NoLineOfHelpIsWiderThanItsWidth) {
  for (const std::size_t width : {40U, 60U, 100U}) {
    std::istringstream help(help_of(kToolsBelow[0], "tool do search", width));
    std::string line;
    while (std::getline(help, line))
      EXPECT_LE(line.size(), std::max<std::size_t>(width, 45)) << line;
  }
}

}  // namespace
}  // namespace nanlocator::command
