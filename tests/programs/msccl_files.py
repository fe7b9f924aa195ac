"""Files in the style of msccl-tools, TACCL and TE-CCL, by a small writer sharing no code with the library's writer.

Moves are given in the order of a sequential program, as in msccl-tools: each move waits for all earlier moves touching
the same data. A thread block serves one peer in both directions, or a ring's two neighbours with fused steps.
"""

import collections


class File:
    """One program; `gpus[rank][block]` is a list of [type, src, dst, count, after]."""

    def __init__(self, coll, size, chunks, in_place=False, scratch=0):
        self.coll, self.size, self.chunks, self.in_place, self.scratch = coll, size, chunks, in_place, scratch
        self.gpus = [collections.defaultdict(list) for _ in range(size)]
        self._touched = collections.defaultdict(list)  # by rank and chunk: (block, step, writes)

    def add(self, rank, block, kind, src, dst, count, reads, writes):
        steps, waits = self.gpus[rank][block], []
        for (buffer, first), is_write in [*((one, False) for one in reads), *((one, True) for one in writes)]:
            for chunk in range(first, first + count):
                history = self._touched[rank, buffer, chunk]
                waits += [(other, number) for other, number, wrote in history if (wrote or is_write) and other != block]
        last = {}
        for other, number in waits:
            last[other] = max(number, last.get(other, -1))
        *more, after = [*last.items()] or [None]
        for wait in more:
            steps.append(["nop", ("i", -1), ("o", -1), 0, wait])
        steps.append([kind, src, dst, count, after])
        for (buffer, first), is_write in [*((one, False) for one in reads), *((one, True) for one in writes)]:
            for chunk in range(first, first + count):
                self._touched[rank, buffer, chunk].append((block, len(steps) - 1, is_write))

    def move(self, source, src, target, dst, count=1, reduce=False, channel=0):
        """Add a message, or a local step if both ends are the same GPU; `reduce` combines with the destination."""
        if source == target:
            self.add(source, (-1, -1, 0), "re" if reduce else "cpy", src, dst, count,
                     [src, dst] if reduce else [src], [dst])
            return
        self.add(source, (target, target, channel), "s", src, dst, count, [src], [])
        self.add(target, (source, source, channel), "rrc" if reduce else "r", dst if reduce else src, dst, count, [],
                 [dst])

    def text(self, name="test"):
        gpus = []
        for rank, blocks in enumerate(self.gpus):
            ids = {block: number for number, block in enumerate(blocks)}
            rows = []
            for block, steps in blocks.items():
                lines = [
                    f'<step s="{number}" type="{kind}" srcbuf="{src[0]}" srcoff="{src[1]}" dstbuf="{dst[0]}" '
                    f'dstoff="{dst[1]}" cnt="{count}" depid="{ids[after[0]] if after else -1}" '
                    f'deps="{after[1] if after else -1}" hasdep="1"/>'
                    for number, (kind, src, dst, count, after) in enumerate(steps)]
                rows.append(f'<tb id="{ids[block]}" send="{block[0]}" recv="{block[1]}" chan="{block[2]}">\n'
                            + "\n".join(lines) + "\n</tb>")
            gpus.append(f'<gpu id="{rank}" i_chunks="{self.chunks}" o_chunks="{self.chunks}" '
                        f's_chunks="{self.scratch}">\n' + "\n".join(rows) + "\n</gpu>")
        return (f'<algo name="{name}" proto="LL128" nchannels="2" nchunksperloop="{self.chunks}" ngpus="{self.size}" '
                f'coll="{self.coll}" inplace="{int(self.in_place)}">\n' + "\n".join(gpus) + "\n</algo>\n")


def ring_all_reduce(size, channels=1):
    """One thread block per channel, with fused steps: s rrs ... rrcs rcs ... r."""
    file = File("allreduce", size, size * channels, in_place=True)
    for channel in range(channels):
        for rank in range(size):
            block = ((rank + 1) % size, (rank - 1) % size, channel)
            kinds = ["s", *["rrs"] * (size - 2), "rrcs", *["rcs"] * (size - 2), "r"]
            for hop, kind in enumerate(kinds):
                place = ("i", (rank - hop) % size + channel * size)
                file.gpus[rank][block].append([kind, place, place, 1, None])
    return file


def ring_all_gather(size, parts=2):
    """In place: all data are in the output."""
    file = File("allgather", size, size * parts, in_place=True)
    for rank in range(size):
        block = ((rank + 1) % size, (rank - 1) % size, 0)
        for hop, kind in enumerate(["s", *["rcs"] * (size - 2), "r"]):
            place = ("o", (rank - hop) % size * parts)
            file.gpus[rank][block].append([kind, place, place, parts, None])
    return file


