"""A process group of torch.distributed; every method is a call of a communicator."""

from __future__ import annotations

import contextlib
import datetime
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch._C._distributed_c10d import Backend
from torch.distributed import DistBackendError, Store

from gpucoll import internal
from gpucoll.torch import checks, handles, membership
from gpucoll.torch.handles import Callback, Caller, JoinedWork, MessageWork, StreamWork, TorchWork, as_torch_raises
from gpucoll.torch.names import Names
from gpucoll.torch.tensors import apart, combined, cut, deliver, fill, moved, op_of, reduced, room, row

Tensor: TypeAlias = torch.Tensor
Tensors: TypeAlias = Sequence[Tensor]


class TorchProcessGroup(Names):
    """The backend "gpucoll": ranks meeting at `store`, with `timeout` as the deadline of every call.

    Made by ``torch.distributed.init_process_group("gpucoll")``. Results are written into the caller's tensors. A thread
    makes calls with ``async_op=True`` in order, while the program computes; calls on GPU tensors are enqueued on a side
    stream of the group.

    Parameters
    ----------
    store : torch.distributed.Store
        Where the ranks meet.
    rank : int
        This rank.
    size : int
        The number of ranks.
    timeout : timedelta
        The deadline of every call.

    Raises
    ------
    torch.distributed.DistBackendError
        Ranks fail or disagree.

    Examples
    --------
    >>> import torch.distributed
    >>> import gpucoll.torch
    >>> "gpucoll" in torch.distributed.Backend.backend_list
    True
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size)  # pybind11: the constructor with a store does not support Python subclasses
        self._store, self._rank, self._size = store, rank, size
        self.options: Any = Backend.Options("gpucoll", timeout)
        with as_torch_raises():
            self._comm, self._points = self._communicators(store, rank, size, timeout)
        self._caller = Caller()
        self._streams: dict[torch.device, Any] = {}
        self._together: list[TorchWork] | None = None  # the calls since `_start_coalescing`
        self._messages: list[tuple[handles.DeferredWork, Callback]] = []  # GPU messages among these calls
        self._count = 0

    _communicators = staticmethod(membership.communicators)

    def _make(self, call: Callback, tensors: Tensors, options: Any, outputs: Sequence[Any] | None = None) -> TorchWork:
        """Make or queue a call on `tensors` and return the handle; `outputs` are the result tensors (None: all)."""
        self._count += 1
        results = tensors if outputs is None else outputs
        if tensors and tensors[0].is_cuda:
            work: TorchWork = StreamWork(results, self._enqueue(call, tensors))
        else:
            at_once = self._together is None and not getattr(options, "asyncOp", True)
            work = self._caller.make(call, results, at_once=at_once)
        if self._together is not None:
            self._together.append(work)
        return work

    def _enqueue(self, call: Callback, tensors: Tensors) -> Any:
        """Enqueue a call on the group's side stream, after the work in the current stream; return the side stream."""
        device = tensors[0].device
        stream = self._side_stream(device)
        # The tensors may still be written by the current stream.
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream), as_torch_raises():
            call()
        # Keep torch's allocator from reusing a tensor's memory before the side stream has finished with the tensor.
        for tensor in tensors:
            tensor.record_stream(stream)
        return stream

    def _side_stream(self, device: torch.device) -> Any:
        """Return the group's side stream on a GPU; the first GPU becomes that of the communicators."""
        if not self._streams:
            for comm in (self._comm, self._points):
                internal.set_device(comm, device.index)
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def synchronize(self) -> None:
        """Wait for all work enqueued on the GPUs of the group's tensors, and for no other GPU."""
        for device in self._streams:
            torch.cuda.synchronize(device)

    # ------------------------------------------------------------ in place

    def broadcast(self, tensors: Any, opts: Any = None, root: int = 0) -> TorchWork:
        """Overwrite all tensors of all ranks with tensor number ``opts.rootTensor`` (default 0) of the root."""
        tensors, root, named = _listed(tensors), getattr(opts, "rootRank", root), getattr(opts, "rootTensor", 0)
        checks.root("broadcast", root, self._size, named, len(tensors))
        checks.alike("broadcast", tensors)
        x = moved(tensors[named])

        def call() -> None:
            self._comm.broadcast(x, root)
            for tensor in tensors:
                deliver(tensor, tensors[named])

        return self._make(call, tensors, opts)

    def allreduce(self, tensors: Any, opts: Any = None) -> TorchWork:
        """Overwrite a tensor with the reduction; several tensors are all reduced together and all overwritten."""
        tensors, op = _listed(tensors), op_of(opts)
        checks.alike("allreduce", tensors)
        together = None if len(tensors) == 1 else combined(op)
        rows = [reduced(tensor) for tensor in tensors]

        def call() -> None:
            for one in rows:
                self._comm.all_reduce(one, one, op)
            if together is not None:
                total = functools.reduce(together, [tensor.detach() for tensor in tensors])
                for tensor in tensors:
                    deliver(tensor, total)

        return self._make(call, tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> TorchWork:
        """Overwrite each tensor with the reduction of all ranks' tensors; a tensor listed twice is reduced once."""
        tensors, op = _listed(tensors), op_of(opts)
        checks.alike("allreduce_coalesced", tensors, sizes=False)
        rows = {(tensor.data_ptr(), tensor.numel()): reduced(tensor) for tensor in tensors}

        def call() -> None:
            for one in rows.values():
                self._comm.all_reduce(one, one, op)

        return self._make(call, tensors, opts)

    def reduce(self, tensors: Any, opts: Any) -> TorchWork:
        """Overwrite the root's tensor with the reduction."""
        tensors, op = _listed(tensors), op_of(opts)
        checks.root("reduce", opts.rootRank, self._size, opts.rootTensor, len(tensors))
        if len(tensors) != 1:
            checks.refuse("reduce", "requires a single-element tensor list")
        checks.dense("reduce", tensors)
        x = reduced(tensors[0])

        def call() -> None:
            self._comm.reduce(x, x if self._rank == opts.rootRank else None, op, opts.rootRank)

        return self._make(call, tensors, opts)

    def barrier(self, opts: Any = None) -> TorchWork:
        """Wait for all ranks; if the group has used a GPU, wait first for all work enqueued on this rank's GPU."""
        limit = getattr(opts, "timeout", None)

        def call() -> None:
            self.synchronize()
            with self._limited(limit):
                self._comm.barrier()

        return self._make(call, (), opts)

    def monitored_barrier(self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; at the deadline raise DistBackendError, which names all late ranks in either case."""
        def call() -> None:
            with self._limited(timeout):
                self._comm.barrier()

        self._caller.make(call, (), at_once=True).wait()

    @contextlib.contextmanager
    def _limited(self, timeout: datetime.timedelta | None) -> Iterator[None]:
        """Use `timeout` as the calls' deadline inside the context; None and torch's negative default change nothing."""
        waits = internal.waits_of(self._comm)
        usual = waits.timeout
        if timeout is not None and timeout.total_seconds() > 0:
            waits.timeout = timeout.total_seconds()
        try:
            yield
        finally:
            waits.timeout = usual

    # ------------------------------------------------------------ gathered and scattered

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> TorchWork:
        """Write all ranks' tensors, one after another, into `output`."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> TorchWork:
        """Gather several tensors at once, each into one output."""
        calls = []
        for output, input in zip(outputs, inputs, strict=True):
            out = room(output)
            x = apart(row(input), out)
            calls.append((output, out, moved(x), moved(out.view(self._size, -1) if out.numel() else out)))

        def call() -> None:
            for output, out, x, blocks in calls:
                if len(x):
                    self._comm.all_gather(x, blocks)
                deliver(output, out)

        return self._make(call, [*outputs, *inputs], opts, outputs)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> TorchWork:
        """Write this rank's block of the reduction into `output`."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> TorchWork:
        """Reduce and scatter several tensors at once."""
        op, calls = op_of(opts), []
        for output, input in zip(outputs, inputs, strict=True):
            out = room(output)
            x = apart(row(input), out)
            calls.append((output, out, reduced(x.view(self._size, -1) if x.numel() else x), reduced(out)))

        def call() -> None:
            for output, out, x, block in calls:
                if len(block):
                    self._comm.reduce_scatter(x, block, op)
                deliver(output, out)

        return self._make(call, [*outputs, *inputs], opts, outputs)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:
        """Write all ranks' tensors into lists of tensors; with one input the lengths may differ between ranks."""
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        checks.gathered("allgather", outputs, inputs, self._size)
        first, alike = outputs[0], len({target.numel() for target in outputs[0]}) == 1
        x = moved(row(inputs[0]) if len(inputs) == 1 else torch.cat([row(one) for one in inputs]))

        def call() -> None:
            blocks: Any = self._comm.all_gather(x) if alike else self._comm.all_gather_v(x)
            if len(inputs) > 1:
                blocks = blocks.reshape(len(first), -1)
            for targets in outputs:
                fill(targets, blocks)

        results = first if len(inputs) == 1 else outputs
        return self._make(call, [*inputs, *(one for targets in outputs for one in targets)], opts, results)

    def allgather_coalesced(self, outputs: Any, inputs: Tensors, opts: Any = None) -> TorchWork:
        """Gather several tensors at once; `outputs` has a list for each rank."""
        checks.gathered_together("allgather_coalesced", outputs, inputs, self._size)
        pairs = [(targets, moved(row(x))) for *targets, x in zip(*outputs, inputs, strict=True)]

        def call() -> None:
            for targets, x in pairs:
                fill(targets, self._comm.all_gather(x))

        return self._make(call, [*inputs, *(one for targets in outputs for one in targets)], opts, outputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> TorchWork:
        """Write all ranks' tensors into a list on the root."""
        outputs, inputs, at_root = _lists(outputs), _listed(inputs), self._rank == opts.rootRank
        checks.root("gather", opts.rootRank, self._size)
        checks.rooted("gather", "input", "output", inputs, outputs, self._size, at_root)
        x, targets = moved(row(inputs[0])), outputs[0] if at_root else []

        def call() -> None:
            blocks = self._comm.gather(x, root=opts.rootRank)
            if blocks is not None:
                fill(targets, blocks)

        return self._make(call, [*inputs, *targets], opts, targets)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> TorchWork:
        """Write tensor i of the root's list into the tensor of rank i."""
        outputs, inputs, at_root = _listed(outputs), _lists(inputs), self._rank == opts.rootRank
        checks.root("scatter", opts.rootRank, self._size)
        checks.rooted("scatter", "output", "input", outputs, inputs, self._size, at_root)
        out, sources = room(outputs[0]), inputs[0] if at_root else []
        block = moved(out)
        x = moved(torch.stack([row(one) for one in sources])) if at_root else None

        def call() -> None:
            self._comm.scatter(x, block, opts.rootRank)
            deliver(outputs[0], out)

        return self._make(call, [*outputs, *sources], opts, outputs)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:
        """Reduce list entry i of all ranks into the tensor of rank i; the entries' lengths may differ."""
        outputs, sources, op = _listed(outputs), _lists(inputs)[0], op_of(opts)
        out, counts = room(outputs[0]), [one.numel() for one in sources]
        block, x = reduced(out), torch.cat([row(one) for one in sources])
        blocks = reduced(x.view(self._size, -1)) if len({*counts}) == 1 and counts[0] else reduced(x)

        def call() -> None:
            if len({*counts}) > 1:
                fill([out], [self._comm.reduce_scatter_v(blocks, counts, op)])
            elif counts[0]:
                self._comm.reduce_scatter(blocks, block, op)
            deliver(outputs[0], out)

        return self._make(call, [*outputs, *sources], opts, outputs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> TorchWork:
        """Write list entry j of rank i into list entry i of rank j; all lengths may differ."""
        parts = [moved(row(one)) for one in inputs]

        def call() -> None:
            fill(outputs, self._comm.all_to_all_v(parts))

        return self._make(call, [*inputs, *outputs], opts, outputs)

    def all_to_all_single(self, output: Tensor, input: Tensor, output_split_sizes: Sequence[int] = (),
                          input_split_sizes: Sequence[int] = (), opts: Any = None) -> TorchWork:
        """Write part j of rank i into part i of rank j, cut along the first axis; without sizes parts are equal."""
        if output_split_sizes or input_split_sizes:
            target = room(output).view(output.shape)
            ends = cut(target, output_split_sizes, self._size)
            parts = [moved(row(one)) for one in cut(input, input_split_sizes, self._size)]

            def uneven() -> None:
                fill(ends, self._comm.all_to_all_v(parts))
                deliver(output, target)

            return self._make(uneven, [input, output], opts, [output])
        out = room(output)
        x = apart(row(input), out)
        blocks, results = (moved(one.view(self._size, -1) if one.numel() else one) for one in (x, out))

        def call() -> None:
            if len(x):
                self._comm.all_to_all(blocks, results)
            deliver(output, out)

        return self._make(call, [output, input], opts, [output])

    # PyTorch before 2.13 calls these methods by other names.
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ------------------------------------------------------------ messages between two ranks

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> TorchWork:
        """Send a tensor to rank `dst` of the group."""
        return self._message(tensors, lambda array: (self._points.send(array, dst, tag, async_op=True), dst))

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> TorchWork:
        """Receive a tensor from rank `src` of the group."""
        return self._message(tensors, lambda array: (self._points.recv(array, src, tag, async_op=True), src))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> TorchWork:
        """Receive a tensor from the first rank to send; not for GPU tensors."""
        if tensors[0].is_cuda:
            raise DistBackendError("recv: pass a source to receive into a GPU tensor")

        def begin(array: Any) -> tuple[Any, int] | None:
            source = internal.sender_of(self._points, tag)
            return None if source is None else (self._points.recv(array, source, tag, async_op=True), source)

        return self._message(tensors, begin)

    def _message(self, tensors: Tensors, begin: Any) -> TorchWork:
        self._count += 1
        array = moved(tensors[0])
        if tensors[0].is_cuda:
            self._side_stream(tensors[0].device)  # a message has a stream of its own, after the current stream
            if self._together is not None:
                self._messages.append((handles.DeferredWork(tensors), lambda: begin(array)))
                return self._messages[-1][0]
        with as_torch_raises():
            work = MessageWork(tensors, lambda: begin(array), self._points.timeout)
        if self._together is not None:
            self._together.append(work)
        return work

    # ------------------------------------------------------------ the group itself

    def _start_coalescing(self, device: Any = None) -> None:
        self._together, self._messages = [], []

    def _end_coalescing(self, device: Any = None) -> TorchWork:
        works, self._together = self._together or [], None
        messages, self._messages = self._messages, []
        if messages:
            tensors = [tensor for work, _ in messages for tensor in work.result()]

            def exchange() -> None:
                with self._points.group():  # in a group of NCCL no message waits for another message
                    for _, begin in messages:
                        begin()

            works.append(StreamWork(tensors, self._enqueue(exchange, tensors)))
            for work, _ in messages:
                work.batch = works[-1]
        if works and all(isinstance(work, StreamWork) for work in works):
            # An event recorded now follows all calls, since the group has one stream.
            return StreamWork([tensor for work in works for tensor in work.result()], works[-1].stream)
        return JoinedWork(works)

    def batch(self, begin: Callable[[], object]) -> TorchWork:
        """Start the messages begun by `begin` together, and return one handle for all."""
        outer = self._together, self._messages
        self._start_coalescing()
        try:
            begin()
            return self._end_coalescing()
        finally:
            self._together, self._messages = outer

    def get_group_store(self) -> Store:
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self._count

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self.options._timeout = timeout
        for comm in (self._comm, self._points):
            internal.waits_of(comm).timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Make all queued calls, then close both communicators. A collective call of the group."""
        self._caller.close()
        with as_torch_raises():
            internal.close_together((self._comm, self._points))

    def abort(self) -> None:
        """Close both communicators as failed: tell the other ranks, wait for no rank."""
        for comm in (self._points, self._comm):
            comm.__exit__(DistBackendError, None, None)
        self._caller.close(waits=False)


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _lists(lists: Any) -> list[Tensors]:
    """Return a list of lists of tensors: a single list becomes a list of one list, an empty list stays empty."""
    return [lists] if lists and isinstance(lists[0], torch.Tensor) else list(lists)
