// The Python type `Engine`, one object per rank and communicator. The executor `shared` makes the object and drives
// its methods; the communicator calls the object itself for known calls (calls.h). Functions make wires (wires.h).
#include "binding/cycles.h"
#include "binding/wires.h"

namespace gpucoll {

// plan(...): return a plan, checked; for the arguments see `take_plan`.
static Ref<> plan(Engine& self, PyObject* given) {
    std::vector<uint32_t> partners;
    for (const Correspondent& one : self.walker.agreement.others) partners.push_back(one.peer);
    return make_plan(self.node, partners, given);
}

// bind_wire(capsule, tag, partners, leader, compares): send messages to ranks of other nodes by the `Wire` in a capsule
// from now on; the bits of `tag` tell this engine's messages from others. With `compares`, calls are compared between
// nodes: `leader` is the first rank of this node, and has the first ranks of the other nodes as `partners`.
static Ref<> bind_wire(Engine& self, PyObject* given) {
    PyObject *capsule, *partners;
    unsigned long long tag;
    unsigned long leader;
    int compares;
    check(PyArg_ParseTuple(given, "OKO!kp", &capsule, &tag, &PyTuple_Type, &partners, &leader, &compares));
    Node& node = self.node;
    void* wire = PyCapsule_GetPointer(capsule, WIRE);
    check_error();
    std::vector<uint32_t> others;
    take_numbers(partners, &others);
    const bool is_whole = leader < node.ranks && node.heads[leader] != nullptr && (tag & WIRE_CALLS) == 0
        && std::all_of(others.begin(), others.end(), [&](uint32_t one) { return one < node.ranks && node.heads[one] == nullptr; });
    const bool has_partners = compares == 0 || leader != node.rank || !others.empty();  // else no greeting brings a verdict
    if (!is_whole || !has_partners || node.wire != nullptr) raise(PyExc_ValueError, "no wire between these ranks");
    for (uint32_t one : others) self.walker.agreement.others.emplace_back(one);
    self.wire = Ref<>::borrow(capsule);
    node.wire = static_cast<Wire*>(wire);
    self.by_python = dynamic_cast<PythonWire*>(node.wire);
    node.wire_tag = tag;
    node.leader = static_cast<uint32_t>(leader);
    node.compares = compares != 0;
    if (node.compares) node.check = ALL;
    return none();
}

// partners(): return the ranks of other nodes with messages under way, in a list.
static Ref<> partners(Engine& self) {
    const Ref<> found = checked(PyList_New(0));
    self.walker.each_partner([&](uint32_t peer) { check(PyList_Append(found.get(), number(peer).get()) == 0); });
    return found;
}

// cancel_messages(): give up the receives from other nodes; return whether all messages have ended.
static Ref<> cancel_messages(Engine& self) { return truth(self.node.wire == nullptr || self.walker.cancel(self.node)); }

// begin(plan, x, out): begin the next call, to be continued by `go_on` or `ends`. The caller keeps the arrays alive.
static Ref<> begin_call(Engine& self, PyObject* given) {
    PyObject *planned, *x, *out;
    check(PyArg_ParseTuple(given, "O!OO", &type_of<PlanState>, &planned, &x, &out));
    const auto plan = Ref<PlanObject>::borrow(planned);
    check_fit(plan, x, out, nullptr);
    begin(self, plan, x, out, false);
    return none();
}

// go_on(): continue the call under way; return whether it is complete, also if no call is under way. Never wait.
static Ref<> go_on_once(Engine& self) { return truth(self.walker.plan == nullptr || go_on(self, false)); }

// ends(): wait a short time; return whether the call under way is complete.
static Ref<> ends(Engine& self) { return truth(self.walker.plan == nullptr || go_on(self, true)); }

// defer(plan, x): begin a deferred call; return whether this rank has shown it. Else `ends` waits until it has.
static Ref<> defer(Engine& self, PyObject* given) {
    PyObject *planned, *x;
    check(PyArg_ParseTuple(given, "O!O", &type_of<PlanState>, &planned, &x));
    const auto plan = Ref<PlanObject>::borrow(planned);
    check_fit(plan, x, Py_None, nullptr);
    begin(self, plan, x, Py_None, false);
    return truth(go_on(self, false));
}

// open(): return the number of the deferred call not yet judged, or 0.
static Ref<> open_call(Engine& self) { return number(self.node.open.load() >> ROUNDS); }

// unlike(): return the number of that call if a rank is known to have made another call, or 0.
static Ref<> unlike(Engine& self) { return number(Walker::unlike(self.node)); }

// heard(): return the bytes that all ranks have shown with the last deferred call judged, in the order of the ranks.
static Ref<> heard(Engine& self) {
    const std::vector<char>& found = self.node.heard;
    return checked(PyBytes_FromStringAndSize(found.data(), static_cast<Py_ssize_t>(found.size())));
}

// symmetric(key, address, bytes): register a slab of this rank's symmetric memory.
static Ref<> symmetric(Engine& self, PyObject* given) {
    long long key;
    unsigned long long start, nbytes;
    check(PyArg_ParseTuple(given, "LKK", &key, &start, &nbytes));
    self.node.symmetric.add({self.node.rank, key, reinterpret_cast<char*>(static_cast<uintptr_t>(start)), nbytes});
    return none();
}

// attach(rank, key, address, bytes): register another rank's segment, mapped at `address` in this process.
static Ref<> attach(Engine& self, PyObject* given) {
    unsigned long rank;
    long long key;
    unsigned long long start, nbytes;
    check(PyArg_ParseTuple(given, "kLKK", &rank, &key, &start, &nbytes));
    const Segment one = {static_cast<uint32_t>(rank), key, reinterpret_cast<char*>(static_cast<uintptr_t>(start)), nbytes};
    Segment found;
    if (!self.node.others.of(one.rank, key, &found)) self.node.others.add(one);
    return none();
}

// staging(buffer, key, address, bytes): register a larger staging buffer of this rank. A call under way keeps its old
// one.
static Ref<> staging(Engine& self, PyObject* given) {
    Node& node = self.node;
    unsigned long buffer;
    long long key;
    unsigned long long start, nbytes;
    check(PyArg_ParseTuple(given, "kLKK", &buffer, &key, &start, &nbytes));
    if (buffer >= SHOWN) raise(PyExc_ValueError, "no buffer %lu", buffer);
    if (nbytes < node.staging_bytes(static_cast<uint32_t>(buffer))) raise(PyExc_ValueError, "plans may need the larger one");
    // A deque never moves its elements, so old pointers stay valid. The release store comes after the element is
    // complete.
    node.all_staging.push_back({node.rank, key, reinterpret_cast<char*>(static_cast<uintptr_t>(start)), nbytes});
    node.staging[buffer].store(&node.all_staging.back(), std::memory_order_release);
    return none();
}

// Return the description of a rank's call. Truncation may split a character, hence "replace".
static Ref<> text_of(const char* text) {
    return checked(PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(strnlen(text, TEXT)), "replace"));
}

