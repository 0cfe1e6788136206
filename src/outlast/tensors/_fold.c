/* What needs one way through memory and would take several: adding gradients to sums with the gradients' XXH3
 * fingerprints (64 bits, seeded; those of _fingerprint.py), and a slice of the tree with the fingerprints of what is
 * added, and the result's and its norm.
 *
 * Only for lengths above 240 bytes: XXH3 has other rules for shorter ones, which are left to the library. And only with
 * AVX2: on other processors the library's own code is better than what a compiler makes of this.
 */
#ifndef __AVX2__
#error "needs AVX2"
#endif
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#define BYTES 64
#define PRODUCT(k) (words)_mm512_mul_epu32((__m512i)(k), (__m512i)((k) >> 32))
#define SWAPPED(d) (words)_mm512_shuffle_epi32((__m512i)(d), _MM_PERM_BADC)
#define HOLD(x) __asm__("" : "+v"(x)) /* read once: compilers would read memory again for each use */
#else
#define BYTES 32
#define PRODUCT(k) (words)_mm256_mul_epu32((__m256i)(k), (__m256i)((k) >> 32))
#define SWAPPED(d) (words)_mm256_shuffle_epi32((__m256i)(d), 0x4e)
#define HOLD(x) __asm__("" : "+x"(x))
#endif
#define STRIPE 64
#define VECTORS (STRIPE / BYTES)
#define SECRET 192
#define ROUND ((SECRET - STRIPE) / 8) /* stripes between two scrambles */

typedef uint64_t words __attribute__((vector_size(BYTES), aligned(1), may_alias));
typedef float values __attribute__((vector_size(BYTES), aligned(1), may_alias));

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

/* XXH3 adds to each word the product of a keyed word and its neighbour; the neighbours are added up by themselves here,
 * and swapped once a round. */
typedef struct {
    words products[VECTORS], plain[VECTORS];
} sums;

typedef struct {
    uint8_t secret[SECRET];
    sums sum; /* loops work on a copy of their own: through memory each stripe would wait for the one before */
} hash;

