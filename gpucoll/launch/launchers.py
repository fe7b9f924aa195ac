"""Launchers and vendors of MPI: who started this process and as which rank, whose MPI it is, how mpiexec is called.

The one home of launchers' variables and of vendors' names. It needs the standard library alone, not even the rest of
the package: scripts load this file by its path before anything is installed.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Vendor(NamedTuple):
    """Who makes an MPI; `marks` stand in what its mpiexec or its library says of its version.

    Launchers and libraries of one `family` work together: MPICH's descendants share its way to start ranks.
    """

    name: str  # as packages are called
    family: str
    marks: tuple[str, ...]


VENDORS = (
    Vendor("impi", "MPICH", ("Intel(R) MPI",)),
    Vendor("openmpi", "Open MPI", ("Open MPI", "OpenRTE", "PRRTE")),
    Vendor("mpich", "MPICH", ("MPICH", "HYDRA", "MVAPICH")),
)


def vendor_of(version: str) -> Vendor | None:
    """Return whose MPI describes itself so, a launcher or a library; None for an unknown one."""
    return next((vendor for vendor in VENDORS if any(mark in version for mark in vendor.marks)), None)


SRUN = {"MPICH": "--mpi=pmi2", "Open MPI": "--mpi=pmix"}  # by which srun starts the ranks of an MPI, by its family


def library_name(version: str) -> str:
    """Return name and version of an MPI library: not who built it, where and with which options.

    >>> library_name("Open MPI v5.0.11, package: Open MPI someone@somewhere")
    'Open MPI 5.0.11'
    """
    line = version.strip("\0").strip().partition("\n")[0].partition(",")[0]
    return " ".join(re.sub(r"\bversion\b\s*:?|\bv(?=\d)", " ", line, flags=re.IGNORECASE).split())


# ---------------------------------------------------------------- who started this process


class Launcher(NamedTuple):
    """Names of the variables by which a launcher tells a process who it is, before MPI starts."""

    name: str
    family: str | None  # of the MPIs whose ranks it can start; None: of any
    rank: str
    size: str
    local_rank: str
    local_size: str


LAUNCHERS = (  # an outer one comes after those that it may have started
    Launcher("Open MPI's mpiexec", "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
             "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    Launcher("MPICH's mpiexec", "MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Launcher("MVAPICH's mpirun_rsh", "MPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
             "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    Launcher("Slurm's srun", None, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)
SLURM = LAUNCHERS[-1]
# Where the launcher of LAUNCHERS does not number the ranks of a host: HPE's PALS, Flux and Cray's PMI do beside MPICH's
# variables, and torchrun does.
LOCAL_RANKS = ("PALS_LOCAL_RANKID", "FLUX_TASK_LOCAL_ID", "PMI_LOCAL_RANK", "LOCAL_RANK")
PORT = 29500  # torchrun's
TOKEN = "GPUCOLL_TOKEN"  # the variable by which ranks that meet without MPI know each other


class Started(NamedTuple):
    """What a launcher has told this process."""

    launcher: Launcher
    rank: int
    size: int
    local_rank: int | None  # on this host; None where the launcher does not say
    local_size: int | None  # how many ranks it has started on this host; None where it does not say


def started(environment: Mapping[str, str] = os.environ) -> Started | None:
    """Return who started this process, and as which rank; None for nobody."""
    numbers = {name: int(environment[name]) for launcher in LAUNCHERS for name in launcher[2:]
               if environment.get(name, "").isdecimal()}
    for launcher in LAUNCHERS:
        if launcher.rank in numbers and launcher.size in numbers:
            # srun --mpi=pmi2 speaks as MPICH's mpiexec does, which also numbers the ranks of a node.
            slurm = launcher.rank == "PMI_RANK" and SLURM.rank in environment and launcher.local_size not in environment
            by = SLURM if slurm else launcher
            return Started(by, numbers[launcher.rank], numbers[launcher.size], numbers.get(by.local_rank),
                           numbers.get(by.local_size))
    return None


def local_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of this process among the ranks of its host; None where no launcher gives one.

    >>> local_rank({"PMI_RANK": "5", "PMI_SIZE": "8", "PALS_LOCAL_RANKID": "1"})
    1
    """
    process = started(environment)
    if process is not None and process.local_rank is not None:
        return process.local_rank
    return next((int(environment[name]) for name in LOCAL_RANKS if environment.get(name, "").isdecimal()), None)


def launched(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return the size and the rank that the launcher gave this process; (1, 0) without a launcher."""
    process = started(environment)
    return (process.size, process.rank) if process else (1, 0)


def torchrun_variables(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    """Return what torchrun would tell a rank of its place.

    >>> torchrun_variables(5, 8, 1, 4)
    {'RANK': '5', 'WORLD_SIZE': '8', 'LOCAL_RANK': '1', 'LOCAL_WORLD_SIZE': '4'}
    """
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(local_size)}


def rank_variables(size: int) -> list[dict[str, str]]:
    """Return the environment of each of `size` ranks of this host that are to meet without MPI.

    Whoever starts processes by himself, as `multiprocessing` or a notebook does, updates ``os.environ`` of each by one
    of these, before its `gpucoll.init`.

    >>> [(one["RANK"], one["WORLD_SIZE"]) for one in rank_variables(2)]
    [('0', '2'), ('1', '2')]
    """
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), TOKEN: secrets.token_hex(16)}
    return [{**torchrun_variables(rank, size, rank, size), **job} for rank in range(size)]


def free_port() -> int:
    """Return a port that nobody listens on now, torchrun's own where there is none to be had."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return int(server.getsockname()[1])
    except OSError:
        return PORT


# ---------------------------------------------------------------- how to start ranks


def find_mpiexec() -> str | None:
    """Return the mpiexec beside this Python, which belongs to its mpi4py, else the one on the PATH, else None."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def mpiexec_options(vendor: Vendor | None, *, per_host: int = 1, hosts: Sequence[str] = (), oversubscribe: bool = True,
                    root: bool | None = None, tag: bool = False) -> list[str]:
    """Return what an mpiexec needs besides ``-n``: `per_host` ranks on each of `hosts`, or on this one without any.

    Open MPI wants consent to more ranks than cores (`oversubscribe`), which also numbers the ranks of a host in a row,
    and to running as `root` (None: found out). With `tag` each line that a rank writes begins with its number.

    >>> mpiexec_options(vendor_of("HYDRA"), per_host=2, hosts=("a", "b"))
    ['-hosts', 'a,b', '-ppn', '2']
    >>> mpiexec_options(vendor_of("Open MPI"), root=True)
    ['--map-by', 'slot:OVERSUBSCRIBE', '--allow-run-as-root']
    """
    if vendor is None or vendor.name != "openmpi":
        return [*(["-hosts", ",".join(hosts), "-ppn", str(per_host)] if hosts else []),
                *(["-prepend-rank"] if tag else [])]
    root = os.geteuid() == 0 if root is None else root
    return [*(["--host", ",".join(f"{host}:{per_host}" for host in hosts)] if hosts else []),
            *(["--map-by", "slot:OVERSUBSCRIBE"] if oversubscribe else []), *(["--allow-run-as-root"] if root else []),
            *(["--tag-output"] if tag else [])]
