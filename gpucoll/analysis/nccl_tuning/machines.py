"""Machines for NCCL's tuning model: named ones, and those that NCCL describes in a log.

The graphs of a named machine are what NCCL's search finds there: logged where a thread is named, and otherwise derived
from the links and the search's list of bandwidths (`speedArrayIntra` and others in src/graph/search.cc). Your own
machine is best read from NCCL's log.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from gpucoll.analysis.nccl_tuning.tuning import PATHS, Graph, Machine
from gpucoll.errors import ArgumentError, nearest

CODE = "GC-NCCL-MODEL"
MOST_NODES = 4096
GPUS = {"V100": 70, "T4": 75, "A100": 80, "A800": 80, "A10": 86, "A40": 86, "RTX 30": 86, "L4": 89, "L20": 89,
        "RTX 40": 89, "GH200": 90, "H100": 90, "H200": 90, "H800": 90, "H20": 90, "B200": 100, "B300": 103,
        "RTX 50": 120}  # compute capabilities by a part of the GPU's name


def _dgx1(nodes: int) -> Machine:
    graph = Graph(6, 20.0, 20.0, same_channels=False)
    return Machine("dgx1", "DGX-1 V100: six rings of NVLinks (derived)", 70, nodes, 8, graph, graph._replace(pattern=1),
                   links="dgx1")


def _a100(nodes: int) -> Machine:
    about = "DGX A100: 12 rings of 20 GB/s"  # logged in many threads, such as nccl#1712
    ring = Graph(12, 20.0, 20.0)
    tree = ring._replace(pattern=1)
    if nodes > 1:
        about = "DGX A100: a NIC of 25 GB/s for each GPU (derived)"
        ring = Graph(8, 24.0, 24.0, ("NVL", "PXB"))
        tree = ring._replace(pattern=1, intra=30.0)
    return Machine("dgx_a100", about, 80, nodes, 8, ring, tree, cpu="amd", links="dgx_a100")


def _h100(nodes: int) -> Machine:
    about = "DGX H100 without NVLS: 12 rings of 30 GB/s (nccl#1197)"
    ring = Graph(12, 30.0, 30.0)
    tree = ring._replace(pattern=1)
    if nodes > 1:
        about = "DGX H100 without NVLS: a NIC of 50 GB/s for each GPU (rings logged, trees derived)"
        ring = Graph(8, 48.0, 48.0)
        tree = ring._replace(pattern=3)
    return Machine("dgx_h100", about, 90, nodes, 8, ring, tree, links="dgx_h100")


def _h100_nvls(nodes: int) -> Machine:
    """Return DGX H100 with NVLS; without a graph of links, as switches of graphs copy but do not reduce."""
    machine = _h100(nodes)
    nvls = Graph(8, 40.0, 60.0) if nodes == 1 else Graph(8, 45.0, 48.0)
    return machine._replace(name="dgx_h100_nvls", nvls=nvls, links="",
                            about=machine.about.replace("without NVLS", "with NVLS"))


def _h800(nodes: int) -> Machine:
    ring = Graph(8, 22.0, 22.0)
    return Machine("h800_ndr", "8 H800, a NIC of 50 GB/s for each GPU (channels fitted to nccl#1154)", 90, nodes, 8,
                   ring, ring._replace(pattern=3))


def _t4(nodes: int) -> Machine:
    ring = Graph(1, 9.0, 9.0, ("SYS", "SYS"))
    return Machine("t4_pcie", "8 T4 on PCIe, a NIC of 12.5 GB/s, one channel (nccl-tests#89)", 75, nodes, 8, ring,
                   ring._replace(pattern=1))


def _gb200(gpus: int) -> Callable[[int], Machine]:
    def make(nodes: int) -> Machine:
        ring = Graph(8, 192.0 * gpus / 32, 192.0 * gpus / 32, ("NVL", "P2C"))
        return Machine(f"gb200_nvl{gpus}", f"{gpus} GB200 on NVLink, a NIC of 50 GB/s for each GPU, NCCL_NVLS_ENABLE=0 "
                       "(derived)", 100, nodes, gpus, ring, ring._replace(pattern=1), cpu="arm",
                       links=f"gb200_nvl{gpus}")
    return make


NAMED: dict[str, tuple[Callable[[int], Machine], int]] = {  # the function, and the least number of nodes
    "dgx1": (_dgx1, 1), "dgx_a100": (_a100, 1), "dgx_h100": (_h100, 1), "dgx_h100_nvls": (_h100_nvls, 1),
    "h800_ndr": (_h800, 2), "t4_pcie": (_t4, 2), "gb200_nvl4": (_gb200(4), 2), "gb200_nvl8": (_gb200(8), 2)}


def machine(text: str, sm: int | None = None) -> Machine:
    """Return the machine of a name such as ``dgx_a100(2)``, or of a file with NCCL's log."""
    if re.fullmatch(r"\w+(?:\(\d+\))?", text):
        return named_machine(text)
    try:
        return logged_machine(Path(text).read_text(errors="replace"), text, sm)
    except OSError as error:
        raise ArgumentError(f"cannot read {text}: {error.strerror}", code="GC-FILE") from None


