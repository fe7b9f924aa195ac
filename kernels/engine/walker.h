// The engine: carries out a rank's part of a schedule in memory shared by the ranks of a node.
//
// Shared memory. Every rank owns a control segment, mapped by all ranks of the node. The segment holds a `Head`
// (progress counter, two call descriptors, failure word), then block starts, slots for eager calls, workspaces for
// small buffers, and the mailboxes of `mail.h`. A rank stores only to its own segment, with three exceptions:
// `Head::sleepers`, counted by waiting ranks; buffers written through the copies of an `Instruction`; the
// fields `pulled` and `ends` of a mailbox.
//
// Progress counter (`Head::counter`). A number that never decreases: the number of the rank's call, shifted left by
// ROUNDS bits, plus a position in the call. The positions are chosen by executors/engine/instructions.py:
//     0            the rank is in the call: the descriptor and the input laid out for the peers may be read
//     2k           the rank has entered round k: all bytes written earlier may be read
//     2k + 1       moreover, the rank has finished all reads of round k: the peers may overwrite the sources
//     SETTLED - 1  after a mismatch: the descriptor also holds the rank's place in the program
//     SETTLED      the call is cancelled: no data moved, and the next call behaves as if this call had not been made
// A plan awaits a peer's counter before reading the peer's bytes, and before overwriting bytes read by the peer.
//
// Call descriptor (`Head::descriptors`, `Head::signatures`). Plans contain no addresses: a part of a plan is a rank, a
// buffer and an offset. The descriptor of a rank says where the buffers are in this call: a segment and an offset, or
// an address for process_vm_readv. The descriptor also holds the call in words, for error messages. The signature
// identifies the call.
//
// Two calls in a row. Call n uses descriptor, workspaces and `modes` of half n % 2, so call n + 1 overwrites nothing
// of call n. Before call n + 2 uses the half again, the rank waits until every reader of call n has shown the counter
// noted in `Node::unread`. The comparison with ALL needs no counter: the ranks meet in call n + 1, and so have left
// call n.
// User arrays and staging buffers have no second half: for these the rank waits at the end of the call (stage
// ENDING). Short repeated calls are eager: the rank shows a `Slot`, out of SLOTS in turn, and may be SLOTS - 1 calls
// ahead.
//
// Mismatches. A signature mixes the call, the call's number and the history of all earlier calls. In the stage
// MEETING a rank waits for the counters of all ranks (`check` ALL) or of the peers (PEERS) and compares signatures
// before data move. A difference ends `go_on` with DIFFERS, and Python raises the error. If all ranks compare, each
// rank first shows its place in the program, reads the others', and the call is cancelled; otherwise the communicator
// has failed. Ranks may miss a mismatch by not meeting. Their `history` then differs, and the next common call
// detects the mismatch.
//
// Deferred comparisons (`DEFERRED`). A call on a GPU waits for no rank: this rank only shows it, in a slot, and goes on.
// The next call of the communicator begins with the stage JUDGING: all ranks have come to the deferred call, and their
// signatures are compared. Data have moved by then, so that a difference ends the communicator. The input of such a
// call, if any, goes to all ranks (`Node::heard`).
//
// Between nodes the leaders' greetings take the place of counters and signatures: see agreement.h. The comparison ends
// with the instruction AGREE, before the call writes to any array of the caller's. Messages of the call travel by
// `Node::wire`, and every wait moves these messages on.
//
// Dead ranks. No wait here lasts much longer than MAX_WAIT. `go_on` then returns WAITING; Python checks the deadline
// and the processes of the other ranks (gpucoll/health/guard.py) and calls again. A rank giving up stores the reason
// in `Head::failure`; `culprit` finds the awaited rank with a failure. A counter shown before the failure counts.
//
// Memory orders are told in waits.h.
//
// The engine knows neither Python nor MPI. Work for Python is an `Outcome`; afterwards the call goes on.
#pragma once
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "engine/agreement.h"
#include "engine/memory.h"
#include "engine/plan.h"

namespace gpucoll {

// Copied results from this size on bypass the caches: reading the lines before overwriting would cost bandwidth.
static const uint64_t STREAMED = 1 << 22;
static const int64_t SETTLED = (1 << ROUNDS) - 1;  // position of a cancelled call in the progress counter
// The last number of a call that leaves room for a position in the progress counter, and for a look at the next call.
static const uint64_t MOST_CALLS = (uint64_t{1} << (63 - ROUNDS)) - 2;
// After this many repetitions a call is eager: rare calls gain nothing from running ahead.
static const uint32_t EAGER_AFTER = 4;
// A rank that meets no other rank looks for ranks waiting for its data only if so many nanoseconds have passed since
// its last call: after a shorter pause, the transfer of the cache lines with the arrivals costs more than the figure tells.
static const int64_t NOTICED = 20000;
// Nanoseconds between two looks at messages after a wait in vain: doubled from the first to the last number.
static const long FIRST_NAP = 20000, LONGEST_NAP = 160000;
static const uint32_t LOOKS = 64;  // looks at messages before the clock is read
static const uint64_t LONGEST_LOOK = 10000000;  // nanoseconds of a wait for messages, after which Python has its turn
static const int DEAR_YIELDS = 8;  // in a wait for messages, before naps: one alone may be chance
static const uint64_t WIRE_CALLS = (1 << 13) - 1;  // the bits of a tag for the number of a call: old tags come again

// The address of a rank's buffer. `process` is 0 for mapped memory, else the process to be read by process_vm_readv.
struct Base {
    char* start;
    int32_t process;
};

// An array of a result that is a list: where it begins among the bytes of the result.
struct Piece {
    uint64_t offset, nbytes;
    char* start;
};

// The call under way, resumable: `go_on` returns at a wait or for work of Python, and continues at `stage` and `at`.
// Outcomes: WAITING for another rank; DIFFERS, a mismatch; UNKNOWN, a segment to be mapped; CALLING, a Python
// function to be called; BROKEN, a system error; CUT, a failed message. Stages, in order: JUDGING, only after a deferred
// call. LISTENING, only for announced calls, waits until the root shows the call. BEFORE waits until the half may be overwritten, then shows the descriptor.
// MEETING waits for the other ranks and compares. GREETING tells the leaders of other nodes. FINDING looks up the peers'
// buffers. WALKING carries out the instructions. ENDING waits for the readers.
struct Walker {
    enum Outcome { DONE, WAITING, DIFFERS, UNKNOWN, CALLING, BROKEN, CUT };
    enum Stage { JUDGING, LISTENING, BEFORE, MEETING, GREETING, FINDING, WALKING, ENDING };

