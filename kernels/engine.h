// The engine: carries out one rank's part of a schedule in the memory of its node.
//
// What waits for what is `plan.py`'s: every rank shows one number, its mark, from which the others learn what they may
// read of it and what it has read. A plan does not depend on addresses: its parts are bytes of the ranks' buffers, and
// where those are each rank shows on a board. Calls take the two boards and workspaces of a control segment in turn.
// A short call that comes again and again, in which a rank reads of few others, is eager: see `Slot`.
// Nothing here knows Python or MPI: what only they can do is an outcome, after which the call goes on.
#pragma once
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstring>
#include <ctime>
#include <deque>
#include <linux/futex.h>
#include <mutex>
#include <sched.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
#include <vector>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "combine.h"
#include "flight.h"

static const uint64_t PATIENCE = 300000;   // nanoseconds of a wait before somebody looks at its deadline
// How long a rank that waits spins, then yields: a sleep and its wake-up cost 10 to 50 us, so that a shorter wait is
// cheaper awake. In nanoseconds, as DEAR, from which on a yield has handed the core to a process that computes.
static const uint64_t SPIN = 100000, YIELD = 300000, DEAR = 500000;
static const uint32_t SLEEPS = 64;         // the most waits that sleep at once after a dear yield, before a yield is tried again
static const int RELAXES = 8;              // pauses of the processor between two looks, or looks at the clock
static const uint64_t PIECE = 1 << 19;     // bytes that are copied at a time, or combined where some must be fetched
static const int64_t HERE = -1;            // in place of a segment's key: what follows is an address
static const uint64_t STREAMED = 1 << 22;  // bytes of a result from which on what is only copied is written past the caches
static const int64_t SETTLED = (1 << ROUNDS) - 1;  // the mark of a call that all ranks know to be none
static const uint32_t ALIKE = 4;           // calls alike, after which a call like them is eager

// Where a rank's buffers are, as keys of segments and offsets, and what its call is.
struct Board {
    int64_t places[SHOWN][2];
    int64_t kind;     // a number for the words
    char text[TEXT];  // where ranks differ, the place in the program follows, in a second line
};

// The beginning of a control segment. What is read of a rank in every call is in the first line.
struct alignas(64) Head {
    std::atomic<int64_t> mark;
    std::atomic<int64_t> signatures[2];
    std::atomic<uint32_t> sleepers;  // ranks that wait for the mark to change
    std::atomic<int32_t> core;       // on which the mark was stored
    alignas(8) std::atomic<int64_t> failure;
    int64_t token;
    std::atomic<int64_t> listens;  // the last call of which it has waited for the root to say what it is
    std::atomic<uint32_t> ways[2];
    alignas(64) Board boards[2];
    // Then, for either half, where the blocks of input and output start, in elements, where they are not alike.
};

static_assert(sizeof(Head) == HEAD && offsetof(Head, mark) == 8 * MARK && offsetof(Head, failure) == 8 * FAILURE
              && offsetof(Head, token) == 8 * TOKEN, "Python keeps as many bytes for it, and reads these words");
static_assert(std::atomic<int64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
              "processes share no locks");

// What a rank shows of an eager call: the call's number and signature, the input that others read, and what a board has
// of it. Eager calls take the slots of a rank in turn, so that a rank which reads of no other one, as a broadcast's root,
// can be SLOTS - 1 calls ahead.
struct alignas(64) Slot {
    std::atomic<int64_t> number;
    std::atomic<int64_t> signature;
    char data[SLOT];
    int64_t kind;
    char text[TEXT];
};

static_assert(sizeof(Slot) == SLOT_BYTES, "Python keeps as many bytes for it");

// Memory that is mapped here: a segment of a rank's.
struct Segment {
    uint32_t rank;
    int64_t key;
    char* start;
    uint64_t nbytes;
};

// Segments that are mapped here. A thread may map another segment while a call of a second thread looks for one, so that
// a lock guards them, and a search returns a copy. The oldest of MOST makes room for the next.
class Segments {
  public:
    static const size_t MOST = 4096;

    void add(const Segment& one) {
        const std::lock_guard<std::mutex> guard(lock);
        if (all.size() == MOST) all.pop_front();
        all.push_back(one);
        none.store(false, std::memory_order_release);
    }

    // Whether there is none yet; takes no lock.
    bool empty() const { return none.load(std::memory_order_acquire); }

