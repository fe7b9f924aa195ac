// Messages of `mail.h` for Python: requests like those of mpi4py, and blocking messages (`exchange`).
//
// A blocking message usually ends in C++, without Python's lock. A message still under way after a short wait becomes
// a request, and Python waits for the rest. The danger throughout is memory: the array of a message must stay alive
// while this rank or the peer may still read or write it, even after an error or the end of the Python objects.
#pragma once
#include "binding/calls.h"
#include "engine/mail.h"

namespace gpucoll {

// A message under way. Holds a reference to the array while this rank or the peer may access its memory.
struct Request {
    PyObject_HEAD
    PyObject* engine;
    std::shared_ptr<Transfer> transfer;
    PyObject* kept;  // the array; null once released
};

static PyTypeObject request_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

// Cancel a message unless complete. Return whether the memory is free: no rank will access it. A rendezvous message
// shown to the peer keeps the memory. The acknowledgement is not read: the mailbox may be unmapped already.
static bool let_go(Engine* engine, const std::shared_ptr<Transfer>& transfer) {
    if (transfer->done) return true;
    engine->mail.call_back(transfer);
    return transfer->ticket == 0;
}

// Return a new request, or null with an error set.
static PyObject* make_request(Engine* engine, const std::shared_ptr<Transfer>& transfer, PyObject* kept) {
    Request* self = reinterpret_cast<Request*>(request_type.tp_alloc(&request_type, 0));
    if (self == nullptr) return nullptr;
    new (&self->transfer) std::shared_ptr<Transfer>(transfer);
    self->engine = Py_NewRef(reinterpret_cast<PyObject*>(engine));
    self->kept = Py_NewRef(kept);
    return reinterpret_cast<PyObject*>(self);
}

static int traverse_request(PyObject* object, visitproc visit, void* arg) {
    Py_VISIT(reinterpret_cast<Request*>(object)->engine);
    Py_VISIT(reinterpret_cast<Request*>(object)->kept);
    return 0;
}

// Cancel the message and release the array. If the peer may still read the memory (a rendezvous message), leak the
// array.
static int forget_request(PyObject* object) {
    Request* self = reinterpret_cast<Request*>(object);
    if (self->kept == nullptr) return 0;
    Engine* engine = reinterpret_cast<Engine*>(self->engine);
    PyObject* kept = self->kept;
    self->kept = nullptr;
    // Another thread uses `Mailbox` without Python's lock: hand the message over, to be cancelled by that thread. Beyond
    // MOST_DROPPED leak the array: a garbage collection may run here, and must not allocate or throw.
    if (engine->exchanges) {
        if (engine->dropped.size() < MOST_DROPPED) engine->dropped.emplace_back(self->transfer, kept);  // has room: no throw
        return 0;
    }
    if (!let_go(engine, self->transfer)) return 0;
    Py_DECREF(kept);
    return 0;
}

static void unmake_request(PyObject* object) {
    Request* self = reinterpret_cast<Request*>(object);
    PyObject_GC_UnTrack(object);
    forget_request(object);
    self->transfer.~shared_ptr();
    Py_XDECREF(self->engine);
    Py_TYPE(object)->tp_free(object);
}

// Advance all messages. Return whether this one is complete, or -1 with an error set if memory is out of reach.
static int look(Request* self) {
    Engine* engine = reinterpret_cast<Engine*>(self->engine);
    if (!engine->mail.has_ended(*self->transfer)) engine->mail.go_on(engine->node);
    if (self->transfer->error == 0) return engine->mail.has_ended(*self->transfer);
    return ask(engine, out_of_reach_name, PyLong_FromLong(self->transfer->error)) ? 0 : -1;
}

// Test(): return whether the message is complete.
static PyObject* test_request(PyObject* object, PyObject*) {
    const int done = look(reinterpret_cast<Request*>(object));
    return done < 0 ? nullptr : PyBool_FromLong(done);
}

// Cancel(): withdraw a posted receive, or a send still without a slot.
static PyObject* cancel_request(PyObject* object, PyObject*) {
    Request* self = reinterpret_cast<Request*>(object);
    if (!self->transfer->done) reinterpret_cast<Engine*>(self->engine)->mail.call_back(self->transfer);
    Py_RETURN_NONE;
}

// Wait(): do nothing. Present for the interface of mpi4py's requests; callers wait by `Test`.
static PyObject* wait_request(PyObject*, PyObject*) { Py_RETURN_NONE; }

// length: the bytes of the message received, None while incomplete.
static PyObject* length_of(PyObject* object, void*) {
    Request* self = reinterpret_cast<Request*>(object);
    const int done = look(self);
    if (done <= 0) return done < 0 ? nullptr : Py_NewRef(Py_None);
    return PyLong_FromUnsignedLongLong(self->transfer->length);
}

// came: the dtype code of the message received, 0 while incomplete.
static PyObject* dtype_of(PyObject* object, void*) {
    return PyLong_FromUnsignedLong(reinterpret_cast<Request*>(object)->transfer->came);
}

// Return the code of one of NumPy's own dtypes: a row of CODES by kind, a column by log2 of the size.
static uint16_t code_of(PyObject* array) {
    const char kind = PyArray_DESCR(array_of(array))->kind;
    const int row = kind == 'b' ? 0 : kind == 'i' ? 1 : kind == 'u' ? 2 : kind == 'f' ? 3 : 4;
    return CODES[row][__builtin_ctz(static_cast<unsigned>(PyArray_ITEMSIZE(array_of(array))))];
}

// Return a transfer of a whole array. Throws std::bad_alloc.
static std::shared_ptr<Transfer> transfer_of(bool sends, PyObject* array, uint32_t peer, uint32_t tag,
                                             uint16_t dtype) {
    auto made = std::make_shared<Transfer>();
    made->sends = sends;
    made->peer = peer;
    made->tag = tag;
    made->dtype = dtype;
    made->row = data_of(array);
    made->nbytes = static_cast<uint64_t>(PyArray_NBYTES(array_of(array)));
    return made;
}

// message(sends, row, peer, tag, dtype): begin a send or receive; return the request.
static PyObject* message(PyObject* object, PyObject* given) {
    Engine* self = reinterpret_cast<Engine*>(object);
    int sends;
    PyObject* row;
    unsigned long peer, tag;
    unsigned short dtype = BYTES;
    if (!PyArg_ParseTuple(given, "pO!kk|H", &sends, &PyArray_Type, &row, &peer, &tag, &dtype)) return nullptr;
    if (!self->mail.reaches(peer) || !PyArray_IS_C_CONTIGUOUS(array_of(row)))
        return PyErr_Format(PyExc_ValueError, "no message to rank %lu", peer);
    const auto transfer = transfer_of(sends != 0, row, static_cast<uint32_t>(peer), static_cast<uint32_t>(tag),
                                      dtype);
    // The request first: once begun, the message needs an owner of its memory.
    PyObject* made = make_request(self, transfer, row);
    if (made != nullptr) self->mail.begin(self->node, transfer);
    return made;
}

// probe(source, tag): return source, tag and bytes of an unexpected message, or None; -1 matches any source or tag.
// None as well while another thread is in a call: `Mailbox` admits a single thread.
static PyObject* probe(PyObject* object, PyObject* given) {
    Engine* self = reinterpret_cast<Engine*>(object);
    long long from, tag;
    if (!PyArg_ParseTuple(given, "LL", &from, &tag)) return nullptr;
    int64_t source = from;
    const Connection::UnexpectedMessage* found = self->under_way > 0 ? nullptr : self->mail.seen(self->node, &source, tag);
    if (found == nullptr) return Py_NewRef(Py_None);
    return Py_BuildValue("LkK", static_cast<long long>(source), static_cast<unsigned long>(found->tag),
                         static_cast<unsigned long long>(found->nbytes));
}

// Return whether `exchange` can use an array as it is: contiguous, native byte order, a NumPy dtype with a code, and
// a same-node peer, stored in `rank`. All other messages are left to Python.
static bool is_plain(const Engine* self, PyObject* array, PyObject* peer, bool writes, uint32_t* rank) {
    if (!is_array(array) || !PyLong_CheckExact(peer)) return false;
    const long number = PyLong_AsLong(peer);
    if (number < 0) PyErr_Clear();
    *rank = static_cast<uint32_t>(number);
    const int kind = PyArray_TYPE(array_of(array));
    return number >= 0 && self->mail.reaches(static_cast<uint64_t>(number))
           && PyArray_CHKFLAGS(array_of(array), writes ? NPY_ARRAY_CARRAY : NPY_ARRAY_CARRAY_RO)
           && PyArray_ISNOTSWAPPED(array_of(array))
           && (PyTypeNum_ISBOOL(kind) || PyTypeNum_ISINTEGER(kind) || kind == NPY_HALF || kind == NPY_FLOAT
               || kind == NPY_DOUBLE || kind == NPY_CFLOAT || kind == NPY_CDOUBLE);
}

// Return whether two arrays share no memory.
static bool are_apart(PyObject* x, PyObject* out) {
    const char *from = data_of(x), *to = data_of(out);
    return from + PyArray_NBYTES(array_of(x)) <= to || to + PyArray_NBYTES(array_of(out)) <= from;
}

// Wait a short time for a send and a receive, either of them null. Return whether both are complete; a longer wait is
// left to Python.
static bool await_both(Engine* self, Transfer* sent, Transfer* came) {
    if (sent == nullptr && came == nullptr) return true;
    Backoff backoff = {self->node, self->node.heads[(came != nullptr ? came : sent)->peer]};
    for (uint64_t look = 0;; look++) {
        const bool done = (sent == nullptr || self->mail.has_ended(*sent)) && (came == nullptr || came->done);
        if (done) return true;
        // Mostly look at the two peers only: a look at all mailboxes costs a cache line each. Now and then look at
        // all: third ranks may wait for free slots.
        if (look % 64 == 63) {
            self->mail.go_on(self->node);
        } else {
            for (Transfer* one : {sent, came})
                if (one != nullptr && !one->done) self->mail.go_on(self->node, one->peer);
        }
        // The first looks spin: most messages arrive before the clock is worth reading.
        if (look < RELAXES && self->node.spins) {
            cpu_relax();
        } else if (!backoff.pause()) {
            return false;
        }
    }
}

// Cancel the messages of requests dropped during this thread's `exchange`. Requires Python's lock.
static void call_back_dropped(Engine* self) {
    while (!self->dropped.empty()) {
        const auto [transfer, kept] = self->dropped.back();
        self->dropped.pop_back();
        if (let_go(self, transfer)) Py_DECREF(kept);
    }
}

// The send and the receive of an exchange; either may be null.
struct Ends {
    std::shared_ptr<Transfer> sent, came;
    bool has_begun = false;  // both have begun; false after a lack of memory

