"""What is wrong and what could be better, from the report alone, as a table of rules; and the report for people."""

from __future__ import annotations

import itertools
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

Report: TypeAlias = dict[str, Any]
Cases: TypeAlias = Iterable[dict[str, Any]]

MIB, GIB = 1 << 20, 1 << 30
SHM_NEEDED, SHM_WANTED = 4 * MIB, 64 * MIB  # free bytes of shared memory for each rank of a host
WRONG, ADVICE = "problems", "advice"  # where the report has them; whatever is wrong makes the exit code 1
LABEL, WIDTH = 12, 110


def named(ranks: Iterable[int]) -> str:
    """Return ranks as a sentence says them.

    >>> named([3]), named([5, 0, 1, 2])
    ('rank 3', 'ranks 0-2,5')
    """
    ordered = sorted(ranks)
    runs = [[rank for _, rank in run] for _, run in itertools.groupby(enumerate(ordered), lambda at: at[1] - at[0])]
    return f"rank{'s' * (len(ordered) > 1)} " + ",".join("-".join(map(str, sorted({run[0], run[-1]}))) for run in runs)


# ---------------------------------------------------------------- the rules


class Rule(NamedTuple):
    """`text` is said once for each of the cases that `cases` finds in a report, with the words of the case."""

    code: str
    severity: str
    cases: Callable[[Report], Cases]
    text: str


def judge(report: Report) -> None:
    """The report has its `problems`, its `advice`, a `verdict` and an `exit_code`."""
    report |= {WRONG: [], ADVICE: []}
    for rule in RULES:
        report[rule.severity] += [{"code": rule.code, "text": rule.text.format_map(case), "ranks": case.get("ranks", []),
                                   "hosts": case.get("hosts", [])} for case in rule.cases(report)]
    report |= {"verdict": "wrong" if report[WRONG] else "fine", "exit_code": int(bool(report[WRONG]))}


def _job(condition: Callable[[Report, Report], Any]) -> Callable[[Report], Cases]:
    """Make one case, of what is known of MPI and versions, where the condition holds for these."""
    return lambda report: [{**report["mpi"], **report["versions"], "missing": report["missing"]}
                           for _ in range(bool(condition(report["mpi"], report["versions"])))]


def _hosts(condition: Callable[[Report], Any]) -> Callable[[Report], Cases]:
    """Make a case of each host for which the condition holds."""
    return lambda report: [{**host, "hosts": [host["name"]], "count": len(host["ranks"])}
                           for host in report["hosts"] if condition(host)]


def _free(host: Report) -> float:
    """Return the free bytes of shared memory for each rank."""
    return host["shm"]["free"] / len(host["ranks"]) if host["shm"] else SHM_WANTED


def _major(version: str | None, unknown: int) -> int:
    return int(version.partition(".")[0]) if version else unknown


def _differing(report: Report) -> Cases:
    for name, by_rank in report["differing"].items():
        owners = {version: named(rank for rank, own in enumerate(by_rank) if own == version) for version in by_rank}
        yield {"name": name, "said": "; ".join(f"{version or 'none'} on {ranks}" for version, ranks in owners.items())}


def _faults(report: Report) -> Cases:
    return [{**fault, "memory": memory, "who": named(fault["ranks"])} for memory, outcome in report["self_test"].items()
            for fault in outcome["faults"]]


def _slow_links(report: Report) -> Cases:
    """One case for each two hosts, or one."""
    by_hosts = defaultdict(list)
    for pair in report["links"]["pairs"] if report["links"] else ():
        if pair["slow"]:
            by_hosts[tuple(dict.fromkeys(pair["hosts"]))].append(pair)
    for hosts, pairs in by_hosts.items():
        worst = max(pairs, key=lambda pair: pair["latency_us"] / pair["bandwidth_mb_s"])
        yield {"hosts": list(hosts), "where": " and ".join(hosts), "worst": worst,
               "pairs": ", ".join("-".join(map(str, pair["ranks"])) for pair in pairs),
               "good": report["links"]["kinds"][worst["kind"]],
               "ranks": sorted({rank for pair in pairs for rank in pair["ranks"]})}


