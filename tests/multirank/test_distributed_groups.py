"""gpucoll.distributed: groups, messages between two ranks, barriers naming missing ranks, start and end."""

import datetime
import sys

import numpy
import pytest

import gpucoll as gc
import gpucoll.distributed as dist
from gpucoll.launch import launchers
from harness.jobs import python
from harness.pace import seconds
from multirank.distributed_world import data, done, same, world


def in_groups(mpi):
    """In a group, `src` and `dst` are ranks of the world; a rank outside the group is warned and does nothing."""
    with world(mpi) as (rank, size):
        odd, members = dist.new_group(rank for rank in range(size) if rank % 2), list(range(1, size, 2))
        if rank not in members:
            outside(odd, rank)
            return
        assert (dist.get_rank(odd), dist.get_world_size(odd)) == (members.index(rank), len(members))
        assert dist.get_process_group_ranks(odd) == members
        assert [dist.get_group_rank(odd, member) for member in members] == list(range(len(members)))
        assert [dist.get_global_rank(odd, number) for number in range(len(members))] == members
        x, y, root = data(rank), data(rank), members[-1]
        dist.reduce(x, root, group=odd)
        same(x, sum(data(member) for member in members) if rank == root else data(rank))
        dist.broadcast(x, root, group=odd)
        dist.broadcast(y, group=odd, group_src=0)
        same(y, data(1))
        outs = [numpy.zeros((2, 3)) for _ in members] if rank == 1 else None
        dist.gather(data(rank), outs, group=odd, group_dst=0)
        assert rank != 1 or numpy.array_equal(outs, [data(member) for member in members])
        dist.scatter(x, [data(member) for member in members] if rank == root else None, root, group=odd)
        same(x, data(rank))
        found = [None] * len(members)
        dist.all_gather_object(found, rank, group=odd)
        assert found == members
        dist.monitored_barrier(odd, timeout=seconds(60))
        for call in (dist.broadcast, dist.gather, dist.scatter, dist.reduce):  # with root 0, outside the group
            with pytest.raises(gc.ArgumentError, match="is not in the group"):
                call(x, group=odd)
        dist.destroy_process_group(odd)
        for error, call in ((gc.ClosedError, dist.barrier), (gc.ArgumentError, dist.destroy_process_group)):
            with pytest.raises(error):
                call(odd)


def outside(group, rank):
    assert group is dist.GroupMember.NON_GROUP_MEMBER
    assert (dist.get_rank(group), dist.get_world_size(group)) == (-1, -1)
    x, untouched = data(rank), [None]
    calls = {dist.all_reduce: (x,), dist.reduce: (x, 1), dist.broadcast: (x, 1), dist.barrier: (), dist.gather: (x,),
             dist.scatter: (x,), dist.all_gather: ([x], x), dist.all_gather_into_tensor: (x, x),
             dist.reduce_scatter: (x, [x]), dist.reduce_scatter_tensor: (x, x), dist.all_to_all: ([x], [x]),
             dist.all_to_all_single: (x, x), dist.isend: (x, 1), dist.irecv: (x, 1), dist.send: (x, 1),
             dist.recv: (x, 1), dist.monitored_barrier: (), dist.all_gather_object: (untouched, 1),
             dist.gather_object: (1,), dist.broadcast_object_list: (untouched, 1),
             dist.scatter_object_list: (untouched,)}
    for call, arguments in calls.items():
        with pytest.warns(UserWarning, match=rf"on global rank {rank} which does not belong"):
            assert call(*arguments, group=group) == (-1 if call is dist.recv else None)
    with pytest.raises(gc.ArgumentError):
        dist.get_backend(group)
    dist.destroy_process_group(group)  # nothing to destroy, no error
    same(x, data(rank))
    assert untouched == [None]


