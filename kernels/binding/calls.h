// Known calls: repeated calls are done here from beginning to end, without a step in Python.
//
// Python checks and plans a call, then registers the plan (`cache_call`). A later call with the same options, shapes and
// dtypes finds the plan in the table (table.h). `bind` makes the same for fixed arrays. Every function returns
// NotImplemented for calls left to Python: unknown calls, known calls behind queued operations or beside a call of
// another thread, and calls without memory for their arrays, since Python tells the other ranks.
//
// A call made here honours the rules of `Progress.gate`: it holds the lock (`Gate`), and `queue` must be empty. Python's
// lock is released while waiting for other ranks (`Unlocked`); without that lock, an engine has one of its own (`Held`).
// A call that lasts goes on in `slow_wait`, in Python; `mark_failed` reports a broken call.
#pragma once
#include <cstdio>
#include <memory>
#include <optional>

#include "binding/python_wire.h"
#include "binding/table.h"
#include "engine/mail.h"

namespace gpucoll {

// Requests dropped during an `exchange` of another thread (`Request::forget`). The arrays of further requests leak:
// the list must not grow, since appending happens inside garbage collections.
static const size_t MOST_DROPPED = 64;
// A rank with its own core polls Python this many nanoseconds, then also yields: another process may need the core.
static const uint64_t ASKED = 20000;
// Nanoseconds of a rank's own delay from which the call site is noted: finding it takes a few microseconds. As in
// gpucoll/health/flight.py.
static const int64_t LONG_DELAY = 100000;

// The engine of a rank and communicator, with all its state.
struct Engine {
    Ref<> executor;  // the `NodeEngine`, the owner of this engine
    Ref<> errors;    // the base class of the executor's errors
    Node node{};
    Walker walker{};
    Mailbox mail{};
    Ref<PlanObject> current;               // the plan of the call under way, or null
    Ref<> acquire, release, queue, waits;  // of `gpucoll.progress.waits`, see `bind_progress`
    Ref<> inside;                          // a list: beginnings of file names that are no place in the user's program
    Ref<> wire;                            // a capsule, the owner of `Node::wire`
    PythonWire* by_python = nullptr;       // `Node::wire`, if its messages are Python's
    Ref<> alone;                           // messages under way in Python: messages here must not overtake them
    Ref<> python;                          // makes the calls that are left to Python
    Ref<> points;                          // the carrier of messages between two ranks, see `bind_points`
    bool carries = false;                  // whether `mail` carries the messages to ranks of this node
    uint64_t most_bytes = 0;               // of a message by `points`
    PyObject* object = nullptr;            // this engine for Python, which owns this state
    bool closed = false;
    int under_way = 0;       // calls of threads inside this object: above 0 the members must stay
    bool exchanges = false;  // a thread without Python's lock uses `mail`
    // Requests dropped meanwhile, each with its array.
    std::vector<std::pair<std::shared_ptr<Transfer>, Ref<>>> dropped;
    // Number of the call whose prepared function is running, or 0. Atomic: a watching thread reads the number.
    std::atomic<uint64_t> calling{0};
    long thread = 0;  // the system's number of the thread of the last call made here, or 0
    KnownCalls table;

    Engine(PyObject* owner, PyObject* base) : executor(Ref<>::borrow(owner)), errors(Ref<>::borrow(base)) {
        // Reserved here, since appending happens inside garbage collections and must not throw.
        dropped.reserve(MOST_DROPPED);
    }

    PyObject* guard() const { return object; }

    template <class Each> void references(Each each) {
        table.references(each);
        for (Ref<>* one : {&acquire, &release, &queue, &waits, &inside, &wire, &alone, &python, &points, &executor, &errors}) each(*one);
        each(current);
    }

