// pack: strided units become contiguous units, in C order. unpack: contiguous units go to strided places.
//
// All addresses and strides are multiples of the unit's size. Strides are in bytes and may be negative; in pack a
// stride may also be zero.
#include "device/walk.h"

constexpr u32 MOST_AXES = 8;

struct PackArguments {
    const void* src;
    void* dst;
    u64 count;
    u32 dims;
    i64 shape[MOST_AXES], strides[MOST_AXES];  // the first `dims` entries are used, at least 1
};

// The offset of a unit in the strided array. `Index` is an integer type wide enough for the number of units.
template <class Index> struct Strided {
    const PackArguments& a;

    GC_DEV u64 operator()(u64 unit) const {
        Index rest = Index(unit);
        i64 offset = 0;
        GC_ROLLED
        for (u32 axis = a.dims - 1; axis > 0; --axis) {
            const Index length = Index(a.shape[axis]), next = rest / length;
            offset += i64(rest - next * length) * a.strides[axis];
            rest = next;
        }
        return u64(offset + i64(rest) * a.strides[0]);
    }
};

template <class Unit, u32 AT_ONCE, class From, class To>
GC_DEV void move_batch(const PackArguments& a, const Batch<AT_ONCE>& batch, const From& from, const To& to) {
    Unit units[AT_ONCE];
    batch.read(units, a.src, from);
    batch.write(a.dst, units, to);
}

template <class Unit, class From, class To>
GC_DEV void move_units(const PackArguments& a, const From& from, const To& to) {
    for_batches<4>(a.count, [&](const auto& batch) { move_batch<Unit>(a, batch, from, to); });
}

template <class Unit> GC_DEV void pack(const PackArguments& a) {
    const Evenly packed = {0, sizeof(Unit)};
    // Index by 32 bits if possible: divisions of 64 bits cost several times as much.
    if (a.count >> 32 == 0)
        move_units<Unit>(a, Strided<u32>{a}, packed);
    else
        move_units<Unit>(a, Strided<u64>{a}, packed);
}

template <class Unit> GC_DEV void unpack(const PackArguments& a) {
    const Evenly packed = {0, sizeof(Unit)};
    if (a.count >> 32 == 0)
        move_units<Unit>(a, packed, Strided<u32>{a});
    else
        move_units<Unit>(a, packed, Strided<u64>{a});
}
