// The host half of the dialect: runs a kernel on one CPU, every CUDA thread as a fiber.
//
// The blocks of a grid run one after another, the fibers of a block take turns: each runs until it ends or waits at a
// barrier. A fiber has a stack only while it is under way, so that a kernel without barriers runs on a single one.
// Nothing here is known outside of the shared object that a kernel becomes.
#pragma once

#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "fibers_context.h"

struct Dim {
    u32 x, y, z;
};
static __thread Dim threadIdx, blockIdx, blockDim, gridDim;

namespace host {

typedef void (*Body)(const void* arguments);

constexpr size_t ARENA = 48 << 10;          // the shared memory that every GPU grants to a block
constexpr u32 ARRAYS = 32;                  // the places in a unit's text that may declare shared memory
constexpr int UNWRITTEN = 0xCB;             // fills shared memory: who reads before writing gets it wrong

enum State { NEW, RUNNABLE, WAITING, DONE };

struct Fiber {
    Context context;
    char* stack;
    Dim index;
    State state;
};

// The block that runs: who has come to the barrier and what all of them voted; shared memory by its place in the text.
struct Block {
    Dim index;
    u32 threads, arrived;
    bool unanimous, verdict;
    void* arrays[ARRAYS];
    size_t used;
};

struct Fault {
    const char* what;
    u64 address;
    u32 block, thread;
};

// What runs one grid at a time. It is kept for later grids, with its fibers and stacks.
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
static pthread_mutex_t machines_lock = PTHREAD_MUTEX_INITIALIZER;

// Remembers the first fault of a launch.
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

static void leave() { exchange(machine->current->context, machine->scheduler); }

static void run_fiber() {
    machine->body(machine->arguments);
    machine->current->state = DONE;
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

// Lets every fiber that can go on do so; false where none could.
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

static void run_block(u32 index, u32 threads) {
    Machine& m = *machine;
    m.block = {{index, 0, 0}, threads, 0, true, true, {}, 0};
    blockIdx = m.block.index;
    for (u32 i = 0; i < threads; ++i) m.fibers[i] = {{}, nullptr, {i, 0, 0}, NEW};
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

// Runs the grid; returns null, or the text of the first fault, which the thread's next launch overwrites.
static const char* launch(Body body, const void* arguments, u32 blocks, u32 threads) {
    machine = take_machine();
    make_room(*machine, threads);
    machine->body = body;
    machine->arguments = arguments;
    machine->fault = {};
    blockDim = {threads, 1, 1};
    gridDim = {blocks, 1, 1};
    for (u32 index = 0; index < blocks; ++index) run_block(index, threads);
    const char* text = text_of(machine->fault);
    give_back(machine);
    return text;
}

static void wake_all(Block& block) {
    block.arrived = 0;
    block.verdict = block.unanimous;
    block.unanimous = true;
    for (u32 i = 0; i < block.threads; ++i)
        if (machine->fibers[i].state == WAITING) machine->fibers[i].state = RUNNABLE;
}

// Returns once all threads of the block are here; whether all voted for it.
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

// Returns the block's array that is declared at this place of the text.
inline void* shared(u32 place, size_t bytes) {
    Block& block = machine->block;
    if (place >= ARRAYS || (block.arrays[place] == nullptr && block.used + bytes > ARENA)) {
        fault("more shared memory than a block has", 0);
        return machine->arena;
    }
    if (block.arrays[place] == nullptr) {
        block.arrays[place] = memset(machine->arena + block.used, UNWRITTEN, bytes);
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
