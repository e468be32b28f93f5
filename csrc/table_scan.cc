// Every stored row once, in log order: chunk by chunk with large sequential reads.
#include <algorithm>
#include <cstring>

#include "error.h"
#include "record.h"
#include "table.h"

namespace bunkbed {

Scan::Scan(Table* table, size_t field) : table_(table), field_(field) {
  table->ask_holder();
  const auto guard = table->lock_alone();
  table->require_usable();
  changes_ = table->changes_;
  Log* log = table->store_->log();
  if (log == nullptr) return;
  // From here on the log holds every row's newest record, so lookups during the scan cannot move any: only clean
  // frames remain, and evicting one appends nothing.
  if (table->options_.writable) {
    table->store_->flush();
    table->store_->forgive_compaction();
    log->drain();
  }
  for (const auto& [id, segment] : log->segments()) segments_.push_back(id);
}

void Scan::copy(const std::byte* record, float* out) const {
  read_field(table_->fields_[field_], record, out);
}

size_t Scan::next(size_t n, int64_t* ids, float* values) {
  const auto guard = table_->lock();
  table_->require_usable();
  if (table_->changes_ != changes_) {
    throw Error(ErrorKind::kBroken, "table '" + table_->name_ +
                                        "' was changed while it was scanned; finish the scan first, or collect the ids "
                                        "and change the rows afterwards");
  }
  const size_t length = table_->fields_[field_].length;
  Store& store = *table_->store_;
  Cache& cache = store.cache();
  size_t found = 0;
  Log* log = store.log();
  if (log == nullptr) {
    for (; frame_ < cache.high_water() && found < n; ++frame_) {
      if (cache.info(frame_).row < 0) continue;
      ids[found] = cache.info(frame_).row;
      copy(cache.record(frame_), values + found++ * length);
    }
    return found;
  }
  const size_t buffer_bytes = store.plan().log.chunk_bytes;
  while (found < n && segment_ < segments_.size()) {
    Segment* segment = log->find_segment(segments_[segment_]);
    if (segment == nullptr || segment->live == 0) {
      ++segment_;
      continue;
    }
    if (!has_chunks_) {
      chunks_ = log->chunks(*segment);
      has_chunks_ = true;
      chunk_ = record_ = 0;
      ids_.clear();
    }
    if (chunk_ == chunks_.size()) {
      has_chunks_ = false;
      ++segment_;
      continue;
    }
    const ChunkTrailer& chunk = chunks_[chunk_];
    if (chunk.kind != ChunkKind::kData) {
      ++chunk_;
      continue;
    }
    if (ids_.empty()) log->read_index(*segment, chunk, &span_, &ids_, &versions_);
    const size_t count = std::min({n - found, std::max<size_t>(1, buffer_bytes / log->stride()), ids_.size() - record_});
    const std::byte* records = nullptr;
    for (size_t i = record_; i < record_ + count; ++i) {
      const uint64_t place = log->position(segment->id, chunk.first_slot + i);
      const Entry entry = store.directory().find(ids_[i]);
      const bool is_current = is_position(entry) ? position_of(entry) == place
                                                 : is_frame(entry) && cache.info(frame_of(entry)).position == place;
      if (!is_current) continue;
      if (records == nullptr) records = log->read_records(*segment, chunk, record_, count, ids_.data(), &span_);
      ids[found] = ids_[i];
      copy(records + (i - record_) * log->stride(), values + found++ * length);
    }
    record_ += count;
    if (record_ == ids_.size()) {
      ++chunk_;
      record_ = 0;
      ids_.clear();
    }
  }
  return found;
}

}  // namespace bunkbed
