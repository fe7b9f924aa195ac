// What a fiber is made of: a stack, and what must be kept while it does not run.
#pragma once

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#if !defined(__x86_64__) || defined(GC_UCONTEXT)
#include <ucontext.h>
#endif

namespace host {

constexpr size_t STACK = (64 << 10) + 256;  // no power of two, or the tops of all stacks would share a few cache lines

static void* granted(void* memory) {
    if (memory == nullptr || memory == MAP_FAILED) abort();
    return memory;
}

static void* pages(size_t bytes) {
    return granted(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
}

#if !defined(__x86_64__) || defined(GC_UCONTEXT)

struct Context {
    ucontext_t state;
};
static void exchange(Context& from, Context& to) { swapcontext(&from.state, &to.state); }
static void prepare(Context& context, char* stack, void (*start)()) {
    getcontext(&context.state);
    context.state.uc_stack.ss_sp = stack;
    context.state.uc_stack.ss_size = STACK;
    context.state.uc_link = nullptr;
    makecontext(&context.state, start, 0);
}

#else

struct Context {
    void* top;
};
// Saves what a call must preserve on the stack that is left, and takes it from the one that is entered.
__attribute__((naked, noipa)) static void exchange(Context&, Context&) {
    asm("pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15\n"
        "movq %rsp, (%rdi); movq (%rsi), %rsp\n"
        "popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp; ret");
}
static void prepare(Context& context, char* stack, void (*start)()) {
    // Six registers, then the address to return to, above which the stack is aligned as after a call.
    void** top = reinterpret_cast<void**>(stack + STACK) - 8;
    memset(top, 0, 8 * sizeof(void*));
    top[6] = reinterpret_cast<void*>(start);
    context.top = top;
}

#endif

}  // namespace host
