/* Vectors of floats as wide as the registers, and operations on them.
 *
 * Tensors hold bfloat16 if BFLOAT16 is 1, float32 if it is 0. The KV memory may hold FP8 (E4M3). All
 * arithmetic is in float32.
 * Vectors never exceed a register: gcc splits wider comparisons and shuffles into single floats.
 */

#ifndef VECTORS_H
#define VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE4_1__
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#define EVEN_LANES {0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30}
#define EVEN_QUADS {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27}
#elif defined(__AVX2__)
#define LANES 8
#define LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7}
#define EVEN_LANES {0, 2, 8, 10, 4, 6, 12, 14}
#define EVEN_QUADS {0, 1, 2, 3, 8, 9, 10, 11}
#else
#define LANES 4
#define LANE_NUMBERS {0, 1, 2, 3}
#define EVEN_LANES {0, 2, 4, 6}
#endif

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef float FloatLanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t HalfLanes __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint8_t ByteLanes __attribute__((vector_size(LANES), aligned(1), may_alias));

#if BFLOAT16
typedef uint16_t Number;
#else
typedef float Number;
#endif

#define INLINE static inline __attribute__((always_inline))

INLINE Vec all(float x) { return (Vec){} + x; }

/* Returns the larger number of each lane. */
INLINE Vec larger(Vec a, Vec b) {
    /* gcc takes several instructions for a comparison and a choice. */
#if defined(__AVX512F__)
    return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE4_1__)
    return (Vec)_mm_max_ps((__m128)a, (__m128)b);
#elif defined(__ARM_NEON)
    return (Vec)vmaxq_f32((float32x4_t)a, (float32x4_t)b);
#else
    return (Vec)(((a > b) & (Ints)a) | (~(a > b) & (Ints)b));
#endif
}

INLINE Vec choose(Ints yes, Vec a, Vec b) { return (Vec)((yes & (Ints)a) | (~yes & (Ints)b)); }

INLINE Vec load(const Number *at) {
    /* Intrinsics where available, because gcc widens the halves of a vector separately. */
#if BFLOAT16 && defined(__AVX512F__)
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)at)), 16);
#elif BFLOAT16 && defined(__AVX2__)
    return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)at)), 16);
#elif BFLOAT16 && defined(__SSE4_1__)
    return (Vec)_mm_slli_epi32(_mm_cvtepu16_epi32(_mm_loadl_epi64((const void *)at)), 16);
#elif BFLOAT16
    return (Vec)(__builtin_convertvector(*(const HalfLanes *)at, Ints) << 16);
#else
    return *(const FloatLanes *)at;
#endif
}

/* Rounds to nearest, ties to even, and returns the stored value. Does not preserve NaNs. */
INLINE Vec store(Number *at, Vec value) {
#if BFLOAT16
    Ints bits = (Ints)value;
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    *(HalfLanes *)at = __builtin_convertvector(bits, HalfLanes);
    return (Vec)(bits << 16);
#else
    *(FloatLanes *)at = value;
    return value;
#endif
}

/* Widens E4M3 without float32 subnormals, whose arithmetic is slow on some processors. The codes of
 * NaN become +-480. */
INLINE Vec load_e4m3(const uint8_t *at) {
#if defined(__AVX2__) && defined(__F16C__)
    /* As the low bits of exponent and mantissa of float16, whose exponents are smaller by 8. */
#if defined(__AVX512F__)
    __m256i halves = _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)at));
    halves = _mm256_and_si256(_mm256_slli_epi16(halves, 7), _mm256_set1_epi16((short)0xbfff));
    return (Vec)_mm512_cvtph_ps(halves) * 256.0f;
#else
    __m128i halves = _mm_cvtepi8_epi16(_mm_loadl_epi64((const void *)at));
    halves = _mm_and_si128(_mm_slli_epi16(halves, 7), _mm_set1_epi16((short)0xbfff));
    return (Vec)_mm256_cvtph_ps(halves) * 256.0f;
#endif
#else
    Ints octets = __builtin_convertvector(*(const ByteLanes *)at, Ints);
    Ints magnitude = (octets & 0x7f) << 20;
    Vec subnormal = (Vec)(magnitude + (121 << 23)) - 0x1p-6f;
    Vec number = choose(magnitude < 1 << 23, subnormal, (Vec)(magnitude + (120 << 23)));
    return (Vec)((Ints)number | (octets & 0x80) << 24);
