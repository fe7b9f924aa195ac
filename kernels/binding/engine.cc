// The Python type `Engine`, one object per rank and communicator. The executor `shared` makes the object and drives
// its methods; the communicator calls the object itself for known calls (calls.h).
#include "binding/messages.h"

namespace gpucoll {

// plan(...): return a plan, checked; for the arguments see `take_plan`.
static PyObject* plan_method(PyObject* object, PyObject* given) {
    return make_plan(reinterpret_cast<Engine*>(object)->node, given);
}

// begin(plan, x, out): begin the next call, to be continued by `go_on` or `ends`. The caller keeps the arrays alive.
static PyObject* begin_method(PyObject* object, PyObject* given) {
    Engine* self = reinterpret_cast<Engine*>(object);
    PyObject *planned, *x, *out;
    if (!PyArg_ParseTuple(given, "O!OO", &plan_type, &planned, &x, &out)) return nullptr;
    if (!fits(reinterpret_cast<PlanObject*>(planned)->plan, x, out)) {
        PyErr_SetString(PyExc_ValueError, "a plan for other arrays");
        return nullptr;
    }
    begin(self, reinterpret_cast<PlanObject*>(planned), x, out, false);
    Py_RETURN_NONE;
}

// Continue the call under way; return True once complete, also if no call is under way.
static PyObject* go_on_as(Engine* self, bool patient) {
    const int done = self->walker.plan == nullptr ? 1 : go_on(self, patient);
    return done < 0 ? nullptr : PyBool_FromLong(done);
}

// go_on(): return whether the call under way is complete; never wait.
static PyObject* go_on_method(PyObject* object, PyObject*) { return go_on_as(reinterpret_cast<Engine*>(object), false); }

// ends(): wait a short time; return whether the call under way is complete.
static PyObject* ends_method(PyObject* object, PyObject*) { return go_on_as(reinterpret_cast<Engine*>(object), true); }

// symmetric(key, address, bytes): register a slab of this rank's symmetric memory.
static PyObject* symmetric_method(PyObject* object, PyObject* given) {
    Node& node = reinterpret_cast<Engine*>(object)->node;
    long long key;
    unsigned long long start, nbytes;
    if (!PyArg_ParseTuple(given, "LKK", &key, &start, &nbytes)) return nullptr;
    node.symmetric.add({node.rank, key, reinterpret_cast<char*>(static_cast<uintptr_t>(start)), nbytes});
    Py_RETURN_NONE;
}

// attach(rank, key, address, bytes): register another rank's segment, mapped at `address` in this process.
static PyObject* attach_method(PyObject* object, PyObject* given) {
    Node& node = reinterpret_cast<Engine*>(object)->node;
    unsigned long rank;
    long long key;
    unsigned long long start, nbytes;
    if (!PyArg_ParseTuple(given, "kLKK", &rank, &key, &start, &nbytes)) return nullptr;
    const Segment one = {static_cast<uint32_t>(rank), key, reinterpret_cast<char*>(static_cast<uintptr_t>(start)), nbytes};
    Segment found;
    if (!node.others.of(one.rank, key, &found)) node.others.add(one);
    Py_RETURN_NONE;
}

// staging(buffer, key, address, bytes): register a larger staging buffer of this rank. A call under way keeps its old
// one.
static PyObject* staging_method(PyObject* object, PyObject* given) {
    Node& node = reinterpret_cast<Engine*>(object)->node;
    unsigned long buffer;
    long long key;
    unsigned long long start, nbytes;
    if (!PyArg_ParseTuple(given, "kLKK", &buffer, &key, &start, &nbytes)) return nullptr;
    if (buffer >= SHOWN) return PyErr_Format(PyExc_ValueError, "no buffer %lu", buffer);
    if (nbytes < node.staging_bytes(static_cast<uint32_t>(buffer))) return PyErr_Format(PyExc_ValueError, "plans may need the larger one");
    // A deque never moves its elements, so old pointers stay valid. The release store comes after the element is
    // complete.
    node.all_staging.push_back({node.rank, key, reinterpret_cast<char*>(static_cast<uintptr_t>(start)), nbytes});
    node.staging[buffer].store(&node.all_staging.back(), std::memory_order_release);
    Py_RETURN_NONE;
}

// Return a rank's words. Truncation may split a character, hence "replace".
static PyObject* text_of(const char* text) {
    return PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(strnlen(text, TEXT)), "replace");
}

