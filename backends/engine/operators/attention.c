/* Attention of a ragged step over a paged cache. Each library has one HEAD_DIM.
 *
 * A row is one query head at one token. Groups of rows share keys, but the operations of a row and
 * their order do not depend on its group. The operations run along the head, then over keys in
 * order of position, by tiles of TILE keys with an online softmax (arXiv 1805.02867). Masked keys
 * are skipped or add exact zeros. The bits of a row therefore do not depend on other rows.
 *
 * Every MAX_ROWS rows share one read of keys and values. Memory limits the speed of a decode.
 */

#include "layers.h"
#include "tiles.h"

enum { ROWS = 4, MAX_ROWS = 64, GROUPS = TILE / LANES, VECTORS = HEAD_DIM / LANES };

/* Vectors per row of one pass over the values. The sums of ROWS rows fit into the registers. */
enum { SUMMED = LANES == 8 ? 2 : 4 };

/* Vectors of transposed keys that ROWS rows read together. */
enum { COLUMNS = 2, BLOCK = COLUMNS * LANES };

/* Minimum rows for which transposed keys pay. With vectors of 4 lanes, they never pay. With 64 rows
 * and heads of 32, they save 18% of the time with AVX-512, and 8% with AVX2 (Zen 4, 2026-11-22). */
enum { MANY_ROWS = LANES > 4 ? 16 : MAX_ROWS + 1 };

/* Keys or values of a head: the KV memory of a layer, and the offset of the head in it. `e4m3` is a
 * constant of each copy of the code. */
typedef struct {
    const void *kv;
    int64_t strip;
    int e4m3;
} Strip;

INLINE Vec load_at(Strip strip, int64_t at) {
    return load_kv(strip.kv, strip.strip + at, strip.e4m3);
}

/* Number of keys between a key that is read and the key that is fetched from memory. The processor
 * does not look beyond a page of the operating system, and a page of the KV memory has few keys. A
 * decode of 16 contexts of 320 tokens takes 0.79 times as long with 3 heads of 64 per KV head (Xeon
 * with AVX-512, 2026-11-28). */
enum { AHEAD = 16 };

/* Fetches a key or value from memory. */
INLINE void prefetch(Strip strip, int64_t at) {
    int size = strip.e4m3 ? 1 : sizeof(Number);
    const char *begin = (const char *)strip.kv + (strip.strip + at) * size;
    for (int i = 0; i < HEAD_DIM * size; i += 64) __builtin_prefetch(begin + i);
}

/* Keys of a tile: begin <= key < end. */
typedef struct {
    int begin, end;
} Keys;

/* Running maximum and sum of a row, and its visible keys of the tile: begin <= key < end. */
typedef struct {
    float most, total;
    int begin, end;
} Row;

/* All rows of a chunk that share a KV head. */
typedef struct {
    int count;
    Row rows[MAX_ROWS];
    Vec query[MAX_ROWS][VECTORS], sums[MAX_ROWS][VECTORS], scores[MAX_ROWS][GROUPS];
} Rows;

/* Returns the first product of a partial sum. Of two products, gcc may fuse either with the sum.
 * Adding 0 leaves no choice, so that `score` and `score_columns` round alike. */
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define FIRST(product) ((product) + 0.0f)
#else
#define FIRST(product) (product)
#endif

/* Computes the scores of `count` rows with LANES keys. query: [count][VECTORS].
 *
 * A score is the sum of LANES partial sums along the head, added as a binary tree of neighbours. */
INLINE void score(
    Vec (*scores)[GROUPS], const Vec *query, Strip keys, const int64_t *at, int count) {
    Vec parts[ROWS][LANES];
    for (int key = 0; key < LANES; key++) {
        Vec part[ROWS];
        Vec k = load_at(keys, at[key]);
        for (int r = 0; r < count; r++) part[r] = FIRST(k * query[r * VECTORS]);
        for (int v = 1; v < VECTORS; v++) {
            k = load_at(keys, at[key] + v * LANES);
            for (int r = 0; r < count; r++) part[r] = part[r] + k * query[r * VECTORS + v];
        }
        for (int r = 0; r < count; r++) parts[r][key] = part[r];
    }
    for (int r = 0; r < count; r++) scores[r][0] = sums_of(parts[r]);
}

