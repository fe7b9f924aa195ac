"""Several all-reduces of the direct kernels on every rank's stream, back to back, and what NumPy makes of them."""

import numpy

from gpucoll.device import sources
from gpucoll.device.peer import Room
from gpucoll.dtypes import DTYPES
from gpucoll.ops import OPS
from peer_world import World, expected, placed

KERNELS = ("packets", "one_shot", "two_shot")
NAMES = "abcdefghijkl"
# Kernel, source, destination, and whether the ranks share these arrays; a rank that is ahead soon overwrites what
# another one may still read, if nothing holds it back.
SCRIPT = (
    ("packets", "a", "d", False),
    ("one_shot", "a", "e", True),
    ("two_shot", "b", "a", False),
    ("packets", "b", "f", False),
    ("packets", "c", "g", False),
    ("packets", "a", "h", False),
    ("one_shot", "b", "i", False),
    ("one_shot", "d", "j", False),
    ("two_shot", "c", "c", True),
    ("two_shot", "b", "k", True),
    ("packets", "c", "c", False),
    ("two_shot", "a", "l", False),
    ("two_shot", "g", "g", False),
)


def instances(op, name):
    row, dtype = OPS[op], DTYPES[name]
    return (sources.packets(row, dtype), sources.shots("one_shot", row, dtype), sources.shots("two_shot", row, dtype))


def room_for(ranks, nbytes, channels):
    """No more room than that, so that who leaves it is noticed."""
    words = -(-nbytes // 16) * 16
    return Room(ranks, channels, depth=2, packets=words, slot=32, staging=words)


def run(libraries, op, name, *, ranks, count=33, blocks=2, threads=4, script=SCRIPT, misaligned=0, between=None,
        **world):
    """Run `script`, and `between(world, rank)` after each of its operations.

    Raises AssertionError where a bit is wrong, Fault where the kernels come to no good end.
    """
    data = [{key: expected.random_array(name, count, 100 * rank + number) for number, key in enumerate(NAMES)}
            for rank in range(ranks)]
    held = [{key: placed(values, misaligned * (number % 3)) for number, (key, values) in enumerate(own.items())}
            for own in data]
    where = World(room_for(ranks, data[0]["a"].nbytes, blocks), libraries, **world)
    entries = dict(zip(KERNELS, (instance.entry for instance in instances(op, name)), strict=True))
    for kernel, src, dst, shared in script:
        for rank in range(ranks):
            arguments = arguments_of(where.heaps[rank], kernel, held, rank, src, dst, shared)
            where.launch(rank, entries[kernel], arguments, blocks, threads)
            if between is not None:
                between(where, rank)
        result = expected.reduced(expected.PAIRS[op], [own[src] for own in data])
        for own in data:
            own[dst] = result
    where.run()
    for rank in range(ranks):
        for key in NAMES:
            assert expected.same(held[rank][key], data[rank][key], zeros_free=op in ("min", "max")), (rank, key)
    assert [int(slab[:8].view(numpy.uint64)[0]) for slab in where.slabs] == [len(script)] * ranks


def arguments_of(heap, kernel, held, rank, src, dst, shared):
    source, target = held[rank][src], held[rank][dst]
    ends = source.ctypes.data, target.ctypes.data, source.size
    if kernel == "packets":
        return heap.packets(*ends)
    apart = shared and (kernel == "two_shot" or src != dst)  # in place one_shot would overwrite what the others read
    inputs = [own[src].ctypes.data for own in held] if apart else heap.staging
    results = [own[dst].ctypes.data for own in held] if shared else heap.staging
    return heap.shots(*ends, inputs, results)
