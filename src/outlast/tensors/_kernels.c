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
#define LEVELS 8           /* a block of 32 Ki columns is 2^8 tiles */
#define STRIP 128          /* columns of mixed rows that a program is run on */
#define AHEAD 256          /* columns to ask the memory for beforehand, where little is computed */
#define PART 32            /* columns mixed at a time: all rows and shared sums of them lie in the first cache */
#if defined(__GNUC__) && !defined(__clang__)
#define FUSED __attribute__((optimize("fp-contract=fast"))) /* only where products and sums are exact */
#else
#define FUSED
#endif

typedef double v4 __attribute__((vector_size(32), may_alias));
typedef float f4 __attribute__((vector_size(16), aligned(4), may_alias));
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int64_t l4 __attribute__((vector_size(32)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (l4){__VA_ARGS__})
#endif
#define WIDE(x) __builtin_convertvector(*(const f4 *)(x), v4)
#define NARROW(x, v) *(f4 *)(x) = __builtin_convertvector(v, f4)

#if defined(__GNUC__) && defined(__AVX2__)
#define KEEP(v) __asm__("" : "+x"(v)) /* load once: eight products read six values, not ten */
#else
#define KEEP(v)
#endif

@PROGRAM@

/* out[l] = program of the rows at column l, for lo <= l < hi. */
void coordinate(const float *const *rows, long num_rows, long lo, long hi, float *out, int *bad)
{
    const float *here[num_rows];
    for (long r = 0; r < num_rows; r++) here[r] = rows[r] + lo;
    program(here, hi - lo, out + lo, bad);
}

/* z[l] = sum over the entries of one mixed row, in their order; `equal`: one weight for all, applied to the sum.
 * Names, not an array: the sums must stay in registers. */
#define EACH(do) do(0) do(1) do(2) do(3) do(4) do(5) do(6) do(7)
#define FIRST(k) v4 sum##k = {0};
#define PLUS(k) sum##k += s[k];
#define TIMES(k) sum##k += weight[e] * s[k];
#define LAST(k) NARROW(z + 4 * k, sum##k * scale);
static void mix_row(const double *x, const int32_t *index, const double *weight, long count, int equal, float *z)
{
    const double scale = equal ? weight[0] : 1.0;
    EACH(FIRST)
    if (equal)
        for (long e = 0; e < count; e++) {
            const v4 *s = (const v4 *)(x + (long)index[e] * PART);
            EACH(PLUS)
        }
    else
        for (long e = 0; e < count; e++) {
            const v4 *s = (const v4 *)(x + (long)index[e] * PART);
            EACH(TIMES)
        }
    EACH(LAST)
}

/* The same for one mixed row alone, straight from the rows; w is a multiple of 16. */
static void mix_alone(const float *const *rows, long at, long w, const int32_t *index, const double *weight, long count,
                      int equal, float *z)
{
    const double scale = equal ? weight[0] : 1.0;
    for (long l = 0; l < w; l += 16) {
        v4 sum[4] = {0};
        for (long e = 0; e < count; e++) {
            const float *s = rows[index[e]];
            if (!s) continue;
            s += at + l;
            __builtin_prefetch(s + AHEAD);
            if (equal)
                for (int k = 0; k < 4; k++) sum[k] += WIDE(s + 4 * k);
            else
                for (int k = 0; k < 4; k++) sum[k] += weight[e] * WIDE(s + 4 * k);
        }
        for (int k = 0; k < 4; k++) NARROW(z + l + 4 * k, sum[k] * scale);
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
int mixed(const float *const *rows, long num_rows, const int32_t *left, const int32_t *right, long num_sums,
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
        at += (hi - lo) / 16 * 16;
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
                for (long k = 0; k < PART; k += 4) *(v4 *)(sum + k) = *(const v4 *)(a + k) + *(const v4 *)(b + k);
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

/* y = x - c, rounded to a multiple of 2^-21 of the power of two below the row's largest |x - c| here, as float64. */
static void center_row(const float *x, const float *c, long w, double *y)
{
    float held[TILE];
    if (w < TILE || !x) {
        for (long l = 0; l < TILE; l++) held[l] = x && l < w ? x[l] : 0.0f;
        x = held;
    }
    int32_t most = 0;
    for (long l = 0; l < TILE; l++) {
        const float d = x[l] - c[l];
        int32_t bits;
        memcpy(&bits, &d, 4);
        bits &= INT32_MAX;
        most = bits > most ? bits : most;
    }
    most &= 0x7f800000;
    float power;
    memcpy(&power, &most, 4);
    const float magic = power * 6.0f; /* 1.5 * 2^2: adding it leaves no bits below 2^-21 of `power` */
    for (long l = 0; l < TILE; l++) y[l] = ((x[l] - c[l]) + magic) - magic;
}

/* The four sums of four vectors. */
static inline v4 sums(v4 a, v4 b, v4 c, v4 d)
{
    const v4 ab = SHUFFLE(a, b, 0, 4, 2, 6) + SHUFFLE(a, b, 1, 5, 3, 7);
    const v4 cd = SHUFFLE(c, d, 0, 4, 2, 6) + SHUFFLE(c, d, 1, 5, 3, 7);
    return SHUFFLE(ab, cd, 0, 1, 4, 5) + SHUFFLE(ab, cd, 2, 3, 6, 7);
}

/* g[i][j] = sum over the tile of y_i y_j, for rows i, i+1 and j .. j+3. Exact, so the order is the compiler's. `next`: a
 * tile that is wanted soon; asking for it here, a little at a time, hides the memory behind the arithmetic. */
FUSED static void products(const double *y, long i, long j, double *g, long n, const float *next)
{
    const double *p = y + i * TILE, *q = y + j * TILE;
    v4 a0 = {0}, a1 = {0}, a2 = {0}, a3 = {0}, b0 = {0}, b1 = {0}, b2 = {0}, b3 = {0};
    for (long l = 0; l < TILE; l += 4) {
        __builtin_prefetch(next + l);
        v4 s = *(const v4 *)(p + l), t = *(const v4 *)(p + TILE + l);
        v4 w = *(const v4 *)(q + l), x = *(const v4 *)(q + TILE + l);
        v4 u = *(const v4 *)(q + 2 * TILE + l), v = *(const v4 *)(q + 3 * TILE + l);
        KEEP(s); KEEP(t); KEEP(w); KEEP(x); KEEP(u); KEEP(v);
        a0 += s * w; a1 += s * x; a2 += s * u; a3 += s * v;
        b0 += t * w; b1 += t * x; b2 += t * u; b3 += t * v;
    }
    *(v4 *)(g + i * n + j) = sums(a0, a1, a2, a3);
    *(v4 *)(g + (i + 1) * n + j) = sums(b0, b1, b2, b3);
}

/* The same for rows i .. i+3 with themselves, the upper triangle. */
FUSED static void squares(const double *y, long i, double *g, long n, const float *next)
{
    const double *p = y + i * TILE;
    v4 a0 = {0}, a1 = {0}, a2 = {0}, a3 = {0}, b1 = {0}, b2 = {0}, b3 = {0}, c2 = {0}, c3 = {0}, d3 = {0};
    for (long l = 0; l < TILE; l += 4) {
        __builtin_prefetch(next + l);
        v4 s = *(const v4 *)(p + l), t = *(const v4 *)(p + TILE + l);
        v4 u = *(const v4 *)(p + 2 * TILE + l), v = *(const v4 *)(p + 3 * TILE + l);
        KEEP(s); KEEP(t); KEEP(u); KEEP(v);
        a0 += s * s; a1 += s * t; a2 += s * u; a3 += s * v;
        b1 += t * t; b2 += t * u; b3 += t * v;
        c2 += u * u; c3 += u * v; d3 += v * v;
    }
    g += i * n + i;
    *(v4 *)g = sums(a0, a1, a2, a3);
    *(v4 *)(g + n) = sums(a1, b1, b2, b3);
    *(v4 *)(g + 2 * n) = sums(a2, b2, c2, c3);
    *(v4 *)(g + 3 * n) = sums(a3, b3, c3, d3);
}

/* The next row's part of the tile to come; there are at least as many products as half the rows. */
static inline const float *soon(const float *const *rows, long num_rows, long *r, long next)
{
    const float *row = *r < num_rows ? rows[(*r)++] : rows[0];
    return row ? row + next : rows[0] + next;
}

/* One block (at most 32 Ki columns from lo): g, (num_rows, num_rows), of the rows centred on the program's value.
 * The first `num_data` rows are the program's; a null row is zero everywhere. Tiles are added as a binary counter adds:
 * two neighbours, then two pairs of neighbours, so that the sum is a balanced tree over tile index. */
int gram(const float *const *rows, long num_rows, long num_data, long lo, long hi, double *g, int *bad)
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
            long r = 0;
            for (long i = 0; i < n; i += 4) {
                squares(y, i, sum, n, soon(rows, num_rows, &r, next));
                for (long j = i + 4; j < n; j += 4) {
                    products(y, i, j, sum, n, soon(rows, num_rows, &r, next));
                    products(y, i + 2, j, sum, n, soon(rows, num_rows, &r, next));
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
