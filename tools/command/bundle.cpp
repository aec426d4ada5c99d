// `nanlocator bundle ls|show|verify|diff`: folders from which faulty calls can be replayed.
#include <algorithm>
#include <filesystem>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "bundle_values.hpp"
#include "command.hpp"
#include "console.hpp"
#include "files/printable.hpp"
#include "files/text.hpp"
#include "nanlocator/error.hpp"
#include "nanlocator/files/atomic_file.hpp"
#include "nanlocator/map/map_query.hpp"
#include "nanlocator/record/bundle.hpp"
#include "record/bundle_json.hpp"
#include "record/sighting_json.hpp"

namespace nanlocator::command {
namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

constexpr int kBundleOutputVersion = 1;

/// The size of the files in a bundle, without unreadable ones.
std::uint64_t bytes_of_folder(const fs::path& folder) {
  std::uint64_t bytes = 0;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const auto size = entry.is_regular_file(error) ? entry.file_size(error) : 0;
    if (!error) bytes += size;
  }
  return bytes;
}

std::string operator_of(const Bundle& bundle) {
  if (bundle.operator_call) return bundle.operator_call->op;
  return bundle.kernel_call ? bundle.kernel_call->name : bundle.birth.sighting.op;
}

std::string module_of(const Bundle& bundle) {
  const std::string& module = bundle.birth.sighting.module;
  return module.empty() && bundle.module_call ? bundle.module_call->name : module;
}

std::string replay_line(const fs::path& bundle) {
  return std::string("nanlocator replay ").append(shell_word(bundle.string()));
}

/// False for a call that was kept by hand (`detect_overflow`, `ModuleCall.write`): the origin of
/// its values was not traced.
bool has_birth(const Bundle& bundle) {
  return !bundle.birth.sighting.role.text().empty();
}
bool can_be_replayed(const Bundle& bundle) {
  const bool has_kernel = bundle.kernel_call && bundle.kernel_call->why_not_replayed.empty();
  return bundle.operator_call || has_kernel ||
         (bundle.module_call && !bundle.module_call->pickle.empty());
}

// --- ls -----------------------------------------------------------------------------------------

struct FoundBundles {
  std::vector<fs::path> folders;
  std::vector<std::string> notes;
};

/// Folders with a bundle.json in `folder` and up to three levels below: a run folder contains
/// a0/bundles/step12-...
void find_bundles(const fs::path& folder, int levels, FoundBundles& found) {
  if (fs::exists(folder / kBundleFile)) {
    found.folders.push_back(folder);
    return;
  }
  if (levels == 0) return;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    std::error_code unreadable;
    if (!entry->is_directory(unreadable)) continue;
    const std::string name = entry->path().filename().string();
    if (name.starts_with(".partial-")) {
      found.notes.push_back(entry->path().string() +
                            ": left behind by a process that was killed while writing; "
                            "it may be removed");
    }
    if (!name.starts_with('.')) find_bundles(entry->path(), levels - 1, found);
  }
  if (error) found.notes.push_back(folder.string() + ": " + error.message());
}

Json listed_to_json(const OpenBundle& open) {
  const Bundle& bundle = open.bundle();
  const Sighting& sighting = bundle.birth.sighting;
  return {{"path", open.path().string()},       {"iteration", sighting.iteration},
          {"phase", name_of(sighting.phase)},   {"rank", bundle.coordinates.rank},
          {"kind", name_of(bundle.birth.kind)}, {"module", module_of(bundle)},
          {"operator", operator_of(bundle)},    {"bytes", bytes_of_folder(open.path())}};
}

