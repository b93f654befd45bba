// Values of short runs of decimal digits, many bytes at a time.
//
// Nothing here asks where the body ends: each verb reads a fixed number of bytes and the caller
// has made sure of them. Little-endian machines only, as everything in this project.
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

static const uint64_t TENS[20] = {
    1u, 10u, 100u, 1000u, 10000u, 100000u, 1000000u, 10000000u, 100000000u, 1000000000u, 10000000000u,
    100000000000u, 1000000000000u, 10000000000000u, 100000000000000u, 1000000000000000u,
    10000000000000000u, 100000000000000000u, 1000000000000000000u, 10000000000000000000u,
};

static inline uint64_t load8(const uint8_t *at)
{
    uint64_t word;
    memcpy(&word, at, 8);
    return word;
}

// How many of the eight bytes are digits before the first that is not.
static inline int count_digits8(uint64_t word)
{
    uint64_t zeroed = word ^ 0x3030303030303030u;   // digits become 0..9
    uint64_t other = (zeroed | (zeroed + 0x0606060606060606u)) & 0xf0f0f0f0f0f0f0f0u;
    return other ? __builtin_ctzll(other) >> 3 : 8;
}

// The value of the first `count` digits, 0..8. Shifting them up leaves zeros below, which read as
// leading zeros; then neighbours are joined: 2, 4, 8 digits.
static inline uint64_t value_of_digits8(uint64_t word, int count)
{
    word &= 0x0f0f0f0f0f0f0f0fu;
    word = word << (4 * (8 - count)) << (4 * (8 - count));
    word = word * 10 + (word >> 8);
    uint64_t low = (word & 0x000000ff000000ffu) * (100 + (1000000ull << 32));
    uint64_t high = ((word >> 16) & 0x000000ff000000ffu) * (1 + (10000ull << 32));
    return (low + high) >> 32;
}

// Up to 16 digits from `at`, which has 16 bytes; returns how many there were.
static inline int read_digits16(const uint8_t *at, uint64_t *value)
{
    uint64_t word = load8(at);
    int count = count_digits8(word);
    *value = value_of_digits8(word, count);
    if (count < 8)
        return count;
    word = load8(at + 8);
    count = count_digits8(word);
    *value = *value * TENS[count] + value_of_digits8(word, count);
    return 8 + count;
}

#if defined(__x86_64__)
// The same in vectors and without a branch. Digits stand right-aligned in 16 bytes, zeros before
// them; neighbours are joined: 2, 4, 8 digits.
#define FOR_AVX2 __attribute__((target("avx2,bmi,bmi2"), always_inline)) static inline

static const int8_t ALIGN_RIGHT[32] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                       0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15};

FOR_AVX2 uint64_t join_digits16(__m128i ones)
{
    __m128i twos = _mm_maddubs_epi16(ones, _mm_set1_epi16(10 | 1 << 8));
    __m128i fours = _mm_madd_epi16(twos, _mm_set1_epi32(100 | 1 << 16));
    __m128i eights = _mm_madd_epi16(_mm_packus_epi32(fours, fours), _mm_set1_epi32(10000 | 1 << 16));
    uint64_t both = (uint64_t)_mm_cvtsi128_si64(eights);
    return (both & 0xffffffffu) * 100000000u + (both >> 32);
}

FOR_AVX2 uint32_t mark_digits(__m128i values)
{
    return (uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(_mm_min_epu8(values, _mm_set1_epi8(9)), values));
}

FOR_AVX2 int read_digits16_wide(const uint8_t *at, uint64_t *value)
{
    __m128i values = _mm_sub_epi8(_mm_loadu_si128((const __m128i *)at), _mm_set1_epi8('0'));
    int count = __builtin_ctz(~mark_digits(values));
    *value = join_digits16(_mm_shuffle_epi8(values, _mm_loadu_si128((const __m128i *)(ALIGN_RIGHT + count))));
    return count;
}

// Loaded from 32 - n, the first n of 16 bytes are ones.
alignas(64) static const int8_t FIRST_BYTES[64] = {
    -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
    -1, -1, -1};

FOR_AVX2 uint32_t mark_commas32(const uint8_t *at)
{
    return (uint32_t)_mm256_movemask_epi8(
        _mm256_cmpeq_epi8(_mm256_loadu_si256((const __m256i *)at), _mm256_set1_epi8(',')));
}

// One bit for each byte that is no digit: a digit xor '0' is at most 9, and 118 more set no sign.
FOR_AVX2 uint32_t mark_others32(const uint8_t *at)
{
    __m256i values = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)at), _mm256_set1_epi8('0'));
    return (uint32_t)_mm256_movemask_epi8(_mm256_adds_epu8(values, _mm256_set1_epi8(118)));
}

// The first 16 digits of a decimal, as if zeros followed its last: "1.25" is 1250000000000000. `whole` of its `digits`
// (both at most 32) stand before the point; bytes behind that move left by one, over it.
FOR_AVX2 uint64_t read_decimal16(const uint8_t *at, uint64_t whole, uint64_t digits)
{
    __m128i left = _mm_loadu_si128((const __m128i *)at);
    __m128i right = _mm_loadu_si128((const __m128i *)(at + 1));
    __m128i before = _mm_loadu_si128((const __m128i *)(FIRST_BYTES + 32 - whole));
    __m128i within = _mm_loadu_si128((const __m128i *)(FIRST_BYTES + 32 - digits));
    __m128i values = _mm_xor_si128(_mm_blendv_epi8(right, left, before), _mm_set1_epi8('0'));
    return join_digits16(_mm_and_si128(values, within));
}
#endif