/* Copies COLUMNS * LANES keys so that `to[i]` holds element i of every key. */
INLINE void transpose_keys(Vec (*to)[COLUMNS], Strip keys, const int64_t *at) {
    for (int c = 0; c < COLUMNS; c++)
        for (int v = 0; v < VECTORS; v++) {
            Vec block[LANES];
            for (int i = 0; i < LANES; i++) block[i] = load_at(keys, at[c * LANES + i] + v * LANES);
            transpose(block);
            for (int i = 0; i < LANES; i++) to[v * LANES + i][c] = block[i];
        }
}

/* Computes the partial sums of `count` rows with COLUMNS * LANES keys. */
INLINE void add_products(
    Vec (*part)[COLUMNS], const float *query, const Vec (*columns)[COLUMNS], int lane, int count) {
    for (int r = 0; r < count; r++)
        for (int c = 0; c < COLUMNS; c++)
            part[r][c] = FIRST(columns[lane][c] * query[r * HEAD_DIM + lane]);
    for (int i = lane + LANES; i < HEAD_DIM; i += LANES)
        for (int r = 0; r < count; r++)
            for (int c = 0; c < COLUMNS; c++)
                part[r][c] = part[r][c] + columns[i][c] * query[r * HEAD_DIM + i];
}

/* Computes the same scores as `score`, with the same operations, for COLUMNS * LANES keys. */
INLINE void score_columns(
    Vec (*scores)[GROUPS], const float *query, const Vec (*columns)[COLUMNS], int count) {
    enum { LEVELS = LANES == 16 ? 4 : LANES == 8 ? 3 : 2 };
    Vec trees[LEVELS][ROWS][COLUMNS]; /* sums of 2, 4, ... neighbouring partial sums */
    for (int pair = 0; pair < LANES / 2; pair++) {
        Vec part[ROWS][COLUMNS], odd[ROWS][COLUMNS];
        add_products(part, query, columns, 2 * pair, count);
        add_products(odd, query, columns, 2 * pair + 1, count);
        for (int r = 0; r < count; r++)
            for (int c = 0; c < COLUMNS; c++) part[r][c] = part[r][c] + odd[r][c];
        int level = 0;
        for (; pair >> level & 1; level++)
            for (int r = 0; r < count; r++)
                for (int c = 0; c < COLUMNS; c++) part[r][c] = trees[level][r][c] + part[r][c];
        for (int r = 0; r < count; r++)
            for (int c = 0; c < COLUMNS; c++) trees[level][r][c] = part[r][c];
    }
    for (int r = 0; r < count; r++)
        for (int c = 0; c < COLUMNS; c++) scores[r][c] = trees[LEVELS - 1][r][c];
}

/* Replaces scores s by cap tanh(s / cap). */
INLINE void bound_scores(Vec *scores, int first, int last, float cap) {
    for (int group = first; group < last; group++) {
        Vec score = scores[group];
        Ints negative = score < 0.0f;
        Vec e = exponential(choose(negative, score, -score) * (2.0f / cap));
        Vec bounded = (1.0f - e) / (e + 1.0f) * cap;
        scores[group] = choose(negative, -bounded, bounded);
    }
}

