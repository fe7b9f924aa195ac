"""`gpucoll run`: a program launched under mpiexec, with torchrun's variables in its environment.

    gpucoll run --nproc-per-node 4 train.py --epochs 3

becomes ``mpiexec -n 4 python -m gpucoll.launch 127.0.0.1:29500 train.py --epochs 3``: each rank runs this module, which
turns what mpiexec has told it into RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and
then runs the program as ``python train.py`` would. MPI is started by the program, not here.
"""

from __future__ import annotations

import argparse
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpucoll import launchers
from gpucoll.arguments import Parser, refuse

PROGRAM = "gpucoll run"


def main(arguments: Sequence[str]) -> int:
    """Become the mpiexec of a job: its exit code is the job's. Wrong arguments: one line, exit code 2."""
    job = _parsed(arguments)
    mpiexec = launchers.find_mpiexec()
    if mpiexec is None:
        sys.stderr.write(f"{PROGRAM}: no mpiexec beside this Python or on the PATH: pip install 'gpucoll[mpich]'\n")
        return 1
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, check=False).stdout
    sys.stdout.flush()
    os.execv(mpiexec, command(mpiexec, version, job, master(job, os.environ), root=os.geteuid() == 0))


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(PROGRAM, description="Launch a program under mpiexec, with torchrun's variables.")
    parser.add_argument("--nproc-per-node", "--nproc_per_node", type=_positive, default=1, metavar="N",
                        help="ranks on each host (1)")
    parser.add_argument("--hosts", type=_hosts, default=(), metavar="a,b", help="where to run; without it, here")
    parser.add_argument("script", help="the Python program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the program is given")
    options = parser.parse_args(list(arguments))
    if not Path(options.script).is_file():
        refuse(PROGRAM, f"there is no file {options.script!r}")
    return options


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of ranks")
    return int(text)


def _hosts(text: str) -> tuple[str, ...]:
    hosts = tuple(host.strip() for host in text.split(","))
    if not all(hosts) or len(set(hosts)) < len(hosts) or any(set(host) & set(" :") for host in hosts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of different host names such as a,b")
    return hosts


def master(job: argparse.Namespace, environment: Mapping[str, str]) -> str:
    """Return address:port of the first rank, after the environment where that says one."""
    address = environment.get("MASTER_ADDR") or (job.hosts[0] if job.hosts else "127.0.0.1")
    return f"{address}:{environment.get('MASTER_PORT') or (launchers.PORT if job.hosts else launchers.free_port())}"


def command(mpiexec: str, version: str, job: argparse.Namespace, first: str, *, root: bool) -> list[str]:
    """Return the command line; `version` is what ``mpiexec --version`` says, and so who its vendor is."""
    each = job.nproc_per_node
    ranks = each * max(len(job.hosts), 1)
    options = launchers.mpiexec_options(launchers.vendor_of(version), per_host=each, hosts=job.hosts, root=root)
    rank = [sys.executable, "-m", "gpucoll.launch", first, job.script, *job.arguments]
    return [mpiexec, "-n", str(ranks), *options, *rank]


def variables(environment: Mapping[str, str], first: str) -> dict[str, str]:
    """Return torchrun's variables for a rank, from those of its launcher; empty where that has said nothing.

    >>> environment = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
    >>> list(variables(environment, "a:29500").values())
    ['5', '8', '1', '4', 'a', '29500']
    """
    process = launchers.started(environment)
    if process is None or process.local_rank is None or process.local_size is None:
        return {}
    address, _, port = first.rpartition(":")
    own = launchers.torchrun_variables(process.rank, process.size, process.local_rank, process.local_size)
    return {**own, "MASTER_ADDR": address, "MASTER_PORT": port}


def run_rank(arguments: Sequence[str]) -> None:
    """Run a program as one rank: `arguments` are the first rank's address:port, the script, and what it is given."""
    first, script, *given = arguments
    own = variables(os.environ, first)
    if not own:
        sys.stderr.write(f"{PROGRAM}: mpiexec has not told this process its rank; known are MPICH's, Intel MPI's and "
                         "Open MPI's\n")
        raise SystemExit(1)
    os.environ.update(own)
    sys.argv[:] = [script, *given]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    run_rank(sys.argv[1:])
