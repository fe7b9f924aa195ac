"""`gpucoll doctor`: check this machine and this job for problems with collectives, and give advice.

    facts    versions, MPI and launcher, GPUs, shared memory, engine; reasons for missing items
    probes   messages between all pairs of ranks; every collective on small exact data
    remarks  problems and advice, derived from the report alone; the report as text

All ranks exchange their findings, so all have the same exit code; rank 0 prints.
"""

from __future__ import annotations

import contextlib
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
from gpucoll.calibration.measure import ranks_of
from gpucoll.device import gpus
from gpucoll.doctor import facts, probes, remarks
from gpucoll.doctor.remarks import Report
from gpucoll.errors import ArgumentError, GpucollError, UsageError
from gpucoll.launch import bootstrap
from gpucoll.launch.binding import near, processor_list
from gpucoll.launch.launchers import RUN, launched
from gpucoll.launch.places import store_place

DOCTOR_TIMEOUT = 60.0  # seconds, unless GPUCOLL_TIMEOUT is set
SILENCE = 5.0  # seconds that silent ranks wait before exiting, so that the reporting rank can finish
TEST_SECONDS = 2.0  # duration of a self-test


def main(options: Any) -> int:
    """Examine this machine and this job; return 0 if all is well, 1 for a problem, the same on all ranks.

    A collective call; rank 0 prints. Wrong options in the environment end the process with 2.
    """
    mpi, by_store = facts.mpi(), RUN in os.environ or store_place() is not None
    if by_store or (mpi.facts["library"] is None and mpi.facts["launcher"] is None):
        by_store = True
        mpi.facts.update(store=True, mismatch=None, match=None)
    elif mpi.facts["library"] is None or mpi.facts["mismatch"]:
        return _alone(mpi, as_json=options.json)
    if facts.host().facts["engine"] is None:
        return _alone(mpi, as_json=options.json)
    try:
        timeout = bootstrap.options({}).timeout if os.environ.get("GPUCOLL_TIMEOUT") else DOCTOR_TIMEOUT
        if not by_store:
            facts.start_mpi(timeout)
        with gpucoll.init(timeout=timeout) as comm:
            return examine(comm, mpi, as_json=options.json)
    # The launcher belongs to another MPI than mpi4py's.
    except UsageError as error:
        mpi.facts.update(mismatch=" ".join(error.args[0].split()), match=False)
        return _alone(mpi, as_json=options.json)
    except ArgumentError:
        raise
    except GpucollError as error:
        sys.stderr.write(f"gpucoll doctor: {facts.reason(error)}\n")
        sys.stderr.flush()
        # The other ranks would wait for this rank until their own timeouts.
        if not by_store and facts.mpi_module().COMM_WORLD.size > 1:
            bootstrap.abort(facts.mpi_module())
        return 1


def _alone(mpi: facts.Findings, *, as_json: bool) -> int:
    """Report on this process without using MPI; of several launched processes only rank 0 reports."""
    if launched()[1] != 0:
        # Open MPI's mpiexec kills all processes when one process exits with an error.
        time.sleep(SILENCE)
        return 1
    return examine(None, mpi, as_json=as_json)


def examine(comm: Any, mpi: facts.Findings, *, as_json: bool) -> int:
    """Examine the job of `comm`, or this process alone for None; return the exit code. A collective call."""
    everyone = comm.all_gather_object(_rank_facts(comm)) if comm else [_rank_facts(comm)]
    findings, speaks = _assemble(everyone, mpi), comm is None or comm.rank == 0
    if speaks and not as_json:
        print(*remarks.facts(findings), sep="\n", flush=True)
    if comm and comm.size > 1:
        findings["links"] = probes.links(ranks_of(comm), [rank["name"] for rank in everyone], comm.timeout)
    else:
        findings["missing"]["links"] = "a link needs two ranks: mpiexec -n 4 gpucoll doctor, or " \
                                       "gpucoll run --standalone -n 4 -m gpucoll doctor"
    if comm:
        _test_self(comm, findings, [number for number, rank in enumerate(everyone) if rank["device"] is None])
    else:
        findings["missing"]["self-test"] = "no ranks could be joined"
    remarks.judge(findings)
    if speaks:
        print(*([json.dumps(findings)] if as_json else remarks.tests(findings)), sep="\n", flush=True)
    return int(findings["exit_code"])


def _rank_facts(comm: Any = None) -> Report:
    """Return the facts known to one rank; only the first rank of a host describes the host."""
    # The launcher may have its own name for the host.
    name = os.environ.get("PMI_HOSTNAME") or os.environ.get("PMIX_HOSTNAME") or socket.gethostname()
    return {"name": name, "versions": facts.versions(), "cores": os.sched_getaffinity(0),
            "device": comm and comm.device, "near": near(_pci(comm and comm.device) or ""),
            "host": facts.host() if comm is None or comm.local_rank == 0 else None}


def _pci(ordinal: int | None) -> str | None:
    """Return a GPU's PCI id, None if unknown."""
    # The doctor also reports on machines where CUDA fails.
    with contextlib.suppress(Exception):
        return None if ordinal is None else gpus.describe_gpu(ordinal).pci
    return None


def _assemble(everyone: Sequence[Report], mpi: facts.Findings) -> Report:
    """Return the report made of the facts of all ranks, and of this rank's facts on MPI; without the tests."""
    ranks = defaultdict(list)
    for number, rank in enumerate(everyone):
        ranks[rank["name"]].append(number)
    hosts = [{"name": name, "ranks": members, "cores": len(set().union(*(everyone[rank]["cores"] for rank in members))),
              "bound": _bound(everyone, members), "far": [
                  rank for rank in members if everyone[rank]["near"] and everyone[rank]["near"].isdisjoint(
                      everyone[rank]["cores"])],
              **everyone[members[0]]["host"].facts, "missing": everyone[members[0]]["host"].missing}
             for name, members in ranks.items()]
    versions, missing = everyone[0]["versions"]
    return {"schema": 3, "ranks": len(everyone), "versions": versions, "mpi": mpi.facts, "hosts": hosts, "links": None,
            "self_test": {}, "missing": {**missing, **mpi.missing}}


def _bound(everyone: Sequence[Report], members: Sequence[int]) -> dict[str, list[int]]:
    """Return the ranks of a host that have the same processors, by the processors."""
    found = defaultdict(list)
    for rank in members:
        found[processor_list(everyone[rank]["cores"])].append(rank)
    return dict(found)


def _test_self(comm: Any, findings: Report, without_gpu: Sequence[int]) -> None:
    """Run the self-tests, on host memory or the emulated device and on GPUs, and add the results to the report."""
    emulated = os.environ.get("GPUCOLL_DEVICE") == "emulated"
    device = "emulated" if emulated else "cpu"
    outcome = findings["self_test"][device] = probes.self_test(comm, comm.all_gather_object, device, numpy,
                                                                TEST_SECONDS)
    why = "the emulated device stands for it" if emulated else "the test before has failed" if outcome["faults"] else \
        f"no GPU for {remarks.named(without_gpu)}" if without_gpu else None
    if why is None:
        import cupy

        # The arrays of the test are allocated on the current device.
        cupy.cuda.Device(comm.device).use()
        outcome = probes.self_test(comm, comm.all_gather_object, "cuda", cupy, TEST_SECONDS)
        why = outcome["refused"]
    if why is None:
        advice = comm.explain("all_reduce", 1 << 20, device="cuda")["advice"]
        findings["self_test"]["cuda"] = outcome | {"advice": advice}
    else:
        findings["missing"]["self-test on cuda"] = why
