"""The base class of gradient compressions: error feedback and byte counts.

Error feedback adds the residual of a step (the part lost by compression) to the gradients of the next step, so no part
is lost for good. Source: Karimireddy et al., arXiv 1901.09847.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpucoll import Communicator
from gpucoll.internal import Array, address, is_alike, module_of
from gpucoll.training.buckets import Bucket, Phases
from gpucoll.training.parameters import Like, to_array

LOST, RIGHT = "lost", "right"  # kinds of arrays in a checkpoint


class Compression:
    """A way to form means over ranks, with this rank's residuals.

    `lost` maps parameters to the residuals of this rank, and belongs to a checkpoint. `wire_bytes` counts the bytes
    sent: each array given to a collective, times the number of copies sent by the collective. `exact_bytes` counts the
    bytes of uncompressed all-reduces: 2 (P - 1) / P for each byte of a gradient.
    """

    collectives = 1  # the number of collectives made by `reduce`

    def __init__(self) -> None:
        self.wire_bytes: float = 0.0
        self.exact_bytes: float = 0.0
        self.lost: dict[str, Array] = {}
        # Two arrays of residuals for each bucket, by the bucket's first parameter; `lost` has views of one of the two
        self._rows: dict[str, tuple[Array, Array]] = {}
        self._workspaces: dict[tuple[str, str], Array] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def of(self, name: str) -> Compression:
        """Return the compression of the parameter `name`: this object."""
        return self

    @property
    def members(self) -> list[Compression]:
        """This compression alone; `Policy` has several."""
        return [self]

    def remember(self) -> dict[str, dict[str, Array]]:
        """Return the attributes to restore after a failed step. A step takes other arrays and writes none of these."""
        return {"lost": dict(self.lost)}

    @property
    def state(self) -> dict[str, Array]:
        """The arrays of a checkpoint, by kind and parameter: "lost/w"."""
        return {f"{LOST}/{name}": row for name, row in self.lost.items()}

    def restore(self, name: str, like: Like, state: Mapping[str, Array]) -> None:
        """Take the arrays of the parameter `name` from a checkpoint's `state`, made of NumPy arrays."""
        if f"{LOST}/{name}" in state:
            self.lost[name] = like.new(like.shape)
            to_array(self.lost[name], state[f"{LOST}/{name}"])

    def reduce(self, gradients: Mapping[str, Array], whole: Array, comm: Communicator) -> Phases:
        """Replace `gradients`, consecutive views of the array `whole`, by the means over all ranks."""
        raise NotImplementedError

    def _count(self, exact: Array, comm: Communicator, *sent: tuple[Array, float]) -> None:
        """Count the bytes of `sent`, pairs of an array and the number of times sent; `exact` is the bucket."""
        others = comm.size - 1
        self.exact_bytes += 2 * others / comm.size * exact.nbytes
        self.wire_bytes += sum(times * array.nbytes for array, times in sent)

    def _rows_of(self, gradients: Mapping[str, Array], whole: Array) -> tuple[Array, Array]:
        """Return a bucket's residuals of the last step, and the array for the residuals of this step.

        The two arrays swap roles in each step, so a failed step leaves the last residuals unchanged.
        """
        first = next(iter(gradients))
        rows = self._rows.get(first)
        # Arrays are made anew in the first step, after a restored checkpoint, and after use by another trainer.
        if rows is None or not is_alike(rows[0], whole, whole.shape, whole.dtype) \
                or address(self.lost.get(first)) not in map(address, rows):
            self._rows[first] = rows = module_of(whole).zeros_like(whole), module_of(whole).zeros_like(whole)
            for name, place in Bucket(gradients, rows[0]).gradients.items():
                if name in self.lost and is_alike(self.lost[name], whole, place.shape, whole.dtype):
                    place[...] = self.lost[name]
                self.lost[name] = place
        one, other = self._rows[first]
        before, after = (one, other) if address(self.lost[first]) == address(one) else (other, one)
        self.lost |= Bucket(gradients, after).gradients
        return before, after

    def _workspace(self, gradients: Mapping[str, Array], like: Array, what: str, shape: tuple[int, ...],
                   dtype: object) -> Array:
        """Return an array reused in every step of a bucket; allocating it anew costs more than the computation."""
        key = what, next(iter(gradients))
        if key not in self._workspaces or not is_alike(self._workspaces[key], like, shape, dtype):
            self._workspaces[key] = module_of(like).zeros(shape, dtype)
        return self._workspaces[key]
