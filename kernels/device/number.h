// The dtypes: the stored form of each, and the wide type used for computing.
//
// up() converts a stored value to the wide type. down() rounds a wide value to the nearest stored value, ties to
// even. Values beyond the range become infinity, or NaN in formats without infinity: nothing saturates. A NaN stays a
// NaN.
#pragma once

#include "device/dialect.h"

// 0 on a CPU: conditions can then compare GC_ARCH everywhere.
#if defined(__CUDA_ARCH__)
#define GC_ARCH __CUDA_ARCH__
#else
#define GC_ARCH 0
#endif

// A truth value in NumPy's storage: zero is false, any other byte true.
struct Bool {
    u8 bits;
};

// A float of fewer than 32 bits, by the bits of exponent and mantissa. In formats without infinities the last code is
// NaN.
template <class Code, u32 EXPONENT, u32 MANTISSA, bool INFINITIES, u32 EXCESS = (1u << (EXPONENT - 1)) - 1>
struct SmallFloat {
    Code bits;

    static constexpr u32 SHIFT = 23 - MANTISSA;  // a float has 23 bits of mantissa
    static constexpr u32 BIAS = EXCESS;
    static constexpr u32 SIGN = 1u << (EXPONENT + MANTISSA);  // a bit outside `Code` in formats without a sign
    // The code of infinity; without infinities the NaN.
    static constexpr u32 TOO_LARGE = INFINITIES ? SIGN - (1u << MANTISSA) : SIGN - 1;
    static constexpr u32 NOT_A_NUMBER = SIGN - 1;
    // As bits of a float: the smallest normal number of this format, and 2^23 times the smallest subnormal number.
    static constexpr u32 NORMAL = (128 - BIAS) << 23;
    static constexpr u32 STEP = (151 - BIAS - MANTISSA) << 23;
};

typedef SmallFloat<u16, 5, 10, true> Float16;
typedef SmallFloat<u16, 8, 7, true> Bfloat16;
typedef SmallFloat<u8, 4, 3, false> Float8E4m3fn;
typedef SmallFloat<u8, 5, 2, true> Float8E5m2;

template <class Real> struct Complex {
    Real re, im;

    Complex() = default;
    GC_DEV Complex(Real re, Real im = 0) : re(re), im(im) {}
};

// The wide type of a dtype: float for small floats, the dtype itself otherwise.
template <class T> struct Number {
    typedef T Wide;
};
template <> struct Number<Bool> {
    typedef bool Wide;
};
template <class Code, u32 E, u32 M, bool I, u32 X> struct Number<SmallFloat<Code, E, M, I, X>> {
    typedef float Wide;
};
template <class T> using Wide = typename Number<T>::Wide;

// Conversions by arithmetic on the bits: always on a CPU; on a GPU for formats without an instruction.

// Return `which ? first : second` without a branch, so that loops vectorise.
GC_DEV u32 either(bool which, u32 first, u32 second) { return second ^ ((first ^ second) & (0 - u32(which))); }

template <class Small> GC_DEV float up_by_bits(Small x) {
    const u32 magnitude = x.bits & (Small::SIGN - 1);
    // Multiplying by a power of two corrects the exponent's bias. The product is exact, for subnormal numbers, too.
    u32 bits = bits_of(float_of(magnitude << Small::SHIFT) * float_of((254 - Small::BIAS) << 23));
    bits |= either(i32(magnitude) >= i32(Small::TOO_LARGE), 0x7F800000, 0);
    return float_of(bits | either((x.bits & Small::SIGN) != 0, 0x80000000, 0));
}

// Return the code of a non-negative float. No branches, and signed comparisons (SSE has no unsigned comparison), so
// that loops vectorise.
template <class Small> GC_DEV u32 rounded(u32 magnitude) {
    // Subnormal: adding STEP aligns the number so that the last bit of the sum is one subnormal step. The addition
    // rounds.
    const u32 small = bits_of(float_of(magnitude) + float_of(Small::STEP)) - Small::STEP;
    // Normal: add just below half a step, plus 1 if the last kept bit is odd; cutting off then rounds ties to even. A
    // carry into the exponent gives the right code, too.
    const u32 half = (1u << (Small::SHIFT - 1)) - 1 + (magnitude >> Small::SHIFT & 1);
    const u32 code = (magnitude - ((127 - Small::BIAS) << 23) + half) >> Small::SHIFT;
    const u32 normal = either(i32(code) < i32(Small::TOO_LARGE), code, Small::TOO_LARGE);
    return either(i32(magnitude) < i32(Small::NORMAL), small, normal);
}

template <class Small> GC_DEV Small down_by_bits(float x) {
    const u32 magnitude = bits_of(x) & 0x7FFFFFFF;
    const u32 code = either(i32(magnitude) > 0x7F800000, Small::NOT_A_NUMBER, rounded<Small>(magnitude));
    Small small;
    small.bits = code | (Small::SIGN & (0 - (bits_of(x) >> 31)));
    return small;
}

// Conversions of a single value.

