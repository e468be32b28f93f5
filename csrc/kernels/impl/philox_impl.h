// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), 8 blocks at a time.
// Included once by each translation unit of the kernels; see kernels_impl.h.
//
// key = (seed bits 0..31, seed bits 32..63); counter = (id bits 0..31, id bits 32..63, block, extra).
// The streams of one table are disjoint: initial values count blocks from 0 with extra = 0, admission has block
// 0x40000000 (format/admission.h), and stochastic rounding of field f counts from kRoundingStream + f * kFieldStream,
// both with extra = step mod 2^32. (Only a row of 2^27 elements, more than a record can hold, would reach the blocks of
// the next field.)

constexpr int64_t kGroupBlocks = 8;
constexpr int64_t kGroupPairs = 2 * kGroupBlocks;
constexpr uint32_t kRoundingStream = 0x80000000u;
constexpr uint32_t kFieldStream = 0x01000000u;

// A block's four words w0 w1 w2 w3 are two pairs: (w0, w1) and (w2, w3). even[p] and odd[p] are the two words of
// pair p, block by block, as the initialisers use them.
struct alignas(64) PhiloxWords {
  uint32_t even[kGroupPairs];
  uint32_t odd[kGroupPairs];
};

#if defined(__AVX512F__)
constexpr size_t kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr size_t kVectorBytes = 32;
#else
constexpr size_t kVectorBytes = 16;
#endif

typedef uint64_t Words64 __attribute__((vector_size(kVectorBytes)));

// Low 32 bits of each lane times `factor`. Intrinsics, because compilers do not make one instruction of
// `(a & 0xffffffff) * factor`.
inline Words64 multiply_low(Words64 a, uint32_t factor) {
#if defined(__AVX512F__)
  // The masked form, because GCC's unmasked one warns about its own undefined operand.
  return (Words64)_mm512_maskz_mul_epu32(0xff, (__m512i)a, _mm512_set1_epi64(factor));
#elif defined(__AVX2__)
  return (Words64)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(factor));
#elif defined(__SSE2__)
  return (Words64)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(factor));
#else
  return (a & 0xffffffffu) * uint64_t{factor};
#endif
}

// Eight blocks as vectors of 64-bit lanes, one word of a block in each lane's lower half.
struct PhiloxState {
  static constexpr size_t kWords = kVectorBytes / 8;
  static constexpr size_t kVectors = kGroupBlocks / kWords;
  Words64 c0[kVectors];
  Words64 c1[kVectors];
  Words64 c2[kVectors];
  Words64 c3[kVectors];
};

// Each 32-bit word of the state is in a 64-bit lane whose upper half may hold any bits: the multiplication reads the
// lower half only, exclusive or has no carry, and the caller masks the words. Groups that are computed together differ
// in their first block only. One after the other they would stall on the multiplier, as each round needs the one
// before.
template <size_t kGroups, typename KeyOfRound>
inline void philox_rounds(KeyOfRound key_of, int64_t id, const uint32_t* first_blocks, uint32_t extra,
                          PhiloxState* groups) {
  static constexpr uint64_t kIota[kGroupBlocks] = {0, 1, 2, 3, 4, 5, 6, 7};
  constexpr size_t kVectors = PhiloxState::kVectors;
  const auto id_bits = static_cast<uint64_t>(id);
  PhiloxState s[kGroups];
  for (size_t g = 0; g < kGroups; ++g) {
    for (size_t v = 0; v < kVectors; ++v) {
      s[g].c0[v] = Words64{} + (id_bits & 0xffffffffu);
      s[g].c1[v] = Words64{} + (id_bits >> 32);
      __builtin_memcpy(&s[g].c2[v], kIota + v * PhiloxState::kWords, sizeof(Words64));
      s[g].c2[v] = s[g].c2[v] + uint64_t{first_blocks[g]};
      s[g].c3[v] = Words64{} + extra;
    }
  }
  for (int round = 0; round < 10; ++round) {
    uint64_t key0;
    uint64_t key1;
    key_of(round, &key0, &key1);
    for (size_t g = 0; g < kGroups; ++g) {
      for (size_t v = 0; v < kVectors; ++v) {
        const Words64 product0 = multiply_low(s[g].c0[v], 0xd2511f53u);
        const Words64 product1 = multiply_low(s[g].c2[v], 0xcd9e8d57u);
        s[g].c0[v] = (product1 >> 32) ^ s[g].c1[v] ^ key0;
        s[g].c1[v] = product1;
        s[g].c2[v] = (product0 >> 32) ^ s[g].c3[v] ^ key1;
        s[g].c3[v] = product0;
      }
    }
  }
  for (size_t g = 0; g < kGroups; ++g) groups[g] = s[g];
}

inline void philox_group(uint64_t seed, int64_t id, uint32_t first_block, uint32_t extra, PhiloxWords* words) {
  PhiloxState s;
  auto low = static_cast<uint32_t>(seed);
  auto high = static_cast<uint32_t>(seed >> 32);
  const auto next_keys = [&](int, uint64_t* key0, uint64_t* key1) {
    *key0 = low;
    *key1 = high;
    low += 0x9e3779b9u;
    high += 0xbb67ae85u;
  };
  philox_rounds<1>(next_keys, id, &first_block, extra, &s);
  for (size_t v = 0; v < PhiloxState::kVectors; ++v) {
    const Words64 even = (s.c0[v] & 0xffffffffu) | (s.c2[v] << 32);
    const Words64 odd = (s.c1[v] & 0xffffffffu) | (s.c3[v] << 32);
    __builtin_memcpy(words->even + 2 * PhiloxState::kWords * v, &even, sizeof even);
    __builtin_memcpy(words->odd + 2 * PhiloxState::kWords * v, &odd, sizeof odd);
  }
}