int list(const Arguments& given) {
  const std::string directory = given.text("DIR");
  std::error_code error;
  if (!fs::is_directory(directory, error)) {
    throw IoError("there is no folder " + directory + "; give a run's folder");
  }
  FoundBundles found;
  find_bundles(directory, 3, found);
  std::ranges::sort(found.folders);
  std::vector<OpenBundle> opened;
  bool is_clean = true;
  for (const auto& folder : found.folders) {
    try {
      opened.emplace_back(folder);
    } catch (const Error& unreadable) {
      found.notes.emplace_back(unreadable.what());
      is_clean = false;
    }
  }
  std::ranges::stable_sort(opened, {}, [](const OpenBundle& open) {
    return std::pair(open.bundle().birth.sighting.iteration, open.bundle().coordinates.rank);
  });

  if (given.has("--json")) {
    Json bundles = Json::array();
    for (const auto& open : opened) bundles.push_back(listed_to_json(open));
    print_json({{"version", kBundleOutputVersion},
                {"directory", directory},
                {"bundles", std::move(bundles)},
                {"notes", found.notes}});
    return is_clean ? kClean : kFindings;
  }
  print_notes(found.notes);
  if (opened.empty()) {
    std::cout << "no readable bundle in " << printable(directory) << "\n";
    return is_clean ? kClean : kFindings;
  }
  Table table({{"step", Alignment::right},
               {"phase"},
               {"rank", Alignment::right},
               {"kind"},
               {"operator"},
               {"module"},
               {"size", Alignment::right},
               {"bundle"}},
              7);
  for (const auto& open : opened) {
    const Bundle& bundle = open.bundle();
    const Sighting& sighting = bundle.birth.sighting;
    table.add_row({std::to_string(sighting.iteration), std::string(name_of(sighting.phase)),
                   std::to_string(bundle.coordinates.rank),
                   has_birth(bundle) ? std::string(name_of(bundle.birth.kind)) : "",
                   operator_of(bundle), module_of(bundle),
                   size_text(static_cast<double>(bytes_of_folder(open.path()))),
                   open.path().string()});
  }
  table.print(std::cout);
  return is_clean ? kClean : kFindings;
}

// --- show ---------------------------------------------------------------------------------------

void print_values(const OpenBundle& open, const std::vector<NamedValue>& values) {
  Table table({{"value"},
               {"dtype"},
               {"shape"},
               {"strides"},
               {"NaN", Alignment::right},
               {"Inf", Alignment::right},
               {"first bad"},
               {"largest |x|", Alignment::right}},
              1);
  for (const auto& value : values) {
    if (value.tensor == nullptr) {
      table.add_row({value.name, value.text, "", "", "", "", "", ""});
      continue;
    }
    const BundleTensor& tensor = *value.tensor;
    std::string dtype = tensor.dtype;
    if (tensor.device != "cpu") dtype += " " + tensor.device;
    std::vector<std::string> row = {value.name, dtype, describe_shape(tensor.sizes),
                                    describe_shape(tensor.strides)};
    if (const auto stats = scan(open, tensor)) {
      row.push_back(std::to_string(stats->nan));
      row.push_back(std::to_string(stats->pos_inf + stats->neg_inf));
      row.push_back(stats->first_bad < 0
                        ? ""
                        : describe_shape(unravel_index(stats->first_bad, tensor.sizes)));
      row.push_back(stats->has_finite() ? number_text(stats->absmax) : "");
    } else {
      row.insert(row.end(), 4, "");
    }
    table.add_row(row);
  }
  table.print(std::cout);
}

void print_lines(const std::string& title, const std::vector<std::string>& lines) {
  if (lines.empty()) return;
  std::cout << '\n' << bold(title) << '\n';
  for (const auto& line : lines) std::cout << "  " << printable(line) << '\n';
}

void print_pairs(const std::string& title, const std::map<std::string, std::string>& pairs) {
  std::vector<std::string> lines;
  for (const auto& [name, value] : pairs) lines.push_back(name + ": " + value);
  print_lines(title, lines);
}

std::string birth_text(const Birth& birth) {
  const Sighting& sighting = birth.sighting;
  std::string text = std::string(name_of(birth.kind)) + " in " +
                     std::string(name_of(sighting.phase)) + " of step " +
                     std::to_string(sighting.iteration);
  if (sighting.microbatch) text += ", microbatch " + std::to_string(*sighting.microbatch);
  text += ": " + sighting.role.text() + " " + sighting.dtype + " " +
          describe_shape(sighting.shape) + ", " + std::to_string(sighting.stats.nan) + " NaN, " +
          std::to_string(sighting.stats.pos_inf + sighting.stats.neg_inf) + " Inf";
  if (sighting.stats.first_bad >= 0) {
    text += ", first at " + describe_shape(unravel_index(sighting.stats.first_bad, sighting.shape));
  }
  return text;
}

/// For a backward operator, its forward operator.
std::string origin_of_operator(const Birth& birth) {
  std::string text;
  if (!birth.node.empty()) text += " in " + birth.node;
  if (!birth.forward_op.empty()) text += ", the derivative of " + birth.forward_op;
  return text;
}

