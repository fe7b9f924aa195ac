// Messages between two ranks of a node.
//
// Every rank has in its control segment a box for each rank that it sends to: letters in a ring, which only the one
// writes and only the other reads. A short message is in its letter, and its sender goes on; of a long one the letter says
// where it is, the receiver reads it there, and notes in the box that it has. Letters that nobody has asked for yet are taken out
// of the box all the same, so that the ring never stops who comes later.
#pragma once
#include <deque>
#include <memory>

#include "engine.h"

static const uint64_t LETTERS = 8;      // of a box
static const uint64_t SHORT = 1 << 13;  // bytes of a message that is in its letter
static const uint64_t LONG_ONES = 512;  // long messages from one rank to another that are under way at a time
static const uint16_t BYTES = 0;        // in place of a dtype: any is meant
static const int64_t ANYBODY = -1, ANYTHING = -1;  // in place of a rank and of a tag

struct alignas(64) Letter {
    enum Kind : uint16_t { SHORT_ONE, LONG_ONE };

    std::atomic<uint64_t> number;  // counted from 1: of this place in the ring the last one; written last
    uint16_t kind, dtype;
    uint32_t tag;
    uint64_t nbytes;
    int64_t key, offset;           // where a long message is, as a board has it
    uint64_t ticket;               // which long message it is, counted from 1
};

struct Box {
    struct alignas(64) Place {
        Letter letter;
        char content[SHORT];
    };

    alignas(64) std::atomic<uint64_t> pulled;  // how many letters its reader has taken out
    alignas(64) std::atomic<uint64_t> ends[LONG_ONES];  // the last of those long messages that has been read
    Place places[LETTERS];
};

// One end of a message.
struct Transfer {
    uint32_t peer, tag;
    char* row;
    uint64_t nbytes;
    uint64_t length = 0;  // of what came
    uint16_t dtype = BYTES, came = BYTES;  // its own, and of what came
    bool sends, done = false;
    int error = 0;        // the system's, where memory is out of reach
    uint64_t ticket = 0;  // of a long one that has been written

    bool fits() const {
        return length == nbytes && (dtype == came || dtype == BYTES || came == BYTES);
    }

    bool has_ended(const Box* out) {
        if (ticket != 0 && !done) done = out->ends[ticket % LONG_ONES].load(std::memory_order_acquire) >= ticket;
        return done;
    }
};

// What a rank has under way with another one.
struct Correspondence {
    struct Unasked {
        uint16_t kind, dtype;
        uint32_t tag;
        uint64_t nbytes;
        int64_t key, offset;
        uint64_t ticket;
        std::unique_ptr<char[]> content;
    };

    Box *out = nullptr, *in = nullptr;
    uint64_t written = 0, pulled = 0, known = 0;  // letters, and how many of those written the other is known to have
    std::deque<std::shared_ptr<Transfer>> outgoing, expected;
    std::deque<Unasked> unasked;
    uint64_t tickets = 0;
};

// All messages of a rank.
struct Mail {
    std::vector<Correspondence> with;

    // `place` is where boxes begin in every control segment.
    void open(const Node& node, uint64_t place) {
        with = std::vector<Correspondence>(node.ranks);
        for (uint32_t peer = 0; peer < node.ranks; peer++) {
            if (node.heads[peer] == nullptr) continue;
            const auto box = [&](uint32_t of, uint32_t to) {
                return reinterpret_cast<Box*>(reinterpret_cast<char*>(node.heads[of]) + place) + to;
            };
            with[peer].out = box(node.rank, peer);
            with[peer].in = box(peer, node.rank);
        }
    }

    bool reaches(uint64_t peer) const { return peer < with.size() && with[peer].out != nullptr; }

    // Throws std::bad_alloc where there is no memory: then nothing has begun.
    void begin(Node& node, const std::shared_ptr<Transfer>& transfer) {
        Correspondence& one = with[transfer->peer];
        if (transfer->sends) {
            one.outgoing.push_back(transfer);
            write_all(node, one);
            return;
        }
        for (auto found = one.unasked.begin(); found != one.unasked.end(); ++found) {
            if (found->tag != transfer->tag) continue;
            const Correspondence::Unasked letter = std::move(*found);
            one.unasked.erase(found);
            deliver(node, one, *transfer, letter, letter.content.get());
            return;
        }
        one.expected.push_back(transfer);
        try {
            go_on(node, transfer->peer);
        } catch (const std::bad_alloc&) {
            // A letter for which there is no memory stays in its box: the next look takes it.
        }
    }

    // Returns the first message from `source` with `tag` that nobody has asked for, ANYBODY and ANYTHING where that is all
    // the same, and notes in `source` who has sent it; null where there is none.
    const Correspondence::Unasked* seen(Node& node, int64_t* source, int64_t tag) {
        go_on(node);
        for (uint32_t peer = 0; peer < with.size(); peer++) {
            if (*source != ANYBODY && *source != peer) continue;
            for (const Correspondence::Unasked& one : with[peer].unasked)
                if (tag == ANYTHING || one.tag == tag) {
                    *source = peer;
                    return &one;
                }
        }
        return nullptr;
    }

    bool has_ended(Transfer& transfer) const { return transfer.has_ended(with[transfer.peer].out); }

