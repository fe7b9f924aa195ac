"""Schedules as traces for other simulators: GOAL for LogGOPSim and ATLAHS, Chakra execution traces for ASTRA-sim.

A trace has the messages of each rank: peer, bytes, and the messages to wait for. As in `gpucoll simulate`, all sends of
a round to one peer are one message, as are all receives from one peer; a message waits for all messages of the rank's
round before. The k-th send from a to b matches the k-th receive of b from a. Copies and reductions are left out: their
time belongs to a machine, not to a schedule.

Sources: GOAL's grammar in txt2bin.re of spcl/LogGOPSim; Chakra's et_def.proto of mlcommons/chakra, written as
length-delimited protobuf messages, a file for each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpucoll.core.chunks import Layout
from gpucoll.core.collectives import COLLECTIVES
from gpucoll.core.schedule import Schedule, Slice, ends
from gpucoll.errors import ArgumentError

MOST_BYTES = 1 << 62  # a message's bytes are a signed 64-bit number in both formats
SEND_NODE, RECEIVE_NODE = 5, 6  # Chakra's NodeType
CHAKRA_VERSION = "0.0.4"


class Transfer(NamedTuple):
    """One end of a message: a send or a receive of `nbytes`; `after` are the numbers of transfers to wait for.

    `round` is the number of the round, and `parts` are the slices sent or received, in order.
    """

    sends: bool
    peer: int
    nbytes: int
    after: range
    round: int
    parts: tuple[Slice, ...]


def _blocks(collective: str, size: int) -> int:
    return size if COLLECTIVES[collective].blocks else 1


def cut_bytes(collective: str, size: int, nbytes: int) -> str:
    """Return in words the bytes of a trace for `nbytes`: fewer, where `size` ranks would have unequal blocks, else "".

    >>> cut_bytes("all_gather", 3, 8), cut_bytes("all_reduce", 3, 8)
    ('; 6 of 8 bytes, for equal blocks', '')
    """
    rest = nbytes % _blocks(collective, size)
    return f"; {nbytes - rest} of {nbytes} bytes, for equal blocks" if rest else ""


def transfers(schedule: Schedule, nbytes: int) -> list[Transfer]:
    """Return the transfers of a rank in order; `nbytes` is the size of the larger of input and output.

    Blocks have equal numbers of bytes (see `cut_bytes`), and chunks whole bytes, as arrays of bytes have. Raises
    ArgumentError for too many bytes.
    """
    blocks = _blocks(schedule.collective, schedule.size)
    if nbytes > MOST_BYTES:
        raise ArgumentError(f"{nbytes} bytes are too many for a trace: at most {MOST_BYTES}", code="GC-SIZE")
    layout, made, before = Layout(nbytes // blocks, schedule.chunks // blocks), list[Transfer](), range(0)
    for number, steps in enumerate(schedule):
        first, moving = len(made), ends(steps)
        for (sends, peer), parts in moving.items():
            spans = [layout.span(part.first, part.count) for part in parts]
            made.append(Transfer(sends, peer, sum(end - begin for begin, end in spans), before, number, tuple(parts)))
        if moving:
            before = range(first, len(made))
    return made


def goal(schedules: Sequence[Schedule], nbytes: int) -> Iterator[str]:
    """Yield the lines of a GOAL file. An empty message has one byte, as LogGP counts the bytes after the first.

    >>> from gpucoll.algorithms import schedules
    >>> print(*goal(schedules("broadcast", "tree", size=2), 8), sep="")
    num_ranks 2
    rank 0 {
    l0: send 8b to 1 tag 0
    }
    rank 1 {
    l0: recv 8b from 0 tag 0
    }
    <BLANKLINE>
    """
    yield f"num_ranks {len(schedules)}\n"
    for schedule in schedules:
        yield f"rank {schedule.rank} {{\n"
        for number, one in enumerate(transfers(schedule, nbytes)):
            way = ("send {}b to" if one.sends else "recv {}b from").format(max(1, one.nbytes))
            yield f"l{number}: {way} {one.peer} tag 0\n"
            yield from (f"l{number} requires l{other}\n" for other in one.after)
        yield "}\n"


def chakra(schedule: Schedule, nbytes: int) -> bytes:
    """Return a Chakra execution trace of a rank."""
    metadata = _field(1, CHAKRA_VERSION.encode())
    return b"".join(map(_delimited, [metadata, *(_node(schedule.rank, number, one)
                                                 for number, one in enumerate(transfers(schedule, nbytes)))]))


def _node(rank: int, number: int, one: Transfer) -> bytes:
    """Return a Node: id, name, type, data_deps, attr."""
    src, dst = (rank, one.peer) if one.sends else (one.peer, rank)
    values = (("is_cpu_op", 27, 0), ("comm_size", 9, one.nbytes), ("comm_src", 7, src), ("comm_dst", 7, dst),
              ("comm_tag", 7, 0))
    name = f"round {one.round}: {'send to' if one.sends else 'receive from'} {one.peer}"
    return b"".join([_field(1, number), _field(2, name.encode()), _field(3, SEND_NODE if one.sends else RECEIVE_NODE),
                     _field(5, b"".join(map(_varint, one.after))) if one.after else b"",
                     *(_field(10, _field(1, attribute.encode()) + _field(kind, value))
                       for attribute, kind, value in values)])


def _field(number: int, value: int | bytes) -> bytes:
    """Return a protobuf field: a whole number, or bytes."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _delimited(value)


def _delimited(value: bytes) -> bytes:
    return _varint(len(value)) + value


def _varint(value: int) -> bytes:
    """Return a whole number of at least 0 in groups of seven bits, the lowest first."""
    groups = []
    while value > 127:
        groups.append(value & 127 | 128)
        value >>= 7
    return bytes([*groups, value])