// Raise ValueError unless a rank is a same-node rank.
static void check_rank(const Node& node, unsigned long rank) {
    if (rank >= node.ranks || node.heads[rank] == nullptr) raise(PyExc_ValueError, "no rank %lu here", rank);
}

// A call of a same-node rank.
struct CallOfRank {
    uint32_t rank;
    uint64_t number;

    CallOfRank(const Node& node, PyObject* given) {
        unsigned long of;
        unsigned long long which;
        check(PyArg_ParseTuple(given, "kK", &of, &which));
        check_rank(node, of);
        rank = static_cast<uint32_t>(of);
        number = which;
    }
};

// description(rank, number): describe a rank's call; after `add_call_site`, with a second line: the call site.
static Ref<> description(Engine& self, PyObject* given) {
    const CallOfRank call(self.node, given);
    return text_of(self.node.description(call.rank, call.number));
}

// is_eager(rank, number): return whether a call was eager on a same-node rank.
static Ref<> is_eager(Engine& self, PyObject* given) {
    const CallOfRank call(self.node, given);
    return truth(self.node.is_eager(call.rank, call.number));
}

// next_call(rank): return the call that comes next on this rank, in words, as shown by `rank`. "" means: `rank`
// itself waits for another rank to show the call. None means: `rank` has not come to this call.
static Ref<> next_call(Engine& self, PyObject* given) {
    const Node& node = self.node;
    const unsigned long rank = PyLong_AsUnsignedLong(given);
    check_error();
    check_rank(node, rank);
    const int64_t base = static_cast<int64_t>(node.call_count + 1) << ROUNDS;
    // Store before loading, seq_cst: of two ranks waiting for each other at least one notices (`is_listening`).
    node.heads[node.rank]->listens.store(base, std::memory_order_seq_cst);
    if (node.heads[rank]->counter.load(std::memory_order_acquire) >= base)
        return text_of(node.description(static_cast<uint32_t>(rank), node.call_count + 1));
    return is_listening(node, static_cast<uint32_t>(rank), base) ? text_of("") : none();
}

