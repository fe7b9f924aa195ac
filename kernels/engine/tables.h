// Printed by gpucoll/executors/engine/tables.py, which has the tables for both sides: not to be edited.
#pragma once
#include <cstdint>

namespace gpucoll {

static const int TEXT = 256;
static const int ROUNDS = 20;
static const uint32_t SHOWN = 3;
static const int64_t SLOTS = 64;
static const uint64_t SLOT = 16384;
static const uint64_t OPENING = 8192;
static const uint64_t PAGE = 4096;
static const uint64_t CACHE_LINE = 64;
static const uint64_t HEAD = 768;
static const uint64_t COUNTER = 0;
static const uint64_t FAILURE = 4;
static const uint64_t ARRIVED = 5;
static const uint64_t TOKEN = 86;
static const uint64_t BEGUN = 90;
static const uint64_t ENDED = 91;
static const uint64_t LEFT = 92;
static const uint64_t SLOT_BYTES = 16704;

#define GC_OPCODES WAIT, PUBLISH, REDUCE, CALL, SEND, RECEIVE, END, OPEN, TAKE, AGREE
enum Buffer : uint32_t { INPUT, OUTPUT, SCRATCH, PRIVATE, GIVEN, RESULT };
enum Check : uint32_t { OFF, PEERS, ALL };
enum Mode : uint32_t { WAITS = 1, IN_PLACE = 2 };
enum PlanFlag : uint32_t { IN_CONTROL = 1, OWN_IN_CONTROL = 2, COPIES_INPUT = 4, KEEPS_OUTPUT = 8, OVERWRITES = 16, REFUSES = 32, ANNOUNCED = 64, ONLY_COMPARES = 128, DEFERRED = 256 };
enum OpPlace { SUM, PROD, MIN, MAX, AVG, BAND, BOR, BXOR, LAND, LOR, LXOR, EXACT_SUM, EXACT_AVG };

// What there is for each dtype, in the order of Python's table (`combine.h`).
#define GC_ROWS \
    whole_row<Bool>(), \
    whole_row<i8>(), \
    whole_row<i16>(), \
    whole_row<i32>(), \
    whole_row<i64>(), \
    whole_row<u8>(), \
    whole_row<u16>(), \
    whole_row<u32>(), \
    whole_row<u64>(), \
    real_row<Float16>(), \
    real_row<Bfloat16>(), \
    real_row<float>(), \
    real_row<double>(), \
    complex_row<Complex<float>>(), \
    complex_row<Complex<double>>(), \
    real_row<Float8E4m3fn>(), \
    real_row<Float8E5m2>(),

// The code of a dtype of NumPy's own in a message, by its kind (b, i, u, f, c) and log2 of its bytes.
static const uint16_t CODES[5][5] = {{2, 0, 0, 0, 0}, {3, 4, 5, 6, 0}, {7, 8, 9, 10, 0}, {0, 11, 13, 14, 0}, {0, 0, 0, 15, 16}};

}  // namespace gpucoll
