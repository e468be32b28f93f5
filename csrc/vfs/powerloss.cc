#include "vfs/powerloss.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "base/error.h"
#include "base/mutex.h"

namespace bunkbed::vfs {

namespace {

constexpr uint64_t kNever = ~0ull;
constexpr size_t kSector = 512;

// splitmix64: small, and equal on all machines.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  uint64_t below(uint64_t n) { return next() % n; }

 private:
  uint64_t state_;
};

uint64_t digest_of(uint64_t digest, const void* data, size_t n) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  while (n >= 8) {
    uint64_t word;
    std::memcpy(&word, bytes, 8);
    digest = (digest ^ word) * 0x9fb21c651e98df25ull;
    digest ^= digest >> 32;
    bytes += 8;
    n -= 8;
  }
  for (; n > 0; --n) digest = (digest ^ *bytes++) * 0x100000001b3ull;
  return digest;
}

void put(std::vector<std::byte>* file, uint64_t offset, const std::byte* data, size_t n) {
  if (file->size() < offset + n) file->resize(offset + n);
  std::memcpy(file->data() + offset, data, n);
}

}  // namespace

PowerlossVfs::PowerlossVfs(std::string root, Vfs& below) : root_(std::move(root)), below_(below) {
  const MutexLock guard(mutex_);
  inodes_[root_] = 0;
  adopt(root_, 0);
}

void PowerlossVfs::adopt(const std::string& path, uint32_t inode) {
  first_entries_[inode];
  for (const std::string& name : below_.list(path)) {
    const std::string child = path + "/" + name;
    const uint32_t number = num_inodes_++;
    inodes_[child] = number;
    first_entries_[inode][name] = number;
    struct stat info{};
    if (::lstat(child.c_str(), &info) == 0 && S_ISDIR(info.st_mode)) {
      adopt(child, number);
      continue;
    }
    const auto file = below_.open(child, false);
    std::vector<std::byte>& bytes = first_bytes_[number];
    bytes.resize(file->size());
    file->read(bytes.data(), bytes.size(), 0);
  }
}

const char* PowerlossVfs::kind_name(Kind kind) {
  switch (kind) {
    case Kind::kWrite:
      return "write";
    case Kind::kTruncate:
      return "truncate";
    case Kind::kSync:
      return "sync";
    case Kind::kCreate:
      return "create";
    case Kind::kLink:
      return "link";
    case Kind::kRemove:
      return "remove";
    case Kind::kMakeDirectory:
      return "mkdir";
    case Kind::kSyncDirectory:
      return "sync_directory";
  }
  return "";
}

// ---- Recording -----------------------------------------------------------------------------------------------

uint32_t PowerlossVfs::directory_of(const std::string& path, std::string* name) {
  const size_t slash = path.find_last_of('/');
  *name = path.substr(slash + 1);
  const auto found = inodes_.find(path.substr(0, slash));
  return found == inodes_.end() ? ~0u : found->second;
}

size_t PowerlossVfs::begin_event(Kind kind, const std::string& path, uint32_t inode) {
  const MutexLock guard(mutex_);
  Event event{kind, ++tick_, kNever, inode, 0, {}, 0, {}};
  event.parent = directory_of(path, &event.name);
  events_.push_back(std::move(event));
  return events_.size() - 1;
}

void PowerlossVfs::end_event(size_t event) {
  const MutexLock guard(mutex_);
  events_[event].end = ++tick_;
}

// Carries out `call`. A write that failed may have changed the file: its event has a begin, no end, and is never safe.
// Any other operation that failed did not happen.
template <typename Call>
auto PowerlossVfs::record(size_t event, Call&& call) {
  try {
    return call();
  } catch (...) {
    const MutexLock guard(mutex_);
    if (events_[event].kind != Kind::kWrite) events_[event].begin = kNever;
    throw;
  }
}

