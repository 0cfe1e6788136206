/* The CPU's fast path for float32 rows: the same operations in the same order as _eager.py, tile by tile in the cache.
 *
 * `program` is emitted from a straight-line program (_program.py) in place of the PROGRAM line. Compiled without any
 * licence to reorder floating point; the Gram sums may be taken in any order because each is exact (_gram.py).
 */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define TILE 128           /* columns of a Gram tile: sums inside one are exact */
#define LEVELS 8           /* a block is 2^8 tiles */
#define BLOCK (TILE << LEVELS)
#define STRIP 128          /* columns of mixed rows that a program is run on */
#define AHEAD 256          /* columns to ask the memory for beforehand, where little is computed */
#define PART 32            /* columns mixed at a time: all rows and shared sums of them lie in the first cache */
#if defined(__GNUC__) && !defined(__clang__)
#define FUSED __attribute__((optimize("fp-contract=fast"))) /* only where products and sums are exact */
#else
#define FUSED
#endif

#ifdef __AVX512F__
#define LANES 8
#else
#define LANES 4
#endif
typedef double wide __attribute__((vector_size(8 * LANES), may_alias));
typedef float half __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float narrow __attribute__((vector_size(8 * LANES), aligned(4), may_alias));
typedef int32_t bits __attribute__((vector_size(8 * LANES), may_alias));
typedef int64_t places __attribute__((vector_size(8 * LANES)));
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define SHUFFLE_BITS(a, ...) __builtin_shufflevector(a, a, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (places){__VA_ARGS__})
#define SHUFFLE_BITS(a, ...) __builtin_shuffle(a, (bits){__VA_ARGS__})
#endif
/* Where gcc makes detours of the portable form, the instruction by name. KEEP: load once, several products read it. */
#if defined(__AVX512F__)
#include <immintrin.h>
#define WIDE(x) (wide)_mm512_cvtps_pd(_mm256_loadu_ps((const float *)(x)))
#define NARROW(x, v) _mm256_storeu_ps((float *)(x), _mm512_cvtpd_ps((__m512d)(v)))
#define LARGER(a, b) (bits)_mm512_max_epi32((__m512i)(a), (__m512i)(b))
#define KEEP(v) __asm__("" : "+v"(v))
#else
#define WIDE(x) __builtin_convertvector(*(const half *)(x), wide)
#define NARROW(x, v) *(half *)(x) = __builtin_convertvector(v, half)
#if defined(__AVX2__)
#include <immintrin.h>
#define LARGER(a, b) (bits)_mm256_max_epi32((__m256i)(a), (__m256i)(b))
#define KEEP(v) __asm__("" : "+x"(v))
#else
#define LARGER(a, b) (((a) & ((a) > (b))) | ((b) & ~((a) > (b))))
#define KEEP(v)
#endif
#endif

@PROGRAM@

/* out[l] = program of the rows at column l, for lo <= l < hi. */
static void coordinate(const float *const *rows, long num_rows, long lo, long hi, float *out, int *bad)
{
    const float *here[num_rows];
    for (long r = 0; r < num_rows; r++) here[r] = rows[r] + lo;
    program(here, hi - lo, out + lo, bad);
}

/* z[l] = sum over the entries of one mixed row, in their order; `equal`: one weight for all, applied to the sum.
 * Names, not an array: the sums must stay in registers. */
#if LANES == 8
#define EACH(do) do(0) do(1) do(2) do(3)
#else
#define EACH(do) do(0) do(1) do(2) do(3) do(4) do(5) do(6) do(7)
#endif
#define FIRST(k) wide sum##k = {0};
#define PLUS(k) sum##k += s[k];
#define TIMES(k) sum##k += weight[e] * s[k];
#define LAST(k) NARROW(z + LANES * k, sum##k * scale);
static void mix_row(const double *x, const int32_t *index, const double *weight, long count, int equal, float *z)
{
    const double scale = equal ? weight[0] : 1.0;
    EACH(FIRST)
    if (equal)
        for (long e = 0; e < count; e++) {
            const wide *s = (const wide *)(x + (long)index[e] * PART);
            EACH(PLUS)
        }
    else
        for (long e = 0; e < count; e++) {
            const wide *s = (const wide *)(x + (long)index[e] * PART);
            EACH(TIMES)
        }
    EACH(LAST)
}

