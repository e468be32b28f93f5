// Making, opening, checking: what surrounds the rows. Lookups, updates and raw records are in table/lookup.cc,
// table/update.cc and table/records.cc, commits in table/commit.cc, what calls require in table/checks.cc.
#include "table/table.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>

#include "base/error.h"
#include "base/failpoints.h"
#include "commit/scratch.h"
#include "format/record.h"

namespace bunkbed {

namespace {

Uuid new_uuid() {
  Uuid uuid;
  std::random_device device;
  for (size_t i = 0; i < uuid.size(); i += 4) {
    const uint32_t word = device();
    std::memcpy(uuid.data() + i, &word, 4);
  }
  uuid[6] = static_cast<uint8_t>((uuid[6] & 0x0f) | 0x40);
  uuid[8] = static_cast<uint8_t>((uuid[8] & 0x3f) | 0x80);
  return uuid;
}

constexpr size_t kMaxPayload = size_t{1} << 30;

// The largest record any optimizer could make of a dim, before offsets are put into 32 bits.
void check_record_size(uint32_t dim) {
  if (size_t{dim} * 12 + 16 > kMaxPayload) {
    throw Error(ErrorKind::kInvalid, "dim " + std::to_string(dim) + " makes records larger than 1 GiB");
  }
}

std::vector<Field> fields_of(const TableSpec& spec) { return record_fields(spec.dim, spec.dtype, spec.optimizer); }

// Segment bytes = table bytes / 64 within 1 MiB and 256 MiB, so small tables compact too; a table of unknown size
// takes the middle.
uint64_t slots_per_segment(const TableSpec& spec, size_t payload_bytes) {
  const size_t stride = record_stride(payload_bytes);
  const uint64_t rows = spec.num_rows < 0 ? (uint64_t{64} * 64 << 20) / stride : static_cast<uint64_t>(spec.num_rows);
  const long double part = static_cast<long double>(rows) * static_cast<long double>(stride) / 64;
  const auto bytes = static_cast<uint64_t>(std::clamp<long double>(part, 1 << 20, 256 << 20));
  return std::max<uint64_t>({bytes / stride, (16 * stride + kSegmentHeaderBytes) / stride + 1});
}

// Flat where it is at most a quarter of the budget.
bool is_flat(int64_t num_rows, size_t ram_bytes) {
  if (num_rows < 0) return false;
  const size_t budget = ram_bytes == 0 ? size_t{4} << 30 : ram_bytes;
  return flat_directory_bytes(static_cast<uint64_t>(num_rows)) <= budget / 4;
}

constexpr size_t kAssumedReadUnit = 4096;  // where no file can be asked yet

}  // namespace

Table::Table(vfs::Vfs& vfs, std::string path, std::string name, TableSpec spec, OpenOptions options)
    : vfs_(vfs),
      path_(std::move(path)),
      name_(std::move(name)),
      spec_(spec),
      options_(std::move(options)),
      lock_(name_),
      manifests_(vfs, path_) {}

Table::~Table() {
  if (!lock_.is_own_process()) {
    // A forked child: the writer threads do not exist here and the lock is the parent's. Leak on purpose.
    (void)staging_.release();
    (void)commit_thread_.release();
    (void)checkpoints_.thread.release();
    (void)store_.release();
    (void)file_lock_.release();
    return;
  }
  settle_checkpoint(false);
  close_files();
}

std::unique_ptr<Table> Table::create(vfs::Vfs& vfs, const std::string& path, const std::string& name,
                                     const TableSpec& spec, size_t ram_bytes, uint64_t disk_bytes) {
  OpenOptions options;
  options.ram_bytes = ram_bytes;
  options.disk_bytes = disk_bytes;
  options.through_run = spec.belongs_to_run;
  check_record_size(spec.dim);
  const std::vector<Field> fields = fields_of(spec);
  const size_t payload = record_payload(fields);
  const size_t needed = minimum_ram(spec, 0, !path.empty());
  if (ram_bytes != 0 && ram_bytes < needed) {
    throw Error(ErrorKind::kInvalid, "table '" + name + "': ram=" + std::to_string(ram_bytes) +
                                         " bytes is too small to work with; it needs at least ram=" +
                                         std::to_string(needed));
  }
  if (path.empty()) {
    auto table = std::unique_ptr<Table>(new Table(vfs, path, name, spec, options));
    table->start_in_ram();
    return table;
  }
  if (disk_bytes != 0) {
    const uint64_t slots = slots_per_segment(spec, payload);
    MemoryPlan plan = plan_memory(ram_bytes, payload, slots, kAssumedReadUnit, true);
    plan.log.chunk_bytes = std::min(plan.log.chunk_bytes, smallest_chunk_bytes(record_stride(payload)));
    const uint64_t least = Store::disk_slack(slots * record_stride(payload), plan.log) + 2 * Store::checkpoint_estimate(0);
    if (disk_bytes < least) {
      throw Error(ErrorKind::kInvalid, "table '" + name + "': disk=" + std::to_string(disk_bytes) +
                                           " bytes is too small to work with; it needs at least disk=" + std::to_string(least));
    }
  }
  bool is_left = false;  // of a scratch table
  if (vfs.exists(path)) {
    bool is_table = false;
    bool is_empty = true;
    try {
      for (const std::string& entry : vfs.list(path)) {
        uint64_t number;
        is_table |= parse_name(entry, "manifest-", &number);
        is_empty &= entry == kLockName || entry.rfind(kTemporaryPrefix, 0) == 0;  // of a create that did not finish
      }
    } catch (const Error& error) {
      if (error.error_number() != ENOTDIR) throw;
      is_empty = false;
    }
    is_left = is_table && is_scratch(Manifests(vfs, path));
    if (is_table && !is_left) {
      throw Error(ErrorKind::kExists,
                  "a table exists already at " + path + "; open it with bb.open, or remove the directory");
    }
    if (!is_empty && !is_left) throw Error(ErrorKind::kExists, path + " exists already and is not an empty directory");
  }
  vfs::current_io();  // a wrong BUNKBED_IO is an error before anything is made
  vfs.make_directories(path);
  std::unique_ptr<vfs::Lock> lock;
  try {
    lock = vfs.lock(path + "/" + kLockName);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kLocked || !is_left) throw;
    throw Error(ErrorKind::kExists, "a scratch table exists at " + path + " and is in use by " + error.what() +
                                        "; close it there first");
  }
  if (is_left) {
    // Another process may have made a table of its own here before this one had the lock.
    if (!is_scratch(Manifests(vfs, path))) {
      throw Error(ErrorKind::kExists, "a table exists already at " + path + "; open it with bb.open, or remove the directory");
    }
    clear_scratch(vfs, path);
  }
  Manifest manifest;
  manifest.uuid = new_uuid();
  manifest.reader_flags = (has_narrow_slots(fields) ? kReaderFlagNarrowSlots : 0) | (spec.is_scratch ? kReaderFlagScratch : 0);
  manifest.writer_flags = spec.belongs_to_run ? kWriterFlagRun : 0;
  manifest.num_rows = spec.num_rows;
  manifest.dim = spec.dim;
  manifest.init = spec.init;
  manifest.optimizer = spec.optimizer;
  manifest.fields = fields;
  manifest.payload_bytes = payload;
  manifest.slots_per_segment = slots_per_segment(spec, payload);
  manifest.meta = "{}";
  Manifests(vfs, path).write(manifest);
  return open_or_made(vfs, path, name, options, std::move(lock));
}