    const Plan* plan = nullptr;  // null while no call is under way
    const char* from;
    char* to;                   // of a list of arrays, `pieces`, the first
    std::vector<Piece> pieces;  // empty: the result is one array
    char *staged, *result;  // staging buffer of the input, memory of the result: null if the caller's array serves
    int64_t base, half;     // `base` is the call number shifted by ROUNDS bits, `half` the parity of the number
    int64_t signature;      // of this call: a hash of plan, number and earlier calls
    int64_t history;        // hash of the earlier calls, restored if this call is cancelled
    bool has_slept = false;  // the last wait was in vain
    bool has_passed;   // the root showed another call than expected: this call was never begun
    bool eager;        // this rank waits only for ranks from which it reads
    bool may_wait;     // the caller's thread does only this call: a blocking MPI call is allowed
    Stage stage;
    size_t at;         // index in the list of the stage: rank, peer, instruction or reader
    uint32_t awaited;  // the rank waited for last
    int64_t needed;    // the counter waited for
    int64_t unknown;   // with UNKNOWN: the key of a segment of `awaited`, not mapped yet
    int error;         // with BROKEN: the system's error number
    const WireMessage* cut;  // with CUT: the message
    bool is_alike;     // the ranks of this node make the same call
    bool differs;      // ranks of some node make another call: all ranks compare descriptions
    long nap = FIRST_NAP;             // nanoseconds: see `until`
    std::deque<WireMessage> messages;  // to and from ranks of other nodes, by number; never moved
    Agreement agreement;
    CallTimes times;   // of this call
    std::vector<Base> bases;        // by rank and buffer
    std::vector<const char*> rows;  // addresses, reused to avoid allocations

    // Begin a call. Throws without memory; then nothing has begun, hence the allocations come first. `listens` is set
    // by a thread that does the whole call: an announced call first waits for the root's descriptor.
    void begin(Node& node, const Plan* walked, const char* x, char* out, bool listens) {
        bases.resize(node.ranks * SHOWN);
        while (messages.size() < walked->messages) messages.emplace_back();
        if (node.private_memory.size() < walked->private_bytes) node.private_memory.resize(walked->private_bytes);
        plan = walked;
        from = x;
        to = out;
        base = static_cast<int64_t>(++node.call_count) << ROUNDS;
        history = node.history;
        // The number tells repeated calls apart; `history` makes a mismatch missed earlier visible.
        signature = plan->signature ^ static_cast<int64_t>(node.call_count << 8) ^ history;
        half = node.call_count & 1;
        has_passed = differs = false;
        is_alike = true;
        cut = agreement.failed = nullptr;
        // Count repetitions: a plan called EAGER_AFTER times in a row counts as part of a loop from then on.
        // Deferred calls do not count: a loop may have calls on the host and on a GPU.
        if (!plan->has(DEFERRED)) node.repeats = plan->signature == std::exchange(node.last, plan->signature) ? std::min(node.repeats + 1, EAGER_AFTER) : 0;
        plan->in_row |= node.repeats == EAGER_AFTER;
        eager = plan->has(DEFERRED) || (plan->in_row && plan->may_be_eager(node.same_node.size()));
        may_wait = listens;
        awaited = node.rank;
        needed = base;
        times = {static_cast<int64_t>(nanoseconds()), 0, 0, 0};
        node.waits_since = 0;
        if (!walked->has(ONLY_COMPARES))
            node.flight.began(walked->text, walked->described(), std::max(walked->given, walked->taken), times.began);
        node.heads[node.rank]->begun.store(static_cast<int64_t>(node.call_count), std::memory_order_relaxed);
        enter(node.open.load(std::memory_order_relaxed) != 0 ? JUDGING : first(node));
    }

    // Continue as far as possible. A patient call waits about MAX_WAIT for another rank before returning WAITING. After
    // unlike calls on several nodes every further call returns DIFFERS.
    Outcome go_on(Node& node, bool patient) {
        if (differs) return DIFFERS;
        const Outcome outcome = advance(node, patient);
        if (outcome != WAITING) return outcome;
        differs = has_differed(node);
        if (agreement.failed != nullptr) cut = agreement.failed;
        return differs ? DIFFERS : cut != nullptr ? CUT : WAITING;
    }

