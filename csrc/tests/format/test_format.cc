// Round trips, and errors for damaged bytes. The format page and its tests pin the bytes.
#include <cstring>
#include <limits>

#include "format/format.h"
#include "format/record.h"
#include "kernels/kernels.h"
#include "tests/check.h"

using namespace bunkbed;
using namespace bunkbed::test;

namespace {

Manifest sample() {
  Manifest m;
  for (size_t i = 0; i < m.uuid.size(); ++i) m.uuid[i] = static_cast<uint8_t>(i * 7);
  m.epoch = 5;
  m.parent_epoch = 4;
  m.step = 17;
  m.next_version = 1000;
  m.next_segment = 9;
  m.num_rows = 50;
  m.dim = 4;
  m.optimizer.kind = OptimizerKind::kRowwiseAdagrad;
  m.payload_bytes = 20;
  m.slots_per_segment = 4096;
  m.stored_rows = 3;
  m.fields = {{"weight", 0, 4, 0}, {"sum", 0, 1, 16}};
  m.segments = {{7, 4, 8192}, {8, 5, 12288}};
  m.keep = "best";
  m.meta = "{\"a\":1}";
  return m;
}

// With a right checksum, as an attacker would write it.
void seal(Bytes* bytes) {
  const uint32_t crc = kernels().crc32c(0, bytes->data(), bytes->size() - 4);
  std::memcpy(bytes->data() + bytes->size() - 4, &crc, 4);
}

template <typename Decode>
bool is_refused(Decode decode) {
  try {
    decode();
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kCorruption || error.kind() == ErrorKind::kFormat);
    return true;
  }
  return false;
}

}  // namespace

TEST(format_manifest_round_trip) {
  const Bytes bytes = encode_manifest(sample());
  const Manifest back = decode_manifest(bytes, "m");
  CHECK(encode_manifest(back) == bytes);
  CHECK(back.fields == sample().fields);
  CHECK_EQ(back.keep, std::string("best"));
  CHECK_EQ(back.segments.size(), size_t{2});
}

TEST(format_manifest_of_a_table_whose_rows_go) {
  Manifest m = sample();
  m.retention = {.expire = 30, .clock = AgeClock::kEvent, .max_rows = 500, .evict = EvictFirst::kSmallest, .keep = 7};
  m.clock = 20'000;
  m.payload_bytes += kUsageBytes;
  const Bytes bytes = encode_manifest(m);
  const Manifest back = decode_manifest(bytes, "m");
  CHECK(encode_manifest(back) == bytes);
  CHECK(back.retention == m.retention);
  CHECK(back.fields == m.fields);
  CHECK_EQ(back.clock, m.clock);
  CHECK_EQ(payload_of(back), m.payload_bytes);
  for (size_t at = 8; at + 8 <= bytes.size(); ++at) {
    for (const uint32_t value : {0u, 1u, 0x7fffffffu, 0xffffffffu}) {
      Bytes bad = bytes;
      std::memcpy(bad.data() + at, &value, 4);
      seal(&bad);
      is_refused([&] {
        const Manifest found = decode_manifest(bad, "m");
        CHECK(encode_manifest(decode_manifest(encode_manifest(found), "m")) == encode_manifest(found));
      });
    }
  }
}

TEST(format_manifest_with_a_probability_of_admission) {
  for (const bool has_usage : {false, true}) {
    Manifest m = sample();
    m.retention.admit = 0.125;
    if (has_usage) {
      m.retention.expire = 3;
      m.payload_bytes += kUsageBytes;
    }
    const Bytes bytes = encode_manifest(m);
    double stored;
    std::memcpy(&stored, bytes.data() + bytes.size() - 12, sizeof(stored));
    CHECK_EQ(stored, 0.125);
    const Manifest back = decode_manifest(bytes, "m");
    CHECK(back.retention == m.retention && encode_manifest(back) == bytes);
    CHECK_EQ(back.reader_flags & kReaderFlagAdmission, kReaderFlagAdmission);
    m = back;
    m.retention.admit = 0.0;
    CHECK_EQ(decode_manifest(encode_manifest(m), "m").reader_flags & kReaderFlagAdmission, uint64_t{0});
    CHECK_EQ(encode_manifest(m).size() + 8, bytes.size());
  }
}

