"""Ray's collective groups by gpucoll: `register` makes ``"gpucoll"`` a backend of `ray.util.collective`.

Needs Ray (extra ``ray``). The actors of a group need no MPI: they connect to a store in the process of rank 0, and UCX
or the store carries messages between hosts. Until all actors have connected, the address of the store is in Ray's
key-value table.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
from typing import Any

import numpy
import ray
from ray.experimental import internal_kv
from ray.util.collective import get_group_handle, is_backend_available
from ray.util.collective.backend_registry import register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import ReduceOp

from gpucoll.arrays import address, as_array, at, module_of
from gpucoll.communicator import Communicator, new_world
from gpucoll.core.ops import OpName
from gpucoll.errors import ArgumentError, CollectiveTimeout, UsageError
from gpucoll.internal import current_stream, refusing
from gpucoll.launch import bootstrap
from gpucoll.launch.launchers import free_port
from gpucoll.launch.places import StorePlace
from gpucoll.transport.connections import connect
from gpucoll.transport.rendezvous import becomes

BACKEND = "gpucoll"
RAY_OPS: dict[Any, OpName] = {ReduceOp.SUM: "sum", ReduceOp.PRODUCT: "prod", ReduceOp.MIN: "min", ReduceOp.MAX: "max"}
KEY_INTERVAL = 0.02  # seconds between two looks at Ray's table of keys
STORE_TIMEOUT = 1.0  # seconds for a connection to the store of rank 0
_options: dict[str, Any] = {}  # of this process' groups, as given to `register`


def register(**options: Any) -> None:
    """Make ``"gpucoll"`` a backend of `ray.util.collective` in this process; idempotent.

    Ray needs the backend in the driver's process and in the process of each actor: call `register` in both.
    ``init_collective_group(size, rank, "gpucoll", name)`` then makes a group, and Ray's functions work on arrays of
    NumPy and CuPy and on PyTorch's tensors. As in Ray's own groups a read-only array of NumPy, such as an actor's
    argument, is a place for results. `communicator` gives all collectives that Ray has no function for.

    Parameters
    ----------
    **options : object
        Those of `gpucoll.init`, for the groups made later in this process; ``timeout`` also limits the time to meet.

    Raises
    ------
    ArgumentError or UsageError
        A wrong option (GC-TIMEOUT, GC-OPTION, GC-EXECUTOR).

    See Also
    --------
    communicator : The rank's communicator.

    Examples
    --------
    >>> import gpucoll.ray
    >>> try:
    ...     gpucoll.ray.register(timeout=-1)
    ... except ValueError as error:
    ...     print(error.code)
    GC-TIMEOUT
    """
    bootstrap.options(options)  # checked here, not in the first group
    _options.clear()
    _options.update(options)
    if not is_backend_available(BACKEND):
        register_collective_backend(BACKEND, Group)


def communicator(group_name: str = "default") -> Communicator:
    """Return the communicator of this actor in a group of the backend ``"gpucoll"``, with its rank and all calls.

    Parameters
    ----------
    group_name : str, optional
        The name given to ``init_collective_group``.

    Returns
    -------
    Communicator
        The communicator of the group.

    Raises
    ------
    UsageError
        The group has another backend (GC-GROUP).
    RuntimeError
        Ray's error: there is no such group.

    See Also
    --------
    register : Before the group is made.

    Examples
    --------
    >>> import gpucoll.ray
    >>> def mean(x):  # in an actor, after init_collective_group(size, rank, "gpucoll", "workers")
    ...     return gpucoll.ray.communicator("workers").all_reduce(x, op="avg")
    """
    group = get_group_handle(group_name)
    if not isinstance(group, Group):
        raise UsageError(f"group {group_name!r} has Ray's backend {group.backend()}, not {BACKEND}", code="GC-GROUP")
    return group.communicator


class Group(BaseGroup):
    """A group of actors, made by Ray in each actor. Ray passes every tensor in a list of one."""

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        wanted = bootstrap.options(_options)
        # Ray's table of keys serves all jobs of the cluster.
        key = " ".join((BACKEND, ray.get_runtime_context().get_job_id(), group_name))
        if rank:
            self.communicator: Communicator = new_world(wanted, _announced(key, rank, world_size, wanted.timeout))
            return
        place = StorePlace(0, world_size, secrets.token_hex(16), (ray.util.get_node_ip_address(), free_port()))
        internal_kv._internal_kv_put(key, json.dumps([place.token, place.address]))
        try:
            self.communicator = new_world(wanted, place)
        finally:  # a later group of this name must not find this place
            internal_kv._internal_kv_del(key)

    @classmethod
    def backend(cls) -> str:
        """Return the name of the backend, as Ray writes it."""
        return BACKEND.upper()

    @classmethod
    def check_backend_availability(cls) -> bool:
        """Return True: the backend needs nothing beside this package."""
        return True

    def destroy_group(self) -> None:
        """Close the communicator in a thread: with Ray each actor leaves alone, and `close` waits for all ranks."""
        threading.Thread(target=self.communicator.close, name="gpucoll close", daemon=True).start()

    def allreduce(self, tensor: list[Any], allreduce_options: Any) -> None:
        """Reduce the tensors of all ranks, in place."""
        x = _writable(tensor[0])
        self.communicator.all_reduce(x, x, RAY_OPS[allreduce_options.reduceOp])

    def barrier(self, barrier_options: Any = None) -> None:
        """Return when every rank has called `barrier`."""
        self.communicator.barrier()

    def reduce(self, tensor: list[Any], reduce_options: Any) -> None:
        """Reduce the tensors of all ranks to the root's tensor; the others do not change."""
        root = reduce_options.root_rank
        x = _writable(tensor[0]) if root == self.rank else tensor[0]
        self.communicator.reduce(x, x if root == self.rank else None, RAY_OPS[reduce_options.reduceOp], root)

    def broadcast(self, tensor: list[Any], broadcast_options: Any) -> None:
        """Overwrite every rank's tensor with the root's."""
        self.communicator.broadcast(_writable(tensor[0]), broadcast_options.root_rank)

    def allgather(self, tensor_list: list[list[Any]], tensor: list[Any], allgather_options: Any = None) -> None:
        """Write each rank's tensor to a tensor of the list."""
        x, targets = tensor[0], [_writable(one) for one in tensor_list[0]]
        with refusing(self.communicator):
            _check_shapes("allgather", targets, x)
        result = self.communicator.all_gather(x)
        with current_stream(self.communicator, [x, *targets]):
            for target, row in zip(targets, result, strict=True):
                as_array("allgather", "tensor_list", target)[...] = row

    def reducescatter(self, tensor: list[Any], tensor_list: list[list[Any]], reducescatter_options: Any) -> None:
        """Reduce the lists of all ranks tensor by tensor, and write the result with this rank's number to `tensor`."""
        target, parts = _writable(tensor[0]), tensor_list[0]
        with refusing(self.communicator):
            _check_shapes("reducescatter", parts, target)
            with current_stream(self.communicator, [target, *parts]):
                rows = [as_array("reducescatter", "tensor_list", one) for one in parts]
                x = module_of(rows[0]).stack(rows)
        self.communicator.reduce_scatter(x, target, RAY_OPS[reducescatter_options.reduceOp])

    def send(self, tensor: list[Any], send_options: Any) -> None:
        """Send a tensor, for a `recv` of the other rank."""
        self.communicator.send(tensor[0], send_options.dst_rank)

    def recv(self, tensor: list[Any], recv_options: Any) -> None:
        """Receive a tensor sent by another rank."""
        self.communicator.recv(_writable(tensor[0]), recv_options.src_rank)