def many_groups(mpi):
    """Make groups from all kinds of iterables, in rank order or in the given order; use two groups at a time."""
    with world(mpi) as (rank, size):
        everyone, x, y = dist.new_group(), data(rank), data(rank)
        for ranks in (range(size), {*range(size)}, numpy.arange(size)[::-1], {0: "a", 1: "b"}):
            members = sorted(int(one) for one in ranks)
            assert dist.get_rank(dist.new_group(ranks)) == (members.index(rank) if rank in members else -1)
        backwards = dist.new_group(range(size)[::-1], sort_ranks=False)
        assert dist.get_rank(backwards) == size - 1 - rank
        works = dist.all_reduce(x, group=everyone, async_op=True), dist.broadcast(y, 0, backwards, async_op=True)
        assert all(work.wait() for work in works)
        same(x, sum(data(peer) for peer in range(size)))
        same(y, data(0))
        assert dist.new_group([]) is dist.GroupMember.NON_GROUP_MEMBER
        assert dist.new_group(timeout=datetime.timedelta(seconds=77), backend="gloo").communicator.timeout == 77
        assert dist.group.WORLD is dist.GroupMember.WORLD
        for wrong in ([0, 0], [size], [-1], [0.0], [True], 3):
            with pytest.raises(gc.ArgumentError, match="GC-GROUP"):
                dist.new_group(wrong)
        with pytest.raises(gc.ArgumentError, match="pass the result of new_group"):
            dist.all_reduce(x, group=[0])
        with pytest.raises(gc.MismatchError, match=r"rank 1 passed other ranks .*must pass the same") as differ:
            dist.new_group([0, 1] if rank == 1 else [0, 1, 2])
        assert differ.value.ranks == (1,)


def further_groups(mpi):
    """Groups made by their members alone, groups of equal size, parts of a group, and a mesh, on 4 ranks."""
    def total(group):
        x = numpy.array([float(rank)])
        dist.all_reduce(x, group=group)
        return x[0]

    with world(mpi) as (rank, _):
        for again in range(2 * (rank != 2)):  # rank 2 takes no part
            members = [(0, 1, 3), (3, 1, 0)][again]
            local = dist.new_group(members, 77, use_local_synchronization=True, sort_ranks=False)
            assert (total(local), local.ranks, local.communicator.timeout) == (4, members, 77)
        assert rank != 2 or dist.new_group([0], use_local_synchronization=True) is dist.GroupMember.NON_GROUP_MEMBER
        half, everyones = dist.new_subgroups(2)
        assert (total(half), everyones.index(half), dist.new_subgroups()[0].size()) == (
            1 + 4 * (rank > 1), rank // 2, 4)
        parts = dist.split_group(split_ranks=[[3, 0], [1]]), dist.split_group(half, [[0], [1]])
        assert [part and part.ranks for part in parts] == [{0: (0, 3), 1: (1,), 3: (0, 3)}.get(rank), (rank,)]
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert (mesh.get_coordinate(), mesh["tp"].mesh.tolist()) == ((rank // 2, rank % 2), [[0, 1], [2, 3]][rank // 2])
        assert [total(mesh.get_group("dp")), total(mesh["tp"].get_group())] == [2 + 2 * (rank % 2), 1 + 4 * (rank > 1)]
        for wrong in (lambda: dist.new_subgroups(3), lambda: dist.new_subgroups_by_enumeration([[0], [0]]),
                      lambda: dist.init_device_mesh("cpu", (3,)), lambda: mesh.get_group("pp"), mesh.get_local_rank):
            with pytest.raises(gc.ArgumentError, match="GC-GROUP"):
                wrong()


def objects_and_lists(mpi):
    with world(mpi) as (rank, size):
        found = [None, None]
        if rank == 1:
            dist.send_object_list([{"a": size}, "b"], 0)
        if rank == 0:
            assert (dist.recv_object_list(found, None), found) == (1, [{"a": size}, "b"])
        for async_op in (False, True):
            given = [data(rank), data(rank)[:1], numpy.zeros((0, 2))]
            done(dist.all_reduce_coalesced(given, async_op=async_op), async_op)
            same(given[0], sum(map(data, range(size))))
            same(given[1], sum(map(data, range(size)))[:1])
        outs = [numpy.zeros((other + 1, rank + 2)) for other in range(size)]
        dist.all_to_all(outs, [numpy.full((rank + 1, other + 2), 10. * rank + other) for other in range(size)])
        assert all((out == 10 * other + rank).all() for other, out in enumerate(outs))


def messages(mpi):
    with world(mpi) as (rank, size):
        right, left = (rank + 1) % size, (rank - 1) % size
        came = numpy.zeros((2, 3))
        works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, came, left), dist.P2POp(dist.isend, data(rank), right)])
        assert [work.wait() for work in works] == [True, True]
        same(came, data(left))
        assert (works[0].source_rank(), works[0].result()[0] is came) == (left, True)
        assert dist.batch_isend_irecv([]) == []
        first, second = numpy.zeros(3), numpy.zeros(3)
        works = [dist.irecv(second, left, tag=2), dist.irecv(first, left, tag=1),
                 dist.isend(numpy.full(3, 1.0 + rank), right, tag=1), dist.isend(-numpy.ones(3), right, tag=2)]
        assert all(work.wait(datetime.timedelta(seconds=seconds(60))) for work in works)
        same(first, numpy.full(3, 1.0 + left))
        same(second, -numpy.ones(3))
        backwards = dist.new_group(range(size)[::-1], sort_ranks=False)
        if rank:
            dist.send(data(rank), dst=0)
        else:
            assert sorted(dist.recv(came) for _ in range(1, size)) == list(range(1, size))
        if rank == size - 1 > 0:
            dist.send(data(7), 0, group=backwards)
        elif rank == 0 and size > 1:
            assert dist.recv(came, group=backwards, group_src=0) == size - 1
            same(came, data(7))


