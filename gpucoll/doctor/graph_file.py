"""`gpucoll doctor --topology F.toml`: the graph of a job's ranks and links, for `bound`, `synthesize`, `simulate`.

Links between ranks without GPUs, and between hosts, have the figures of the doctor's messages. Links between GPUs of a
host are NVML's: NVLinks at their speed, and PCI Express for a GPU without NVLink. NVML knows no latency: 0.7 us for an
NVLink and 1.3 us for PCI Express, as for the named graphs.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpucoll.errors import ArgumentError, BackendError
from gpucoll.lab.graphs.link_graph import graph_of
from gpucoll.lab.graphs.named import NIC, NVLINK

SWITCH = "switch"  # the other end of a GPU's links to NVSwitches
NETWORK = "network"


def write(path: Path, report: Mapping[str, Any], gpus: Sequence[int | None]) -> None:
    """Write the graph of a report to a TOML file.

    `gpus` has for each rank the index of the GPU among NVML's GPUs of the host, or None; empty for a process alone,
    whose graph has the GPUs of the host as ranks. Raises ArgumentError if there are no two ranks with known links, and
    BackendError if the file cannot be written.
    """
    table = graph(report, gpus)
    graph_of(path.stem, table)  # raises for a graph in which a rank has no links
    try:
        path.write_text("\n".join(_lines(table)) + "\n")
    except OSError as error:
        raise BackendError(f"doctor: {path}: {error.strerror}", code="GC-FILE") from error


def graph(report: Mapping[str, Any], gpus: Sequence[int | None]) -> dict[str, Any]:
    """Return the graph in the form of a TOML file; see `write`."""
    hosts = report["hosts"]
    if gpus:
        members = [[*host["ranks"]] for host in hosts]
        names = [f"r{rank}" for rank in range(report["ranks"])]
    else:
        gpus = range(len(hosts[0]["gpus"] or ()))
        members, names = [[*gpus]], [f"g{index}" for index in gpus]
    if len(names) < 2:
        raise ArgumentError("a graph needs two ranks or two GPUs: mpiexec -n 4 gpucoll doctor --topology F.toml",
                            code="GC-TOPOLOGY")
    figures = _measured(report["links"])
    switches: dict[str, None] = {}
    links = []
    for number, (host, ranks) in enumerate(zip(hosts, members, strict=True)):
        rows = [(host["gpus"] or [])[gpu] if gpu is not None else None for gpu in (gpus[rank] for rank in ranks)]
        inner = [*_of_gpus(number, [names[rank] for rank in ranks], rows)] if all(rows) else \
            [*_of_ranks(number, ranks, names, figures)]
        if len(hosts) > 1:
            inner += _to_network(number, ranks, names, rows, figures)
        for one, other, speed, latency, both in inner:
            switches |= dict.fromkeys(end for end in (one, other) if end not in names)
            links.append({"from": one, "to": other, "GBps": speed, "us": latency, "both": both})
    return {"kind": "graph", "name": f"{len(hosts)} x {hosts[0]['name']}", "ranks": names, "switches": [*switches],
            "links": links}


Joint = tuple[str, str, float, float, bool]  # both ends, GB/s, us, and whether the link has a way back


def _measured(links: Any) -> dict[tuple[int, int], tuple[float, float, bool]]:
    """Return latency in us, GB/s, and whether the ranks share a host, for each pair of ranks in both orders."""
    found = {}
    for pair in links["pairs"] if links else ():
        one, other = pair["ranks"]
        found[one, other] = found[other, one] = (pair["latency_us"], round(pair["bandwidth_mb_s"] / 1e3, 9),
                                                 pair["kind"] == "same node")
    return found


def _of_ranks(number: int, ranks: Sequence[int], names: Sequence[str], figures: Mapping[Any, Any]) -> Iterator[Joint]:
    """Yield a link from each rank to the memory of the host, with the best figures of the rank's pairs."""
    for rank in ranks:
        pairs = [figures[rank, other] for other in ranks if other != rank]
        if pairs:
            yield (names[rank], f"memory{number}", max(speed for _, speed, _ in pairs),
                   min(latency for latency, _, _ in pairs) / 2, True)


def _of_gpus(number: int, names: Sequence[str], rows: Sequence[Any]) -> Iterator[Joint]:
    """Yield the NVLinks between the GPUs of a host; a GPU without NVLink to the other GPUs has PCI Express."""
    by_place: dict[str, list[str]] = defaultdict(list)
    for name, row in zip(names, rows, strict=True):
        by_place[row["pci"]].append(name)
    for name, row in zip(names, rows, strict=True):
        ends = {end: speed for end, speed in (row["links"] or {}).items() if end == SWITCH or end in by_place}
        for end, speed in ends.items():
            if end == SWITCH:
                yield name, f"nvswitch{number}", speed, NVLINK / 2, True
            else:
                yield from ((name, other, speed, NVLINK, False) for other in by_place[end])
        if not ends and row["pcie"]:
            yield name, f"pcie{number}", row["pcie"], NIC / 2, True


def _to_network(number: int, ranks: Sequence[int], names: Sequence[str], rows: Sequence[Any],
                figures: Mapping[Any, Any]) -> Iterator[Joint]:
    """Yield the links of a host to the network of all hosts."""
    across = [found for (rank, _), found in figures.items() if rank in ranks and not found[2]]
    if not across:
        return
    inside = [found[0] for (rank, other), found in figures.items() if rank in ranks and other in ranks]
    latency = max(min(found[0] for found in across) - min(inside, default=0.0), 0.0) / 2
    if all(rows):
        yield from ((names[rank], f"nic{number}", row["pcie"] or max(found[1] for found in across), 0.0, True)
                    for rank, row in zip(ranks, rows, strict=True))
    elif len(ranks) == 1:
        yield names[ranks[0]], f"memory{number}", max(found[1] for found in across), 0.0, True
    yield f"{'nic' if all(rows) else 'memory'}{number}", NETWORK, max(found[1] for found in across), latency, True


def _lines(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a TOML file; texts, numbers, lists and truth values are JSON's too."""
    yield from (f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in table.items() if key != "links")
    for link in table["links"]:
        yield "[[links]]"
        yield from (f"{key} = {json.dumps(value)}" for key, value in link.items())
