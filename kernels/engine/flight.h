// The flight recorder: the last calls of a rank, in a mapped file. The file stays readable after SIGKILL.
//
// Records form a ring, written by this rank and read at any time by other processes. A record's number is 0 during
// writing and stored last, so a reader can tell a record being written.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstring>

namespace gpucoll {

static const int DESCRIPTION_BYTES = 208, SITE_BYTES = 128;  // fill up a record of 384 bytes

// The times of a call on a rank, in nanoseconds: all that is kept of a call, and added up for `stats`.
struct CallTimes {
    int64_t began = 0, ended = 0;  // by CLOCK_MONOTONIC; `ended` is 0 while the call is under way
    int64_t own = 0, waited = 0;   // the rank's own delay before the call, and the wait for other ranks to come
};

// The layout is shared with gpucoll/health/flight.py.
struct FlightRecord {
    std::atomic<uint64_t> number;  // of the call, counted from 1; 0 while the record is being written
    CallTimes times;
    uint64_t nbytes;
    char description[DESCRIPTION_BYTES];
    char site[SITE_BYTES];         // file and line of the program's call, or empty
};

static_assert(sizeof(FlightRecord) == 384, "records are read by Python, too");

// The recorder of a rank.
struct Flight {
    FlightRecord* records = nullptr;  // null: recording is off
    std::atomic<uint64_t>* last = nullptr;  // in the file: number of the last call
    uint64_t capacity = 0;
    char site[SITE_BYTES] = {};             // of the call to be recorded next

    // Note the beginning of a call at `time`, nanoseconds of CLOCK_MONOTONIC.
    void began(const char* description, uint64_t length, uint64_t nbytes, int64_t time) {
        if (records == nullptr) return;
        // Relaxed: only this rank stores `last`.
        const uint64_t number = last->load(std::memory_order_relaxed) + 1;
        FlightRecord& one = records[number % capacity];
        // The 0 must be visible before any new field: a release fence orders the store before the later plain stores.
        one.number.store(0, std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_release);
        one.times = {time, 0, 0, 0};
        one.nbytes = nbytes;
        std::memset(one.description, 0, DESCRIPTION_BYTES);
        std::memcpy(one.description, description, length < DESCRIPTION_BYTES ? length : DESCRIPTION_BYTES);
        std::memcpy(one.site, site, SITE_BYTES);
        // Release: the fields are complete for a reader of the number, the record for a reader of `last`.
        one.number.store(number, std::memory_order_release);
        last->store(number, std::memory_order_release);
    }

    // Remove the last record: this rank was not in the call after all (`Walker::has_passed`).
    void left() {
        if (records == nullptr) return;
        const uint64_t number = last->load(std::memory_order_relaxed);
        records[number % capacity].number.store(0, std::memory_order_release);
        last->store(number - 1, std::memory_order_release);
    }

    // Note the times of the last call, which has ended.
    void ended(const CallTimes& times) {
        if (records != nullptr) records[last->load(std::memory_order_relaxed) % capacity].times = times;
    }
};

}  // namespace gpucoll
