"""GPU memory that all ranks of a node map: each at an address of its own, and all at once by the NVLink switch.

Every rank makes memory by CUDA's driver, gives the other ranks a handle of it, and maps the memory of all ranks. Every
rank also binds its memory to a common object of CUDA, and maps the object: one address then reads or writes the memory
of all GPUs. Only the kernels of ``kernels/device/peer_multimem.cu`` use this address. Hopper GPUs and newer behind an
NVSwitch have such multicast memory (NVLS). Source: CUDA's driver API, virtual memory and multicast object management.

A handle is 64 bytes where the GPUs form a fabric and the driver permits it; else a file descriptor, with a meaning in
its own process only. The kernel copies a descriptor sent through a Unix socket into the receiving process.
"""

from __future__ import annotations

import array
import contextlib
import functools
import itertools
import os
import secrets
import socket
import struct
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from gpucoll.errors import GpucollError
from gpucoll.executors.peer.tables import Multicast
from gpucoll.progress.operations import Pending
from gpucoll.transport.connections import belongs_to_user, is_readable

if TYPE_CHECKING:
    from gpucoll.device.cuda import CudaDevice

# Exchange words: return the words of every rank, in rank order.
ExchangeNumbers: TypeAlias = Callable[[Sequence[int]], Generator[Pending, None, list[list[int]]]]
NAME_BITS = 62  # of the name of an offer
_FABRIC = struct.Struct("=8q")  # the words of a handle of the fabric
_SERIALS = itertools.count(1)  # of memory


class Lacking(Exception):
    """Some rank cannot take part: no rank has the memory."""


class MemoryDriver:
    """CUDA's driver on the GPU of `rank`, one of `size`, for memory that all ranks map.

    `agree` sets the kind of the handles, and the `step`: memory is a multiple of this number of bytes.
    """

    def __init__(self, device: CudaDevice, rank: int, size: int, *, by_fabric: bool) -> None:
        self.device, self.rank, self.size, self.by_fabric = device, rank, size, by_fabric
        self.names: Any = None  # the package of CUDA's driver
        self.kind: Any = None
        self.step = 0

    def agree(self, exchange: ExchangeNumbers) -> Generator[Pending, None, None]:
        """Find the properties common to all ranks; raise Lacking if a rank has no multicast memory."""
        self.step = max(row[0] for row in (yield from self.together(exchange, self._look)))

    def together(self, exchange: ExchangeNumbers, act: Callable[..., Sequence[int] | None],
                 *arguments: Any) -> Generator[Pending, None, list[list[int]]]:
        """Do a step on all ranks and return the words of all ranks' results; raise Lacking if the step fails on some.

        `act` waits for no rank. Any error means that this rank lacks the memory.
        """
        try:
            with self.device.current:
                row = [1, *(act(*arguments) or ())]
        except Exception:
            row = [0]
        everybody = yield from exchange(row)
        if not all(one[0] for one in everybody):
            raise Lacking
        return [one[1:] for one in everybody]

    def _look(self) -> Sequence[int]:
        try:
            from gpucoll.device.gpus import driver

            self.names, gives = driver, driver.CUdevice_attribute
            wanted = [gives.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED]
            self.kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            if self.by_fabric:
                wanted.append(gives.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED)
                self.kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
        # An old version of the package lacks the attribute.
        except (ImportError, AttributeError) as error:
            raise OSError(str(error)) from error
        gpu = self.call("cuDeviceGet", self.device.ordinal)
        if not all(self.call("cuDeviceGetAttribute", one, gpu) for one in wanted):
            raise OSError("the GPU has no such memory")
        return [max(self.call("cuMulticastGetGranularity", self.object_properties(0),
                              driver.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_MINIMUM),
                    self.call("cuMemGetAllocationGranularity", self.memory_properties(),
                              driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM))]

    def map(self, memory: Any, nbytes: int) -> int:
        """Return the address at which this GPU reads and writes the memory from now on."""
        names, start = self.names, self.call("cuMemAddressReserve", nbytes, 0, 0, 0)
        try:
            self.call("cuMemMap", start, nbytes, 0, memory, 0)
        except OSError:
            self.call("cuMemAddressFree", start, nbytes)
            raise
        access = names.CUmemAccessDesc()
        access.location.type = names.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.device.ordinal
        access.flags = names.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        try:
            self.call("cuMemSetAccess", start, nbytes, [access], 1)
        except OSError:
            self.unmap(int(start), nbytes)
            raise
        return int(start)

    def unmap(self, start: int, nbytes: int) -> None:
        """Undo `map`; unlike `cudaFree`, CUDA waits for no kernel."""
        self.attempt("cuMemUnmap", start, nbytes)
        self.attempt("cuMemAddressFree", start, nbytes)

    def object_properties(self, nbytes: int) -> Any:
        wanted = self.names.CUmulticastObjectProp()
        wanted.numDevices, wanted.size, wanted.handleTypes = self.size, nbytes, self.kind
        return wanted

    def memory_properties(self) -> Any:
        names = self.names
        wanted = names.CUmemAllocationProp()
        wanted.type = names.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.location.type = names.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        wanted.location.id = self.device.ordinal
        wanted.requestedHandleTypes = self.kind  # as of the object
        return wanted

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the driver; return its result, or raise OSError."""
        try:
            code, *results = getattr(self.names, name)(*arguments)
        # The package has functions and attributes that an older driver lacks.
        except RuntimeError as error:
            raise OSError(str(error)) from error
        if int(code) != 0:
            raise OSError(f"{name}: {code!r}")
        return results[0] if results else None

    def attempt(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver; an error must not keep this rank from the other ranks' next step."""
        with self.device.current, contextlib.suppress(OSError):
            self.call(name, *arguments)


