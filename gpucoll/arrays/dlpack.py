"""Host arrays of objects with DLPack as the only access to their memory."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy


class _Asked:
    """An object that NumPy asks for a DLPack capsule; it keeps the capsule of the object `x`."""

    def __init__(self, x: Any) -> None:
        self.x, self.capsule = x, None

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        self.capsule = self.x.__dlpack__(**options)
        return self.capsule


class _Held:
    """A view of an array's memory; keeps the array and the capsule alive.

    `array` is released before `capsule`, because some exporters free the memory, or what the array's end calls, with
    the capsule.
    """

    __slots__ = ("__array_interface__", "array", "capsule")

    def __init__(self, array: numpy.ndarray[Any, Any], capsule: object, is_readonly: bool) -> None:
        interface = array.__array_interface__
        self.array, self.capsule = array, capsule
        self.__array_interface__ = {**interface, "data": (interface["data"][0], is_readonly)}


def of_dlpack(x: Any) -> numpy.ndarray[Any, Any]:
    """Return the array of an object with DLPack alone; read-only where the object says so.

    DLPack before version 1.0 cannot mark an array as read-only, and NumPy makes every array without this mark
    read-only. Here these arrays are writable.
    """
    asked = _Asked(x)
    array = numpy.from_dlpack(asked)
    is_unversioned = ctypes.pythonapi.PyCapsule_IsValid(ctypes.py_object(asked.capsule), b"used_dltensor")
    return numpy.asarray(_Held(array, asked.capsule, not (array.flags.writeable or is_unversioned)))
