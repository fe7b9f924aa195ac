"""The configuration of NCCL's communicators by a program: `gpucoll.init(nccl={"max_ctas": 8, "name": "tp"})`.

The names are the fields of NCCL's ``ncclConfig_t``; `NcclFields` has the meaning of each in NCCL's documentation.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from typing import Any

from gpucoll.core.dtypes import is_whole
from gpucoll.errors import ArgumentError, BackendError, nearest

NCCL_MAGIC = 0xCAFEBEEF
UNSET = -(1 << 31)  # NCCL_CONFIG_UNDEF_INT
SELECTION_SINCE = 23100  # the NCCL version introducing a configuration for each collective


class NcclFields(ctypes.Structure):
    """``ncclConfig_t`` as of NCCL 2.27; older versions end earlier, as told by `size`."""

    _fields_ = (("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint),
                ("blocking", ctypes.c_int), ("cga_cluster_size", ctypes.c_int), ("min_ctas", ctypes.c_int),
                ("max_ctas", ctypes.c_int), ("net_name", ctypes.c_char_p), ("split_share", ctypes.c_int),
                ("traffic_class", ctypes.c_int), ("name", ctypes.c_char_p), ("collnet_enable", ctypes.c_int),
                ("cta_policy", ctypes.c_int), ("shrink_share", ctypes.c_int), ("nvls_ctas", ctypes.c_int))


class SelectionFields(ctypes.Structure):
    """``ncclCollConfig_t`` as of NCCL 2.31, the configuration of one collective."""

    _fields_ = (("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint),
                ("ext", ctypes.c_void_p), ("min_ctas", ctypes.c_int), ("max_ctas", ctypes.c_int),
                ("nvls_ctas", ctypes.c_int), ("cga_cluster_size", ctypes.c_int), ("alg_selection", ctypes.c_char_p),
                ("force_alg_selection", ctypes.c_int), ("cta_policy", ctypes.c_int),
                ("user_profiler_tag", ctypes.c_uint64))


@functools.cache
def selecting(algorithm: str) -> SelectionFields:
    """Return the configuration, kept for ever, that lets a collective run by this algorithm of NCCL or fail."""
    return SelectionFields(ctypes.sizeof(SelectionFields), NCCL_MAGIC, SELECTION_SINCE, None, *4 * [UNSET],
                           algorithm.encode(), 1, UNSET, 0)


FIELD_TYPES = dict(NcclFields._fields_[4:])  # all but the head and `blocking`: deadlines need NCCL's blocking calls
WINDOWS = "windows"  # no field of NCCL's: arrays of `comm.empty` become windows
SETTINGS = (*FIELD_TYPES, WINDOWS)


def checked(given: Any) -> dict[str, Any] | None:
    """Return the settings given by a program; raise ArgumentError for unknown names and values of another type.

    >>> checked({"max_ctas": 8, "name": "tp", "windows": True})
    {'max_ctas': 8, 'name': 'tp', 'windows': True}
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ArgumentError(f"nccl={given!r} is no dict of NCCL's settings", code="GC-OPTION")
    for name, value in given.items():
        if name not in SETTINGS:
            raise ArgumentError(f"nccl: NCCL's configuration has no {name!r}{nearest(str(name), SETTINGS)}",
                                code="GC-OPTION")
        is_text = FIELD_TYPES.get(name) is ctypes.c_char_p
        if not (isinstance(value, str) and value and "\0" not in value if is_text else
                isinstance(value, bool) or (is_whole(value) and 0 <= value < 1 << 31)):
            raise ArgumentError(f"nccl: {name}={value!r} is not {'a text' if is_text else 'a number, 0 or more'}",
                                code="GC-OPTION")
    return {name: value if isinstance(value, str | bool) else int(value) for name, value in given.items()}


def written(config: Any, settings: Mapping[str, Any]) -> Any:
    """Return `config`, an `NcclConfig` of CuPy, after writing these settings into it.

    CuPy's class takes ``split_share`` alone. It has NCCL's struct inside, found here by the struct's magic number.
    BackendError if the struct has no such setting.
    """
    head = ctypes.string_at(id(config), config.__sizeof__())
    at = head.find(NCCL_MAGIC.to_bytes(4, "little")) - NcclFields.magic.offset
    fields = NcclFields.from_address(id(config) + at) if at >= 0 else None
    for name, value in settings.items():
        if fields is None or getattr(NcclFields, name).offset + getattr(NcclFields, name).size > fields.size:
            raise BackendError(f"nccl: CuPy's NCCL has no setting {name}; it needs CuPy 14, built for NCCL 2.27",
                               code="GC-NCCL")
        setattr(fields, name, _kept(value) if isinstance(value, str) else int(value))
    return config


@functools.cache
def _kept(text: str) -> bytes:
    """Return the bytes of `text`, kept for ever: NCCL reads them by their address."""
    return text.encode()
