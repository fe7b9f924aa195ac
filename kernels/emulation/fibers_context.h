// The context of a fiber: a stack, and the registers saved while the fiber does not run.
#pragma once

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#if !defined(__x86_64__) || defined(GC_UCONTEXT)
#include <ucontext.h>
#endif

namespace host {

constexpr size_t STACK = (64 << 10) + 256;  // not a power of two: the tops of all stacks would share a few cache lines

// Return `memory`, or abort: a kernel cannot report a failed allocation.
static void* granted(void* memory) {
    if (memory == nullptr || memory == MAP_FAILED) abort();
    return memory;
}

// MAP_NORESERVE: thousands of stacks are mapped, and few pages of each are touched.
static void* pages(size_t bytes) {
    return granted(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
}

// Portable but slow: `swapcontext` makes a system call for the signal mask at every switch.
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
// Switch stacks. The callee-saved registers of the x86-64 calling convention are pushed on the old stack and popped
// from the new stack; the compiler saves all other registers around the call. `naked`: a prologue would move the stack
// pointer.
__attribute__((naked, noipa)) static void exchange(Context&, Context&) {
    asm("pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15\n"
        "movq %rsp, (%rdi); movq (%rsi), %rsp\n"
        "popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp; ret");
}
static void prepare(Context& context, char* stack, void (*start)()) {
    // Six registers, then the return address. Above the address the stack is aligned as after a call.
    void** top = reinterpret_cast<void**>(stack + STACK) - 8;
    memset(top, 0, 8 * sizeof(void*));
    top[6] = reinterpret_cast<void*>(start);
    context.top = top;
}

#endif

}  // namespace host
