// The memory that the ranks of a node share, and a rank's view of the node.
//
// Every rank owns a control segment, mapped by all ranks of the node: a `Head`, block starts, slots for eager calls,
// workspaces, mailboxes (mail.h). walker.h tells how a call uses them.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "engine/flight.h"
#include "engine/tables.h"
#include "engine/wire.h"

namespace gpucoll {

static const int64_t HERE = -1;            // instead of a segment key: the offset is an address of the process

// A call descriptor: where the rank's buffers are, as pairs of segment key and offset, and the call in words.
struct CallDescriptor {
    int64_t places[SHOWN][2];
    int64_t kind;     // the plan's signature: equal means `text` need not be written again
    char text[TEXT];  // after a mismatch, a second line holds the place in the program
};

// The beginning of a control segment. Fields read in every call share the first cache line: a single transfer.
struct alignas(64) Head {
    std::atomic<int64_t> counter;        // the progress counter
    std::atomic<int64_t> signatures[2];  // of the call in each half
    std::atomic<uint32_t> sleepers;      // ranks asleep until the progress counter changes
    std::atomic<int32_t> core;           // processor of the last store: spinning on the same core is useless
    alignas(8) std::atomic<int64_t> failure;  // 0, or the reason why this rank gave up (written by Python)
    std::atomic<int64_t> arrived[2];     // when the rank came to the call in each half, by `nanoseconds`
    std::atomic<uint32_t> modes[2];       // flags `Mode`: how this rank can make the call through MPI
    alignas(64) CallDescriptor descriptors[2];
    int64_t token;                       // random; a peer checks by this number the mapping of the right segment
    // Counter of the latest call for which this rank waited until the root showed the call.
    std::atomic<int64_t> listens;
    // Of the first rank of a node, between nodes: whether all nodes make the latest call compared, and when the first
    // rank of all came to the call, in nanoseconds since 1970 (agreement.h).
    std::atomic<int64_t> verdict, first_arrival;
    // For error messages on other ranks: the numbers of the last call begun and of the last call ended, negative for a
    // deferred call, whose work goes on; and when that call ended, by `nanoseconds`.
    std::atomic<int64_t> begun, ended, left;
    // Behind the head, for either half: block starts of input and output in elements, for blocks of unequal length.
};

static_assert(sizeof(Head) == HEAD && offsetof(Head, counter) == 8 * COUNTER && offsetof(Head, failure) == 8 * FAILURE
              && offsetof(Head, arrived) == 8 * ARRIVED && offsetof(Head, token) == 8 * TOKEN
              && offsetof(Head, begun) == 8 * BEGUN && offsetof(Head, ended) == 8 * ENDED && offsetof(Head, left) == 8 * LEFT,
              "Python keeps as many bytes for it, and reads these words");
static_assert(std::atomic<int64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
              "processes share no locks");

// The descriptor of an eager call, together with the input. Call n uses slot n % SLOTS. A rank reading from no other
// rank, for example the root of a broadcast, can be SLOTS - 1 calls ahead: many calls then fit in a time slice of a
// core.
struct alignas(64) Slot {
    std::atomic<int64_t> number;     // of the call; any other number means: this call is not eager on this rank
    std::atomic<int64_t> signature;
    char data[SLOT];                 // the input read by the peers
    int64_t kind;
    char text[TEXT];
};

static_assert(sizeof(Slot) == SLOT_BYTES, "Python keeps as many bytes for it");

// A segment of some rank's memory, mapped by this process.
struct Segment {
    uint32_t rank;
    int64_t key;  // never used for a later segment of the same process
    char* start;
    uint64_t nbytes;
};

// The segments mapped by this process. A thread may add a segment while another thread searches in a call. A lock
// guards the list, and a search returns a copy, valid after the lock is released. Beyond MOST the oldest is dropped.
class Segments {
  public:
    static const size_t MOST = 4096;

    void add(const Segment& one) {
        const std::lock_guard<std::mutex> guard(lock);
        if (all.size() == MOST) all.pop_front();
        all.push_back(one);
        // Release: a thread that sees the flag cleared may rely on the list behind it.
        none.store(false, std::memory_order_release);
    }

    // Return whether no segment was ever added. Most programs have no symmetric memory, so this test takes no lock.
    bool empty() const { return none.load(std::memory_order_acquire); }

    // Return whether a single segment contains `nbytes` bytes from `start` on; copy that segment to `found`.
    bool holding(const char* start, uint64_t nbytes, Segment* found) const {
        return !empty() && first([&](const Segment& one) {
            return start >= one.start && start + nbytes <= one.start + one.nbytes; }, found);
    }

