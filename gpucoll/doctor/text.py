"""The report for people: aligned, a paragraph for each matter, what is missing with its reason, the verdict last."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from gpucoll.doctor.rules import Report, named
from gpucoll.doctor.versions import NAMES

LABEL, WIDTH = 12, 110
LONGEST = 160  # characters of a reason
GIB = 1 << 30


def paragraph(label: str, lines: Iterable[str]) -> Iterator[str]:
    """Yield `lines` beside their label, the long ones wrapped.

    >>> list(paragraph("links", ["one", "two"]))
    ['links       one', '            two']
    """
    for line in lines:
        for part in textwrap.wrap(line, WIDTH - LABEL, subsequent_indent="  ", break_long_words=False,
                                  break_on_hyphens=False):
            yield f"{label:{LABEL}}{part}"
            label = ""


def facts(report: Report) -> Iterator[str]:
    """Yield the part that needs no tests."""
    hosts = len(report["hosts"])
    yield f"gpucoll doctor: {_count(report['ranks'], 'rank')} on {_count(hosts, 'host')}"
    yield from paragraph("versions", _versions(report))
    yield from paragraph("MPI", _mpi(report["mpi"]))
    for host in report["hosts"]:
        yield from paragraph("host", _host(host))
        yield from paragraph("GPUs", _gpus(host))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _versions(report: Report) -> Iterator[str]:
    found = {name: version for name, version in report["versions"].items() if version}
    yield ", ".join(f"{NAMES[name]} {version}" for name, version in found.items())
    yield from _missing({NAMES[name]: report["missing"].get(f"versions.{name}", "")
                         for name in report["versions"] if name not in found})


def _missing(reasons: dict[str, str]) -> Iterator[str]:
    """Yield one line for each reason, with all that is missing for it."""
    by_reason = defaultdict(list)
    for name, why in reasons.items():
        by_reason[why].append(name)
    for why, names in by_reason.items():
        yield f"no {', '.join(names)}: {textwrap.shorten(why, LONGEST, placeholder=' ...')}"


def _mpi(mpi: Report) -> Iterator[str]:
    started = f"{mpi['launcher']} started {_count(mpi['launched'], 'rank')}" if mpi["launcher"] else "no launcher"
    own = f"; mpiexec is {mpi['mpiexec']}" if mpi["mpiexec"] else ""
    match = {True: "; they match", False: "; they do NOT match", None: ""}[mpi["match"]]
    threads = f", threads {mpi['threads']}" if mpi["threads"] else ""
    yield f"{mpi['library'] or 'none'} (standard {mpi['standard']}){threads}; {started}{own}{match}"


def _host(host: Report) -> Iterator[str]:
    numa = "NUMA not known" if host["numa"] is None else _count(len(host["numa"]), "NUMA node")
    quota = f", a quota of {host['quota_cores']:g}" if host["quota_cores"] else ""
    cores = "cores not known" if host["usable_cores"] is None else \
        f"{host['usable_cores']:g} of {_count(host['cores'], 'core')}{quota}"
    yield f"{host['name']}: {named(host['ranks'])}; {cores}; {numa}"
    if len(set(host["affinity"].values())) > 1:
        yield "bound: " + ", ".join(f"rank {rank} to {cores}" for rank, cores in host["affinity"].items())
    shm, clock = host["shm"], host["clock"] or {}
    if shm:
        yield f"/dev/shm {shm['size'] / GIB:.1f} GiB, {shm['free'] / GIB:.1f} GiB free; " + _limits(host)
    yield f"clock {clock.get('source')}, resolution {clock.get('resolution_ns')} ns, steps of {clock.get('step_ns')} ns"
    yield from _missing({name: why for name, why in host["missing"].items() if "gpu" not in name and "[" not in name})


def _limits(host: Report) -> str:
    return ", ".join(f"{name} {_size(limit['soft'], bytes_=name != 'nofile')}"
                     for name, limit in (host["limits"] or {}).items())


def _size(value: int | str, *, bytes_: bool) -> str:
    return f"{value / (1 << 20):g} MiB" if bytes_ and isinstance(value, int) else str(value)


def _gpus(host: Report) -> Iterator[str]:
    if host["gpus"] is None:
        yield f"not known: {host['missing'].get('gpus', 'no reason given')}"
        return
    yield from map(_gpu, host["gpus"])
    if not host["gpus"]:
        yield "none"
    yield from _matrix(host)
    yield from _missing({name: why for name, why in host["missing"].items() if "[" in name})


def _gpu(gpu: Report) -> str:
    sizes = ("memory_bytes", ""), ("memory_free_bytes", " free")
    memory = [f"{gpu[name] / GIB:.1f} GiB{word}" for name, word in sizes if gpu[name] is not None]
    links = gpu["nvlinks"] or {"up": 0, "down": 0}
    nvlinks = f"{links['up']} of {_count(links['up'] + links['down'], 'NVLink')} up"
    return f"{gpu['index']:3}  {gpu['pci']}  {gpu['name']}  {', '.join(memory) or 'memory not known'}  {nvlinks}"


def _matrix(host: Report) -> Iterator[str]:
    """Yield who reaches whom: by NVLink or PCI, and over what distance in nvidia-smi's words."""
    rows = host["p2p"] or []
    if len(rows) < 2:
        return
    yield "".join(["     ", *(f"{column:<14}" for column in range(len(rows)))]).rstrip()
    for i, row in enumerate(rows):
        cells = [_cell(way, host["paths"][i][j]) for j, way in enumerate(row)]
        yield "".join([f"{i:3}  ", *(f"{cell:14}" for cell in cells)]).rstrip()


