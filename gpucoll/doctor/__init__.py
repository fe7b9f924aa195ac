"""`gpucoll doctor`: is this machine, and this job, fit for collectives? What it finds, and what to do, in plain words.

    facts       versions, MPI and launcher, GPUs, shared memory, compiler; for what is missing the reason
    probes      messages between all pairs of ranks; every collective on small exact data
    report      what is wrong, by a table of rules from the report alone; the report for people

Every rank learns what all have found, and so comes to the same exit code; rank 0 prints.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy

import gpucoll
from gpucoll.arguments import launched, refuse
from gpucoll.doctor import facts, probes, report
from gpucoll.doctor.report import Report
from gpucoll.errors import ArgumentError, GpucollError, UsageError

PROGRAM = "gpucoll doctor"
TIMEOUT = 60.0  # seconds, where GPUCOLL_TIMEOUT says nothing
SILENCE = 5.0  # seconds that ranks which cannot reach each other leave the one that speaks
SECONDS = 2.0  # of self-test


def main(*, as_json: bool) -> int:
    """Examine this machine and this job; return 0 where all is fine, 1 where something is wrong, the same on all ranks.

    A collective call; rank 0 prints. Wrong options in the environment end the process with 2.
    """
    mpi = facts.mpi()
    if mpi.facts["library"] is None or mpi.facts["mismatch"]:
        return _alone(mpi, as_json=as_json)
    try:
        facts.start_mpi(mpi)
        with gpucoll.init(timeout=None if os.environ.get("GPUCOLL_TIMEOUT") else TIMEOUT) as comm:
            return examine(comm, mpi, as_json=as_json)
    except UsageError as error:  # a launcher that mpi4py's MPI does not understand
        mpi.facts.update(mismatch=" ".join(error.args[0].split()), match=False)
        return _alone(mpi, as_json=as_json)
    except ArgumentError as error:
        refuse(PROGRAM, str(error))
    except GpucollError as error:
        sys.stderr.write(f"{PROGRAM}: {facts.reason(error)}\n")
        sys.stderr.flush()
        world = facts.mpi_module().COMM_WORLD
        if world.size > 1:  # the others wait for this rank, or for the one that it waits for
            world.Abort(1)
        return 1


def _alone(mpi: facts.Findings, *, as_json: bool) -> int:
    """Report on this process without MPI, which cannot be used; one process speaks for all that were launched."""
    if launched()[1] != 0:
        time.sleep(SILENCE)  # Open MPI's mpiexec ends the others when one leaves with an error
        return 1
    found = assemble([_rank_facts()], mpi)
    found["missing"].update(dict.fromkeys(("links", "self-test"), "MPI cannot be started"))
    report.judge(found)
    _write([json.dumps(found)] if as_json else [*report.facts(found), *report.tests(found), *report.verdict(found)])
    return int(found["exit_code"])


def examine(comm: Any, mpi: facts.Findings, *, as_json: bool) -> int:
    """Examine the job of `comm` and return the exit code, the same on all ranks; a collective call."""
    speaks = comm.rank == 0 and not as_json
    found = assemble(comm.mpi.allgather(_rank_facts(comm)), mpi)
    _write(report.facts(found) if speaks else ())
    if comm.size > 1:
        found["links"] = _links_as_json(probes.measure(comm.mpi, comm.mpi.allgather(comm.node), comm.timeout), found)
    else:
        found["missing"]["links"] = "a link needs two ranks: mpiexec -n 4 gpucoll doctor"
    _test_self(comm, found)
    report.judge(found)
    _write([*report.tests(found), *report.verdict(found)] if speaks else ())
    _write([json.dumps(found)] if comm.rank == 0 and as_json else ())
    return int(found["exit_code"])


def _write(lines: Iterable[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def _rank_facts(comm: Any = None) -> Report:
    """Return what one rank knows; of a host its first rank tells."""
    versions = facts.versions()
    name = os.environ.get("PMI_HOSTNAME") or os.environ.get("PMIX_HOSTNAME") or socket.gethostname()
    return {"node": comm.node if comm else 0, "name": name, "versions": versions, "device": comm and comm.device,
            "cores": os.sched_getaffinity(0), "host": facts.host() if not comm or comm.local_rank == 0 else None}


def assemble(told: Sequence[Report], mpi: facts.Findings) -> Report:
    """Return the report of what all ranks told, and what one knows of MPI; the tests are still missing."""
    versions, missing = told[0]["versions"]
    by_rank = {name: [rank["versions"].facts[name] for rank in told] for name in versions}
    return {"schema": 2, "ranks": len(told), "versions": versions, "mpi": mpi.facts, "hosts": _hosts(told), "links": None,
            "differing": {name: found for name, found in by_rank.items() if len(set(found)) > 1}, "self_test": {},
            "devices": [rank["device"] for rank in told], "missing": {**missing, **mpi.missing}}


def _hosts(told: Sequence[Report]) -> list[Report]:
    """Return the facts of each node; two of one name are told apart by their numbers."""
    ranks: dict[int, list[int]] = {}
    for number, rank in enumerate(told):
        ranks.setdefault(rank["node"], []).append(number)
    names = [told[members[0]]["name"] for members in ranks.values()]
    return [{"name": name if names.count(name) == 1 else f"{name} (node {node})", "ranks": members,
             "cores": len(set().union(*(told[rank]["cores"] for rank in members))),
             **told[members[0]]["host"].facts, "missing": told[members[0]]["host"].missing}
            for name, (node, members) in zip(names, ranks.items(), strict=True)]


def _links_as_json(links: Sequence[probes.Link], found: Report) -> Report:
    names = {rank: host["name"] for host in found["hosts"] for rank in host["ranks"]}
    slow = probes.slow(links)
    pairs = [{"ranks": [link.one, link.two], "hosts": [names[link.one], names[link.two]], "kind": link.kind,
              **_figures(link.latency, link.bandwidth), "slow": link in slow} for link in links]
    return {"pairs": pairs, "kinds": {
        kind: {"pairs": sum(link.kind == kind for link in links), "slow": sum(link.kind == kind for link in slow),
               **_figures(*figures)} for kind, figures in probes.good(links).items()}}


def _figures(latency: float, bandwidth: float) -> dict[str, float]:
    return {"latency_us": float(f"{latency * 1e6:.3g}"), "bandwidth_mb_s": float(f"{bandwidth / 1e6:.3g}")}


def _test_self(comm: Any, found: Report) -> None:
    """The report has the outcome of the self-tests: on the host's memory, or the emulated device, and on GPUs."""
    emulated = os.environ.get("GPUCOLL_DEVICE") == "emulated"
    device = "emulated" if emulated else "cpu"
    found["self_test"][device] = outcome = probes.self_test(comm, comm.mpi.allgather, device, numpy, SECONDS)
    without = [rank for rank, ordinal in enumerate(found["devices"]) if ordinal is None]
    why = "the emulated device stands for it" if emulated else "the test before has failed" if outcome["faults"] else \
        f"there is no GPU for {report.named(without)}" if without else None
    if why is None:
        import cupy

        outcome = probes.self_test(comm, comm.mpi.allgather, "cuda", cupy, SECONDS)
        why = outcome["refused"]
    if why is None:
        found["self_test"]["cuda"] = outcome
    else:
        found["missing"]["self-test on cuda"] = why
