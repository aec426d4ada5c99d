#include "report/ledger_files.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <iterator>
#include <mutex>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "nanlocator/error.hpp"
#include "nanlocator/files/atomic_file.hpp"

namespace nanlocator::inline report_room {
namespace {

namespace fs = std::filesystem;

/// A rank with 10,000 parameters and as many sightings writes about 10 MB per incident.
constexpr std::uint64_t kLargestLedgerFile = std::uint64_t{1} << 30;

/// Reading is mostly parsing; more threads would wait for memory.
constexpr unsigned kMostThreads = 8;

/// The start of a ledger's first line as this project writes it. Other spellings are found by
/// parsing all lines before the first such line.
constexpr std::string_view kHeader = R"({"record":"ledger",)";

/// Calls `work(0)` to `work(count - 1)` on several threads and rethrows the first exception.
template <typename Work>
void in_parallel(std::size_t count, const Work& work) {
  std::atomic<std::size_t> next{0};
  std::exception_ptr failure;
  std::mutex failure_lock;
  const auto run = [&] {
    try {
      for (std::size_t index = next++; index < count; index = next++) work(index);
    } catch (...) {
      const std::lock_guard lock(failure_lock);
      if (!failure) failure = std::current_exception();
      next = count;
    }
  };
  // A thread costs more than reading a few small files.
  constexpr std::size_t kFilesPerThread = 8;
  const std::size_t most = std::clamp(std::thread::hardware_concurrency(), 1U, kMostThreads);
  std::vector<std::jthread> threads;
  for (std::size_t i = 1; i < std::min(most, count / kFilesPerThread); ++i) {
    threads.emplace_back(run);
  }
  run();
  threads.clear();
  if (failure) std::rethrow_exception(failure);
}

struct TextRange {
  std::size_t begin = 0;
  std::size_t end = 0;
  std::size_t line = 1;
};

bool is_blank(std::string_view text) {
  return text.find_first_not_of(" \t\r\n") == std::string_view::npos;
}

/// Splits `text` before each first line of a ledger.
std::vector<TextRange> ranges_of(std::string_view text) {
  std::vector<TextRange> ranges;
  std::size_t begin = 0;
  std::size_t line = 1;
  while (begin < text.size()) {
    std::size_t end = text.size();
    std::size_t lines = 0;
    for (std::size_t at = begin;;) {
      const std::size_t newline = text.find('\n', at);
      if (newline == std::string_view::npos) break;
      ++lines;
      at = newline + 1;
      if (text.substr(at).starts_with(kHeader)) {
        end = at;
        break;
      }
    }
    if (!is_blank(text.substr(begin, end - begin))) {
      ranges.push_back({begin, end, line});
    }
    begin = end;
    line += lines;
  }
  return ranges;
}

/// The name of a range of a file in messages; their line numbers count from the range's first line.
std::string source_of(const fs::path& path, std::size_t line) {
  const std::string name = path.filename().string();
  return line == 1 ? name : name + " from line " + std::to_string(line) + " on";
}

struct IndexedFile {
  std::vector<LedgerPlace> places;
  std::vector<std::string> notes;
};

IndexedFile index_file(const fs::path& path, std::size_t file) {
  IndexedFile indexed;
  const std::string text = read_file(path, kLargestLedgerFile);
  if (is_blank(text)) indexed.notes.push_back(path.filename().string() + ": the file is empty");
  for (const auto& [begin, end, line] : ranges_of(text)) {
    std::string_view known_by = std::string_view(text).substr(begin, end - begin);
    if (known_by.starts_with(kHeader)) known_by = known_by.substr(0, known_by.find('\n'));
    try {
      for (const Ledger& ledger : ledgers_from_jsonl(known_by, source_of(path, line))) {
        indexed.places.push_back(
            {file, begin, end, line, ledger.run_id, ledger.iteration, ledger.coordinates.rank});
      }
    } catch (const FormatError& error) {
      indexed.notes.push_back(error.what() + std::string("; the ledger is left out"));
    }
  }
  return indexed;
}

}  // namespace

bool is_ledger_file(const fs::path& path) {
  const std::string name = path.filename().string();
  return !name.starts_with('.') && name.ends_with(".jsonl") &&
         name.find("ledger_") != std::string::npos;
}

LedgerFiles find_ledgers(const fs::path& directory) {
  LedgerFiles files;
  std::error_code error;
  for (fs::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    if (is_ledger_file(entry->path())) files.paths.push_back(entry->path());
  }
  if (error) {
    throw IoError("cannot read the folder " + directory.string() + ": " + error.message());
  }
  std::ranges::sort(files.paths);

  std::vector<IndexedFile> indexed(files.paths.size());
  in_parallel(files.paths.size(), [&](std::size_t file) {
    try {
      indexed[file] = index_file(files.paths[file], file);
    } catch (const IoError& unreadable) {
      indexed[file].notes.push_back(unreadable.what() + std::string("; it is left out"));
    }
  });
  for (auto& file : indexed) {
    std::ranges::move(file.places, std::back_inserter(files.places));
    std::ranges::move(file.notes, std::back_inserter(files.notes));
  }
  return files;
}

std::vector<ReadLedger> read_ledgers(const LedgerFiles& files, const std::string& run_id,
                                     std::int64_t iteration, std::vector<std::string>& notes) {
  // The ranges of one file are read together, because two ledgers may share a file.
  std::vector<std::vector<TextRange>> ranges(files.paths.size());
  for (const LedgerPlace& place : files.places) {
    if (place.run_id != run_id || place.iteration != iteration) continue;
    auto& of_file = ranges[place.file];
    if (of_file.empty() || of_file.back().begin != place.begin) {
      of_file.push_back({place.begin, place.end, place.line});
    }
  }

  std::vector<std::vector<Ledger>> read(files.paths.size());
  std::vector<std::string> problems(files.paths.size());
  in_parallel(files.paths.size(), [&](std::size_t file) {
    if (ranges[file].empty()) return;
    try {
      const std::string text = read_file(files.paths[file], kLargestLedgerFile);
      for (const auto& [begin, end, line] : ranges[file]) {
        if (begin >= text.size()) continue;  // the file was truncated after it was indexed
        auto ledgers = ledgers_from_jsonl(std::string_view(text).substr(begin, end - begin),
                                          source_of(files.paths[file], line));
        for (auto& ledger : ledgers) {
          if (ledger.run_id == run_id && ledger.iteration == iteration) {
            read[file].push_back(std::move(ledger));
          }
        }
      }
    } catch (const Error& error) {
      problems[file] = error.what();
    }
  });

  std::vector<ReadLedger> result;
  for (std::size_t file = 0; file < read.size(); ++file) {
    if (!problems[file].empty()) notes.push_back(std::move(problems[file]));
    for (auto& ledger : read[file]) result.push_back({std::move(ledger), file});
  }
  return result;
}

}  // namespace nanlocator::inline report_room