    // Whether so many bytes from `start` on lie in one segment, which `found` then is.
    bool holding(const char* start, uint64_t nbytes, Segment* found) const {
        return !empty() && first([&](const Segment& one) {
            return start >= one.start && start + nbytes <= one.start + one.nbytes; }, found);
    }

    // Whether there is the segment of a rank with that key, which `found` then is.
    bool of(uint32_t rank, int64_t key, Segment* found) const {
        return first([&](const Segment& one) { return one.rank == rank && one.key == key; }, found);
    }

  private:
    template <class Matches> bool first(Matches matches, Segment* found) const {
        const std::lock_guard<std::mutex> guard(lock);
        const auto place = std::find_if(all.begin(), all.end(), matches);
        if (place == all.end()) return false;
        *found = *place;
        return true;
    }

    mutable std::mutex lock;
    std::atomic<bool> none{true};
    std::deque<Segment> all;
};

// The ranks of a node as one of them sees them.
struct Node {
    uint32_t rank, ranks;
    Check check;
    bool spins;                    // whether a rank that waits may keep its core: where there is a core for each rank
    uint32_t to_sleep = 0;         // waits left that sleep without a yield: see `Backoff`
    uint32_t sleeps = 0;           // how many waits the last dear yield let sleep, halved by each cheap one since
    bool copies;                   // whether the system copies from one rank's memory to another's
    int32_t process;
    uint64_t first, workspace_bytes;  // in a control segment: where the workspaces begin, and the bytes of each
    std::vector<Head*> heads;      // null for ranks of other nodes
    std::vector<int64_t> keys;     // of the control segments
    std::vector<int32_t> processes;
    std::vector<uint32_t> near;    // the other ranks of this node
    std::atomic<const Segment*> staging[SHOWN];  // of this one, for what is not where others can read it
    std::deque<Segment> all_staging;             // which a call that is under way may still use
    uint64_t walks;                // how many calls there were
    int64_t history = 0;           // a number for what they were
    std::vector<int64_t> unread[2];  // by half and rank: the mark it shows after it has read what it reads of this one
    std::vector<char> aside, fetched;
    int64_t last = 0;              // the signature of the last plan
    uint32_t alike = 0;            // how many calls before that one were of the same plan
    bool was_eager = false;        // the last call
    int64_t reached = 0;           // a mark that all ranks of this node are known to show
    Flight flight;
    Segments others;               // of other ranks
    Segments symmetric;            // of this one, at the same places on all

    // Where a workspace is in the control segment of a rank. What is read and written together begins at unlike places
    // of a page: a processor takes a load for one of a store before it that has the same place.
    uint64_t offset(uint32_t of, int64_t half, uint32_t buffer) const {
        const uint64_t which = static_cast<uint64_t>(half) * SHOWN + buffer;
        return first + which * (workspace_bytes + PAGE) + (of * SHOWN + buffer) % 8 * (PAGE / 8);
    }
    char* workspace(uint32_t of, int64_t half, uint32_t buffer) const {
        return reinterpret_cast<char*>(heads[of]) + offset(of, half, buffer);
    }
    // Where blocks start, of input and then of output.
    int64_t* starts(uint32_t of, int64_t half) const {
        return reinterpret_cast<int64_t*>(heads[of] + 1) + half * 2 * (ranks + 1);
    }
    Slot* slot(uint32_t of, uint64_t number) const {
        const uint64_t blocks = 4 * (ranks + 1) * sizeof(int64_t);
        char* slots = reinterpret_cast<char*>(heads[of] + 1) + (blocks + LINE - 1) / LINE * LINE;
        return reinterpret_cast<Slot*>(slots) + number % SLOTS;
    }
    // What a rank that has come to that call shows of it in words.
    const char* words(uint32_t of, uint64_t number) const {
        return is_eager(of, number) ? slot(of, number)->text : heads[of]->boards[number & 1].text;
    }
    // Whether that call was eager on a rank, which has come to it.
    bool is_eager(uint32_t of, uint64_t number) const {
        return slot(of, number)->number.load(std::memory_order_relaxed) == static_cast<int64_t>(number);
    }
    uint64_t staging_bytes(uint32_t buffer) const {
        const Segment* found = staging[buffer].load(std::memory_order_acquire);
        return found == nullptr ? 0 : found->nbytes;
    }
};

