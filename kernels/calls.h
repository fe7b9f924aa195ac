// The table of calls: one that looks like a call that Python has checked and planned before, by its options and by the
// shapes and dtypes of its arrays, is done here from its beginning to its end; all others are Python's.
#pragma once
#include <cstddef>

#include "mail.h"
#include "plans.h"

static const int MOST_AXES = 6;
static const uint64_t SETS = 64, WAYS = 4;  // of the table
static const uint64_t LAST = 32;            // times kept of each kind of call

// An array as far as a call depends on it, beside where it is; without a dtype None stands for it.
struct Look {
    PyArray_Descr* dtype;
    int axes;
    npy_intp shape[MOST_AXES];

    bool is_of(PyObject* object) const {
        if (!is_array(object)) return dtype == nullptr && object == Py_None;
        PyArrayObject* array = array_of(object);
        return PyArray_DESCR(array) == dtype && PyArray_NDIM(array) == axes
               && std::equal(shape, shape + axes, PyArray_DIMS(array))
               && PyArray_CHKFLAGS(array, NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED);
    }
};

// A call that was planned.
struct Entry {
    PyObject* options[4];  // what is called, op, root, algorithm
    Look x, out;
    bool allocates;          // whether it was given no `out`
    npy_intp inside;         // from which byte of the result on `x` is, or APART
    bool symmetric;          // whether all arrays are in symmetric memory
    PlanObject* plan;        // null where there is no entry
    PyArrayObject* seconds;  // how many were noted, and the last LAST of them
};

static const npy_intp APART = -1;
// Requests that are dropped while another thread is at the messages and that it calls back; memory of more stays for ever.
static const size_t MOST_DROPPED = 64;
static const uint64_t ASKED = 20000;  // nanoseconds for which a rank with a core of its own asks Python without yielding

struct Engine {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Node node;
    Walker walker;
    Mail mail;
    PlanObject* current;                          // the plan of the call under way, or null
    PyObject *acquire, *release, *queue, *waits;  // of `gpucoll.progress.waits`
    PyObject* alone;                              // messages under way, which none may overtake
    PyObject* executor;                           // whose engine it is
    PyObject* errors;                             // the class of what that raises
    bool is_made;  // whether the C++ members are there, which is not so where there was no memory for them
    bool closed;
    int under_way;  // calls of threads: what they use stays
    bool exchanges;  // whether a thread without Python's lock is at the messages
    std::vector<std::pair<std::shared_ptr<Transfer>, PyObject*>> dropped;  // meanwhile, with the memory that each works on
    std::atomic<uint64_t> calling;  // the number of the call in which a thread waits in what Python calls, or 0
    uint64_t turn;  // which way of a set is overwritten next
    long thread;  // the system's number of the thread that made the last call here, or 0
    Entry entries[SETS * WAYS];
};

static PyObject *failure_name, *owner_name, *linger_name, *broken_name, *watch_name, *attach_name, *differ_name,
    *out_of_reach_name, *cancel_name, *exchange_name;

static bool is_same(PyObject* kept, PyObject* given) {
    if (kept == given) return true;
    if (PyUnicode_CheckExact(kept) && PyUnicode_CheckExact(given)) return PyUnicode_Compare(kept, given) == 0;
    return PyLong_CheckExact(kept) && PyLong_CheckExact(given) && PyObject_RichCompareBool(kept, given, Py_EQ) > 0;
}

static uint64_t hash_of(PyObject* option) {
    if (!PyUnicode_CheckExact(option) && !PyLong_CheckExact(option)) return reinterpret_cast<uintptr_t>(option) >> 4;
    return static_cast<uint64_t>(PyObject_Hash(option));
}

// Returns the entries of which one may be that of a call.
static Entry* set_of(Engine* self, PyObject* const* options, PyObject* x) {
    const uint64_t mix = 0x9e3779b97f4a7c15u;
    uint64_t hash = 0;
    for (int axis = 0; is_array(x) && axis < PyArray_NDIM(array_of(x)); axis++)
        hash = (hash ^ static_cast<uint64_t>(PyArray_DIM(array_of(x), axis))) * mix;
    for (int i = 0; i < 4; i++) hash = (hash ^ hash_of(options[i])) * mix;
    if (is_array(x)) hash = (hash ^ (reinterpret_cast<uintptr_t>(PyArray_DESCR(array_of(x))) >> 4)) * mix;
    return self->entries + (hash >> 32) % SETS * WAYS;
}