std::unique_ptr<Table> Table::open(vfs::Vfs& vfs, const std::string& path, const std::string& name,
                                   const OpenOptions& options) {
  return open_or_made(vfs, path, name, options, nullptr);
}

std::unique_ptr<Table> Table::open_or_made(vfs::Vfs& vfs, const std::string& path, const std::string& name,
                                           const OpenOptions& options, std::unique_ptr<vfs::Lock> made) {
  const Manifests manifests(vfs, path);
  // A reader may meet a commit that is collected while it opens; it then looks again.
  for (int attempt = 0;; ++attempt) {
    const bool is_made = made != nullptr;
    std::unique_ptr<vfs::Lock> lock = std::move(made);
    try {
      (void)manifests.epochs();  // a table at all?
      if (options.writable && !is_made) {
        try {
          lock = vfs.lock(path + "/" + kLockName);
        } catch (const Error& error) {
          if (error.kind() != ErrorKind::kLocked) throw;
          throw Error(ErrorKind::kLocked, "table '" + name + "' at " + path + " is being written by " + error.what() +
                                              "; close it there, or open it with mode=\"r\"");
        }
      }
      Manifest manifest = !options.snapshot.empty()  ? manifests.load_snapshot(options.snapshot)
                          : options.epoch.has_value() ? manifests.load(*options.epoch)
                                                      : manifests.load_newest();
      const bool is_scratch = (manifest.reader_flags & kReaderFlagScratch) != 0;
      if (is_scratch && !is_made) refuse_scratch(name, path);
      if (options.writable) {
        if ((manifest.writer_flags & ~kKnownWriterFlags) != 0) {
          throw Error(ErrorKind::kReadOnly, "table '" + name +
                                                "' uses features this release cannot write; open it with mode=\"r\"");
        }
        if ((manifest.writer_flags & kWriterFlagRun) != 0 && !options.through_run) {
          throw Error(ErrorKind::kReadOnly, "table '" + name + "' at " + path +
                                                " belongs to a run, which commits its tables together; open the run "
                                                "with bb.Run, or the table with mode=\"r\"");
        }
        std::vector<uint64_t> newer;
        for (const uint64_t epoch : manifests.epochs()) {
          if (epoch > manifest.epoch) newer.push_back(epoch);
        }
        manifests.remove(newer);
        manifests.remove_temporaries();
      }
      check_record_size(manifest.dim);
      TableSpec spec;
      spec.num_rows = manifest.num_rows;
      spec.dim = manifest.dim;
      spec.dtype = manifest.dtype();
      spec.init = manifest.init;
      spec.optimizer = manifest.optimizer;
      spec.belongs_to_run = (manifest.writer_flags & kWriterFlagRun) != 0;
      spec.is_scratch = is_scratch;
      const size_t needed = minimum_ram(spec, manifest.stored_rows, true);
      if (options.ram_bytes < needed) {
        throw Error(ErrorKind::kInvalid, "table '" + name + "': ram=" + std::to_string(options.ram_bytes) +
                                             " bytes is too small for " + std::to_string(manifest.stored_rows) +
                                             " stored rows; it needs at least ram=" + std::to_string(needed));
      }
      auto table = std::unique_ptr<Table>(new Table(vfs, path, name, spec, options));
      table->file_lock_ = std::move(lock);
      table->load(manifest);
      table->require_disk_limit();
      if (options.writable) table->store_->merge_segments();
      return table;
    } catch (const Error& error) {
      // A run's reader asks for one epoch, which the writer may have collected: no damage, and no other to look for.
      const bool is_collected = !options.writable && options.epoch.has_value() &&
                                !vfs.exists(path + "/" + manifest_name(*options.epoch));
      const bool vanished = error.kind() == ErrorKind::kNotFound && vfs.exists(path) && !is_collected;
      if (vanished && !options.writable && attempt < 20) continue;
      if (vanished) throw Error(ErrorKind::kCorruption, "table '" + name + "': a file its commit names is missing: " + error.what());
      throw;
    }
  }
}

