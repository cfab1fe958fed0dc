/* Float32 products of bfloat16 rows with a bfloat16 matrix, which is read as it is stored.
 *
 * Each output is a sum along the width in LANES lanes, then over the lanes. Its bits do not depend
 * on the other rows. Every ROWS rows share one read of the matrix. Memory limits the speed of up to
 * about 8 rows, arithmetic limits the speed of more rows.
 */

#include <stdlib.h>

#include "vectors.h"

/* A block of ROWS by COLUMNS sums fits into the registers: 32 of 16 lanes, or 16 of 8 lanes. */
enum { ROWS = LANES == 8 ? 2 : 4, COLUMNS = 4, CHUNK = 64 };

/* Computes up to ROWS by COLUMNS outputs. x: float32 rows. */
INLINE void multiply_block(
    float *out, const float *x, const Number *weight, int64_t outputs, int64_t width, int rows,
    int columns) {
    Vec parts[ROWS * COLUMNS];
    for (int i = 0; i < ROWS * COLUMNS; i++) parts[i] = all(0.0f);
    for (int64_t i = 0; i < width; i += LANES) {
        Vec column[COLUMNS];
        for (int c = 0; c < columns; c++) {
            column[c] = load(weight + c * width + i);
            __builtin_prefetch(weight + (c + COLUMNS) * width + i); /* the loop reads a row once */
        }
        for (int r = 0; r < rows; r++) {
            Vec row = *(const FloatLanes *)(x + r * width + i);
            for (int c = 0; c < columns; c++)
                parts[r * COLUMNS + c] = parts[r * COLUMNS + c] + row * column[c];
        }
    }
    for (int first = 0; first < rows * COLUMNS; first += LANES) {
        Vec sums = sums_of(parts + first);
        for (int i = 0; i < LANES; i++) {
            int r = (first + i) / COLUMNS, c = (first + i) % COLUMNS;
            if (r < rows && c < columns) out[r * outputs + c] = sums[i];
        }
    }
}

/* out[rows, outputs] = x[rows, width] weight[outputs, width]^T. Returns 1 if memory is lacking. */
int multiply(
    float *out, const Number *x, const Number *weight, int64_t rows, int64_t outputs,
    int64_t width, int64_t threads) {
    float *wide = aligned_alloc(64, rows * width * sizeof *wide);
    if (!wide) return 1;
    for (int64_t i = 0; i < rows * width; i += LANES) *(FloatLanes *)(wide + i) = load(x + i);
#pragma omp parallel for num_threads(threads)
    for (int64_t begin = 0; begin < outputs; begin += CHUNK) {
        int64_t end = begin + CHUNK < outputs ? begin + CHUNK : outputs;
        int64_t whole = begin + (end - begin) / COLUMNS * COLUMNS, r = 0;
        for (; r + ROWS <= rows; r += ROWS)
            for (int64_t c = begin; c < whole; c += COLUMNS)
                multiply_block(
                    out + r * outputs + c, wide + r * width, weight + c * width, outputs, width,
                    ROWS, COLUMNS);
        for (; r < rows; r++)
            for (int64_t c = begin; c < whole; c += COLUMNS)
                multiply_block(
                    out + r * outputs + c, wide + r * width, weight + c * width, outputs, width, 1,
                    COLUMNS);
        for (r = 0; r < rows; r++)
            for (int64_t c = whole; c < end; c++)
                multiply_block(
                    out + r * outputs + c, wide + r * width, weight + c * width, outputs, width, 1,
                    1);
    }
    free(wide);
    return 0;
}