#endif
}

/* Rounds to the nearest number of E4M3, ties to even, within +-448. NaNs become +-448. */
INLINE void store_e4m3(uint8_t *at, Vec value) {
    Ints sign = (Ints)value >> 24 & 0x80;
    Vec magnitude = (Vec)((Ints)value & 0x7fffffff);
    magnitude = choose(magnitude < 448.0f, magnitude, all(448.0f));
    Ints bits = (Ints)magnitude;
    Ints normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
    Ints subnormal = (Ints)(magnitude + 0x1p14f) - (Ints)all(0x1p14f); /* rounds to 2^-9 */
    Ints small = bits < 121 << 23;
    *(ByteLanes *)at = __builtin_convertvector((small & subnormal) | (~small & normal) | sign, ByteLanes);
}

/* Loads LANES numbers of the KV memory, in E4M3 or as `Number`. */
INLINE Vec load_kv(const void *kv, int64_t at, int e4m3) {
    return e4m3 ? load_e4m3((const uint8_t *)kv + at) : load((const Number *)kv + at);
}

/* exp(x) for x <= 0, within 2 ulp, 0 below -87.7. From Cephes' expf: 2^n times a polynomial. */
INLINE Vec exponential(Vec x) {
    const float magic = 12582912.0f; /* adding 1.5 * 2^23 rounds to an integer */
    x = larger(x, all(-88.0f));      /* n = -127, for which 2^n has the bits of 0 */
    Vec shifted = x * 1.44269504f + magic;
    Vec n = shifted - magic;
    Vec r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    Vec y = all(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    return y * (Vec)(((Ints)shifted - ((Ints)all(magic) - 127)) << 23);
}

INLINE float largest(Vec x) {
    float best = x[0];
    for (int i = 1; i < LANES; i++) best = x[i] > best ? x[i] : best;
    return best;
}

/* Returns the sum of the lanes. Adds the upper half to the lower half until one lane remains. */
INLINE float sum(Vec x) {
    float total[LANES];
    memcpy(total, &x, sizeof x);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) total[i] += total[i + half];
    return total[0];
}

/* Halves the number of vectors: adds neighbouring lanes, or groups of four, of each pair. */
#define FOLD(parts, count, evens, distance)                                                      \
    for (int i = 0; i < (count); i++) {                                                          \
        const Ints first = evens, second = first + (distance);                                   \
        Vec a = (parts)[2 * i], b = (parts)[2 * i + 1];                                          \
        (parts)[i] = __builtin_shuffle(a, b, first) + __builtin_shuffle(a, b, second);           \
    }

/* Returns the sums of LANES vectors: lane i is the sum of parts[i]. Overwrites the parts. */
INLINE Vec sums_of(Vec *parts) {
    FOLD(parts, LANES / 2, EVEN_LANES, 1)
    FOLD(parts, LANES / 4, EVEN_LANES, 1)
#if LANES > 4
    FOLD(parts, LANES / 8, EVEN_QUADS, 4)
#endif
#if LANES > 8
    FOLD(parts, LANES / 16, EVEN_QUADS, 4)
#endif
    return parts[0];
}

/* Swaps the upper lanes of a row with the lower lanes of the row at a distance, in groups of
 * 2 * distance lanes. */
#define SWAP(rows, distance)                                                                     \
    for (int i = 0; i < LANES; i++) {                                                            \
        if (i & (distance)) continue;                                                            \
        const Ints lanes = LANE_NUMBERS, upper = (lanes & (distance)) != 0;                      \
        const Ints first = lanes + (upper & (LANES - (distance))), second = first + (distance);  \
        Vec a = (rows)[i], b = (rows)[i + (distance)];                                           \
        (rows)[i] = __builtin_shuffle(a, b, first);                                              \
        (rows)[i + (distance)] = __builtin_shuffle(a, b, second);                                \
    }

/* Transposes a matrix of LANES rows in place. */
INLINE void transpose(Vec *rows) {
    SWAP(rows, 1)
    SWAP(rows, 2)
#if LANES > 4
    SWAP(rows, 4)
#endif
#if LANES > 8
    SWAP(rows, 8)
#endif
}

#endif