    // Break cycles, but during a call only those of the table: the call under way uses the rest.
    void forget() {
        table.forget();
        if (under_way > 0) return;
        walker.plan = nullptr;
        references([](auto& one) { one = nullptr; });
    }
};

static PyObject *failure_name, *owner_name, *slow_wait_name, *broken_name, *check_failures_name, *attach_name, *differ_name,
    *out_of_reach_name, *disconnected_name, *cancel_name, *exchange_name, *on_delay_name, *spent_name, *usable_name, *send_name,
    *receive_name, *test_name, *came_name, *length_name;

// Return whether all arrays of a call are in symmetric memory; False for a list, since its blocks lie apart.
static bool is_symmetric(const Engine& self, PyObject* x, PyObject* out) {
    const Segments& known = self.node.symmetric;
    bool symmetric = !known.empty() && !is_blocks(x) && !is_blocks(out);
    Segment found;
    for (PyObject* array : {x, out})
        symmetric = symmetric && (!is_array(array) || known.holding(data_of(array), static_cast<uint64_t>(PyArray_NBYTES(array_of(array))), &found));
    return symmetric;
}

// Return the key of a call. `options` are name, op, root or counts, algorithm.
static CallKey key_of(const Engine& self, PyObject* const* options, PyObject* x, PyObject* out) {
    return {{options[0], options[1], options[2], options[3]}, x, out, is_symmetric(self, x, out)};
}

// Return the seconds of the monotonic clock.
static double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Return whether a queue is empty and the communicator has not failed: only then a call may be made here.
static bool is_free(const Engine& self, const Ref<>& queue) {
    const Py_ssize_t waiting = PyObject_Size(queue.get());
    if (waiting != 0) {
        check_error();
        return false;
    }
    return checked(PyObject_GetAttr(self.waits.get(), failure_name)).get() == Py_None;
}

// Report a broken call to Python and the other ranks. Python's error is set, and stays set, possibly replaced by a
// better explanation. The executor keeps the arrays for ever: other ranks may still access them.
static void mark_failed(Engine& self, PyObject* name, PyObject* x, PyObject* out) {
    Failure failure;
    const auto broken = Ref<>::steal(PyObject_CallMethodObjArgs(self.waits.get(), broken_name, failure.error(), name, nullptr));
    // `Progress.broken` raises if a better explanation is known: report that error instead.
    if (!broken) failure = Failure();
    const auto cancelled = Ref<>::steal(PyObject_CallMethodObjArgs(self.executor.get(), cancel_name, failure.error(), x, out, nullptr));
    if (!cancelled) PyErr_WriteUnraisable(self.executor.get());
    failure.restore();
}

// Notes this thread as the owner of a call: a signal handler calling the same communicator gets an error, no deadlock.
class CallOwner {
  public:
    explicit CallOwner(const Engine& engine) : self(engine) {
        if (PyObject_SetAttr(self.waits.get(), owner_name, number(static_cast<long long>(PyThread_get_thread_ident())).get()) != 0)
            throw Raised();
    }
    ~CallOwner() {
        const KeptError kept;
        PyObject_SetAttr(self.waits.get(), owner_name, Py_None);
    }
    CallOwner(const CallOwner&) = delete;

