// The table of known calls: finds the plan of a call by options, dtypes and shapes.
//
// A table may be searched, cleared and changed by Python code run in between, so no function here runs Python code while
// an entry is looked at.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "binding/plans.h"

namespace gpucoll {

static const int MOST_AXES = 6;             // arrays with more axes are left to Python: `ArraySignature` has a fixed size
static const uint64_t SETS = 64, WAYS = 4;  // the table is set-associative: a search compares at most WAYS entries
static const uint64_t LAST = 32;            // durations kept of each kind of call, the same number as in Python
static const uint64_t SUMS = 5;             // calls, bytes, and seconds of own delay, waiting and moving: as in Python
static const npy_intp APART = -1;

// Return whether an object is the input of a v-variant with one array for each rank.
static bool is_blocks(PyObject* x) { return PyList_CheckExact(x) || PyTuple_CheckExact(x); }

// Call `take` on each block of a list or tuple, or on `x` itself.
template <class Take> static void for_each_array(PyObject* x, Take take) {
    if (!is_blocks(x)) return take(x);
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(x); i++) take(PySequence_Fast_GET_ITEM(x, i));
}

// Return the bytes of an array, or of all arrays of a list; 0 for other objects.
static uint64_t nbytes_of(PyObject* x) {
    uint64_t nbytes = 0;
    for_each_array(x, [&](PyObject* one) { nbytes += is_array(one) ? static_cast<uint64_t>(PyArray_NBYTES(array_of(one))) : 0; });
    return nbytes;
}

// Return the offset of an array `x` in the memory of `out`, or APART.
static npy_intp inside_of(PyObject* x, PyObject* out) {
    if (!is_array(x) || !is_array(out)) return APART;
    const std::ptrdiff_t inside = data_of(x) - data_of(out);
    return inside >= 0 && inside < PyArray_NBYTES(array_of(out)) ? inside : APART;
}

// Return whether two arrays have a byte in common.
static bool is_overlap(PyObject* x, PyObject* out) {
    const char *from = data_of(x), *to = data_of(out);
    return is_array(x) && from < to + PyArray_NBYTES(array_of(out)) && to < from + PyArray_NBYTES(array_of(x));
}

// Dtype and shape of an array, all that plans depend on beside `Entry::inside` and `symmetric`. No dtype stands for
// None.
struct ArraySignature {
    Ref<PyArray_Descr> dtype;
    int axes = 0;
    npy_intp shape[MOST_AXES] = {};

    // Return whether an `ArraySignature` can describe an object.
    static bool describes(PyObject* x) { return x == Py_None || (is_array(x) && PyArray_NDIM(array_of(x)) <= MOST_AXES); }

    static ArraySignature of(PyObject* object) {
        ArraySignature made;
        if (!is_array(object)) return made;
        PyArrayObject* array = array_of(object);
        made.dtype = Ref<PyArray_Descr>::borrow(PyArray_DESCR(array));
        made.axes = PyArray_NDIM(array);
        std::copy_n(PyArray_DIMS(array), made.axes, made.shape);
        return made;
    }

    // Return whether an object has this dtype and shape. Plans need contiguous, aligned arrays: all others are
    // left to Python.
    bool matches(PyObject* object) const {
        if (!is_array(object)) return !dtype && object == Py_None;
        PyArrayObject* array = array_of(object);
        return PyArray_DESCR(array) == dtype.get() && PyArray_NDIM(array) == axes
               && std::equal(shape, shape + axes, PyArray_DIMS(array))
               && PyArray_CHKFLAGS(array, NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED);
    }
};

// The signature of an input or a result: an array, None, or a list or tuple of arrays.
struct SideSignature {
    ArraySignature array;
    std::vector<ArraySignature> blocks;
    bool is_list = false;

    static bool describes(PyObject* x) {
        bool all = true;
        for_each_array(x, [&](PyObject* one) { all &= ArraySignature::describes(one); });
        return all;
    }

