"""Gloo's reduce-scatter by halving and doubling, written as schedules after reading gloo/reduce_scatter.h of 2026-04.

Ranks form blocks of powers of two, the largest first. Each block reduces by recursive halving with the nearest ranks
first, smaller blocks hand their parts to larger blocks, and the largest block sends each result to its rank. Everything
happens in the caller's buffer, here the first chunks of scratch. At the end a rank writes its result to the front of
the same buffer.

`gloo_halving_doubling` has every message read from the buffer before the next round. `gloo_as_it_runs` differs in one
message: Gloo does not wait until a message has left the buffer, so the last message to rank 0 is read after the result
was written to the front.
"""

from gpucoll import Copy, Recv, RecvReduce, Send, Slice, algorithm


def reversed_bits(number, bits):
    return int(f"{number:0{bits}b}"[::-1], 2) if bits else 0


def binary_blocks(size):
    """Return (first rank, ranks) of each block, the largest first."""
    blocks, first = [], 0
    for bit in reversed(range(size.bit_length())):
        if size >> bit & 1:
            blocks.append((first, 1 << bit))
            first += 1 << bit
    return blocks


def buffer(first, end):
    return Slice("scratch", first, end - first)


def halving_doubling(rank, size, count):
    """Yield the rounds on `count` elements, with the sends of a round kept apart as (peer, first, end)."""
    steps, share = size.bit_length() - 1, count // size
    chunk = -(-count >> steps)
    blocks = binary_blocks(size)
    mine = next(number for number, (first, ranks) in enumerate(blocks) if rank < first + ranks)
    begin, ranks = blocks[mine]
    place = rank - begin
    first, length = 0, chunk << steps  # the part of the buffer still reduced here
    for step in range(ranks.bit_length() - 1):
        length //= 2
        kept, given = (first + length, first) if rank >> step & 1 else (first, first + length)
        yield [(rank ^ 1 << step, given, given + length)], [RecvReduce(part, rank ^ 1 << step)
                                                            for part in clipped(kept, kept + length, count)]
        first = kept
    if mine + 1 < len(blocks):
        smaller, fewer = blocks[mine + 1]
        yield [], [RecvReduce(part, smaller + place % fewer) for part in clipped(first, first + length, count)]
    if mine:
        larger, more = blocks[mine - 1]
        each, ordinal = length * ranks // more, reversed_bits(place, ranks.bit_length() - 1) * more // ranks
        yield [(larger + reversed_bits(ordinal + part, more.bit_length() - 1), first + part * each,
                first + (part + 1) * each) for part in range(more // ranks)], []
    owners = [(reversed_bits(number, steps), number * chunk, (number + 1) * chunk) for number in range(1 << steps)]
    sends = [(peer, max(first, peer * share), min(first + length, (peer + 1) * share))
             for peer in range(size) if peer != rank and not mine]
    results = [(owner, max(start, rank * share), min(end, (rank + 1) * share)) for owner, start, end in owners]
    results = [result for result in results if result[1] < result[2]]
    yield sends, [Recv(buffer(count + begin, count + end), owner) for owner, begin, end in results if owner != rank]
    yield [], [Copy(buffer(begin + count * (owner != rank), end + count * (owner != rank)),
                    buffer(begin - rank * share, end - rank * share)) for owner, begin, end in results if rank]


def clipped(first, end, count):
    return [buffer(first, min(end, count))] if first < count else []


def rounds(rank, size, segments, late=()):
    """Yield the schedule of a rank. The messages of `late` (sender, receiver, first element) are read at the end."""
    count, at_the_end = size * segments, []
    yield (Copy(Slice("input", 0, count), Slice("scratch", 0, count)),)
    for sends, others in halving_doubling(rank, size, count):
        now = []
        for peer, first, end in sends:
            ends = at_the_end if (rank, peer, first) in late else now
            ends += [Send(part, peer) for part in clipped(first, end, count) if first < end]
        if now or others:
            yield (*now, *others)
    if at_the_end:
        yield tuple(at_the_end)
    yield (Copy(Slice("scratch", 0, segments), Slice("output", 0, segments)),)


@algorithm("reduce_scatter", chunks="P * S")
def gloo_halving_doubling(rank, size, segments=1):
    return rounds(rank, size, segments)


@algorithm("reduce_scatter", chunks="P * S")
def gloo_as_it_runs(rank, size, segments=1):
    blocks = binary_blocks(size)
    return rounds(rank, size, segments, [(blocks[1][0] if blocks[1:] else size // 2, 0, 0)])
