"""Equal ranks of a rehearsal run once: their processes have the results of every rank, and prove agreement only.

`shared_rehearsals.py` has the programs. Operations on a `PerRank` are compared with Python's own, rank by rank.
"""

import contextlib
import copy
import functools
import json
import operator
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest

from gpucoll.core.signature import Signature
from gpucoll.rehearsal import coordinator
from gpucoll.rehearsal.coordinator import Coordinator, Given, send
from gpucoll.rehearsal.per_rank import BINARY, COMPARISONS, UNARY, PerRank, lift, mark_of, per_rank
from gpucoll.rehearsal.rewriting import rewritten
from pace import seconds

TESTS = Path(__file__).parents[1]


def check(name, limit=60):
    """Return the results of a check of `shared_rehearsals.py`, in at most `limit` seconds."""
    job = subprocess.run([sys.executable, TESTS / "shared_rehearsals.py", name], capture_output=True, text=True,
                         timeout=seconds(limit), check=False)
    assert job.returncode == 0, job.stderr
    return json.loads(job.stdout)


def test_every_rank_has_the_values_of_its_own_process():
    found = check("agreeing")
    assert len(found) == 12
    assert [one for one in found if one[1] is not None] == []


def test_equal_ranks_run_once():
    assert check("equal_ranks") == [[None, 3]]


def test_a_program_gives_up_before_it_changes_anything_outside():
    for name, why, reason in check("others"):
        assert reason is not None, name
        assert why in reason, (name, reason)


@pytest.mark.parametrize("name", ["faults", pytest.param("disagreements", marks=pytest.mark.slow)])
def test_no_fault_is_taken_for_agreement(name):
    found = check(name, limit=200)
    for case, *code, reason in found:
        assert (reason is None) == (code == [None] or code == [""]), (case, code, reason)


def test_random_programs_agree_or_are_not_followed():
    for number, reason in check("random_programs"):
        assert reason is None or reason.startswith(("a message between", "refused arguments")), (number, reason)


# ---------------------------------------------------------------- values of each rank


class Chosen(Exception):
    """Raised in place of a fork."""


class Numbers:
    """Ranks without processes."""

    numbers = (0, 1, 2, 5)

    def choose(self, values):
        raise Chosen(values)


RANKS = Numbers()
OTHERS = (3, -2, 0, 2.5, True, numpy.int64(3), numpy.float32(0.5))


def values_of(found):
    return {number: found.of(number) if type(found) is PerRank else found for number in RANKS.numbers}


def expected(function, *arguments):
    try:
        return {number: function(*(one.of(number) if type(one) is PerRank else one for one in arguments))
                for number in RANKS.numbers}
    except (ZeroDivisionError, TypeError, ValueError):
        return None


def test_operations_are_those_of_each_rank():
    rank = PerRank(RANKS, {number: number for number in RANKS.numbers})
    other = rank * rank - 4
    for name in (*BINARY, *COMPARISONS):
        function = getattr(operator, f"__{name}__")
        for pair in ((rank, other), *((rank, one) for one in OTHERS), *((one, rank) for one in OTHERS[:5])):
            wanted = expected(function, *pair)
            differs = wanted is None or len({*wanted.values()}) > 1
            if wanted is None or (name in COMPARISONS and differs):  # errors, and truth values, are told apart at once
                with pytest.raises(Chosen):
                    function(*pair)
            else:
                found = values_of(function(*pair))
                assert found == wanted, (name, pair)
                assert [*map(type, found.values())] == [*map(type, wanted.values())]
    for name in UNARY:
        assert values_of(getattr(operator, name)(other)) == expected(getattr(operator, name), other)
    assert values_of(divmod(rank, 2)[1]) == {0: 0, 1: 1, 2: 0, 5: 1}
    assert values_of(rank.bit_length()) == {0: 0, 1: 1, 2: 2, 5: 3}


