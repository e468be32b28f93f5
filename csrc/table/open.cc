// Makes and opens tables.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <utility>

#include "base/error.h"
#include "commit/scratch.h"
#include "format/record.h"
#include "table/parts.h"
#include "table/table.h"

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

}  // namespace

std::unique_ptr<Table> Table::create(vfs::Vfs& vfs, const std::string& path, const std::string& name,
                                     const TableSpec& spec, size_t ram_bytes, uint64_t disk_bytes,
                                     const std::optional<Identity>& identity) {
  OpenOptions options;
  options.ram_bytes = ram_bytes;
  options.disk_bytes = disk_bytes;
  options.through_run = spec.belongs_to_run;
  check_record_size(spec.dim);
  const std::vector<Field> fields = fields_of(spec);
  const size_t payload = payload_of(spec);
  const size_t needed = minimum_ram(spec, 0, !path.empty());
  if (ram_bytes != 0 && ram_bytes < needed) {
    throw Error(ErrorKind::kInvalid,
                "table '" + name + "': ram=" + std::to_string(ram_bytes) +
                    " bytes is too small to work with; it needs at least ram=" + std::to_string(needed));
  }
  if (path.empty()) {
    auto parts = std::make_unique<TableParts>(vfs, path, name, spec, options);
    {
      const auto guard = parts->state.lock.work();
      parts->loader.start_in_ram(new_uuid());
    }
    return std::unique_ptr<Table>(new Table(std::move(parts)));
  }
  if (disk_bytes != 0) {
    const uint64_t slots = slots_per_segment(spec, payload);
    MemoryPlan plan = plan_memory(ram_bytes, payload, slots, kAssumedReadUnit, true);
    plan.log.chunk_bytes = std::min(plan.log.chunk_bytes, smallest_chunk_bytes(record_stride(payload)));
    const uint64_t least =
        DiskBudget::slack_bytes(slots * record_stride(payload), plan.log) + 2 * DiskBudget::index_snapshot_estimate(0);
    if (disk_bytes < least) {
      throw Error(ErrorKind::kInvalid,
                  "table '" + name + "': disk=" + std::to_string(disk_bytes) +
                      " bytes is too small to work with; it needs at least disk=" + std::to_string(least));
    }
  }
  bool is_left = false;  // the directory has an old scratch table
  if (vfs.exists(path)) {
    bool is_table = false;
    bool is_empty = true;
    try {
      for (const std::string& entry : vfs.list(path)) {
        uint64_t number;
        is_table |= parse_name(entry, "manifest-", &number);
        is_empty &= entry == kLockName || entry.rfind(kTemporaryPrefix, 0) == 0;  // of a failed create()
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
  vfs::current_io();  // throws for a wrong BUNKBED_IO before anything is made
  vfs.make_directories(path);
  std::unique_ptr<vfs::Lock> lock;
  try {
    lock = vfs.lock(path + "/" + kLockName);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kLocked || !is_left) throw;
    throw Error(ErrorKind::kExists,
                "a scratch table exists at " + path + " and is in use by " + error.what() + "; close it there first");
  }
  if (is_left) {
    // Another process may have made a table of its own here before this one had the lock.
    if (!is_scratch(Manifests(vfs, path))) {
      throw Error(ErrorKind::kExists,
                  "a table exists already at " + path + "; open it with bb.open, or remove the directory");
    }
    clear_scratch(vfs, path);
  }
  Manifest manifest;
  manifest.uuid = identity.has_value() ? identity->uuid : new_uuid();
  manifest.epoch = identity.has_value() ? identity->epoch - 1 : 0;
  manifest.reader_flags =
      (has_narrow_slots(fields) ? kReaderFlagNarrowSlots : 0) | (spec.is_scratch ? kReaderFlagScratch : 0);
  manifest.writer_flags = spec.belongs_to_run ? kWriterFlagRun : 0;
  manifest.num_rows = spec.num_rows;
  manifest.dim = spec.dim;
  manifest.init = spec.init;
  manifest.optimizer = spec.optimizer;
  manifest.retention = spec.retention;
  manifest.clock = spec.retention.first_time();
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
  // A commit may be collected while a reader opens it. The reader then tries again.
  for (int attempt = 0;; ++attempt) {
    const bool is_made = made != nullptr;
    std::unique_ptr<vfs::Lock> lock = std::move(made);
    try {
      (void)manifests.epochs();  // throws if there is no table
      if (options.writable && !is_made) {
        try {
          lock = vfs.lock(path + "/" + kLockName);
        } catch (const Error& error) {
          if (error.kind() != ErrorKind::kLocked) throw;
          throw Error(ErrorKind::kLocked, "table '" + name + "' at " + path + " is being written by " + error.what() +
                                              "; close it there, or open it with mode=\"r\"");
        }
      }
      Manifest manifest = !options.snapshot.empty()   ? manifests.load_snapshot(options.snapshot)
                          : options.epoch.has_value() ? manifests.load(*options.epoch)
                                                      : manifests.load_newest();
      const bool is_scratch = (manifest.reader_flags & kReaderFlagScratch) != 0;
      if (is_scratch && !is_made) refuse_scratch(name, path);
      if (options.writable) {
        if ((manifest.writer_flags & ~kKnownWriterFlags) != 0) {
          throw Error(ErrorKind::kReadOnly,
                      "table '" + name + "' uses features this release cannot write; open it with mode=\"r\"");
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
      const TableSpec spec = spec_of(manifest);
      // Refuses what cannot work before it is loaded. The minimum has room for any rows and for growth; the directory
      // of these may take less, so load() has the last word.
      const uint64_t stored = manifest.stored_rows;
      const uint64_t fewest = spec.num_rows < 0 ? stored - stored / 8 : stored / 4;
      if (options.ram_bytes != 0 && options.ram_bytes < minimum_ram(spec, fewest, true)) {
        const size_t needed = minimum_ram(spec, stored, true);
        throw Error(ErrorKind::kInvalid, "table '" + name + "': ram=" + std::to_string(options.ram_bytes) +
                                             " bytes is too small for " + std::to_string(manifest.stored_rows) +
                                             " stored rows; it needs at least ram=" + std::to_string(needed));
      }
      auto table = std::unique_ptr<Table>(new Table(std::make_unique<TableParts>(vfs, path, name, spec, options)));
      table->parts_->file_lock = std::move(lock);
      const auto guard = table->parts_->state.lock.work();
      table->parts_->loader.load(manifest);
      table->parts_->loader.finish_opening();
      return table;
    } catch (const Error& error) {
      // A reader of a run opens one given epoch. If the writer has collected it, nothing is damaged and no retry can
      // help.
      const bool is_collected =
          !options.writable && options.epoch.has_value() && !vfs.exists(path + "/" + manifest_name(*options.epoch));
      const bool vanished = error.kind() == ErrorKind::kNotFound && vfs.exists(path) && !is_collected;
      if (vanished && !options.writable && attempt < 20) continue;
      if (vanished)
        throw Error(ErrorKind::kCorruption,
                    "table '" + name + "': a file its commit names is missing: " + error.what());
      throw;
    }
  }
}

}  // namespace bunkbed