  private:
    Outcome advance(Node& node, bool patient) {
        switch (stage) {
            case JUDGING:
                for (; at < node.same_node.size(); at++)
                    if (!sees(node, node.same_node[at], node.open, patient)) return WAITING;
                if (unlike(node) != 0) return DIFFERS;
                hear(node);
                node.open = 0;
                enter(first(node));
                return advance(node, patient);
            case LISTENING:
                // Show the listening before looking: of two ranks taking each other for the root, either must go on.
                node.heads[node.rank]->listens.store(base, std::memory_order_seq_cst);
                if (!sees(node, plan->root, base, patient)) {
                    if (!is_listening(node, plan->root, base)) return WAITING;
                } else if (!agrees(node, plan->root)) {
                    // The root is in another call: undo `begin`, so that Python can take part in the root's call.
                    node.heads[node.rank]->begun.store(static_cast<int64_t>(--node.call_count), std::memory_order_relaxed);
                    node.repeats = 0;
                    node.flight.left();
                    plan = nullptr;
                    has_passed = true;
                    return DONE;
                }
                enter(BEFORE);
                [[fallthrough]];
            case BEFORE:
                // Wait for ranks still reading the half or slot about to be overwritten. `reached` saves an eager
                // call the look at all ranks: once read, the least counter is good for many calls.
                for (; at < node.ranks && !(eager && overdue() <= node.reached); at++)
                    if (node.heads[at] != nullptr && !sees(node, at, awaited_of(node, at), patient)) return WAITING;
                if (eager && at == node.ranks) node.reached = reached(node);
                count_wait(node);
                present(node);
                // A refusing rank shows the refusal in place of a call, and does not meet the other ranks.
                if (plan->has(REFUSES)) {
                    settle(node);
                    return DONE;
                }
                enter(MEETING);
                [[fallthrough]];
            case MEETING:
                // Load all counters first: only then may the descriptors be read.
                for (; at < met(node); at++)
                    // A failed rank's memory must not be written: wait, and `culprit` reports the rank.
                    if (!sees(node, met(node, at), base, patient) || is_left(node, met(node, at))) return WAITING;
                for (size_t i = 0; node.check != OFF && i < met(node); i++) is_alike &= agrees(node, met(node, i));
                if (!is_alike && !node.compares) return DIFFERS;
                count_wait(node);
                count_delay(node);
                enter(GREETING);
                [[fallthrough]];
            case GREETING:
                if (node.compares) {
                    if (!until(node, patient, [&] { return agreement.is_free(); })) return WAITING;
                    greet(node);
                }
                differs = !is_alike;
                if (differs) return DIFFERS;
                enter(FINDING);
                [[fallthrough]];
            case FINDING:
                for (; at < plan->peers.size(); at++)
                    if (!find(node, plan->peers[at])) return UNKNOWN;
                enter(WALKING);
                at = plan->lead;
                [[fallthrough]];
            case WALKING:
                for (; at < plan->instructions.size(); at++) {
                    const Outcome outcome = carry_out(node, plan->instructions[at], patient);
                    if (outcome != DONE) return outcome;
                }
                enter(ENDING);
                [[fallthrough]];
            case ENDING:
                if (node.compares && !until(node, patient, [&] { return agreement.has_sent(); })) return WAITING;
                // The caller may overwrite arrays, the next call a staging buffer: wait for the readers' counters.
                // Workspaces are overwritten two calls later: note the counter in `unread`, to be awaited in BEFORE.
                // Eager calls are read from slots, guarded by `overdue`.
                for (; at < plan->readers.size() && !eager; at++) {
                    const Reader& one = plan->readers[at];
                    if (!is_control(node, one.buffer) && !sees(node, one.peer, base + one.counter, patient)) return WAITING;
                    int64_t& last = node.unread[half][one.peer];
                    last = std::max(last, base + one.counter);
                }
        }
        if (result != nullptr) place_result({result, 0}, 0, plan->taken);
        if (plan->finish != nullptr) plan->finish(to, plan->taken, plan->contributions);
        end(node);
        return DONE;
    }

  public:
    // Return a failed rank needed by this call, or -1. Acquire: the counter, loaded afterwards, is not older than the
    // failure, so all progress made before the failure counts.
    int64_t culprit(const Node& node) const {
        const auto failed = [&](uint32_t rank) { return node.heads[rank]->failure.load(std::memory_order_acquire) != 0; };
        if (failed(awaited)) return awaited;
        const bool judges = stage == JUDGING;
        const size_t count = judges ? node.same_node.size() : stage == MEETING ? met(node) : 0;
        for (size_t i = at; i < count; i++) {
            const uint32_t peer = judges ? node.same_node[i] : met(node, i);
            if (failed(peer) && node.heads[peer]->counter.load(std::memory_order_acquire) < (judges ? node.open.load() : base)) return peer;
        }
        return -1;
    }

    // Return the number of the deferred call not yet judged if all ranks have come to it, and a rank made another call;
    // else 0. May be called while another thread continues a call.
    static int64_t unlike(const Node& node) {
        const int64_t open = node.open.load(std::memory_order_acquire);
        const auto number = static_cast<uint64_t>(open >> ROUNDS);
        bool alike = true;
        for (uint32_t rank : node.same_node) {
            if (node.heads[rank]->counter.load(std::memory_order_acquire) < open) return 0;
            alike &= open == 0 || shows(node, rank, number, node.slot(node.rank, number)->signature.load(std::memory_order_relaxed));
        }
        return alike ? 0 : open >> ROUNDS;
    }

