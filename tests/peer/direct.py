"""All-reduces of the direct kernels, back to back on every rank's stream, compared with NumPy."""

import itertools

import numpy

from gpucoll.core.dtypes import DTYPES
from gpucoll.core.ops import OPS
from gpucoll.device import sources
from gpucoll.executors.peer.tables import ROW, Places, Room
from peer.world import World, expected, placed

KERNELS = ("packets", "ll128", "fold_all", "fold_share")
NAMES = "abcdefghijklmnopq"
WRONG = "b"  # an array with unusable addresses, given in place of arrays not shared by the ranks
# Kernel, source, destination, and sharing of these arrays: True (equal marks on all ranks), False, "some" (marks only
# on odd ranks), "others" (unequal marks), "inputs" (equal marks of the inputs only), "switch" (equal marks, and all
# arrays at one address). The arrays are reused soon:
# without synchronization, a rank running ahead overwrites data still read by another rank.
SCRIPT = (
    ("packets", "a", "d", False),
    ("fold_all", "a", "e", True),
    ("fold_share", "b", "a", False),
    ("fold_share", "d", "e", "some"),
    ("fold_all", "d", "f", "others"),
    ("packets", "b", "f", False),
    ("packets", "c", "g", False),
    ("packets", "a", "h", False),
    ("fold_all", "b", "i", False),
    ("fold_all", "d", "j", False),
    ("fold_share", "c", "c", True),
    ("fold_share", "b", "k", True),
    ("fold_share", "k", "j", "others"),
    ("fold_all", "k", "i", "some"),
    ("packets", "c", "c", False),
    ("ll128", "a", "m", False),
    ("ll128", "m", "n", False),
    ("ll128", "n", "n", False),
    ("fold_share", "a", "l", False),
    ("ll128", "l", "o", False),
    ("packets", "o", "p", False),
    ("ll128", "c", "q", False),
    ("fold_share", "g", "g", False),
)


# The switch combines in any order, so these rows are for integers only.
SWITCHED = (
    *SCRIPT[:5],
    ("multimem_share", "a", "b", False),
    ("multimem_share", "b", "f", "some"),
    ("multimem_share", "f", "e", True),
    ("multimem_share", "f", "g", "others"),
    ("multimem_share", "a", "j", "inputs"),
    ("fold_share", "j", "k", "inputs"),
    ("multimem_share", "k", "l", "inputs"),
    ("multimem_share", "e", "e", True),
    ("multimem_share", "e", "f", "switch"),
    ("multimem_share", "f", "f", "switch"),
    ("multimem_share", "j", "e", "some"),
    ("multimem_share", "e", "j", "switch"),
    ("fold_share", "b", "g", True),
    ("multimem_share", "c", "c", False),
    ("multimem_share", "g", "h", False),
    ("packets", "h", "i", False),
    ("multimem_share", "i", "i", False),
)


def instances(op, name, kernels=KERNELS):
    row, dtype = OPS[op], DTYPES[name]
    return tuple(sources.reducing(kernel, row, dtype) for kernel in kernels)


