"""`gpucoll run`: a program launched on several ranks, with torchrun's variables in its environment.

    gpucoll run -n 4 train.py --epochs 3

becomes ``mpiexec -n 4 python -m gpucoll.cli.jobs 127.0.0.1:29500 train.py --epochs 3``. Each rank runs this module.
The module translates mpiexec's variables to RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and
MASTER_PORT, and then runs the program like ``python train.py``, or with ``-m`` a module like ``python -m``. The program
itself starts MPI. With ``--standalone``, `gpucoll.cli.standalone` starts and watches the ranks
without MPI, and the ranks meet by a store. With ``--nnodes``, one such launcher on each host starts the ranks of this
host, and the ranks of all hosts meet at a store of rank 0, on the host of node 0:

    gpucoll run --nnodes 2 --node-rank 1 --rendezvous a:29400 -n 4 train.py
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpucoll.cli import mpi_jobs, standalone
from gpucoll.cli.arguments import Parser, at_least, refuse
from gpucoll.core.output import say
from gpucoll.device.gpus import gpu_count
from gpucoll.launch import binding, launchers, places
from gpucoll.launch.places import address_of, text_of

PROGRAM = "gpucoll run"


def main(arguments: Sequence[str]) -> int:
    """Launch a job and return the job's exit code; wrong arguments end with a line of error and exit code 2."""
    job = _parsed(arguments)
    if job.standalone or job.nnodes:
        own = launchers.rank_variables(job.nproc_per_node) if job.standalone else \
            launchers.node_variables(job.nnodes, job.node_rank, job.nproc_per_node, *job.rendezvous)
        if job.nnodes and job.node_rank == 0 and not os.environ.get(launchers.SECRET):
            host, port = job.rendezvous
            say(f"{PROGRAM}: {launchers.SECRET} is not set, so any process that reaches {host}:{port} may join the "
                "job; set the same secret on all hosts\n")
        store = "" if job.standalone else text_of(job.rendezvous)
        return standalone.Job(lambda parent: _rank_command(job, f"--parent={parent}", store), own,
                              survive=job.survive).run()
    mpiexec = launchers.find_mpiexec()
    if mpiexec is None:
        say(f"{PROGRAM}: no mpiexec beside this Python or on the PATH: pip install 'gpucoll[mpich]', or with "
            "--standalone do without MPI on one host\n")
        return 1
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, check=False, timeout=60).stdout
    first = master(job, os.environ)
    return mpi_jobs.MpiexecJob(
        lambda name: command(mpiexec, version, job, f"--launcher={name}", first, root=os.geteuid() == 0),
        shares_terminal=bool(job.hosts) and os.isatty(0)).run()


def parser() -> Parser:
    flags = Parser(PROGRAM, description="Launch a program on several ranks, with torchrun's variables.")
    flags.add_argument("-n", "--nproc-per-node", "--nproc_per_node", type=_count, default=1, metavar="N",
                        help="ranks on each host (1): a number; gpu or cpu: the number of this host's GPUs or "
                             "processors; auto: gpu if there is a GPU, else cpu")
    flags.add_argument("--hosts", type=_hosts, default=(), metavar="a,b", help="hosts (this host)")
    flags.add_argument("--bind", choices=binding.WAYS, default="auto",
                       help="processors of a rank: those of one core, or of one NUMA node, near the rank's GPU; numa "
                            "is the default if a host has as many ranks as GPUs or cores, otherwise none")
    flags.add_argument("--standalone", action="store_true", help="this host only, without MPI")
    flags.add_argument("--survive", action="store_true",
                       help="without MPI: a failed rank does not end the others; the exit code is 0 if any rank "
                            "exits with 0")
    flags.add_argument("--nnodes", type=at_least(1), metavar="N",
                        help="N hosts without MPI: start this command on each host, with the same -n")
    flags.add_argument("--node-rank", "--node_rank", type=at_least(0), metavar="K", help="number of this host, from 0")
    flags.add_argument("--rendezvous", type=_place, metavar="HOST:PORT",
                        help="address and free port of host 0, where the ranks connect")
    flags.add_argument("-m", "--module", action="store_true", help="the program is a module, as in python -m")
    flags.add_argument("script", help="the Python program")
    flags.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the program")
    return flags


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    options = parser().parse_args(list(arguments))
    if options.standalone and options.hosts:
        refuse(PROGRAM, "--standalone is for this host, and --hosts for MPI: give only one option")
    if options.survive and not (options.standalone or options.nnodes):
        refuse(PROGRAM, "--survive is for ranks without MPI: give --standalone or --nnodes")
    several = [options.nnodes, options.node_rank, options.rendezvous]
    if several != [None] * 3 and (None in several or options.standalone or options.hosts):
        refuse(PROGRAM, "--nnodes, --node-rank and --rendezvous go together, without --standalone and --hosts")
    if options.nnodes is not None and not options.node_rank < options.nnodes:
        refuse(PROGRAM, f"--node-rank {options.node_rank} is not below --nnodes {options.nnodes}")
    if options.module and not _is_module(options.script):
        refuse(PROGRAM, f"there is no module {options.script!r}")
    if not options.module and not Path(options.script).is_file():
        refuse(PROGRAM, f"there is no file {options.script!r}")
    return options