static inline void begin(hash *h, uint64_t seed)
{
    for (long i = 0; i < SECRET; i += 16) {
        const uint64_t low = word(SECRET_OF_SEED_0 + i) + seed, high = word(SECRET_OF_SEED_0 + i + 8) - seed;
        memcpy(h->secret + i, &low, 8);
        memcpy(h->secret + i + 8, &high, 8);
    }
    const uint64_t start[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    memcpy(h->sum.products, start, STRIPE);
    memset(h->sum.plain, 0, STRIPE);
}

/* Vector k of a stripe. */
static inline void absorb(sums *sum, const uint8_t *secret, int k, words data)
{
    sum->products[k] += PRODUCT(data ^ *(const words *)(secret + k * BYTES));
    sum->plain[k] += data;
}

static inline void join(sums *sum)
{
    for (int k = 0; k < VECTORS; k++) {
        sum->products[k] += SWAPPED(sum->plain[k]);
        sum->plain[k] ^= sum->plain[k];
    }
}

/* After a round. */
static inline void scramble(sums *sum, const uint8_t *secret)
{
    join(sum);
    for (int k = 0; k < VECTORS; k++) {
        const words key = *(const words *)(secret + SECRET - STRIPE + k * BYTES), old = sum->products[k];
        sum->products[k] = (old ^ old >> 47 ^ key) * PRIME32_1;
    }
}

/* Of n values at x, all stripes but the last being in; the last overlaps the one before. */
static inline uint64_t finish(hash *h, const float *x, long n)
{
    const float *last = x + n - STRIPE / 4;
    for (int k = 0; k < VECTORS; k++)
        absorb(&h->sum, h->secret + SECRET - STRIPE - 7, k, *(const words *)(last + k * (BYTES / 4)));
    join(&h->sum);
    uint64_t sum[8], value = (uint64_t)(4 * n) * PRIME64_1;
    memcpy(sum, h->sum.products, STRIPE);
    for (int i = 0; i < 4; i++)
        value += folded(sum[2 * i] ^ word(h->secret + 11 + 16 * i), sum[2 * i + 1] ^ word(h->secret + 19 + 16 * i));
    value = (value ^ value >> 37) * 0x165667919E3779F9;
    return value ^ value >> 32;
}

enum { COPY, ADD, RESULT }; /* to = from; to += from; the same, and it is the result that is fingerprinted */

static inline void stripe(sums *sum, const uint8_t *secret, float *to, const float *from, int what)
{
    for (int k = 0; k < VECTORS; k++) {
        const long at = k * (BYTES / 4);
        values read = *(const values *)(from + at);
        HOLD(read);
        values made = read;
        if (what != COPY) made = *(const values *)(to + at) + read;
        absorb(sum, secret, k, (words)(what == RESULT ? made : read));
        *(values *)(to + at) = made;
    }
}

static inline uint64_t pass(float *to, const float *from, long n, uint64_t seed, int what)
{
    hash h;
    begin(&h, seed);
    sums sum = h.sum;
    const long stripes = (4 * n - 1) / STRIPE, wide = STRIPE / 4;
    long at = 0, s = 0;
    for (; s + ROUND <= stripes; s += ROUND) {
#pragma GCC unroll 16
        for (int q = 0; q < ROUND; q++, at += wide) stripe(&sum, h.secret + q * 8, to + at, from + at, what);
        scramble(&sum, h.secret);
    }
    for (int q = 0; s < stripes; s++, q++, at += wide) stripe(&sum, h.secret + q * 8, to + at, from + at, what);
    h.sum = sum;
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

#define LANES 64
#define TILE (4 * LANES) /* a round, in values */

/* One round of what is only read. */
static inline void read_round(sums *to, const uint8_t *secret, const float *at)
{
    sums sum = *to;
#pragma GCC unroll 16
    for (int q = 0; q < ROUND; q++)
        for (int k = 0; k < VECTORS; k++)
            absorb(&sum, secret + q * 8, k, *(const words *)(at + q * (STRIPE / 4) + k * (BYTES / 4)));
    scramble(&sum, secret);
    *to = sum;
}

/* What follows the whole rounds of n values at x, and their fingerprint. */
static inline uint64_t read_rest(hash *h, const float *x, long n)
{
    const long stripes = (4 * n - 1) / STRIPE;
    for (long s = stripes / ROUND * ROUND, q = 0; s < stripes; s++, q++)
        for (int k = 0; k < VECTORS; k++)
            absorb(&h->sum, h->secret + q * 8, k, *(const words *)(x + s * (STRIPE / 4) + k * (BYTES / 4)));
    return finish(h, x, n);
}

/* A sum of squares in float64, as a balanced tree: over rows of LANES values, by number, zeros following the last; then
 * over what is left in each lane. Four rows are a round. */
#define DEEPEST 40
typedef struct {
    double level[DEEPEST][LANES];
    long rows;
} tree;

static inline double square(float x) { return (double)x * x; }

/* `row`: a row, or the sum of 2^k of them, with what waits for it at its level and above. */
static inline void climb(tree *t, double *row, int k)
{
    for (long r = t->rows >> k; r & 1; r >>= 1, k++)
        for (int l = 0; l < LANES; l++) row[l] = t->level[k][l] + row[l];
    memcpy(t->level[k], row, LANES * sizeof *row);
}

static inline void square_round(tree *t, const float *at)
{
    double row[LANES];
    for (int l = 0; l < LANES; l++)
        row[l] = (square(at[l]) + square(at[l + LANES])) + (square(at[l + 2 * LANES]) + square(at[l + 3 * LANES]));
    climb(t, row, 2);
    t->rows += 4;
}

/* What follows the whole rounds, up to `end`, and the sum. */
static inline double square_rest(tree *t, const float *at, const float *end)
{
    double row[LANES];
    for (; at < end; at += LANES, t->rows++) {
        for (int l = 0; l < LANES; l++) row[l] = at + l < end ? square(at[l]) : 0.0;
        climb(t, row, 0);
    }
    int any = 0;
    for (int k = 0; t->rows >> k; k++)
        if (t->rows >> k & 1) {
            for (int l = 0; l < LANES; l++) row[l] = any ? t->level[k][l] + row[l] : t->level[k][l];
            any = 1;
        }
    for (int width = LANES / 2; width; width /= 2)
        for (int l = 0; l < width; l++) row[l] = row[2 * l] + row[2 * l + 1];
    return row[0];
}

/* A slice of the tree: out = scale x the sum of `parts` (n values each) by `steps`, (left, right) by number, a step's
 * result being numbered after all before it. Block by block, `first` on: the fingerprint of out, of each part where
 * `prints` (parts x blocks) is there, and the sum of squares of out where `squares` is; out's are added up.
 * With out itself as the only part and no scale it is only looked at. `unsure`: a NaN came out. Which of two NaNs an
 * addition keeps is the compiler's choice, and differs even between the whole tiles and the rest. */
#define MOST 64 /* parts */
typedef struct {
    float *out;
    const float *const *parts;
    const int32_t *steps;
    uint64_t *prints;
    double *squares;
    long num_parts, num_steps, n, block;
    uint64_t first;
    double scale;
    long unsure;
} slice;

/* Several streams by turns, a tile of each: a processor foresees that too late, and takes up to three times as long. */
static inline void foresee(const slice *s, long from)
{
    for (long p = 0; p < s->num_parts; p++)
        for (long l = 0; l < TILE; l += STRIPE / 4) __builtin_prefetch(s->parts[p] + from + 4 * TILE + l);
}

static inline void add_tile(slice *s, long from, long size)
{
    float scratch[MOST][TILE];
    const float *have[2 * MOST];
    float *out = s->out + from;
    for (long p = 0; p < s->num_parts; p++) have[p] = s->parts[p] + from;
    for (long i = 0; i < s->num_steps; i++) {
        const float *left = have[s->steps[2 * i]], *right = have[s->steps[2 * i + 1]];
        float *into = i + 1 < s->num_steps ? scratch[i] : out;
        for (long l = 0; l < size; l++) into[l] = left[l] + right[l];
        have[s->num_parts + i] = into;
    }
    const float scale = (float)s->scale;
    if (scale != 1.0f)
        for (long l = 0; l < size; l++) out[l] = (s->num_steps ? out[l] : have[0][l]) * scale;
    else if (!s->num_steps && have[0] != out)
        memcpy(out, have[0], 4 * size);
    int nan = 0;
    for (long l = 0; l < size; l++) nan |= out[l] != out[l];
    s->unsure |= nan;
}

static uint64_t reduce_block(slice *s, long from, long size, uint64_t *of_parts, long stride, double *squares,
                             uint64_t seed)
{
    hash result;
    tree norm;
    sums read[MOST];
    norm.rows = 0;
    begin(&result, seed);
    for (long p = 0; of_parts && p < s->num_parts; p++) read[p] = result.sum;
    const long rounds = (4 * size - 1) / STRIPE / ROUND, rest = size - rounds * TILE;
    for (long r = 0; r < rounds; r++, from += TILE) {
        foresee(s, from);
        for (long p = 0; of_parts && p < s->num_parts; p++) read_round(&read[p], result.secret, s->parts[p] + from);
        add_tile(s, from, TILE);
        read_round(&result.sum, result.secret, s->out + from);
        if (squares) square_round(&norm, s->out + from);
    }
    add_tile(s, from, rest);
    const long start = from - rounds * TILE;
    for (long p = 0; of_parts && p < s->num_parts; p++) {
        hash h = result;
        h.sum = read[p];
        of_parts[p * stride] = read_rest(&h, s->parts[p] + start, size);
    }
    if (squares) *squares = square_rest(&norm, s->out + from, s->out + from + rest);
    return read_rest(&result, s->out + start, size);
}

uint64_t reduce(slice *s)
{
    uint64_t prints = 0;
    const long blocks = (s->n + s->block - 1) / s->block;
    for (long from = 0, b = 0; b < blocks; from += s->block, b++)
        prints += reduce_block(s, from, s->n - from < s->block ? s->n - from : s->block, s->prints ? s->prints + b : 0,
                               blocks, s->squares ? s->squares + b : 0, s->first + b);
    return prints;
}
