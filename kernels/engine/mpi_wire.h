// Messages by MPI, without MPI's headers: the functions are looked up in the MPI that mpi4py has loaded.
//
// ABI. A handle of MPI is an int in MPICH and its relatives, else a pointer: hence the parameter `Handle`. A status is
// only passed on, in memory of the size that mpi4py tells. MPI_SUCCESS is 0 in every MPI.
//
// MPI counts bytes with an int, so a long message travels in pieces. `WireMessage::handle` is the number of pieces under
// way.
//
// Threads. The lock guards the lists and the status. Other threads may call MPI at the same time, as mpi4py lets them.
// MPI moves data only inside calls: a waiting rank calls `progress` again and again.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <new>
#include <vector>

#include "engine/wire.h"

namespace gpucoll {

// Numbers of reasons besides MPI's own, which are positive.
static const int NO_ROOM = -1, TOO_LONG = -2, CANCELLED = -3;

template <class Handle> class MpiWire final : public Wire {
  public:
    struct Functions {
        int (*Isend)(const void*, int, Handle, int, int, Handle, Handle*);
        int (*Irecv)(void*, int, Handle, int, int, Handle, Handle*);
        int (*Improbe)(int, int, Handle, int*, Handle*, void*);
        int (*Imrecv)(void*, int, Handle, Handle*, Handle*);
        int (*Test)(Handle*, int*, void*);
        int (*Cancel)(Handle*);
        int (*Get_count)(const void*, Handle, int*);
        int (*Error_string)(int, char*, int*);
        int (*Finalized)(int*);

        // Look up all functions by `find`, which takes the name.
        template <class Find> explicit Functions(Find find) {
#define GC_MPI(name) name = reinterpret_cast<decltype(name)>(find("MPI_" #name));
            GC_MPI(Isend) GC_MPI(Irecv) GC_MPI(Improbe) GC_MPI(Imrecv) GC_MPI(Test) GC_MPI(Cancel) GC_MPI(Get_count)
            GC_MPI(Error_string) GC_MPI(Finalized)
#undef GC_MPI
        }
    };

    // `byte` is the datatype of a byte; `most` is the number of bytes of a piece. Some MPIs write a message that is too
    // long behind its row: with `matches` a receive therefore begins only once its message has come, and its length is
    // known.
    MpiWire(const Functions& functions, Handle comm, Handle byte, size_t status_bytes, uint64_t most, bool matches)
        : mpi(functions), comm(comm), byte(byte), most(most), matches(matches), status(status_bytes / sizeof(std::max_align_t) + 1) {}

    void send(WireMessage& message, uint32_t peer, uint64_t tag, const void* row, uint64_t nbytes) noexcept override {
        begin(message, peer, true, nbytes, [&](uint64_t start, int count) {
            add(message, [&](Handle* request) {
                return mpi.Isend(static_cast<const char*>(row) + start, count, byte, static_cast<int>(peer), static_cast<int>(tag), comm, request);
            });
        });
    }

    void receive(WireMessage& message, uint32_t peer, uint64_t tag, void* row, uint64_t nbytes) noexcept override {
        begin(message, peer, false, nbytes, [&](uint64_t start, int count) {
            const Posted one = {&message, static_cast<int>(peer), static_cast<int>(tag), static_cast<char*>(row) + start, count};
            if (matches) return posted.push_back(one);
            add(message, [&](Handle* request) { return mpi.Irecv(one.row, count, byte, one.peer, one.tag, comm, request); });
        });
    }

    bool progress() noexcept override {
        // The thread with the lock does the same work.
        const std::unique_lock<std::mutex> guard(lock, std::try_to_lock);
        if (!guard.owns_lock()) return false;
        const bool has_matched = match();
        const size_t before = requests.size();
        requests.erase(std::remove_if(requests.begin(), requests.end(), [&](Request& one) { return has_ended(one); }), requests.end());
        return has_matched || requests.size() < before;
    }

    void cancel(WireMessage& message) noexcept override {
        const std::lock_guard<std::mutex> guard(lock);
        int is_final = 0;
        mpi.Finalized(&is_final);
        if (is_final != 0) return;
        posted.erase(std::remove_if(posted.begin(), posted.end(), [&](const Posted& one) {
            if (one.message == &message) end_piece(message, CANCELLED);
            return one.message == &message;
        }), posted.end());
        // No wait: a message half sent by a process that has died neither arrives nor can be cancelled.
        requests.erase(std::remove_if(requests.begin(), requests.end(), [&](Request& one) {
            if (one.message != &message) return false;
            message.error = message.error != 0 ? message.error : CANCELLED;
            mpi.Cancel(&one.handle);
            return has_ended(one);
        }), requests.end());
    }

    const char* reason(int error) const noexcept override {
        static thread_local char text[8192];  // more than MPI_MAX_ERROR_STRING of any MPI
        int length = 0;
        if (error == NO_ROOM) return "no memory";
        if (error == TOO_LONG) return "a longer message came than awaited";
        if (error == CANCELLED || mpi.Error_string(error, text, &length) != 0) return "cancelled";
        text[length] = 0;
        return text;
    }

  private:
    struct Request {
        Handle handle;
        WireMessage* message;
    };
    // A piece to be received, without a message so far.
    struct Posted {
        WireMessage* message;
        int peer, tag;
        char* row;
        int count;
    };

    // Begin a message, piece by piece. After the error of a piece no further piece begins.
    template <class Piece> void begin(WireMessage& message, uint32_t peer, bool sends, uint64_t nbytes, Piece piece) noexcept {
        const uint64_t pieces = begin_pieces(message, peer, sends, nbytes, most);
        const std::lock_guard<std::mutex> guard(lock);
        for (uint64_t i = 0; i < pieces; i++) {
            if (message.error != 0) {
                end_piece(message, message.error);
                continue;
            }
            try {
                piece(i * most, static_cast<int>(std::min(most, nbytes - i * most)));
            } catch (const std::bad_alloc&) {
                end_piece(message, NO_ROOM);
            }
        }
    }

    // Begin a request by `call`. Throws std::bad_alloc, and then nothing has begun.
    template <class Call> void add(WireMessage& message, Call call) {
        requests.push_back({Handle{}, &message});
        const int error = call(&requests.back().handle);
        if (error == 0) return;
        requests.pop_back();
        end_piece(message, error);
    }

    // Return whether a request has ended. MPI forgets a request that has failed.
    bool has_ended(Request& one) {
        int done = 0, count = 0;
        const int error = mpi.Test(&one.handle, &done, status.data());
        if (error == 0 && done == 0) return false;
        if (error == 0 && !one.message->sends && mpi.Get_count(status.data(), byte, &count) == 0 && count > 0)
            one.message->length += static_cast<uint64_t>(count);
        end_piece(*one.message, error);
        return true;
    }

    // Begin the receives whose messages have come, those of a rank with a tag in order; return whether any has begun.
    bool match() {
        const size_t before = posted.size();
        auto one = posted.begin();
        while (one != posted.end()) {
            const bool waits = std::any_of(posted.begin(), one, [&](const Posted& other) { return other.peer == one->peer && other.tag == one->tag; });
            one = !waits && is_taken(*one) ? posted.erase(one) : one + 1;
        }
        return posted.size() < before;
    }

    // Return whether the receive of a piece has begun, or failed.
    bool is_taken(const Posted& one) {
        WireMessage& message = *one.message;
        int found = 0, count = 0;
        Handle matched{};
        int error = mpi.Improbe(one.peer, one.tag, comm, &found, &matched, status.data());
        if (error == 0 && found == 0) return false;
        if (error == 0) error = mpi.Get_count(status.data(), byte, &count);
        if (error != 0) return end_piece(message, error), true;
        try {
            char* row = one.row;
            if (count > one.count) {
                // A matched message must be received, here into memory kept as long as the wire.
                message.error = TOO_LONG;
                long_ones.emplace_back(static_cast<size_t>(count));
                row = long_ones.back().data();
            }
            add(message, [&](Handle* request) { return mpi.Imrecv(row, count, byte, &matched, request); });
        } catch (const std::bad_alloc&) {
            end_piece(message, NO_ROOM);
        }
        return true;
    }

    const Functions mpi;
    const Handle comm, byte;
    const uint64_t most;
    const bool matches;
    std::mutex lock;
    std::vector<Request> requests;
    std::vector<Posted> posted;
    std::vector<std::vector<char>> long_ones;
    std::vector<std::max_align_t> status;
};

}  // namespace gpucoll
