// The flag reduction over a raw NCCL communicator, for C++ programs that have NCCL and no c10d. In
// CUDA builds that found nccl.h (NANLOCATOR_NCCL); the caller links NCCL.
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

/// `communicator`: contains the ranks that train together, in their order; blocking or not. The
/// caller owns it: it must outlive the reduction, and is neither destroyed nor aborted here. NCCL
/// wants all ranks to use it in the same order, so either it has no other use, or the program's own
/// collectives come at the same points on every rank. `stream`, of the communicator's device: runs
/// the reduction; nullptr: a stream from Torch's pool.
///
/// `start` and `finish` block neither host nor device; `check` calls ncclCommGetAsyncError. Throws
/// UsageError if `communicator` is null or invalid.
[[nodiscard]] std::unique_ptr<FlagReduction> flag_reduction_over_nccl(
    ncclComm* communicator, CUstream_st* stream = nullptr);

}  // namespace nanlocator::inline agree_room
