#include "stress/readers.h"

#include <numeric>

#include "base/error.h"

namespace bunkbed::stress {

Reader::Reader(Subject& subject, uint64_t seed) : subject_(subject), rng_(seed), least_(subject.rows()) {
  table_ = open();
}

std::shared_ptr<Table> Reader::open() const {
  OpenOptions options;
  options.writable = false;
  Rng rng(subject_.rows());
  options.ram_bytes = subject_.some_ram(&rng);
  return Table::open(vfs::posix(), subject_.path(), subject_.name() + " (reader)", options);
}

void Reader::verify(Tally* tally) {
  if (rng_.one_in(4)) {
    table_->close();
    table_ = open();
  }
  table_->refresh();
  std::vector<size_t> rows(subject_.rows());
  std::iota(rows.begin(), rows.end(), size_t{0});
  const std::vector<int64_t> ids = subject_.ids_of(rows);
  std::vector<float> values(rows.size() * subject_.shape().dim);
  table_->lookup(ids.data(), ids.size(), true, values.data());
  Reading(subject_.bounds, rows).check(values.data(), subject_.shape().dim, "reader between episodes", tally);
  scan_and_check(subject_, table_.get(), subject_.bounds, 64, "reader's scan between episodes", [] {}, tally);
  for (const size_t row : rows) least_.put(row, subject_.bounds.low(row));  // the writer may have rewound
}

void ReaderThread::run(size_t calls) {
  try {
    for (size_t i = 0; i < calls; ++i) call();
  } catch (const std::exception& error) {
    tally_.fail(std::string("reader: ") + error.what());
  }
}

std::vector<size_t> ReaderThread::some_rows() {
  std::vector<size_t> rows;
  for (size_t n = 1 + rng_.below(rng_.one_in(10) ? reader_.subject_.rows() : 24); n > 0; --n) {
    const size_t row = rng_.below(reader_.subject_.rows());
    rows.insert(rows.end(), {row, reader_.subject_.twin(row)});
  }
  return rows;
}

void ReaderThread::read() {
  Subject& subject = reader_.subject_;
  const std::vector<size_t> rows = some_rows();
  const std::vector<int64_t> ids = subject.ids_of(rows);
  const size_t dim = subject.shape().dim;
  std::vector<float> out(rows.size() * dim);
  const Reading reading(reader_.least_, rows);
  std::string call;
  switch (rng_.below(4)) {
    case 0:
      call = "reader's get";
      reader_.table_->get(ids.data(), ids.size(), 0, out.data());
      break;
    case 1: {
      call = "reader's lookup of a batch";
      const Batch batch = reader_.table_->batch(ids.data(), ids.size());
      reader_.table_->lookup(batch, rng_.one_in(2), out.data());
      break;
    }
    default:
      call = "reader's lookup";
      reader_.table_->lookup(ids.data(), ids.size(), rng_.one_in(2), out.data());
  }
  ++tally_.calls[call];
  const std::vector<int32_t> found = reading.check(out.data(), dim, call, &tally_, &subject.bounds);
  for (size_t i = 0; i < rows.size(); ++i) reader_.least_.raise_low(rows[i], found[i]);
}

void ReaderThread::refresh() {
  const std::vector<int32_t> committed = reader_.subject_.floor.lows();
  reader_.table_->refresh();
  for (size_t row = 0; row < committed.size(); ++row) reader_.least_.raise_low(row, committed[row]);
  ++tally_.calls["refresh"];
}

void ReaderThread::scan() {
  try {
    scan_and_check(
        reader_.subject_, reader_.table_.get(), reader_.least_, 1 + rng_.below(200), "reader's scan",
        [&] {
          if (rng_.one_in(4)) read();
        },
        &tally_);
    ++tally_.calls["reader's scans that came to their end"];
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kBroken || std::string(error.what()).find("was changed while") == std::string::npos)
      throw;
    ++tally_.refused["reader's scan: changed"];  // the other thread refreshed
  }
}

void ReaderThread::open_another() {
  Reader other(reader_.subject_, rng_.bits());
  ++tally_.calls["open to read"];
  ReaderThread thread(other, rng_.bits());
  thread.scan();
  thread.read();
  thread.refresh();
  thread.read();
  tally_.add(thread.tally());
  other.table_->close();
}

void ReaderThread::call() {
  Table& table = *reader_.table_;
  const size_t choice = rng_.below(20);
  if (choice < 9) {
    read();
  } else if (choice < 13) {
    refresh();
  } else if (choice < 15) {
    const std::vector<int64_t> ids = reader_.subject_.ids_of(some_rows());
    table.stage(ids.data(), ids.size());
    ++tally_.calls["reader's stage"];
  } else if (choice < 17) {
    const std::vector<int64_t> ids = reader_.subject_.ids_of(some_rows());
    const uint32_t batch = table.expect(ids.data(), ids.size(), 0);
    table.advance(kNoUse, batch == Table::kWindowFull ? kNoUse : batch, 2);
    if (batch != Table::kWindowFull) table.forget(batch);
    ++tally_.calls["reader's window"];
  } else if (choice < 18) {
    scan();
  } else if (choice < 19) {
    open_another();
  } else {
    (void)table.stats();
    (void)table.epoch();
    // These calls take no lock, and another thread may refresh meanwhile.
    if (table.fields().size() != 1 || table.payload_bytes() == 0) tally_.fail("reader: not the fields of its table");
    ++tally_.calls["reader's stats"];
  }
}

}  // namespace bunkbed::stress
