/* Checksums of matrix products: what a product's rows add up to beside what its factors say that they must.
 *
 * A row of C = A B adds up to A's row times the sums of B's rows. Sums are taken in double precision, so that what is
 * left over is the product's own rounding, whose spread is returned to scale by. Matrices are given by their strides;
 * one of the two must be 1. Types: 0 is float, 1 is bfloat16, 2 is double.
 */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef double wide __attribute__((vector_size(64), aligned(8), may_alias));
typedef float narrow __attribute__((vector_size(32), aligned(4), may_alias));
typedef unsigned words __attribute__((vector_size(32), aligned(4), may_alias));
typedef unsigned short halves __attribute__((vector_size(16), aligned(2), may_alias));
typedef float many __attribute__((vector_size(64), aligned(4), may_alias));
typedef unsigned manywords __attribute__((vector_size(64), aligned(4), may_alias));
typedef unsigned short manyhalves __attribute__((vector_size(32), aligned(2), may_alias));
enum { LANES = 8, CHUNK = 256, BLOCKS = 16, SPAN = 512 };

struct matrix {
    const void *at;
    long type, rows, cols, row_stride, col_stride;
};

static inline wide load(const void *at, long type, long i)
{
    if (type == 0)
        return __builtin_convertvector(*(const narrow *)((const float *)at + i), wide);
    if (type == 1) {
        const words w = __builtin_convertvector(*(const halves *)((const unsigned short *)at + i), words) << 16;
        narrow x;
        memcpy(&x, &w, sizeof x);
        return __builtin_convertvector(x, wide);
    }
    return *(const wide *)((const double *)at + i);
}

static inline double one(const void *at, long type, long i)
{
    if (type == 0)
        return ((const float *)at)[i];
    if (type == 1) {
        const unsigned w = (unsigned)((const unsigned short *)at)[i] << 16;
        float x;
        memcpy(&x, &w, sizeof x);
        return x;
    }
    return ((const double *)at)[i];
}

