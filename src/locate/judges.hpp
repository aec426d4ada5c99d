// Passes over the origins: each judges those of one kind by evidence that events do not have.
#pragma once

#include <vector>

#include "incident/findings.hpp"
#include "nanlocator/verdict/verdict.hpp"

namespace nanlocator::inline locate_room {

/// A step that adds to bad gradients of an earlier one has bad gradients, whatever it computes:
/// its origins of unknown cause among gradients, and those that read these gradients, become one
/// origin, `left_gradients`.
void judge_left_gradients(const Incident& incident, std::vector<Origin>& origins);

/// Diverging training eventually overflows; the place of the overflow is not its cause. An overflow
/// after several steps of climbing maxima of the gradients becomes `divergence`, with its place and
/// confidence. For an overflow after a single jump, the evidence says so. docs/causes.md,
/// "Divergence".
void judge_divergence(const Incident& incident, std::vector<Origin>& origins);

/// Adds to each origin that is a bad weight whether its copies (data-parallel copies,
/// tensor-parallel duplicates, tied embeddings) are clean, bad or not scanned, unless already
/// known, and how the preceding update is involved.
void judge_bad_weights(const Findings& findings, std::vector<Origin>& origins);

/// Checks collectives that should give every member the same result: in a pass of the re-run the
/// members report their results (PeerQuestion). Adds to origins on one rank whether that rank
/// received the same as the other members of its groups, or else the first collective of the
/// microbatch whose result differed. If the values of that one are far apart, it is the cause, and
/// the operator was only the first that its result made bad.
void judge_collective_results(const Incident& incident, std::vector<Origin>& origins);

/// Decides whether a step was bad because the program used memory that a transfer between ranks, or
/// another of its threads, was still reading or writing. All origins are a race if the step was bad
/// in every re-run except those that waited for each transfer at its start, or if the outcome
/// changed, twice, with the order in which the step and a thread used some memory. An origin that
/// was gone in the re-run or came out of a collective is one if an operator was seen to use its
/// memory or collective too early. Other origins that may be a race get such accesses as facts.
void judge_races(const Incident& incident, const RerunOutcome& rerun, std::vector<Origin>& origins);

}  // namespace nanlocator::inline locate_room
