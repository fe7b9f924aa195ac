// Owners of references, of objects' memory, of Python's lock and of Python's errors. No other file counts references.
//
// nanobind has such owners as well, but a lack of memory ends the process there: it enters each new object in a hash
// table, below frames that must not throw. Here every lack of memory becomes a MemoryError.
#pragma once
#define PY_SSIZE_T_CLEAN
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <Python.h>
#include <numpy/arrayobject.h>

#include <cstddef>
#include <exception>
#include <new>
#include <optional>
#include <stdexcept>
#include <utility>

namespace gpucoll {

// Owns a reference to a Python object, or nothing. An old object is released last: releasing may run Python code.
template <class T = PyObject> class Ref {
  public:
    Ref() = default;
    Ref(std::nullptr_t) {}
    Ref(const Ref& other) : held(borrow(other.held).release()) {}
    Ref(Ref&& other) noexcept : held(other.release()) {}
    ~Ref() { Py_CLEAR(held); }
    Ref& operator=(Ref other) noexcept {
        std::swap(held, other.held);
        return *this;
    }

    // Take over a reference returned by a function of Python.
    static Ref steal(PyObject* object) {
        Ref made;
        made.held = reinterpret_cast<T*>(object);
        return made;
    }
    // Add a reference of one's own.
    static Ref borrow(const void* object) {
        return steal(Py_XNewRef(static_cast<PyObject*>(const_cast<void*>(object))));
    }

    T* get() const { return held; }
    T* operator->() const { return held; }
    PyObject* object() const { return reinterpret_cast<PyObject*>(held); }
    explicit operator bool() const { return held != nullptr; }
    // Give the reference away, to Python or for ever.
    T* release() { return std::exchange(held, nullptr); }

  private:
    T* held = nullptr;
};

// Thrown with Python's error set. `bordered` leaves the error to Python.
struct Raised {};

static void check_error() {
    if (PyErr_Occurred() != nullptr) throw Raised();
}

// Own a reference returned by a function of Python, null with an error set.
static Ref<> checked(PyObject* object) {
    if (object == nullptr) throw Raised();
    return Ref<>::steal(object);
}

// Check the result of PyArg_ParseTuple, and of other functions returning 0 with an error set.
static void check(int done) {
    if (done == 0) throw Raised();
}

// Raise an error of Python.
template <class... Given> [[noreturn]] static void raise(PyObject* kind, const char* text, Given... given) {
    PyErr_Format(kind, text, given...);
    throw Raised();
}

static Ref<> none() { return Ref<>::borrow(Py_None); }
static Ref<> not_implemented() { return Ref<>::borrow(Py_NotImplemented); }
static Ref<> truth(bool value) { return Ref<>::borrow(value ? Py_True : Py_False); }
static Ref<> number(long long value) { return checked(PyLong_FromLongLong(value)); }
static Ref<> address(const void* place) { return checked(PyLong_FromVoidPtr(const_cast<void*>(place))); }

// Python's error, taken away: with an error set, Python must not be called.
class Failure {
  public:
    Failure() {
        PyObject *raised[3];
        PyErr_Fetch(&raised[0], &raised[1], &raised[2]);
        PyErr_NormalizeException(&raised[0], &raised[1], &raised[2]);
        if (raised[1] != nullptr && raised[2] != nullptr) PyException_SetTraceback(raised[1], raised[2]);
        for (int i = 0; i < 3; i++) parts[i] = Ref<>::steal(raised[i]);
    }
    PyObject* error() const { return parts[1].get(); }
    void restore() { PyErr_Restore(parts[0].release(), parts[1].release(), parts[2].release()); }

  private:
    Ref<> parts[3];  // class, value, traceback
};

// Puts Python's error aside for a block, and drops errors of the block.
class KeptError {
  public:
    KeptError() {
        if (PyErr_Occurred() != nullptr) failure.emplace();
    }
    ~KeptError() {
        if (PyErr_Occurred() != nullptr) PyErr_Clear();
        if (failure) failure->restore();
    }
    KeptError(const KeptError&) = delete;

  private:
    std::optional<Failure> failure;  // most often there is no error, and the test is all
};

// Releases Python's lock for a block; the destructor takes the lock again, also after an exception.
class Unlocked {
  public:
    Unlocked() : state(PyEval_SaveThread()) {}
    ~Unlocked() { PyEval_RestoreThread(state); }
    Unlocked(const Unlocked&) = delete;

