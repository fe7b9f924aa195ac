"""The order of the examination: facts of each rank, then links, then self-tests; rank 0 judges and speaks."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import gpucoll
from gpucoll import bootstrap
from gpucoll.arguments import launched, refuse
from gpucoll.doctor import gpus, links, mpi, rules, selftest, text
from gpucoll.doctor.findings import Findings, scrubbed
from gpucoll.doctor.machine import host_name, machine
from gpucoll.doctor.rules import Report
from gpucoll.doctor.versions import versions
from gpucoll.errors import ArgumentError, GpucollError, UsageError

PROGRAM = "gpucoll doctor"
TIMEOUT = 60.0  # seconds, where GPUCOLL_TIMEOUT says nothing
SILENCE = 5.0  # seconds that ranks which cannot reach each other leave the one that speaks
Say = Callable[[Iterable[str]], None]


def main(*, as_json: bool) -> int:
    """Examine this machine and this job; return 0 where all is fine, 1 where something is wrong, the same on all ranks.

    A collective call; rank 0 prints. Wrong options in the environment end the process with 2.
    """
    found = Findings()
    library, started_by = mpi.library_facts(found), mpi.launcher(os.environ)
    mpi.launcher_facts(found, library, started_by)
    if library is None or found.facts["mismatch"]:
        return _alone(found, as_json=as_json)
    try:
        mpi.start()
        with gpucoll.init(timeout=None if os.environ.get("GPUCOLL_TIMEOUT") else TIMEOUT) as comm:
            return _together(comm, found, as_json=as_json)
    except UsageError as error:  # a launcher that mpi4py's MPI does not understand
        found.facts.update(mismatch=" ".join(error.args[0].split()), match=False)
        return _alone(found, as_json=as_json)
    except ArgumentError as error:
        refuse(PROGRAM, str(error))
    except GpucollError as error:
        sys.stderr.write(f"{PROGRAM}: {scrubbed(str(error))}\n")
        _end_all()
        return 1


def _end_all() -> None:
    """End the job where it has other ranks: they wait for this one, or for the one that it waits for."""
    from mpi4py import MPI

    sys.stderr.flush()
    if MPI.COMM_WORLD.size > 1:
        MPI.COMM_WORLD.Abort(1)


def _speaker(rank: int, *, as_json: bool) -> Say:
    """Return what prints lines for people at once: on rank 0, and not where one JSON object is wanted."""
    def say(lines: Iterable[str]) -> None:
        if rank == 0 and not as_json:
            _write("".join(f"{line}\n" for line in lines))

    return say


def _write(output: str) -> None:
    sys.stdout.write(output)
    sys.stdout.flush()


def _alone(found: Findings, *, as_json: bool) -> int:
    """Report on this process without MPI, which cannot be used; one process speaks for all that were launched."""
    if launched()[1] != 0:
        time.sleep(SILENCE)  # Open MPI's mpiexec ends the others when one leaves with an error
        return 1
    report = assemble([_rank_facts(0, 0, 0, None)], found)
    report["missing"].update({name: "MPI cannot be started" for name in ("links", "self_test.cpu", "self_test.cuda")})
    rules.judge(report)
    _write(f"{json.dumps(report)}\n" if as_json else "".join(f"{line}\n" for line in text.lines(report)))
    return int(report["exit_code"])


# ---------------------------------------------------------------- all ranks together


def _together(comm: Any, found: Findings, *, as_json: bool) -> int:
    """Examine the job of `comm`; rank 0 assembles, judges and tells every rank the exit code."""
    say = _speaker(comm.rank, as_json=as_json)
    mpi.world_facts(found, comm.size)
    told = comm.mpi.gather(_rank_facts(comm.rank, comm.local_rank, comm.node, comm.device))
    report = assemble(told, found) if told else {}
    if told:
        say(text.facts(report))
    _test_links(comm, report)
    if report:
        say(text.links(report))
    _test_self(comm, report)
    if report:
        rules.judge(report)
        say([*text.self_test(report), *text.verdict(report)])
        if as_json:
            _write(f"{json.dumps(report)}\n")
    return int(comm.mpi.bcast(report.get("exit_code")))


def _rank_facts(rank: int, local_rank: int, node: int, device: int | None) -> Report:
    """Return what one rank knows; of a host's GPUs its first rank asks."""
    packages, host, own = versions(), machine(), Findings()
    boards = gpus.gpus() if local_rank == 0 else Findings()
    own.look("device", lambda: _gpu(device))
    own.look("cores", lambda: sorted(os.sched_getaffinity(0)))
    return {"rank": rank, "node": node, "name": host_name(), "versions": packages.facts,
            "versions_missing": packages.missing, "machine": {**host.facts, **boards.facts},
            "missing": {**host.missing, **boards.missing}, "device": own.facts["device"],
            "device_missing": own.missing.get("device"), "cores": own.facts["cores"]}


def _gpu(device: int | None) -> dict[str, Any]:
    """Return the GPU of this process; raise the reason where it has none."""
    if _emulated():
        raise LookupError("GPUCOLL_DEVICE=emulated stands for it")
    import cupy

    if device is None:
        raise LookupError(f"CuPy finds {cupy.cuda.runtime.getDeviceCount()} GPUs")
    found = bootstrap.describe_gpu(device)
    return {"ordinal": found.ordinal, "pci": found.pci}


def _emulated() -> bool:
    return os.environ.get("GPUCOLL_DEVICE") == "emulated"


