// dst = src, elements of type T. All addresses are multiples of T's size.
#include "device/walk.h"

struct CopyArguments {
    const void* src;
    void* dst;
    u64 count;
};

template <class Unit, u32 AT_ONCE, class Place>
GC_DEV void copy_batch(const CopyArguments& a, const Batch<AT_ONCE>& batch, const Place& place) {
    Unit units[AT_ONCE];
    batch.read(units, a.src, place);
    batch.write(a.dst, units, place);
}

template <class Unit, class Place> GC_DEV void copy_units(const CopyArguments& a, u64 count, const Place& place) {
    for_batches<4>(count, [&](const auto& batch) { copy_batch<Unit>(a, batch, place); });
}

template <class T> GC_DEV void copy(const CopyArguments& a) {
    const Layout layout = layout_of<T>(address_of(a.dst), address_of(a.src) ^ address_of(a.dst), a.count);
    copy_units<Word>(a, layout.words, words_of<T>(layout));
    copy_units<T>(a, layout.edges, edges_of<T>(layout));
}
