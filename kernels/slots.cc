// The Python type of a rank's slots: made by the executor `shared`, called by the communicator (express.h).
#include "express.h"

// begin(x, out, What, dtype's and op's places, signature, root): this rank has come to its next call, as an operation;
// both arrays stay.
static PyObject* begin_method(PyObject* object, PyObject* given) {
    Slots* self = reinterpret_cast<Slots*>(object);
    PyObject *x, *out;
    int what;
    long dtype, op;
    unsigned long long signature, root;
    Kind kind;
    if (!PyArg_ParseTuple(given, "O!O!illKK", &PyArray_Type, &x, &PyArray_Type, &out, &what, &dtype, &op, &signature,
                          &root))
        return nullptr;
    if (!kind_of(self, array_of(x), array_of(out), what, dtype, op, signature, root, &kind)) return nullptr;
    begin(self, array_of(x), array_of(out), kind);
    Py_RETURN_NONE;
}

// go_on(name): returns whether that call is done; never waits.
static PyObject* go_on_method(PyObject* object, PyObject* name) {
    Slots* self = reinterpret_cast<Slots*>(object);
    while (is_over(self->view, self->call.meeting))
        if (go_on(self)) return self->call.differs ? mismatch(self, name) : Py_NewRef(Py_True);
    Py_RETURN_FALSE;
}

// Returns the addresses in a tuple, to be freed; null with an error set.
static char** addresses(PyObject* tuple) {
    const Py_ssize_t count = PyTuple_GET_SIZE(tuple);
    char** places = static_cast<char**>(PyMem_Calloc(static_cast<size_t>(count), sizeof(char*)));
    if (places == nullptr) PyErr_NoMemory();
    for (Py_ssize_t i = 0; places != nullptr && i < count; i++) {
        places[i] = static_cast<char*>(PyLong_AsVoidPtr(PyTuple_GET_ITEM(tuple, i)));
        if (PyErr_Occurred()) {
            PyMem_Free(places);
            return nullptr;
        }
    }
    return places;
}

// reach(bytes, bases): a slab of symmetric memory, and where each rank's is here.
static PyObject* reach(PyObject* object, PyObject* given) {
    View* view = &reinterpret_cast<Slots*>(object)->view;
    unsigned long long nbytes;
    PyObject* bases;
    if (!PyArg_ParseTuple(given, "KO!", &nbytes, &PyTuple_Type, &bases)) return nullptr;
    if (view->known == MOST_SLABS) Py_RETURN_NONE;  // what lies in it is copied
    char** places = addresses(bases);
    if (places == nullptr) return nullptr;
    view->slabs[view->known++] = {nbytes, places};
    Py_RETURN_NONE;
}

// Forgets an error: all came, and one has failed since.
static PyObject* done_after_all() {
    PyErr_Clear();
    Py_RETURN_TRUE;
}

static PyObject* walk_ends(Slots* self) {
    const int done = step(self);
    if (done != 0) return done < 0 ? nullptr : Py_NewRef(Py_True);
    if (!has_failed(self, self->walker.awaited)) return PyErr_Occurred() ? nullptr : Py_NewRef(Py_False);
    PyObject *kind, *error, *trace;
    PyErr_Fetch(&kind, &error, &trace);
    const int after = step(self);
    PyErr_Restore(kind, error, trace);
    return after > 0 ? done_after_all() : nullptr;
}

// ends(): returns whether all have come to the meeting under way, or the walk has ended, after a short wait.
static PyObject* ends_method(PyObject* object, PyObject*) {
    Slots* self = reinterpret_cast<Slots*>(object);
    if (self->walker.plan != nullptr) return walk_ends(self);
    bool done;
    Py_BEGIN_ALLOW_THREADS
    done = have_come(self->view, self->call.meeting);
    Py_END_ALLOW_THREADS
    if (done) Py_RETURN_TRUE;
    if (!has_failed(self, -1)) return PyErr_Occurred() ? nullptr : Py_NewRef(Py_False);
    return is_over(self->view, self->call.meeting) ? done_after_all() : nullptr;
}

// refuse(): this rank has refused a call: others that made it are not in its next one.
static PyObject* refuse(PyObject* object, PyObject*) {
    reinterpret_cast<Slots*>(object)->refusals++;
    Py_RETURN_NONE;
}