// Returns from which byte of `out` on `x` is, or APART.
static npy_intp inside_of(PyObject* x, PyObject* out) {
    if (!is_array(x) || !is_array(out)) return APART;
    const std::ptrdiff_t inside = data_of(x) - data_of(out);
    return inside >= 0 && inside < PyArray_NBYTES(array_of(out)) ? inside : APART;
}

// Whether all arrays of a call are in symmetric memory.
static bool is_symmetric(const Engine* self, PyObject* x, PyObject* out) {
    const Segments& known = self->node.symmetric;
    bool symmetric = !known.empty();
    Segment found;
    for (PyObject* array : {x, out})
        symmetric = symmetric && (!is_array(array) || known.holding(data_of(array), static_cast<uint64_t>(PyArray_NBYTES(array_of(array))), &found));
    return symmetric;
}

static bool is_of(const Engine* self, const Entry* entry, PyObject* const* options, PyObject* x, PyObject* out) {
    return entry->plan != nullptr && is_same(entry->options[0], options[0]) && is_same(entry->options[1], options[1])
           && is_same(entry->options[2], options[2]) && is_same(entry->options[3], options[3]) && entry->x.is_of(x)
           && entry->inside == inside_of(x, out) && entry->symmetric == is_symmetric(self, x, out);
}

// Whether an entry is of calls with such an `out`: results that are allocated have a shape that a given one need not have.
static bool is_to(const Entry* entry, PyObject* out) {
    if (entry->plan == nullptr || entry->out.dtype == nullptr || entry->plan->plan->overwrites) return true;
    return out == Py_None ? entry->allocates : entry->out.is_of(out);
}

// Returns the entry of a call, null where there is none.
static Entry* find(Engine* self, PyObject* const* options, PyObject* x, PyObject* out) {
    Entry* set = set_of(self, options, x);
    for (Entry* entry = set; entry < set + WAYS; entry++)
        if (is_of(self, entry, options, x, out) && is_to(entry, out)) return entry;
    return nullptr;
}

static double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

static void note(PyArrayObject* seconds, double elapsed) {
    double* kept = static_cast<double*>(PyArray_DATA(seconds));
    kept[1 + static_cast<uint64_t>(kept[0]) % LAST] = elapsed;
    kept[0] += 1;
}

// Whether nothing is under way that a call must follow, and nothing has failed; -1 with an error set.
static int is_free(Engine* self) {
    const Py_ssize_t waiting = PyObject_Size(self->queue);
    if (waiting != 0) return waiting < 0 ? -1 : 0;
    PyObject* failure = PyObject_GetAttr(self->waits, failure_name);
    if (failure == nullptr) return -1;
    Py_DECREF(failure);
    return failure == Py_None;
}

// Tells Python, and the other ranks, that a call has broken down, whose error is set and stays.
// What it works on stays for ever: others may be at it still.
static void spoil(Engine* self, PyObject* name, PyObject* x, PyObject* out) {
    PyObject *kind, *error, *trace;
    PyErr_Fetch(&kind, &error, &trace);
    PyErr_NormalizeException(&kind, &error, &trace);
    Py_XDECREF(PyObject_CallMethodObjArgs(self->waits, broken_name, error, name, nullptr));
    if (PyErr_Occurred()) {  // the same in our words
        Py_XDECREF(kind);
        Py_XDECREF(error);
        Py_XDECREF(trace);
        PyErr_Fetch(&kind, &error, &trace);
        PyErr_NormalizeException(&kind, &error, &trace);
    }
    Py_XDECREF(PyObject_CallMethodObjArgs(self->executor, cancel_name, error, x, out, nullptr));
    if (PyErr_Occurred()) PyErr_WriteUnraisable(self->executor);
    PyErr_Restore(kind, error, trace);
}