    // After a mismatch, add this rank's place in the program to the descriptor, and show position SETTLED - 1.
    void add_call_site(Node& node, const char* where) {
        Head* head = node.heads[node.rank];
        CallDescriptor& descriptor = head->descriptors[half];
        // In place of the second line, the place of the first such call.
        const void* line = std::memchr(descriptor.text, '\n', strnlen(descriptor.text, TEXT));
        const size_t length = line == nullptr ? strnlen(descriptor.text, TEXT - 2) : static_cast<size_t>(static_cast<const char*>(line) - descriptor.text);
        descriptor.text[length] = '\n';
        std::strncpy(descriptor.text + length + 1, where, TEXT - length - 2);
        // The text no longer matches the plan: the next call must write the description again.
        descriptor.kind = 0;
        show(head, base + SETTLED - 1);
    }

    // Give up the receives under way, after a failure. Return whether all messages have ended: otherwise the transport
    // still uses the memory.
    bool cancel(Node& node) {
        bool has_ended = true;
        const auto end_one = [&](WireMessage& one) {
            if (one.is_under_way() && !one.sends) node.wire->cancel(one);
            has_ended &= !one.is_under_way();
        };
        for (WireMessage& one : messages) end_one(one);
        for (Correspondent& one : agreement.others) {
            end_one(one.came);
            end_one(one.sent);
        }
        return has_ended;
    }

    // Call `take` with the partner of each message under way. May be called while another thread continues the call.
    template <class Take> void each_partner(Take take) const {
        for (const WireMessage& one : messages)
            if (one.is_under_way()) take(one.peer);
        for (const Correspondent& one : agreement.others)
            if (one.came.is_under_way()) take(one.peer);
    }

    // Cancel a call before data have moved. The next call behaves as if this call had not been made.
    void settle(Node& node) {
        // The other ranks read this descriptor until their own SETTLED.
        for (int64_t& counter : node.unread[half]) counter = base + SETTLED;
        // A refusing rank has not met the others, possibly still comparing the call before: guard that half as well.
        for (int64_t& counter : node.unread[1 - half]) counter = std::max(counter, base);
        node.history = history;
        node.repeats = 0;
        end(node);
        show(node.heads[node.rank], base + SETTLED);
    }

    // Fill `rows` with the arguments of a CALL: the addresses of `to` and of the sources. A plan `by_calls` gets
    // a further argument, the modes open to all ranks. Return the number of arguments.
    uint32_t find_rows(const Node& node, const Instruction& one) {
        rows.resize(one.count + 1 + plan->by_calls);
        if (plan->by_calls) rows[one.count + 1] = reinterpret_cast<const char*>(static_cast<uintptr_t>(common_modes(node)));
        rows[0] = place(node, one.to).start;
        for (uint32_t i = 0; i < one.count; i++) rows[i + 1] = place(node, plan->parts[one.first + i]).start;
        return one.count + 1 + plan->by_calls;
    }

  private:
    // Leave the call.
    void end(Node& node) {
        node.left = times.ended = static_cast<int64_t>(nanoseconds());
        Head* head = node.heads[node.rank];
        head->left.store(node.left, std::memory_order_relaxed);
        const auto number = static_cast<int64_t>(node.call_count);
        head->ended.store(plan->has(DEFERRED) ? -number : number, std::memory_order_relaxed);
        if (plan->has(DEFERRED)) {
            node.open_bytes = plan->given;
            node.open = base;
        }
        node.total.own += times.own;
        node.total.waited += times.waited;
        if (!plan->has(ONLY_COMPARES)) node.flight.ended(times);
        plan = nullptr;
    }

    // Count the wait that has just ended, if any, as a wait for other ranks to come.
    void count_wait(Node& node) {
        if (node.waits_since == 0) return;
        times.waited += static_cast<int64_t>(nanoseconds()) - node.waits_since;
        node.waits_since = 0;
    }

    // Count this rank's own delay: how much later than the first waiting rank it came, at most the time since its last
    // call. A rank behind in the call has an older or a later arrival, and was not waiting: neither counts.
    void count_delay(const Node& node) {
        const int64_t between = times.began - node.left;
        int64_t first = times.began;
        const auto look = [&](uint32_t rank) {
            // Acquire: the arrival, read afterwards, belongs to this call or a later one.
            if (node.heads[rank]->counter.load(std::memory_order_acquire) >= base)
                first = std::min(first, node.heads[rank]->arrived[half].load(std::memory_order_relaxed));
        };
        if (meets_all(node)) {
            std::for_each(node.same_node.begin(), node.same_node.end(), look);
        } else if (between > NOTICED) {
            for (const Reader& one : plan->readers) look(one.peer);
        }
        times.own = std::min(times.began - first, between);
    }

    // The ranks met and compared before data move: all same-node ranks, or only the peers.
    bool meets_all(const Node& node) const { return node.check == ALL && !eager; }
    size_t met(const Node& node) const { return meets_all(node) ? node.same_node.size() : plan->peers.size(); }
    uint32_t met(const Node& node, size_t i) const { return meets_all(node) ? node.same_node[i] : plan->peers[i]; }

    // Return the counter to be shown by all ranks before an eager call overwrites its slot. The slot was used SLOTS
    // calls ago; a rank in the next call has left that call.
    int64_t overdue() const { return base - ((SLOTS - 1) << ROUNDS); }