template <class T> GC_DEV T up(T x) { return x; }
template <class T> GC_DEV void down(T& stored, T x) { stored = x; }

GC_DEV bool up(Bool x) { return x.bits != 0; }
GC_DEV void down(Bool& stored, bool x) { stored.bits = x; }

template <class Code, u32 E, u32 M, bool I, u32 X> GC_DEV float up(SmallFloat<Code, E, M, I, X> x) {
    return up_by_bits(x);
}
template <class Code, u32 E, u32 M, bool I, u32 X> GC_DEV void down(SmallFloat<Code, E, M, I, X>& stored, float x) {
    stored = down_by_bits<SmallFloat<Code, E, M, I, X>>(x);
}

#if GC_ARCH > 0

GC_DEV float up(Float16 x) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
    return wide;
}
GC_DEV void down(Float16& stored, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(stored.bits) : "f"(x)); }

GC_DEV float up(Bfloat16 x) { return float_of(u32(x.bits) << 16); }

// float8_e5m2 is the upper half of a float16.
GC_DEV float up(Float8E5m2 x) { return up(Float16{u16(x.bits << 8)}); }

#endif

#if GC_ARCH >= 800

GC_DEV void down(Bfloat16& stored, float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(stored.bits) : "f"(x)); }

#endif

#if GC_ARCH >= 890

// The instructions for float8 convert two values at once, and saturate: `down_pair` corrects the saturation.

GC_DEV void up_pair(float& low, float& high, u16 pair) {
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    low = up(Float16{u16(halves)});
    high = up(Float16{u16(halves >> 16)});
}

GC_DEV u32 saturated_pair(Float8E4m3fn, float low, float high) {
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}
GC_DEV u32 saturated_pair(Float8E5m2, float low, float high) {
    u16 pair;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

// Return whether x rounds beyond the largest number. A tie, half a step above, goes to the even code: in e4m3fn down
// to the largest number, in e5m2 up. Hence > and >=.
GC_DEV bool is_too_large(Float8E4m3fn, float x) { return fabsf(x) > 464; }
GC_DEV bool is_too_large(Float8E5m2, float x) { return fabsf(x) >= 61440; }

template <class Small> GC_DEV u32 down_pair(float low, float high) {
    // In both formats the code after the largest number is the right one for larger values: NaN or infinity. So add
    // 1.
    return saturated_pair(Small(), low, high) + is_too_large(Small(), low) + (is_too_large(Small(), high) << 8);
}

GC_DEV float up(Float8E4m3fn x) {
    float low, high;
    up_pair(low, high, x.bits);
    return low;
}
GC_DEV void down(Float8E4m3fn& stored, float x) { stored.bits = u8(down_pair<Float8E4m3fn>(x, 0)); }
GC_DEV void down(Float8E5m2& stored, float x) { stored.bits = u8(down_pair<Float8E5m2>(x, 0)); }

#endif

// Conversions of a unit, the bytes read or written at once by a thread: an element, or a word of several elements.

template <class T, class Unit> constexpr u32 ITEMS = sizeof(Unit) / sizeof(T);

template <class T, class Unit> union Items {
    Unit unit;
    T item[ITEMS<T, Unit>];
};

template <class T, class Unit> GC_DEV void widen(Wide<T> (&wide)[ITEMS<T, Unit>], Unit unit) {
    Items<T, Unit> items;
    items.unit = unit;
    GC_UNROLL
    for (u32 i = 0; i < ITEMS<T, Unit>; ++i) wide[i] = up(items.item[i]);
}

template <class T, class Unit> GC_DEV Unit narrow(const Wide<T> (&wide)[ITEMS<T, Unit>]) {
    Items<T, Unit> items;
    GC_UNROLL
    for (u32 i = 0; i < ITEMS<T, Unit>; ++i) down(items.item[i], wide[i]);
    return items.unit;
}

#if GC_ARCH >= 890

// Words of float8 by pairs: half as many instructions as single conversions.
template <> GC_DEV void widen<Float8E4m3fn, Word>(float (&wide)[16], Word word) {
    const u32 lanes[4] = {word.x, word.y, word.z, word.w};
    GC_UNROLL
    for (u32 i = 0; i < 16; i += 2) up_pair(wide[i], wide[i + 1], u16(lanes[i / 4] >> (i % 4 * 8)));
}

template <class Small> GC_DEV Word narrow_pairs(const float (&wide)[16]) {
    u32 lanes[4];
    GC_UNROLL
    for (u32 i = 0; i < 4; ++i)
        lanes[i] = down_pair<Small>(wide[4 * i], wide[4 * i + 1]) |
                   down_pair<Small>(wide[4 * i + 2], wide[4 * i + 3]) << 16;
    return {lanes[0], lanes[1], lanes[2], lanes[3]};
}
template <> GC_DEV Word narrow<Float8E4m3fn, Word>(const float (&wide)[16]) { return narrow_pairs<Float8E4m3fn>(wide); }
template <> GC_DEV Word narrow<Float8E5m2, Word>(const float (&wide)[16]) { return narrow_pairs<Float8E5m2>(wide); }

#endif