// Parse a same-node rank and a call number; return false with an error set.
static bool take_call(const Node& node, PyObject* given, uint32_t* rank, uint64_t* number) {
    unsigned long of;
    unsigned long long which;
    if (!PyArg_ParseTuple(given, "kK", &of, &which)) return false;
    *rank = static_cast<uint32_t>(of);
    *number = which;
    if (of < node.ranks && node.heads[of] != nullptr) return true;
    PyErr_Format(PyExc_ValueError, "no rank %lu here", of);
    return false;
}

// description(rank, number): describe a rank's call; after `add_call_site`, with a second line: the call site.
static PyObject* description(PyObject* object, PyObject* given) {
    const Node& node = reinterpret_cast<Engine*>(object)->node;
    uint32_t rank;
    uint64_t number;
    return take_call(node, given, &rank, &number) ? text_of(node.description(rank, number)) : nullptr;
}

// is_eager(rank, number): return whether a call was eager on a same-node rank.
static PyObject* is_eager_method(PyObject* object, PyObject* given) {
    const Node& node = reinterpret_cast<Engine*>(object)->node;
    uint32_t rank;
    uint64_t number;
    return take_call(node, given, &rank, &number) ? PyBool_FromLong(node.is_eager(rank, number)) : nullptr;
}

// next_call(rank): return the call that comes next on this rank, in words, as shown by `rank`. "" means: `rank`
// itself waits for another rank to show the call. None means: `rank` has not come to this call.
static PyObject* next_call(PyObject* object, PyObject* given) {
    const Node& node = reinterpret_cast<Engine*>(object)->node;
    const unsigned long rank = PyLong_AsUnsignedLong(given);
    if (PyErr_Occurred()) return nullptr;
    if (rank >= node.ranks || node.heads[rank] == nullptr) return PyErr_Format(PyExc_ValueError, "no rank %lu here", rank);
    const int64_t base = static_cast<int64_t>(node.call_count + 1) << ROUNDS;
    // Store before loading, seq_cst: of two ranks waiting for each other at least one notices (`is_listening`).
    node.heads[node.rank]->listens.store(base, std::memory_order_seq_cst);
    if (node.heads[rank]->counter.load(std::memory_order_acquire) >= base) {
        return text_of(node.description(static_cast<uint32_t>(rank), node.call_count + 1));
    }
    return is_listening(node, static_cast<uint32_t>(rank), base) ? PyUnicode_FromString("") : Py_NewRef(Py_None);
}

// record(address, offset of the last call's number, offset of the records, how many): write flight records from now
// on.
static PyObject* record(PyObject* object, PyObject* given) {
    unsigned long long start, last, records, capacity;
    if (!PyArg_ParseTuple(given, "KKKK", &start, &last, &records, &capacity)) return nullptr;
    char* memory = reinterpret_cast<char*>(static_cast<uintptr_t>(start));
    Flight& flight = reinterpret_cast<Engine*>(object)->node.flight;
    flight.last = reinterpret_cast<std::atomic<uint64_t>*>(memory + last);
    flight.capacity = capacity;
    flight.records = reinterpret_cast<FlightRecord*>(memory + records);
    Py_RETURN_NONE;
}

// awaited(): return the rank awaited by the call under way, or None. The calling thread may be without a processor: a
// rank whose counter has come meanwhile is not awaited, and may be in its next call.
static PyObject* awaited(PyObject* object, PyObject*) {
    const Engine* self = reinterpret_cast<const Engine*>(object);
    const Walker& walker = self->walker;
    const Head* head = walker.plan == nullptr ? nullptr : self->node.heads[walker.awaited];
    if (head == nullptr || head->counter.load(std::memory_order_acquire) >= walker.needed) Py_RETURN_NONE;
    return PyLong_FromUnsignedLong(walker.awaited);
}

// add_call_site(where): after a mismatch, show the other ranks where in the program this rank makes its call.
static PyObject* add_call_site(PyObject* object, PyObject* where) {
    Engine* self = reinterpret_cast<Engine*>(object);
    const char* text = PyUnicode_AsUTF8(where);
    if (text == nullptr) return nullptr;
    if (self->walker.plan != nullptr) self->walker.add_call_site(self->node, text);
    Py_RETURN_NONE;
}

