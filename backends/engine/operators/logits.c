/* Logits: products of few rows with a matrix as it lies, in float32.
 *
 * A logit is summed along the width in 16 lanes and then over the lanes, whatever rows are computed
 * with it. Bytes: the matrix once; up to about 8 rows memory is what takes time, then arithmetic.
 */

#include <stdlib.h>

#include "vectors.h"

enum { BLOCK = 4, CHUNK = 64 };

/* BLOCK by BLOCK logits, of which `rows` by `tokens` are there. */
INLINE void multiply_block(
    float *out, const float *x, const Number *weight, int64_t vocab, int64_t width, int rows,
    int tokens) {
    Vec parts[LANES];
    for (int i = 0; i < LANES; i++) parts[i] = all(0.0f);
    for (int64_t i = 0; i < width; i += LANES) {
        Vec columns[BLOCK];
        for (int t = 0; t < tokens; t++) {
            columns[t] = load(weight + t * width + i);
            __builtin_prefetch(weight + (t + BLOCK) * width + i); /* rows are read once */
        }
        for (int r = 0; r < rows; r++) {
            Vec row = *(const FloatLanes *)(x + r * width + i);
            for (int t = 0; t < tokens; t++)
                parts[r * BLOCK + t] = parts[r * BLOCK + t] + row * columns[t];
        }
    }
    Vec sums = sums_of(parts);
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < tokens; t++) out[r * vocab + t] = sums[r * BLOCK + t];
}

static void multiply_tail(
    float *out, const float *x, const Number *weight, int64_t vocab, int64_t width, int64_t rows,
    int64_t tokens) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t t = 0; t < tokens; t++)
            multiply_block(
                out + r * vocab + t, x + r * width, weight + t * width, vocab, width, 1, 1);
}

/* out[rows, vocab] = x[rows, width] weight[vocab, width]^T. Returns 0, or 1 without memory. */
int logits(
    float *out, const Number *x, const Number *weight, int64_t rows, int64_t vocab, int64_t width,
    int64_t threads) {
    float *wide = aligned_alloc(sizeof(Vec), rows * width * sizeof *wide);
    if (!wide) return 1;
    for (int64_t i = 0; i < rows * width; i += LANES) *(FloatLanes *)(wide + i) = load(x + i);
#pragma omp parallel for num_threads(threads)
    for (int64_t begin = 0; begin < vocab; begin += CHUNK) {
        int64_t end = begin + CHUNK < vocab ? begin + CHUNK : vocab;
        int64_t whole = begin + (end - begin) / BLOCK * BLOCK, r = 0;
        for (; r + BLOCK <= rows; r += BLOCK)
            for (int64_t t = begin; t < whole; t += BLOCK)
                multiply_block(
                    out + r * vocab + t, wide + r * width, weight + t * width, vocab, width, BLOCK,
                    BLOCK);
        for (; r < rows; r++)
            for (int64_t t = begin; t < whole; t += BLOCK)
                multiply_block(
                    out + r * vocab + t, wide + r * width, weight + t * width, vocab, width, 1,
                    BLOCK);
        multiply_tail(
            out + whole, wide, weight + whole * width, vocab, width, rows, end - whole);
    }
    free(wide);
    return 0;
}