def test_equal_values_are_plain_and_others_are_told_apart():
    rank = PerRank(RANKS, {number: number for number in RANKS.numbers})
    assert type(rank < 6) is bool
    assert mark_of(numpy.zeros((0, 2))) == mark_of(numpy.ones((0, 2)))  # nothing can be changed
    assert mark_of(numpy.zeros(1)) != mark_of(numpy.zeros(1))
    assert type(rank * 0) is int
    assert type(per_rank(RANKS, dict.fromkeys(RANKS.numbers, float("nan")))) is float
    assert type(per_rank(RANKS, {0: 0.0, 1: -0.0, 2: 0.0, 5: 0.0})) is PerRank
    # A program may ask for the type or for the object, or change the object.
    for first, second in ((1, True), (1, 1.0), (numpy.int64(1), 1), (0, None), (True, False), ([], [])):
        with pytest.raises(Chosen):
            per_rank(RANKS, {0: first, 1: second, 2: first, 5: first})
    for use in (bool, int, float, str, repr, hash, operator.index, pickle.dumps, numpy.asarray, "{}".format, range,
                "%d".__mod__, [1, 2].__getitem__, lambda one: numpy.ones(3) + one, lambda one: [0] * one):
        with pytest.raises(Chosen):
            use(rank)
    assert isinstance(rank, int)
    assert copy.deepcopy([rank])[0] is rank


def test_rewritten_code_keeps_equal_ranks_together(monkeypatch):
    rank = PerRank(RANKS, {number: number for number in RANKS.numbers})
    text = lift(str, rank)
    place = {"rank": rank, "text": text, "table": ["a", "a", "a", "b", "b", "a"], "ranks": [rank] * 6, "log": []}
    same = (b"same = [text is None, (rank < 3) is True, type(rank) is int, [[0], [1]] is rank]\n"
            b"match rank < 6:\n    case True:\n        same.append(5)\n")
    with pytest.raises(Chosen):
        exec(rewritten(same, "program.py"), place)
    exec(rewritten(same.replace(b"< 3", b"< 6").replace(b" is rank", b""), "program.py"), place)
    assert place["same"] == [False, True, True, [[0], [1]], 5]
    for subject in (b"rank < 3", b"(rank < 3, 1)[0:1]"):
        with pytest.raises(Chosen):
            exec(rewritten(b"match " + subject + b":\n    case [True] | True:\n        pass\n", "program.py"), place)
    with pytest.raises(Chosen):  # the ranks may change the objects
        exec(rewritten(b"[array, array.copy(), array.copy(), 0, 0, array][rank]", "program.py"),
             place | {"array": numpy.zeros(1)})
    source = (b"first = table[rank]\nsecond = int(text)\nthird = ranks[rank]\nkind: list[int] = [int('3', base=8)]\n"
              b"nested = {'a': table[int(text)]}['a'][0]\n"
              b"def f(x: list[int]) -> None:\n    print(f'{rank:d} of {len(table)}', rank, *log, sep='')\n"
              b"    print('%d of %d' % (rank, 6), '%s' % rank, 'is {} {n}'.format(rank, n=rank))\n"
              b"import sys\ndef g():\n    print('rank', rank, file=sys.stderr)\n"
              b"def h(words):\n    print('rank', rank, **words)\n")
    exec(rewritten(source, "program.py"), place)
    assert (place["first"], place["nested"], place["kind"]) == ("a", "a", [3])
    assert values_of(place["second"]) == values_of(place["third"]) == values_of(rank)
    with pytest.raises(Chosen):  # the output may be read
        place["f"](0)
    with open("/dev/null", "w") as nowhere, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", nowhere)
        place["f"](0)
        with monkeypatch.context() as inner:
            inner.setattr(sys, "__stderr__", nowhere)
            inner.setattr(sys, "stderr", nowhere)
            place["g"]()
        with pytest.raises(Chosen):
            place["h"]({"file": sys.stderr})
        place["print"] = functools.partial(print, flush=True)
        place["f"](0)
        place["print"] = "{}".format
        with pytest.raises(Chosen):
            place["f"](0)
    monkeypatch.setattr(sys, "stdout", type("Tee", (), {"name": "/dev/null", "write": len})())
    del place["print"]
    with pytest.raises(Chosen):
        place["f"](0)


# ---------------------------------------------------------------- the coordinator


def reason_of(*messages, second=()):
    """Return the reason of a coordinator of two ranks: `messages` of the first process, then those of the second."""
    ends, other = socket.socketpair(), socket.socketpair()
    for message in messages:
        send(ends[1], message, *([other[0].fileno()] if message[0] == "part" else []))
    for message in second:
        send(other[1], message)
    for one in (ends[1], *other):
        one.close()
    leader = subprocess.Popen(["sleep", "1000"], process_group=0)
    try:
        return Coordinator(ends[0], 2, leader.pid).run()
    finally:
        leader.kill()