def room_for(ranks, nbytes, channels, sections=1):
    """Return a room without spare space, so that overruns are noticed; staging an array takes `sections` sections."""
    words = -(-nbytes // 16)
    return Room(ranks, channels, depth=2, packets=16 * words, ll128=16 * words, slot=32,
                staging=16 * -(-words // sections))


def run(libraries, op, name, *, ranks, count=33, blocks=2, threads=4, script=SCRIPT, misaligned=0, between=None,
        sections=1, filled=None, epoch=0, **world):
    """Run `script` on all ranks, and `between(world, rank)` after each operation, and compare all arrays with NumPy.

    `filled` has the value of all elements for some arrays; the other arrays have random values. `epoch` operations
    have gone before: then all packets have the numbers of operations that 2^32 others have followed.

    Raises AssertionError for a wrong bit, and Fault if the kernels do not end properly.
    """
    data = [{key: expected.random_array(name, count, 100 * rank + number) for number, key in enumerate(NAMES)}
            for rank in range(ranks)]
    for own, (key, value) in itertools.product(data, (filled or {}).items()):
        own[key][:] = value
    held = [{key: placed(values, misaligned * (number % 3)) for number, (key, values) in enumerate(own.items())}
            for own in data]
    where = World(room_for(ranks, data[0]["a"].nbytes, blocks, sections), libraries, **world)
    for slab in where.slabs if epoch else ():
        slab[:8].view(numpy.uint64)[0] = epoch
        packets = slab[where.room.offsets["packets"]:where.room.offsets["ll128"]].view(numpy.uint32)
        for number, half in ((epoch + 1, (epoch + 1) % 2), (epoch + 2, epoch % 2)):
            words = ranks * where.room.packet_room // 4
            packets[half * words:(half + 1) * words] = number % 2**32
    kernels = {row[0] for row in script}
    entries = {kernel: instance.entry for kernel, instance in zip(kernels, instances(op, name, kernels), strict=True)}
    for kernel, src, dst, shared in script:
        for rank in range(ranks):
            arguments = arguments_of(where, kernel, held, rank, src, dst, shared)
            # A row of `ll128` has eight threads.
            where.launch(rank, entries[kernel], arguments, blocks, max(threads, ROW) if kernel == "ll128" else threads)
            if between is not None:
                between(where, rank)
        result = expected.reduced(expected.PAIRS[op], [own[src] for own in data])
        for own in data:
            own[dst] = result
    where.run()
    for rank in range(ranks):
        for key in NAMES:
            assert expected.same(held[rank][key], data[rank][key], zeros_free=op in ("min", "max")), (rank, key)
    staged = -(-data[0]["a"].nbytes // where.room.staging)
    in_one = [kernel in sources.IN_PACKETS or (shared in (True, "switch") and (kernel, src) != ("fold_all", dst))
              for kernel, src, dst, shared in script]
    epochs = epoch + sum(1 if one else staged for one in in_one)
    assert [int(slab[:8].view(numpy.uint64)[0]) for slab in where.slabs] == [epochs] * ranks


def arguments_of(where, kernel, held, rank, src, dst, shared):
    heap, source, target = where.heaps[rank], held[rank][src], held[rank][dst]
    ends = source.ctypes.data, target.ctypes.data, source.size
    if kernel in sources.IN_PACKETS:
        return heap.packets(*ends)
    mark = {True: 7, False: 0, "some": 7 * (rank % 2), "others": 7 + rank, "inputs": 7, "switch": 7}[shared]
    is_there = shared in (True, "inputs", "switch")
    inputs, results = (Places(mark, [own[name if is_there else WRONG].ctypes.data for own in held],
                              *(together(where, held, name) if shared == "switch" else ())) for name in (src, dst))
    if shared == "inputs":
        results = Places(0)
    if kernel == "fold_all":  # in place, the kernel would overwrite data read by the others
        return heap.shots(*ends, Places(0) if src == dst else inputs, Places(1))
    return heap.shots(*ends, inputs, results, multicast=where.multicasts[rank] if kernel == "multimem_share" else None)


def together(where, held, name):
    """Return the address of multicast memory that has this array of all ranks, and the array's offset there."""
    offset = 16 * (ord(name) % 5) + held[0][name].ctypes.data % 16
    table = numpy.array([len(held), *(own[name].ctypes.data - offset for own in held)], numpy.uint64)
    where._kept.append(table)
    return table.ctypes.data, offset


def gather(libraries, *, ranks, count, width=4, blocks=2, threads=4, sections=1, misaligned=0, repeats=3, **world):
    """Gather blocks of `count` units of `width` bytes by the switch, back to back into two results in turn."""
    parts = -(-count * width // 16 // sections) or 1
    where = World(Room(ranks, blocks, 2, packets=16, ll128=16, slot=32, staging=16 * parts * ranks), libraries, **world)
    entry = sources.instance("multimem_gather", width).entry
    kept, wanted = [], []
    for number in range(repeats):
        data = [expected.random_array("uint8", count * width, 100 * rank + number) for rank in range(ranks)]
        inputs = [placed(one, misaligned * (rank % 2)) for rank, one in enumerate(data)]
        outputs = [placed(numpy.zeros(ranks * count * width, numpy.uint8), misaligned) for _ in range(ranks)]
        for rank in range(ranks):
            ends = inputs[rank].ctypes.data, outputs[rank].ctypes.data
            arguments = where.heaps[rank].shots(*ends, count, multicast=where.multicasts[rank])
            where.launch(rank, entry, arguments, blocks, threads)
        kept.append((inputs, outputs))
        wanted.append(numpy.concatenate(data))
    where.run()
    for (_, outputs), result in zip(kept, wanted, strict=True):
        for rank in range(ranks):
            assert (outputs[rank] == result).all(), rank