  private:
    const Engine& self;
};

// Wait on in Python until the call ends; Python checks deadline, signals and dead ranks.
static void slow_wait(Engine& self, PyObject* name) {
    const CallOwner owner(self);
    checked(PyObject_CallMethodObjArgs(self.waits.get(), slow_wait_name, self.object, name, nullptr));
}

// Call a Python function with addresses.
static Ref<> call_with(PyObject* called, const char* const* rows, size_t count) {
    static_assert(sizeof(Ref<>) == sizeof(PyObject*), "an array of owners is an array of objects");
    std::vector<Ref<>> arguments(count);
    for (size_t i = 0; i < count; i++) arguments[i] = address(rows[i]);
    return checked(PyObject_Vectorcall(called, reinterpret_cast<PyObject* const*>(arguments.data()), count, nullptr));
}

// Call the function of a plan `by_calls`; return whether it is done. The function may return a blocking call instead of
// True or False. That call is kept and made again while the addresses are the same: repeated calls then skip preparing
// the arguments.
static bool call_prepared(Engine& self, PlanState& planned, PyObject* called, const std::vector<const char*>& rows) {
    if (!planned.prepared || !std::equal(rows.begin(), rows.end(), planned.prepared_on)) {
        Ref<> found = call_with(called, rows.data(), 3);
        if (PyBool_Check(found.get())) return found.get() == Py_True;
        planned.prepared = std::move(found);
        std::copy(rows.begin(), rows.end(), planned.prepared_on);
    }
    // A reference of our own: the call runs Python, and Python may replace `prepared`.
    const Ref<> call = planned.prepared;
    self.calling = self.node.call_count;
    const auto found = Ref<>::steal(PyObject_CallNoArgs(call.get()));
    self.calling = 0;
    if (!found) throw Raised();
    return true;
}

// Call a method of the executor.
static void ask(const Engine& self, PyObject* name, const Ref<>& first = nullptr, const Ref<>& second = nullptr) {
    checked(PyObject_CallMethodObjArgs(self.executor.get(), name, first.get(), second.get(), nullptr));
}

// Report a failed message between nodes to Python, which raises the error.
static void cut_off(const Engine& self, const WireMessage& message) {
    const bool has_failed = message.now() == WireMessage::FAILED;
    const Ref<> why = checked(has_failed ? PyUnicode_FromString(self.node.wire->reason(message.error))
                                         : PyUnicode_FromFormat("a message of %llu bytes came, of another length than awaited",
                                                                static_cast<unsigned long long>(message.length)));
    ask(self, disconnected_name, why, number(message.peer));
}

// Return whether to poll a Python function again; `since` is the time of the first poll. Polling lasts about
// MAX_WAIT, as any wait here. After ASKED, or with more ranks than cores, yield: the awaited rank may need this core.
static bool is_soon(const Node& node, double* since) {
    const double time = now();
    if (*since == 0) *since = time;
    if (node.spins == 0 || time > *since + 1e-9 * static_cast<double>(ASKED)) sched_yield();
    return time < *since + 1e-9 * static_cast<double>(MAX_WAIT);
}

// Carry out the CALL at which the walker stands; return whether it is done.
static bool call_function(Engine& self, PyObject* calls) {
    Walker& walker = self.walker;
    const Instruction& one = walker.plan->instructions[walker.at];
    const uint32_t count = walker.find_rows(self.node, one);
    PyObject* called = PyTuple_GET_ITEM(calls, one.counter);
    if (walker.plan->by_calls) return call_prepared(self, self.current->state, called, walker.rows);
    return call_with(called, walker.rows.data(), count).get() != Py_False;
}

// Continue the call under way; return whether it is complete. With `asks_again`, poll a waiting Python function (for
// example a message) for a short time; long waits belong to `gpucoll.progress.waits`, able to sleep.
static bool step(Engine& self, bool patient, bool asks_again = false) {
    Walker& walker = self.walker;
    double since = 0;  // time of the first poll of a Python function
    PyObject* calls = self.current->state.calls.get();  // the plan is not released during a call
    // Each turn handles an outcome that needs Python, then continues the walker.
    for (;;) {
        Walker::Outcome outcome = Walker::WAITING;
        // A plan `by_calls` only compares here, and a deferred one waits for nobody. If the other ranks are in the call
        // already, comparing is shorter than releasing and acquiring Python's lock.
        if ((walker.plan->by_calls && walker.plan->finish == nullptr) || walker.plan->has(DEFERRED)) outcome = walker.go_on(self.node, false);
        if (outcome == Walker::WAITING) {
            const Unlocked unlocked;
            outcome = walker.go_on(self.node, patient);
        }
        if (self.by_python != nullptr) self.by_python->raise_kept();
        switch (outcome) {
            case Walker::DONE: return true;
            case Walker::WAITING: return false;
            case Walker::UNKNOWN: ask(self, attach_name, number(walker.awaited), number(walker.unknown)); break;
            case Walker::CALLING:
                if (call_function(self, calls)) {
                    walker.at++;
                } else if (!asks_again || !is_soon(self.node, &since)) {
                    return false;
                }
                break;
            case Walker::DIFFERS: ask(self, differ_name); return false;
            case Walker::BROKEN: ask(self, out_of_reach_name, number(walker.error)); return false;
            case Walker::CUT: cut_off(self, *walker.cut); return false;
        }
    }
}

// Continue the call as `step`, and raise the failure of an awaited rank. Progress shown before the failure counts:
// after finding a failure, try once more.
static bool go_on(Engine& self, bool patient) {
    if (step(self, patient)) return true;
    const int64_t culprit = self.walker.culprit(self.node);
    if (culprit < 0) return false;
    try {
        ask(self, check_failures_name, number(culprit));
        return false;
    } catch (const Raised&) {
        if (!PyErr_ExceptionMatches(self.errors.get())) throw;
        Failure failure;
        if (step(self, false)) return true;
        failure.restore();
        throw;
    }
}

// Return whether code of a file is the library's, or between the library and the user's program.
static bool is_inside(const Engine& self, PyObject* file) {
    for (Py_ssize_t i = 0; self.inside && i < PyList_GET_SIZE(self.inside.get()); i++) {
        PyObject* start = PyList_GET_ITEM(self.inside.get(), i);
        if (PyUnicode_Check(start) && PyUnicode_Tailmatch(file, start, 0, PY_SSIZE_T_MAX, -1) == 1) return true;
    }
    return false;
}

// Note the place of the call in the user's program for the flight recorder: the file, or the end of a long name, and the
// line. In a thread without frames of the user's, such as the progress thread, the place is empty.
static void note_site(Engine& self) {
    char* site = self.node.flight.site;
    std::memset(site, 0, SITE_BYTES);
    auto frame = Ref<PyFrameObject>::borrow(PyEval_GetFrame());
    while (frame) {
        const auto code = Ref<PyCodeObject>::steal(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame.get())));
        if (!is_inside(self, code->co_filename)) {
            Py_ssize_t length = 0;
            const char* name = PyUnicode_AsUTF8AndSize(code->co_filename, &length);
            if (name == nullptr) return PyErr_Clear();
            const Py_ssize_t room = SITE_BYTES - 16;  // the rest is for the line
            std::snprintf(site, SITE_BYTES, "%s:%d", name + std::max<Py_ssize_t>(0, length - room), PyFrame_GetLineNumber(frame.get()));
            return;
        }
        frame = Ref<PyFrameObject>::steal(reinterpret_cast<PyObject*>(PyFrame_GetBack(frame.get())));
    }
}

