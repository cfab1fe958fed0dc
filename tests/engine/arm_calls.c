/* Calls the functions of one source with arguments from a file, and writes the outputs.
 *
 * An argument is its size in bytes, then its bytes. The first argument is integers. OPERATORS names
 * the source, whose functions a macro selects by number.
 */

#include <stdio.h>
#include <stdlib.h>

#include OPERATORS

enum { MAX_ARGUMENTS = 8 };

static void *argument[MAX_ARGUMENTS];
static int64_t size[MAX_ARGUMENTS];

static void read_arguments(void) {
    for (int i = 0; fread(&size[i], sizeof size[i], 1, stdin) == 1; i++) {
        argument[i] = aligned_alloc(64, (size[i] + 127) / 64 * 64);
        if (fread(argument[i], 1, size[i], stdin) != (size_t)size[i]) exit(2);
    }
}

static void write_argument(int i) { fwrite(argument[i], 1, size[i], stdout); }

int main(void) {
    read_arguments();
    const int64_t *n = argument[0];
#ifdef CALL_ATTEND
    /* The addresses of a chunk's tables are offsets in argument 5. */
    Chunk *chunks = argument[4];
    int64_t num_chunks = size[4] / sizeof *chunks;
    for (int64_t i = 0; i < num_chunks; i++) {
        chunks[i].pages = (int64_t *)argument[5] + (int64_t)chunks[i].pages;
        chunks[i].tail = (int64_t *)argument[5] + (int64_t)chunks[i].tail;
    }
    Step step = {argument[1], argument[2], argument[3], n[0], n[1], n[2], n[3], chunks, num_chunks,
                 (float)n[4], (int32_t)n[5]};
    attend(&step, 1);
    write_argument(1);
#elif defined CALL_ADD_NORM
    add_norm(argument[1], argument[2], argument[3], argument[4], n[0], n[1], 1e-5f, 1);
    write_argument(1);
    write_argument(2);
#elif defined CALL_GATE
    gate(argument[1], argument[2], n[0], n[1], n[2], 1);
    write_argument(1);
#elif defined CALL_ROTATE_AND_STORE
    const int64_t *positions = argument[4];
    Rotation rotation = {positions, positions + n[0], argument[5], argument[6], n[0], n[1],
                         n[2],      n[3],             n[4],        n[5],        1.0f, 1e-5f, (int32_t)n[6]};
    rotate_and_store(argument[1], argument[2], argument[3], NULL, &rotation, 1);
    write_argument(1);
    write_argument(2);
#elif defined CALL_MULTIPLY_PACKED
    int64_t rows = n[0], outputs = n[1], width = n[2];
    uint8_t *codes = aligned_alloc(64, (code_bytes(outputs, width) + 63) / 64 * 64);
    uint8_t *scales = malloc(scale_bytes(outputs, width));
    RowBlock *blocks = malloc(rows * (width / BLOCK) * sizeof *blocks);
    Matrix matrix = {codes, scales, NULL, outputs, width};
    pack(argument[3], codes, scales, outputs, width, 1);
    if (multiply_packed(argument[1], argument[2], blocks, &matrix, rows, outputs, 1, 1)) return 3;
    write_argument(1);
#else
    if (multiply(argument[1], argument[2], argument[3], n[0], n[1], n[2], 1)) return 3;
    write_argument(1);
#endif
    return 0;
}
