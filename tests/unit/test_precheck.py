"""`gpucoll.precheck`: programs whose calls agree have no finding; every planted disagreement is found, with its lines.

The calls in which rank 1 differs come from `multirank/disagreements.py`, random programs from `mixture.py` with the
values of the oracle.
"""

import json
import os
import random
import re
import sys
import threading
import tomllib
from pathlib import Path

import numpy
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

import gpucoll as gc
import mixture
from faults.faulty_programs import PROGRAMS
from gpucoll.core.collectives import COLLECTIVES
from gpucoll.device import store
from gpucoll.precheck.script import check_script
from gpucoll.precheck.state import is_of_program
from harness.grids import often
from harness.jobs import python
from harness.ranks import find_launcher
from harness.sources import ROOT
from multirank.disagreements import CULPRIT, cases, made

TRAIN = ROOT / "scripts/train.py"
RANKS = 4


def line(source, text):
    """Return "file:line" of the line of a function's source with `text`."""
    number = next(index for index, row in enumerate(Path(__file__).read_text().splitlines(), 1) if text in row)
    return f"{source}:{number}"


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_way_of_disagreeing_is_found_and_no_other(collective):
    names = ["auto", *gc.algorithms(collective, size=RANKS, op="sum", dtype="f8")][:3]
    for case in cases(collective, names):
        other = names[(names.index(case.algorithm) + 1) % len(names)]
        found = gc.precheck(lambda comm: made(comm, case, 12, other), RANKS)  # noqa: B023
        if case.code:
            kind = {"GC-PEER": "refused", "GC-ALGO": "algorithm"}.get(case.code, case.code[3:].lower())
            assert (found[0]["kind"], found[0]["ranks"]) == (kind, [CULPRIT]), (case, found)
            assert all("disagreements.py:" in place for place in found[0]["places"])
        else:
            assert found == [], case


@pytest.mark.parametrize("number", range(12))
def test_random_programs_with_right_values_have_no_finding(number):
    check_random(range(5 * number, 5 * number + 5))


def check_random(numbers):
    for number in numbers:
        chances = random.Random(number)
        size = chances.choice((1, 2, 3, 4, 5, 8))
        steps = mixture.draw(chances, size, steps=chances.randint(1, 5))
        assert gc.precheck(lambda comm: mixture.run(comm, steps), size) == [], (number, size, steps)  # noqa: B023


@pytest.mark.nightly
def test_ten_thousand_random_programs_have_no_finding():
    check_random(range(1000, 11_000))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.function.__name__)
def test_a_fault_is_found_with_kind_ranks_and_line(program):
    found = gc.precheck(program.function, program.size)
    assert [(one["kind"], one["ranks"]) for one in found] == [(program.kind, [*program.ranks])], found
    first = found[0]
    source = program.function.__code__.co_filename
    there = {place.removeprefix(f"{source}:") for place in first["places"]}
    assert program.lines() <= there, (program.lines(), found)
    assert all(re.fullmatch(r".+:\d+", place) for place in first["places"])


def test_where_the_ranks_last_agreed_is_told():
    def diverges(comm):
        comm.barrier()  # the last agreement
        comm.all_reduce(numpy.ones(2), op="max" if comm.rank == 2 else "sum")  # the difference

    (found,) = gc.precheck(diverges, RANKS)
    assert found["agreed"] == [line(__file__, "barrier()  # the last agreement")]
    assert found["places"] == [line(__file__, "else \"sum\")  # the difference")]
    assert [one["ranks"] for one in found["calls"]] == [[2], [0, 1, 3]]


def test_values_decide_up_to_the_bound_and_only_shapes_above():
    def decides(comm):
        assert comm.all_reduce(numpy.ones(1 << 10))[5] == comm.size
        big = comm.all_reduce(numpy.ones(1 << 24, numpy.uint8), numpy.empty(1 << 24, numpy.uint8))
        assert big.shape == (1 << 24,)

    assert gc.precheck(decides, 16) == []


