// Plans as Python makes them, from tuples of numbers; one that is not whole is refused.
#pragma once
#define PY_SSIZE_T_CLEAN
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <Python.h>
#include <numpy/arrayobject.h>

#include <exception>
#include <memory>
#include <new>
#include <stdexcept>

#include "engine.h"

// Python's lock is let go of in a block, and taken again at its end, whatever ends the block.
class Unlocked {
  public:
    Unlocked() : state(PyEval_SaveThread()) {}
    ~Unlocked() { PyEval_RestoreThread(state); }
    Unlocked(const Unlocked&) = delete;

  private:
    PyThreadState* state;
};

// The error that is set is put aside in a block: Python may not be called with one. It is set again at the end.
class KeptError {
  public:
    KeptError() { PyErr_Fetch(&kind, &value, &trace); }
    ~KeptError() { PyErr_Restore(kind, value, trace); }
    KeptError(const KeptError&) = delete;

  private:
    PyObject *kind, *value, *trace;
};

// Owns a reference.
struct Release {
    void operator()(PyObject* one) const { Py_DECREF(one); }
};
using Owned = std::unique_ptr<PyObject, Release>;

// An exception that is under way becomes Python's error.
static void set_error() {
    try {
        throw;
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    } catch (const std::length_error&) {  // more than there could be
        PyErr_NoMemory();
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
}

// A function as Python calls it. Its exceptions end here: none may cross a frame of C.
template <auto function, class... Given> static PyObject* bordered(Given... given) noexcept {
    try {
        return function(given...);
    } catch (...) {
        set_error();
        return nullptr;
    }
}

static bool is_array(PyObject* object) { return Py_TYPE(object) == &PyArray_Type; }

static PyArrayObject* array_of(PyObject* object) { return reinterpret_cast<PyArrayObject*>(object); }

static char* data_of(PyObject* object) {
    return is_array(object) ? static_cast<char*>(PyArray_DATA(array_of(object))) : nullptr;
}

// A plan as Python holds it.
struct PlanObject {
    PyObject_HEAD
    Plan* plan;
    PyObject* calls;  // what its CALLs call, after what to call while it waits; or an empty tuple
    PyObject* prepared;        // of a plan `by_calls`, what does it on these rows; or null
    const char* prepared_on[3];
};

static PyTypeObject plan_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

// Whether each item of a tuple is taken by `take`, which sets an error where it is not.
template <class Take> static bool for_each(PyObject* tuple, Take take) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++)
        if (!take(PyTuple_GET_ITEM(tuple, i))) return false;
    return true;
}