def from_anybody(mpi):
    """Receive from any rank; a timeout of the group or of one wait is no failure, and the call goes on."""
    with world(mpi) as (rank, _):
        impatient = dist.new_group(timeout=datetime.timedelta(seconds=0.1))
        came, late = numpy.zeros(2), numpy.zeros(1)
        if rank == 0:
            work = dist.irecv(came)
            assert not work.is_completed()
            dist.send(numpy.ones(2), 1)
            assert work.wait()
            assert work.source_rank() == 1
            same(came, numpy.full(2, 2.0))
            with pytest.raises(gc.CollectiveTimeout, match="no rank sent"):
                dist.recv(came, group=impatient)
            dist.recv(late, 1)
            dist.send(numpy.ones(2), 1, tag=1)
        else:
            dist.recv(came, 0)
            dist.send(came + 1, 0)
            work = dist.irecv(came, 0, tag=1)
            with pytest.raises(gc.CollectiveTimeout, match="the call continues"):
                work.wait(datetime.timedelta(microseconds=1))
            dist.send(late, 0)
            work.wait()


def missing_ranks(mpi):
    """All ranks in a monitored barrier name the missing ranks, and the group stays usable."""
    with world(mpi) as (rank, _):
        patience = seconds(60)
        for _ in range(20):  # rank 0 may announce the next barrier while other ranks are still in this barrier
            dist.monitored_barrier(timeout=patience)
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=patience), wait_all_ranks=True)
        if rank == 2:
            dist.barrier()  # rank 2 enters the monitored barrier late, after the verdict
        with pytest.raises(gc.CollectiveTimeout, match="" if rank == 2 else "rank 2 did not come within") as late:
            dist.monitored_barrier(timeout=patience if rank == 2 else seconds(1))
        assert late.value.ranks == (2,)
        if rank != 2:
            dist.barrier()
        dist.monitored_barrier(timeout=patience)
        for missing in ((0,), (1, 2, 3)):
            if rank not in missing:
                with pytest.raises(gc.CollectiveTimeout) as late:
                    dist.monitored_barrier(timeout=0.2)
                assert late.value.ranks == missing
            dist.barrier()
        dist.monitored_barrier(timeout=patience)


