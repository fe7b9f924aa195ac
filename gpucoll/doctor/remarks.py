"""Problems and advice, derived from the report alone; and the report as text."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

Report: TypeAlias = dict[str, Any]
Remark: TypeAlias = tuple[str, str, str]  # key in the report (WRONG or ADVICE), code, text

MIB = 1 << 20
SHM_NEEDED, SHM_WANTED = 4 * MIB, 64 * MIB  # free bytes of shared memory for each rank of a host
WRONG, ADVICE = "problems", "advice"  # keys of the report; any problem makes the exit code 1
LABEL, WIDTH = 12, 110


def named(ranks: Sequence[int]) -> str:
    """Return ranks as words of a sentence, at most eight ranks.

    >>> named([3]), named(range(100))
    ('rank 3', 'ranks 0, 1, 2, 3, 4, 5, 6, 7, ...')
    """
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{', ...' * (len(ranks) > 8)}"


def judge(report: Report) -> None:
    """Add `problems`, `advice`, `verdict` and `exit_code` to the report."""
    report |= {WRONG: [], ADVICE: []}
    for remarks in (_of_versions(report), _of_tests(report), *map(_of_host, report["hosts"])):
        for severity, code, text in remarks:
            report[severity].append({"code": code, "text": text})
    report |= {"verdict": "wrong" if report[WRONG] else "fine", "exit_code": int(bool(report[WRONG]))}


def _of_versions(report: Report) -> Iterator[Remark]:
    versions, mpi, missing = report["versions"], report["mpi"], report["missing"]
    if mpi["library"] is None and mpi["store"]:
        yield ADVICE, "GC-LAUNCHER", ("no MPI: ranks by store, as by gpucoll run --standalone or torchrun; for mpiexec "
                                      f"pip install mpi4py 'gpucoll[mpich]' ({missing['library']})")
    elif mpi["library"] is None:
        yield WRONG, "GC-LAUNCHER", (f"MPI cannot be used: {missing['library']}; pip install 'gpucoll[mpich]', or load "
                                     "the site's MPI")
    if mpi["mismatch"]:
        yield WRONG, "GC-LAUNCHER", mpi["mismatch"]
    if "mpiexec" in missing and mpi["library"] is not None:
        yield ADVICE, "GC-LAUNCHER", f"ranks cannot be launched: {missing['mpiexec']}"
    if "cupy" in missing and report["hosts"][0]["gpus"]:
        yield ADVICE, "GC-NO-GPU", f"there are GPUs, but no CuPy: {missing['cupy']}"
    driver, runtime = versions["cuda_driver"], versions["cuda_runtime"]
    if driver and runtime and int(driver.partition(".")[0]) < int(runtime.partition(".")[0]):
        yield WRONG, "GC-NO-GPU", (f"the driver is for CUDA {driver}, older than CuPy's {runtime}; update it, or "
                                   "install the extra for its CUDA")
    if "nccl" in missing and driver:
        yield ADVICE, "GC-NCCL", f"GPUs have no NCCL: {missing['nccl']}"


def _of_tests(report: Report) -> Iterator[Remark]:
    for memory, outcome in report["self_test"].items():
        for fault in outcome["faults"]:
            yield WRONG, "GC-RESULT", (f"self-test on {memory}: {fault['call']}: {fault['what']} on "
                                       f"{named(fault['ranks'])}")
        if outcome.get("advice"):
            yield ADVICE, "GC-TABLE", outcome["advice"]
    slow = defaultdict(list)  # by host, or pair of hosts
    for pair in report["links"]["pairs"] if report["links"] else ():
        if pair["slow"]:
            slow[" and ".join(dict.fromkeys(pair["hosts"]))].append(pair)
    for hosts, pairs in slow.items():
        worst = max(pairs, key=lambda pair: pair["latency_us"] / pair["bandwidth_mb_s"])
        better = report["links"]["kinds"][worst["kind"]]
        yield WRONG, "GC-LINK", (
            f"slow link, {hosts}: rank pairs {', '.join('-'.join(map(str, pair['ranks'])) for pair in pairs)}: "
            f"{worst['bandwidth_mb_s']:g} MB/s and {worst['latency_us']:g} us, where better ones have "
            f"{better['bandwidth_mb_s']:g} MB/s and {better['latency_us']:g} us")


def _of_host(host: Report) -> Iterator[Remark]:
    name, free, who = host["name"], host["shm_free"], named(host["ranks"])
    if free is None:
        yield WRONG, "GC-SHM", f"{name} has no shared memory: {host['missing']['shm_free']}; mount a tmpfs on /dev/shm"
    elif free < SHM_WANTED * len(host["ranks"]):
        yield WRONG if free < SHM_NEEDED * len(host["ranks"]) else ADVICE, "GC-SHM", (
            f"/dev/shm of {name} has {free:,} bytes free for {who}, less than 64 MiB for each; remove the files of "
            "crashed jobs, or make it larger (Docker: --shm-size=1g, or --ipc=host)")
    if host["engine"] is None:
        yield WRONG, "GC-ENGINE", f"{name}: {host['missing']['engine']}"
    if len(host["ranks"]) > host["cores"]:
        yield ADVICE, "GC-CORES", (f"{who} share {host['cores']} cores of {name}: they wait for each other more than "
                                   "for messages")
    if host["far"]:
        yield ADVICE, "GC-CORES", (f"{named(host['far'])} of {name} may not use the processors near their GPUs: "
                                   "gpucoll run --bind numa")
    for index, gpu in enumerate(host["gpus"] or ()):
        where = f"GPU {index} ({gpu['pci']}) of {name}"
        if gpu["nvlinks"] and gpu["nvlinks"]["down"]:
            yield ADVICE, "GC-LINK", (f"{where} has {gpu['nvlinks']['down']} NVLinks down: see nvidia-smi nvlink "
                                        "--status")
        if "none" in (gpu["reaches"] or ()):
            yield ADVICE, "GC-LINK", (f"{where} cannot read the memory of all others: data goes through the host: "
                                     "IOMMU or ACS switched on, or GPUs behind different sockets")


def paragraph(label: str, *lines: str) -> Iterator[str]:
    """Yield `lines`, wrapped, after a column with the label in the first line."""
    for line in lines:
        for part in textwrap.wrap(line, WIDTH - LABEL, subsequent_indent="  ", break_on_hyphens=False):
            yield f"{label:{LABEL}}{part}"
            label = ""


def facts(report: Report) -> Iterator[str]:
    """Yield the text of the part known before the tests."""
    yield f"gpucoll doctor: {named(range(report['ranks']))} on {', '.join(host['name'] for host in report['hosts'])}"
    versions, mpi = report["versions"], report["mpi"]
    yield from paragraph("versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version))
    launcher = f"{mpi['launcher']} started {mpi['launched']}" if mpi["launcher"] else f"mpiexec is {mpi['mpiexec']}"
    match = {True: ": they match", False: ": they do NOT match", None: ""}[mpi["match"]]
    how = "ranks by store" if mpi["store"] else f"{launcher}{match}"
    yield from paragraph("MPI", f"{mpi['library']}; {how}" if mpi["library"] else f"no MPI: {how}")
    for host in report["hosts"]:
        yield from paragraph("host", f"{host['name']}: {named(host['ranks'])}; {host['cores']} cores; /dev/shm has "
                                     f"{(host['shm_free'] or 0) / 2**30:.1f} GiB free; engine: {host['engine']}")
        yield from paragraph("binding", "; ".join(f"{named(ranks)}: processors {cores}"
                                                  for cores, ranks in host["bound"].items()))
        for index, gpu in enumerate(host["gpus"] or ()):
            links = "{up} NVLinks up, {down} down".format(**gpu["nvlinks"]) if gpu["nvlinks"] else "NVLinks unknown"
            free = f"{(gpu['free_bytes'] or 0) / 2**30:.1f} GiB free"
            yield from paragraph(f"GPU {index}", f"{gpu['name']}  {gpu['pci']}  {free}  {links}  "
                                                 f"reaches others by: {' '.join(gpu['reaches'] or ())}")


def tests(report: Report) -> Iterator[str]:
    """Yield the text on the tests, missing items with reasons, problems, advice, and the verdict."""
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
