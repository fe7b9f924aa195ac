// The short way of small calls on the host. One that looks like a call that Python has checked before, by its options
// and by the shapes and dtypes of its arrays, is done here from its beginning to its end, by slots or by walking a
// schedule (engine.h); all others are Python's.
#pragma once
#include <algorithm>
#include <cstddef>

#include "walks.h"

static const int MOST_AXES = 6;
static const uint64_t ENTRIES = 128;
static const uint64_t LAST = 32;  // times kept of each kind of call

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

// What a call is, whatever its arrays.
struct Kind {
    What what;
    uint64_t root;
    Combine combine;  // null where nothing is reduced
    uint64_t nbytes;  // of a block
    uint64_t tag;     // tells it from others
};

// A call that was checked. The objects are told apart by identity: equal ones that are not the same are Python's.
struct Entry {
    PyObject* options[4];  // what is called, op, root, algorithm
    Look x, out;
    Kind kind;
    Walk* walk;              // or null; of the kind it takes what it writes
    PyObject* telling;       // or null: a Walk by which the root tells of the call, what it told, and a row for the next
    PyArrayObject* seconds;  // how many were noted, and the last LAST of them
};

struct Slots {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    View view;
    Node node;
    Call call;
    Walker walker;
    PyObject *acquire, *release, *queue, *waits;  // of `gpucoll.waits`
    PyObject* watch;                              // looks after other ranks' failures, or tells them of this rank's
    PyObject* errors;                             // the class of what it raises
    bool closed;
    int under_way;  // calls of threads: what they use stays
    uint64_t walks;  // how many there were
    uint64_t refusals;
    Entry* entries;
};

static PyObject *failure_name, *owner_name, *linger_name, *broken_name, *mismatch_name;

