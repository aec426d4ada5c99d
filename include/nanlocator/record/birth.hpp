// A place where something bad came into being on one rank, as the trace (operators) or the watch
// (modules) tells it. Ledgers carry births; `locate` makes origins of them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "nanlocator/record/sighting.hpp"

namespace nanlocator {

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
  user_hook,     // a hook that the user registered on a tensor or a node
  collective,    // came out of a collective
};
[[nodiscard]] std::string_view name_of(BirthKind kind) noexcept;
[[nodiscard]] std::optional<BirthKind> birth_kind_from_name(std::string_view name) noexcept;

/// What replaying the recorded operator call in this process said (replay/replay.hpp).
enum class ReplayConclusion : std::uint8_t {
  deterministic_overflow,   // bad again; finite in fp64
  deterministic_undefined,  // bad again, in every precision: the mathematics of these inputs
  deterministic_kernel,     // bad again in the recorded dtype and kernel, finite in the same dtype
                            // elsewhere
  varies,  // clean, or other bits from call to call: hardware, race, uninitialised memory
  not_replayed,
};
[[nodiscard]] std::string_view name_of(ReplayConclusion conclusion) noexcept;
[[nodiscard]] std::optional<ReplayConclusion> replay_conclusion_from_name(
    std::string_view name) noexcept;

/// In Birth::reached: it was handed to other ranks, by a collective or a pipeline transfer.
inline constexpr std::string_view kOtherRanks = "other ranks";

struct Birth {
  BirthKind kind = BirthKind::nan;
  /// The bad tensor at its place. phase: forward, loss (a forward operator outside any module) or
  /// backward, params_after for the optimizer's own; module, op ("aten::div.Tensor", "" from the
  /// watch); role "output[0]", "grad_input[1]", "weight".
  Sighting sighting;
  bool is_module_inferred = false;  // no module was entered: it is the one whose parameter was used
                                    // last on this thread
  std::string node;                 // backward: the autograd node, "DivBackward0"
  std::string forward_op;           // backward: the operator whose derivative it is
  std::optional<int> parent;        // index into the ledger's births
  /// Input elements at the first bad output element, by the schema's names, where shapes map there.
  std::vector<std::pair<std::string, double>> values;
  std::vector<std::string> inputs;  // one line each: "self: float32 [4, 8], finite, |x| <= 3.2"
  std::vector<std::string> stack;   // Python frames, innermost first: "file.py:12 in forward"
  /// What made it an origin: "loss", kOtherRanks, or names of parameters whose gradients it made
  /// bad; from the watch "module a.b", the last one that met something bad.
  std::vector<std::string> reached;
  std::string bundle;  // folder below the run's, "bundles/step3-..."; "" without one
  ReplayConclusion replay = ReplayConclusion::not_replayed;
  std::vector<std::string> replay_lines;  // its evidence, sentences

  friend bool operator==(const Birth&, const Birth&) = default;
};

}  // namespace nanlocator
