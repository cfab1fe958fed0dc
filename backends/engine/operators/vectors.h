/* Vectors of 16 floats and what the kernels do with them. Compiled with BFLOAT16 0 or 1: whether
 * tensors hold bfloat16 or float32. Everything is computed in float32. */

#ifndef VECTORS_H
#define VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

enum { LANES = 16 };

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef float FloatLanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t HalfLanes __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

#if BFLOAT16
typedef uint16_t Number;
#else
typedef float Number;
#endif

#define INLINE static inline __attribute__((always_inline))

INLINE Vec all(float x) { return (Vec){} + x; }

INLINE Vec choose(Ints yes, Vec a, Vec b) { return (Vec)((yes & (Ints)a) | (~yes & (Ints)b)); }

INLINE Vec load(const Number *at) {
#if BFLOAT16 && defined(__AVX512F__)
    /* What gcc makes of the line below widens halves apart. */
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)at)), 16);
#elif BFLOAT16
    return (Vec)(__builtin_convertvector(*(const HalfLanes *)at, Ints) << 16);
#else
    return *(const FloatLanes *)at;
#endif
}

/* Rounds to nearest, ties to even; there are no NaNs to keep. Returns what was stored. */
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

/* exp(x) for x <= 0, within 2 ulp; 0 below -87. Cephes' expf: 2^n times a polynomial. */
INLINE Vec exponential(Vec x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    Ints inside = x > -87.0f;
    x = choose(inside, x, all(-87.0f));
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
    Vec scaled = (Vec)((Ints)y + (((Ints)shifted - (Ints)all(magic)) << 23));
    return choose(inside, scaled, all(0.0f));
}

INLINE float largest(Vec x) {
    float best = x[0];
    for (int i = 1; i < LANES; i++) best = x[i] > best ? x[i] : best;
    return best;
}

/* The sum of the lanes, halves first. */
INLINE float sum(Vec x) {
    float total[LANES];
    memcpy(total, &x, sizeof x);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) total[i] += total[i + half];
    return total[0];
}

/* Sums of pairs: what lies `first` and `second` in two vectors. */
#define PAIR(a, b, first, second) (__builtin_shuffle(a, b, first) + __builtin_shuffle(a, b, second))

/* Returns the sums of 16 vectors: lane i is that of parts[i]. */
INLINE Vec sums_of(Vec *parts) {
    const Ints a8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}, b8 = a8 + 8;
    const Ints a4 = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27}, b4 = a4 + 4;
    const Ints a2 = {0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29}, b2 = a2 + 2;
    const Ints a1 = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30}, b1 = a1 + 1;
    for (int i = 0; i < 8; i++) parts[i] = PAIR(parts[2 * i], parts[2 * i + 1], a8, b8);
    for (int i = 0; i < 4; i++) parts[i] = PAIR(parts[2 * i], parts[2 * i + 1], a4, b4);
    for (int i = 0; i < 2; i++) parts[i] = PAIR(parts[2 * i], parts[2 * i + 1], a2, b2);
    return PAIR(parts[0], parts[1], a1, b1);
}

#endif
