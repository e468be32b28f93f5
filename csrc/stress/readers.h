// Readers of a table while its writer changes it in the same process. Each has its own Table, used by two threads.
#pragma once

#include <memory>
#include <vector>

#include "stress/oracle.h"
#include "stress/subject.h"

namespace bunkbed::stress {

class Reader {
 public:
  Reader(Subject& subject, uint64_t seed);
  // Refreshes and checks every row exactly. Requires that no other thread runs and the last commit holds every change.
  void verify(Tally* tally);

 private:
  friend class ReaderThread;
  std::shared_ptr<Table> open() const;

  Subject& subject_;
  Rng rng_;
  std::shared_ptr<Table> table_;
  Bounds least_;  // low: counts of the last commit that it refreshed to, and counts that it has returned
};

class ReaderThread {
 public:
  ReaderThread(Reader& reader, uint64_t seed) : reader_(reader), rng_(seed) {}
  void run(size_t calls);
  Tally& tally() { return tally_; }

 private:
  void call();
  void read();
  void refresh();
  void scan();
  void open_another();
  std::vector<size_t> some_rows();

  Reader& reader_;
  Rng rng_;
  Tally tally_;
};

}  // namespace bunkbed::stress
