/* The block formats of GGUF: their layout in files, in memory, and their integer products.
 *
 * TYPE is the number of a format in GGUF. In memory, the codes of a block of 32 weights of LANES
 * outputs are VECTORS vectors of four codes per output. Two vectors share a vector of nibbles, and
 * all vectors share one or two with their fifth and sixth bits. Codes of 8 bits are vectors themselves.
 */

#ifndef PACKED_H
#define PACKED_H

#include <stddef.h>

#include "vectors.h"
#ifdef _OPENMP
#include <omp.h>
#endif

#define Q4_0 2
#define Q4_1 3
#define Q5_0 6
#define Q5_1 7
#define Q8_0 8
#define Q4_K 12
#define Q5_K 13
#define Q6_K 14
#define IQ4_NL 20

/* Whether blocks of 32 share scales of 256 weights, and have a minimum. Sub-blocks with a scale. */
#define SUPER (TYPE == Q4_K || TYPE == Q5_K || TYPE == Q6_K)
#define MINS (TYPE == Q4_1 || TYPE == Q5_1 || TYPE == Q4_K || TYPE == Q5_K)
#define SUBS (TYPE == Q6_K ? 2 : 1)
#define HIGH_BITS (TYPE == Q6_K ? 2 : TYPE == Q5_0 || TYPE == Q5_1 || TYPE == Q5_K ? 1 : 0)

/* Bytes of a file's block, of FILE_VALUES weights. */
#if TYPE == Q4_0 || TYPE == IQ4_NL
#define FILE_BYTES 18
#elif TYPE == Q4_1
#define FILE_BYTES 20
#elif TYPE == Q5_0
#define FILE_BYTES 22
#elif TYPE == Q5_1
#define FILE_BYTES 24
#elif TYPE == Q8_0
#define FILE_BYTES 34
#elif TYPE == Q4_K
#define FILE_BYTES 144
#elif TYPE == Q5_K
#define FILE_BYTES 176
#elif TYPE == Q6_K
#define FILE_BYTES 210
#else
#error "TYPE is not a supported format"
#endif
#define FILE_VALUES (SUPER ? 256 : 32)

#if (defined(__AVX512VNNI__) && LANES == 16) || (defined(__AVXVNNI__) && LANES == 8)
#define VNNI 1
#else
#define VNNI 0
#endif

/* Codes of 8 bits are signed, or unsigned with 128 added for instructions that need that. */
#define WIDE (TYPE == Q8_0 || TYPE == IQ4_NL)
#if WIDE
#define OFFSET (VNNI ? 128 : 0)
#else
#define OFFSET (TYPE == Q4_0 ? 8 : TYPE == Q5_0 ? 16 : TYPE == Q6_K ? 32 : 0)
#endif

enum {
    BLOCK = 32,
    VECTORS = 8,
    VECTOR = 4 * LANES,
    CODE_BYTES = (TYPE == Q8_0 ? 8 : 4 + HIGH_BITS) * VECTOR,
    /* Halves of the scales and minima of LANES outputs, then a byte of each for SUPER. */
    SCALE_BYTES = 2 * LANES * (1 + MINS),
    SUB_BYTES = 2 * LANES,
};

typedef uint8_t Bytes __attribute__((vector_size(VECTOR)));
typedef uint8_t LooseBytes __attribute__((vector_size(VECTOR), aligned(1), may_alias));
typedef uint16_t Shorts __attribute__((vector_size(VECTOR)));
typedef int8_t SignedByteLanes __attribute__((vector_size(LANES), aligned(1), may_alias));

typedef struct {
    Vec scale[SUBS];
    Vec min;
} Scales;

INLINE int64_t group_scale_bytes(int64_t blocks) {
    return SUPER ? (blocks / 8) * (SCALE_BYTES + 8 * SUB_BYTES) : blocks * SCALE_BYTES;
}