    // Return the counter to be shown by a rank before this rank overwrites descriptor and workspaces. After eager
    // calls a slow rank may still read the descriptor of an earlier call: wait until the rank is in the previous call.
    int64_t awaited_of(const Node& node, size_t rank) const {
        if (eager) return overdue();
        return std::max(node.unread[half][rank], node.was_eager ? base - (1 << ROUNDS) : 0);
    }

    // Return the least progress counter of the other same-node ranks.
    static int64_t reached(const Node& node) {
        int64_t least = INT64_MAX;
        for (uint32_t rank : node.same_node) least = std::min(least, node.heads[rank]->counter.load(std::memory_order_acquire));
        return least;
    }

    // The first stage of a call, after a deferred one was judged.
    Stage first(const Node& node) const {
        return may_wait && plan->has(ANNOUNCED) && plan->root != node.rank ? LISTENING : BEFORE;
    }

    // Take what all ranks have shown with the deferred call, if anything, before this rank shows the next call.
    static void hear(Node& node) {
        if (node.open_bytes == 0) return;
        node.heard.resize(node.ranks * node.open_bytes);
        for (uint32_t rank = 0; rank < node.ranks; rank++)
            std::memcpy(node.heard.data() + rank * node.open_bytes, node.slot(rank, static_cast<uint64_t>(node.open >> ROUNDS))->data, node.open_bytes);
    }

    // Enter a stage at the first item of its list.
    void enter(Stage next) {
        stage = next;
        at = 0;
    }

    // Return whether a rank shows `counter`, with a wait if `patient`. Note the rank for error messages and `culprit`.
    bool sees(Node& node, size_t rank, int64_t counter, bool patient) {
        awaited = static_cast<uint32_t>(rank);
        needed = counter;
        // A sleep until the counter changes would stop the messages, and the leader's look at greetings.
        if (stage >= WALKING && (plan->agrees || plan->messages > 0))
            return until(node, patient, [&] { return node.heads[rank]->counter.load(std::memory_order_acquire) >= counter; });
        const bool found = has_shown(node, node.heads[rank], counter, patient, has_slept);
        // After a full wait in vain the next look sleeps at once: the awaited rank is slow, and spinning wastes the
        // core.
        has_slept = !found && patient;
        return found;
    }

    // Return whether `ready` holds, with a wait if `patient`: look, yield, then nap. In between messages move on, and a
    // leader looks at greetings. Unlike calls and failed messages end the wait.
    template <class Ready> bool until(Node& node, bool patient, Ready ready) {
        uint64_t entered = 0, began = 0;
        int dear = 0;  // yields that took long
        for (uint32_t look = 0; !ready(); look++) {
            const bool has_moved = node.wire->progress();
            agreement.look(node.heads[node.rank], base, signature);
            if (ready()) break;
            if (agreement.failed != nullptr || has_differed(node)) return false;
            if (has_moved) has_slept = false;
            // Most waits end before the clock is read.
            if (patient && look < LOOKS && node.spins && !has_slept) continue;
            const uint64_t time = nanoseconds();
            note_wait(node, time);
            if (!patient) return false;
            if (entered == 0) entered = time;
            if (began == 0 || has_moved) began = time;
            const uint64_t waited = time - began;
            // Messages that move for ever must not keep Python from signals and deadlines.
            if (time - entered > LONGEST_LOOK) return false;
            if (waited > (has_slept ? MAX_WAIT : SPIN + YIELD)) {
                has_slept = true;
                return false;
            }
            if (has_slept) {
                // The partner is slow, or data take long: looking more often would only take the core from others.
                const timespec pause = {0, nap};
                nanosleep(&pause, nullptr);
                nap = std::min(2 * nap, LONGEST_NAP);
            } else {
                // At once, without a longer spin: a yield costs little on a free core, and the ranks of other hosts may
                // share this core where hosts are emulated. Dear yields have given the core to a process outside the
                // job: a nap costs less (see `Backoff`).
                sched_yield();
                dear += nanoseconds() - time > DEAR;
                has_slept = dear > DEAR_YIELDS;
            }
        }
        has_slept = false;
        nap = FIRST_NAP;
        return true;
    }

    // Return whether some node is known to make another call. Acquire: the verdict comes from another rank's thread.
    bool has_differed(const Node& node) const {
        return node.compares && node.heads[node.leader]->verdict.load(std::memory_order_acquire) == base + UNLIKE_CALLS;
    }

    // Return whether all nodes are known to make this call. A later verdict means: the leader is in a later call, so this
    // call was alike.
    bool has_agreed(const Node& node) const {
        const int64_t verdict = node.heads[node.leader]->verdict.load(std::memory_order_acquire);
        return verdict == base + ALIKE_CALLS || verdict > base + UNLIKE_CALLS;
    }

    // Return the tag of this call's messages.
    uint64_t tag(const Node& node) const { return node.wire_tag | (node.call_count & WIRE_CALLS); }

    // Begin the comparison with the other nodes. Greetings with data follow by OPEN.
    void greet(Node& node) {
        int64_t first = times.began;
        for (uint32_t rank : node.same_node) first = std::min(first, node.heads[rank]->arrived[half].load(std::memory_order_relaxed));
        agreement.begin(*node.wire, tag(node), {signature, is_alike, first + to_realtime()});
        for (Correspondent& one : agreement.others)
            if (!is_alike || std::find(plan->opened.begin(), plan->opened.end(), one.peer) == plan->opened.end())
                Agreement::send(*node.wire, tag(node), one, nullptr, 0);
        if (is_alike || node.rank != node.leader) return;
        agreement.missing = 0;
        node.heads[node.rank]->verdict.store(base + UNLIKE_CALLS, std::memory_order_release);
    }

