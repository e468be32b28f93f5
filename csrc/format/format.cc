#include "format/format.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <set>

#include "base/bytes.h"
#include "base/error.h"
#include "format/record.h"
#include "kernels/kernels.h"

namespace bunkbed {

namespace {

constexpr char kSegmentMagic[8] = {'B', 'B', 'E', 'D', 'S', 'E', 'G', '\n'};
constexpr char kChunkMagic[8] = {'B', 'B', 'E', 'D', 'C', 'H', 'K', '\n'};
constexpr char kManifestMagic[8] = {'B', 'B', 'E', 'D', 'M', 'A', 'N', '\n'};
constexpr size_t kManifestPrefixBytes = 24;  // magic, version, zero, bytes that follow before the checksum
constexpr uint64_t kMaxManifestBytes = 1ull << 30;

uint32_t crc32c(uint32_t crc, const void* data, size_t n) { return kernels().crc32c(crc, data, n); }

// Appends little-endian numbers. The host is little-endian (csrc/bindings/module.cc).
class Writer {
 public:
  explicit Writer(Bytes* out) : out_(out) {}
  void raw(const void* data, size_t n) {
    const auto* bytes = static_cast<const std::byte*>(data);
    out_->insert(out_->end(), bytes, bytes + n);
  }
  template <typename T>
  void put(T value) {
    raw(&value, sizeof(value));
  }
  void text(const std::string& value) {
    put<uint32_t>(static_cast<uint32_t>(value.size()));
    raw(value.data(), value.size());
  }

 private:
  Bytes* out_;
};

// Reads what Writer wrote; never past the end.
class Reader {
 public:
  Reader(std::span<const std::byte> bytes, const std::string& path) : bytes_(bytes), path_(path) {}
  void raw(void* out, size_t n) {
    if (n > bytes_.size() - at_) malformed("it ends at byte " + std::to_string(bytes_.size()));
    std::memcpy(out, bytes_.data() + at_, n);
    at_ += n;
  }
  template <typename T>
  T get() {
    T value;
    raw(&value, sizeof(value));
    return value;
  }
  std::string text() {
    const auto n = get<uint32_t>();
    if (n > bytes_.size() - at_) malformed("a string of " + std::to_string(n) + " bytes passes its end");
    std::string value(n, '\0');
    raw(value.data(), n);
    return value;
  }
  // Reads a count of items of at least `item_bytes` each. Refuses a count that does not fit into the remaining bytes.
  size_t count(size_t item_bytes, const char* what) {
    const auto n = get<uint32_t>();
    if (n > (bytes_.size() - at_) / item_bytes) malformed(std::string("too many ") + what + ": " + std::to_string(n));
    return n;
  }
  bool at_end() const { return at_ == bytes_.size(); }
  [[noreturn]] void malformed(const std::string& why) const {
    throw Error(ErrorKind::kFormat, "manifest " + path_ + " is malformed: " + why);
  }

