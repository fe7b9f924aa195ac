// What a rank has called, in memory that is a file's: it stays readable after the process has been killed.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstring>
#include <ctime>

static const int SPOKEN = 224;  // bytes of a call in words

// As gpucoll/health/flight.py has it.
struct FlightRecord {
    std::atomic<uint64_t> number;  // of the call, counted from 1; 0 while the record is being written
    int64_t began, ended;          // nanoseconds of CLOCK_MONOTONIC; `ended` is 0 while it is under way
    uint64_t nbytes;
    char words[SPOKEN];
};

static_assert(sizeof(FlightRecord) == 256, "records are read by Python, too");

struct Flight {
    FlightRecord* records = nullptr;  // null where nothing is recorded
    std::atomic<uint64_t>* last = nullptr;
    uint64_t capacity = 0;

    static int64_t now() {
        timespec time;
        clock_gettime(CLOCK_MONOTONIC, &time);
        return static_cast<int64_t>(time.tv_sec) * 1000000000 + time.tv_nsec;
    }

    void began(const char* words, uint64_t length, uint64_t nbytes) {
        if (records == nullptr) return;
        const uint64_t number = last->load(std::memory_order_relaxed) + 1;
        FlightRecord& one = records[number % capacity];
        one.number.store(0, std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_release);
        one.began = now();
        one.ended = 0;
        one.nbytes = nbytes;
        std::memset(one.words, 0, SPOKEN);
        std::memcpy(one.words, words, length < SPOKEN ? length : SPOKEN);
        one.number.store(number, std::memory_order_release);
        last->store(number, std::memory_order_release);
    }

    // Forgets the last one, which this rank was not in.
    void left() {
        if (records == nullptr) return;
        const uint64_t number = last->load(std::memory_order_relaxed);
        records[number % capacity].number.store(0, std::memory_order_release);
        last->store(number - 1, std::memory_order_release);
    }

    void ended() {
        if (records != nullptr) records[last->load(std::memory_order_relaxed) % capacity].ended = now();
    }
};
