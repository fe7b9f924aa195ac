"""torch.distributed for virtual ranks: the groups of each rank, the store, and the ways of torch to start.

All backends are followed as the backend "gpucoll". The classes and checks are those of `gpucoll.torch`; replaced are
the ways in which ranks meet, and the thread that makes asynchronous calls.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.multiprocessing
from torch.distributed import Backend, Store, distributed_c10d, rpc
from torch.distributed.device_mesh import DeviceMesh

from gpucoll import Communicator, internal
from gpucoll.internal import Signature, options
from gpucoll.precheck import torch_tensors
from gpucoll.precheck.matching import VirtualGroup
from gpucoll.precheck.ranks import VirtualTransport
from gpucoll.precheck.state import replaced
from gpucoll.precheck.torch_threads import primitives
from gpucoll.precheck.turns import Turns, refusal
from gpucoll.torch import handles
from gpucoll.torch.group import TorchProcessGroup
from gpucoll.torch.membership import STORE_NAMES

c10d: Any = distributed_c10d
_serials = itertools.count()  # of prechecks


def fresh_variables() -> dict[str, Any]:
    """Return the variables of `torch.distributed.distributed_c10d` in a process without groups."""
    world = c10d._World()
    return {"_world": world, "_pg_map": {}, "_pg_names": {}, "_pg_group_ranks": {}, "_pg_backend_config": {},
            "_group_count": 0, "_tags_to_pg": {}, "_pg_to_tag": {}, "_backend": None, "_default_pg_init_method": None}


class VirtualStore(Store):
    """A store of torch shared by virtual ranks; `get` and `wait` give up the turn."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        self._turns.events += 1

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self.set(key, str(total))
        return total

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a value if the value is as expected, or absent and expected to be empty; return the value."""
        expected, before = expected.encode() if isinstance(expected, str) else bytes(expected), self._values.get(key)
        if before == expected or (before is None and not expected):
            self.set(key, desired)
        return self._values.get(key, expected)

    def append(self, key: str, value: str | bytes) -> None:
        self.set(key, self._values.get(key, b"") + (value.encode() if isinstance(value, str) else bytes(value)))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def check(self, keys: Sequence[str]) -> bool:
        self._turns.pause("store.check")
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        """Wait until all keys have values; turns take no time, so that no deadline passes."""
        self._turns.wait(lambda: all(key in self._values for key in keys), "store.wait")

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)

    def clone(self) -> VirtualStore:
        """Return the store itself: a connection of its own is needed by real threads only."""
        return self


class VirtualTorchGroup(TorchProcessGroup):
    """A torch process group of virtual ranks."""

    def __init__(self, world: TorchWorld, options: Any) -> None:
        self._meeting = world, str(options.group_id), tuple(options.global_ranks_in_group)
        super().__init__(options.store, options.group_rank, options.group_size, options.timeout)

    def _communicators(self, *_: Any) -> list[Communicator]:
        world, name, members = self._meeting
        return world.meet(name, members, self._rank, self._size)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Receive a tensor from the first rank to send; the message looked for is noted, for the findings."""
        link: Any = internal.link_of(self._points)
        probes = link.group.probes

        def begin(array: Any) -> tuple[Any, int] | None:
            probes[self._rank] = None, tag  # until a message is seen
            source = internal.sender_of(self._points, tag)
            return None if source is None else (self._points.recv(array, source, tag, async_op=True), source)

        return self._message(tensors, begin)

    def _enqueue(self, call: Callable[[], object], tensors: Any) -> NoReturn:
        raise refusal("a tensor of a call is on a GPU; precheck supports host tensors only, so let the program use the "
                      "CPU there")


class TorchWorld:
    """The groups and stores of all ranks in torch.distributed."""

    def __init__(self, turns: Turns, groups: list[VirtualGroup]) -> None:
        self._turns, self._groups = turns, groups
        self._size = len(turns.ranks)
        self._stores: dict[Any, VirtualStore] = {}
        # For each group, by name and members: the groups for collectives and for messages. torch uses a name again
        # after all members have left the group.
        self._known: dict[tuple[str, tuple[int, ...]], list[VirtualGroup]] = {}

    def store(self, place: object) -> VirtualStore:
        """Return the store at a place, the same for all ranks."""
        if place not in self._stores:
            self._stores[place] = VirtualStore(self._turns)
        return self._stores[place]

    def rendezvous(self, url: Any, rank: int = -1, world_size: int = -1, **_: Any) -> Iterator[tuple[Store, int, int]]:
        """Yield the store, the rank and the size for the default group."""
        yield (self.store(url), self._turns.current.number if rank == -1 else rank,
               self._size if world_size == -1 else world_size)

    def meet(self, name: str, members: tuple[int, ...], rank: int, size: int) -> list[Communicator]:
        """Return a communicator for collectives and one for messages; wait for all members."""
        number, call = self._turns.current.number, "new_group" if members else "init_process_group"
        if not members and (rank, size) != (number, self._size):
            raise refusal(f"{call}: rank {rank} of {size} is rank {number} of {self._size} here; precheck supports "
                          "only a default group of all ranks in their order, so pass RANK and WORLD_SIZE of the "
                          "environment")
        members = members or (*range(self._size),)
        if (name, members) not in self._known:
            self._known[name, members] = [VirtualGroup(self._turns, members, self._groups) for _ in STORE_NAMES]
        groups = self._known[name, members]
        made = [Communicator(VirtualTransport(group, number), options({})) for group in groups]
        internal.waits_of(made[0]).run(groups[0].exchange(rank, Signature(call, header=call), None, bool, []), call)
        return made


