// What both simulators know of a transformer: its tokens as bits that say which are NaN, how tokens
// reach one another, and Megatron-Core's names of what has parameters.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace nanlocator::simulator {

/// Bit n: the token with number n is NaN. Numbers follow the sequence.
using Tokens = std::uint64_t;
using Grid = std::vector<std::vector<Tokens>>;  // [lane][tp]

[[nodiscard]] inline Tokens token_number(int number) {
  return Tokens{1} << number;
}

/// A sum of tensors.
inline void add(Grid& to, const Grid& from) {
  for (std::size_t lane = 0; lane < to.size(); ++lane) {
    for (std::size_t tp = 0; tp < to[lane].size(); ++tp) to[lane][tp] |= from[lane][tp];
  }
}

/// What causal attention makes bad: in forward the later tokens, in backward the earlier ones.
[[nodiscard]] inline Tokens attended_from(Tokens tokens, bool is_backward) {
  if (tokens == 0) return 0;
  return is_backward ? ~Tokens{0} >> std::countl_zero(tokens)
                     : ~Tokens{0} << std::countr_zero(tokens);
}

/// Tokens that are words of the part of the vocabulary that one of `tp` ranks holds.
[[nodiscard]] inline Tokens with_words_of(int tp_rank, int tp) {
  Tokens words = 0;
  for (int number = 0; number < 64; ++number) {
    if ((number * 5 + 1) % tp == tp_rank) words |= token_number(number);
  }
  return words;
}

// ---- names ----

inline constexpr const char* kWordEmbeddings = "embedding.word_embeddings.weight";
inline constexpr const char* kPositionEmbeddings = "embedding.position_embeddings.weight";
inline constexpr const char* kOutputLayer = "output_layer.weight";
inline constexpr const char* kFinalNorm = "decoder.final_layernorm";

[[nodiscard]] inline std::string layer_name(int layer) {
  return "decoder.layers." + std::to_string(layer);
}
[[nodiscard]] inline std::string block_name(int layer, bool is_mlp) {
  return layer_name(layer) + (is_mlp ? ".mlp" : ".self_attention");
}
[[nodiscard]] inline std::string norm_name(int layer, bool is_mlp) {
  return layer_name(layer) + (is_mlp ? ".pre_mlp_layernorm" : ".input_layernorm");
}
/// The column-parallel layer that a block begins with.
[[nodiscard]] inline std::string column_name(int layer, bool is_mlp) {
  return block_name(layer, is_mlp) + (is_mlp ? ".linear_fc1" : ".linear_qkv");
}
/// The row-parallel layer that it ends with.
[[nodiscard]] inline std::string row_name(int layer, bool is_mlp) {
  return block_name(layer, is_mlp) + (is_mlp ? ".linear_fc2" : ".linear_proj");
}

}  // namespace nanlocator::simulator
