"""Host arrays of objects that have DLPack and no other way to their memory."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy


class _Asked:
    """What NumPy asks for a DLPack capsule in place of the object that gives it: keeps the capsule."""

    def __init__(self, x: Any) -> None:
        self.x, self.capsule = x, None

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        self.capsule = self.x.__dlpack__(**options)
        return self.capsule


class _Held:
    """The memory of an array, to be written; `array` is let go of before `capsule`, with which some exporters free."""

    __slots__ = ("__array_interface__", "array", "capsule")

    def __init__(self, array: numpy.ndarray[Any, Any], capsule: object) -> None:
        interface = array.__array_interface__
        self.array, self.capsule = array, capsule
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def of_dlpack(x: Any) -> numpy.ndarray[Any, Any]:
    """Return the array of an object that has DLPack alone; read-only where the object says so.

    Before its version 1.0 DLPack cannot say so, and NumPy takes all such arrays for read-only: these are writable here.
    """
    asked = _Asked(x)
    array = numpy.from_dlpack(asked)
    is_unversioned = ctypes.pythonapi.PyCapsule_IsValid(ctypes.py_object(asked.capsule), b"used_dltensor")
    return array if array.flags.writeable or not is_unversioned else numpy.asarray(_Held(array, asked.capsule))
