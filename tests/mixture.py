"""Random programs: calls of all kinds made by all ranks, compared with the oracle; ranks differ where allowed.

    python tests/mixture.py --programs 100000 --seed 7 [--steps 5] [--executors mpi,nccl] [--ranks 1,2,8]
    mpiexec -n 3 python tests/mixture.py --programs 200 --executors mpi,shared,native,any
    gpucoll run --standalone -n 3 tests/mixture.py --programs 200 --executors mpi,shared
    python tests/mixture.py --replay 7/peer/3/12/40

Ranks are threads, or processes under a launcher. Prints the number of calls, wrong results and leaks.
"""

import argparse
import ctypes
import functools
import gc as garbage
import os
import random
import sys
import time
import traceback

import hypothesis
import numpy
from hypothesis import strategies

import gpucoll as gc
from gpucoll.algorithms import find, registry
from gpucoll.core.collectives import COLLECTIVES
from gpucoll.launch import bootstrap, launchers
from harness.compiled import PEER, make_peer_kernels, make_usual
from harness.grids import SEED, naming
from harness.pace import seconds
from harness.thread_ranks import on_threads
from oracles import oracle
from oracles.spots import GUARD, Call, Spot, listed
from programs import collectives
from programs.collectives import MOVED, MOVEMENTS, REDUCTIONS, check

PAIRS = [(op, name) for op in oracle.OPS for name in oracle.DTYPES if oracle.legal(op, name)]
KINDS = {"collective": 40, "points": 4, "sendrecv": 2, "barrier": 1, "split": 1}  # weights of the kinds of steps
WAYS = {"turns": 3, "plan": 1, "group": 1, "flight": 1}  # weights of the ways to repeat a call
CUSTOM = {("sum", "float32"): "a + b", ("max", "float32"): "max(a, b)"}
CARRIED = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
IN_PLACE = ("all_reduce", "scan", "exscan", "all_to_all")
ROOM = 1 << 16  # bytes of a communicator's memory mapped by all ranks


def called(comm, calls):
    """Make each call: collective, algorithm, op, dtype, length, and a number selecting the root, or in place."""
    for call in calls:
        with naming((*call, f"{comm.size} ranks")):
            collective, algorithm, op, name, count, chance = call
            if collective in REDUCTIONS:
                collectives.reduction(comm, collective, algorithm, op, name, count, in_place=chance < 0.5)
            else:
                root = int(chance * comm.size) if COLLECTIVES[collective].rooted else 0
                MOVED[collective](comm, algorithm, name, count, root)


