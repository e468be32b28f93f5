// The kinds of failure the core can report. The bindings translate each kind into one Python exception.
#pragma once

#include <stdexcept>
#include <string>

namespace bunkbed {

enum class ErrorKind {
  kInvalid,     // the caller's value: ValueError
  kIndex,       // an id outside the table: IndexError
  kExists,      // FileExistsError
  kNotFound,    // FileNotFoundError
  kSystem,      // an operating-system call failed: OSError with errno and path
  kSync,        // fsync or fdatasync failed: OSError; what reached the disk is unknown
  kMemory,      // a memory budget is too small: MemoryError
  kFormat,      // the bytes are not what this version can read: FormatError
  kCorruption,  // the bytes fail their checksum: CorruptionError
  kLocked,      // another process writes here: TableLockedError
  kClosed,      // TableClosedError
  kReadOnly,    // ReadOnlyError
  kBroken,      // the table refuses use until reopened: BunkbedError
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message, int error_number = 0, std::string path = {})
      : std::runtime_error(message), kind_(kind), error_number_(error_number), path_(std::move(path)) {}

  ErrorKind kind() const { return kind_; }
  int error_number() const { return error_number_; }  // errno, for kSystem and kSync
  const std::string& path() const { return path_; }   // for kSystem and kSync

 private:
  ErrorKind kind_;
  int error_number_;
  std::string path_;
};

}  // namespace bunkbed
