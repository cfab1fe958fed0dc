/* All layers of a decoder whose products are packed, in one call.
 *
 * From Python, a layer takes about ten calls and as many allocations. */

#include "layers.h"

/* `multiply_packed` of the library of a block format. */
typedef int (*Multiply)(
    void *out, const Number *x, void *blocks, const void *matrix, int64_t rows, int64_t stride,
    int64_t wide, int64_t threads);

typedef struct {
    Multiply multiply;
    const void *matrix;
    int64_t outputs;
} Part;

/* Matrices side by side. */
typedef struct {
    const Part *parts;
    int64_t count, outputs;
} Linear;

/* The weights of `qk_norm`, `output_norm` and `down_norm` are NULL for models without these norms. */
typedef struct {
    Linear qkv, output, gate_up, down;
    const float *input_norm, *qk_norm, *output_norm, *mlp_norm, *down_norm;
    const Number *cosines, *sines;
    int64_t half, window;
} Layer;

typedef struct {
    const Layer *layers;
    int64_t count, hidden_size, inner, gelu;
} Decoder;

/* Memory for the rows of a step. `hidden` has their embeddings, and then the sums before the last
 * `delta`. Rows of `attended` that belong to no chunk must be finite. */
typedef struct {
    Number *hidden, *normed, *fused, *queries, *attended, *delta, *gate_up, *gated;
    void *blocks;
} Buffers;

static int multiply(
    Number *out, const Number *x, const Linear *linear, void *blocks, int64_t rows,
    int64_t threads) {
    for (int64_t i = 0; i < linear->count; i++) {
        const Part *part = linear->parts + i;
        int failed = part->multiply(
            out, i ? NULL : x, blocks, part->matrix, rows, linear->outputs, 0, threads);
        if (failed) return 1;
        out += part->outputs;
    }
    return 0;
}

/* Returns 1 if memory is lacking. kv: the KV memory of each layer. */
int run_layers(
    const Decoder *decoder, const Buffers *at, Step *step, Rotation *rotation, void *const *kv,
    int64_t threads) {
    int64_t rows = rotation->rows, width = decoder->hidden_size;
    float eps = rotation->eps;
    const Number *delta = NULL;
    step->out = at->attended;
    step->query = at->queries;
    for (int64_t i = 0; i < decoder->count; i++) {
        const Layer *layer = decoder->layers + i;
        rotation->cosines = layer->cosines;
        rotation->sines = layer->sines;
        rotation->half = layer->half;
        step->kv = kv[i];
        step->window = layer->window;
        add_norm(at->hidden, at->normed, delta, layer->input_norm, rows, width, eps, threads);
        if (multiply(at->fused, at->normed, &layer->qkv, at->blocks, rows, threads)) return 1;
        rotate_and_store(at->queries, kv[i], at->fused, layer->qk_norm, rotation, threads);
        attend(step, threads);
        if (multiply(at->delta, at->attended, &layer->output, at->blocks, rows, threads)) return 1;
        if (layer->output_norm)
            add_norm(at->delta, at->delta, NULL, layer->output_norm, rows, width, eps, threads);
        add_norm(at->hidden, at->normed, at->delta, layer->mlp_norm, rows, width, eps, threads);
        if (multiply(at->gate_up, at->normed, &layer->gate_up, at->blocks, rows, threads)) return 1;
        gate(at->gated, at->gate_up, rows, decoder->inner, decoder->gelu, threads);
        if (multiply(at->delta, at->gated, &layer->down, at->blocks, rows, threads)) return 1;
        if (layer->down_norm)
            add_norm(at->delta, at->delta, NULL, layer->down_norm, rows, width, eps, threads);
        delta = at->delta;
    }
    return 0;
}