class Varied:
    """A communicator making calls in many ways; draws of `_alike` are equal on all ranks, draws of `_own` differ."""

    def __init__(self, comm):
        self._comm, self.rank, self.size, self.count = comm, comm.rank, comm.size, 0
        self._room, self._used = comm.zeros(ROOM, "uint8"), 0
        # Between processes a message of GPUs has no tag, and comes after all work given before.
        self._in_order = comm.mpi is not None and os.environ.get("GPUCOLL_DEVICE") == "emulated"

    def run(self, steps):
        for number, (kind, seed, *arguments) in enumerate(steps):
            self._alike, self._own = random.Random(f"{seed}"), random.Random(f"{seed}/{self.rank}")  # not `step`'s
            with naming(f"step {number} of {len(steps)}: {kind} {seed} {arguments}"):
                if not (self._in_order and kind == "points"):
                    getattr(self, f"_{kind}")(*arguments)
        return self.count

    def __getattr__(self, name):
        return functools.partial(self._call, name)

    def _spot(self, plain, x, written):
        memory = self._memory if plain or self._own.random() < 0.2 else functools.partial(numpy.empty, dtype="uint8")
        return Spot(self._own, x, memory, plain, written, not written and self._own.random() < 0.3)

    def _memory(self, nbytes):
        """Return memory of `nbytes` bytes, mapped by all ranks if some is left."""
        first, self._used = self._used, self._used + -(-nbytes // GUARD) * GUARD
        return self._room[first:first + nbytes] if self._used <= ROOM else numpy.empty(nbytes, numpy.uint8)

    def _call(self, name, x, out=None, **options):
        (way,), turns = self._alike.choices(list(WAYS), WAYS.values()), range(self._alike.choice((1, 1, 1, 2, 3, 5)))
        way = "turns" if way == "flight" and self._in_order else way
        given, like, options = self._dressed(x, out, options) if "op" in options else (x, out, options)
        in_place = name == "broadcast" or (out is x and x is not None)
        if out is None and name in (*IN_PLACE, "reduce_scatter", "all_gather") and self._own.random() < 0.7:
            in_place = name in IN_PLACE and self._own.random() < 0.5
            shape = {"reduce_scatter": given.shape[1:], "all_gather": (self.size, *given.shape)}.get(name, given.shape)
            like = numpy.empty(shape, given.dtype)
        self._used, self.count, plain = 0, self.count + len(turns), self._alike.random() < 0.2
        calls = [Call(functools.partial(self._spot, plain), name, given, like, in_place)
                 for _ in (turns if way in ("group", "flight") else (0,))]
        with naming((way, len(turns), options)):
            if self._alike.random() < 0.1:
                self._refused(name, calls[0], options)
            *others, found = (self._together if way in ("group", "flight") else self._in_turn)(
                name, calls, turns[::-1], options, way)
        for other in others:
            for pair in zip(listed(other), listed(found), strict=True):
                check(*pair, "otherwise than in the last turn")
        if found is not None and "dtype" in options:
            found = found.view(x.dtype)
        into = x if name == "broadcast" else out
        if into is None or found is None:
            return found
        into[...] = found
        return into

    def _dressed(self, x, out, options):
        """Return the same reduction, expressed in another way."""
        words, op, dtype = self._alike.random(), options["op"], x.dtype.name
        if words < 0.1:
            options = options | {"op": gc.ReduceOp(op)}
        elif words < 0.4 and dtype in CARRIED:
            x, out = (one if one is None else one.view(f"u{x.itemsize}") for one in (x, out))
            options = options | {"dtype": dtype}
        elif words < 0.6 and op == "sum" and dtype != "bool":  # by a different factor on every rank
            factor = 1 if dtype.startswith("u") else self._own.choice((1, -1))
            x, options = (x * factor).astype(x.dtype), options | {"op": gc.premul_sum(factor)}
        elif words < 0.9 and (op, dtype) in CUSTOM and "native" not in (self._comm.executor, options["algorithm"]):
            options = options | {"op": gc.elementwise_op(CUSTOM[op, dtype], oracle.identity(op, dtype))}
        return x, out, options

    def _once(self, name, call, turn, options):
        call.fill(turn)
        return getattr(self._comm, name)(call.x, **call.out, **options, async_op=self._own.random() < 0.3)

    def _in_turn(self, name, calls, turns, options, way):
        (call,) = calls
        call.fill(1)
        plan = self._comm.plan(name, call.x, **call.out, **options) if way == "plan" else None
        for turn in turns:
            call.fill(turn)
            yield call.ended(plan() if plan else self._once(name, call, turn, options), turn)

    def _together(self, name, calls, turns, options, way):
        """Begin the calls between two halves of a message, and end them in any order."""
        took, left, later = numpy.zeros(1, int), (self.rank - 1) % self.size, {"async_op": way == "flight"}
        with self._comm.group() if way == "group" else naming(way):
            came = self._comm.recv(took, left, **later)
            found = [self._once(name, call, turn, options) for call, turn in zip(calls, turns, strict=True)]
            sent = self._comm.send(numpy.array([self.rank]), (self.rank + 1) % self.size, **later)
        for work in self._own.sample([came, sent, *found], len(found) + 2):
            if isinstance(work, gc.Work):
                work.wait()
        assert took[0] == left
        yield from map(Call.ended, calls, found, turns)

    def _refused(self, name, call, options):
        """Make the call with an error common to all ranks: a typed error, and every array unchanged."""
        call.fill(0)
        code, wrong = self._alike.choice([*wrongs(COLLECTIVES[name], self.size, call.x, options)])
        way, arguments = self._alike.choice(("now", "later", "plan", "group")), call.out | options | wrong
        self.count, x, found = self.count + 1, arguments.pop("x", call.x), None
        if name.startswith("scatter") and "x" in wrong and self.rank != options["root"]:
            x, code = None, "GC-PEER"  # only the root's argument counts
        try:
            with self._comm.group() if way == "group" else naming(way):
                if way == "plan":
                    self._comm.plan(name, x, **arguments)()
                else:
                    getattr(self._comm, name)(x, **arguments, async_op=way == "later")
        except (gc.RankFailedError, gc.CollectiveTimeout, gc.RevokedError, gc.ClosedError, gc.BackendError):
            raise  # another rank has failed, in programs with failures
        except gc.GpucollError as error:
            found = error
        kind = gc.PeerError if code == "GC-PEER" else gc.DtypeError if "DTYPE" in code else gc.ArgumentError
        assert (type(found), getattr(found, "code", "")) == (kind, code), (way, wrong, found)
        for spot in call.spots:
            spot.check(ended=False)

    # Other steps

    def _collective(self, *call):
        called(self, [call])

    def _barrier(self):
        self.count += 1
        assert (self._comm.barrier(async_op=True).wait() if self._own.random() < 0.5 else self._comm.barrier()) is None

    def _split(self, steps):
        colors, keys = ([self._alike.choice(some) for _ in range(self.size)] for some in ((0, 0, 1, None), (-1, 0, 5)))
        color = colors[self.rank]
        part = self._comm.split(color, keys[self.rank])
        assert (part is None) == (color is None)
        if part is not None:
            members = sorted((rank for rank in range(self.size) if colors[rank] == color), key=keys.__getitem__)
            assert members[part.rank] == self.rank
            with part:
                self.count += Varied(part).run(steps)

    def _sendrecv(self):
        """A ring of any width, of messages with different lengths."""
        shift, dtype, self._used, self.count = self._alike.randrange(self.size), "int32", 0, self.count + 1
        counts = [self._alike.choice((0, 1, 50, 5000)) for _ in range(self.size)]
        rows = [oracle.values("sum", dtype, rank, count) for rank, count in enumerate(counts)]
        source = (self.rank - shift) % self.size
        x, out = self._spot(False, rows[self.rank], False), self._spot(False, numpy.zeros_like(rows[source]), True)
        for spot in x, out:
            spot.fill(0)
        found = self._comm.sendrecv(x.given, out.given, (self.rank + shift) % self.size, source, shift)
        assert found is out.given
        for spot in x, out:
            spot.check()
        check(out.given.copy(), rows[source])

    def _points(self):
        """Messages between any ranks: in order, or all under way together and awaited in any order."""
        together, alike = self.size == 1 or self._alike.random() < 0.6, self._alike
        self._used, works, came, number = 0, [], [], alike.randint(1, 6)
        self.count += number
        with self._comm.group() if together and alike.random() < 0.5 else naming("messages"):
            for turn in range(number):
                source, tag, dtype = alike.randrange(self.size), alike.choice((0, 0, 9)), alike.choice(oracle.DTYPES)
                target = (source + alike.randrange(0 if together else 1, self.size)) % self.size
                x = oracle.values("sum", dtype, source + turn, alike.choice((0, 1, 50, 5000)))
                for rank, kind, peer in ((source, "send", target), (target, "recv", source)):
                    if rank == self.rank:
                        spot = self._spot(False, numpy.zeros_like(x) if kind == "recv" else x, kind == "recv")
                        spot.fill(0)
                        works.append(getattr(self._comm, kind)(spot.given, peer, tag, async_op=together))
                        came.append((spot, x))
        for work in self._own.sample(works, len(works)) if together else ():
            work.wait()
        for spot, x in came:
            spot.check()
            check(spot.given.copy(), x, "message")


def wrongs(row, size, x, options):
    """Yield possible errors of a call: the code, and the wrong arguments."""
    lists, odd = row.name in ("scatter_v", "all_to_all_v"), numpy.zeros((size, 2), ">f4")
    yield from (("GC-ALGO", {"algorithm": "rng"}), ("GC-ALGO", {"algorithm": "tree(7)"}))
    yield from (("GC-COUNTS" if lists else "GC-ARRAY", {"x": 1.0}), ("GC-DTYPE", {"x": list(odd) if lists else odd}))
    if row.rooted:
        yield from (("GC-ROOT", {"root": root}) for root in (size, -1, True, None, 0.0))
    if row.reduces:
        dtype = options.get("dtype", x.dtype.name)
        yield from (("GC-OP-DTYPE", {"op": op}) for op in oracle.OPS if op != "avg" and not oracle.legal(op, dtype))
        yield from (("GC-OP", {"op": "nope"}), ("GC-OP", {"op": ["sum"]}), ("GC-DTYPE", {"dtype": "nope"}))
    if "scan" in row.name:
        yield "GC-OP", {"op": "avg"}
    if row.name == "reduce_scatter_v":
        yield "GC-COUNTS", {"counts": [len(x)] * (size + 1)}
    if row.name in IN_PLACE:
        yield "GC-DTYPE", {"out": numpy.zeros(x.shape, "M8[s]")}
        yield "GC-READONLY", {"out": numpy.broadcast_to(numpy.zeros(1, x.dtype), x.shape)}
    if row.name != "broadcast" and not row.ragged:
        yield from (("GC-SHAPE", {"out": numpy.zeros((9, 9, 9, 9))}), ("GC-ARRAY", {"out": "nope"}))
        if row.input.blocks and size > 1:  # with one rank any first axis is fine
            yield "GC-SHAPE", {"x": numpy.zeros((size + 1, 2))}


def step(seed, size, pairs=PAIRS, algorithms=None):
    """Return the step drawn from a seed, equal on all ranks; `algorithms` returns the algorithms of a collective."""
    chances = random.Random(seed)
    algorithms = algorithms or (
        lambda collective: [one for one in collectives.algorithms(collective) if one != "native"])

    def call(*, whole=True):
        collective = chances.choice((*REDUCTIONS, *MOVEMENTS))
        name = chances.choice(algorithms(collective))
        found = registry().get((collective, name))
        if whole and found is not None and found.variants is not None and chances.random() < 0.5:
            variant = f"{name}({chances.choice([*found.variants(collective, size)])})"
            name = variant if find(collective, variant).unfit(size, None) is None else name
        (count,) = chances.choices((0, 1, size, 37, 3000, 20011), (20, 20, 20, 40, 20, 1))
        return collective, name, *chances.choice(pairs), count, chances.random()

    arguments = {"collective": call, "split": lambda: (
        [("collective", chances.getrandbits(32), *call(whole=False)) for _ in range(5)],)}
    (kind,) = chances.choices(list(KINDS), KINDS.values())
    return kind, seed, *arguments.get(kind, tuple)()


def draw(chances, size, pairs=PAIRS, algorithms=None, steps=40):
    """Return a program: the argument of `run`."""
    return [step(chances.getrandbits(32), size, pairs, algorithms) for _ in range(steps)]


def given(count, test, sizes, pairs=PAIRS, algorithms=None):
    """Run `test(size, steps)` on `count` programs drawn by hypothesis; a failing program is shortened."""
    @hypothesis.seed(SEED)
    @hypothesis.settings(max_examples=count, deadline=None, database=None, suppress_health_check=hypothesis.HealthCheck)
    @hypothesis.given(strategies.sampled_from(sizes), strategies.lists(strategies.integers(0, 1 << 32), min_size=1,
                                                                       max_size=8))
    def every(size, seeds):
        test(size, [step(seed, size, pairs, algorithms) for seed in seeds])

    every()


def run(comm, steps):
    """Run the steps without barriers in between: no call may disturb another call. Return the number of calls."""
    return Varied(comm).run(steps)


# The command

SIZE, RANK = launchers.launched()
IS_STANDALONE = SIZE == 1 and int(os.environ.get("WORLD_SIZE", 1)) > 1  # of `gpucoll run --standalone`
if IS_STANDALONE:
    SIZE, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])


