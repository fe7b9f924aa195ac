// Messages of `mail.h` for Python: requests like those of mpi4py, and blocking messages (`exchange`), also by the messages of
// a carrier of Python's between nodes.
//
// A blocking message usually ends in C++, without Python's lock. A message still under way after a short wait becomes
// a request, and Python waits for the rest. The danger throughout is memory: the array of a message must stay alive
// while this rank or the peer may still read or write it, even after an error or the end of the Python objects.
#pragma once
#include "binding/calls.h"

namespace gpucoll {

// Cancel a message unless complete. Return whether the memory is free: no rank will access it. A rendezvous message
// shown to the peer keeps the memory. The acknowledgement is not read: the mailbox may be unmapped already.
static bool let_go(Engine& engine, const std::shared_ptr<Transfer>& transfer) {
    if (transfer->done) return true;
    engine.mail.call_back(transfer);
    return transfer->ticket == 0;
}

// A message under way, with the array whose memory this rank or the peer may access.
struct Request {
    Ref<Object<Engine>> engine;
    std::shared_ptr<Transfer> transfer;
    Ref<> array;  // null once released

    Request(const Engine& owner, std::shared_ptr<Transfer> begun, PyObject* row)
        : engine(Ref<Object<Engine>>::borrow(owner.object)), transfer(std::move(begun)), array(Ref<>::borrow(row)) {}
    Request(const Request&) = delete;
    ~Request() { forget(); }

    PyObject* guard() const { return engine.object(); }

    template <class Each> void references(Each each) {
        each(engine);
        each(array);
    }

    // Cancel the message and release the array. If the peer may still read the memory (a rendezvous message), leak the
    // array.
    void forget() {
        if (!array) return;
        const Held held(guard());
        Ref<> kept = std::move(array);
        std::vector<std::pair<std::shared_ptr<Transfer>, Ref<>>>& dropped = engine->state.dropped;
        // Another thread uses `Mailbox` without Python's lock: hand the message over, to be cancelled by that thread.
        // Beyond MOST_DROPPED leak the array: a garbage collection may run here, and must not allocate or throw.
        if (engine->state.exchanges && dropped.size() < MOST_DROPPED) {
            dropped.emplace_back(transfer, std::move(kept));  // has room: no throw
        } else if (engine->state.exchanges || !let_go(engine->state, transfer)) {
            kept.release();
        }
    }

