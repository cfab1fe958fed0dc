/* The token with the largest logit / temperature + g of a row, for the noise g of `noise.py`.
 *
 * A row is drawn in two passes. The first finds the block with the largest logit and draws from it.
 * The second skips every block whose logits cannot reach the best score so far, because g is at
 * most MOST_NOISE. Most tokens of a language model are so unlikely that their noise is never
 * computed.
 *
 * The logarithms differ from those of the definition in their last bits. A row whose two best scores
 * are closer than both errors is therefore left to the caller.
 */

#include "vectors.h"

/* A Philox call serves four tokens. HALF calls run side by side, in 64-bit lanes. */
enum { HALF = LANES / 2, BLOCK = 4 * HALF, ROUNDS = 10 };

typedef uint64_t Longs __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

#if LANES == 16
#define LOW_LONGS {0, 8, 1, 9, 2, 10, 3, 11}
#define CALLS {0, 1, 2, 3, 4, 5, 6, 7}
#elif LANES == 8
#define LOW_LONGS {0, 4, 1, 5}
#define CALLS {0, 1, 2, 3}
#else
#define LOW_LONGS {0, 2}
#define CALLS {0, 1}
#endif

/* -log(-log(u)) of the largest u, (2^23 - 0.5) / 2^23, is 16.636. */
#define MOST_NOISE 16.65f

/* The definition and this file err by less than 4e-5 + 4e-7 |score| together: a few units in the
 * last place of g, at most 17, and the rounding of the sum. */
#define LEAST_GAP 2e-4f
#define LEAST_RELATIVE_GAP 2e-6f

typedef struct {
    uint32_t keys[ROUNDS][2];
    uint64_t position;
    float temperature;
} Row;

typedef struct {
    float best, second;
    int64_t token;
} Draw;

/* The product of the low halves of each lane. */
INLINE Longs product(Longs a, uint32_t factor) {
#if defined(__AVX512F__)
    return (Longs)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(factor));
#elif defined(__AVX2__)
    return (Longs)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(factor));
#elif defined(__SSE4_1__)
    return (Longs)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(factor));
#elif defined(__ARM_NEON)
    return (Longs)vmull_u32(vmovn_u64((uint64x2_t)a), vdup_n_u32(factor));
#else
    return (a & 0xffffffff) * factor;
#endif
}

/* The words of HALF Philox calls in order of their tokens: two vectors. */
INLINE void words_of(const Row *row, uint64_t first_call, Words *words) {
    const Longs calls = CALLS, low = LOW_LONGS, high = low + HALF / 2;
    /* The upper halves of the lanes are garbage, which no product reads. */
    Longs c0 = (Longs){} + row->position, c1 = (Longs){}, c2 = calls + first_call, c3 = (Longs){};
    for (int round = 0; round < ROUNDS; round++) {
        Longs a = product(c0, 0xD2511F53), b = product(c2, 0xCD9E8D57);
        c0 = (b >> 32) ^ c1 ^ row->keys[round][0];
        c2 = (a >> 32) ^ c3 ^ row->keys[round][1];
        c1 = b;
        c3 = a;
    }
    Longs front = (c0 & 0xffffffff) | c1 << 32, back = (c2 & 0xffffffff) | c3 << 32;
    words[0] = (Words)__builtin_shuffle(front, back, low);
    words[1] = (Words)__builtin_shuffle(front, back, high);
}

/* log(x) of positive normal numbers, within 3 ulp: x = 2^n (1 + f) with 1 + f in [0.7, 1.42), and
 * log(1 + f) = 2 artanh(f / (2 + f)). */
INLINE Vec logarithm(Vec x) {
    Ints bits = (Ints)x, exponent = (bits - 0x3f330000) >> 23; /* 0x3f330000 is 0.699 */
    Vec f = (Vec)(bits - (exponent << 23)) - 1.0f, n = __builtin_convertvector(exponent, Vec);
    Vec s = f / (f + 2.0f), z = s * s;
    Vec tail = all(2.0f / 11);
    tail = tail * z + 2.0f / 9;
    tail = tail * z + 2.0f / 7;
    tail = tail * z + 2.0f / 5;
    tail = tail * z + 2.0f / 3;
    /* 2 s = f - s f is exact to an ulp of f, and small numbers keep their relative precision. */
    return n * 0.693145752f + (f - s * (f - z * tail) + n * 1.42860677e-6f);
}