class PowerlossVfs::TracedFile final : public File {
 public:
  TracedFile(PowerlossVfs* owner, std::shared_ptr<File> below, uint32_t inode)
      : owner_(owner), below_(std::move(below)), inode_(inode) {}
  void read(void* data, size_t n, uint64_t offset) override { below_->read(data, n, offset); }
  void write(const void* data, size_t n, uint64_t offset) override {
    const size_t event = owner_->begin_event(Kind::kWrite, path(), inode_);
    {
      const MutexLock guard(owner_->mutex_);
      owner_->events_[event].offset = offset;
      const auto* bytes = static_cast<const std::byte*>(data);
      owner_->events_[event].data.assign(bytes, bytes + n);
    }
    owner_->record(event, [&] { below_->write(data, n, offset); });
    owner_->end_event(event);
  }
  void sync() override {
    const size_t event = owner_->begin_event(Kind::kSync, path(), inode_);
    owner_->record(event, [&] { below_->sync(); });
    owner_->end_event(event);
  }
  uint64_t size() override { return below_->size(); }
  uint32_t read_alignment() const override { return below_->read_alignment(); }
  const std::string& path() const override { return below_->path(); }
  bool is_at(const std::string& path) override { return below_->is_at(path); }
  Identity identity() override { return below_->identity(); }
  int descriptor(std::shared_ptr<File>* hold) override { return below_->descriptor(hold); }

 private:
  PowerlossVfs* owner_;
  std::shared_ptr<File> below_;
  const uint32_t inode_;
};

uint64_t PowerlossVfs::now() {
  const MutexLock guard(mutex_);
  return tick_;
}

std::string PowerlossVfs::describe(uint64_t moment) {
  const MutexLock guard(mutex_);
  const Event* last = nullptr;
  for (const Event& event : events_) {
    if (event.begin <= moment && (last == nullptr || event.begin > last->begin)) last = &event;
  }
  if (last == nullptr) return "";
  return std::string(last->end <= moment ? "after " : "during ") + kind_name(last->kind) + " " + last->name;
}

std::shared_ptr<File> PowerlossVfs::traced(const std::string& path, std::shared_ptr<File> below, size_t event) {
  uint32_t inode;
  {
    const MutexLock guard(mutex_);
    inode = num_inodes_++;
    inodes_[path] = inode;
    events_[event].inode = inode;
  }
  end_event(event);
  return std::make_shared<TracedFile>(this, std::move(below), inode);
}

std::shared_ptr<File> PowerlossVfs::create(const std::string& path) {
  const size_t event = begin_event(Kind::kCreate, path, ~0u);
  return traced(path, record(event, [&] { return below_.create(path); }), event);
}

std::shared_ptr<File> PowerlossVfs::create_small(const std::string& path) {
  const size_t event = begin_event(Kind::kCreate, path, ~0u);
  return traced(path, record(event, [&] { return below_.create_small(path); }), event);
}

void PowerlossVfs::link(const std::string& from, const std::string& to) {
  uint32_t inode;
  {
    const MutexLock guard(mutex_);
    inode = inodes_.at(from);
  }
  const size_t event = begin_event(Kind::kLink, to, inode);
  record(event, [&] { below_.link(from, to); });
  end_event(event);
  const MutexLock guard(mutex_);
  inodes_[to] = inode;
}

void PowerlossVfs::remove(const std::string& path) {
  const bool is_there = below_.exists(path);
  if (!is_there) return below_.remove(path);
  const size_t event = begin_event(Kind::kRemove, path, 0);
  record(event, [&] { below_.remove(path); });
  end_event(event);
  const MutexLock guard(mutex_);
  inodes_.erase(path);
}

// The other filesystem syncs a truncation: it is safe once it has ended.
void PowerlossVfs::truncate(const std::string& path, uint64_t bytes) {
  uint32_t inode;
  {
    const MutexLock guard(mutex_);
    inode = inodes_.at(path);
  }
  const size_t event = begin_event(Kind::kTruncate, path, inode);
  {
    const MutexLock guard(mutex_);
    events_[event].offset = bytes;
  }
  record(event, [&] { below_.truncate(path, bytes); });
  end_event(event);
}

void PowerlossVfs::sync_directory(const std::string& path) {
  uint32_t inode = ~0u;
  {
    const MutexLock guard(mutex_);
    const auto found = inodes_.find(path);
    if (found != inodes_.end()) inode = found->second;
  }
  const size_t event = begin_event(Kind::kSyncDirectory, path, inode);
  record(event, [&] { below_.sync_directory(path); });
  end_event(event);
}

