// Descriptions of calls in memory mapped by all ranks of a node. Ranks compare calls on devices by these descriptions,
// and calls on the host made by messages; gpucoll/health/mapped.py makes and exchanges the segments.
//
// Each rank has a segment: the number of its last call, and two slots used in turn. A slot holds the description of a
// call, and the time at which the rank came to the call. It may also hold stamps of earlier calls on a GPU, because the
// GPU comes to a call later than the host. A rank overwrites a slot two calls later. By then all ranks have published
// the call in between, and have judged the call in the slot before that.
#pragma once
#include <atomic>
#include <cstring>
#include <ctime>
#include <vector>

#include "binding/owners.h"

namespace gpucoll {

static const size_t FIRST_SLOT = 128;  // offset of the first slot: the head has cache lines of its own

// When the GPU of a rank came to two calls: the number of a call, and nanoseconds since 1970. Number 0 is no call. A call
// has one stamp; with room for two, the stamps that a rank has not sent yet become fewer.
struct Stamps {
    long long number, time, next_number, next_time;
};

// The head of a segment. Python writes the token, and identifies the segment by it.
struct DescriptionHead {
    std::atomic<int64_t> number;  // of the rank's last call
    int64_t token;
    int64_t arrived[2];           // of each slot: nanoseconds since 1970, by the rank's clock
    Stamps stamps[2];             // of each slot
};
static_assert(sizeof(DescriptionHead) <= FIRST_SLOT, "the head ends before the first slot");

// The segments of all ranks, as one of the ranks sees them.
struct Descriptions {
    Ref<> segments;             // the arrays, which keep the memory mapped
    std::vector<char*> starts;  // by rank
    size_t rank = 0, nbytes = 0;

    template <class Each> void references(Each each) { each(segments); }
    void forget() {}  // arrays of bytes are part of no cycle

    DescriptionHead& head(size_t of) const { return *reinterpret_cast<DescriptionHead*>(starts[of]); }
    char* text(size_t of, int64_t number) const { return starts[of] + FIRST_SLOT + static_cast<size_t>(number & 1) * nbytes; }

    // Return whether a rank has come to a call. Acquire: the description of the call can be read afterwards.
    bool has_come(size_t of, int64_t number) const { return head(of).number.load(std::memory_order_acquire) >= number; }

    int64_t own_number() const { return head(rank).number.load(std::memory_order_relaxed); }

    // Show all ranks the description of this rank's call, and stamps.
    void publish(int64_t number, const char* row, const Stamps& stamps) {
        timespec time;
        clock_gettime(CLOCK_REALTIME, &time);
        std::memcpy(text(rank, number), row, nbytes);
        head(rank).arrived[number & 1] = static_cast<int64_t>(time.tv_sec) * 1000000000 + time.tv_nsec;
        head(rank).stamps[number & 1] = stamps;
        // Release: a rank that sees the number also sees the description and the stamps.
        head(rank).number.store(number, std::memory_order_release);
    }

