/* Products of rows with a matrix in a block format of GGUF, which stays packed.
 *
 * TYPE is the number of the format in GGUF. A group of LANES outputs is interleaved: a vector holds
 * four codes of every output, so that a lane adds the products of one output. Each row is rounded to
 * int8 in blocks of 32 numbers. The sums of a block are exact integers, and an output adds the blocks
 * in their order, with explicit fused multiplications and additions. The bits of an output therefore
 * depend on its row and its weights only: not on other rows, threads or the instruction set.
 * `packed_ref.py` defines the same arithmetic.
 */

#include <stdlib.h>

#include "packed.h"

/* Rows of a tile, whose sums fit into the registers together. */
enum { TILE = LANES == 16 ? 8 : 4 };

/* 32 numbers of a row: int8 codes, their scale, sums of the halves, and the scale times the sum. */
typedef struct {
    int8_t codes[BLOCK];
    float scale, scaled_sum;
    int32_t sums[2];
} RowBlock;

typedef struct {
    const uint8_t *codes, *scales;
    const float *bias; /* or NULL */
    int64_t outputs, width;
} Matrix;

_Static_assert(sizeof(RowBlock) == 48, "packed.py knows the size");

int64_t code_bytes(int64_t outputs, int64_t width) {
    return (outputs + LANES - 1) / LANES * (width / BLOCK) * CODE_BYTES;
}
int64_t scale_bytes(int64_t outputs, int64_t width) {
    return (outputs + LANES - 1) / LANES * group_scale_bytes(width / BLOCK);
}

/* Interleaves the rows of a file. The outputs of the last group that do not exist become 0. */
void pack(
    const uint8_t *rows, uint8_t *codes, uint8_t *scales, int64_t outputs, int64_t width,
    int64_t threads) {
    int64_t blocks = width / BLOCK, row_bytes = width / FILE_VALUES * FILE_BYTES;
    memset(scales, 0, scale_bytes(outputs, width));
    memset(codes, 0, code_bytes(outputs, width));
#pragma omp parallel for num_threads(threads)
    for (int64_t first = 0; first < outputs; first += LANES)
        for (int64_t lane = 0; lane < LANES && first + lane < outputs; lane++) {
            const uint8_t *row = rows + (first + lane) * row_bytes;
            uint8_t *group_codes = codes + first / LANES * blocks * CODE_BYTES;
            uint8_t *group_scales = scales + first / LANES * group_scale_bytes(blocks);
            for (int64_t block = 0; block < blocks; block++) {
                pack_codes(group_codes + block * CODE_BYTES, row, block, lane);
                pack_scales(group_scales, row, block, lane);
            }
        }
}

/* Writes the weights of some outputs as rows of numbers. */
void unpack_rows(
    Number *out, const Matrix *matrix, const int64_t *outputs, int64_t count, int64_t threads) {
    int64_t width = matrix->width, blocks = width / BLOCK;
#pragma omp parallel for num_threads(threads) if (count > 16)
    for (int64_t i = 0; i < count; i++) {
        int64_t group = outputs[i] / LANES, lane = outputs[i] % LANES;
        const uint8_t *codes = matrix->codes + group * blocks * CODE_BYTES;
        const uint8_t *scales = matrix->scales + group * group_scale_bytes(blocks);
        for (int64_t block = 0; block < blocks; block++) {
            float values[BLOCK];
            Scales found = load_scales(scales, block);
            for (int v = 0; v < VECTORS; v++) {
                uint8_t vector[VECTOR];
                Bytes loaded = load_codes(codes + block * CODE_BYTES, v);
                memcpy(vector, &loaded, sizeof vector);
                for (int j = 0; j < 4; j++) {
                    int code = number_of(vector[4 * lane + j]);
                    float scaled = found.scale[v * SUBS / VECTORS][lane] * (float)code; /* exact */
                    values[first_of(v) + j] = scaled + found.min[lane];
                }
            }
            for (int64_t j = 0; j < BLOCK; j += LANES)
                store(out + i * width + block * BLOCK + j, *(FloatLanes *)(values + j));
        }
    }
}

/* Rounds 32 numbers to int8 codes times a scale. */
INLINE void round_block(RowBlock *to, const Number *from) {
    Vec numbers[BLOCK / LANES], most = all(0.0f);
    for (int i = 0; i < BLOCK / LANES; i++) {
        numbers[i] = load(from + i * LANES);
        most = larger(most, (Vec)((Ints)numbers[i] & 0x7fffffff));
    }
    float limit = largest(most);
    /* The inverse of a smaller number could overflow. */
    float inverse = limit >= 1e-30f ? 127.0f / limit : 0.0f;
    to->sums[0] = to->sums[1] = 0;
    for (int i = 0; i < BLOCK / LANES; i++) {
        Ints codes = nearest(numbers[i] * inverse);
        *(SignedByteLanes *)(to->codes + i * LANES) = __builtin_convertvector(codes, SignedByteLanes);
        to->sums[i * LANES / (BLOCK / 2)] += sum_of_ints(codes);
    }
    to->scale = limit / 127.0f;
    to->scaled_sum = to->scale * (float)(to->sums[0] + to->sums[1]);
}

/* Unpacked blocks of a group, for more rows than a tile has. */
typedef struct {
    Bytes codes[VECTORS];
    Scales scales;
} PanelBlock;

