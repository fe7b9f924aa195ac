"""Multicast memory of the GPUs of a node: one address reads or writes the memory of all GPUs, by the NVLink switch.

Every rank allocates memory on its GPU and binds the memory to a common object of CUDA. Every rank maps the object at a
second address, used by the kernels of ``kernels/device/peer_multimem.cu`` only. Hopper GPUs and newer behind an
NVSwitch have such memory (NVLS). Source: CUDA's driver API, multicast object management.

CUDA exports the object as a file descriptor, and a descriptor has a meaning in its own process only. The kernel copies
a descriptor sent through a Unix socket into the receiving process.
"""

from __future__ import annotations

import array
import contextlib
import os
import secrets
import socket
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


class Lacking(Exception):
    """Some rank cannot take part: no rank has multicast memory."""


class MulticastMemory:
    """One rank's part in the multicast memory of `size` ranks, at least `nbytes` on each GPU."""

    def __init__(self, device: CudaDevice, rank: int, size: int, nbytes: int) -> None:
        self._device, self._rank, self._size, self._nbytes = device, rank, size, nbytes
        self._driver: Any = None
        self._object: Any = None  # the common object
        self._memory: Any = None  # this GPU's memory, bound to the object
        self._mapped: list[int] = []  # addresses
        self._bound = False

    def join(self, exchange: ExchangeNumbers) -> Generator[Pending, None, Multicast | None]:
        """Return the memory, or None if some rank cannot take part; a collective call.

        CUDA demands this order on all ranks together: all GPUs join the object before any memory is bound, and all
        memory is bound before the object is used.
        """
        try:
            yield from self._together(exchange, self._check)
            offer = yield from self._offered(exchange)
            yield from self._together(exchange, self._add_device, offer)
            yield from self._together(exchange, self._bind)
            yield from self._together(exchange, lambda: self._map(self._object))
        except Lacking:
            self.release()
            return None
        own, group = self._mapped
        return Multicast(own, group)

    def _together(self, exchange: ExchangeNumbers, act: Callable[..., Sequence[int] | None],
                  *arguments: Any) -> Generator[Pending, None, list[list[int]]]:
        """Do a step on all ranks and return the words of all ranks' results; raise Lacking if the step fails on some.

        `act` waits for no rank. Any error means that this rank lacks multicast memory.
        """
        try:
            with self._device.current:
                row = [1, *(act(*arguments) or ())]
        except Exception:
            row = [0]
        everybody = yield from exchange(row)
        if not all(one[0] for one in everybody):
            raise Lacking
        return [one[1:] for one in everybody]

    def _check(self) -> None:
        try:
            from gpucoll.device.gpus import driver

            attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
        # An old version of the package lacks the attribute.
        except (ImportError, AttributeError) as error:
            raise OSError(str(error)) from error
        self._driver = driver
        if not self._call("cuDeviceGetAttribute", attribute, self._call("cuDeviceGet", self._device.ordinal)):
            raise OSError("the GPU has no multicast memory")

    def _offered(self, exchange: ExchangeNumbers) -> Generator[Pending, None, int]:
        """Return this process's descriptor of the common object, made by rank 0; -1 if none came.

        All ranks connect before rank 0 waits for them: a rank in another container cannot connect.
        """
        offer: list[DescriptorOffer] = []
        connected: list[Any] = []
        try:
            words = yield from self._together(exchange, self._make if self._rank == 0 else lambda _: None, offer)
            name, self._nbytes = words[0][:2]
            yield from self._together(exchange, _connect if self._rank else lambda *_: None, connected, name)
            if self._rank != 0:
                return (yield from take(connected[0]))
            return (yield from self._give(offer[0]))
        # A deadline that has passed is an OSError, too, and ends the handshake.
        except GpucollError:
            raise
        except OSError:
            return -1
        finally:
            for one in (*offer, *connected):
                one.close()

    def _give(self, offer: DescriptorOffer) -> Generator[Pending, None, int]:
        """Give the other ranks the descriptor of the common object, and return the descriptor."""
        with self._device.current:
            descriptor = int(self._call("cuMemExportToShareableHandle", self._object, self._by_descriptor(), 0))
        try:
            yield from offer.give(descriptor, self._size - 1)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _make(self, offer: list[DescriptorOffer]) -> Sequence[int]:
        """Make the common object and the offer on rank 0; return the offer's name and the bytes of the object."""
        driver, wanted = self._driver, self._object_properties()
        step = max(self._call("cuMulticastGetGranularity", wanted,
                              driver.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_MINIMUM),
                   self._call("cuMemGetAllocationGranularity", self._memory_properties(),
                              driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM))
        self._nbytes = wanted.size = -(-self._nbytes // step) * step
        self._object = self._call("cuMulticastCreate", wanted)
        offer.append(DescriptorOffer())
        return offer[0].name, self._nbytes

    def _add_device(self, descriptor: int) -> None:
        if descriptor < 0:
            raise OSError("no descriptor has come")
        try:
            if self._rank != 0:
                self._object = self._call("cuMemImportFromShareableHandle", descriptor, self._by_descriptor())
        finally:
            os.close(descriptor)
        self._call("cuMulticastAddDevice", self._object, self._call("cuDeviceGet", self._device.ordinal))

    def _bind(self) -> None:
        """Allocate memory, map it for this rank alone, and bind it to the common object."""
        self._memory = self._call("cuMemCreate", self._nbytes, self._memory_properties(), 0)
        self._map(self._memory)
        self._call("cuMulticastBindMem", self._object, 0, self._memory, 0, self._nbytes, 0)
        self._bound = True

    def _map(self, memory: Any) -> None:
        driver = self._driver
        start = self._call("cuMemAddressReserve", self._nbytes, 0, 0, 0)
        try:
            self._call("cuMemMap", start, self._nbytes, 0, memory, 0)
        except OSError:
            self._call("cuMemAddressFree", start, self._nbytes)
            raise
        self._mapped.append(int(start))
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self._device.ordinal
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call("cuMemSetAccess", start, self._nbytes, [access], 1)

    def _object_properties(self) -> Any:
        wanted = self._driver.CUmulticastObjectProp()
        wanted.numDevices, wanted.size = self._size, self._nbytes
        wanted.handleTypes = self._by_descriptor()
        return wanted

    def _memory_properties(self) -> Any:
        driver = self._driver
        wanted = driver.CUmemAllocationProp()
        wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        wanted.location.id = self._device.ordinal
        wanted.requestedHandleTypes = self._by_descriptor()  # as of the object
        return wanted

    def _by_descriptor(self) -> Any:
        return self._driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the driver; return its result, or raise OSError."""
        try:
            code, *results = getattr(self._driver, name)(*arguments)
        # The package has functions and attributes that an older driver lacks.
        except RuntimeError as error:
            raise OSError(str(error)) from error
        if int(code) != 0:
            raise OSError(f"{name}: {code!r}")
        return results[0] if results else None

    def close(self) -> None:
        """Unmap the memory; idempotent. No kernel of this rank may still use the memory."""
        for start in self._mapped:
            self._try("cuMemUnmap", start, self._nbytes)
            self._try("cuMemAddressFree", start, self._nbytes)
        self._mapped.clear()

    def free(self) -> None:
        """Release the memory once all ranks have unmapped the object; idempotent."""
        if self._bound:
            self._try("cuMulticastUnbind", self._object, self._device.ordinal, 0, self._nbytes)
        for handle in (self._memory, self._object):
            if handle is not None:
                self._try("cuMemRelease", handle)
        self._bound, self._memory, self._object = False, None, None

    def release(self) -> None:
        """Give up memory that no kernel has used on any rank."""
        self.close()
        self.free()

    def _try(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver; an error must not keep this rank from the other ranks' next step."""
        with self._device.current, contextlib.suppress(OSError):
            self._call(name, *arguments)


def _connect(connected: list[Any], name: int) -> None:
    connected.append(reach(name))


class DescriptorOffer:
    """A descriptor on offer to processes of this user; `name` is a number for `reach`."""

    def __init__(self) -> None:
        self.name: int = secrets.randbits(NAME_BITS)
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(_place(self.name))
            self._listener.listen()
        except OSError:
            self._listener.close()
            raise

    def give(self, descriptor: int, count: int) -> Generator[Pending, None, None]:
        """Send the descriptor to `count` processes; a connection of another user is closed and not counted."""
        while count:
            while not is_readable(self._listener):
                yield lambda: is_readable(self._listener)
            connected, _ = self._listener.accept()
            with connected:
                if belongs_to_user(connected):
                    socket.send_fds(connected, [b"\0"], [descriptor])
                    count -= 1

    def close(self) -> None:
        self._listener.close()


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


def take(connected: socket.socket) -> Generator[Pending, None, int]:
    """Return the descriptor sent through a connection, and close the connection; raise OSError if none comes."""
    with connected:
        while not is_readable(connected):
            yield lambda: is_readable(connected)
        _, descriptors, _, _ = socket.recv_fds(connected, 1, array.array("i").itemsize)
    if len(descriptors) != 1:
        raise OSError("the other process has closed the connection")
    return descriptors[0]


def _place(name: int) -> str:
    # The leading zero byte makes the name abstract: no file remains.
    return f"\0gpucoll-descriptor-{name:016x}"