static long futex(std::atomic<uint32_t>* word, int what, uint32_t value, const timespec* patience) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), what, value, patience, nullptr, 0);
}

static void breathe() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

// The half of a mark that changes.
static std::atomic<uint32_t>* low(std::atomic<int64_t>* mark) {
    return reinterpret_cast<std::atomic<uint32_t>*>(mark) + (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__);
}

static void show(Head* head, int64_t mark) {
    head->core.store(sched_getcpu(), std::memory_order_relaxed);
    head->mark.store(mark, std::memory_order_seq_cst);
    if (head->sleepers.load(std::memory_order_seq_cst) != 0) futex(low(&head->mark), FUTEX_WAKE, INT_MAX, nullptr);
}

static uint64_t nanoseconds() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<uint64_t>(time.tv_sec) * 1000000000u + static_cast<uint64_t>(time.tv_nsec);
}

// Fills the time between two looks of a rank that waits for another rank.
//
// Spinning is the quickest way, as long as the awaited rank runs on another core. On the same core that rank runs only
// after this one has left the core: a yield switches to it within a few microseconds. Where a process outside the job
// computes on this core, though, a yield hands that process a whole slice of the scheduler, which is milliseconds.
// Such a yield is dear. A sleep costs a wake-up, but no slice: the next wait sleeps instead of yielding. A rank of the job
// that computes for a moment costs a slice, too; so only further dear yields make more and more waits sleep, and cheap ones
// make it fewer. Not so in eager calls of ranks that share cores: there the slice was the awaited rank's, which makes many
// calls in it, as long as no sleeper that it wakes takes the core from it.
struct Backoff {
    Node& node;
    const Head* awaited;
    uint64_t began = 0, last = 0;  // the present way of waiting, the last look at the clock
    bool yields = false;

    // Lets a little time pass. Returns false where the rank should sleep.
    bool pause() {
        if (began == 0) {
            began = last = nanoseconds();
            yields = !node.spins || awaited->core.load(std::memory_order_relaxed) == sched_getcpu();
        }
        if (!yields) {
            for (int look = 0; look < RELAXES; look++) breathe();
            last = nanoseconds();
            yields = last - began >= SPIN;
            if (yields) began = last;
            return true;
        }
        const bool minds_slices = node.spins || !node.was_eager;
        if (node.to_sleep > 0 && minds_slices) {
            node.to_sleep--;
            return false;
        }
        sched_yield();
        const uint64_t now = nanoseconds();
        if (now - last > DEAR && minds_slices) {
            node.sleeps = std::min(2 * node.sleeps + 1, SLEEPS);
            node.to_sleep = node.sleeps;
        }
        last = now;
        return now - began < YIELD;
    }
};

// Returns whether a rank shows so much. A patient caller waits for it about `PATIENCE` at most; `sleeps` says that it
// has waited in vain before, so that it sleeps at once.
static bool has_shown(Node& node, Head* head, int64_t mark, bool patient, bool sleeps = false) {
    if (head->mark.load(std::memory_order_acquire) >= mark) return true;
    if (!patient) return false;
    for (int look = 0; node.spins && look < RELAXES; look++) {  // most waits end here, before the clock is read
        breathe();
        if (head->mark.load(std::memory_order_acquire) >= mark) return true;
    }
    Backoff backoff = {node, head};
    while (!sleeps && backoff.pause())
        if (head->mark.load(std::memory_order_acquire) >= mark) {
            if (backoff.yields && node.to_sleep == 0) node.sleeps /= 2;
            return true;
        }
    const timespec nap = {0, static_cast<long>(PATIENCE)};
    head->sleepers.fetch_add(1, std::memory_order_seq_cst);
    const int64_t seen = head->mark.load(std::memory_order_seq_cst);
    if (seen < mark) futex(low(&head->mark), FUTEX_WAIT, static_cast<uint32_t>(seen), &nap);
    head->sleepers.fetch_sub(1, std::memory_order_seq_cst);
    return head->mark.load(std::memory_order_acquire) >= mark;
}

