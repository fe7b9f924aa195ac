// Messages between ranks that share no memory, as the engine sees them: a transport implements `Wire`. MPI does so in
// mpi_wire.h, threads of one process in thread_wire.h, and UCX in binding/ucx.cc, a module of its own. Python hands the
// object to the engine. So this file has neither Python nor a transport in it.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace gpucoll {

// A message under way. The message, and the bytes sent or received, must stay where they are until `state` says the
// end: the transport writes there at any time.
struct WireMessage {
    enum State : int { NONE, UNDER_WAY, DONE, FAILED };

    std::atomic<int> state{NONE};  // stored last by the transport, with release: the fields below are complete then
    int error = 0;                 // FAILED: the transport's number of the reason
    uint32_t peer = 0;
    bool sends = false;
    uint64_t length = 0;           // of a receive, DONE: bytes of the message, possibly more than there was room for
    void* handle = nullptr;        // the transport's

    // Acquire pairs with the transport's release: the bytes received are complete.
    State now() const { return static_cast<State>(state.load(std::memory_order_acquire)); }
    bool is_under_way() const { return now() == UNDER_WAY; }
};

// Begin a message that travels in pieces of at most `most` bytes; return their number. `handle` counts the pieces that have
// not ended.
static inline uint64_t begin_pieces(WireMessage& message, uint32_t peer, bool sends, uint64_t nbytes, uint64_t most) {
    const uint64_t pieces = nbytes == 0 ? 1 : (nbytes + most - 1) / most;
    message.peer = peer;
    message.sends = sends;
    message.error = 0;
    message.length = 0;
    message.handle = reinterpret_cast<void*>(pieces);
    message.state.store(WireMessage::UNDER_WAY, std::memory_order_relaxed);
    return pieces;
}

// End a piece; the last one ends the message. Release: bytes and length are complete for the thread that reads the state.
static inline void end_piece(WireMessage& message, int error) {
    if (error != 0) message.error = error;
    message.handle = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(message.handle) - 1);
    if (message.handle == nullptr)
        message.state.store(message.error == 0 ? WireMessage::DONE : WireMessage::FAILED, std::memory_order_release);
}

// The messages of a communicator. All functions return at once, and may be called by any thread. A function that fails
// leaves the reason in the message: nothing is thrown.
//
// Messages from one rank with one tag arrive in the order of sending.
class Wire {
  public:
    // Begin to send or to receive. An old message in `message` must have ended.
    virtual void send(WireMessage& message, uint32_t peer, uint64_t tag, const void* row, uint64_t nbytes) noexcept = 0;
    virtual void receive(WireMessage& message, uint32_t peer, uint64_t tag, void* row, uint64_t nbytes) noexcept = 0;
    // Move data as far as possible without waiting; return whether anything has moved.
    virtual bool progress() noexcept = 0;
    // Ask the transport to give up a receive; in vain if data are on the way.
    virtual void cancel(WireMessage& message) noexcept = 0;
    // Return the reason of a failure in words.
    virtual const char* reason(int error) const noexcept = 0;

  protected:
    ~Wire() = default;
};

// A pointer from one module to the other goes through a capsule of Python's with this name.
static const char WIRE[] = "gpucoll.Wire";

}  // namespace gpucoll
