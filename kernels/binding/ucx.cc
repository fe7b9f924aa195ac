// The module gpucoll._ucx: messages between processes by UCX's tag matching, for ranks of several hosts without MPI.
//
// UCX is opened at run time, so the module loads where no UCX is installed. A `Worker` is this process' end of all
// connections, and an endpoint leads to one other process. A `Transfer` is one message of Python's, sent or received.
// `CommunicatorWire` carries the engine's messages of a communicator, without Python. Nothing here waits, except
// `Worker::close`: a waiting caller calls `test` or `progress` again, and UCX moves data in these calls only.
//
// Threads. UCX calls back only from inside a call, and expects one thread at a time. A thread of the engine calls without
// the interpreter's lock, so the worker has a lock of its own. No function of Python is called with that lock held: a
// thread with the interpreter's lock may wait for the worker's, but never the other way round.
#include <dlfcn.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "binding/ucx.h"
#include "engine/wire.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace gpucoll::ucx {

// The fields of a tag, from the highest bits on: the communicator, whether the message is a user's, the dtype's code,
// the sending rank, and the tag of the sender. A receive compares the fields chosen by a mask.
constexpr int CONTEXT_BITS = 24, USER_BITS = 1, DTYPE_BITS = 5, SOURCE_BITS = 18, TAG_BITS = 16;
constexpr int SOURCE_SHIFT = TAG_BITS, DTYPE_SHIFT = SOURCE_SHIFT + SOURCE_BITS, USER_SHIFT = DTYPE_SHIFT + DTYPE_BITS,
              CONTEXT_SHIFT = USER_SHIFT + USER_BITS;
static_assert(CONTEXT_SHIFT + CONTEXT_BITS == 64, "the fields fill a tag");

// The first version with all functions used here.
constexpr unsigned UCX_MAJOR = 1, UCX_MINOR = 10;

constexpr uint64_t field(uint64_t tag, int shift, int bits) { return tag >> shift & ((uint64_t{1} << bits) - 1); }

struct UcxError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// UCX's functions, looked up by name in the opened library. Its declarations give the types.
struct Functions {
#define GC_UCX(name) decltype(&::ucp_##name) name = nullptr;
#define GC_UCX_FUNCTIONS                                                                                            \
    GC_UCX(get_version_string) GC_UCX(config_read) GC_UCX(config_release) GC_UCX(init_version) GC_UCX(cleanup)      \
    GC_UCX(worker_create) GC_UCX(worker_destroy) GC_UCX(worker_get_address) GC_UCX(worker_release_address)          \
    GC_UCX(worker_progress) GC_UCX(ep_create) GC_UCX(ep_close_nbx) GC_UCX(ep_flush_nbx) GC_UCX(tag_send_nbx)        \
    GC_UCX(tag_send_sync_nbx) GC_UCX(tag_recv_nbx) GC_UCX(tag_probe_nb) GC_UCX(tag_msg_recv_nbx)                    \
    GC_UCX(request_check_status) GC_UCX(request_cancel) GC_UCX(request_free)
    GC_UCX_FUNCTIONS
#undef GC_UCX
    const char* (*status_string)(ucs_status_t) = nullptr;
};
static Functions ucp;

static void* found(void* library, const char* name) {
    void* function = dlsym(library, name);
    if (function == nullptr) throw UcxError(std::string("this UCX has no ") + name);
    return function;
}

// Open the library with UCX's protocols, the one of this process if there is one, else at `path`; return its version.
static std::string open(const std::string& path) {
    // An MPI may have loaded its own UCX. A second one in the process would get half of its libraries from the first.
    void* library = dlopen("libucp.so.0", RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr) library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw UcxError(dlerror());
#define GC_UCX(name) ucp.name = reinterpret_cast<decltype(ucp.name)>(found(library, "ucp_" #name));
    GC_UCX_FUNCTIONS
#undef GC_UCX
    ucp.status_string = reinterpret_cast<decltype(ucp.status_string)>(found(library, "ucs_status_string"));
    return ucp.get_version_string();
}