// Copies to or from another process; returns 0, or the system's error.
template <class Call> static int transfer(Call call, int32_t process, char* here, char* there, uint64_t nbytes) {
    while (nbytes > 0) {
        const iovec mine = {here, nbytes}, theirs = {there, nbytes};
        const ssize_t done = call(process, &mine, 1, &theirs, 1, 0);
        if (done <= 0) return done < 0 && errno != 0 ? errno : EFAULT;
        here += done;
        there += done;
        nbytes -= static_cast<uint64_t>(done);
    }
    return 0;
}

// Whether a rank takes another one for the root of that call.
static bool is_listening(const Node& node, uint32_t rank, int64_t base) {
    return node.heads[rank]->listens.load(std::memory_order_seq_cst) >= base;
}

// By pieces, as long rows would be written past the caches.
static void copy(char* to, const char* from, uint64_t nbytes) {
    for (uint64_t start = 0; start < nbytes && to != from; start += PIECE)
        std::memmove(to + start, from + start, std::min(PIECE, nbytes - start));
}

// The same past the caches, where a line that is written is not read before: for long rows that nobody reads soon.
static void stream(char* to, const char* from, uint64_t nbytes) {
#if defined(__SSE2__)
    const uint64_t head = std::min(nbytes, -static_cast<uint64_t>(reinterpret_cast<uintptr_t>(to)) % LINE);
    std::memmove(to, from, head);
    for (to += head, from += head, nbytes -= head; nbytes >= LINE; to += LINE, from += LINE, nbytes -= LINE) {
        const __m128i* words = reinterpret_cast<const __m128i*>(from);
        const __m128i a = _mm_loadu_si128(words), b = _mm_loadu_si128(words + 1), c = _mm_loadu_si128(words + 2),
                      d = _mm_loadu_si128(words + 3);
        __m128i* line = reinterpret_cast<__m128i*>(to);
        _mm_stream_si128(line, a);
        _mm_stream_si128(line + 1, b);
        _mm_stream_si128(line + 2, c);
        _mm_stream_si128(line + 3, d);
    }
    _mm_sfence();  // before the mark by which others know of it
#endif
    copy(to, from, nbytes);
}

// Bytes of a rank's buffer from `offset` on; of another rank whose blocks are not alike, from that block on.
struct Part {
    uint32_t rank, buffer;
    uint64_t offset;
};

// AWAIT: go on when `peer` shows `mark` of this call. SIGNAL: show `mark`. FORM: `to` = the sources combined in order;
// what comes of each piece is written to the copies too. CALL: Python's, with the addresses of `to` and the sources.
struct Instruction {
    enum Opcode : int { GC_OPCODES };

    Opcode opcode;
    uint32_t peer, first, count, copies;  // the copies follow the sources
    int64_t mark;                         // of a CALL the place of what is called
    Part to;
    uint64_t nbytes;
};

// Who reads a buffer of this rank, until it shows `mark`.
struct Reader {
    uint32_t buffer, peer;
    int64_t mark;
};

// What a call does, whatever its arrays.
struct Plan {
    int64_t signature;  // alike on all ranks that make the same call
    char text[TEXT];
    uint64_t given, taken, scratch, aside;  // bytes of this rank's buffers
    uint64_t itemsize;
    Combine combine;                        // null where nothing is reduced
    Finish finish;                          // null where that is all
    uint64_t contributions;                 // for it
    bool in_control;                        // whether all ranks' buffers are in the control segments
    bool small;                             // the same of this one's buffers
    bool copies_input;                      // works on a copy of the input
    bool keeps_output;                      // it is there already: of a broadcast's root
    bool overwrites;                        // a call of it has no `out`
    bool refuses;                           // no call: says that this rank refuses one
    bool announced;                         // by the root alone: the others find out from it what is called
    bool only_compares;                     // another executor makes the call, and records it
    bool read[SHOWN];                       // whether others read these buffers
    bool writes = false;                    // whether it writes to other ranks' buffers
    uint32_t root;
    std::vector<uint32_t> peers;            // whose memory is read, or written to
    std::vector<Reader> readers;
    std::vector<int64_t> starts;            // where this rank's blocks start, where they are not alike
    std::vector<Instruction> instructions;
    std::vector<Part> parts;
    size_t lead = 0;             // instructions that lay out the input, before this rank shows that it is in the call
    bool places_result = false;  // rather than have all of OUTPUT copied to the caller's array
    bool by_calls = false;       // Python's calls do all of it, on the caller's arrays
    mutable bool in_row = false; // ALIKE calls of it have followed each other

