/* Matrix tiles of x86 (AMX) with bfloat16 numbers.
 *
 * A tile has SIDE rows of 64 bytes. `_tile_dpbf16ps(0, 1, 2)` adds the products of SIDE rows of DEPTH
 * numbers (tile 1) with SIDE columns of as many (tile 2) to SIDE by SIDE sums in float32 (tile 0).
 * Tile 2 has PAIRS rows, each with two neighbouring numbers of every column. A sum depends on its row
 * and column only.
 */

#ifndef TILES_H
#define TILES_H

#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__AVX512BW__)
#define HAS_TILES 1

#include <sys/syscall.h>
#include <unistd.h>

enum { SIDE = 16, PAIRS = 16, DEPTH = 2 * PAIRS, TILE_BYTES = 64 };

enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 }; /* of arch_prctl */

/* Prepares the tiles of this thread, until `_tile_release`. */
static void use_tiles(void) {
    /* Static, because gcc assumes that `_tile_loadconfig` reads the first eight bytes only. */
    static const struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } layout = {
        .palette = 1,
        .row_bytes = {[0 ... 7] = TILE_BYTES},
        .rows = {[0 ... 7] = SIDE},
    };
    _tile_loadconfig(&layout);
}

/* Ends all writes to memory that tiles read, because gcc does not know that they read memory. */
INLINE void end_writes(void) { __asm__ volatile("" ::: "memory"); }

#endif
#endif