static inline double total(wide x)
{
    return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

/* One row, columns lo to hi: sum of x w and of x x v; w and v are 1 where they are NULL. */
static inline __attribute__((always_inline)) void along(
    const void *at, const long type, long first, long lo, long hi, const double *w, const double *v, double *sum,
    double *squares)
{
    wide a0 = {0}, a1 = {0}, b0 = {0}, b1 = {0};
    long j = lo;
    for (; j + 2 * LANES <= hi; j += 2 * LANES) {
        const wide x0 = load(at, type, first + j), x1 = load(at, type, first + j + LANES);
        if (w) {
            a0 += x0 * *(const wide *)(w + j);
            a1 += x1 * *(const wide *)(w + j + LANES);
            b0 += x0 * x0 * *(const wide *)(v + j);
            b1 += x1 * x1 * *(const wide *)(v + j + LANES);
        } else {
            a0 += x0;
            a1 += x1;
            b0 += x0 * x0;
            b1 += x1 * x1;
        }
    }
    double a = total(a0 + a1), b = total(b0 + b1);
    for (; j < hi; j++) {
        const double x = one(at, type, first + j);
        a += w ? x * w[j] : x;
        b += w ? x * x * v[j] : x * x;
    }
    *sum = a;
    *squares = b;
}

/* Rows of a matrix whose columns lie together: a column at a time, for CHUNK rows that stay in cache. */
static inline __attribute__((always_inline)) void across(
    const struct matrix *x, const long type, long lo, long hi, const double *w, const double *v, long stride,
    double *sums, double *squares)
{
    for (long start = 0; start < x->rows; start += CHUNK) {
        const long size = x->rows - start < CHUNK ? x->rows - start : CHUNK;
        double a[CHUNK] = {0}, b[CHUNK] = {0};
        for (long j = lo; j < hi; j++) {
            const long first = start + j * x->col_stride;
            const double f = w ? w[j] : 1.0, g = w ? v[j] : 1.0;
            long i = 0;
            for (; i + LANES <= size; i += LANES) {
                const wide value = load(x->at, type, first + i);
                *(wide *)(a + i) += value * f;
                *(wide *)(b + i) += value * value * g;
            }
            for (; i < size; i++) {
                const double value = one(x->at, type, first + i);
                a[i] += value * f;
                b[i] += value * value * g;
            }
        }
        for (long i = 0; i < size; i++) {
            sums[(start + i) * stride] = a[i];
            squares[(start + i) * stride] = b[i];
        }
    }
}

static inline __attribute__((always_inline)) void weigh_typed(
    const struct matrix *x, const long type, const double *w, const double *v, double *sums, double *squares)
{
    if (x->col_stride != 1) {
        across(x, type, 0, x->cols, w, v, 1, sums, squares);
        return;
    }
    for (long i = 0; i < x->rows; i++)
        along(x->at, type, i * x->row_stride, 0, x->cols, w, v, sums + i, squares + i);
}

static inline many load_many(const void *at, long type, long i, long count)
{
    many x = {0};
    if (count >= BLOCKS && type == 0)
        return *(const many *)((const float *)at + i);
    if (count >= BLOCKS && type == 1) {
        const manywords bits =
            __builtin_convertvector(*(const manyhalves *)((const unsigned short *)at + i), manywords) << 16;
        memcpy(&x, &bits, sizeof x);
        return x;
    }
    for (long l = 0; l < count && l < BLOCKS; l++)
        x[l] = (float)one(at, type, i + l);
    return x;
}

/* Sums over blocks of columns. Column j is in block j / SPAN * BLOCKS + j % BLOCKS, so that a row's blocks are the lanes
 * of a register. In single precision: for outputs of few bits. */
static inline __attribute__((always_inline)) void blocks_typed(
    const struct matrix *x, const long type, long blocks, double *sums, double *squares)
{
    const long spans = (x->cols + SPAN - 1) / SPAN;
    if (x->col_stride == 1) {
        for (long i = 0; i < x->rows; i++)
            for (long s = 0; s < spans; s++) {
                const long hi = (s + 1) * SPAN < x->cols ? (s + 1) * SPAN : x->cols;
                many a = {0}, b = {0};
                for (long j = s * SPAN; j < hi; j += BLOCKS) {
                    const many value = load_many(x->at, type, i * x->row_stride + j, hi - j);
                    a += value;
                    b += value * value;
                }
                for (long l = 0; l < BLOCKS; l++) {
                    sums[i * blocks + s * BLOCKS + l] = a[l];
                    squares[i * blocks + s * BLOCKS + l] = b[l];
                }
            }
        return;
    }
    for (long i = 0; i < x->rows; i += BLOCKS)
        for (long n = 0; n < blocks; n++) {
            const long lo = n / BLOCKS * SPAN + n % BLOCKS;
            const long end = (n / BLOCKS + 1) * SPAN < x->cols ? (n / BLOCKS + 1) * SPAN : x->cols;
            many a = {0}, b = {0};
            for (long j = lo; j < end; j += BLOCKS) {
                const many value = load_many(x->at, type, i + j * x->col_stride, x->rows - i);
                a += value;
                b += value * value;
            }
            for (long l = 0; l < BLOCKS && i + l < x->rows; l++) {
                sums[(i + l) * blocks + n] = a[l];
                squares[(i + l) * blocks + n] = b[l];
            }
        }
}

/* With `blocks` 1: sums of each row, of x w and of x x v. With more: of x and of x x, over the row's blocks. */
void weigh(const struct matrix *x, const double *w, const double *v, long blocks, double *sums, double *squares)
{
    if (blocks > 1 && x->type == 0)
        blocks_typed(x, 0, blocks, sums, squares);
    else if (blocks > 1)
        blocks_typed(x, 1, blocks, sums, squares);
    else if (x->type == 0)
        weigh_typed(x, 0, w, v, sums, squares);
    else if (x->type == 1)
        weigh_typed(x, 1, w, v, sums, squares);
    else
        weigh_typed(x, 2, w, v, sums, squares);
}

struct limits {
    double alpha, beta, products, values, least; /* variance = products * q + values * sum of c c + least */
};

/* Check C against A and the sums of B's rows: `sums`, `squares` of (k) or, where `told` is given, `told` (rows,
 * blocks) in place of A's row times the sums. `bias_sums`, `bias_squares`: of each block, or NULL. `work`: room for
 * 2 * rows + 2 * rows * blocks. Returns the worst place's number (row * blocks + block), and in `worst` how many times
 * its variance the square of what is left over there is. Infinite where anything is not finite. */
long check_product(
    const struct matrix *c, const struct matrix *a, const double *sums, const double *squares, const float *told,
    const double *bias_sums, const double *bias_squares, const struct limits *limits, long blocks, double *work,
    double *worst)
{
    double *predicted = work, *spread = work + c->rows, *found = spread + c->rows;
    double *found_squares = found + c->rows * blocks;
    long place = 0;
    weigh(a, sums, squares, 1, predicted, spread);
    weigh(c, NULL, NULL, blocks, found, found_squares);
    *worst = 0.0;
    for (long i = 0; i < c->rows; i++)
        for (long n = 0; n < blocks; n++) {
            const long at = i * blocks + n;
            const double bias = bias_sums ? bias_sums[n] : 0.0, more = bias_squares ? bias_squares[n] : 0.0;
            const double expected = limits->alpha * (told ? told[at] : predicted[i]) + limits->beta * bias;
            const double q = limits->alpha * limits->alpha * spread[i] + limits->beta * limits->beta * more;
            const double left = found[at] - expected;
            const double variance = limits->products * q + limits->values * found_squares[at] + limits->least;
            if (left * left <= *worst * variance && variance <= DBL_MAX)
                continue; /* nearly all, without a division */
            const double ratio = isfinite(variance) ? left * left / variance : INFINITY;
            if (!(ratio <= *worst)) {
                place = at;
                *worst = isfinite(ratio) ? ratio : INFINITY;
                if (!isfinite(ratio))
                    return place;
            }
        }
    return place;
}
