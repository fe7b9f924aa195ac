"""What is wrong and what could be better, from the report alone, by a table of rules; and the report for people."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

Report: TypeAlias = dict[str, Any]
Cases: TypeAlias = Iterable[dict[str, Any]]

MIB, GIB = 1 << 20, 1 << 30
SHM_NEEDED, SHM_WANTED = 4 * MIB, 64 * MIB  # free bytes of shared memory for each rank of a host
WRONG, ADVICE = "problems", "advice"  # where the report has them; whatever is wrong makes the exit code 1
LABEL, WIDTH = 12, 110


def named(ranks: Sequence[int]) -> str:
    """Return ranks as a sentence says them.

    >>> named([3]), named(range(100))
    ('rank 3', 'ranks 0, 1, 2, 3, 4, 5, 6, 7, ...')
    """
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{', ...' * (len(ranks) > 8)}"


class Verdict(NamedTuple):
    """`text` is said once for each of the cases that `cases` finds in a report, with the words of the case."""

    code: str
    severity: str
    cases: Callable[[Report], Cases]
    text: str


def judge(report: Report) -> None:
    """The report has its `problems`, its `advice`, a `verdict` and an `exit_code`."""
    report |= {WRONG: [], ADVICE: []}
    for code, severity, cases, text in RULES:
        report[severity] += [{"code": code, "text": text.format_map(case)} for case in cases(report)]
    report |= {"verdict": "wrong" if report[WRONG] else "fine", "exit_code": int(bool(report[WRONG]))}


def _where(condition: Callable[[Report], Any]) -> Callable[[Report], Cases]:
    """Make one case, with the words of the whole report, where the condition holds."""
    return lambda report: [report] if condition(report) else []


def _hosts(condition: Callable[[Report], Any]) -> Callable[[Report], Cases]:
    """Make a case of each host for which the condition holds."""
    return lambda report: [{**host, "who": named(host["ranks"])} for host in report["hosts"] if condition(host)]


def _memory(least: float, most: float) -> Callable[[Report], Cases]:
    """Make a case of each host whose free bytes of shared memory for each rank are in that range."""
    return _hosts(lambda host: host["shm_free"] is not None and least <= host["shm_free"] / len(host["ranks"]) < most)


def _old_driver(versions: Report) -> bool:
    driver, runtime = (int((versions[name] or "0").partition(".")[0]) for name in ("cuda_driver", "cuda_runtime"))
    return 0 < driver < runtime


def _faults(report: Report) -> Cases:
    return [{**fault, "memory": memory, "who": named(fault["ranks"])} for memory, outcome in report["self_test"].items()
            for fault in outcome["faults"]]


def _slow_links(report: Report) -> Cases:
    """One case for each two hosts, or one."""
    by_hosts = defaultdict(list)
    for pair in report["links"]["pairs"] if report["links"] else ():
        if pair["slow"]:
            by_hosts[" and ".join(dict.fromkeys(pair["hosts"]))].append(pair)
    for hosts, pairs in by_hosts.items():
        worst = max(pairs, key=lambda pair: pair["latency_us"] / pair["bandwidth_mb_s"])
        yield {"hosts": hosts, "pairs": ", ".join("-".join(map(str, pair["ranks"])) for pair in pairs), "worst": worst,
               "better": report["links"]["kinds"][worst["kind"]]}


def _gpus(condition: Callable[[Report], Any]) -> Callable[[Report], Cases]:
    """Make a case of each GPU for which the condition holds."""
    return lambda report: [{**gpu, "host": host["name"], "index": index} for host in report["hosts"]
                           for index, gpu in enumerate(host["gpus"] or ()) if condition(gpu)]


SHM = ("/dev/shm of {name} has {shm_free:,} bytes free for {who}, 64 MiB for each would do; remove what crashed jobs "
       "left there, or mount it larger (Docker: --shm-size=1g, or --ipc=host)")
RULES = (
    Verdict("GC-MPI", WRONG, _where(lambda report: report["mpi"]["library"] is None),
        "MPI cannot be used: {missing[library]}; pip install 'gpucoll[mpich]', or load the site's MPI"),
    Verdict("GC-LAUNCHER", WRONG, _where(lambda report: report["mpi"]["mismatch"]), "{mpi[mismatch]}"),
    Verdict("GC-LAUNCHER", ADVICE, _where(lambda report: "mpiexec" in report["missing"]),
        "ranks cannot be launched: {missing[mpiexec]}"),
    Verdict("GC-CUPY", ADVICE, _where(lambda report: "cupy" in report["missing"] and report["hosts"][0]["gpus"]),
        "there are GPUs, but no CuPy: {missing[cupy]}"),
    Verdict("GC-DRIVER", WRONG, _where(lambda report: _old_driver(report["versions"])),
        "the driver is for CUDA {versions[cuda_driver]}, older than CuPy's {versions[cuda_runtime]}; update it, or "
        "install the extra for its CUDA"),
    Verdict("GC-NCCL", ADVICE, _where(lambda report: "nccl" in report["missing"] and report["versions"]["cuda_driver"]),
        "GPUs have no NCCL: {missing[nccl]}"),
    Verdict("GC-RESULT", WRONG, _faults, "self-test on {memory}: {call}: {what} on {who}"),
    Verdict("GC-LINK", WRONG, _slow_links,
        "slow link, {hosts}: rank pairs {pairs}: {worst[bandwidth_mb_s]:g} MB/s and {worst[latency_us]:g} us, where "
        "better ones have {better[bandwidth_mb_s]:g} MB/s and {better[latency_us]:g} us"),
    Verdict("GC-SHM", WRONG, _hosts(lambda host: host["shm_free"] is None),
        "{name} has no shared memory: {missing[shm_free]}; mount a tmpfs on /dev/shm"),
    Verdict("GC-SHM", WRONG, _memory(0, SHM_NEEDED), SHM),
    Verdict("GC-SHM", ADVICE, _memory(SHM_NEEDED, SHM_WANTED), SHM),
    Verdict("GC-ENGINE", ADVICE, _hosts(lambda host: host["engine"] is None),
        "{name} lacks the engine that makes short calls on the host fast: {missing[engine]}; with g++ and Python's "
        "headers (python3-dev) install again: pip install --force-reinstall --no-deps --no-cache-dir, and gpucoll or "
        "its folder"),
    Verdict("GC-CORES", ADVICE, _hosts(lambda host: len(host["ranks"]) > host["cores"]),
        "{who} share {cores} cores of {name}: they wait for each other more than for messages"),
    Verdict("GC-NVLINK", ADVICE, _gpus(lambda gpu: gpu["nvlinks"] and gpu["nvlinks"]["down"]),
        "GPU {index} ({pci}) of {host} has {nvlinks[down]} NVLinks down: see nvidia-smi nvlink --status"),
    Verdict("GC-P2P", ADVICE, _gpus(lambda gpu: "none" in (gpu["reaches"] or ())),
        "GPU {index} ({pci}) of {host} cannot read the memory of all others: data goes through the host: IOMMU or ACS "
        "switched on, or GPUs behind different sockets"),
)


def paragraph(label: str, *lines: str) -> Iterator[str]:
    """Yield `lines` beside their label, the long ones wrapped."""
    for line in lines:
        for part in textwrap.wrap(line, WIDTH - LABEL, subsequent_indent="  ", break_on_hyphens=False):
            yield f"{label:{LABEL}}{part}"
            label = ""


def facts(report: Report) -> Iterator[str]:
    """Yield the part that needs no tests."""
    yield f"gpucoll doctor: {named(range(report['ranks']))} on {', '.join(host['name'] for host in report['hosts'])}"
    versions, mpi = report["versions"], report["mpi"]
    yield from paragraph("versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version))
    launcher = f"{mpi['launcher']} started {mpi['launched']}" if mpi["launcher"] else f"mpiexec is {mpi['mpiexec']}"
    match = {True: ": they match", False: ": they do NOT match", None: ""}[mpi["match"]]
    yield from paragraph("MPI", f"{mpi['library']}; {launcher}{match}")
    for host in report["hosts"]:
        yield from paragraph("host", f"{host['name']}: {named(host['ranks'])}; {host['cores']} cores; /dev/shm has "
                                     f"{(host['shm_free'] or 0) / GIB:.1f} GiB free; engine: {host['engine']}")
        for index, gpu in enumerate(host["gpus"] or ()):
            links = "{up} NVLinks up, {down} down".format(**gpu["nvlinks"]) if gpu["nvlinks"] else "NVLinks unknown"
            free = f"{(gpu['free_bytes'] or 0) / GIB:.1f} GiB free"
            yield from paragraph(f"GPU {index}", f"{gpu['name']}  {gpu['pci']}  {free}  {links}  "
                                                 f"reaches others by: {' '.join(gpu['reaches'] or ())}")


def tests(report: Report) -> Iterator[str]:
    """Yield what came of the tests, what is missing and why, what is wrong, the advice, and the verdict."""
    for kind, links in report["links"]["kinds"].items() if report["links"] else ():
        yield from paragraph("links", f"{kind}: {links['pairs']} pairs, the better ones {links['latency_us']:g} us and "
                                      f"{links['bandwidth_mb_s']:g} MB/s, {links['slow'] or 'none'} slow")
    for memory, run in report["self_test"].items():
        wrong = f"{len(run['faults'])} WRONG" if run["faults"] else "all right"
        yield from paragraph("self-test", f"{memory}: {run['calls']} calls of {run['collectives']} collectives in "
                                          f"{run['seconds']:.1f} s, {wrong}")
    reasons = defaultdict(list)
    for missing in (report["missing"], *(host["missing"] for host in report["hosts"])):
        for name, why in missing.items():
            reasons[why].append(name)
    yield from paragraph("missing", *(f"{', '.join(dict.fromkeys(names))}: {why}" for why, names in reasons.items()))
    for label, remarks in (("wrong", report[WRONG]), ("advice", report[ADVICE])):
        for remark in remarks:
            yield from paragraph(label, f"[{remark['code']}] {remark['text']}")
    yield from paragraph("verdict", f"{len(report[WRONG])} wrong" if report[WRONG] else "fine")
