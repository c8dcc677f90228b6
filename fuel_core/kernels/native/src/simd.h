// Vectors of the instruction set that this file is compiled for. A kernel is written once against these
// names and compiled once per set, each time in the namespace FUEL_ISA.
//
// F and I32 hold W floats or integers; Bytes hold 4 W bytes, also seen as 2 W 16-bit integers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512BW__)
#include <immintrin.h>
#endif

namespace fuel::FUEL_ISA {

inline float wide_bf16(uint16_t bits) {
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

// Round to nearest even; a NaN stays one.
inline uint16_t narrow_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#if defined(__AVX512BW__) && defined(__AVX512VL__)

constexpr int W = 16;
using F = __m512;
using I32 = __m512i;
using Bytes = __m512i;

inline F zero() { return _mm512_setzero_ps(); }
inline F set1(float x) { return _mm512_set1_ps(x); }
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F abs(F a) { return _mm512_abs_ps(a); }
inline F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline float sum(F a) { return _mm512_reduce_add_ps(a); }
inline float largest(F a) { return _mm512_reduce_max_ps(a); }
inline F load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline F load_bf16(const uint16_t* p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline F load_u8(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
inline F load_i8(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
inline F to_float(I32 a) { return _mm512_cvtepi32_ps(a); }
// Whole numbers of -128 to 127.
inline void store_i8(int8_t* p, F a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a))); }
// 2^n for integral n of -126 to 127.
inline F pow2(F n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}

inline I32 zero_i32() { return _mm512_setzero_si512(); }
inline I32 add32(I32 a, I32 b) { return _mm512_add_epi32(a, b); }
inline Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline void store_bytes(uint8_t* p, Bytes a) { _mm512_storeu_si512(p, a); }
inline Bytes each_byte(int x) { return _mm512_set1_epi8(char(x)); }
inline Bytes broadcast4(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
}
inline Bytes and_(Bytes a, Bytes b) { return _mm512_and_si512(a, b); }
inline Bytes or_(Bytes a, Bytes b) { return _mm512_or_si512(a, b); }
template <int n> inline Bytes shift_right(Bytes a) { return _mm512_srli_epi16(a, n); }
template <int n> inline Bytes shift_left(Bytes a) { return _mm512_slli_epi16(a, n); }
inline Bytes pairs(Bytes u, Bytes s) { return _mm512_maddubs_epi16(u, s); }
inline Bytes signed_pairs(Bytes a, Bytes b) {
    return _mm512_maddubs_epi16(
        _mm512_abs_epi8(a), _mm512_mask_sub_epi8(b, _mm512_movepi8_mask(a), _mm512_setzero_si512(), b));
}
inline Bytes add16(Bytes a, Bytes b) { return _mm512_add_epi16(a, b); }
inline Bytes xor_(Bytes a, Bytes b) { return _mm512_xor_si512(a, b); }
inline I32 widen(Bytes a) { return _mm512_madd_epi16(a, _mm512_set1_epi16(1)); }
#if defined(__AVX512VNNI__)
#define FUEL_DOT4 1
inline I32 dot4(I32 sum, Bytes u, Bytes s) { return _mm512_dpbusd_epi32(sum, u, s); }
#endif

#elif defined(__AVX2__)

constexpr int W = 8;
using F = __m256;
using I32 = __m256i;
using Bytes = __m256i;

inline F zero() { return _mm256_setzero_ps(); }
inline F set1(float x) { return _mm256_set1_ps(x); }
inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, F x) { _mm256_storeu_ps(p, x); }
inline F add(F a, F b) { return _mm256_add_ps(a, b); }
inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F div(F a, F b) { return _mm256_div_ps(a, b); }
inline F max(F a, F b) { return _mm256_max_ps(a, b); }
inline F min(F a, F b) { return _mm256_min_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline F round(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline float sum(F a) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
inline float largest(F a) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
inline F load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline F load_bf16(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline F load_u8(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline F load_i8(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline F to_float(I32 a) { return _mm256_cvtepi32_ps(a); }
inline void store_i8(int8_t* p, F a) {
    const __m256i wide = _mm256_cvtps_epi32(a);
    const __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(half, half));
}
inline F pow2(F n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}

inline I32 zero_i32() { return _mm256_setzero_si256(); }
inline I32 add32(I32 a, I32 b) { return _mm256_add_epi32(a, b); }
inline Bytes load_bytes(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline void store_bytes(uint8_t* p, Bytes a) { _mm256_storeu_si256((__m256i*)p, a); }
inline Bytes each_byte(int x) { return _mm256_set1_epi8(char(x)); }
inline Bytes broadcast4(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
}
inline Bytes and_(Bytes a, Bytes b) { return _mm256_and_si256(a, b); }
inline Bytes or_(Bytes a, Bytes b) { return _mm256_or_si256(a, b); }
template <int n> inline Bytes shift_right(Bytes a) { return _mm256_srli_epi16(a, n); }
template <int n> inline Bytes shift_left(Bytes a) { return _mm256_slli_epi16(a, n); }
inline Bytes pairs(Bytes u, Bytes s) { return _mm256_maddubs_epi16(u, s); }
inline Bytes signed_pairs(Bytes a, Bytes b) { return _mm256_maddubs_epi16(_mm256_abs_epi8(a), _mm256_sign_epi8(b, a)); }
inline Bytes add16(Bytes a, Bytes b) { return _mm256_add_epi16(a, b); }
inline Bytes xor_(Bytes a, Bytes b) { return _mm256_xor_si256(a, b); }
inline I32 widen(Bytes a) { return _mm256_madd_epi16(a, _mm256_set1_epi16(1)); }

#else

constexpr int W = 8;
struct F { float at[W]; };
struct I32 { int32_t at[W]; };
struct Bytes { uint8_t at[4 * W]; };

template <class Op> inline F map(Op op) {
    F out;
    for (int i = 0; i < W; i++) out.at[i] = op(i);
    return out;
}
inline F set1(float x) { return map([&](int) { return x; }); }
inline F zero() { return set1(0); }
inline F load(const float* p) { return map([&](int i) { return p[i]; }); }
inline void store(float* p, F x) { std::memcpy(p, x.at, sizeof x.at); }
inline F add(F a, F b) { return map([&](int i) { return a.at[i] + b.at[i]; }); }
inline F sub(F a, F b) { return map([&](int i) { return a.at[i] - b.at[i]; }); }
inline F mul(F a, F b) { return map([&](int i) { return a.at[i] * b.at[i]; }); }
inline F div(F a, F b) { return map([&](int i) { return a.at[i] / b.at[i]; }); }
// As the instructions do: the second where either is a NaN.
inline F max(F a, F b) { return map([&](int i) { return a.at[i] > b.at[i] ? a.at[i] : b.at[i]; }); }
inline F min(F a, F b) { return map([&](int i) { return a.at[i] < b.at[i] ? a.at[i] : b.at[i]; }); }
inline F fma(F a, F b, F c) { return map([&](int i) { return a.at[i] * b.at[i] + c.at[i]; }); }
inline F abs(F a) { return map([&](int i) { return std::fabs(a.at[i]); }); }
inline F round(F a) { return map([&](int i) { return std::nearbyintf(a.at[i]); }); }
inline float sum(F a) {
    float total = 0;
    for (float x : a.at) total += x;
    return total;
}
inline float largest(F a) {
    float most = a.at[0];
    for (float x : a.at) most = x > most ? x : most;
    return most;
}
inline float wide_f16(uint16_t bits) {
    uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 31, mantissa = bits & 1023, wide;
    if (exponent == 31) {
        wide = sign | 0x7f800000 | mantissa << 13;
    } else if (exponent) {
        wide = sign | (exponent + 112) << 23 | mantissa << 13;
    } else {
        float value = std::ldexp(float(mantissa), -24);
        return sign ? -value : value;
    }
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}
inline F load_f16(const uint16_t* p) { return map([&](int i) { return wide_f16(p[i]); }); }
inline F load_bf16(const uint16_t* p) { return map([&](int i) { return wide_bf16(p[i]); }); }
inline F load_u8(const uint8_t* p) { return map([&](int i) { return float(p[i]); }); }
inline F load_i8(const int8_t* p) { return map([&](int i) { return float(p[i]); }); }
inline F to_float(I32 a) { return map([&](int i) { return float(a.at[i]); }); }
inline void store_i8(int8_t* p, F a) {
    for (int i = 0; i < W; i++) p[i] = int8_t(a.at[i]);
}
inline F pow2(F n) {
    return map([&](int i) { return n.at[i] == n.at[i] ? std::ldexp(1.0f, int(n.at[i])) : n.at[i]; });
}

inline I32 zero_i32() { return I32{}; }
inline I32 add32(I32 a, I32 b) {
    for (int i = 0; i < W; i++) a.at[i] += b.at[i];
    return a;
}
inline Bytes load_bytes(const uint8_t* p) {
    Bytes out;
    std::memcpy(out.at, p, sizeof out.at);
    return out;
}
inline void store_bytes(uint8_t* p, Bytes a) { std::memcpy(p, a.at, sizeof a.at); }
inline Bytes each_byte(int x) {
    Bytes out;
    std::memset(out.at, x, sizeof out.at);
    return out;
}
inline Bytes broadcast4(const int8_t* p) {
    Bytes out;
    for (int i = 0; i < W; i++) std::memcpy(out.at + 4 * i, p, 4);
    return out;
}
inline Bytes and_(Bytes a, Bytes b) {
    for (int i = 0; i < 4 * W; i++) a.at[i] &= b.at[i];
    return a;
}
inline Bytes or_(Bytes a, Bytes b) {
    for (int i = 0; i < 4 * W; i++) a.at[i] |= b.at[i];
    return a;
}
inline Bytes xor_(Bytes a, Bytes b) {
    for (int i = 0; i < 4 * W; i++) a.at[i] ^= b.at[i];
    return a;
}
// Bytes as 16-bit integers, and back.
template <class Op> inline Bytes map16(Bytes a, Op op) {
    int16_t x[2 * W];
    std::memcpy(x, a.at, sizeof x);
    for (int i = 0; i < 2 * W; i++) x[i] = int16_t(op(x[i], i));
    std::memcpy(a.at, x, sizeof x);
    return a;
}
template <int n> inline Bytes shift_right(Bytes a) {
    return map16(a, [](int16_t x, int) { return uint16_t(x) >> n; });
}
template <int n> inline Bytes shift_left(Bytes a) {
    return map16(a, [](int16_t x, int) { return uint16_t(x) << n; });
}
inline Bytes pairs(Bytes u, Bytes s) {
    return map16(Bytes{}, [&](int16_t, int i) {
        return int(u.at[2 * i]) * int8_t(s.at[2 * i]) + int(u.at[2 * i + 1]) * int8_t(s.at[2 * i + 1]);
    });
}
inline Bytes signed_pairs(Bytes a, Bytes b) {
    return map16(Bytes{}, [&](int16_t, int i) {
        return int8_t(a.at[2 * i]) * int8_t(b.at[2 * i]) + int8_t(a.at[2 * i + 1]) * int8_t(b.at[2 * i + 1]);
    });
}
inline Bytes add16(Bytes a, Bytes b) {
    int16_t y[2 * W];
    std::memcpy(y, b.at, sizeof y);
    return map16(a, [&](int16_t x, int i) { return x + y[i]; });
}
inline I32 widen(Bytes a) {
    int16_t x[2 * W];
    std::memcpy(x, a.at, sizeof x);
    I32 out;
    for (int i = 0; i < W; i++) out.at[i] = int(x[2 * i]) + int(x[2 * i + 1]);
    return out;
}

#endif

// The sums of four vectors, side by side.
inline void store_sums(float* p, F a, F b, F c, F d) {
#if defined(__AVX2__)
#if defined(__AVX512BW__)
    const auto half = [](F x) { return _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)); };
    const __m256 w = half(a), x = half(b), y = half(c), z = half(d);
#else
    const __m256 w = a, x = b, y = c, z = d;
#endif
    const __m256 low = _mm256_add_ps(_mm256_unpacklo_ps(w, x), _mm256_unpackhi_ps(w, x));
    const __m256 high = _mm256_add_ps(_mm256_unpacklo_ps(y, z), _mm256_unpackhi_ps(y, z));
    const __m256 all = _mm256_add_ps(_mm256_shuffle_ps(low, high, 0x44), _mm256_shuffle_ps(low, high, 0xee));
    _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#else
    p[0] = sum(a), p[1] = sum(b), p[2] = sum(c), p[3] = sum(d);
#endif
}

// The value, computed here: left alone, the compiler puts a chain of sums off until its terms fill the stack.
inline Bytes in_register(Bytes a) {
#if defined(__AVX2__)
    asm volatile("" : "+v"(a));
#endif
    return a;
}

// e^x within 2 units in the last place: Cody and Waite's reduction and a polynomial of degree 6.
// Below -87 it is 0, above 88 it is as at 88; a NaN stays one.
inline F exp(F x) {
    const F low = set1(-87.0f), high = set1(88.0f);
    F clamped = max(low, min(high, x));  // the second operand where either is a NaN
    F n = round(mul(clamped, set1(1.44269504f)));
    F r = fma(n, set1(-0.693359375f), clamped);
    r = fma(n, set1(2.12194440e-4f), r);
    F p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = add(fma(mul(r, r), p, r), set1(1.0f));
    return mul(p, pow2(n));
}

// Elements of a cache or a plain matrix, by their stored type.
struct F32 {
    using Stored = float;
    static F load(const float* p) { return FUEL_ISA::load(p); }
    static float wide(float x) { return x; }
    static float narrow(float x) { return x; }
};
struct Bf16 {
    using Stored = uint16_t;
    static F load(const uint16_t* p) { return load_bf16(p); }
    static float wide(uint16_t x) { return wide_bf16(x); }
    static uint16_t narrow(float x) { return narrow_bf16(x); }
};
struct F16 {
    using Stored = uint16_t;
    static F load(const uint16_t* p) { return load_f16(p); }
    static float wide(uint16_t x) {
        _Float16 half;
        std::memcpy(&half, &x, 2);
        return float(half);
    }
    static uint16_t narrow(float x) {
        _Float16 half = _Float16(x);
        uint16_t bits;
        std::memcpy(&bits, &half, 2);
        return bits;
    }
};

}  // namespace fuel::FUEL_ISA
