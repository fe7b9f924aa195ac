"""Programs for ranks with a GPU each, or with what stands for one: schedules by the `peer` executor on CuPy arrays."""

import cupy

import peer_schedules
from gpucoll.bootstrap import device as ordinal_of
from gpucoll.device.cuda import CudaDevice
from gpucoll.executors.nccl.rooms import Order
from gpucoll.executors.peer import PeerExecutor
from gpucoll.links import MpiLink
from peer_schedules import Case

PATIENCE = 60.0
ALGORITHMS = [("all_reduce", "one_shot"), ("all_reduce", "two_shot"), ("all_reduce", "ring"),
              ("all_reduce", "halving_doubling"), ("broadcast", "chain"), ("all_gather", "bruck"),
              ("reduce_scatter", "ring"), ("all_to_all", "direct"), ("barrier", "dissemination")]


class Rank:
    """One rank's GPU and executor."""

    def __init__(self, mpi):
        self.rank, self.size = mpi.rank, mpi.size
        self.link = MpiLink.of(mpi, PATIENCE)
        self.device = CudaDevice(ordinal_of(mpi.rank))
        self.order = Order(self.device)
        self.executor = PeerExecutor(self.device, self.order, self.link, PATIENCE)

    def prepare(self, case, stream):
        """Return the task of a case, its arrays on the GPU."""
        task = case.task(self.rank, stream)
        in_place = task.in_place and task.input is not None
        with stream:
            task.output = None if task.output is None else cupy.asarray(task.output)
            task.input = None if task.input is None or in_place else cupy.asarray(task.input)
        if in_place:
            task.input = task.output[:case.count]
        return task

    def enqueue(self, task, stream):
        assert self.executor.serves(task) is None
        assert list(self.executor.run(task)) == []
        self.order.passed(stream, task)
        return task

    def check(self, task, case):
        expected = case.output(self.rank)
        assert expected is None or peer_schedules.same(cupy.asnumpy(task.output), expected, case), case.algorithm

    def close(self):
        cupy.cuda.runtime.deviceSynchronize()
        self.executor.check()
        self.executor.close()
        self.link.free()


def schedules(mpi, counts):
    """Every algorithm, all enqueued before the host looks at the first result, on two streams in turn."""
    rank = Rank(mpi)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    cases = [Case(*kind, rank.size, count) for count in counts for kind in ALGORITHMS]
    tasks = [rank.prepare(case, streams[number % 2]) for number, case in enumerate(cases)]
    for task in tasks:
        rank.enqueue(task, task.stream)
    cupy.cuda.runtime.deviceSynchronize()
    for task, case in zip(tasks, cases, strict=True):
        rank.check(task, case)
    rank.close()


def refused(mpi):
    """Why the executor does not serve where CUDA lets rank 1 map nothing."""
    runtime = cupy.cuda.runtime

    def open_none(handle):
        raise runtime.CUDARuntimeError(201)

    genuine = runtime.ipcOpenMemHandle
    runtime.ipcOpenMemHandle = open_none if mpi.rank == 1 else genuine
    try:
        rank = Rank(mpi)
        reason = rank.executor.serves(Case("all_reduce", "ring", mpi.size, 10).task(mpi.rank))
        rank.close()
        return reason
    finally:
        runtime.ipcOpenMemHandle = genuine


def graphs(mpi):
    """A captured call, launched again and again between others."""
    rank = Rank(mpi)
    stream = cupy.cuda.Stream(non_blocking=True)
    cases = [Case("all_reduce", algorithm, rank.size, 700) for algorithm in ("one_shot", "two_shot", "ring")]
    tasks = [rank.prepare(case, stream) for case in cases]
    stream.begin_capture()
    for task in tasks:
        rank.enqueue(task, stream)
    graph = stream.end_capture()
    for _ in range(3):
        graph.launch(stream)
        between = Case("broadcast", "linear", rank.size, 100)
        task = rank.enqueue(rank.prepare(between, stream), stream)
        stream.synchronize()
        rank.check(task, between)
        for one, case in zip(tasks, cases, strict=True):
            rank.check(one, case)
    rank.close()
