// A wire by messages of Python: those of a store of ranks without MPI, and of a program's own transport.
//
// Python's object `comm` has mpi4py's `Isend` and `Irecv` of an array of bytes. Its requests have `Test` and `Cancel`,
// those of receives also `length` (gpucoll/communicator/transports.py).
//
// Threads. Python's lock guards everything here; a Python without that lock has the lock of one object (`Held`). A method
// of Python's may let another thread in, so a piece that has ended stays in the list until no thread looks at the list.
//
// Errors. An exception, of the transport or of a signal's handler, is kept, and raised by the call under way.
#pragma once
#include <algorithm>
#include <list>
#include <optional>

#include "binding/owners.h"
#include "engine/wire.h"

namespace gpucoll {

// Holds Python's lock for a block, whether or not this thread has it already.
class Locked {
  public:
    Locked() : state(PyGILState_Ensure()) {}
    ~Locked() { PyGILState_Release(state); }
    Locked(const Locked&) = delete;

  private:
    PyGILState_STATE state;
};

class PythonWire final : public Wire {
  public:
    // `most` is the number of bytes of a piece: a long message travels in pieces.
    PythonWire(PyObject* comm, uint64_t most)
        : isend(checked(PyObject_GetAttrString(comm, "Isend"))), irecv(checked(PyObject_GetAttrString(comm, "Irecv"))), most(most) {}

    void send(WireMessage& message, uint32_t peer, uint64_t tag, const void* row, uint64_t nbytes) noexcept override {
        begin(message, peer, true, tag, static_cast<char*>(const_cast<void*>(row)), nbytes);  // a row sent is only read
    }
    void receive(WireMessage& message, uint32_t peer, uint64_t tag, void* row, uint64_t nbytes) noexcept override {
        begin(message, peer, false, tag, static_cast<char*>(row), nbytes);
    }

    bool progress() noexcept override {
        const Locked locked;
        const Held held(isend.get());
        if (is_testing) return false;  // the thread that tests does the same work
        const Look look(*this);
        is_testing = true;
        has_moved = false;
        for (Piece& one : pieces)
            if (!comes_later(one) && !guarded([&] { test(one); })) break;
        is_testing = false;
        return has_moved;
    }

    void cancel(WireMessage& message) noexcept override {
        const Locked locked;
        const Held held(isend.get());
        const Look look(*this);
        for (Piece& one : pieces) {
            if (one.message != &message) continue;
            message.error = CANCELLED;
            const bool is_well = guarded([&] {
                checked(PyObject_CallMethod(one.request.get(), "Cancel", nullptr));
                if (!is_testing) test(one);
            });
            if (!is_well) failure.reset();  // the caller has an error already
        }
    }

    const char* reason(int error) const noexcept override { return error == CANCELLED ? "cancelled" : "it could not begin"; }

    // Raise the exception kept, if there is one.
    void raise_kept() {
        const Held held(isend.get());
        if (!failure) return;
        failure->restore();
        failure.reset();
        throw Raised();
    }

  private:
    static const int CANCELLED = 1, NOT_BEGUN = 2;

    // A part of a message. `message` is null once the piece has ended, `request` while the piece begins.
    struct Piece {
        WireMessage* message;
        uint64_t tag;
        Ref<> request;
    };

    // Removes the pieces that have ended, once no thread looks at the list.
    class Look {
      public:
        explicit Look(PythonWire& wire) : self(wire) { self.looks++; }
        ~Look() {
            if (--self.looks == 0) self.pieces.remove_if([](const Piece& one) { return one.message == nullptr; });
        }
        Look(const Look&) = delete;

      private:
        PythonWire& self;
    };

    void begin(WireMessage& message, uint32_t peer, bool sends, uint64_t tag, char* row, uint64_t nbytes) noexcept {
        const Locked locked;
        const Held held(isend.get());
        const uint64_t count = begin_pieces(message, peer, sends, nbytes, most);
        for (uint64_t i = 0; i < count; i++) {
            const bool begun = message.error == 0 && guarded([&] {
                npy_intp length = static_cast<npy_intp>(std::min(most, nbytes - i * most));
                const Ref<> array = checked(PyArray_SimpleNewFromData(1, &length, NPY_UINT8, row + i * most));
                const Ref<> buffer = checked(Py_BuildValue("[Os]", array.get(), "B"));
                Piece& one = pieces.emplace_back(Piece{&message, tag, nullptr});
                one.request = Ref<>::steal(PyObject_CallFunction((sends ? isend : irecv).get(), "OIK", buffer.get(), peer,
                                                                 static_cast<unsigned long long>(tag)));
                if (one.request) return;
                one.message = nullptr;
                throw Raised();
            });
            if (!begun) end_piece(message, NOT_BEGUN);
        }
    }

    // Whether an earlier receive from the same rank with the same tag has not ended. It takes the next message: a transport
    // may hand a message to the first request that asks, and a message may come between the tests of two requests.
    bool comes_later(const Piece& one) const {
        if (one.message == nullptr || one.message->sends || one.message->error != 0) return false;
        for (const Piece& other : pieces) {
            if (&other == &one) return false;
            if (other.message != nullptr && !other.message->sends && other.message->peer == one.message->peer && other.tag == one.tag)
                return true;
        }
        return false;
    }

    // Do what may raise; return whether it has not. The first exception is kept.
    template <class Work> bool guarded(Work work) noexcept {
        try {
            work();
            return true;
        } catch (...) {
            set_error();
            if (failure) {
                PyErr_Clear();
            } else {
                failure.emplace();
            }
            return false;
        }
    }

    // End a piece if its request has ended. A receive counts the bytes of the message, perhaps more than its room.
    void test(Piece& one) {
        const Ref<> request = one.request;
        if (!request || one.message == nullptr) return;
        const Ref<> done = checked(PyObject_CallMethod(request.get(), "Test", nullptr));
        if (PyObject_IsTrue(done.get()) != 1) return check_error();
        uint64_t length = 0;
        if (one.message != nullptr && !one.message->sends) {
            length = PyLong_AsUnsignedLongLong(checked(PyObject_GetAttrString(request.get(), "length")).get());
            check_error();
        }
        if (one.message == nullptr) return;  // cancelled meanwhile
        WireMessage& message = *one.message;
        has_moved = true;
        message.length += length;
        one.message = nullptr;
        end_piece(message, message.error);
    }

    const Ref<> isend, irecv;
    const uint64_t most;
    std::list<Piece> pieces;
    std::optional<Failure> failure;
    int looks = 0;
    bool is_testing = false, has_moved = false;
};

}  // namespace gpucoll
