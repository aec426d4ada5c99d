// A bundle: a folder from which a guilty operator or kernel call, and the module call around it,
// can be executed again, by this project's replay or by anyone with Python's safetensors.
//
//     bundles/step12-backward-rank3-decoder.layers.3.q_layernorm/
//         bundle.json            what was called, with which arguments, where, in which settings
//         tensors.safetensors    every storage range that a tensor of bundle.json uses, once
//
// Both files are private (0600): they hold weights and data. docs/formats.md has every key.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "nanlocator/map/rank_coordinates.hpp"
#include "nanlocator/record/birth.hpp"
#include "nanlocator/record/safetensors.hpp"

namespace nanlocator::inline record_room {

/// A tensor with its memory layout: a strided view of one stored range.
struct BundleTensor {
  std::string storage;  // an entry of tensors.safetensors
  std::string dtype;    // Torch's spelling: "float32", "int64", "bool", "complex64"
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;  // in elements of `dtype`
  std::int64_t offset =
      0;               // index of the first element, in elements of `dtype` from the range's start
  std::string device;  // original device: "cpu", "cuda:3"
  bool is_wrapped_number = false;  // a Python number: takes no part in type promotion
  bool is_conjugate = false;       // lazily conjugated (complex)
  bool is_negative = false;        // lazily negated
  bool requires_grad = false;
  friend bool operator==(const BundleTensor&, const BundleTensor&) = default;
};

enum class BundleValueKind : std::uint8_t {
  none,
  undefined_tensor,
  tensor,
  boolean,
  integer,
  real,     // stored as the 16 hex digits of its bits, so that NaN payloads and -0 survive
  complex,  // `real` and `imaginary`
  text,
  device,
  generator,  // a Generator argument; its state is in the call's generator_states
  list,       // also tuples of an operator's schema
  tuple,
  dictionary,   // keys in `names`
  object,       // a dataclass or ModelOutput: class in `text`, fields as a dictionary
  unsupported,  // `text` describes it; the call cannot be replayed
};

/// A value in an argument list: a tree.
struct BundleValue {
  BundleValueKind kind = BundleValueKind::none;
  BundleTensor tensor;
  bool boolean = false;
  std::int64_t integer = 0;
  double real = 0;
  double imaginary = 0;
  std::string text;
  std::vector<std::string> names;
  std::vector<BundleValue> items;
  friend bool operator==(const BundleValue&, const BundleValue&);  // compares reals by their bits
};

/// The module or library that registered a custom operator in the run's process. Importing or
/// loading it runs its code; reading a bundle does neither.
struct BundleRegistration {
  /// "my_ops". "__main__": the program itself. For a shared library that is not a Python module,
  /// its package, or "".
  std::string module;
  std::string
      file;  // the module's or library's file on the original machine; absolute, or "" without one
  std::string source;  // file in the bundle that registers the operator on its own; "" without one
  friend bool operator==(const BundleRegistration&, const BundleRegistration&) = default;
};

/// An operator call as the dispatcher saw it.
struct BundleOperatorCall {
  std::string op;                      // "aten::div.Tensor": name, '.', overload if there is one
  std::string schema;                  // as the dispatcher prints it, to detect another version
  std::vector<BundleValue> arguments;  // in the schema's order, values before the call
  std::vector<BundleValue> outputs;    // as seen after the call
  /// State of the default generator before the call, per device ("cpu", "cuda:0"), for operators
  /// that draw random numbers: tensors of bytes.
  std::map<std::string, BundleTensor> generator_states;
  /// In loading order; empty for Torch's own operators.
  std::vector<BundleRegistration> registered_by;
  friend bool operator==(const BundleOperatorCall&, const BundleOperatorCall&) = default;
};

/// The call of the enclosing module. Parts that were not seen (gradients in a forward fault) are
/// empty.
struct BundleModuleCall {
  std::string name;
  std::string class_name;  // "transformers.models.gpt2.modeling_gpt2.GPT2Attention"
  bool is_training = true;
  std::vector<BundleValue> arguments;  // positional
  std::vector<std::pair<std::string, BundleValue>> keywords;
  BundleValue outputs;
  std::vector<std::pair<std::string, BundleTensor>>
      weights;  // parameters and buffers, by the module's own names
  std::vector<BundleValue> grad_outputs;
  std::vector<BundleValue> grad_inputs;
  std::string pickle;  // file in the bundle that Python can unpickle to the module without its
                       // tensors; "" if pickling failed
  std::string pickle_problem;  // why it failed
  friend bool operator==(const BundleModuleCall&, const BundleModuleCall&) = default;
};

/// Contents of a kernel argument's storage outside the argument's own elements.
enum class Beside : std::uint8_t {
  nothing,  // the argument uses all of its storage
  finite,   // or cannot be scanned: other parts of packed tensors
  bad,      // NaN or Inf
};
[[nodiscard]] constexpr auto names_of(Beside) {
  return std::to_array<std::string_view>({"nothing", "finite", "bad"});
}

/// Prefixes of the environment variables by which kernel libraries choose what they execute. A
/// bundle contains no others.
inline constexpr auto kKernelVariables = std::to_array<std::string_view>(
    {"TRITON_", "TORCHINDUCTOR_", "NVTE_", "FLASH_ATTENTION_", "CUBLAS_WORKSPACE_CONFIG"});

/// A call of a kernel that the dispatcher does not see. Only Python can execute it: it imports
/// `module`, which runs its code, and calls `entry`. Reading a bundle does neither.
struct BundleKernelCall {
  std::string name;      // as in births: "flash_attn_2_cuda::fwd", "triton::scale_kernel"
  std::string launcher;  // "function", "triton"
  std::string module;    // "flash_attn_2_cuda"; "" if it cannot be imported
  std::string entry;     // in the module: "fwd"
  std::string file;      // the file from which the module was loaded, on the original machine
  std::string source;    // file in the bundle with the kernel's source; "" without one
  std::string why_not_replayed;        // of a call that cannot be executed again; else ""
  std::vector<std::string> names;      // of the positional arguments, as far as known
  std::vector<BundleValue> arguments;  // positional, before the call
  std::vector<std::pair<std::string, BundleValue>> keywords;
  std::vector<BundleValue> launch;  // for Triton: the grid
  /// Every tensor among the arguments, in order, when the call had ended.
  std::vector<BundleValue> arguments_after;
  std::vector<Beside> beside;                      // for the same tensors, before the call
  std::vector<BundleValue> results;                // the returned tensors
  std::map<std::string, std::string> environment;  // of kKernelVariables
  friend bool operator==(const BundleKernelCall&, const BundleKernelCall&) = default;
};

struct Bundle {
  std::string run_id;
  RankCoordinates coordinates;
  Birth birth;  // without bundle, replay and reached
  std::optional<BundleOperatorCall> operator_call;
  std::optional<BundleModuleCall> module_call;
  std::optional<BundleKernelCall> kernel_call;
  /// "autocast": "cpu bfloat16", "deterministic_algorithms": "warn", "threads": "2", ...;
  /// docs/replay.md lists them.
  std::map<std::string, std::string> settings;
  std::map<std::string, std::string>
      versions;  // "torch": "2.11.0", "cuda", "nanlocator", "cpu", ...
  std::vector<std::string> cpp_stack;
  std::vector<std::string> notes;  // what could not be stored
  friend bool operator==(const Bundle&, const Bundle&) = default;
};

/// The bytes for tensors.safetensors, and further files (the pickle, sources) by name.
struct BundleContents {
  std::vector<SafetensorsEntry> storages;
  std::vector<std::pair<std::string, std::string>> files;
};

/// An opened bundle: bundle.json parsed and checked against the tensors (every view is within its
/// storage, every name is a plain file name).
class OpenBundle {
 public:
  /// `path`: the folder, or the bundle.json in it. Throws IoError, FormatError (file and field).
  explicit OpenBundle(const std::filesystem::path& path, FileAccess access = FileAccess::map);

  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }
  [[nodiscard]] const Bundle& bundle() const noexcept { return bundle_; }
  [[nodiscard]] const SafetensorsFile& tensors() const noexcept { return tensors_; }
  /// Compares every checksum with the bytes, which reads all of them. Returns one sentence per
  /// mismatch; empty if all agree.
  [[nodiscard]] std::vector<std::string> verify() const;