    // Whether a rank with so many others on its node may make this call eagerly: its arrays are short, others read nothing of
    // it but its input, and there is a rank that it does not read of.
    bool may_be_eager(size_t others) const {
        return in_control && !refuses && !by_calls && !writes && scratch == 0 && given <= SLOT && taken <= SLOT && !read[OUTPUT]
               && !read[SCRATCH] && peers.size() < others;
    }

    // `one` is over all parts that have no instruction yet.
    void add(const Instruction& one) {
        lead += one.opcode == Instruction::FORM && one.to.buffer == INPUT && lead == instructions.size();
        places_result |= one.to.buffer == RESULT;
        writes |= one.copies > 0;
        instructions.push_back(one);
    }
};

// Where a rank's buffer is; `process` where only the system reaches it.
struct Base {
    char* start;
    int32_t process;
};

// The call under way.
struct Walker {
    enum Outcome { DONE, WAITING, DIFFERS, UNKNOWN, CALLING, BROKEN };
    enum Stage { LISTENING, BEFORE, MEETING, FINDING, WALKING, ENDING };

    const Plan* plan = nullptr;  // null where none is
    const char* from;
    char* to;
    char *staged, *result;  // where input is copied to, and output from, or null
    int64_t base, half;
    int64_t signature;  // tells what this rank calls, which of its calls it is, and which came before
    int64_t history;    // of the calls before
    bool has_slept = false;  // the last wait was in vain
    bool has_passed;   // the root is in another call than this rank took it to be: nothing has begun
    bool eager;        // this rank waits for no rank that it does not read of
    bool may_wait;     // whether the caller's thread has nothing else to do than this call
    Stage stage;
    size_t at;         // in what the stage waits for
    uint32_t awaited;  // the last rank
    int64_t unknown;   // the key of a segment of that rank that is not mapped here
    int error;
    std::vector<Base> bases;
    std::vector<const char*> rows;

    // Throws where there is no memory for what is aside: nothing has begun then. A thread that does the whole call `listens`:
    // it looks first whether the root is in this call.
    void begin(Node& node, const Plan* walked, const char* x, char* out, bool listens) {
        bases.resize(node.ranks * SHOWN);
        if (node.aside.size() < walked->aside) node.aside.resize(walked->aside);
        plan = walked;
        from = x;
        to = out;
        base = static_cast<int64_t>(++node.walks) << ROUNDS;
        history = node.history;
        signature = plan->signature ^ static_cast<int64_t>(node.walks << 8) ^ history;
        half = node.walks & 1;
        has_passed = false;
        node.alike = plan->signature == node.last ? std::min(node.alike + 1, ALIKE) : 0;
        node.last = plan->signature;
        plan->in_row |= node.alike == ALIKE;
        eager = plan->in_row && plan->may_be_eager(node.near.size());
        may_wait = listens;
        awaited = node.rank;
        if (!walked->only_compares)
            node.flight.began(walked->text, strnlen(walked->text, TEXT), std::max(walked->given, walked->taken));
        stage = listens && walked->announced && walked->root != node.rank ? LISTENING : BEFORE;
        at = 0;
    }

    // Goes on as far as it can; WAITING where another rank has not, which who is patient waits for about `PATIENCE`.
    Outcome go_on(Node& node, bool patient) {
        switch (stage) {
            case LISTENING:
                node.heads[node.rank]->listens.store(base, std::memory_order_seq_cst);
                if (!sees(node, plan->root, base, patient)) {
                    if (!is_listening(node, plan->root, base)) return WAITING;
                } else if (!agrees(node, plan->root)) {
                    node.walks--;
                    node.alike = 0;
                    node.flight.left();
                    plan = nullptr;
                    has_passed = true;
                    return DONE;
                }
                enter(BEFORE);
                [[fallthrough]];
            case BEFORE:  // those that still read what is overwritten from here on
                for (; at < node.ranks && !(eager && overdue() <= node.reached); at++)
                    if (node.heads[at] != nullptr && !sees(node, at, awaited_of(node, at), patient)) return WAITING;
                if (eager && at == node.ranks) node.reached = reached(node);
                present(node);
                if (plan->refuses) {
                    settle(node);
                    return DONE;
                }
                enter(MEETING);
                [[fallthrough]];
            case MEETING:
                for (; at < met(node); at++)
                    if (!sees(node, met(node, at), base, patient) || is_left(node, met(node, at))) return WAITING;
                for (size_t i = 0; node.check != OFF && i < met(node); i++)
                    if (!agrees(node, met(node, i))) return DIFFERS;
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
            case ENDING:  // until nobody reads any more what the caller, or the next call, may overwrite
                for (; at < plan->readers.size() && !eager; at++) {
                    const Reader& one = plan->readers[at];
                    if (!is_control(node, one.buffer) && !sees(node, one.peer, base + one.mark, patient)) return WAITING;
                    int64_t& last = node.unread[half][one.peer];
                    last = std::max(last, base + one.mark);
                }
        }
        if (result != nullptr) (plan->taken >= STREAMED ? stream : copy)(to, result, plan->taken);
        if (plan->finish != nullptr) plan->finish(to, plan->taken, plan->contributions);
        end(node);
        return DONE;
    }