    // Add to the shares of this call what the comparison with the other nodes has found.
    void count_agreement(Node& node) {
        const int64_t first = node.heads[node.leader]->first_arrival.load(std::memory_order_relaxed) - to_realtime();
        times.own = std::max(times.own, std::min(times.began - first, times.began - node.left));
        count_wait(node);
    }

    // Return whether this plan would write to the memory of a failed rank: the array may be in use for other data.
    bool is_left(const Node& node, uint32_t rank) const {
        return plan->writes && node.heads[rank]->failure.load(std::memory_order_acquire) != 0;
    }

    // Return the modes open to all ranks: MPI takes a mode from all ranks or from none. Ranks that did not meet use
    // none.
    uint32_t common_modes(const Node& node) const {
        uint32_t modes = node.check == ALL ? WAITS | IN_PLACE : 0;
        for (uint32_t peer : node.same_node) modes &= node.heads[peer]->modes[half].load(std::memory_order_relaxed);
        return modes & node.heads[node.rank]->modes[half].load(std::memory_order_relaxed);
    }

    // Return the modes in which this rank can make the call: with a blocking call, and with the input inside the
    // result.
    uint32_t own_modes() const {
        const bool in_place = plan->given > 0 && from >= to && from < to + plan->taken;
        return (may_wait ? WAITS : 0) | (in_place ? IN_PLACE : 0);
    }

    // Return whether a rank, already in this call, shows the same call in its descriptor. Relaxed: read after the
    // counter.
    bool is_described(const Node& node, uint32_t rank) const {
        return node.heads[rank]->signatures[half].load(std::memory_order_relaxed) == signature;
    }

    // Return whether a rank, already in this call, makes the same call. Each rank decides alone about eager calls, so
    // look at the descriptor and at the slot.
    bool agrees(const Node& node, uint32_t rank) const { return shows(node, rank, node.call_count, signature); }

    // Return whether a rank, already in call `number`, shows a signature.
    static bool shows(const Node& node, uint32_t rank, uint64_t number, int64_t signature) {
        return node.heads[rank]->signatures[number & 1].load(std::memory_order_relaxed) == signature
            || (node.is_eager(rank, number) && node.slot(rank, number)->signature.load(std::memory_order_relaxed) == signature);
    }

    // Return whether a buffer of this rank is in the control segment, and so guarded by the halves.
    bool is_control(const Node& node, uint32_t buffer) const {
        const int64_t key = node.heads[node.rank]->descriptors[half].places[buffer][0];
        return plan->has(IN_CONTROL) || key == node.keys[node.rank];
    }

    // Place the buffers, copy the input where the peers read it, write the descriptor and show position 0.
    void present(Node& node) {
        Head* head = node.heads[node.rank];
        CallDescriptor& descriptor = head->descriptors[half];
        lay(node, descriptor, INPUT, const_cast<char*>(from), plan->given);
        lay(node, descriptor, OUTPUT, to, plan->taken);
        lay(node, descriptor, SCRATCH, nullptr, plan->scratch);
        Base* mine = bases.data() + node.rank * SHOWN;
        staged = plan->given > 0 && mine[INPUT].start != from ? mine[INPUT].start : nullptr;
        result = plan->taken > 0 && mine[OUTPUT].start != to && !plan->has(KEEPS_OUTPUT) && !plan->places_result
                     ? mine[OUTPUT].start : nullptr;
        if (staged != nullptr && plan->lead == 0) copy(staged, from, plan->given);
        // The input must be in place before the counter shows the call. These copies stay in this rank and cannot
        // fail.
        for (size_t i = 0; i < plan->lead; i++) form(node, plan->instructions[i]);
        if (!plan->starts.empty()) std::copy(plan->starts.begin(), plan->starts.end(), node.starts(node.rank, half));
        if (eager) {
            write_description(*node.slot(node.rank, node.call_count));
        } else {
            write_description(descriptor);
        }
        // Mix this call into `history`: a mismatch missed now is detected at the next common call.
        // The factor (2^64 divided by the golden ratio) and the shift spread every bit over the whole number.
        const uint64_t mix = (static_cast<uint64_t>(node.history) ^ static_cast<uint64_t>(plan->signature)) * 0x9e3779b97f4a7c15u;
        node.history = static_cast<int64_t>(mix ^ mix >> 29);
        if (plan->by_calls) head->modes[half].store(own_modes(), std::memory_order_relaxed);
        node.was_eager = eager;
        // All relaxed: `show` publishes these stores.
        head->arrived[half].store(times.began, std::memory_order_relaxed);
        if (eager) {
            Slot* slot = node.slot(node.rank, node.call_count);
            slot->signature.store(signature, std::memory_order_relaxed);
            slot->number.store(static_cast<int64_t>(node.call_count), std::memory_order_relaxed);
        } else {
            head->signatures[half].store(signature, std::memory_order_relaxed);
        }
        show(head, base);
    }

    // Write the description of the call to a descriptor or slot, unless present: a repeated call saves the copy.
    template <class Place> void write_description(Place& place) const {
        if (place.kind == plan->signature) return;
        std::memcpy(place.text, plan->text, TEXT);
        place.kind = plan->signature;
    }