// record(inside, address, offset of the last call's number, offset of the records, how many): write flight records from
// now on. `inside` is a list: see `is_inside`.
static Ref<> record(Engine& self, PyObject* given) {
    unsigned long long start, last, records, capacity;
    PyObject* inside;
    check(PyArg_ParseTuple(given, "O!KKKK", &PyList_Type, &inside, &start, &last, &records, &capacity));
    self.inside = Ref<>::borrow(inside);
    char* memory = reinterpret_cast<char*>(static_cast<uintptr_t>(start));
    Flight& flight = self.node.flight;
    flight.last = reinterpret_cast<std::atomic<uint64_t>*>(memory + last);
    flight.capacity = capacity;
    flight.records = reinterpret_cast<FlightRecord*>(memory + records);
    return none();
}

// awaited(): return the rank awaited by the call under way, or None. The calling thread may be without a processor: a
// rank whose counter has come meanwhile is not awaited, and may be in its next call.
static Ref<> awaited(Engine& self) {
    const Walker& walker = self.walker;
    const Head* head = walker.plan == nullptr ? nullptr : self.node.heads[walker.awaited];
    if (head == nullptr || head->counter.load(std::memory_order_acquire) >= walker.needed) return none();
    return number(walker.awaited);
}

// add_call_site(where): after a mismatch, show the other ranks where in the program this rank makes its call.
static Ref<> add_call_site(Engine& self, PyObject* where) {
    const char* text = PyUnicode_AsUTF8(where);
    if (text == nullptr) throw Raised();
    if (self.walker.plan != nullptr) self.walker.add_call_site(self.node, text);
    return none();
}

// calling(): return the number of the call whose prepared function is running (see `call_prepared`), or 0. Without the
// engine's lock, which a function in Python may keep for long.
static PyObject* calling(PyObject* object, PyObject*) {
    return bordered([&] { return number(static_cast<long long>(state_of<Engine>(object).calling.load())); });
}

// shares(): return nanoseconds summed over all calls, of own delay and of waiting for other ranks, and the time of the
// end of the last call, 0 before the first: an engine may be made after many calls of other executors.
static Ref<> shares(Engine& self) {
    const Node& node = self.node;
    return checked(Py_BuildValue("LLL", static_cast<long long>(node.total.own), static_cast<long long>(node.total.waited),
                                 node.call_count == 0 ? 0LL : static_cast<long long>(node.left)));
}

// settle(): cancel the call under way. All ranks know, and no data moved.
static Ref<> settle(Engine& self) {
    if (self.walker.plan != nullptr) self.walker.settle(self.node);
    return none();
}

// bind_progress(acquire, release, queue, messages under way, waits, errors, python): set the rules honoured by calls made here,
// a lock and two queues (see `Progress.gate`), and the class of the executor's errors.
static Ref<> bind_progress(Engine& self, PyObject* given) {
    Ref<>* const places[] = {&self.acquire, &self.release, &self.queue, &self.alone, &self.waits, &self.errors, &self.python};
    PyObject* objects[7];
    check(PyArg_ParseTuple(given, "OOOOOOO", objects, objects + 1, objects + 2, objects + 3, objects + 4, objects + 5, objects + 6));
    for (int i = 0; i < 7; i++) *places[i] = Ref<>::borrow(objects[i]);
    return none();
}

