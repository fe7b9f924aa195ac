// The comparison of a call between nodes, at the same time as the first data.
//
// Greeting. The first rank of every node is the node's leader. In each call every leader sends a greeting to every other
// leader: the signature of the call, the time at which the node came to the call, and perhaps the first data. These
// data, at most OPENING bytes, save a message of their own. The receiver keeps them apart until the signatures have been
// compared: an unlike call overwrites no array.
//
// Verdict. A leader with the greetings of all leaders knows alone whether all nodes make the call. The leader stores the
// verdict in its head for the ranks of its node (`Head::verdict`). A leader of a node that makes unlike calls sends a
// greeting that says so. A verdict of unlike calls makes every rank compare descriptions by messages of Python, and raise
// the error.
//
// Invariant: in each call, every leader sends exactly one greeting to every other leader. After a call cancelled on all
// ranks no message remains that a later call could take: greetings travel before the descriptions.
#pragma once
#include <algorithm>
#include <cstring>
#include <ctime>
#include <deque>
#include <vector>

#include "engine/waits.h"
#include "engine/wire.h"

namespace gpucoll {

static const int64_t ALIKE_CALLS = 1, UNLIKE_CALLS = 2;  // positions of a verdict, added to the call's `base`

// Return nanoseconds to be added to `nanoseconds` for the time since 1970: hosts compare times by these clocks.
static int64_t to_realtime() {
    timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    return static_cast<int64_t>(time.tv_sec) * 1000000000 + time.tv_nsec - static_cast<int64_t>(nanoseconds());
}

struct Greeting {
    int64_t signature;
    int64_t is_alike;  // 0: the ranks of the sender's node make unlike calls
    int64_t first;     // when the first rank of the sender's node came to the call, nanoseconds since 1970
};

// The greetings between this leader and another.
struct Correspondent {
    uint32_t peer;
    WireMessage sent, came;
    std::vector<char> out, in;  // a greeting, and room for data
    bool is_heard = false;      // the greeting of this call was looked at

    explicit Correspondent(uint32_t other) : peer(other), out(sizeof(Greeting) + OPENING), in(sizeof(Greeting) + OPENING) {
        sent.peer = came.peer = other;
        sent.sends = true;
    }
    Greeting greeting() const {
        Greeting found;
        std::memcpy(&found, in.data(), sizeof found);
        return found;
    }
    bool is_free() const { return !sent.is_under_way() && !came.is_under_way(); }
};

struct Agreement {
    std::deque<Correspondent> others;  // the other leaders; empty on a rank that is no leader
    const WireMessage* failed = nullptr;
    size_t missing = 0;                // greetings of this call not looked at
    int64_t first = 0;                 // the earliest arrival known, nanoseconds since 1970

    Correspondent* with(uint32_t peer) {
        const auto found = std::find_if(others.begin(), others.end(), [&](const Correspondent& one) { return one.peer == peer; });
        return found == others.end() ? nullptr : &*found;
    }

    // Return whether the greetings of the call before have ended: their memory is used again.
    bool is_free() const {
        return std::all_of(others.begin(), others.end(), [](const Correspondent& one) { return one.is_free(); });
    }

    // Return whether all greetings have left. A failed one is kept in `failed`.
    bool has_sent() {
        return std::all_of(others.begin(), others.end(), [&](const Correspondent& one) {
            if (one.sent.now() == WireMessage::FAILED) failed = &one.sent;
            return one.sent.now() == WireMessage::DONE;
        });
    }

    // Write this rank's greetings of a call, without data so far, and post the receives. `first` of these is the
    // earliest arrival on this node.
    void begin(Wire& wire, uint64_t tag, const Greeting& mine) {
        first = mine.first;
        missing = others.size();
        for (Correspondent& one : others) {
            one.is_heard = false;
            std::memcpy(one.out.data(), &mine, sizeof mine);
            wire.receive(one.came, one.peer, tag, one.in.data(), one.in.size());
        }
    }

    // Send a greeting, with `nbytes` bytes of data.
    static void send(Wire& wire, uint64_t tag, Correspondent& one, const char* row, uint64_t nbytes) {
        if (nbytes > 0) std::memcpy(one.out.data() + sizeof(Greeting), row, nbytes);
        wire.send(one.sent, one.peer, tag, one.out.data(), sizeof(Greeting) + nbytes);
    }

    // Look at the greetings that have come. Store a verdict for the ranks of the node as soon as there is one. A failed
    // message is kept in `failed`.
    void look(Head* head, int64_t base, int64_t signature) {
        if (missing == 0) return;
        for (Correspondent& one : others) {
            if (one.is_heard || one.came.is_under_way()) continue;
            if (one.came.now() == WireMessage::FAILED || one.came.length < sizeof(Greeting)) {
                failed = &one.came;
                return;
            }
            one.is_heard = true;
            missing--;
            const Greeting found = one.greeting();
            first = std::min(first, found.first);
            if (found.is_alike == 0 || found.signature != signature) {
                missing = 0;  // the other greetings tell nothing more
                head->verdict.store(base + UNLIKE_CALLS, std::memory_order_release);
                return;
            }
        }
        if (missing == 0) settle(head, base);
    }

    // Tell the ranks of this node that all ranks make the call. Release: the earliest arrival is complete.
    void settle(Head* head, int64_t base) const {
        head->first_arrival.store(first, std::memory_order_relaxed);
        head->verdict.store(base + ALIKE_CALLS, std::memory_order_release);
    }
};

}  // namespace gpucoll
