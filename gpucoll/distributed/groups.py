"""Process groups: members, numbers of ranks in a group, and the list of this process' groups."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

from gpucoll.arrays import on_gpu
from gpucoll.communicator import Communicator
from gpucoll.core.dtypes import is_whole
from gpucoll.errors import ArgumentError, UsageError


class ProcessGroup:
    """A group of communicating ranks, made by `init_process_group` and `new_group`.

    A program does not call the class.

    Parameters
    ----------
    communicator : gpucoll.Communicator
        The communicator of the ranks.
    ranks : sequence of int
        The numbers of the ranks in the world.

    Attributes
    ----------
    ranks : tuple of int
        ``ranks[i]`` is the number in the world of rank i of the group.
    communicator : gpucoll.Communicator
        The communicator of these ranks, for features without a name in torch.distributed.

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> pair = dist.new_group([0])
    >>> pair.ranks, pair.communicator.size
    ((0,), 1)
    >>> dist.destroy_process_group()
    """

    def __init__(self, communicator: Communicator, ranks: Sequence[int]) -> None:
        self.communicator: Any = communicator  # Any: its overloads take only literal True and False
        self.ranks: tuple[int, ...] = tuple(ranks)
        self.uses_gpu = False
        self.made: Counter[tuple[int, ...]] = Counter()  # groups made by their members alone, by ranks
        self.barriers: itertools.count[int] = itertools.count()
        self.early: list[tuple[int, int, int, list[int]]] = []  # `monitored_barrier`: messages received early
        self.sending: list[Any] = []  # `monitored_barrier`: send requests not yet completed, with their buffers

    def rank(self) -> int:
        """Return this rank's number in the group.

        Returns
        -------
        int
            0 to `size` - 1.

        See Also
        --------
        get_rank : The function of torch.

        Examples
        --------
        >>> import gpucoll.distributed as dist
        >>> dist.init_process_group()  # without a launcher: one rank
        >>> dist.new_group().rank()
        0
        >>> dist.destroy_process_group()
        """
        return self.communicator.rank

    def size(self) -> int:
        """Return the number of ranks in the group.

        Returns
        -------
        int
            At least 1.

        See Also
        --------
        get_world_size : The function of torch.

        Examples
        --------
        >>> import gpucoll.distributed as dist
        >>> dist.init_process_group()  # without a launcher: one rank
        >>> dist.new_group().size()
        1
        >>> dist.destroy_process_group()
        """
        return int(self.communicator.size)

    def number_of(self, name: str, what: str, rank: Any, group_rank: Any = None) -> int:
        """Return the number in the group of `rank`, a rank of the world.

        Parameters
        ----------
        name : str
            The name of the call, for the error's text.
        what : str
            The name of the argument, for the error's text.
        rank : int or None
            The number in the world.
        group_rank : int or None, optional
            A number in the group, returned itself.

        Returns
        -------
        int
            The number in the group.

        Raises
        ------
        ArgumentError
            Both numbers are given, or neither, or the rank is not in the group (GC-ROOT).

        See Also
        --------
        get_group_rank : The function of torch.

        Examples
        --------
        >>> import gpucoll.distributed as dist
        >>> dist.init_process_group()  # without a launcher: one rank
        >>> dist.new_group().number_of("reduce", "dst", 0)
        0
        >>> dist.destroy_process_group()
        """
        if group_rank is not None:
            if rank not in (None, 0):  # 0 is the default of `src` and `dst`
                raise ArgumentError(f"{name}: {what}={rank!r} and group_{what}={group_rank!r} were both passed; pass "
                                    "only one", code="GC-ROOT")
            if not is_whole(group_rank) or not 0 <= group_rank < self.size():
                raise ArgumentError(f"{name}: group_{what} {group_rank!r} is not in 0..{self.size() - 1}",
                                    code="GC-ROOT")
            return int(group_rank)
        if not is_whole(rank) or rank not in self.ranks:
            raise ArgumentError(f"{name}: {what} {rank!r} is not in the group of ranks "
                                f"{', '.join(map(str, self.ranks))}", code="GC-ROOT")
        return self.ranks.index(rank)

    def __repr__(self) -> str:
        return f"<gpucoll.distributed.ProcessGroup rank={self.rank()} ranks={list(self.ranks)}>"


groups: list[ProcessGroup] = []  # of this process, the default group first; empty before `init_process_group`


class _NonMember:
    """The value returned by `new_group` on ranks outside the new group."""

    def __repr__(self) -> str:
        return "GroupMember.NON_GROUP_MEMBER"


class _Members(type):
    """A metaclass with the default group as a class attribute."""

    @property
    def WORLD(cls) -> ProcessGroup | None:
        """The default group; None before `init_process_group`."""
        return groups[0] if groups else None


class GroupMember(metaclass=_Members):
    """``WORLD`` is the default group; ``NON_GROUP_MEMBER`` stands for any group without this rank.

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> dist.GroupMember.WORLD
    <gpucoll.distributed.ProcessGroup rank=0 ranks=[0]>
    >>> dist.destroy_process_group()
    """

    NON_GROUP_MEMBER = _NonMember()


group = GroupMember


def _get_default_group() -> ProcessGroup:
    if not groups:
        raise UsageError("no process group exists yet; call gpucoll.distributed.init_process_group() first",
                         code="GC-INIT")
    return groups[0]


def member(name: str, group: Any, *arrays: Any) -> ProcessGroup | None:
    """Return the group of call `name`, or warn and return None on a rank outside the group.

    `arrays` are the arguments of the call; an array on a GPU changes the answer of `get_backend`.
    Raises UsageError before `init_process_group`, and ArgumentError if `group` is no group.
    """
    world = _get_default_group()
    if group is GroupMember.NON_GROUP_MEMBER:
        warnings.warn(f"Running {name} on global rank {world.rank()} which does not belong to the given group.",
                      stacklevel=3)
        return None
    pg = _checked(name, group)
    pg.uses_gpu |= any(on_gpu(array) for array in arrays)
    return pg


def _checked(name: str, group: Any) -> ProcessGroup:
    world = _get_default_group()
    if group is not None and not isinstance(group, ProcessGroup):
        raise ArgumentError(f"{name}: group is a {type(group).__name__}; pass the result of new_group, or None for all "
                            "ranks", code="GC-GROUP")
    return group or world


def is_available() -> bool:
    """Return True: a program started without a launcher is a world of one rank.

    Returns
    -------
    bool
        True.

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.is_available()
    True
    """
    return True


def is_initialized() -> bool:
    """Return whether the default group exists.

    That is so after `init_process_group`, and before `destroy_process_group`.

    Returns
    -------
    bool
        True if the default group exists.

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> dist.is_initialized()
    True
    >>> dist.destroy_process_group()
    """
    return bool(groups)


def get_rank(group: Any = None) -> int:
    """Return this rank's number in `group`, -1 outside the group.

    Parameters
    ----------
    group : ProcessGroup or None, optional
        The group; None is the default group.

    Returns
    -------
    int
        0 to the size of the group - 1, or -1.

    Raises
    ------
    UsageError
        There is no group yet: call `init_process_group` first (GC-INIT).

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> dist.get_rank()
    0
    >>> dist.destroy_process_group()
    """
    return -1 if group is GroupMember.NON_GROUP_MEMBER else _checked("get_rank", group).rank()


def get_world_size(group: Any = None) -> int:
    """Return the number of ranks in `group`, -1 outside the group.

    Parameters
    ----------
    group : ProcessGroup or None, optional
        The group; None is the default group.

    Returns
    -------
    int
        At least 1, or -1.

    Raises
    ------
    UsageError
        There is no group yet: call `init_process_group` first (GC-INIT).

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> dist.get_world_size()
    1
    >>> dist.destroy_process_group()
    """
    return -1 if group is GroupMember.NON_GROUP_MEMBER else _checked("get_world_size", group).size()


def get_backend(group: Any = None) -> str:
    """Return "nccl" after a call of the group on GPU arrays, else "mpi".

    Parameters
    ----------
    group : ProcessGroup or None, optional
        The group; None is the default group.

    Returns
    -------
    str
        "nccl" or "mpi".

    Raises
    ------
    ArgumentError
        This rank is outside the group (GC-GROUP).
    UsageError
        There is no group yet: call `init_process_group` first (GC-INIT).

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> dist.get_backend()
    'mpi'
    >>> dist.destroy_process_group()
    """
    return "nccl" if _checked("get_backend", group).uses_gpu else "mpi"


def get_process_group_ranks(group: Any = None) -> list[int]:
    """Return the world ranks of the members of `group`, ordered by number in the group.

    Parameters
    ----------
    group : ProcessGroup or None, optional
        The group; None is the default group.

    Returns
    -------
    list of int
        The numbers in the world.

    Raises
    ------
    UsageError
        There is no group yet: call `init_process_group` first (GC-INIT).

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> dist.get_process_group_ranks()
    [0]
    >>> dist.destroy_process_group()
    """
    return list(_checked("get_process_group_ranks", group).ranks)


def get_group_rank(group: Any, global_rank: int) -> int:
    """Return the number in `group` of rank `global_rank` of the world.

    Parameters
    ----------
    group : ProcessGroup or None, optional
        The group; None is the default group.
    global_rank : int
        The number in the world.

    Returns
    -------
    int
        The number in the group.

    Raises
    ------
    ArgumentError
        The rank is no member (GC-ROOT).
    UsageError
        There is no group yet: call `init_process_group` first (GC-INIT).

    See Also
    --------
    get_global_rank : The other way.

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> dist.get_group_rank(dist.GroupMember.WORLD, 0)
    0
    >>> dist.destroy_process_group()
    """
    return _checked("get_group_rank", group).number_of("get_group_rank", "global_rank", global_rank)


def get_global_rank(group: Any, group_rank: int) -> int:
    """Return the number in the world of rank `group_rank` of `group`.

    Parameters
    ----------
    group : ProcessGroup or None, optional
        The group; None is the default group.
    group_rank : int
        The number in the group.

    Returns
    -------
    int
        The number in the world.

    Raises
    ------
    ArgumentError
        The group has no such rank (GC-ROOT).
    UsageError
        There is no group yet: call `init_process_group` first (GC-INIT).

    See Also
    --------
    get_group_rank : The other way.

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> dist.get_global_rank(dist.GroupMember.WORLD, 0)
    0
    >>> dist.destroy_process_group()
    """
    pg = _checked("get_global_rank", group)
    return pg.ranks[pg.number_of("get_global_rank", "rank", None, group_rank)]
