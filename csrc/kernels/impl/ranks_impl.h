// Counts of scores that reach given floors.
// Included once by each translation unit of the kernels; see kernels_impl.h.

// Counts for kFloors floors in one pass over the scores: their counters stay in registers.
template <int64_t kFloors>
inline void count_some(int64_t n, const float* x, const float* floors, int64_t* counts) {
  Floats at_least[kFloors];
  Ints32 reached[kFloors] = {};
  for (int64_t f = 0; f < kFloors; ++f) at_least[f] = floors[f] - Floats{};
  int64_t i = 0;
  for (; i + kVectorFloats <= n; i += kVectorFloats) {
    const Floats scores = load_floats(x + i);
    for (int64_t f = 0; f < kFloors; ++f) reached[f] -= scores >= at_least[f];  // a true lane is -1
  }
  for (int64_t f = 0; f < kFloors; ++f) {
    int64_t sum = 0;
    for (int64_t lane = 0; lane < kVectorFloats; ++lane) sum += reached[f][lane];
    for (int64_t rest = i; rest < n; ++rest) sum += x[rest] >= floors[f];
    counts[f] += sum;
  }
}

void count_reaching(int64_t n, const float* x, int64_t num_floors, const float* floors, int64_t* counts) {
  int64_t f = 0;
  for (; f + 4 <= num_floors; f += 4) count_some<4>(n, x, floors + f, counts + f);
  for (; f < num_floors; ++f) count_some<1>(n, x, floors + f, counts + f);
}
