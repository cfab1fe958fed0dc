/* Float32 products of bfloat16 rows with a bfloat16 matrix, which is read as it is stored.
 *
 * Each output is a sum along the width in LANES lanes, then over the lanes. Its bits do not depend
 * on the other rows. Every ROWS rows share one read of the matrix. Memory limits the speed of up to
 * about 8 rows, arithmetic limits the speed of more rows.
 *
 * Matrix tiles (AMX) multiply 16 rows in the time that memory needs for the matrix. A sum of tiles
 * has one order along the width, and depends on no other row either.
 */

#include <stdlib.h>

#include "tiles.h"

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

#ifdef HAS_TILES

/* Asks the kernel for the tiles of this process, and uses one. Returns 0 if that works. The process
 * receives SIGILL on a machine whose hypervisor lists tiles but forbids them. */
int request_tiles(void) {
    if (syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA)) return 1;
    use_tiles();
    _tile_zero(0);
    _tile_release();
    return 0;
}

/* Writes a tile of sums as columns `first` and following of up to 16 rows of `out`. */
static void store_tile(const float *sums, float *out, int64_t outputs, int64_t rows) {
    Vec block[SIDE];
    memcpy(block, sums, sizeof block);
    transpose(block);
    for (int r = 0; r < SIDE && r < rows; r++) *(FloatLanes *)(out + r * outputs) = block[r];
}

/* Computes 32 outputs of 32 rows. x: DEPTH by SIDE blocks of one group of rows after another. */
static void multiply_tiles(
    float *out, const uint16_t *x, const uint16_t *weight, int64_t outputs, int64_t width,
    int64_t rows) {
    float sums[4][SIDE * SIDE] __attribute__((aligned(64)));
    int64_t stride = width * sizeof *weight, group = width * SIDE;
    int both = rows > SIDE;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < width; i += DEPTH) {
        for (int r = 0; r < 2 * SIDE; r++) /* of the next outputs */
            __builtin_prefetch(weight + (2 * SIDE + r) * width + i);
        _tile_loadd(4, weight + i, stride);
        _tile_loadd(5, weight + SIDE * width + i, stride);
        _tile_loadd(6, x + i * SIDE, TILE_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if (both) {
            _tile_loadd(7, x + group + i * SIDE, TILE_BYTES);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0], TILE_BYTES);
    _tile_stored(1, sums[1], TILE_BYTES);
    store_tile(sums[0], out, outputs, rows);
    store_tile(sums[1], out + SIDE, outputs, rows);
    if (both) {
        _tile_stored(2, sums[2], TILE_BYTES);
        _tile_stored(3, sums[3], TILE_BYTES);
        store_tile(sums[2], out + SIDE * outputs, outputs, rows - SIDE);
        store_tile(sums[3], out + SIDE * outputs + SIDE, outputs, rows - SIDE);
    }
}

/* `multiply` for a width that DEPTH divides, and outputs that 2 * SIDE divides. */
int multiply_in_tiles(
    float *out, const Number *x, const Number *weight, int64_t rows, int64_t outputs,
    int64_t width, int64_t threads) {
    int64_t groups = (rows + SIDE - 1) / SIDE;
    uint16_t *packed = aligned_alloc(64, groups * SIDE * width * sizeof *packed);
    if (!packed) return 1;
    memset(packed, 0, groups * SIDE * width * sizeof *packed);
    for (int64_t r = 0; r < rows; r++) { /* pairs of numbers of 16 rows side by side */
        uint16_t *group = packed + r / SIDE * SIDE * width + r % SIDE * 2;
        for (int64_t i = 0; i < width; i += 2)
            memcpy(group + i * SIDE, x + r * width + i, 2 * sizeof *packed);
    }
    end_writes();
#pragma omp parallel num_threads(threads)
    {
        use_tiles();
#pragma omp for
        for (int64_t o = 0; o < outputs; o += 2 * SIDE)
            for (int64_t r = 0; r < rows; r += 2 * SIDE)
                multiply_tiles(
                    out + r * outputs + o, packed + r * width, weight + o * width, outputs, width,
                    rows - r);
        _tile_release();
    }
    free(packed);
    return 0;
}

#endif
