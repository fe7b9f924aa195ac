// Messages between two ranks of a node, through rings in the control segments.
//
// Mailbox (`Ring`). The sender's control segment holds a mailbox for each receiver: a ring of MAIL_SLOTS slots
// (`MailSlot`), each with a header (`MessageHeader`) and room for SHORT bytes. The sender fills slots, the receiver
// empties them: with a single writer and a single reader no lock is needed. Message n, counted from 1, uses slot
// (n - 1) % MAIL_SLOTS. The sender publishes a slot by storing n to `MessageHeader::number`. The receiver frees the
// slot by storing n to `Ring::pulled`.
//
// Eager messages, at most SHORT bytes, are copied to the slot: the send completes at once. Rendezvous messages are
// longer: the slot says where the sender's buffer is, the receiver reads the buffer in place, then acknowledges in
// `Ring::ends`. The send completes with the acknowledgement. Each rendezvous message has a ticket, counted from 1, and
// is acknowledged at place ticket % LONG_ONES: receivers match tags in any order, so a counter of finished messages
// would not do.
//
// Matching. A receive takes the first message of its peer with the same tag. Receives without a message wait in the
// list of posted receives (`posted`). Messages without a receive move from the ring to the unexpected queue
// (`unexpected`), so a message without a receive never blocks the messages behind it. Sends without a free slot wait in
// `outgoing`.
//
// Cycles. A rank that waits long in a blocking message shows its wait to the ranks of the node: see cycles.h.
//
// Progress. All calls return at once; `go_on` empties the rings and fills free slots. `Mailbox` has no lock of its own:
// `Progress.gate` admits a single thread at a time.
#pragma once
#include <deque>
#include <memory>

#include "engine/cycles.h"
#include "engine/memory.h"
#include "engine/waits.h"

namespace gpucoll {

static const uint64_t MAIL_SLOTS = 8;   // slots of a ring
static const uint64_t SHORT = 1 << 13;  // most bytes of an eager message
// The most rendezvous messages under way from a rank to another: a further message waits for the acknowledgement in
// its place.
static const uint64_t LONG_ONES = 512;
static const uint16_t BYTES = 0;        // dtype code: matches any dtype
static const int64_t ANYBODY = -1, ANYTHING = -1;  // wildcards for rank and tag

// The header of a message in a slot. A cache line of its own: the receiver polls `number`.
struct alignas(64) MessageHeader {
    enum Kind : uint16_t { SHORT_ONE, LONG_ONE };  // eager, rendezvous

    std::atomic<uint64_t> number;  // of the last message in this slot, counted from 1; stored after everything else
    uint16_t kind, dtype;
    uint32_t tag;
    uint64_t nbytes;
    int64_t key, offset;           // rendezvous: segment key and offset of the sender's buffer, or HERE and an address
    uint64_t ticket;               // rendezvous: the number among the rendezvous messages
};

// The mailbox of a sender and a receiver, in the sender's control segment.
struct Ring {
    struct alignas(64) MailSlot {
        MessageHeader header;
        char content[SHORT];
    };

    // Both stored by the receiver only, on cache lines apart from the sender's: no line moves back and forth
    // needlessly.
    alignas(64) std::atomic<uint64_t> pulled;           // messages taken from the ring so far
    alignas(64) std::atomic<uint64_t> ends[LONG_ONES];  // ticket of the last message read, by ticket % LONG_ONES
    alignas(64) WaitRecord record;                      // stored by the sender only, in waits that last
    MailSlot slots[MAIL_SLOTS];
};

// A send or a receive under way on this rank.
struct Transfer {
    uint32_t peer, tag;
    char* row;
    uint64_t nbytes;
    uint64_t length = 0;  // bytes of the message received
    uint16_t dtype = BYTES, came = BYTES;  // dtype code of this rank's array, and of the message received
    bool sends, done = false;
    int error = 0;        // the system's error number if the sender's memory is out of reach
    uint64_t ticket = 0;  // of a rendezvous message shown to the receiver; 0: the receiver knows nothing yet

    // Return whether the message received has the length and dtype of this rank's array.
    bool fits() const {
        return length == nbytes && (dtype == came || dtype == BYTES || came == BYTES);
    }

    // Return whether the transfer is complete. Acquire pairs with the receiver's release: all reads of the buffer are
    // over, so the sender may overwrite the buffer. A larger ticket in this place implies the acknowledgement of this
    // ticket.
    bool has_ended(const Ring* out) {
        if (ticket != 0 && !done) done = out->ends[ticket % LONG_ONES].load(std::memory_order_acquire) >= ticket;
        return done;
    }
};

// All messages under way between this rank and a peer.
struct Connection {
    // A message of the unexpected queue. `content` is a copy if eager; a rendezvous message stays in the sender's
    // buffer.
    struct UnexpectedMessage {
        uint16_t kind, dtype;
        uint32_t tag;
        uint64_t nbytes;
        int64_t key, offset;
        uint64_t ticket;
        std::unique_ptr<char[]> content;
    };