// bind_points(points, carries, most): `exchange` makes messages by the carrier `points`, with the methods `Isend` and `Irecv`
// and at most `most` bytes, from now on; with `carries`, those inside the node by the engine itself.
static Ref<> bind_points(Engine& self, PyObject* given) {
    PyObject* points;
    int carries;
    unsigned long long most;
    check(PyArg_ParseTuple(given, "OpK", &points, &carries, &most));
    self.points = Ref<>::borrow(points);
    self.carries = carries != 0;
    self.most_bytes = most;
    return none();
}

// close(): forget all known calls. A call under way may still be completed.
static Ref<> close(Engine& self) {
    self.closed = true;
    self.table.forget();
    return none();
}

// forget(name): forget all known calls of this name.
static Ref<> forget_calls(Engine& self, PyObject* name) {
    self.table.forget(name);
    return none();
}

// is_walking(): return whether a call is under way, in this thread or another.
static Ref<> is_walking(Engine& self) { return truth(self.under_way > 0 || self.walker.plan != nullptr); }

// is_busy(): return whether a call made here, not by `Progress.run`, is under way.
static Ref<> is_busy(Engine& self) { return truth(self.under_way > 0); }

static Ref<> call_count(Engine& self) { return number(static_cast<long long>(self.node.call_count)); }

static Ref<> thread(Engine& self) { return number(self.thread); }

// Engine(executor, errors, rank, check, process, spins, crowd, copies, first, workspace_bytes, boxes, heads, keys,
// processes). `check` says with which ranks calls are compared. `first` and `boxes` are the offsets of workspaces and
// mailboxes in a control segment. `heads`, `keys` and `processes` are by rank: addresses of control segments (0 for
// remote ranks), keys of these segments, process numbers.
static Ref<> make_engine(PyObject* given, PyObject* named) {
    static const char* names[] = {"executor", "errors", "rank", "check", "process", "spins", "crowd", "copies", "first",
                                  "workspace_bytes", "boxes", "heads", "keys", "processes", nullptr};
    PyObject *executor, *errors, *heads, *keys, *processes;
    unsigned long rank;
    int process, spins, crowd, copies;
    unsigned int check_level;
    unsigned long long first, workspace_bytes, boxes;
    check(PyArg_ParseTupleAndKeywords(given, named, "OOkIipipKKKO!O!O!", const_cast<char**>(names), &executor, &errors,
                                      &rank, &check_level, &process, &spins, &crowd, &copies, &first, &workspace_bytes, &boxes,
                                      &PyTuple_Type, &heads, &PyTuple_Type, &keys, &PyTuple_Type, &processes));
    const auto made = make_object<Engine>(executor, errors);
    made->vectorcall = call_engine;
    Engine& self = made->state;
    self.object = made.object();
    Node& node = self.node;
    node.rank = static_cast<uint32_t>(rank);
    node.ranks = static_cast<uint32_t>(PyTuple_GET_SIZE(heads));
    node.check = static_cast<Check>(std::min(check_level, static_cast<unsigned int>(ALL)));
    node.process = process;
    node.crowd = static_cast<uint32_t>(crowd);
    node.spins = spins != 0;
    node.copies = copies != 0;
    node.first = first;
    node.workspace_bytes = workspace_bytes;
    node.left = static_cast<int64_t>(nanoseconds());
    for (std::vector<int64_t>& counters : node.unread) counters.resize(node.ranks);
    for_each(heads, [&](PyObject* one) {
        node.heads.push_back(static_cast<Head*>(PyLong_AsVoidPtr(one)));
        check_error();
    });
    take_numbers(keys, &node.keys);
    take_numbers(processes, &node.processes);
    if (rank >= node.ranks || node.keys.size() != node.ranks || node.processes.size() != node.ranks)
        raise(PyExc_ValueError, "an engine of ranks that are not there");
    for (uint32_t other = 0; other < node.ranks; other++)
        if (other != node.rank && node.heads[other] != nullptr) node.same_node.push_back(other);
    self.mail.open(node, boxes);
    return Ref<>::borrow(made.get());
}

