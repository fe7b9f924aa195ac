// Ranks of one process carry out the calls of a program (written.py) one after the other, nothing between them. Exits
// with 1 where a result is wrong.
//
//     driver PROGRAM         ranks are threads; ThreadSanitizer, or AddressSanitizer, looks on
//     driver PROGRAM SEED    all ranks are in one thread, and the seed decides which of them goes on when
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <thread>

#include "engine/walker.h"

using namespace gpucoll;

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(start, nbytes) ((void)0)
#define ASAN_UNPOISON_MEMORY_REGION(start, nbytes) ((void)0)
#endif

static const uint64_t SLAB = 1 << 17;  // bytes of a rank's symmetric memory: half for inputs, half for outputs

struct Words {
    const char* at;
    int64_t number() {
        int64_t found;
        std::memcpy(&found, at, sizeof found);
        at += sizeof found;
        return found;
    }
    uint64_t size() { return static_cast<uint64_t>(number()); }
    uint32_t index() { return static_cast<uint32_t>(number()); }
};

struct Bytes {
    const char* start;
    uint64_t nbytes;
    explicit Bytes(Words& words) : nbytes(words.size()) {
        start = words.at;
        words.at += (nbytes + 7) / 8 * 8;
    }
};

// A rank's part of a call.
struct Part_of {
    bool symmetric, in_place;
    Plan plan;
    std::vector<Bytes> given, expected;
};

static void take_part(Words& words, std::vector<Part>& parts) {
    const uint32_t rank = words.index(), buffer = words.index();
    parts.push_back({rank, buffer, words.size()});
}

static void take_plan(Words& words, Plan& plan, uint32_t rank) {
    plan.signature = words.number();
    for (uint64_t* one : {&plan.given, &plan.taken, &plan.scratch, &plan.private_bytes, &plan.itemsize})
        *one = words.size();
    const long dtype = words.number(), op = words.number();
    plan.combine = op < 0 ? nullptr : combine_of(dtype, op);
    plan.contributions = words.size();
    plan.finish = plan.contributions == 0 ? nullptr : op == AVG ? mean_of(dtype) : truth_of(dtype);
    plan.flags = words.index();
    plan.root = words.index();
    for (uint64_t left = words.size(); left > 0; left--) plan.peers.push_back(words.index());
    for (uint64_t left = words.size(); left > 0; left--) {
        const uint32_t buffer = words.index(), peer = words.index();
        plan.readers.push_back({buffer, peer, words.number()});
        plan.read[buffer] = true;
    }
    for (uint64_t left = words.size(); left > 0; left--) plan.starts.push_back(words.number());
    for (uint64_t left = words.size(); left > 0; left--) {
        Instruction one = {static_cast<Instruction::Opcode>(words.number()), words.index(),
                           static_cast<uint32_t>(plan.parts.size()), 0, 0, words.number(), {rank, 0, 0}, 0};
        std::vector<Part> to;
        take_part(words, to);
        one.to = to[0];
        one.nbytes = words.size();
        one.count = words.index();
        one.copies = words.index();
        for (uint32_t i = 0; i < one.count + one.copies; i++) take_part(words, plan.parts);
        plan.add(one);
    }
}

// The ranks, and what they call.
struct World {
    uint32_t ranks;
    uint64_t variants, kinds;
    std::deque<Node> nodes;
    std::vector<std::vector<Part_of>> calls;  // by kind and rank
    std::vector<uint64_t> turns;
    std::atomic<int> wrong{0};

    explicit World(Words& words) : ranks(words.index()) {
        const uint64_t first = words.size(), workspace_bytes = words.size();
        const bool copies = words.number() != 0, far = words.number() != 0;
        variants = words.size();
        kinds = words.size();
        make_nodes(words, first, workspace_bytes, copies, far);
        for (uint64_t kind = 0; kind < kinds; kind++) {
            calls.emplace_back();
            for (uint32_t rank = 0; rank < ranks; rank++) {
                Part_of part = {words.number() != 0, words.number() != 0, {}, {}, {}};
                take_plan(words, part.plan, rank);
                for (uint64_t variant = 0; variant < variants; variant++) {
                    part.given.emplace_back(words);
                    part.expected.emplace_back(words);
                }
                calls.back().push_back(std::move(part));
            }
        }
        for (uint64_t left = words.size(); left > 0; left--) turns.push_back(words.size());
    }

    void make_nodes(Words& words, uint64_t first, uint64_t workspace_bytes, bool copies, bool far) {
        const uint64_t control = first + 2 * SHOWN * (workspace_bytes + PAGE);
        std::vector<Head*> heads;
        std::vector<Segment> segments;
        std::vector<int64_t> keys;
        for (uint32_t rank = 0; rank < ranks; rank++) {
            keys.push_back(100 + rank);
            const uint64_t place = reinterpret_cast<uintptr_t>(std::calloc(1, control + PAGE));
            heads.push_back(reinterpret_cast<Head*>((place + PAGE - 1) / PAGE * PAGE));
            for (uint32_t buffer = 0; buffer <= SHOWN; buffer++) {  // the last is symmetric memory
                const uint64_t nbytes = buffer == SHOWN ? SLAB : words.size();
                segments.push_back({rank, buffer, nbytes == 0 ? nullptr : new char[nbytes], nbytes});
            }
        }
        for (uint32_t rank = 0; rank < ranks; rank++) {
            Node& node = nodes.emplace_back();
            node.rank = rank;
            node.ranks = ranks;
            node.crowd = 1;
            node.spins = true;
            node.copies = copies;
            node.process = far ? -1 : getpid();
            node.first = first;
            node.workspace_bytes = workspace_bytes;
            node.heads = heads;
            node.keys = keys;
            node.processes.assign(ranks, getpid());
            node.check = ranks % 2 == 0 ? ALL : PEERS;
            for (uint32_t other = 0; other < ranks; other++)
                if (other != rank) node.same_node.push_back(other);
            for (const Segment& one : segments) {
                if (one.rank != rank) node.others.add(one);
                else if (one.key == SHOWN) node.symmetric.add(one);
                else node.staging[one.key] = &node.all_staging.emplace_back(one);
            }
            for (std::vector<int64_t>& marks : node.unread) marks.resize(ranks);
        }
        for (uint32_t rank = 0; rank < ranks; rank++) {
            ASAN_POISON_MEMORY_REGION(reinterpret_cast<char*>(heads[rank]) + first, control - first);
            for (uint32_t which = 0; which < 2 * SHOWN; which++)
                ASAN_UNPOISON_MEMORY_REGION(nodes[0].workspace(rank, which / SHOWN, which % SHOWN), workspace_bytes);
        }
    }

