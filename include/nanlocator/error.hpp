// The errors that nanlocator throws. A message says what was found, where, what was expected and
// what to do about it.
#pragma once

#include <exception>
#include <stdexcept>
#include <string>

namespace nanlocator {

/// The base of every error thrown on purpose by nanlocator.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A file or a message is not in the form that docs/formats.md describes: truncated, malformed,
/// out of bounds, of another version. The text names the file and the byte, line or key.
class FormatError : public Error {
 public:
  using Error::Error;
};

/// An option or an argument has a value that cannot be used, or the call comes at a wrong time.
class UsageError : public Error {
 public:
  using Error::Error;
};

/// A dtype, layout or device that this build cannot scan. The text lists what it can.
class UnsupportedError : public Error {
 public:
  using Error::Error;
};

/// Ranks do not agree (versions, options, layouts), or one does not answer within a deadline.
/// The text names the ranks and the values that differ.
class AgreementError : public Error {
 public:
  using Error::Error;
};

/// The operating system refused: a full disk, a missing directory, no permission. Names the path.
class IoError : public Error {
 public:
  using Error::Error;
};

/// A call into CUDA failed. Names the call and CUDA's own error.
class CudaError : public Error {
 public:
  using Error::Error;
};

/// What a person reads of an error: c10::Error appends a C++ stack, Python's errors a traceback.
[[nodiscard]] inline std::string first_line(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

}  // namespace nanlocator
