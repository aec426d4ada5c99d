// A place where something bad came into being on one rank, as the trace (operators) or the watch
// (modules) reports it. Ledgers carry births; `locate` makes origins of them.
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
  nan,           // an operator or module made NaN of finite inputs
  nan_from_inf,  // it made NaN of inputs with Inf and without NaN; `parent` is where the Inf is
                 // from
  inf,           // it made Inf of finite inputs
  literal,       // a non-finite scalar argument put it there (a mask)
  weight,        // a parameter that was bad before the pass
  buffer,        // a buffer that was bad before the pass
  data,          // any other tensor that was bad before the pass: the batch
  memory,        // finite when last written, bad when read, and no operator wrote in between
  opaque,        // computed off the dispatcher: a pybind kernel, a compiled region
  unwritten,     // memory that nobody had written: a re-run filled it with NaN, which was read here
  kernel,  // the same as opaque, by a call that was scanned on both sides; `last_seen`: allocated
           // where memory that nobody had written was bad before it, else finite
  user_hook,   // a hook that the user registered on a tensor or a node
  collective,  // came out of a collective
};
[[nodiscard]] constexpr auto names_of(BirthKind) {
  return std::to_array<std::string_view>({"nan", "nan_from_inf", "inf", "literal", "weight",
                                          "buffer", "data", "memory", "opaque", "unwritten",
                                          "kernel", "user_hook", "collective"});
}

/// What replaying the recorded operator call in this process said (replay/replay.hpp).
enum class ReplayConclusion : std::uint8_t {
  deterministic_overflow,   // bad again; finite in fp64
  deterministic_undefined,  // bad again, in every precision: the mathematics of these inputs
  deterministic_custom,     // bad again, in every precision, of an operator that is not PyTorch's:
                            // its mathematics or its code
  deterministic_kernel,     // bad again in the recorded dtype and kernel, finite in the same dtype
                            // elsewhere
  varies,  // clean, or other bits from call to call: hardware, race, uninitialised memory
  not_replayed,
};
[[nodiscard]] constexpr auto names_of(ReplayConclusion) {
  return std::to_array<std::string_view>({"deterministic_overflow", "deterministic_undefined",
                                          "deterministic_custom", "deterministic_kernel", "varies",
                                          "not_replayed"});
}

/// What executing the recorded call of a kernel again said (replay/kernel_replay.hpp).
enum class KernelConclusion : std::uint8_t {
  not_replayed,      // `problem` says why
  not_bad_again,     // finite in every execution
  varies,            // bad, or not, or elsewhere, from execution to execution
  leaves_unwritten,  // the bad elements hold what was there before the call
  reads_unwritten,   // memory that the kernel allocates itself
  reads_outside,     // memory beside the elements of its arguments
  writes_outside,    // the same
  wrong_values,      // bad again; its reference is finite in float64, float32 and the own dtype
  overflows,         // bad again; its reference exceeds the range of the own dtype or of float32
  undefined,         // bad again; its reference is bad in float64, too
  given_bad,         // bad again, and something that it read was bad before it
  bad_again,         // of finite inputs; no reference is known that its finite elements agree with
};
[[nodiscard]] constexpr auto names_of(KernelConclusion) {
  return std::to_array<std::string_view>({"not_replayed", "not_bad_again", "varies",
                                          "leaves_unwritten", "reads_unwritten", "reads_outside",
                                          "writes_outside", "wrong_values", "overflows",
                                          "undefined", "given_bad", "bad_again"});
}

/// A line of source code, as Python names it.
struct CodeLine {
  std::string file;
  int line = 0;
  std::string function;
  std::string text;  // the line itself, without its indentation; "" where it could not be read
  friend bool operator==(const CodeLine&, const CodeLine&) = default;
};

/// What went into the guilty call: a tensor or a number, as it was when the call began.
struct Operand {
  std::string name;            // the schema's, "self"; from the watch "input[0]"
  std::optional<int> element;  // which one of an argument that is a list
  std::string dtype;           // "" of a number
  std::vector<std::int64_t> shape;
  std::optional<TensorStats> stats;       // of a tensor whose values can be scanned, integers too
  std::optional<std::int64_t> negatives;  // elements below zero; empty where not counted
  std::optional<std::int64_t> ignored;    // of labels: how many equal the call's ignore_index
  std::optional<double> number;           // of an argument that is a number
  /// The element that the first bad output element was computed from, where shapes map there.
  std::optional<double> at_first_bad;
  friend bool operator==(const Operand&, const Operand&) = default;
};

