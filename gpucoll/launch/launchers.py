"""Launchers and vendors of MPI: the launcher and rank of this process, the vendor of an MPI, the options of mpiexec.

All knowledge of launchers' variables and vendors' names is here. The module needs only the standard library, and
nothing else of the package: scripts load this file by path before anything is installed.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Vendor(NamedTuple):
    """A vendor of MPI; each of `marks` identifies the vendor in a version text of an mpiexec or a library.

    Launchers and libraries of the same `family` work together: MPICH's descendants share the protocol to start ranks.
    """

    name: str  # the name in package names
    family: str
    marks: tuple[str, ...]


VENDORS = (
    Vendor("impi", "MPICH", ("Intel(R) MPI",)),
    Vendor("openmpi", "Open MPI", ("Open MPI", "OpenRTE", "PRRTE")),
    Vendor("mpich", "MPICH", ("MPICH", "HYDRA", "MVAPICH")),
)


def vendor_of(version: str) -> Vendor | None:
    """Return the vendor of a launcher or a library, from the version text; None for an unknown vendor."""
    return next((vendor for vendor in VENDORS if any(mark in version for mark in vendor.marks)), None)


SRUN = {"MPICH": "--mpi=pmi2", "Open MPI": "--mpi=pmix"}  # srun's option to start the ranks of an MPI, by family


def may_shrink(version: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether an MPI library with this version text may continue after the death of a rank.

    Without ``mpiexec --with-ft ulfm``, Open MPI's own calls for that would wait for ever.

    >>> may_shrink("Open MPI v5.0.11", {}), may_shrink("Open MPI v5.0.11", {"OMPI_MCA_mpi_ft_enable": "1"})
    (False, True)
    """
    vendor = vendor_of(version)
    told = environment.get("OMPI_MCA_mpi_ft_enable", "0").lower()
    return vendor is None or vendor.family != "Open MPI" or told not in ("0", "false", "")


def library_name(version: str) -> str:
    """Return name and version of an MPI library, without builder, place and build options.

    >>> library_name("Open MPI v5.0.11, package: Open MPI someone@somewhere")
    'Open MPI 5.0.11'
    """
    line = version.strip("\0").strip().partition("\n")[0].partition(",")[0]
    return " ".join(re.sub(r"\bversion\b\s*:?|\bv(?=\d)", " ", line, flags=re.IGNORECASE).split())


# ---------------------------------------------------------------- the launcher of this process


class Launcher(NamedTuple):
    """A launcher, with the names of the variables that describe a rank's place before MPI starts."""

    name: str
    family: str | None  # the family of MPIs with ranks started by this launcher; None for any
    rank: str
    size: str
    local_rank: str
    local_size: str