GROUP, CALL = ("group", "all", (0, 1)), ("call", "all", 1, Signature("barrier").encode(), Given())


PARTED = ("part", (1,)), ("parted",)


def test_the_coordinator_proves_only_what_has_ended(monkeypatch):
    assert reason_of(("end",)) is None
    assert reason_of(GROUP, CALL, ("end",)) is None
    assert reason_of(*PARTED, ("end",), second=[("end",)]) is None
    assert "ended early" in reason_of(GROUP, CALL)
    assert "ended early" in reason_of(*PARTED, ("end",), second=[GROUP, CALL])
    assert reason_of(*PARTED, ("end",), second=[GROUP, CALL, ("end",)]) == "calls are left"
    assert reason_of(*PARTED, ("gave up", "a reason"), second=[("end",)]) == "a reason"
    assert reason_of(PARTED[0], ("end",), second=[("end",)]) == "a process has ended before a fork"
    assert reason_of(GROUP, (*CALL[:3], "no signature", Given(request=b"?")), CALL).startswith("UnpicklingError")
    monkeypatch.setattr(coordinator, "RESERVE", 1 << 60)
    assert "too much memory" in reason_of(*PARTED, ("end",), second=[("end",)])
    monkeypatch.setattr(coordinator, "MOST_PROCESSES", 1)
    assert reason_of(*PARTED, ("end",), second=[("end",)]) == "too many different ranks"


# ---------------------------------------------------------------- the command


def command(tmp_path, text, *, ranks=64):
    """Run the command on a program with many ranks; return exit code, findings and the note on stderr."""
    program = tmp_path / "program.py"
    program.write_text("import os\nimport numpy\nimport gpucoll as gc\ncomm = gc.init()\nrank, size = comm.rank, "
                       f"comm.size\n{text}\n")
    job = subprocess.run([sys.executable, "-m", "gpucoll", "precheck", "-n", str(ranks), "--json", str(program)],
                         capture_output=True, text=True, timeout=seconds(200), check=False)
    return job.returncode, json.loads(job.stdout), job.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_command(tmp_path, number):
    program = tmp_path / "program.py"
    program.write_text("import gpucoll as gc\ncomm = gc.init()\nwhile comm.rank < 2:\n    pass\ncomm.barrier()\n")
    job = subprocess.Popen([sys.executable, "-m", "gpucoll", "precheck", "-n", "64", program], process_group=0,
                           stderr=subprocess.DEVNULL, preexec_fn=lambda: signal.signal(
                               signal.SIGINT, signal.default_int_handler))
    deadline = time.monotonic() + seconds(60)
    try:
        while len(running(program)) < 4:  # the command, its guard and two groups of ranks
            assert time.monotonic() < deadline
            time.sleep(0.05)
        job.send_signal(number)
        job.wait(seconds(60))
        while running(program):
            assert time.monotonic() < deadline, running(program)
            time.sleep(0.05)
    finally:
        for process in running(program):
            os.kill(process, signal.SIGKILL)


def running(program):
    """Return the numbers of all processes of the command that checks a program; an ended process has no arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if os.fsencode(program) in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def test_the_command_proves_agreement_of_equal_ranks(tmp_path):
    text = ("assert int(os.environ['RANK']) == rank\nprint(f'rank {rank} of {size}')\nbest = [0, 1][rank >= 32]\n"
            "x = comm.all_reduce(numpy.full(3, best))\nassert x[0] == 32\ncomm.close()")
    assert command(tmp_path, text) == (0, [], "")


@pytest.mark.parametrize(("text", "kind", "ranks", "note"), [
    ("if rank != 40:\n    comm.barrier()", "ended", [40], "calls differ: "),
    ("comm.all_reduce(numpy.zeros(3 + (rank == 7)))", "shape", [7], "calls differ: all_reduce and all_reduce"),
    ("comm.send(numpy.ones(1), (rank + 1) % size)", "deadlock", [*range(64)], "a message between two ranks")])
def test_the_command_names_what_keeps_ranks_from_agreeing(tmp_path, text, kind, ranks, note):
    code, (found,), error = command(tmp_path, text)
    assert (code, found["kind"], found["ranks"]) == (1, kind, ranks)
    assert error.startswith(f"precheck: the 64 ranks run one by one: {note}")