    static SideSignature of(PyObject* x) {
        SideSignature made;
        made.is_list = is_blocks(x);
        if (!made.is_list) made.array = ArraySignature::of(x);
        else for_each_array(x, [&](PyObject* one) { made.blocks.push_back(ArraySignature::of(one)); });
        return made;
    }

    bool is_none() const { return !is_list && !array.dtype; }

    bool matches(PyObject* x) const {
        if (is_blocks(x) != is_list) return false;
        if (!is_list) return array.matches(x);
        const size_t count = static_cast<size_t>(PySequence_Fast_GET_SIZE(x));
        PyObject** items = PySequence_Fast_ITEMS(x);
        return count == blocks.size()
               && std::equal(items, items + count, blocks.begin(), [](PyObject* one, const ArraySignature& kept) { return kept.matches(one); });
    }

    template <class Each> void references(Each each) {
        each(array.dtype);
        for (ArraySignature& one : blocks) each(one.dtype);
    }
};

// What a known call needs: the plan, its bytes, and the figures of calls of its kind: the number of durations noted, a
// ring of the last LAST durations, and the SUMS over all calls.
struct KnownCall {
    Ref<PlanObject> plan;
    Ref<PyArrayObject> seconds;
    double nbytes = 0;

    template <class Each> void references(Each each) {
        each(plan);
        each(seconds);
    }

    // Note the times of a call that has ended.
    void note(const CallTimes& times) const {
        const int64_t elapsed = times.ended - times.began;
        double* kept = static_cast<double*>(PyArray_DATA(seconds.get()));
        kept[1 + static_cast<uint64_t>(kept[0]) % LAST] = 1e-9 * static_cast<double>(elapsed);
        kept[0] += 1;
        double* sums = kept + 1 + LAST;
        sums[0] += 1;
        sums[1] += nbytes;
        sums[2] += 1e-9 * static_cast<double>(times.own);
        sums[3] += 1e-9 * static_cast<double>(times.waited);
        sums[4] += 1e-9 * static_cast<double>(elapsed - times.waited);
    }
};

// The options of a call: name of the collective, op, root or the counts of reduce_scatter_v, algorithm.
static const int OPTIONS = 4;

// A call to be found. `symmetric` says whether all arrays are in symmetric memory: other memory needs other plans.
struct CallKey {
    PyObject* options[OPTIONS];
    PyObject *x, *out;
    bool symmetric;
};

// An entry of the table: the key, and the call. Without a plan the entry is unused.
struct Entry {
    Ref<> options[OPTIONS];
    SideSignature x, out;
    bool allocates = false;   // the call was made without `out`
    npy_intp inside = APART;  // offset of `x` in the result (a call in place), or APART
    bool symmetric = false;
    Ref<> lengths;            // tuple of the lengths of the blocks of which the result is a list; null for an array
    std::string description;  // how the ranks describe and compare the call of `cache_renamed`; else empty
    int64_t signature = 0;
    KnownCall known;

    template <class Each> void references(Each each) {
        for (Ref<>& option : options) each(option);
        x.references(each);
        out.references(each);
        each(lengths);
        known.references(each);
    }
};

// Return whether two options are equal. Only exact strings, integers, and lists and tuples of these are compared by
// value: comparing other objects could run Python code. Kept counts are a tuple: the caller may change a list.
static bool is_same(PyObject* kept, PyObject* given) {
    if (kept == given) return true;
    if (PyUnicode_CheckExact(kept) && PyUnicode_CheckExact(given)) return PyUnicode_Compare(kept, given) == 0;
    if (PyLong_CheckExact(kept) && PyLong_CheckExact(given)) return PyObject_RichCompareBool(kept, given, Py_EQ) > 0;
    if (!PyTuple_CheckExact(kept) || !is_blocks(given)) return false;
    const Py_ssize_t count = PyTuple_GET_SIZE(kept);
    PyObject** items = PySequence_Fast_ITEMS(given);
    return count == PySequence_Fast_GET_SIZE(given) && std::equal(items, items + count, PySequence_Fast_ITEMS(kept), [](PyObject* one, PyObject* number) {
        return PyLong_CheckExact(one) && PyLong_CheckExact(number) && PyObject_RichCompareBool(number, one, Py_EQ) > 0;
    });
}

