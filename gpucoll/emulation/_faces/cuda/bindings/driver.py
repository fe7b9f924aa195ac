"""Memory of CUDA's driver, after the driver API of CUDA 13: memory of the host, shared by processes.

Rules of CUDA: all GPUs join an object before memory is bound, sizes are multiples of the granularity, only reserved
addresses are mapped, memory is used after `cuMemSetAccess` alone, a handle has the kinds that its memory was made for,
and memory lives until the last handle and the last address have gone. A further rule of this machine: an object is
mapped after all memory has been bound. At a mapped object's address lies the table of kernels/device/multimem.h.

    EMULATED_SWITCH   1: the GPUs have multicast memory; "lossy": every load reduces the memory of one GPU; "fabric":
                      handles of the fabric as well; "unplugged": these, but the driver refuses to open them
"""

import ctypes
import enum
import fcntl
import mmap
import os
import struct
from types import SimpleNamespace

from gpucoll.device.gpus import cupy

MACHINE, Chunk, bytes_at = cupy._machine.MACHINE, cupy._memory.Chunk, cupy._memory.bytes_at

STEP = 1 << 16  # granularity in bytes
HEADER = struct.Struct("5q")  # mark, GPUs, GPUs joined, memory bound, bytes
MARK = 0x6D63
SLOT = struct.Struct("2q")  # process, descriptor
FABRIC = struct.Struct("=2q48x")  # a handle of the fabric: process, descriptor
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000
_reserved = {}  # bytes by address, and what is mapped there
_chunks = {}  # memory of the GPU by address
open_handles = set()  # memory and objects not yet released


CUresult = enum.IntEnum("CUresult", {"CUDA_SUCCESS": 0, "CUDA_ERROR_INVALID_VALUE": 1, "CUDA_ERROR_OUT_OF_MEMORY": 2,
                                     "CUDA_ERROR_ILLEGAL_STATE": 401, "CUDA_ERROR_NOT_PERMITTED": 800})
OK, INVALID, NO_MEMORY, TOO_EARLY, FORBIDDEN = CUresult
CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED=132,
                                     CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED=128)
CUmulticastGranularity_flags = SimpleNamespace(CU_MULTICAST_GRANULARITY_MINIMUM=0)
CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1, CU_MEM_HANDLE_TYPE_FABRIC=8)
CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)


class _Located:
    __slots__ = ("location",)

    def __init__(self):
        self.location = SimpleNamespace()


CUmulticastObjectProp = type("CUmulticastObjectProp", (), {"__slots__": ("handleTypes", "numDevices", "size")})
CUmemAllocationProp = type("CUmemAllocationProp", (_Located,), {"__slots__": ("requestedHandleTypes", "type")})
CUmemAccessDesc = type("CUmemAccessDesc", (_Located,), {"__slots__": ("flags",)})
CUmemFabricHandle = type("CUmemFabricHandle", (), {"__slots__": ("data",)})


class _Handle:
    """Memory of a GPU, or a multicast object, for handles of `kind`: a file."""

    def __init__(self, file, nbytes, kind, *, is_object):
        self.file, self.nbytes, self.kind, self.is_object = file, nbytes, kind, is_object
        open_handles.add(self)

    def change(self, joined=0, bound=0):
        """Add to the counts of an object, and return its fields."""
        fcntl.lockf(self.file, fcntl.LOCK_EX)
        try:
            mark, gpus, there, full, nbytes = HEADER.unpack(os.pread(self.file, HEADER.size, 0))
            fields = mark, gpus, there + joined, full + bound, nbytes
            os.pwrite(self.file, HEADER.pack(*fields), 0)
        finally:
            fcntl.lockf(self.file, fcntl.LOCK_UN)
        return fields


def cuDeviceGet(ordinal):
    return OK, ordinal


def cuDeviceGetAttribute(attrib, dev):
    if attrib == CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED:
        return OK, int(os.environ.get("EMULATED_SWITCH") in ("fabric", "unplugged"))
    assert attrib == CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
    return OK, int("EMULATED_SWITCH" in os.environ)


def cuMulticastGetGranularity(prop, option):
    return OK, STEP


def cuMemGetAllocationGranularity(prop, option):
    return OK, STEP // 2


def cuMulticastCreate(prop):
    if prop.size % STEP or prop.numDevices < 1:
        return INVALID, None
    handle = _Handle(os.memfd_create("emulated"), prop.size, prop.handleTypes, is_object=True)
    os.pwrite(handle.file, HEADER.pack(MARK, prop.numDevices, 0, 0, prop.size), 0)
    return OK, handle