    // Return whether all ranks are known to have come to a call with one description.
    bool agree(int64_t number) const {
        for (size_t other = 0; other < starts.size(); other++)
            if (!has_come(other, number) || std::memcmp(text(other, number), text(rank, number), nbytes) != 0) return false;
        return true;
    }
};

// The stamps shown with a call, a list of four numbers by rank; None if no rank has shown any.
static Ref<> stamps_of(const Descriptions& self, int64_t call) {
    const auto of = [&](size_t other) -> const Stamps& { return self.head(other).stamps[call & 1]; };
    bool any = false;
    for (size_t other = 0; other < self.starts.size(); other++) any = any || of(other).number != 0;
    if (!any) return none();
    const Ref<> found = checked(PyList_New(0));
    for (size_t other = 0; other < self.starts.size(); other++) {
        const Stamps& one = of(other);
        const Ref<> numbers = checked(Py_BuildValue("LLLL", one.number, one.time, one.next_number, one.next_time));
        check(PyList_Append(found.get(), numbers.get()) == 0);
    }
    return found;
}

// Read the arguments of `publish` and `advance`, and return the bytes of the description.
static const char* read_description(const Descriptions& self, PyObject* given, long long& number, Stamps& stamps) {
    const char* row;
    Py_ssize_t length;
    check(PyArg_ParseTuple(given, "Ly#(LLLL)", &number, &row, &length, &stamps.number, &stamps.time,
                           &stamps.next_number, &stamps.next_time));
    if (static_cast<size_t>(length) != self.nbytes) raise(PyExc_ValueError, "a description has %zu bytes", self.nbytes);
    return row;
}

// publish(number, row, stamps): show all ranks the description of this rank's call, and stamps: four numbers.
static Ref<> publish(Descriptions& self, PyObject* given) {
    long long number;
    Stamps stamps;
    const char* row = read_description(self, given, number, stamps);
    self.publish(number, row, stamps);
    return none();
}

// advance(number, row, stamps): publish call `number` + 1 if all ranks have come to call `number` with one description.
// Return this rank's delay at call `number` behind the first rank, its lead before the last rank, in nanoseconds, and the
// stamps shown with call `number`. Return None if call `number` is not known to agree, or is not this rank's last call;
// nothing is published then.
static Ref<> advance(Descriptions& self, PyObject* given) {
    long long number;
    Stamps stamps;
    const char* row = read_description(self, given, number, stamps);
    if (self.own_number() != number || !self.agree(number)) return none();
    const int64_t mine = self.head(self.rank).arrived[number & 1];
    int64_t first = mine, last = mine;
    for (size_t other = 0; other < self.starts.size(); other++) {
        first = std::min(first, self.head(other).arrived[number & 1]);
        last = std::max(last, self.head(other).arrived[number & 1]);
    }
    // Before this rank publishes: then no rank can overwrite its slot of call `number`.
    const Ref<> shown = stamps_of(self, number);
    self.publish(number + 1, row, stamps);
    return checked(Py_BuildValue("LLO", static_cast<long long>(mine - first), static_cast<long long>(last - mine),
                                 shown.get()));
}

// missing(number): return the ranks that have not come to a call, as a frozenset.
static Ref<> missing(Descriptions& self, PyObject* given) {
    const long long wanted = PyLong_AsLongLong(given);
    check_error();
    const Ref<> found = checked(PyFrozenSet_New(nullptr));
    for (size_t other = 0; other < self.starts.size(); other++)
        if (!self.has_come(other, wanted)) check(PySet_Add(found.get(), number(static_cast<long long>(other)).get()) == 0);
    return found;
}

// arrivals(number): return when each rank came to a call, once all ranks have published the call.
static Ref<> arrivals(Descriptions& self, PyObject* given) {
    const long long wanted = PyLong_AsLongLong(given);
    check_error();
    const Ref<> found = checked(PyList_New(0));
    for (size_t other = 0; other < self.starts.size(); other++)
        check(PyList_Append(found.get(), number(self.head(other).arrived[wanted & 1]).get()) == 0);
    return found;
}

// stamps(number): return the stamps shown with a call, once all ranks have published the call; None without any.
static Ref<> stamps(Descriptions& self, PyObject* given) {
    const long long wanted = PyLong_AsLongLong(given);
    check_error();
    return stamps_of(self, wanted);
}

// The number of this rank's last published call.
static Ref<> last_number(Descriptions& self) { return number(self.own_number()); }

// Descriptions(segments, rank, nbytes): the arrays are by rank, and each slot has `nbytes`.
static Ref<> make_descriptions(PyObject* given) {
    PyObject* segments;
    unsigned long rank;
    unsigned long long nbytes;
    check(PyArg_ParseTuple(given, "O!kK", &PyList_Type, &segments, &rank, &nbytes));
    const auto made = make_object<Descriptions>();
    Descriptions& self = made->state;
    self.segments = checked(PyList_AsTuple(segments));
    self.rank = rank;
    self.nbytes = nbytes;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self.segments.get()); i++) {
        PyObject* one = PyTuple_GET_ITEM(self.segments.get(), i);
        if (!is_array(one) || static_cast<uint64_t>(PyArray_NBYTES(array_of(one))) < FIRST_SLOT + 2 * nbytes)
            raise(PyExc_ValueError, "a segment has room for two descriptions");
        self.starts.push_back(data_of(one));
    }
    if (rank >= self.starts.size()) raise(PyExc_ValueError, "no rank %lu", rank);
    return Ref<>::borrow(made.get());
}

static PyObject* new_descriptions(PyTypeObject*, PyObject* given, PyObject*) {
    return bordered([&] { return make_descriptions(given); });
}

static PyMethodDef description_methods[] = {{"advance", Method<advance>::call, METH_VARARGS, nullptr},
                                            {"arrivals", Method<arrivals>::call, METH_O, nullptr},
                                            {"missing", Method<missing>::call, METH_O, nullptr},
                                            {"publish", Method<publish>::call, METH_VARARGS, nullptr},
                                            {"stamps", Method<stamps>::call, METH_O, nullptr},
                                            {nullptr, nullptr, 0, nullptr}};
static PyGetSetDef description_members[] = {{"number", Method<last_number>::get, nullptr, nullptr, nullptr},
                                            {nullptr, nullptr, nullptr, nullptr, nullptr}};

}  // namespace gpucoll