  private:
    PyThreadState* state;
};

// Holds the lock of an object for a block, where Python has no lock of its own (free threading). Like Python's lock it is
// given up while `Unlocked`, and may be given up in any call of Python: between two such calls no other thread interferes.
class Held {
  public:
#if defined(Py_GIL_DISABLED)
    explicit Held(PyObject* object) { PyCriticalSection_Begin(&section, object); }
    ~Held() { PyCriticalSection_End(&section); }
#else
    explicit Held(PyObject*) {}
    ~Held() {}
#endif
    Held(const Held&) = delete;

#if defined(Py_GIL_DISABLED)
  private:
    PyCriticalSection section;
#endif
};

// Turn the C++ exception being handled into Python's error.
static void set_error() {
    try {
        throw;
    } catch (const Raised&) {
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    } catch (const std::length_error&) {  // a vector longer than any memory
        PyErr_NoMemory();
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
}

// Return the result of a function called by Python. C++ exceptions end here: unwinding through Python's C frames is
// undefined.
template <class Function> static PyObject* bordered(Function function) noexcept {
    try {
        return function().release();
    } catch (...) {
        set_error();
        return nullptr;
    }
}

// A Python object around a C++ `State`. The state has `references`, which applies a function to each Ref of the state,
// `forget`, which breaks cycles of references, and, with methods, `guard`, the object whose lock a method holds.
template <class State> struct Object {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    bool is_made;  // `state` is constructed: false if the constructor lacked memory
    State state;
};

template <class State> static PyTypeObject type_of = {PyVarObject_HEAD_INIT(nullptr, 0)};

template <class State> static State& state_of(PyObject* object) {
    return reinterpret_cast<Object<State>*>(object)->state;
}

// Return a new object. Python's allocation is zeroed, and known to the garbage collector before the state is there.
template <class State, class... Given> static Ref<Object<State>> make_object(Given&&... given) {
    PyTypeObject* type = &type_of<State>;
    auto made = Ref<Object<State>>::steal(type->tp_alloc(type, 0));
    if (!made) throw Raised();
    new (&made->state) State(std::forward<Given>(given)...);
    made->is_made = true;
    return made;
}

template <class State> static int traverse(PyObject* object, visitproc visit, void* arg) {
    int found = 0;
    const auto look = [&](const auto& one) {
        if (found == 0 && one) found = visit(one.object(), arg);
    };
    if (reinterpret_cast<Object<State>*>(object)->is_made) state_of<State>(object).references(look);
    return found;
}

template <class State> static int forget(PyObject* object) {
    if (reinterpret_cast<Object<State>*>(object)->is_made) state_of<State>(object).forget();
    return 0;
}

template <class State> static void unmake(PyObject* object) {
    PyObject_GC_UnTrack(object);
    if (reinterpret_cast<Object<State>*>(object)->is_made) state_of<State>(object).~State();
    Py_TYPE(object)->tp_free(object);
}

// Make the type of a state; with `is_called`, objects are called through `Object::vectorcall`.
template <class State> static void make_type(const char* name, bool is_called = false) {
    PyTypeObject& type = type_of<State>;
    type.tp_name = name;
    type.tp_basicsize = sizeof(Object<State>);
    type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
    if (is_called) {
        type.tp_flags |= Py_TPFLAGS_HAVE_VECTORCALL;
        type.tp_vectorcall_offset = offsetof(Object<State>, vectorcall);
        type.tp_call = PyVectorcall_Call;
    }
    type.tp_dealloc = unmake<State>;
    type.tp_traverse = traverse<State>;
    type.tp_clear = forget<State>;
    check(PyType_Ready(&type) == 0);
}

// A method of a state with a tuple of arguments, or a single argument; or without.
template <auto function> struct Method;
template <class State, Ref<> (*function)(State&, PyObject*)> struct Method<function> {
    static PyObject* call(PyObject* object, PyObject* given) {
        return bordered([&] {
            const Held held(state_of<State>(object).guard());
            return function(state_of<State>(object), given);
        });
    }
};
template <class State, Ref<> (*function)(State&)> struct Method<function> {
    static PyObject* call(PyObject* object, PyObject*) {
        return bordered([&] {
            const Held held(state_of<State>(object).guard());
            return function(state_of<State>(object));
        });
    }
    static PyObject* get(PyObject* object, void*) { return call(object, nullptr); }
};

static bool is_array(PyObject* object) { return Py_TYPE(object) == &PyArray_Type; }

static PyArrayObject* array_of(PyObject* object) { return reinterpret_cast<PyArrayObject*>(object); }

static char* data_of(PyObject* object) {
    return is_array(object) ? static_cast<char*>(PyArray_DATA(array_of(object))) : nullptr;
}

}  // namespace gpucoll
