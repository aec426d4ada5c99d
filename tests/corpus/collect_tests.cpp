// Names the running gtest test for collect.cpp, in this process and in the processes that the test
// starts.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

namespace {

class CurrentTest : public ::testing::EmptyTestEventListener {
  void OnTestStart(const ::testing::TestInfo& test) override {
    const std::string name =
        std::string(test.file()) + "::" + test.test_suite_name() + "." + test.name();
    setenv("VERDICT_CORPUS_TEST", name.c_str(), 1);
  }
};

const bool kIsListening = [] {
  ::testing::UnitTest::GetInstance()->listeners().Append(new CurrentTest);  // the list owns it
  return true;
}();

}  // namespace
