"""Constants of NCCL's tuning model, by release: src/graph/tuning.cc of the tags of github.com/NVIDIA/nccl.

A row names its tag, and holds until the next row: 2.26 has the constants of 2.25. A row names only what changed, and
the formulas in `tuning` ask for the release. Latencies are in us, bandwidths in GB/s. Limits of bandwidth are rows for
a generation of GPUs (Volta, Ampere, Hopper, Blackwell) with columns for 1 node, 2 nodes and more.
"""

from __future__ import annotations

import re
from typing import NamedTuple, TypeAlias

from gpucoll.errors import ArgumentError

ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")  # in NCCL's order
PROTOCOLS = ("LL", "LL128", "Simple")
Row: TypeAlias = tuple[float, float, float]
Rows: TypeAlias = tuple[Row, ...]
Latencies: TypeAlias = dict[str, Row]  # by algorithm, with a column for each protocol


class Release(NamedTuple):
    """The constants of a release."""

    since: tuple[int, int, int]
    base: Latencies  # of a call
    links: dict[str, Latencies]  # of a step over NVL, PCI or NET
    ll: Rows  # most of LL; on several nodes Volta's row is for Intel's processors, Ampere's for AMD's
    tree: Rows  # most of a channel
    ring_ll128: Rows  # most of a channel
    tree_ll128: Rows  # most of a channel
    nvls_tree: Rows = ()  # most of a channel
    nvls_share: tuple[float, ...] = ()  # of NVLink, reached by NVLS; by generation
    corrections: tuple[tuple[float, ...], ...] = ()  # of trees, by protocol and power of two from 64 B on
    pat_share: float = 0.0  # of the bandwidth, reached by PAT


def _same(value: float) -> Row:
    return (value, value, value)


def _simple(value: float) -> Row:
    return (0.0, 0.0, value)


def _twice(row: Row) -> Row:
    return (2 * row[0], 2 * row[1], 2 * row[2])