// 2^64 divided by the golden ratio: spreads close numbers over the upper bits of a hash.
static const uint64_t MIX = 0x9e3779b97f4a7c15u;

static uint64_t hash_of(PyObject* option) {
    if (PyUnicode_CheckExact(option) || PyLong_CheckExact(option)) return static_cast<uint64_t>(PyObject_Hash(option));
    if (!is_blocks(option)) return reinterpret_cast<uintptr_t>(option) >> 4;
    uint64_t hash = 0;
    for_each_array(option, [&](PyObject* one) { hash = (hash ^ (PyLong_CheckExact(one) ? hash_of(one) : 0)) * MIX; });
    return hash;
}

// The entries, in sets of WAYS.
class KnownCalls {
  public:
    // Return the entry of a call, or null.
    const Entry* find(const CallKey& key) {
        Entry* set = set_of(key);
        const Entry* found = std::find_if(set, set + WAYS, [&](const Entry& one) { return matches(one, key) && accepts(one, key.out); });
        return found == set + WAYS ? nullptr : found;
    }

    // Add an entry, in place of the call's own, of an unused one, or of the next in turn. The old entry is released
    // last, with the table in order: releasing may run Python code.
    void add(const CallKey& key, Entry made) {
        for (int i = 0; i < OPTIONS; i++) made.options[i] = Ref<>::borrow(key.options[i]);
        Entry *set = set_of(key), *place = nullptr;
        for (Entry* one = set; one < set + WAYS; one++) {
            if (matches(*one, key) && accepts(*one, key.out)) {
                place = one;
                break;
            }
            if (!one->known.plan && place == nullptr) place = one;
        }
        std::swap(*(place != nullptr ? place : set + turn++ % WAYS), made);
    }

    // Forget all calls, or those of a `name`. Each entry is emptied before its references are released, since that may
    // run Python code and search the table.
    void forget(PyObject* name = nullptr) {
        for (Entry& entry : entries)
            if (entry.known.plan && (name == nullptr || is_same(entry.options[0].get(), name))) const Entry old = std::exchange(entry, Entry());
    }

    template <class Each> void references(Each each) {
        for (Entry& entry : entries) entry.references(each);
    }

  private:
    // Return the set for a call. `out` is not hashed: for some calls any `out` fits (`accepts`).
    Entry* set_of(const CallKey& key) {
        uint64_t hash = 0;
        for_each_array(key.x, [&](PyObject* one) {
            for (int axis = 0; is_array(one) && axis < PyArray_NDIM(array_of(one)); axis++)
                hash = (hash ^ static_cast<uint64_t>(PyArray_DIM(array_of(one), axis))) * MIX;
            if (is_array(one)) hash = (hash ^ (reinterpret_cast<uintptr_t>(PyArray_DESCR(array_of(one))) >> 4)) * MIX;
        });
        for (PyObject* option : key.options) hash = (hash ^ hash_of(option)) * MIX;
        return entries + (hash >> 32) % SETS * WAYS;
    }

    // Return whether an entry fits a call, but for the shape of `out` (see `accepts`).
    static bool matches(const Entry& entry, const CallKey& key) {
        return entry.known.plan && is_same(entry.options[0].get(), key.options[0])
               && is_same(entry.options[1].get(), key.options[1]) && is_same(entry.options[2].get(), key.options[2])
               && is_same(entry.options[3].get(), key.options[3]) && entry.x.matches(key.x)
               && entry.inside == inside_of(key.x, key.out) && entry.symmetric == key.symmetric;
    }

    // Return whether an entry fits the `out` of a call. An allocated result has a fixed shape; a given `out` may have
    // another shape of the same size.
    static bool accepts(const Entry& entry, PyObject* out) {
        if (entry.out.is_none() || entry.known.plan->state.plan.has(OVERWRITES)) return true;
        return out == Py_None ? entry.allocates : entry.out.matches(out);
    }

    uint64_t turn = 0;  // next way of a full set to be overwritten
    Entry entries[SETS * WAYS];
};

}  // namespace gpucoll