// Waits on in Python, which looks at the deadline; whatever a signal does there meanwhile. False: an error.
static bool linger(Engine* self, PyObject* name) {
    PyObject* thread = PyLong_FromUnsignedLong(PyThread_get_thread_ident());
    const bool owned = thread != nullptr && PyObject_SetAttr(self->waits, owner_name, thread) == 0;
    PyObject* found = owned ? PyObject_CallMethodObjArgs(self->waits, linger_name, self, name, nullptr) : nullptr;
    Py_XDECREF(thread);
    {
        const KeptError kept;
        PyObject_SetAttr(self->waits, owner_name, Py_None);
        PyErr_Clear();
    }
    Py_XDECREF(found);
    return found != nullptr;
}

// Lets Python call what a plan says, or what it calls while it waits; 1 where it is done, 0 where not yet, -1: an error.
static int call_python(PyObject* called, const std::vector<const char*>& rows, uint32_t count) {
    std::vector<PyObject*> arguments(count);
    for (uint32_t i = 0; i < count; i++) arguments[i] = PyLong_FromVoidPtr(const_cast<char*>(rows[i]));
    PyObject* found = PyErr_Occurred() ? nullptr : PyObject_Vectorcall(called, arguments.data(), count, nullptr);
    for (uint32_t i = 0; i < count; i++) Py_XDECREF(arguments[i]);
    Py_XDECREF(found);
    return found == nullptr ? -1 : found != Py_False;
}

// The same of a plan `by_calls`, whose function may return what does the call, and waits for its end, in place of whether it
// is done: that is kept, for calls on the same rows.
static int call_prepared(Engine* self, PlanObject* planned, PyObject* called, const std::vector<const char*>& rows) {
    if (planned->prepared == nullptr || !std::equal(rows.begin(), rows.end(), planned->prepared_on)) {
        PyObject* arguments[3] = {};
        for (int i = 0; i < 3; i++) arguments[i] = PyLong_FromVoidPtr(const_cast<char*>(rows[static_cast<size_t>(i)]));
        PyObject* found = PyErr_Occurred() ? nullptr : PyObject_Vectorcall(called, arguments, 3, nullptr);
        for (PyObject* one : arguments) Py_XDECREF(one);
        if (found == nullptr) return -1;
        if (PyBool_Check(found)) {
            Py_DECREF(found);
            return found == Py_True;
        }
        Py_XSETREF(planned->prepared, found);
        std::copy(rows.begin(), rows.end(), planned->prepared_on);
    }
    PyObject* call = Py_NewRef(planned->prepared);
    self->calling = self->node.walks;
    PyObject* found = PyObject_CallNoArgs(call);
    self->calling = 0;
    Py_DECREF(call);
    Py_XDECREF(found);
    return found == nullptr ? -1 : 1;
}

// Calls a method of the executor's; false with an error set.
static bool ask(Engine* self, PyObject* name, PyObject* first = nullptr, PyObject* second = nullptr) {
    PyObject* found = PyErr_Occurred() ? nullptr
                                       : PyObject_CallMethodObjArgs(self->executor, name, first, second, nullptr);
    Py_XDECREF(first);
    Py_XDECREF(second);
    Py_XDECREF(found);
    return found != nullptr;
}

// Whether what Python waits for is to be asked for once more: for about as long as any other wait, which this rank leaves
// to others that want its core where it has asked for some time, or ranks outnumber cores.
static bool is_soon(const Node& node, double* since) {
    const double time = now();
    if (*since == 0) *since = time;
    if (node.spins == 0 || time > *since + 1e-9 * static_cast<double>(ASKED)) sched_yield();
    return time < *since + 1e-9 * static_cast<double>(PATIENCE);
}