def test_each_rank_has_random_numbers_environment_and_world_of_its_own(tmp_path):
    program = tmp_path / "own.py"
    program.write_text(OWN)
    assert command(program, 3) == (0, f"{program}: the calls of 3 ranks agree\n")
    unseeded = OWN.replace("numpy.random.seed(5)", "pass").replace("size = 3", "size = numpy.random.randint(9)")
    program.write_text(unseeded.replace("is_seeded = True", "is_seeded = False"))
    code, text = command(program, 8, "--json")
    (found,) = json.loads(text)
    assert (code, found["kind"], found["places"]) == (1, "shape", [f"{program}:{OWN.splitlines().index(LAST) + 1}"])


LAST = "comm.all_reduce(numpy.ones(size))"
OWN = f"""import os
import random
import sys

import numpy

import gpucoll as gc

numpy.random.seed(5)
random.seed(5)
size = 3
comm = gc.init()
assert comm is gc.init()
assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(comm.rank), str(comm.size))
first = numpy.random.rand(), random.random()
comm.barrier()
second = numpy.random.rand(), random.random()
is_seeded = True
assert not is_seeded or comm.all_gather_object((first, second)) == [(first, second)] * comm.size
assert sys.modules["__main__"].comm is comm
os.environ["MINE"] = str(comm.rank)
{LAST}
assert os.environ["MINE"] == str(comm.rank)
print("no line of this output")
sys.exit(0)
"""


def test_each_rank_imports_the_programs_modules_for_itself(tmp_path):
    (tmp_path / "helper.py").write_text(HELPER)
    program = tmp_path / "uses.py"
    program.write_text("import helper\nhelper.seen.append(1)\nassert helper.seen == [1]\nhelper.comm.barrier()\n"
                       "assert helper.rank == helper.comm.all_gather_object(helper.rank)[helper.comm.rank]\n")
    assert command(program, 5)[0] == 0


HELPER = """import gpucoll
comm = gpucoll.init()
rank, seen = comm.rank, []
comm.barrier()
"""


def test_a_program_that_catches_everything_ends(tmp_path):
    program = tmp_path / "stubborn.py"
    program.write_text("import gpucoll\ncomm = gpucoll.init()\nwhile comm.rank:\n    try:\n        comm.barrier()\n"
                       "    except BaseException:\n        pass\n")
    code, text = command(program, 2, "--json")
    assert (code, [(one["kind"], one["ranks"]) for one in json.loads(text)]) == (1, [("ended", [0])])


def command(program, ranks, *flags, options=()):
    """Run the command in a process, as the program may start MPI; return exit code and output."""
    job = python("-m", "gpucoll", "precheck", "-n", ranks, *flags, program, *options, cwd=ROOT, timeout=250)
    assert job.stderr == "" or job.returncode, job.stderr
    return job.returncode, job.stdout


def test_programs_of_torch_distributed_and_mpi4py_are_followed(tmp_path):
    program = tmp_path / "ours.py"
    program.write_text(DISTRIBUTED)
    assert command(program, 4)[0] == 0
    program.write_text(DISTRIBUTED + "if rank == 2:\n    dist.barrier()\n")
    code, text = command(program, 4, "--json")
    assert (code, [(one["kind"], one["ranks"]) for one in json.loads(text)]) == (1, [("ended", [2])])
    if find_launcher() is None:
        pytest.skip("mpi4py needs an MPI")
    program.write_text(MPI4PY)
    assert command(program, 4)[0] == 0
    program.write_text(MPI4PY + "world.Send(x, (rank + 1) % size)\n")
    code, text = command(program, 4, "--json")
    (found,) = json.loads(text)
    assert (code, found["kind"], found["ranks"], found["call"]) == (1, "deadlock", [0, 1, 2, 3], "send")


DISTRIBUTED = """import numpy

import gpucoll.distributed as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
x = numpy.full(3, rank + 1.0)
dist.all_reduce(x)
assert x[0] == size * (size + 1) / 2
pair = dist.new_group([0, 1])
if rank < 2:
    dist.all_reduce(x, group=pair)
dist.monitored_barrier(timeout=30)
works = [dist.isend(x, 1)] if rank == 0 else [dist.irecv(x)] if rank == 1 else []
for work in works:
    work.wait()
"""
MPI4PY = """import numpy
from mpi4py import MPI

import gpucoll.mpi

world = MPI.COMM_WORLD
rank, size = world.Get_rank(), world.size
comm = gpucoll.mpi.Comm(world)
x, y = numpy.full(3, float(rank)), numpy.empty(3)
comm.Allreduce(x, y, op=MPI.MAX)
assert y[0] == size - 1 and world.allreduce(rank) == size * (size - 1) // 2
half = comm.Split(rank % 2, rank)
half.Bcast(y)
assert half.size == (size + 1 - rank % 2) // 2
request = comm.Irecv(y, (rank - 1) % size)
comm.Send(x, (rank + 1) % size)
request.Wait()
assert y[0] == (rank - 1) % size and world.bcast({"a": rank}, root=1) == {"a": 1}
"""