INLINE Vec noise_of(Words words) {
    Vec u = (__builtin_convertvector((Ints)(words >> 9), Vec) + 0.5f) * 0x1p-23f;
    return -logarithm(-logarithm(u));
}

/* Returns whether a lane is at least this large. */
INLINE int reaches(Vec x, float least) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(least), _CMP_GE_OQ) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, _mm256_set1_ps(least), _CMP_GE_OQ)) != 0;
#else
    return largest(x) >= least;
#endif
}

INLINE Vec larger_half(const float *block) {
    return larger(*(const FloatLanes *)block, *(const FloatLanes *)(block + LANES));
}

INLINE float margin_of(float best) {
    return LEAST_GAP + LEAST_RELATIVE_GAP * fabsf(best);
}

INLINE void note(Draw *draw, float score, int64_t token) {
    if (score > draw->best) {
        draw->second = draw->best;
        draw->best = score;
        draw->token = token;
    } else if (score > draw->second) {
        draw->second = score;
    }
}

/* Draws from BLOCK tokens of which `count` exist. */
static void draw_block(
    const Row *row, const float *logits, int64_t first, int64_t count, Draw *draw) {
    Words words[2];
    words_of(row, first / 4, words);
    float ends[BLOCK];
    if (count < BLOCK) {
        for (int i = 0; i < BLOCK; i++) ends[i] = i < count ? logits[first + i] : -INFINITY;
        logits = ends - first;
    }
    for (int half = 0; half < 2; half++) {
        int64_t from = first + half * LANES;
        Vec scores = *(const FloatLanes *)(logits + from) / row->temperature;
        scores = scores + noise_of(words[half]);
        if (!reaches(scores, draw->best - margin_of(draw->best))) continue;
        for (int i = 0; i < LANES; i++) note(draw, scores[i], from + i);
    }
}

static Row row_of(uint64_t seed, uint32_t choice, uint32_t position, float temperature) {
    Row row = {.position = position, .temperature = temperature};
    uint32_t low = seed, high = (seed >> 32) ^ choice;
    for (int i = 0; i < ROUNDS; i++) {
        row.keys[i][0] = low + i * 0x9E3779B9u;
        row.keys[i][1] = high + i * 0xBB67AE85u;
    }
    return row;
}

/* Returns the token of a row, or -1 if rounding errors could decide it. */
static int64_t draw_row(const Row *row, const float *logits, int64_t vocabulary) {
    Draw draw = {.best = -INFINITY, .second = -INFINITY, .token = 0};
    int64_t whole = vocabulary / BLOCK * BLOCK, top = 0;
    Vec most = all(-INFINITY);
    for (int64_t first = 0; first < whole; first += BLOCK)
        most = larger(most, larger_half(logits + first));
    float peak = largest(most);
    while (top < whole && !reaches(larger_half(logits + top), peak)) top += BLOCK;
    if (top < whole) draw_block(row, logits, top, BLOCK, &draw);
    for (int64_t first = 0; first < whole; first += BLOCK) {
        float reach = (draw.best - margin_of(draw.best) - MOST_NOISE) * row->temperature;
        if (first != top && reaches(larger_half(logits + first), reach))
            draw_block(row, logits, first, BLOCK, &draw);
    }
    if (whole < vocabulary) draw_block(row, logits, whole, vocabulary - whole, &draw);
    if (draw.best == -INFINITY) return 0; /* all tokens are forbidden */
    return draw.best - draw.second > margin_of(draw.best) ? draw.token : -1;
}

/* Writes the token of each row, or -1 for rows that the caller must draw. */
void draw(
    int64_t *tokens, const float *logits, const float *temperatures, const uint64_t *seeds,
    const int32_t *choices, const int32_t *positions, int64_t rows, int64_t vocabulary,
    int64_t threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < rows; i++) {
        Row row = row_of(seeds[i], choices[i], positions[i], temperatures[i]);
        tokens[i] = draw_row(&row, logits + i * vocabulary, vocabulary);
    }
}