    Ring *out = nullptr, *in = nullptr;  // null for remote ranks
    // Messages written to `out`, taken from `in`, and a lower bound for those taken from `out` by the peer.
    uint64_t written = 0, pulled = 0, known = 0;
    std::deque<std::shared_ptr<Transfer>> outgoing, posted;  // sends without a slot; posted receives
    std::deque<UnexpectedMessage> unexpected;                          // the unexpected queue
    uint64_t tickets = 0;                                    // rendezvous messages written so far
};

// All messages of a rank, by peer.
struct Mailbox {
    std::vector<Connection> with;
    uint64_t first = 0;  // the offset of the mailboxes in every control segment
    std::atomic<uint64_t> wait{0};  // the number of this rank's last shown wait, odd while shown
    uint32_t rank = 0;

    // Find the mailboxes. They begin at offset `place` of every control segment, in the order of the receivers.
    void open(const Node& node, uint64_t place) {
        with = std::vector<Connection>(node.ranks);
        first = place;
        rank = node.rank;
        for (uint32_t peer = 0; peer < node.ranks; peer++) {
            if (node.heads[peer] == nullptr) continue;
            with[peer].out = box(node, node.rank, peer);
            with[peer].in = box(node, peer, node.rank);
        }
    }

    // Return the mailbox of a sender and a receiver, both on this node.
    Ring* box(const Node& node, uint32_t of, uint32_t to) const {
        return reinterpret_cast<Ring*>(reinterpret_cast<char*>(node.heads[of]) + first) + to;
    }

    bool reaches(uint64_t peer) const { return peer < with.size() && with[peer].out != nullptr; }

    // Begin a send or receive. Throws std::bad_alloc without memory; then nothing has begun.
    void begin(Node& node, const std::shared_ptr<Transfer>& transfer) {
        hide_wait();  // a rank that begins a message does not wait
        Connection& one = with[transfer->peer];
        if (transfer->sends) {
            one.outgoing.push_back(transfer);
            write_all(node, one);
            return;
        }
        // The unexpected queue first: those messages were sent before any message still in the ring.
        for (auto found = one.unexpected.begin(); found != one.unexpected.end(); ++found) {
            if (found->tag != transfer->tag) continue;
            const Connection::UnexpectedMessage header = std::move(*found);
            one.unexpected.erase(found);
            deliver(node, one, *transfer, header, header.content.get());
            return;
        }
        one.posted.push_back(transfer);
        try {
            go_on(node, transfer->peer);
        } catch (const std::bad_alloc&) {
            // The receive is posted. A message without memory for a copy stays in its slot until the next `go_on`.
        }
    }

    // Return the first unexpected message from `source` with `tag`, or null. ANYBODY and ANYTHING match all.
    // Store the sender in `source`.
    const Connection::UnexpectedMessage* seen(Node& node, int64_t* source, int64_t tag) {
        go_on(node);
        for (uint32_t peer = 0; peer < with.size(); peer++) {
            if (*source != ANYBODY && *source != peer) continue;
            for (const Connection::UnexpectedMessage& one : with[peer].unexpected)
                if (tag == ANYTHING || one.tag == tag) {
                    *source = peer;
                    return &one;
                }
        }
        return nullptr;
    }

    bool has_ended(Transfer& transfer) const { return transfer.has_ended(with[transfer.peer].out); }

    // Cancel a posted receive, or a send still without a slot.
    void call_back(const std::shared_ptr<Transfer>& transfer) {
        std::deque<std::shared_ptr<Transfer>>& waiting =
            transfer->sends ? with[transfer->peer].outgoing : with[transfer->peer].posted;
        waiting.erase(std::remove(waiting.begin(), waiting.end(), transfer), waiting.end());
    }

    // Take all messages arrived from a peer, and write waiting sends to free slots. Throws std::bad_alloc without
    // memory for the copy of a message; that message stays in its slot.
    void go_on(Node& node, uint32_t peer) {
        Connection& one = with[peer];
        for (;;) {
            Ring::MailSlot& place = one.in->slots[one.pulled % MAIL_SLOTS];
            // Acquire pairs with `post`: header and content are complete. An old message in the slot has a smaller
            // number.
            if (place.header.number.load(std::memory_order_acquire) != one.pulled + 1) break;
            // Store `pulled` after taking, with release: the reads of the slot are over before the sender may
            // overwrite it.
            take(node, one, place);
            one.in->pulled.store(++one.pulled, std::memory_order_release);
        }
        write_all(node, one);
    }