// wake(): this rank has shown a mark; who sleeps until it does goes on.
static PyObject* wake(PyObject* object, PyObject*) {
    const Node& node = reinterpret_cast<Slots*>(object)->node;
    futex(low(&node.heads[node.rank]->mark), FUTEX_WAKE, INT_MAX, nullptr);
    Py_RETURN_NONE;
}

// follow(acquire, release, queue, waits, watch, errors): what calls here must keep to (see `Waits.gate`), and a function
// that raises one of the class `errors` if another rank has failed, or given an error tells the others of it.
static PyObject* follow(PyObject* object, PyObject* given) {
    Slots* self = reinterpret_cast<Slots*>(object);
    PyObject *acquire, *release, *queue, *waits, *watch, *errors;
    if (!PyArg_ParseTuple(given, "OOOOOO", &acquire, &release, &queue, &waits, &watch, &errors)) return nullptr;
    Py_XSETREF(self->acquire, Py_NewRef(acquire));
    Py_XSETREF(self->release, Py_NewRef(release));
    Py_XSETREF(self->queue, Py_NewRef(queue));
    Py_XSETREF(self->waits, Py_NewRef(waits));
    Py_XSETREF(self->watch, Py_NewRef(watch));
    Py_XSETREF(self->errors, Py_NewRef(errors));
    Py_RETURN_NONE;
}

// Slots(rank, areas, spins, yields, bytes of a slot, heads, boards, progress): one rank's part in the exchanges of its
// communicator. `areas` are the addresses of all ranks' parts, `heads` and `boards` those in their control segments,
// `progress` is that of this rank's own words.
static PyObject* make(PyTypeObject* type, PyObject* given, PyObject*) {
    unsigned long long rank, spins, yields, slot, progress;
    PyObject *areas, *heads, *boards;
    if (!PyArg_ParseTuple(given, "KO!KKKO!O!K", &rank, &PyTuple_Type, &areas, &spins, &yields, &slot, &PyTuple_Type,
                          &heads, &PyTuple_Type, &boards, &progress))
        return nullptr;
    Slots* self = reinterpret_cast<Slots*>(type->tp_alloc(type, 0));
    if (self == nullptr) return nullptr;
    View* view = &self->view;
    self->vectorcall = call;
    view->ranks = static_cast<uint64_t>(PyTuple_GET_SIZE(areas));
    view->rank = rank;
    view->spins = spins;
    view->yields = yields;
    view->slot = slot;
    view->areas = addresses(areas);
    self->node = {rank, view->ranks, spins, yields, reinterpret_cast<Head**>(addresses(heads)),
                  reinterpret_cast<int64_t**>(addresses(boards)), reinterpret_cast<int64_t*>(pointer(progress))};
    self->call.sources = static_cast<const char**>(PyMem_Calloc(view->ranks, sizeof(char*)));
    self->entries = static_cast<Entry*>(PyMem_Calloc(ENTRIES, sizeof(Entry)));
    if (self->call.sources == nullptr || self->entries == nullptr || self->node.heads == nullptr
        || self->node.boards == nullptr)
        PyErr_NoMemory();
    if (PyErr_Occurred()) {
        Py_DECREF(self);
        return nullptr;
    }
    view->line = reinterpret_cast<Line*>(view->areas[0]);
    return reinterpret_cast<PyObject*>(self);
}

// For Python's collector: these objects, the executor and the communicator hold each other.
static int traverse(PyObject* object, visitproc visit, void* arg) {
    Slots* self = reinterpret_cast<Slots*>(object);
    for (Entry* entry = self->entries; entry != nullptr && entry < self->entries + ENTRIES; entry++) {
        for (PyObject* option : entry->options) Py_VISIT(option);
        Py_VISIT(entry->x.dtype);
        Py_VISIT(entry->out.dtype);
        Py_VISIT(entry->seconds);
        Py_VISIT(entry->walk);
        Py_VISIT(entry->telling);
    }
    PyObject* const owned[] = {self->acquire, self->release, self->queue, self->waits, self->watch, self->errors};
    for (PyObject* one : owned) Py_VISIT(one);
    return 0;
}

static int forget(PyObject* object) {
    Slots* self = reinterpret_cast<Slots*>(object);
    for (Entry* entry = self->entries; entry != nullptr && entry < self->entries + ENTRIES; entry++) {
        for (PyObject*& option : entry->options) Py_CLEAR(option);
        Py_CLEAR(entry->x.dtype);
        Py_CLEAR(entry->out.dtype);
        Py_CLEAR(entry->seconds);
        Py_CLEAR(entry->walk);
        Py_CLEAR(entry->telling);
    }
    if (self->under_way > 0) return 0;
    Py_CLEAR(self->acquire);
    Py_CLEAR(self->release);
    Py_CLEAR(self->queue);
    Py_CLEAR(self->waits);
    Py_CLEAR(self->watch);
    Py_CLEAR(self->errors);
    return 0;
}