 private:
  std::span<const std::byte> bytes_;
  size_t at_ = 0;
  const std::string& path_;
};

[[noreturn]] void corrupt(const std::string& message) { throw Error(ErrorKind::kCorruption, message); }

std::string numbered(const char* prefix, uint64_t number) {
  char text[64];
  std::snprintf(text, sizeof(text), "%s%016" PRIu64, prefix, number);
  return text;
}

}  // namespace

// ---- Records -------------------------------------------------------------------------------------------------

uint32_t record_crc_seed(const Uuid& uuid) { return crc32c(0, uuid.data(), uuid.size()); }

uint32_t record_crc(uint32_t seed, int64_t id, const std::byte* payload, size_t payload_bytes) {
  const Kernels& k = kernels();
  return k.crc32c(k.crc32c(seed, &id, sizeof(id)), payload, payload_bytes);
}

void put_record_crc(uint32_t crc, std::byte* after_payload) { store(after_payload, crc); }
uint32_t get_record_crc(const std::byte* after_payload) { return load<uint32_t>(after_payload); }

// ---- Segment header ------------------------------------------------------------------------------------------

void encode_segment_header(const SegmentHeader& header, std::byte* out) {
  std::memset(out, 0, kSegmentHeaderBytes);
  std::memcpy(out, kSegmentMagic, 8);
  store(out + 8, kFormatVersion);
  std::memcpy(out + 16, header.uuid.data(), 16);
  store(out + 32, header.segment);
  store(out + 40, header.epoch);
  store(out + 48, header.stride);
  store(out + 56, crc32c(0, out, 56));
}

SegmentHeader decode_segment_header(std::span<const std::byte> bytes, const std::string& path) {
  if (bytes.size() < 60 || std::memcmp(bytes.data(), kSegmentMagic, 8) != 0) {
    corrupt("segment " + path + " does not begin with a segment header");
  }
  const auto version = load<uint32_t>(bytes.data() + 8);
  if (load<uint32_t>(bytes.data() + 56) != crc32c(0, bytes.data(), 56)) {
    corrupt("segment " + path + " has a header that fails its checksum");
  }
  if (version != kFormatVersion) {
    throw Error(ErrorKind::kFormat, "segment " + path + " has format version " + std::to_string(version) +
                                        ", this release reads version " + std::to_string(kFormatVersion));
  }
  SegmentHeader header;
  std::memcpy(header.uuid.data(), bytes.data() + 16, 16);
  header.segment = load<uint64_t>(bytes.data() + 32);
  header.epoch = load<uint64_t>(bytes.data() + 40);
  header.stride = load<uint64_t>(bytes.data() + 48);
  return header;
}

// ---- Chunk ---------------------------------------------------------------------------------------------------

void encode_chunk_trailer(const ChunkTrailer& trailer, const Uuid& uuid, uint64_t segment, std::byte* out) {
  std::memcpy(out, kChunkMagic, 8);
  store(out + 8, static_cast<uint32_t>(trailer.kind));
  store(out + 12, trailer.count);
  store(out + 16, segment);
  store(out + 24, trailer.epoch);
  store(out + 32, trailer.begin);
  store(out + 40, trailer.end);
  store(out + 48, trailer.first_slot);
  store(out + 56, trailer.index_offset);
  store(out + 64, trailer.index_crc);
  store<uint32_t>(out + 68, 0);
  store<uint32_t>(out + 72, 0);
  // The checksum covers the uuid, which is not stored: a chunk of another table fails it.
  store(out + 76, crc32c(record_crc_seed(uuid), out, 76));
}

ChunkTrailer decode_chunk_trailer(std::span<const std::byte> bytes, const Uuid& uuid, uint64_t segment, uint64_t end,
                                  uint64_t stride, uint64_t slots_per_segment, const std::string& path) {
  const std::string where = "segment " + path + ": the chunk that ends at byte " + std::to_string(end);
  if (bytes.size() != kChunkTrailerBytes || std::memcmp(bytes.data(), kChunkMagic, 8) != 0) {
    corrupt(where + " has no chunk trailer");
  }
  if (load<uint32_t>(bytes.data() + 76) != crc32c(record_crc_seed(uuid), bytes.data(), 76)) {
    corrupt(where + " has a trailer that fails its checksum");
  }
  ChunkTrailer trailer;
  const auto kind = load<uint32_t>(bytes.data() + 8);
  trailer.count = load<uint32_t>(bytes.data() + 12);
  trailer.epoch = load<uint64_t>(bytes.data() + 24);
  trailer.begin = load<uint64_t>(bytes.data() + 32);
  trailer.end = load<uint64_t>(bytes.data() + 40);
  trailer.first_slot = load<uint64_t>(bytes.data() + 48);
  trailer.index_offset = load<uint64_t>(bytes.data() + 56);
  trailer.index_crc = load<uint32_t>(bytes.data() + 64);
  if (kind < 1 || kind > 3) {
    throw Error(ErrorKind::kFormat, where + " is of unknown kind " + std::to_string(kind));
  }
  trailer.kind = static_cast<ChunkKind>(kind);
  const uint64_t records = trailer.kind == ChunkKind::kData ? trailer.count : 0;
  const bool sound =
      load<uint64_t>(bytes.data() + 16) == segment && trailer.end == end && trailer.begin < end &&
      trailer.begin >= kSegmentHeaderBytes && trailer.begin % 4096 == 0 && end % 4096 == 0 &&
      trailer.first_slot <= end / stride && trailer.first_slot + records <= slots_per_segment &&
      records <= (end - trailer.begin) / stride && trailer.index_offset <= end &&
      trailer.first_slot * stride >= trailer.begin && (trailer.first_slot + records) * stride <= trailer.index_offset &&
      trailer.index_offset >= trailer.begin && trailer.index_bytes() <= end - kChunkTrailerBytes - trailer.begin &&
      trailer.index_offset + trailer.index_bytes() <= end - kChunkTrailerBytes;
  if (!sound) corrupt(where + " has a trailer whose numbers contradict each other or its place");
  return trailer;
}

// ---- Manifest ------------------------------------------------------------------------------------------------

bool has_narrow_slots(const std::vector<Field>& fields) {
  return fields.size() > 1 && fields[1].dtype != static_cast<uint8_t>(DType::kFloat32);
}

namespace {

size_t field_dtype_bytes(uint8_t dtype) {
  return dtype == kFieldInt64 ? 8 : dtype == kFieldUint32 ? 4 : dtype_bytes(static_cast<DType>(dtype));
}

// Reads the rules of retention, and takes the fields of usage out of the manifest's fields.
void read_retention(Reader& r, Manifest* m) {
  m->retention.expire = r.get<int64_t>();
  m->retention.max_rows = r.get<int64_t>();
  m->retention.keep = r.get<int64_t>();
  m->clock = r.get<int64_t>();
  const auto clock = r.get<uint8_t>();
  const auto evict = r.get<uint8_t>();
  (void)r.get<uint16_t>();
  if (clock > 1) r.malformed("unknown clock " + std::to_string(clock));
  if (evict > 2) r.malformed("unknown order of eviction " + std::to_string(evict));
  m->retention.clock = static_cast<AgeClock>(clock);
  m->retention.evict = static_cast<EvictFirst>(evict);
  if (m->retention.expire < 0 || m->retention.max_rows < 0 || m->retention.keep < 0 ||
      m->clock < m->retention.first_time() || !m->retention.is_set()) {
    r.malformed("a rule of retention is out of range");
  }
  if (m->fields.size() < 3) r.malformed("its records have no usage");
  const std::vector<Field> usage(m->fields.end() - 2, m->fields.end());
  m->fields.resize(m->fields.size() - 2);
  if (usage != usage_fields(m->fields)) r.malformed("its records have another usage than this release knows");
}

}  // namespace

Bytes encode_manifest(const Manifest& m) {
  Bytes out;
  out.reserve(1024);
  Writer w(&out);
  w.raw(kManifestMagic, 8);
  w.put<uint32_t>(kFormatVersion);
  w.put<uint32_t>(0);
  w.put<uint64_t>(0);  // bytes that follow before the checksum; filled in below
  const bool has_history = m.deletions_from > 0 || !m.rewinds.empty();
  const bool has_usage = m.retention.is_set();
  const bool has_admission = m.retention.admit > 0.0;
  const bool has_counts = m.has_counts || m.retention.admit_from > 0;
  w.put((m.reader_flags & ~(kReaderFlagHistory | kReaderFlagRetention | kReaderFlagAdmission | kReaderFlagCounts)) |
        (has_history ? kReaderFlagHistory : 0) | (has_usage ? kReaderFlagRetention : 0) |
        (has_admission ? kReaderFlagAdmission : 0) | (has_counts ? kReaderFlagCounts : 0));
  w.put(m.writer_flags);
  w.raw(m.uuid.data(), m.uuid.size());
  w.put(m.epoch);
  w.put(m.parent_epoch);
  w.put(m.step);
  w.put(m.next_version);
  w.put(m.next_segment);
  w.put(m.num_rows);
  w.put(m.dim);
  w.put(static_cast<uint8_t>(m.init.kind));
  w.put(static_cast<uint8_t>(m.optimizer.kind));
  w.put<uint8_t>(m.optimizer.decoupled ? 1 : 0);
  w.put<uint8_t>(0);
  w.put(m.init.a);
  w.put(m.init.b);
  w.put(m.init.seed);
  w.put(m.optimizer.lr);
  w.put(m.optimizer.eps);
  w.put(m.optimizer.beta1);
  w.put(m.optimizer.beta2);
  w.put(m.optimizer.weight_decay);
  w.put(m.optimizer.initial_accumulator);
  w.put(m.shard_index);
  w.put(m.shard_count);
  w.put(m.payload_bytes);
  w.put(m.slots_per_segment);
  w.put(m.stored_rows);
  std::vector<Field> fields = m.fields;
  if (has_usage) {
    for (Field& field : usage_fields(m.fields)) fields.push_back(std::move(field));
  }
  w.put<uint32_t>(static_cast<uint32_t>(fields.size()));
  for (const Field& field : fields) {
    w.text(field.name);
    w.put(field.dtype);
    w.put(field.length);
    w.put(field.offset);
  }
  w.put<uint32_t>(static_cast<uint32_t>(m.segments.size()));
  for (const SegmentEntry& segment : m.segments) {
    w.put(segment.segment);
    w.put(segment.epoch);
    w.put(segment.bytes);
  }
  w.put<uint32_t>(static_cast<uint32_t>(m.index_snapshots.size()));
  for (const IndexSnapshotEntry& index_snapshot : m.index_snapshots) {
    w.put(index_snapshot.file);
    w.put(index_snapshot.bytes);
  }
  w.text(m.keep);
  w.text(m.meta);
  if (has_history) {
    w.put(m.deletions_from);
    w.put(static_cast<uint32_t>(m.rewinds.size()));
    for (const Rewind& rewind : m.rewinds) {
      w.put(rewind.to);
      w.put(rewind.at);
    }
  }
  if (has_usage) {
    w.put(m.retention.expire);
    w.put(m.retention.max_rows);
    w.put(m.retention.keep);
    w.put(m.clock);
    w.put(static_cast<uint8_t>(m.retention.clock));
    w.put(static_cast<uint8_t>(m.retention.evict));
    w.put<uint16_t>(0);
  }
  if (has_admission) w.put(m.retention.admit);
  if (has_counts) {
    w.put(m.retention.admit_from);
    w.put(m.counted_ids);
    w.put(m.counts_since);
  }
  store<uint64_t>(out.data() + 16, out.size() - kManifestPrefixBytes);
  w.put(crc32c(0, out.data(), out.size()));
  return out;
}

Manifest decode_manifest(std::span<const std::byte> bytes, const std::string& path) {
  if (bytes.size() < kManifestPrefixBytes + 4 || std::memcmp(bytes.data(), kManifestMagic, 8) != 0) {
    corrupt("manifest " + path + " does not begin as a manifest does");
  }
  // The checksum is tested first: a damaged version number must be reported as damage, not as another version.
  if (load<uint32_t>(bytes.data() + bytes.size() - 4) != crc32c(0, bytes.data(), bytes.size() - 4)) {
    corrupt("manifest " + path + " fails its checksum");
  }
  const auto version = load<uint32_t>(bytes.data() + 8);
  if (version != kFormatVersion) {
    throw Error(ErrorKind::kFormat, "manifest " + path + " has format version " + std::to_string(version) +
                                        ", this release reads version " + std::to_string(kFormatVersion));
  }
  if (bytes.size() > kMaxManifestBytes ||
      load<uint64_t>(bytes.data() + 16) != bytes.size() - kManifestPrefixBytes - 4) {
    corrupt("manifest " + path + " is " + std::to_string(bytes.size()) +
            " bytes long, which is not the length it states");
  }
  Reader r(bytes.subspan(kManifestPrefixBytes, bytes.size() - kManifestPrefixBytes - 4), path);
  Manifest m;
  m.reader_flags = r.get<uint64_t>();
  if ((m.reader_flags & ~kKnownReaderFlags) != 0) {
    throw Error(ErrorKind::kFormat, "manifest " + path + " uses features this release cannot read (flags " +
                                        std::to_string(m.reader_flags) + "); open it with a newer release");
  }
  m.writer_flags = r.get<uint64_t>();
  r.raw(m.uuid.data(), m.uuid.size());
  m.epoch = r.get<uint64_t>();
  m.parent_epoch = r.get<uint64_t>();
  m.step = r.get<int64_t>();
  m.next_version = r.get<uint64_t>();
  m.next_segment = r.get<uint64_t>();
  m.num_rows = r.get<int64_t>();
  m.dim = r.get<uint32_t>();
  const auto init_kind = r.get<uint8_t>();
  const auto optimizer_kind = r.get<uint8_t>();
  m.optimizer.decoupled = r.get<uint8_t>() != 0;
  (void)r.get<uint8_t>();
  if (init_kind > 2) r.malformed("unknown initialiser " + std::to_string(init_kind));
  if (optimizer_kind > 3) r.malformed("unknown optimizer " + std::to_string(optimizer_kind));
  m.init.kind = static_cast<InitKind>(init_kind);
  m.optimizer.kind = static_cast<OptimizerKind>(optimizer_kind);
  m.init.a = r.get<double>();
  m.init.b = r.get<double>();
  m.init.seed = r.get<uint64_t>();
  m.optimizer.lr = r.get<double>();
  m.optimizer.eps = r.get<double>();
  m.optimizer.beta1 = r.get<double>();
  m.optimizer.beta2 = r.get<double>();
  m.optimizer.weight_decay = r.get<double>();
  m.optimizer.initial_accumulator = r.get<double>();
  m.shard_index = r.get<uint32_t>();
  m.shard_count = r.get<uint32_t>();
  m.payload_bytes = r.get<uint64_t>();
  m.slots_per_segment = r.get<uint64_t>();
  m.stored_rows = r.get<uint64_t>();
  const bool has_usage = (m.reader_flags & kReaderFlagRetention) != 0;
  const size_t num_fields = r.count(13, "fields");
  for (size_t i = 0; i < num_fields; ++i) {
    Field field;
    field.name = r.text();
    field.dtype = r.get<uint8_t>();
    field.length = r.get<uint32_t>();
    field.offset = r.get<uint32_t>();
    const bool is_of_usage = has_usage && i + 2 >= num_fields;
    if (field.dtype > (is_of_usage ? kFieldUint32 : 2)) {
      r.malformed("field '" + field.name + "' has unknown dtype " + std::to_string(field.dtype));
    }
    const uint64_t end = field.offset + uint64_t{field.length} * field_dtype_bytes(field.dtype);
    if (end > m.payload_bytes) r.malformed("field '" + field.name + "' passes the record's end");
    for (const Field& other : m.fields) {
      if (other.name == field.name) r.malformed("field '" + field.name + "' appears twice");
    }
    m.fields.push_back(std::move(field));
  }
  const uint64_t last_segment = m.slots_per_segment == 0 ? 0 : kMaxPosition / m.slots_per_segment;
  const size_t num_segments = r.count(24, "segments");
  std::set<uint64_t> seen;
  for (size_t i = 0; i < num_segments; ++i) {
    SegmentEntry segment;
    segment.segment = r.get<uint64_t>();
    segment.epoch = r.get<uint64_t>();
    segment.bytes = r.get<uint64_t>();
    if (!seen.insert(segment.segment).second) {
      r.malformed("segment " + std::to_string(segment.segment) + " appears twice");
    }
    if (segment.segment >= m.next_segment || segment.epoch > m.epoch || segment.bytes % 4096 != 0 ||
        segment.bytes < kSegmentHeaderBytes || segment.segment == 0 || segment.segment >= last_segment) {
      r.malformed("segment " + std::to_string(segment.segment) + " has impossible numbers");
    }
    m.segments.push_back(segment);
  }
  const size_t num_index_snapshots = r.count(16, "index snapshots");
  for (size_t i = 0; i < num_index_snapshots; ++i) {
    IndexSnapshotEntry index_snapshot;
    index_snapshot.file = r.get<uint64_t>();
    index_snapshot.bytes = r.get<uint64_t>();
    m.index_snapshots.push_back(index_snapshot);
  }
  m.keep = r.text();
  m.meta = r.text();
  if ((m.reader_flags & kReaderFlagHistory) != 0) {
    m.deletions_from = r.get<uint64_t>();
    const size_t num_rewinds = r.count(16, "rewinds");
    uint64_t before = 0;
    for (size_t i = 0; i < num_rewinds; ++i) {
      const Rewind rewind{r.get<uint64_t>(), r.get<uint64_t>()};
      if (rewind.to >= rewind.at || rewind.at > m.epoch || rewind.at <= before) {
        r.malformed("a rewind to commit " + std::to_string(rewind.to) + " with commit " + std::to_string(rewind.at) +
                    " is impossible");
      }
      before = rewind.at;
      m.rewinds.push_back(rewind);
    }
    if (m.deletions_from > m.next_version) r.malformed("it has tombstones from a version on that is not given out yet");
  }
  if (has_usage) read_retention(r, &m);
  if ((m.reader_flags & kReaderFlagAdmission) != 0) {
    m.retention.admit = r.get<double>();
    if (!(m.retention.admit > 0.0 && m.retention.admit < 1.0))
      r.malformed("its probability of admission is out of range");
  }
  m.has_counts = (m.reader_flags & kReaderFlagCounts) != 0;
  if (m.has_counts) {
    m.retention.admit_from = r.get<uint32_t>();
    m.counted_ids = r.get<uint64_t>();
    m.counts_since = r.get<int64_t>();
    const uint32_t from = m.retention.admit_from;
    if (from == 1 || from > kMostAdmitFrom || (from > 0 && m.retention.admit > 0.0) || m.counts_since < 0) {
      r.malformed("its steps of admission are out of range");
    }
  }
  if (!r.at_end()) r.malformed("bytes follow its last field");

  if (m.fields.empty() || m.fields[0].name != "weight" || m.fields[0].length != m.dim || m.fields[0].offset != 0) {
    r.malformed("its first field is not the weights");
  }
  for (size_t f = 1; f < m.fields.size(); ++f) {
    const auto dtype = static_cast<DType>(m.fields[f].dtype);
    if (dtype == DType::kFloat16) r.malformed("slot '" + m.fields[f].name + "' is float16");
    if (f > 1 && dtype != m.optimizer.state_dtype) r.malformed("its slots are of several dtypes");
    m.optimizer.state_dtype = dtype;
  }
  if (has_narrow_slots(m.fields) != ((m.reader_flags & kReaderFlagNarrowSlots) != 0)) {
    r.malformed("its slots are not what its flags say");
  }
  if (m.dim == 0 || m.payload_bytes == 0 || m.payload_bytes > (1u << 30) || m.num_rows < -1 || m.step < 0 ||
      m.shard_index >= m.shard_count ||
      m.slots_per_segment * record_stride(m.payload_bytes) < kSegmentHeaderBytes + 2 * record_stride(m.payload_bytes) ||
      m.slots_per_segment > (1ull << 40) / record_stride(m.payload_bytes)) {
    r.malformed("a size is out of range");
  }
  return m;
}

// ---- File names ----------------------------------------------------------------------------------------------

std::string manifest_name(uint64_t epoch) { return numbered("manifest-", epoch); }
std::string segment_name(uint64_t segment) { return numbered("segment-", segment); }

bool parse_name(const std::string& name, const char* prefix, uint64_t* number) {
  const size_t length = std::strlen(prefix);
  if (name.size() != length + 16 || name.compare(0, length, prefix) != 0) return false;
  uint64_t value = 0;
  for (size_t i = length; i < name.size(); ++i) {
    if (name[i] < '0' || name[i] > '9') return false;
    value = value * 10 + static_cast<uint64_t>(name[i] - '0');
  }
  *number = value;
  return true;
}

}  // namespace bunkbed