INLINE int64_t thread_number(void) {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

static const int8_t LEVELS[16] = {
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
}; /* of IQ4_NL */

/* Returns the place in its block of the first of four weights of a vector. */
INLINE int first_of(int v) {
    return SUBS == 2 ? v / 4 * 16 + v / 2 % 2 * 4 + v % 2 * 8 : v / 2 * 4 + v % 2 * 16;
}

/* Returns the integer that a loaded code stands for. */
INLINE int number_of(uint8_t code) { return (WIDE && !VNNI ? (int)(int8_t)code : code) - OFFSET; }

/* Reads the codes of a block of a file's row. */
INLINE void read_codes(uint8_t *codes, const uint8_t *row, int64_t block) {
    const uint8_t *at = row + (SUPER ? block / 8 : block) * FILE_BYTES;
#if SUPER
    int s = block % 8;
#endif
    for (int i = 0; i < BLOCK; i++) {
#if TYPE == Q6_K
        uint8_t low = at[s / 4 * 64 + s % 2 * 32 + i], high = at[128 + s / 4 * 32 + i];
        codes[i] = (s % 4 >= 2 ? low >> 4 : low & 15) | (high >> s % 4 * 2 & 3) << 4;
#elif SUPER
        uint8_t low = at[FILE_BYTES - 128 + s / 2 * 32 + i];
        codes[i] = (s % 2 ? low >> 4 : low & 15) | (HIGH_BITS ? (at[16 + i] >> s & 1) << 4 : 0);
#elif TYPE == Q8_0
        codes[i] = at[2 + i] ^ (VNNI ? 128 : 0);
#else
        uint8_t low = at[FILE_BYTES - 16 + i % 16];
        uint8_t high = HIGH_BITS ? at[FILE_BYTES - 20 + i / 8] >> i % 8 & 1 : 0;
        codes[i] = (i / 16 ? low >> 4 : low & 15) | high << 4;
#endif
    }
}

/* Adds the codes of a block of a file's row to a group whose codes were 0. */
INLINE void pack_codes(uint8_t *to, const uint8_t *row, int64_t block, int64_t lane) {
    uint8_t codes[BLOCK];
    read_codes(codes, row, block);
    for (int v = 0; v < VECTORS; v++)
        for (int j = 0; j < 4; j++) {
            uint8_t code = codes[first_of(v) + j], *at = to + 4 * lane + j;
            if (TYPE == Q8_0) {
                at[v * VECTOR] = code;
                continue;
            }
            at[v / 2 * VECTOR] |= (code & 15) << v % 2 * 4;
            if (HIGH_BITS == 1) at[4 * VECTOR] |= (code >> 4) << v;
            if (HIGH_BITS == 2) at[(4 + v / 4) * VECTOR] |= (code >> 4) << v % 4 * 2;
        }
}

/* Copies the scales of a block of a file's row to a group. */
INLINE void pack_scales(uint8_t *to, const uint8_t *row, int64_t block, int64_t lane) {
#if SUPER
    const uint8_t *at = row + block / 8 * FILE_BYTES;
    uint8_t *super = to + block / 8 * (SCALE_BYTES + 8 * SUB_BYTES);
    int s = block % 8;
    uint8_t *own = super + SCALE_BYTES + s * SUB_BYTES;
    memcpy(super + 2 * lane, at + (TYPE == Q6_K ? 208 : 0), 2);
#if TYPE == Q6_K
    own[lane] = at[192 + 2 * s];
    own[LANES + lane] = at[192 + 2 * s + 1];
#else
    const uint8_t *six = at + 4; /* six bits each */
    memcpy(super + 2 * LANES + 2 * lane, at + 2, 2);
    own[lane] = s < 4 ? six[s] & 63 : (six[s + 4] & 15) | six[s - 4] >> 6 << 4;
    own[LANES + lane] = s < 4 ? six[s + 4] & 63 : six[s + 4] >> 4 | six[s] >> 6 << 4;
#endif
#else
    const uint8_t *at = row + block * FILE_BYTES;
    memcpy(to + block * SCALE_BYTES + 2 * lane, at, 2);
    if (MINS) memcpy(to + block * SCALE_BYTES + 2 * LANES + 2 * lane, at + 2, 2);
#endif
}

/* Widens float16. */
INLINE Vec load_halves(const uint8_t *at) {
#if LANES == 16
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)at));
#elif LANES == 8 && defined(__F16C__)
    return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const void *)at));
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (Vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const void *)at)));
#else
    Ints bits = __builtin_convertvector(*(const HalfLanes *)at, Ints);
    Vec magnitude = (Vec)((bits & 0x7fff) << 13) * 0x1p112f; /* right for subnormals as well */
    return (Vec)((Ints)magnitude | (bits & 0x8000) << 16);