static void check(ucs_status_t status, const char* what) {
    if (status != UCS_OK) throw UcxError(std::string(what) + ": " + ucp.status_string(status));
}

// The bytes of a Python object, kept alive and unmoved as long as UCX may access them.
class Memory {
  public:
    Memory(nb::handle object, bool writable) {
        if (PyObject_GetBuffer(object.ptr(), &view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0)
            throw nb::python_error();
    }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    ~Memory() { PyBuffer_Release(&view); }
    void* start() const { return view.buf; }
    size_t nbytes() const { return static_cast<size_t>(view.len); }

  private:
    Py_buffer view;
};

struct Transfer {
    Transfer(nb::handle object, bool receives) : memory(object, receives) {}
    Memory memory;
    bool done = false;
    ucs_status_t status = UCS_OK;
    ucp_tag_recv_info_t info = {};  // of a receive, once done: the sender's tag and the length
    void* handle = nullptr;         // UCX's request, while the transfer is under way
};

using Shared = std::shared_ptr<Transfer>;

// Keeps a transfer, and so the memory, alive until its end; then a link of the list of ended transfers. The engine's
// thread may end a transfer, but must not release memory of Python.
struct Kept {
    Shared transfer;
    Kept** ended;  // the list of the worker
    Kept* next = nullptr;
};

// End a transfer, as UCX reports. `user` has kept the transfer since its begin.
static void end(void* request, ucs_status_t status, void* user) {
    Kept* kept = static_cast<Kept*>(user);
    kept->transfer->status = status;
    kept->transfer->done = true;
    kept->transfer->handle = nullptr;
    kept->next = std::exchange(*kept->ended, kept);
    ucp.request_free(request);
}

static void end_receive(void* request, ucs_status_t status, const ucp_tag_recv_info_t* info, void* user) {
    // After a cancellation the info is undefined.
    if (status == UCS_OK || status == UCS_ERR_MESSAGE_TRUNCATED) static_cast<Kept*>(user)->transfer->info = *info;
    end(request, status, user);
}

// End a message of the engine's. Release: bytes and length are complete for the thread that reads the state.
static void end_message(WireMessage& message, ucs_status_t status) {
    message.error = status;
    message.handle = nullptr;
    message.state.store(status == UCS_OK ? WireMessage::DONE : WireMessage::FAILED, std::memory_order_release);
}

static void end_sent(void* request, ucs_status_t status, void* user) {
    end_message(*static_cast<WireMessage*>(user), status);
    ucp.request_free(request);
}

static void end_came(void* request, ucs_status_t status, const ucp_tag_recv_info_t* info, void* user) {
    if (status == UCS_OK) static_cast<WireMessage*>(user)->length = info->length;
    end_sent(request, status, user);
}

class Worker {
  public:
    Worker() {
        ucp_config_t* config;
        check(ucp.config_read(nullptr, nullptr, &config), "configuration");
        ucp_params_t wanted = {};
        wanted.field_mask = UCP_PARAM_FIELD_FEATURES;
        wanted.features = UCP_FEATURE_TAG;
        const ucs_status_t status = ucp.init_version(UCX_MAJOR, UCX_MINOR, &wanted, config, &context);
        ucp.config_release(config);
        check(status, "start");
        ucp_worker_params_t own = {};
        own.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
        own.thread_mode = UCS_THREAD_MODE_SERIALIZED;
        const ucs_status_t made = ucp.worker_create(context, &own, &worker);
        if (made != UCS_OK) ucp.cleanup(context);
        check(made, "worker");
    }
    Worker(const Worker&) = delete;
    Worker& operator=(const Worker&) = delete;
    ~Worker() { close(0); }