void print_bundle(const OpenBundle& open) {
  const Bundle& bundle = open.bundle();
  std::cout << bold(printable(open.path().string())) << '\n'
            << printable(bundle.coordinates.describe());
  if (!bundle.run_id.empty()) std::cout << ", run " << printable(bundle.run_id);
  std::cout << '\n';
  if (has_birth(bundle)) std::cout << printable(birth_text(bundle.birth)) << '\n';
  if (const std::string module = module_of(bundle); !module.empty()) {
    std::cout << "module " << printable(module)
              << (bundle.birth.is_module_inferred ? " (inferred from its parameters)" : "") << '\n';
  }
  if (bundle.operator_call) {
    std::cout << "\noperator " << bold(printable(bundle.operator_call->op))
              << printable(origin_of_operator(bundle.birth)) << '\n'
              << printable(bundle.operator_call->schema) << '\n';
    for (const auto& [module, file, source] : bundle.operator_call->registered_by) {
      const std::string separator = module.empty() || file.empty() ? "" : ", ";
      std::cout << "  registered by " << printable(module + separator + file) << '\n';
    }
    print_values(open, values_of(*bundle.operator_call));
  }
  if (bundle.kernel_call) {
    const auto& call = *bundle.kernel_call;
    std::cout << "\nkernel " << bold(printable(call.name)) << ", " << printable(call.entry)
              << " of " << printable(call.module) << '\n';
    if (!call.file.empty()) std::cout << "  " << printable(call.file) << '\n';
    print_values(open, values_of(call));
    if (!call.why_not_replayed.empty()) {
      std::cout << "  it cannot be executed again: " << printable(call.why_not_replayed) << '\n';
    }
  }
  if (bundle.module_call) {
    const auto& call = *bundle.module_call;
    std::cout << "\nmodule call " << bold(printable(call.name)) << ", a "
              << printable(call.class_name) << (call.is_training ? ", training" : ", evaluating")
              << '\n';
    print_values(open, values_of(call));
    if (!call.pickle_problem.empty()) {
      std::cout << "  the module itself was not kept: " << printable(call.pickle_problem) << '\n';
    }
  }
  print_pairs("settings", bundle.settings);
  print_pairs("versions", bundle.versions);
  print_lines("Python stack", bundle.birth.stack);
  print_lines("C++ stack", bundle.cpp_stack);
  print_lines("notes", bundle.notes);
  if (can_be_replayed(bundle)) print_lines("run it again", {replay_line(open.path())});
}

Json values_to_json(const OpenBundle& open, const std::vector<NamedValue>& values) {
  Json out = Json::array();
  for (const auto& value : values) {
    Json json = {{"name", value.name}};
    if (value.tensor == nullptr) {
      json["value"] = value.text;
    } else {
      const auto stats = scan(open, *value.tensor);
      json["dtype"] = value.tensor->dtype;
      json["shape"] = value.tensor->sizes;
      json["strides"] = value.tensor->strides;
      json["device"] = value.tensor->device;
      json["stats"] = value_to_json(stats);
    }
    out.push_back(std::move(json));
  }
  return out;
}

int show(const Arguments& given) {
  const OpenBundle open(given.text("BUNDLE"));
  if (!given.has("--json")) {
    print_bundle(open);
    return kClean;
  }
  const Bundle& bundle = open.bundle();
  print_json(
      {{"version", kBundleOutputVersion},
       {"path", open.path().string()},
       {"bundle", Json::parse(read_file(open.path() / kBundleFile))},
       {"operator_values",
        bundle.operator_call ? values_to_json(open, values_of(*bundle.operator_call)) : Json()},
       {"kernel_values",
        bundle.kernel_call ? values_to_json(open, values_of(*bundle.kernel_call)) : Json()},
       {"module_values",
        bundle.module_call ? values_to_json(open, values_of(*bundle.module_call)) : Json()},
       {"replay", replay_line(open.path())}});
  return kClean;
}

// --- verify -------------------------------------------------------------------------------------

/// What is wrong with the bundle, as sentences. Only a missing path is wrong use.
std::vector<std::string> problems_of(const std::string& path) {
  if (std::error_code error; !fs::exists(path, error)) {
    throw IoError("there is no bundle " + path);
  }
  try {
    return OpenBundle(path).verify();
  } catch (const Error& error) {
    return {error.what()};
  }
}

int verify(const Arguments& given) {
  const bool is_json = given.has("--json");
  Json results = Json::array();
  bool is_clean = true;
  for (const auto& path : given.texts("BUNDLE")) {
    const auto problems = problems_of(path);
    is_clean = is_clean && problems.empty();
    if (is_json) {
      results.push_back({{"path", path}, {"ok", problems.empty()}, {"problems", problems}});
    } else if (problems.empty()) {
      std::cout << printable(path) << ": intact\n";
    } else {
      for (const auto& problem : problems) std::cout << printable(problem) << '\n';
    }
  }
  if (is_json) print_json({{"version", kBundleOutputVersion}, {"bundles", std::move(results)}});
  return is_clean ? kClean : kFindings;
}

