// All-reduce of a small message by packets, as NCCL's LL protocol: every rank writes all data to every other rank.
//
// Each half of a packet carries 4 bytes of data and the number of the operation (`epoch`). The receiving rank tests the
// numbers, so no flag, fence or second message is needed: latency is a single write across the link.
//
// The packets go into two buffers in turn. Before a rank writes into a buffer again, the rank has heard from every
// other rank in some operation in between. The other ranks started this operation after reading the buffer, so no
// unread packet is overwritten.
//
// The number in a packet has 32 bits, and a packet beyond the end of shorter messages stays for ever. So the first
// operation in a buffer LIFETIME operations after the last renewal renews the buffer: each rank gives all packets of its
// slab another number, and the ranks meet before they write. No packet is ever 2^32 operations old.
#include "device/peer_fold.h"

struct PacketsArguments {
    Heap heap;
    const void* src;
    void* dst;
    u64 count, nan_bytes;  // bytes of the result set to NaN if a rank is missing
};

// Return word `index` of the input. The array may end within the word and need not be aligned to words.
template <class T> GC_DEV Word gather(const PacketsArguments& a, u64 index) {
    constexpr u64 PER_WORD = sizeof(Word) / sizeof(T);
    const u64 here = address_of(a.src) + index * sizeof(Word);
    if (here % sizeof(Word) == 0 && (index + 1) * PER_WORD <= a.count) return load<Word>(here);
    Items<T, Word> items;
    items.unit = {0, 0, 0, 0};
    GC_UNROLL
    for (u32 i = 0; i < PER_WORD; ++i)
        if (index * PER_WORD + i < a.count)
            items.item[i] = load<T>(here + i * sizeof(T));
    return items.unit;
}
// Store word `index` of the result, with the same freedoms.
template <class T> GC_DEV void scatter(const PacketsArguments& a, u64 index, Word word) {
    constexpr u64 PER_WORD = sizeof(Word) / sizeof(T);
    const u64 there = address_of(a.dst) + index * sizeof(Word);
    if (there % sizeof(Word) == 0 && (index + 1) * PER_WORD <= a.count) {
        store<Word>(there, word);
        return;
    }
    Items<T, Word> items;
    items.unit = word;
    GC_UNROLL
    for (u32 i = 0; i < PER_WORD; ++i)
        if (index * PER_WORD + i < a.count)
            store<T>(there + i * sizeof(T), items.item[i]);
}

// The words whose packets lie together: the first packets of all words, then the second ones. The threads of a warp then
// write and read whole cache lines.
constexpr u32 TILE = 32;

// Return the address, in the owner's slab, of the first packet with word `index` from `writer`; the second packet
// follows TILE packets later.
GC_DEV u64 packets_of(const Heap& heap, u32 owner, u32 writer, u64 epoch, u64 index) {
    const u64 buffer = epoch % 2;
    const u64 room = heap.slabs[owner] + heap.packets + (buffer * heap.ranks + writer) * heap.packet_room;
    return room + (index / TILE * 2 * TILE + index % TILE) * sizeof(Word);
}

constexpr u64 LIFETIME = u64(1) << 31;  // operations between two renewals of a buffer

// Return whether an operation is to renew its buffer. Both loads at once: neither waits for the epoch.
GC_DEV bool is_worn(const Heap& heap, u64 epoch) {
    const u64 even = load_relaxed(address_of(&state_of(heap)->renewed[0]));
    const u64 odd = load_relaxed(address_of(&state_of(heap)->renewed[1]));
    return epoch - (epoch % 2 == 0 ? even : odd) >= LIFETIME;
}

// Renew this block's packets in this slab: the number is of an operation in the other buffer. Return false if some rank
// has not come. A block renews what the same block of the other ranks writes, so the meeting orders the stores.
GC_DEV bool renew(const Heap& heap, u32 channel, u64 epoch, u64 first, u64 step) {
    const u32 number = u32(epoch - 1);
    for (u32 writer = 0; writer < heap.ranks; ++writer) {
        for (u64 index = first; index < heap.packet_room / (2 * sizeof(Word)); index += step) {
            const u64 here = packets_of(heap, heap.rank, writer, epoch, index);
            store_packet(here, {0, number, 0, number});
            store_packet(here + TILE * sizeof(Word), {0, number, 0, number});
        }
    }
    return meet(heap, channel, MEETINGS * epoch);
}