def cuMemExportToShareableHandle(handle, handleType, flags):
    if handle.kind != handleType:
        return INVALID, None
    if handleType == CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR:
        return OK, os.dup(handle.file)
    made = CUmemFabricHandle()
    made.data = FABRIC.pack(os.getpid(), handle.file)
    return OK, made


def cuMemImportFromShareableHandle(osHandle, shHandleType):
    if shHandleType == CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC:
        if os.environ["EMULATED_SWITCH"] == "unplugged":
            return FORBIDDEN, None
        process, number = FABRIC.unpack(osHandle)
        file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
    else:
        file = os.dup(osHandle)
    mark, *_, nbytes = HEADER.unpack(os.pread(file, HEADER.size, 0))
    is_object = mark == MARK
    return OK, _Handle(file, nbytes if is_object else os.fstat(file).st_size, shHandleType, is_object=is_object)


def cuMulticastAddDevice(mcHandle, dev):
    _, gpus, joined, _, _ = mcHandle.change(joined=1)
    return (OK,) if joined <= gpus else (INVALID,)


def cuMemCreate(size, prop, flags):
    if size % (STEP // 2) or prop.location.id != MACHINE.device():
        return INVALID, None
    file = os.memfd_create("emulated")
    os.ftruncate(file, size)
    return OK, _Handle(file, size, prop.requestedHandleTypes, is_object=False)


def cuMulticastBindMem(mcHandle, mcOffset, memHandle, memOffset, size, flags):
    _, gpus, joined, _, nbytes = mcHandle.change()
    if joined < gpus:
        return (TOO_EARLY,)
    if size != nbytes or size != memHandle.nbytes or size % STEP or memHandle.kind != mcHandle.kind:
        return (INVALID,)
    place = mcHandle.change(bound=1)[3] - 1
    os.pwrite(mcHandle.file, SLOT.pack(os.getpid(), memHandle.file), HEADER.size + place * SLOT.size)
    return (OK,)


def cuMulticastUnbind(mcHandle, dev, mcOffset, size):
    mcHandle.change(bound=-1)
    return (OK,)


def cuMemAddressReserve(size, alignment, addr, flags):
    start = _libc.mmap(None, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
    _reserved[start] = size, None
    return OK, start


def cuMemMap(ptr, size, offset, handle, flags):
    if _reserved.get(ptr) != (size, None) or size != handle.nbytes:
        return (INVALID,)
    if handle.is_object:
        _, gpus, _, bound, _ = handle.change()
        if bound < gpus:
            return (TOO_EARLY,)
        _map(ptr, size, -1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        places = []
        for number in range(gpus):
            process, file = SLOT.unpack(os.pread(handle.file, SLOT.size, HEADER.size + number * SLOT.size))
            there = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
            places.append(_libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, there, 0))
            os.close(there)
        if os.environ["EMULATED_SWITCH"] == "lossy":
            places = places[:1] * gpus
        ctypes.memmove(ptr, struct.pack(f"{1 + gpus}Q", gpus, *places), 8 * (1 + gpus))
    else:
        places = []
        _map(ptr, size, handle.file, mmap.MAP_SHARED)
    _reserved[ptr] = size, places
    return (OK,)


def cuMemSetAccess(ptr, size, desc, count):
    there, places = _reserved.get(ptr, (0, None))
    if places is None or (there, count) != (size, 1) or [one.location.id for one in desc] != [MACHINE.device()]:
        return (INVALID,)
    if not places:  # the table of an object is no memory
        _chunks[ptr] = Chunk(size, MACHINE.device(), bytes_at(ptr, size), unit=1)
    return (OK,)


def cuMemUnmap(ptr, size):
    if _reserved.get(ptr, (0, None))[1] is None:
        return (INVALID,)
    if ptr in _chunks:
        _chunks.pop(ptr).forget()
    for place in {*_reserved[ptr][1]}:
        _libc.munmap(place, size)
    _reserved[ptr] = size, None
    return (OK,)


def cuMemAddressFree(ptr, size):
    if _reserved.get(ptr) != (size, None):
        return (INVALID,)
    _libc.munmap(ptr, size)
    del _reserved[ptr]
    return (OK,)


def cuMemRelease(handle):
    os.close(handle.file)
    open_handles.remove(handle)
    return (OK,)


def _map(ptr, size, file, flags):
    assert _libc.mmap(ptr, size, mmap.PROT_READ | mmap.PROT_WRITE, flags | MAP_FIXED, file, 0) == ptr