def _is_module(name: str) -> bool:
    """Return whether the first part of a module's name can be found, also in the working folder; imports nothing."""
    # Only the first part: finding a submodule would import, and so run, the package here.
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.util.find_spec(name.partition(".")[0]) is not None
    except ValueError:
        return False
    finally:
        del sys.path[0]


def _count(text: str) -> int:
    """Return the ranks per host for a number, gpu, cpu or auto, like torchrun; raise ArgumentTypeError for others."""
    gpus = gpu_count() if text in ("gpu", "auto") else 0
    if text == "gpu" and not gpus:
        raise argparse.ArgumentTypeError("'gpu' starts a rank for each GPU, but CuPy finds no GPU here")
    return gpus or len(os.sched_getaffinity(0)) if text in ("gpu", "cpu", "auto") else at_least(1)(text)


def _place(text: str) -> tuple[str, int]:
    place = address_of(f"tcp://{text}")
    if place is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form host:port")
    return place


def _hosts(text: str) -> tuple[str, ...]:
    hosts = tuple(host.strip() for host in text.split(","))
    if not all(hosts) or len(set(hosts)) < len(hosts) or any(set(host) & set(" :") for host in hosts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of different host names such as a,b")
    return hosts


def master(job: argparse.Namespace, environment: Mapping[str, str]) -> str:
    """Return address:port of the first rank; MASTER_ADDR and MASTER_PORT of the environment come first."""
    # With several hosts, a port found free here may be taken on the first host: use torchrun's fixed port.
    address = environment.get("MASTER_ADDR") or (job.hosts[0] if job.hosts else "127.0.0.1")
    return f"{address}:{environment.get('MASTER_PORT') or (launchers.PORT if job.hosts else launchers.free_port())}"


def command(mpiexec: str, version: str, job: argparse.Namespace, *place: str, root: bool) -> list[str]:
    """Return mpiexec's command line; `version` is the output of ``mpiexec --version``, and names the vendor.

    `place` as in `_rank_command`.
    """
    each = job.nproc_per_node
    ranks = each * max(len(job.hosts), 1)
    options = launchers.mpiexec_options(launchers.vendor_of(version), per_host=each, hosts=job.hosts, root=root)
    return [mpiexec, "-n", str(ranks), *options, *_rank_command(job, *place)]


def _rank_command(job: argparse.Namespace, *place: str) -> list[str]:
    """Return the command line of a rank.

    `place` is ``--launcher`` and the first rank's address:port; or ``--parent``, if the environment has the rank's
    variables, and the store of ranks on several hosts, else "".
    """
    how = ["--module"] if job.module else []
    is_whole = len(binding.numa_nodes(os.sched_getaffinity(0))) == 1 and not job.hosts  # other hosts see for themselves
    has_choice = job.bind == "core" or not (job.bind == "none" or is_whole)
    bound = [sys.executable, "-IS", binding.__file__, job.bind] if has_choice else []
    return [*bound, sys.executable, "-m", "gpucoll.cli.jobs", *how, *place, job.script, *job.arguments]


def variables(environment: Mapping[str, str], first: str) -> dict[str, str]:
    """Return torchrun's variables for this rank, from the launcher's variables; empty without a known launcher.

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
    """Run a program as a rank; `arguments` are those of `_rank_command`."""
    is_module = arguments[0] == "--module"
    launcher, first, script, *given = arguments[is_module:]
    kind, _, name = launcher.partition("=")
    if kind == "--parent":
        standalone.follow(name, int(os.environ["RANK"]))
        if first:
            places.follow(first)
    else:
        own = variables(os.environ, first)
        if not own:
            say(f"{PROGRAM}: mpiexec has not told this process its rank; known are MPICH's, Intel MPI's and Open "
                "MPI's\n")
            raise SystemExit(1)
        os.environ.update(own)
        mpi_jobs.keep(name)
    _run_program(script, given, is_module=is_module)


def _run_program(script: str, given: Sequence[str], *, is_module: bool) -> None:
    """Run a program like ``python script``, or a module like ``python -m script``."""
    sys.argv[:] = [script, *given]
    if is_module:  # the working folder is first on the path already, because this module was started by -m
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    run_rank(sys.argv[1:])
