// Which lines of the program call the operators: the trace asks, the program's language answers.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "nanlocator/record/birth.hpp"

namespace nanlocator::inline operators_room {

/// Called on any thread, with no lock of the trace held.
class ProgramCode {
 public:
  ProgramCode() = default;
  virtual ~ProgramCode() = default;
  ProgramCode(const ProgramCode&) = delete;  // its handles stay valid as long as it lives
  ProgramCode& operator=(const ProgramCode&) = delete;

  /// A line as the source keeps it: read only where a birth needs it.
  struct Position {
    const void* code = nullptr;  // the source's handle of a function; null for none
    int line = 0;
  };
  struct Caller {
    Position user;       // the innermost line of the user's own code
    Position framework;  // the innermost one in a framework, where that is further in
  };

  /// Of the calling thread, now. Cheap: asked at every forward operator that autograd records.
  [[nodiscard]] virtual Caller caller() = 0;
  [[nodiscard]] virtual std::optional<CodeLine> read(const Position& position) = 0;
  /// This thread's frames, innermost first: "file.py:12 in forward".
  [[nodiscard]] virtual std::vector<std::string> stack() = 0;
};

}  // namespace nanlocator::inline operators_room