TEST(format_manifest_with_steps_of_admission) {
  for (const uint32_t from : {0u, 2u, kMostAdmitFrom}) {
    Manifest m = sample();
    m.retention.admit_from = from;
    m.has_counts = true;
    m.counted_ids = 12;
    m.counts_since = int64_t{1} << 40;
    const Bytes bytes = encode_manifest(m);
    CHECK_EQ(bytes.size(), encode_manifest(sample()).size() + 20);
    uint32_t stored;
    std::memcpy(&stored, bytes.data() + bytes.size() - 24, sizeof(stored));
    CHECK_EQ(stored, from);
    const Manifest back = decode_manifest(bytes, "m");
    CHECK(back.retention == m.retention && encode_manifest(back) == bytes && back.has_counts);
    CHECK_EQ(back.counted_ids, uint64_t{12});
    CHECK_EQ(back.counts_since, m.counts_since);
    CHECK_EQ(back.reader_flags & kReaderFlagCounts, kReaderFlagCounts);
  }
}

TEST(format_manifest_every_truncation_and_flipped_bit) {
  Manifest admitting = sample();
  admitting.retention.admit_from = 5;
  const Bytes bytes = encode_manifest(admitting);
  for (size_t n = 0; n < bytes.size(); ++n) CHECK(is_refused([&] { decode_manifest({bytes.data(), n}, "m"); }));
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    Bytes bad = bytes;
    bad[bit / 8] ^= static_cast<std::byte>(1u << bit % 8);
    CHECK(is_refused([&] { decode_manifest(bad, "m"); }));
  }
  Bytes longer = bytes;
  longer.push_back(std::byte{0});
  CHECK(is_refused([&] { decode_manifest(longer, "m"); }));
}

TEST(format_manifest_hostile_numbers_with_a_sound_checksum) {
  // Replaces each 4 bytes in turn. Decoding throws, or returns a value that can be encoded again.
  const Bytes bytes = encode_manifest(sample());
  for (size_t at = 8; at + 8 <= bytes.size(); ++at) {
    for (const uint32_t value : {0u, 1u, 0x7fffffffu, 0x80000000u, 0xffffffffu}) {
      Bytes bad = bytes;
      std::memcpy(bad.data() + at, &value, 4);
      seal(&bad);
      is_refused([&] {
        const Manifest m = decode_manifest(bad, "m");
        CHECK(m.dim > 0 && m.slots_per_segment > 0 && m.payload_bytes <= (1u << 30));
        for (const SegmentEntry& s : m.segments) CHECK(s.segment < (uint64_t{1} << 40) / m.slots_per_segment);
        (void)encode_manifest(m);
      });
    }
  }
}

TEST(format_manifest_names_what_is_wrong) {
  const auto refuse = [](auto&& change, const char* part) {
    Manifest m = sample();
    change(m);
    const Bytes bytes = encode_manifest(m);
    CHECK_THROWS(decode_manifest(bytes, "m"), ErrorKind::kFormat, part);
  };
  refuse([](Manifest& m) { m.reader_flags = 64; }, "newer release");
  refuse([](Manifest& m) { m.fields[1].offset = 17; }, "passes the record's end");
  refuse([](Manifest& m) { m.fields[1].name = "weight"; }, "appears twice");
  refuse([](Manifest& m) { m.fields[0].name = "w"; }, "first field");
  refuse([](Manifest& m) { m.segments[1].segment = 7; }, "appears twice");
  refuse([](Manifest& m) { m.segments[1].segment = 9; }, "impossible numbers");
  refuse([](Manifest& m) { m.segments[1].epoch = 6; }, "impossible numbers");
  refuse([](Manifest& m) { m.segments[1].bytes = 8193; }, "impossible numbers");
  refuse([](Manifest& m) { m.next_segment = ~uint64_t{0}, m.segments[1].segment = uint64_t{1} << 50; },
         "impossible numbers");
  refuse([](Manifest& m) { m.rewinds = {{3, 3}}; }, "rewind");
  refuse([](Manifest& m) { m.rewinds = {{1, 3}, {2, 3}}; }, "rewind");
  refuse([](Manifest& m) { m.rewinds = {{1, m.epoch + 1}}; }, "rewind");
  refuse([](Manifest& m) { m.deletions_from = m.next_version + 1; }, "not given out");
  refuse([](Manifest& m) { m.num_rows = -2; }, "out of range");
  const auto refuse_rule = [&](auto&& change, const char* part) {
    refuse(
        [&](Manifest& m) {
          m.retention.expire = 3;
          m.payload_bytes += kUsageBytes;
          change(m);
        },
        part);
  };
  refuse_rule([](Manifest& m) { m.retention.keep = -1; }, "out of range");
  refuse_rule([](Manifest& m) { m.retention.max_rows = -1; }, "out of range");
  refuse_rule([](Manifest& m) { m.clock = -1; }, "out of range");
  refuse_rule([](Manifest& m) { m.retention.clock = AgeClock::kEvent, m.clock = -2; }, "out of range");
  refuse_rule([](Manifest& m) { m.retention.clock = static_cast<AgeClock>(2); }, "unknown clock 2");
  refuse_rule([](Manifest& m) { m.retention.evict = static_cast<EvictFirst>(3); }, "unknown order of eviction 3");
  refuse_rule([](Manifest& m) { m.payload_bytes -= 4; }, "passes the record's end");
  refuse([](Manifest& m) { m.retention.admit = 1.0; }, "probability of admission");
  refuse([](Manifest& m) { m.retention.admit_from = 1; }, "steps of admission");
  refuse([](Manifest& m) { m.retention.admit_from = kMostAdmitFrom + 1; }, "steps of admission");
  refuse([](Manifest& m) { m.retention.admit = 0.5, m.retention.admit_from = 2; }, "steps of admission");
  refuse([](Manifest& m) { m.has_counts = true, m.counts_since = -1; }, "steps of admission");
  refuse([](Manifest& m) { m.retention.admit = std::numeric_limits<double>::infinity(); }, "probability of admission");
}