def _test_links(comm: Any, report: Report) -> None:
    """The report has the links between all pairs of ranks, and which of them are slow."""
    if comm.size == 1:
        report["missing"]["links"] = "a link needs two ranks: mpiexec -n 4 gpucoll doctor"
        return
    found = links.measure(comm.mpi, comm.mpi.allgather(comm.node), comm.timeout)
    if report:
        names = {rank: host["name"] for host in report["hosts"] for rank in host["ranks"]}
        report["links"] = links_as_json(found, names)


def links_as_json(found: Sequence[links.Link], names: Mapping[int, str]) -> Report:
    """Return classes and pairs as the report has them; `names` is the host of every rank."""
    slow = {(bad.link.one, bad.link.two) for bad in links.slow(found)}
    pairs = [{"ranks": [link.one, link.two], "hosts": [names[link.one], names[link.two]], "class": link.kind,
              **_figures("", link.latency, link.bandwidth), "slow": (link.one, link.two) in slow} for link in found]
    kinds = [{"class": name, "pairs": len(alike),
              **_figures("", statistics.median(link.latency for link in alike),
                         statistics.median(link.bandwidth for link in alike)),
              **_figures("good_", *links.good(alike))} for name, alike in links.classes(found).items()]
    return {"classes": kinds, "pairs": pairs}


def _figures(prefix: str, latency: float, bandwidth: float) -> dict[str, float]:
    return {f"{prefix}latency_us": float(f"{latency * 1e6:.3g}"),
            f"{prefix}bandwidth_mb_s": float(f"{bandwidth / 1e6:.3g}")}


def _test_self(comm: Any, report: Report) -> None:
    """The report has the outcome of the self-tests: on the host's memory, or the emulated device, and on GPUs."""
    host = selftest.HOST._replace(name="emulated") if _emulated() else selftest.HOST
    outcomes = {host.name: selftest.self_test(comm, comm.mpi, host, selftest.SECONDS)}
    why = "the test before has failed" if _failed(outcomes[host.name]) else _why_no_gpu_test(comm)
    outcomes["cuda"] = {"refused": why} if why else \
        selftest.self_test(comm, comm.mpi, selftest.gpu(), selftest.SECONDS)
    if report:
        for memory, outcome in outcomes.items():
            if memory == "cuda" and "refused" in outcome:
                report["missing"]["self_test.cuda"] = outcome["refused"]
            else:
                report["self_test"][memory] = outcome


def _failed(outcome: Report) -> bool:
    return "refused" in outcome or bool(outcome["faults"])


def _why_no_gpu_test(comm: Any) -> str | None:
    """Return why GPU arrays cannot be tested, the same on every rank; None where they can. A collective call."""
    mine = Findings()
    mine.look("device", lambda: _gpu(comm.device))
    whys = comm.mpi.allgather(mine.missing.get("device"))
    ranks = [rank for rank, why in enumerate(whys) if why]
    return f"{whys[ranks[0]]} ({rules.named(ranks)})" if ranks else None


# ---------------------------------------------------------------- the report


def assemble(told: Sequence[Report], found: Findings) -> Report:
    """Return the report of what all ranks told and what rank 0 knows of MPI; the tests are still missing."""
    first = told[0]
    hosts = list(_hosts(told))
    report = {"schema": 1, "verdict": None, "exit_code": None, "problems": [], "advice": [], "ranks": len(told),
              "versions": first["versions"], "differing": dict(_differing(told)), "mpi": found.facts, "hosts": hosts,
              "links": None, "self_test": dict.fromkeys(("cpu", "emulated", "cuda"))}
    report["missing"] = {**{f"versions.{name}": why for name, why in first["versions_missing"].items()},
                         **{f"mpi.{name}": why for name, why in found.missing.items()}}
    return report


def _differing(told: Sequence[Report]) -> Iterator[tuple[str, list[str | None]]]:
    """Yield each version that ranks do not share, with every rank's."""
    for name in rules.ALIKE:
        by_rank = [rank["versions"][name] for rank in told]
        if len(set(by_rank)) > 1:
            yield name, by_rank


def _hosts(told: Sequence[Report]) -> Iterator[Report]:
    """Yield the facts of each node, from its first rank; two nodes of one name are told apart by their numbers."""
    names = {rank["node"]: rank["name"] for rank in told}
    for node in sorted(names):
        ranks = [rank for rank in told if rank["node"] == node]
        name = names[node] if list(names.values()).count(names[node]) == 1 else f"{names[node]} (node {node})"
        yield {"name": name, "ranks": [rank["rank"] for rank in ranks], **ranks[0]["machine"],
               "usable_cores": _usable(ranks),
               "affinity": {str(rank["rank"]): rank["machine"]["affinity"] for rank in ranks},
               "devices": {str(rank["rank"]): rank["device"] for rank in ranks},
               "missing": {**ranks[0]["missing"], **_missing_devices(ranks)}}


def _usable(ranks: Sequence[Report]) -> float | None:
    """Return on how many cores the ranks may run together, and no more than their control group allows."""
    if any(rank["cores"] is None for rank in ranks):
        return None
    cores = {core for rank in ranks for core in rank["cores"]}
    quotas = [rank["machine"]["quota_cores"] for rank in ranks if rank["machine"]["quota_cores"]]
    return min(len(cores), *quotas) if quotas else len(cores)


def _missing_devices(ranks: Sequence[Report]) -> dict[str, str]:
    return {f"devices[{rank['rank']}]": rank["device_missing"] for rank in ranks if rank["device_missing"]}
