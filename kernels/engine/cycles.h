// Waits in blocking messages, shown to the other ranks of the node, so that ranks waiting for each other are found.
//
// Record (`WaitRecord`). A rank that waits long shows its wait in the mailbox to itself: a number, odd while the wait is
// shown, and the ends of the messages still awaited, at most a send and a receive. During a shown wait the rank begins
// no message (`Mailbox::begin` ends the wait shown). The wait ends only when all its messages have ended.
//
// Answers. Only the partner knows whether it has begun the other end. A rank in a shown wait of its own looks at the
// waits for it, and notes those that are in vain, in the mailbox to the waiting rank: its messages cannot change before
// its own wait ends. A send is in vain if the message is in the partner's unexpected queue. A receive is in vain if the
// receiver had taken `mark` messages of the partner, was still without its message, and the partner has sent no other.
// An answer names the numbers of both waits, and so holds as long as both waits are shown.
//
// A cycle of such answers, read twice with the same numbers, held at the moment between: all waits of the cycle were
// shown at once, and none of these ranks can ever leave its wait. No clock decides.
//
// Verdict. The rank that finds a cycle notes each rank's wait in the mailbox to that rank, since its own wait ends by
// its error. Records stay as they are after the end of a wait, so the other ranks can name the whole cycle.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstring>

#include "engine/flight.h"

namespace gpucoll {

static const uint64_t SENDING = 0, RECEIVING = 1;  // the two ends of messages of a wait

// The end of a message in a wait: `mark` is a send's ticket, or the messages that a receiver has taken from the peer.
struct ShownEnd {
    bool is_there = false;
    uint64_t peer = 0, tag = 0, nbytes = 0, mark = 0;
};

// A shown end in shared memory. All accesses are seq_cst: waits of this length have time.
struct EndRecord {
    std::atomic<uint64_t> is_there, peer, tag, nbytes, mark;

    void show(const ShownEnd& end) {
        peer.store(end.peer);
        tag.store(end.tag);
        nbytes.store(end.nbytes);
        mark.store(end.mark);
        is_there.store(end.is_there);
    }
    ShownEnd shown() const { return {is_there.load() != 0, peer.load(), tag.load(), nbytes.load(), mark.load()}; }
};

// What the sender of a mailbox shows in it. Number, ends and site are used in the mailbox of a rank to itself.
struct WaitRecord {
    std::atomic<uint64_t> number;      // of the wait, odd while shown
    EndRecord ends[2];                 // by direction
    char site[SITE_BYTES];             // the place in the user's program; stored before the number
    std::atomic<uint64_t> answers[2];  // to the receiver of the mailbox, by direction: see `answer_of`
    std::atomic<uint64_t> verdict;     // on the receiver: the number of its wait, in a cycle, and the direction

    void name_site(const char* text) {
        std::strncpy(site, text, SITE_BYTES - 1);
        site[SITE_BYTES - 1] = 0;
    }
};

// Return the answer of a rank in wait `given` to the wait `asked`: 32 bits of either number.
static uint64_t answer_of(uint64_t asked, uint64_t given) { return asked << 32 | (given & 0xffffffff); }

}  // namespace gpucoll
