#include "report/words.hpp"

#include <array>
#include <string_view>
#include <utility>

#include "files/printable.hpp"
#include "files/text.hpp"
#include "nanlocator/record/collective_kind.hpp"

namespace nanlocator::inline report_room {

std::string short_list(const std::vector<int>& ranks) {
  constexpr std::size_t kMostColumns = 100;
  std::string text = describe_ranks(ranks);
  if (text.size() <= kMostColumns) return text;
  return text.substr(0, text.rfind(',', kMostColumns)) + ", ...";
}

std::string counted(std::int64_t number) {
  std::string text = std::to_string(number);
  const std::size_t first_digit = number < 0 ? 1 : 0;
  for (std::size_t at = text.size(); at > first_digit + 3;) text.insert(at -= 3, 1, ',');
  return text;
}

std::string counted(std::int64_t number, const std::string& noun) {
  return counted(number) + " " + noun + (number == 1 ? "" : "s");
}

std::string list_for_command(const std::vector<std::string>& items) {
  std::string list;
  for (const std::string& each : items) append_item(list, each, ",");
  return list;
}

std::string short_number(double number) {
  return number_text(number, 3);
}

std::string bad_text(const BadCount& bad) {
  std::vector<std::string> parts;
  const auto add = [&](std::int64_t count, const char* what) {
    if (count > 0) parts.push_back(counted(count) + " " + what);
  };
  add(bad.nan, "NaN");
  add(bad.pos_inf, "+Inf");
  add(bad.neg_inf, "-Inf");
  return joined(parts);
}

std::string share_text(const BadCount& bad) {
  return bad_text(bad) + " of " + counted(bad.numel);
}

std::string joined(const std::vector<std::string>& items, const char* last) {
  std::string text;
  for (std::size_t i = 0; i < items.size(); ++i) {
    text += (i == 0 ? "" : i + 1 < items.size() ? ", " : last) + items[i];
  }
  return text;
}

static bool is_integer(std::string_view dtype) {
  return dtype.starts_with("int") || dtype.starts_with("uint") || dtype == "bool";
}

static std::string integers_text(const Operand& operand, const TensorStats& stats) {
  if (operand.dtype == "bool") {
    return ", " + counted(stats.numel - stats.zeros) + " of " + counted(stats.numel) + " true";
  }
  if (operand.ignored) {
    return ", " + counted(*operand.ignored) + " of " + counted(stats.numel) +
           " equal ignore_index, so they do not count";
  }
  return stats.has_finite()
             ? ", " + short_number(stats.finite_min) + " to " + short_number(stats.finite_max)
             : "";
}

std::string operand_text(const Operand& operand) {
  std::string text = operand.name;
  if (operand.element) text += "[" + std::to_string(*operand.element) + "]";
  if (operand.number) return text + ": " + short_number(*operand.number);
  text += ": " + operand.dtype + " " + describe_shape(operand.shape);
  if (!operand.stats) return text;
  const TensorStats& stats = *operand.stats;
  if (is_integer(operand.dtype)) return text + integers_text(operand, stats);
  text += stats.is_finite() ? ", finite" : ", " + bad_text(bad_count(stats));
  if (stats.has_finite() && stats.absmax == 0) return text + ", all zero";
  if (stats.has_finite()) text += ", |x| <= " + short_number(stats.absmax);
  if (operand.negatives.value_or(0) > 0) text += ", " + counted(*operand.negatives) + " negative";
  if (stats.zeros > 0) text += ", " + counted(stats.zeros) + " zero";
  return text;
}

std::string reached_text(const Reached& reached) {
  switch (reached.kind) {
    case ReachedKind::loss:
    case ReachedKind::parameter:
      return reached.name;
    case ReachedKind::other_ranks:
      return "other ranks";
    case ReachedKind::module:
      return "module " + reached.name;
  }
  return reached.name;
}

std::string extent_text(const OriginTensor& tensor) {
  return extent_text(tensor.shape, tensor.nan + tensor.pos_inf + tensor.neg_inf, tensor.extent);
}

std::string extent_text(const std::vector<std::int64_t>& shape, std::int64_t bad,
                        const std::optional<BadExtent>& extent) {
  std::int64_t numel = 1;
  for (const std::int64_t size : shape) {
    if (__builtin_mul_overflow(numel, size, &numel)) return "";
  }
  if (bad > 1 && bad == numel) return "every element";
  if (!extent || extent->dimensions.size() != shape.size()) return "";
  std::vector<std::string> parts;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    const BadExtent::Indices& indices = extent->dimensions[i];
    if (indices.count == shape[i] || shape[i] == 1) continue;
    std::string which =
        indices.count == 1 ? "index " + std::to_string(indices.first)
        : indices.count == indices.last - indices.first + 1
            ? "indices " + std::to_string(indices.first) + " to " + std::to_string(indices.last)
            : counted(indices.count) + " indices from " + std::to_string(indices.first) + " to " +
                  std::to_string(indices.last);
    parts.push_back(which + " of dimension " + std::to_string(i));
  }
  if (parts.empty()) return extent->is_block ? "every element" : "scattered over the whole tensor";
  if (bad == 1) return "";  // the first bad element already gives it
  return (extent->is_block ? "everything at " : "scattered over ") + joined(parts, ", ");
}