    // Return whether a peer, or `Mailbox`, may access the arrays.
    bool is_at_memory() const { return sent != nullptr || has_begun; }
};

// Send x and receive out, unless None, without Python's lock. Return whether both are complete. The send comes first,
// so that the peer reads while this rank prepares the receive.
static bool exchange_both(Engine* self, PyObject* x, uint32_t dst, PyObject* out, uint32_t src, uint32_t tag, Ends* ends) {
    const Unlocked unlocked;
    try {
        if (x != Py_None) {
            auto sent = transfer_of(true, x, dst, tag, code_of(x));
            self->mail.begin(self->node, sent);
            ends->sent = std::move(sent);
        }
        if (out != Py_None) {
            ends->came = transfer_of(false, out, src, tag, code_of(out));
            self->mail.begin(self->node, ends->came);
        }
        ends->has_begun = true;
        return await_both(self, ends->sent.get(), ends->came.get());
    } catch (const std::bad_alloc&) {
        return false;  // if `has_begun`, Python waits for the rest
    }
}

// exchange(x, dst, out, src, tag): send x and receive out, unless None. Return True if both are complete and the
// message fits the array. Otherwise return a pair of requests (receive, send), for Python to wait or to raise the
// error. Return NotImplemented if Python must do the whole call.
static PyObject* exchange(PyObject* object, PyObject* const* given, Py_ssize_t count) {
    Engine* self = reinterpret_cast<Engine*>(object);
    if (count != 5) return PyErr_Format(PyExc_TypeError, "exchange takes five arguments");
    PyObject *x = given[0], *out = given[2];
    uint32_t dst = 0, src = 0;
    const long tag = PyLong_CheckExact(given[4]) ? PyLong_AsLong(given[4]) : -1;
    if (PyErr_Occurred()) PyErr_Clear();
    if (tag < 0 || tag >= 1 << 15 || self->closed || self->waits == nullptr) Py_RETURN_NOTIMPLEMENTED;
    if ((x != Py_None && !is_plain(self, x, given[1], false, &dst))
        || (out != Py_None && !is_plain(self, out, given[3], true, &src))
        || (x != Py_None && out != Py_None && !are_apart(x, out)))
        Py_RETURN_NOTIMPLEMENTED;
    // Queued messages of this communicator come first: messages with the same tag must not overtake each other.
    const Py_ssize_t alone = PyObject_Size(self->alone);
    PyObject* failure = alone < 0 ? nullptr : PyObject_GetAttr(self->waits, failure_name);
    if (failure == nullptr) return nullptr;
    Py_DECREF(failure);
    if (alone > 0 || failure != Py_None) Py_RETURN_NOTIMPLEMENTED;
    // The lock of `Progress`, without blocking: if another thread is in a call, Python decides.
    const Owned mine(PyObject_CallOneArg(self->acquire, Py_False));
    if (mine.get() != Py_True) return mine == nullptr ? nullptr : Py_NewRef(Py_NotImplemented);
    self->thread = thread_number();
    self->under_way++;
    self->exchanges = true;
    Ends ends;
    const bool done = exchange_both(self, x, dst, out, src, static_cast<uint32_t>(tag), &ends);
    self->exchanges = false;
    self->under_way--;
    call_back_dropped(self);
    const std::shared_ptr<Transfer>&sent = ends.sent, &came = ends.came;
    PyObject* found = nullptr;
    if (!ends.has_begun) {
        PyErr_NoMemory();
    } else if (done && (came == nullptr || (came->fits() && came->error == 0))) {
        found = Py_NewRef(Py_True);
    } else {
        const Owned first(came == nullptr ? Py_NewRef(Py_None) : make_request(self, came, out));
        const Owned second(sent == nullptr ? Py_NewRef(Py_None) : make_request(self, sent, x));
        if (first != nullptr && second != nullptr) found = PyTuple_Pack(2, first.get(), second.get());
    }
    // No request holds the arrays, but a peer may access them: end the communicator and keep the arrays for ever.
    if (found == nullptr && ends.is_at_memory()) mark_failed(self, exchange_name, x, out);
    open_gate(self);
    return found;
}

static PyMethodDef request_methods[] = {{"Cancel", bordered<cancel_request>, METH_NOARGS, nullptr},
                                        {"Test", bordered<test_request>, METH_NOARGS, nullptr},
                                        {"Wait", wait_request, METH_NOARGS, nullptr},
                                        {nullptr, nullptr, 0, nullptr}};
static PyGetSetDef request_members[] = {{"came", dtype_of, nullptr, nullptr, nullptr},
                                        {"length", bordered<length_of>, nullptr, nullptr, nullptr},
                                        {nullptr, nullptr, nullptr, nullptr, nullptr}};

static bool make_request_type() {
    request_type.tp_name = "gpucoll._engine.Request";
    request_type.tp_basicsize = sizeof(Request);
    request_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
    request_type.tp_dealloc = unmake_request;
    request_type.tp_traverse = traverse_request;
    request_type.tp_clear = forget_request;
    request_type.tp_methods = request_methods;
    request_type.tp_getset = request_members;
    return PyType_Ready(&request_type) == 0;
}

}  // namespace gpucoll
