/* Vectors of 16 floats and what the kernels do with them. Compiled with BFLOAT16 0 or 1: whether
 * tensors hold bfloat16 or float32. Everything is computed in float32. */

#ifndef VECTORS_H
#define VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

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
#if BFLOAT16
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

#endif
