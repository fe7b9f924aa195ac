"""Programs drawn at random: any order of calls, dtypes, algorithms and layouts; NumPy knows the end."""

import numpy
import pytest

import gpucoll as gc
import oracle
from grids import generator

CALLS = ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all", "scan",
         "exscan", "all_gather_v", "all_to_all_v", "sendrecv", "barrier")


def draw(random, size, executor):
    """A list of calls: (name, options); the same for all ranks, which is why it is drawn before they start."""
    program = []
    for _ in range(25):
        name = random.choice(CALLS)
        op, dtype = random.choice([pair for pair in executor.pairs if pair[0] != "avg" or "scan" not in name])
        program.append((name, {
            "dtype": dtype, "op": op, "count": random.choice([0, 1, size - 1, size, 37, 3000]),
            "root": random.randrange(size), "algorithm": random.choice([*executor.algorithms(name), "auto"]),
            "hop": random.randrange(size), "async": random.random() < 0.3,
            "layout": random.choice(["plain", "strided", "reversed", "in place"])}))
    return program


def laid_out(values, layout):
    """The same values in another memory layout."""
    if layout == "strided":
        room = numpy.zeros((*values.shape[:-1], values.shape[-1] * 2), values.dtype)
        room[..., ::2] = values
        return room[..., ::2]
    return numpy.ascontiguousarray(values[..., ::-1])[..., ::-1] if layout == "reversed" else values.copy()


def inputs(name, options, size):
    shape = (size, options["count"]) if name in ("scatter", "reduce_scatter", "all_to_all") else (options["count"],)
    return [oracle.values(options["op"], options["dtype"], rank, int(numpy.prod(shape))).reshape(shape)
            for rank in range(size)]


def expected(name, options, everyone, rank):
    """What NumPy says that `rank` gets."""
    size, root = len(everyone), options["root"]

    def total(some):
        return oracle.reduced(options["op"], options["dtype"], some)

    return {
        "all_reduce": lambda: total(everyone),
        "reduce": lambda: total(everyone) if rank == root else None,
        "broadcast": lambda: everyone[root],
        "all_gather": lambda: numpy.stack(everyone),
        "gather": lambda: numpy.stack(everyone) if rank == root else None,
        "scatter": lambda: everyone[root][rank],
        "reduce_scatter": lambda: total(everyone)[rank],
        "all_to_all": lambda: numpy.stack([one[rank] for one in everyone]),
        "scan": lambda: total(everyone[:rank + 1]),
        "exscan": lambda: total(everyone[:rank]) if rank else numpy.full(
            everyone[0].shape, oracle.identity(options["op"], options["dtype"]), oracle.kind(options["dtype"])),
        "all_gather_v": lambda: [one[:source] for source, one in enumerate(everyone)],
        "all_to_all_v": lambda: [one[:(source + rank) % 4] for source, one in enumerate(everyone)],
        "sendrecv": lambda: everyone[(rank - options["hop"]) % size],
        "barrier": lambda: None,
    }[name]()


def start(comm, name, options, x):
    """Make the call; its result or Work."""
    how = {"algorithm": options["algorithm"], "async_op": options["async"]}
    op, root = {"op": options["op"]}, {"root": options["root"]}
    in_place = {"out": x} if options["layout"] == "in place" else {}
    if name == "sendrecv":
        out = numpy.empty(x.shape, x.dtype)
        return comm.sendrecv(x, out, (comm.rank + options["hop"]) % comm.size, (comm.rank - options["hop"]) % comm.size)
    if name == "barrier":
        return comm.barrier(**how)
    if name == "all_gather_v":
        return comm.all_gather_v(x[:comm.rank], **how)
    if name == "all_to_all_v":
        return comm.all_to_all_v([x[:(comm.rank + peer) % 4] for peer in range(comm.size)], **how)
    call = getattr(comm, name)
    if name in ("all_reduce", "scan", "exscan"):
        return call(x, **op, **how, **in_place)
    if name == "all_to_all":
        return call(x, **how, **in_place)
    if name in ("reduce", "reduce_scatter"):
        return call(x, **op, **how, **(root if name == "reduce" else {}))
    if name == "scatter":
        x = x if comm.rank == options["root"] else None
    return call(x, **how, **({} if name == "all_gather" else root))


def run(comm, program):
    open_works = []
    for number, (name, options) in enumerate(program):
        everyone = inputs(name, options, comm.size)
        x = laid_out(everyone[comm.rank], options["layout"])
        found = start(comm, name, options, x)
        wanted = expected(name, options, everyone, comm.rank)
        if isinstance(found, gc.Work):
            open_works.append((number, name, options, found, wanted))
        else:
            compare(number, name, options, found, wanted)
    for number, name, options, work, wanted in reversed(open_works):
        compare(number, name, options, work.wait(), wanted)


def compare(number, name, options, found, wanted):
    context = f"call {number}: {name} {options}"
    if isinstance(wanted, list):
        assert len(found) == len(wanted), context
        for one, other in zip(found, wanted, strict=True):
            assert oracle.same_bits(one, other), context
    elif wanted is None:
        assert found is None, context
    else:
        assert oracle.same_bits(numpy.asarray(found), numpy.asarray(wanted)), (context, found, wanted)


@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.nightly) for number in range(1, 40))])
def test_random_programs(executor, number):
    random = generator(f"random/{executor.name}/{number}")
    for size in random.sample((1, 2, 3, 4, 5, 8), 2):
        executor.run(size, run, draw(random, size, executor))
