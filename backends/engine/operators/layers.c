/* Operations of a layer on single rows, between its products. Widths are multiples of 16. */

#include "layers.h"

/* Minimum elements of a call that uses several threads. */
enum { WORTH_SHARING = 1 << 15 };

/* hidden += delta, unless delta is NULL. normed = hidden / rms(hidden) * weight. */
void add_norm(
    Number *hidden, Number *normed, const Number *delta, const float *weight, int64_t rows,
    int64_t width, float eps, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > WORTH_SHARING)
    for (int64_t row = 0; row < rows; row++) {
        Number *x = hidden + row * width, *y = normed + row * width;
        Vec squares = all(0.0f);
        for (int64_t i = 0; i < width; i += LANES) {
            Vec value = load(x + i);
            if (delta) value = store(x + i, value + load(delta + row * width + i));
            squares = squares + value * value;
        }
        Vec scale = all(1.0f / sqrtf(sum(squares) / (float)width + eps));
        for (int64_t i = 0; i < width; i += LANES)
            store(y + i, load(x + i) * scale * *(const FloatLanes *)(weight + i));
    }
}

/* Returns silu(x), or the approximation of gelu(x) by tanh, which is x sigmoid(z) as well. */
INLINE Vec activated(Vec x, int64_t gelu) {
    Vec z = x;
    if (gelu) z = x * (x * x * 0.0713548163f + 1.5957691216f); /* 2 sqrt(2 / pi) (x + 0.044715 x^3) */
    Vec e = exponential(choose(z < 0.0f, z, -z));
    return x * (choose(z < 0.0f, e, all(1.0f)) / (e + 1.0f));
}

/* out = activation(gate) * up. A row of gate_up holds gate, then up, of `width` numbers each. */
void gate(
    Number *out, const Number *gate_up, int64_t rows, int64_t width, int64_t gelu,
    int64_t threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > WORTH_SHARING)
    for (int64_t row = 0; row < rows; row++) {
        const Number *gates = gate_up + 2 * row * width;
        for (int64_t i = 0; i < width; i += LANES)
            store(
                out + row * width + i,
                activated(load(gates + i), gelu) * load(gates + width + i));
    }
}

/* Converts a head of any width to floats. */
INLINE void widen(float *to, const Number *from, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) *(FloatLanes *)(to + i) = load(from + i);
}

/* Converts a head of any width from floats, times `scale`. */
INLINE void narrow(Number *to, const float *from, int64_t count, float scale) {
    for (int64_t i = 0; i < count; i += LANES)
        store(to + i, *(const FloatLanes *)(from + i) * scale);
}

/* Writes a head of keys or values from floats to the KV memory. */
INLINE void write_kv(void *kv, int64_t at, const float *from, int64_t count, int e4m3) {
    if (!e4m3) {
        narrow((Number *)kv + at, from, count, 1.0f);
        return;
    }
    for (int64_t i = 0; i < count; i += LANES)
        store_e4m3((uint8_t *)kv + at + i, *(const FloatLanes *)(from + i));
}

/* Normalises a head of queries or keys unless weight is NULL, then rotates its first 2 * half
 * dimensions by its position. */
INLINE void rotate_head(
    float *x, const float *weight, const float *cosines, const float *sines, int64_t width,
    int64_t half, float eps) {
    if (weight) {
        Vec squares = all(0.0f);
        for (int64_t i = 0; i < width; i += LANES) {
            Vec value = *(const FloatLanes *)(x + i);
            squares = squares + value * value;
        }
        Vec scale = all(1.0f / sqrtf(sum(squares) / (float)width + eps));
        for (int64_t i = 0; i < width; i += LANES) {
            FloatLanes *at = (FloatLanes *)(x + i);
            *at = *at * scale * *(const FloatLanes *)(weight + i);
        }
    }
    for (int64_t i = 0; i < half; i++) {
        float first = x[i], second = x[half + i];
        x[i] = first * cosines[i] - second * sines[i];
        x[half + i] = second * cosines[i] + first * sines[i];
    }
}

enum { MAX_HEAD_DIM = 256 };

/* Writes rotated keys and values of each row to its slot, and rotated, scaled queries to `out`.
 *
 * fused: rows of query heads, key heads and value heads. kv: strips of keys, then of values.
 */
void rotate_and_store(
    Number *out, void *kv, const Number *fused, const float *qk_norm, const Rotation *rotation,
    int64_t threads) {
    int64_t width = rotation->head_dim, half = rotation->half;
    int64_t rotated = rotation->heads + rotation->kv_heads;
    int64_t all_heads = rotated + rotation->kv_heads;
#pragma omp parallel for num_threads(threads) \
    if (rotation->rows * all_heads * width > WORTH_SHARING)
    for (int64_t row = 0; row < rotation->rows; row++) {
        float cosines[MAX_HEAD_DIM / 2 + LANES], sines[MAX_HEAD_DIM / 2 + LANES];
        float x[MAX_HEAD_DIM];
        int64_t position = rotation->positions[row], slot = rotation->slots[row];
        for (int64_t i = 0; i < half; i += 8) { /* `half` is a multiple of 8 */
            for (int64_t j = i; j < i + 8; j++) {
#if BFLOAT16
                uint32_t c = (uint32_t)rotation->cosines[position * half + j] << 16;
                uint32_t s = (uint32_t)rotation->sines[position * half + j] << 16;
                memcpy(cosines + j, &c, 4);
                memcpy(sines + j, &s, 4);
#else
                cosines[j] = rotation->cosines[position * half + j];
                sines[j] = rotation->sines[position * half + j];
#endif
            }
        }
        const Number *from = fused + row * all_heads * width;
        for (int64_t head = 0; head < all_heads; head++) {
            widen(x, from + head * width, width);
            if (head < rotated)
                rotate_head(
                    x, qk_norm ? qk_norm + head * width : 0, cosines, sines, width, half,
                    rotation->eps);
            if (head < rotation->heads)
                narrow(out + (row * rotation->heads + head) * width, x, width, rotation->scale);
            else
                write_kv(
                    kv, (head - rotation->heads) * rotation->strip + slot * width, x, width,
                    rotation->e4m3);
        }
    }
}