/* Replaces a row's scores by weights, and rescales its sums to the new maximum. */
INLINE void weigh(Row *row, Vec *sums, Vec *scores, int first, int last) {
    const Ints lanes = LANE_NUMBERS;
    Vec best = all(-INFINITY), total = all(0.0f);
    for (int group = first; group < last; group++) {
        int key = group * LANES;
        if (key < row->begin || key + LANES > row->end) {
            Ints keys = lanes + key;
            Ints seen = (keys >= row->begin) & (keys < row->end);
            scores[group] = choose(seen, scores[group], all(-INFINITY));
        }
        best = larger(best, scores[group]);
    }
    float most = largest(best);
    most = most > row->most ? most : row->most;
    /* The maximum is -inf before the first unmasked key, and -inf - -inf would be NaN. */
    float base = most == -INFINITY ? 0.0f : most;
    for (int group = first; group < last; group++) {
        scores[group] = exponential(scores[group] - base);
        total = total + scores[group];
    }
    float keep = exponential(all(row->most - base))[0];
    row->total = row->total * keep + sum(total);
    row->most = most;
    for (int v = 0; v < VECTORS; v++) sums[v] = sums[v] * keep;
}

/* Adds weights * values of the keys from begin to end. sums: [count][VECTORS]. */
INLINE void add_values(
    Vec *sums, const float (*weights)[TILE], Strip values, const int64_t *at, int begin, int end,
    int count) {
    for (int v = 0; v < VECTORS; v += SUMMED) {
        int some = VECTORS - v < SUMMED ? VECTORS - v : SUMMED;
        Vec own[ROWS][SUMMED];
        for (int r = 0; r < count; r++)
            for (int i = 0; i < some; i++) own[r][i] = sums[r * VECTORS + v + i];
        for (int key = begin; key < end; key++) {
            if (v == 0 && key + AHEAD < TILE) prefetch(values, at[key + AHEAD]);
            for (int i = 0; i < some; i++) {
                Vec value = load_at(values, at[key] + (v + i) * LANES);
                for (int r = 0; r < count; r++) own[r][i] = own[r][i] + value * weights[r][key];
            }
        }
        for (int r = 0; r < count; r++)
            for (int i = 0; i < some; i++) sums[r * VECTORS + v + i] = own[r][i];
    }
}

/* Writes the offsets of a tile's keys in a strip, and 0 for keys past the context. */
INLINE void find_keys(int64_t *at, const Chunk *chunk, int64_t tile) {
    int64_t begin = tile * TILE, end = chunk->position + chunk->tokens, i = 0;
    int64_t paged = end < chunk->tail_start ? end : chunk->tail_start;
    int64_t page = begin / chunk->page_tokens, in_page = begin % chunk->page_tokens;
    for (; i < TILE && begin + i < paged; page++, in_page = 0) {
        int64_t slot = chunk->pages[page] * chunk->page_tokens + in_page;
        int64_t left = chunk->page_tokens - in_page;
        for (; left && i < TILE && begin + i < paged; left--) at[i++] = HEAD_DIM * slot++;
    }
    for (; i < TILE && begin + i < end; i++)
        at[i] = HEAD_DIM * chunk->tail[begin + i - chunk->tail_start];
    for (; i < TILE; i++) at[i] = 0;
}

/* Sets the keys of a tile that each row attends to. */
INLINE void set_visible_keys(
    Row *rows, const Step *step, const Chunk *chunk, int64_t tile, int64_t group) {
    for (int64_t r = 0; r < chunk->tokens * group; r++) {
        int64_t newest = chunk->position + r / group - tile * TILE;
        int64_t oldest = step->window ? newest - step->window + 1 : 0;
        rows[r].begin = oldest < 0 ? 0 : oldest < TILE ? (int)oldest : TILE;
        rows[r].end = newest + 1 < TILE ? (int)newest + 1 : TILE;
    }
}

/* Returns the keys of a tile that at least one of `count` rows attends to. */
INLINE Keys visible_keys(const Row *rows, int count) {
    Keys keys = {TILE, 0};
    for (int r = 0; r < count; r++) {
        if (rows[r].end <= rows[r].begin) continue;
        keys.begin = rows[r].begin < keys.begin ? rows[r].begin : keys.begin;
        keys.end = rows[r].end > keys.end ? rows[r].end : keys.end;
    }
    return keys;
}