 private:
  std::filesystem::path path_;
  SafetensorsFile tensors_;
  Bundle bundle_;
  // CRC-32 (zlib's) by name.
  std::map<std::string, std::uint32_t> storage_checksums_;
  std::map<std::string, std::uint32_t> file_checksums_;
};

struct BundleBudget {
  std::uint64_t bytes = std::uint64_t{4} << 30;
  int count = 16;
};

/// A bundle with a folder reserved for it, not yet on disk.
struct PreparedBundle {
  std::string folder;  // relative to the run's ("bundles/step3-...")
  std::string json;
  BundleContents contents;
};

/// The bundles of one rank's run. The first origins win: a bundle that exceeds the budget is
/// dropped and named. One thread at a time.
class BundleStore {
 public:
  /// Creates `run_dir`/bundles with the first bundle.
  BundleStore(std::filesystem::path run_dir, BundleBudget budget);

  /// Chooses the bundle's folder and charges its bytes to the budget; nullopt if it was dropped.
  /// Reads the disk only to find a free name. Throws UsageError for contents that do not belong to
  /// the bundle. The bytes behind `contents` must stay unchanged until they are written.
  [[nodiscard]] std::optional<PreparedBundle> prepare(const Bundle& bundle,
                                                      BundleContents contents);
  /// Writes the folder under a temporary name, fsyncs and renames it, so that it appears whole or
  /// not at all. Throws IoError (a full disk), leaving no partial folder, and refunds the budget.
  void write(const PreparedBundle& prepared);
  /// Both at once. Returns the folder, "" if it was dropped.
  std::string write(const Bundle& bundle, const BundleContents& contents);

  /// Bytes of bundles that were prepared and not lost to a failed write.
  [[nodiscard]] std::uint64_t bytes_written() const noexcept;
  /// A sentence for each dropped bundle, with its size and the budget that would keep it.
  [[nodiscard]] const std::vector<std::string>& dropped() const noexcept;

 private:
  std::filesystem::path run_dir_;
  BundleBudget budget_;
  std::uint64_t bytes_ = 0;
  int count_ = 0;
  std::set<std::string> prepared_;  // folders
  std::vector<std::string> dropped_;
};

}  // namespace nanlocator::inline record_room
