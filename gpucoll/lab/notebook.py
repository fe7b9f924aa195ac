"""`gpucoll.draw`: a drawing in a notebook's cell, by one call."""

from __future__ import annotations

import os
from pathlib import Path

from gpucoll.lab.document import write


class Drawing:
    """The proved and drawn schedules of all ranks: shown as a picture in a notebook, written to a file by `save`."""

    def __init__(self, algorithm: str, collective: str, ranks: int, root: int, segments: int) -> None:
        self._asked = algorithm, collective, ranks, root, segments
        self._picture = self._text("svg")

    def _text(self, form: str) -> str:
        from gpucoll.lab.draw import draw  # here, to keep `import gpucoll` free of drawing code

        algorithm, collective, ranks, root, segments = self._asked
        return draw(algorithm, collective, size=ranks, root=root, segments=segments, form=form)

    def _repr_svg_(self) -> str:
        return self._picture

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file: an ``.svg`` picture, or an ``.html`` page that steps through the rounds.

        Raises ArgumentError with code GC-DRAW for any other ending, and with GC-FILE if writing fails.
        """
        file = Path(path)
        write(file, self._text(file.suffix[1:]))

    def __repr__(self) -> str:
        algorithm, collective, ranks, _, _ = self._asked
        return f"<Drawing of {collective} by {algorithm}, {ranks} rank{'s' * (ranks > 1)}>"


def draw(algorithm: str, ranks: int = 8, *, collective: str = "all_reduce", root: int = 0,
         segments: int = 1) -> Drawing:
    """Return a drawing of an algorithm on `ranks` ranks.

    A notebook shows it; ``save(path)`` writes it to a file: a path ending in ``.svg`` is a picture, a path ending in
    ``.html`` a page that steps through the rounds. The schedule is proved first. Neither MPI nor a GPU is needed.

    Parameters
    ----------
    algorithm : str
        A name from `algorithms`.
    ranks : int, optional
        The number of ranks.
    collective : str, optional
        The name of the collective.
    root : int, optional
        The root of a rooted collective.
    segments : int, optional
        The number of messages for a rank's part (pipelining).

    Returns
    -------
    Drawing
        The drawing.

    Raises
    ------
    ArgumentError
        An unknown name (GC-ALGO, GC-COLLECTIVE), or a drawing too large to read (GC-DRAW).

    See Also
    --------
    schedule : The rounds as data.

    Examples
    --------
    >>> import gpucoll as gc
    >>> gc.draw("ring", 4)
    <Drawing of all_reduce by ring, 4 ranks>
    """
    return Drawing(algorithm, collective, ranks, root, segments)
