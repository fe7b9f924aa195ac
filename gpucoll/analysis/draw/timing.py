"""Seconds in place of rounds: what `gpucoll simulate` predicts for every message and every round of a topology."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy

from gpucoll.analysis.draw.record import Rounds
from gpucoll.analysis.replay import replay
from gpucoll.analysis.simulate.network import Topology
from gpucoll.analysis.simulate.routes import Routes
from gpucoll.schedule import RecvReduce, Reduce, Round, Schedule, Send


class TimedRounds(Rounds):
    """The clock of `analysis/simulate`: a wave of its messages is what starts together by the clock of rounds."""

    def __init__(self, schedules: Sequence[Schedule], topology: Topology, nbytes: float) -> None:
        super().__init__(len(schedules))
        log = _Log(len(schedules))
        replay(schedules, log)
        self._chunk, self._routes = nbytes / schedules[0].chunks, Routes(topology, len(schedules))
        self._spans: dict[tuple[float, int, int], tuple[float, float]] = {}
        self._ends: list[list[float]] = [[] for _ in schedules]
        self._time, self._last = [0.0] * len(schedules), [0.0] * len(schedules)
        for wave in sorted({0.0, *log.messages, *(end for rounds in log.rounds for end, _ in rounds)}):
            self._close(wave, log)
            self._move(wave, log.messages[wave])

    def _close(self, wave: float, log: _Log) -> None:
        """End the rounds whose last message was of the wave before."""
        for rank, rounds in enumerate(log.rounds):
            while len(self._ends[rank]) < len(rounds) and rounds[len(self._ends[rank])][0] <= wave:
                combined = rounds[len(self._ends[rank])][1]
                self._time[rank] = self._last[rank] = self._last[rank] + self._combining(rank, combined)
                self._ends[rank].append(_rounded(self._time[rank]))

    def _combining(self, rank: int, combined: list[tuple[int, int]]) -> float:
        """Return the seconds that `rank` takes to combine so many chunks from so many sources."""
        if not combined:
            return 0.0
        sources, chunks = numpy.array(combined).T
        return float(self._routes.gamma(sources, numpy.full(len(sources), rank)) @ chunks) * self._chunk

    def _move(self, wave: float, messages: list[tuple[int, int, int]]) -> None:
        if not messages:
            return
        alphas, betas = self._routes.fares(*numpy.array(messages).T)
        for (sender, receiver, _), alpha, beta in zip(messages, alphas.tolist(), betas.tolist(), strict=True):
            start = max(self._time[sender], self._time[receiver])
            end = start + alpha + beta * self._chunk
            self._spans[wave, sender, receiver] = (_rounded(start), _rounded(end))
            self._last[sender], self._last[receiver] = max(self._last[sender], end), max(self._last[receiver], end)

    def meet(self, sender: int, receiver: int) -> tuple[float, float]:
        """Return when a message starts and ends; those of one wave between two ranks are one."""
        return self._spans[super().meet(sender, receiver)[0], sender, receiver]

    def finish(self, rank: int) -> float:
        """Return when the round of `rank` ends."""
        super().finish(rank)
        return self._ends[rank].pop(0)


class _Log:
    """The observer of a replay: messages by wave, and for every rank its rounds: their ends, what each combines."""

    def __init__(self, size: int) -> None:
        self.messages: dict[float, list[tuple[int, int, int]]] = defaultdict(list)
        self.rounds: list[list[tuple[float, list[tuple[int, int]]]]] = [[] for _ in range(size)]
        self._clock = Rounds(size)
        self._steps: list[Round] = [()] * size

    def begin(self, rank: int, steps: Round) -> None:
        self._clock.begin(rank)
        self._steps[rank] = steps

    def meet(self, sender: int, sent: int, receiver: int, received: int) -> None:
        step, wave = self._steps[sender][sent], self._clock.meet(sender, receiver)[0]
        self.messages[wave].append((sender, receiver, step.src.count if isinstance(step, Send) else 0))

    def finish(self, rank: int) -> None:
        combined = [(rank if isinstance(step, Reduce) else step.peer, step.dst.count) for step in self._steps[rank]
                    if isinstance(step, RecvReduce | Reduce)]
        self.rounds[rank].append((self._clock.finish(rank), combined))


def _rounded(time: float) -> float:
    """Return the same number for times that differ only by how they were added up."""
    return float(f"{time:.9g}")