/* Computes LANES outputs of up to TILE rows. x: the blocks of the rows side by side. */
INLINE void multiply_tile(
    Vec *totals, const uint8_t *codes, const uint8_t *scales, const PanelBlock *panel,
    const RowBlock *x, int64_t blocks, int rows) {
    for (int r = 0; r < rows; r++) totals[r] = all(0.0f);
    for (int64_t block = 0; block < blocks; block++, x += rows) {
        Scales found = panel ? panel[block].scales : load_scales(scales, block);
        const uint8_t *packed = codes + block * CODE_BYTES;
#pragma GCC unroll 2
        for (int sub = 0; sub < SUBS; sub++) {
            Ints sums[TILE];
            for (int r = 0; r < rows; r++)
                sums[r] = (Ints){} - OFFSET * (SUBS == 2 ? x[r].sums[sub] : x[r].sums[0] + x[r].sums[1]);
            int begin = sub * VECTORS / SUBS, end = begin + VECTORS / SUBS;
#pragma GCC unroll 8
            for (int first = begin; first < end; first += FLUSH) {
                Parts parts[TILE];
                for (int r = 0; r < rows; r++) parts[r] = begin_parts(sums[r]);
#pragma GCC unroll 8
                for (int v = first; v < first + FLUSH; v++) {
                    Bytes vector = panel ? panel[block].codes[v] : load_codes(packed, v);
                    for (int r = 0; r < rows; r++)
                        parts[r] = add_products(parts[r], vector, x[r].codes + first_of(v));
                }
                for (int r = 0; r < rows; r++) sums[r] = end_parts(sums[r], parts[r]);
            }
            for (int r = 0; r < rows; r++)
                totals[r] = fused(found.scale[sub] * x[r].scale, to_floats(sums[r]), totals[r]);
        }
#if MINS
        for (int r = 0; r < rows; r++)
            totals[r] = fused(found.min, all(x[r].scaled_sum), totals[r]);
#endif
    }
}

static void multiply_rows(
    Vec *totals, const uint8_t *codes, const uint8_t *scales, const PanelBlock *panel,
    const RowBlock *x, int64_t blocks, int rows) {
#define ROWS(n)                                                                                  \
    case n:                                                                                      \
        if (panel)                                                                               \
            multiply_tile(totals, codes, scales, panel, x, blocks, n);                           \
        else                                                                                     \
            multiply_tile(totals, codes, scales, NULL, x, blocks, n);                            \
        break;
    switch (rows) {
        ROWS(1)
        ROWS(2)
        ROWS(3)
        ROWS(4)
#if LANES == 16
        ROWS(5)
        ROWS(6)
        ROWS(7)
        ROWS(8)
#endif
    }
#undef ROWS
}

/* Writes LANES totals, of which the last may not exist, as bfloat16 or as they are. */
INLINE void write_totals(
    void *out, int64_t at, Vec totals, const float *bias, int64_t count, int wide) {
    if (count >= LANES) {
        if (bias) totals = totals + *(const FloatLanes *)bias;
        if (wide)
            *(FloatLanes *)((float *)out + at) = totals;
        else
            store((Number *)out + at, totals);
        return;
    }
    Number narrow[LANES];
    float floats[LANES];
    memcpy(floats, &totals, sizeof floats);
    for (int64_t i = 0; bias && i < count; i++) floats[i] += bias[i];
    store(narrow, *(FloatLanes *)floats);
    if (wide)
        memcpy((float *)out + at, floats, count * sizeof(float));
    else
        memcpy((Number *)out + at, narrow, count * sizeof(Number));
}

/* out[rows, stride] = x[rows, width] matrix^T + bias, for the matrix's outputs in every row.
 *
 * x: rows to round to `blocks`, or NULL if another matrix has rounded them. wide: whether `out` holds
 * floats rather than numbers. Returns 1 if memory is lacking.
 */
int multiply_packed(
    void *out, const Number *x, RowBlock *blocks, const Matrix *matrix, int64_t rows,
    int64_t stride, int64_t wide, int64_t threads) {
    int64_t width = matrix->width, outputs = matrix->outputs, count = width / BLOCK;
    int64_t panel_bytes = rows > TILE ? count * sizeof(PanelBlock) : 0;
    uint8_t *panels = panel_bytes ? aligned_alloc(64, threads * panel_bytes) : NULL;
    if (panel_bytes && !panels) return 1;
#pragma omp parallel num_threads(threads)
    {
        PanelBlock *panel = panels ? (PanelBlock *)(panels + thread_number() * panel_bytes) : NULL;
        if (x) {
#pragma omp for
            for (int64_t row = 0; row < rows; row++) {
                int64_t first = row / TILE * TILE;
                int64_t tile = rows - first < TILE ? rows - first : TILE;
                RowBlock *to = blocks + first * count + row - first;
                for (int64_t block = 0; block < count; block++)
                    round_block(to + block * tile, x + row * width + block * BLOCK);
            }
        }
#pragma omp for
        for (int64_t output = 0; output < outputs; output += LANES) {
            const uint8_t *codes = matrix->codes + output / LANES * count * CODE_BYTES;
            const uint8_t *scales = matrix->scales + output / LANES * group_scale_bytes(count);
            for (int64_t block = 0; panel && block < count; block++) {
                panel[block].scales = load_scales(scales, block);
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; v++)
                    panel[block].codes[v] = load_codes(codes + block * CODE_BYTES, v);
            }
            for (int64_t first = 0; first < rows; first += TILE) {
                int64_t tile = rows - first < TILE ? rows - first : TILE;
                Vec totals[TILE];
                multiply_rows(totals, codes, scales, panel, blocks + first * count, count, tile);
                for (int64_t r = 0; r < tile; r++)
                    write_totals(
                        out, (first + r) * stride + output, totals[r],
                        matrix->bias ? matrix->bias + output : NULL, outputs - output, wide);
            }
        }
    }
    free(panels);
    return 0;
}
