// Calls that neither read nor change a row: staging, commits, maintenance; and the frequency of each call.
#include <algorithm>

#include "stress/worker.h"

namespace bunkbed::stress {

void Worker::stage(Subject& s) {
  const std::vector<int64_t> ids = s.ids_of(rows_to_read(s, some_count(s)));
  attempt(s, "stage", [&] { s.table->stage(ids.data(), ids.size()); });
}

// Enters a coming batch into the window; advances over an entered batch or forgets it.
void Worker::window(Subject& s) {
  const std::vector<int64_t> ids = s.ids_of(rows_to_read(s, 1 + rng_.below(40)));
  uint32_t batch = 0;
  if (!attempt(s, "expect",
               [&] { batch = s.table->expect(ids.data(), ids.size(), static_cast<uint32_t>(rng_.below(8))); })) {
    return;
  }
  if (batch != kNoUse && batch != Table::kWindowFull) expected_.emplace_back(&s, batch);
  const auto mine = std::find_if(expected_.begin(), expected_.end(), [&](const auto& one) { return one.first == &s; });
  if (mine == expected_.end()) return;
  const uint32_t first = mine->second;
  if (rng_.one_in(4)) {
    expected_.erase(mine);
    attempt(s, "forget", [&] { s.table->forget(first); });
  } else {
    const bool is_over = rng_.one_in(2);
    if (is_over) expected_.erase(mine);
    attempt(s, "advance",
            [&] { s.table->advance(is_over ? first : kNoUse, first, static_cast<uint32_t>(rng_.below(5))); });
  }
}

void Worker::wait_for(StartedCommit* entry) {
  if (!attempt(*entry->subject, "wait for a commit", [&] { entry->commit->wait(); })) return;
  for (size_t row = 0; row < entry->counts.size(); ++row) entry->subject->floor.raise_low(row, entry->counts[row]);
}

void Worker::commit(Subject& s) {
  if (episode_.run_commit) return episode_.run_commit(this);
  const std::vector<int32_t> counts = s.bounds.lows();
  const auto meta =
      rng_.one_in(3) ? std::optional<std::string>("{\"at\":" + std::to_string(rng_.below(100)) + "}") : std::nullopt;
  if (!attempt(s, "commit", [&] { s.table->commit(meta, ""); })) return;
  for (size_t row = 0; row < counts.size(); ++row) s.floor.raise_low(row, counts[row]);
}

void Worker::begin_commit(Subject& s) {
  if (episode_.run_commit) return episode_.run_commit(this);
  StartedCommit started{&s, nullptr, s.bounds.lows()};
  if (!attempt(s, "begin_commit", [&] { started.commit = s.table->begin_commit(std::nullopt, ""); })) return;
  started_.push_back(std::move(started));
  if (started_.size() < 2 && rng_.one_in(2)) return;
  wait_for(&started_.front());
  started_.erase(started_.begin());
}

void Worker::keep_and_drop(Subject& s) {
  if (s.shape().is_scratch || s.shape().in_run) return;
  const std::string name = "of thread " + std::to_string(index_);
  if (!attempt(s, "commit(keep=)", [&] { s.table->commit(std::nullopt, name); })) return;
  attempt(s, "snapshots", [&] {
    const auto found = s.table->snapshots();
    if (std::none_of(found.begin(), found.end(), [&](const auto& one) { return one.name == name; })) {
      tally_.fail("snapshots: '" + name + "' is missing");
    }
  });
  attempt(s, "drop", [&] { s.table->drop(name); });
}

void Worker::go_back(Subject& s) {
  if (s.shape().is_scratch || s.shape().in_run) return;
  const std::string name = "of thread " + std::to_string(index_);
  if (!attempt(s, "commit(keep=)", [&] { s.table->commit(std::nullopt, name); })) return;
  attempt(s, "rewind", [&] { s.table->rewind(name, std::nullopt); });
  attempt(s, "drop", [&] { s.table->drop(name); });
}

void Worker::facts(Subject& s) {
  attempt(s, "stats", [&] {
    const TableStats stats = s.table->stats();
    if (stats.stored_rows > s.rows()) tally_.fail("stats: " + std::to_string(stats.stored_rows) + " stored rows");
    if (stats.ram_budget_bytes > 0 && stats.ram_bytes > stats.ram_budget_bytes) {
      tally_.fail("stats: " + std::to_string(stats.ram_bytes) + " bytes of RAM, the budget is " +
                  std::to_string(stats.ram_budget_bytes));
    }
  });
  attempt(s, "uncommitted", [&] { (void)s.table->uncommitted(); });
  attempt(s, "step, epoch, meta", [&] {
    (void)s.table->step();
    (void)s.table->epoch();
    (void)s.table->meta();
    (void)s.table->is_changed();
  });
  attempt(s, "set_optimizer", [&] {
    OptimizerSpec optimizer = s.table->changeable().optimizer;
    optimizer.eps = static_cast<double>(rng_.below(8));  // SGD does not use it
    s.table->set_optimizer(optimizer);
  });
  // These calls take no lock.
  const bool is_it =
      s.table->fields().size() == 1 && s.table->spec().dim == s.shape().dim && s.table->payload_bytes() > 0;
  if (!is_it || s.table->uuid() == Uuid{}) tally_.fail("fields: not those of its spec");
}

void Worker::maintain(Subject& s) {
  switch (rng_.below(6)) {
    case 0:
      if (episode_.is_quiet) break;  // a scan counts it as a change
      attempt(s, "compact", [&] { s.table->compact(); });
      break;
    case 1:
      attempt(s, "collect", [&] { s.table->collect(1 + rng_.below(3)); });
      break;
    case 2:
      attempt(s, "set_ram", [&] { s.set_some_ram(&rng_); });
      break;
    case 3:
      if (s.shape().has_limit) attempt(s, "require_disk_to_keep", [&] { s.table->require_disk_to_keep("a name"); });
      break;
    default:
      attempt(s, "write_dirty", [&] { s.table->write_dirty(); });
  }
}

void Worker::harmless(Subject& s) {
  switch (rng_.below(10)) {
    case 0:
      return lookup(s);
    case 1:
      return lookup_batch(s);
    case 2:
      return stage(s);
    case 3:
      return window(s);
    case 4:
      return get(s);
    case 5:
      return gather_records(s);
    case 6:
      return commit(s);
    case 7:
      return begin_commit(s);
    case 8:
      return maintain(s);
    default:
      return facts(s);
  }
}

bool Worker::call(Subject& s) {
  const size_t choice = rng_.below(100);
  const bool may_change = !episode_.is_quiet;
  if (choice < 18) {
    lookup(s);
  } else if (choice < 25) {
    lookup_batch(s);
  } else if (choice < 30) {
    lookup_bags(s);
  } else if (choice < 50) {
    may_change ? update(s) : lookup(s);
  } else if (choice < 58) {
    if (may_change) {
      update_batch(s);
    } else {
      episode_.goes_back&& index_ == 0 ? go_back(s) : lookup_batch(s);
    }
  } else if (choice < 63) {
    stage(s);
  } else if (choice < 70) {
    window(s);
  } else if (choice < 73) {
    get(s);
  } else if (choice < 75) {
    contains(s);
  } else if (choice < 78) {
    if (may_change) set(s);
  } else if (choice < 81) {
    if (may_change) write_records(s);
  } else if (choice < 84) {
    gather_records(s);
  } else if (choice < 86) {
    commit(s);
  } else if (choice < 89) {
    begin_commit(s);
  } else if (choice < 90) {
    keep_and_drop(s);
  } else if (choice < 93) {
    maintain(s);
  } else if (choice < 96) {
    facts(s);
  } else {
    scan(s);
  }
  return !is_over_;
}

void Worker::finish() {
  for (StartedCommit& started : started_) wait_for(&started);
  started_.clear();
  for (const auto& [subject, batch] : expected_) {
    attempt(*subject, "forget", [&, number = batch, s = subject] { s->table->forget(number); });
  }
  expected_.clear();
}

}  // namespace bunkbed::stress
