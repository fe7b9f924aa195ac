"""NCCL as `cupy.cuda.nccl`, by MPI messages; errors have NCCL's numbers.

A call outside of a group is a group of its own, and only `groupEnd` enqueues work. Rules of NCCL: valid dtypes, ops,
ranks, addresses and communicators, a stream of the communicator's GPU, a receive for every send to self, the same call
with the same arguments on all ranks, and by default a GPU for each rank.
"""

import concurrent.futures
import contextlib
import os
import threading
import types
import weakref

import numpy

from gpucoll.device import gpus

from .. import _memory, _windows, _wire
from .._config import NcclConfig
from .._connect import Connections, SharedResources, Truncated
from .._machine import MACHINE, CUDARuntimeError, on_device
from .._operations import KINDS, PAIRS, EnqueuedCollective, EnqueuedMessage, Launch, reduced
from .._order import touched
from ..hostile import capability, nccl_version, on, report
from . import runtime

available = True
get_version = get_build_version = nccl_version
NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG = range(5)
NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32, NCCL_INT64, NCCL_UINT64, NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64, \
    NCCL_BFLOAT16 = range(10)
NCCL_CHAR, NCCL_INT, NCCL_HALF = NCCL_INT8, NCCL_INT32, NCCL_FLOAT16
NCCL_FLOAT, NCCL_DOUBLE = NCCL_FLOAT32, NCCL_FLOAT64
_FLOAT8 = 10  # the first float8 dtype

_last_error = ""
_communicators = weakref.WeakValueDictionary()  # by a number in place of an ncclComm's address


class _Local(threading.local):
    """The open group of a thread: nesting depth, calls, and the latest error."""

    depth, calls, error = 0, (), None


_local = _Local()


class NcclError(RuntimeError):
    def __init__(self, status):
        self.status = status
        super().__init__(status)

    def __str__(self):
        return f"NCCL error {self.status}: the machine's words"


def _refuse(status, words):
    global _last_error
    _last_error = words
    raise NcclError(status)


def get_unique_id():
    return _wire.make_id()


def groupStart():
    _local.depth += 1


def groupEnd():
    if not _local.depth:
        _refuse(5, "ncclGroupEnd: not in a group call.")
    _local.depth -= 1
    if _local.depth == 0:
        calls, error = _local.calls, _local.error
        _local.calls, _local.error = (), None
        # As in NCCL, an error in a group leaves all calls of the group undone.
        if error:
            raise error
        groups = {comm: [call for call in calls if call.comm is comm] for comm in {call.comm: None for call in calls}}
        if len(groups) > 1:  # of one thread: their connections wait for each other
            with concurrent.futures.ThreadPoolExecutor(len(groups)) as threads:
                list(threads.map(NcclCommunicator._connect, groups, groups.values()))
        for comm, mine in groups.items():
            with comm.family.entered():
                if len(groups) == 1:
                    comm._connect(mine)
                _enqueue(comm, mine)


def _enqueue(comm, calls):
    """Enqueue the calls of a group, all under way together; a send to self needs a receive from self."""
    itself = [call.sends for call in calls if isinstance(call, EnqueuedMessage) and call.peer == comm.rank_id()]
    if itself.count(True) != itself.count(False):
        _refuse(5, "Trying to send to self without a matching recv, or to receive without a send")
    queue, *others = queues = [*{comm._queue(call): None for call in calls}]
    for one in queues:
        if one.device != comm.device_id():
            _refuse(4, f"a stream of GPU {one.device} for a communicator on GPU {comm.device_id()}")
    MACHINE.submit(queue, Launch(comm, calls), kernel=True, after=[(other, other.issued) for other in others])
    spans = [[(place.ctypes.data, place.ctypes.data + place.nbytes) for call in calls
              if (place := getattr(call, use)) is not None] for use in ("source", "target")]
    touched(queue, *spans)
    for other in others:  # as in NCCL, all streams of a group wait for it
        MACHINE.submit(other, lambda: lambda: True, after=[(queue, queue.issued)])


