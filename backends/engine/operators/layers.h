/* The operations of a layer, and the parts of a step that they read. */

#ifndef LAYERS_H
#define LAYERS_H

#include "vectors.h"

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
    const Number *query;
    const void *kv;
    int64_t heads, kv_heads, strip, window;
    const Chunk *chunks;
    int64_t num_chunks;
    float softcap; /* bound on the scores, or 0 */
    int32_t e4m3;  /* whether the KV memory is in FP8 */
    int32_t tiles; /* whether to multiply in matrix tiles, if the head fits */
} Step;

typedef struct {
    const int64_t *positions, *slots;
    const Number *cosines, *sines; /* [positions, half] */
    int64_t rows, heads, kv_heads, head_dim, half, strip; /* half of the rotated dimensions */
    float scale, eps;
    int32_t e4m3; /* whether the KV memory is in FP8 */
} Rotation;

void add_norm(
    Number *hidden, Number *normed, const Number *delta, const float *weight, int64_t rows,
    int64_t width, float eps, int64_t threads);
void rotate_and_store(
    Number *out, void *kv, const Number *fused, const float *qk_norm, const Rotation *rotation,
    int64_t threads);
void attend(const Step *step, int64_t threads);
void gate(
    Number *out, const Number *gate_up, int64_t rows, int64_t width, int64_t gelu,
    int64_t threads);

#endif
