// The engine: walks one rank's part of a schedule in the memory of its node, without a step in Python.
//
// What waits for what is `order.py`'s: every rank shows one number, its mark, from which the others learn what they may
// read of it and what it has read. A walk is bound to the ranks' control segments: input and output are copied there and
// back, so that it serves arrays anywhere. Calls take the two boards and workspaces of a control segment in turn; Python
// walks longer calls by the same marks.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "slots.h"

static const int ROUNDS = 20;          // bits of a mark below the number of the call
static const int BOARD = 8;            // words: a stamp, where three buffers are, and last the call's signature
static const int64_t ASTRAY = -2;      // the failure of a rank that has met another call

// The beginning of a control segment.
struct Head {
    std::atomic<int64_t> mark;
    int64_t token;
    std::atomic<uint32_t> sleepers;  // ranks that wait for the mark to change
    alignas(8) std::atomic<int64_t> failure;
    std::atomic<int64_t> calls[2];  // the last two, by slots too: twice the number of each, and 1 more for a walk
};

// The ranks of a node as the engine sees them.
struct Node {
    uint64_t rank, ranks, spins, yields;
    Head** heads;       // of all ranks
    int64_t** boards;   // of all ranks: two each
    int64_t* progress;  // how many walks there were, and calls; for either half of the walks and each rank, the mark
                        // it shows after it has read what it reads of this rank

    int64_t* unread(int64_t half) const { return progress + 2 + static_cast<uint64_t>(half) * ranks; }
    int64_t* board(uint64_t of, int64_t half) const { return boards[of] + half * BOARD; }

    // Shows that this rank begins a call: those who wait in vain see that it is another one than theirs.
    void announce(bool walks) const {
        const int64_t number = ++progress[1];
        heads[rank]->calls[number & 1].store(number * 2 + walks, std::memory_order_release);
    }
};

// The half of a mark that changes.
static std::atomic<uint32_t>* low(std::atomic<int64_t>* mark) {
    return reinterpret_cast<std::atomic<uint32_t>*>(mark) + (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__);
}

static void show(Head* head, int64_t mark) {
    head->mark.store(mark, std::memory_order_seq_cst);
    if (head->sleepers.load(std::memory_order_seq_cst) != 0) futex(low(&head->mark), FUTEX_WAKE, INT_MAX, nullptr);
}

// Returns whether a rank shows so much, waiting for it at most about `PATIENCE`.
static bool has_shown(const Node& node, Head* head, int64_t mark) {
    if (head->mark.load(std::memory_order_acquire) >= mark) return true;
    for (uint64_t look = 0; look < node.spins; look++) {
        breathe();
        if (head->mark.load(std::memory_order_acquire) >= mark) return true;
    }
    for (uint64_t look = 0; look < node.yields; look++) {
        sched_yield();
        if (head->mark.load(std::memory_order_acquire) >= mark) return true;
    }
    const timespec nap = {0, static_cast<long>(PATIENCE)};
    head->sleepers.fetch_add(1, std::memory_order_seq_cst);
    const int64_t seen = head->mark.load(std::memory_order_seq_cst);
    if (seen < mark) futex(low(&head->mark), FUTEX_WAIT, static_cast<uint32_t>(seen), &nap);
    head->sleepers.fetch_sub(1, std::memory_order_seq_cst);
    return head->mark.load(std::memory_order_acquire) >= mark;
}

// AWAIT: go on when `peer` shows `mark` of this call. SIGNAL: show `mark`. FORM: `to` = the sources combined in order.
struct Instruction {
    enum Opcode { AWAIT, SIGNAL, FORM };

    Opcode opcode;
    uint32_t peer, first, count;  // of FORM the sources
    int64_t mark;
    char* to;
    uint64_t nbytes;
};

// A program, bound to the boards and workspaces of one half.
struct Program {
    char *input, *output;  // in the control segment; null where this rank gives or takes nothing
    int64_t board[BOARD - 1];
    std::vector<Instruction> instructions;
    std::vector<const char*> sources;
};

// What a call does, whatever its arrays.
struct Plan {
    int64_t signature;
    uint64_t given, taken;                           // bytes of this rank's arrays
    Combine combine;                                 // null where nothing is reduced
    Divide divide;                                   // null where the result is no mean
    uint64_t contributions;                          // of which it is one
    bool overwrites;                                 // its input, but for that of the root
    uint64_t root;
    std::vector<uint32_t> peers;                     // whose memory is read
    std::vector<std::pair<uint32_t, int64_t>> readers;  // the mark of each that reads this rank's, when it has done so
    Program programs[2];
};

// The call under way.
struct Walker {
    enum Outcome { DONE, WAITING, DIFFERS };
    enum Stage { BEFORE, MEETING, WALKING };

    const Plan* plan;  // null where none is
    const char* from;
    char* to;
    int64_t base, half, refusals;
    Stage stage;
    size_t at;         // in what the stage waits for
    uint32_t awaited;  // the last rank

    void begin(const Node& node, const Plan* walked, const char* x, char* out, uint64_t refused) {
        plan = walked;
        from = x;
        to = out;
        refusals = static_cast<int64_t>(refused);
        node.announce(true);
        half = ++*node.progress & 1;
        base = *node.progress << ROUNDS;
        stage = BEFORE;
        at = 0;
    }

    // Goes on as far as it can; WAITING after about `PATIENCE` in which another rank has not.
    Outcome go_on(const Node& node) {
        const Program& program = plan->programs[half];
        if (stage == BEFORE) {  // those that read what the call before the last one left here
            for (; at < node.ranks; at++)
                if (!sees(node, static_cast<uint32_t>(at), node.unread(half)[at])) return WAITING;
            if (program.input != nullptr) std::memcpy(program.input, from, plan->given);
            int64_t* board = node.board(node.rank, half);
            if (board[0] != program.board[0]) std::copy_n(program.board, BOARD - 1, board);
            board[BOARD - 1] = plan->signature + refusals;
            show(node.heads[node.rank], base);
            stage = MEETING;
            at = 0;
        }
        if (stage == MEETING) {
            for (; at < plan->peers.size(); at++)
                if (!sees(node, plan->peers[at], base)) return WAITING;
            for (uint32_t peer : plan->peers)
                if (node.board(peer, half)[BOARD - 1] != plan->signature + refusals) return DIFFERS;
            stage = WALKING;
            at = 0;
        }
        for (; at < program.instructions.size(); at++)
            if (!carry_out(node, program, program.instructions[at])) return WAITING;
        for (const auto& reader : plan->readers) node.unread(half)[reader.first] = base + reader.second;
        if (program.output != nullptr) std::memcpy(to, program.output, plan->taken);
        if (plan->divide != nullptr) plan->divide(to, plan->taken, plan->contributions);
        plan = nullptr;
        return DONE;
    }

  private:
    bool sees(const Node& node, uint32_t rank, int64_t mark) {
        awaited = rank;
        return has_shown(node, node.heads[rank], mark);
    }

    bool carry_out(const Node& node, const Program& program, const Instruction& one) {
        switch (one.opcode) {
            case Instruction::AWAIT: return sees(node, one.peer, base + one.mark);
            case Instruction::SIGNAL: show(node.heads[node.rank], base + one.mark); return true;
            case Instruction::FORM: break;
        }
        const char* const* sources = program.sources.data() + one.first;
        if (one.count == 1) {
            std::memmove(one.to, sources[0], one.nbytes);
        } else {
            plan->combine(sources, one.count, one.to, 0, one.nbytes);
        }
        return true;
    }
};