// Begin the next call. Throws without memory, and after the last number of a call; then nothing has begun.
static void begin(Engine& self, const Ref<PlanObject>& planned, PyObject* x, PyObject* out, bool listens) {
    if (self.node.call_count >= MOST_CALLS) ask(self, spent_name);
    if (self.node.flight.records != nullptr) note_site(self);
    std::vector<Piece>& pieces = self.walker.pieces;
    pieces.clear();
    if (is_blocks(out)) {
        uint64_t offset = 0;
        for_each_array(out, [&](PyObject* one) {
            pieces.push_back({offset, nbytes_of(one), data_of(one)});
            offset += nbytes_of(one);
        });
    }
    self.walker.begin(self.node, &planned->state.plan, data_of(x), pieces.empty() ? data_of(out) : pieces[0].start, listens);
    self.current = planned;
}

// Do a planned call from beginning to end, unless the root is in another call (`has_passed`).
static void perform(Engine& self, PyObject* name, const Ref<PlanObject>& planned, PyObject* x, PyObject* out) {
    try {
        begin(self, planned, x, out, true);
        if (!step(self, true, true)) slow_wait(self, name);
    } catch (...) {
        set_error();
        mark_failed(self, name, x, out);
        self.walker.plan = nullptr;
        throw Raised();
    }
    self.walker.plan = nullptr;
}

