// The host half of the dialect: runs a kernel on a single CPU, every CUDA thread as a fiber.
//
// The blocks of a grid run one after another. The fibers of a block take turns: a fiber runs until its end or a
// barrier. Fibers instead of system threads: a barrier costs a switch of registers, and the order is the same in
// every run. A fiber has a stack only between start and end, so a kernel without barriers needs a single stack. Each
// kernel becomes a shared object; nothing here is visible outside.
#pragma once

#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "emulation/fibers_context.h"

// CUDA's built-in variables; per system thread, since several threads may run grids at once.
struct Dim {
    u32 x, y, z;
};
static __thread Dim threadIdx, blockIdx, blockDim, gridDim;

namespace host {

typedef void (*Body)(const void* arguments);

constexpr size_t ARENA = 48 << 10;          // shared memory granted to a block by every GPU
constexpr u32 ARRAYS = 32;                  // most declarations of shared memory in a source
constexpr int UNWRITTEN = 0xCB;             // fills shared memory: reading before writing gives a wrong result

// WAITING: at the barrier. TOGETHER: at a barrier of a warp.
enum State { NEW, RUNNABLE, WAITING, TOGETHER, DONE };

struct Fiber {
    Context context;
    char* stack;
    Dim index;
    State state;
    u32 mask;  // of the lanes awaited at a barrier of the warp
};

// The running block: fibers that have not ended, fibers arrived at the barrier, their votes, and the shared arrays by
// declaration.
struct Block {
    Dim index;
    u32 threads, left, arrived, agreed;
    bool unanimous, verdict;
    void* arrays[ARRAYS];
    size_t used;
};

// A fault of a kernel: text, address, and the thread.
struct Fault {
    const char* what;
    u64 address;
    u32 block, thread;
};

// Runs a single grid at a time. Machines are kept in a list for later grids, to save allocating fibers and stacks.
struct Machine {
    Machine* next;
    Body body;
    const void* arguments;
    Context scheduler;
    Fiber* fibers;
    Fiber* current;
    char** stacks;
    u32 capacity, idle;
    Block block;
    Fault fault;
    char* arena;
};

static __thread Machine* machine;
static Machine* machines;
// Several threads may launch kernels; the lock is held only to take or return a machine.
static pthread_mutex_t machines_lock = PTHREAD_MUTEX_INITIALIZER;

// Remember the first fault of a launch: later faults often follow from the first.
static void fault(const char* what, u64 address) {
    if (machine->fault.what == nullptr) machine->fault = {what, address, blockIdx.x, threadIdx.x};
}

static Machine* take_machine() {
    pthread_mutex_lock(&machines_lock);
    Machine* taken = machines;
    if (taken != nullptr) machines = taken->next;
    pthread_mutex_unlock(&machines_lock);
    return taken != nullptr ? taken : static_cast<Machine*>(granted(calloc(1, sizeof(Machine))));
}

static void give_back(Machine* taken) {
    pthread_mutex_lock(&machines_lock);
    taken->next = machines;
    machines = taken;
    pthread_mutex_unlock(&machines_lock);
}

// Switch from the running fiber to the scheduler.
static void leave() { exchange(machine->current->context, machine->scheduler); }

#if defined(GC_USER)
static void ended_early();
#endif

// The body of every fiber. Never returns: the fiber is not resumed after DONE.
static void run_fiber() {
    machine->body(machine->arguments);
    machine->current->state = DONE;
    --machine->block.left;
#if defined(GC_USER)
    ended_early();
#endif
    leave();
}

static void start(Fiber& fiber) {
    Machine& m = *machine;
    fiber.stack = m.idle > 0 ? m.stacks[--m.idle] : static_cast<char*>(pages(STACK));
    fiber.state = RUNNABLE;
    prepare(fiber.context, fiber.stack, run_fiber);
}

static void reclaim(Fiber& fiber) {
    if (fiber.stack != nullptr) machine->stacks[machine->idle++] = fiber.stack;
    fiber.stack = nullptr;
}

static void resume(Fiber& fiber) {
    if (fiber.state == NEW) start(fiber);
    machine->current = &fiber;
    threadIdx = fiber.index;
    exchange(machine->scheduler, fiber.context);
    if (fiber.state == DONE) reclaim(fiber);
}

// Run every fiber able to continue; return false if there was none.
static bool turn() {
    bool progress = false;
    for (u32 i = 0; i < machine->block.threads; ++i) {
        Fiber& fiber = machine->fibers[i];
        if (fiber.state != NEW && fiber.state != RUNNABLE) continue;
        resume(fiber);
        progress = true;
    }
    return progress;
}

static bool ended() {
    for (u32 i = 0; i < machine->block.threads; ++i)
        if (machine->fibers[i].state != DONE) return false;
    return true;
}

static void run_block(Dim index, u32 threads) {
    Machine& m = *machine;
    m.block = {index, threads, threads, 0, 0, true, true, {}, 0};
    blockIdx = m.block.index;
    for (u32 i = 0; i < threads; ++i)
        m.fibers[i] = {{}, nullptr, {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y}, NEW, 0};
    // No fiber can continue: either all have ended, or the rest waits at a barrier for ever.
    while (turn()) {}
    if (!ended()) fault("a barrier that not all threads of the block come to", 0);
    for (u32 i = 0; i < threads; ++i) reclaim(m.fibers[i]);
}

static void make_room(Machine& m, u32 threads) {
    if (m.arena == nullptr) m.arena = static_cast<char*>(pages(ARENA));
    if (m.capacity >= threads) return;
    m.fibers = static_cast<Fiber*>(granted(realloc(m.fibers, threads * sizeof(Fiber))));
    m.stacks = static_cast<char**>(granted(realloc(m.stacks, threads * sizeof(char*))));
    m.capacity = threads;
}

static const char* text_of(const Fault& fault) {
    static __thread char text[160];
    if (fault.what == nullptr) return nullptr;
    snprintf(text, sizeof(text), "%s (block %u, thread %u, address 0x%llx)", fault.what, fault.block, fault.thread,
             fault.address);
    return text;
}

// Run a grid. Return null, or the text of the first fault, valid until the thread's next launch.
static const char* launch(Body body, const void* arguments, Dim grid, Dim block) {
    u32 threads = block.x * block.y * block.z;
    machine = take_machine();
    make_room(*machine, threads);
    machine->body = body;
    machine->arguments = arguments;
    machine->fault = {};
    blockDim = block;
    gridDim = grid;
    for (u32 z = 0; z < grid.z; ++z)
        for (u32 y = 0; y < grid.y; ++y)
            for (u32 x = 0; x < grid.x; ++x) run_block({x, y, z}, threads);
    const char* text = text_of(machine->fault);
    give_back(machine);
    return text;
}

static const char* launch(Body body, const void* arguments, u32 blocks, u32 threads) {
    return launch(body, arguments, Dim{blocks, 1, 1}, Dim{threads, 1, 1});
}

// Open the barrier: publish the vote, and reset the barrier for the next use.
static void wake_all(Block& block) {
    block.arrived = 0;
    block.verdict = block.unanimous;
    block.unanimous = true;
    for (u32 i = 0; i < block.threads; ++i)
        if (machine->fibers[i].state == WAITING) machine->fibers[i].state = RUNNABLE;
}

// Wait until all threads of the block have arrived; return whether all voted true.
inline bool barrier(bool vote) {
    Block& block = machine->block;
    block.unanimous = block.unanimous && vote;
    if (++block.arrived == block.threads) {
        wake_all(block);
    } else {
        machine->current->state = WAITING;
        leave();
    }
    return block.verdict;
}

// Return the block's shared array of a declaration, by its number in the source (`__COUNTER__`).
inline void* shared(u32 place, size_t bytes) {
    Block& block = machine->block;
    if (place >= ARRAYS || (block.arrays[place] == nullptr && block.used + bytes > ARENA)) {
        fault("more shared memory than a block has", 0);
        // Some valid memory: the kernel runs on until the launch reports the fault.
        return machine->arena;
    }
    if (block.arrays[place] == nullptr) {
        block.arrays[place] = memset(machine->arena + block.used, UNWRITTEN, bytes);
        // Arrays of words need 16-byte alignment.
        block.used += (bytes + 15) / 16 * 16;
    }
    return block.arrays[place];
}

}  // namespace host

inline void __syncthreads() { host::barrier(true); }
inline int __syncthreads_and(int vote) { return host::barrier(vote != 0); }

#define GC_ENTRY(name, Arguments, ...)                                                        \
    static void run_##name(const void* a) { __VA_ARGS__(*static_cast<const Arguments*>(a)); } \
    extern "C" const char* name(u32 blocks, u32 threads, const Arguments* a) {                \
        return host::launch(run_##name, a, blocks, threads);                                  \
    }