// --- diff ---------------------------------------------------------------------------------------

/// A difference: a setting, a version, an argument. The text of each side; "" if a side lacks it.
struct BundleDifference {
  std::string what;
  std::string left;
  std::string right;
  std::optional<ElementDifference> elements;  // for tensors of the same dtype and shape
};

void compare_texts(const std::string& what, const std::string& left, const std::string& right,
                   std::vector<BundleDifference>& out) {
  if (left != right) out.push_back({what, left, right, {}});
}

void compare_pairs(const std::string& what, const std::map<std::string, std::string>& left,
                   const std::map<std::string, std::string>& right,
                   std::vector<BundleDifference>& out) {
  std::set<std::string> names;
  for (const auto* side : {&left, &right}) {
    for (const auto& [name, value] : *side) names.insert(name);
  }
  const auto value_in = [](const auto& side, const std::string& name) {
    const auto found = side.find(name);
    return found == side.end() ? std::string() : found->second;
  };
  for (const auto& name : names) {
    compare_texts(what + " " + name, value_in(left, name), value_in(right, name), out);
  }
}

std::string summary_of(const NamedValue& value) {
  if (value.tensor == nullptr) return value.text;
  std::string text = value.tensor->dtype + " " + describe_shape(value.tensor->sizes);
  const auto add_flag = [&](bool is_set, const char* name) {
    if (is_set) append_item(text, name);
  };
  add_flag(value.tensor->is_wrapped_number, "a Python number");
  add_flag(value.tensor->is_conjugate, "conjugated");
  add_flag(value.tensor->is_negative, "negated");
  return text;
}

void compare_values(const std::string& what, const OpenBundle& left,
                    const std::vector<NamedValue>& left_values, const OpenBundle& right,
                    const std::vector<NamedValue>& right_values,
                    std::vector<BundleDifference>& out) {
  std::map<std::string, const NamedValue*> rest;
  for (const auto& value : right_values) rest[value.name] = &value;
  for (const auto& value : left_values) {
    const auto found = rest.find(value.name);
    const std::string name = what + value.name;
    if (found == rest.end()) {
      out.push_back({name, summary_of(value), "", {}});
      continue;
    }
    const NamedValue& other = *found->second;
    rest.erase(found);
    const std::string left_text = summary_of(value);
    const std::string right_text = summary_of(other);
    compare_texts(name, left_text, right_text, out);
    if (value.tensor == nullptr || other.tensor == nullptr || left_text != right_text) continue;
    compare_texts(name + ", strides", describe_shape(value.tensor->strides),
                  describe_shape(other.tensor->strides), out);
    compare_texts(name + ", device", value.tensor->device, other.tensor->device, out);
    if (auto elements = compare_elements(left, *value.tensor, right, *other.tensor)) {
      out.push_back({name, elements->left, elements->right, std::move(elements)});
    }
  }
  for (const auto& value : right_values) {  // in order; `rest` is by name
    if (rest.contains(value.name)) out.push_back({what + value.name, "", summary_of(value), {}});
  }
}

std::vector<BundleDifference> compare_bundles(const OpenBundle& left, const OpenBundle& right) {
  const Bundle& a = left.bundle();
  const Bundle& b = right.bundle();
  std::vector<BundleDifference> out;
  compare_texts("operator", operator_of(a), operator_of(b), out);
  compare_texts("module", module_of(a), module_of(b), out);
  compare_pairs("setting", a.settings, b.settings, out);
  compare_pairs("version", a.versions, b.versions, out);
  const auto presence = [](bool is_there) { return std::string(is_there ? "recorded" : ""); };
  compare_texts("operator call", presence(a.operator_call.has_value()),
                presence(b.operator_call.has_value()), out);
  if (a.operator_call && b.operator_call) {
    compare_texts("schema", a.operator_call->schema, b.operator_call->schema, out);
    compare_values("", left, values_of(*a.operator_call), right, values_of(*b.operator_call), out);
  }
  compare_texts("kernel call", presence(a.kernel_call.has_value()),
                presence(b.kernel_call.has_value()), out);
  if (a.kernel_call && b.kernel_call) {
    compare_texts("kernel module", a.kernel_call->module, b.kernel_call->module, out);
    compare_texts("kernel entry", a.kernel_call->entry, b.kernel_call->entry, out);
    compare_values("", left, values_of(*a.kernel_call), right, values_of(*b.kernel_call), out);
  }
  compare_texts("module call", presence(a.module_call.has_value()),
                presence(b.module_call.has_value()), out);
  if (a.module_call && b.module_call) {
    compare_texts("module class", a.module_call->class_name, b.module_call->class_name, out);
    compare_texts("module mode", a.module_call->is_training ? "training" : "evaluating",
                  b.module_call->is_training ? "training" : "evaluating", out);
    compare_values("module ", left, values_of(*a.module_call), right, values_of(*b.module_call),
                   out);
  }
  return out;
}