// Return whether the call may write to `out`. Arrays overlapping differently than planned are left to Python.
static bool may_write(const Entry* entry, PyObject* x, PyObject* out) {
    if (!entry->out.matches(out)) return false;
    bool is_writable = true, is_apart = true;
    size_t count = 0;
    for_each_array(out, [&](PyObject* array) {
        is_writable &= PyArray_ISWRITEABLE(array_of(array)) != 0;
        for_each_array(x, [&](PyObject* one) { is_apart &= !is_overlap(one, array); });
        for (size_t i = 0; i < count; i++) is_apart &= !is_overlap(PySequence_Fast_GET_ITEM(out, static_cast<Py_ssize_t>(i)), array);
        count++;
    });
    if (!is_writable) return false;
    return is_apart || (entry->inside >= 0 && data_of(x) - data_of(out) == entry->inside);
}

// Own a new object; NotImplemented in place of an error, to leave the call to Python.
static Ref<> left_if_null(PyObject* made) {
    if (made == nullptr) PyErr_Clear();
    return made == nullptr ? not_implemented() : Ref<>::steal(made);
}

// Return the input as one array: the bytes of all blocks of a list, or the array itself; NotImplemented without memory.
static Ref<> joined(PyObject* x) {
    if (!is_blocks(x)) return Ref<>::borrow(x);
    npy_intp nbytes = static_cast<npy_intp>(nbytes_of(x));
    Ref<> made = left_if_null(PyArray_SimpleNew(1, &nbytes, NPY_UINT8));
    char* to = data_of(made.get());
    for_each_array(x, [&](PyObject* one) {
        const size_t length = static_cast<size_t>(PyArray_NBYTES(array_of(one)));
        if (to != nullptr && length > 0) std::memcpy(to, data_of(one), length);
        if (to != nullptr) to += length;
    });
    return made;
}

// Return the list of the blocks of `out`, views of these lengths along the first axis; NotImplemented without memory.
static Ref<> blocks_of(const Ref<>& out, const Ref<>& lengths) {
    PyArrayObject* array = array_of(out.get());
    const Py_ssize_t count = PyTuple_GET_SIZE(lengths.get());
    Ref<> made = left_if_null(PyList_New(count));
    char* start = data_of(out.get());
    npy_intp shape[NPY_MAXDIMS];
    std::copy_n(PyArray_DIMS(array), PyArray_NDIM(array), shape);
    const npy_intp rows = shape[0], row = rows > 0 ? PyArray_NBYTES(array) / rows : 0;
    for (Py_ssize_t i = 0; i < count && made.get() != Py_NotImplemented; i++) {
        shape[0] = PyLong_AsSsize_t(PyTuple_GET_ITEM(lengths.get(), i));
        Ref<PyArray_Descr> dtype = Ref<PyArray_Descr>::borrow(PyArray_DESCR(array));  // NumPy takes over the reference
        Ref<> view = left_if_null(PyArray_NewFromDescr(&PyArray_Type, dtype.release(), PyArray_NDIM(array), shape, nullptr, start, NPY_ARRAY_CARRAY, nullptr));
        Ref<> base = out;  // NumPy takes over the reference
        if (view.get() == Py_NotImplemented || PyArray_SetBaseObject(array_of(view.get()), base.release()) != 0) {
            PyErr_Clear();
            return not_implemented();
        }
        PyList_SET_ITEM(made.get(), i, view.release());
        start += shape[0] * row;
    }
    return made;
}