// Write a word to all other ranks, as two packets.
GC_DEV void push(const Heap& heap, u64 epoch, u64 index, Word word) {
    const u32 number = u32(epoch);
    // Start with the next rank: otherwise all ranks would write to rank 0 first.
    for (u32 k = 1; k < heap.ranks; ++k) {
        const u64 there = packets_of(heap, (heap.rank + k) % heap.ranks, heap.rank, epoch, index);
        store_packet(there, {word.x, number, word.y, number});
        store_packet(there + TILE * sizeof(Word), {word.z, number, word.w, number});
    }
}

constexpr u32 AT_ONCE = 4;  // ranks with packets loaded together: eight loads of 16 bytes

// Wait for the words of AT_ONCE ranks from `first` on. A load takes a whole trip to memory, so all loads are issued
// before the first test. The place of this rank, and places beyond the last rank, load another rank's packets instead:
// a constant number of loads is unrolled into registers.
GC_DEV bool pull(const Heap& heap, u32 first, u64 epoch, u64 index, Word (&words)[AT_ONCE]) {
    const u32 number = u32(epoch), other = heap.rank == 0 ? 1 : 0;
    u32 writers[AT_ONCE], missing = other;
    Word low[AT_ONCE], high[AT_ONCE];
    GC_UNROLL
    for (u32 k = 0; k < AT_ONCE; ++k)
        writers[k] = first + k < heap.ranks && first + k != heap.rank ? first + k : other;
    const bool came = wait(heap, A_PACKET, missing, epoch, [&](u64& seen) {
        GC_UNROLL
        for (u32 k = 0; k < AT_ONCE; ++k) {
            const u64 here = packets_of(heap, heap.rank, writers[k], epoch, index);
            low[k] = load_packet(here);
            high[k] = load_packet(here + TILE * sizeof(Word));
        }
        bool all = true;
        GC_UNROLL
        for (u32 k = 0; k < AT_ONCE; ++k)
            // Test both halves of both packets: the halves of a packet may arrive in either order.
            if (low[k].y != number || low[k].w != number || high[k].y != number || high[k].w != number) {
                all = false;
                missing = writers[k];
                seen = low[k].y;
            }
        return all;
    });
    GC_UNROLL
    for (u32 k = 0; k < AT_ONCE; ++k) words[k] = {low[k].x, low[k].z, high[k].x, high[k].z};
    return came;
}

// Reduce word `index` over all ranks, in the order of ranks: all ranks get the same bits.
template <class T, class Op> GC_DEV bool reduce_word(const PacketsArguments& a, u64 epoch, u64 index) {
    const Word own = gather<T>(a, index);
    Wide<T> total[1][ITEMS<T, Word>];
    GC_ROLLED
    for (u32 first = 0; first < a.heap.ranks; first += AT_ONCE) {
        Word words[AT_ONCE];
        if (!pull(a.heap, first, epoch, index, words)) return false;
        GC_UNROLL
        for (u32 k = 0; k < AT_ONCE; ++k) {
            Word units[1] = {first + k == a.heap.rank ? own : words[k]};
            if (first + k == 0)
                widen<T>(total[0], units[0]);
            else if (first + k < a.heap.ranks)
                combine<T, Op>(total, units);
        }
    }
    scatter<T>(a, index, narrow<T, Word>(total[0]));
    return true;
}

template <class T, class Op> GC_DEV void packets(const PacketsArguments& a) {
    constexpr u64 PER_WORD = sizeof(Word) / sizeof(T);
    const u64 words = (a.count + PER_WORD - 1) / PER_WORD, step = gridDim.x * blockDim.x;
    // The number before the channel: the two loads overlap.
    const u64 epoch = epoch_of(a.heap);
    const bool renews = is_worn(a.heap, epoch);
    const u32 channel = take_channel(a.heap);
    const u64 first = channel * blockDim.x + threadIdx.x;
    bool came = !renews || renew(a.heap, channel, epoch, first, step);
    // Push everything before the first wait for a packet: two ranks waiting first would wait for ever.
    for (u64 index = first; came && index < words; index += step) push(a.heap, epoch, index, gather<T>(a, index));
    for (u64 index = first; came && index < words; index += step) came = reduce_word<T, Op>(a, epoch, index);
    if (!__syncthreads_and(came)) fill_with_nan(address_of(a.dst), a.nan_bytes);
    end_epoch(a.heap, epoch, renews);
}