// close(): no call is known here any more; the ranks' memory may go, and with it all that holds it.
static PyObject* close_method(PyObject* object, PyObject*) {
    reinterpret_cast<Slots*>(object)->closed = true;
    forget(object);
    Py_RETURN_NONE;
}

static void unmake(PyObject* object) {
    Slots* self = reinterpret_cast<Slots*>(object);
    PyObject_GC_UnTrack(object);
    forget(object);
    PyMem_Free(self->entries);
    for (uint64_t slab = 0; slab < self->view.known; slab++) PyMem_Free(self->view.slabs[slab].bases);
    PyMem_Free(self->view.areas);
    PyMem_Free(self->node.heads);
    PyMem_Free(self->node.boards);
    PyMem_Free(self->call.sources);
    Py_TYPE(object)->tp_free(object);
}

static PyObject* calls(PyObject* object, void*) {
    return PyLong_FromUnsignedLongLong(reinterpret_cast<Slots*>(object)->call.turn);
}

static PyObject* walks(PyObject* object, void*) {
    return PyLong_FromUnsignedLongLong(reinterpret_cast<Slots*>(object)->walks);
}

static PyObject* is_busy(PyObject* object, PyObject*) {
    return PyBool_FromLong(reinterpret_cast<Slots*>(object)->under_way);
}

static PyMethodDef methods[] = {{"begin", begin_method, METH_VARARGS, nullptr},
                                {"close", close_method, METH_NOARGS, nullptr},
                                {"ends", ends_method, METH_NOARGS, nullptr},
                                {"go_on", go_on_method, METH_O, nullptr},
                                {"follow", follow, METH_VARARGS, nullptr},
                                {"is_busy", is_busy, METH_NOARGS, nullptr},
                                {"learn", learn, METH_VARARGS, nullptr},
                                {"reach", reach, METH_VARARGS, nullptr},
                                {"refuse", refuse, METH_NOARGS, nullptr},
                                {"tell", tell, METH_VARARGS, nullptr},
                                {"wake", wake, METH_NOARGS, nullptr},
                                {nullptr, nullptr, 0, nullptr}};
static PyGetSetDef members[] = {{"calls", calls, nullptr, nullptr, nullptr},
                                {"walks", walks, nullptr, nullptr, nullptr},
                                {nullptr, nullptr, nullptr, nullptr, nullptr}};
static PyTypeObject slots_type = {PyVarObject_HEAD_INIT(nullptr, 0)};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "slots", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit_slots() {
    import_array();
    failure_name = PyUnicode_InternFromString("failure");
    owner_name = PyUnicode_InternFromString("_owner");
    linger_name = PyUnicode_InternFromString("linger");
    broken_name = PyUnicode_InternFromString("broken");
    mismatch_name = PyUnicode_InternFromString("mismatch");
    slots_type.tp_name = "slots.Slots";
    slots_type.tp_basicsize = sizeof(Slots);
    slots_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_HAVE_GC;
    slots_type.tp_vectorcall_offset = offsetof(Slots, vectorcall);
    slots_type.tp_call = PyVectorcall_Call;
    slots_type.tp_new = make;
    slots_type.tp_dealloc = unmake;
    slots_type.tp_traverse = traverse;
    slots_type.tp_clear = forget;
    slots_type.tp_methods = methods;
    slots_type.tp_getset = members;
    walk_type.tp_name = "slots.Walk";
    walk_type.tp_basicsize = sizeof(Walk);
    walk_type.tp_flags = Py_TPFLAGS_DEFAULT;
    walk_type.tp_new = make_walk;
    walk_type.tp_dealloc = unmake_walk;
    PyObject* made = PyModule_Create(&module);
    if (made == nullptr || PyType_Ready(&slots_type) < 0 || PyType_Ready(&walk_type) < 0) return nullptr;
    Py_INCREF(&walk_type);
    PyModule_AddObject(made, "Walk", reinterpret_cast<PyObject*>(&walk_type));
    Py_INCREF(&slots_type);
    PyModule_AddObject(made, "Slots", reinterpret_cast<PyObject*>(&slots_type));
    return made;
}