    // Decide where a buffer of this rank is during the call, and note the place in the descriptor. In order of cost:
    // the caller's array if no peer reads it, workspace or slot, symmetric memory, process_vm_readv, a staging buffer.
    void lay(const Node& node, CallDescriptor& descriptor, uint32_t buffer, char* row, uint64_t nbytes) {
        Base& mine = bases[node.rank * SHOWN + buffer];
        int64_t key = HERE, offset = 0;
        mine = {row, 0};
        Segment slab;
        if (nbytes == 0) {
            mine.start = nullptr;
        } else if (plan->by_calls) {
            // the Python function works on the caller's arrays
        } else if (row != nullptr && !plan->read[buffer] && !(buffer == INPUT ? from == to || plan->has(COPIES_INPUT)
                                                                             : plan->has(KEEPS_OUTPUT))) {
            // only this rank uses the buffer: stay in the caller's array
        } else if (plan->has(OWN_IN_CONTROL) && nbytes <= node.workspace_bytes) {
            mine.start = eager && buffer == INPUT ? node.slot(node.rank, node.call_count)->data : node.workspace(node.rank, half, buffer);
            key = node.keys[node.rank];
            offset = static_cast<int64_t>(node.offset(node.rank, half, buffer));
        } else if (row != nullptr && !(buffer == INPUT && plan->has(COPIES_INPUT))
                   && node.symmetric.holding(row, nbytes, &slab)) {
            key = slab.key;
            offset = row - slab.start;
        } else if (row != nullptr && node.copies && !(buffer == INPUT && plan->has(COPIES_INPUT))) {
            offset = static_cast<int64_t>(reinterpret_cast<intptr_t>(row));
        } else {
            // Acquire: another thread may just have stored a larger buffer.
            const Segment* staged = node.staging[buffer].load(std::memory_order_acquire);
            mine.start = staged->start;
            key = staged->key;
        }
        // Workspaces of control segments are at known places: the descriptor need not be written.
        if (plan->has(IN_CONTROL)) return;
        descriptor.places[buffer][0] = key;
        descriptor.places[buffer][1] = offset;
    }

    // Look up the buffers of another rank. Return false if a segment is not mapped yet.
    bool find(const Node& node, uint32_t rank) {
        const CallDescriptor& descriptor = node.heads[rank]->descriptors[half];
        Segment found;
        for (uint32_t buffer = 0; buffer < SHOWN; buffer++) {
            Base& theirs = bases[rank * SHOWN + buffer];
            if (plan->has(IN_CONTROL)) {
                const bool in_slot = buffer == INPUT && !is_described(node, rank) && node.is_eager(rank, node.call_count);
                theirs = {in_slot ? node.slot(rank, node.call_count)->data : node.workspace(rank, half, buffer), 0};
                continue;
            }
            const int64_t key = descriptor.places[buffer][0], offset = descriptor.places[buffer][1];
            if (key == HERE) {
                const bool same_process = node.processes[rank] == node.process;  // ranks may be threads of the same process
                theirs = {reinterpret_cast<char*>(static_cast<intptr_t>(offset)), same_process ? 0 : node.processes[rank]};
            } else if (key == node.keys[rank]) {
                theirs = {reinterpret_cast<char*>(node.heads[rank]) + offset, 0};
            } else if (node.others.of(rank, key, &found)) {
                theirs = {found.start + offset, 0};
            } else {
                awaited = rank;
                unknown = key;
                return false;
            }
        }
        return true;
    }

    // Return the address of a part. `starts` translates the block number of another rank to an offset.
    Base place(const Node& node, const Part& part) const {
        if (part.buffer == PRIVATE) return {const_cast<char*>(node.private_memory.data()) + part.offset, 0};
        if (part.buffer == GIVEN) return {const_cast<char*>(from) + part.offset, 0};
        if (part.buffer == RESULT) return {to + part.offset, 0};
        const Base& found = bases[part.rank * SHOWN + part.buffer];
        uint64_t offset = part.offset;
        if (!plan->starts.empty() && part.rank != node.rank) {
            const int64_t* starts = node.starts(part.rank, half) + (part.buffer == OUTPUT ? node.ranks + 1 : 0);
            offset = static_cast<uint64_t>(starts[offset]) * plan->itemsize;
        }
        return {found.start == nullptr ? nullptr : found.start + offset, found.process};
    }

    // Carry out an instruction. A CALL is left to Python: `at` stays, and Python's side advances it.
    Outcome carry_out(Node& node, const Instruction& one, bool patient) {
        switch (one.opcode) {
            case Instruction::WAIT: return sees(node, one.peer, base + one.counter, patient) ? DONE : WAITING;
            case Instruction::PUBLISH: show(node.heads[node.rank], base + one.counter); return DONE;
            case Instruction::CALL: awaited = node.rank; return CALLING;
            case Instruction::REDUCE: break;
            default: return carry_message(node, one, patient);
        }
        error = form(node, one);
        return error == 0 ? DONE : BROKEN;
    }