// Return the array for the result, given or new; None if this rank has no result; NotImplemented if the call is left to
// Python.
static Ref<> result_of(const Engine& self, const Entry* entry, PyObject* x, PyObject* out) {
    if (entry->out.is_none()) return out == Py_None ? none() : not_implemented();
    const Plan& plan = entry->known.plan->state.plan;
    if (plan.has(OVERWRITES)) {
        const bool given = out == Py_None || out == x;
        const bool only_read = (plan.has(OWN_IN_CONTROL) || plan.by_calls) && plan.root == self.node.rank;
        const bool ready = given && (only_read || PyArray_ISWRITEABLE(array_of(x)));
        return ready ? Ref<>::borrow(x) : not_implemented();
    }
    if (out == Py_None) {
        const ArraySignature& array = entry->out.array;
        Ref<PyArray_Descr> dtype = array.dtype;  // NumPy takes over the reference
        return left_if_null(PyArray_Empty(array.axes, array.shape, dtype.release(), 0));
    }
    if (!may_write(entry, x, out)) return not_implemented();
    // A tuple keeps the arrays of a list alive: Python code may change the list during the call.
    return is_blocks(out) ? left_if_null(PySequence_Tuple(out)) : Ref<>::borrow(out);
}

// Return whether a call may run Python functions, and so a signal handler.
static bool runs_python(const PlanState& planned) { return PyTuple_GET_SIZE(planned.calls.get()) > 0; }

// Return the system's number of this thread: one system call per thread, then kept.
static long thread_number() {
    static thread_local const long number = syscall(SYS_gettid);
    return number;
}

// Holds the lock of `Progress` for a call made here, unless another thread is in a call: `is_open` says so. With `counts`
// the engine keeps its members, and a collective call of another thread is refused meanwhile.
class Gate {
  public:
    explicit Gate(Engine& engine, bool counts = true) : self(engine), counted(counts ? 1 : 0) {
        is_open = checked(PyObject_CallOneArg(self.acquire.get(), Py_False)).get() == Py_True;
        if (!is_open) return;
        self.thread = thread_number();
        self.under_way += counted;
    }
    ~Gate() {
        if (!is_open) return;
        const KeptError kept;
        Ref<>::steal(PyObject_CallNoArgs(self.release.get()));
        self.under_way -= counted;
    }
    Gate(const Gate&) = delete;

    bool is_open;

  private:
    Engine& self;
    const int counted;
};

// Do a known call; return `out`, or NotImplemented if another thread is in a call or the root in another call. `own` is
// set to this rank's own delay.
static Ref<> do_gated_call(Engine& self, const KnownCall& known, PyObject* name, PyObject* x, Ref<> out, int64_t* own) {
    const Gate gate(self);
    if (!gate.is_open || self.closed) return not_implemented();
    std::optional<CallOwner> owner;
    if (runs_python(known.plan->state)) owner.emplace(self);
    perform(self, name, known.plan, x, out.get());
    if (self.walker.has_passed) return not_implemented();
    known.note(self.walker.times);
    *own = self.walker.times.own;
    return out;
}

// Do a known call as `do_gated_call`, and let Python note a long own delay. Outside the gate: a signal handler may run in
// that function, call this communicator, and raise.
static Ref<> do_call(Engine& self, const KnownCall& known, PyObject* name, PyObject* x, Ref<> out) {
    int64_t own = 0;
    const Ref<> waits = self.waits;
    Ref<> done = do_gated_call(self, known, name, x, std::move(out), &own);
    if (own > LONG_DELAY) checked(PyObject_CallMethodObjArgs(waits.get(), on_delay_name, number(own).get(), nullptr));
    return done;
}

// Return whether arrays have the sizes of a plan.
static bool fits(const Plan& plan, PyObject* x, PyObject* out) {
    return (plan.given == 0 || nbytes_of(x) == plan.given) && (plan.taken == 0 || nbytes_of(out) == plan.taken);
}

// Raise ValueError unless arrays have the sizes of a plan, and `seconds` has room for durations and sums.
static void check_fit(const Ref<PlanObject>& planned, PyObject* x, PyObject* out, PyObject* seconds) {
    const bool has_room = seconds == nullptr || PyArray_SIZE(array_of(seconds)) > static_cast<npy_intp>(LAST + SUMS);
    if (!has_room || !fits(planned->state.plan, x, out)) raise(PyExc_ValueError, "a plan for other arrays");
}

