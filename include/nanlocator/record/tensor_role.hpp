// What a scanned tensor was in its step, in the vocabulary of ledgers and verdicts.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace nanlocator::inline record_room {

/// The roles that matter to locating; every other one only describes a tensor to a reader.
enum class RoleKind : std::uint8_t {
  described,
  sent,      // this rank's input to a collective or a message
  received,  // its output
  loss,      // one of the step's losses
};

/// "main_grad", "grad", "weight", "buffer", "input[0]", "output[0]", "grad_input[1]", "sent",
/// "received", "loss", "loss[2]". "layers.3 output[0]" belongs to another module, seen from
/// outside.
class TensorRole {
 public:
  TensorRole() = default;
  TensorRole(std::string text)  // NOLINT(google-explicit-constructor): a role is its text
      : text_(std::move(text)), kind_(kind_of(text_)) {}
  TensorRole(std::string_view text)  // NOLINT(google-explicit-constructor)
      : TensorRole(std::string(text)) {}
  TensorRole(const char* text)  // NOLINT(google-explicit-constructor)
      : TensorRole(std::string(text)) {}

  [[nodiscard]] const std::string& text() const noexcept { return text_; }
  [[nodiscard]] RoleKind kind() const noexcept { return kind_; }

  friend bool operator==(const TensorRole& a, const TensorRole& b) { return a.text_ == b.text_; }

 private:
  [[nodiscard]] static RoleKind kind_of(std::string_view text) noexcept {
    if (text == "sent") return RoleKind::sent;
    if (text == "received") return RoleKind::received;
    if (text == "loss" || text.starts_with("loss[")) return RoleKind::loss;
    return RoleKind::described;
  }

  std::string text_;
  RoleKind kind_ = RoleKind::described;
};

}  // namespace nanlocator::inline record_room