class NcclCommunicator:
    def __init__(self, ndev, commId, rank, config=None):
        self.comm = 0
        if not isinstance(commId, bytes):
            raise TypeError(f"Argument 'commId' has incorrect type {type(commId)}")
        if len(commId) != 128:
            raise ValueError(f"commId length {len(commId)} != 128.")
        device = MACHINE.use()
        mpi, spots = _wire.meet(ndev, bytes(commId), rank, runtime.deviceGetPCIBusId(device))
        if len(set(spots)) < len(spots) and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
            _refuse(5, "Duplicate GPU detected : two ranks on one CUDA device")
        self._begin(device, mpi, rank, ndev, config or NcclConfig(), SharedResources())

    @staticmethod
    def initAll(devices):
        """Return the communicators of this process's GPUs, given by their number or as a list."""
        devices = [*range(devices)] if isinstance(devices, int) else [*devices]
        name, found = _wire.make_id(here=True), []
        for rank, device in enumerate(devices):
            with on_device(device):
                mpi = None if len(devices) == 1 else _wire.by_files(name, rank, len(devices))
                found.append(NcclCommunicator.__new__(NcclCommunicator)._begin(
                    MACHINE.use(), mpi, rank, len(devices), NcclConfig(), SharedResources()))
        return found

    def _begin(self, device, mpi, rank, size, config, family):
        self._device, self.fields = device, config.fields()
        self.mpi, self.wire, self.config, self.family = mpi, _wire.Wire(rank, size, mpi), config, family
        self.graphs, self.destroying, self.error = 0, False, None
        self.windows = _windows.WindowTable()
        self._connections = Connections(rank, size)
        self.comm = next(MACHINE.handles)
        _communicators[self.comm] = self
        return self

    def commSplit(self, color, key, config=None):
        """Return the communicator of the ranks of the same color; the parent's configuration decides on sharing."""
        self._usable()
        if self.family.ended < self.family.issued:
            report("ncclCommSplit with work of the communicator under way")
        alone = self.mpi is None
        mpi = None if alone else self.mpi.Split(_wire.undefined(self.mpi) if color == -1 else color, key)
        if color == -1:
            return None
        family = self.family if self.fields.get("splitShare") else SharedResources()
        return NcclCommunicator.__new__(NcclCommunicator)._begin(
            self._device, mpi, 0 if alone else mpi.rank, 1 if alone else mpi.size, config or self.config, family)

    def _usable(self):
        if not self.comm:
            _refuse(4, "comm is NULL: it was destroyed or aborted")
        return self

    def _place(self, address, nbytes):
        try:
            return _memory.view(address, nbytes, self._device)
        except CUDARuntimeError as error:
            _refuse(4, str(error))

    def _connect(self, calls):
        """Wait for peers in new directions, blocking the calling thread; only an abort ends the wait."""
        if not on("connect"):
            return
        peers = [{call.peer for call in calls if isinstance(call, EnqueuedMessage) and call.sends is sends}
                 for sends in (True, False)]
        for call in calls:
            for mine, others in zip(peers, getattr(call, "reaches", ()), strict=False):
                mine.update(others)
        collective = get_version() >= 22200 and any(getattr(call, "reaches", None) == () for call in calls)
        messages = self.wire.put, lambda peer, tag: self.wire.take(peer, tag, self._not_aborted)
        try:
            self._connections.reach(*peers, collective, *messages)
            if any(isinstance(call, EnqueuedCollective) and self._queue(call).capture for call in calls):
                self._connections.register(*messages)
        except Truncated as error:
            _refuse(3, str(error))

    def _queue(self, call):
        """Return the stream of a call; the null stream is that of this communicator's GPU."""
        return MACHINE.queues[self._device] if call.stream in (0, 1) else MACHINE.queue(call.stream)

    def _meet_all(self):
        """Meet the neighbours of the ring, in a call made by all ranks."""
        self._connections.register(self.wire.put, lambda peer, tag: self.wire.take(peer, tag, self._not_aborted))

    def _not_aborted(self):
        if self.family.aborted:
            _refuse(3, "the communicator was aborted")

    def _wait_for_graphs(self):
        while on("graphs_alive") and self.graphs:
            threading.Event().wait(1e-3)

    def destroy(self):
        """Wait for the end of all enqueued work and of all graphs, then free the communicator."""
        if self.comm:
            self.destroying = True
            if self.windows.places:
                report("ncclCommDestroy of a communicator that has windows")
            # Poll, so that an abort by another thread ends the wait.
            while self.family.ended < self.family.issued and not self.family.aborted and MACHINE.fault is None:
                MACHINE.hurry = True
                MACHINE.help()
                threading.Event().wait(1e-3)
            self._wait_for_graphs()
            self.comm = 0
            if self.mpi is not None and not self.family.aborted:
                self.mpi.Free()

    def abort(self):
        if self.comm:
            if self.destroying and on("graphs_alive"):
                report("ncclCommAbort of a communicator while ncclCommDestroy is at work on it")
            self.family.aborted, self.comm = True, 0
            self._wait_for_graphs()

    def device_id(self):
        return self._usable()._device

    def size(self):
        return self._usable().wire.size

    def rank_id(self):
        return self._usable().wire.rank

    def check_async_error(self):
        self._usable()
        if self.error is not None:
            _refuse(6, str(self.error))
        if MACHINE.fault is not None and not on("codes"):  # NCCL reports network faults, not kernel faults
            _refuse(1, repr(MACHINE.fault))

    @contextlib.contextmanager
    def _calling(self, datatype, op=None, peer=0):
        """Yield the bytes of an element, and enqueue the call at the end unless a group is open.

        An error inside of a group is raised at once, and again at the end of the group.
        """
        groupStart()
        try:
            self._usable()
            if not 0 <= datatype < len(KINDS) or not 0 <= (op or 0) < len(PAIRS) or not 0 <= peer < self.wire.size:
                _refuse(4, f"dtype {datatype}, op {op}, rank {peer}")
            if datatype >= _FLOAT8 and on("float8"):
                if get_version() < 22400:
                    _refuse(4, f"dtype {datatype} is unknown to NCCL {get_version()}")
                if op is not None and int(capability()) < 90:
                    _refuse(4, "FP8 reduction support begins with sm90 capable devices.")
            yield KINDS[datatype].itemsize
        except NcclError as error:
            _local.error = error
            groupEnd()
            raise
        groupEnd()

    def _message(self, sends, address, count, datatype, peer, stream):
        with self._calling(datatype, peer=peer) as width:
            _local.calls += (EnqueuedMessage(self, sends, address, count * width, datatype, peer, stream),)

    def send(self, sendbuf, count, datatype, peer, stream):
        self._message(True, sendbuf, count, datatype, peer, stream)

    def recv(self, recvbuf, count, datatype, peer, stream):
        self._message(False, recvbuf, count, datatype, peer, stream)

    def _collective(self, name, source, target, given, taken, datatype, stream, form, op=None, root=0,
                    reaches=()):
        with self._calling(datatype, op, root) as width:
            _local.calls += (EnqueuedCollective(self, f"{name}{op or 0}{root}", source, target, given * width,
                                                taken * width, datatype, stream, form, reaches),)

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):
        self._collective("allReduce", sendbuf, recvbuf, count, count, datatype, stream,
                         lambda rooms: reduced(datatype, op, rooms), op)

    def reduce(self, sendbuf, recvbuf, count, datatype, op, root, stream):
        self._collective("reduce", sendbuf, recvbuf, count, count * (self.rank_id() == root), datatype, stream,
                         lambda rooms: reduced(datatype, op, rooms, root), op, root)

    def broadcast(self, sendbuff, recvbuff, count, datatype, root, stream):
        source = sendbuff if self.rank_id() == root else recvbuff
        self._collective("broadcast", source, recvbuff, count, count, datatype, stream, lambda rooms: rooms[root],
                         root=root)

    def bcast(self, buff, count, datatype, root, stream):
        self.broadcast(buff, buff, count, datatype, root, stream)

    def reduceScatter(self, sendbuf, recvbuf, recvcount, datatype, op, stream):
        self._collective("reduceScatter", sendbuf, recvbuf, recvcount * self.wire.size, recvcount, datatype, stream,
                         lambda rooms: numpy.split(reduced(datatype, op, rooms), len(rooms))[self.wire.rank], op)

    def allGather(self, sendbuf, recvbuf, count, datatype, stream):
        self._collective("allGather", sendbuf, recvbuf, count, count * self.wire.size, datatype, stream,
                         numpy.concatenate)

    # CuPy lacks these collectives: gpucoll calls the functions of the loaded library by ctypes.

    def _ncclAlltoAll(self, source, target, count, datatype, stream):
        everybody = set(range(self.wire.size))
        self._collective("ncclAlltoAll", source, target, count * self.wire.size, count * self.wire.size, datatype,
                         stream, lambda rooms: numpy.concatenate([room.reshape(len(rooms), -1)[self.wire.rank]
                                                                  for room in rooms]), reaches=(everybody, everybody))

    def _ncclGather(self, source, target, count, datatype, root, stream):
        is_root = self.wire.rank == root
        givers = set(range(self.wire.size)) if is_root else set()
        self._collective("ncclGather", source, target, count, count * self.wire.size * is_root, datatype, stream,
                         numpy.concatenate, root=root, reaches=({root}, givers))

    def _ncclScatter(self, source, target, count, datatype, root, stream):
        with self._calling(datatype, peer=root) as width:
            for peer in range(self.wire.size) if self.wire.rank == root else ():
                self.send(source + peer * width * count, count, datatype, peer, stream)
            self.recv(target, count, datatype, root, stream)