#endif
}

INLINE Vec to_floats(Ints x) { return __builtin_convertvector(x, Vec); }

/* Widens bytes without a sign, or with one. */
INLINE Vec load_bytes(const uint8_t *at) {
#if LANES == 16
    return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)at)));
#elif LANES == 8
    return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)at)));
#else
    return to_floats(__builtin_convertvector(*(const ByteLanes *)at, Ints));
#endif
}

INLINE Vec load_signed_bytes(const uint8_t *at) {
#if LANES == 16
    return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)at)));
#elif LANES == 8
    return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)at)));
#else
    return to_floats(__builtin_convertvector(*(const SignedByteLanes *)at, Ints));
#endif
}

/* Returns the scales and the minima of a block. All products of halves and bytes are exact. */
INLINE Scales load_scales(const uint8_t *scales, int64_t block) {
    Scales found;
    found.min = all(0.0f);
#if SUPER
    const uint8_t *super = scales + block / 8 * (SCALE_BYTES + 8 * SUB_BYTES);
    const uint8_t *own = super + SCALE_BYTES + block % 8 * SUB_BYTES;
    Vec scale = load_halves(super);
#if TYPE == Q6_K
    found.scale[0] = scale * load_signed_bytes(own);
    found.scale[1] = scale * load_signed_bytes(own + LANES);
#else
    found.scale[0] = scale * load_bytes(own);
    found.min = -load_halves(super + 2 * LANES) * load_bytes(own + LANES);
#endif
#else
    found.scale[0] = load_halves(scales + block * SCALE_BYTES);
    if (MINS) found.min = load_halves(scales + block * SCALE_BYTES + 2 * LANES);
#endif
    return found;
}

/* Returns the numbers of IQ4_NL for nibbles. */
INLINE Bytes levels(Bytes nibbles) {
    uint8_t table[16];
    for (int i = 0; i < 16; i++) table[i] = (uint8_t)(LEVELS[i] + OFFSET);
#if LANES == 16
    __m512i all_tables = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)table));
    return (Bytes)_mm512_shuffle_epi8(all_tables, (__m512i)nibbles);
#elif LANES == 8
    __m256i all_tables = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)table));
    return (Bytes)_mm256_shuffle_epi8(all_tables, (__m256i)nibbles);
#else
    return __builtin_shuffle(*(const LooseBytes *)table, nibbles);
#endif
}

/* Returns vector v of a block. */
INLINE Bytes load_codes(const uint8_t *block, int v) {
    if (TYPE == Q8_0) return *(const LooseBytes *)(block + v * VECTOR);
    Bytes pair = *(const LooseBytes *)(block + v / 2 * VECTOR);
    Bytes codes = (v % 2 ? (Bytes)((Shorts)pair >> 4) : pair) & 15;
    if (TYPE == IQ4_NL) return levels(codes);
    if (HIGH_BITS) {
        Shorts high = *(const Shorts *)(block + (4 + (HIGH_BITS == 2 ? v / 4 : 0)) * VECTOR);
        int shift = HIGH_BITS == 2 ? 4 - v % 4 * 2 : 4 - v;
        high = shift > 0 ? high << shift : high >> -shift;
        codes |= (Bytes)high & (HIGH_BITS == 2 ? 0x30 : 0x10);
    }
    return codes;
}

