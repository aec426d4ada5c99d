// A full disk, without filling one.
#pragma once

#include <sys/resource.h>

#include <csignal>

namespace nanlocator::testing {

/// Files of this process may not grow beyond `bytes`: stands for a full disk.
class LimitedFileSize {
 public:
  explicit LimitedFileSize(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    rlimit limit = before_;
    limit.rlim_cur = bytes;
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  LimitedFileSize(const LimitedFileSize&) = delete;  // one owner restores the limit
  LimitedFileSize& operator=(const LimitedFileSize&) = delete;
  ~LimitedFileSize() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_{};
  void (*handler_)(int);
};

}  // namespace nanlocator::testing