namespace {

// Rows whose directory the smallest budget must hold: all of a table where that is little, otherwise the stored ones
// and some to begin with.
uint64_t rows_to_hold(const TableSpec& spec, uint64_t stored_rows) {
  constexpr size_t kLittle = 16u << 20;
  if (spec.num_rows >= 0 && hashed_directory_bytes(static_cast<uint64_t>(spec.num_rows)) <= kLittle) {
    return static_cast<uint64_t>(spec.num_rows);
  }
  return stored_rows + 4096;
}

}  // namespace

size_t Table::minimum_ram(const TableSpec& spec, uint64_t stored_rows, bool on_disk) {
  const size_t payload = record_payload(fields_of(spec));
  const uint64_t slots = slots_per_segment(spec, payload);
  // The plan grows with the budget in places: the smallest budget that holds a directory is a fixed point.
  const auto smallest = [&](size_t directory, size_t at_least) {
    size_t needed = at_least;
    for (int round = 0; round < 64; ++round) {
      const MemoryPlan plan = plan_memory(needed, payload, slots, kAssumedReadUnit, on_disk);
      const size_t next = plan.fixed_bytes + directory + (kMinFrames + 1) * Cache::frame_cost(payload);
      if (next <= needed) break;
      needed = next;
    }
    return needed;
  };
  const size_t hashed = smallest(hashed_directory_bytes(rows_to_hold(spec, stored_rows)), 1);
  if (spec.num_rows < 0) return hashed;
  const size_t flat = flat_directory_bytes(static_cast<uint64_t>(spec.num_rows));
  return std::min(is_flat(spec.num_rows, hashed) ? ~size_t{0} : hashed, smallest(flat, 4 * flat));
}