/* Computes the scores of `count` rows from `r` on with the keys of a tile. */
INLINE void score_tile(Rows *rows, int r, Strip keys, const int64_t *at, int count) {
    Keys visible = visible_keys(rows->rows + r, count);
    for (int key = visible.begin / LANES * LANES; key < visible.end; key += LANES) {
        for (int i = key + AHEAD; i < key + AHEAD + LANES && i < TILE; i++) prefetch(keys, at[i]);
        score((Vec(*)[GROUPS])&rows->scores[r][key / LANES], rows->query[r], keys, at + key, count);
    }
}

/* Computes the scores of `count` rows from `r` on with a block of transposed keys. */
INLINE void score_block(
    Rows *rows, int r, const Vec (*columns)[COLUMNS], int block, int count) {
    Keys visible = visible_keys(rows->rows + r, count);
    if (visible.begin >= block + BLOCK || visible.end <= block) return;
    score_columns(
        (Vec(*)[GROUPS])&rows->scores[r][block / LANES], (const float *)rows->query[r], columns,
        count);
}

/* Adds the values of a tile to the sums of `count` rows from `r` on, by their scores. */
INLINE void add_tile(
    Rows *rows, int r, Strip values, const int64_t *at, float softcap, int count) {
    Keys visible = visible_keys(rows->rows + r, count);
    if (visible.end <= visible.begin) return;
    int first = visible.begin / LANES, last = (visible.end + LANES - 1) / LANES;
    for (int i = r; i < r + count; i++) {
        if (softcap) bound_scores(rows->scores[i], first, last, softcap);
        weigh(rows->rows + i, rows->sums[i], rows->scores[i], first, last);
    }
    add_values(
        rows->sums[r], (const float(*)[TILE])rows->scores[r], values, at, visible.begin,
        visible.end, count);
}

/* Calls `f` for all rows, in groups of a constant number of rows. */
#define BY_ROWS(rows, f, ...)                                                                    \
    for (int r = 0; r < (rows)->count;) {                                                        \
        int left = (rows)->count - r;                                                            \
        if (left >= ROWS) {                                                                      \
            f(rows, r, __VA_ARGS__, ROWS);                                                       \
            r += ROWS;                                                                           \
            continue;                                                                            \
        }                                                                                        \
        if (left == 3) f(rows, r, __VA_ARGS__, 3);                                               \
        if (left == 2) f(rows, r, __VA_ARGS__, 2);                                               \
        if (left == 1) f(rows, r, __VA_ARGS__, 1);                                               \
        break;                                                                                   \
    }

/* Attends all rows to a tile, whose keys have the offsets `at` in a strip. */
INLINE void attend_tile(
    Rows *rows, Strip keys, Strip values, const int64_t *at, float softcap) {
    if (rows->count < MANY_ROWS) {
        BY_ROWS(rows, score_tile, keys, at)
    } else {
        Keys visible = visible_keys(rows->rows, rows->count);
        for (int block = visible.begin / BLOCK * BLOCK; block < visible.end; block += BLOCK) {
            Vec columns[HEAD_DIM][COLUMNS];
            transpose_keys(columns, keys, at + block);
            BY_ROWS(rows, score_block, (const Vec(*)[COLUMNS])columns, block)
        }
    }
    BY_ROWS(rows, add_tile, values, at, softcap)
}

#if defined(HAS_TILES) && BFLOAT16 && HEAD_DIM % 32 == 0 && TILE % 64 == 0
#define ATTENDS_IN_TILES 1

enum { SIDES = MAX_ROWS / SIDE };

/* Operands of a KV tile as matrix tiles read them: the queries of SIDE rows, keys, pairs of values of
 * neighbouring keys, and the weights of SIDE rows. Rows past the last one are not initialised, and
 * results for them are never read. */
