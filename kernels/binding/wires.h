// Wires for the engine, in capsules: between threads, by MPI, and by Python's messages. binding/ucx.cc has one more.
#pragma once
#include <dlfcn.h>

#include "binding/owners.h"
#include "binding/python_wire.h"
#include "engine/mpi_wire.h"
#include "engine/thread_wire.h"

namespace gpucoll {

static const char POST[] = "gpucoll.Post";

// Return a capsule with a wire. The engine casts the pointer to `Wire`.
template <class Made> static Ref<> wire_of(std::unique_ptr<Made> made) {
    const auto unmake = [](PyObject* capsule) { delete static_cast<Made*>(static_cast<Wire*>(PyCapsule_GetPointer(capsule, WIRE))); };
    Ref<> capsule = checked(PyCapsule_New(static_cast<Wire*>(made.get()), WIRE, unmake));
    made.release();
    return capsule;
}

// post(ranks): return a capsule with the messages between `ranks` threads.
static Ref<> make_post(PyObject* ranks) {
    const unsigned long count = PyLong_AsUnsignedLong(ranks);
    check_error();
    auto made = std::make_unique<std::shared_ptr<Post>>(std::make_shared<Post>(static_cast<uint32_t>(count)));
    const auto unmake = [](PyObject* capsule) { delete static_cast<std::shared_ptr<Post>*>(PyCapsule_GetPointer(capsule, POST)); };
    Ref<> capsule = checked(PyCapsule_New(made.get(), POST, unmake));
    made.release();
    return capsule;
}

// thread_wire(post, rank): return the wire of a rank.
static Ref<> thread_wire(PyObject* given) {
    PyObject* post;
    unsigned long rank;
    check(PyArg_ParseTuple(given, "Ok", &post, &rank));
    const auto* shared = static_cast<std::shared_ptr<Post>*>(PyCapsule_GetPointer(post, POST));
    check_error();
    return wire_of(std::make_unique<ThreadWire>(*shared, static_cast<uint32_t>(rank)));
}

template <class Handle> static Ref<> wire_by(void* library, uintptr_t comm, uintptr_t byte, size_t status_bytes, uint64_t most, bool matches) {
    const typename MpiWire<Handle>::Functions functions([&](const char* name) {
        void* function = dlsym(library, name);
        if (function == nullptr) raise(PyExc_ImportError, "this MPI has no %s", name);
        return function;
    });
    // A pointer has as many bits as the number; a handle of 32 bits is the lower half.
    return wire_of(std::make_unique<MpiWire<Handle>>(functions, (Handle)comm, (Handle)byte, status_bytes, most, matches));
}

// mpi_wire(path, comm, byte, bytes of a handle, bytes of a status, most, matches): return a wire by the MPI to which the
// loaded module at `path` is linked. `comm` and `byte` are handles; see `MpiWire`.
static Ref<> mpi_wire(PyObject* given) {
    const char* path;
    unsigned long long comm, byte, handle_bytes, status_bytes, most;
    int matches;
    check(PyArg_ParseTuple(given, "sKKKKKp", &path, &comm, &byte, &handle_bytes, &status_bytes, &most, &matches));
    // A search from this module on finds the functions that mpi4py itself calls, also with several MPIs in the process.
    void* library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr) raise(PyExc_ImportError, "%s is not loaded", path);
    if (handle_bytes != sizeof(int) && handle_bytes != sizeof(void*)) raise(PyExc_ImportError, "an MPI with handles of %llu bytes", handle_bytes);
    return (handle_bytes == sizeof(int) ? wire_by<int> : wire_by<void*>)(library, comm, byte, status_bytes, most, matches != 0);
}

// python_wire(comm, most): return a wire by the messages of `comm`; see `PythonWire`.
static Ref<> python_wire(PyObject* given) {
    PyObject* comm;
    unsigned long long most;
    check(PyArg_ParseTuple(given, "OK", &comm, &most));
    return wire_of(std::make_unique<PythonWire>(comm, most));
}

}  // namespace gpucoll
