// The dtypes: how each is stored, and the wide type that it is computed in.
//
// up() gives the wide value of a stored one; down() rounds a wide value to the nearest stored one, ties to even.
// What is too large becomes infinity, or NaN where the format has no infinity: nothing saturates. A NaN stays a NaN.
#pragma once

#include "dialect.h"

#if defined(__CUDA_ARCH__)
#define GC_ARCH __CUDA_ARCH__
#else
#define GC_ARCH 0
#endif

// A truth value as NumPy stores it; any byte but zero is true.
struct Bool {
    u8 bits;
};

// A float of fewer than 32 bits. In a format without infinities the last code alone is no number.
template <class Code, u32 EXPONENT, u32 MANTISSA, bool INFINITIES, u32 EXCESS = (1u << (EXPONENT - 1)) - 1>
struct SmallFloat {
    Code bits;

    static constexpr u32 SHIFT = 23 - MANTISSA;
    static constexpr u32 BIAS = EXCESS;
    static constexpr u32 SIGN = 1u << (EXPONENT + MANTISSA);  // beyond the code where there is none
    static constexpr u32 TOO_LARGE = INFINITIES ? SIGN - (1u << MANTISSA) : SIGN - 1;
    static constexpr u32 NOT_A_NUMBER = SIGN - 1;
    // The floats with the bits of the smallest normal number, and of 2^23 times the smallest number there is.
    static constexpr u32 NORMAL = (128 - BIAS) << 23;
    static constexpr u32 STEP = (151 - BIAS - MANTISSA) << 23;
};

typedef SmallFloat<u16, 5, 10, true> Float16;
typedef SmallFloat<u16, 8, 7, true> Bfloat16;
typedef SmallFloat<u8, 4, 3, false> Float8E4m3fn;
typedef SmallFloat<u8, 5, 2, true> Float8E5m2;
// Adam's moments, of which the second has no sign: 2^-54 to 2^17, and 2^-63 to 2^9. Only kept, never combined.
typedef SmallFloat<u16, 6, 9, true, 46> Mean16;
typedef SmallFloat<u16, 6, 10, true, 54> Square16;

template <class Real> struct Complex {
    Real re, im;

    Complex() = default;
    GC_DEV Complex(Real re, Real im = 0) : re(re), im(im) {}
};

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

// By arithmetic on the bits: everywhere on a CPU, on a GPU where it has no instruction for the format.

// The first where `which`, else the second.
GC_DEV u32 either(bool which, u32 first, u32 second) { return second ^ ((first ^ second) & (0 - u32(which))); }

template <class Small> GC_DEV float up_by_bits(Small x) {
    const u32 magnitude = x.bits & (Small::SIGN - 1);
    // The product, which is exact, puts the bias of the exponent right, and serves subnormal numbers as well.
    u32 bits = bits_of(float_of(magnitude << Small::SHIFT) * float_of((254 - Small::BIAS) << 23));
    bits |= either(i32(magnitude) >= i32(Small::TOO_LARGE), 0x7F800000, 0);
    return float_of(bits | either((x.bits & Small::SIGN) != 0, 0x80000000, 0));
}

// The code of a float that is not negative. Without branches, and by signed comparisons, so that compilers vectorise it.
template <class Small> GC_DEV u32 rounded(u32 magnitude) {
    // A subnormal number is rounded by an addition whose sum has the same step.
    const u32 small = bits_of(float_of(magnitude) + float_of(Small::STEP)) - Small::STEP;
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

// One value at a time.

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

// The upper half of a float16 is a float8_e5m2.
GC_DEV float up(Float8E5m2 x) { return up(Float16{u16(x.bits << 8)}); }

#endif

#if GC_ARCH >= 800

GC_DEV void down(Bfloat16& stored, float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(stored.bits) : "f"(x)); }

#endif

#if GC_ARCH >= 890

// The instructions for float8 take two values, and saturate.

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

// Half a step above the largest number a tie goes down to it in e4m3fn, whose largest code is even, and up in e5m2.
GC_DEV bool is_too_large(Float8E4m3fn, float x) { return fabsf(x) > 464; }
GC_DEV bool is_too_large(Float8E5m2, float x) { return fabsf(x) >= 61440; }

template <class Small> GC_DEV u32 down_pair(float low, float high) {
    // In both formats the code after the largest number is what should have become of what is too large.
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

// All values of what a thread reads or writes at once: one element, or a word of several.

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