def _nvlinks_down(report: Report) -> Cases:
    for host in report["hosts"]:
        gpus = [{**gpu, **gpu["nvlinks"]} for gpu in host["gpus"] or () if gpu["nvlinks"]]
        most = max((gpu["up"] for gpu in gpus), default=0)
        yield from ({**gpu, "host": host["name"], "most": most, "hosts": [host["name"]]}
                    for gpu in gpus if gpu["up"] < most or (gpu["up"] and gpu["down"]))


def _apart(report: Report) -> Cases:
    for host in report["hosts"]:
        pairs = [f"{j}-{i}" for i, row in enumerate(host["p2p"] or ()) for j in range(i) if row[j] == "none"]
        yield from [{"host": host["name"], "pairs": ", ".join(pairs), "hosts": [host["name"]]}] if pairs else []


SHM = ("/dev/shm of {name} has {shm[free]:,} bytes free for {count} ranks, 64 MiB for each would do; remove what crashed "
       "jobs left there, or mount it larger (Docker: --shm-size=1g, or --ipc=host)")
RULES = (
    Rule("GC-MPI", WRONG, _job(lambda mpi, _: mpi["library"] is None),
         "MPI cannot be used: {missing[library]}; pip install 'gpucoll[mpich]', or load the site's MPI"),
    Rule("GC-LAUNCHER", WRONG, _job(lambda mpi, _: mpi["mismatch"]), "{mismatch}"),
    Rule("GC-LAUNCHER", ADVICE, _job(lambda mpi, _: mpi["launcher"] is None and mpi["mpiexec"] is None),
         "ranks cannot be launched: {missing[mpiexec]}"),
    Rule("GC-THREADS", ADVICE, _job(lambda mpi, _: mpi["threads"] not in ("multiple", None)),
         "MPI allows threads only as {threads!r}: what async_op starts goes on only inside a call of gpucoll's"),
    Rule("GC-VERSIONS", WRONG, _differing,
         "ranks have different versions of {name}: {said}; give every host the same environment"),
    Rule("GC-CUPY", ADVICE, _job(lambda _, versions: versions["nvidia_driver"] and versions["cupy"] is None),
         "there is an NVIDIA driver, but no CuPy: {missing[cupy]}"),
    Rule("GC-DRIVER", WRONG, _job(lambda _, versions: _major(versions["cuda_driver"], 99)
                                  < _major(versions["cuda_runtime"], 0)),
         "the driver is for CUDA {cuda_driver}, older than CuPy's {cuda_runtime}; update it, or install an older CuPy"),
    Rule("GC-NCCL", ADVICE, _job(lambda _, versions: versions["cuda_driver"] and versions["nccl"] is None),
         "GPUs have no NCCL: {missing[nccl]}"),
    Rule("GC-NVRTC", ADVICE, _job(lambda _, versions: versions["cuda_driver"] and versions["nvrtc"] is None),
         "kernels cannot be compiled for the GPUs: {missing[nvrtc]}"),
    Rule("GC-RESULT", WRONG, _faults, "self-test on {memory}: {call}: {what} on {who}"),
    Rule("GC-LINK", WRONG, _slow_links,
         "slow link, {where}: rank pairs {pairs}: {worst[bandwidth_mb_s]:g} MB/s and {worst[latency_us]:g} us, where good "
         "links have {good[bandwidth_mb_s]:g} MB/s and {good[latency_us]:g} us"),
    Rule("GC-SHM", WRONG, _hosts(lambda host: host["shm"] is None),
         "{name} has no shared memory: {missing[shm]}; mount a tmpfs on /dev/shm"),
    Rule("GC-SHM", WRONG, _hosts(lambda host: _free(host) < SHM_NEEDED), SHM),
    Rule("GC-SHM", ADVICE, _hosts(lambda host: SHM_NEEDED <= _free(host) < SHM_WANTED), SHM),
    Rule("GC-COMPILER", ADVICE, _hosts(lambda host: host["compiler"] is None),
         "{name} cannot compile what makes short calls on the host fast: {missing[compiler]}; install g++ and Python's "
         "headers (python3-dev), or name a compiler in CXX"),
    Rule("GC-CORES", ADVICE, _hosts(lambda host: len(host["ranks"]) > host["cores"]),
         "{count} ranks share {cores} cores of {name}: they wait for each other more than for messages"),
    Rule("GC-NVLINK", ADVICE, _nvlinks_down,
         "GPU {index} ({pci}) of {host} has {up} NVLinks up and {down} down, others up to {most}: see nvidia-smi nvlink -s"),
    Rule("GC-P2P", ADVICE, _apart,
         "GPUs {pairs} of {host} cannot read each other's memory: data goes through the host: IOMMU or ACS switched on, "
         "or GPUs behind different sockets"),
)