// Goes on with the call under way: 1 where it has ended, 0 where it waits, -1 with an error set. What Python waits for,
// as a message, it may ask for again and again at first; in a long wait that is left to `gpucoll.progress.waits`, which sleeps.
static int step(Engine* self, bool patient, bool asks_again = false) {
    Walker& walker = self->walker;
    double since = 0;  // when what Python calls was first asked whether it is done
    PyObject* calls = self->current->calls;  // the plan stays: who lets go of it is in no call
    for (;;) {
        Walker::Outcome outcome = Walker::WAITING;
        // To let other threads run takes longer than what is left where the others are in the call already.
        if (walker.plan->by_calls && walker.plan->finish == nullptr) outcome = walker.go_on(self->node, false);
        if (outcome == Walker::WAITING) {
            const Unlocked unlocked;
            outcome = walker.go_on(self->node, patient);
        }
        int done;
        switch (outcome) {
            case Walker::DONE: return 1;
            case Walker::WAITING:
                return PyTuple_GET_SIZE(calls) == 0 ? 0 : std::min(0, call_python(PyTuple_GET_ITEM(calls, 0), {}, 0));
            case Walker::UNKNOWN:
                if (!ask(self, attach_name, PyLong_FromUnsignedLong(walker.awaited), PyLong_FromLongLong(walker.unknown)))
                    return -1;
                break;
            case Walker::CALLING: {
                const Instruction& one = walker.plan->instructions[walker.at];
                const uint32_t count = walker.find_rows(self->node, one);
                PyObject* called = PyTuple_GET_ITEM(calls, one.mark);
                done = walker.plan->by_calls ? call_prepared(self, self->current, called, walker.rows)
                                             : call_python(called, walker.rows, count);
                if (done < 0 || (done == 0 && !(asks_again && is_soon(self->node, &since)))) return done;
                walker.at += static_cast<size_t>(done);
                break;
            }
            case Walker::DIFFERS:
                return ask(self, differ_name) ? 0 : -1;
            case Walker::BROKEN: return ask(self, out_of_reach_name, PyLong_FromLong(walker.error)) ? 0 : -1;
        }
    }
}

// Whether a rank that is waited for has failed, with the error set; or whatever else Python raises.
static bool has_failed(Engine* self) {
    const int64_t culprit = self->walker.culprit(self->node);
    return culprit >= 0 && !ask(self, watch_name, Py_NewRef(Py_None), PyLong_FromLongLong(culprit));
}

// The same as `step`, looking after the rank that is waited for. What it has shown before it failed counts.
static int go_on(Engine* self, bool patient) {
    const int done = step(self, patient);
    if (done != 0 || !has_failed(self)) return done;
    if (!PyErr_ExceptionMatches(self->errors)) return -1;
    PyObject* raised[3];
    PyErr_Fetch(&raised[0], &raised[1], &raised[2]);
    Owned kind(raised[0]), error(raised[1]), trace(raised[2]);
    const int after = step(self, false);
    if (after != 0) return after;
    PyErr_Restore(kind.release(), error.release(), trace.release());
    return -1;
}

// Comes to the next call. Throws where there is no memory: then nothing has begun.
static void begin(Engine* self, PlanObject* planned, PyObject* x, PyObject* out, bool listens) {
    self->walker.begin(self->node, planned->plan, data_of(x), data_of(out), listens);
    Py_XSETREF(self->current, reinterpret_cast<PlanObject*>(Py_NewRef(reinterpret_cast<PyObject*>(planned))));
}

// Does a planned call from its beginning to its end, unless the root is in another one; false with an error set.
static bool perform(Engine* self, PyObject* name, PlanObject* planned, PyObject* x, PyObject* out) {
    int done = -1;
    try {
        begin(self, planned, x, out, true);
        done = step(self, true, true);
    } catch (...) {
        set_error();
    }
    const bool well = done > 0 || (done == 0 && linger(self, name));
    if (!well) spoil(self, name, x, out);
    self->walker.plan = nullptr;
    return well;
}

// Whether a result may be written: arrays that share memory otherwise than as was planned are Python's.
static bool may_write(const Engine* self, const Entry* entry, PyObject* x, PyObject* out) {
    if (!entry->out.is_of(out) || !PyArray_ISWRITEABLE(array_of(out))) return false;
    if (!is_array(x)) return true;
    const char *from = data_of(x), *to = data_of(out);
    const npy_intp given = PyArray_NBYTES(array_of(x)), taken = PyArray_NBYTES(array_of(out));
    if (from + given <= to || to + taken <= from) return true;
    return entry->inside >= 0 && from - to == entry->inside;
}