TEST(format_trailer_round_trip_and_damage) {
  const Uuid uuid = sample().uuid;
  ChunkTrailer trailer;
  trailer.epoch = 3;
  trailer.begin = 4096;
  trailer.end = 12288;
  trailer.first_slot = 171;
  trailer.count = 10;
  trailer.index_offset = 181 * 24;
  trailer.index_crc = 77;
  Bytes bytes(kChunkTrailerBytes);
  encode_chunk_trailer(trailer, uuid, 6, bytes.data());
  const auto decode = [&](const Bytes& b, uint64_t segment = 6, uint64_t end = 12288, uint64_t slots = 4096) {
    return decode_chunk_trailer(b, uuid, segment, end, 24, slots, "s");
  };
  const ChunkTrailer back = decode(bytes);
  CHECK_EQ(back.first_slot, uint64_t{171});
  CHECK_EQ(back.count, 10u);
  CHECK(is_refused([&] { decode(bytes, 5); }));
  CHECK(is_refused([&] { decode(bytes, 6, 16384); }));
  CHECK(is_refused([&] { decode(bytes, 6, 12288, 180); }));  // one record beyond the segment
  for (size_t n = 0; n < bytes.size(); ++n)
    CHECK(is_refused([&] { decode(Bytes(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(n))); }));
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    Bytes bad = bytes;
    bad[bit / 8] ^= static_cast<std::byte>(1u << bit % 8);
    CHECK(is_refused([&] { decode(bad); }));
  }
  // Numbers that contradict each other, with a right checksum.
  const auto refuse = [&](auto&& change) {
    ChunkTrailer bad = trailer;
    change(bad);
    Bytes encoded(kChunkTrailerBytes);
    encode_chunk_trailer(bad, uuid, 6, encoded.data());
    CHECK(is_refused([&] { decode(encoded); }));
  };
  refuse([](ChunkTrailer& t) { t.begin = 0; });
  refuse([](ChunkTrailer& t) { t.begin = 12288; });
  refuse([](ChunkTrailer& t) { t.begin = 5000; });
  refuse([](ChunkTrailer& t) { t.first_slot = 170; });
  refuse([](ChunkTrailer& t) { t.first_slot = ~uint64_t{0}; });
  refuse([](ChunkTrailer& t) { t.count = ~0u; });
  refuse([](ChunkTrailer& t) { t.count = 300; });
  refuse([](ChunkTrailer& t) { t.index_offset = ~uint64_t{0}; });
  refuse([](ChunkTrailer& t) { t.index_offset = 12288 - 80; });
}

TEST(format_segment_header_round_trip_and_damage) {
  Bytes bytes(kSegmentHeaderBytes);
  encode_segment_header({sample().uuid, 3, 2, 24}, bytes.data());
  const SegmentHeader back = decode_segment_header(bytes, "s");
  CHECK(back.uuid == sample().uuid && back.segment == 3 && back.epoch == 2 && back.stride == 24);
  for (size_t bit = 0; bit < 60 * 8; ++bit) {
    Bytes bad = bytes;
    bad[bit / 8] ^= static_cast<std::byte>(1u << bit % 8);
    CHECK(is_refused([&] { decode_segment_header(bad, "s"); }));
  }
  for (size_t n = 0; n < 60; ++n) CHECK(is_refused([&] { decode_segment_header({bytes.data(), n}, "s"); }));
}

TEST(format_names) {
  uint64_t number = 0;
  CHECK(parse_name(segment_name(42), "segment-", &number) && number == 42);
  CHECK(parse_name(manifest_name(0), "manifest-", &number) && number == 0);
  for (const char* bad : {"segment-42", "segment-00000000000000042", "segment-000000000000004x",
                          "manifest-0000000000000042", "new-manifest-0000000000000042", "", "segment-"}) {
    CHECK(!parse_name(bad, "segment-", &number));
  }
}