size_t Table::wanted_ram(const TableSpec& spec, bool on_disk) {
  if (spec.num_rows < 0) return 0;
  const size_t payload = record_payload(fields_of(spec));
  const auto rows = static_cast<size_t>(spec.num_rows);
  const long double base = static_cast<long double>(rows) * (Cache::frame_cost(payload) + 5) + (1u << 20);
  if (base > 1e15L) return 0;
  size_t wanted = static_cast<size_t>(base);
  for (int round = 0; round < 64; ++round) {
    const MemoryPlan plan = plan_memory(wanted, payload, slots_per_segment(spec, payload), kAssumedReadUnit, on_disk);
    const size_t directory = is_flat(spec.num_rows, wanted) ? flat_directory_bytes(rows) : hashed_directory_bytes(rows);
    const size_t next = plan.fixed_bytes + directory + rows * Cache::frame_cost(payload) + Cache::frame_cost(payload);
    if (next <= wanted) return wanted;
    wanted = next;
  }
  return wanted;
}

MemoryUse Table::memory_use(const TableSpec& spec, uint64_t stored_rows, size_t ram_bytes, size_t read_unit,
                            bool on_disk) {
  const size_t payload = record_payload(fields_of(spec));
  const MemoryPlan plan = plan_memory(ram_bytes, payload, slots_per_segment(spec, payload), read_unit, on_disk);
  MemoryUse use;
  use.most_segments = Compactor::most_segments(
      static_cast<uint64_t>(static_cast<double>(stored_rows * (record_stride(payload) + 16)) / kTargetLive),
      slots_per_segment(spec, payload) * record_stride(payload));
  use.record_bytes = payload;
  use.stored_bytes = record_stride(payload) + sizeof(int64_t) + sizeof(uint64_t);
  use.frame_bytes = Cache::frame_cost(payload);
  use.directory_bytes = is_flat(spec.num_rows, ram_bytes) ? flat_directory_bytes(static_cast<uint64_t>(spec.num_rows))
                                                          : hashed_directory_bytes(stored_rows);
  use.fixed_bytes = plan.fixed_bytes;
  const size_t taken = use.fixed_bytes + use.directory_bytes;
  use.frames = ram_bytes == 0 ? stored_rows : (ram_bytes > taken ? ram_bytes - taken : 0) / use.frame_bytes;
  if (spec.num_rows >= 0) use.frames = std::min(use.frames, static_cast<size_t>(spec.num_rows));
  return use;
}