    // Return whether the segment `key` of `rank` is mapped; copy the segment to `found`.
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

// A rank's view of the node, kept from call to call. Private names: `same_node` are the other same-node ranks,
// `call_count` the number of calls, `repeats` a count of repeated calls.
struct Node {
    uint32_t rank, ranks;
    Check check;
    uint32_t crowd;                // ranks that are threads of this process, per core
    bool spins;                    // every rank has a core: a waiting rank may spin
    uint32_t to_sleep = 0;         // remaining waits that sleep without a yield: see `Backoff`
    uint32_t sleeps = 0;           // waits put to sleep by the last dear yield; each cheap yield halves the number
    bool copies;                   // the system allows copies between the ranks' memory (process_vm_readv)
    int32_t process;
    uint64_t first, workspace_bytes;  // in every control segment: where workspaces begin, and the size of each
    std::vector<Head*> heads;      // by rank; null for remote ranks
    std::vector<int64_t> keys;     // of the control segments
    std::vector<int32_t> processes;
    std::vector<uint32_t> same_node;  // the other same-node ranks
    std::atomic<const Segment*> staging[SHOWN];  // this rank's staging buffers, for arrays unreachable for the peers
    std::deque<Segment> all_staging;             // all of them: a call under way may still use an outgrown buffer
    uint64_t call_count;           // number of the current or last call
    int64_t history = 0;           // a hash of all calls so far, part of the next signature
    // By half and rank: the counter to be shown by that rank before this rank may overwrite the half.
    std::vector<int64_t> unread[2];
    std::vector<char> private_memory, fetched;  // private memory of plans; pieces copied from other processes
    int64_t last = 0;              // the signature of the last plan
    uint32_t repeats = 0;          // consecutive earlier calls with this signature, at most EAGER_AFTER
    bool was_eager = false;        // the last call was eager
    std::atomic<int64_t> open{0};  // the progress counter of a deferred call not yet judged, or 0
    uint64_t open_bytes = 0;       // of the input of that call, shown to all ranks
    std::vector<char> heard;       // such inputs of all ranks, of the last deferred call judged
    int64_t reached = 0;           // a counter known to be shown by all same-node ranks
    int64_t waits_since = 0;       // nanoseconds: when the present wait first read the clock, 0 before
    int64_t left = 0;              // nanoseconds: when the last call ended, or when this rank began
    CallTimes total;               // own delays and waits of all calls
    Flight flight;
    Segments others;               // of other ranks
    Segments symmetric;            // this rank's symmetric memory, laid out alike on all ranks
    Wire* wire = nullptr;          // messages to ranks of other nodes; null: Python's functions send them
    uint64_t wire_tag = 0;         // with the number of a call, the tag of the call's messages
    bool compares = false;         // calls are compared between nodes by the wire
    uint32_t leader = 0;           // the first rank of this node

    // Return where a workspace begins in a control segment. Workspaces read and written together start at different
    // offsets of a page: a processor mistakes a load for an earlier store with the same low address bits, and stalls.
    uint64_t offset(uint32_t of, int64_t half, uint32_t buffer) const {
        const uint64_t which = static_cast<uint64_t>(half) * SHOWN + buffer;
        return first + which * (workspace_bytes + PAGE) + (of * SHOWN + buffer) % 8 * (PAGE / 8);
    }
    char* workspace(uint32_t of, int64_t half, uint32_t buffer) const {
        return reinterpret_cast<char*>(heads[of]) + offset(of, half, buffer);
    }
    // Return the block starts of a rank: `ranks` + 1 of the input, then as many of the output.
    int64_t* starts(uint32_t of, int64_t half) const {
        return reinterpret_cast<int64_t*>(heads[of] + 1) + half * 2 * (ranks + 1);
    }
    Slot* slot(uint32_t of, uint64_t number) const {
        const uint64_t blocks = 4 * (ranks + 1) * sizeof(int64_t);
        char* slots = reinterpret_cast<char*>(heads[of] + 1) + (blocks + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
        return reinterpret_cast<Slot*>(slots) + number % SLOTS;
    }
    // Return the description of call `number` on rank `of`. The caller has seen the rank's counter in the call.
    const char* description(uint32_t of, uint64_t number) const {
        return is_eager(of, number) ? slot(of, number)->text : heads[of]->descriptors[number & 1].text;
    }
    // Return whether call `number` is eager on rank `of`, already in the call. Relaxed: read after the rank's
    // counter.
    bool is_eager(uint32_t of, uint64_t number) const {
        return slot(of, number)->number.load(std::memory_order_relaxed) == static_cast<int64_t>(number);
    }
    // Acquire pairs with the release store in `staging_method`: the fields of the segment are complete.
    uint64_t staging_bytes(uint32_t buffer) const {
        const Segment* found = staging[buffer].load(std::memory_order_acquire);
        return found == nullptr ? 0 : found->nbytes;
    }
};

}  // namespace gpucoll