// Returns the array for the result, which is given or new, None where this rank has none; null with an error set;
// NotImplemented where the call is Python's.
static PyObject* result_of(Engine* self, const Entry* entry, PyObject* x, PyObject* out) {
    if (entry->out.dtype == nullptr) return Py_NewRef(out == Py_None ? Py_None : Py_NotImplemented);
    const Plan* plan = entry->plan->plan;
    if (plan->overwrites) {
        const bool given = out == Py_None || out == x;
        const bool only_read = (plan->small || plan->by_calls) && plan->root == self->node.rank;
        const bool ready = given && (only_read || PyArray_ISWRITEABLE(array_of(x)));
        return Py_NewRef(ready ? x : Py_NotImplemented);
    }
    if (out == Py_None) {
        Py_INCREF(entry->out.dtype);
        return PyArray_Empty(entry->out.axes, entry->out.shape, entry->out.dtype, 0);
    }
    return Py_NewRef(may_write(self, entry, x, out) ? out : Py_NotImplemented);
}

// Whether Python has a part in a call, beside what is prepared, in which no signal's handler runs.
static bool runs_python(const PlanObject* planned) { return PyTuple_GET_SIZE(planned->calls) > 0 && planned->prepared == nullptr; }

// Notes that this thread is in such a call, or no more; false with an error set.
static bool own(Engine* self, bool begins) {
    PyObject* thread = begins ? PyLong_FromUnsignedLong(PyThread_get_thread_ident()) : Py_NewRef(Py_None);
    const bool noted = thread != nullptr && PyObject_SetAttr(self->waits, owner_name, thread) == 0;
    Py_XDECREF(thread);
    return noted;
}

static long thread_number() {
    static thread_local const long number = syscall(SYS_gettid);
    return number;
}

// Lets the next call begin, whatever has been raised.
static void open_gate(Engine* self) {
    if (PyErr_Occurred() == nullptr) {
        Py_XDECREF(PyObject_CallNoArgs(self->release));
        return;
    }
    const KeptError kept;
    Py_XDECREF(PyObject_CallNoArgs(self->release));
    PyErr_Clear();
}

// Does a known call unless another thread is in one, or the root in another call; returns `out`, which it takes,
// NotImplemented, or null with an error set.
static PyObject* do_call(Engine* self, const Entry& known, PyObject* name, PyObject* x, PyObject* out) {
    PyObject* mine = PyObject_CallOneArg(self->acquire, Py_False);
    if (mine != Py_True) {
        Py_DECREF(out);
        if (mine == nullptr) return nullptr;
        Py_DECREF(mine);
        Py_RETURN_NOTIMPLEMENTED;
    }
    Py_DECREF(mine);
    self->thread = thread_number();
    const double started = now();
    self->under_way++;
    const bool owned = runs_python(known.plan);
    if (self->closed) {
        Py_SETREF(out, Py_NewRef(Py_NotImplemented));
    } else if ((owned && !own(self, true)) || !perform(self, name, known.plan, x, out)) {
        Py_CLEAR(out);
    } else if (self->walker.has_passed) {
        Py_SETREF(out, Py_NewRef(Py_NotImplemented));
    } else {
        note(known.seconds, now() - started);
    }
    if (owned) {  // whatever has been raised
        const KeptError kept;
        own(self, false);
        PyErr_Clear();
    }
    open_gate(self);
    self->under_way--;
    return out;
}

// Whether a plan is for such arrays.
static bool fits(const Plan* plan, PyObject* x, PyObject* out) {
    const bool gives = is_array(x) && static_cast<uint64_t>(PyArray_NBYTES(array_of(x))) == plan->given;
    const bool takes = is_array(out) && static_cast<uint64_t>(PyArray_NBYTES(array_of(out))) == plan->taken;
    return (plan->given == 0 || gives) && (plan->taken == 0 || takes);
}

