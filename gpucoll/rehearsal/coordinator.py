"""The coordinator of processes of equal ranks: matches the calls of the processes, and computes the results.

A process sends a message for each call, and the coordinator answers once all ranks have made the same call. Different
calls, or a process that gives up, end the work with a reason. The ranks then run one by one, and the cause is found.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy

from gpucoll.core.dtypes import numpy_dtype
from gpucoll.core.signature import Signature
from gpucoll.errors import listed
from gpucoll.executors import ReadyCall
from gpucoll.rehearsal.values import compute, has_own_results

HEADER = struct.Struct("<Q")  # the length of a message, before its bytes
MOST_PROCESSES = 512
RESERVE = 1 << 30  # bytes of memory to be left to other programs
LOOKS = 3  # seconds in a row without a message or a process at work, until the processes count as stopped


class Given(NamedTuple):
    """The data of a process for a call of all ranks.

    `objects` are the pickled objects of an exchange, for each of `numbers` or once for all. Of a collective, `request`
    is the pickled `CallRequest`, `source` the input, and `has_output` whether the ranks get a result.
    """

    numbers: tuple[int, ...] = ()
    objects: Any = None
    request: bytes = b""
    source: Any = None
    has_output: bool = False


class ProcessConnection:
    """The coordinator's end of the connection with the process of the ranks `numbers`."""

    def __init__(self, channel: socket.socket, numbers: tuple[int, ...]) -> None:
        self.channel, self.numbers = channel, numbers
        self.parts: list[ProcessConnection] = []  # of processes that the process is about to fork
        self._out: deque[memoryview] = deque()  # bytes that the process has had no room for

    def send(self, message: bytes = b"") -> bool:
        """Send as much as the process has room for, last a pickled `message`; return whether anything is left.

        The coordinator never waits for room, because the process may send before receiving.
        """
        if message:
            self._out += memoryview(HEADER.pack(len(message))), memoryview(message)
        while self._out:
            try:
                sent = self.channel.sendmsg([*self._out][:64], [], socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except BrokenPipeError:  # the process has ended; its last message tells why
                self._out.clear()
                break
            while self._out and sent >= len(self._out[0]):
                sent -= len(self._out.popleft())
            if sent:
                self._out[0] = self._out[0][sent:]
        return False


class Stopped(Exception):
    """Agreement cannot be proved; the message is the reason."""


class Coordinator:
    """Serves the processes, at first the process `leader` of all `size` ranks, until all have ended."""

    def __init__(self, channel: socket.socket, size: int, leader: int) -> None:
        self._selector, self._leader = selectors.DefaultSelector(), leader
        self._connections: list[ProcessConnection] = []
        self._groups: dict[Any, tuple[int, ...]] = {}
        self._calls: dict[tuple[Any, int], tuple[str, list[Given]]] = {}
        self._requests: dict[bytes, Any] = {}
        self._handlers: dict[str, Callable[..., None]] = {
            "call": self._call, "group": self._group, "part": self._part, "parted": self._parted, "end": self._end,
            "gave up": self._gave_up}
        self._add(ProcessConnection(channel, tuple(range(size))))

    def run(self) -> str | None:
        """Return None if the calls of all ranks agree, else the reason for leaving off."""
        looks, before = 0, 0
        try:
            while self._connections:
                events = self._selector.select(1)
                if not events:
                    # A process that computes takes time of a processor.
                    spent = _seconds_of(self._leader)
                    looks, before = (0, spent) if spent != before else (looks + 1, before)
                    if looks == LOOKS:
                        raise Stopped("no process goes on")
                for key, mask in events:
                    looks = 0
                    if mask & selectors.EVENT_WRITE and not key.data.send():
                        self._selector.modify(key.data.channel, selectors.EVENT_READ, key.data)
                    if mask & selectors.EVENT_READ:
                        self._receive(key.data)
            if self._calls:
                raise Stopped("calls are left")
        except Stopped as error:
            return str(error)
        except Exception as error:  # as of NumPy, or of the system
            return f"{type(error).__name__}: {error}"
        finally:
            # The first process is collected last: until then nobody else gets the number of its group.
            os.killpg(self._leader, signal.SIGKILL)
            os.waitpid(self._leader, 0)
            for one in self._connections:
                for each in (one, *one.parts):
                    each.channel.close()
            self._selector.close()
        return None

    def _add(self, one: ProcessConnection) -> None:
        self._connections.append(one)
        self._selector.register(one.channel, selectors.EVENT_READ, one)

    def _receive(self, one: ProcessConnection) -> None:
        descriptors, message = receive(one.channel, most=1)
        kind, *rest = pickle.loads(message)
        if kind == "part" and not descriptors:  # the system closes files for which this process has no room
            raise Stopped("too many open files")
        self._handlers[kind](one, *rest, *(socket.socket(fileno=number) for number in descriptors))

    def _send(self, one: ProcessConnection, message: bytes) -> None:
        if one.send(message):
            self._selector.modify(one.channel, selectors.EVENT_READ | selectors.EVENT_WRITE, one)

    # ------------------------------------------------------------ processes

    def _part(self, one: ProcessConnection, numbers: tuple[int, ...], channel: socket.socket) -> None:
        """Note that a process will fork: the ranks `numbers` get a process with the connection `channel`."""
        one.parts.append(ProcessConnection(channel, numbers))
        if len(self._connections) + len(one.parts) > MOST_PROCESSES:
            raise Stopped("too many different ranks")

    def _parted(self, one: ProcessConnection) -> None:
        """Allow a process to fork. The process passes on all answers so far; later answers go to each part."""
        if _free_memory() < RESERVE:
            raise Stopped("the different ranks need too much memory")
        for part in one.parts:
            one.numbers = tuple(sorted({*one.numbers} - {*part.numbers}))
            self._add(part)
        one.parts.clear()
        self._send(one, pickle.dumps(None))

    def _end(self, one: ProcessConnection) -> None:
        if one.parts:
            raise Stopped("a process has ended before a fork")
        self._connections.remove(one)
        self._selector.unregister(one.channel)
        one.channel.close()

    def _gave_up(self, one: ProcessConnection, reason: str) -> None:
        raise Stopped(reason)

    # ------------------------------------------------------------ calls

    def _group(self, one: ProcessConnection, group: Any, members: tuple[int, ...]) -> None:
        self._groups[group] = members

    def _call(self, one: ProcessConnection, group: Any, number: int, signature: str, given: Given) -> None:
        """Note the call `number` of a process in a group; answer all once all ranks have made it."""
        there, arrived = self._calls.setdefault((group, number), (signature, []))
        if there != signature:
            names = " and ".join(Signature.decode(each).collective for each in (there, signature))
            raise Stopped(f"calls differ: {names} of ranks {listed(one.numbers)}")
        arrived.append(given._replace(numbers=one.numbers))
        members = self._groups[group]
        if sum(len(each.numbers) for each in arrived) == len(members):
            del self._calls[group, number]
            self._answer(group, number, members, arrived)

    def _answer(self, group: Any, number: int, members: tuple[int, ...], arrived: list[Given]) -> None:
        inside, answers = {*members}, list[Any]()
        here = [one for one in self._connections if one.numbers[0] in inside]
        if not arrived[0].request:
            objects = [(each.numbers, each.objects) for each in arrived if each.objects is not None]
            answers = [(group, number, objects or None)]
        elif (results := self._results(members, arrived)) is None:
            answers = [(group, number, None)]
        elif isinstance(results, dict):
            answers = [(group, number, {rank: results.get(rank) for rank in one.numbers}) for one in here]
        else:
            answers = [(group, number, results)]
        messages = [pickle.dumps(answer, pickle.HIGHEST_PROTOCOL) for answer in answers]
        for one, message in zip(here, messages if len(messages) == len(here) else messages * len(here), strict=True):
            self._send(one, message)

    def _results(self, members: Sequence[int], arrived: Sequence[Given]) -> Any:
        """Return the common result of a collective, or the results by rank, or None without any."""
        calls, targets = dict[int, ReadyCall](), dict[int, Any]()
        requests = [self._request(each.request) for each in arrived]
        is_own = has_own_results(requests[0])
        for each, request in zip(arrived, requests, strict=True):
            call = ReadyCall(SimpleNamespace(request=request), each.source, None)  # type: ignore[arg-type]
            calls |= dict.fromkeys(each.numbers, call)
            if each.has_output and (is_own or not targets):
                dtype = numpy_dtype(request.dtype.name)
                for rank in each.numbers if is_own else each.numbers[:1]:
                    targets[rank] = numpy.zeros(request.sizes[1] // dtype.itemsize, dtype)
                    calls[rank] = call._replace(target=targets[rank])
        compute([calls[rank] for rank in members])
        return targets if is_own else next(iter(targets.values()), None)

    def _request(self, pickled: bytes) -> Any:
        if pickled not in self._requests:
            self._requests[pickled] = pickle.loads(pickled)
        return self._requests[pickled]


def send(channel: socket.socket, message: Any, *descriptors: int) -> None:
    """Send an object, with open files for the receiving process."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    header = HEADER.pack(len(data))
    if descriptors:
        socket.send_fds(channel, [header], descriptors)
        channel.sendall(data)
    else:
        channel.sendall(header + data)


def receive(channel: socket.socket, most: int = 0) -> tuple[list[int], bytearray]:
    """Return at most `most` open files, and the bytes of the next message; EOFError at the end."""
    header, descriptors, *_ = socket.recv_fds(channel, HEADER.size, most, socket.MSG_WAITALL) if most \
        else (channel.recv(HEADER.size, socket.MSG_WAITALL), [])
    if len(header) < HEADER.size:
        raise EOFError("a process has ended early")
    data = bytearray(HEADER.unpack(header)[0])
    view, here = memoryview(data), 0
    while here < len(data):
        came = channel.recv_into(view[here:], 0, socket.MSG_WAITALL)
        if not came:
            raise EOFError("a process has ended early")
        here += came
    return descriptors, data


def _seconds_of(leader: int) -> int:
    """Return the time on processors of all processes of a process group, in ticks."""
    spent = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[2]) == leader:
                spent += int(fields[11]) + int(fields[12])
    return spent


def _free_memory() -> int:
    """Return the bytes of memory that are free, or that the system can free."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) << 10
    return RESERVE