// calling(): return the number of the call whose prepared function is running (see `call_prepared`), or 0.
static PyObject* calling(PyObject* object, PyObject*) {
    return PyLong_FromUnsignedLongLong(reinterpret_cast<Engine*>(object)->calling);
}

// settle(): cancel the call under way. All ranks know, and no data moved.
static PyObject* settle(PyObject* object, PyObject*) {
    Engine* self = reinterpret_cast<Engine*>(object);
    if (self->walker.plan != nullptr) self->walker.settle(self->node);
    Py_RETURN_NONE;
}

// bind_progress(acquire, release, queue, messages under way, waits, errors): set the rules honoured by calls made here,
// a lock and two queues (see `Progress.gate`), and the class of the executor's errors.
static PyObject* bind_progress(PyObject* object, PyObject* given) {
    Engine* self = reinterpret_cast<Engine*>(object);
    PyObject *acquire, *release, *queue, *alone, *waits, *errors;
    if (!PyArg_ParseTuple(given, "OOOOOO", &acquire, &release, &queue, &alone, &waits, &errors)) return nullptr;
    Py_XSETREF(self->alone, Py_NewRef(alone));
    Py_XSETREF(self->acquire, Py_NewRef(acquire));
    Py_XSETREF(self->release, Py_NewRef(release));
    Py_XSETREF(self->queue, Py_NewRef(queue));
    Py_XSETREF(self->waits, Py_NewRef(waits));
    Py_XSETREF(self->errors, Py_NewRef(errors));
    Py_RETURN_NONE;
}

// Engine(executor, errors, rank, check, process, spins, copies, first, workspace_bytes, boxes, heads, keys,
// processes). `check` says with which ranks calls are compared. `first` and `boxes` are the offsets of workspaces and
// mailboxes in a control segment. `heads`, `keys` and `processes` are by rank: addresses of control segments (0 for
// remote ranks), keys of these segments, process numbers.
static PyObject* make(PyTypeObject* type, PyObject* given, PyObject*) {
    PyObject *executor, *errors, *heads, *keys, *processes;
    unsigned long rank;
    int process, spins, copies;
    unsigned int check;
    unsigned long long first, workspace_bytes, boxes;
    if (!PyArg_ParseTuple(given, "OOkIippKKKO!O!O!", &executor, &errors, &rank, &check, &process, &spins, &copies, &first,
                          &workspace_bytes, &boxes, &PyTuple_Type, &heads, &PyTuple_Type, &keys, &PyTuple_Type, &processes))
        return nullptr;
    Engine* self = reinterpret_cast<Engine*>(type->tp_alloc(type, 0));
    if (self == nullptr) return nullptr;
    Owned made(reinterpret_cast<PyObject*>(self));
    self->vectorcall = bordered<call>;
    new (&self->walker) Walker();
    new (&self->mail) Mailbox();
    new (&self->dropped) decltype(self->dropped)();
    // Last: if this constructor throws, `is_made` stays false, and the members before own nothing yet.
    Node& node = *new (&self->node) Node();
    self->is_made = true;
    // Reserved here, since appending happens inside garbage collections and must not throw.
    self->dropped.reserve(MOST_DROPPED);
    node.rank = static_cast<uint32_t>(rank);
    node.ranks = static_cast<uint32_t>(PyTuple_GET_SIZE(heads));
    node.check = static_cast<Check>(std::min(check, static_cast<unsigned int>(ALL)));
    node.process = process;
    node.spins = spins != 0;
    node.copies = copies != 0;
    node.first = first;
    node.workspace_bytes = workspace_bytes;
    self->executor = Py_NewRef(executor);
    self->errors = Py_NewRef(errors);
    for (std::vector<int64_t>& counters : node.unread) counters.resize(node.ranks);
    for_each(heads, [&](PyObject* one) {
        node.heads.push_back(static_cast<Head*>(PyLong_AsVoidPtr(one)));
        return !PyErr_Occurred();
    }) && take_numbers(keys, &node.keys) && take_numbers(processes, &node.processes);
    if (!PyErr_Occurred() && (rank >= node.ranks || node.keys.size() != node.ranks || node.processes.size() != node.ranks))
        PyErr_SetString(PyExc_ValueError, "an engine of ranks that are not there");
    for (uint32_t other = 0; !PyErr_Occurred() && other < node.ranks; other++)
        if (other != node.rank && node.heads[other] != nullptr) node.same_node.push_back(other);
    if (PyErr_Occurred()) return nullptr;
    self->mail.open(node, boxes);
    return made.release();
}