def _foreign(name, there=()):
    """Return a function of the library; a configuration of the call names one of the algorithms `there`."""
    def call(*arguments):
        *most, comm, stream, config = arguments if there else (*arguments, None)
        try:
            if comm not in _communicators:
                _refuse(4, f"{comm:#x} is no communicator")
            if there and not (config._obj.magic == 0xCAFEBEEF and config._obj.alg_selection in there):
                _refuse(4, f"algSelection {config._obj.alg_selection} cannot be honored for {name}")
            getattr(_communicators[comm], name)(*most, stream)
        except NcclError as error:
            return error.status
        return 0
    return call


def _library():
    """Return the functions of NCCL's library that CuPy lacks."""
    functions = {f"nccl{x}": _foreign(f"_nccl{x}") for x in ("AlltoAll", "Gather", "Scatter") if get_version() >= 22800}
    functions |= {f"nccl{x[0].upper()}{x[1:]}Config": _foreign(x, [b"ring", b"tree"][:1 + ("allR" in x)])
                  for x in ("allReduce", "reduce", "broadcast", "reduceScatter", "allGather") if get_version() >= 23100}
    functions |= _windows.functions(_communicators) if get_version() >= 22700 else {}
    return types.SimpleNamespace(**functions, ncclGetLastError=lambda _: _last_error.encode())


gpus.use({"libnccl.so.2": _library()})