void Table::make_store(const MemoryPlan& plan, std::unique_ptr<Log> log) {
  const bool is_reader = !options_.writable;
  const size_t frame_bytes = is_reader ? weight_bytes_ : payload_bytes_;
  std::unique_ptr<Directory> directory = is_flat(spec_.num_rows, plan.total_bytes)
                                             ? make_flat_directory(static_cast<uint64_t>(spec_.num_rows))
                                             : make_hashed_directory();
  // Address space for as many frames as could ever be asked for; memory comes with use.
  const size_t cost = Cache::frame_cost(frame_bytes);
  const size_t physical = static_cast<size_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(::sysconf(_SC_PAGE_SIZE));
  size_t frames = std::max(physical, plan.total_bytes) / cost;
  if (spec_.num_rows >= 0) frames = std::min(frames, static_cast<size_t>(spec_.num_rows));
  ahead_ = {};
  staging_.reset();
  store_ = std::make_unique<Store>(name_, frame_bytes, std::max(frames, kMinFrames), std::move(directory),
                                   std::move(log), plan);
  // Commits at once that nobody asked to keep: the last; a run's tables have those of its last two, and one on its way.
  store_->set_disk_limit(options_.disk_bytes, spec_.is_scratch ? 0 : spec_.belongs_to_run ? 3 : 1,
                         static_cast<uint64_t>(spec_.num_rows));  // -1: the largest number
  store_->reserve_held(rows_above());
  store_->set_initial_record(
      [this](int64_t row, size_t record_bytes, std::byte* record) { initial_record(row, record_bytes, record); });
}

void Table::start_in_ram() {
  uuid_ = new_uuid();
  fields_ = fields_of(spec_);
  payload_bytes_ = record_payload(fields_);
  weight_bytes_ = field_bytes(fields_[0]);
  committed_.epoch = 0;
  committed_.optimizer = spec_.optimizer;
  make_store(plan_memory(options_.ram_bytes, payload_bytes_, 1, kAssumedReadUnit, false), nullptr);
}

void Table::load(const Manifest& manifest) {
  // What the fields say must be what this release's optimizer would lay out: otherwise an update would write
  // somewhere else.
  if (manifest.fields != fields_of(spec_) || manifest.payload_bytes != record_payload(manifest.fields)) {
    throw Error(ErrorKind::kFormat, "table '" + name_ + "': its record holds fields this release does not know");
  }
  if (fields_.empty()) {  // other threads read these without the lock: they are set once, before the table is handed out
    uuid_ = manifest.uuid;
    fields_ = manifest.fields;
    payload_bytes_ = manifest.payload_bytes;
    weight_bytes_ = field_bytes(fields_[0]);
  }
  read_unit_ = vfs_.open(path_ + "/" + manifest_name(manifest.epoch), true)->read_alignment();
  const MemoryPlan plan =
      plan_memory(options_.ram_bytes, payload_bytes_, manifest.slots_per_segment, read_unit_, true);
  auto log = std::make_unique<Log>(vfs_, path_, uuid_, payload_bytes_, manifest.slots_per_segment, plan.log);
  if (spec_.is_scratch) {
    log->make_nameless();
  } else if (options_.writable) {
    log->close_unused();
  }
  if (spec_.num_rows >= 0) log->set_ids_end(static_cast<uint64_t>(spec_.num_rows));
  log->adopt(manifest.segments);
  failpoint("open.adopted");
  log->begin_epoch(manifest.epoch + 1, manifest.next_segment, manifest.next_version);
  make_store(plan, std::move(log));
  // The frames are empty while the directory is rebuilt: their room serves as scratch.
  const size_t scratch = plan.scratch_bytes + store_->cache().capacity() * Cache::frame_cost(store_->frame_bytes()) / 2;
  load_directory(manifest, scratch);
  failpoint("open.rebuilt");
  if (store_->directory().stored_rows() != manifest.stored_rows) {
    throw Error(ErrorKind::kCorruption, "table '" + name_ + "': its segments hold " +
                                            std::to_string(store_->directory().stored_rows()) +
                                            " rows, the commit names " + std::to_string(manifest.stored_rows));
  }
  store_->apply(plan);
  if (options_.writable) manifests_.remember();
  committed_ = manifest;
  step_ = manifest.step;
  meta_ = manifest.meta;
  changed_ = false;
  ++changes_;
  if (!options_.writable) return;
  if (store_->disk_limit() != 0) remove_leftovers();
  collect_locked();
  if (store_->disk_limit() != 0 && !store_->has_disk_bytes(0)) collect_locked(1);
}

