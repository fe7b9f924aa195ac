// Reads the plans made by Python, tuples of numbers (executors/engine/plans.py, instructions.py), and checks them
// once.
//
// The engine carries out plans without checks, and a wrong offset would overwrite another rank's memory. So each
// number is checked here: parts inside their buffers, peers in shared memory, counters below the end of a call.
#pragma once
#include "binding/owners.h"
#include "engine/walker.h"

namespace gpucoll {

// A plan for Python.
struct PlanState {
    Plan plan{};
    Ref<> calls;     // tuple of the functions of CALLs
    Ref<> prepared;  // plan `by_calls`: the blocking call kept for the arguments `prepared_on`, or null
    const char* prepared_on[3];

    template <class Each> void references(Each each) {
        each(calls);
        each(prepared);
    }
    void forget() { calls = prepared = nullptr; }
};

using PlanObject = Object<PlanState>;

// Call `take` on each item of a tuple.
template <class Take> static void for_each(PyObject* tuple, Take take) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) take(PyTuple_GET_ITEM(tuple, i));
}

// Raise ValueError unless `is_whole`.
static void whole(bool is_whole) {
    if (!is_whole) raise(PyExc_ValueError, "a plan that is not whole");
}

// Keeps the pieces of `Walker::combine_all` at least a cache line long.
static const uint64_t MOST_SOURCES = COPY_BYTES / 64;

// Return whether a position lies within a call: a larger one would announce later calls.
static bool is_position(long long counter) { return counter >= 0 && counter < 1LL << ROUNDS; }

// Reads a plan and checks all numbers against the node.
struct Reading {
    Plan* plan;
    const Node* node;
    Py_ssize_t calls;
    std::vector<uint32_t> partners;  // the leaders of other nodes, if this rank is a leader

    bool is_peer(uint64_t rank) const {
        return std::find(plan->peers.begin(), plan->peers.end(), rank) != plan->peers.end();
    }

    // Return the bytes of a buffer. GIVEN and RESULT are the caller's arrays, as long as INPUT and OUTPUT.
    uint64_t bytes_of(uint32_t buffer) const {
        const uint64_t bytes[] = {plan->given, plan->taken, plan->scratch, plan->private_bytes, plan->given, plan->taken};
        return bytes[buffer];
    }

    // Return whether each buffer of this rank fits wherever `Walker::lay` may place it.
    bool has_staging() const {
        if (plan->by_calls) return true;  // works on the caller's arrays only
        const bool needs[] = {plan->has(COPIES_INPUT) || !node->copies, !node->copies, true};
        for (uint32_t buffer = 0; buffer < SHOWN; buffer++) {
            const uint64_t most = std::max(plan->has(OWN_IN_CONTROL) ? node->workspace_bytes : 0, node->staging_bytes(buffer));
            if (needs[buffer] && bytes_of(buffer) > most) return false;
            // Small buffers must fit a workspace. With `in_control` the peers do not even look at the descriptor.
            const bool fits = plan->has(IN_CONTROL) || (plan->has(OWN_IN_CONTROL) && buffer != SCRATCH);
            if (fits && bytes_of(buffer) > node->workspace_bytes) return false;
        }
        return true;
    }

    // Return whether all blocks of this rank start inside its buffers: the peers compute addresses from these
    // numbers.
    bool has_blocks() const {
        for (size_t i = 0; i < plan->starts.size(); i++) {
            const uint64_t most = bytes_of(i <= node->ranks ? INPUT : OUTPUT) / plan->itemsize;
            if (plan->starts[i] < 0 || static_cast<uint64_t>(plan->starts[i]) > most) return false;
        }
        return true;
    }

    // Return whether all parts from `first` on belong to this rank (`own`), or all to other ranks.
    bool are_own(size_t first, bool own) const {
        return std::all_of(plan->parts.begin() + static_cast<std::ptrdiff_t>(first), plan->parts.end(),
                           [&](const Part& one) { return (one.rank == node->rank) == own; });
    }

    // Read (rank, buffer, offset); the buffer must have `nbytes` bytes from there on. The buffers of other ranks can
    // be checked only in control segments: elsewhere their lengths are unknown here.
    Part take_part(PyObject* given, uint64_t nbytes) const {
        unsigned long long rank, buffer, offset;
        whole(PyTuple_Check(given));
        check(PyArg_ParseTuple(given, "KKK", &rank, &buffer, &offset));
        const Part part = {static_cast<uint32_t>(rank), static_cast<uint32_t>(buffer), offset};
        if (rank == node->rank) {
            whole(buffer <= RESULT);
            const uint64_t there = bytes_of(part.buffer);
            whole(offset <= there && nbytes <= there - offset);
            return part;
        }
        const bool is_block = !plan->starts.empty() && offset <= node->ranks;
        const uint64_t most = node->workspace_bytes;
        const bool is_inside = !plan->has(IN_CONTROL) || (offset <= most && nbytes <= most - offset);
        whole(buffer < SHOWN && is_peer(rank) && (plan->starts.empty() ? is_inside : is_block));
        return part;
    }