/// How the bad elements lie in their tensor.
struct BadExtent {
  /// The indices along one dimension at which something is bad.
  struct Indices {
    std::int64_t first = 0;
    std::int64_t last = 0;
    std::int64_t count = 0;  // of them: last - first + 1 where none is left out
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
  std::string problem;                // what was not executed, and why
  std::string output;                 // that is judged: an argument that it writes, "output[0]"
  int executions = 0;                 // as recorded
  std::optional<bool> has_same_bits;  // in all of them
  std::int64_t bad = 0;               // elements of `output` that the conclusion is about
  std::vector<std::int64_t> shape;    // of `output`
  std::optional<BadExtent> extent;    // of these elements
  std::string argument;               // of `given_bad`, `writes_outside`: which one
  /// The float64 reference that `compared` elements of the output were held against; "" where none
  /// is known, or it agrees with too few of them.
  std::string reference;
  std::int64_t compared = 0;
  std::int64_t agreeing = 0;
  bool is_reference_finite = false;  // at the bad elements, in every precision
  bool is_compared_scaled = false;   // with inputs scaled to at most 1, not the recorded ones
  friend bool operator==(const KernelReplay&, const KernelReplay&) = default;
};

/// How large a parameter of the module is in which something overflowed.
struct Magnitude {
  std::string parameter;
  double absmax = 0;  // largest finite magnitude when it overflowed
  /// The same in the steps before, where the weights are scanned in each (option check_params).
  Maxima before{};
  Maxima gradient_before{};  // of its gradient on this rank
  friend bool operator==(const Magnitude&, const Magnitude&) = default;
};

/// What a birth made bad.
enum class ReachedKind : std::uint8_t {
  loss,         // name: "loss", of several "loss[0]", "loss[lm]"
  other_ranks,  // it was sent to them, by a collective or a pipeline transfer; no name
  parameter,    // the gradient of the parameter `name`
  module,       // from the watch: the module `name`, the last one that met something bad
};
[[nodiscard]] constexpr auto names_of(ReachedKind) {
  return std::to_array<std::string_view>({"loss", "other_ranks", "parameter", "module"});
}

struct Reached {
  ReachedKind kind = ReachedKind::loss;
  std::string name;
  friend bool operator==(const Reached&, const Reached&) = default;
};

/// What the trace knew of memory that was bad when it was read.
enum class LastSeen : std::uint8_t {
  unknown,    // no operator of this pass wrote it
  allocated,  // Birth::writer allocated it, and no operator has written it
  finite,     // finite when Birth::writer wrote it, the last operator that did
};
[[nodiscard]] constexpr auto names_of(LastSeen) {
  return std::to_array<std::string_view>({"unknown", "allocated", "finite"});
}

struct Birth {
  BirthKind kind = BirthKind::nan;
  /// The bad tensor at its place. phase: forward, loss (a forward operator outside any module) or
  /// backward, params_after for the optimizer's own; module, op ("aten::div.Tensor", "" from the
  /// watch); role "output[0]", "grad_input[1]", "weight".
  Sighting sighting;
  bool is_module_inferred = false;  // no module was entered: it is the one whose parameter was used
                                    // last on this thread
  /// The operator is not PyTorch's own (not aten, prims): what its mathematics is, nobody here
  /// knows.
  bool is_custom_operator = false;
  std::string node;             // backward: the autograd node, "DivBackward0"
  std::string forward_op;       // backward: the operator whose derivative it is
  std::string custom_function;  // a custom autograd Function in whose own code it was born
  std::optional<int> parent;    // index into the ledger's births
  std::string literal_op;       // nan_from_inf: the operator that wrote the Inf, a mask's
  /// The user's line that called the operator; for a birth in backward the line that called the
  /// forward operator. Empty in C++ programs, and from the watch.
  std::optional<CodeLine> code;
  /// The innermost line, where that is in a framework (megatron, transformers) and `code` is not.
  std::optional<CodeLine> framework_code;
  std::vector<Operand> operands;         // in the schema's order; the first kMostOperands
  std::optional<BadExtent> extent;       // of the bad elements; empty where it was not computed
  std::vector<Magnitude> weights;        // of NaN and overflows: the parameters of its module
  std::optional<CodeLine> allocated_at;  // of unwritten memory
  // Of what was bad before an operator read it (weight, buffer, data, memory, opaque, unwritten,
  // collective):
  std::string reader;  // the operator that read it first
  std::string writer;  // the operator that wrote or allocated it last
  LastSeen last_seen = LastSeen::unknown;
  std::string group;   // of a collective: its process group; "" where nobody has named it
  RankList members;    // of that, global ranks
  std::string inside;  // the custom function or compiled region around it, by its frame's name
  std::vector<std::string> stack;  // Python frames, innermost first: "file.py:12 in forward"
  std::vector<Reached> reached;    // what made it an origin
  std::string bundle;              // folder below the run's, "bundles/step3-..."; "" without one
  ReplayConclusion replay = ReplayConclusion::not_replayed;
  std::vector<std::string> replay_lines;  // its evidence, sentences
  /// Of what a kernel made or left unwritten: which of its calls in the pass it was, from 0.
  std::optional<std::int64_t> kernel_call;
  std::optional<KernelReplay> kernel_replay;

  friend bool operator==(const Birth&, const Birth&) = default;
};

/// To the weights of overflows: how large they and their gradients were in the steps before
/// `iteration`.
void add_maxima_before(std::vector<Birth>& births, const History& gradients, const History& weights,
                       std::int64_t iteration);

/// Of a call with more, the rest is in the bundle.
inline constexpr std::size_t kMostOperands = 32;

}  // namespace nanlocator::inline record_room