// Visit all references for Python's collector: engine, executor and communicator refer to each other.
static int traverse(PyObject* object, visitproc visit, void* arg) {
    Engine* self = reinterpret_cast<Engine*>(object);
    for (Entry& entry : self->entries) {
        for (PyObject* option : entry.options) Py_VISIT(option);
        Py_VISIT(entry.x.dtype);
        Py_VISIT(entry.out.dtype);
        Py_VISIT(entry.seconds);
        Py_VISIT(entry.plan);
    }
    PyObject* const owned[] = {self->acquire, self->release, self->queue, self->waits, self->alone, self->executor, self->errors,
                               reinterpret_cast<PyObject*>(self->current)};
    for (PyObject* one : owned) Py_VISIT(one);
    return 0;
}

// Clear all references, but during a call only the table: the call under way uses the rest.
static int forget(PyObject* object) {
    Engine* self = reinterpret_cast<Engine*>(object);
    for (Entry& entry : self->entries) forget_entry(&entry);
    if (self->under_way > 0) return 0;
    Py_CLEAR(self->acquire);
    Py_CLEAR(self->release);
    Py_CLEAR(self->queue);
    Py_CLEAR(self->waits);
    Py_CLEAR(self->alone);
    Py_CLEAR(self->executor);
    Py_CLEAR(self->errors);
    Py_CLEAR(self->current);
    if (self->is_made) self->walker.plan = nullptr;
    return 0;
}

// close(): forget all known calls. A call under way may still be completed.
static PyObject* close_method(PyObject* object, PyObject*) {
    Engine* self = reinterpret_cast<Engine*>(object);
    self->closed = true;
    for (Entry& entry : self->entries) forget_entry(&entry);
    Py_RETURN_NONE;
}

static void unmake(PyObject* object) {
    Engine* self = reinterpret_cast<Engine*>(object);
    PyObject_GC_UnTrack(object);
    forget(object);
    if (self->is_made) {
        self->walker.~Walker();
        self->mail.~Mailbox();
        self->dropped.~vector();
        self->node.~Node();
    }
    Py_TYPE(object)->tp_free(object);
}

static PyObject* call_count(PyObject* object, void*) {
    return PyLong_FromUnsignedLongLong(reinterpret_cast<Engine*>(object)->node.call_count);
}

static PyObject* thread_of(PyObject* object, void*) { return PyLong_FromLong(reinterpret_cast<Engine*>(object)->thread); }

// is_walking(): return whether a call is under way, in this thread or another.
static PyObject* is_walking(PyObject* object, PyObject*) {
    const Engine* self = reinterpret_cast<Engine*>(object);
    return PyBool_FromLong(self->under_way > 0 || self->walker.plan != nullptr);
}

// is_busy(): return whether a call made here, not by `Progress.run`, is under way.
static PyObject* is_busy(PyObject* object, PyObject*) {
    return PyBool_FromLong(reinterpret_cast<Engine*>(object)->under_way);
}