// What a session left that died. Their numbers are not used again while this one lasts: a reader may have seen a commit of
// theirs that a run took back.
void Table::remove_leftovers() {
  uint64_t next = store_->log()->next_segment();
  for (const std::string& name : vfs_.list(path_)) {
    uint64_t number;
    if (parse_name(name, "segment-", &number)) next = std::max(next, number + 1);
  }
  store_->log()->begin_epoch(store_->log()->epoch(), next, store_->log()->next_version());
}

void Table::drop_store() {
  ++checkpoints_.store;
  checkpoints_.ready.reset();
  checkpoints_.replay_epoch = 0;
  staging_.reset();
  store_.reset();
}

void Table::close() {
  lock_.require_own_process();
  settle_checkpoint(true);
  close_files();
}

void Table::close_files() {
  const auto guard = lock_.exclusive();
  if (commit_thread_ != nullptr) commit_thread_->join();
  commit_thread_.reset();
  if (closed_) return;
  closed_ = true;
  drop_store();
  if (file_lock_ != nullptr && !(spec_.belongs_to_run && pinned_epochs_.empty())) {
    try {
      manifests_.collect({.pinned = pinned_epochs_});  // segments that no commit came to name
    } catch (const std::exception&) {  // no memory, say; the next opening tries again
    }
  }
  if (file_lock_ != nullptr) file_lock_->unlock();
  file_lock_.reset();
}

void Table::initial_record(int64_t row, size_t record_bytes, std::byte* record) const {
  if (spec_.dtype == DType::kFloat32) {
    kernels().init_row(spec_.init, row, spec_.dim, reinterpret_cast<float*>(record));
  } else {
    thread_local std::vector<float> wide;  // a row's weights, kept between calls
    wide.resize(spec_.dim);
    kernels().init_row(spec_.init, row, spec_.dim, wide.data());
    write_field(fields_[0], wide.data(), record);
    const size_t used = spec_.dim * dtype_bytes(spec_.dtype);
    std::memset(record + used, 0, weight_bytes_ - used);
  }
  if (record_bytes < payload_bytes_) return;  // weights only
  write_initial_slots(fields_, spec_.optimizer, record);
}

void Table::widen(const std::byte* record, float* out) const { read_field(fields_[0], record, out); }

// ---- Facts ---------------------------------------------------------------------------------------------------

void Table::set_ram(size_t bytes) {
  const auto guard = lock_.exclusive();
  require_usable();
  const bool has_log = store_->log() != nullptr;
  const MemoryPlan plan = plan_within_disk(
      plan_memory(bytes, payload_bytes_, has_log ? committed_.slots_per_segment : 1, read_unit_, has_log));
  staging_.reset();  // it reads into memory that is laid out anew
  store_->apply(plan);
  options_.ram_bytes = bytes;
  drop_scratch();  // of the old size; it grows back as far as the new plan allows
}

void Table::drop_scratch() {
  batch_ = Batch();
  missing_ids_ = {};
  missing_ = {};
  frames_ = {};
  members_ = {};
  sums_ = {};
  records_ = {};
}