def named_machine(text: str) -> Machine:
    """Return a named machine; the number in brackets counts nodes.

    >>> named_machine("dgx_a100(2)").ranks
    16
    """
    found = re.fullmatch(r"(\w+)(?:\((\d{1,5})\))?", text)
    if found is None or found[1] not in NAMED:
        raise ArgumentError(f"no machine is named {text!r}{nearest(text.partition('(')[0], NAMED)}; or pass a file "
                            "with NCCL's log", code=CODE)
    make, least = NAMED[found[1]]
    nodes = int(found[2] or least)
    most = 1 if found[1] == "dgx1" else MOST_NODES
    if not least <= nodes <= most:
        raise ArgumentError(f"{found[1]} takes a number of nodes from {least} to {most}, as in {found[1]}({least})",
                            code=CODE)
    return make(nodes)._replace(name=text)


PATTERN = re.compile(r"^(.*?)NCCL INFO Pattern (\d+), crossNic \d+, nChannels (\d+), (?:bw|speed) ([\d.]+)/([\d.]+), "
                     r"type (\w+)/(\w+), sameChannels (\d)", re.MULTILINE)
HELP = "run with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,GRAPH"


def logged_machine(text: str, name: str, sm: int | None = None) -> Machine:
    """Return the machine that NCCL describes in a log; ArgumentError names what the log lacks.

    The log has the subsystems INIT and GRAPH, and the names of the GPUs, as nccl-tests prints them; otherwise `sm` is
    the compute capability. Only the first rank's lines count.
    """
    graphs = _logged_graphs(text)
    if "Ring" not in graphs or "Tree" not in graphs:
        raise ArgumentError(f"{name} has no graphs (lines with Pattern 4 and Pattern 1, 2 or 3): {HELP}", code=CODE)
    size = re.search(r"nRanks (\d+) nNodes (\d+)", text)
    if size is None or int(size[1]) < 2 or int(size[1]) % int(size[2]):
        raise ArgumentError(f"{name} has no line with nRanks and nNodes of several ranks on equal nodes: {HELP}, with "
                            "NCCL 2.20 or newer", code=CODE)
    if sm is None:
        gpu = re.search(r"#\s+Rank\s+\d+.* device\s+\d+ \[\S+\] (.+)", text)
        known = [part for part in GPUS if gpu and part in gpu[1]]
        if not known:
            raise ArgumentError(f"{name} names no known GPU: give the compute capability, as in --sm 90", code=CODE)
        sm = GPUS[max(known, key=len)]
    cpu = re.search(r"NCCL INFO CPU/\S+ \((\d)/(\d)/", text)
    vendor = {"2": "power", "3": "arm"}.get(cpu[1] if cpu else "1") or ("amd" if cpu and cpu[2] == "2" else "intel")
    nodes = int(size[2])
    if " NVS/" not in text:
        graphs.pop("CollNetDirect", None)
    return Machine(name, "from NCCL's log", sm, nodes, int(size[1]) // nodes, graphs["Ring"], graphs["Tree"],
                   graphs.get("NVLS"), graphs.get("CollNetChain"), graphs.get("CollNetDirect"), cpu=vendor)


def _logged_graphs(text: str) -> dict[str, Graph]:
    """Return the graphs of the first rank by algorithm: a tree after the first is CollNet's chain."""
    kinds: dict[str, Graph] = {}
    lines = PATTERN.findall(text)
    for prefix, pattern, channels, intra, inter, near, far, same in lines:
        if prefix != lines[0][0]:
            continue
        paths = (near if near in PATHS else PATHS[-1], far if far in PATHS else PATHS[-1])
        graph = Graph(int(channels), float(intra), float(inter), paths, int(pattern), same == "1")
        trees = "CollNetChain" if "Tree" in kinds else "Tree"
        kind = {"4": "Ring", "5": "NVLS", "6": "CollNetDirect"}.get(pattern, trees)
        if graph.channels:
            kinds.setdefault(kind, graph)
    return kinds
