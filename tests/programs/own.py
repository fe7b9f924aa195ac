"""Algorithms as written by a user; running this file registers the algorithms, as `gpucoll.load` does."""

import gpucoll as gc
from gpucoll import Copy, Recv, RecvReduce, Reduce, Send, Slice


@gc.algorithm("all_reduce", "own_all", chunks=1)
def everyone(rank, size):
    """All to all, in rank order: every rank reduces all inputs."""
    out, own, others = Slice("output", 0), Slice("input", 0), [peer for peer in range(size) if peer != rank]
    first = Copy(own, out) if rank == 0 else Recv(out, 0)
    added = [Reduce(own, out) if peer == rank else RecvReduce(out, peer) for peer in range(1, size)]
    yield (*(Send(own, peer) for peer in others), first, *added)


@gc.algorithm("all_reduce", "own_line", chunks="2 * S")
def line(rank, size, segments=1):
    """Up a line of ranks through scratch, and down again; rounds are lists."""
    whole = 2 * segments
    data, out, held = Slice("input", 0, whole), Slice("output", 0, whole), Slice("scratch", 0, whole)
    if rank:
        yield [Recv(held, rank - 1)]
        yield [Reduce(data, held)]
    if rank < size - 1:
        yield [Send(held if rank else data, rank + 1)]
        yield [Recv(out, rank + 1)]
    else:
        yield [Copy(held, out)]
    if rank:
        yield [Send(out, rank - 1)]


@gc.algorithm("broadcast", "own_star", chunks="1")
def star(rank, size, root=0):
    out = Slice("output", 0)
    if rank == root:
        yield (Copy(Slice("input", 0), out), *(Send(Slice("input", 0), peer) for peer in range(size) if peer != root))
    else:
        yield (Recv(out, root),)


@gc.algorithm("all_to_all", "own_turns", chunks="P")
def turns(rank, size):
    yield (Copy(Slice("input", rank), Slice("output", rank)),)
    for distance in range(1, size):
        to, of = (rank + distance) % size, (rank - distance) % size
        yield Send(Slice("input", to), to), Recv(Slice("output", of), of)


@gc.algorithm("reduce_scatter", "own_direct", chunks="P")
def direct(rank, size):
    out = Slice("output", 0)
    yield (*(Send(Slice("input", peer), peer) for peer in range(size) if peer != rank), Copy(Slice("input", rank), out),
           *(RecvReduce(out, peer) for peer in range(size) if peer != rank))


@gc.algorithm("all_gather_v", "own_gather", chunks="P")
def gather(rank, size):
    own, others = Slice("input", 0), [peer for peer in range(size) if peer != rank]
    yield (Copy(own, Slice("output", rank)), *(Send(own, peer) for peer in others),
           *(Recv(Slice("output", peer), peer) for peer in others))