def told(one):
    """Return the objects of all ranks, on all ranks."""
    if IS_STANDALONE:
        with gc.init(timeout=seconds(600)) as comm:
            return comm.all_gather_object(one)
    return [one] if SIZE == 1 else bootstrap.world().allgather(one)


def held():
    """Return the resources held by this process, except kernels: each stays loaded with a descriptor."""
    garbage.collect()
    ctypes.CDLL(None).malloc_trim(0)
    files = [os.path.realpath(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd")]
    with open("/proc/self/maps") as maps, open("/proc/self/statm") as memory:
        return {"files": sum(not one.endswith(".so") for one in files), "threads": len(os.listdir("/proc/self/task")),
                "shared memory": sum("memfd" in line or "/dev/shm" in line for line in maps),
                "MiB": int(memory.read().split()[1]) >> 8}


def once(name):
    """Run the program SEED/EXECUTOR/RANKS/NUMBER/STEPS; return the number of calls, and the errors."""
    from harness.node_ranks import on_two_nodes

    _, executor, size, _, steps = name.split("/")
    os.environ["GPUCOLL_DEVICE"] = "emulated" if executor in ("nccl", "peer") else ""
    names = {"native": lambda collective: ["native", "auto"], "any": collectives.algorithms}.get(executor)
    drawn = draw(random.Random(name), int(size), PEER if executor == "peer" else PAIRS, names, int(steps))
    options, count, wrong = {"executor": None if executor == "any" else executor, "timeout": seconds(30)}, 0, ""
    try:
        if SIZE == 1:
            count = max(on_threads(int(size), run, drawn, **options))
        else:
            with on_two_nodes(bootstrap.world(), None) if executor == "hybrid" else gc.init(**options) as comm:
                count = run(comm, drawn)
    except Exception:
        wrong = traceback.format_exc()
    counts, wrongs = zip(*told((count, wrong)), strict=True)
    return max(counts), "".join(wrongs)


def many(executor, sizes, programs, steps, seed):
    """Run programs until ten have failed; yield a text for each failure and a summary, and whether the text is bad."""
    number, count, failed, began, early = 0, 0, 0, time.monotonic(), None
    while number < programs and failed < 10:
        made, wrong = once(name := f"{seed}/{executor}/{sizes[number % len(sizes)]}/{number}/{steps}")
        number, count, failed = number + 1, count + made, failed + bool(wrong)
        if wrong:
            yield f"{name} went wrong:\n{wrong}", True
        early = held() if early is None and (wrong or number >= programs / 10) else early
    grown = {key: late - early[key] for key, late in held().items()}
    grown = {key: max(one[key] for one in told(grown)) for key in grown}
    leaked = [key for key in grown if grown[key] > (64 if key == "MiB" else 0)]
    yield (f"{executor} on {'threads' if SIZE == 1 else 'processes'}, ranks {sizes}, seed {seed}: {number} "
           f"programs, {count} calls, {count / (time.monotonic() - began):.0f} a second; wrong: {failed}; "
           f"leaked: {leaked or 'nothing'}, of {grown}"), bool(leaked)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=2000, help="in all")
    parser.add_argument("--steps", type=int, default=5, help="of a program")
    parser.add_argument("--seed", default=str(time.time_ns() % 1000000))
    parser.add_argument("--executors", default="mpi,shared,nccl,peer", help="of processes native, any and hybrid too")
    parser.add_argument("--ranks", default="1,2,3,4,8", help="of threads")
    parser.add_argument("--replay", metavar="SEED/EXECUTOR/RANKS/NUMBER/STEPS", help="only this program")
    options = parser.parse_args()
    if options.replay:
        sys.exit(once(options.replay)[1] or None)
    sizes = [int(size) for size in options.ranks.split(",")] if SIZE == 1 else [SIZE]
    seed, executors = told(options.seed)[0], options.executors.split(",")
    if {"nccl", "peer"} & {*executors}:
        make_usual()
        make_peer_kernels(PEER)
    ctypes.CDLL(None).mallopt(-8, 1)  # one arena for all threads, so that freed memory is returned to the system
    bad = []
    for executor in executors:
        for text, is_bad in many(executor, sizes, options.programs // len(executors), options.steps, seed):
            if RANK == 0:
                print(text, flush=True)
            bad += [executor] * is_bad
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