SLURM = Launcher("Slurm's srun", None, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
# The first launcher found counts. An outer launcher (srun) comes after those that it may have started (mpiexec).
LAUNCHERS = (
    Launcher("Open MPI's mpiexec", "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
             "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    Launcher("MPICH's mpiexec", "MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Launcher("MVAPICH's mpirun_rsh", "MPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
             "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    SLURM,
)
# Variables for the local rank if the launcher of LAUNCHERS sets none: HPE's PALS, Flux and Cray's PMI set these and
# MPICH's variables, and torchrun sets the last.
LOCAL_RANKS = ("PALS_LOCAL_RANKID", "FLUX_TASK_LOCAL_ID", "PMI_LOCAL_RANK", "LOCAL_RANK")
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # torchrun's variables for a rank's place
PORT = 29500  # torchrun's default port
SECRET = "GPUCOLL_SECRET"  # the variable with the user's secret, known to the ranks of all hosts
# torchrun's variable with the name of a job. Launchers without MPI set it, with a random name on one host, so that the
# rank belongs to them even inside a job of MPI.
RUN = "TORCHELASTIC_RUN_ID"
NO_AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "False"}  # the variable of a torchrun around such a launcher


class Started(NamedTuple):
    """This process' place, as told by the launcher."""

    launcher: Launcher
    rank: int
    size: int
    local_rank: int | None  # the rank among the ranks of this host; None if the launcher does not tell
    local_size: int | None  # the number of ranks on this host; None if the launcher does not tell


def started(environment: Mapping[str, str] = os.environ) -> Started | None:
    """Return the launcher of this process and the process' place; None without a known launcher."""
    numbers = {name: int(environment[name]) for launcher in LAUNCHERS for name in launcher[2:]
               if environment.get(name, "").isdecimal()}
    for launcher in LAUNCHERS:
        if launcher.rank in numbers and launcher.size in numbers:
            # srun --mpi=pmi2 sets PMI_RANK as MPICH's mpiexec does, but not mpiexec's variables for the local rank.
            slurm = launcher.rank == "PMI_RANK" and SLURM.rank in environment and launcher.local_size not in environment
            by = SLURM if slurm else launcher
            return Started(by, numbers[launcher.rank], numbers[launcher.size], numbers.get(by.local_rank),
                           numbers.get(by.local_size))
    return None


def local_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of this process among the ranks of the host; None if no launcher tells.

    >>> local_rank({"PMI_RANK": "5", "PMI_SIZE": "8", "PALS_LOCAL_RANKID": "1"})
    1
    """
    process = started(environment)
    # Below srun, for example, a launcher without MPI numbers the ranks of a host anew.
    if RUN in environment and environment.get("LOCAL_RANK", "").isdecimal():
        return int(environment["LOCAL_RANK"])
    if process is not None and process.local_rank is not None:
        return process.local_rank
    return next((int(environment[name]) for name in LOCAL_RANKS if environment.get(name, "").isdecimal()), None)


def local_place(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Return the number of this process among the ranks of the host, and their number; None if no launcher tells.

    >>> local_place({"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"})
    (1, 4)
    """
    own = [environment.get(name, "") for name in TORCHRUN[2:]]
    if RUN in environment and all(map(str.isdecimal, own)):
        return int(own[0]), int(own[1])
    process = started(environment)
    if process is None or process.local_rank is None or process.local_size is None:
        return None
    return process.local_rank, process.local_size


def launched(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return the number of ranks and this process' rank, as told by the launcher; (1, 0) without a launcher."""
    if RUN in environment and environment.get("WORLD_SIZE", "").isdecimal():  # without MPI
        return int(environment["WORLD_SIZE"]), int(environment.get("RANK", 0))
    process = started(environment)
    return (process.size, process.rank) if process else (1, 0)


def torchrun_variables(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    """Return torchrun's variables for a rank's place.

    >>> torchrun_variables(5, 8, 1, 4)
    {'RANK': '5', 'WORLD_SIZE': '8', 'LOCAL_RANK': '1', 'LOCAL_WORLD_SIZE': '4'}
    """
    return dict(zip(TORCHRUN, map(str, (rank, size, local_rank, local_size)), strict=True))


def rank_variables(size: int) -> list[dict[str, str]]:
    """Return the environment variables of each of `size` ranks of this host, for ranks that meet without MPI.

    A program that starts the processes (by `multiprocessing`, or from a notebook) updates ``os.environ`` of each
    process with one of the results, before the process calls `gpucoll.init`.

    Parameters
    ----------
    size : int
        The number of ranks.

    Returns
    -------
    list of dict
        The variables of each rank, by name.

    See Also
    --------
    gpucoll.init : Reads the variables.

    Examples
    --------
    >>> from gpucoll.launch import rank_variables
    >>> [(one["RANK"], one["WORLD_SIZE"]) for one in rank_variables(2)]
    [('0', '2'), ('1', '2')]
    """
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), RUN: secrets.token_hex(16), **NO_AGENT}
    return [{**torchrun_variables(rank, size, rank, size), **job} for rank in range(size)]


def node_variables(nodes: int, node: int, per_node: int, host: str, port: int) -> list[dict[str, str]]:
    """Return the environment variables of the `per_node` ranks of host `node` among `nodes`; rank 0 is on `host`.

    Rank 0's store takes `port`, see `places.follow`. torch.distributed, in the same program, takes the next port.

    >>> [one["RANK"] for one in node_variables(2, 1, 4, "a", 29400)]
    ['4', '5', '6', '7']
    """
    job = {"MASTER_ADDR": host, "MASTER_PORT": str(port + 1), RUN: "gpucoll", **NO_AGENT}
    return [{**torchrun_variables(node * per_node + rank, nodes * per_node, rank, per_node), **job}
            for rank in range(per_node)]


def free_port() -> int:
    """Return a port without a listener at this moment, or torchrun's default port if none can be found."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return int(server.getsockname()[1])
    except OSError:
        return PORT


# ---------------------------------------------------------------- the start of ranks


def find_mpiexec() -> str | None:
    """Return the path of the mpiexec in this Python's folder, or else on the PATH, or else None."""
    # An mpiexec in this Python's folder belongs to the MPI used by this Python's mpi4py.
    installed = Path(sys.executable).with_name("mpiexec")
    import shutil  # slow, with its compressors, and of no use to most ranks

    return str(installed) if installed.exists() else shutil.which("mpiexec")


def mpiexec_options(vendor: Vendor | None, *, per_host: int = 1, hosts: Sequence[str] = (), oversubscribe: bool = True,
                    root: bool | None = None) -> list[str]:
    """Return mpiexec's options after ``-n``, for `per_host` ranks on each of `hosts`, or on this host without hosts.

    Open MPI needs an option to run more ranks than cores (`oversubscribe`), which also gives the ranks of a host
    consecutive numbers, and an option to run as `root` (None: find out). Open MPI's and Intel's mpiexec would bind
    ranks to processors unless told not to; see `binding`.

    >>> mpiexec_options(vendor_of("HYDRA"), per_host=2, hosts=("a", "b"))
    ['-hosts', 'a,b', '-ppn', '2']
    >>> mpiexec_options(vendor_of("Open MPI"), root=True)
    ['--bind-to', 'none', '--map-by', 'slot:OVERSUBSCRIBE', '--allow-run-as-root']
    """
    if vendor is None or vendor.name != "openmpi":
        unbound = ["-genv", "I_MPI_PIN", "0"] if vendor and vendor.name == "impi" else []
        return [*unbound, *(["-hosts", ",".join(hosts), "-ppn", str(per_host)] if hosts else [])]
    root = os.geteuid() == 0 if root is None else root
    return ["--bind-to", "none", *(["--host", ",".join(f"{host}:{per_host}" for host in hosts)] if hosts else []),
            *(["--map-by", "slot:OVERSUBSCRIBE"] if oversubscribe else []), *(["--allow-run-as-root"] if root else [])]