typedef struct {
    uint16_t queries[SIDES][HEAD_DIM / 2][SIDE][2];
    uint16_t keys[TILE][HEAD_DIM];
    uint16_t values[TILE / 2][HEAD_DIM][2];
    uint16_t weights[SIDE][TILE];
} __attribute__((aligned(64))) Operands;

/* Writes the queries of all rows, which are numbers in float32. */
static void pack_queries(Operands *operands, const Rows *rows) {
    for (int r = 0; r < rows->count; r++)
        for (int v = 0; v < VECTORS; v++) {
            uint16_t numbers[LANES];
            store(numbers, rows->query[r][v]);
            for (int i = 0; i < LANES; i += 2)
                memcpy(
                    operands->queries[r / SIDE][(v * LANES + i) / 2][r % SIDE], numbers + i,
                    2 * sizeof *numbers);
        }
}

/* Returns DEPTH numbers of the KV memory. Those in FP8 are exact in bfloat16. */
INLINE __m512i numbers_at(Strip strip, int64_t at) {
    if (!strip.e4m3) return _mm512_loadu_si512((const uint16_t *)strip.kv + strip.strip + at);
    uint16_t numbers[DEPTH];
    for (int i = 0; i < DEPTH; i += LANES) store(numbers + i, load_at(strip, at + i));
    return _mm512_loadu_si512(numbers);
}

/* Copies keys, and pairs values. The values of keys that no row attends to are zeros, because they
 * may not be finite. */
INLINE void copy_keys(Operands *operands, Strip keys, Strip values, const int64_t *at, Keys seen) {
    __m512i lower, upper;
    for (int i = 0; i < DEPTH; i++) {
        ((uint16_t *)&lower)[i] = i / 2 + i % 2 * DEPTH;
        ((uint16_t *)&upper)[i] = i / 2 + PAIRS + i % 2 * DEPTH;
    }
    int begin = seen.begin / DEPTH * DEPTH, end = (seen.end + DEPTH - 1) / DEPTH * DEPTH;
    for (int key = begin; key < end; key += 2) {
        for (int i = key + AHEAD; i < key + AHEAD + 2 && i < TILE; i++) {
            prefetch(keys, at[i]);
            prefetch(values, at[i]);
        }
        for (int d = 0; d < HEAD_DIM; d += DEPTH) {
            __m512i pair[2];
            for (int i = 0; i < 2; i++) {
                int is_seen = key + i >= seen.begin && key + i < seen.end;
                _mm512_store_si512(operands->keys[key + i] + d, numbers_at(keys, at[key + i] + d));
                pair[i] = is_seen ? numbers_at(values, at[key + i] + d) : _mm512_setzero_si512();
            }
            uint16_t *to = operands->values[key / 2][d];
            _mm512_store_si512(to, _mm512_permutex2var_epi16(pair[0], lower, pair[1]));
            _mm512_store_si512(to + DEPTH, _mm512_permutex2var_epi16(pair[0], upper, pair[1]));
        }
    }
}

/* Computes the scores of up to SIDE rows with 4 * SIDE keys. */
static void score_side(Rows *rows, const Operands *operands, int side, int count, int key) {
    Vec block[4][SIDE];
    const uint16_t(*keys)[HEAD_DIM] = operands->keys + key;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int d = 0; d < HEAD_DIM; d += DEPTH) {
        _tile_loadd(4, operands->queries[side][d / 2], TILE_BYTES);
        _tile_loadd(5, keys[0] + d, sizeof keys[0]);
        _tile_dpbf16ps(0, 5, 4);
        _tile_loadd(6, keys[SIDE] + d, sizeof keys[0]);
        _tile_dpbf16ps(1, 6, 4);
        _tile_loadd(5, keys[2 * SIDE] + d, sizeof keys[0]);
        _tile_dpbf16ps(2, 5, 4);
        _tile_loadd(6, keys[3 * SIDE] + d, sizeof keys[0]);
        _tile_dpbf16ps(3, 6, 4);
    }
    _tile_stored(0, block[0], TILE_BYTES);
    _tile_stored(1, block[1], TILE_BYTES);
    _tile_stored(2, block[2], TILE_BYTES);
    _tile_stored(3, block[3], TILE_BYTES);
    for (int i = 0; i < 4; i++) {
        transpose(block[i]);
        for (int r = 0; r < count; r++) rows->scores[side * SIDE + r][key / LANES + i] = block[i][r];
    }
}

