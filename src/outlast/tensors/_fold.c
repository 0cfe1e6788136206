/* Adding gradients to sums, and their XXH3 fingerprints (64 bits, seeded; those of _fingerprint.py) on the same way
 * through memory: who adds first and fingerprints afterwards waits for the memory twice. And a block's fingerprint and
 * norm at once.
 *
 * Only for lengths above 240 bytes: XXH3 has other rules for shorter ones, which are left to the library.
 */
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#define BYTES 64
#else
#define BYTES 32
#endif
#define STRIPE 64
#define VECTORS (STRIPE / BYTES)
#define SECRET 192
#define ROUND ((SECRET - STRIPE) / 8) /* stripes between two scrambles */

typedef uint64_t words __attribute__((vector_size(BYTES), aligned(1), may_alias));
typedef float values __attribute__((vector_size(BYTES), aligned(1), may_alias));

#if defined(__AVX512F__)
#include <immintrin.h>
#define PRODUCT(k) (words)_mm512_mul_epu32((__m512i)(k), (__m512i)((k) >> 32))
#define SWAPPED(d) (words)_mm512_shuffle_epi32((__m512i)(d), _MM_PERM_BADC)
#elif defined(__AVX2__)
#include <immintrin.h>
#define PRODUCT(k) (words)_mm256_mul_epu32((__m256i)(k), (__m256i)((k) >> 32))
#define SWAPPED(d) (words)_mm256_shuffle_epi32((__m256i)(d), 0x4e)
#else
#define PRODUCT(k) (((k) & 0xffffffff) * ((k) >> 32))
#define SWAPPED(d) ((words){(d)[1], (d)[0], (d)[3], (d)[2]})
#endif

static const uint32_t PRIME32_1 = 0x9E3779B1, PRIME32_2 = 0x85EBCA77, PRIME32_3 = 0xC2B2AE3D;
static const uint64_t PRIME64_1 = 0x9E3779B185EBCA87, PRIME64_2 = 0xC2B2AE3D27D4EB4F, PRIME64_3 = 0x165667B19E3779F9,
                      PRIME64_4 = 0x85EBCA77C2B2AE63, PRIME64_5 = 0x27D4EB2F165667C5;
static const uint8_t SECRET_OF_SEED_0[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d,
    0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0,
    0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0,
    0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b,
    0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac,
    0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51,
    0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34,
    0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49,
    0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8,
    0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b,
    0x40, 0x7e,
};

static uint64_t word(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, 8);
    return value;
}

static uint64_t folded(uint64_t a, uint64_t b)
{
    const unsigned __int128 both = (unsigned __int128)a * b;
    return (uint64_t)both ^ (uint64_t)(both >> 64);
}

enum { COPY, ADD, RESULT }; /* to = from; to += from; the same, and it is the result that is fingerprinted */

/* One stripe into the accumulators; what is written where there is a `to`. */
static inline void stripe(words *sum, const uint8_t *secret, float *to, const float *from, int what)
{
    for (int k = 0; k < VECTORS; k++) {
        const long at = k * (BYTES / 4);
        const values read = *(const values *)(from + at);
        values made = read;
        if (what != COPY) made = *(const values *)(to + at) + read;
        const words data = (words)(what == RESULT ? made : read), keyed = data ^ *(const words *)(secret + k * BYTES);
        sum[k] += SWAPPED(data) + PRODUCT(keyed);
        *(values *)(to + at) = made;
    }
}

typedef struct {
    uint8_t secret[SECRET];
    words sum[VECTORS];
} hash;

