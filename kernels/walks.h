// Plans as Python makes them, from tuples of numbers; one that is not whole is refused.
#pragma once
#define PY_SSIZE_T_CLEAN
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <Python.h>
#include <numpy/arrayobject.h>

#include <new>

#include "engine.h"

static bool is_array(PyObject* object) { return Py_TYPE(object) == &PyArray_Type; }

static PyArrayObject* array_of(PyObject* object) { return reinterpret_cast<PyArrayObject*>(object); }

// A plan as Python holds it.
struct Walk {
    PyObject_HEAD
    Plan* plan;
    PyObject* kept;  // whose memory it works on
};

static PyTypeObject walk_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

static char* pointer(unsigned long long address) { return reinterpret_cast<char*>(static_cast<uintptr_t>(address)); }

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

static bool is_mark(long long mark) { return mark >= 0 && mark < 1LL << ROUNDS; }

// Takes (AWAIT, peer, mark, 0, ()), (SIGNAL, 0, mark, 0, ()) or (FORM, address, 0, bytes, addresses).
static bool take_instruction(Program* program, const Plan& plan, uint64_t ranks, PyObject* given) {
    int opcode;
    unsigned long long what, nbytes;
    long long mark;
    PyObject* sources;
    if (!PyTuple_Check(given)) return whole(false);
    if (!PyArg_ParseTuple(given, "iKLKO!", &opcode, &what, &mark, &nbytes, &PyTuple_Type, &sources)) return false;
    const Py_ssize_t count = PyTuple_GET_SIZE(sources);
    Instruction one = {static_cast<Instruction::Opcode>(opcode), 0, static_cast<uint32_t>(program->sources.size()),
                       static_cast<uint32_t>(count), mark, nullptr, nbytes};
    if (opcode == Instruction::FORM) {
        one.to = pointer(what);
        if (!whole(what != 0 && nbytes > 0 && count > 0 && (count == 1 || plan.combine != nullptr))) return false;
    } else {
        one.peer = static_cast<uint32_t>(what);
        if (!whole((opcode == Instruction::AWAIT || opcode == Instruction::SIGNAL) && what < ranks && is_mark(mark)))
            return false;
    }
    program->instructions.push_back(one);
    return for_each(sources, [program](PyObject* source) {
        const unsigned long long from = PyLong_AsUnsignedLongLong(source);
        if (!whole(!PyErr_Occurred() && from != 0)) return false;
        program->sources.push_back(pointer(from));
        return true;
    });
}

// Takes (address of the input, of the output, the board, instructions).
static bool take_program(Program* program, const Plan& plan, uint64_t ranks, PyObject* given) {
    unsigned long long input, output;
    PyObject *board, *instructions;
    if (!PyTuple_Check(given)) return whole(false);
    if (!PyArg_ParseTuple(given, "KKO!O!", &input, &output, &PyTuple_Type, &board, &PyTuple_Type, &instructions))
        return false;
    program->input = pointer(input);
    program->output = pointer(output);
    if (!whole(PyTuple_GET_SIZE(board) == BOARD - 1)) return false;
    int64_t* word = program->board;
    return for_each(board, [&word](PyObject* one) {
        *word++ = PyLong_AsLongLong(one);
        return !PyErr_Occurred();
    }) && for_each(instructions, [&](PyObject* one) { return take_instruction(program, plan, ranks, one); });
}

static bool take_plan(Plan* plan, PyObject* given, PyObject** kept) {
    unsigned long long given_bytes, taken, contributions, root, ranks;
    long kind, op;
    int overwrites;
    long long signature;
    PyObject *peers, *readers, *programs;
    if (!PyArg_ParseTuple(given, "KLKKllKpKO!O!O!O", &ranks, &signature, &given_bytes, &taken, &kind, &op,
                          &contributions, &overwrites, &root, &PyTuple_Type, &peers, &PyTuple_Type, &readers,
                          &PyTuple_Type, &programs, kept))
        return false;
    plan->signature = signature;
    plan->given = given_bytes;
    plan->taken = taken;
    plan->combine = combine_of(kind, op);
    plan->contributions = contributions;
    plan->divide = contributions > 0 ? divide_of(kind) : nullptr;
    plan->overwrites = overwrites != 0;
    plan->root = root;
    if (!whole(PyTuple_GET_SIZE(programs) == 2 && root < ranks && (contributions == 0 || plan->divide != nullptr)))
        return false;
    Program* program = plan->programs;
    return for_each(peers, [&](PyObject* one) {
        const unsigned long long peer = PyLong_AsUnsignedLongLong(one);
        if (!whole(!PyErr_Occurred() && peer < ranks)) return false;
        plan->peers.push_back(static_cast<uint32_t>(peer));
        return true;
    }) && for_each(readers, [&](PyObject* one) {
        unsigned long long peer;
        long long mark;
        if (!whole(PyTuple_Check(one)) || !PyArg_ParseTuple(one, "KL", &peer, &mark)) return false;
        if (!whole(peer < ranks && is_mark(mark))) return false;
        plan->readers.push_back({static_cast<uint32_t>(peer), mark});
        return true;
    }) && for_each(programs, [&](PyObject* one) { return take_program(program++, *plan, ranks, one); });
}

// Walk(ranks, signature, bytes given, bytes taken, dtype's and op's places, of how many it is the mean or 0, whether it
// overwrites what it is given, root, peers, (reader, mark) pairs, two programs, what is kept): one rank's plan.
static PyObject* make_walk(PyTypeObject* type, PyObject* given, PyObject*) {
    Walk* self = reinterpret_cast<Walk*>(type->tp_alloc(type, 0));
    if (self == nullptr) return nullptr;
    bool is_whole = false;
    try {
        self->plan = new Plan();
        PyObject* kept = Py_None;
        is_whole = take_plan(self->plan, given, &kept);
        self->kept = Py_NewRef(kept);
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    }
    if (is_whole) return reinterpret_cast<PyObject*>(self);
    Py_DECREF(self);
    return nullptr;
}

static void unmake_walk(PyObject* object) {
    Walk* self = reinterpret_cast<Walk*>(object);
    delete self->plan;
    Py_XDECREF(self->kept);
    Py_TYPE(object)->tp_free(object);
}

// Whether a plan is for such arrays.
static bool fits(const Plan* plan, PyObject* x, PyObject* out) {
    const Program& program = plan->programs[0];
    const bool gives = is_array(x) && static_cast<uint64_t>(PyArray_NBYTES(array_of(x))) == plan->given;
    const bool takes = is_array(out) && static_cast<uint64_t>(PyArray_NBYTES(array_of(out))) == plan->taken;
    return (program.input == nullptr || gives) && (program.output == nullptr || takes);
}