static PyMethodDef methods[] = {{"attach", bordered<attach_method>, METH_VARARGS, nullptr},
                                {"awaited", bordered<awaited>, METH_NOARGS, nullptr},
                                {"bind", bordered<bind>, METH_VARARGS, nullptr},
                                {"begin", bordered<begin_method>, METH_VARARGS, nullptr},
                                {"calling", bordered<calling>, METH_NOARGS, nullptr},
                                {"close", bordered<close_method>, METH_NOARGS, nullptr},
                                {"ends", bordered<ends_method>, METH_NOARGS, nullptr},
                                {"exchange", reinterpret_cast<PyCFunction>(bordered<exchange, PyObject*, PyObject* const*, Py_ssize_t>), METH_FASTCALL, nullptr},
                                {"bind_progress", bordered<bind_progress>, METH_VARARGS, nullptr},
                                {"go_on", bordered<go_on_method>, METH_NOARGS, nullptr},
                                {"is_busy", bordered<is_busy>, METH_NOARGS, nullptr},
                                {"is_eager", bordered<is_eager_method>, METH_VARARGS, nullptr},
                                {"is_walking", bordered<is_walking>, METH_NOARGS, nullptr},
                                {"cache_call", bordered<cache_call>, METH_VARARGS, nullptr},
                                {"message", bordered<message>, METH_VARARGS, nullptr},
                                {"next_call", bordered<next_call>, METH_O, nullptr},
                                {"plan", bordered<plan_method>, METH_VARARGS, nullptr},
                                {"probe", bordered<probe>, METH_VARARGS, nullptr},
                                {"record", bordered<record>, METH_VARARGS, nullptr},
                                {"staging", bordered<staging_method>, METH_VARARGS, nullptr},
                                {"settle", bordered<settle>, METH_NOARGS, nullptr},
                                {"symmetric", bordered<symmetric_method>, METH_VARARGS, nullptr},
                                {"add_call_site", bordered<add_call_site>, METH_O, nullptr},
                                {"description", bordered<description>, METH_VARARGS, nullptr},
                                {nullptr, nullptr, 0, nullptr}};
static PyGetSetDef members[] = {{"thread", thread_of, nullptr, nullptr, nullptr},
                                {"call_count", call_count, nullptr, nullptr, nullptr},
                                {nullptr, nullptr, nullptr, nullptr, nullptr}};
static PyTypeObject engine_type = {PyVarObject_HEAD_INIT(nullptr, 0)};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_engine", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};

}  // namespace gpucoll

// Make the module. `sources` is the digest of the source files: Python refuses a module built from other files.
PyMODINIT_FUNC PyInit__engine() {
    using namespace gpucoll;
    import_array();
    failure_name = PyUnicode_InternFromString("failure");
    owner_name = PyUnicode_InternFromString("_owner");
    slow_wait_name = PyUnicode_InternFromString("slow_wait");
    broken_name = PyUnicode_InternFromString("broken");
    check_failures_name = PyUnicode_InternFromString("check_failures");
    attach_name = PyUnicode_InternFromString("attach");
    differ_name = PyUnicode_InternFromString("differ");
    out_of_reach_name = PyUnicode_InternFromString("out_of_reach");
    cancel_name = PyUnicode_InternFromString("cancel");
    exchange_name = PyUnicode_InternFromString("sendrecv");
    engine_type.tp_name = "gpucoll._engine.Engine";
    engine_type.tp_basicsize = sizeof(Engine);
    engine_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_HAVE_GC;
    engine_type.tp_vectorcall_offset = offsetof(Engine, vectorcall);
    engine_type.tp_call = PyVectorcall_Call;
    engine_type.tp_new = bordered<make>;
    engine_type.tp_dealloc = unmake;
    engine_type.tp_traverse = traverse;
    engine_type.tp_clear = forget;
    engine_type.tp_methods = methods;
    engine_type.tp_getset = members;
    plan_type.tp_name = "gpucoll._engine.Plan";
    plan_type.tp_basicsize = sizeof(PlanObject);
    plan_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
    plan_type.tp_dealloc = unmake_plan;
    plan_type.tp_traverse = traverse_plan;
    plan_type.tp_clear = forget_plan;
    bound_type.tp_name = "gpucoll._engine.Bound";
    bound_type.tp_basicsize = sizeof(Bound);
    bound_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_HAVE_GC;
    bound_type.tp_vectorcall_offset = offsetof(Bound, vectorcall);
    bound_type.tp_call = PyVectorcall_Call;
    bound_type.tp_dealloc = unmake_bound;
    bound_type.tp_traverse = traverse_bound;
    bound_type.tp_clear = forget_bound;
    PyObject* made = PyModule_Create(&module);
    if (made == nullptr || PyType_Ready(&engine_type) < 0 || PyType_Ready(&plan_type) < 0
        || PyType_Ready(&bound_type) < 0 || !make_request_type())
        return nullptr;
    if (PyModule_AddStringConstant(made, "sources", GC_SOURCES) < 0) return nullptr;
    Py_INCREF(&engine_type);
    PyModule_AddObject(made, "Engine", reinterpret_cast<PyObject*>(&engine_type));
    PyModule_AddIntConstant(made, "BOX", sizeof(Ring));
    return made;
}
