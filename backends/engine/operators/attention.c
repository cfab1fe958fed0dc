/* Attention of a ragged step over a paged cache. Each library has one HEAD_DIM.
 *
 * A row is one query head at one token. Groups of rows share keys, but the operations of a row and
 * their order do not depend on its group. The operations run along the head, then over keys in
 * order of position, by tiles of TILE keys with an online softmax (arXiv 1805.02867). Masked keys
 * are skipped or add exact zeros. The bits of a row therefore do not depend on other rows.
 *
 * Every MAX_ROWS rows share one read of keys and values. Memory limits the speed of a decode.
 */

#include "vectors.h"

enum { ROWS = 4, MAX_ROWS = 64, GROUPS = TILE / LANES, VECTORS = HEAD_DIM / LANES };

/* Vectors per row of one pass over the values. The sums of ROWS rows fit into the registers. */
enum { SUMMED = LANES == 8 ? 2 : 4 };

/* Tokens `row` to `row + tokens` of the step, the first at `position`. Keys before `tail_start` are
 * in pages of `page_tokens` slots, later keys in the slots of `tail`. */
typedef struct {
    int64_t row, tokens, position;
    const int64_t *pages;
    int64_t page_tokens, tail_start;
    const int64_t *tail;
} Chunk;

typedef struct {
    Number *out;
    const Number *query, *kv;
    int64_t heads, kv_heads, strip, window;
    const Chunk *chunks;
    int64_t num_chunks;
} Step;

/* Running maximum and sum of a row, and its visible keys of the tile: begin <= key < end. */
typedef struct {
    float most, total;
    int begin, end;
} Row;

/* Computes the scores of `count` rows with LANES keys. query: [count][VECTORS]. */
INLINE void score(
    Vec (*scores)[GROUPS], const Vec *query, const Number *keys, const int64_t *at, int count) {
    Vec parts[ROWS][LANES];
    for (int key = 0; key < LANES; key++) {
        Vec part[ROWS];
        for (int v = 0; v < VECTORS; v++) {
            Vec k = load(keys + at[key] + v * LANES);
            for (int r = 0; r < count; r++)
                part[r] = v ? part[r] + k * query[r * VECTORS + v] : k * query[r * VECTORS];
        }
        for (int r = 0; r < count; r++) parts[r][key] = part[r];
    }
    for (int r = 0; r < count; r++) scores[r][0] = sums_of(parts[r]);
}

/* Replaces a row's scores by weights, and rescales its sums to the new maximum. */
INLINE void weigh(Row *row, Vec *sums, Vec *scores, int first, int last) {
    const Ints lanes = LANE_NUMBERS;
    Vec best = all(-INFINITY), total = all(0.0f);
    for (int group = first; group < last; group++) {
        Ints key = lanes + group * LANES;
        Ints seen = (key >= row->begin) & (key < row->end);
        scores[group] = choose(seen, scores[group], all(-INFINITY));
        best = choose(scores[group] > best, scores[group], best);
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
    Vec *sums, const float (*weights)[TILE], const Number *values, const int64_t *at, int begin,
    int end, int count) {
    for (int v = 0; v < VECTORS; v += SUMMED) {
        int some = VECTORS - v < SUMMED ? VECTORS - v : SUMMED;
        Vec own[ROWS][SUMMED];
        for (int r = 0; r < count; r++)
            for (int i = 0; i < some; i++) own[r][i] = sums[r * VECTORS + v + i];
        for (int key = begin; key < end; key++)
            for (int i = 0; i < some; i++) {
                Vec value = load(values + at[key] + (v + i) * LANES);
                for (int r = 0; r < count; r++) own[r][i] = own[r][i] + value * weights[r][key];
            }
        for (int r = 0; r < count; r++)
            for (int i = 0; i < some; i++) sums[r * VECTORS + v + i] = own[r][i];
    }
}

/* Attends `count` rows to one tile. `at` holds the offsets of the tile's keys in a strip. */
INLINE void attend_tile(
    Row *rows, Vec *sums, const Vec *query, const Number *keys, const Number *values,
    const int64_t *at, int count) {
    Vec scores[ROWS][GROUPS];
    int begin = TILE, end = 0;
    for (int r = 0; r < count; r++) {
        if (rows[r].end <= rows[r].begin) continue;
        begin = rows[r].begin < begin ? rows[r].begin : begin;
        end = rows[r].end > end ? rows[r].end : end;
    }
    int first = begin / LANES, last = (end + LANES - 1) / LANES;
    for (int group = first; group < last; group++)
        score((Vec(*)[GROUPS])&scores[0][group], query, keys, at + group * LANES, count);
    if (end <= begin) return;
    for (int r = 0; r < count; r++) weigh(rows + r, sums + r * VECTORS, scores[r], first, last);
    add_values(sums, (const float(*)[TILE])scores, values, at, begin, end, count);
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

/* Attends all rows of a chunk that share a KV head. */
static void attend_chunk(const Step *step, const Chunk *chunk, int64_t head) {
    int64_t group = step->heads / step->kv_heads;
    int count = (int)(chunk->tokens * group);
    Vec query[MAX_ROWS * VECTORS], sums[MAX_ROWS * VECTORS];
    Row rows[MAX_ROWS];
    int64_t to[MAX_ROWS], at[TILE];
    for (int r = 0; r < count; r++) {
        to[r] = ((chunk->row + r / group) * step->heads + head * group + r % group) * HEAD_DIM;
        rows[r] = (Row){-INFINITY, 0.0f, 0, 0};
        for (int v = 0; v < VECTORS; v++) {
            query[r * VECTORS + v] = load(step->query + to[r] + v * LANES);
            sums[r * VECTORS + v] = all(0.0f);
        }
    }
    const Number *keys = step->kv + head * step->strip;
    const Number *values = step->kv + (head + step->kv_heads) * step->strip;
    int64_t oldest = step->window ? chunk->position - step->window + 1 : 0;
    int64_t end = chunk->position + chunk->tokens;
    for (int64_t tile = oldest > 0 ? oldest / TILE : 0; tile * TILE < end; tile++) {
        find_keys(at, chunk, tile);
        set_visible_keys(rows, step, chunk, tile, group);
        int r = 0;
        for (; r + ROWS <= count; r += ROWS)
            attend_tile(
                rows + r, sums + r * VECTORS, query + r * VECTORS, keys, values, at, ROWS);
        for (; r + 2 <= count; r += 2)
            attend_tile(rows + r, sums + r * VECTORS, query + r * VECTORS, keys, values, at, 2);
        for (; r < count; r++)
            attend_tile(rows + r, sums + r * VECTORS, query + r * VECTORS, keys, values, at, 1);
    }
    for (int r = 0; r < count; r++)
        for (int v = 0; v < VECTORS; v++)
            store(step->out + to[r] + v * LANES, sums[r * VECTORS + v] / rows[r].total);
}

/* Attends every row of a step, and leaves the output of rows outside all chunks unchanged.
 *
 * The caller must ensure that chunks have at most MAX_ROWS rows. */
void attend(const Step *step, int64_t threads) {
    int64_t tasks = step->num_chunks * step->kv_heads;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t task = 0; task < tasks; task++)
        attend_chunk(step, step->chunks + task / step->kv_heads, task % step->kv_heads);
}
