"""Where ranks meet without MPI: at a store on rank 0, found by the variables of a launcher or named by the user."""

from __future__ import annotations

import datetime
import json
import os
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gpucoll.core.dtypes import is_whole
from gpucoll.errors import CollectiveTimeout, UsageError
from gpucoll.launch.launchers import RUN, SECRET, SLURM, free_port, started
from gpucoll.transport.rendezvous import route

MOST_PORT = 65535


class StorePlace(NamedTuple):
    """This process' place among ranks that meet without MPI, by a store on rank 0.

    `token` is the job's secret. `address`, a host and a port, is where rank 0 listens for ranks of several hosts.
    """

    rank: int
    size: int
    token: str
    address: tuple[str, int] | None = None


def follow(store: str) -> None:
    """Let this process' ranks meet at `store`, "tcp://host:port" of rank 0, as its launcher says."""
    _told.append(store)


_told: list[str] = []


def store_place(environment: Mapping[str, str] = os.environ) -> StorePlace | None:
    """Return this rank's place among ranks that meet by a store, told by torchrun's variables, without MPI.

    None for a lone process, and for a process started by MPI's launcher. Raises UsageError if the ranks cannot meet.

    >>> store_place({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"})
    StorePlace(rank=1, size=2, token='localhost:29500  ', address=None)
    """
    if _told:
        return named_place(_told[-1], None, None, environment)
    rank, size, local, host, port = (environment.get(name, "") for name in
                                     ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    process = started(environment)
    by_mpi = is_by_mpi(environment, has_address=bool(host and port))
    if process and process.launcher is SLURM and not by_mpi:  # srun --mpi=none
        rank, size = rank or str(process.rank), size or str(process.size)
    # torchrun decides for the store even inside an MPI job; MPI's launcher decides otherwise.
    if not rank or not size or (size == "1" and rank == "0") or (by_mpi and RUN not in environment):
        return None
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise UsageError(f"init: RANK={rank!r} is not one of the WORLD_SIZE={size!r} ranks; set both, or neither",
                         code="GC-LAUNCHER")
    # An address that other hosts reach is for ranks of several hosts, unless all ranks are said to be on this one.
    is_spread = local != size if local else not (host in ("", "localhost", "::1") or host.startswith("127."))
    if not port or (is_spread and not (host and port.isdecimal())):
        raise UsageError(f"init: WORLD_SIZE announces {size} ranks, but MASTER_ADDR and MASTER_PORT give no address "
                         "for the store of rank 0; launch with mpiexec, torchrun, or gpucoll run --standalone -n "
                         f"{size}",
                         code="GC-LAUNCHER")
    # torchrun restarts a job with the same port: its run and restart number keep the old and the new ranks apart.
    run = [environment.get(name, "") for name in (RUN, "TORCHELASTIC_RESTART_COUNT")]
    secret = environment.get(SECRET, "")
    if is_spread and not any(run):
        return StorePlace(int(rank), int(size), secret or text_of((host, int(port))), (host, int(port)))
    # The user's secret is not enough: two jobs of a host may have the same secret.
    token = " ".join([*filter(None, [secret]), f"{host}:{port}", *run])
    return StorePlace(int(rank), int(size), token, (host, int(port)) if is_spread else None)


def is_by_mpi(environment: Mapping[str, str], *, has_address: bool) -> bool:
    """Return whether MPI's launcher started the ranks: srun did not, if MPI has no part and the store `has_address`."""
    process, has_pmi = started(environment), any(name.startswith(("PMI_", "PMIX_")) for name in environment)
    if process is None or (process.launcher is SLURM and not has_pmi and has_address):
        return has_pmi
    return process.size > 1


def named_place(store: str, rank: int | None, size: int | None,
                environment: Mapping[str, str] = os.environ) -> StorePlace:
    """Return this rank's place among ranks that meet at `store`, "tcp://host:port" of rank 0; UsageError if incomplete.

    `rank` and `size` default to torchrun's variables, and to the launcher's.

    >>> named_place("tcp://a:29400", 1, 4, {"GPUCOLL_SECRET": "s"})
    StorePlace(rank=1, size=4, token='s', address=('a', 29400))
    """
    address = address_of(store)
    if address is None:
        raise UsageError(f"init: store={store!r} is not of the form tcp://host:port", code="GC-STORE")
    process = started(environment)
    numbers = []
    for what, given, name, by in (("rank", rank, "RANK", process and process.rank),
                                  ("size", size, "WORLD_SIZE", process and process.size)):
        text = environment.get(name) or ("" if by is None else str(by))
        number = given if given is not None else int(text) if text.isdecimal() else None
        if number is None or not is_whole(number):
            raise UsageError(f"init: with store={store!r} this rank needs its {what}: pass {what}= or set {name}",
                             code="GC-STORE")
        numbers.append(int(number))
    if not 0 <= numbers[0] < numbers[1]:
        raise UsageError(f"init: rank {numbers[0]} is not one of {numbers[1]} ranks", code="GC-STORE")
    return StorePlace(numbers[0], numbers[1], environment.get(SECRET) or store, address)


def address_of(text: object) -> tuple[str, int] | None:
    """Return host and port of a text "tcp://host:port"; None for any other.

    >>> address_of("tcp://[::1]:29400"), address_of("a:29400")
    (('::1', 29400), None)
    """
    found = re.fullmatch(r"tcp://(\[[0-9A-Fa-f:.]+\]|[^/:\[\]]+):(\d{1,5})", text) if isinstance(text, str) else None
    return (found[1].strip("[]"), int(found[2])) if found is not None and int(found[2]) <= MOST_PORT else None


def text_of(address: tuple[str, int]) -> str:
    """Return an address in the form of `gpucoll.join`.

    >>> text_of(("::1", 29400))
    'tcp://[::1]:29400'
    """
    return f"tcp://[{address[0]}]:{address[1]}" if ":" in address[0] else f"tcp://{address[0]}:{address[1]}"


def announced(place: StorePlace, timeout: float, environment: Mapping[str, str]) -> StorePlace:
    """Return `place`; for ranks of torchrun on several hosts, with the address announced by rank 0 in torchrun's store.

    A collective call of these ranks: torchrun's own store listens at MASTER_PORT, so rank 0 takes another port.
    """
    if place.address is None or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return place
    run = [environment.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")]
    # Once in a process' life: rank 0's store stays open, and serves the next world, too.
    if tuple(run) not in _announcements:
        from torch.distributed import TCPStore

        host, port = place.address
        _announcements[tuple(run)] = through(
            lambda patience: TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=patience),
            place, timeout, " ".join(["gpucoll", *run]))
    token, address = _announcements[tuple(run)][2:]
    return place._replace(token=environment.get(SECRET) or token, address=address)


_announcements: dict[tuple[str, ...], StorePlace] = {}  # by run and restart of a job


def through(connect: Callable[[datetime.timedelta], Any], place: StorePlace, timeout: float, key: str) -> StorePlace:
    """Return `place` with address and token of rank 0's store, told by rank 0 in torch's store at the place's address.

    `connect` returns torch's store, given the patience. A collective call.
    """
    assert place.address is not None
    host, port = place.address
    patience = datetime.timedelta(seconds=timeout)
    try:
        store = connect(patience)
        if place.rank == 0:
            # Rank 0 may be on another host than torch's store. Its address on the way there is in their network,
            # unless this host calls itself by a loopback address.
            address = route(host) or host
            own = host if address.startswith("127.") else address
            store.set(key, json.dumps([own, free_port(), secrets.token_hex(16)]))
        store.wait([key], patience)
        own_host, own_port, token = json.loads(store.get(key))
    except RuntimeError as error:  # torch's errors, of a lost connection and of the deadline
        raise CollectiveTimeout(f"init: waited {timeout:g} s for rank 0 in torch's store at {host}:{port}: {error}",
                                ranks=(0,)) from error
    return place._replace(token=token, address=(own_host, own_port))
