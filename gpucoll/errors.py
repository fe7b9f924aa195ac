"""The exceptions of gpucoll: typed, with a code for scripts and a sentence for people."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class GpucollError(RuntimeError):
    """Base of every error that gpucoll raises.

    ``code`` names the case ("GC-SHAPE", ...) and ``ranks`` the culprits, where there are any.

    >>> try:
    ...     raise ArgumentError("root 8 is not in 0..7", code="GC-ROOT")
    ... except ValueError as error:
    ...     print(error.code, error)
    GC-ROOT [GC-ROOT] root 8 is not in 0..7
    """

    default_code = "GC-ERROR"
    # Whether nothing is left under way: all ranks have found it out before anything moved, or it is of a message that
    # has ended. The communicator goes on then.
    settled = False

    def __init__(self, message: str, *, code: str | None = None, ranks: tuple[int, ...] = ()) -> None:
        self.code = code or self.default_code
        self.ranks = ranks
        super().__init__(message)

    def __str__(self) -> str:
        return f"[{self.code}] {self.args[0]}"

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only state is lost by the default pickling of exceptions.
        return _rebuild, (type(self), self.args[0], self.code, self.ranks)


def _rebuild(kind: type[GpucollError], message: str, code: str, ranks: tuple[int, ...]) -> GpucollError:
    return kind(message, code=code, ranks=ranks)


class ArgumentError(GpucollError, ValueError):
    """An argument is wrong; nothing has moved and nothing was written."""

    default_code = "GC-ARGUMENT"


class DtypeError(GpucollError, TypeError):
    """A dtype is not supported, or the op is not defined for it; nothing has moved."""

    default_code = "GC-DTYPE"


class MismatchError(GpucollError):
    """The ranks called different things; nothing has moved."""

    default_code = "GC-MISMATCH"


class PeerError(GpucollError):
    """Another rank refused its arguments; nothing has moved."""

    default_code = "GC-PEER"


class RankFailedError(GpucollError):
    """A rank died or left; the communicator is revoked."""

    default_code = "GC-RANK"


class CollectiveTimeout(GpucollError, TimeoutError):
    """A wait reached its deadline; the communicator is revoked."""

    default_code = "GC-TIMEOUT"


class RevokedError(GpucollError):
    """The communicator failed earlier and can only be closed."""

    default_code = "GC-REVOKED"


class ClosedError(GpucollError):
    """The communicator was closed."""

    default_code = "GC-CLOSED"


class UsageError(GpucollError):
    """The library was started or used in a way that cannot work."""

    default_code = "GC-USAGE"


class BackendError(GpucollError):
    """MPI, NCCL or CUDA reported an error of its own."""

    default_code = "GC-BACKEND"


def minority(values: Sequence[object]) -> tuple[int, ...]:
    """Return the ranks whose value is not the one that most ranks have, which may be as few as rank 0 and its like.

    >>> minority(["sum", "max", "max"]), minority([1, 2])
    ((0,), (1,))
    """
    most = max(values, key=values.count)
    return tuple(rank for rank, one in enumerate(values) if one != most)


def listed(ranks: Iterable[int]) -> str:
    """Return ranks as a message names them.

    >>> listed((0, 3))
    '0, 3'
    """
    return ", ".join(map(str, ranks))


def nearest(name: object, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown `name`: the nearest known one, and all of them.

    >>> nearest("rng", ["ring", "tree"])
    '; did you mean ring? known: ring, tree'
    """
    names = list(known)
    guess = difflib.get_close_matches(str(name), names, 1)
    return (f"; did you mean {guess[0]}?" if guess else ";") + " known: " + ", ".join(names)


def is_settled(error: BaseException) -> bool:
    """Return whether an error leaves nothing under way."""
    return isinstance(error, GpucollError) and error.settled