@pytest.mark.parametrize("strategy", often(["data_parallel", "zero3", "parameter_server"], "zero3"))
def test_a_training_agrees(strategy):
    code, text = command(TRAIN, 5, options=["--epochs", "1", "--strategy", strategy, "--progress", "off"])
    assert (code, text) == (0, f"{TRAIN}: the calls of 5 ranks agree\n")


def test_a_precheck_leaves_the_process_as_it_was(monkeypatch):
    monkeypatch.setenv("GPUCOLL_DUMP_DIR", "/nowhere")
    state = numpy.random.get_state()[1].tolist()
    arguments, module = sys.argv, sys.modules["__main__"]
    assert gc.precheck(lambda comm: comm.all_reduce(numpy.random.rand(3 + comm.rank)), 3) != []
    assert numpy.random.get_state()[1].tolist() == state
    assert (sys.argv, sys.modules["__main__"]) == (arguments, module)
    assert gc.run_local(lambda comm: comm.all_reduce(numpy.ones(1))[0], 2) == [2.0, 2.0]


def test_products_of_a_rank_take_one_thread():
    threads = set()
    with threadpool_limits(2, "blas"):
        assert gc.precheck(lambda comm: threads.update(one["num_threads"] for one in threadpool_info()
                                                   if one["user_api"] == "blas"), 2) == []
    assert threads == {1}


def test_ranks_have_numbers_of_their_own_from_a_generator_put_in_place_of_numpys():
    def draws(comm):
        numpy.random.seed(comm.rank)
        found = []
        for _ in range(3):
            found.append(numpy.random.rand())
            comm.barrier()
        assert found == numpy.random.RandomState(comm.rank).rand(3).tolist()

    assert gc.precheck(draws, 3) == []
    before = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.MT19937(7))
    try:
        assert gc.precheck(draws, 3) == []
    finally:
        numpy.random.set_bit_generator(before)


def test_what_cannot_be_checked_is_refused(tmp_path):
    for size in (0, 1.5, True, "4", 1 << 20):
        with pytest.raises(gc.ArgumentError, match="GC-PRECHECK"):
            gc.precheck(print, size)
    (found,) = gc.precheck(lambda comm: gc.precheck(print, 2), 1)
    assert "GC-PRECHECK" in found["message"]
    with pytest.raises(gc.ArgumentError, match="cannot be run"):
        check_script(str(tmp_path / "missing.py"), [], 2)


def test_the_command_ends_with_two_where_a_program_cannot_be_checked(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import gpucoll as gc\ncomm = gc.init()\nif comm.rank == 1:\n    gc.precheck(print, 2)\n"
                       "comm.barrier()\n")
    code, text = command(program, 3, "--json")
    (found,) = json.loads(text)
    assert (code, found["kind"], found["ranks"]) == (2, "unsupported", [1])
    assert command(program, 0) == (2, "")


@pytest.mark.parametrize("inside", [store.__file__, "<frozen importlib._bootstrap>"])
def test_no_rank_gives_up_its_turn_inside_of_a_lock_of_all_ranks(tmp_path, inside):
    """A compiler, or another process with the same kernel, is awaited by pauses; so are some imports."""
    program = tmp_path / "program.py"
    program.write_text(f"""
import gpucoll as gc, subprocess, threading, time
lock = vars(subprocess).setdefault("of_all_ranks", threading.Lock())
with gc.init() as comm:
    comm.barrier()
    assert lock.acquire(blocking=False), "another rank holds the lock"
    exec(compile("time.sleep(1e-3)", {inside!r}, "exec"))
    lock.release()
""")
    assert check_script(str(program), [], 2)[0] == []


