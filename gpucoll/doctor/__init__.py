"""`gpucoll doctor`: is this machine, and this job, fit for collectives? What it finds, and what to do, in plain words.

    facts       versions, MPI and launcher, GPUs, shared memory, engine; for what is missing the reason
    probes      messages between all pairs of ranks; every collective on small exact data
    remarks     what is wrong, from the report alone; the report for people

Every rank learns what all have found, and so comes to the same exit code; rank 0 prints.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy

import gpucoll
from gpucoll.doctor import facts, probes, remarks
from gpucoll.doctor.remarks import Report
from gpucoll.errors import ArgumentError, GpucollError, UsageError
from gpucoll.launch import bootstrap
from gpucoll.launch.launchers import launched

TIMEOUT = 60.0  # seconds, where GPUCOLL_TIMEOUT says nothing
SILENCE = 5.0  # seconds that ranks which cannot reach each other leave the one that speaks
SECONDS = 2.0  # of self-test


def main(options: Any) -> int:
    """Examine this machine and this job; return 0 where all is fine, 1 where something is wrong, the same on all ranks.

    A collective call; rank 0 prints. Wrong options in the environment end the process with 2.
    """
    mpi = facts.mpi()
    if mpi.facts["library"] is None or mpi.facts["mismatch"]:
        return _alone(mpi, as_json=options.json)
    try:
        facts.start_mpi()
        with gpucoll.init(timeout=None if os.environ.get("GPUCOLL_TIMEOUT") else TIMEOUT) as comm:
            return examine(comm, mpi, as_json=options.json)
    except UsageError as error:  # a launcher that mpi4py's MPI does not understand
        mpi.facts.update(mismatch=" ".join(error.args[0].split()), match=False)
        return _alone(mpi, as_json=options.json)
    except ArgumentError:
        raise
    except GpucollError as error:
        sys.stderr.write(f"gpucoll doctor: {facts.reason(error)}\n")
        sys.stderr.flush()
        if facts.mpi_module().COMM_WORLD.size > 1:  # the others wait for this rank, or for the one that it waits for
            bootstrap.abort(facts.mpi_module())
        return 1


def _alone(mpi: facts.Findings, *, as_json: bool) -> int:
    """Report on this process without MPI, which cannot be used; one process speaks for all that were launched."""
    if launched()[1] != 0:
        time.sleep(SILENCE)  # Open MPI's mpiexec ends the others when one leaves with an error
        return 1
    return examine(None, mpi, as_json=as_json)


def examine(comm: Any, mpi: facts.Findings, *, as_json: bool) -> int:
    """Examine the job of `comm`, or this process alone; return the exit code, on all ranks. A collective call."""
    everyone = comm.mpi.allgather(_rank_facts(comm)) if comm else [_rank_facts(comm)]
    findings, speaks = _assemble(everyone, mpi), comm is None or comm.rank == 0
    if speaks and not as_json:
        print(*remarks.facts(findings), sep="\n", flush=True)
    if comm and comm.size > 1:
        findings["links"] = probes.measure(comm.mpi, [rank["name"] for rank in everyone], comm.timeout)
    else:
        findings["missing"]["links"] = "a link needs two ranks: mpiexec -n 4 gpucoll doctor"
    if comm:
        _test_self(comm, findings, [number for number, rank in enumerate(everyone) if rank["device"] is None])
    else:
        findings["missing"]["self-test"] = "MPI cannot be started"
    remarks.judge(findings)
    if speaks:
        print(*([json.dumps(findings)] if as_json else remarks.tests(findings)), sep="\n", flush=True)
    return int(findings["exit_code"])


def _rank_facts(comm: Any = None) -> Report:
    """Return what one rank knows; of a host its first rank tells. A launcher may have its own name for the host."""
    name = os.environ.get("PMI_HOSTNAME") or os.environ.get("PMIX_HOSTNAME") or socket.gethostname()
    return {"name": name, "versions": facts.versions(), "cores": os.sched_getaffinity(0),
            "device": comm and comm.device, "host": facts.host() if comm is None or comm.local_rank == 0 else None}


def _assemble(everyone: Sequence[Report], mpi: facts.Findings) -> Report:
    """Return the report of what all ranks know, and what one knows of MPI; the tests are still missing."""
    ranks = defaultdict(list)
    for number, rank in enumerate(everyone):
        ranks[rank["name"]].append(number)
    hosts = [{"name": name, "ranks": members, "cores": len(set().union(*(everyone[rank]["cores"] for rank in members))),
              **everyone[members[0]]["host"].facts, "missing": everyone[members[0]]["host"].missing}
             for name, members in ranks.items()]
    versions, missing = everyone[0]["versions"]
    return {"schema": 3, "ranks": len(everyone), "versions": versions, "mpi": mpi.facts, "hosts": hosts, "links": None,
            "self_test": {}, "missing": {**missing, **mpi.missing}}


def _test_self(comm: Any, findings: Report, without_gpu: Sequence[int]) -> None:
    """The report has the outcome of the self-tests: on the host's memory, or the emulated device, and on GPUs."""
    emulated = os.environ.get("GPUCOLL_DEVICE") == "emulated"
    device = "emulated" if emulated else "cpu"
    outcome = findings["self_test"][device] = probes.self_test(comm, comm.mpi.allgather, device, numpy, SECONDS)
    why = "the emulated device stands for it" if emulated else "the test before has failed" if outcome["faults"] else \
        f"no GPU for {remarks.named(without_gpu)}" if without_gpu else None
    if why is None:
        import cupy

        cupy.cuda.Device(comm.device).use()  # where the arrays of the test are to be
        outcome = probes.self_test(comm, comm.mpi.allgather, "cuda", cupy, SECONDS)
        why = outcome["refused"]
    if why is None:
        findings["self_test"]["cuda"] = outcome
    else:
        findings["missing"]["self-test on cuda"] = why
