// Error feedback: x plus the part that the last call lost by rounding, formed in the wide type and rounded once.
//
// The lost part of a NaN or an infinity is 0; otherwise the feedback would repeat the NaN in every later call.
#pragma once

#include "device/functions.h"
#include "device/number.h"
#include "device/walk.h"

// x - x is 0 for every finite x, and NaN otherwise.
template <class W> GC_DEV W finite_or_zero(W x) { return x - x == W(0) ? x : W(0); }

// The unsigned type of BYTES bytes, for accesses to several narrow elements at once.
template <u32 BYTES> struct Bits;
template <> struct Bits<1> { typedef u8 Type; };
template <> struct Bits<2> { typedef u16 Type; };
template <> struct Bits<4> { typedef u32 Type; };
template <> struct Bits<8> { typedef u64 Type; };
template <> struct Bits<16> { typedef Word Type; };

// Return x + before, rounded to S.
template <class S> GC_DEV Wide<S> sum_of(Wide<S> x, Wide<S> before) {
    S stored;
    down(stored, x + before);
    return up(stored);
}

// Load x and the previous error `lost`, and set `sum` to the sums rounded to S. A null `lost` means no error.
template <class S, class Unit> GC_DEV void add_lost(Wide<S> (&sum)[ITEMS<S, Unit>], u64 x, u64 lost) {
    widen<S>(sum, load<Unit>(x));
    if (lost == 0) return;
    Wide<S> before[ITEMS<S, Unit>];
    widen<S>(before, load<Unit>(lost));
    GC_UNROLL
    for (u32 i = 0; i < ITEMS<S, Unit>; ++i) sum[i] = sum_of<S>(sum[i], before[i]);
}
