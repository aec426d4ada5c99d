// Source of the program's lines that call operators. The trace queries it; the program's language
// implements it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "nanlocator/record/birth.hpp"

namespace nanlocator::inline operators_room {

/// Called on any thread, without any lock of the trace.
class ProgramCode {
 public:
  ProgramCode() = default;
  virtual ~ProgramCode() = default;
  ProgramCode(const ProgramCode&) = delete;  // its handles stay valid as long as it lives
  ProgramCode& operator=(const ProgramCode&) = delete;

  /// A line as the source stores it; read only if a birth needs it.
  struct Position {
    const void* code = nullptr;  // the source's handle of a function; null for no function
    int line = 0;
    int instruction = -1;  // where in the function, as the source counts; -1: unknown
  };
  struct Caller {
    Position user;       // the innermost line of the user's own code
    Position framework;  // the innermost framework line, if it is further in
    /// `user` is what runs now: a line of the program's own, and not the call of a backward in
    /// which other code runs.
    bool is_programs = false;
  };

  /// The calling thread's current line. Must be cheap: called at every forward operator that
  /// autograd records.
  [[nodiscard]] virtual Caller caller() = 0;
  /// True if the calling thread now executes code in the source's language, at any depth.
  [[nodiscard]] virtual bool is_running() = 0;
  [[nodiscard]] virtual std::optional<CodeLine> read(const Position& position) = 0;
  /// This thread's frames, innermost first: "file.py:12 in forward".
  [[nodiscard]] virtual std::vector<std::string> stack() = 0;
};

}  // namespace nanlocator::inline operators_room