void Table::set_optimizer(const OptimizerSpec& optimizer) {
  const auto guard = lock_.exclusive(TableLock::Commits::kMayRun);
  require_usable();
  if (optimizer.kind != spec_.optimizer.kind || optimizer.initial_accumulator != spec_.optimizer.initial_accumulator ||
      optimizer.state_dtype != spec_.optimizer.state_dtype) {
    throw Error(ErrorKind::kInvalid, "table '" + name_ + "': its slots cannot change");
  }
  spec_.optimizer = optimizer;
}

OptimizerSpec Table::optimizer() const {
  TableLock::Guard guard;
  if (lock_.is_own_process()) guard = lock_.work();  // a forked child may have got it locked, and has no thread that sets
  return spec_.optimizer;
}

TableStats Table::stats() {
  const auto guard = lock_.work();
  require_usable();
  TableStats stats;
  stats.store = store_->stats();
  stats.lookups = lookups_;
  stats.updates = updates_;
  stats.ids = ids_seen_;
  stats.commits = commits_;
  stats.ram_bytes = store_->ram_bytes();
  stats.ram_budget_bytes = store_->plan().total_bytes;
  stats.frames = store_->cache().resident();
  stats.frame_capacity = store_->cache().capacity();
  stats.dirty_rows = store_->dirty_rows();
  stats.stored_rows = store_->directory().stored_rows();
  stats.directory_bytes = store_->directory().bytes();
  if (Log* log = store_->log()) {
    stats.log = log->stats();
    stats.compactions = store_->compactor().segments_compacted();
    stats.compacted_records = store_->compactor().records_moved();
    stats.live_bytes = store_->compactor().live_bytes();
    stats.segments = log->segments().size();
    for (const auto& [id, segment] : log->segments()) stats.open_files += segment->file->is_open();
    for (const CheckpointEntry& entry : committed_.checkpoints) stats.checkpoint_bytes += entry.bytes;
    stats.disk_bytes = store_->disk_bytes() + (options_.writable ? 0 : stats.checkpoint_bytes);
    stats.disk_limit_bytes = store_->disk_limit();
    stats.snapshot_bytes = store_->snapshot_bytes();
    stats.stall_s = stall_s_ + stats.log.read_wait_s;
  }
  stats.staged_rows = staged_rows_;
  stats.indexed_records = indexed_records_;
  stats.window_batches = store_->window().next_batch() - store_->window().first_batch();
  stats.window_bytes = store_->window_bytes();
  stats.staging_depth = ahead_.depth;
  return stats;
}

int64_t Table::step() {
  const auto guard = lock_.work();
  return step_;
}

uint64_t Table::epoch() {
  const auto guard = lock_.work();
  return committed_.epoch;
}

Table::Uncommitted Table::uncommitted() {
  const auto guard = lock_.work();
  const size_t held = holder_ == nullptr ? 0 : holder_->num_held();
  if (closed_ || (!changed_ && is_durable_ && held == 0) || store_ == nullptr || spec_.is_scratch) return {};
  // A row that is held may be dirty here, too.
  Uncommitted found{store_->dirty_rows() + held, held == 0 || store_->dirty_rows() == 0,
                    std::max<int64_t>(0, step_ - committed_.step)};
  if (Log* log = store_->log()) {
    for (const auto& [id, segment] : log->segments()) {
      if (segment->epoch <= committed_.epoch || segment->live == 0) continue;
      found.rows += segment->live;
      found.is_exact = false;
    }
  }
  found.rows = std::min<uint64_t>(found.rows, store_->directory().stored_rows() + held);
  return found;
}

bool Table::is_changed() {
  const auto guard = lock_.work();
  return changed_ || !is_durable_ || (holder_ != nullptr && holder_->num_held() > 0);
}

std::string Table::meta() {
  const auto guard = lock_.work();
  return meta_;
}

}  // namespace bunkbed