// A call on given arrays.
struct Bound {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Engine* engine;
    PyObject *name, *x, *out;
    Entry known;  // its plan and where its times are noted
};

static PyTypeObject bound_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

// Does it once more and returns the result, and NotImplemented where the call is Python's.
static PyObject* call_bound(PyObject* object, PyObject* const*, size_t, PyObject*) {
    Bound* self = reinterpret_cast<Bound*>(object);
    Engine* engine = self->engine;
    if (engine == nullptr || engine->closed) Py_RETURN_NOTIMPLEMENTED;
    if (!fits(self->known.plan->plan, self->x, self->out)) Py_RETURN_NOTIMPLEMENTED;  // an array has been resized
    const int free = is_free(engine);
    if (free <= 0) return free < 0 ? nullptr : Py_NewRef(Py_NotImplemented);
    return do_call(engine, self->known, self->name, self->x, Py_NewRef(self->out));
}

// bind(name, x, out, a plan, seconds): a callable that does this call, of no arguments.
static PyObject* bind(PyObject* object, PyObject* given) {
    PyObject *name, *x, *out, *planned, *seconds;
    if (!PyArg_ParseTuple(given, "OOOO!O!", &name, &x, &out, &plan_type, &planned, &PyArray_Type, &seconds)) return nullptr;
    Bound* self = reinterpret_cast<Bound*>(bound_type.tp_alloc(&bound_type, 0));
    if (self == nullptr) return nullptr;
    self->vectorcall = bordered<call_bound>;
    self->engine = reinterpret_cast<Engine*>(Py_NewRef(object));
    self->name = Py_NewRef(name);
    self->x = Py_NewRef(x);
    self->out = Py_NewRef(out);
    self->known.plan = reinterpret_cast<PlanObject*>(Py_NewRef(planned));
    self->known.seconds = reinterpret_cast<PyArrayObject*>(Py_NewRef(seconds));
    if (fits(self->known.plan->plan, x, out) && PyArray_SIZE(self->known.seconds) > static_cast<npy_intp>(LAST))
        return reinterpret_cast<PyObject*>(self);
    Py_DECREF(self);
    PyErr_SetString(PyExc_ValueError, "a plan for other arrays");
    return nullptr;
}

static int traverse_bound(PyObject* object, visitproc visit, void* arg) {
    Bound* self = reinterpret_cast<Bound*>(object);
    Py_VISIT(self->engine);
    Py_VISIT(self->name);
    Py_VISIT(self->x);
    Py_VISIT(self->out);
    Py_VISIT(self->known.plan);
    Py_VISIT(self->known.seconds);
    return 0;
}

static int forget_bound(PyObject* object) {
    Bound* self = reinterpret_cast<Bound*>(object);
    Py_CLEAR(self->engine);
    Py_CLEAR(self->name);
    Py_CLEAR(self->x);
    Py_CLEAR(self->out);
    Py_CLEAR(self->known.plan);
    Py_CLEAR(self->known.seconds);
    return 0;
}

static void unmake_bound(PyObject* object) {
    PyObject_GC_UnTrack(object);
    forget_bound(object);
    Py_TYPE(object)->tp_free(object);
}

// (what is called, op, root, algorithm, x, out): does the call and returns its result, or NotImplemented where it is not
// known here.
static PyObject* call(PyObject* object, PyObject* const* given, size_t count, PyObject* names) {
    Engine* self = reinterpret_cast<Engine*>(object);
    if (PyVectorcall_NARGS(count) != 6 || names != nullptr || (self->waits == nullptr && !self->closed)) {
        PyErr_SetString(PyExc_TypeError, "the engine takes six arguments, once it has a gate");
        return nullptr;
    }
    if (self->closed) Py_RETURN_NOTIMPLEMENTED;
    PyObject* x = given[4];
    const Entry* entry = find(self, given, x, given[5]);
    if (entry == nullptr) Py_RETURN_NOTIMPLEMENTED;
    const int free = is_free(self);
    if (free <= 0) return free < 0 ? nullptr : Py_NewRef(Py_NotImplemented);
    Entry known = *entry;  // what follows may run Python, and that may close the communicator
    PyObject* const kept[] = {reinterpret_cast<PyObject*>(known.plan), reinterpret_cast<PyObject*>(known.seconds)};
    for (PyObject* one : kept) Py_XINCREF(one);
    PyObject* out = result_of(self, entry, x, given[5]);
    if (out != nullptr && out != Py_NotImplemented) out = do_call(self, known, given[0], x, out);
    for (PyObject* one : kept) Py_XDECREF(one);
    return out;
}

