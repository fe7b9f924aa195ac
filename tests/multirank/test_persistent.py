"""comm.plan and comm.explain: calls with everything resolved, and what is known of them."""

import json

import numpy
import pytest

import gpucoll as gc
import oracle
from programs import program


@pytest.fixture
def ranks(ranks_anywhere):
    return ranks_anywhere


KEPT = ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "reduce_scatter", "all_to_all", "scan")
ROOTED = ("reduce", "broadcast", "gather")


def content(comm, turn, shape):
    count = int(numpy.prod(shape))
    return (numpy.arange(count, dtype=numpy.int64) * (comm.rank + 3) + 1000 * turn + comm.rank).reshape(shape)


def shape_for(comm, collective):
    return (comm.size, 5) if collective in ("reduce_scatter", "all_to_all") else (5,)


@program
def again_and_again(comm, collective, algorithm):
    """What a plan returns is what the collective returns for the same content: that is held against the oracle."""
    options = {"algorithm": algorithm} | ({"root": comm.size - 1} if collective in ROOTED else {})
    x = content(comm, 0, shape_for(comm, collective))
    plan, results = comm.plan(collective, x, **options), []
    assert numpy.array_equal(x, content(comm, 0, x.shape))  # no data move before the first call
    for turn in range(5):
        x[...] = content(comm, turn, x.shape)
        results.append(plan())
        expected = getattr(comm, collective)(content(comm, turn, x.shape), **options)
        assert oracle.same_bits(results[-1], expected) if expected is not None else results[-1] is None, turn
    assert all(result is results[0] for result in results)
    mapped = not (comm.options.emulated and algorithm == "native")  # which reads memory when it likes
    assert (plan.executor is not None) == mapped
    assert not mapped or algorithm in ("auto", plan.algorithm)


@program
def into_given_memory(comm):
    x, out = content(comm, 1, (7,)), numpy.zeros(7, numpy.int64)
    plan, inplace = comm.plan("all_reduce", x, out, op="max"), comm.plan("all_reduce", x, x, op="sum")
    assert plan() is out
    assert oracle.same_bits(out, comm.all_reduce(x, op="max"))
    total = comm.all_reduce(x)
    assert inplace() is x
    assert oracle.same_bits(x, total)
    assert oracle.same_bits(inplace(), total * comm.size)


@program
def whatever_else(comm):
    """Arrays with gaps, scatter, the v-variants and barriers: decided in each call, and right."""
    wide = content(comm, 0, (10,))
    gaps = comm.plan("all_reduce", wide[::2])
    for turn in range(3):
        wide[:] = content(comm, turn, (10,))
        assert oracle.same_bits(gaps(), comm.all_reduce(wide[::2].copy()))
    blocks = numpy.arange(2 * comm.size).reshape(comm.size, 2)
    scatter = comm.plan("scatter", blocks if comm.rank == 0 else None)
    parts = comm.plan("all_gather_v", content(comm, 0, (comm.rank,)))
    barrier = comm.plan("barrier")
    for turn in range(2):
        blocks += turn
        assert oracle.same_bits(scatter(), blocks[comm.rank])
        assert [len(part) for part in parts()] == list(range(comm.size))
        barrier()
    assert (scatter.executor, gaps.executor) == (None, None)


@program
def refusals(comm):
    x, codes = content(comm, 0, (4,)), []
    for name, options in (("all_reduc", {}), ("all_reduce", {"op": "foo"}), ("all_reduce", {"algorithm": "rng"}),
                          ("reduce", {"root": 99}), ("all_reduce", {"out": numpy.zeros(3, numpy.int64)})):
        with pytest.raises(gc.ArgumentError) as refused:
            comm.plan(name, x, **options)
        codes.append(refused.value.code)
    for options in ({"root": 0}, {"async_op": True}):
        with pytest.raises(TypeError):
            comm.plan("all_reduce", x, **options)
    plan = comm.plan("all_reduce", x)
    comm.close()
    with pytest.raises(gc.ClosedError):
        plan()
    return codes


@program
def explained(comm):
    """On the host calls are counted and timed; on a device they end later than they return."""
    x, device = content(comm, 0, (512,)), "emulated" if comm.options.emulated else "cpu"
    before = comm.explain("all_reduce", x.nbytes, "int64")
    for _ in range(3):
        comm.all_reduce(x)
    after = comm.explain("all_reduce", x.nbytes, "int64", device)
    assert before.choice == after.choice == after.candidates[0]["algorithm"]
    calls = [row["calls"] for row in after.candidates]
    assert calls == [3 * (device == "cpu")] + [0] * (len(calls) - 1)
    assert all((row["measured"] is None) == (row["calls"] == 0) for row in after.candidates)
    assert json.loads(json.dumps(after)) == after
    assert str(after).splitlines()[-1].startswith(f"choice: {after.choice}: {after.reason}")
    for arguments in (("all_reduc", 8), ("all_reduce", -1), ("all_reduce", 1.5), ("all_reduce", True)):
        with pytest.raises(gc.ArgumentError):
            comm.explain(*arguments)
    with pytest.raises(gc.ArgumentError):
        comm.explain("all_reduce", 8, device="tpu")
    with pytest.raises(gc.DtypeError):
        comm.explain("all_reduce", 8, "float31")
    return after.choice, after["executor"]


@pytest.mark.parametrize("algorithm", ["auto", "native", "linear"])
@pytest.mark.parametrize("collective", KEPT)
def test_a_plan_is_called_again_and_again(ranks, collective, algorithm):
    name = algorithm if algorithm != "linear" else gc.algorithms(collective)[0]
    for size in (1, 2, 4):
        ranks(again_and_again, size, collective, name)


def test_a_plan_writes_where_it_is_told_to(ranks):
    ranks(into_given_memory, 3)


def test_a_plan_of_anything_else_is_right_too(ranks):
    ranks(whatever_else, 3)


def test_a_plan_is_refused_as_the_call_would_be(ranks):
    assert ranks(refusals, 2) == [["GC-COLLECTIVE", "GC-OP", "GC-ALGO", "GC-ROOT", "GC-SHAPE"]] * 2


def test_explain_knows_what_has_been_called(ranks):
    assert len(set(ranks(explained, 3))) == 1