    // Forgets a receive that has not ended, or lets a message that has not been begun stay unsent.
    void call_back(const std::shared_ptr<Transfer>& transfer) {
        std::deque<std::shared_ptr<Transfer>>& waiting =
            transfer->sends ? with[transfer->peer].outgoing : with[transfer->peer].expected;
        waiting.erase(std::remove(waiting.begin(), waiting.end(), transfer), waiting.end());
    }

    // Takes all letters that have come from a rank, and writes what there is room for. Throws std::bad_alloc where there is
    // no memory for a letter, which stays in its box.
    void go_on(Node& node, uint32_t peer) {
        Correspondence& one = with[peer];
        for (;;) {
            Box::Place& place = one.in->places[one.pulled % LETTERS];
            if (place.letter.number.load(std::memory_order_acquire) != one.pulled + 1) break;
            take(node, one, place);
            one.in->pulled.store(++one.pulled, std::memory_order_release);
        }
        write_all(node, one);
    }

    void go_on(Node& node) {
        for (uint32_t peer = 0; peer < with.size(); peer++)
            if (with[peer].out != nullptr) go_on(node, peer);
    }

  private:
    void take(Node& node, Correspondence& one, Box::Place& place) {
        const Letter& letter = place.letter;
        Correspondence::Unasked copy = {letter.kind, letter.dtype, letter.tag, letter.nbytes, letter.key, letter.offset,
                                        letter.ticket, nullptr};
        for (auto found = one.expected.begin(); found != one.expected.end(); ++found) {
            if ((*found)->tag != letter.tag) continue;
            const std::shared_ptr<Transfer> transfer = *found;
            one.expected.erase(found);
            deliver(node, one, *transfer, copy, place.content);
            return;
        }
        if (letter.kind == Letter::SHORT_ONE) {
            copy.content.reset(new char[letter.nbytes + 1]);
            std::memcpy(copy.content.get(), place.content, letter.nbytes);
        }
        one.unasked.push_back(std::move(copy));
    }

    // Nothing is written where the message has another length or another dtype than the receive.
    void deliver(Node& node, Correspondence& one, Transfer& transfer, const Correspondence::Unasked& letter,
                 const char* content) {
        transfer.length = letter.nbytes;
        transfer.came = letter.dtype;
        const bool fits = transfer.fits();
        if (letter.kind == Letter::SHORT_ONE) {
            if (fits) std::memcpy(transfer.row, content, letter.nbytes);
        } else {
            if (fits) transfer.error = read(node, transfer, letter);
            one.in->ends[letter.ticket % LONG_ONES].store(letter.ticket, std::memory_order_release);
        }
        transfer.done = true;
    }

    static int read(const Node& node, const Transfer& transfer, const Correspondence::Unasked& letter) {
        if (letter.key != HERE) {
            Segment segment;
            const Segments& known = transfer.peer == node.rank ? node.symmetric : node.others;
            if (!known.of(transfer.peer, letter.key, &segment)) return EFAULT;
            copy(transfer.row, segment.start + letter.offset, letter.nbytes);
            return 0;
        }
        char* there = reinterpret_cast<char*>(static_cast<intptr_t>(letter.offset));
        if (node.processes[transfer.peer] == node.process) {
            copy(transfer.row, there, letter.nbytes);
            return 0;
        }
        return transfer_from(node.processes[transfer.peer], transfer.row, there, letter.nbytes);
    }

    static int transfer_from(int32_t process, char* here, char* there, uint64_t nbytes) {
        return transfer(process_vm_readv, process, here, there, nbytes);
    }

    // Returns the next free letter; null where the ring is full.
    static Box::Place* next(Correspondence& one) {
        if (one.written - one.known == LETTERS) one.known = one.out->pulled.load(std::memory_order_acquire);
        return one.written - one.known == LETTERS ? nullptr : &one.out->places[one.written % LETTERS];
    }

    // Whether the first message that is waiting is short, or not one long message too many.
    static bool may_write(const Correspondence& one) {
        const uint64_t ticket = one.tickets + 1;
        return one.outgoing.front()->nbytes <= SHORT || ticket <= LONG_ONES
               || one.out->ends[ticket % LONG_ONES].load(std::memory_order_acquire) == ticket - LONG_ONES;
    }

    static void post(Correspondence& one, Box::Place* place) {
        place->letter.number.store(++one.written, std::memory_order_release);
    }

    void write_all(Node& node, Correspondence& one) {
        Box::Place* place;
        while (!one.outgoing.empty() && may_write(one) && (place = next(one)) != nullptr) {
            write(node, one, *one.outgoing.front(), *place);
            one.outgoing.pop_front();
            post(one, place);
        }
    }

    static void write(const Node& node, Correspondence& one, Transfer& transfer, Box::Place& place) {
        Letter& letter = place.letter;
        letter.tag = transfer.tag;
        letter.dtype = transfer.dtype;
        letter.nbytes = transfer.nbytes;
        if (transfer.nbytes <= SHORT) {
            letter.kind = Letter::SHORT_ONE;
            if (transfer.nbytes > 0) std::memcpy(place.content, transfer.row, transfer.nbytes);
            transfer.done = true;
            return;
        }
        Segment slab;
        const bool mapped = node.symmetric.holding(transfer.row, transfer.nbytes, &slab);
        letter.kind = Letter::LONG_ONE;
        letter.key = mapped ? slab.key : HERE;
        letter.offset = mapped ? transfer.row - slab.start
                               : static_cast<int64_t>(reinterpret_cast<intptr_t>(transfer.row));
        letter.ticket = transfer.ticket = ++one.tickets;
    }
};
