// A plan: what a rank does in a call, in bytes of the ranks' buffers. binding/plans.h makes plans of Python's numbers.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "engine/combine.h"
#include "engine/tables.h"

namespace gpucoll {

// A place in a rank's buffer, `offset` in bytes. With blocks of unequal length, `offset` in another rank is a block
// number.
struct Part {
    uint32_t rank, buffer;
    uint64_t offset;
};

// An instruction of a plan. WAIT: wait until `peer` shows position `counter` of this call. PUBLISH: show position
// `counter`. REDUCE: combine the sources in order into `to`, and write each piece to the copies as well. CALL: call a
// Python function with the addresses of `to` and of the sources.
//
// Messages to ranks of other nodes. SEND, RECEIVE: begin message `counter` to or from `peer`, with the bytes of `to`.
// END: wait until message `counter` has ended. OPEN: send the greeting of this call (agreement.h) to `peer`, with the
// bytes of `to`. TAKE: wait for the greeting of `peer`, and copy its data to `to`. AGREE: wait until all ranks are known
// to make this call; before, no array of the caller's may be written.
struct Instruction {
    enum Opcode : int { GC_OPCODES };

    Opcode opcode;
    uint32_t peer, first, count, copies;  // `count` sources at `Plan::parts[first]`, followed by the copies
    int64_t counter;                      // of a CALL: the index of the function; of a message: its number
    Part to;
    uint64_t nbytes;
};

// A rank reading a buffer of this rank; the reads have ended once `peer` shows position `counter`.
struct Reader {
    uint32_t buffer, peer;
    int64_t counter;
};

// All that a call does, independent of the arrays: made once (plans.h), used for every similar call.
struct Plan {
    int64_t signature;  // equal on all ranks making the same call
    char text[TEXT];    // the description of the call; a second line has the place of the first such call in the program
    uint64_t given, taken, scratch, private_bytes;  // bytes of input, output, shared scratch and private memory
    uint64_t itemsize;
    Combine combine;                        // null if nothing is reduced
    Finish finish;                          // last step on the result (mean, truth value), or null
    uint64_t contributions;                 // argument of `finish`
    uint32_t flags;                         // bits of `PlanFlag`
    bool read[SHOWN];                       // by buffer: read by other ranks
    bool writes = false;                    // writes to buffers of other ranks
    uint32_t root;
    std::vector<uint32_t> peers;            // ranks whose memory this rank reads or writes
    std::vector<Reader> readers;
    std::vector<int64_t> starts;            // this rank's block starts, if blocks have unequal lengths; or empty
    std::vector<Instruction> instructions;
    std::vector<Part> parts;
    size_t lead = 0;             // leading instructions that lay out the input, done before the rank shows the call
    bool places_result = false;  // instructions write to the caller's array; else all of OUTPUT is copied at the end
    bool by_calls = false;       // a single Python function does the whole call, on the caller's arrays
    bool agrees = false;         // has an AGREE
    size_t messages = 0;         // to and from other nodes: numbers of SEND and RECEIVE
    std::vector<uint32_t> opened; // ranks of other nodes whose greeting goes with data, by an OPEN
    mutable bool in_row = false; // was once called EAGER_AFTER times in a row: eager from then on, if allowed

    bool has(PlanFlag flag) const { return (flags & flag) != 0; }

    // Return the length of the first line of `text`.
    size_t described() const {
        const size_t length = strnlen(text, TEXT);
        const void* line = std::memchr(text, '\n', length);
        return line == nullptr ? length : static_cast<size_t>(static_cast<const char*>(line) - text);
    }

    // Return whether this call may be eager on a rank with `others` same-node ranks. The arrays must be short. The
    // peers may read only the input, copied to the slot. The rank must not read from all others: an eager call would
    // save no wait.
    bool may_be_eager(size_t others) const {
        return has(IN_CONTROL) && !has(REFUSES) && !by_calls && !writes && scratch == 0 && given <= SLOT && taken <= SLOT && !read[OUTPUT]
               && !read[SCRATCH] && peers.size() < others;
    }

    // Return whether a part of rank `own` lies in the caller's array for the result.
    bool is_result(const Part& part, uint32_t own) const {
        return part.buffer == RESULT || (part.buffer == OUTPUT && part.rank == own && !read[OUTPUT]);
    }

    // Return whether the result may be a list of arrays: only copies write to it, and nothing reads it.
    bool may_split(uint32_t own) const {
        const auto is_like = [&](const Instruction& one) {
            const auto* first = parts.data() + one.first;
            const bool copies_one = one.opcode == Instruction::REDUCE && one.count == 1 && one.copies == 0;
            return (copies_one || !is_result(one.to, own))
                && std::none_of(first, first + one.count + one.copies, [&](const Part& part) { return is_result(part, own); });
        };
        return !by_calls && finish == nullptr && !has(OVERWRITES) && (!read[OUTPUT] || has(OWN_IN_CONTROL))
            && std::all_of(instructions.begin(), instructions.end(), is_like);
    }

    // Append an instruction. The parts of `one` are already at the end of `parts`.
    void add(const Instruction& one) {
        lead += one.opcode == Instruction::REDUCE && one.to.buffer == INPUT && lead == instructions.size();
        places_result |= one.to.buffer == RESULT;
        writes |= one.copies > 0;
        agrees |= one.opcode == Instruction::AGREE;
        messages += one.opcode == Instruction::SEND || one.opcode == Instruction::RECEIVE;
        if (one.opcode == Instruction::OPEN) opened.push_back(one.peer);
        instructions.push_back(one);
    }
};

}  // namespace gpucoll
