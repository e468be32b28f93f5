#include "bindings/without_gil.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>

// CPython has the first from 3.13 on, and the second before; neither is declared in the stable ABI.
extern "C" {
[[gnu::weak]] int Py_IsFinalizing(void);
[[gnu::weak]] int _Py_IsFinalizing(void);
}

namespace bunkbed {

namespace {

thread_local int depth = 0;  // nested calls of this thread
std::atomic<long> inside{0};
std::atomic<unsigned long> closed_by{0};  // the thread that closed the door; 0: it is open

bool is_finalizing() { return (Py_IsFinalizing != nullptr ? Py_IsFinalizing() : _Py_IsFinalizing()) != 0; }

// The parent's other threads do not exist in a forked child.
[[maybe_unused]] const int handlers = ::pthread_atfork(nullptr, nullptr, [] { inside = depth > 0 ? 1 : 0; });

}  // namespace

InCore::InCore() {
  if (depth == 0) {
    require_open_door();
    ++inside;
  }
  ++depth;
}

InCore::~InCore() {
  if (--depth == 0) --inside;
}

void InCore::close_door() { closed_by = PyThread_get_thread_ident(); }

void InCore::require_open_door() {
  if (closed_by == 0 || closed_by == PyThread_get_thread_ident()) return;
  PyErr_SetNone(PyExc_SystemExit);
  throw nanobind::python_error();
}

long InCore::num_inside() { return inside - (depth > 0 ? 1 : 0); }

WithoutGil::~WithoutGil() {
  // Ctrl-C ended the exit's wait for this call. Taking the GIL would end the thread here, so it sleeps until the exit.
  while (is_finalizing() && closed_by != PyThread_get_thread_ident()) ::pause();
  PyEval_RestoreThread(thread_);
}

}  // namespace bunkbed