    // Read a tuple of parts, and append them to the plan.
    void take_parts(PyObject* parts, uint64_t nbytes) const {
        for_each(parts, [&](PyObject* one) { plan->parts.push_back(take_part(one, nbytes)); });
    }

    // Read (opcode, peer, counter, to, bytes, sources, copies).
    void take_instruction(PyObject* given) const {
        int opcode;
        unsigned long long peer, nbytes;
        long long counter;
        PyObject *to, *sources, *copies;
        whole(PyTuple_Check(given));
        check(PyArg_ParseTuple(given, "iKLOKO!O!", &opcode, &peer, &counter, &to, &nbytes, &PyTuple_Type, &sources,
                               &PyTuple_Type, &copies));
        Instruction one = {static_cast<Instruction::Opcode>(opcode), static_cast<uint32_t>(peer),
                           static_cast<uint32_t>(plan->parts.size()), static_cast<uint32_t>(PyTuple_GET_SIZE(sources)),
                           static_cast<uint32_t>(PyTuple_GET_SIZE(copies)), counter, {node->rank, INPUT, 0}, nbytes};
        const bool has_place = opcode == Instruction::REDUCE || (opcode != Instruction::WAIT && opcode != Instruction::PUBLISH && to != Py_None);
        if (has_place) one.to = take_part(to, nbytes);
        take_parts(sources, nbytes);
        take_parts(copies, nbytes);
        plan->add(one);
        plan->by_calls = plan->instructions.size() == 1 && opcode == Instruction::CALL && one.count == 1;
        // Leading instructions run before the rank shows the call, when only the caller's array may be read.
        const bool is_lead = plan->lead == plan->instructions.size();
        switch (opcode) {
            case Instruction::WAIT: return whole(is_same_node(peer) && is_position(counter));
            case Instruction::PUBLISH: return whole(is_position(counter));
            case Instruction::CALL:
                // Own parts only: Python gets addresses, and another rank's memory need not be mapped.
                return whole(counter >= 0 && counter < calls && one.to.rank == node->rank && are_own(one.first, true));
            case Instruction::AGREE: return whole(node->compares);
            case Instruction::SEND: case Instruction::RECEIVE: case Instruction::END: case Instruction::OPEN: case Instruction::TAKE:
                return whole(is_message(one));
            case Instruction::REDUCE:
                // The destination must be this rank's and not the caller's input; the copies must be in other ranks.
                return whole(one.to.rank == node->rank && one.to.buffer != GIVEN && nbytes > 0
                             && nbytes % plan->itemsize == 0 && one.count > 0 && one.count <= MOST_SOURCES
                             && (one.count == 1 || plan->combine != nullptr) && are_own(one.first + one.count, false)
                             && (!is_lead || (one.count == 1 && plan->parts[one.first].buffer == GIVEN)));
        }
        whole(false);
    }

    // Return whether an instruction is for a message between nodes as carried out by the engine: messages are numbered in
    // the order of their begins, and written only to this rank's own memory. No message but a greeting begins before the
    // comparison.
    bool is_message(const Instruction& one) const {
        const auto has = [](const auto& some, auto wanted) { return std::find(some.begin(), some.end(), wanted) != some.end(); };
        const bool begins = one.opcode == Instruction::SEND || one.opcode == Instruction::RECEIVE;
        const bool is_greeting = one.opcode == Instruction::OPEN || one.opcode == Instruction::TAKE;
        const bool writes = one.opcode == Instruction::RECEIVE || one.opcode == Instruction::TAKE;
        const size_t last = plan->messages - 1;
        return node->wire != nullptr && one.peer < node->ranks && !is_same_node(one.peer) && one.count == 0 && one.copies == 0 && one.to.rank == node->rank
               && (!writes || one.to.buffer != GIVEN) && (!begins || static_cast<uint64_t>(one.counter) == last)
               && (one.opcode != Instruction::END || static_cast<uint64_t>(one.counter) < plan->messages)
               && (is_greeting ? has(partners, one.peer) && one.nbytes <= OPENING : plan->agrees || !node->compares)
               && (one.opcode != Instruction::OPEN || std::count(plan->opened.begin(), plan->opened.end(), one.peer) == 1);
    }

