"""The exceptions of gpucoll: each has a type, a code for scripts and a sentence for people."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence


class GpucollError(RuntimeError):
    """Base of every error raised by gpucoll.

    Parameters
    ----------
    message : str
        The sentence for people.
    code : str or None, optional
        The code for scripts; None is the code of the class.
    ranks : tuple of int, optional
        The ranks at fault, if any are known.
    settled : bool, optional
        Whether the communicator can be used further.

    Attributes
    ----------
    code : str
        The case, such as "GC-SHAPE".
    ranks : tuple of int
        The ranks at fault, if any are known.

    Examples
    --------
    >>> import gpucoll as gc
    >>> try:
    ...     raise gc.ArgumentError("root 8 is not in 0..7", code="GC-ROOT")
    ... except gc.GpucollError as error:
    ...     print(error.code, error)
    GC-ROOT [GC-ROOT] root 8 is not in 0..7
    """

    default_code = "GC-BACKEND"
    # A settled error does not revoke the communicator. No message of the failed call is left under way: either all
    # ranks saw the error before data moved, or the error concerns a message already completed.
    settled: bool = False
    # The cause of an own error is on this rank alone: no other rank is asked to explain it.
    own = False

    def __init__(self, message: str, *, code: str | None = None, ranks: tuple[int, ...] = (),
                 settled: bool = False) -> None:
        self.code: str = code or self.default_code
        self.ranks = ranks
        if settled:
            self.settled = True
        super().__init__(message)

    def __str__(self) -> str:
        return f"[{self.code}] {self.args[0]}"

    def __reduce__(self) -> tuple[object, ...]:
        # Errors are pickled between ranks, and the default pickling of exceptions loses keyword-only state.
        return functools.partial(type(self), code=self.code, ranks=self.ranks), self.args


class ArgumentError(GpucollError, ValueError):
    """An argument is wrong; no data has been sent and no array was written.

    Parameters
    ----------
    message : str
        The sentence for people.
    code : str or None, optional
        The code for scripts; None is the code of the class.
    ranks : tuple of int, optional
        The ranks at fault, if any are known.
    settled : bool, optional
        Whether the communicator can be used further.

    Examples
    --------
    >>> import gpucoll as gc
    >>> try:
    ...     gc.algorithms("all_reduce", size=0)
    ... except gc.GpucollError as error:
    ...     print(type(error).__name__, error.code)
    ArgumentError GC-ALGO
    """

    default_code = "GC-ARGUMENT"


class DtypeError(GpucollError, TypeError):
    """A dtype is not supported, or the op is not defined for the dtype.

    No data has been sent.

    Parameters
    ----------
    message : str
        The sentence for people.
    code : str or None, optional
        The code for scripts; None is the code of the class.
    ranks : tuple of int, optional
        The ranks at fault, if any are known.
    settled : bool, optional
        Whether the communicator can be used further.

    Examples
    --------
    >>> import gpucoll as gc
    >>> import numpy
    >>> try:
    ...     gc.run_local(lambda comm: comm.all_reduce(numpy.array(["a"])), 2)
    ... except gc.GpucollError as error:
    ...     print(type(error).__name__, error.code)
    DtypeError GC-DTYPE
    """

    default_code = "GC-DTYPE"


class MismatchError(GpucollError):
    """The ranks made different calls, or a message has another length or dtype than the receiver expects.

    Parameters
    ----------
    message : str
        The sentence for people.
    code : str or None, optional
        The code for scripts; None is the code of the class.
    ranks : tuple of int, optional
        The ranks at fault, if any are known.
    settled : bool, optional
        Whether the communicator can be used further.

    Examples
    --------
    >>> import gpucoll as gc
    >>> import numpy
    >>> try:
    ...     gc.run_local(lambda comm: comm.all_reduce(numpy.zeros(1 + comm.rank)), 2)
    ... except gc.GpucollError as error:
    ...     print(type(error).__name__, error.code)
    MismatchError GC-SHAPE
    """

    default_code = "GC-MISMATCH"


class PeerError(GpucollError):
    """Another rank refused its arguments.

    Parameters
    ----------
    message : str
        The sentence for people.
    code : str or None, optional
        The code for scripts; None is the code of the class.
    ranks : tuple of int, optional
        The ranks at fault, if any are known.
    settled : bool, optional
        Whether the communicator can be used further.

    Examples
    --------
    >>> import gpucoll as gc
    >>> issubclass(gc.PeerError, gc.GpucollError)
    True
    """

    default_code = "GC-PEER"


class RankFailedError(GpucollError):
    """A rank died or left; the communicator is revoked.

    Parameters
    ----------
    message : str
        The sentence for people.
    code : str or None, optional
        The code for scripts; None is the code of the class.
    ranks : tuple of int, optional
        The ranks at fault, if any are known.
    settled : bool, optional
        Whether the communicator can be used further.

    Examples
    --------
    >>> import gpucoll as gc
    >>> gc.RankFailedError("rank 2 has ended", ranks=(2,)).ranks
    (2,)
    """

    default_code = "GC-RANK"


class CollectiveTimeout(GpucollError, TimeoutError):
    """A wait reached its deadline; the communicator is revoked.

    Parameters
    ----------
    message : str
        The sentence for people.
    code : str or None, optional
        The code for scripts; None is the code of the class.
    ranks : tuple of int, optional
        The ranks at fault, if any are known.
    settled : bool, optional
        Whether the communicator can be used further.

    Examples
    --------
    >>> import gpucoll as gc
    >>> issubclass(gc.CollectiveTimeout, TimeoutError)
    True
    """

    default_code = "GC-TIMEOUT"


class RevokedError(GpucollError):
    """The communicator failed earlier; closing is the only call left.

    Parameters
    ----------
    message : str
        The sentence for people.
    code : str or None, optional
        The code for scripts; None is the code of the class.
    ranks : tuple of int, optional
        The ranks at fault, if any are known.
    settled : bool, optional
        Whether the communicator can be used further.

    Examples
    --------
    >>> import gpucoll as gc
    >>> gc.RevokedError("an earlier call has failed").code
    'GC-REVOKED'
    """

    default_code = "GC-REVOKED"


class ClosedError(GpucollError):
    """The communicator was closed.

    Parameters
    ----------
    message : str
        The sentence for people.
    code : str or None, optional
        The code for scripts; None is the code of the class.
    ranks : tuple of int, optional
        The ranks at fault, if any are known.
    settled : bool, optional
        Whether the communicator can be used further.

    Examples
    --------
    >>> import gpucoll as gc
    >>> comm, = gc.init_local(1)
    >>> comm.close()
    >>> try:
    ...     comm.barrier()
    ... except gc.GpucollError as error:
    ...     print(type(error).__name__, error.code)
    ClosedError GC-CLOSED
    """

    default_code = "GC-CLOSED"


class UsageError(GpucollError):
    """The program starts or uses the library in an impossible way.

    Parameters
    ----------
    message : str
        The sentence for people.
    code : str or None, optional
        The code for scripts; None is the code of the class.
    ranks : tuple of int, optional
        The ranks at fault, if any are known.
    settled : bool, optional
        Whether the communicator can be used further.

    Examples
    --------
    >>> import gpucoll as gc
    >>> try:
    ...     gc.init(rank=0, size=2)  # without store=
    ... except gc.GpucollError as error:
    ...     print(type(error).__name__, error.code)
    UsageError GC-STORE
    """

    default_code = "GC-USAGE"


class BackendError(GpucollError):
    """MPI, NCCL or CUDA reported an error.

    Parameters
    ----------
    message : str
        The sentence for people.
    code : str or None, optional
        The code for scripts; None is the code of the class.
    ranks : tuple of int, optional
        The ranks at fault, if any are known.
    settled : bool, optional
        Whether the communicator can be used further.

    Examples
    --------
    >>> import gpucoll as gc
    >>> gc.BackendError("no memory is left", code="GC-MEMORY").code
    'GC-MEMORY'
    """

    default_code = "GC-BACKEND"


REFUSALS = (ArgumentError, DtypeError, MemoryError)  # errors in a rank's own arguments


def minority(values: Sequence[object]) -> tuple[int, ...]:
    """Return the ranks whose value differs from the most frequent value; on a tie the lowest rank's value counts.

    >>> minority(["sum", "max", "max"]), minority([1, 2])
    ((0,), (1,))
    """
    most = max(values, key=values.count)
    return tuple(rank for rank, one in enumerate(values) if one != most)


def listed(ranks: Iterable[int]) -> str:
    """Return ranks as text for a message.

    >>> listed((0, 3))
    '0, 3'
    """
    return ", ".join(map(str, ranks))


def with_noun(ranks: Sequence[int]) -> str:
    """Return ranks as text for a message, with the noun in front.

    >>> with_noun((0, 3)), with_noun([2])
    ('ranks 0, 3', 'rank 2')
    """
    return f"rank{'s' * (len(ranks) != 1)} {listed(ranks)}"


def nearest(name: object, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown `name`: the nearest known name and all known names.

    >>> nearest("rng", ["ring", "tree"])
    '; did you mean ring? known: ring, tree'
    """
    names = list(known)
    import difflib

    guess = difflib.get_close_matches(str(name), names, 1)
    return (f"; did you mean {guess[0]}?" if guess else ";") + " known: " + ", ".join(names)


def is_settled(error: BaseException) -> bool:
    """Return whether an error leaves no message under way, so that the communicator can be used further."""
    return isinstance(error, GpucollError) and error.settled


def is_known(error: BaseException) -> bool:
    """Return whether the cause of an error is known; the cause of the other errors may be another rank."""
    return getattr(error, "own", False) or (not isinstance(error, BackendError | RankFailedError | CollectiveTimeout) \
        and (not isinstance(error, MismatchError) or bool(error.ranks)))
