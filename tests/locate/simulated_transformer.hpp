// The transformer of both simulators: its tokens as bits that mark NaN, the flow between tokens,
// and Megatron-Core's names of modules with parameters.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace nanlocator::simulator {

/// Bit n: token number n is NaN. Numbers follow the sequence.
using Tokens = std::uint64_t;
using Grid = std::vector<std::vector<Tokens>>;  // [lane][tp]

[[nodiscard]] inline Tokens token_number(int number) {
  return Tokens{1} << number;
}

/// Adds `from` to `to`: a sum is NaN at the tokens of either.
inline void add(Grid& to, const Grid& from) {
  for (std::size_t lane = 0; lane < to.size(); ++lane) {
    for (std::size_t tp = 0; tp < to[lane].size(); ++tp) to[lane][tp] |= from[lane][tp];
  }
}

/// Tokens made bad by causal attention: the later ones in forward, the earlier ones in backward.
[[nodiscard]] inline Tokens attended_from(Tokens tokens, bool is_backward) {
  if (tokens == 0) return 0;
  return is_backward ? ~Tokens{0} >> std::countl_zero(tokens)
                     : ~Tokens{0} << std::countr_zero(tokens);
}

/// Tokens whose words are in the part of the vocabulary of one of `tp` ranks.
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
/// The column-parallel layer at the start of a block.
[[nodiscard]] inline std::string column_name(int layer, bool is_mlp) {
  return block_name(layer, is_mlp) + (is_mlp ? ".linear_fc1" : ".linear_qkv");
}
/// The row-parallel layer at its end.
[[nodiscard]] inline std::string row_name(int layer, bool is_mlp) {
  return block_name(layer, is_mlp) + (is_mlp ? ".linear_fc2" : ".linear_proj");
}

}  // namespace nanlocator::simulator