    // Return the address by which other processes connect to this worker.
    nb::bytes address() {
        ucp_address_t* start;
        size_t length;
        std::string copy;
        {
            const Hold hold(*this);
            check(ucp.worker_get_address(of_open(), &start, &length), "address");
            copy.assign(reinterpret_cast<const char*>(start), length);
            ucp.worker_release_address(worker, start);
        }
        return nb::bytes(copy.data(), copy.size());
    }

    // Begin to send the bytes of `object`. A `synchronous` send ends only after the receive has begun.
    Shared send(const std::string& address, uint64_t tag, nb::handle object, bool synchronous) {
        const auto begin = synchronous ? ucp.tag_send_sync_nbx : ucp.tag_send_nbx;
        return begun(object, false, [&](const Memory& memory, const ucp_request_param_t& how) {
            return begin(endpoint(address), memory.start(), memory.nbytes(), tag, &how);
        });
    }

    // Begin to receive the next message with this tag, in the bits of `mask`, into the bytes of `object`.
    Shared receive(uint64_t tag, uint64_t mask, nb::handle object) {
        return begun(object, true, [&](const Memory& memory, const ucp_request_param_t& how) {
            return ucp.tag_recv_nbx(of_open(), memory.start(), memory.nbytes(), tag, mask, &how);
        });
    }

    // Return tag, length and handle of an arrived message, or nothing. With `removes`, the message is taken out of
    // UCX's queue: only `take` can receive it.
    std::optional<std::tuple<uint64_t, size_t, uintptr_t>> probe(uint64_t tag, uint64_t mask, bool removes) {
        ucp_tag_recv_info_t info;
        ucp_tag_message_h message;
        {
            const Hold hold(*this);
            while (ucp.worker_progress(of_open()) != 0) continue;
            message = ucp.tag_probe_nb(worker, tag, mask, removes ? 1 : 0, &info);
        }
        release_ended();
        if (message == nullptr) return std::nullopt;
        return std::make_tuple(info.sender_tag, info.length, reinterpret_cast<uintptr_t>(message));
    }

    // Begin to receive a message removed by `probe`.
    Shared take(uintptr_t message, nb::handle object) {
        return begun(object, true, [&](const Memory& memory, const ucp_request_param_t& how) {
            return ucp.tag_msg_recv_nbx(of_open(), memory.start(), memory.nbytes(),
                                        reinterpret_cast<ucp_tag_message_h>(message), &how);
        });
    }

    // Move data as far as possible.
    void progress() {
        {
            const Hold hold(*this);
            while (ucp.worker_progress(of_open()) != 0) continue;
        }
        release_ended();
    }

    // Return whether a transfer has ended; throw UcxError if it has failed.
    bool test(const Transfer& transfer) {
        bool done;
        {
            const Hold hold(*this);
            if (!transfer.done && worker != nullptr) ucp.worker_progress(worker);
            done = transfer.done;
        }
        release_ended();
        if (done && transfer.status != UCS_ERR_CANCELED) check(transfer.status, "message");
        return done;
    }

    // Ask UCX to give up a transfer, in vain if data are on the way: the memory stays alive until the end.
    void cancel(const Transfer& transfer) {
        {
            const Hold hold(*this);
            if (!transfer.done && worker != nullptr) {
                ucp.request_cancel(worker, transfer.handle);
                ucp.worker_progress(worker);
            }
        }
        release_ended();
    }

    // Close all connections. The last messages leave before, within `patience` seconds.
    void close(double patience) {
        {
            const Hold hold(*this);
            if (worker != nullptr) close_all(patience);
        }
        release_ended();
    }

