// The table of known calls: repeated calls are done here from beginning to end, without a step in Python.
//
// Python checks and plans a call, then registers the plan (`cache_call`). A later call with the same options, shapes and
// dtypes finds the plan in the table. `bind` makes the same for fixed arrays. Every function returns NotImplemented
// for calls left to Python: unknown calls, and known calls behind queued operations or beside a call of another
// thread.
//
// A call made here honours the rules of `Progress.gate`: it holds the lock `acquire`/`release`, and `queue` must be
// empty. Python's lock is released while waiting for other ranks (`Unlocked`). A call that lasts goes on in
// `slow_wait`, in Python; `mark_failed` reports a broken call.
#pragma once
#include <cstddef>

#include "engine/mail.h"
#include "binding/plans.h"

namespace gpucoll {

static const int MOST_AXES = 6;             // arrays with more axes are left to Python: `ArraySignature` has a fixed size
static const uint64_t SETS = 64, WAYS = 4;  // the table is set-associative: a search compares at most WAYS entries
static const uint64_t LAST = 32;            // durations kept of each kind of call, the same number as in Python

// Dtype and shape of an array, all that plans depend on beside `Entry::inside` and `symmetric`. No dtype stands for
// None.
struct ArraySignature {
    PyArray_Descr* dtype;
    int axes;
    npy_intp shape[MOST_AXES];

