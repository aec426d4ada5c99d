// The flag over a raw NCCL communicator, for C++ programs that have NCCL and no c10d. In builds
// with CUDA that found nccl.h (NANLOCATOR_NCCL); whoever calls it links NCCL.
//
//   auto communicator = std::make_shared<nanlocator::Communicator>(
//       nanlocator::flag_reduction_over_nccl(nccl, stream),
//       c10::make_intrusive<c10d::TCPStore>(host, options), "nanlocator/0");
#pragma once

#include <memory>

#include "nanlocator/agree/flag_reduction.hpp"

struct ncclComm;     // *: ncclComm_t
struct CUstream_st;  // *: cudaStream_t

namespace nanlocator::inline agree_room {

/// `communicator`: of the ranks that train together, in their order, blocking or not; the caller's:
/// it must outlive the reduction, and is neither destroyed nor aborted here. NCCL wants all ranks
/// to use it in the same order, so either it has no other use, or the program's own collectives
/// come at the same points on every rank. `stream`, of the communicator's device: where the
/// reduction runs; nullptr: a stream of Torch's pool.
///
/// Host and device wait for nobody in `start` and `finish`; `check` asks ncclCommGetAsyncError.
/// Throws UsageError where `communicator` is null or no communicator.
[[nodiscard]] std::unique_ptr<FlagReduction> flag_reduction_over_nccl(
    ncclComm* communicator, CUstream_st* stream = nullptr);

}  // namespace nanlocator::inline agree_room
