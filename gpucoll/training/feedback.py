"""What compressions of gradients share: what a step has lost is added to the next one's, so that nothing is for good.

Source: Karimireddy et al., arXiv 1901.09847.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpucoll.arrays import Array, address, module_of
from gpucoll.communicator import Communicator
from gpucoll.training.buckets import Bucket, Phases
from gpucoll.training.parameters import Like, to_array

LOST, RIGHT = "lost", "right"  # kinds of arrays in a checkpoint


class Compression:
    """Forms means over ranks. `wire_bytes` are the bytes of what this rank has handed to collectives, weighted as these
    send them, and `exact_bytes` those of the all-reduces in their place: 2 (P - 1) / P for each byte of a gradient.

    `lost`, what this rank has still to make good of each parameter's gradients, belongs to a checkpoint.
    """

    collectives = 1  # that a reduction makes

    def __init__(self) -> None:
        self.wire_bytes = self.exact_bytes = 0.0
        self.lost: dict[str, Array] = {}
        self._rows: dict[str, tuple[Array, Array]] = {}  # by a bucket's first parameter: `lost` has parts of one
        self._workspaces: dict[tuple[str, str], Array] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def of(self, name: str) -> Compression:
        """Return what compresses the parameter `name`."""
        return self

    @property
    def members(self) -> list[Compression]:
        """This one alone."""
        return [self]

    def remember(self) -> dict[str, dict[str, Array]]:
        """Return what a failed step is undone by: its arrays are replaced, never changed."""
        return {"lost": dict(self.lost)}

    @property
    def state(self) -> dict[str, Array]:
        """What belongs to a checkpoint: arrays by kind and parameter, as "lost/w"."""
        return {f"{LOST}/{name}": row for name, row in self.lost.items()}

    def restore(self, name: str, like: Like, state: Mapping[str, Array]) -> None:
        """Take up what a checkpoint has of the parameter `name`, on the host."""
        if f"{LOST}/{name}" in state:
            self.lost[name] = like.new(like.shape)
            to_array(self.lost[name], state[f"{LOST}/{name}"])

    def reduce(self, gradients: Mapping[str, Array], whole: Array, comm: Communicator) -> Phases:
        """Replace `gradients`, which lie one after the other in the row `whole`, by their means over all ranks."""
        raise NotImplementedError

    def _count(self, exact: Array, comm: Communicator, *sent: tuple[Array, float]) -> None:
        """Count the bytes of `sent`: arrays, and how often each is sent to another rank."""
        others = comm.size - 1
        self.exact_bytes += 2 * others / comm.size * exact.nbytes
        self.wire_bytes += sum(times * array.nbytes for array, times in sent)

    def _rows_of(self, gradients: Mapping[str, Array], whole: Array) -> tuple[Array, Array]:
        """Return the row of what was lost of a bucket before, and the one for what this step loses.

        The two are taken in turn: a step that fails leaves the one before as it was.
        """
        first = next(iter(gradients))
        rows = self._rows.get(first)
        if rows is None or not is_alike(rows[0], whole, whole.shape, whole.dtype) \
                or address(self.lost.get(first)) not in map(address, rows):  # new, restored, or of another trainer
            self._rows[first] = rows = module_of(whole).zeros_like(whole), module_of(whole).zeros_like(whole)
            for name, place in Bucket(gradients, rows[0]).gradients.items():
                if name in self.lost and is_alike(self.lost[name], whole, place.shape, whole.dtype):
                    place[...] = self.lost[name]
                self.lost[name] = place
        one, other = self._rows[first]
        before, after = (one, other) if address(self.lost[first]) == address(one) else (other, one)
        self.lost |= Bucket(gradients, after).gradients
        return before, after

    def _workspace(self, what: str, gradients: Mapping[str, Array], like: Array, shape: int | tuple[int, ...],
              dtype: object) -> Array:
        """Return memory for a step, the same in the next one: what is allocated anew costs more than what it is for."""
        key, shape = (what, next(iter(gradients))), (shape,) if isinstance(shape, int) else shape
        if key not in self._workspaces or not is_alike(self._workspaces[key], like, shape, dtype):
            self._workspaces[key] = module_of(like).zeros(shape, dtype)
        return self._workspaces[key]


def is_alike(array: Array, like: Array, shape: tuple[int, ...], dtype: object) -> bool:
    """Return whether an array has this shape and dtype, and is where `like` is."""
    return array.shape == shape and array.dtype == dtype and module_of(array) is module_of(like)


def keep_finite(after: Array, lost: Array) -> None:
    """Write what is lost into `after`; what is out of range is lost in this step only."""
    xp = module_of(lost)
    after[...] = xp.where(xp.isfinite(lost), lost, lost.dtype.type(0))