    // Begin a message of the engine's.
    template <class Call> void begin(WireMessage& message, ucp_request_param_t& how, Call call) noexcept {
        how.op_attr_mask |= UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
        how.memory_type = UCS_MEMORY_TYPE_HOST;
        how.user_data = &message;
        message.state.store(WireMessage::UNDER_WAY, std::memory_order_relaxed);
        const Hold hold(*this);
        ucs_status_ptr_t request;
        try {
            request = worker == nullptr ? UCS_STATUS_PTR(UCS_ERR_CANCELED) : call();
        } catch (const std::bad_alloc&) {
            request = UCS_STATUS_PTR(UCS_ERR_NO_MEMORY);
        } catch (const UcxError&) {
            request = UCS_STATUS_PTR(UCS_ERR_UNREACHABLE);
        }
        if (!UCS_PTR_IS_PTR(request)) {
            end_message(message, UCS_PTR_RAW_STATUS(request));
        } else if (message.is_under_way()) {
            message.handle = request;
        }
    }

    // Move data once, unless a thread of Python's waits for the lock; return whether anything has moved.
    bool progress_once() noexcept {
        if (waiting.load(std::memory_order_relaxed) > 0) sched_yield();
        const std::lock_guard<std::mutex> guard(lock);
        return worker != nullptr && ucp.worker_progress(worker) != 0;
    }

    void cancel(const WireMessage& message) noexcept {
        const Hold hold(*this);
        if (worker != nullptr && message.handle != nullptr) ucp.request_cancel(worker, message.handle);
    }

    ucp_worker_h of_open() const {
        if (worker == nullptr) throw UcxError("the worker is closed");
        return worker;
    }

    // Return the endpoint that leads to the worker with this address. The connection is made later. Requires the lock.
    ucp_ep_h endpoint(const std::string& address) {
        const auto found = endpoints.find(address);
        if (found != endpoints.end()) return found->second;
        ucp_ep_params_t wanted = {};
        wanted.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE
            | UCP_EP_PARAM_FIELD_ERR_HANDLER;
        wanted.address = reinterpret_cast<const ucp_address_t*>(address.data());
        // With this mode the end of the other process ends the transfers with an error, and not this process.
        wanted.err_mode = UCP_ERR_HANDLING_MODE_PEER;
        wanted.err_handler.cb = [](void*, ucp_ep_h, ucs_status_t) {};  // the transfers report the error
        ucp_ep_h made;
        check(ucp.ep_create(of_open(), &wanted, &made), "connection");
        endpoints.emplace(address, made);
        return made;
    }

  private:
    // Holds the worker's lock. The engine's thread looks at the worker again and again: `waiting` asks it to step back.
    class Hold {
      public:
        explicit Hold(Worker& worker) : self(worker) {
            self.waiting.fetch_add(1, std::memory_order_relaxed);
            self.lock.lock();
            self.waiting.fetch_sub(1, std::memory_order_relaxed);
        }
        ~Hold() { self.lock.unlock(); }
        Hold(const Hold&) = delete;

      private:
        Worker& self;
    };

    // Begin a transfer by `call`, which may complete the transfer at once.
    template <class Call> Shared begun(nb::handle object, bool receives, Call call) {
        const Shared transfer = std::make_shared<Transfer>(object, receives);
        std::unique_ptr<Kept> kept(new Kept{transfer, &ended});
        ucp_request_param_t how = {};
        how.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
        how.memory_type = UCS_MEMORY_TYPE_HOST;
        how.user_data = kept.get();
        if (receives) {
            how.op_attr_mask |= UCP_OP_ATTR_FIELD_RECV_INFO;
            how.cb.recv = end_receive;
            how.recv_info.tag_info = &transfer->info;
        } else {
            how.cb.send = end;
        }
        {
            const Hold hold(*this);
            of_open();
            const ucs_status_ptr_t request = call(transfer->memory, how);
            if (UCS_PTR_IS_PTR(request)) {
                kept.release();  // `end` takes it
                // A callback may have run inside `call` already.
                if (!transfer->done) transfer->handle = request;
            } else {
                transfer->status = UCS_PTR_RAW_STATUS(request);
                transfer->done = true;
            }
        }
        release_ended();
        return transfer;
    }