/* The same for one mixed row alone, straight from the rows; w is a multiple of PART. */
static void mix_alone(const float *const *rows, long at, long w, const int32_t *index, const double *weight, long count,
                      int equal, float *z)
{
    const double scale = equal ? weight[0] : 1.0;
    for (long l = 0; l < w; l += 4 * LANES) {
        wide sum[4] = {0};
        for (long e = 0; e < count; e++) {
            const float *s = rows[index[e]];
            if (!s) continue;
            s += at + l;
            for (long k = 0; k < 4 * LANES; k += 16) __builtin_prefetch(s + AHEAD + k);
            if (equal)
                for (int k = 0; k < 4; k++) sum[k] += WIDE(s + LANES * k);
            else
                for (int k = 0; k < 4; k++) sum[k] += weight[e] * WIDE(s + LANES * k);
        }
        for (int k = 0; k < 4; k++) NARROW(z + l + LANES * k, sum[k] * scale);
    }
}

/* x[r] = w columns of row r as float64, zeros beyond. */
static void widen(const float *row, long w, double *x)
{
    if (row && w == PART) {
        for (long l = 0; l < PART; l++) x[l] = row[l];
        __builtin_prefetch(row + STRIP);
        __builtin_prefetch(row + STRIP + 16);
        return;
    }
    for (long l = 0; l < PART; l++) x[l] = row && l < w ? row[l] : 0.0;
}

/* Mixed rows (start, index, weight: one compressed row each), then the program on them; without it (alone) row 0.
 * Sums of two that several mixed rows share come first: number num_rows + p is number left[p] plus number right[p]. */
static int mixed(const float *const *rows, long num_rows, const int32_t *left, const int32_t *right, long num_sums,
                 const int32_t *start, const int32_t *index, const double *weight, const int32_t *equal, long num_mixed,
                 int alone, long lo, long hi, float *out, int *bad)
{
    double *x = aligned_alloc(64, sizeof(double) * PART * (num_rows + num_sums));
    float *z = aligned_alloc(64, sizeof(float) * STRIP * num_mixed);
    char *used = calloc(num_rows + num_sums, 1);
    if (!x || !z || !used) { free(x); free(z); free(used); return 1; }
    for (int32_t e = 0; e < start[num_mixed]; e++) used[index[e]] = 1;
    for (long p = 0; p < num_sums; p++) used[left[p]] = used[right[p]] = 1;
    long at = lo;
    if (alone) {
        at += (hi - lo) / PART * PART;
        mix_alone(rows, lo, at - lo, index, weight, start[1], equal[0], out + lo);
    }
    const float *here[num_mixed];
    for (long i = 0; i < num_mixed; i++) here[i] = z + i * STRIP;
    for (; at < hi; at += STRIP) {
        const long strip = hi - at < STRIP ? hi - at : STRIP;
        for (long l = 0; l < strip; l += PART) {
            const long w = strip - l < PART ? strip - l : PART;
            for (long r = 0; r < num_rows; r++)
                if (used[r]) widen(rows[r] ? rows[r] + at + l : 0, w, x + r * PART);
            for (long p = 0; p < num_sums; p++) {
                const double *a = x + left[p] * PART, *b = x + right[p] * PART;
                double *sum = x + (num_rows + p) * PART;
                for (long k = 0; k < PART; k += LANES) *(wide *)(sum + k) = *(const wide *)(a + k) + *(const wide *)(b + k);
            }
            for (long i = 0; i < num_mixed; i++) {
                const int32_t s = start[i];
                mix_row(x, index + s, weight + s, start[i + 1] - s, equal[i], z + i * STRIP + l);
            }
        }
        if (alone) memcpy(out + at, z, sizeof(float) * strip);
        else program(here, strip, out + at, bad);
    }
    free(x); free(z); free(used);
    return 0;
}

