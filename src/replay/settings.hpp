// Applies recorded settings during its lifetime.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace nanlocator::inline replay_room {

/// Applies `settings` (replay/operator_call.hpp's current_settings) to this thread and process,
/// changing only those that differ; the destructor restores them.
class ScopedSettings {
 public:
  explicit ScopedSettings(const std::map<std::string, std::string>& settings);
  ~ScopedSettings();
  ScopedSettings(const ScopedSettings&) = delete;  // strictly nested
  ScopedSettings& operator=(const ScopedSettings&) = delete;

  /// Sentences about settings that this build does not know or cannot apply.
  [[nodiscard]] const std::vector<std::string>& problems() const noexcept { return problems_; }

 private:
  std::vector<std::pair<std::string, std::string>> before_;
  std::vector<std::string> problems_;
  std::optional<at::AutoDispatchBelowADInplaceOrView> below_autograd_;
};

}  // namespace nanlocator::inline replay_room