    // Carry out an instruction for ranks of other nodes.
    Outcome carry_message(Node& node, const Instruction& one, bool patient) {
        WireMessage* message = one.counter < static_cast<int64_t>(plan->messages) ? &messages[static_cast<size_t>(one.counter)] : nullptr;
        const bool is_greeting = one.opcode == Instruction::OPEN || one.opcode == Instruction::TAKE;
        Correspondent* other = is_greeting ? agreement.with(one.peer) : nullptr;
        char* row = one.nbytes > 0 ? place(node, one.to).start : nullptr;
        awaited = node.rank;
        switch (one.opcode) {
            case Instruction::SEND: node.wire->send(*message, one.peer, tag(node), row, one.nbytes); return DONE;
            case Instruction::RECEIVE: node.wire->receive(*message, one.peer, tag(node), row, one.nbytes); return DONE;
            case Instruction::END:
                if (!until(node, patient, [&] { return !message->is_under_way(); })) return WAITING;
                return has_come(*message, message->length);
            case Instruction::OPEN: Agreement::send(*node.wire, tag(node), *other, row, one.nbytes); return DONE;
            case Instruction::TAKE:
                // The length of an unlike call's data is no error of its own.
                if (!until(node, patient, [&] { return other->is_heard && !has_differed(node); })) return WAITING;
                if (has_come(other->came, sizeof(Greeting) + one.nbytes) != DONE) return CUT;
                if (one.nbytes > 0) std::memcpy(row, other->in.data() + sizeof(Greeting), one.nbytes);
                return DONE;
            default:  // AGREE
                awaited = node.leader;
                needed = INT64_MAX;  // no counter tells of the verdict: the leader is awaited until the end
                if (!until(node, patient, [&] { return has_agreed(node); })) return WAITING;
                count_agreement(node);
                return DONE;
        }
    }

    // Return whether a message has ended well, a receive with `nbytes` bytes; else note the message for the error. Of calls
    // compared only later, a message may be too short: the comparison then names the ranks.
    Outcome has_come(const WireMessage& message, uint64_t nbytes) {
        if (message.now() == WireMessage::DONE && (message.sends || message.length == nbytes)) return DONE;
        cut = &message;
        return CUT;
    }

    // Carry out a REDUCE. Return 0, or the system's error.
    int form(Node& node, const Instruction& one) {
        char* to_row = place(node, one.to).start;
        const Part* sources = plan->parts.data() + one.first;
        const Base source = place(node, sources[0]);
        if (to_row == nullptr || source.start == nullptr) return EFAULT;
        if (one.count == 1 && one.copies == 0) {
            const bool is_last = plan->is_result(one.to, node.rank);
            if (is_last && !pieces.empty()) return place_result(source, one.to.offset, one.nbytes);
            return fetch(to_row, source, one.nbytes, is_last);
        }
        return combine_all(node, one, to_row, sources);
    }

    // Copy bytes, of this process or another. Bytes read again, by peers or by this plan, should stay in the caches: not
    // so the last copy, to the result. Return 0, or the system's error.
    int fetch(char* to_row, const Base& source, uint64_t nbytes, bool is_last) const {
        if (source.process != 0) return transfer(process_vm_readv, source.process, to_row, source.start, nbytes);
        (is_last && plan->taken >= STREAMED ? stream : copy)(to_row, source.start, nbytes);
        return 0;
    }

    // Copy bytes to the result from `offset` on, to one array or to the arrays of a list.
    int place_result(const Base& source, uint64_t offset, uint64_t nbytes) const {
        if (pieces.empty()) return fetch(to + offset, source, nbytes, true);
        for (const Piece& one : pieces) {
            const uint64_t start = std::max(offset, one.offset), stop = std::min(offset + nbytes, one.offset + one.nbytes);
            if (start >= stop) continue;
            const Base there = {source.start + (start - offset), source.process};
            if (const int failed = fetch(one.start + (start - one.offset), there, stop - start, true)) return failed;
        }
        return 0;
    }

    // Combine the sources of a REDUCE. Sources in other processes are fetched piece by piece, and copies are written
    // piece by piece: so a piece is combined, and written again, while in the cache.
    int combine_all(Node& node, const Instruction& one, char* to_row, const Part* sources) {
        uint64_t away = 0;
        rows.resize(one.count);
        for (uint32_t i = 0; i < one.count; i++) {
            const Base source = place(node, sources[i]);
            if (source.start == nullptr) return EFAULT;
            away += source.process != 0;
            rows[i] = source.start;
        }
        // All fetched pieces together should fit in the cache, so many sources mean short pieces, in whole lines.
        const uint64_t piece = away + one.copies > 0 ? COPY_BYTES / std::max(1u, one.count / 2) / 64 * 64 : one.nbytes;
        if (node.fetched.size() < away * piece) node.fetched.resize(away * piece);
        for (uint64_t start = 0; start < one.nbytes; start += piece) {
            const uint64_t nbytes = std::min(piece, one.nbytes - start);
            char* fetched = node.fetched.data();
            for (uint32_t i = 0; i < one.count; i++) {
                const Base source = place(node, sources[i]);
                rows[i] = source.start + start;
                if (source.process == 0) continue;
                const int failed = transfer(process_vm_readv, source.process, fetched, source.start + start, nbytes);
                if (failed != 0) return failed;
                rows[i] = fetched;
                fetched += piece;
            }
            if (one.count == 1) {
                copy(to_row + start, rows[0], nbytes);
            } else {
                plan->combine(rows.data(), one.count, to_row + start, nbytes);
            }
            for (uint32_t i = 0; i < one.copies; i++) {
                const Base there = place(node, sources[one.count + i]);
                if (there.start == nullptr) return EFAULT;
                if (there.process == 0) {
                    std::memcpy(there.start + start, to_row + start, nbytes);
                } else if (const int failed = transfer(process_vm_writev, there.process, to_row + start,
                                                       there.start + start, nbytes)) {
                    return failed;
                }
            }
        }
        return 0;
    }
};

}  // namespace gpucoll