    bool run_as_threads();
    bool run_in_turns(uint64_t seed);
};

// One rank's way through all calls. When a call has returned, no rank reads its arrays any more, nor writes to them.
class Caller {
  public:
    Caller(World& of, uint32_t one) : world(of), node(of.nodes[one]), rank(one) { begin(); }

    bool has_ended() const { return turn == world.turns.size(); }

    // Goes on as far as it can; returns whether a call has ended.
    bool go_on(bool patient) {
        const Walker::Outcome outcome = walker.go_on(node, patient);
        if (outcome == Walker::WAITING) return false;
        const Bytes& expected = part().expected[turn % world.variants];
        if (outcome != Walker::DONE || std::memcmp(out, expected.start, expected.nbytes) != 0) {
            std::fprintf(stderr, "turn %lu, kind %lu, rank %u: outcome %d\n", turn, world.turns[turn], rank, outcome);
            world.wrong++;
            if (outcome != Walker::DONE) std::_Exit(1);
        }
        if (part().plan.given > 0) std::memset(x, 0x5a, part().plan.given);
        if (part().plan.taken > 0) std::memset(out, 0xa5, part().plan.taken);
        turn++;
        begin();
        return true;
    }

    uint64_t turn = 0;

  private:
    World& world;
    Node& node;
    const uint32_t rank;
    Walker walker;
    std::unique_ptr<char[]> own, beside;
    char *x = nullptr, *out = nullptr;

    const Part_of& part() const { return world.calls[world.turns[turn]][rank]; }

    void begin() {
        if (has_ended()) return;
        const Bytes& given = part().given[turn % world.variants];
        Segment found;
        node.symmetric.of(rank, SHOWN, &found);
        char* slab = found.start;
        own.reset(new char[part().plan.given]);
        beside.reset(new char[part().plan.taken]);
        x = part().symmetric ? slab : own.get();
        out = part().in_place ? x : part().symmetric ? slab + SLAB / 2 : beside.get();
        if (given.nbytes > 0) std::memcpy(x, given.start, given.nbytes);
        walker.begin(node, &part().plan, x, out, true);
    }
};

bool World::run_as_threads() {
    std::atomic<bool> goes_on{true};
    std::thread mapper([this, &goes_on] {  // as a program that makes symmetric arrays beside its calls
        for (int64_t key = -2; goes_on && key > -1000; key--) {
            for (Node& node : nodes) {
                node.others.add({node.rank, key, nullptr, 0});
                node.symmetric.add({node.rank, key, nullptr, 0});
            }
            sched_yield();
        }
    });
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < ranks; rank++)
        threads.emplace_back([this, rank] {
            for (Caller one(*this, rank); !one.has_ended();)
                if (!one.go_on(one.turn % 2 == 0)) sched_yield();
        });
    for (std::thread& one : threads) one.join();
    goes_on = false;
    mapper.join();
    return true;
}

// In one thread, so that the seed alone decides which rank goes on when. For a while at a time one rank is held back:
// the others come as far ahead of it as the engine lets them. Returns whether all calls have ended.
bool World::run_in_turns(uint64_t seed) {
    const uint64_t longest = 512, most = 100000;  // steps of one such time; steps in which some call must end
    std::mt19937_64 random(seed);
    std::deque<Caller> callers;
    for (uint32_t rank = 0; rank < ranks; rank++) callers.emplace_back(*this, rank);
    const auto has_ended = [](const Caller& one) { return one.has_ended(); };
    for (uint64_t idle = 0; idle < most;) {
        if (std::all_of(callers.begin(), callers.end(), has_ended)) return true;
        const uint64_t held = random() % (ranks + 1);  // `ranks`: none
        for (uint64_t left = random() % longest + 1; left > 0; left--) {
            const uint64_t rank = random() % ranks;
            const bool ends = rank != held && !callers[rank].has_ended() && callers[rank].go_on(false);
            idle = ends ? 0 : idle + 1;
        }
    }
    std::fprintf(stderr, "no call has ended in %lu steps\n", most);
    return false;
}

int main(int count, char** words_of) {
    std::ifstream file(words_of[1], std::ios::binary);
    const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    Words words = {text.data()};
    World world(words);
    const bool has_ended = count > 2 ? world.run_in_turns(std::stoull(words_of[2])) : world.run_as_threads();
    std::printf("%zu calls, wrong: %d\n", world.turns.size(), world.wrong.load());
    return world.wrong != 0 || !has_ended;
}