def _cell(way: str | None, path: str | None) -> str:
    if way == "self":
        return "-"
    return f"{'?' if way is None else way.partition(':')[0]} {path or ''}".strip()


def links(report: Report) -> Iterator[str]:
    """Yield the links by class."""
    yield from paragraph("links", _links(report))


def _links(report: Report) -> Iterator[str]:
    if report["links"] is None:
        yield f"not tested: {report['missing']['links']}"
        return
    for kind in report["links"]["classes"]:
        slow = sum(pair["slow"] for pair in report["links"]["pairs"] if pair["class"] == kind["class"])
        yield (f"{kind['class']:12}  {_count(kind['pairs'], 'pair'):>9}  {kind['latency_us']:>8g} us  "
               f"{kind['bandwidth_mb_s']:>8g} MB/s (medians)  {slow or 'none'} slow")


def self_test(report: Report) -> Iterator[str]:
    """Yield what came of the self-tests."""
    for memory, outcome in report["self_test"].items():
        if outcome is None:  # of the host's memory and the emulated device one is tested, without a reason
            why = report["missing"].get(f"self_test.{memory}")
            yield from paragraph("self-test", [f"{memory:8}  not run: {why}"] if why else [])
            continue
        wrong = f"{len(outcome['faults'])} WRONG" if outcome["faults"] else "all right"
        yield from paragraph("self-test", [f"{memory:8}  {outcome['calls']} calls of {outcome['collectives']} kinds in "
                                           f"{outcome['seconds']:.1f} s: {wrong}"])


def verdict(report: Report) -> Iterator[str]:
    """Yield what is wrong, the advice, and the verdict."""
    for label, remarks in (("wrong", report["problems"]), ("advice", report["advice"])):
        for remark in remarks:
            yield from paragraph(label, [f"[{remark['code']}] {remark['text']}"])
    wrong = len(report["problems"])
    yield from paragraph("verdict", [f"{_count(wrong, 'thing')} wrong" if wrong else "fine"])


def lines(report: Report) -> Iterator[Any]:
    """Yield the whole report."""
    for part in (facts, links, self_test, verdict):
        yield from part(report)
