"""Explanations of a choice of algorithm: the candidates, the choice and the reason, for people and for scripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpucoll.simulator import Prediction, Topology
from gpucoll.tuner.choice import MEASURED_TIE, TIE, Candidate, link_load, ranked

PriceRow = dict[str, Any]
PARTS = ("latency", "bandwidth", "reduction")


class Explanation(dict[str, Any]):
    """The result of `explain`: a dictionary of JSON values, printed as a table.

    ``choice`` is the algorithm, ``executor`` its executor, ``reason`` a sentence, ``basis`` the table or topology used,
    ``advice`` what to measure, or "". ``candidates`` lists the candidates, the choice first. Each has ``algorithm``,
    ``executor``, ``segments``, the predicted ``seconds``, and the parts ``latency``, ``bandwidth`` and ``reduction`` of
    the seconds (None if unknown). ``origin`` tells whether the seconds are "measured" by a curve of the table,
    "estimated" from the links, or "assumed" as a link is; ``tuned`` is true for a curve that decides the choice.
    ``calls`` and ``measured`` are the number and the median seconds of calls made by the program. On a
    topology ``total`` is the number of bytes sent by all ranks together.
    """

    def __str__(self) -> str:
        width = max(24, *(len(row["algorithm"]) for row in self["candidates"]))
        totals = f"{'total sent':>13} " if "total" in self["candidates"][0] else ""
        formulas = [f"{row['algorithm']:{width}} {row['formula']}" for row in self["candidates"] if "formula" in row]
        return "\n".join((
            f"{self['collective']} of {self['bytes']} bytes for {self['ranks']} ranks, by {self['basis']}",
            f"{'algorithm':{width}} {'executor':8} {'segments':>8} {'predicted us':>13} {'origin':9} {totals}"
            f"{'latency':>8} {'bandwidth':>9} {'reduction':>9} {'measured us':>12} {'calls':>6}",
            *(_line(row, width) for row in self["candidates"]), f"choice: {self['choice']}: {self['reason']}",
            *filter(None, [self["advice"]]), *(("", self["formula"], *formulas) if formulas else ())))

    @property
    def choice(self) -> str:
        """The chosen algorithm."""
        return str(self["choice"])

    @property
    def reason(self) -> str:
        """The reason for the choice, a sentence."""
        return str(self["reason"])

    @property
    def candidates(self) -> list[PriceRow]:
        """The candidates, the choice first."""
        return list(self["candidates"])


def _line(row: PriceRow, width: int) -> str:
    shares = ["-" if row[part] is None else f"{_percent(row[part], sum(row[name] for name in PARTS))} %"
              for part in PARTS]
    measured = "-" if row["measured"] is None else f"{1e6 * row['measured']:.2f}"
    return (f"{row['algorithm']:{width}} {row['executor'] or '-':8} {row['segments']:8} {1e6 * row['seconds']:13.2f} "
            f"{row['origin']:9} {_total(row)}{shares[0]:>8} {shares[1]:>9} {shares[2]:>9} {measured:>12} "
            f"{row['calls'] or '-':>6}")


def _total(row: PriceRow) -> str:
    total = row.get("total")
    return f"{'-' if total is None else round(total):>13} " if "total" in row else ""


def _percent(part: float, whole: float) -> int:
    return round(100 * part / whole) if whole else 0


def explained(collective: str, nbytes: int, ranks: int, basis: str, candidates: Sequence[Candidate],
              times: Sequence[tuple[int, float | None]] = (), considered: int | None = None) -> Explanation:
    """Return the explanation of `candidates`, the choice first; `times` has the calls and median seconds of each.

    Only the first `considered` candidates were open to the choice; user-defined algorithms follow.
    """
    rows = []
    for candidate, (calls, measured) in zip(candidates, times or [(0, None)] * len(candidates), strict=True):
        row = candidate._asdict()
        # The parts are unknown, as for a native collective with a measured curve: show None, not zeros.
        if not any(row[name] for name in PARTS):
            row |= dict.fromkeys(PARTS)
        rows.append({name: row[name] for name in ("algorithm", "executor", "segments", "seconds", "origin", *PARTS)}
                    | {"tuned": candidate.measured, "calls": calls, "measured": measured})
    return Explanation(collective=collective, bytes=nbytes, ranks=ranks, basis=basis, choice=candidates[0].algorithm,
                       executor=candidates[0].executor, reason=reason(candidates[:considered]), candidates=rows,
                       advice="")


def on_topology(collective: str, nbytes: int, topology: Topology, rows: Sequence[Prediction]) -> Explanation:
    """Return the explanation of the simulator's predictions `rows` on a topology."""
    nodes = topology.nodes(rows[0].ranks) or (0,) * rows[0].ranks
    candidates = ranked([Candidate("", row.algorithm, row.segments, row.seconds, *row[5:], False) for row in rows],
                        lambda row: link_load(collective, row.algorithm, nodes))
    return explained(collective, nbytes, rows[0].ranks, f"the topology {topology.name}: {topology.about}", candidates)


def reason(candidates: Sequence[Candidate]) -> str:
    """Return the reason for choosing the first candidate.

    >>> reason([Candidate("mpi", "ring", 1, 2e-5, 2e-5, 0.0, 0.0, False)])
    'there is no other'
    """
    if len(candidates) == 1:
        return "there is no other"
    first, *others = candidates
    second = min([row for row in others if row.measured == first.measured] or others, key=lambda row: row.seconds)
    if first.executor == "native" and second.seconds * (1 + TIE) < first.seconds:
        return f"{_name(second)} is {second.origin} to be quicker, but not measured on such GPUs"
    if second.seconds < first.seconds:
        tie = MEASURED_TIE if first.measured else TIE
        return (f"within {tie:.0%} of {_name(second)}, the quickest, with less on the links ({first.link_load:g} "
                f"ways, not {second.link_load:g}): other traffic disturbs it least; {_most(first)}")
    ahead = second.seconds / first.seconds if first.seconds else 1.0
    kind = "measured" if first.measured else "predicted"
    return f"{kind} {ahead:.2f} times as fast as {_name(second)}, the next; {_most(first)}"


def _name(candidate: Candidate) -> str:
    return f"{candidate.algorithm} on {candidate.executor}" if candidate.executor else candidate.algorithm


def _most(candidate: Candidate) -> str:
    parts = {name: getattr(candidate, name) for name in PARTS}
    if not any(parts.values()):
        return "a native collective, of which the whole time is known only"
    most = max(parts, key=parts.__getitem__)
    return f"{most} is {_percent(parts[most], sum(parts.values()))} % of its time"
