"""A transport of a program's own: processes joined by pipes, without MPI and without a store."""


import pytest

from harness.jobs import python

PIPES = '''
import collections, itertools, multiprocessing
import numpy
import gpucoll as gc

class Pipes(gc.Transport):
    """Ranks joined by one pipe for each pair; `inbox` has what came, by channel, sender and tag."""

    def __init__(self, world, rank, ends, inbox, name="world"):
        self.world, self.ends, self.inbox, self.name, self.calls = world, ends, inbox, name, itertools.count()
        super().__init__(rank, ["here"] * len(world), self, Channel(self, f"{name} wire"),
                         Channel(self, f"{name} points"))

    def post(self, rank, key, dtype, data):
        there = self.world[rank]
        if there == self.world[self.rank]:
            self.inbox[key].append((there, dtype, data))
        else:
            self.ends[there].send((key, dtype, data))

    def look(self):
        for there, end in self.ends.items():
            try:
                while end.poll():
                    key, dtype, data = end.recv()
                    self.inbox[key].append((there, dtype, data))
            except (EOFError, ConnectionError):
                pass

    def allgather(self, value):
        key = f"{self.name} ranks", next(self.calls)
        for rank in range(self.size):
            self.post(rank, key, 0, value)
        while len(self.inbox[key]) < self.size:
            self.look()
        return [value for _, _, value in sorted(self.inbox.pop(key), key=lambda one: self.world.index(one[0]))]

    def bcast(self, value, root=0):
        return self.allgather(value)[root]

    def part(self, name, ranks):
        return Pipes([self.world[one] for one in ranks], ranks.index(self.rank), self.ends, self.inbox,
                     f"{self.name} {name}")


class Channel:
    def __init__(self, pipes, name):
        self.pipes, self.name = pipes, name

    def Isend(self, buffer, dest, tag=0, dtype=0):
        self.pipes.post(dest, (self.name, tag), dtype, buffer[0].tobytes())
        return Message(None, buffer[0], dest, (self.name, tag), dtype)

    def Irecv(self, buffer, source, tag=0, dtype=0):
        return Message(self.pipes, buffer[0], source, (self.name, tag), dtype)

    def seen(self, source, tag):
        self.pipes.look()
        for (name, its_tag), there in self.pipes.inbox.items():
            for sender, _, data in there if name == self.name and tag in (None, its_tag) else ():
                if source is None or sender == self.pipes.world[source]:
                    return self.pipes.world.index(sender), its_tag, len(data)
        return None


class Message:
    came, taken = 0, None

    def __init__(self, pipes, row, rank, key, dtype):
        self.pipes, self.row, self.rank, self.key, self.dtype = pipes, row, rank, key, dtype

    def Test(self, status=None):
        if self.pipes is None or self.taken is not None:
            return True
        there = self.pipes.inbox[self.key]
        if not there:
            # What comes now is for the request that asks next, as from pipes that another thread reads.
            self.pipes.look()
            return False
        for one in there:
            if one[0] == self.pipes.world[self.rank]:
                there.remove(one)
                _, self.came, data = one
                row, data = self.row.reshape(-1).view(numpy.uint8), numpy.frombuffer(data, numpy.uint8)
                if 0 in (self.came, self.dtype) or self.came == self.dtype:
                    row[:len(data)] = data[:len(row)]
                self.taken = len(data)
                return True
        return False

    @property
    def length(self):
        return self.taken if self.Test() else None

    def Cancel(self):
        self.taken = 0


def started(rank, ends, call, results):
    comm = gc.init(transport=Pipes(range(SIZE), rank, ends, collections.defaultdict(list)), timeout=20)
    assert gc.init() is comm and comm.mpi is None and (comm.rank, comm.size) == (rank, SIZE)
    try:
        results.put((rank, call(comm)))
        comm.close()
    except Exception as error:
        results.put((rank, (error.code, error.ranks) if isinstance(error, gc.GpucollError) else repr(error)))


def run(call):
    context = multiprocessing.get_context("fork")
    pairs = {(a, b): context.Pipe() for a, b in itertools.combinations(range(SIZE), 2)}
    ends = [{**{b: pairs[a, b][0] for a, b in pairs if a == rank},
             **{a: pairs[a, b][1] for a, b in pairs if b == rank}} for rank in range(SIZE)]
    results = context.SimpleQueue()
    ranks = [context.Process(target=started, args=(rank, ends[rank], call, results)) for rank in range(SIZE)]
    for one in ranks:
        one.start()
    print(*(found for _, found in sorted(results.get() for _ in ranks)), sep="\\n")
    for one in ranks:
        one.join()

SIZE = 3
'''
CALLS = {
    "collectives": ("""
def call(comm):
    x = numpy.arange(5.0) + comm.rank
    blocks = comm.all_gather_v(numpy.full(comm.rank, comm.rank))
    return (comm.all_reduce(x).tolist(), comm.all_reduce(x, algorithm="ring").tolist(), list(map(len, blocks)),
            comm.all_gather_object(comm.rank), comm.scan(x)[0].item())
""", ["([3.0, 6.0, 9.0, 12.0, 15.0], [3.0, 6.0, 9.0, 12.0, 15.0], [0, 1, 2], [0, 1, 2], 0.0)",
      "([3.0, 6.0, 9.0, 12.0, 15.0], [3.0, 6.0, 9.0, 12.0, 15.0], [0, 1, 2], [0, 1, 2], 1.0)",
      "([3.0, 6.0, 9.0, 12.0, 15.0], [3.0, 6.0, 9.0, 12.0, 15.0], [0, 1, 2], [0, 1, 2], 3.0)"]),
    "messages and parts": ("""
def call(comm):
    z, status = numpy.zeros(2, int), gc.Status()
    sent = comm.send(numpy.full(2, comm.rank), (comm.rank + 1) % SIZE, tag=7, async_op=True)
    comm.recv(z, gc.ANY_SOURCE, 7, status)
    sent.wait()
    part = comm.split(comm.rank % 2, -comm.rank)
    with part:
        return z.tolist(), status.source, part.rank, part.all_gather_object(comm.rank)
""", ["([2, 2], 2, 1, [2, 0])", "([0, 0], 0, 0, [1])", "([1, 1], 1, 0, [2, 0])"]),
    "calls that differ": ("""
def call(comm):
    return comm.all_reduce(numpy.ones(3 + comm.rank // 2))
""", ["('GC-SHAPE', (2,))"] * 3),
    "options that differ": ("""
def started(rank, ends, call, results):
    try:
        gc.init(transport=Pipes(range(SIZE), rank, ends, collections.defaultdict(list)),
                check="off" if rank == 1 else None)
    except gc.UsageError as error:
        results.put((rank, (error.code, error.ranks) if isinstance(error, gc.GpucollError) else repr(error)))

call = None
""", ["('GC-OPTION', (1,))"] * 3),
    "a rank that leaves": ("""
def call(comm):
    return comm.rank if comm.rank == 1 else comm.all_reduce(numpy.ones(3))
""", ["('GC-RANK', (1,))", "1", "('GC-RANK', (1,))"]),
}


@pytest.mark.parametrize("what", CALLS)
def test_ranks_joined_by_a_transport_of_the_program(tmp_path, what):
    text, wanted = CALLS[what]
    script = tmp_path / "program.py"
    script.write_text(f"{PIPES}{text}\nrun(call)\n")
    job = python(script, timeout=100)
    assert job.stdout.splitlines() == wanted, job.stderr