def ring_reduce_scatter(size):
    file = File("reduce_scatter", size, size, in_place=True)
    for rank in range(size):
        block = ((rank + 1) % size, (rank - 1) % size, 0)
        for hop, kind in enumerate(["s", *["rrs"] * (size - 2), "rrc"]):
            place = ("i", (rank - hop - 1) % size)
            file.gpus[rank][block].append([kind, place, place, 1, None])
    return file


def all_pairs(size):
    """Each rank collects its chunk from all ranks in scratch, reduces, and sends the result to all ranks."""
    file = File("allreduce", size, size, in_place=True, scratch=size)
    pairs = [(rank, peer) for rank in range(size) for peer in range(size) if peer != rank]
    for rank, peer in pairs:
        file.move(peer, ("i", rank), rank, ("s", peer))
    for rank, peer in pairs:
        file.move(rank, ("s", peer), rank, ("i", rank), reduce=True)
    for rank, peer in pairs:
        file.move(rank, ("i", rank), peer, ("i", rank), channel=1)
    return file


def two_step_all_to_all(size):
    """Nodes of the root of `size`: within the node by scratch, to the rank with the target's number; then across."""
    local = next(one for one in range(1, size + 1) if one * one >= size)
    nodes = size // local
    file = File("alltoall", size, size, scratch=nodes * local)
    for source in range(size):
        node, number = divmod(source, local)
        for target in range(size):
            to, at = divmod(target, local)
            if at == number:
                file.move(source, ("i", target), source, ("s", to * local + number))
            else:
                file.move(source, ("i", target), node * local + at, ("s", to * local + number))
    for rank in range(size):
        node, number = divmod(rank, local)
        for to in range(nodes):
            target = to * local + number
            file.move(rank, ("s", to * local), target, ("o", node * local), count=local, channel=1)
    return file


def tree(size, channels=2):
    """Up and down two trees; the second tree numbers the ranks in reverse."""
    file = File("allreduce", size, channels, in_place=True)
    for channel in range(channels):
        real = [*range(size)][::-1] if channel else [*range(size)]
        for child in range(size - 1, 0, -1):
            file.move(real[child], ("i", channel), real[(child - 1) // 2], ("i", channel), reduce=True, channel=channel)
        for child in range(1, size):
            file.move(real[(child - 1) // 2], ("i", channel), real[child], ("i", channel), channel=channel)
    return file


def chain_broadcast(size):
    file = File("broadcast", size, 3)
    file.move(0, ("i", 0), 0, ("o", 0), count=3)
    for rank in range(1, size):
        file.move(rank - 1, ("i" if rank == 1 else "o", 0), rank, ("o", 0), count=3)
    return file


def linear_reduce(size):
    file = File("reduce", size, 2)
    file.move(0, ("i", 0), 0, ("o", 0), count=2)
    for rank in range(1, size):
        file.move(rank, ("i", 0), 0, ("o", 0), count=2, reduce=True)
    return file


def linear_gather(size):
    file = File("gather", size, size)
    for rank in range(size):
        file.move(rank, ("i", 0), 0, ("o", rank))
    return file


def linear_scatter(size):
    file = File("scatter", size, size)
    for rank in range(size):
        file.move(0, ("i", rank), rank, ("o", 0))
    return file


FILES = {  # by name: the collective, the function returning the file, the numbers of ranks
    "ring": ("all_reduce", ring_all_reduce, (2, 3, 4, 16)),
    "two_rings": ("all_reduce", lambda size: ring_all_reduce(size, 2), (4, 8)),
    "ring_all_gather": ("all_gather", ring_all_gather, (2, 4, 7)),
    "ring_reduce_scatter": ("reduce_scatter", ring_reduce_scatter, (2, 4, 8)),
    "all_pairs": ("all_reduce", all_pairs, (2, 4, 8)),
    "two_step": ("all_to_all", two_step_all_to_all, (4, 9, 16)),
    "tree": ("all_reduce", tree, (3, 4, 7, 16)),
    "chain": ("broadcast", chain_broadcast, (2, 4, 5)),
    "linear_reduce": ("reduce", linear_reduce, (3, 4)),
    "linear_gather": ("gather", linear_gather, (2, 4)),
    "linear_scatter": ("scatter", linear_scatter, (2, 4)),
}


def written(name, size):
    """Return the text of a file."""
    return FILES[name][1](size).text(f"test_{name}_{size}")
