"""Random programs: calls of all kinds that all ranks make, held against the oracle; ranks differ where they may.

    python tests/mixture.py --calls 200000 --seed 7 [--executors mpi,shared,nccl,peer] [--ranks 1,2,3,4,8]
    mpiexec -n 3 python tests/mixture.py --calls 20000 --executors mpi,shared,native
    python tests/mixture.py --replay 7/peer/3/12

By itself it has threads as ranks, under mpiexec processes. It says what was called, wrong and leaked; the name of a
program that failed draws it again.
"""

import argparse
import functools
import gc as garbage
import itertools
import os
import random
import resource
import sys
import time
import traceback

import numpy

import gpucoll as gc
import oracle
import programs
from compiled import PEER, make_peer_kernels, make_usual
from gpucoll import bootstrap, launchers
from gpucoll.algorithms import find, registry
from gpucoll.collectives import COLLECTIVES
from grids import naming
from pace import seconds
from programs import MOVED, MOVEMENTS, REDUCTIONS, check
from thread_ranks import on_threads

ALL = (*REDUCTIONS, *MOVEMENTS)
LISTS = ("scatter_v", "all_to_all_v")  # which take a list of arrays
PAIRS = [(op, name) for op in oracle.OPS for name in oracle.DTYPES if oracle.legal(op, name)]
KINDS = {"collective": 40, "refused": 5, "points": 4, "barrier": 1, "split": 1}  # of steps, and how often each is drawn
WAYS = {"plain": 3, "plan": 1, "group": 1}  # to call a collective
CUSTOM = {("sum", "float32"): "a + b", ("max", "float32"): "max(a, b)"}
CARRIED = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
EMULATED = ("nccl", "peer")
IN_PLACE = ("all_reduce", "scan", "exscan", "all_to_all")
GUARD, ROOM = 64, 1 << 16  # bytes around every array, and of a communicator's memory that all ranks map


def called(comm, calls):
    """Each of `calls`: collective, algorithm, op, dtype, length, and a number that chooses the root, or in place."""
    for call in calls:
        with naming((*call, f"{comm.size} ranks")):
            collective, algorithm, op, name, count, chance = call
            if collective in REDUCTIONS:
                programs.reduction(comm, collective, algorithm, op, name, count, in_place=chance < 0.5)
            else:
                root = int(chance * comm.size) if COLLECTIVES[collective].rooted else 0
                MOVED[collective](comm, algorithm, name, count, root)


def flipped(x, turn):
    """New data whose result is known: whatever is drawn here is done element by element."""
    return x[..., ::-1] if turn % 2 else x


def listed(x):
    return x if isinstance(x, list) else [] if x is None else [x]


class Spot:
    """An array like `x` somewhere in memory that is known: with gaps, backwards, turned, at an odd byte, read-only."""

    def __init__(self, own, x, memory, plain, fixed=False):
        self._x, self._step = x, 1 if plain else own.choice((1, 1, 1, 2, -1, -3))
        self._turned = x.ndim == 2 and not plain and own.random() < 0.3
        self._first = GUARD + (0 if plain else own.choice((0, 0, 8, 1)))
        self._memory = memory(self._first + x.nbytes * abs(self._step) + GUARD)
        self._array = self.given = self._in(self._memory)
        if fixed:
            self.given = self._array.view()
            self.given.flags.writeable = False

    def _in(self, memory):
        shape, wide = self._x.shape, abs(self._step)
        row = memory[self._first:self._first + self._x.nbytes * wide].view(self._x.dtype)
        if self._turned:
            return row.reshape(shape[1] * wide, shape[0])[::self._step].T
        return row.reshape(*shape[:-1], shape[-1] * wide)[..., ::self._step]

    def fill(self, values):
        self._memory[:] = 0x5A
        self._array[...] = values
        self._before = self._memory.copy()

    def check(self, *, written=False):
        if written:
            self._in(self._before)[...] = self._array
        assert (self._before == self._memory).all(), "bytes have changed that nobody may write"


