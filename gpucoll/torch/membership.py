"""How the ranks of a group meet: by MPI if MPI started all of the ranks, else by torch's store alone."""

from __future__ import annotations

import datetime
import os
import zlib

from torch.distributed import DistError, PrefixStore, Store

from gpucoll.communicator import Communicator
from gpucoll.communicator.links import StoreLink
from gpucoll.launch import bootstrap
from gpucoll.launch.launchers import started
from gpucoll.transport.kvstore import KeyStore
from gpucoll.transport.mailbox import StoreRanks
from gpucoll.transport.rendezvous import becomes

STORE_NAMES = ("collectives", "messages")
CHECK_INTERVAL = 1e-3  # seconds between two checks of the store


class TorchStore(KeyStore):
    """A torch store as gpucoll's `KeyStore`. The calls of torch's store have a deadline set by torch."""

    foreign: tuple[type[Exception], ...] = (DistError,)

    def __init__(self, store: Store) -> None:
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str, wait: float = 0.0) -> bytes | None:
        return bytes(self._store.get(key)) if becomes(lambda: self._store.check([key]), wait, CHECK_INTERVAL) else None

    def delete(self, key: str) -> None:
        self._store.delete_key(key)


def set_variables() -> None:
    """Set torchrun's variables in the environment if mpiexec has started this rank without these variables.

    In this case the call is collective and starts MPI. In all other cases it does nothing.
    """
    process = started()
    if process is None or process.size == 1 or {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= {*os.environ}:
        return
    bootstrap.start_mpi(bootstrap.options({}).timeout)
    world = bootstrap.world()
    bootstrap.set_variables(bootstrap.place(world), world.bcast)


def communicators(store: Store, rank: int, size: int, timeout: datetime.timedelta) -> list[Communicator]:
    """Return one communicator for collectives and one for messages. A collective call of the group's members.

    With two communicators, collectives and messages do not wait for each other.
    """
    seconds = timeout.total_seconds()
    # An earlier group of the same name may have left keys in the store. Each group adds `size` to the counter, so the
    # quotient numbers the groups, and each group's keys get another prefix.
    ours = TorchStore(PrefixStore(f"{(store.add('came', 1) - 1) // size}", store))
    numbers = StoreRanks(ours, "numbers", rank, size, seconds).allgather(_number())
    if len({*numbers} - {None}) == size:
        return _by_mpi(numbers, seconds)
    options = bootstrap.options({"timeout": seconds})
    links = [StoreLink(ours, name, rank, size, seconds) for name in STORE_NAMES]
    bootstrap.check_alike(links[0].mpi, options)
    return [Communicator(link, options) for link in links]


def _number() -> int | None:
    """Return this process' rank in MPI's world; None if MPI did not start the process or sees only this process."""
    process = started()
    if process is None:
        return None
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # started by srun, for example, without any MPI
        return None

    return MPI.COMM_WORLD.rank if MPI.COMM_WORLD.size == process.size else None


def _by_mpi(numbers: list[int], seconds: float) -> list[Communicator]:
    from mpi4py import MPI

    # Create_group involves only the members. The tag separates groups being created at the same time.
    group = MPI.COMM_WORLD.group.Incl(numbers)
    part = MPI.COMM_WORLD.Create_group(group, zlib.crc32(repr(numbers).encode()) % (1 << 15))
    made = [Communicator.from_mpi(part, timeout=seconds) for _ in STORE_NAMES]
    part.Free()
    group.Free()
    return made