class MulticastMemory:
    """A slab of zeros, at least `nbytes` on this GPU, that `join` maps on all ranks; raises OSError for lack of memory.

    The memory lives until the slab and all arrays on the slab are gone, and every rank has called `free`.
    """

    def __init__(self, driver: MemoryDriver, nbytes: int) -> None:
        self._driver = driver
        self.key: int = -next(_SERIALS)  # negative: no key of other memory
        self.nbytes: int = -(-nbytes // driver.step) * driver.step
        self._object: Any = None  # the common object, made by rank 0
        self._offer: DescriptorOffer | None = None
        self._mapped: list[int] = []  # addresses of the other ranks' memory, and of all
        self._bound = False
        with driver.device.current:
            self._handles: list[Any] = [driver.call("cuMemCreate", self.nbytes, driver.memory_properties(), 0)]
            try:
                self.start: int = driver.map(self._handles[0], self.nbytes)
                self.drop: Any = weakref.finalize(self, driver.device.after_all, functools.partial(
                    driver.unmap, self.start, self.nbytes))
                self.drop.atexit = False  # at exit CUDA may have ended already
                driver.device.clear(self.start, self.nbytes)
            except OSError:
                self.free()
                raise

    def export(self) -> list[int]:
        """Return the words that `join` needs on the other ranks; raise OSError if the driver refuses."""
        driver = self._driver
        with driver.device.current:
            if driver.rank == 0:
                # Without the object all ranks map the memory of each other, and have no address for all.
                with contextlib.suppress(OSError):
                    self._object = driver.call("cuMulticastCreate", driver.object_properties(self.nbytes))
                    self._handles.append(self._object)
            shared = [driver.call("cuMemExportToShareableHandle", one, driver.kind, 0) for one in self._handles]
        if driver.by_fabric:
            return [len(shared), *(word for one in shared for word in _FABRIC.unpack(bytes(one.data)))]
        self._offer = DescriptorOffer(shared)
        return [len(shared), self._offer.name]

    def join(self, exchange: ExchangeNumbers, everybody: Sequence[Sequence[int]]) -> \
            Generator[Pending, None, Multicast | None]:
        """Map the memory of all ranks, given each rank's result of `export`; None if some rank cannot. Collective.

        CUDA demands this order on all ranks together: all GPUs join the object before any memory is bound, and all
        memory is bound before the object is used.
        """
        together, addresses = self._driver.together, list[int]()
        try:
            given = yield from self._given(exchange, everybody)
            yield from together(exchange, self._map_all, given, addresses)
        except Lacking:
            self.unmap()
            return None
        finally:
            self._withdraw()
        group = 0
        with contextlib.suppress(Lacking):
            yield from together(exchange, self._add_device)
            yield from together(exchange, self._bind)
            yield from together(exchange, self._map_object)
            group = self._mapped[-1]
        return Multicast(self.start, group, addresses)

    def _given(self, exchange: ExchangeNumbers, everybody: Sequence[Sequence[int]]) -> \
            Generator[Pending, None, list[list[Any]]]:
        """Return the handles given by each rank, none of this rank.

        All ranks connect before a rank waits for them: a rank in another container cannot connect.
        """
        driver, found = self._driver, [list[Any]() for _ in everybody]
        others = [rank for rank in range(driver.size) if rank != driver.rank]
        if driver.by_fabric:
            for rank in others:
                count, *words = everybody[rank]
                found[rank] = [_FABRIC.pack(*words[8 * number:][:8]) for number in range(count)]
            return found
        connected: dict[int, socket.socket] = {}
        try:
            yield from driver.together(exchange, lambda: connected.update(
                (rank, reach(everybody[rank][1])) for rank in others))
            assert self._offer is not None
            yield from self._offer.give(len(others))
            for rank in others:
                found[rank] = yield from take(connected[rank], everybody[rank][0])
        # A deadline that has passed is an OSError, too, and ends the handshake.
        except GpucollError:
            raise
        except OSError:  # `_map_all` misses the handle, and tells the other ranks
            pass
        finally:
            for one in connected.values():
                one.close()
        return found

    def _map_all(self, given: Sequence[Sequence[Any]], addresses: list[int]) -> None:
        driver = self._driver
        try:
            for rank, handles in enumerate(given):
                if rank != driver.rank:
                    memory = driver.call("cuMemImportFromShareableHandle", handles[0], driver.kind)
                    try:
                        self._mapped.append(driver.map(memory, self.nbytes))
                    finally:
                        driver.attempt("cuMemRelease", memory)
                addresses.append(self.start if rank == driver.rank else self._mapped[-1])
            if len(given[0]) > 1:
                self._object = driver.call("cuMemImportFromShareableHandle", given[0][1], driver.kind)
                self._handles.append(self._object)
        finally:
            for one in () if driver.by_fabric else itertools.chain(*given):
                os.close(one)

    def _add_device(self) -> None:
        if self._object is None:
            raise OSError("rank 0 has made no object")
        driver = self._driver
        driver.call("cuMulticastAddDevice", self._object, driver.call("cuDeviceGet", driver.device.ordinal))

    def _bind(self) -> None:
        self._driver.call("cuMulticastBindMem", self._object, 0, self._handles[0], 0, self.nbytes, 0)
        self._bound = True

    def _map_object(self) -> None:
        self._mapped.append(self._driver.map(self._object, self.nbytes))

    def unmap(self) -> None:
        """Unmap the memory of others and of all; idempotent. No kernel of this rank may still use that memory."""
        for start in self._mapped:
            self._driver.unmap(start, self.nbytes)
        self._mapped.clear()

    def free(self) -> None:
        """Release the memory once all ranks have unmapped; idempotent. The last array on the slab still keeps it."""
        driver = self._driver
        if self._bound:
            driver.attempt("cuMulticastUnbind", self._object, driver.device.ordinal, 0, self.nbytes)
        for handle in self._handles:
            driver.attempt("cuMemRelease", handle)
        self._bound, self._object = False, None
        self._handles.clear()

    def close(self) -> None:
        """Give up memory that no other rank uses; arrays on the slab still keep it."""
        self._withdraw()
        self.unmap()
        self.free()

    def _withdraw(self) -> None:
        if self._offer is not None:
            self._offer.close()
            self._offer = None


class DescriptorOffer:
    """Descriptors on offer to processes of this user, closed by `close`; `name` is a number for `reach`."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._descriptors = descriptors
        self.name: int = secrets.randbits(NAME_BITS)
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(_place(self.name))
            self._listener.listen()
        except OSError:
            self.close()
            raise

    def give(self, count: int) -> Generator[Pending, None, None]:
        """Send the descriptors to `count` processes; a connection of another user is closed and not counted."""
        while count:
            while not is_readable(self._listener):
                yield lambda: is_readable(self._listener)
            connected, _ = self._listener.accept()
            with connected:
                if belongs_to_user(connected):
                    socket.send_fds(connected, [b"\0"], self._descriptors)
                    count -= 1

    def close(self) -> None:
        self._listener.close()
        for one in self._descriptors:
            os.close(one)


def reach(name: int) -> socket.socket:
    """Return a connection to the offer `name`; raise OSError if the offer is in another container, or another user's.
    """
    connected = socket.socket(socket.AF_UNIX)
    try:
        connected.connect(_place(name))
        if not belongs_to_user(connected):
            raise OSError("the socket belongs to another user")
    except OSError:
        connected.close()
        raise
    return connected


def take(connected: socket.socket, count: int) -> Generator[Pending, None, list[int]]:
    """Return the descriptors sent through a connection, and close the connection; raise OSError if fewer come."""
    with connected:
        while not is_readable(connected):
            yield lambda: is_readable(connected)
        _, descriptors, _, _ = socket.recv_fds(connected, 1, count * array.array("i").itemsize)
    if len(descriptors) != count:
        raise OSError("the other process has closed the connection")
    return descriptors


def _place(name: int) -> str:
    # The leading zero byte makes the name abstract: no file remains.
    return f"\0gpucoll-descriptor-{name:016x}"
