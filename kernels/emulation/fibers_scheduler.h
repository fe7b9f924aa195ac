// The scheduler of fibers. A world runs kernels of one or several ranks, each rank on its own stream, on one CPU
// thread.
//
// Fibers run in turn, or in a random order drawn from a seed. At most `residency` blocks of a launch run at once; a
// further block begins when a block has ended, in a random order if turns are random. A GPU promises no more, so tests
// meet every order allowed on a GPU.
//
// Under ThreadSanitizer every fiber counts as a thread. Only barriers, the order of launches on a stream, and the
// kernels' own synchronisation create happens-before edges; taking turns creates none. So races are found although a
// single CPU thread runs all fibers.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <time.h>

#include "emulation/fibers_context.h"

// Weak: null unless the process runs under ThreadSanitizer.
extern "C" {
__attribute__((weak)) void* __tsan_get_current_fiber();
__attribute__((weak)) void* __tsan_create_fiber(unsigned flags);
__attribute__((weak)) void __tsan_destroy_fiber(void* fiber);
__attribute__((weak)) void __tsan_switch_to_fiber(void* fiber, unsigned flags);
__attribute__((weak)) void __tsan_acquire(void* address);
__attribute__((weak)) void __tsan_release(void* address);
}

namespace host {

constexpr u32 STREAMS = 16;
constexpr u32 ARRAYS = 32;         // most declarations of shared memory in a source
constexpr int UNWRITTEN = 0xCB;    // fills shared memory: reading before writing gives a wrong result
constexpr unsigned NO_ORDER = 1;   // flag for ThreadSanitizer: a switch of fibers creates no happens-before edge
constexpr u64 STEP = 100;          // nanoseconds per turn, if time is counted in turns
constexpr u64 EMPTY_TURNS = 64;    // turns per fiber without progress, before a waiting world yields the processor

// WAITING: at the barrier.
enum State { NEW, RUNNABLE, WAITING, DONE };

struct Block;

struct Fiber {
    Context context;
    Place place;
    Block* block;
    char* stack;
    void* shadow;  // ThreadSanitizer's record of the fiber
    State state;
};

// A kernel launched on a stream, with the numbers of blocks begun and ended.
struct Launch {
    Launch* next;
    Body body;
    const void* arguments;
    Block* blocks;
    u32 count, threads, stream, begun, ended;
};

constexpr u32 ROW_THREADS = 8;

// A row of threads moving 128 bytes together: the threads arrived, with the parts of the move, and the votes.
struct Row {
    u32 arrived;
    bool unanimous, verdict;
    RowAction action;
    u64 addresses[ROW_THREADS];
    u64* words[ROW_THREADS];
};

// A block: threads arrived at the barrier, their votes and the verdict of the last barrier, and the shared arrays.
struct Block {
    Launch* launch;
    Fiber* fibers;
    Row* rows;
    u32 arrived, ended;
    bool begun, unanimous, verdict;
    void* arrays[ARRAYS];
    u64 used;
    char* arena;
};

// The launches of a rank, in order. Only the first launch runs.
struct Stream {
    Launch *first, *last;
};

// A fault of a kernel: text, address and thread.
struct Fault {
    const char* what;
    u64 address;
    u32 stream, block, thread;
};

// The streams of all ranks, and the fibers of all running blocks (`active`). Ended launches are kept until the end.
struct World {
    Stream streams[STREAMS];
    Launch* retired;
    Fiber** active;
    u32 active_count, capacity, turn, residency;
    bool by_chance, by_turns, paused;
    u64 random, turns, idle;
    Context scheduler;
    void* shadow;
    Fiber* current;
    Fault fault;
    char text[200];
};

static __thread World* running;  // the world advanced by this thread; another thread may continue the world later

// ---------------------------------------------------------------- stacks, and what ThreadSanitizer is told

static bool is_watched() { return __tsan_create_fiber != nullptr; }
static void released(void* by) {
    if (is_watched()) __tsan_release(by);
}
static void acquired(void* by) {
    if (is_watched()) __tsan_acquire(by);
}
static void watch(void* shadow) {
    if (is_watched()) __tsan_switch_to_fiber(shadow, NO_ORDER);
}

// Unused stacks, linked through their last word. Several threads may run worlds, hence the lock.
struct Stacks {
    pthread_mutex_t lock;
    char* first;
};
static Stacks stacks = {PTHREAD_MUTEX_INITIALIZER, nullptr};

static char*& next_stack(char* stack) { return *reinterpret_cast<char**>(stack + STACK - sizeof(char*)); }

// Return an unused stack, or a new stack under ThreadSanitizer: two fibers on the same stack would look like a race.
static char* take_stack() {
    pthread_mutex_lock(&stacks.lock);
    char* stack = is_watched() ? nullptr : stacks.first;
    if (stack != nullptr) stacks.first = next_stack(stack);
    pthread_mutex_unlock(&stacks.lock);
    return stack != nullptr ? stack : static_cast<char*>(pages(STACK));
}

static void give_back(char* stack) {
    if (stack == nullptr) return;
    if (is_watched()) {
        munmap(stack, STACK);
        return;
    }
    pthread_mutex_lock(&stacks.lock);
    next_stack(stack) = stacks.first;
    stacks.first = stack;
    pthread_mutex_unlock(&stacks.lock);
}

// ---------------------------------------------------------------- whose turn it is

// Return 31 random bits, by Knuth's generator of 64 bits: the upper bits are the best.
static u32 draw(World& world) {
    world.random = world.random * 6364136223846793005ull + 1442695040888963407ull;
    return u32(world.random >> 33);
}

// Switch from the running fiber to the scheduler.
static void leave(World& world) {
    Fiber& fiber = *world.current;
    watch(world.shadow);
    exchange(fiber.context, world.scheduler);
}

// The body of every fiber. Never returns: a fiber is not resumed after DONE. The stream's edges order this launch after
// the launch before; the block's edge orders the fiber after `prepare_block`.
__attribute__((noipa)) static void run_fiber() {
    World& world = *running;
    Fiber& fiber = *world.current;
    Launch& launch = *fiber.block->launch;
    acquired(fiber.block);
    acquired(&world.streams[launch.stream]);
    launch.body(launch.arguments);
    released(&world.streams[launch.stream]);
    fiber.state = DONE;
    leave(world);
}

// Run a fiber until the fiber switches back. The stack is allocated at the first turn, not before.
static void resume(World& world, Fiber& fiber) {
    if (fiber.state == NEW) {
        fiber.stack = take_stack();
        fiber.shadow = is_watched() ? __tsan_create_fiber(0) : nullptr;
        fiber.state = RUNNABLE;
        prepare(fiber.context, fiber.stack, run_fiber);
    }
    world.current = &fiber;
    world.paused = false;
    ++world.turns;
    watch(fiber.shadow);
    exchange(world.scheduler, fiber.context);
}

// Let the fibers of a block take part in the turns.
static void begin(World& world, Block& block) {
    block.begun = true;
    ++block.launch->begun;
    for (u32 i = 0; i < block.launch->threads; ++i) {
        if (world.active_count == world.capacity) {
            world.capacity = 2 * world.capacity + 64;
            world.active = static_cast<Fiber**>(granted(realloc(world.active, world.capacity * sizeof(Fiber*))));
        }
        world.active[world.active_count++] = &block.fibers[i];
    }
}

// Begin blocks of the stream's first launch, up to `residency` at once.
static void admit(World& world, Stream& stream) {
    Launch* launch = stream.first;
    while (launch != nullptr && launch->begun < launch->count && launch->begun - launch->ended < world.residency) {
        u32 choice = world.by_chance ? draw(world) % launch->count : 0;
        while (launch->blocks[choice].begun) choice = (choice + 1) % launch->count;
        begin(world, launch->blocks[choice]);
    }
}

// Remove an ended block from the turns. The next launch of the stream may begin when the last block has ended.
static void retire(World& world, Block& block) {
    u32 kept = 0;
    for (u32 i = 0; i < world.active_count; ++i)
        if (world.active[i]->block != &block) world.active[kept++] = world.active[i];
    world.active_count = kept;
    Launch& launch = *block.launch;
    Stream& stream = world.streams[launch.stream];
    if (++launch.ended == launch.count) {
        stream.first = launch.next;
        launch.next = world.retired;
        world.retired = &launch;
    }
    admit(world, stream);
}

// Return the next fiber able to run, or null if all fibers wait at barriers: a deadlock.
static Fiber* choose(World& world) {
    const u32 count = world.active_count, first = world.by_chance ? draw(world) : world.turn + 1;
    for (u32 k = 0; k < count; ++k) {
        world.turn = (first % count + k) % count;
        Fiber* fiber = world.active[world.turn];
        if (fiber->state == NEW || fiber->state == RUNNABLE) return fiber;
    }
    return nullptr;
}

// ---------------------------------------------------------------- memory

static void prepare_block(Launch& launch, u32 index) {
    Block& block = launch.blocks[index];
    block.launch = &launch;
    block.unanimous = true;
    // Fill now, in the launching thread, and publish by `released` below. Filled later by another fiber,
    // ThreadSanitizer would report a race.
    block.arena = static_cast<char*>(memset(granted(malloc(ARENA)), UNWRITTEN, ARENA));
    block.fibers = static_cast<Fiber*>(granted(calloc(launch.threads, sizeof(Fiber))));
    block.rows = static_cast<Row*>(granted(calloc(launch.threads / ROW_THREADS + 1, sizeof(Row))));
    for (u32 i = 0; i < launch.threads; ++i) {
        block.fibers[i].block = &block;
        block.fibers[i].place = {{i, 0, 0}, {index, 0, 0}, {launch.threads, 1, 1}, {launch.count, 1, 1}};
    }
    released(&block);
}

// Move the 128 bytes of a row. The other ranks may be other processes, and a CPU moves 128 bytes in parts: so the last
// 8 bytes, the number of the operation, are stored last and loaded first.
static void move_row(const Row& row) {
    for (u32 i = 0; i < 2 * ROW_THREADS; ++i) {
        const u32 half = row.action == A_STORE ? i : 2 * ROW_THREADS - 1 - i;
        u64* const memory = reinterpret_cast<u64*>(row.addresses[half / 2]) + half % 2;
        u64* const word = row.words[half / 2] + half % 2;
        if (row.action == A_STORE)
            __atomic_store_n(memory, *word, __ATOMIC_RELEASE);
        else
            *word = __atomic_load_n(memory, __ATOMIC_ACQUIRE);
    }
}

static bool is_whole(const Row& row) {
    bool whole = row.addresses[0] % (2 * ROW_THREADS * sizeof(u64)) == 0;
    for (u32 i = 0; i < ROW_THREADS; ++i) whole = whole && row.addresses[i] == row.addresses[0] + 2 * i * sizeof(u64);
    return whole;
}

static void let_go(Launch* launch) {
    for (u32 b = 0; b < launch->count; ++b) {
        Block& block = launch->blocks[b];
        for (u32 i = 0; i < launch->threads; ++i) {
            give_back(block.fibers[i].stack);
            if (block.fibers[i].shadow != nullptr) __tsan_destroy_fiber(block.fibers[i].shadow);
        }
        free(block.fibers);
        free(block.rows);
        free(block.arena);
    }
    free(launch->blocks);
    free(launch);
}

static void let_go_all(Launch* launch) {
    while (launch != nullptr) {
        Launch* next = launch->next;
        let_go(launch);
        launch = next;
    }
}

}  // namespace host

