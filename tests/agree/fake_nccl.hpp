// A fake of nccl.h for flag_reduction_over_nccl, among threads and on host memory. A reduction is
// complete when its launch returns.
#pragma once

#include <nccl.h>

#include <atomic>
#include <cstddef>
#include <memory>

#include "agree/thread_ranks.hpp"

struct ncclComm {
  int rank = 0;
  int size = 1;
  std::shared_ptr<nanlocator::testing::MaxReduction> reduction;
  std::size_t launched = 0;
  std::atomic<ncclResult_t> failure = ncclSuccess;  // as if a peer were gone
  std::atomic<int> polls_until_taken = 0;           // for a nonblocking communicator
  std::atomic<int> ended = 0;                       // aborted or destroyed
};