    // Release the memory of the transfers that have ended. Requires the interpreter's lock, and not the worker's: an
    // array's end may run Python code, which may use the worker.
    void release_ended() {
        Kept* list;
        {
            const Hold hold(*this);
            list = std::exchange(ended, nullptr);
        }
        while (list != nullptr) {
            const std::unique_ptr<Kept> first(list);
            list = first->next;
        }
    }

    void close_all(double patience) {
        using Clock = std::chrono::steady_clock;
        const auto late = Clock::now() + std::chrono::duration<double>(patience);
        const ucp_request_param_t plain = {};
        for (const auto& [_, endpoint] : endpoints) {
            ucs_status_ptr_t flush = patience > 0 ? ucp.ep_flush_nbx(endpoint, &plain) : nullptr;
            ends(flush, [&] { return Clock::now() < late; });
        }
        // By force: the other process may have ended, and a connection closed in order would wait for its answer.
        ucp_request_param_t force = {};
        force.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
        force.flags = UCP_EP_CLOSE_FLAG_FORCE;
        for (const auto& [_, endpoint] : endpoints) ends(ucp.ep_close_nbx(endpoint, &force), [] { return true; });
        endpoints.clear();
        ucp.worker_destroy(worker);
        ucp.cleanup(context);
        worker = nullptr;
    }

    // Wait for a request without a callback as long as `goes_on`.
    template <class GoesOn> void ends(ucs_status_ptr_t request, GoesOn goes_on) {
        if (!UCS_PTR_IS_PTR(request)) return;
        while (ucp.request_check_status(request) == UCS_INPROGRESS && goes_on()) ucp.worker_progress(worker);
        ucp.request_free(request);
    }

    ucp_context_h context = nullptr;
    ucp_worker_h worker = nullptr;
    std::mutex lock;              // guards all fields below, `worker`, and the transfers under way
    std::atomic<int> waiting{0};  // threads that wait for `lock`
    std::unordered_map<std::string, ucp_ep_h> endpoints;  // by the address of the other process
    Kept* ended = nullptr;        // transfers whose memory is to be released
};

// The engine's messages between the ranks of a communicator. The tags of the messages begin with the bits of `base`, in
// which the sender's rank is missing.
class CommunicatorWire final : public Wire {
  public:
    CommunicatorWire(std::shared_ptr<Worker> own, uint64_t base, uint32_t rank, std::vector<std::string> everyone)
        : worker(std::move(own)), base(base), rank(rank), addresses(std::move(everyone)), endpoints(addresses.size()) {}

    void send(WireMessage& message, uint32_t peer, uint64_t tag, const void* row, uint64_t nbytes) noexcept override {
        message.peer = peer;
        message.sends = true;
        ucp_request_param_t how = {};
        how.cb.send = end_sent;
        worker->begin(message, how, [&] {
            if (endpoints[peer] == nullptr) endpoints[peer] = worker->endpoint(addresses[peer]);
            return ucp.tag_send_nbx(endpoints[peer], row, nbytes, full(rank, tag), &how);
        });
    }

    void receive(WireMessage& message, uint32_t peer, uint64_t tag, void* row, uint64_t nbytes) noexcept override {
        message.peer = peer;
        message.sends = false;
        ucp_request_param_t how = {};
        how.op_attr_mask = UCP_OP_ATTR_FIELD_RECV_INFO;
        how.cb.recv = end_came;
        ucp_tag_recv_info_t info = {};
        how.recv_info.tag_info = &info;
        worker->begin(message, how, [&] {
            const ucs_status_ptr_t request = ucp.tag_recv_nbx(worker->of_open(), row, nbytes, full(peer, tag), ~uint64_t{0}, &how);
            if (request == nullptr) message.length = info.length;
            return request;
        });
    }

    bool progress() noexcept override { return worker->progress_once(); }
    void cancel(WireMessage& message) noexcept override { worker->cancel(message); }
    const char* reason(int error) const noexcept override { return ucp.status_string(static_cast<ucs_status_t>(error)); }