/* Returns a * b + c, rounded once. */
INLINE Vec fused(Vec a, Vec b, Vec c) {
#if LANES == 16
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8
    return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    for (int i = 0; i < LANES; i++) c[i] = fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

/* Rounds to integers, ties to even. */
INLINE Ints nearest(Vec x) {
#if LANES == 16
    return (Ints)_mm512_cvtps_epi32((__m512)x);
#elif LANES == 8
    return (Ints)_mm256_cvtps_epi32((__m256)x);
#elif defined(__SSE4_1__)
    return (Ints)_mm_cvtps_epi32((__m128)x);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (Ints)vcvtnq_s32_f32((float32x4_t)x);
#else
    Ints rounded;
    for (int i = 0; i < LANES; i++) rounded[i] = (int32_t)rintf(x[i]);
    return rounded;
#endif
}

INLINE int32_t sum_of_ints(Ints x) {
#if LANES == 16
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    int32_t total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
#endif
}

/* Integer products. `Parts` holds the sums of FLUSH vectors, in 16 bits where no instruction adds four
 * products of bytes: 2 FLUSH products of a code and 127 must not exceed 32,767. */
#if LANES == 16
#define MM(name) _mm512_##name
typedef __m512i Register;
#elif LANES == 8
#define MM(name) _mm256_##name
typedef __m256i Register;
#elif defined(__SSE4_1__)
#define MM(name) _mm_##name
typedef __m128i Register;
#endif

INLINE int32_t four_codes(const int8_t *codes) {
    int32_t four;
    memcpy(&four, codes, 4);
    return four;
}

#if VNNI || !defined(MM)
typedef Ints Parts;
enum { FLUSH = VECTORS / SUBS };
INLINE Parts begin_parts(Ints sums) { return sums; }
INLINE Ints end_parts(Ints sums, Parts parts) {
    (void)sums;
    return parts;
}
INLINE Parts add_products(Parts parts, Bytes codes, const int8_t *row) {
#if VNNI && LANES == 16
    return (Parts)_mm512_dpbusd_epi32(
        (__m512i)parts, (__m512i)codes, _mm512_set1_epi32(four_codes(row)));
#elif VNNI
    return (Parts)_mm256_dpbusd_avx_epi32(
        (__m256i)parts, (__m256i)codes, _mm256_set1_epi32(four_codes(row)));
#elif defined(__ARM_FEATURE_DOTPROD)
    int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(four_codes(row)));
    return (Parts)vdotq_s32((int32x4_t)parts, (int8x16_t)codes, four);
#else
    for (int lane = 0; lane < LANES; lane++)
        for (int j = 0; j < 4; j++) parts[lane] += (int8_t)codes[4 * lane + j] * row[j];
    return parts;
#endif
}
#else
typedef Register Parts;
enum { FLUSH = WIDE ? 1 : HIGH_BITS == 2 ? 2 : HIGH_BITS ? 4 : 8 };
INLINE Parts begin_parts(Ints sums) {
    (void)sums;
    return (Register)(Ints){};
}
INLINE Ints end_parts(Ints sums, Parts parts) {
    return sums + (Ints)MM(madd_epi16)(parts, MM(set1_epi16)(1));
}
INLINE Parts add_products(Parts parts, Bytes codes, const int8_t *row) {
    Register four = MM(set1_epi32)(four_codes(row)), numbers = (Register)codes;
#if WIDE
    /* The instruction multiplies unsigned by signed numbers, so the row takes the sign. */
#if LANES == 16
    four = _mm512_mask_sub_epi8(four, _mm512_movepi8_mask(numbers), _mm512_setzero_si512(), four);
#else
    four = MM(sign_epi8)(four, numbers);
#endif
    numbers = MM(abs_epi8)(numbers);
#endif
    return MM(add_epi16)(parts, MM(maddubs_epi16)(numbers, four));
}
#endif

#endif