// combine(dtype, op, to, rows): write the rows, combined in order by an op, to an array. `dtype` and `op` are numbers of
// the tables; `to` may be one of the rows. All are contiguous, and of one length.
static Ref<> combine_rows(PyObject* given) {
    long dtype, op;
    PyObject *to, *rows;
    check(PyArg_ParseTuple(given, "llO!O!", &dtype, &op, &PyArray_Type, &to, &PyTuple_Type, &rows));
    const Combine combine = combine_of(dtype, op);
    const uint64_t nbytes = nbytes_of(to);
    std::vector<const char*> sources;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(rows); i++) {
        PyObject* row = PyTuple_GET_ITEM(rows, i);
        if (!is_array(row) || nbytes_of(row) != nbytes) raise(PyExc_ValueError, "rows of unlike lengths");
        sources.push_back(data_of(row));
    }
    if (combine == nullptr || sources.size() < 2) raise(PyExc_ValueError, "nothing to be combined");
    combine(sources.data(), sources.size(), data_of(to), nbytes);
    return none();
}

static PyObject* new_engine(PyTypeObject*, PyObject* given, PyObject* named) {
    return bordered([&] { return make_engine(given, named); });
}

static PyMethodDef methods[] = {
    {"add_call_site", Method<add_call_site>::call, METH_O, nullptr},
    {"attach", Method<attach>::call, METH_VARARGS, nullptr},
    {"awaited", Method<awaited>::call, METH_NOARGS, nullptr},
    {"begin", Method<begin_call>::call, METH_VARARGS, nullptr},
    {"bind", Method<bind>::call, METH_VARARGS, nullptr},
    {"bind_points", Method<bind_points>::call, METH_VARARGS, nullptr},
    {"bind_progress", Method<bind_progress>::call, METH_VARARGS, nullptr},
    {"bind_wire", Method<bind_wire>::call, METH_VARARGS, nullptr},
    {"cache_call", Method<cache_call>::call, METH_VARARGS, nullptr},
    {"cache_renamed", Method<cache_renamed>::call, METH_VARARGS, nullptr},
    {"calling", calling, METH_NOARGS, nullptr},
    {"cancel_messages", Method<cancel_messages>::call, METH_NOARGS, nullptr},
    {"close", Method<close>::call, METH_NOARGS, nullptr},
    {"condemn", Method<condemn>::call, METH_VARARGS, nullptr},
    {"defer", Method<defer>::call, METH_VARARGS, nullptr},
    {"description", Method<description>::call, METH_VARARGS, nullptr},
    {"ends", Method<ends>::call, METH_NOARGS, nullptr},
    {"exchange", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(exchange_method)), METH_FASTCALL, nullptr},
    {"forget", Method<forget_calls>::call, METH_O, nullptr},
    {"go_on", Method<go_on_once>::call, METH_NOARGS, nullptr},
    {"heard", Method<heard>::call, METH_NOARGS, nullptr},
    {"hide_wait", Method<hide_wait>::call, METH_NOARGS, nullptr},
    {"is_busy", Method<is_busy>::call, METH_NOARGS, nullptr},
    {"is_eager", Method<is_eager>::call, METH_VARARGS, nullptr},
    {"is_walking", Method<is_walking>::call, METH_NOARGS, nullptr},
    {"message", Method<message>::call, METH_VARARGS, nullptr},
    {"next_call", Method<next_call>::call, METH_O, nullptr},
    {"open", Method<open_call>::call, METH_NOARGS, nullptr},
    {"partners", Method<partners>::call, METH_NOARGS, nullptr},
    {"plan", Method<plan>::call, METH_VARARGS, nullptr},
    {"probe", Method<probe>::call, METH_VARARGS, nullptr},
    {"record", Method<record>::call, METH_VARARGS, nullptr},
    {"settle", Method<settle>::call, METH_NOARGS, nullptr},
    {"shares", Method<shares>::call, METH_NOARGS, nullptr},
    {"show_wait", Method<show_wait>::call, METH_VARARGS, nullptr},
    {"shown_waits", Method<shown_waits>::call, METH_NOARGS, nullptr},
    {"staging", Method<staging>::call, METH_VARARGS, nullptr},
    {"symmetric", Method<symmetric>::call, METH_VARARGS, nullptr},
    {"unlike", Method<unlike>::call, METH_NOARGS, nullptr},
    {"verdict", Method<verdict>::call, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};
