// write_sample_pages FOLDER: writes the pages of sample_reports.hpp, for
// tests/report/test_report_page.py and for work on the page.
#include <filesystem>
#include <fstream>
#include <iostream>

#include "nanlocator/report/html.hpp"
#include "report/sample_reports.hpp"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: write_sample_pages FOLDER\n";
    return 2;
  }
  using namespace nanlocator;
  const std::filesystem::path folder = argv[1];
  const auto write = [&](const char* name, const RunReport& report) {
    const std::string page = format_html(report);
    std::ofstream(folder / (std::string(name) + ".html"), std::ios::binary) << page;
    std::cout << name << ' ' << page.size() << '\n';
  };
  write("located", testing::located_report());
  write("clean", testing::clean_report());
  write("partial", testing::partial_report());
  write("several", testing::several_origins_report());
  write("hostile", testing::hostile_report());
  write("large", testing::large_report(8, 16, 8));
  write("huge", testing::large_report(8, 16, 128));
  return 0;
}
