// Messages as Python sees them: requests, as mpi4py's, and blocking ones, which end here unless they take long.
#pragma once
#include "calls.h"
#include "mail.h"

// A message that is under way. Its memory is kept as long as this rank, or the other one, may be at it.
struct Request {
    PyObject_HEAD
    PyObject* engine;
    std::shared_ptr<Transfer> transfer;
    PyObject* kept;  // the memory
};

static PyTypeObject request_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

// Calls a message back that has not ended; returns whether no rank is at its memory any more. Whether the other rank has
// read a long message is not asked here: its box may have gone with the communicator.
static bool let_go(Engine* engine, const std::shared_ptr<Transfer>& transfer) {
    if (transfer->done) return true;
    engine->mail.call_back(transfer);
    return transfer->ticket == 0;
}

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

// Lets go of the memory, unless some rank may still be at it: the message is called back before, which another thread that
// is at the messages does for this one. Of a long message that the other rank knows of, the memory stays for ever.
static int forget_request(PyObject* object) {
    Request* self = reinterpret_cast<Request*>(object);
    if (self->kept == nullptr) return 0;
    Engine* engine = reinterpret_cast<Engine*>(self->engine);
    PyObject* kept = self->kept;
    self->kept = nullptr;
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

// Goes on with all messages; -1 with an error set where memory is out of reach.
static int look(Request* self) {
    Engine* engine = reinterpret_cast<Engine*>(self->engine);
    if (!engine->mail.has_ended(*self->transfer)) engine->mail.go_on(engine->node);
    if (self->transfer->error == 0) return engine->mail.has_ended(*self->transfer);
    return ask(engine, out_of_reach_name, PyLong_FromLong(self->transfer->error)) ? 0 : -1;
}

// Test(): returns whether it has ended.
static PyObject* test_request(PyObject* object, PyObject*) {
    const int done = look(reinterpret_cast<Request*>(object));
    return done < 0 ? nullptr : PyBool_FromLong(done);
}

// Cancel(): it is not to be received, or sent, any more.
static PyObject* cancel_request(PyObject* object, PyObject*) {
    Request* self = reinterpret_cast<Request*>(object);
    if (!self->transfer->done) reinterpret_cast<Engine*>(self->engine)->mail.call_back(self->transfer);
    Py_RETURN_NONE;
}

static PyObject* wait_request(PyObject*, PyObject*) { Py_RETURN_NONE; }

// The bytes that came, None as long as nothing has.
static PyObject* length_of(PyObject* object, void*) {
    Request* self = reinterpret_cast<Request*>(object);
    const int done = look(self);
    if (done <= 0) return done < 0 ? nullptr : Py_NewRef(Py_None);
    return PyLong_FromUnsignedLongLong(self->transfer->length);
}

// The code of the dtype that came, 0 as long as nothing has.
static PyObject* dtype_of(PyObject* object, void*) {
    return PyLong_FromUnsignedLong(reinterpret_cast<Request*>(object)->transfer->came);
}

// The code of a dtype of NumPy's own.
static uint16_t code_of(PyObject* array) {
    const char kind = PyArray_DESCR(array_of(array))->kind;
    const int row = kind == 'b' ? 0 : kind == 'i' ? 1 : kind == 'u' ? 2 : kind == 'f' ? 3 : 4;
    return CODES[row][__builtin_ctz(static_cast<unsigned>(PyArray_ITEMSIZE(array_of(array))))];
}

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

// message(sends, row, peer, tag, dtype): begins to send or to receive; returns the request.
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
    PyObject* made = make_request(self, transfer, row);
    if (made != nullptr) self->mail.begin(self->node, transfer);
    return made;
}

// probe(source, tag): source, tag and bytes of a message that could be received now, or None; -1 is any source or tag.
static PyObject* probe(PyObject* object, PyObject* given) {
    Engine* self = reinterpret_cast<Engine*>(object);
    long long from, tag;
    if (!PyArg_ParseTuple(given, "LL", &from, &tag)) return nullptr;
    int64_t source = from;
    const Correspondence::Unasked* found = self->under_way > 0 ? nullptr : self->mail.seen(self->node, &source, tag);
    if (found == nullptr) return Py_NewRef(Py_None);
    return Py_BuildValue("LkK", static_cast<long long>(source), static_cast<unsigned long>(found->tag),
                         static_cast<unsigned long long>(found->nbytes));
}

// Whether a blocking message may work on an array itself, and its other rank is on this node.
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

static bool are_apart(PyObject* x, PyObject* out) {
    const char *from = data_of(x), *to = data_of(out);
    return from + PyArray_NBYTES(array_of(x)) <= to || to + PyArray_NBYTES(array_of(out)) <= from;
}

// Looks after two ends of messages for a while. Returns whether both have ended; a wait that takes longer is Python's.
static bool await_both(Engine* self, Transfer* sent, Transfer* came) {
    if (sent == nullptr && came == nullptr) return true;
    Backoff backoff = {self->node, self->node.heads[(came != nullptr ? came : sent)->peer]};
    for (uint64_t look = 0;; look++) {
        const bool done = (sent == nullptr || self->mail.has_ended(*sent)) && (came == nullptr || came->done);
        if (done) return true;
        if (look % 64 == 63) {
            self->mail.go_on(self->node);  // others may wait for room in their boxes
        } else {
            for (Transfer* one : {sent, came})
                if (one != nullptr && !one->done) self->mail.go_on(self->node, one->peer);
        }
        if (look < RELAXES && self->node.spins) {
            breathe();
        } else if (!backoff.pause()) {
            return false;
        }
    }
}

// The messages of requests that were dropped while this thread was at the messages, Python's lock being taken again.
static void call_back_dropped(Engine* self) {
    while (!self->dropped.empty()) {
        const auto [transfer, kept] = self->dropped.back();
        self->dropped.pop_back();
        if (let_go(self, transfer)) Py_DECREF(kept);
    }
}

// The two ends of an exchange, of which either may be none.
struct Ends {
    std::shared_ptr<Transfer> sent, came;
    bool has_begun = false;  // whether all that there is has begun, which is not so where there was no memory

    bool is_at_memory() const { return sent != nullptr || has_begun; }
};

// Sends x and receives out, unless they are None, without Python's lock; returns whether both have ended. The send comes
// first: the other rank reads while this one prepares to receive.
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
        return false;  // where both have begun, Python asks for the rest
    }
}

// exchange(x, dst, out, src, tag): sends x and receives out, unless they are None. Returns whether both have ended, with
// the length that is to come; their requests where they have not; NotImplemented where the call is Python's.
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
    const Py_ssize_t alone = PyObject_Size(self->alone);
    PyObject* failure = alone < 0 ? nullptr : PyObject_GetAttr(self->waits, failure_name);
    if (failure == nullptr) return nullptr;
    Py_DECREF(failure);
    if (alone > 0 || failure != Py_None) Py_RETURN_NOTIMPLEMENTED;
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
    if (found == nullptr && ends.is_at_memory()) spoil(self, exchange_name, x, out);  // which no request keeps
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
