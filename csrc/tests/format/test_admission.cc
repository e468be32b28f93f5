// Which rows a step admits, compared with Philox as published (philox.h) and with the table of FORMAT.md.
#include "format/admission.h"

#include "tests/check.h"
#include "tests/philox.h"
#include "tests/sample.h"

using namespace bunkbed;
using namespace bunkbed::test;

TEST(admission_is_the_stream_of_the_format) {
  Sampler sampler(1);
  for (int i = 0; i < 2000; ++i) {
    const uint64_t seed = sampler.bits();
    const auto id = static_cast<int64_t>(sampler.bits() >> 1);
    const auto step = static_cast<int64_t>(sampler.bits() >> (1 + sampler.bits() % 62));
    const double probability = static_cast<double>(1 + sampler.bits() % 999) / 1000;
    const auto words = row_block(seed, id, 0x40000000u, static_cast<uint32_t>(step));
    const uint64_t drawn = (uint64_t{words[1]} << 32 | words[0]) >> 11;
    CHECK_EQ(Admission(probability, seed, step).admits(id), static_cast<double>(drawn) * 0x1p-53 < probability);
  }
}

TEST(admission_examples) {
  const int64_t ids[] = {0, 1, 2, 3, 12345, int64_t{1} << 31, (int64_t{1} << 40) + 3, ~(uint64_t{1} << 63)};
  const char* const expected[] = {"00001011", "00011101", "11111101"};
  for (int64_t step = 1; step <= 3; ++step) {
    std::string found;
    for (const int64_t id : ids) found += Admission(0.5, 7, step).admits(id) ? '1' : '0';
    CHECK_EQ(found, std::string(expected[step - 1]));
  }
}

TEST(admission_has_the_probability_and_draws_again_with_each_step) {
  for (const double probability : {0x1p-1074, 0.01, 0.5, 0.99, 1.0 - 0x1p-53}) {
    const Admission admission(probability, 3, 9);
    const Admission next(probability, 3, 10);
    std::vector<int64_t> rows;
    int both = 0;
    for (int64_t id = 0; id < 20'000; ++id) {
      rows.push_back(id);
      both += admission.admits(id) && next.admits(id);
    }
    admission.remove_refused(&rows);
    for (const int64_t id : rows) CHECK(admission.admits(id));
    const auto near = [](double found, double wanted) { return found > wanted - 0.015 && found < wanted + 0.015; };
    CHECK(near(static_cast<double>(rows.size()) / 20'000, probability));
    CHECK(near(both / 20'000.0, probability * probability));
  }
}