Json difference_to_json(const BundleDifference& difference) {
  const auto text_or_nothing = [](const std::string& text) {
    return text.empty() ? Json() : Json(text);
  };
  Json json = {{"what", difference.what},
               {"left", text_or_nothing(difference.left)},
               {"right", text_or_nothing(difference.right)},
               {"differing_elements", nullptr},
               {"first_index", nullptr}};
  if (difference.elements) {
    json["differing_elements"] = difference.elements->count;
    json["first_index"] = difference.elements->first;
  }
  return json;
}

int diff(const Arguments& given) {
  const auto bundles = given.texts("BUNDLE");
  const OpenBundle left(bundles.front());
  const OpenBundle right(bundles.back());
  const auto differences = compare_bundles(left, right);
  const int code = differences.empty() ? kClean : kFindings;
  if (given.has("--json")) {
    Json list = Json::array();
    for (const auto& difference : differences) list.push_back(difference_to_json(difference));
    print_json({{"version", kBundleOutputVersion},
                {"left", left.path().string()},
                {"right", right.path().string()},
                {"differences", std::move(list)}});
    return code;
  }
  if (differences.empty()) {
    std::cout << "no difference: the same call, bit for bit\n";
    return code;
  }
  Table table(
      {{"what"}, {"differing elements", Alignment::right}, {"first at"}, {"left"}, {"right"}}, 0);
  for (const auto& difference : differences) {
    const auto& elements = difference.elements;
    table.add_row({difference.what, elements ? std::to_string(elements->count) : "",
                   elements ? describe_shape(elements->first) : "", difference.left,
                   difference.right});
  }
  table.print(std::cout);
  return code;
}

/// The argument BUNDLE, from `least` to `most` times.
constexpr Option bundles(int least, int most) {
  return {.name = "BUNDLE",
          .least = least,
          .most = most,
          .help = "A bundle's folder, or the bundle.json in it"};
}

constexpr Option kListBundleOptions[] = {
    {.name = "DIR",
     .default_value = "nanlocator_run",
     .help = "A run's folder, or one with bundles in it, up to three levels down"},
    kJsonOption,
};
constexpr Option kShowBundleOptions[] = {bundles(1, 1), kJsonOption};
constexpr Option kVerifyBundleOptions[] = {bundles(1, kMany), kJsonOption};
constexpr Option kDiffBundleOptions[] = {bundles(2, 2), kJsonOption};

constexpr Command kBundleCommands[] = {
    {.name = "ls",
     .summary = "List the bundles of a run",
     .options = kListBundleOptions,
     .exit_codes = "0 listed, 1 a bundle cannot be read, 2 wrong use",
     .examples = "nanlocator bundle ls nanlocator_run/a0",
     .run = list},
    {.name = "show",
     .summary = "Show what was called, with which values, and where",
     .options = kShowBundleOptions,
     .details = "NaN and Inf are counted now, in floating-point and complex tensors; those without "
                "counts hold integers, or a type that is not scanned.",
     .examples = "nanlocator bundle show nanlocator_run/a0/bundles/step12-backward-rank0-lm_head",
     .run = show},
    {.name = "verify",
     .summary = "Check bundles against their checksums",
     .options = kVerifyBundleOptions,
     .details = "Each line names the file and the part that has changed or cannot be read.",
     .exit_codes = "0 intact, 1 something has changed or cannot be read, 2 wrong use",
     .examples = "nanlocator bundle verify nanlocator_run/a0/bundles/*",
     .run = verify},
    {.name = "diff",
     .summary = "Show in which values, settings and versions two calls differ",
     .options = kDiffBundleOptions,
     .details = "Tensors are compared bit for bit, in the order of their elements: left and right "
                "are the first elements that differ.",
     .exit_codes = "0 no difference, 1 something differs, 2 wrong use or unreadable input",
     .examples = "nanlocator bundle diff run_a/bundles/step12-forward-rank0-lm_head \\\n"
                 "                       run_b/bundles/step12-forward-rank0-lm_head",
     .run = diff},
};

}  // namespace

Command bundle_command() {
  return {.name = "bundle",
          .summary = "Folders from which a faulty call can be replayed",
          .examples = "nanlocator bundle ls nanlocator_run/a0",
          .commands = kBundleCommands};
}

}  // namespace nanlocator::command