def _refused(text: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise refusal(text)

    return refuse


def _replacements(world: TorchWorld, turns: Turns) -> list[tuple[Any, str, Any]]:
    """Return the functions and classes of torch to be replaced: owner, name and replacement."""
    helper, mesh, serial = c10d._new_process_group_helper, DeviceMesh.__init__, next(_serials)
    future, wait_in_torch = handles.TorchWork.get_future, torch.futures.Future.wait

    def with_gpucoll(size: int, rank: int, ranks: Sequence[int], backend: Any, *given: Any, **named: Any) -> Any:
        named.pop("backend_options", None)  # of the other backend
        return helper(size, rank, ranks, Backend("gpucoll"), *given, **named)

    def of_rank(self: Any, *given: Any, **named: Any) -> None:
        mesh(self, *given, **named)
        # Meshes of several ranks are alike, and DTensor's caches, kept for the life of the process, must not take one
        # for the other. The number of a thread would do for torch, but the system uses the number again.
        self._thread_id = serial, turns.current.number

    def get_future(self: Any) -> Any:
        found = future(self)
        if turns.current is turns.ranks[turns.current.number]:  # not in a callback of a future
            # Futures are awaited in C++, with the turn: complete all calls before. DistributedDataParallel waits at the
            # end of backward, after the callbacks of the engine.
            try:
                torch.autograd.Variable._execution_engine.queue_callback(turns.settle)
            except RuntimeError:  # not inside of backward
                turns.settle()
        return found

    def wait(self: Any) -> Any:
        turns.wait(self.done, "wait")
        return wait_in_torch(self)

    multiprocessing: Any = torch.multiprocessing
    spawn = _refused("torch.multiprocessing starts further processes; precheck runs the ranks itself, so let the "
                     "program take RANK and WORLD_SIZE from the environment")
    return [
        *((handles, name, value) for name, value in primitives(turns).items()),
        (c10d, "_new_process_group_helper", with_gpucoll), (c10d, "rendezvous", world.rendezvous),
        (torch.distributed, "TCPStore", lambda host_name, port, *_, **__: world.store((host_name, port))),
        (torch.distributed, "FileStore", lambda file_name, *_, **__: world.store(file_name)),
        (handles.TorchWork, "get_future", get_future), (torch.futures.Future, "wait", wait),
        (DeviceMesh, "__init__", of_rank),
        (multiprocessing, "spawn", spawn), (multiprocessing, "start_processes", spawn),
        (rpc, "init_rpc", _refused("init_rpc: precheck follows calls of torch.distributed, and no remote calls"))]


@contextlib.contextmanager
def as_world(turns: Turns, groups: list[VirtualGroup]) -> Iterator[None]:
    """Let torch.distributed make groups of virtual ranks."""
    world, hook, plugin = TorchWorld(turns, groups), sys.excepthook, Backend._plugins["GPUCOLL"]
    threads, level = torch.get_num_threads(), torch.distributed.get_debug_level()
    Backend._plugins["GPUCOLL"] = plugin._replace(creator_fn=lambda options, _: VirtualTorchGroup(world, options),
                                                  extended_api=True)
    # The registry of groups by name, used by functional collectives, is a thread's own then.
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    torch.distributed.set_debug_level(torch.distributed.DebugLevel.OFF)  # no second group of Gloo for each group
    torch.set_num_threads(1)  # as torchrun does; each rank's thread has a pool of its own
    try:
        # The second replacements call the first.
        with replaced(torch_tensors.replacements(len(turns.ranks))), replaced(_replacements(world, turns)):
            yield
    finally:
        torch.set_num_threads(threads)
        torch.distributed.set_debug_level(level)
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        Backend._plugins["GPUCOLL"] = plugin
        sys.excepthook = hook