// Makes each directory below the root and syncs its parent, in the order that posix() has.
void PowerlossVfs::make_directories(const std::string& path) {
  below_.make_directories(root_);
  for (size_t at = root_.size() + 1; at <= path.size(); ++at) {
    if (at != path.size() && path[at] != '/') continue;
    const std::string prefix = path.substr(0, at);
    if (below_.exists(prefix)) continue;
    const size_t event = begin_event(Kind::kMakeDirectory, prefix, ~0u);
    record(event, [&] { below_.make_directories(prefix); });
    {
      const MutexLock guard(mutex_);
      events_[event].inode = num_inodes_++;
      inodes_[prefix] = events_[event].inode;
    }
    end_event(event);
    sync_directory(prefix.substr(0, prefix.find_last_of('/')));
  }
}

// The other filesystem writes the process id of the holder; no record of it is needed after a loss.
std::unique_ptr<Lock> PowerlossVfs::lock(const std::string& path) {
  if (below_.exists(path)) return below_.lock(path);
  const size_t event = begin_event(Kind::kCreate, path, ~0u);
  auto lock = record(event, [&] { return below_.lock(path); });
  (void)traced(path, nullptr, event);
  return lock;
}

// ---- Losing power --------------------------------------------------------------------------------------------

namespace {

bool begins_with(const std::string& text, const std::string& with) { return text.compare(0, with.size(), with) == 0; }

}  // namespace

bool PowerlossVfs::is_ignored(const Event& sync, const std::vector<const Event*>& pending,
                              const std::vector<IgnoredSync>& ignored) const {
  for (const IgnoredSync& rule : ignored) {
    const bool of_directory = !rule.change.empty();
    if (of_directory != (sync.kind == Kind::kSyncDirectory)) continue;
    if (!of_directory) {
      if (begins_with(sync.name, rule.name)) return true;
      continue;
    }
    const auto is_of = [&](const Event* event) {
      return event->parent == sync.inode && begins_with(event->name, rule.name) &&
             kind_name(event->kind) == rule.change;
    };
    // The code syncs a directory for a link in another place than for a new file: a rule for "create" skips the former.
    const auto is_link = [&](const Event* event) { return event->parent == sync.inode && event->kind == Kind::kLink; };
    if (rule.change == "create" && std::any_of(pending.begin(), pending.end(), is_link)) continue;
    if (std::any_of(pending.begin(), pending.end(), is_of)) return true;
  }
  return false;
}

