// Calls of the core by Python threads, and the end of the process.
//
// Before Python 3.14 the interpreter ends a thread by pthread_exit when the thread takes the GIL during finalisation.
// That unwinds C++ frames, and a destructor there leads to std::terminate: a daemon thread in a lookup aborted the
// process. So the interpreter's exit (table/opening.py):
//
//   1. closes the door: another thread's next call raises SystemExit, which ends the thread and releases its locks;
//   2. waits until no call is inside, with the GIL released and the interpreter alive.
//
// A call made by a callback is part of the outer call, and passes. The thread that closed the door may still call.
#pragma once

#include <nanobind/nanobind.h>

namespace bunkbed {

// Counts a call of the core from before it releases the GIL until it has the GIL again. Made and ended with the GIL.
class InCore {
 public:
  InCore();
  ~InCore();
  InCore(const InCore&) = delete;
  InCore& operator=(const InCore&) = delete;

  // Called by the thread that ends the process.
  static void close_door();
  // Throws SystemExit in other threads once the door is closed.
  static void require_open_door();
  // Number of other threads' calls that are inside.
  static long num_inside();
};

// Releases the GIL for a call of the core.
class WithoutGil {
 public:
  WithoutGil() : thread_(PyEval_SaveThread()) {}
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  const InCore inside_;
  PyThreadState* const thread_;
};

}  // namespace bunkbed
