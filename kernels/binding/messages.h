// Messages of `mail.h` for Python: requests like those of mpi4py, and blocking messages (`exchange`).
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
// a same-node peer, stored in `rank`. All other messages are left to Python.
static bool is_plain(const Engine& self, PyObject* array, PyObject* peer, bool writes, uint32_t* rank) {
    if (!is_array(array) || !PyLong_CheckExact(peer)) return false;
    const long number = PyLong_AsLong(peer);
    if (number < 0) PyErr_Clear();
    *rank = static_cast<uint32_t>(number);
    const int kind = PyArray_TYPE(array_of(array));
    return number >= 0 && self.mail.reaches(static_cast<uint64_t>(number))
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

// Return True for a complete exchange, else the pair of requests (receive, send).
static Ref<> exchange_result(const Engine& self, const Ends& ends, bool done, PyObject* x, PyObject* out) {
    if (!ends.has_begun) throw std::bad_alloc();
    const std::shared_ptr<Transfer>&sent = ends.sent, &came = ends.came;
    if (done && (came == nullptr || (came->fits() && came->error == 0))) return truth(true);
    const Ref<> first = came == nullptr ? none() : make_request(self, came, out);
    const Ref<> second = sent == nullptr ? none() : make_request(self, sent, x);
    return checked(PyTuple_Pack(2, first.get(), second.get()));
}

// exchange(x, dst, out, src, tag): send x and receive out, unless None. Return True if both are complete and the
// message fits the array. Otherwise return a pair of requests (receive, send), for Python to wait or to raise the
// error. Return NotImplemented if Python must do the whole call.
static Ref<> exchange(Engine& self, PyObject* const* given, Py_ssize_t count) {
    if (count != 5) raise(PyExc_TypeError, "exchange takes five arguments");
    PyObject *x = given[0], *out = given[2];
    uint32_t dst = 0, src = 0;
    const long tag = PyLong_CheckExact(given[4]) ? PyLong_AsLong(given[4]) : -1;
    if (PyErr_Occurred()) PyErr_Clear();
    if (tag < 0 || tag >= 1 << 15 || self.closed || !self.waits) return not_implemented();
    if ((x != Py_None && !is_plain(self, x, given[1], false, &dst))
        || (out != Py_None && !is_plain(self, out, given[3], true, &src))
        || (x != Py_None && out != Py_None && !are_apart(x, out)))
        return not_implemented();
    // Queued messages of this communicator come first: messages with the same tag must not overtake each other.
    if (!is_free(self, self.alone)) return not_implemented();
    const Gate gate(self);
    if (!gate.is_open) return not_implemented();
    self.exchanges = true;
    Ends ends;
    const bool done = exchange_both(self, x, dst, out, src, static_cast<uint32_t>(tag), &ends);
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