    void go_on(Node& node) {
        for (uint32_t peer = 0; peer < with.size(); peer++)
            if (with[peer].out != nullptr) go_on(node, peer);
    }

    // Show that this rank waits for messages under way, at most one of either direction, and look at the other ranks'
    // waits for this rank. Return whether there was a message to show. Throws std::bad_alloc as `go_on`.
    bool show_wait(Node& node, const std::vector<Transfer*>& transfers, const char* site) {
        go_on(node);
        WaitRecord& mine = with[rank].out->record;
        bool any = false;
        for (uint64_t direction : {SENDING, RECEIVING}) {
            ShownEnd end;
            for (Transfer* one : transfers) {
                if (one->sends != (direction == SENDING) || has_ended(*one)) continue;
                if (one->sends && one->ticket == 0) continue;  // the receiver knows nothing yet
                end = {true, one->peer, one->tag, one->nbytes, one->sends ? one->ticket : with[one->peer].pulled};
                break;
            }
            any |= end.is_there;
            mine.ends[direction].show(end);
        }
        if (!any) {
            hide_wait();
            return false;
        }
        if (wait % 2 == 0) {
            mine.name_site(site);
            wait++;
            mine.number.store(wait);
        }
        answer(node);
        return true;
    }

    // End the wait shown. Called before this rank does anything else; by two threads at once only if a program breaks
    // the rule of one thread. Relaxed: another thread's wait is no concern of a message.
    void hide_wait() {
        uint64_t shown = wait.load(std::memory_order_relaxed);
        if (shown % 2 != 0 && wait.compare_exchange_strong(shown, shown + 1)) with[rank].out->record.number.store(shown + 1);
    }

    // Return the number of the partner's shown wait if an end of a rank's shown wait cannot end before that wait, else 0.
    uint64_t stuck_by(const Node& node, uint32_t of, uint64_t direction) const {
        const WaitRecord& asks = box(node, of, of)->record;
        const ShownEnd end = asks.ends[direction].shown();
        if (!end.is_there || !reaches(end.peer)) return 0;
        const uint64_t asked = asks.number.load(), given = box(node, end.peer, end.peer)->record.number.load();
        const uint64_t answer = box(node, end.peer, of)->record.answers[direction].load();
        return asked % 2 != 0 && given % 2 != 0 && answer == answer_of(asked, given) ? given : 0;
    }

  private:
    // Note which ranks wait in vain for this rank, as long as this rank waits: a send whose message is unexpected here;
    // a receive of a rank that has seen all messages of this rank.
    void answer(const Node& node) {
        for (uint32_t peer = 0; peer < with.size(); peer++) {
            const Connection& one = with[peer];
            if (one.out == nullptr) continue;
            const WaitRecord& asks = box(node, peer, peer)->record;
            for (uint64_t direction : {SENDING, RECEIVING}) {
                const uint64_t number = asks.number.load();
                const ShownEnd end = asks.ends[direction].shown();
                if (number % 2 == 0 || !end.is_there || end.peer != rank) continue;
                const bool vain = direction == SENDING ? is_unexpected(one, end.mark)
                                                       : one.outgoing.empty() && one.written == end.mark;
                // The end belongs to this wait only if the wait is still shown.
                if (vain && asks.number.load() == number) one.out->record.answers[direction].store(answer_of(number, wait));
            }
        }
    }

    static bool is_unexpected(const Connection& one, uint64_t ticket) {
        return std::any_of(one.unexpected.begin(), one.unexpected.end(),
                           [&](const auto& message) { return message.kind == MessageHeader::LONG_ONE && message.ticket == ticket; });
    }

    // Deliver the message in a slot to the first matching posted receive, or append it to the unexpected queue.
    void take(Node& node, Connection& one, Ring::MailSlot& place) {
        const MessageHeader& header = place.header;
        Connection::UnexpectedMessage copy = {header.kind, header.dtype,  header.tag,    header.nbytes,
                                              header.key,  header.offset, header.ticket, nullptr};
        for (auto found = one.posted.begin(); found != one.posted.end(); ++found) {
            if ((*found)->tag != header.tag) continue;
            const std::shared_ptr<Transfer> transfer = *found;
            one.posted.erase(found);
            deliver(node, one, *transfer, copy, place.content);
            return;
        }
        if (header.kind == MessageHeader::SHORT_ONE) {
            copy.content.reset(new char[header.nbytes + 1]);  // messages may be empty
            std::memcpy(copy.content.get(), place.content, header.nbytes);
        }
        one.unexpected.push_back(std::move(copy));
    }