/* The largest of all lanes, in every lane. */
static inline bits largest(bits a)
{
#if LANES == 8
    a = LARGER(a, SHUFFLE_BITS(a, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    a = LARGER(a, SHUFFLE_BITS(a, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    a = LARGER(a, SHUFFLE_BITS(a, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    return LARGER(a, SHUFFLE_BITS(a, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
#else
    a = LARGER(a, SHUFFLE_BITS(a, 4, 5, 6, 7, 0, 1, 2, 3));
    a = LARGER(a, SHUFFLE_BITS(a, 2, 3, 0, 1, 6, 7, 4, 5));
    return LARGER(a, SHUFFLE_BITS(a, 1, 0, 3, 2, 5, 4, 7, 6));
#endif
}

/* y = x - c, rounded to a multiple of 2^-21 of the power of two below the row's largest |x - c| here, as float64. */
static void center_row(const float *x, const float *c, long w, double *y)
{
    float held[TILE];
    if (w < TILE || !x) {
        for (long l = 0; l < TILE; l++) held[l] = x && l < w ? x[l] : 0.0f;
        x = held;
    }
    bits most = {0};
    for (long l = 0; l < TILE; l += 2 * LANES)
        most = LARGER(most, (bits)(*(const narrow *)(x + l) - *(const narrow *)(c + l)) & INT32_MAX);
    /* 1.5 * 2^2 of that power: adding it leaves no bits below 2^-21 of the power */
    const narrow magic = (narrow)(largest(most) & 0x7f800000) * 6.0f;
    for (long l = 0; l < TILE; l += 2 * LANES) {
        const narrow rounded = ((*(const narrow *)(x + l) - *(const narrow *)(c + l)) + magic) - magic;
        *(wide *)(y + l) = WIDE(&rounded);
        *(wide *)(y + l + LANES) = WIDE((const float *)&rounded + LANES);
    }
}

/* g[i][j] = sum over the tile of y_i y_j, for four rows from i (`products`: two with four lanes) and four from j;
 * `squares`: for four rows with themselves, the upper triangle. Sums are exact, so their order is the compiler's.
 * `next`: a tile of two rows that is wanted soon; asking for it here, a little at a time, hides the memory behind the
 * arithmetic. */
#define READ(v, row) wide v = *(const wide *)((row) + l); KEEP(v)
#define SOON() __builtin_prefetch(next[l / (TILE / 2)] + l % (TILE / 2) * 2)
#if LANES == 8
#define BESIDE 4
/* The eight sums of eight vectors: the first four to `to`, the others to `below`. */
static inline void put(wide a, wide b, wide c, wide d, wide e, wide f, wide g, wide h, double *to, double *below)
{
    const wide ab = SHUFFLE(a, b, 0, 8, 2, 10, 4, 12, 6, 14) + SHUFFLE(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
    const wide cd = SHUFFLE(c, d, 0, 8, 2, 10, 4, 12, 6, 14) + SHUFFLE(c, d, 1, 9, 3, 11, 5, 13, 7, 15);
    const wide ef = SHUFFLE(e, f, 0, 8, 2, 10, 4, 12, 6, 14) + SHUFFLE(e, f, 1, 9, 3, 11, 5, 13, 7, 15);
    const wide gh = SHUFFLE(g, h, 0, 8, 2, 10, 4, 12, 6, 14) + SHUFFLE(g, h, 1, 9, 3, 11, 5, 13, 7, 15);
    const wide abcd = SHUFFLE(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
    const wide efgh = SHUFFLE(ef, gh, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(ef, gh, 2, 3, 10, 11, 6, 7, 14, 15);
    const wide all = SHUFFLE(abcd, efgh, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(abcd, efgh, 4, 5, 6, 7, 12, 13, 14, 15);
    memcpy(to, &all, 32);
    memcpy(below, (const double *)&all + 4, 32);
}

FUSED static void products(const double *y, long i, long j, double *g, long n, const float *const *next)
{
    const double *p = y + i * TILE, *q = y + j * TILE;
    wide a0 = {0}, a1 = {0}, a2 = {0}, a3 = {0}, b0 = {0}, b1 = {0}, b2 = {0}, b3 = {0};
    wide c0 = {0}, c1 = {0}, c2 = {0}, c3 = {0}, d0 = {0}, d1 = {0}, d2 = {0}, d3 = {0};
    for (long l = 0; l < TILE; l += LANES) {
        SOON();
        READ(s, p); READ(t, p + TILE); READ(u, p + 2 * TILE); READ(v, p + 3 * TILE);
        READ(w, q); READ(x, q + TILE); READ(o, q + 2 * TILE); READ(z, q + 3 * TILE);
        a0 += s * w; a1 += s * x; a2 += s * o; a3 += s * z;
        b0 += t * w; b1 += t * x; b2 += t * o; b3 += t * z;
        c0 += u * w; c1 += u * x; c2 += u * o; c3 += u * z;
        d0 += v * w; d1 += v * x; d2 += v * o; d3 += v * z;
    }
    g += i * n + j;
    put(a0, a1, a2, a3, b0, b1, b2, b3, g, g + n);
    put(c0, c1, c2, c3, d0, d1, d2, d3, g + 2 * n, g + 3 * n);
}
#else
#define BESIDE 2
static inline void put(wide a, wide b, wide c, wide d, wide e, wide f, wide g, wide h, double *to, double *below)
{
    const wide ab = SHUFFLE(a, b, 0, 4, 2, 6) + SHUFFLE(a, b, 1, 5, 3, 7);
    const wide cd = SHUFFLE(c, d, 0, 4, 2, 6) + SHUFFLE(c, d, 1, 5, 3, 7);
    const wide ef = SHUFFLE(e, f, 0, 4, 2, 6) + SHUFFLE(e, f, 1, 5, 3, 7);
    const wide gh = SHUFFLE(g, h, 0, 4, 2, 6) + SHUFFLE(g, h, 1, 5, 3, 7);
    *(wide *)to = SHUFFLE(ab, cd, 0, 1, 4, 5) + SHUFFLE(ab, cd, 2, 3, 6, 7);
    *(wide *)below = SHUFFLE(ef, gh, 0, 1, 4, 5) + SHUFFLE(ef, gh, 2, 3, 6, 7);
}

FUSED static void products(const double *y, long i, long j, double *g, long n, const float *const *next)
{
    const double *p = y + i * TILE, *q = y + j * TILE;
    wide a0 = {0}, a1 = {0}, a2 = {0}, a3 = {0}, b0 = {0}, b1 = {0}, b2 = {0}, b3 = {0};
    for (long l = 0; l < TILE; l += LANES) {
        SOON();
        READ(s, p); READ(t, p + TILE);
        READ(w, q); READ(x, q + TILE); READ(o, q + 2 * TILE); READ(z, q + 3 * TILE);
        a0 += s * w; a1 += s * x; a2 += s * o; a3 += s * z;
        b0 += t * w; b1 += t * x; b2 += t * o; b3 += t * z;
    }
    g += i * n + j;
    put(a0, a1, a2, a3, b0, b1, b2, b3, g, g + n);
}
#endif

FUSED static void squares(const double *y, long i, double *g, long n, const float *const *next)
{
    const double *p = y + i * TILE;
    wide a0 = {0}, a1 = {0}, a2 = {0}, a3 = {0}, b1 = {0}, b2 = {0}, b3 = {0}, c2 = {0}, c3 = {0}, d3 = {0};
    for (long l = 0; l < TILE; l += LANES) {
        SOON();
        READ(s, p); READ(t, p + TILE); READ(u, p + 2 * TILE); READ(v, p + 3 * TILE);
        a0 += s * s; a1 += s * t; a2 += s * u; a3 += s * v;
        b1 += t * t; b2 += t * u; b3 += t * v;
        c2 += u * u; c3 += u * v; d3 += v * v;
    }
    g += i * n + i;
    put(a0, a1, a2, a3, a1, b1, b2, b3, g, g + n);
    put(a2, b2, c2, c3, a3, b3, c3, d3, g + 2 * n, g + 3 * n);
}

/* Two more rows' part of the tile to come. */
static inline void soon(const float *const *rows, long num_rows, long *r, long next, const float *both[2])
{
    for (int k = 0; k < 2; k++) {
        const float *row = *r < num_rows ? rows[(*r)++] : 0;
        both[k] = (row ? row : rows[0]) + next;
    }
}

/* One block (at most BLOCK columns from lo): g, (num_rows, num_rows), of the rows centred on the program's value.
 * The first `num_data` rows are the program's; a null row is zero everywhere. Tiles are added as a binary counter adds:
 * two neighbours, then two pairs of neighbours, so that the sum is a balanced tree over tile index. */
static int gram(const float *const *rows, long num_rows, long num_data, long lo, long hi, double *g, int *bad)
{
    const long n = (num_rows + 3) / 4 * 4, size = n * n;
    double *y = aligned_alloc(64, sizeof(double) * TILE * n);
    double *level = aligned_alloc(64, sizeof(double) * (LEVELS + 2) * size);
    if (!y || !level) { free(y); free(level); return 1; }
    memset(y, 0, sizeof(double) * TILE * n);
    memset(level, 0, sizeof(double) * (LEVELS + 2) * size);
    float c[TILE] __attribute__((aligned(64))) = {0};
    for (long t = 0; t < 1L << LEVELS; t++) {
        const long at = lo + t * TILE, w = hi - at < TILE ? hi - at : TILE;
        double *sum = t & 1 ? level : level + size;
        if (w > 0) {
            const float *here[num_data];
            for (long r = 0; r < num_data; r++) here[r] = rows[r] + at;
            program(here, w, c, bad);
            for (long l = w; l < TILE; l++) c[l] = 0.0f;
            /* Not finite only where too many rows are not: these are refused, and no others must look like them. */
            for (long l = 0; l < TILE; l++) c[l] = c[l] - c[l] == 0.0f ? c[l] : 0.0f;
            for (long r = 0; r < num_rows; r++) center_row(rows[r] ? rows[r] + at : 0, c, w, y + r * TILE);
            const long next = at + 2 * TILE <= hi ? at + TILE : at;
            const float *both[2];
            long r = 0;
            for (long i = 0; i < n; i += 4) {
                soon(rows, num_rows, &r, next, both);
                squares(y, i, sum, n, both);
                for (long j = i + 4; j < n; j += 4)
                    for (long k = 0; k < 4; k += BESIDE) {
                        soon(rows, num_rows, &r, next, both);
                        products(y, i + k, j, sum, n, both);
                    }
            }
        } else memset(sum, 0, sizeof(double) * size);
        for (long k = 1, rest = t; rest & 1; rest >>= 1, k++) {
            const double *before = level + k * size;
            double *to = rest & 2 ? level : level + (k + 1) * size;
            for (long e = 0; e < size; e++) to[e] = before[e] + level[e];
        }
    }
    const double *whole = level + (LEVELS + 1) * size;
    for (long i = 0; i < num_rows; i++)
        for (long j = 0; j < num_rows; j++) g[i * num_rows + j] = whole[i <= j ? i * n + j : j * n + i];
    free(y); free(level);
    return 0;
}

/* One call's columns, shared out block by block to whoever comes. The fields are those of `Task` in _native.py. */
struct task {
    long next; /* first column that nobody has taken */
    long num_columns, what, bad, failed;
    const float *const *rows;
    long num_rows, num_data;
    const int32_t *left, *right;
    long num_sums;
    const int32_t *start, *index;
    const double *weight;
    const int32_t *equal;
    long num_mixed;
    float *out;
    double *grams;
};
enum { COORDINATE, MIXED, ALONE, GRAM };

void work(void *shared)
{
    struct task *t = shared;
    long lo;
    while ((lo = __atomic_fetch_add(&t->next, BLOCK, __ATOMIC_RELAXED)) < t->num_columns) {
        const long hi = t->num_columns - lo < BLOCK ? t->num_columns : lo + BLOCK;
        int bad = 0, failed = 0;
        if (t->what == COORDINATE) coordinate(t->rows, t->num_rows, lo, hi, t->out, &bad);
        else if (t->what == GRAM)
            failed = gram(t->rows, t->num_rows, t->num_data, lo, hi,
                          t->grams + lo / BLOCK * t->num_rows * t->num_rows, &bad);
        else
            failed = mixed(t->rows, t->num_rows, t->left, t->right, t->num_sums, t->start, t->index, t->weight,
                           t->equal, t->num_mixed, t->what == ALONE, lo, hi, t->out, &bad);
        if (bad) __atomic_store_n(&t->bad, 1, __ATOMIC_RELAXED);
        if (failed) __atomic_store_n(&t->failed, 1, __ATOMIC_RELAXED);
    }
}