// A function of the module.
template <Ref<> (*function)(PyObject*)> static PyObject* module_function(PyObject*, PyObject* given) {
    return bordered([&] { return function(given); });
}

static PyMethodDef functions[] = {{"combine", module_function<combine_rows>, METH_VARARGS, nullptr},
                                  {"mpi_wire", module_function<mpi_wire>, METH_VARARGS, nullptr},
                                  {"post", module_function<make_post>, METH_O, nullptr},
                                  {"python_wire", module_function<python_wire>, METH_VARARGS, nullptr},
                                  {"thread_wire", module_function<thread_wire>, METH_VARARGS, nullptr},
                                  {nullptr, nullptr, 0, nullptr}};
static PyGetSetDef members[] = {{"thread", Method<thread>::get, nullptr, nullptr, nullptr},
                                {"call_count", Method<call_count>::get, nullptr, nullptr, nullptr},
                                {nullptr, nullptr, nullptr, nullptr, nullptr}};

// Fill the module. `sources` is the digest of the source files: Python refuses a module built from other files.
static void fill(PyObject* made) {
    const std::pair<PyObject**, const char*> names[] = {
        {&failure_name, "failure"}, {&owner_name, "_owner"}, {&slow_wait_name, "slow_wait"}, {&broken_name, "broken"},
        {&check_failures_name, "check_failures"}, {&attach_name, "attach"}, {&differ_name, "differ"},
        {&out_of_reach_name, "out_of_reach"}, {&disconnected_name, "disconnected"}, {&spent_name, "spent"}, {&cancel_name, "cancel"}, {&exchange_name, "sendrecv"},
        {&on_delay_name, "on_delay"}, {&usable_name, "check_usable"}, {&send_name, "Isend"}, {&receive_name, "Irecv"}, {&test_name, "Test"},
        {&came_name, "came"}, {&length_name, "length"}};
    for (const auto& [place, text] : names) *place = checked(PyUnicode_InternFromString(text)).release();
    type_of<Engine>.tp_new = new_engine;
    type_of<Engine>.tp_methods = methods;
    type_of<Engine>.tp_getset = members;
    type_of<Request>.tp_methods = request_methods;
    type_of<Request>.tp_getset = request_members;
    make_type<Engine>("gpucoll._engine.Engine", true);
    make_type<PlanState>("gpucoll._engine.Plan");
    make_type<BoundCall>("gpucoll._engine.Bound", true);
    make_type<Request>("gpucoll._engine.Request");
    check(PyModule_AddStringConstant(made, "sources", GC_SOURCES) == 0);
    check(PyModule_AddIntConstant(made, "BOX", sizeof(Ring)) == 0);
    check(PyModule_AddObjectRef(made, "Engine", reinterpret_cast<PyObject*>(&type_of<Engine>)) == 0);
}

static int execute(PyObject* made) {
    import_array1(-1);
    const auto done = Ref<>::steal(bordered([&] { return fill(made), none(); }));
    return done ? 0 : -1;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, reinterpret_cast<void*>(execute)},
#if defined(Py_mod_multiple_interpreters)
                                   {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#if defined(Py_mod_gil)
                                   {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
                                   {0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_engine", nullptr, 0, functions, slots, nullptr, nullptr, nullptr};

}  // namespace gpucoll

PyMODINIT_FUNC PyInit__engine() { return PyModuleDef_Init(&gpucoll::definition); }
