// A hashed directory that counts the rows that are located.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "directory/directory.h"

namespace bunkbed::test {

class CountingDirectory final : public Directory {
 public:
  // Rows of locate() since the last call of this.
  size_t take_located() { return located_.exchange(0); }

  void locate(const int64_t* rows, size_t n, Entry* entries) const override {
    located_ += n;
    below_->locate(rows, n, entries);
  }
  Entry find(int64_t row) const override { return below_->find(row); }
  void prefetch(int64_t row) const override { below_->prefetch(row); }
  void set(int64_t row, Entry entry) override {
    below_->set(row, entry);
    follow();
  }
  bool grows() const override { return below_->grows(); }
  NewRows new_rows(const int64_t* rows, size_t n) const override { return below_->new_rows(rows, n); }
  size_t bytes_after(const NewRows& coming) const override { return below_->bytes_after(coming); }
  void reserve(const NewRows& coming) override {
    below_->reserve(coming);
    follow();
  }
  size_t bytes() const override { return below_->bytes(); }
  size_t bytes_for(uint64_t stored_rows) const override { return below_->bytes_for(stored_rows); }
  void clear() override {
    below_->clear();
    follow();
  }
  size_t num_parts() const override { return below_->num_parts(); }
  size_t part_of(int64_t row) const override { return below_->part_of(row); }
  bool has_ranges() const override { return below_->has_ranges(); }
  void part(size_t part, std::vector<int64_t>* rows, std::vector<Entry>* entries) const override {
    below_->part(part, rows, entries);
  }
  void begin_bulk(uint64_t rows) override { below_->begin_bulk(rows); }
  void bulk_exchange(const int64_t* rows, Entry* entries, size_t n) override {
    below_->bulk_exchange(rows, entries, n);
  }
  bool bulk_copy(int64_t first, const std::byte* packed, size_t n) override {
    return below_->bulk_copy(first, packed, n);
  }
  void end_bulk(size_t rows, size_t counted) override {
    below_->end_bulk(rows, counted);
    follow();
  }

 private:
  void follow() {
    stored_rows_ = below_->stored_rows();
    if (below_->version() == seen_) return;
    seen_ = below_->version();
    changed();
  }

  const std::unique_ptr<Directory> below_ = make_hashed_directory();
  uint64_t seen_ = below_->version();
  mutable std::atomic<size_t> located_{0};
};

}  // namespace bunkbed::test