class Call:
    """The arrays of one call in spots of their own: those of `x`, and one like `out` unless it is `in_place`."""

    def __init__(self, spot, name, x, out, in_place):
        self._xs = listed(x)
        self._spots = [spot(one, fixed=not in_place) for one in self._xs]
        self._out = self._spots[0] if in_place else None if out is None else spot(out)
        given = [one.given for one in self._spots]
        self.x = given if isinstance(x, list) else given[0] if given else None
        self.out = {} if self._out is None or name == "broadcast" else {"out": self._out.given}

    def fill(self, turn):
        for spot, values in zip(self._spots, self._xs, strict=True):
            spot.fill(flipped(values, turn))
        if self._out not in (None, *self._spots):
            self._out.fill(0)

    def ended(self, found, turn):
        """What was found, as it is for the first data; nothing else was written."""
        found = found.wait() if isinstance(found, gc.Work) else found
        assert self._out is None or found is self._out.given
        for spot in {*self._spots, self._out} - {None}:
            spot.check(written=spot is self._out)
        results = [flipped(one, turn).copy() for one in listed(found)]
        return found if found is None else results if isinstance(found, list) else results[0]


class Varied:
    """A communicator whose calls are made in any way: what `alike` draws is alike on all ranks."""

    def __init__(self, comm, seed):
        self._comm, self.rank, self.size, self.count = comm, comm.rank, comm.size, 0
        self._alike, self._own = random.Random(str(seed)), random.Random(f"{seed}/{comm.rank}")
        self._room, self._used = comm.zeros(ROOM, "uint8"), 0

    def run(self, steps):
        for number, (kind, *arguments) in enumerate(steps):
            with naming(f"step {number} of {len(steps)}: {kind} {arguments}"):
                getattr(self, f"run_{kind}")(*arguments)
        return self.count

    def __getattr__(self, name):
        return functools.partial(self._call, name)

    def _memory(self, shared, nbytes):
        """So many bytes, of memory that all ranks map where some are left."""
        first, last = self._used, self._used + -(-nbytes // GUARD) * GUARD
        if not shared or last > ROOM:
            return numpy.empty(nbytes, numpy.uint8)
        self._used = last
        return self._room[first:first + nbytes]

    def _spot(self, plain, x, fixed=False):
        shared, fixed = plain or self._own.random() < 0.2, fixed and self._own.random() < 0.3
        return Spot(self._own, x, functools.partial(self._memory, shared), plain, fixed)

    def _call(self, name, x, out=None, **options):
        (way,), turns = self._alike.choices(list(WAYS), WAYS.values()), self._alike.choice((1, 1, 1, 2, 3, 5))
        given, result, options = self._dressed(x, out, options) if "op" in options else (x, out, options)
        in_place = name == "broadcast" or (out is not None and out is x)
        if out is None and name in (*IN_PLACE, "reduce_scatter", "all_gather") and self._own.random() < 0.7:
            in_place = name in IN_PLACE and self._own.random() < 0.5
            shape = {"reduce_scatter": given.shape[1:], "all_gather": (self.size, *given.shape)}.get(name, given.shape)
            result = numpy.empty(shape, given.dtype)
        self._used, self.count, plain = 0, self.count + turns, self._alike.random() < 0.2
        calls = [Call(functools.partial(self._spot, plain), name, given, result, in_place)
                 for _ in range(turns if way == "group" else 1)]
        with naming((way, turns, options)):
            *others, found = getattr(self, f"_{way}")(name, itertools.cycle(calls), range(turns)[::-1], options)
        for other in others:
            for one, last in zip(listed(other), listed(found), strict=True):
                check(one, last, "otherwise than in the last turn")
        if found is not None and "dtype" in options:
            found = found.view(x.dtype)
        into = x if name == "broadcast" else out
        if into is not None and found is not None:
            into[...] = found
        return found if into is None else into

    def _dressed(self, x, out, options):
        """The same reduction in other words."""
        words, op, dtype = self._alike.random(), options["op"], x.dtype.name
        if words < 0.1:
            options = options | {"op": gc.ReduceOp(op)}
        elif words < 0.4 and dtype in CARRIED:
            x, out = (one if one is None else one.view(f"u{x.itemsize}") for one in (x, out))
            options = options | {"dtype": dtype}
        elif words < 0.6 and op == "sum" and dtype != "bool":  # by a factor of every rank's own
            factor = 1 if dtype.startswith("u") else self._own.choice((1, -1))
            x, options = (x * factor).astype(x.dtype), options | {"op": gc.premul_sum(factor)}
        elif words < 0.9 and (op, dtype) in CUSTOM and "native" not in (self._comm.executor, options["algorithm"]):
            options = options | {"op": gc.elementwise_op(CUSTOM[op, dtype], oracle.identity(op, dtype))}
        return x, out, options

    def _plain(self, name, calls, turns, options):
        for turn, call in zip(turns, calls, strict=False):
            call.fill(turn)
            later = {"async_op": self._own.random() < 0.3}
            yield call.ended(getattr(self._comm, name)(call.x, **call.out, **options, **later), turn)

    def _plan(self, name, calls, turns, options):
        call = next(calls)
        call.fill(1)
        plan = self._comm.plan(name, call.x, **call.out, **options)
        for turn in turns:
            call.fill(turn)
            yield call.ended(plan(), turn)

    def _group(self, name, calls, turns, options):
        calls, took = list(itertools.islice(calls, len(turns))), numpy.zeros(1, int)
        with self._comm.group():
            self._comm.recv(took, (self.rank - 1) % self.size)
            found = []
            for turn, call in zip(turns, calls, strict=True):
                call.fill(turn)
                later = {"async_op": self._own.random() < 0.3}
                found.append(getattr(self._comm, name)(call.x, **call.out, **options, **later))
            self._comm.send(numpy.array([self.rank]), (self.rank + 1) % self.size)
        assert took[0] == (self.rank - 1) % self.size
        yield from map(Call.ended, calls, found, turns)

    # Steps

    def run_collective(self, *call):
        called(self, [call])

    def run_barrier(self):
        found = self._comm.barrier(async_op=self._own.random() < 0.5)
        assert (found if found is None else found.wait()) is None
        self.count += 1

    def run_split(self, steps):
        colors, keys = ([self._alike.choice(some) for _ in range(self.size)] for some in ((0, 0, 1, None), (-1, 0, 5)))
        color, seed = colors[self.rank], self._alike.random()
        part = self._comm.split(color, keys[self.rank])
        assert (part is None) == (color is None)
        if part is not None:
            members = sorted((rank for rank in range(self.size) if colors[rank] == color), key=keys.__getitem__)
            assert members[part.rank] == self.rank
            with part:
                self.count += Varied(part, f"{seed}/{color}").run(steps)

    def run_points(self):
        """Messages between any ranks: in their order, or all under way together and waited for in any order."""
        together, alike = self.size == 1 or self._alike.random() < 0.6, self._alike
        self._used, works, came = 0, [], []
        self.count += (number := alike.randint(1, 6))
        with self._comm.group() if together and alike.random() < 0.5 else naming("messages"):
            for turn in range(number):
                source, tag, dtype = alike.randrange(self.size), alike.choice((0, 0, 9)), alike.choice(oracle.DTYPES)
                target = (source + alike.randrange(0 if together else 1, self.size)) % self.size
                x = oracle.values("sum", dtype, source + turn, alike.choice((0, 1, 50, 5000)))
                for rank, kind, peer in ((source, "send", target), (target, "recv", source)):
                    if rank == self.rank:
                        spot = self._spot(False, x, fixed=kind == "send")
                        spot.fill(x if kind == "send" else 0)
                        works.append(getattr(self._comm, kind)(spot.given, peer, tag, async_op=together))
                        came.append((spot, x, kind == "recv"))
        for work in self._own.sample(works, len(works)) if together else ():
            work.wait()
        for spot, x, written in came:
            spot.check(written=written)
            check(spot.given.copy(), x, "message")

    def run_refused(self, collective, count):
        """What all ranks get wrong alike: a typed error, with every array as it was."""
        row, root = COLLECTIVES[collective], self._alike.randrange(self.size)
        x = numpy.ones((self.size, count) if row.input.blocks or row.ragged else count, "float32")
        spots, self._used = [self._spot(False, one, fixed=collective != "broadcast") for one in (x if collective in LISTS else [x])], 0
        for spot in spots:
            spot.fill(1)
        x = [spot.given for spot in spots] if collective in LISTS else spots[0].given
        code, wrong = self._alike.choice(wrongs(row, self.size, x))
        arguments = {"x": x} | ({"root": root} if row.rooted else {}) | (
            {"counts": [1] * self.size} if collective == "reduce_scatter_v" else {}) | wrong
        wrong_x = arguments.pop("x")
        if collective.startswith("scatter") and self.rank != root:
            wrong_x, code = None, "GC-PEER" if "x" in wrong else code
        call, wanted = getattr(self._comm, collective), {"GC-PEER": gc.PeerError, "GC-DTYPE": gc.DtypeError,
                                                         "GC-OP-DTYPE": gc.DtypeError}.get(code, gc.ArgumentError)
        way, found, self.count = self._alike.choice(("plain", "async", "plan", "group")), None, self.count + 1
        try:
            with self._comm.group() if way == "group" else naming(way):
                if way == "plan":
                    self._comm.plan(collective, wrong_x, **arguments)()
                else:
                    call(wrong_x, **arguments, async_op=way == "async")
        except gc.GpucollError as error:
            found = error
        assert type(found) is wanted, (way, wrong, found)
        assert found.code == code, (way, wrong, found)
        for spot in spots:
            spot.check()


def wrongs(row, size, x):
    """What may be wrong in a call: the code, and the arguments that are."""
    found = [("GC-ALGO", {"algorithm": "rng"}), ("GC-ALGO", {"algorithm": "tree(7)"})]
    if isinstance(x, list):
        found += [("GC-COUNTS", {"x": [*x, x[0]]}), ("GC-DTYPE", {"x": [one.astype(object) for one in x]})]
    else:
        found += [("GC-ARRAY", {"x": [1.0]}), ("GC-DTYPE", {"x": x.astype(">f4")}), ("GC-DTYPE", {"x": x.astype("O")})]
    if row.rooted:
        found += [("GC-ROOT", {"root": root}) for root in (size, -1, True, None, 0.0)]
    if row.reduces:
        found += [("GC-OP", {"op": "nope"}), ("GC-OP", {"op": ["sum"]}), ("GC-OP-DTYPE", {"op": "band"}),
                  ("GC-DTYPE", {"dtype": "int8"}), *[("GC-OP", {"op": "avg"})] * ("scan" in row.name)]
    if row.name == "reduce_scatter_v":
        found.append(("GC-COUNTS", {"counts": [2] * size}))
    if row.name != "broadcast" and not row.ragged:
        shape = x.shape[row.input.blocks:]
        out = numpy.zeros((size, *shape) if row.output.blocks else shape, x.dtype)
        fixed, both = out.view(), numpy.zeros(x.size + 1, x.dtype)
        fixed.flags.writeable = False
        found += [("GC-SHAPE", {"out": out[..., None]}), ("GC-DTYPE", {"out": out.astype("f8")}),
                  ("GC-READONLY", {"out": fixed})]
        if row.input.blocks:
            found.append(("GC-SHAPE", {"x": numpy.ones((size + 1, 2))}))
        elif not row.output.blocks:
            found.append(("GC-OVERLAP", {"x": both[1:], "out": both[:-1]}))
    return found


def without_native(collective):
    return [name for name in programs.algorithms(collective) if name != "native"]


def draw(chances, size, pairs=PAIRS, algorithms=without_native, steps=40):
    """What `run` is told, alike on all ranks: `chances` draws it before they begin."""
    def call(*, whole=True):
        collective = chances.choice(ALL)
        name = chances.choice(algorithms(collective))
        found = registry().get((collective, name))
        if whole and found is not None and found.variants is not None and chances.random() < 0.5:
            variant = f"{name}({chances.choice([*found.variants(collective, size)])})"
            name = variant if find(collective, variant).unfit(size, None) is None else name
        return collective, name, *chances.choice(pairs), chances.choice((0, 1, size, 37, 37, 3000)), chances.random()

    arguments = {"collective": call, "refused": lambda: (chances.choice(ALL), chances.choice((2, 37, 3000))),
                 "split": lambda: ([("collective", *call(whole=False)) for _ in range(5)],)}
    kinds = chances.choices(list(KINDS), KINDS.values(), k=steps)
    return [(kind, *arguments.get(kind, tuple)()) for kind in kinds], chances.random()


def run(comm, drawn):
    """The steps without a barrier between them: nothing of one call is seen by another. Returns how many calls."""
    steps, seed = drawn
    return Varied(comm, seed).run(steps)


# The command


def held():
    """What this process holds."""
    garbage.collect()
    with open("/proc/self/maps") as maps, open("/proc/self/statm") as memory:
        shared = sum("memfd" in line or "/dev/shm" in line for line in maps)
        return {"files": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task")),
                "shared memory": shared, "MiB": int(memory.read().split()[1]) * resource.getpagesize() >> 20}


def tell(*words):
    if launchers.launched()[1] == 0:
        print(*words, flush=True)


def once(name, world=None):
    """How many calls the program SEED/EXECUTOR/RANKS/NUMBER made, and what went wrong on this rank."""
    _, executor, size, _ = name.split("/")
    os.environ["GPUCOLL_DEVICE"] = "emulated" if executor in EMULATED else ""
    names = {"native": lambda collective: ["native", "auto"], "any": programs.algorithms}.get(executor, without_native)
    drawn = draw(random.Random(name), int(size), PEER if executor == "peer" else PAIRS, names, steps=100)
    options = {"executor": None if executor == "any" else executor, "timeout": seconds(30)}
    try:
        if world is None:
            return max(on_threads(int(size), run, drawn, **options)), ""
        with gc.init(**options) as comm:
            return run(comm, drawn), ""
    except Exception:
        return 0, traceback.format_exc()


def many(executor, sizes, options, world):
    """Programs on one executor until they have made their share of the calls; whether all is well."""
    programs = count = failed = 0
    began, early = time.monotonic(), None
    while count < options.calls:
        name = f"{options.seed}/{executor}/{sizes[programs % len(sizes)]}/{programs}"
        everyone = [once(name, world)] if world is None else world.allgather(once(name, world))
        wrong = [text for _, text in everyone if text]
        programs, count, failed = programs + 1, count + max(calls for calls, _ in everyone), failed + bool(wrong)
        if wrong:
            tell(f"{name} went wrong:\n{wrong[0]}")
        if early is None and count >= options.calls / 10:
            early = held()
    taken, late = time.monotonic() - began, held()
    grown = {key: late[key] - early[key] for key in late}
    grown = grown if world is None else {key: max(one[key] for one in world.allgather(grown)) for key in grown}
    leaked = [key for key in grown if grown[key] > (32 if key == "MiB" else 0)]
    tell(f"{executor}, {'threads' if world is None else 'processes'}, {','.join(map(str, sizes))} ranks, seed "
         f"{options.seed}: {programs} programs, {count} calls, {count / taken:.0f} a second; wrong: {failed}; leaked: "
         f"{', '.join(leaked) or 'nothing'} ({', '.join(f'{key} {grown[key]:+}' for key in grown)})")
    return not failed and not leaked


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20000, help="in all")
    parser.add_argument("--seed", default=str(time.time_ns() % 1000000))
    parser.add_argument("--executors", default="mpi,shared,nccl,peer", help="of processes native and any, too")
    parser.add_argument("--ranks", default="1,2,3,4,8", help="of threads")
    parser.add_argument("--replay", metavar="SEED/EXECUTOR/RANKS/NUMBER", help="only this program")
    options = parser.parse_args()
    world = bootstrap.world() if launchers.launched()[0] > 1 else None
    if world is not None:
        options.seed, options.ranks = world.bcast(options.seed), str(world.size)
    executors = options.executors.split(",")
    if {*executors} & {*EMULATED} and launchers.launched()[1] == 0:
        make_usual()
        make_peer_kernels(PEER)
    if options.replay:
        wrong = once(options.replay, world)[1]
        print(wrong)
        return bool(wrong)
    options.calls //= len(executors)
    return not all([many(one, [int(size) for size in options.ranks.split(",")], options, world) for one in executors])


if __name__ == "__main__":
    sys.exit(main())
