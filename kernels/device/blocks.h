// Block-scaled formats: each block of elements shares a scale, and an element takes 8 or 4 bits.
//
// A value is element * scale. Elements are rounded to the nearest, ties to even, and never beyond the largest element.
// Source of the mx formats: OCP Microscaling Formats (MX) 1.0, part 6.3; of nvfp4: NVIDIA, arXiv 2509.25149,
// appendix C; of int8: Dettmers et al., arXiv 2110.02861.
//
// A format has
//     Scale                      the stored form of a scale
//     BLOCK, PER_BYTE, LARGEST   elements of a block (0: any number), elements in a byte, the largest element
//     code(number), value(code)  the element nearest to `number`, at most LARGEST in magnitude; and back
//     scale(most, row)           the scale of a block with this largest magnitude
//     factor(scale, row)         the value of a scale: NaN for a block with a NaN or an infinity
//     row(most)                  the second scale of nvfp4, for a whole row; 1 in other formats
#pragma once

#include "device/functions.h"
#include "device/number.h"

// float4_e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. Every code is a number, but SmallFloat takes the codes
// of the largest exponent for infinities and NaN. A third bit of exponent, 0 in every number, keeps these codes apart;
// `Fours` moves the sign to its place.
typedef SmallFloat<u8, 3, 1, false, 1> Float4E2m1;

// Round to the nearest integer, ties to even, for |x| <= 2^22 (float). At 1.5 * 2^23 neighbouring floats differ by 1,
// so the addition rounds. The double uses 1.5 * 2^52.
GC_DEV float whole(float x) { return x + 12582912.0f - 12582912.0f; }
GC_DEV double whole(double x) { return x + 6755399441055744.0 - 6755399441055744.0; }

// A double keeps an odd last bit, so that the next rounding, to fewer bits, equals rounding the double itself.
GC_DEV float to_float(float x) { return x; }
GC_DEV float to_float(double x) { return odd_float(x); }

// Limit x to -most .. most; NaN becomes -most.
template <class W> GC_DEV W limited(W x, W most) { return x > most ? most : x > -most ? x : -most; }

template <class Small, i32 LARGEST_> struct SmallElements {
    static constexpr u32 PER_BYTE = 1;
    static constexpr i32 LARGEST = LARGEST_;

    template <class W> static GC_DEV u8 code(W number) {
        Small stored;
        down(stored, to_float(number));
        return stored.bits;
    }
    static GC_DEV float value(u8 code) {
        Small stored;
        stored.bits = code;
        return up(stored);
    }
};

struct Fours {
    static constexpr u32 PER_BYTE = 2;
    static constexpr i32 LARGEST = 6;

    template <class W> static GC_DEV u8 code(W number) {
        const u32 bits = down_by_bits<Float4E2m1>(to_float(number)).bits;
        return u8((bits & 7) | (bits >> 1 & 8));
    }
    // The digits of the constant are twice the values. Bits of a float would do as well, but 0.5 would pass through a
    // subnormal number, which costs a CPU 150 cycles.
    static GC_DEV float value(u8 code) {
        const i32 twice = i32(0xC8643210 >> (code & 7) * 4 & 15);
        return float_of(bits_of(float(twice) * 0.5f) | u32(code & 8) << 28);
    }
};

// Scales of the mx formats: a power of two, stored as its exponent plus 127; 255 is NaN. TOP is the exponent of the
// largest element. So the largest magnitude of a block gets the exponent of the largest element.
template <i32 TOP, u32 BLOCK_> struct PowersOfTwo {
    typedef u8 Scale;
    static constexpr u32 BLOCK = BLOCK_;

    static GC_DEV i32 exponent_of(float x) { return i32(bits_of(x) >> 23); }
    static GC_DEV i32 exponent_of(double x) { return i32(bits_of(x) >> 52) - 1023 + 127; }

    template <class W> static GC_DEV u8 scale(W most, float) {
        // Subnormal numbers have the exponent 0: their scale is the smallest in any case.
        const i32 exponent = exponent_of(most) - TOP;
        const bool is_finite = most - most == W(0);
        return u8(!is_finite || exponent > 254 ? 255 : exponent > 0 ? exponent : 0);
    }
    static GC_DEV float factor(u8 scale, float) {
        const u32 power = scale == 0 ? 0x00400000 : u32(scale) << 23;  // 2^-127 is subnormal
        return float_of(scale == 255 ? 0x7FC00000 : power);
    }
    template <class W> static GC_DEV float row(W) { return 1; }
};

struct Mxfp8E4m3 : SmallElements<Float8E4m3fn, 448>, PowersOfTwo<8, 32> {};
struct Mxfp8E5m2 : SmallElements<Float8E5m2, 57344>, PowersOfTwo<15, 32> {};
struct Mxfp4 : Fours, PowersOfTwo<2, 32> {};

struct Nvfp4 : Fours {
    typedef u8 Scale;
    typedef SmallElements<Float8E4m3fn, 448> Scales;
    static constexpr u32 BLOCK = 16;

    // The smallest normal float at least, so that the quotient below is exact to 24 bits.
    template <class W> static GC_DEV float row(W most) { return maximum(float(most / W(2688)), float_of(0x00800000)); }
    template <class W> static GC_DEV u8 scale(W most, float row) {
        const W number = most / W(6) / W(row);
        return Scales::code(number > W(448) ? W(448) : number > W(0) ? number : W(0));
    }
    static GC_DEV float factor(u8 scale, float row) { return Scales::value(scale) * row; }
};

struct Int8 {
    typedef float Scale;
    static constexpr u32 BLOCK = 0, PER_BYTE = 1;
    static constexpr i32 LARGEST = 127;

    template <class W> static GC_DEV u8 code(W number) { return u8(i32(whole(number))); }
    static GC_DEV float value(u8 code) { return float(i8(code)); }
    template <class W> static GC_DEV float scale(W most, float) { return float(most / 127); }
    static GC_DEV float factor(float scale, float) { return scale - scale == 0 ? scale : float_of(0x7FC00000); }
    template <class W> static GC_DEV float row(W) { return 1; }
};

// The divisor for a scale of this value: a scale of 0 or NaN divides nothing.
template <class W> GC_DEV W divisor_of(W factor) { return factor > 0 ? factor : W(1); }

template <class F, class W> GC_DEV u8 element_of(W number, W divisor) {
    return F::code(limited(number / divisor, W(F::LARGEST)));
}