// ---------------------------------------------------------------- what kernels call

extern "C" {

// `noipa` here and below: fibers may continue in another thread, so the address of a thread-local variable must be
// computed anew in every call.
__attribute__((noipa)) const Place* gc_place() { return &host::running->current->place; }

__attribute__((noipa)) void gc_fault(const char* what, u64 address) {
    host::World& world = *host::running;
    const host::Fiber& fiber = *world.current;
    if (world.fault.what == nullptr)
        world.fault = {what, address, fiber.block->launch->stream, fiber.place.block.x, fiber.place.thread.x};
}

// `paused` marks a turn without progress, see gc_advance().
__attribute__((noipa)) void gc_pause() {
    host::World& world = *host::running;
    world.paused = true;
    host::leave(world);
}

__attribute__((noipa)) u32 gc_coin() {
    host::World& world = *host::running;
    return world.by_chance ? host::draw(world) & 1 : 0;
}

// Switch in a quarter of the cases: tests meet orders between any two accesses, and still make progress.
__attribute__((noipa)) void gc_between() {
    host::World& world = *host::running;
    if (world.by_chance && host::draw(world) % 4 == 0) host::leave(world);
}

__attribute__((noipa)) bool gc_barrier(bool vote) {
    host::World& world = *host::running;
    host::Fiber& fiber = *world.current;
    host::Block& block = *fiber.block;
    host::released(&block);
    block.unanimous = block.unanimous && vote;
    if (++block.arrived == block.launch->threads) {
        block.arrived = 0;
        block.verdict = block.unanimous;
        block.unanimous = true;
        for (u32 i = 0; i < block.launch->threads; ++i)
            if (block.fibers[i].state == host::WAITING) block.fibers[i].state = host::RUNNABLE;
        if (world.by_chance) host::leave(world);
    } else {
        fiber.state = host::WAITING;
        host::leave(world);
    }
    host::acquired(&block);
    return block.verdict;
}

__attribute__((noipa)) bool gc_row(RowAction action, u64 address, u64* word, bool vote) {
    host::World& world = *host::running;
    host::Fiber& fiber = *world.current;
    const u32 thread = fiber.place.thread.x, lane = thread % host::ROW_THREADS, first = thread - lane;
    host::Row& row = fiber.block->rows[thread / host::ROW_THREADS];
    host::released(&row);
    if (row.arrived == 0) {
        row.action = action;
        row.unanimous = true;
    } else if (row.action != action) {
        gc_fault("a row with threads at different instructions", address);
    }
    row.addresses[lane] = address;
    row.words[lane] = word;
    row.unanimous = row.unanimous && vote;
    if (++row.arrived == host::ROW_THREADS) {
        row.arrived = 0;
        row.verdict = row.unanimous;
        if (action != A_VOTE && !host::is_whole(row))
            gc_fault("a row that is not 128 bytes in a line", address);
        else if (action != A_VOTE)
            host::move_row(row);
        for (u32 i = first; i < first + host::ROW_THREADS; ++i)
            if (fiber.block->fibers[i].state == host::WAITING) fiber.block->fibers[i].state = host::RUNNABLE;
        if (world.by_chance) gc_pause();
    } else {
        fiber.state = host::WAITING;
        // No progress: a row waiting for another rank loads and votes for ever.
        gc_pause();
    }
    host::acquired(&row);
    return row.verdict;
}

__attribute__((noipa)) u64 gc_clock() {
    host::World& world = *host::running;
    if (world.by_turns) return world.turns * host::STEP;
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return u64(now.tv_sec) * 1000000000 + u64(now.tv_nsec);
}

__attribute__((noipa)) void* gc_shared(u32 place, u64 bytes) {
    host::Block& block = *host::running->current->block;
    if (place >= host::ARRAYS || (block.arrays[place] == nullptr && block.used + bytes > host::ARENA)) {
        // Some valid memory: the kernel runs on until the world reports the fault.
        gc_fault("more shared memory than a block has", 0);
        return block.arena;
    }
    if (block.arrays[place] == nullptr) {
        block.arrays[place] = block.arena + block.used;
        // Arrays of words need 16-byte alignment.
        block.used += (bytes + 15) / 16 * 16;
    }
    return block.arrays[place];
}

// ---------------------------------------------------------------- what runs kernels

// Return a new world. Turns are random if `seed` is not 0. With `by_turns`, time is counted in turns: deadlines are
// then reproducible.
host::World* gc_world(u64 seed, u32 residency, u32 by_turns) {
    host::World* world = static_cast<host::World*>(host::granted(calloc(1, sizeof(host::World))));
    world->by_chance = seed != 0;
    world->random = seed;
    world->residency = residency;
    world->by_turns = by_turns;
    return world;
}

// Append a launch to a stream. The memory at `arguments` must stay valid until the end of the world.
void gc_launch(host::World* world, u32 stream, Body body, const void* arguments, u32 blocks, u32 threads) {
    host::Launch* launch = static_cast<host::Launch*>(host::granted(calloc(1, sizeof(host::Launch))));
    host::Block* room = static_cast<host::Block*>(host::granted(calloc(blocks, sizeof(host::Block))));
    *launch = {nullptr, body, arguments, room, blocks, threads, stream, 0, 0};
    for (u32 index = 0; index < blocks; ++index) host::prepare_block(*launch, index);
    host::Stream& queue = world->streams[stream];
    (queue.first == nullptr ? queue.first : queue.last->next) = launch;
    queue.last = launch;
    if (queue.first == launch) host::admit(*world, queue);
}

// Advance the world. Return 0 once all launches have ended, or at a deadlock at barriers (a fault). Return 1 if all
// remaining fibers have waited for a while, unless `to_the_end` is set: other processes may have to run first.
u32 gc_advance(host::World* world, u32 to_the_end) {
    host::running = world;
    world->shadow = host::is_watched() ? __tsan_get_current_fiber() : nullptr;
    world->idle = 0;
    while (world->active_count > 0) {
        host::Fiber* fiber = host::choose(*world);
        if (fiber == nullptr) {
            gc_fault("a barrier that not all threads of the block come to", 0);
            return 0;
        }
        host::resume(*world, *fiber);
        if (fiber->state == host::DONE && ++fiber->block->ended == fiber->block->launch->threads)
            host::retire(*world, *fiber->block);
        world->idle = world->paused ? world->idle + 1 : 0;
        if (!to_the_end && world->idle > host::EMPTY_TURNS * world->active_count) return 1;
    }
    return 0;
}

// Return null, or the text of the first fault.
const char* gc_complaint(host::World* world) {
    const host::Fault& fault = world->fault;
    if (fault.what == nullptr) return nullptr;
    snprintf(world->text, sizeof(world->text), "%s (stream %u, block %u, thread %u, address 0x%llx)", fault.what,
             fault.stream, fault.block, fault.thread, fault.address);
    return world->text;
}

// Free the world and its launches.
void gc_end(host::World* world) {
    for (host::Stream& stream : world->streams) {
        host::acquired(&stream);
        host::let_go_all(stream.first);
    }
    host::let_go_all(world->retired);
    free(world->active);
    free(world);
}

// A residency of all blocks: the blocks of a rank run together, as on a GPU with enough processors.
const char* gc_run(Body body, const void* arguments, u32 blocks, u32 threads) {
    static __thread char text[sizeof(host::World::text)];
    host::World* world = gc_world(0, blocks, 0);
    gc_launch(world, 0, body, arguments, blocks, threads);
    while (gc_advance(world, 0) != 0) sched_yield();  // the awaited ranks may be other processes on this processor
    const char* complaint = gc_complaint(world);
    if (complaint != nullptr) memcpy(text, complaint, sizeof(text));
    gc_end(world);
    return complaint == nullptr ? nullptr : text;
}

}