    // Complete a receive. A message of another length or dtype writes nothing, so the caller's array stays intact; a
    // rendezvous message is acknowledged all the same, or the sender would wait for ever.
    void deliver(Node& node, Connection& one, Transfer& transfer, const Connection::UnexpectedMessage& header,
                 const char* content) {
        transfer.length = header.nbytes;
        transfer.came = header.dtype;
        const bool fits = transfer.fits();
        if (header.kind == MessageHeader::SHORT_ONE) {
            if (fits) std::memcpy(transfer.row, content, header.nbytes);
        } else {
            if (fits) transfer.error = read(node, transfer, header);
            // Release: all reads of the sender's buffer happen before the sender sees the acknowledgement.
            one.in->ends[header.ticket % LONG_ONES].store(header.ticket, std::memory_order_release);
        }
        transfer.done = true;
    }

    // Copy a rendezvous message from the sender's buffer: mapped symmetric memory, the same process, or another
    // process through process_vm_readv. Return 0, or the system's error.
    static int read(const Node& node, const Transfer& transfer, const Connection::UnexpectedMessage& header) {
        if (header.key != HERE) {
            Segment segment;
            const Segments& known = transfer.peer == node.rank ? node.symmetric : node.others;
            if (!known.of(transfer.peer, header.key, &segment)) return EFAULT;
            copy(transfer.row, segment.start + header.offset, header.nbytes);
            return 0;
        }
        char* there = reinterpret_cast<char*>(static_cast<intptr_t>(header.offset));
        if (node.processes[transfer.peer] == node.process) {
            copy(transfer.row, there, header.nbytes);
            return 0;
        }
        return transfer_from(node.processes[transfer.peer], transfer.row, there, header.nbytes);
    }

    static int transfer_from(int32_t process, char* here, char* there, uint64_t nbytes) {
        return transfer(process_vm_readv, process, here, there, nbytes);
    }

    // Return the next free slot, or null if the ring is full.
    static Ring::MailSlot* next(Connection& one) {
        // Load `pulled` only if the ring seems full: the line belongs to the receiver, and loading costs a transfer.
        // Acquire: the receiver's reads of the slot are over before this rank overwrites the slot.
        if (one.written - one.known == MAIL_SLOTS) one.known = one.out->pulled.load(std::memory_order_acquire);
        return one.written - one.known == MAIL_SLOTS ? nullptr : &one.out->slots[one.written % MAIL_SLOTS];
    }

    // Return whether the first waiting send may be written: always if eager; a rendezvous message must wait until the
    // earlier message with the same place in `ends` is acknowledged, or that acknowledgement would be lost.
    static bool may_write(const Connection& one) {
        const uint64_t ticket = one.tickets + 1;
        return one.outgoing.front()->nbytes <= SHORT || ticket <= LONG_ONES
               || one.out->ends[ticket % LONG_ONES].load(std::memory_order_acquire) == ticket - LONG_ONES;
    }

    // Publish a slot. Release: header and content are written before the number.
    static void post(Connection& one, Ring::MailSlot* place) {
        place->header.number.store(++one.written, std::memory_order_release);
    }

    // Write waiting sends to free slots, in order: messages with the same tag must not overtake each other.
    void write_all(Node& node, Connection& one) {
        Ring::MailSlot* place;
        while (!one.outgoing.empty() && may_write(one) && (place = next(one)) != nullptr) {
            write(node, one, *one.outgoing.front(), *place);
            one.outgoing.pop_front();
            post(one, place);
        }
    }

    // Fill a slot for a send; an eager send is complete then.
    static void write(const Node& node, Connection& one, Transfer& transfer, Ring::MailSlot& place) {
        MessageHeader& header = place.header;
        header.tag = transfer.tag;
        header.dtype = transfer.dtype;
        header.nbytes = transfer.nbytes;
        if (transfer.nbytes <= SHORT) {
            header.kind = MessageHeader::SHORT_ONE;
            if (transfer.nbytes > 0) std::memcpy(place.content, transfer.row, transfer.nbytes);
            transfer.done = true;
            return;
        }
        Segment slab;
        const bool mapped = node.symmetric.holding(transfer.row, transfer.nbytes, &slab);
        header.kind = MessageHeader::LONG_ONE;
        header.key = mapped ? slab.key : HERE;
        header.offset = mapped ? transfer.row - slab.start
                               : static_cast<int64_t>(reinterpret_cast<intptr_t>(transfer.row));
        header.ticket = transfer.ticket = ++one.tickets;
    }
};

}  // namespace gpucoll