// A call on fixed arrays: skips the search in the table.
struct BoundCall {
    Ref<Object<Engine>> engine;
    Ref<> name, x, out;
    KnownCall known;

    template <class Each> void references(Each each) {
        each(engine);
        for (Ref<>* one : {&name, &x, &out}) each(*one);
        known.references(each);
    }
    void forget() {
        references([](auto& one) { one = nullptr; });
    }
};

// Do the call once more. Return the result, or NotImplemented if the call is left to Python.
static Ref<> repeat(BoundCall& bound) {
    if (!bound.engine) return not_implemented();
    const Held held(bound.engine.object());
    Engine& engine = bound.engine->state;
    if (engine.closed) return not_implemented();
    // `ndarray.resize` may have changed an array since `bind`.
    if (!fits(bound.known.plan->state.plan, bound.x.get(), bound.out.get())) return not_implemented();
    if (!is_free(engine, engine.queue)) return not_implemented();
    return do_call(engine, bound.known, bound.name.get(), bound.x.get(), bound.out);
}

static PyObject* repeat_bound(PyObject* object, PyObject* const*, size_t, PyObject*) {
    return bordered([&] { return repeat(state_of<BoundCall>(object)); });
}

// bind(name, x, out, plan, seconds, nbytes): return a callable without arguments, doing this call.
static Ref<> bind(Engine& self, PyObject* given) {
    PyObject *name, *x, *out, *planned, *seconds;
    double nbytes;
    check(PyArg_ParseTuple(given, "OOOO!O!d", &name, &x, &out, &type_of<PlanState>, &planned, &PyArray_Type, &seconds, &nbytes));
    const auto made = make_object<BoundCall>();
    made->vectorcall = repeat_bound;
    made->state = {Ref<Object<Engine>>::borrow(self.object), Ref<>::borrow(name), Ref<>::borrow(x), Ref<>::borrow(out),
                   {Ref<PlanObject>::borrow(planned), Ref<PyArrayObject>::borrow(seconds), nbytes}};
    check_fit(made->state.known.plan, x, out, seconds);
    return Ref<>::borrow(made.get());
}

// Do a call with the arguments name, op, root or counts, algorithm, x, out; return the result, or NotImplemented if the
// call is left to Python. The input of a v-variant may be a list of arrays, the result a list of blocks.
static Ref<> call(Engine& self, PyObject* const* given) {
    const Held held(self.object);
    if (self.closed) return not_implemented();
    PyObject* x = given[OPTIONS];
    const Entry* entry = self.table.find(key_of(self, given, x, given[OPTIONS + 1]));
    if (entry == nullptr || !is_free(self, self.queue)) return not_implemented();
    // Copies with references: the steps below may run Python, and Python may close the communicator and clear the
    // table.
    const KnownCall known = entry->known;
    const Ref<> lengths = given[OPTIONS + 1] == Py_None ? entry->lengths : nullptr;
    Ref<> out = result_of(self, entry, x, given[OPTIONS + 1]);
    if (out.get() == Py_NotImplemented) return out;
    // Memory is taken before the call: afterwards a rank without memory would have received, and lost, its result.
    const Ref<> source = joined(x);
    const Ref<> blocks = is_blocks(given[OPTIONS + 1]) ? Ref<>::borrow(given[OPTIONS + 1]) : lengths ? blocks_of(out, lengths) : nullptr;
    if (source.get() == Py_NotImplemented || blocks.get() == Py_NotImplemented) return not_implemented();
    if (!fits(known.plan->state.plan, source.get(), out.get())) return not_implemented();
    const Ref<> result = do_call(self, known, given[0], source.get(), std::move(out));
    return blocks && result.get() != Py_NotImplemented ? blocks : result;
}

