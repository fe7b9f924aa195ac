"""torch's collectives of Python objects, which overwrite lists; see `gpucoll.communicator.objects`."""

from __future__ import annotations

from typing import Any

from gpucoll.distributed.groups import member
from gpucoll.errors import ArgumentError


def _check_list(name: str, what: str, values: Any, least: int) -> list[Any]:
    if not isinstance(values, list) or len(values) < least:
        given = f"has {len(values)}" if isinstance(values, list) else f"is a {type(values).__name__}"
        raise ArgumentError(f"{name}: {what} must be a list with room for {least} objects, but {given}",
                            code="GC-COUNTS")
    return values


def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    """Write `obj` of rank i into ``object_list[i]`` of every rank; the list may be longer than there are ranks."""
    name, pg = "all_gather_object", member("all_gather_object", group)
    if pg is None:
        return
    with pg.communicator._refusing():
        _check_list(name, "object_list", object_list, pg.size())
    object_list[:pg.size()] = pg.communicator.all_gather_object(obj)


def gather_object(obj: Any, object_gather_list: list[Any] | None = None, dst: int | None = 0, group: Any = None,
                  group_dst: int | None = None) -> None:
    """Write `obj` of rank i into ``object_gather_list[i]`` of rank `dst`; elsewhere the list is None or empty."""
    name, pg = "gather_object", member("gather_object", group)
    if pg is None:
        return
    root = pg.number_of(name, "dst", dst, group_dst)
    with pg.communicator._refusing():
        if pg.rank() == root:
            _check_list(name, "object_gather_list", object_gather_list, pg.size())
        elif object_gather_list:
            raise ArgumentError(f"{name}: object_gather_list was given on a rank that is not dst; pass it there only",
                                code="GC-ROOT")
    objects = pg.communicator.gather_object(obj, root)
    if object_gather_list:
        object_gather_list[:pg.size()] = objects


def broadcast_object_list(object_list: list[Any], src: int | None = 0, group: Any = None, device: Any = None,
                          group_src: int | None = None) -> None:
    """Overwrite the objects of every rank's list with those of rank `src`; `device` has no effect.

    Raises ArgumentError, with nothing written, where a list is not as long as that of rank `src`.
    """
    name, pg = "broadcast_object_list", member("broadcast_object_list", group)
    if pg is None:
        return
    root = pg.number_of(name, "src", src, group_src)
    given = None
    if pg.rank() == root:
        with pg.communicator._refusing():
            given = list(_check_list(name, "object_list", object_list, 0))
    came = pg.communicator.broadcast_object(given, root)
    if pg.rank() != root:
        if len(_check_list(name, "object_list", object_list, len(came))) != len(came):
            raise ArgumentError(f"{name}: object_list has {len(object_list)} objects, that of rank {src} has "
                                f"{len(came)}", code="GC-COUNTS")
        object_list[:] = came


def scatter_object_list(scatter_object_output_list: list[Any], scatter_object_input_list: list[Any] | None = None,
                        src: int | None = 0, group: Any = None, group_src: int | None = None) -> None:
    """Write ``scatter_object_input_list[i]`` of rank `src` into ``scatter_object_output_list[0]`` of rank i.

    Elsewhere the input list is ignored. The output list has at least one element: ArgumentError.
    """
    name, pg = "scatter_object_list", member("scatter_object_list", group)
    if pg is None:
        return
    root = pg.number_of(name, "src", src, group_src)
    came = pg.communicator.scatter_object(scatter_object_input_list, root)
    # Checked after the others have been served: who refuses before would keep them waiting.
    _check_list(name, "scatter_object_output_list", scatter_object_output_list, 1)
    scatter_object_output_list[0] = came