VOLTA_TREE, AMPERE_TREE, HOPPER_TREE = (26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (38.7, 41.4, 36.0)
VOLTA_LL, AMPERE_LL, HOPPER_LL = (39.0, 39.0, 20.4), (87.7, 22.5, 19.0), (141.0, 45.0, 35.0)
HOPPER_TREE_LL128 = (36.7, 36.7, 29.0)
CORRECTIONS = (
    (1.0, 1.0, 1.0, 1.0, .9, .8, .7, .7, .7, .7, .6, .5, .4, .4, .5, .6, .7, .8, .9, 1.0, 1.0, 1.0, 1.0),
    (1.0, 1.0, 1.0, 1.0, 1.0, .9, .8, .8, .8, .7, .6, .6, .6, .6, .6, .6, .8, .9, .9, .9, .9, 1.0, 1.0),
    (.9, .9, .9, .9, .9, .9, .9, .8, .7, .6, .6, .5, .5, .5, .5, .6, .7, .8, .7, .7, .8, .9, .9),
)
CORRECTION_2_8 = (1.0, 1.0, 1.0, 1.0, 1.0, .9, .8, .8, .8, .7, .6, .6, .6, .5, .6, .6, .7, .7, .8, .9, .9, .92, .92)

V2_8 = Release(
    (2, 8, 3),  # v2.8.3-1; until 2.9
    base={"Tree": (4.4, 4.4, 0.0), "Ring": (3.6, 10.0, 8.4)},
    links={"NVL": {"Tree": (.52, 1.25, 28.0), "Ring": (.47, 1.9, 3.4)},
           "PCI": {"Tree": (1.0, 1.9, 28.0), "Ring": (1.0, 2.5, 5.7)},
           "NET": {"Tree": (5.0, 8.5, 28.0), "Ring": (2.7, 4.0, 9.6)}},
    ll=(VOLTA_LL, AMPERE_LL), tree=(VOLTA_TREE, (24.0, 22.5, 16.0)), ring_ll128=(), tree_ll128=(),
    corrections=(CORRECTIONS[0], CORRECTION_2_8, CORRECTIONS[2]))
LL128_2_8 = {"broadcast": 18.8, "reduce": 12.0, "all_gather": 18.3, "reduce_scatter": 15.2, "all_reduce": 16.9}
V2_10 = V2_8._replace(  # v2.10.3-1; until 2.11
    since=(2, 10, 3), tree=(VOLTA_TREE, AMPERE_TREE), ring_ll128=(_same(20.0),) * 2, tree_ll128=(_same(20.0),) * 2,
    corrections=CORRECTIONS)
V2_19 = Release(
    (2, 19, 1),  # v2.19.1-1
    base={"Tree": (6.8, 14.0, 0.0), "Ring": (6.6, 14.0, 8.4)},
    links={"NVL": {"Tree": (.6, 1.25, 28.0), "Ring": (.6, 1.9, 3.4), "CollNetDirect": _simple(3.7),
                   "CollNetChain": _simple(2.8), "NVLS": _simple(23.0), "NVLSTree": _simple(23.0)},
           "PCI": {"Tree": (1.0, 1.9, 28.0), "Ring": (1.0, 2.5, 5.7), "CollNetDirect": _simple(3.7),
                   "CollNetChain": _simple(2.8)},
           "NET": {"Tree": (5.0, 8.5, 28.0), "Ring": (2.7, 4.0, 14.0), "CollNetDirect": _simple(31.0),
                   "CollNetChain": _simple(30.0), "NVLS": _simple(18.0), "NVLSTree": _simple(14.0)}},
    ll=(VOLTA_LL, AMPERE_LL, AMPERE_LL), tree=(VOLTA_TREE, AMPERE_TREE, HOPPER_TREE),
    ring_ll128=(_same(20.0), _same(20.0), _same(36.7)), tree_ll128=(_same(20.0), _same(20.0), HOPPER_TREE_LL128),
    corrections=CORRECTIONS)
V2_20 = V2_19._replace(since=(2, 20, 3))  # v2.20.3-1
V2_21 = V2_20._replace(  # v2.21.5-1
    since=(2, 21, 5), ll=(VOLTA_LL, AMPERE_LL, HOPPER_LL),
    links=V2_20.links | {"NVL": V2_20.links["NVL"] | {"NVLS": _simple(25.0), "NVLSTree": _simple(25.0)}})
V2_22 = V2_21._replace(since=(2, 22, 3))  # v2.22.3-1
V2_23 = V2_22._replace(  # v2.23.4-1
    since=(2, 23, 4), base=V2_22.base | {"Tree": (6.8, 14.0, 8.4), "PAT": _same(8.0)}, pat_share=.85,
    links={"NVL": V2_22.links["NVL"] | {"Tree": (.6, 1.25, 4.0)},
           "PCI": V2_22.links["PCI"] | {"Tree": (1.0, 1.9, 4.0)},
           "NET": V2_22.links["NET"] | {"Tree": (5.0, 8.5, 14.0)}})
V2_24 = V2_23._replace(since=(2, 24, 3), pat_share=.75)  # v2.24.3-1
V2_25 = V2_24._replace(  # v2.25.1-1; until 2.26
    since=(2, 25, 1), ll=(*V2_24.ll, _twice(HOPPER_LL)), tree=(*V2_24.tree, _twice(HOPPER_TREE)),
    ring_ll128=(*V2_24.ring_ll128, _same(73.4)), tree_ll128=(*V2_24.tree_ll128, _twice(HOPPER_TREE_LL128)))
V2_27 = V2_25._replace(since=(2, 27, 3))  # v2.27.3-1
V2_27_5 = V2_27._replace(since=(2, 27, 5))  # v2.27.5-1
V2_28 = V2_27_5._replace(  # v2.28.3-1
    since=(2, 28, 3), tree=(*V2_24.tree, (70.0, 42.8, 24.0)), tree_ll128=(*V2_24.tree_ll128, (55.6, 31.67, 20.0)),
    nvls_share=(0.0, 0.0, .85, .74),
    nvls_tree=(VOLTA_TREE, AMPERE_TREE, (0.0, 57.7, 45.5), (0.0, 96.0, 43.1)),
    links=V2_27_5.links | {"NET": V2_27_5.links["NET"] | {"PAT": _simple(14.0)}})
V2_28_7 = V2_28._replace(since=(2, 28, 7), ring_ll128=(*V2_24.ring_ll128, (73.4, 34.6, 73.4)))  # v2.28.7-1
V2_28_9 = V2_28_7._replace(  # v2.28.9-1
    since=(2, 28, 9), nvls_tree=(*V2_28.nvls_tree[:3], (0.0, 96.0, 43.8)),
    links=V2_28.links | {"NET": V2_28.links["NET"] | {"NVLSTree": _simple(20.9)}})
V2_29 = V2_28_9._replace(since=(2, 29, 2), ring_ll128=(*V2_24.ring_ll128, (34.5, 34.6, 34.5)))  # v2.29.2-1
V2_29_7 = V2_29._replace(since=(2, 29, 7), ring_ll128=(*V2_24.ring_ll128, _same(40.0)))  # v2.29.7-1
V2_30 = V2_29_7._replace(since=(2, 30, 3), nvls_tree=(*V2_28.nvls_tree[:3], (0.0, 96.0, 80.0)))  # v2.30.3-1, 2.30.7
RELEASES = (V2_8, V2_10, V2_19, V2_20, V2_21, V2_22, V2_23, V2_24, V2_25, V2_27, V2_27_5, V2_28, V2_28_7,
            V2_28_9, V2_29, V2_29_7, V2_30)
UNREAD = ((2, 12), (2, 19))  # releases from the first up to the second, whose model is not here
NEWEST = (2, 30)


def release(text: str) -> Release:
    """Return the constants of a release such as ``2.27`` or ``2.27.7``; raise ArgumentError for an unknown release.

    Without a third number the newest release of these two numbers is meant.

    >>> release("2.29").since, release("2.26.5").since
    ((2, 29, 7), (2, 25, 1))
    """
    found = re.fullmatch(r"(\d{1,3})\.(\d{1,3})(?:\.(\d{1,3}))?(?:[-+].*)?", text)
    asked = found and (int(found[1]), int(found[2]), int(found[3] or 999))
    if not asked or asked[:2] > NEWEST or asked < V2_8.since or UNREAD[0] <= asked[:2] < UNREAD[1]:
        raise ArgumentError(f"the tuning model of NCCL {text} is not known; known are 2.8.3 to 2.11 and 2.19 to 2.30",
                            code="GC-NCCL-MODEL")
    return max((row for row in RELEASES if row.since <= asked), key=lambda row: row.since)
