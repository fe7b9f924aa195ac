// Shown waits of `engine/cycles.h` for Python (gpucoll/communicator/cycles.py). Callers hold the lock of `Progress`:
// `Mailbox` admits a single thread.
#pragma once
#include "binding/messages.h"

namespace gpucoll {

// show_wait(requests, where): show that this rank waits for messages, from this place of the program; messages to other
// nodes, by another carrier, are left out. Return the number of the wait, or 0 without a message to show: each has ended,
// or has not reached the other rank.
static Ref<> show_wait(Engine& self, PyObject* given) {
    PyObject* requests;
    const char* where;
    check(PyArg_ParseTuple(given, "O!s", &PyTuple_Type, &requests, &where));
    std::vector<Transfer*> transfers;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(requests); i++) {
        PyObject* one = PyTuple_GET_ITEM(requests, i);
        if (Py_TYPE(one) == &type_of<Request>) transfers.push_back(state_of<Request>(one).transfer.get());
    }
    // Another thread is in a call, or the memory is unmapped.
    if (self.under_way > 0 || self.closed || !self.mail.reaches(self.node.rank)) return number(0);
    return number(self.mail.show_wait(self.node, transfers, where) ? static_cast<long long>(self.mail.wait.load()) : 0);
}

// hide_wait(): show no wait any more.
static Ref<> hide_wait(Engine& self) {
    if (!self.closed) self.mail.hide_wait();
    return none();
}

// Return the ends of a rank's shown wait: a list of (sends, peer, tag, bytes, `Mailbox::stuck_by`).
static Ref<> ends_of(const Engine& self, uint32_t rank) {
    const Ref<> found = checked(PyList_New(0));
    for (uint64_t direction : {SENDING, RECEIVING}) {
        const ShownEnd end = self.mail.box(self.node, rank, rank)->record.ends[direction].shown();
        if (!end.is_there) continue;
        const uint64_t stuck = self.mail.stuck_by(self.node, rank, direction);
        const Ref<> sends = truth(direction == SENDING);
        const Ref<> one = checked(Py_BuildValue("OLLLL", sends.get(), static_cast<long long>(end.peer), static_cast<long long>(end.tag),
                                                static_cast<long long>(end.nbytes), static_cast<long long>(stuck)));
        check(PyList_Append(found.get(), one.get()) == 0);
    }
    return found;
}

// shown_waits(): return the last shown waits, by rank of this node: (number, odd while shown; place; ends).
static Ref<> shown_waits(Engine& self) {
    const Ref<> found = checked(PyDict_New());
    for (uint32_t rank = 0; rank < self.node.ranks; rank++) {
        if (self.closed || !self.mail.reaches(rank)) continue;
        const WaitRecord& record = self.mail.box(self.node, rank, rank)->record;
        const uint64_t shown = record.number.load();
        if (shown == 0) continue;
        const Ref<> ends = ends_of(self, rank);
        const Ref<> where = checked(PyUnicode_DecodeUTF8(record.site, static_cast<Py_ssize_t>(strnlen(record.site, SITE_BYTES)), "replace"));
        const Ref<> wait = checked(Py_BuildValue("KOO", static_cast<unsigned long long>(shown), where.get(), ends.get()));
        check(PyDict_SetItem(found.get(), number(rank).get(), wait.get()) == 0);
    }
    return found;
}

// condemn(rank, number, sends): note that a rank's wait is in a cycle, by its send or by its receive.
static Ref<> condemn(Engine& self, PyObject* given) {
    unsigned long rank;
    unsigned long long wait;
    int sends;
    check(PyArg_ParseTuple(given, "kKp", &rank, &wait, &sends));
    if (!self.mail.reaches(rank)) raise(PyExc_ValueError, "no rank %lu here", rank);
    self.mail.with[rank].out->record.verdict.store(2 * wait + (sends != 0 ? SENDING : RECEIVING));
    return none();
}

// verdict(by, on): return the number of the wait of a rank that another rank has found in a cycle, and whether the wait
// is in the cycle by its send; number 0 if none was found.
static Ref<> verdict(Engine& self, PyObject* given) {
    unsigned long by, on;
    check(PyArg_ParseTuple(given, "kk", &by, &on));
    if (!self.mail.reaches(by) || !self.mail.reaches(on)) raise(PyExc_ValueError, "no ranks %lu, %lu here", by, on);
    const uint64_t found = self.mail.box(self.node, static_cast<uint32_t>(by), static_cast<uint32_t>(on))->record.verdict.load();
    const Ref<> sends = truth(found % 2 == SENDING);
    return checked(Py_BuildValue("LO", static_cast<long long>(found / 2), sends.get()));
}

}  // namespace gpucoll