/* Adds weights * values of the keys in `seen` to the sums of SIDE rows. */
static void add_side(Vec (*sums)[VECTORS], const Operands *operands, Keys seen) {
    enum { COLUMNS_OF_TILES = HEAD_DIM / SIDE < 4 ? HEAD_DIM / SIDE : 4 };
    for (int v = 0; v < VECTORS; v += COLUMNS_OF_TILES) {
        _tile_loadd(0, &sums[0][v], sizeof sums[0]);
        _tile_loadd(1, &sums[0][v + 1], sizeof sums[0]);
        if (COLUMNS_OF_TILES == 4) {
            _tile_loadd(2, &sums[0][v + 2], sizeof sums[0]);
            _tile_loadd(3, &sums[0][v + 3], sizeof sums[0]);
        }
        for (int key = seen.begin / DEPTH * DEPTH; key < seen.end; key += DEPTH) {
            const uint16_t(*values)[HEAD_DIM][2] = operands->values + key / 2;
            _tile_loadd(4, operands->weights[0] + key, sizeof operands->weights[0]);
            _tile_loadd(5, values[0][v * SIDE], sizeof values[0]);
            _tile_loadd(6, values[0][(v + 1) * SIDE], sizeof values[0]);
            _tile_dpbf16ps(0, 4, 5);
            _tile_dpbf16ps(1, 4, 6);
            if (COLUMNS_OF_TILES == 4) {
                _tile_loadd(5, values[0][(v + 2) * SIDE], sizeof values[0]);
                _tile_loadd(6, values[0][(v + 3) * SIDE], sizeof values[0]);
                _tile_dpbf16ps(2, 4, 5);
                _tile_dpbf16ps(3, 4, 6);
            }
        }
        _tile_stored(0, &sums[0][v], sizeof sums[0]);
        _tile_stored(1, &sums[0][v + 1], sizeof sums[0]);
        if (COLUMNS_OF_TILES == 4) {
            _tile_stored(2, &sums[0][v + 2], sizeof sums[0]);
            _tile_stored(3, &sums[0][v + 3], sizeof sums[0]);
        }
    }
}

/* `attend_tile` in matrix tiles. Weights are rounded to bfloat16 before they multiply values. */
INLINE void attend_in_tiles(
    Rows *rows, Operands *operands, Strip keys, Strip values, const int64_t *at, float softcap) {
    copy_keys(operands, keys, values, at, visible_keys(rows->rows, rows->count));
    end_writes();
    for (int side = 0; side * SIDE < rows->count; side++) {
        int begin = side * SIDE, left = rows->count - begin, count = left < SIDE ? left : SIDE;
        Keys seen = visible_keys(rows->rows + begin, count);
        if (seen.end <= seen.begin) continue;
        int first = seen.begin / LANES, last = (seen.end + LANES - 1) / LANES;
        for (int group = first / 4 * 4; group < last; group += 4)
            score_side(rows, operands, side, count, group * LANES);
        for (int r = 0; r < count; r++) {
            Vec *scores = rows->scores[begin + r];
            if (softcap) bound_scores(scores, first, last, softcap);
            weigh(rows->rows + begin + r, rows->sums[begin + r], scores, first, last);
            for (int key = seen.begin / DEPTH * DEPTH; key < seen.end; key += LANES) {
                int group = key / LANES;
                Vec weights = group < first || group >= last ? all(0.0f) : scores[group];
                store(operands->weights[r] + key, weights);
            }
            if (last % 2) store(operands->weights[r] + last * LANES, all(0.0f));
        }
        end_writes();
        add_side(rows->sums + begin, operands, seen);
    }
}

