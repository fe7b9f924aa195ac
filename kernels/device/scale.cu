// dst = src / factor, src * factor, or the truth value of src; formed in the wide type and rounded once.
#include "device/functions.h"
#include "device/number.h"
#include "device/walk.h"

struct ScaleArguments {
    const void* src;
    void* dst;
    u64 count;
    alignas(16) unsigned char factor[16];  // a value of the wide type
};

struct Divide {
    template <class W> static GC_DEV W of(W x, W factor) { return divide(x, factor); }
};
struct Multiply {
    template <class W> static GC_DEV W of(W x, W factor) { return multiply(x, factor); }
};
// NaN is true.
struct Truth {
    template <class W> static GC_DEV W of(W x, W) { return W(x != W(0)); }
};

template <class T, class What, class Unit, u32 AT_ONCE, class Place>
GC_DEV void scale_batch(const ScaleArguments& a, Wide<T> factor, const Batch<AT_ONCE>& batch, const Place& place) {
    Unit units[AT_ONCE];
    batch.read(units, a.src, place);
    GC_UNROLL
    for (u32 i = 0; i < AT_ONCE; ++i) {
        Wide<T> wide[ITEMS<T, Unit>];
        widen<T>(wide, units[i]);
        GC_UNROLL
        for (u32 j = 0; j < ITEMS<T, Unit>; ++j) wide[j] = What::of(wide[j], factor);
        units[i] = narrow<T, Unit>(wide);
    }
    batch.write(a.dst, units, place);
}

template <class T, class What, class Unit, class Place>
GC_DEV void scale_units(const ScaleArguments& a, Wide<T> factor, u64 count, const Place& place) {
    constexpr u32 AT_ONCE = sizeof(T) == 1 ? 2 : 4;
    for_batches<AT_ONCE>(count, [&](const auto& batch) { scale_batch<T, What, Unit>(a, factor, batch, place); });
}

template <class T, class What> GC_DEV void scale(const ScaleArguments& a) {
    const Wide<T> factor = *reinterpret_cast<const Wide<T>*>(a.factor);
    const Layout layout = layout_of<T>(address_of(a.dst), address_of(a.src) ^ address_of(a.dst), a.count);
    scale_units<T, What, Word>(a, factor, layout.words, words_of<T>(layout));
    scale_units<T, What, T>(a, factor, layout.edges, edges_of<T>(layout));
}