    // Read (buffer, peer, counter).
    void take_reader(PyObject* given) const {
        unsigned long long buffer, peer;
        long long counter;
        whole(PyTuple_Check(given));
        check(PyArg_ParseTuple(given, "KKL", &buffer, &peer, &counter));
        whole(buffer < SHOWN && is_same_node(peer) && is_position(counter));
        plan->readers.push_back({static_cast<uint32_t>(buffer), static_cast<uint32_t>(peer), counter});
        plan->read[buffer] = true;
    }

    // Return whether a rank is a same-node rank (this one included).
    bool is_same_node(uint64_t rank) const { return rank < node->ranks && node->heads[rank] != nullptr; }
};

// Read a tuple of integers.
template <class Number> static void take_numbers(PyObject* tuple, std::vector<Number>* numbers) {
    for_each(tuple, [&](PyObject* one) {
        numbers->push_back(static_cast<Number>(PyLong_AsLongLong(one)));
        check_error();
    });
}

// Read (words, signature, sizes, kinds, flags, root, peers, readers, starts, instructions, calls): sizes of input,
// output, scratch, private memory and an element; kinds are dtype, op and contributions. Return the calls.
static PyObject* take_plan(Plan* plan, const Node& node, const std::vector<uint32_t>& partners, PyObject* given) {
    const char* text;
    unsigned long long root, sizes[4], itemsize, contributions;
    unsigned int flags;
    long long signature;
    long dtype, op;
    PyObject *peers, *readers, *starts, *instructions, *calls;
    check(PyArg_ParseTuple(given, "sL(KKKKK)(llK)IKO!O!O!O!O!", &text, &signature, sizes, sizes + 1, sizes + 2,
                           sizes + 3, &itemsize, &dtype, &op, &contributions, &flags, &root, &PyTuple_Type, &peers,
                           &PyTuple_Type, &readers, &PyTuple_Type, &starts, &PyTuple_Type, &instructions,
                           &PyTuple_Type, &calls));
    std::strncpy(plan->text, text, TEXT - 1);
    plan->signature = signature;
    plan->given = sizes[0];
    plan->taken = sizes[1];
    plan->scratch = sizes[2];
    plan->private_bytes = sizes[3];
    plan->itemsize = itemsize;
    plan->combine = op < 0 ? nullptr : combine_of(dtype, op);
    plan->contributions = contributions;
    plan->finish = contributions == 0 ? nullptr : op == AVG ? mean_of(dtype) : truth_of(dtype);
    plan->flags = flags;
    plan->root = static_cast<uint32_t>(root);
    const uint64_t most = std::max({plan->given, plan->taken, plan->scratch});
    const bool is_like = itemsize > 0 && root < node.ranks && (!plan->has(ANNOUNCED) || node.heads[root] != nullptr) && (contributions == 0 || plan->finish != nullptr)
        && (!plan->has(IN_CONTROL) || (plan->has(OWN_IN_CONTROL) && most <= node.workspace_bytes))
        && (PyTuple_GET_SIZE(starts) == 0 || PyTuple_GET_SIZE(starts) == 2 * (node.ranks + 1));
    whole(is_like);
    const Reading reading = {plan, &node, PyTuple_GET_SIZE(calls), partners};
    take_numbers(peers, &plan->peers);
    take_numbers(starts, &plan->starts);
    whole(std::all_of(plan->peers.begin(), plan->peers.end(),
                      [&](uint32_t peer) { return reading.is_same_node(peer) && peer != node.rank; }));
    for_each(readers, [&](PyObject* one) { reading.take_reader(one); });
    for_each(instructions, [&](PyObject* one) { reading.take_instruction(one); });
    whole(reading.has_staging() && reading.has_blocks() && (plan->agrees || !node.compares));
    return calls;
}

// Return a new plan.
static Ref<> make_plan(const Node& node, const std::vector<uint32_t>& partners, PyObject* given) {
    const auto made = make_object<PlanState>();
    PyObject* calls = take_plan(&made->state.plan, node, partners, given);
    made->state.calls = Ref<>::borrow(calls);
    return Ref<>::borrow(made.get());
}

// Return a plan for the same work, described to the other ranks by `text` and `signature`.
static Ref<PlanObject> renamed_plan(const PlanState& old, const char* text, long long signature) {
    const auto made = make_object<PlanState>();
    made->state.plan = old.plan;
    made->state.calls = old.calls;
    made->state.plan.signature = signature;
    made->state.plan.in_row = false;
    std::memset(made->state.plan.text, 0, TEXT);
    std::strncpy(made->state.plan.text, text, TEXT - 1);
    return made;
}

}  // namespace gpucoll