std::string code_place(const CodeLine& code) {
  return code.file + ":" + std::to_string(code.line);
}

std::string code_text(const CodeLine& code) {
  std::string text = code_place(code);
  if (!code.function.empty()) text += " in " + code.function;
  if (!code.text.empty()) text += ": " + code.text;
  return text;
}

std::string netcheck_command(int ranks_per_host, int hosts, const std::string& first_host) {
  constexpr const char* kPort = "29400";  // torchrun's default
  std::string command = "nanlocator netcheck --nproc-per-node " + std::to_string(ranks_per_host);
  if (hosts > 1) {
    command += " --nnodes " + std::to_string(hosts) + " --rdzv-backend c10d --rdzv-endpoint " +
               first_host + ":" + kPort;
  }
  return command;
}

std::string replay_command(const std::filesystem::path& run_dir, const std::string& bundle) {
  const auto folder =
      run_dir.empty() ? std::filesystem::path() : std::filesystem::absolute(run_dir);
  return "nanlocator replay " + shell_word((folder / bundle).string());
}

std::string function_name_of(const std::string& op) {
  constexpr std::array<std::pair<std::string_view, const char*>, 8> kPublic = {{
      {"_softmax", "torch.softmax"},
      {"_log_softmax", "torch.log_softmax"},
      {"native_layer_norm", "layer_norm"},
      {"native_batch_norm", "batch_norm"},
      {"nll_loss_forward", "nll_loss"},
      {"_to_copy", "the conversion to another dtype"},
      {"copy_", "the copy"},
      {"linalg_vector_norm", "torch.linalg.vector_norm"},
  }};
  if (!op.starts_with("aten::")) return op;
  const std::string name = op.substr(6, op.find('.') == op.npos ? op.npos : op.find('.') - 6);
  for (const auto& [inner, outer] : kPublic) {
    if (name == inner) return outer;
  }
  return (name.ends_with("_") ? "torch.Tensor." : "torch.") + name;
}

std::string collective_name_of(const std::string& op) {
  switch (collective_kind_of(op).value_or(CollectiveKind::exchange)) {
    case CollectiveKind::all_reduce:
      return "an all-reduce";
    case CollectiveKind::reduce_scatter:
      return "a reduce-scatter";
    case CollectiveKind::reduce:
      return "a reduce";
    case CollectiveKind::all_gather:
      return "an all-gather";
    case CollectiveKind::broadcast:
      return "a broadcast";
    case CollectiveKind::scatter:
      return "a scatter";
    case CollectiveKind::exchange:
      return op.empty() ? "a collective" : "an all-to-all";
    default:
      return "a transfer";
  }
}

}  // namespace nanlocator::inline report_room
