// Words and phrases for sentences: ranks, numbers, counts of bad elements.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "nanlocator/map/rank_coordinates.hpp"
#include "nanlocator/verdict/verdict.hpp"

namespace nanlocator::inline report_room {

/// "0-3, 9", cut if long.
[[nodiscard]] std::string short_list(const std::vector<int>& ranks);
/// "8,192".
[[nodiscard]] std::string counted(std::int64_t number);
/// "8,192 gradients", "1 gradient".
[[nodiscard]] std::string counted(std::int64_t number, const std::string& noun);
/// "1.8e+19": three digits.
[[nodiscard]] std::string short_number(double number);
/// "3 NaN and 1 +Inf".
[[nodiscard]] std::string bad_text(const BadCount& bad);
/// "3 NaN of 8,192".
[[nodiscard]] std::string share_text(const BadCount& bad);
/// "a, b and c".
[[nodiscard]] std::string joined(const std::vector<std::string>& items, const char* last = " and ");
/// "a17,a18", for a command.
[[nodiscard]] std::string list_for_command(const std::vector<std::string>& items);

/// "self: float32 [4, 8], finite, |x| <= 3.2, 12 zero".
[[nodiscard]] std::string operand_text(const Operand& operand);
/// "loss", "other ranks", "module a.b", a parameter's name.
[[nodiscard]] std::string reached_text(const Reached& reached);
/// "all of it", "index 1 of dimension 0"; "" if nothing informative is known.
[[nodiscard]] std::string extent_text(const OriginTensor& tensor);
/// For `bad` elements of a tensor; "" if the extent is unknown or one element.
[[nodiscard]] std::string extent_text(const std::vector<std::int64_t>& shape, std::int64_t bad,
                                      const std::optional<BadExtent>& extent);
/// "model.py:412".
[[nodiscard]] std::string code_place(const CodeLine& code);
/// "model.py:412 in forward: torch.sqrt(var)".
[[nodiscard]] std::string code_text(const CodeLine& code);
/// As a program calls it: "torch.div" of "aten::div.Tensor"; other names as they are.
[[nodiscard]] std::string function_name_of(const std::string& op);
/// "an all-reduce" of "c10d::allreduce_".
[[nodiscard]] std::string collective_name_of(const std::string& op);
/// "nanlocator replay /runs/a0/bundles/step12-forward-rank0-mlp": works from any folder if the
/// run's folder is known.
[[nodiscard]] std::string replay_command(const std::filesystem::path& run_dir,
                                         const std::string& bundle);

/// "nanlocator netcheck ..." for torchrun's rendezvous on `first_host`.
[[nodiscard]] std::string netcheck_command(int ranks_per_host, int hosts,
                                           const std::string& first_host);

}  // namespace nanlocator::inline report_room
