"""alpha, beta, gamma and gap out of measured times: least squares of the relative error, nothing below 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy

CONSTANTS = ("alpha", "beta", "gamma", "gap")


class Probe(NamedTuple):
    """A measured time, and how often each constant is in it: rounds, bytes moved, bytes combined, further messages."""

    rounds: float
    moved: float
    reduced: float
    further: float
    seconds: float


def fit(probes: Sequence[Probe]) -> dict[str, float]:
    """Return the constants that explain `probes` best.

    >>> found = fit([Probe(1, 0, 0, 0, 1e-5), Probe(1, 1e6, 0, 0, 1.01e-3), Probe(1, 1e6, 1e6, 0, 1.51e-3)])
    >>> {name: float(f"{value:.3g}") for name, value in found.items()}
    {'alpha': 1e-05, 'beta': 1e-09, 'gamma': 5e-10, 'gap': 0.0}
    """
    seconds = numpy.array([probe.seconds for probe in probes])
    matrix = numpy.array([probe[:-1] for probe in probes], float) / seconds[:, None]
    used = [column for column in range(len(CONSTANTS)) if matrix[:, column].any()]
    values = numpy.zeros(len(CONSTANTS))
    while used:
        scale = matrix[:, used].max(0)
        found = numpy.linalg.lstsq(matrix[:, used] / scale, numpy.ones(len(probes)), rcond=None)[0] / scale
        if (found >= 0).all():
            values[used] = found
            break
        used.pop(int(found.argmin()))
    return dict(zip(CONSTANTS, map(float, values), strict=True))
