#include "verdict/kernel_facts.hpp"

namespace nanlocator::inline verdict_room {

void append_kernel_facts(Facts& facts, const KernelReplay& replay, const std::string& kernel) {
  if (replay.executions > 0) {
    facts.push_back({.kind = FactKind::kernel_executed,
                     .count = replay.executions,
                     .op = kernel,
                     .conclusion = replay.has_same_bits == true ? "same_bits" : ""});
  }
  if (replay.conclusion == KernelConclusion::not_replayed) {
    if (replay.problem.empty()) return;
    facts.push_back({.kind = FactKind::kernel_not_executed, .op = kernel, .text = replay.problem});
    return;
  }
  Operand output;
  output.name = replay.output;
  output.shape = replay.shape;
  facts.push_back({.kind = FactKind::kernel_replayed,
                   .count = replay.bad,
                   .op = kernel,
                   .role = replay.argument,
                   .conclusion = std::string(name_of(replay.conclusion)),
                   .operand = std::move(output),
                   .extent = replay.extent});
  if (!replay.reference.empty()) {
    facts.push_back({.kind = FactKind::kernel_reference,
                     .count = replay.agreeing,
                     .of = replay.compared,
                     .op = kernel,
                     .variant = replay.is_compared_scaled ? "scaled" : "",
                     .text = replay.reference});
  } else if (replay.conclusion == KernelConclusion::bad_again || !replay.problem.empty()) {
    facts.push_back({.kind = FactKind::no_kernel_reference,
                     .op = kernel,
                     .conclusion = std::string(name_of(replay.conclusion)),
                     .text = replay.problem});
  }
}

}  // namespace nanlocator::inline verdict_room