    // Returns a rank that keeps this one from going on, since it has failed; -1 where there is none.
    int64_t culprit(const Node& node) const {
        const auto failed = [&](uint32_t rank) { return node.heads[rank]->failure.load(std::memory_order_acquire) != 0; };
        if (failed(awaited)) return awaited;
        for (size_t i = at; stage == MEETING && i < met(node); i++) {
            const uint32_t peer = met(node, i);
            if (failed(peer) && node.heads[peer]->mark.load(std::memory_order_acquire) < base) return peer;
        }
        return -1;
    }

    // Shows where in the program this rank makes a call that others do not make.
    void tell(Node& node, const char* where) {
        Head* head = node.heads[node.rank];
        Board& board = head->boards[half];
        const size_t length = strnlen(board.text, TEXT - 2);
        board.text[length] = '\n';
        std::strncpy(board.text + length + 1, where, TEXT - length - 2);
        board.kind = 0;
        show(head, base + SETTLED - 1);
    }

    // Ends a call in which nothing has been moved: the next one is as if it had not been.
    void settle(Node& node) {
        for (int64_t& mark : node.unread[half]) mark = base + SETTLED;
        // Who refuses has not met the others: they may still be comparing the call before.
        for (int64_t& mark : node.unread[1 - half]) mark = std::max(mark, base);
        node.history = history;
        node.alike = 0;
        end(node);
        show(node.heads[node.rank], base + SETTLED);
    }

    // Leaves the addresses of what a CALL is about in `rows`, the first that of `to`, and last of a plan `by_calls` the ways
    // that are open to all ranks; returns how many.
    uint32_t find_rows(const Node& node, const Instruction& one) {
        rows.resize(one.count + 1 + plan->by_calls);
        if (plan->by_calls) rows[one.count + 1] = reinterpret_cast<const char*>(static_cast<uintptr_t>(common_ways(node)));
        rows[0] = place(node, one.to).start;
        for (uint32_t i = 0; i < one.count; i++) rows[i + 1] = place(node, plan->parts[one.first + i]).start;
        return one.count + 1 + plan->by_calls;
    }

  private:
    // Leaves the call.
    void end(Node& node) {
        if (!plan->only_compares) node.flight.ended();
        plan = nullptr;
    }

    // Those with whom this rank meets before data move.
    bool meets_all(const Node& node) const { return node.check == ALL && !eager; }
    size_t met(const Node& node) const { return meets_all(node) ? node.near.size() : plan->peers.size(); }
    uint32_t met(const Node& node, size_t i) const { return meets_all(node) ? node.near[i] : plan->peers[i]; }

    // The mark that all ranks must show before an eager call takes its slot: they have left the call that had it.
    int64_t overdue() const { return base - ((SLOTS - 1) << ROUNDS); }

    // The mark that a rank must show before this one presents its call. After eager calls a rank may be behind, and look for
    // the boards of the calls before them.
    int64_t awaited_of(const Node& node, size_t rank) const {
        if (eager) return overdue();
        return std::max(node.unread[half][rank], node.was_eager ? base - (1 << ROUNDS) : 0);
    }

    // The least mark of the ranks of this node.
    static int64_t reached(const Node& node) {
        int64_t least = INT64_MAX;
        for (uint32_t rank : node.near) least = std::min(least, node.heads[rank]->mark.load(std::memory_order_acquire));
        return least;
    }

    void enter(Stage next) {
        stage = next;
        at = 0;
    }