static Entry* entry_for(Slots* self, PyObject* const* options, PyObject* x) {
    const bool given = is_array(x);
    uint64_t hash = 0;
    for (int axis = 0; given && axis < PyArray_NDIM(array_of(x)); axis++)
        hash = (hash ^ static_cast<uint64_t>(PyArray_DIM(array_of(x), axis))) * 0x9e3779b97f4a7c15u;
    for (int i = 0; i < 4; i++) hash = (hash ^ (reinterpret_cast<uintptr_t>(options[i]) >> 4)) * 0x9e3779b97f4a7c15u;
    if (given) hash = (hash ^ (reinterpret_cast<uintptr_t>(PyArray_DESCR(array_of(x))) >> 4)) * 0x9e3779b97f4a7c15u;
    return self->entries + (hash >> 32) % ENTRIES;
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
static int is_free(Slots* self) {
    const Py_ssize_t waiting = PyObject_Size(self->queue);
    if (waiting != 0) return waiting < 0 ? -1 : 0;
    PyObject* failure = PyObject_GetAttr(self->waits, failure_name);
    if (failure == nullptr) return -1;
    Py_DECREF(failure);
    return failure == Py_None;
}

// Tells Python, and the other ranks, that a call has broken down, whose error is set and stays.
static void spoil(Slots* self, PyObject* name) {
    PyObject *kind, *error, *trace;
    PyErr_Fetch(&kind, &error, &trace);
    PyErr_NormalizeException(&kind, &error, &trace);
    Py_XDECREF(PyObject_CallMethodObjArgs(self->waits, broken_name, error, name, nullptr));
    if (PyErr_Occurred()) PyErr_WriteUnraisable(self->waits);
    Py_XDECREF(PyObject_CallOneArg(self->watch, error));
    if (PyErr_Occurred()) PyErr_WriteUnraisable(self->watch);
    PyErr_Restore(kind, error, trace);
}

// Waits on in Python, which looks at the deadline; whatever a signal does there meanwhile. False: an error.
static bool linger(Slots* self, PyObject* name) {
    PyObject* thread = PyLong_FromUnsignedLong(PyThread_get_thread_ident());
    const bool owned = thread != nullptr && PyObject_SetAttr(self->waits, owner_name, thread) == 0;
    PyObject* found = owned ? PyObject_CallMethodObjArgs(self->waits, linger_name, self, name, nullptr) : nullptr;
    Py_XDECREF(thread);
    if (found == nullptr) spoil(self, name);
    PyObject *kind, *error, *trace;
    PyErr_Fetch(&kind, &error, &trace);
    PyObject_SetAttr(self->waits, owner_name, Py_None);
    PyErr_Restore(kind, error, trace);
    Py_XDECREF(found);
    return found != nullptr;
}

// Waits for all ranks, without holding up other threads; after PATIENCE in Python. False: an error.
static bool meet(Slots* self, PyObject* name) {
    if (is_over(self->view, self->call.meeting)) return true;
    bool done;
    Py_BEGIN_ALLOW_THREADS
    done = have_come(self->view, self->call.meeting);
    Py_END_ALLOW_THREADS
    return done || linger(self, name);
}

// Looks after the failure of a rank, or of all where there is none: whether one has failed, with an error set. False
// with an error set: another one, as a signal's.
static bool has_failed(Slots* self, int64_t rank) {
    PyObject* awaited = rank < 0 ? Py_NewRef(Py_None) : PyLong_FromLongLong(rank);
    PyObject* found = awaited == nullptr ? nullptr
                                         : PyObject_CallFunctionObjArgs(self->watch, Py_None, awaited, nullptr);
    Py_XDECREF(awaited);
    Py_XDECREF(found);
    return found == nullptr && PyErr_ExceptionMatches(self->errors);
}

// Raises that ranks make different calls, and returns null; all of them do.
static PyObject* mismatch(Slots* self, PyObject* name) {
    const View& view = self->view;
    PyObject* signs = PyList_New(0);
    for (uint64_t rank = 0; signs != nullptr && rank < view.ranks; rank++) {
        const Sign* sign = view.sign(rank, self->call.turn);
        PyObject* shown = Py_BuildValue("KK", static_cast<unsigned long long>(sign->tag),
                                        static_cast<unsigned long long>(sign->refusals));
        if (shown == nullptr || PyList_Append(signs, shown) < 0) Py_CLEAR(signs);
        Py_XDECREF(shown);
    }
    if (signs != nullptr) Py_XDECREF(PyObject_CallMethodObjArgs(self->waits, mismatch_name, name, signs, nullptr));
    Py_XDECREF(signs);
    return nullptr;
}

static void begin(Slots* self, PyArrayObject* x, PyArrayObject* out, const Kind& kind) {
    Call* call = &self->call;
    call->from = static_cast<const char*>(PyArray_DATA(x));
    call->to = static_cast<char*>(PyArray_DATA(out));
    call->what = kind.what;
    call->root = kind.root;
    call->combine = kind.combine;
    call->nbytes = kind.nbytes;
    call->tag = kind.tag;
    call->refusals = self->refusals;
    self->node.announce(false);
    call->begin(self->view);
}

// Goes on after a meeting; other threads may run meanwhile where it takes long.
static bool go_on(Slots* self) {
    if (self->call.nbytes < LONG) return self->call.go_on(self->view);
    bool done;
    Py_BEGIN_ALLOW_THREADS
    done = self->call.go_on(self->view);
    Py_END_ALLOW_THREADS
    return done;
}

// Goes on with a walk until it waits; -1 with an error set, where another rank makes another call.
static int step(Slots* self) {
    Walker::Outcome outcome;
    Py_BEGIN_ALLOW_THREADS
    outcome = self->walker.go_on(self->node);
    Py_END_ALLOW_THREADS
    if (outcome != Walker::DIFFERS) return outcome == Walker::DONE;
    self->node.heads[self->node.rank]->failure.store(ASTRAY, std::memory_order_release);
    has_failed(self, static_cast<int64_t>(self->node.rank));
    return -1;
}

// Walks a schedule from its beginning to its end; false with an error set.
static bool walk(Slots* self, PyObject* name, PyObject* x, PyObject* out, Walk* walked) {
    Py_INCREF(walked);
    self->walks++;
    self->walker.begin(self->node, walked->plan, is_array(x) ? static_cast<char*>(PyArray_DATA(array_of(x))) : nullptr,
                       is_array(out) ? static_cast<char*>(PyArray_DATA(array_of(out))) : nullptr, self->refusals);
    const int done = step(self);
    if (done < 0) spoil(self, name);
    const bool well = done > 0 || (done == 0 && linger(self, name));
    self->walker.plan = nullptr;
    Py_DECREF(walked);
    return well;
}

// Does a call by slots; false with an error set. Another thread may change the entries meanwhile.
static bool exchange(Slots* self, PyObject* name, PyArrayObject* x, PyArrayObject* out, Kind kind) {
    if (self->view.ranks == 1) {
        void *from = PyArray_DATA(x), *to = PyArray_DATA(out);
        const size_t nbytes = static_cast<size_t>(PyArray_NBYTES(x));
        if (from == to) return true;
        Py_BEGIN_ALLOW_THREADS
        std::memcpy(to, from, nbytes);
        Py_END_ALLOW_THREADS
        return true;
    }
    begin(self, x, out, kind);
    do {
        if (!meet(self, name)) return false;
    } while (!go_on(self));
    return !self->call.differs || mismatch(self, name) != nullptr;
}

// Whether a result may be written: arrays that share memory otherwise than as one are Python's.
static bool may_write(const Entry* entry, PyObject* x, PyObject* out) {
    if (!entry->out.is_of(out) || !PyArray_ISWRITEABLE(array_of(out))) return false;
    if (!is_array(x)) return true;
    const char *from = static_cast<char*>(PyArray_DATA(array_of(x))),
               *to = static_cast<char*>(PyArray_DATA(array_of(out)));
    const npy_intp given = PyArray_NBYTES(array_of(x)), taken = PyArray_NBYTES(array_of(out));
    return (from == to && given == taken) || from + given <= to || to + taken <= from;
}

// Returns the array for the result, which is given or new, null with an error set; None where the call is Python's, and
// the slots themselves where there is no result.
static PyObject* result_of(Slots* self, const Entry* entry, PyObject* x, PyObject* out) {
    if (entry->out.dtype == nullptr) return Py_NewRef(out == Py_None ? reinterpret_cast<PyObject*>(self) : Py_None);
    if (entry->kind.what == BROADCAST) {
        const bool given = out == Py_None || out == x;
        const bool ready = given && (entry->kind.root == self->view.rank || PyArray_ISWRITEABLE(array_of(x)));
        return Py_NewRef(ready ? x : Py_None);
    }
    if (out == Py_None) {
        Py_INCREF(entry->out.dtype);
        return PyArray_Empty(entry->out.axes, entry->out.shape, entry->out.dtype, 0);
    }
    return Py_NewRef(may_write(entry, x, out) ? out : Py_None);
}

// Walks what the root tells of a call before it: whether it is what it told before, on the root always; -1 with an error
// set.
static int hear(Slots* self, PyObject* name, PyObject* telling) {
    Walk* walked = reinterpret_cast<Walk*>(PyTuple_GET_ITEM(telling, 0));
    const bool is_root = walked->plan->root == self->view.rank;
    PyObject *told = PyTuple_GET_ITEM(telling, 1), *heard = PyTuple_GET_ITEM(telling, 2);
    PyObject* row = is_root ? told : heard;
    if (!walk(self, name, row, row, walked)) return -1;
    return is_root || std::memcmp(PyArray_DATA(array_of(told)), PyArray_DATA(array_of(heard)), walked->plan->taken) == 0;
}

// Does a known call unless another thread is in one; returns `out`, which it takes, None, or null with an error set;
// what the root has told, where that is another call.
static PyObject* do_call(Slots* self, const Entry& known, PyObject* name, PyObject* x, PyObject* out) {
    PyObject* mine = PyObject_CallOneArg(self->acquire, Py_False);
    if (mine != Py_True) {
        Py_DECREF(out);
        if (mine == nullptr) return nullptr;
        Py_DECREF(mine);
        Py_RETURN_NONE;
    }
    Py_DECREF(mine);
    const double started = now();
    self->under_way++;
    const int same = self->closed || known.telling == nullptr ? 1 : hear(self, name, known.telling);
    if (self->closed) {
        Py_SETREF(out, Py_NewRef(Py_None));
    } else if (same < 0) {
        Py_CLEAR(out);
    } else if (same == 0) {
        Py_SETREF(out, Py_NewRef(PyTuple_GET_ITEM(known.telling, 2)));
    } else if (known.walk != nullptr ? walk(self, name, x, out, known.walk)
                                     : exchange(self, name, array_of(x), array_of(out), known.kind)) {
        note(known.seconds, now() - started);
    } else {
        Py_CLEAR(out);
    }
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    Py_XDECREF(PyObject_CallNoArgs(self->release));
    PyErr_Restore(kind, value, trace);
    self->under_way--;
    return out;
}

// (what is called, op, root, algorithm, x, out): does the call and returns `out`, or None where it is not known here.
static PyObject* call(PyObject* object, PyObject* const* given, size_t count, PyObject* names) {
    Slots* self = reinterpret_cast<Slots*>(object);
    if (PyVectorcall_NARGS(count) != 6 || names != nullptr || (self->waits == nullptr && !self->closed)) {
        PyErr_SetString(PyExc_TypeError, "slots take six arguments, once they have a gate");
        return nullptr;
    }
    if (self->closed) Py_RETURN_NONE;
    PyObject* x = given[4];
    const Entry* entry = entry_for(self, given, x);
    if (std::memcmp(entry->options, given, sizeof entry->options) != 0 || !entry->x.is_of(x)) Py_RETURN_NONE;
    const int free = is_free(self);
    if (free <= 0) return free < 0 ? nullptr : Py_NewRef(Py_None);
    Entry known = *entry;  // what follows may run Python, and that may close the communicator
    Py_XINCREF(known.walk);
    Py_XINCREF(known.telling);
    Py_INCREF(known.seconds);
    PyObject* out = result_of(self, entry, x, given[5]);
    if (out != nullptr && out != Py_None) out = do_call(self, known, given[0], x, out);
    Py_XDECREF(known.walk);
    Py_XDECREF(known.telling);
    Py_DECREF(known.seconds);
    return out;
}

// Leaves in `found` what a call of these arrays is; false with an error set for one that slots do not do.
static bool kind_of(const Slots* self, PyArrayObject* x, PyArrayObject* out, int what, long dtype, long op,
                    uint64_t signature, uint64_t root, Kind* found) {
    const uint64_t ranks = self->view.ranks, given = static_cast<uint64_t>(PyArray_NBYTES(x)),
                   taken = static_cast<uint64_t>(PyArray_NBYTES(out));
    const bool reduces = what == ONE_SHOT || what == TWO_SHOT || what == REDUCE_SCATTER;
    const uint64_t more = what == ALL_GATHER ? ranks : 1, fewer = what == REDUCE_SCATTER ? ranks : 1;
    *found = {static_cast<What>(what), root, reduces ? combine_of(dtype, op) : nullptr,
              what == ALL_TO_ALL ? given / ranks : given < taken ? given : taken, 0};
    found->tag = signature ^ ((found->nbytes * 8 + static_cast<uint64_t>(what)) * 4096 + root) * 0x9e3779b97f4a7c15u;
    if (what >= 0 && what <= COPY && (what != COPY || ranks == 1) && given * more == taken * fewer
        && (!reduces || found->combine != nullptr || ranks == 1) && root < ranks)
        return true;
    PyErr_SetString(PyExc_ValueError, "slots do no such calls");
    return false;
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

// Whether entries tell such arrays, or None.
static bool has_look(PyObject* x) { return x == Py_None || (is_array(x) && PyArray_NDIM(array_of(x)) <= MOST_AXES); }

// Returns the kind of call of (What, dtype's and op's places, signature); false with an error set.
static bool kind_in(const Slots* self, PyObject* step, PyObject* x, PyObject* out, PyObject* root, Kind* found) {
    int what;
    long dtype, op;
    unsigned long long signature;
    const unsigned long long from = PyLong_AsUnsignedLongLong(root);
    return !PyErr_Occurred() && PyArg_ParseTuple(step, "illK", &what, &dtype, &op, &signature)
           && kind_of(self, array_of(x), array_of(out), what, dtype, op, signature, from, found);
}

// learn(what is called, op, root, algorithm, x, out, a Walk or (What, dtype's and op's places, signature), seconds):
// such calls are done here from now on.
static PyObject* learn(PyObject* object, PyObject* given) {
    Slots* self = reinterpret_cast<Slots*>(object);
    PyObject *options[4], *x, *out, *step, *seconds;
    if (!PyArg_ParseTuple(given, "OOOOOOOO!", options, options + 1, options + 2, options + 3, &x, &out, &step,
                          &PyArray_Type, &seconds))
        return nullptr;
    Walk* walked = Py_TYPE(step) == &walk_type ? reinterpret_cast<Walk*>(step) : nullptr;
    if (!has_look(x) || !has_look(out) || PyArray_SIZE(array_of(seconds)) <= static_cast<npy_intp>(LAST)) Py_RETURN_NONE;
    Kind kind = {COPY, 0, nullptr, 0, 0};
    if (walked != nullptr ? !fits(walked->plan, x, out)
                          : !is_array(x) || !is_array(out) || !kind_in(self, step, x, out, options[2], &kind)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "slots do no such calls");
        return nullptr;
    }
    if (walked != nullptr && walked->plan->overwrites) kind = {BROADCAST, walked->plan->root, nullptr, 0, 0};
    Entry* entry = entry_for(self, options, x);
    for (int i = 0; i < 4; i++) Py_XSETREF(entry->options[i], Py_NewRef(options[i]));
    look_at(&entry->x, x);
    look_at(&entry->out, out);
    entry->kind = kind;
    Py_XINCREF(walked);
    Py_XSETREF(entry->walk, walked);
    Py_CLEAR(entry->telling);
    Py_INCREF(seconds);
    Py_XSETREF(entry->seconds, array_of(seconds));
    Py_RETURN_NONE;
}

// Whether rows of bytes are as long as a walk by which a root tells of a call writes them.
static bool may_tell(PyObject* telling) {
    if (PyTuple_GET_SIZE(telling) != 3 || Py_TYPE(PyTuple_GET_ITEM(telling, 0)) != &walk_type) return false;
    const Plan* plan = reinterpret_cast<Walk*>(PyTuple_GET_ITEM(telling, 0))->plan;
    for (Py_ssize_t i = 1; i < 3; i++) {
        PyObject* row = PyTuple_GET_ITEM(telling, i);
        if (!is_array(row) || static_cast<uint64_t>(PyArray_NBYTES(array_of(row))) < std::max(plan->given, plan->taken)
            || !PyArray_CHKFLAGS(array_of(row), NPY_ARRAY_CARRAY))
            return false;
    }
    return plan->overwrites;
}

// tell(another name, what is called, op, root, algorithm, x, out, (Walk, what the root told, a row for what it will tell)):
// by the other name such a call begins with what the root tells of it.
static PyObject* tell(PyObject* object, PyObject* given) {
    Slots* self = reinterpret_cast<Slots*>(object);
    PyObject *name, *options[4], *x, *out, *telling;
    if (!PyArg_ParseTuple(given, "OOOOOOOO!", &name, options, options + 1, options + 2, options + 3, &x, &out,
                          &PyTuple_Type, &telling))
        return nullptr;
    if (!may_tell(telling)) {
        PyErr_SetString(PyExc_ValueError, "nothing that a root can tell");
        return nullptr;
    }
    const Entry* known = entry_for(self, options, x);
    if (std::memcmp(known->options, options, sizeof options) != 0 || !known->x.is_of(x) || !known->out.is_of(out))
        Py_RETURN_FALSE;
    const Entry from = *known;
    options[0] = name;
    Entry* entry = entry_for(self, options, x);
    if (entry == known) Py_RETURN_FALSE;
    for (int i = 0; i < 4; i++) Py_XSETREF(entry->options[i], Py_NewRef(options[i]));
    Py_XINCREF(from.x.dtype);
    Py_XINCREF(from.out.dtype);
    Py_XINCREF(from.walk);
    Py_INCREF(from.seconds);
    Py_XSETREF(entry->x.dtype, from.x.dtype);
    Py_XSETREF(entry->out.dtype, from.out.dtype);
    Py_XSETREF(entry->walk, from.walk);
    Py_XSETREF(entry->seconds, from.seconds);
    Py_XSETREF(entry->telling, Py_NewRef(telling));
    entry->x = from.x;
    entry->out = from.out;
    entry->kind = from.kind;
    Py_RETURN_TRUE;
}