def test_a_check_without_room_for_a_thread_has_failed(monkeypatch):
    def start(thread):
        if thread.name == "rank 2":
            raise RuntimeError("can't start new thread")
        starts(thread)

    starts = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(gc.UsageError, match="can't start new thread"):
        gc.precheck(lambda comm: comm.barrier(), 4)


@pytest.mark.nightly
def test_a_thousand_ranks_of_a_training_agree():
    code, text = command(TRAIN, 1024, options=["--epochs", "1", "--progress", "off"])
    assert (code, text) == (0, f"{TRAIN}: the calls of 1024 ranks agree\n")


@pytest.mark.parametrize(("file", "is_own"), [
    ("/home/me/train.py", True), ("/home/me/.local/lib/python3.11/site-packages/torch/__init__.py", False),
    ("/usr/lib/python3/dist-packages/numpy/__init__.py", False), (os.__file__, False), ("/home/me/fast.so", False)])
def test_installed_packages_are_shared_by_all_ranks(file, is_own):
    assert is_of_program(file) is is_own


PROGRAMS = tomllib.loads((Path(__file__).parents[1] / "faults/process_programs.toml").read_text())
HEAD, RIGHT = PROGRAMS["head"], PROGRAMS["right"]
WRONG = {name: text for kind in ("texts", "addresses", "numbers", "chance", "threads", "ends")
         for name, text in PROGRAMS[kind].items()}
UNKNOWN = {"unsupported", "process"}  # kinds with exit code 2


def findings(folder, text):
    """Run the command for a program whose ranks may differ; return the exit code and the findings."""
    (program := folder / "program.py").write_text(HEAD + text + "\n")
    code, found = command(program, RANKS, "--json", options=[folder])
    return code, json.loads(found)


def check(folder, name):
    code, found = findings(folder, WRONG.get(name) or RIGHT[name])
    kinds = [one["kind"] for one in found]
    assert code == (2 if {*kinds} & UNKNOWN else 1 if kinds else 0), found
    assert name in RIGHT or code, f"{name} agrees"
    assert name in WRONG or not {*kinds} - UNKNOWN, found
    assert all(re.search(r"\w+ \w+ \w+", one["message"]) for one in found)  # a sentence
    return found


CERTAIN = {  # the programs that always run: kind of the finding, and a word of its message
    "a loop over a set": ("process", "order of a set"), "a number of a process": ("process", "number of a process"),
    "a thread that drops errors": ("unsupported", "another thread"), "a call at the exit": ("ended", "rank 3"),
    "SIGKILL": ("unsupported", "SIGKILL"), "execv": ("unsupported", "replaces its process"),
    "os._exit with a code": ("exit", "3"), "sorted by address": ("shape", "ranks"),
}


@pytest.mark.parametrize(("name", "kind", "word"), [(name, *rest) for name, rest in CERTAIN.items()])
def test_what_differs_between_processes_is_a_finding_or_cannot_be_checked(tmp_path, name, kind, word):
    (found,) = check(tmp_path, name)
    assert (found["kind"], word in found["message"]) == (kind, True), found


def test_two_runs_name_the_ranks_and_both_lines(tmp_path):
    code, (found,) = findings(tmp_path, "if hash('weight') % 97 == 77: comm.barrier()\ncomm.all_gather(np.ones(2))\n")
    first = len(HEAD.splitlines())
    assert (code, found["kind"], found["ranks"]) == (2, "process", [*range(RANKS)])
    assert [place.rpartition(":")[2] for place in found["places"]] == [str(first + 1), str(first + 2)], found
    assert [one["call"].split()[0] for one in found["calls"]] == ["barrier,", "all_gather"]


WHYS = {"one rank's order": "one rank tells the others", "a folder that must be new": "FileExistsError",
        "one rank's random number": "", "an exit taken back": "", "objects of any length": ""}


@pytest.mark.parametrize(("name", "why"), WHYS.items())
def test_a_right_program_has_no_finding(tmp_path, name, why):
    found = check(tmp_path, name)
    assert [why in one["message"] for one in found] == [True] * bool(why), found


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted({*WRONG, *RIGHT} - {*CERTAIN, *WHYS}))
def test_no_program_that_depends_on_its_process_agrees_and_no_right_one_has_a_finding(tmp_path, name):
    check(tmp_path, name)