#endif

/* Attends all rows of a chunk that share a KV head. */
INLINE void attend_chunk(const Step *step, const Chunk *chunk, int64_t head, int e4m3, int tiles) {
    int64_t group = step->heads / step->kv_heads;
    Rows rows;
    rows.count = (int)(chunk->tokens * group);
    int64_t to[MAX_ROWS], at[TILE];
    for (int r = 0; r < rows.count; r++) {
        to[r] = ((chunk->row + r / group) * step->heads + head * group + r % group) * HEAD_DIM;
        rows.rows[r] = (Row){-INFINITY, 0.0f, 0, 0};
        for (int v = 0; v < VECTORS; v++) {
            rows.query[r][v] = load(step->query + to[r] + v * LANES);
            rows.sums[r][v] = all(0.0f);
        }
    }
#ifdef ATTENDS_IN_TILES
    Operands operands;
    if (tiles) pack_queries(&operands, &rows);
#endif
    Strip keys = {step->kv, head * step->strip, e4m3};
    Strip values = {step->kv, (head + step->kv_heads) * step->strip, e4m3};
    int64_t oldest = step->window ? chunk->position - step->window + 1 : 0;
    int64_t end = chunk->position + chunk->tokens;
    for (int64_t tile = oldest > 0 ? oldest / TILE : 0; tile * TILE < end; tile++) {
        find_keys(at, chunk, tile);
        set_visible_keys(rows.rows, step, chunk, tile, group);
#ifdef ATTENDS_IN_TILES
        if (tiles) {
            attend_in_tiles(&rows, &operands, keys, values, at, step->softcap);
            continue;
        }
#endif
        attend_tile(&rows, keys, values, at, step->softcap);
    }
    for (int r = 0; r < rows.count; r++)
        for (int v = 0; v < VECTORS; v++)
            store(step->out + to[r] + v * LANES, rows.sums[r][v] / rows.rows[r].total);
}

static void attend_numbers(const Step *step, const Chunk *chunk, int64_t head) {
    attend_chunk(step, chunk, head, 0, 0);
}

static void attend_e4m3(const Step *step, const Chunk *chunk, int64_t head) {
    attend_chunk(step, chunk, head, 1, 0);
}

#ifdef ATTENDS_IN_TILES
static void attend_numbers_in_tiles(const Step *step, const Chunk *chunk, int64_t head) {
    attend_chunk(step, chunk, head, 0, 1);
}

static void attend_e4m3_in_tiles(const Step *step, const Chunk *chunk, int64_t head) {
    attend_chunk(step, chunk, head, 1, 1);
}
#endif

/* Attends every row of a step, and leaves the output of rows outside all chunks unchanged.
 *
 * The caller must ensure that chunks have at most MAX_ROWS rows. */
void attend(const Step *step, int64_t threads) {
    int64_t tasks = step->num_chunks * step->kv_heads;
    void (*attend_one)(const Step *, const Chunk *, int64_t) =
        step->e4m3 ? attend_e4m3 : attend_numbers;
#ifdef ATTENDS_IN_TILES
    if (step->tiles) attend_one = step->e4m3 ? attend_e4m3_in_tiles : attend_numbers_in_tiles;
#endif
#pragma omp parallel num_threads(threads)
    {
#ifdef ATTENDS_IN_TILES
        if (step->tiles) use_tiles();
#endif
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < tasks; task++)
            attend_one(step, step->chunks + task / step->kv_heads, task % step->kv_heads);
#ifdef ATTENDS_IN_TILES
        if (step->tiles) _tile_release();
#endif
    }
}
