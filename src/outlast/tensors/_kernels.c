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
#define LEVELS 9           /* a block of 64 Ki columns is 2^9 tiles */
#define STRIP 128          /* columns mixed at a time */
#if defined(__GNUC__) && !defined(__clang__)
#define FUSED __attribute__((optimize("fp-contract=fast"))) /* only where products and sums are exact */
#else
#define FUSED
#endif

typedef double v4 __attribute__((vector_size(32), may_alias));
typedef float f4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef int64_t i4 __attribute__((vector_size(32)));

@PROGRAM@

/* out[l] = program of the rows at column l, for lo <= l < hi. */
void coordinate(const float *const *rows, long num_rows, long lo, long hi, float *out, int *bad)
{
    const float *here[num_rows];
    for (long r = 0; r < num_rows; r++) here[r] = rows[r] + lo;
    program(here, hi - lo, out + lo, bad);
}

/* z[l] = sum over the entries of one mixed row, in their order; `equal`: one weight for all, applied to the sum. */
static void mix_row(double *x, const int32_t *index, const double *weight, long count, int equal, float *z)
{
    for (long l = 0; l < STRIP; l += 16) {
        v4 a = {0}, b = {0}, c = {0}, d = {0};
        for (long e = 0; e < count; e++) {
            const v4 *s = (const v4 *)(x + (long)index[e] * STRIP + l);
            if (equal) {
                a += s[0]; b += s[1]; c += s[2]; d += s[3];
            } else {
                const double w = weight[e];
                a += w * s[0]; b += w * s[1]; c += w * s[2]; d += w * s[3];
            }
        }
        if (equal) {
            const double w = weight[0];
            a *= w; b *= w; c *= w; d *= w;
        }
        for (int k = 0; k < 4; k++) {
            z[l + k] = (float)a[k]; z[l + 4 + k] = (float)b[k];
            z[l + 8 + k] = (float)c[k]; z[l + 12 + k] = (float)d[k];
        }
    }
}

/* Mixed rows (start, index, weight: one compressed row each), then the program on them; without it (alone) row 0. */
int mixed(const float *const *rows, long num_rows, const int32_t *start, const int32_t *index, const double *weight,
          const int32_t *equal, long num_mixed, int alone, long lo, long hi, float *out, int *bad)
{
    double *x = aligned_alloc(64, sizeof(double) * STRIP * num_rows);
    float *z = aligned_alloc(64, sizeof(float) * STRIP * num_mixed);
    char *used = calloc(num_rows, 1);
    if (!x || !z || !used) { free(x); free(z); free(used); return 1; }
    for (int32_t e = 0; e < start[num_mixed]; e++) used[index[e]] = 1;
    for (long at = lo; at < hi; at += STRIP) {
        const long w = hi - at < STRIP ? hi - at : STRIP;
        for (long r = 0; r < num_rows; r++) {
            if (!used[r]) continue;
            double *to = x + r * STRIP;
            if (rows[r]) for (long l = 0; l < w; l++) to[l] = rows[r][at + l];
            for (long l = rows[r] ? w : 0; l < STRIP; l++) to[l] = 0.0;
        }
        const float *here[num_mixed];
        for (long i = 0; i < num_mixed; i++) {
            const int32_t s = start[i];
            mix_row(x, index + s, weight + s, start[i + 1] - s, equal[i], z + i * STRIP);
            here[i] = z + i * STRIP;
        }
        if (alone) memcpy(out + at, z, sizeof(float) * w);
        else program(here, w, out + at, bad);
    }
    free(x); free(z); free(used);
    return 0;
}

static inline i4 larger(i4 a, i4 b)
{
    const i4 more = a > b;
    return (a & more) | (b & ~more);
}

/* y = x - c; returns the larger of `top` and |y|, as bits: positive float64 numbers are ordered as their bits are. */
static inline i4 center_four(const float *x, const double *c, double *y, i4 top)
{
    const i4 sign = {INT64_MAX, INT64_MAX, INT64_MAX, INT64_MAX};
    const v4 d = __builtin_convertvector(*(const f4 *)x, v4) - *(const v4 *)c;
    *(v4 *)y = d;
    return larger((i4)d & sign, top);
}