    // Return whether an object has this dtype and shape. Plans need contiguous, aligned arrays: all others are
    // left to Python.
    bool matches(PyObject* object) const {
        if (!is_array(object)) return dtype == nullptr && object == Py_None;
        PyArrayObject* array = array_of(object);
        return PyArray_DESCR(array) == dtype && PyArray_NDIM(array) == axes
               && std::equal(shape, shape + axes, PyArray_DIMS(array))
               && PyArray_CHKFLAGS(array, NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED);
    }
};

// A known call: key, plan and statistics.
struct Entry {
    PyObject* options[4];  // name of the collective, op, root, algorithm
    ArraySignature x, out;
    bool allocates;          // the call was made without `out`
    npy_intp inside;         // offset of `x` in the result (a call in place), or APART
    bool symmetric;          // all arrays are in symmetric memory
    PlanObject* plan;        // null: the entry is unused
    PyArrayObject* seconds;  // the number of durations noted, then a ring of the last LAST durations
};

static const npy_intp APART = -1;
// Requests dropped during an `exchange` of another thread (`forget_request`). The arrays of further requests leak:
// the list must not grow, since appending happens inside garbage collections.
static const size_t MOST_DROPPED = 64;
// A rank with its own core polls Python this many nanoseconds, then also yields: another process may need the core.
static const uint64_t ASKED = 20000;

// The Python object of a rank's engine, with all its state.
struct Engine {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Node node;
    Walker walker;
    Mailbox mail;
    PlanObject* current;                          // the plan of the call under way, or null
    PyObject *acquire, *release, *queue, *waits;  // of `gpucoll.progress.waits`, see `bind_progress`
    PyObject* alone;                              // messages under way in Python: messages here must not overtake them
    PyObject* executor;                           // the `EngineExecutor`, the owner of this engine
    PyObject* errors;                             // the base class of the executor's errors
    bool is_made;  // the C++ members are constructed: false after a lack of memory
    bool closed;
    int under_way;  // calls of threads inside this object: above 0 the members must stay
    bool exchanges;  // a thread without Python's lock uses `mail`
    // Requests dropped meanwhile, each with a reference to its array.
    std::vector<std::pair<std::shared_ptr<Transfer>, PyObject*>> dropped;
    // Number of the call whose prepared function is running, or 0. Atomic: a watching thread reads the number.
    std::atomic<uint64_t> calling;
    uint64_t turn;  // next way of a full set to be overwritten
    long thread;  // the system's number of the thread of the last call made here, or 0
    Entry entries[SETS * WAYS];
};

static PyObject *failure_name, *owner_name, *slow_wait_name, *broken_name, *check_failures_name, *attach_name, *differ_name,
    *out_of_reach_name, *cancel_name, *exchange_name;

// Return whether two options are equal. Only exact strings and integers are compared by value: comparing other
// objects could run Python code.
static bool is_same(PyObject* kept, PyObject* given) {
    if (kept == given) return true;
    if (PyUnicode_CheckExact(kept) && PyUnicode_CheckExact(given)) return PyUnicode_Compare(kept, given) == 0;
    return PyLong_CheckExact(kept) && PyLong_CheckExact(given) && PyObject_RichCompareBool(kept, given, Py_EQ) > 0;
}

static uint64_t hash_of(PyObject* option) {
    if (!PyUnicode_CheckExact(option) && !PyLong_CheckExact(option)) return reinterpret_cast<uintptr_t>(option) >> 4;
    return static_cast<uint64_t>(PyObject_Hash(option));
}

// Return the set of WAYS entries for a call. `out` is not hashed: for some calls any `out` fits (`accepts`).
static Entry* set_of(Engine* self, PyObject* const* options, PyObject* x) {
    // 2^64 divided by the golden ratio: spreads close numbers over the upper bits, used below.
    const uint64_t mix = 0x9e3779b97f4a7c15u;
    uint64_t hash = 0;
    for (int axis = 0; is_array(x) && axis < PyArray_NDIM(array_of(x)); axis++)
        hash = (hash ^ static_cast<uint64_t>(PyArray_DIM(array_of(x), axis))) * mix;
    for (int i = 0; i < 4; i++) hash = (hash ^ hash_of(options[i])) * mix;
    if (is_array(x)) hash = (hash ^ (reinterpret_cast<uintptr_t>(PyArray_DESCR(array_of(x))) >> 4)) * mix;
    return self->entries + (hash >> 32) % SETS * WAYS;
}

// Return the offset of `x` in the memory of `out`, or APART.
static npy_intp inside_of(PyObject* x, PyObject* out) {
    if (!is_array(x) || !is_array(out)) return APART;
    const std::ptrdiff_t inside = data_of(x) - data_of(out);
    return inside >= 0 && inside < PyArray_NBYTES(array_of(out)) ? inside : APART;
}

// Return whether all arrays of a call are in symmetric memory: other memory needs other plans.
static bool is_symmetric(const Engine* self, PyObject* x, PyObject* out) {
    const Segments& known = self->node.symmetric;
    bool symmetric = !known.empty();
    Segment found;
    for (PyObject* array : {x, out})
        symmetric = symmetric && (!is_array(array) || known.holding(data_of(array), static_cast<uint64_t>(PyArray_NBYTES(array_of(array))), &found));
    return symmetric;
}

// Return whether an entry fits a call, but for the shape of `out` (see `accepts`).
static bool matches(const Engine* self, const Entry* entry, PyObject* const* options, PyObject* x, PyObject* out) {
    return entry->plan != nullptr && is_same(entry->options[0], options[0]) && is_same(entry->options[1], options[1])
           && is_same(entry->options[2], options[2]) && is_same(entry->options[3], options[3]) && entry->x.matches(x)
           && entry->inside == inside_of(x, out) && entry->symmetric == is_symmetric(self, x, out);
}

// Return whether an entry fits the `out` of a call. An allocated result has a fixed shape; a given `out` may have
// another shape of the same size.
static bool accepts(const Entry* entry, PyObject* out) {
    if (entry->plan == nullptr || entry->out.dtype == nullptr || entry->plan->plan->overwrites) return true;
    return out == Py_None ? entry->allocates : entry->out.matches(out);
}

// Return the entry of a call, or null.
static Entry* find(Engine* self, PyObject* const* options, PyObject* x, PyObject* out) {
    Entry* set = set_of(self, options, x);
    for (Entry* entry = set; entry < set + WAYS; entry++)
        if (matches(self, entry, options, x, out) && accepts(entry, out)) return entry;
    return nullptr;
}

// Return the seconds of the monotonic clock.
static double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Note a duration in the ring of an entry.
static void note(PyArrayObject* seconds, double elapsed) {
    double* kept = static_cast<double*>(PyArray_DATA(seconds));
    kept[1 + static_cast<uint64_t>(kept[0]) % LAST] = elapsed;
    kept[0] += 1;
}

// Return 1 if a call may be made now: no operation is queued before, and the communicator has not failed. Return 0 if
// not, -1 with an error set.
static int is_free(Engine* self) {
    const Py_ssize_t waiting = PyObject_Size(self->queue);
    if (waiting != 0) return waiting < 0 ? -1 : 0;
    PyObject* failure = PyObject_GetAttr(self->waits, failure_name);
    if (failure == nullptr) return -1;
    Py_DECREF(failure);
    return failure == Py_None;
}

// Report a broken call to Python and the other ranks. The error is set, and stays set, possibly replaced by a better
// explanation. The executor keeps the arrays for ever: other ranks may still access them.
static void mark_failed(Engine* self, PyObject* name, PyObject* x, PyObject* out) {
    PyObject *kind, *error, *trace;
    PyErr_Fetch(&kind, &error, &trace);
    PyErr_NormalizeException(&kind, &error, &trace);
    Py_XDECREF(PyObject_CallMethodObjArgs(self->waits, broken_name, error, name, nullptr));
    // `Progress.broken` raises if a better explanation is known: report that error instead.
    if (PyErr_Occurred()) {
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

// Wait on in Python until the call ends; Python checks deadline, signals and dead ranks. Return false with an error
// set. This thread is noted as the owner meanwhile: a signal handler calling this communicator then gets an error, no
// deadlock.
static bool slow_wait(Engine* self, PyObject* name) {
    PyObject* thread = PyLong_FromUnsignedLong(PyThread_get_thread_ident());
    const bool owned = thread != nullptr && PyObject_SetAttr(self->waits, owner_name, thread) == 0;
    PyObject* found = owned ? PyObject_CallMethodObjArgs(self->waits, slow_wait_name, self, name, nullptr) : nullptr;
    Py_XDECREF(thread);
    {
        const KeptError kept;
        PyObject_SetAttr(self->waits, owner_name, Py_None);
        PyErr_Clear();
    }
    Py_XDECREF(found);
    return found != nullptr;
}

// Call a Python function of a plan with addresses. Return 1 if done, 0 if to be called again, -1 with an error set.
static int call_python(PyObject* called, const std::vector<const char*>& rows, uint32_t count) {
    std::vector<PyObject*> arguments(count);
    for (uint32_t i = 0; i < count; i++) arguments[i] = PyLong_FromVoidPtr(const_cast<char*>(rows[i]));
    PyObject* found = PyErr_Occurred() ? nullptr : PyObject_Vectorcall(called, arguments.data(), count, nullptr);
    for (uint32_t i = 0; i < count; i++) Py_XDECREF(arguments[i]);
    Py_XDECREF(found);
    return found == nullptr ? -1 : found != Py_False;
}

// Call the function of a plan `by_calls`. The function may return a blocking call instead of True or False. That call
// is kept and made again while the addresses are the same: repeated calls then skip preparing the arguments.
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
    // A reference of our own: the call runs Python, and Python may replace `prepared`.
    PyObject* call = Py_NewRef(planned->prepared);
    self->calling = self->node.call_count;
    PyObject* found = PyObject_CallNoArgs(call);
    self->calling = 0;
    Py_DECREF(call);
    Py_XDECREF(found);
    return found == nullptr ? -1 : 1;
}

// Call a method of the executor. Takes the references to the arguments. Return false with an error set.
static bool ask(Engine* self, PyObject* name, PyObject* first = nullptr, PyObject* second = nullptr) {
    PyObject* found = PyErr_Occurred() ? nullptr
                                       : PyObject_CallMethodObjArgs(self->executor, name, first, second, nullptr);
    Py_XDECREF(first);
    Py_XDECREF(second);
    Py_XDECREF(found);
    return found != nullptr;
}

// Return whether to poll a Python function again; `since` is the time of the first poll. Polling lasts about
// MAX_WAIT, as any wait here. After ASKED, or with more ranks than cores, yield: the awaited rank may need this core.
static bool is_soon(const Node& node, double* since) {
    const double time = now();
    if (*since == 0) *since = time;
    if (node.spins == 0 || time > *since + 1e-9 * static_cast<double>(ASKED)) sched_yield();
    return time < *since + 1e-9 * static_cast<double>(MAX_WAIT);
}

// Continue the call under way. Return 1 if complete, 0 if waiting, -1 with an error set. With `asks_again`, poll a
// waiting Python function (for example a message) for a short time; long waits belong to `gpucoll.progress.waits`,
// able to sleep.
static int step(Engine* self, bool patient, bool asks_again = false) {
    Walker& walker = self->walker;
    double since = 0;  // time of the first poll of a Python function
    PyObject* calls = self->current->calls;  // borrowed: the plan is not released during a call
    // Each turn handles an outcome that needs Python, then continues the walker.
    for (;;) {
        Walker::Outcome outcome = Walker::WAITING;
        // A plan `by_calls` only compares here. If the other ranks are in the call already, comparing is shorter than
        // releasing and acquiring Python's lock.
        if (walker.plan->by_calls && walker.plan->finish == nullptr) outcome = walker.go_on(self->node, false);
        if (outcome == Walker::WAITING) {
            const Unlocked unlocked;
            outcome = walker.go_on(self->node, patient);
        }
        int done;
        switch (outcome) {
            case Walker::DONE: return 1;
            case Walker::WAITING:
                // The first function of a plan advances messages: MPI moves messages only inside MPI calls.
                return PyTuple_GET_SIZE(calls) == 0 ? 0 : std::min(0, call_python(PyTuple_GET_ITEM(calls, 0), {}, 0));
            case Walker::UNKNOWN:
                if (!ask(self, attach_name, PyLong_FromUnsignedLong(walker.awaited), PyLong_FromLongLong(walker.unknown)))
                    return -1;
                break;
            case Walker::CALLING: {
                const Instruction& one = walker.plan->instructions[walker.at];
                const uint32_t count = walker.find_rows(self->node, one);
                PyObject* called = PyTuple_GET_ITEM(calls, one.counter);
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

// Return whether an awaited rank has failed, with the error set.
static bool has_failed(Engine* self) {
    const int64_t culprit = self->walker.culprit(self->node);
    return culprit >= 0 && !ask(self, check_failures_name, PyLong_FromLongLong(culprit));
}

// Continue the call as `step`, and check the awaited rank for failure. Progress shown before the failure counts:
// after finding a failure, try once more.
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

// Begin the next call. Throws without memory; then nothing has begun.
static void begin(Engine* self, PlanObject* planned, PyObject* x, PyObject* out, bool listens) {
    self->walker.begin(self->node, planned->plan, data_of(x), data_of(out), listens);
    Py_XSETREF(self->current, reinterpret_cast<PlanObject*>(Py_NewRef(reinterpret_cast<PyObject*>(planned))));
}

// Do a planned call from beginning to end, unless the root is in another call (`has_passed`). Return false with an
// error set.
static bool perform(Engine* self, PyObject* name, PlanObject* planned, PyObject* x, PyObject* out) {
    int done = -1;
    try {
        begin(self, planned, x, out, true);
        done = step(self, true, true);
    } catch (...) {
        set_error();
    }
    const bool well = done > 0 || (done == 0 && slow_wait(self, name));
    if (!well) mark_failed(self, name, x, out);
    self->walker.plan = nullptr;
    return well;
}

// Return whether the call may write to `out`. Arrays overlapping differently than planned are left to Python.
static bool may_write(const Engine* self, const Entry* entry, PyObject* x, PyObject* out) {
    if (!entry->out.matches(out) || !PyArray_ISWRITEABLE(array_of(out))) return false;
    if (!is_array(x)) return true;
    const char *from = data_of(x), *to = data_of(out);
    const npy_intp given = PyArray_NBYTES(array_of(x)), taken = PyArray_NBYTES(array_of(out));
    if (from + given <= to || to + taken <= from) return true;
    return entry->inside >= 0 && from - to == entry->inside;
}

// Return the array for the result, given or new; None if this rank has no result; NotImplemented if the call is left
// to Python; null with an error set.
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

// Return whether a call may run Python functions, and so a signal handler.
static bool runs_python(const PlanObject* planned) { return PyTuple_GET_SIZE(planned->calls) > 0; }

// Note this thread as the owner of a call, or of none. Return false with an error set. A signal handler calling the
// same communicator then gets an error.
static bool own(Engine* self, bool begins) {
    PyObject* thread = begins ? PyLong_FromUnsignedLong(PyThread_get_thread_ident()) : Py_NewRef(Py_None);
    const bool noted = thread != nullptr && PyObject_SetAttr(self->waits, owner_name, thread) == 0;
    Py_XDECREF(thread);
    return noted;
}

// Return the system's number of this thread: one system call per thread, then kept.
static long thread_number() {
    static thread_local const long number = syscall(SYS_gettid);
    return number;
}

// Release the lock of `Progress`. An error already set stays set.
static void open_gate(Engine* self) {
    if (PyErr_Occurred() == nullptr) {
        Py_XDECREF(PyObject_CallNoArgs(self->release));
        return;
    }
    const KeptError kept;
    Py_XDECREF(PyObject_CallNoArgs(self->release));
    PyErr_Clear();
}

// Do a known call. Takes the reference `out` and returns it as the result. Return NotImplemented if another thread is
// in a call or the root in another call, or null with an error set.
static PyObject* do_call(Engine* self, const Entry& known, PyObject* name, PyObject* x, PyObject* out) {
    // Not blocking: if another thread is in a call, Python queues this one or raises the error.
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
    if (owned) {  // whatever has been raised: the error stays set
        const KeptError kept;
        own(self, false);
        PyErr_Clear();
    }
    open_gate(self);
    self->under_way--;
    return out;
}

// Return whether arrays have the sizes of a plan.
static bool fits(const Plan* plan, PyObject* x, PyObject* out) {
    const bool gives = is_array(x) && static_cast<uint64_t>(PyArray_NBYTES(array_of(x))) == plan->given;
    const bool takes = is_array(out) && static_cast<uint64_t>(PyArray_NBYTES(array_of(out))) == plan->taken;
    return (plan->given == 0 || gives) && (plan->taken == 0 || takes);
}

// A call on fixed arrays: skips the search in the table.
struct Bound {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Engine* engine;
    PyObject *name, *x, *out;
    Entry known;  // only `plan` and `seconds` are set
};

static PyTypeObject bound_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

// Do the call once more. Return the result, or NotImplemented if the call is left to Python.
static PyObject* call_bound(PyObject* object, PyObject* const*, size_t, PyObject*) {
    Bound* self = reinterpret_cast<Bound*>(object);
    Engine* engine = self->engine;
    if (engine == nullptr || engine->closed) Py_RETURN_NOTIMPLEMENTED;
    // `ndarray.resize` may have changed an array since `bind`.
    if (!fits(self->known.plan->plan, self->x, self->out)) Py_RETURN_NOTIMPLEMENTED;
    const int free = is_free(engine);
    if (free <= 0) return free < 0 ? nullptr : Py_NewRef(Py_NotImplemented);
    return do_call(engine, self->known, self->name, self->x, Py_NewRef(self->out));
}

// bind(name, x, out, plan, seconds): return a callable without arguments, doing this call.
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

// Engine.__call__(name, op, root, algorithm, x, out): do the call and return the result, or NotImplemented if the
// call is left to Python.
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
    // A copy with references: the steps below may run Python, and Python may close the communicator and clear the
    // table.
    Entry known = *entry;
    PyObject* const kept[] = {reinterpret_cast<PyObject*>(known.plan), reinterpret_cast<PyObject*>(known.seconds)};
    for (PyObject* one : kept) Py_XINCREF(one);
    PyObject* out = result_of(self, entry, x, given[5]);
    if (out != nullptr && out != Py_NotImplemented) out = do_call(self, known, given[0], x, out);
    for (PyObject* one : kept) Py_XDECREF(one);
    return out;
}

// Set an `ArraySignature` to an array, or to None.
static void look_at(ArraySignature* look, PyObject* object) {
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

// Return the entry to be written for a call: the call's own, an unused one, or the next in turn.
static Entry* entry_for(Engine* self, PyObject* const* options, PyObject* x, PyObject* out) {
    Entry *set = set_of(self, options, x), *unused = nullptr;
    for (Entry* entry = set; entry < set + WAYS; entry++) {
        if (matches(self, entry, options, x, out) && accepts(entry, out)) return entry;
        if (entry->plan == nullptr && unused == nullptr) unused = entry;
    }
    return unused != nullptr ? unused : set + self->turn++ % WAYS;
}

// Return whether an `ArraySignature` can describe an object.
static bool has_look(PyObject* x) { return x == Py_None || (is_array(x) && PyArray_NDIM(array_of(x)) <= MOST_AXES); }

// Write the entry of a call; `out` is the result, `given` the `out` of the caller.
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

// cache_call(name, op, root, algorithm, x, result, the caller's out, plan, seconds): do similar calls here from now on.
static PyObject* cache_call(PyObject* object, PyObject* given) {
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

}  // namespace gpucoll