  private:
    uint64_t full(uint32_t source, uint64_t tag) const { return base | static_cast<uint64_t>(source) << SOURCE_SHIFT | tag; }

    std::shared_ptr<Worker> worker;
    uint64_t base;
    uint32_t rank;
    std::vector<std::string> addresses;
    std::vector<ucp_ep_h> endpoints;  // null before the first message
};

// Return a capsule with a `Wire` for the engine: see `CommunicatorWire`.
static nb::capsule wire(std::shared_ptr<Worker> self, uint64_t base, uint32_t rank, const std::vector<nb::bytes>& everyone) {
    std::vector<std::string> addresses;
    for (const nb::bytes& one : everyone) addresses.emplace_back(one.c_str(), one.size());
    Wire* made = new CommunicatorWire(std::move(self), base, rank, std::move(addresses));
    return nb::capsule(made, WIRE, [](void* kept) noexcept { delete static_cast<CommunicatorWire*>(static_cast<Wire*>(kept)); });
}

// A message under way, with the methods of mpi4py's requests. `length` and `came` are as of `mailbox.StoredMessage`.
struct Request {
    std::shared_ptr<Worker> worker;
    Shared transfer;

    bool test(nb::handle) { return worker->test(*transfer); }
    void cancel() { worker->cancel(*transfer); }
    std::optional<size_t> length() {
        if (!worker->test(*transfer)) return std::nullopt;
        return transfer->info.length;
    }
    uint64_t came() const { return field(transfer->info.sender_tag, DTYPE_SHIFT, DTYPE_BITS); }
};

}  // namespace gpucoll::ucx

NB_MODULE(_ucx, module) {
    using namespace gpucoll::ucx;
    // The library keeps requests and their memory for ever after a failure: these are no leaks of the binding.
    nb::set_leak_warnings(false);
    module.doc() = "Messages between processes by UCX; see gpucoll.transport.ucx.";
    nb::exception<UcxError>(module, "UcxError", PyExc_RuntimeError);
    module.def("open", &open, "path"_a);
    for (auto [name, value] : {std::pair("CONTEXT_BITS", CONTEXT_BITS), {"DTYPE_BITS", DTYPE_BITS},
                               {"SOURCE_BITS", SOURCE_BITS}, {"TAG_BITS", TAG_BITS}, {"SOURCE_SHIFT", SOURCE_SHIFT},
                               {"DTYPE_SHIFT", DTYPE_SHIFT}, {"USER_SHIFT", USER_SHIFT},
                               {"CONTEXT_SHIFT", CONTEXT_SHIFT}})
        module.attr(name) = value;
    nb::class_<Request>(module, "Request")
        .def("Test", &Request::test, "status"_a.none() = nb::none())
        .def("Cancel", &Request::cancel)
        .def_prop_ro("length", &Request::length)
        .def_prop_ro("came", &Request::came);
    using Owner = std::shared_ptr<Worker>;
    nb::class_<Worker>(module, "Worker")
        .def(nb::init<>())
        .def("address", &Worker::address)
        .def("send", [](Owner self, const nb::bytes& address, uint64_t tag, nb::handle object, bool synchronous) {
            return Request{self, self->send({address.c_str(), address.size()}, tag, object, synchronous)};
        }, "address"_a, "tag"_a, "object"_a, "synchronous"_a = false)
        .def("wire", &wire, "base"_a, "rank"_a, "addresses"_a)
        .def("receive", [](Owner self, uint64_t tag, uint64_t mask, nb::handle object) {
            return Request{self, self->receive(tag, mask, object)};
        }, "tag"_a, "mask"_a, "object"_a)
        .def("probe", &Worker::probe, "tag"_a, "mask"_a, "removes"_a = false)
        .def("take", [](Owner self, uintptr_t message, nb::handle object) {
            return Request{self, self->take(message, object)};
        }, "message"_a, "object"_a)
        .def("progress", &Worker::progress)
        .def("close", &Worker::close, "patience"_a);
}