    bool sees(Node& node, size_t rank, int64_t mark, bool patient) {
        awaited = static_cast<uint32_t>(rank);
        const bool found = has_shown(node, node.heads[rank], mark, patient, has_slept);
        has_slept = !found && patient;
        return found;
    }

    // Whether a rank has gone on without this call, whose memory would be written to.
    bool is_left(const Node& node, uint32_t rank) const {
        return plan->writes && node.heads[rank]->failure.load(std::memory_order_acquire) != 0;
    }

    // The ways that this rank and all others show, which have met: none where they do not meet.
    uint32_t common_ways(const Node& node) const {
        uint32_t ways = node.check == ALL ? WAITS | IN_PLACE : 0;
        for (uint32_t peer : node.near) ways &= node.heads[peer]->ways[half].load(std::memory_order_relaxed);
        return ways & node.heads[node.rank]->ways[half].load(std::memory_order_relaxed);
    }

    uint32_t own_ways() const {
        const bool in_place = plan->given > 0 && from >= to && from < to + plan->taken;
        return (may_wait ? WAITS : 0) | (in_place ? IN_PLACE : 0);
    }

    // Whether a rank that has come to this call has shown it on its board.
    bool is_on_board(const Node& node, uint32_t rank) const {
        return node.heads[rank]->signatures[half].load(std::memory_order_relaxed) == signature;
    }

    // Whether a rank that has come to this call makes the same one.
    bool agrees(const Node& node, uint32_t rank) const {
        return is_on_board(node, rank) || (node.is_eager(rank, node.walks)
                                           && node.slot(rank, node.walks)->signature.load(std::memory_order_relaxed) == signature);
    }

    bool is_control(const Node& node, uint32_t buffer) const {
        const int64_t key = node.heads[node.rank]->boards[half].places[buffer][0];
        return plan->in_control || key == node.keys[node.rank];
    }

    // Shows this rank's call, its input being where the others find it.
    void present(Node& node) {
        Head* head = node.heads[node.rank];
        Board& board = head->boards[half];
        lay(node, board, INPUT, const_cast<char*>(from), plan->given);
        lay(node, board, OUTPUT, to, plan->taken);
        lay(node, board, SCRATCH, nullptr, plan->scratch);
        Base* mine = bases.data() + node.rank * SHOWN;
        staged = plan->given > 0 && mine[INPUT].start != from ? mine[INPUT].start : nullptr;
        result = plan->taken > 0 && mine[OUTPUT].start != to && !plan->keeps_output && !plan->places_result
                     ? mine[OUTPUT].start : nullptr;
        if (staged != nullptr && plan->lead == 0) copy(staged, from, plan->given);
        for (size_t i = 0; i < plan->lead; i++) form(node, plan->instructions[i]);  // of this rank's memory: never fails
        if (!plan->starts.empty()) std::copy(plan->starts.begin(), plan->starts.end(), node.starts(node.rank, half));
        if (eager) {
            tell_words(*node.slot(node.rank, node.walks));
        } else {
            tell_words(board);
        }
        // So that a call which ranks that did not meet in it took for different ones is told where they meet next.
        const uint64_t mix = (static_cast<uint64_t>(node.history) ^ static_cast<uint64_t>(plan->signature)) * 0x9e3779b97f4a7c15u;
        node.history = static_cast<int64_t>(mix ^ mix >> 29);
        if (plan->by_calls) head->ways[half].store(own_ways(), std::memory_order_relaxed);
        node.was_eager = eager;
        if (eager) {
            Slot* slot = node.slot(node.rank, node.walks);
            slot->signature.store(signature, std::memory_order_relaxed);
            slot->number.store(static_cast<int64_t>(node.walks), std::memory_order_relaxed);
        } else {
            head->signatures[half].store(signature, std::memory_order_relaxed);
        }
        show(head, base);
    }

    // Has the words of the call on a board, or in a slot.
    template <class Place> void tell_words(Place& place) const {
        if (place.kind == plan->signature) return;
        std::memcpy(place.text, plan->text, TEXT);
        place.kind = plan->signature;
    }

