// Copies of bytes: inside a process, past the caches, and to or from the memory of another process.
#pragma once
#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <sys/uio.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "engine/tables.h"

namespace gpucoll {

// Copying or combining in pieces keeps a piece in the cache between fetching, combining and writing.
static const uint64_t COPY_BYTES = 1 << 19;

// Copy to or from another process by `call` (process_vm_readv, process_vm_writev). Return 0, or the system's error.
template <class Call> static int transfer(Call call, int32_t process, char* here, char* there, uint64_t nbytes) {
    // The system may copy fewer bytes than requested (at most 2 GiB): ask for the rest.
    while (nbytes > 0) {
        const iovec mine = {here, nbytes}, theirs = {there, nbytes};
        const ssize_t done = call(process, &mine, 1, &theirs, 1, 0);
        if (done <= 0) return done < 0 && errno != 0 ? errno : EFAULT;
        here += done;
        there += done;
        nbytes -= static_cast<uint64_t>(done);
    }
    return 0;
}

// Copy in pieces: `memmove` of a long row bypasses the caches, and the bytes are read again soon.
static void copy(char* to, const char* from, uint64_t nbytes) {
    for (uint64_t start = 0; start < nbytes && to != from; start += COPY_BYTES)
        std::memmove(to + start, from + start, std::min(COPY_BYTES, nbytes - start));
}

// Copy past the caches, for long results not read again soon: the processor need not read a line before overwriting.
static void stream(char* to, const char* from, uint64_t nbytes) {
#if defined(__SSE2__)
    // Streaming stores need aligned addresses: copy the bytes before the first line of `to` normally.
    const uint64_t head = std::min(nbytes, -static_cast<uint64_t>(reinterpret_cast<uintptr_t>(to)) % CACHE_LINE);
    std::memmove(to, from, head);
    for (to += head, from += head, nbytes -= head; nbytes >= CACHE_LINE; to += CACHE_LINE, from += CACHE_LINE, nbytes -= CACHE_LINE) {
        const __m128i* words = reinterpret_cast<const __m128i*>(from);
        const __m128i a = _mm_loadu_si128(words), b = _mm_loadu_si128(words + 1), c = _mm_loadu_si128(words + 2),
                      d = _mm_loadu_si128(words + 3);
        __m128i* line = reinterpret_cast<__m128i*>(to);
        _mm_stream_si128(line, a);
        _mm_stream_si128(line + 1, b);
        _mm_stream_si128(line + 2, c);
        _mm_stream_si128(line + 3, d);
    }
    // Streaming stores are weakly ordered: without a fence the progress counter could overtake the data.
    _mm_sfence();
#endif
    copy(to, from, nbytes);
}

}  // namespace gpucoll
