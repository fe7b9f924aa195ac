"""Messages by NCCL: a communicator for each pair of ranks, made by these two ranks at their first message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gpucoll.device import Device, DeviceTransport, GroupPart, Waiting
from gpucoll.progress.operations import together

if TYPE_CHECKING:
    from gpucoll.device.nccl import Nccl


class Pairs(DeviceTransport):
    """The messages of one rank; ``join(peer)`` returns the communicator of a pair, and waits for nobody.

    On one communicator of all ranks, the first message would wait for ranks that take no part in it.
    """

    def __init__(self, rank: int, device: Device, join: Callable[[int], Nccl]) -> None:
        self._rank, self._device, self._join = rank, device, join
        self.joined: dict[int, Nccl] = {}  # by peer
        self._streams: dict[int, Any] = {}  # by peer

    def group(self, sends: Sequence[GroupPart], receives: Sequence[GroupPart], stream: Any) -> Waiting:
        parts: dict[int, tuple[list[GroupPart], list[GroupPart]]] = {}
        for way, given in enumerate((sends, receives)):
            for part in given:
                # In its communicator the higher rank of a pair has number 1; a rank with itself is alone.
                parts.setdefault(part.peer, ([], []))[way].append(part._replace(peer=int(part.peer > self._rank)))
        for peer in parts.keys() - self.joined.keys():
            self.joined[peer], self._streams[peer] = self._join(peer), self._device.new_stream()
        if len(parts) == 1:
            ((peer, mine),) = parts.items()
            yield from self.joined[peer].group(*mine, stream)
            return
        # In one stream the messages of a pair would wait for those of another pair: each pair has a stream of its own.
        before = self._device.mark(stream)
        for peer in parts:
            self._streams[peer].wait_event(before)
        yield from together(*(self.joined[peer].group(*mine, self._streams[peer]) for peer, mine in parts.items()))
        for peer in parts:
            stream.wait_event(self._device.mark(self._streams[peer]))

    def check(self) -> None:
        for nccl in [*self.joined.values()]:
            nccl.check()

    def close(self, *, captured: bool) -> None:
        # NCCL may wait for the other rank. In the order of the peers, no circle of ranks waits.
        for _, nccl in sorted(self.joined.items()):
            nccl.close(captured=captured)

    def abort(self) -> None:
        for nccl in [*self.joined.values()]:
            nccl.abort()
