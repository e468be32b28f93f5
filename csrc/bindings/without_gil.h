// Calls of the core by Python threads, and the end of the process.
//
// A thread that wants the GIL back from an interpreter that finalises is ended by pthread_exit (before Python
// 3.14). That unwinds through C++ frames, and a destructor there makes it std::terminate: a daemon thread in a lookup
// aborted the process. So the interpreter's exit (table/opening.py):
//
//   1. closes the door: another thread's next call raises SystemExit, which ends that thread with all its locks released;
//   2. waits until no call is inside, with the GIL released and the interpreter alive.
//
// A call made by a callback within a call is part of that one, and passes. The thread that closed the door goes on as ever.
#pragma once

#include <nanobind/nanobind.h>

namespace bunkbed {

// A call of the core, counted from before the GIL is released until it is taken again. Made and ended with the GIL held.
class InCore {
 public:
  InCore();
  ~InCore();
  InCore(const InCore&) = delete;
  InCore& operator=(const InCore&) = delete;

  // By the thread that ends the process.
  static void close_door();
  // Throws SystemExit in other threads once the door is closed.
  static void require_open_door();
  // Calls of other threads.
  static long num_inside();
};

// A call of the core without the GIL.
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
