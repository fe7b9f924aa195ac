// All-reduce of a message of middle length by packets of 128 bytes, as NCCL's LL128 protocol: every rank writes all data
// to every other rank, as in peer_packets.cu. A packet carries 120 bytes of data and 8 bytes of the number of the
// operation, so a link moves 1.07 bytes for each byte of data instead of 2.
//
// A row of eight threads writes and reads a packet. The receiving row tests only the number: if the number has come, so
// have the other 120 bytes. This holds on NVLink, see `row_mask` in dialect.h; the host launches this kernel nowhere
// else. Two packets carry a group of 15 words:
//
//     thread      0     1    ...    6           7
//     packet 0    w0    w1   ...    w6    half of w14, number
//     packet 1    w7    w8   ...    w13   half of w14, number
//
// So no thread needs a word of another thread. The two buffers used in turn, and the reason why two suffice, are those
// of peer_packets.cu. The memory differs: there a number may lie where here data lie, and data may equal a number.
#include "device/peer_packets.cu"

constexpr u32 GROUP_WORDS = 2 * ROW - 1, GROUP_BYTES = 2 * ROW * sizeof(Word);

GC_DEV u32 lane() { return threadIdx.x % ROW; }
GC_DEV bool has_number() { return lane() == ROW - 1; }

// Return the place of this thread's part of packet 0 of a group, in the owner's slab; packet 1 follows.
GC_DEV u64 place_of(const Heap& heap, u32 owner, u32 writer, u64 epoch, u64 group) {
    const u64 room = heap.slabs[owner] + heap.ll128 + (epoch % 2 * heap.ranks + writer) * heap.ll128_room;
    return room + group * GROUP_BYTES + lane() * sizeof(Word);
}

// Return the index of the first of this thread's words of a group; a thread without number has a second word.
GC_DEV u64 first_word(u64 group) { return group * GROUP_WORDS + (has_number() ? GROUP_WORDS - 1 : lane()); }
GC_DEV u64 second_word(u64 group) { return first_word(group) + ROW - 1; }

// Read this thread's words of the input. The thread with the number has its only word twice: harmless to combine.
template <class T> GC_DEV void gather_group(const PacketsArguments& a, u64 group, Word (&own)[2]) {
    own[0] = gather<T>(a, first_word(group));
    own[1] = has_number() ? own[0] : gather<T>(a, second_word(group));
}

// Write this thread's parts of a group to all other ranks, starting with the next rank.
GC_DEV void push_group(const Heap& heap, u64 epoch, u64 group, const Word (&own)[2]) {
    const u32 low = u32(epoch), high = u32(epoch >> 32);
    const Word first = has_number() ? Word{own[0].x, own[0].y, low, high} : own[0];
    const Word second = has_number() ? Word{own[0].z, own[0].w, low, high} : own[1];
    for (u32 k = 1; k < heap.ranks; ++k) {
        gather_row();
        const u64 there = place_of(heap, (heap.rank + k) % heap.ranks, heap.rank, epoch, group);
        store_row(there, first);
        store_row(there + ROW * sizeof(Word), second);
    }
}

// Wait for this thread's words of AT_ONCE ranks from `first` on, as `pull` in peer_packets.cu.
GC_DEV bool pull_group(const Heap& heap, u32 first, u64 epoch, u64 group, Word (&words)[AT_ONCE][2]) {
    const u32 other = heap.rank == 0 ? 1 : 0;
    u32 writers[AT_ONCE], missing = other;
    GC_UNROLL
    for (u32 k = 0; k < AT_ONCE; ++k)
        writers[k] = first + k < heap.ranks && first + k != heap.rank ? first + k : other;
    const bool came = wait<WholeRow>(heap, A_PACKET, missing, epoch, [&](u64& seen) {
        gather_row();
        GC_UNROLL
        for (u32 k = 0; k < AT_ONCE; ++k) {
            const u64 here = place_of(heap, heap.rank, writers[k], epoch, group);
            words[k][0] = load_row(here);
            words[k][1] = load_row(here + ROW * sizeof(Word));
        }
        bool all = true;
        GC_UNROLL
        for (u32 k = 0; k < AT_ONCE; ++k) {
            const u64 number = words[k][0].z | u64(words[k][0].w) << 32, again = words[k][1].z | u64(words[k][1].w) << 32;
            if (has_number() && (number != epoch || again != epoch)) {
                all = false;
                missing = writers[k];
                seen = number;
            }
        }
        return all;
    });
    GC_UNROLL
    for (u32 k = 0; k < AT_ONCE; ++k)
        if (has_number()) words[k][0] = words[k][1] = {words[k][0].x, words[k][0].y, words[k][1].x, words[k][1].y};
    return came;
}

// Reduce a group over all ranks, in the order of ranks: all ranks get the same bits.
template <class T, class Op> GC_DEV bool reduce_group(const PacketsArguments& a, u64 epoch, u64 group) {
    Word own[2];
    gather_group<T>(a, group, own);
    Wide<T> total[2][ITEMS<T, Word>];
    GC_ROLLED
    for (u32 first = 0; first < a.heap.ranks; first += AT_ONCE) {
        Word words[AT_ONCE][2];
        if (!pull_group(a.heap, first, epoch, group, words)) return false;
        GC_UNROLL
        for (u32 k = 0; k < AT_ONCE; ++k) {
            const bool mine = first + k == a.heap.rank;
            Word units[2] = {mine ? own[0] : words[k][0], mine ? own[1] : words[k][1]};
            if (first + k == 0) {
                widen<T>(total[0], units[0]);
                widen<T>(total[1], units[1]);
            } else if (first + k < a.heap.ranks) {
                combine<T, Op>(total, units);
            }
        }
    }
    scatter<T>(a, first_word(group), narrow<T, Word>(total[0]));
    if (!has_number()) scatter<T>(a, second_word(group), narrow<T, Word>(total[1]));
    return true;
}

template <class T, class Op> GC_DEV void ll128(const PacketsArguments& a) {
    constexpr u64 PER_GROUP = sizeof(Word) / sizeof(T) * GROUP_WORDS;
    const u64 groups = (a.count + PER_GROUP - 1) / PER_GROUP, step = gridDim.x * blockDim.x / ROW;
    const u64 epoch = epoch_of(a.heap), first = (take_channel(a.heap) * blockDim.x + threadIdx.x) / ROW;
    // Push everything before the first wait: two ranks waiting first would wait for ever.
    for (u64 group = first; group < groups; group += step) {
        Word own[2];
        gather_group<T>(a, group, own);
        push_group(a.heap, epoch, group, own);
    }
    bool came = true;
    for (u64 group = first; came && group < groups; group += step) came = reduce_group<T, Op>(a, epoch, group);
    if (!__syncthreads_and(came)) fill_with_nan(address_of(a.dst), a.nan_bytes);
    end_epoch(a.heap, epoch);
}