    // Advance all messages. Return whether this one is complete; raise if memory is out of reach.
    bool is_complete() {
        Mailbox& mail = engine->state.mail;
        if (!mail.has_ended(*transfer)) mail.go_on(engine->state.node);
        if (transfer->error == 0) return mail.has_ended(*transfer);
        ask(engine->state, out_of_reach_name, number(transfer->error));
        return false;
    }
};

// Return a new request.
static Ref<> make_request(const Engine& engine, const std::shared_ptr<Transfer>& transfer, PyObject* array) {
    const auto made = make_object<Request>(engine, transfer, array);
    return Ref<>::borrow(made.get());
}

// Test(): return whether the message is complete.
static Ref<> test(Request& self) { return truth(self.is_complete()); }

// Cancel(): withdraw a posted receive, or a send still without a slot.
static Ref<> cancel(Request& self) {
    if (!self.transfer->done) self.engine->state.mail.call_back(self.transfer);
    return none();
}

// Wait(): do nothing. Present for the interface of mpi4py's requests; callers wait by `Test`.
static Ref<> wait(Request&) { return none(); }

// length: the bytes of the message received, None while incomplete.
static Ref<> length(Request& self) {
    return self.is_complete() ? number(static_cast<long long>(self.transfer->length)) : none();
}

// came: the dtype code of the message received, 0 while incomplete.
static Ref<> came(Request& self) { return number(self.transfer->came); }

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
static Ref<> message(Engine& self, PyObject* given) {
    int sends;
    PyObject* row;
    unsigned long peer, tag;
    unsigned short dtype = BYTES;
    check(PyArg_ParseTuple(given, "pO!kk|H", &sends, &PyArray_Type, &row, &peer, &tag, &dtype));
    if (!self.mail.reaches(peer) || !PyArray_IS_C_CONTIGUOUS(array_of(row)))
        raise(PyExc_ValueError, "no message to rank %lu", peer);
    const auto transfer = transfer_of(sends != 0, row, static_cast<uint32_t>(peer), static_cast<uint32_t>(tag),
                                      dtype);
    // The request first: once begun, the message needs an owner of its memory.
    Ref<> made = make_request(self, transfer, row);
    self.mail.begin(self.node, transfer);
    return made;
}

// probe(source, tag): return source, tag and bytes of an unexpected message, or None; -1 matches any source or tag.
// None as well while another thread is in a call: `Mailbox` admits a single thread.
static Ref<> probe(Engine& self, PyObject* given) {
    long long from, tag;
    check(PyArg_ParseTuple(given, "LL", &from, &tag));
    int64_t source = from;
    const Connection::UnexpectedMessage* found = self.under_way > 0 ? nullptr : self.mail.seen(self.node, &source, tag);
    if (found == nullptr) return none();
    return checked(Py_BuildValue("LkK", static_cast<long long>(source), static_cast<unsigned long>(found->tag),
                                 static_cast<unsigned long long>(found->nbytes)));
}

// Return whether `exchange` can use an array as it is: contiguous, native byte order, a NumPy dtype with a code, and
// another rank, stored in `rank`. All other messages are left to Python.
static bool is_plain(const Engine& self, PyObject* array, PyObject* peer, bool writes, uint32_t* rank) {
    if (!is_array(array) || !PyLong_CheckExact(peer)) return false;
    const long number = PyLong_AsLong(peer);
    if (number < 0) PyErr_Clear();
    *rank = static_cast<uint32_t>(number);
    const int kind = PyArray_TYPE(array_of(array));
    return number >= 0 && static_cast<uint64_t>(number) < self.node.ranks
           && PyArray_CHKFLAGS(array_of(array), writes ? NPY_ARRAY_CARRAY : NPY_ARRAY_CARRAY_RO)
           && PyArray_ISNOTSWAPPED(array_of(array))
           && (PyTypeNum_ISBOOL(kind) || PyTypeNum_ISINTEGER(kind) || kind == NPY_HALF || kind == NPY_FLOAT
               || kind == NPY_DOUBLE || kind == NPY_CFLOAT || kind == NPY_CDOUBLE);
}

// Seconds of polls of a carrier's requests, and of a yield that has given the core away; as in gpucoll/progress/waits.py.
static const double SOON = 1e-3, GIVEN_AWAY = 500e-6;

// Return whether two arrays share no memory.
static bool are_apart(PyObject* x, PyObject* out) {
    const char *from = data_of(x), *to = data_of(out);
    return from + PyArray_NBYTES(array_of(x)) <= to || to + PyArray_NBYTES(array_of(out)) <= from;
}

// Wait a short time for a send and a receive, either of them null. Return whether both are complete; a longer wait is
// left to Python.
static bool await_both(Engine& self, Transfer* sent, Transfer* came) {
    if (sent == nullptr && came == nullptr) return true;
    Backoff backoff = {self.node, self.node.heads[(came != nullptr ? came : sent)->peer]};
    for (uint64_t look = 0;; look++) {
        const bool done = (sent == nullptr || self.mail.has_ended(*sent)) && (came == nullptr || came->done);
        if (done) return true;
        // Mostly look at the two peers only: a look at all mailboxes costs a cache line each. Now and then look at
        // all: third ranks may wait for free slots.
        if (look % 64 == 63) {
            self.mail.go_on(self.node);
        } else {
            for (Transfer* one : {sent, came})
                if (one != nullptr && !one->done) self.mail.go_on(self.node, one->peer);
        }
        // The first looks spin: most messages arrive before the clock is worth reading.
        if (look < RELAXES && self.node.spins) {
            cpu_relax();
        } else if (!backoff.pause()) {
            return false;
        }
    }
}

// Cancel the messages of requests dropped during this thread's `exchange`. Requires Python's lock.
static void call_back_dropped(Engine& self) {
    while (!self.dropped.empty()) {
        auto [transfer, array] = std::move(self.dropped.back());
        self.dropped.pop_back();
        if (!let_go(self, transfer)) array.release();
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
static bool exchange_both(Engine& self, PyObject* x, uint32_t dst, PyObject* out, uint32_t src, uint32_t tag, Ends* ends) {
    const Unlocked unlocked;
    try {
        if (x != Py_None) {
            auto sent = transfer_of(true, x, dst, tag, code_of(x));
            self.mail.begin(self.node, sent);
            ends->sent = std::move(sent);
        }
        if (out != Py_None) {
            ends->came = transfer_of(false, out, src, tag, code_of(out));
            self.mail.begin(self.node, ends->came);
        }
        ends->has_begun = true;
        return await_both(self, ends->sent.get(), ends->came.get());
    } catch (const std::bad_alloc&) {
        return false;  // if `has_begun`, Python waits for the rest
    }
}

// Return True for a complete exchange, else the requests of receive and send, and None.
static Ref<> exchange_result(const Engine& self, const Ends& ends, bool done, PyObject* x, PyObject* out) {
    if (!ends.has_begun) throw std::bad_alloc();
    const std::shared_ptr<Transfer>&sent = ends.sent, &came = ends.came;
    if (done && (came == nullptr || (came->fits() && came->error == 0))) return truth(true);
    const Ref<> first = came == nullptr ? none() : make_request(self, came, out);
    const Ref<> second = sent == nullptr ? none() : make_request(self, sent, x);
    return checked(PyTuple_Pack(3, first.get(), second.get(), Py_None));
}

// Exchange inside the node; see `exchange`.
static Ref<> exchange_here(Engine& self, PyObject* x, uint32_t dst, PyObject* out, uint32_t src, uint32_t tag) {
    const Gate gate(self);
    if (!gate.is_open) return not_implemented();
    self.exchanges = true;
    Ends ends;
    const bool done = exchange_both(self, x, dst, out, src, tag, &ends);
    self.exchanges = false;
    call_back_dropped(self);
    try {
        return exchange_result(self, ends, done, x, out);
    } catch (...) {
        set_error();
        // No request holds the arrays, but a peer may access them: end the communicator, keep the arrays for ever.
        if (ends.is_at_memory()) mark_failed(self, exchange_name, x, out);
        throw Raised();
    }
}

// Begin a message by the carrier, with the bytes of an array; return the request. The request keeps the array.
static Ref<> begin_by(PyObject* points, PyObject* method, PyObject* array, uint32_t peer, uint32_t tag) {
    npy_intp nbytes = PyArray_NBYTES(array_of(array));
    const Ref<> row = checked(PyArray_SimpleNewFromData(1, &nbytes, NPY_UINT8, data_of(array)));
    Ref<> base = Ref<>::borrow(array);  // NumPy takes over the reference
    check(PyArray_SetBaseObject(array_of(row.get()), base.release()) == 0);
    const Ref<> buffer = checked(Py_BuildValue("[Os]", row.get(), "B"));
    return checked(PyObject_CallMethodObjArgs(points, method, buffer.get(), number(peer).get(), number(tag).get(),
                                              number(code_of(array)).get(), nullptr));
}

// Return whether a request of the carrier's, or None, has ended.
static bool has_ended(PyObject* request) {
    if (request == Py_None) return true;
    const int done = PyObject_IsTrue(checked(PyObject_CallMethodNoArgs(request, test_name)).get());
    check_error();
    return done == 1;
}

// Return a number that a request of the carrier's tells.
static long long told(PyObject* request, PyObject* name) {
    const long long value = PyLong_AsLongLong(checked(PyObject_GetAttr(request, name)).get());
    check_error();
    return value;
}

// Return whether the message that a request has received has the dtype and the length of the array.
static bool fits(PyObject* came, PyObject* array) {
    const long long code = told(came, came_name);
    return (code == 0 || code == code_of(array)) && told(came, length_name) == PyArray_NBYTES(array_of(array));
}

// Wait a short time for two requests of the carrier's, each perhaps None; return whether both have ended. Each poll yields
// the core; a yield that lasts has given it to a rank that computes, and the rest of the wait may sleep, in Python.
static bool await_requests(PyObject* came, PyObject* sent) {
    double since = 0;
    for (PyObject* one : {came, sent}) {
        while (!has_ended(one)) {
            const double time = now();
            if (since == 0) since = time;
            if (time > since + SOON) return false;
            const Unlocked unlocked;
            sched_yield();
            if (now() > time + GIVEN_AWAY) return false;
        }
    }
    return true;
}

// Exchange by the carrier; see `exchange`. Outside the gate's count: another thread may make a collective call meanwhile.
static Ref<> exchange_by_points(Engine& self, PyObject* x, uint32_t dst, PyObject* out, uint32_t src, uint32_t tag) {
    checked(PyObject_CallMethodNoArgs(self.waits.get(), usable_name));
    const Ref<> points = self.points, requests = checked(PyList_New(3));
    const Gate gate(self, false);
    if (!gate.is_open) return not_implemented();
    Ref<> came = none(), sent = none(), error = none();
    bool done = false;
    try {
        // The receive first: a message for it then stays out of the unexpected queue.
        if (out != Py_None) came = begin_by(points.get(), receive_name, out, src, tag);
        if (x != Py_None) sent = begin_by(points.get(), send_name, x, dst, tag);
        done = await_requests(came.get(), sent.get()) && (out == Py_None || fits(came.get(), out));
    } catch (const Raised&) {
        const Failure failure;
        error = Ref<>::borrow(failure.error());
    }
    if (done) return truth(true);
    // The list was made before the messages: a rank without memory must not lose them.
    Py_ssize_t place = 0;
    for (Ref<>* one : {&came, &sent, &error}) PyList_SET_ITEM(requests.get(), place++, one->release());
    return requests;
}

// exchange(x, dst, out, src, tag): send x and receive out, unless None. Return True if both are complete and the
// message fits the array. Otherwise return the requests of receive and send, each perhaps None, and the error met meanwhile,
// or None, for Python to wait or to raise. Return NotImplemented if Python must do the whole call.
static Ref<> exchange(Engine& self, PyObject* const* given, Py_ssize_t count) {
    if (count != 5) raise(PyExc_TypeError, "exchange takes five arguments");
    PyObject *x = given[0], *out = given[2];
    uint32_t dst = 0, src = 0;
    const long tag = PyLong_CheckExact(given[4]) ? PyLong_AsLong(given[4]) : -1;
    if (PyErr_Occurred()) PyErr_Clear();
    if (tag < 0 || tag >= 1 << 15 || self.closed || !self.waits || !self.points) return not_implemented();
    if ((x != Py_None && !is_plain(self, x, given[1], false, &dst))
        || (out != Py_None && !is_plain(self, out, given[3], true, &src))
        || (x != Py_None && out != Py_None && !are_apart(x, out)))
        return not_implemented();
    // Queued messages of this communicator come first: messages with the same tag must not overtake each other.
    if (!is_free(self, self.alone)) return not_implemented();
    const bool is_here = self.carries && (x == Py_None || self.mail.reaches(dst)) && (out == Py_None || self.mail.reaches(src));
    if (is_here) return exchange_here(self, x, dst, out, src, static_cast<uint32_t>(tag));
    for (PyObject* one : {x, out})
        if (one != Py_None && nbytes_of(one) > self.most_bytes) return not_implemented();
    return exchange_by_points(self, x, dst, out, src, static_cast<uint32_t>(tag));
}

static PyObject* exchange_method(PyObject* object, PyObject* const* given, Py_ssize_t count) {
    return bordered([&] {
        const Held held(object);
        return exchange(state_of<Engine>(object), given, count);
    });
}

static PyMethodDef request_methods[] = {{"Cancel", Method<cancel>::call, METH_NOARGS, nullptr},
                                        {"Test", Method<test>::call, METH_NOARGS, nullptr},
                                        {"Wait", Method<wait>::call, METH_NOARGS, nullptr},
                                        {nullptr, nullptr, 0, nullptr}};
static PyGetSetDef request_members[] = {{"came", Method<came>::get, nullptr, nullptr, nullptr},
                                        {"length", Method<length>::get, nullptr, nullptr, nullptr},
                                        {nullptr, nullptr, nullptr, nullptr, nullptr}};

}  // namespace gpucoll
