"""What is wrong and what could be better, from the report alone: one rule for each matter, none of which measures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from gpucoll.doctor.machine import ranges
from gpucoll.doctor.versions import NAMES

Report: TypeAlias = dict[str, Any]

MIB = 1 << 20
SHM_NEEDED, SHM_WANTED = 4 * MIB, 64 * MIB  # free bytes of shared memory for each rank of a host
FILES_NEEDED, FILES_WANTED = (64, 4), (64, 16)  # file handles: so many, and for each rank of the job
FILES_USUAL = 1024
STACK_USUAL = 8 * MIB
SLOW_NETWORK = 50.0  # MB/s: what no network for this work has been as slow as for long
STEP_WANTED = 1000  # nanoseconds
GOOD_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "timebase", "xen")
ALIKE = ("gpucoll", "python", "numpy", "mpi4py", "cupy", "nccl", "cuda_runtime")  # versions that ranks must share


class Remark(NamedTuple):
    """Something wrong where `serious`, else advice; about these ranks and hosts."""

    serious: bool
    code: str
    text: str
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {"code": self.code, "text": self.text, "ranks": list(self.ranks), "hosts": list(self.hosts)}


def judge(report: Report) -> None:
    """The report has its `problems`, its `advice`, a `verdict` and an `exit_code`."""
    remarks = [remark for rule in RULES for remark in rule(report)]
    remarks += [remark for host in report["hosts"] for rule in HOST_RULES for remark in rule(host, report["ranks"])]
    report["problems"] = [remark.as_json() for remark in remarks if remark.serious]
    report["advice"] = [remark.as_json() for remark in remarks if not remark.serious]
    report["verdict"] = "wrong" if report["problems"] else "fine"
    report["exit_code"] = 1 if report["problems"] else 0


# ---------------------------------------------------------------- the job


def _mpi(report: Report) -> Iterator[Remark]:
    mpi = report["mpi"]
    if mpi["library"] is None:
        yield Remark(True, "GC-MPI", f"MPI cannot be used: {report['missing'].get('mpi.library', 'no reason given')}; "
                     "pip install 'gpucoll[mpich]', or load the site's MPI")
    if mpi["mismatch"]:
        yield Remark(True, "GC-LAUNCHER", mpi["mismatch"])
    if mpi["launcher"] is None and mpi["mpiexec"] is None:
        yield Remark(False, "GC-LAUNCHER", f"ranks cannot be launched: {report['missing'].get('mpi.mpiexec', '')}")
    if mpi["threads"] not in ("multiple", None):
        yield Remark(False, "GC-THREADS", f"MPI allows threads only as {mpi['threads']!r}: what async_op starts goes "
                     "on only while the program is inside a call of gpucoll's")


def _alike(report: Report) -> Iterator[Remark]:
    for name, by_rank in report["differing"].items():
        owners = defaultdict(list)
        for rank, version in enumerate(by_rank):
            owners[version or "none"].append(rank)
        said = "; ".join(f"{version} on ranks {ranges(ranks)}" for version, ranks in owners.items())
        yield Remark(True, "GC-VERSIONS", f"ranks have different versions of {NAMES.get(name, name)}: {said}; give "
                     "every host the same environment")


def _cuda(report: Report) -> Iterator[Remark]:
    versions = report["versions"]
    seen = sum(len(host["gpus"] or ()) for host in report["hosts"])
    if seen and versions["cupy"] is None:
        yield Remark(False, "GC-CUPY", f"NVML sees {seen} GPUs, but there is no CuPy: "
                     f"{report['missing'].get('versions.cupy')}")
    if versions["cupy"] and versions["cuda_driver"] and versions["cuda_runtime"] and \
            _numbers(versions["cuda_driver"])[0] < _numbers(versions["cuda_runtime"])[0]:
        yield Remark(True, "GC-DRIVER", f"the driver is for CUDA {versions['cuda_driver']}, older than the CUDA "
                     f"{versions['cuda_runtime']} of CuPy; update the driver, or install the extra for its CUDA")
    if versions["cupy"] and versions["cuda_driver"] and versions["nccl"] is None:
        yield Remark(False, "GC-NCCL", f"GPUs have no NCCL: {report['missing'].get('versions.nccl')}")
    if versions["nccl"] and versions["nccl_build"] and _numbers(versions["nccl"]) < _numbers(versions["nccl_build"]):
        yield Remark(False, "GC-NCCL", f"NCCL {versions['nccl']} is older than the {versions['nccl_build']} that CuPy "
                     "was built for; update it")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _self_test(report: Report) -> Iterator[Remark]:
    for memory, outcome in report["self_test"].items():
        for fault in (outcome or {}).get("faults", ()):
            yield Remark(True, "GC-RESULT", f"self-test on {memory}: {fault['call']}: {fault['what']} on "
                         f"{named(fault['ranks'])}", tuple(fault["ranks"]))


def _links(report: Report) -> Iterator[Remark]:
    """One remark for each two hosts, and a guess at the culprit where all slow links across nodes share a host."""
    slow = [pair for pair in (report["links"] or {}).get("pairs", ()) if pair["slow"]]
    by_hosts: dict[tuple[str, ...], list[Any]] = defaultdict(list)
    for pair in slow:
        by_hosts[tuple(dict.fromkeys(pair["hosts"]))].append(pair)
    for hosts, pairs in by_hosts.items():
        yield _slow_between(hosts, pairs, report["links"]["classes"])
    across = [set(hosts) for hosts in by_hosts if len(hosts) == 2]
    culprits = set.intersection(*across) if len(across) > 1 else set()
    if culprits:
        yield Remark(False, "GC-LINK", f"all slow links lead to host {' or '.join(sorted(culprits))}: look there "
                     "first, at card, cable, switch port and route", hosts=tuple(sorted(culprits)))
    for kind in (report["links"] or {}).get("classes", ()):
        if kind["class"] == "across nodes" and kind["bandwidth_mb_s"] < SLOW_NETWORK and not across:
            yield _slow_network(report, kind)


def _slow_network(report: Report, kind: Any) -> Remark:
    hosts = tuple(host["name"] for host in report["hosts"])
    return Remark(True, "GC-NETWORK", f"hosts {', '.join(hosts[:8])}{' ...' if len(hosts) > 8 else ''} are joined at "
                  f"{kind['bandwidth_mb_s']:g} MB/s only, all links alike: does MPI use the right network? MPICH: "
                  "UCX_NET_DEVICES or FI_TCP_IFACE, Open MPI: --mca btl_tcp_if_include",
                  tuple(range(report["ranks"])), hosts)


def _slow_between(hosts: Sequence[str], pairs: Sequence[Any], classes: Sequence[Any]) -> Remark:
    worst = max(pairs, key=lambda pair: pair["latency_us"] / pair["bandwidth_mb_s"])
    usual = next(kind for kind in classes if kind["class"] == worst["class"])
    ranks = tuple(sorted({rank for pair in pairs for rank in pair["ranks"]}))
    names = ", ".join("-".join(map(str, pair["ranks"])) for pair in pairs)
    where = f"between hosts {' and '.join(hosts)}" if len(hosts) == 2 else f"inside host {hosts[0]}"
    text = (f"slow link {where}: rank pairs {names}: {worst['bandwidth_mb_s']:g} MB/s and {worst['latency_us']:g} us, "
            f"where good links {'across' if len(hosts) == 2 else 'inside'} nodes have {usual['good_bandwidth_mb_s']:g} "
            f"MB/s and {usual['good_latency_us']:g} us")
    return Remark(True, "GC-LINK", text, ranks, tuple(hosts))


RULES: tuple[Callable[[Report], Iterator[Remark]], ...] = (_mpi, _alike, _cuda, _self_test, _links)


# ---------------------------------------------------------------- each host


def _shared_memory(host: Report, size: int) -> Iterator[Remark]:
    ranks, hosts = len(host["ranks"]), (host["name"],)
    if host["shm"] is None:
        why = host["missing"].get("shm", "")
        yield Remark(True, "GC-SHM", f"{host['name']} has no shared memory: {why}; mount a tmpfs on /dev/shm",
                     hosts=hosts)
        return
    free = host["shm"]["free"]
    if free < SHM_WANTED * ranks:
        yield Remark(free < SHM_NEEDED * ranks, "GC-SHM", f"/dev/shm of {host['name']} has {free / MIB:.0f} MiB free "
                     f"for {named(host['ranks'])}, {SHM_WANTED * ranks // MIB} MiB would do; remove what crashed jobs "
                     "left there, or mount it larger (Docker: --shm-size=1g, or --ipc=host)", hosts=hosts)


def _files(host: Report, size: int) -> Iterator[Remark]:
    limit = _limit(host, "nofile")
    wanted = max(FILES_USUAL, FILES_WANTED[0] + FILES_WANTED[1] * size)
    if limit < wanted:
        needed = FILES_NEEDED[0] + FILES_NEEDED[1] * size
        yield Remark(limit < needed, "GC-FILES", f"a process on {host['name']} may open {limit:.0f} files, and each "
                     f"connection is one: ulimit -n {wanted}", hosts=(host["name"],))


def _compiler(host: Report, size: int) -> Iterator[Remark]:
    if not host["slots"]:
        yield Remark(False, "GC-COMPILER", f"{host['name']} cannot compile what makes short calls on the host fast: "
                     "install g++ and Python's headers (python3-dev), or name a compiler in CXX", hosts=(host["name"],))


def _memory_limits(host: Report, size: int) -> Iterator[Remark]:
    if host["rdma"] and _limit(host, "memlock") < float("inf"):
        yield Remark(False, "GC-MEMLOCK", f"{host['name']} has an RDMA network ({', '.join(host['rdma'])}), but may "
                     f"lock only {_limit(host, 'memlock') / MIB:.0f} MiB of memory for it: ulimit -l unlimited",
                     hosts=(host["name"],))
    if _limit(host, "stack") < STACK_USUAL:
        yield Remark(False, "GC-STACK", f"the stack on {host['name']} is limited to {_limit(host, 'stack') / MIB:.1f} "
                     "MiB, less than libraries count on: ulimit -s 8192", hosts=(host["name"],))


def _limit(host: Report, name: str) -> float:
    """Return a limit; infinity for none, and where it is not known, of which there is a reason already."""
    soft = (host["limits"] or {}).get(name, {}).get("soft", "unlimited")
    return float("inf") if soft == "unlimited" else float(soft)


def _cores(host: Report, size: int) -> Iterator[Remark]:
    ranks, cores = len(host["ranks"]), host["usable_cores"]
    if cores and ranks > cores:
        yield Remark(False, "GC-CORES", f"{ranks} ranks share {cores:g} cores of {host['name']}: they wait for each "
                     "other more than for messages, and times measured here mean little", hosts=(host["name"],))
    bound = defaultdict(list)
    for rank, affinity in host["affinity"].items():
        if affinity and affinity.isdigit():
            bound[affinity].append(int(rank))
    for core, together in bound.items():
        if len(together) > 1 and host["cores"] and host["cores"] >= ranks:
            yield Remark(False, "GC-BINDING", f"{named(together)} of {host['name']} are bound to one core, {core}, "
                         "while others are free: see the launcher's --bind-to", tuple(together), (host["name"],))


def _clock(host: Report, size: int) -> Iterator[Remark]:
    clock = host["clock"] or {}
    if clock.get("source") not in (None, *GOOD_CLOCKS) or (clock.get("step_ns") or 0) > STEP_WANTED:
        yield Remark(False, "GC-CLOCK", f"the clock of {host['name']} is {clock['source']}, with steps of "
                     f"{clock['step_ns']} ns: short times are measured badly", hosts=(host["name"],))


def _gpus(host: Report, size: int) -> Iterator[Remark]:
    hosts, gpus = (host["name"],), host["gpus"] or ()
    owners = defaultdict(list)
    for rank, device in host["devices"].items():
        if device:
            owners[device["pci"]].append(int(rank))
    for pci, ranks in owners.items():
        if len(ranks) > 1:
            yield Remark(False, "GC-SHARED-GPU", f"{named(ranks)} would share the GPU {pci} of {host['name']}: start "
                         "no more ranks than there are GPUs, or set GPUCOLL_SHARE_GPU=1", tuple(ranks), hosts)
    links = [gpu["nvlinks"] or {"up": 0, "down": 0} for gpu in gpus]
    most = max((count["up"] for count in links), default=0)
    for gpu, count in zip(gpus, links, strict=True):
        if count["up"] < most or (count["up"] and count["down"]):
            yield Remark(False, "GC-NVLINK", f"GPU {gpu['index']} ({gpu['pci']}) of {host['name']} has {count['up']} "
                         f"NVLinks up and {count['down']} down, others up to {most}: see "
                         "nvidia-smi nvlink --status", hosts=hosts)


def _peers(host: Report, size: int) -> Iterator[Remark]:
    rows = host["p2p"] or ()
    apart = [f"{i}-{j} ({row[j][4:]})" for i, row in enumerate(rows) for j in range(i + 1, len(row))
             if row[j] and row[j].startswith("no: ")]
    if apart:
        yield Remark(False, "GC-P2P", f"GPUs of {host['name']} cannot read each other's memory: {', '.join(apart)}; "
                     "data goes through the host: IOMMU or ACS switched on, or GPUs behind different sockets",
                     hosts=(host["name"],))


def named(ranks: Sequence[int]) -> str:
    """Return ranks as a sentence says them.

    >>> named([3]), named([0, 1, 2, 5])
    ('rank 3', 'ranks 0-2,5')
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"


HOST_RULES: tuple[Callable[[Report, int], Iterator[Remark]], ...] = (
    _shared_memory, _files, _compiler, _memory_limits, _cores, _clock, _gpus, _peers)