def _announced(key: str, rank: int, size: int, timeout: float) -> StorePlace:
    """Return the place announced by rank 0 under `key` in Ray's table, once a connection succeeds."""
    found: list[StorePlace] = []

    def is_open() -> bool:
        value = internal_kv._internal_kv_get(key)
        if value is not None:
            token, (host, port) = json.loads(value)
            # The place of a rank 0 that has died may still stand in the table.
            with contextlib.suppress(OSError):
                connect((host, port), STORE_TIMEOUT).socket.close()
                found.append(StorePlace(rank, size, token, (host, port)))
        return bool(found)

    if not becomes(is_open, timeout, KEY_INTERVAL):
        raise CollectiveTimeout(f"waited {timeout:g} s for rank 0 of {size}; did every actor of the group call "
                                "init_collective_group with the same name?", ranks=(0,))
    return found[0]


def _writable(x: Any) -> Any:
    """Return `x`; for a read-only array of NumPy a writable one on the same memory."""
    # Ray hands arrays to actors as read-only views, and Ray's own groups write results there.
    if isinstance(x, numpy.ndarray) and not x.flags.writeable and x.flags.c_contiguous and x.nbytes:
        return at(address(x), x.nbytes).view(x.dtype).reshape(x.shape)
    return x


def _check_shapes(name: str, tensors: list[Any], other: Any) -> None:
    """Raise ArgumentError for tensors of a list with another shape than the tensor beside the list."""
    shapes = [tuple(one.shape) for one in tensors]
    if {*shapes} != {tuple(other.shape)}:
        raise ArgumentError(f"{name}: the tensors of the list have shapes {shapes}, the tensor has shape "
                            f"{tuple(other.shape)}; all shapes must be equal", code="GC-SHAPE")
