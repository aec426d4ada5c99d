// A place at which a bad value arose on one rank, as reported by the trace (operators) or the watch
// (modules). Ledgers carry births; `locate` turns them into origins.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "nanlocator/files/names.hpp"
#include "nanlocator/map/rank_list.hpp"
#include "nanlocator/record/history.hpp"
#include "nanlocator/record/sighting.hpp"
#include "nanlocator/scan/tensor_stats.hpp"

namespace nanlocator::inline record_room {

enum class BirthKind : std::uint8_t {
  nan,           // an operator or module made NaN from finite inputs
  nan_from_inf,  // it made NaN from inputs with Inf and without NaN; `parent` is the birth of the
                 // Inf
  inf,           // it made Inf from finite inputs
  literal,       // a non-finite scalar argument put it there (a mask)
  weight,        // a parameter that was bad before the pass
  buffer,        // a buffer that was bad before the pass
  data,          // any other tensor that was bad before the pass: the batch
  memory,        // finite when last written, bad when read, and no operator wrote in between
  opaque,        // computed off the dispatcher: a pybind kernel, a compiled region
  unwritten,  // memory read before it was written: a re-run filled it with NaN, which was read here
  kernel,     // like opaque, by a call that was scanned on both sides; `last_seen`: `allocated` if
              // never-written memory was bad before the call, else `finite`
  user_hook,  // a hook that the user registered on a tensor or a node
  collective,  // came out of a collective
};
[[nodiscard]] constexpr auto names_of(BirthKind) {
  return std::to_array<std::string_view>({"nan", "nan_from_inf", "inf", "literal", "weight",
                                          "buffer", "data", "memory", "opaque", "unwritten",
                                          "kernel", "user_hook", "collective"});
}

/// The result of replaying the recorded operator call in this process (replay/replay.hpp).
enum class ReplayConclusion : std::uint8_t {
  deterministic_overflow,   // bad again; finite in fp64
  deterministic_undefined,  // bad again, in every precision: a property of the mathematics for
                            // these inputs
  deterministic_custom,  // bad again, in every precision, from an operator that is not PyTorch's:
                         // its mathematics or its code
  deterministic_kernel,  // bad again in the recorded dtype and kernel, finite in the same dtype
                         // elsewhere
  varies,  // finite, or different bits from call to call: hardware, race, uninitialised memory
  not_replayed,
};
[[nodiscard]] constexpr auto names_of(ReplayConclusion) {
  return std::to_array<std::string_view>({"deterministic_overflow", "deterministic_undefined",
                                          "deterministic_custom", "deterministic_kernel", "varies",
                                          "not_replayed"});
}

/// The result of re-executing the recorded call of a kernel (replay/kernel_replay.hpp).
enum class KernelConclusion : std::uint8_t {
  not_replayed,      // `problem` says why
  not_bad_again,     // finite in every execution
  varies,            // bad or not, or at other elements, from execution to execution
  leaves_unwritten,  // the bad elements hold the values from before the call
  reads_unwritten,   // memory that the kernel allocates itself
  reads_outside,     // memory outside the elements of its arguments
  writes_outside,    // memory outside the elements of its arguments
  wrong_values,      // bad again; its reference is finite in float64, float32 and its own dtype
  overflows,         // bad again; its reference exceeds the range of its own dtype or of float32
  undefined,         // bad again; its reference is also bad in float64
  given_bad,         // bad again, and an input was bad before the call
  bad_again,         // from finite inputs; no known reference agrees with its finite elements
};
[[nodiscard]] constexpr auto names_of(KernelConclusion) {
  return std::to_array<std::string_view>({"not_replayed", "not_bad_again", "varies",
                                          "leaves_unwritten", "reads_unwritten", "reads_outside",
                                          "writes_outside", "wrong_values", "overflows",
                                          "undefined", "given_bad", "bad_again"});
}

/// The call within a line of source code.
struct Expression {
  int begin = 0, end = 0;              // in CodeLine::text, as UTF-8
  std::string call;                    // the function's last name; of `a / b`, "div"
  std::vector<std::string> arguments;  // their source, in order; of a method, the object first
  friend bool operator==(const Expression&, const Expression&) = default;
};

/// A line of source code, as Python names it.
struct CodeLine {
  std::string file;
  int line = 0;
  std::string function;
  std::string text;  // the line itself, without indentation; "" if it could not be read
  std::optional<Expression> expression{};  // from Python 3.11 on
  friend bool operator==(const CodeLine&, const CodeLine&) = default;
};

/// An argument of the guilty call, a tensor or a number, as it was when the call began.
struct Operand {
  std::string name;            // the schema's, "self"; from the watch "input[0]"
  std::optional<int> element;  // index in an argument that is a list
  std::string dtype;           // "" for a number
  std::vector<std::int64_t> shape;
  std::optional<TensorStats> stats;  // of a tensor whose values can be scanned, integers included
  std::optional<std::int64_t> negatives;  // elements below zero; empty if not counted
  std::optional<std::int64_t> ignored;    // for labels: how many equal the call's ignore_index
  std::optional<double> number;           // for an argument that is a number
  /// The element from which the first bad output element was computed, if the shapes allow to tell.
  std::optional<double> at_first_bad;
  std::optional<bool> requires_grad{};  // of a tensor: computed from parameters
  friend bool operator==(const Operand&, const Operand&) = default;
};

/// The positions of the bad elements in their tensor.
struct BadExtent {
  /// The indices along one dimension at which an element is bad.
  struct Indices {
    std::int64_t first = 0;
    std::int64_t last = 0;
    std::int64_t count = 0;  // number of indices: last - first + 1 if there are no gaps
    friend bool operator==(const Indices&, const Indices&) = default;
  };
  std::vector<Indices> dimensions;  // as many as the tensor has
  /// Every element at these indices is bad: one whole row, all of token 1, the whole tensor.
  /// Otherwise the bad elements are scattered among them.
  bool is_block = false;
  friend bool operator==(const BadExtent&, const BadExtent&) = default;
};

struct KernelReplay {
  KernelConclusion conclusion = KernelConclusion::not_replayed;
  std::string problem;  // what was not executed, and why
  std::string
      output;  // the output that is judged: an argument that the kernel writes, or "output[0]"
  int executions = 0;                 // as recorded
  std::optional<bool> has_same_bits;  // in all of them
  std::int64_t bad = 0;               // elements of `output` that the conclusion is about
  std::vector<std::int64_t> shape;    // of `output`
  std::optional<BadExtent> extent;    // of these elements
  std::string argument;               // of `given_bad`, `writes_outside`: which argument
  /// The float64 reference with which `compared` elements of the output were compared; "" if none
  /// is known, or if it agrees with too few of them.
  std::string reference;
  std::int64_t compared = 0;
  std::int64_t agreeing = 0;
  bool is_reference_finite = false;  // at the bad elements, in every precision
  bool is_compared_scaled = false;   // with inputs scaled to at most 1, not the recorded ones
  friend bool operator==(const KernelReplay&, const KernelReplay&) = default;
};

/// Magnitudes of a parameter of the module in which something overflowed.
struct Magnitude {
  std::string parameter;
  double absmax = 0;  // largest finite magnitude at the overflow
  /// In the steps before, if the weights are scanned in every step (option check_params).
  Maxima before{};
  Maxima gradient_before{};  // of its gradient on this rank
  friend bool operator==(const Magnitude&, const Magnitude&) = default;
};

/// What a bad value reached.
enum class ReachedKind : std::uint8_t {
  loss,         // name: "loss"; one of several losses: "loss[0]", "loss[lm]"
  other_ranks,  // sent to them, by a collective or a pipeline transfer; no name
  parameter,    // the gradient of the parameter `name`
  module,       // from the watch: the module `name`, the last one with a bad value
};
[[nodiscard]] constexpr auto names_of(ReachedKind) {
  return std::to_array<std::string_view>({"loss", "other_ranks", "parameter", "module"});
}

struct Reached {
  ReachedKind kind = ReachedKind::loss;
  std::string name;
  friend bool operator==(const Reached&, const Reached&) = default;
};

/// What the trace knew about memory that was bad when it was read.
enum class LastSeen : std::uint8_t {
  unknown,     // no operator of this pass wrote it
  allocated,   // Birth::writer allocated it, and no operator has written it
  finite,      // finite when Birth::writer, the last operator to write it, did so
  first_pass,  // received in the first pass: the re-run did not communicate
  rewritten,   // written again while the step ran: this is what the step had read
};
[[nodiscard]] constexpr auto names_of(LastSeen) {
  return std::to_array<std::string_view>(
      {"unknown", "allocated", "finite", "first_pass", "rewritten"});
}

struct Birth {
  BirthKind kind = BirthKind::nan;
  /// The bad tensor and its place. phase: forward, loss (a forward operator outside any module) or
  /// backward, params_after for the optimizer's own; module; op ("aten::div.Tensor", "" from the
  /// watch); role "output[0]", "grad_input[1]", "weight". position: when the operator, kernel or
  /// module returned or, if something unseen made the value, when it was first read.
  Sighting sighting;
  bool is_module_inferred =
      false;  // no module was entered: the one whose parameter was last used on this thread
  /// The operator is not PyTorch's own (not aten, prims), so its mathematics is unknown.
  bool is_custom_operator = false;
  /// A hook of a parameter's gradient, after it was added up, or of a bucket of gradients did it.
  bool is_in_hook = false;
  std::string node;             // backward: the autograd node, "DivBackward0"
  std::string forward_op;       // backward: the operator whose derivative it is
  std::string custom_function;  // the custom autograd Function whose own code produced it
  std::optional<int> parent;    // index into the ledger's births
  std::string literal_op;       // nan_from_inf: the operator, a mask's, that wrote the Inf
  /// The user's line that called the operator; for a birth in backward, the line that called the
  /// forward operator. Empty in C++ programs, and from the watch.
  std::optional<CodeLine> code;
  /// The innermost line, if it is in a framework (megatron, transformers) and `code` is not.
  std::optional<CodeLine> framework_code;
  std::vector<Operand> operands;         // in the schema's order; the first kMostOperands
  std::optional<BadExtent> extent;       // of the bad elements; empty if it was not computed
  std::vector<Magnitude> weights;        // for NaN and overflows: the parameters of its module
  std::optional<CodeLine> allocated_at;  // for unwritten memory
  // For values that were bad before an operator read them (weight, buffer, data, memory, opaque,
  // unwritten, collective):
  std::string reader;  // the first operator that read it
  std::string writer;  // the last operator that wrote or allocated it
  LastSeen last_seen = LastSeen::unknown;
  std::string group;  // of a collective: its process group; "" if unnamed
  RankList members;   // the group's global ranks
  /// Of a reduction's result: the largest finite magnitude of this rank's input.
  std::optional<double> largest_sent{};
  std::string inside;  // the enclosing custom function or compiled region, by its frame's name
  std::vector<std::string> stack;  // Python frames, innermost first: "file.py:12 in forward"
  std::vector<Reached> reached;    // the losses, gradients and ranks that make it an origin
  std::string bundle;              // folder inside the run's, "bundles/step3-..."; "" without one
  ReplayConclusion replay = ReplayConclusion::not_replayed;
  std::vector<std::string> replay_lines;  // the replay's evidence as sentences
  /// For values that a kernel made or left unwritten: the number of its call in the pass, from 0.
  std::optional<std::int64_t> kernel_call;
  std::optional<KernelReplay> kernel_replay;

  friend bool operator==(const Birth&, const Birth&) = default;
};

/// Fills in the weights of overflows: how large they and their gradients were in the steps before
/// `iteration`.
void add_maxima_before(std::vector<Birth>& births, const History& gradients, const History& weights,
                       std::int64_t iteration);

/// A call's further operands are in its bundle.
inline constexpr std::size_t kMostOperands = 32;

}  // namespace nanlocator::inline record_room