/* y = x - c in float64, then rounded to a multiple of 2^-22 of the power of two below the row's largest value here. */
static void center_row(const float *x, const double *c, long w, double *y)
{
    float held[TILE];
    if (w < TILE || !x) {
        for (long l = 0; l < TILE; l++) held[l] = x && l < w ? x[l] : 0.0f;
        x = held;
    }
    i4 t0 = {0}, t1 = {0}, t2 = {0}, t3 = {0};
    for (long l = 0; l < TILE; l += 16) {
        t0 = center_four(x + l, c + l, y + l, t0);
        t1 = center_four(x + l + 4, c + l + 4, y + l + 4, t1);
        t2 = center_four(x + l + 8, c + l + 8, y + l + 8, t2);
        t3 = center_four(x + l + 12, c + l + 12, y + l + 12, t3);
    }
    t0 = larger(larger(t0, t1), larger(t2, t3));
    int64_t most = 0;
    for (int k = 0; k < 4; k++) most = t0[k] > most ? t0[k] : most;
    most &= 0x7ff0000000000000;
    double power;
    memcpy(&power, &most, 8);
    const double magic = power * 1610612736.0; /* 1.5 * 2^30: adding it leaves no bits below 2^-22 of `power` */
    for (long l = 0; l < TILE; l += 4) *(v4 *)(y + l) = (*(v4 *)(y + l) + magic) - magic;
}

/* g[i][j] = sum over the tile of y_i y_j, for rows i, i+1 and j .. j+3. Exact, so the order is the compiler's. */
FUSED static void products(const double *y, long i, long j, double *g, long n)
{
    const double *p = y + i * TILE, *q = y + j * TILE;
    v4 a0 = {0}, a1 = {0}, a2 = {0}, a3 = {0}, b0 = {0}, b1 = {0}, b2 = {0}, b3 = {0};
    for (long l = 0; l < TILE; l += 4) {
        const v4 s = *(const v4 *)(p + l), t = *(const v4 *)(p + TILE + l);
        const v4 w = *(const v4 *)(q + l), x = *(const v4 *)(q + TILE + l);
        const v4 u = *(const v4 *)(q + 2 * TILE + l), v = *(const v4 *)(q + 3 * TILE + l);
        a0 += s * w; a1 += s * x; a2 += s * u; a3 += s * v;
        b0 += t * w; b1 += t * x; b2 += t * u; b3 += t * v;
    }
    const v4 a[8] = {a0, a1, a2, a3, b0, b1, b2, b3};
    for (int k = 0; k < 8; k++) g[(i + k / 4) * n + j + k % 4] = (a[k][0] + a[k][1]) + (a[k][2] + a[k][3]);
}

/* One block (at most 64 Ki columns from lo): g, (num_rows, num_rows), of the rows centred on the program's value.
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
    float center[TILE];
    double c[TILE] __attribute__((aligned(64)));
    for (long t = 0; t < 1L << LEVELS; t++) {
        const long at = lo + t * TILE, w = hi - at < TILE ? hi - at : TILE;
        double *sum = level;
        if (w > 0) {
            const float *here[num_data];
            for (long r = 0; r < num_data; r++) here[r] = rows[r] + at;
            program(here, w, center, bad);
            for (long l = 0; l < TILE; l++) c[l] = l < w ? center[l] : 0.0;
            for (long r = 0; r < num_rows; r++) center_row(rows[r] ? rows[r] + at : 0, c, w, y + r * TILE);
            for (long i = 0; i < n; i += 2)
                for (long j = i / 4 * 4; j < n; j += 4) products(y, i, j, sum, n);
        } else memset(sum, 0, sizeof(double) * size);
        long k = 1;
        for (long rest = t; rest & 1; rest >>= 1, k++) {
            const double *before = level + k * size;
            for (long e = 0; e < size; e++) sum[e] = before[e] + sum[e];
        }
        memcpy(level + k * size, sum, sizeof(double) * size);
    }
    const double *whole = level;
    for (long i = 0; i < num_rows; i++)
        for (long j = 0; j < num_rows; j++) g[i * num_rows + j] = whole[i <= j ? i * n + j : j * n + i];
    free(y); free(level);
    return 0;
}