static inline void begin(hash *h, uint64_t seed)
{
    for (long i = 0; i < SECRET; i += 16) {
        const uint64_t low = word(SECRET_OF_SEED_0 + i) + seed, high = word(SECRET_OF_SEED_0 + i + 8) - seed;
        memcpy(h->secret + i, &low, 8);
        memcpy(h->secret + i + 8, &high, 8);
    }
    const uint64_t start[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    memcpy(h->sum, start, STRIPE);
}

/* After stripe number s. */
static inline void scramble(hash *h, long s)
{
    if (s % ROUND != ROUND - 1) return;
    for (int k = 0; k < VECTORS; k++) {
        const words key = *(const words *)(h->secret + SECRET - STRIPE + k * BYTES);
        h->sum[k] = (h->sum[k] ^ h->sum[k] >> 47 ^ key) * PRIME32_1;
    }
}

/* Of n values at x, all stripes but the last being in; the last overlaps the one before. */
static inline uint64_t finish(hash *h, const float *x, long n)
{
    const float *last = x + n - STRIPE / 4;
    for (int k = 0; k < VECTORS; k++) {
        const words data = *(const words *)(last + k * (BYTES / 4));
        h->sum[k] += SWAPPED(data) + PRODUCT(data ^ *(const words *)(h->secret + SECRET - STRIPE - 7 + k * BYTES));
    }
    uint64_t sum[8], value = (uint64_t)(4 * n) * PRIME64_1;
    memcpy(sum, h->sum, STRIPE);
    for (int i = 0; i < 4; i++)
        value += folded(sum[2 * i] ^ word(h->secret + 11 + 16 * i), sum[2 * i + 1] ^ word(h->secret + 19 + 16 * i));
    value = (value ^ value >> 37) * 0x165667919E3779F9;
    return value ^ value >> 32;
}

static inline uint64_t pass(float *to, const float *from, long n, uint64_t seed, int what)
{
    hash h;
    begin(&h, seed);
    const long stripes = (4 * n - 1) / STRIPE, wide = STRIPE / 4;
    long at = 0;
    for (long s = 0; s < stripes; s++, at += wide) {
        stripe(h.sum, h.secret + s % ROUND * 8, to + at, from + at, what);
        scramble(&h, s);
    }
    for (; at < n; at++) to[at] = what == COPY ? from[at] : to[at] + from[at];
    return finish(&h, what == RESULT ? to : from, n);
}

/* Each `from` into its `to`; the sum of the fingerprints of what was added, each with its seed. */
uint64_t add_all(float *const *to, const float *const *from, const int64_t *lengths, const uint64_t *seeds, long count,
                 int fresh)
{
    uint64_t prints = 0;
    for (long i = 0; i < count; i++)
        prints += fresh ? pass(to[i], from[i], lengths[i], seeds[i], COPY)
                        : pass(to[i], from[i], lengths[i], seeds[i], ADD);
    return prints;
}

/* to += from, and the fingerprint of each block of the result, its number from `first` being its seed. */
void add_blocks(float *to, const float *from, long n, long block, uint64_t first, uint64_t *prints)
{
    for (long at = 0; at < n; at += block) {
        const long size = n - at < block ? n - at : block;
        *prints++ = pass(to + at, from + at, size, first++, RESULT);
    }
}

/* The fingerprint of n values, and the sum of their squares in float64, as a balanced tree: over rows of LANES values,
 * by number, zeros following the last; then over what is left in each lane. */
#define LANES 64
#define DEEPEST 40
double look(const float *x, long n, uint64_t seed, uint64_t *print)
{
    hash h;
    begin(&h, seed);
    double level[DEEPEST][LANES], row[LANES];
    const long stripes = (4 * n - 1) / STRIPE, rows = (n + LANES - 1) / LANES;
    for (long r = 0, s = 0; r < rows; r++) {
        const float *at = x + r * LANES;
        for (int q = 0; q < LANES * 4 / STRIPE && s < stripes; q++, s++) {
            for (int k = 0; k < VECTORS; k++) {
                const words data = *(const words *)(at + q * (STRIPE / 4) + k * (BYTES / 4));
                h.sum[k] += SWAPPED(data) + PRODUCT(data ^ *(const words *)(h.secret + s % ROUND * 8 + k * BYTES));
            }
            scramble(&h, s);
        }
        const long here = n - r * LANES < LANES ? n - r * LANES : LANES;
        if (here == LANES)
            for (long l = 0; l < LANES; l++) row[l] = (double)at[l] * at[l];
        else
            for (long l = 0; l < LANES; l++) row[l] = l < here ? (double)at[l] * at[l] : 0.0;
        int k = 0;
        for (long rest = r; rest & 1; rest >>= 1, k++)
            for (long l = 0; l < LANES; l++) row[l] = level[k][l] + row[l];
        memcpy(level[k], row, sizeof row);
    }
    int any = 0;
    for (int k = 0; rows >> k; k++)
        if (rows >> k & 1) {
            for (long l = 0; l < LANES; l++) row[l] = any ? level[k][l] + row[l] : level[k][l];
            any = 1;
        }
    for (long width = LANES / 2; width; width /= 2)
        for (long l = 0; l < width; l++) row[l] = row[2 * l] + row[2 * l + 1];
    *print = finish(&h, x, n);
    return row[0];
}
