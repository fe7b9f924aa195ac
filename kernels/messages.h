// Messages as Python sees them: requests, as mpi4py's, and blocking ones, which end here unless they take long.
#pragma once
#include "calls.h"
#include "mail.h"

struct Request {
    PyObject_HEAD
    PyObject* engine;
    std::shared_ptr<Transfer> transfer;
    PyObject* kept;  // the memory
};

static PyTypeObject request_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

static PyObject* make_request(Engine* engine, const std::shared_ptr<Transfer>& transfer, PyObject* kept) {
    Request* self = reinterpret_cast<Request*>(request_type.tp_alloc(&request_type, 0));
    if (self == nullptr) return nullptr;
    new (&self->transfer) std::shared_ptr<Transfer>(transfer);
    self->engine = Py_NewRef(reinterpret_cast<PyObject*>(engine));
    self->kept = Py_NewRef(kept);
    return reinterpret_cast<PyObject*>(self);
}

static void unmake_request(PyObject* object) {
    Request* self = reinterpret_cast<Request*>(object);
    Engine* engine = reinterpret_cast<Engine*>(self->engine);
    if (!self->transfer->done && engine->under_way == 0) engine->mail.call_back(self->transfer);
    self->transfer.~shared_ptr();
    Py_XDECREF(self->engine);
    Py_XDECREF(self->kept);
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

// The code of a plain dtype, as gpucoll/dtypes.py has it: it counts kinds and sizes of 1, 2, 4, ... bytes.
static uint16_t code_of(PyObject* array) {
    const PyArray_Descr* descr = PyArray_DESCR(array_of(array));
    const int size = __builtin_ctz(static_cast<unsigned>(PyArray_ITEMSIZE(array_of(array))));
    switch (descr->kind) {
        case 'b': return 2;
        case 'i': return static_cast<uint16_t>(3 + size);
        case 'u': return static_cast<uint16_t>(7 + size);
        case 'f': return static_cast<uint16_t>(size == 1 ? 11 : 11 + size);
        default: return static_cast<uint16_t>(12 + size);
    }
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

// exchange(x, dst, out, src, tag): sends x and receives out, unless they are None. Returns whether both have ended, with
// the length that is to come; their requests where they have not; None where the call is Python's.
static PyObject* exchange(PyObject* object, PyObject* const* given, Py_ssize_t count) {
    Engine* self = reinterpret_cast<Engine*>(object);
    if (count != 5) return PyErr_Format(PyExc_TypeError, "exchange takes five arguments");
    PyObject *x = given[0], *out = given[2];
    uint32_t dst = 0, src = 0;
    const long tag = PyLong_CheckExact(given[4]) ? PyLong_AsLong(given[4]) : -1;
    if (PyErr_Occurred()) PyErr_Clear();
    if (tag < 0 || tag >= 1 << 15 || self->closed || self->waits == nullptr) Py_RETURN_NONE;
    if ((x != Py_None && !is_plain(self, x, given[1], false, &dst))
        || (out != Py_None && !is_plain(self, out, given[3], true, &src))
        || (x != Py_None && out != Py_None && !are_apart(x, out)))
        Py_RETURN_NONE;
    const Py_ssize_t alone = PyObject_Size(self->alone);
    PyObject* failure = alone < 0 ? nullptr : PyObject_GetAttr(self->waits, failure_name);
    if (failure == nullptr) return nullptr;
    Py_DECREF(failure);
    if (alone > 0 || failure != Py_None) Py_RETURN_NONE;
    PyObject* mine = PyObject_CallOneArg(self->acquire, Py_False);
    if (mine != Py_True) {
        Py_XDECREF(mine);
        return mine == nullptr ? nullptr : Py_NewRef(Py_None);
    }
    Py_DECREF(mine);
    self->thread = thread_number();
    self->under_way++;
    std::shared_ptr<Transfer> sent, came;
    bool done;
    Py_BEGIN_ALLOW_THREADS
    if (x != Py_None) {  // first, so that the other rank reads at the same time
        sent = transfer_of(true, x, dst, static_cast<uint32_t>(tag), code_of(x));
        self->mail.begin(self->node, sent);
    }
    if (out != Py_None) {
        came = transfer_of(false, out, src, static_cast<uint32_t>(tag), code_of(out));
        self->mail.begin(self->node, came);
    }
    done = await_both(self, sent.get(), came.get());
    Py_END_ALLOW_THREADS
    self->under_way--;
    const bool fits = came == nullptr || (came->fits() && came->error == 0);
    PyObject* found = nullptr;
    if (done && fits) {
        found = Py_NewRef(Py_True);
    } else {
        PyObject* first = came == nullptr ? Py_NewRef(Py_None) : make_request(self, came, out);
        PyObject* second = sent == nullptr ? Py_NewRef(Py_None) : make_request(self, sent, x);
        found = first == nullptr || second == nullptr ? nullptr : PyTuple_Pack(2, first, second);
        Py_XDECREF(first);
        Py_XDECREF(second);
    }
    Py_XDECREF(PyObject_CallNoArgs(self->release));
    return found;
}

static PyMethodDef request_methods[] = {{"Cancel", cancel_request, METH_NOARGS, nullptr},
                                        {"Test", test_request, METH_NOARGS, nullptr},
                                        {"Wait", wait_request, METH_NOARGS, nullptr},
                                        {nullptr, nullptr, 0, nullptr}};
static PyGetSetDef request_members[] = {{"came", dtype_of, nullptr, nullptr, nullptr},
                                        {"length", length_of, nullptr, nullptr, nullptr},
                                        {nullptr, nullptr, nullptr, nullptr, nullptr}};

static bool make_request_type() {
    request_type.tp_name = "gpucoll._engine.Request";
    request_type.tp_basicsize = sizeof(Request);
    request_type.tp_flags = Py_TPFLAGS_DEFAULT;
    request_type.tp_dealloc = unmake_request;
    request_type.tp_methods = request_methods;
    request_type.tp_getset = request_members;
    return PyType_Ready(&request_type) == 0;
}