// Engine.__call__(name, op, root or counts, algorithm, x, out): see `call`. With three more arguments, dtype, stream and
// async_op, `python` makes a call left to Python with these nine, as each call with one of the three options.
static Ref<> call_or_leave(Engine& self, PyObject* const* given, size_t count, PyObject* names) {
    const Py_ssize_t length = PyVectorcall_NARGS(count);
    const bool has_options = length == OPTIONS + 5;
    if ((length != OPTIONS + 2 && !has_options) || names != nullptr || (!self.waits && !self.closed))
        raise(PyExc_TypeError, "the engine takes six or nine arguments, once it has a gate");
    PyObject* const* more = given + OPTIONS + 2;
    const bool is_left = has_options && (more[0] != Py_None || more[1] != Py_None || more[2] != Py_False);
    const Ref<> python = self.python;  // a reference of our own: Python may drop the engine
    Ref<> done = is_left ? not_implemented() : call(self, given);
    if (!has_options || done.get() != Py_NotImplemented) return done;
    return checked(PyObject_Vectorcall(python.get(), given, count, nullptr));
}

static PyObject* call_engine(PyObject* object, PyObject* const* given, size_t count, PyObject* names) {
    return bordered([&] { return call_or_leave(state_of<Engine>(object), given, count, names); });
}

// cache_call(name, op, root or counts, algorithm, x, result, the caller's out, plan, seconds, nbytes, lengths, text,
// signature): do similar calls here from now on; return whether they can be done here. With `lengths`, a tuple, the result
// is the list of the blocks of a new array. `text` and `signature` describe the call under another name (`cache_renamed`).
static Ref<> cache_call(Engine& self, PyObject* given) {
    PyObject *options[OPTIONS], *x, *out, *callers, *planned, *seconds, *lengths = Py_None;
    const char* text = "";
    long long signature = 0;
    double nbytes;
    check(PyArg_ParseTuple(given, "OOOOOOOO!O!d|OsL", options, options + 1, options + 2, options + 3, &x, &out, &callers,
                           &type_of<PlanState>, &planned, &PyArray_Type, &seconds, &nbytes, &lengths, &text, &signature));
    if (lengths != Py_None && !PyTuple_CheckExact(lengths)) raise(PyExc_TypeError, "lengths are a tuple");
    if (!SideSignature::describes(x) || !SideSignature::describes(out)) return truth(false);
    if (is_blocks(out) && !reinterpret_cast<PlanObject*>(planned)->state.plan.may_split(self.node.rank)) return truth(false);
    const CallKey key = key_of(self, options, x, callers);
    Entry made = {{}, SideSignature::of(x), SideSignature::of(out), callers == Py_None, inside_of(x, callers), key.symmetric,
                  lengths == Py_None ? nullptr : Ref<>::borrow(lengths), text, signature,
                  {Ref<PlanObject>::borrow(planned), Ref<PyArrayObject>::borrow(seconds), nbytes}};
    check_fit(made.known.plan, x, out, seconds);
    self.table.add(key, std::move(made));
    return truth(true);
}

// cache_renamed(known name, name, op, root or counts, algorithm, x, the caller's out): do a known call under another name,
// too, with the description given to `cache_call`.
static Ref<> cache_renamed(Engine& self, PyObject* given) {
    PyObject *known, *options[OPTIONS], *x, *out;
    check(PyArg_ParseTuple(given, "OOOOOOO", &known, options, options + 1, options + 2, options + 3, &x, &out));
    PyObject* others[OPTIONS] = {known, options[1], options[2], options[3]};
    const Entry* entry = self.table.find(key_of(self, others, x, out));
    if (entry == nullptr || entry->description.empty()) return none();
    Entry made = *entry;
    made.known.plan = renamed_plan(made.known.plan->state, made.description.c_str(), made.signature);
    self.table.add(key_of(self, options, x, out), std::move(made));
    return none();
}

}  // namespace gpucoll