    // Decides where one of this rank's buffers is during the call.
    void lay(const Node& node, Board& board, uint32_t buffer, char* row, uint64_t nbytes) {
        Base& mine = bases[node.rank * SHOWN + buffer];
        int64_t key = HERE, offset = 0;
        mine = {row, 0};
        Segment slab;
        if (nbytes == 0) {
            mine.start = nullptr;
        } else if (plan->by_calls) {
            // Python's calls are given the caller's arrays
        } else if (row != nullptr && !plan->read[buffer] && !(buffer == INPUT ? from == to || plan->copies_input
                                                                             : plan->keeps_output)) {
            // only this rank needs it
        } else if (plan->small && nbytes <= node.workspace_bytes) {
            mine.start = eager && buffer == INPUT ? node.slot(node.rank, node.walks)->data : node.workspace(node.rank, half, buffer);
            key = node.keys[node.rank];
            offset = static_cast<int64_t>(node.offset(node.rank, half, buffer));
        } else if (row != nullptr && !(buffer == INPUT && plan->copies_input)
                   && node.symmetric.holding(row, nbytes, &slab)) {
            key = slab.key;
            offset = row - slab.start;
        } else if (row != nullptr && node.copies && !(buffer == INPUT && plan->copies_input)) {
            offset = static_cast<int64_t>(reinterpret_cast<intptr_t>(row));
        } else {
            const Segment* staged = node.staging[buffer].load(std::memory_order_acquire);
            mine.start = staged->start;
            key = staged->key;
        }
        if (plan->in_control) return;  // where they are needs no telling
        board.places[buffer][0] = key;
        board.places[buffer][1] = offset;
    }

    // Finds the buffers of another rank; false where a segment is not mapped here yet.
    bool find(const Node& node, uint32_t rank) {
        const Board& board = node.heads[rank]->boards[half];
        Segment found;
        for (uint32_t buffer = 0; buffer < SHOWN; buffer++) {
            Base& theirs = bases[rank * SHOWN + buffer];
            if (plan->in_control) {
                const bool in_slot = buffer == INPUT && !is_on_board(node, rank) && node.is_eager(rank, node.walks);
                theirs = {in_slot ? node.slot(rank, node.walks)->data : node.workspace(rank, half, buffer), 0};
                continue;
            }
            const int64_t key = board.places[buffer][0], offset = board.places[buffer][1];
            if (key == HERE) {
                const bool near = node.processes[rank] == node.process;  // a thread
                theirs = {reinterpret_cast<char*>(static_cast<intptr_t>(offset)), near ? 0 : node.processes[rank]};
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

    Base place(const Node& node, const Part& part) const {
        if (part.buffer == ASIDE) return {const_cast<char*>(node.aside.data()) + part.offset, 0};
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

    Outcome carry_out(Node& node, const Instruction& one, bool patient) {
        switch (one.opcode) {
            case Instruction::AWAIT: return sees(node, one.peer, base + one.mark, patient) ? DONE : WAITING;
            case Instruction::SIGNAL: show(node.heads[node.rank], base + one.mark); return DONE;
            case Instruction::CALL: awaited = node.rank; return CALLING;
            case Instruction::FORM: break;
        }
        error = form(node, one);
        return error == 0 ? DONE : BROKEN;
    }

    int form(Node& node, const Instruction& one) {
        char* to_row = place(node, one.to).start;
        const Part* sources = plan->parts.data() + one.first;
        const Base source = place(node, sources[0]);
        if (to_row == nullptr || source.start == nullptr) return EFAULT;
        if (one.count == 1 && one.copies == 0) {
            if (source.process != 0) return transfer(process_vm_readv, source.process, to_row, source.start, one.nbytes);
            const bool is_last = one.to.buffer == RESULT || (one.to.buffer == OUTPUT && !plan->read[OUTPUT]);
            (is_last && plan->taken >= STREAMED ? stream : copy)(to_row, source.start, one.nbytes);
            return 0;
        }
        return combine_all(node, one, to_row, sources);
    }

    // Piece by piece where something has to be fetched or to be written elsewhere as well.
    int combine_all(Node& node, const Instruction& one, char* to_row, const Part* sources) {
        uint64_t away = 0;
        rows.resize(one.count);
        for (uint32_t i = 0; i < one.count; i++) {
            const Base source = place(node, sources[i]);
            if (source.start == nullptr) return EFAULT;
            away += source.process != 0;
            rows[i] = source.start;
        }
        const uint64_t piece = away + one.copies > 0 ? PIECE / std::max(1u, one.count / 2) / 64 * 64 : one.nbytes;
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