# ---------------------------------------------------------------- for people


def paragraph(label: str, *lines: str) -> Iterator[str]:
    """Yield `lines` beside their label, the long ones wrapped.

    >>> list(paragraph("links", "one", "two"))
    ['links       one', '            two']
    """
    for line in lines:
        for part in textwrap.wrap(line, WIDTH - LABEL, subsequent_indent="  ", break_on_hyphens=False):
            yield f"{label:{LABEL}}{part}"
            label = ""


def facts(report: Report) -> Iterator[str]:
    """Yield the part that needs no tests."""
    yield f"gpucoll doctor: {named(range(report['ranks']))} on {', '.join(host['name'] for host in report['hosts'])}"
    versions = [f"{name} {version}" for name, version in report["versions"].items() if version]
    yield from paragraph("versions", ", ".join(versions))
    mpi, words = report["mpi"], {True: ": they match", False: ": they do NOT match", None: ""}
    launched = f"{mpi['launcher']} started {mpi['launched']}" if mpi["launcher"] else f"mpiexec is {mpi['mpiexec']}"
    yield from paragraph("MPI", f"{mpi['library']}, threads {mpi['threads']}; {launched}{words[mpi['match']]}")
    for host in report["hosts"]:
        shm = f"{host['shm']['free'] / GIB:.1f} of {host['shm']['size'] / GIB:.1f} GiB" if host["shm"] else "none"
        yield from paragraph("host", f"{host['name']}: {named(host['ranks'])}; {host['cores']} cores; /dev/shm {shm} free; "
                                     f"compiler {host['compiler'] or 'none'}")
        for gpu, row in zip(host["gpus"] or (), host["p2p"] or (), strict=True):
            sizes = [f"{(gpu[name] or 0) / GIB:.1f}" for name in ("memory_free_bytes", "memory_bytes")]
            yield from paragraph(f"GPU {gpu['index']}", f"{gpu['name']}  {gpu['pci']}  {' of '.join(sizes)} GiB free  NVLinks "
                                 f"{(gpu['nvlinks'] or {}).get('up', 0)}  reaches by {' '.join(row)}")


def tests(report: Report) -> Iterator[str]:
    """Yield what came of the tests, and what is missing, with the reason."""
    for kind, found in (report["links"] or {"kinds": {}})["kinds"].items():
        yield from paragraph("links", f"{kind}: {found['pairs']} pairs, good ones {found['latency_us']:g} us and "
                                      f"{found['bandwidth_mb_s']:g} MB/s, {found['slow'] or 'none'} slow")
    for memory, found in report["self_test"].items():
        wrong = f"{len(found['faults'])} WRONG" if found["faults"] else "all right"
        yield from paragraph("self-test", f"{memory}: {found['calls']} calls of {found['collectives']} collectives in "
                                          f"{found['seconds']:.1f} s: {wrong}")
    reasons = defaultdict(list)
    for missing in (report["missing"], *(host["missing"] for host in report["hosts"])):
        for name, why in missing.items():
            reasons[why].append(name)
    yield from paragraph("missing", *(f"{', '.join(dict.fromkeys(names))}: {why}" for why, names in reasons.items()))


def verdict(report: Report) -> Iterator[str]:
    """Yield what is wrong, the advice, and the verdict."""
    for label, remarks in (("wrong", report[WRONG]), ("advice", report[ADVICE])):
        for remark in remarks:
            yield from paragraph(label, f"[{remark['code']}] {remark['text']}")
    yield from paragraph("verdict", f"{len(report[WRONG])} wrong" if report[WRONG] else "fine")