static void look_at(Look* look, PyObject* object) {
    if (!is_array(object)) {
        Py_CLEAR(look->dtype);
        return;
    }
    PyArrayObject* array = array_of(object);
    Py_INCREF(PyArray_DESCR(array));
    Py_XSETREF(look->dtype, PyArray_DESCR(array));
    look->axes = PyArray_NDIM(array);
    std::copy_n(PyArray_DIMS(array), look->axes, look->shape);
}

static void forget_entry(Entry* entry) {
    for (PyObject*& option : entry->options) Py_CLEAR(option);
    Py_CLEAR(entry->x.dtype);
    Py_CLEAR(entry->out.dtype);
    Py_CLEAR(entry->plan);
    Py_CLEAR(entry->seconds);
}

// Returns an entry for a call: that which it has, or another one, which is overwritten.
static Entry* entry_for(Engine* self, PyObject* const* options, PyObject* x, PyObject* out) {
    Entry *set = set_of(self, options, x), *unused = nullptr;
    for (Entry* entry = set; entry < set + WAYS; entry++) {
        if (is_of(self, entry, options, x, out) && is_to(entry, out)) return entry;
        if (entry->plan == nullptr && unused == nullptr) unused = entry;
    }
    return unused != nullptr ? unused : set + self->turn++ % WAYS;
}

// Whether entries tell such arrays, or None.
static bool has_look(PyObject* x) { return x == Py_None || (is_array(x) && PyArray_NDIM(array_of(x)) <= MOST_AXES); }

// `given` is the caller's `out`.
static void keep(Engine* self, PyObject* const* options, PyObject* x, PyObject* out, PyObject* given,
                 PlanObject* planned, PyObject* seconds) {
    Entry* entry = entry_for(self, options, x, given);
    for (int i = 0; i < 4; i++) Py_XSETREF(entry->options[i], Py_NewRef(options[i]));
    look_at(&entry->x, x);
    look_at(&entry->out, out);
    entry->allocates = given == Py_None;
    entry->inside = inside_of(x, given);
    entry->symmetric = is_symmetric(self, x, given);
    Py_XSETREF(entry->plan, reinterpret_cast<PlanObject*>(Py_NewRef(reinterpret_cast<PyObject*>(planned))));
    Py_XSETREF(entry->seconds, reinterpret_cast<PyArrayObject*>(Py_NewRef(seconds)));
}

// learn(what is called, op, root, algorithm, x, the result, the caller's out, a plan, seconds): such calls are done here from now on.
static PyObject* learn(PyObject* object, PyObject* given) {
    Engine* self = reinterpret_cast<Engine*>(object);
    PyObject *options[4], *x, *out, *callers, *planned, *seconds;
    if (!PyArg_ParseTuple(given, "OOOOOOOO!O!", options, options + 1, options + 2, options + 3, &x, &out, &callers,
                          &plan_type, &planned, &PyArray_Type, &seconds))
        return nullptr;
    if (!has_look(x) || !has_look(out) || PyArray_SIZE(array_of(seconds)) <= static_cast<npy_intp>(LAST)) Py_RETURN_NONE;
    if (!fits(reinterpret_cast<PlanObject*>(planned)->plan, x, out)) {
        PyErr_SetString(PyExc_ValueError, "a plan for other arrays");
        return nullptr;
    }
    keep(self, options, x, out, callers, reinterpret_cast<PlanObject*>(planned), seconds);
    Py_RETURN_NONE;
}
