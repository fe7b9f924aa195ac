"""Layers of parameters gathered for the time of use, each during the computation of the layer before."""

from __future__ import annotations

from gpucoll import Communicator
from gpucoll.training.buckets import PhaseQueue
from gpucoll.training.parameters import Like, Parameters
from gpucoll.training.shards import Shards

LayerNames = tuple[str, ...]


class Layers:
    """Whole parameters gathered layer by layer from the ranks' `shards`.

    The next layer is predicted from the order of layers in the step before, and gathered in advance.
    """

    def __init__(self, shards: Parameters, like: dict[str, Like], comm: Communicator, *, overlaps: bool) -> None:
        self._shards, self._like, self._comm, self._overlaps = shards, like, comm, overlaps
        self._used: list[LayerNames] = []  # in this step
        self._before: list[LayerNames] = []  # in the last step
        self._coming: tuple[LayerNames, Parameters, PhaseQueue] | None = None
        self._held: list[Parameters] = []

    def restart(self) -> None:
        """Begin a step. A layer gathered in advance is dropped, since the parameters have changed."""
        self._before, self._used = self._used, []
        self._drop()

    def enter(self, names: LayerNames) -> Parameters:
        """Return the arrays of a layer, and begin to gather the predicted next layer. A collective call."""
        if self._coming is None or self._coming[0] != names:
            self._drop()
            self._coming = self._begin(names)
        _, found, queue = self._coming
        self._coming = None
        queue.finish()
        self._held.append(found)
        self._used.append(names)
        # Predict only while this step follows the order of the last step.
        at = len(self._used)
        if at < len(self._before) and self._before[at - 1] == names:
            self._coming = self._begin(self._before[at])
        return found

    def leave(self, found: Parameters) -> None:
        """Release the arrays of a layer returned by `enter`."""
        self._held = [one for one in self._held if one is not found]

    @property
    def nbytes(self) -> int:
        """Bytes of the layers in use and of the layer being gathered."""
        coming = [self._coming[1]] if self._coming is not None else []
        return sum(array.nbytes for layer in [*self._held, *coming] for array in layer.values())

    def _begin(self, names: LayerNames) -> tuple[LayerNames, Parameters, PhaseQueue]:
        found = {name: self._like[name].new(self._like[name].shape) for name in names}
        queue = PhaseQueue(overlaps=self._overlaps)
        for dtype in dict.fromkeys(self._like[name].dtype for name in names):
            like = {name: self._like[name] for name in names if self._like[name].dtype == dtype}
            some = Shards(like, self._comm.rank, self._comm.size)
            queue.start(some.all_gather(self._shards, self._comm, found), 1)
        return names, found, queue

    def _drop(self) -> None:
        """Release a layer gathered in advance but not used next."""
        if self._coming is not None:
            # Complete the collective first: the other ranks take part in it too.
            self._coming[2].finish()
            self._coming = None