START = """
import os, datetime
import pytest
import gpucoll as gc, gpucoll.distributed as dist
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
assert not dist.is_initialized() and dist.is_available() and dist.group.WORLD is None
for call in (dist.get_rank, dist.barrier, dist.new_group, dist.destroy_process_group,
             lambda: dist.P2POp(dist.isend, 1, 0), dist.distributed_c10d._get_default_group):
    with pytest.raises(gc.UsageError, match="call gpucoll.distributed.init_process_group"):
        call()
for options, error in [
        (dict(init_method="shared"), gc.ArgumentError), (dict(world_size=7), gc.UsageError),
        (dict(rank="x"), gc.UsageError)]:
    with pytest.raises(error):
        dist.init_process_group(**options)
    assert not dist.is_initialized()
os.environ["WORLD_SIZE"] = "7"
with pytest.raises(gc.UsageError, match="the environment says world_size '7', MPI says 3"):
    dist.init_process_group()
del os.environ["WORLD_SIZE"]
os.environ["MASTER_PORT"] = "1234"
dist.init_process_group("cpu:gloo,cuda:nccl", "env://", datetime.timedelta(seconds=99), world_size=3)
rank = dist.get_rank()
assert {name: os.environ[name] for name in names} == {
    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}
assert dist.group.WORLD.communicator.timeout == 99
with pytest.raises(gc.UsageError, match="was called before"):
    dist.init_process_group()
dist.new_group([0, 2])
dist.destroy_process_group(dist.group.WORLD)
assert not dist.is_initialized() and "RANK" not in os.environ and os.environ["MASTER_PORT"] == "1234"
dist.init_process_group(backend="NCCL", init_method="tcp://127.0.0.1:1", timeout=55.5, rank=rank, device_id="cuda:0")
assert gc.init() is not dist.group.WORLD.communicator
print(f"right{rank}")
"""


def test_start_and_end(mpiexec):
    variables = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
    job = mpiexec(3, sys.executable, "-c", START, env=dict.fromkeys([*variables, "PYTHONUNBUFFERED"]))
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.split()) == ["right0", "right1", "right2"]


STANDARD_FORM = """
import datetime, multiprocessing, sys
import numpy
import gpucoll.distributed as dist

def work(rank, size, method):
    store = dist.TCPStore("127.0.0.1", int(sys.argv[3]), size, rank == 0) if method == "store" else None
    dist.init_process_group("gloo", None if store or not method else method, rank=rank, world_size=size, store=store)
    dist.all_reduce(x := numpy.array([rank + 1.0]))
    if store:
        store.set(f"{rank}", f"{rank}")
        assert store.get("2") == b"2" and store.check(["0", "none"]) is False
    sys.stdout.write(f"{x} {rank} {size} {dist.get_node_local_rank()} {dist.group.WORLD.communicator.mpi}\\n")

if __name__ == "__main__":
    start = multiprocessing.get_context(sys.argv[1])
    ranks = [start.Process(target=work, args=(rank, 3, sys.argv[2])) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(max(rank.exitcode for rank in ranks))
"""


@pytest.mark.parametrize(("start", "method"), [
    ("spawn", ""), ("fork", "tcp://localhost:{port}"), ("fork", "file://{folder}/shared"), ("fork", "store")])
def test_processes_of_multiprocessing_are_ranks(tmp_path, start, method):
    """torch's standard form: a program without a launcher starts its processes itself, and tells them their ranks."""
    port = launchers.free_port()
    (tmp_path / "program.py").write_text(STANDARD_FORM)
    job = python("program.py", start, method.format(port=port, folder=tmp_path), port, cwd=tmp_path, timeout=120,
                 env={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    assert (job.returncode, sorted(job.stdout.splitlines())) == (
        0, [f"[6.] {rank} 3 {rank} None" for rank in range(3)]), job.stderr


@pytest.mark.parametrize(("program", "size"), [
    (in_groups, 3), (many_groups, 3), (further_groups, 4), (objects_and_lists, 3), (messages, 1), (messages, 5),
    (from_anybody, 2), (missing_ranks, 4),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [(in_groups, 8), (messages, 2)])])
def test_program(ranks, program, size):
    ranks(program, size)