static bool whole(bool is_whole) {
    if (!is_whole && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a plan that is not whole");
    return is_whole;
}

static const uint64_t MOST_SOURCES = PIECE / 64;  // of which a piece has a line each, at the least

static bool is_mark(long long mark) { return mark >= 0 && mark < 1LL << ROUNDS; }

// Checks plans against the node that they are for.
struct Reading {
    Plan* plan;
    const Node* node;
    Py_ssize_t calls;

    bool is_peer(uint64_t rank) const {
        return std::find(plan->peers.begin(), plan->peers.end(), rank) != plan->peers.end();
    }

    uint64_t bytes_of(uint32_t buffer) const {
        const uint64_t bytes[] = {plan->given, plan->taken, plan->scratch, plan->aside, plan->given, plan->taken};
        return bytes[buffer];
    }

    // Whether each of this rank's buffers has memory wherever it may have to be.
    bool has_staging() const {
        if (plan->by_calls) return true;  // nobody reads them
        const bool needs[] = {plan->copies_input || !node->copies, !node->copies, true};
        for (uint32_t buffer = 0; buffer < SHOWN; buffer++) {
            const uint64_t most = std::max(plan->small ? node->workspace_bytes : 0, node->staging_bytes(buffer));
            if (needs[buffer] && bytes_of(buffer) > most) return false;
            const bool fits = plan->in_control || (plan->small && buffer != SCRATCH);  // what others take for granted
            if (fits && bytes_of(buffer) > node->workspace_bytes) return false;
        }
        return true;
    }

    // Whether this rank's blocks, which others find by these numbers, start in its buffers.
    bool has_blocks() const {
        for (size_t i = 0; i < plan->starts.size(); i++) {
            const uint64_t most = bytes_of(i <= node->ranks ? INPUT : OUTPUT) / plan->itemsize;
            if (plan->starts[i] < 0 || static_cast<uint64_t>(plan->starts[i]) > most) return false;
        }
        return true;
    }

    // Whether parts from `first` on are all of this rank's, or all of others'.
    bool are_own(size_t first, bool own) const {
        return std::all_of(plan->parts.begin() + static_cast<std::ptrdiff_t>(first), plan->parts.end(),
                           [&](const Part& one) { return (one.rank == node->rank) == own; });
    }

    // Takes (rank, buffer, offset), of which there must be so many bytes.
    bool take_part(PyObject* given, uint64_t nbytes, Part* part) const {
        unsigned long long rank, buffer, offset;
        if (!PyTuple_Check(given) || !PyArg_ParseTuple(given, "KKK", &rank, &buffer, &offset)) return whole(false);
        *part = {static_cast<uint32_t>(rank), static_cast<uint32_t>(buffer), offset};
        if (rank == node->rank) {
            if (buffer > RESULT) return whole(false);
            const uint64_t there = bytes_of(part->buffer);
            return whole(offset <= there && nbytes <= there - offset);
        }
        const bool is_block = !plan->starts.empty() && offset <= node->ranks;
        const uint64_t most = node->workspace_bytes;
        const bool is_inside = !plan->in_control || (offset <= most && nbytes <= most - offset);
        return whole(buffer < SHOWN && is_peer(rank) && (plan->starts.empty() ? is_inside : is_block));
    }

    bool take_parts(PyObject* parts, uint64_t nbytes) const {
        return for_each(parts, [&](PyObject* one) {
            Part part;
            if (!take_part(one, nbytes, &part)) return false;
            plan->parts.push_back(part);
            return true;
        });
    }

    // Takes (opcode, peer, mark, place, bytes, sources, copies).
    bool take_instruction(PyObject* given) const {
        int opcode;
        unsigned long long peer, nbytes;
        long long mark;
        PyObject *to, *sources, *copies;
        if (!PyTuple_Check(given)) return whole(false);
        if (!PyArg_ParseTuple(given, "iKLOKO!O!", &opcode, &peer, &mark, &to, &nbytes, &PyTuple_Type, &sources,
                              &PyTuple_Type, &copies))
            return false;
        Instruction one = {static_cast<Instruction::Opcode>(opcode), static_cast<uint32_t>(peer),
                           static_cast<uint32_t>(plan->parts.size()), static_cast<uint32_t>(PyTuple_GET_SIZE(sources)),
                           static_cast<uint32_t>(PyTuple_GET_SIZE(copies)), mark, {node->rank, INPUT, 0}, nbytes};
        const bool has_place = opcode == Instruction::FORM || (opcode == Instruction::CALL && to != Py_None);
        if (has_place && !take_part(to, nbytes, &one.to)) return false;
        if (!take_parts(sources, nbytes) || !take_parts(copies, nbytes)) return false;
        plan->add(one);
        plan->by_calls = plan->instructions.size() == 1 && opcode == Instruction::CALL && one.count == 1;
        const bool is_lead = plan->lead == plan->instructions.size();
        switch (opcode) {
            case Instruction::AWAIT: return whole(is_near(peer) && is_mark(mark));
            case Instruction::SIGNAL: return whole(is_mark(mark));
            case Instruction::CALL:  // Python reads what is mapped
                return whole(mark > 0 && mark < calls && one.to.rank == node->rank && are_own(one.first, true));
            case Instruction::FORM:
                return whole(one.to.rank == node->rank && one.to.buffer != GIVEN && nbytes > 0
                             && nbytes % plan->itemsize == 0 && one.count > 0 && one.count <= MOST_SOURCES
                             && (one.count == 1 || plan->combine != nullptr) && are_own(one.first + one.count, false)
                             && (!is_lead || (one.count == 1 && plan->parts[one.first].buffer == GIVEN)));
        }
        return whole(false);
    }

    bool take_reader(PyObject* given) const {
        unsigned long long buffer, peer;
        long long mark;
        if (!PyTuple_Check(given) || !PyArg_ParseTuple(given, "KKL", &buffer, &peer, &mark)) return whole(false);
        if (!whole(buffer < SHOWN && is_near(peer) && is_mark(mark))) return false;
        plan->readers.push_back({static_cast<uint32_t>(buffer), static_cast<uint32_t>(peer), mark});
        plan->read[buffer] = true;
        return true;
    }

    bool is_near(uint64_t rank) const { return rank < node->ranks && node->heads[rank] != nullptr; }
};

template <class Number> static bool take_numbers(PyObject* tuple, std::vector<Number>* numbers) {
    return for_each(tuple, [&](PyObject* one) {
        numbers->push_back(static_cast<Number>(PyLong_AsLongLong(one)));
        return !PyErr_Occurred();
    });
}

// Takes (words, signature, sizes, kinds, flags, root, peers, readers, starts, instructions, calls).
static bool take_plan(Plan* plan, const Node& node, PyObject* given, PyObject** called) {
    const char* text;
    unsigned long long root, sizes[4], itemsize, contributions;
    long long signature;
    long dtype, op;
    int in_control, small, copies_input, keeps_output, overwrites, refuses, announced, only_compares;
    PyObject *peers, *readers, *starts, *instructions;
    if (!PyArg_ParseTuple(given, "sL(KKKKK)(llK)(pppppppp)KO!O!O!O!O!", &text, &signature, sizes, sizes + 1, sizes + 2,
                          sizes + 3, &itemsize, &dtype, &op, &contributions, &in_control, &small, &copies_input,
                          &keeps_output, &overwrites, &refuses, &announced, &only_compares, &root, &PyTuple_Type, &peers, &PyTuple_Type,
                          &readers, &PyTuple_Type, &starts, &PyTuple_Type, &instructions, &PyTuple_Type, called))
        return false;
    std::strncpy(plan->text, text, TEXT - 1);
    plan->signature = signature;
    plan->given = sizes[0];
    plan->taken = sizes[1];
    plan->scratch = sizes[2];
    plan->aside = sizes[3];
    plan->itemsize = itemsize;
    plan->combine = op < 0 ? nullptr : combine_of(dtype, op);
    plan->contributions = contributions;
    plan->finish = contributions == 0 ? nullptr : op == AVG ? mean_of(dtype) : truth_of(dtype);
    plan->in_control = in_control != 0;
    plan->small = small != 0;
    plan->copies_input = copies_input != 0;
    plan->keeps_output = keeps_output != 0;
    plan->overwrites = overwrites != 0;
    plan->refuses = refuses != 0;
    plan->announced = announced != 0;
    plan->only_compares = only_compares != 0;
    plan->root = static_cast<uint32_t>(root);
    const uint64_t most = std::max({plan->given, plan->taken, plan->scratch});
    const bool is_like = itemsize > 0 && root < node.ranks && (!announced || node.heads[root] != nullptr) && (contributions == 0 || plan->finish != nullptr)
        && (!in_control || (small && most <= node.workspace_bytes))
        && (PyTuple_GET_SIZE(starts) == 0 || PyTuple_GET_SIZE(starts) == 2 * (node.ranks + 1));
    if (!whole(is_like)) return false;
    const Reading reading = {plan, &node, PyTuple_GET_SIZE(*called)};
    return take_numbers(peers, &plan->peers) && take_numbers(starts, &plan->starts)
        && whole(std::all_of(plan->peers.begin(), plan->peers.end(),
                             [&](uint32_t peer) { return reading.is_near(peer) && peer != node.rank; }))
        && for_each(readers, [&](PyObject* one) { return reading.take_reader(one); })
        && for_each(instructions, [&](PyObject* one) { return reading.take_instruction(one); })
        && whole(reading.has_staging() && reading.has_blocks());
}

// Returns a plan for a node, null with an error set for one that is not whole.
static PyObject* make_plan(const Node& node, PyObject* given) {
    PlanObject* self = reinterpret_cast<PlanObject*>(plan_type.tp_alloc(&plan_type, 0));
    if (self == nullptr) return nullptr;
    bool is_whole = false;
    try {
        self->plan = new Plan();
        PyObject* called = nullptr;
        is_whole = take_plan(self->plan, node, given, &called);
        self->calls = Py_XNewRef(called);
    } catch (...) {
        set_error();
    }
    if (is_whole) return reinterpret_cast<PyObject*>(self);
    Py_DECREF(self);
    return nullptr;
}

static int traverse_plan(PyObject* object, visitproc visit, void* arg) {
    Py_VISIT(reinterpret_cast<PlanObject*>(object)->calls);
    Py_VISIT(reinterpret_cast<PlanObject*>(object)->prepared);
    return 0;
}

static int forget_plan(PyObject* object) {
    Py_CLEAR(reinterpret_cast<PlanObject*>(object)->calls);
    Py_CLEAR(reinterpret_cast<PlanObject*>(object)->prepared);
    return 0;
}

static void unmake_plan(PyObject* object) {
    PlanObject* self = reinterpret_cast<PlanObject*>(object);
    PyObject_GC_UnTrack(object);
    delete self->plan;
    Py_XDECREF(self->calls);
    Py_XDECREF(self->prepared);
    Py_TYPE(object)->tp_free(object);
}