CrashState PowerlossVfs::crash(uint64_t moment, Names names, Sectors sectors, uint64_t seed,
                               const std::vector<IgnoredSync>& ignored) {
  const MutexLock guard(mutex_);
  Random random(seed * 0x2545f4914f6cdd1dull + moment);

  // The time until which each file and directory is safe: safe events ended before its last sync began.
  std::map<uint32_t, uint64_t> safe_until;
  std::map<uint32_t, std::vector<const Event*>> since_sync;  // changes of names since the last sync of a directory
  for (const Event& event : events_) {
    const bool is_sync = event.kind == Kind::kSync || event.kind == Kind::kSyncDirectory;
    if (event.end > moment) continue;
    const bool is_of_bytes = event.kind == Kind::kWrite || event.kind == Kind::kTruncate;
    if (!is_sync && !is_of_bytes) since_sync[event.parent].push_back(&event);
    if (!is_sync) continue;
    std::vector<const Event*>& pending = since_sync[event.inode];
    const bool is_taken = !is_ignored(event, pending, ignored);
    if (event.kind == Kind::kSyncDirectory) pending.clear();
    if (is_taken) safe_until[event.inode] = std::max(safe_until[event.inode], event.begin);
  }
  const auto is_safe = [&](const Event& event, uint32_t of) {
    const auto found = safe_until.find(of);
    return found != safe_until.end() && event.end < found->second;
  };

  // Names that survive.
  std::map<uint32_t, Entries> entries = first_entries_;
  std::vector<const Event*> changes;
  size_t num_unsafe = 0;
  for (const Event& event : events_) {
    const bool is_change = event.kind == Kind::kCreate || event.kind == Kind::kLink || event.kind == Kind::kRemove ||
                           event.kind == Kind::kMakeDirectory;
    if (!is_change || event.begin > moment) continue;
    changes.push_back(&event);
    num_unsafe += !is_safe(event, event.parent);
  }
  const uint64_t prefix = random.below(num_unsafe + 1);
  size_t at = 0;
  for (const Event* event : changes) {
    if (!is_safe(*event, event->parent)) {
      const size_t index = at++;
      bool survives = names == Names::kAll;
      if (names == Names::kPrefix) survives = index < prefix;
      if (names == Names::kSubset) survives = random.below(2) == 0;
      if (!survives) continue;
    }
    if (event->kind == Kind::kRemove) {
      entries[event->parent].erase(event->name);
    } else {
      entries[event->parent][event->name] = event->inode;
    }
    if (event->kind == Kind::kMakeDirectory) entries[event->inode];
  }

  // Files that can be reached by name.
  CrashState state;
  std::map<std::string, uint32_t> files;
  std::set<uint32_t> reached;
  std::vector<std::pair<std::string, uint32_t>> to_visit = {{"", 0}};
  while (!to_visit.empty()) {
    const auto [path, inode] = to_visit.back();
    to_visit.pop_back();
    for (const auto& [name, child] : entries[inode]) {
      const std::string child_path = path.empty() ? name : path + "/" + name;
      if (entries.contains(child)) {
        state.directories_.push_back(child_path);
        to_visit.emplace_back(child_path, child);
      } else {
        files[child_path] = child;
        reached.insert(child);
      }
    }
  }

  // Bytes that survive.
  std::map<uint32_t, std::vector<std::byte>> bytes;
  const auto bytes_of = [&](uint32_t inode) REQUIRES(mutex_) -> std::vector<std::byte>& {
    const auto [found, is_new] = bytes.try_emplace(inode);
    const auto first = first_bytes_.find(inode);
    if (is_new && first != first_bytes_.end()) found->second = first->second;
    return found->second;
  };
  for (const Event& event : events_) {
    if (event.begin > moment || !reached.contains(event.inode)) continue;
    if (event.kind == Kind::kTruncate && (event.end <= moment || random.below(2) == 0)) {
      bytes_of(event.inode).resize(event.offset);
    }
    if (event.kind != Kind::kWrite) continue;
    std::vector<std::byte>& file = bytes_of(event.inode);
    const size_t n = event.data.size();
    if (is_safe(event, event.inode)) {
      put(&file, event.offset, event.data.data(), n);
      continue;
    }
    // 0 kept, 1 dropped, 2 garbage, 3 chosen for each sector
    uint64_t way = static_cast<uint64_t>(sectors);
    if (sectors == Sectors::kMixed) way = std::min<uint64_t>(random.below(6), 3);
    for (size_t from = 0; from < n; from += kSector) {
      const size_t size = std::min(kSector, n - from);
      const uint64_t fate = way == 3 ? random.below(3) : way;
      if (fate == 0) put(&file, event.offset + from, event.data.data() + from, size);
      if (fate != 2) continue;
      std::byte garbage[kSector];
      for (size_t i = 0; i < kSector; i += 8) {
        const uint64_t word = random.next();
        std::memcpy(garbage + i, &word, 8);
      }
      put(&file, event.offset + from, garbage, size);
    }
    // The file may have the new length without the bytes.
    const bool is_extended = way != 0 && random.below(2) == 0;
    if (is_extended && file.size() < event.offset + n) file.resize(event.offset + n);
  }

  for (const auto& [path, inode] : files) state.files_[path] = bytes_of(inode);  // a copy: a file may have two names
  std::sort(state.directories_.begin(), state.directories_.end());
  uint64_t digest = 1;
  for (const std::string& path : state.directories_) digest = digest_of(digest, path.data(), path.size() + 1);
  for (const auto& [path, file] : state.files_) {
    const uint64_t size = file.size();
    digest = digest_of(digest, path.data(), path.size() + 1);
    digest = digest_of(digest, &size, sizeof size);
    digest = digest_of(digest, file.data(), file.size());
  }
  state.digest_ = digest;
  return state;
}

void CrashState::write(const std::string& path) const {
  Vfs& vfs = posix();
  vfs.make_directories(path);
  // Sorted: a directory comes before what is in it.
  for (const std::string& directory : directories_) {
    if (::mkdir((path + "/" + directory).c_str(), 0777) != 0) {
      throw Error(ErrorKind::kSystem, "mkdir failed", errno, path + "/" + directory);
    }
  }
  for (const auto& [name, bytes] : files_) {
    const auto file = vfs.create_small(path + "/" + name);
    if (!bytes.empty()) file->write(bytes.data(), bytes.size(), 0);
  }
}

}  // namespace bunkbed::vfs
