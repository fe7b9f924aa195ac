"""Users' own algorithms: registration, proof before use, prices, drawings, loading from files, and named mistakes."""

import json
import os
from pathlib import Path

import numpy
import pytest

import gpucoll as gc
from gpucoll import Copy, Recv, Reduce, Send, Slice
from gpucoll.lab.draw import draw
from gpucoll.lab.verify import verify
from gpucoll.tuner.choice import allowed, scheduled
from gpucoll.verify.user import Claim, proved
from harness.commands_of import run
from harness.refusals import refused
from harness.thread_ranks import on_threads

OWN = str(Path(__file__).parents[1] / "programs" / "own.py")
IN, OUT, HELD = Slice("input", 0), Slice("output", 0), Slice("scratch", 0)
pytestmark = pytest.mark.usefixtures("own_algorithms")


def ring(rank, size):
    """All-reduce one chunk without fault: each input goes once around the ring, and each rank adds it to the output."""
    right, left = (rank + 1) % size, (rank - 1) % size
    yield Copy(IN, OUT), Send(IN, right), Recv(HELD, left)
    for turn in range(size - 1):
        more = (Send(HELD, right), Recv(HELD, left)) if turn < size - 2 else ()
        yield Reduce(HELD, OUT), *more


def changed(where, change):
    """Return the generator `ring` with `change(steps)` in place of the steps of `where`, a (rank, round)."""
    def make(rank, size):
        for number, steps in enumerate(ring(rank, size), 1):
            yield change(steps) if (rank, number) == where else steps

    return make


def raises(steps):
    raise KeyError("nothing")


MISTAKES = {  # mistake: the change of the steps, and the words of the error after rank and round
    "a step is missing": (lambda steps: steps[1:], "output chunk 0.*contributions"),
    "a step twice": (lambda steps: (steps[0], *steps), "output chunk 0.*contributions"),
    "a copy for a reduction": (lambda steps: (Copy(HELD, OUT), *steps[1:]), "output chunk 0.*contributions"),
    "a send is missing": (lambda steps: (steps[0], steps[2]), "scratch chunk 0.*waits for ever"),
    "a receive is missing": (lambda steps: steps[:2], "(scratch|output) chunk 0.*waits for ever"),
    "another chunk": (lambda steps: (Reduce(Slice("input", 1), OUT), *steps[1:]), "output chunk 0.*not in the"),
    "a chunk before the first": (lambda steps: (Reduce(Slice("scratch", -1), OUT), *steps[1:]), "output .*not in"),
    "nobody has written it": (lambda steps: (Reduce(Slice("scratch", 3), OUT), *steps[1:]),
                              "output chunk 0.*written by no step"),
    "writes to input": (lambda steps: (Copy(HELD, IN), *steps), "input chunk 0.*writes to input"),
    "two writers": (lambda steps: (*steps, Copy(IN, HELD)), "scratch chunk 0.*an earlier step of the round"),
    "of unlike lengths": (lambda steps: (Reduce(Slice("scratch", 0, 2), OUT), *steps[1:]), "output chunk 0.*lengths"),
    "a peer that is not there": (lambda steps: (Send(HELD, 4), *steps), "scratch chunk 0.*another rank of 0..3"),
    "a peer that is itself": (lambda steps: (Send(HELD, 2), *steps), "scratch chunk 0.*another rank"),
    "no tuple": (lambda steps: steps[0], "no chunk: it is Reduce.*not a tuple of steps"),
    "no step": (lambda steps: ("send", *steps), "no chunk: 'send' is no step"),
    "no slice": (lambda steps: (Reduce(0, OUT), *steps), "no chunk: Reduce.*slices are"),
    "no buffer": (lambda steps: (Reduce(Slice("outptu", 0), OUT), *steps), "no chunk: Reduce.*slices are"),
    "half a chunk": (lambda steps: (Reduce(Slice("input", 0.5), OUT), *steps), "no chunk: Reduce.*slices are"),
    "it raises": (raises, "no chunk: the generator raised KeyError: 'nothing'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake):
    """Errors name rank, round and chunk: of the faulty step, of the faulty rank's last round, or of the partner."""
    change, words = MISTAKES[mistake]
    name = "faulty_" + mistake.replace(" ", "_")
    gc.algorithm("all_reduce", name, chunks=1)(changed((2, 2), change))
    with pytest.raises(gc.ArgumentError, match=f"(?s)rank [0-3], round [1-4], {words}") as caught:
        gc.schedule("all_reduce", name, rank=0, size=4)
    assert caught.value.code == "GC-PROOF"
    assert name in str(caught.value)
    if "waits for ever" not in words:
        assert "rank 2, round" in str(caught.value)
    if "no chunk" not in words and "another rank" not in words:
        assert "who holds what" in str(caught.value)
        assert "rank 2 output   [0=0 of " in str(caught.value) or "rank 2 its input" in str(caught.value) \
            or "waits" in str(caught.value)
    with pytest.raises(gc.ArgumentError, match="GC-PROOF"):  # the registry does not take a refused algorithm for proved
        on_threads(4, lambda comm: comm.all_reduce(numpy.ones(3), algorithm=name), executor="mpi")


def test_what_never_ends_or_changes_is_refused(monkeypatch):
    monkeypatch.setattr("gpucoll.verify.user.ROUND_LIMIT", 50)

    @gc.algorithm("all_reduce", "endless", chunks=1)
    def endless(rank, size):
        while True:
            yield ()

    with pytest.raises(gc.ArgumentError, match=r"round 51, .*ever end"):
        gc.schedule("all_reduce", "endless", rank=0, size=2)
    times = []

    @gc.algorithm("all_reduce", "restless", chunks=1)
    def restless(rank, size):
        times.append(rank)
        yield from ring(rank, size)
        if len(times) > size:
            yield ()

    made = gc.schedule("all_reduce", "restless", rank=0, size=3)
    with pytest.raises(gc.ArgumentError, match="rank 0 does not yield the proved rounds"):
        list(made)


@pytest.mark.parametrize(("arguments", "make", "words"), [
    (("all_reduce", "ring"), ring, "cannot be named 'ring': the library has this"),
    (("all_reduce", "linear"), ring, "library has this"), (("all_reduce", "auto"), ring, "library has this"),
    (("all_reduce", "a-b"), ring, "letters and digits"), (("all_reduce", "x"), 3, "not a generator"),
    (("all_reduce", "x"), lambda: (), "not a generator"),
    (("all_reduce", "x"), lambda rank, size, more: (), "not a generator"),
    (("all_reduc", "x"), ring, "did you mean"), (("all_reduce",), lambda rank, size: (), "cannot be named '<lambda>'")])
def test_what_cannot_be_registered_is_refused(arguments, make, words):
    with pytest.raises(gc.ArgumentError, match=words):
        gc.algorithm(*arguments)(make)


def test_it_is_a_name_like_any_other():
    gc.algorithm("all_reduce", "mine", chunks=1, unfit=lambda size, nodes: "no" if size > 9 else None)(ring)
    assert "mine" in gc.algorithms("all_reduce", size=5)
    assert "mine" not in gc.algorithms("all_reduce", size=10)
    assert "mine" not in gc.algorithms("all_gather")
    assert "mine" not in scheduled("all_reduce", 4, 1)  # `auto` never tries a user's algorithm
    assert allowed("all_reduce:mine", "all_reduce", ["ring"]) == ["mine"]
    assert verify("all_reduce", "mine", 5).messages == 20
    assert [len(steps) for steps in gc.schedule("all_reduce", "mine", rank=0, size=3)] == [3, 3, 1]
    assert draw("mine", size=4, form="svg").startswith("<svg")
    with pytest.raises(gc.ArgumentError, match="does not support 10 ranks: no"):
        gc.schedule("all_reduce", "mine", rank=0, size=10)
    with pytest.raises(gc.ArgumentError, match="in use and cannot be replaced"):
        gc.algorithm("all_reduce", "mine", chunks=1)(ring)
    gc.algorithm("all_to_all", "mine_too")(ring)
    with pytest.raises(gc.ArgumentError, match="users' algorithms cannot be parts"):
        gc.schedule("all_to_all", "hierarchical(direct,mine_too)", rank=0, size=4)


# ---------------------------------------------------------------- files and commands


def test_the_digest_is_that_of_all_ranks():
    """The digest covers all ranks: ranks with unlike generators under one name are detected before data move."""
    def other(rank, size):
        yield from ring(rank, size)
        if rank == 2:
            yield (Copy(OUT, HELD),)

    digests = {proved(Claim("all_reduce", "x", make, 4, 1, 0, ()))[-1] for make in (ring, other)}
    assert len(digests) == 2
    gc.algorithm("all_reduce", "digested", chunks=1)(ring)
    assert {gc.schedule("all_reduce", "digested", rank=rank, size=4).digest for rank in range(4)} <= digests


@pytest.mark.parametrize(("text", "words", "code"), [
    ("x = (", "SyntaxError", "GC-FILE"), ("1 / 0", "ZeroDivisionError", "GC-FILE"), ("\0", "Error", "GC-FILE"),
    ("raise SystemExit(3)", "SystemExit", "GC-FILE"), ("import no_such_module", "ModuleNotFoundError", "GC-FILE"),
    ("", "registers no algorithm 'mine', but none", "GC-FILE"), ("\xff = 1", "Error", "GC-FILE"),
    ("import gpucoll\n@gpucoll.algorithm('all_reduce', 'mind', chunks=1)\ndef f(rank, size):\n    yield ()",
     "did you mean mind", "GC-FILE"),
    ("import gpucoll\n@gpucoll.algorithm('all_reduce', 'ring')\ndef f(rank, size):\n    yield ()",
     "library has this", "GC-ALGO")])
def test_files_that_are_none_are_refused(text, words, code, tmp_path):
    file = tmp_path / "mine.py"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(gc.ArgumentError, match=words) as caught:
        gc.load(f"{file}:mine")
    assert caught.value.code == code


def test_a_file_is_loaded_once():
    assert {gc.load(f"{OWN}:own_line") for _ in range(3)} == {"own_line"}
    assert gc.load(os.path.relpath(OWN) + ":own_star") == "own_star"
    assert verify("broadcast", "own_star", 5, root=3).messages == 4
    assert verify("all_reduce", "own_line", 5, segments=3).messages == 8


def test_one_that_takes_no_root_is_for_any():
    def gather(rank, size):
        mine = Copy(IN, OUT) if rank == 0 else Send(IN, 0)
        yield (mine, *(Recv(Slice("output", peer), peer) for peer in range(1, size) if rank == 0))

    def broadcast(rank, size, nodes=None):
        seen.add(nodes)
        yield (Copy(IN, OUT), *(Send(IN, peer) for peer in range(1, size))) if rank == 0 else (Recv(OUT, 0),)

    seen = set()
    for kind in ("gather", "gather_v"):
        gc.algorithm(kind, f"rootless_{kind}", chunks="P")(gather)
        for root in range(5):
            assert verify(kind, f"rootless_{kind}", 5, root=root).messages == 4
    gc.algorithm("broadcast", "rootless_nodes", chunks=1)(broadcast)
    assert verify("broadcast", "rootless_nodes", 3, root=2, nodes=(0, 0, 1)).messages == 2
    assert seen == {(1, 0, 0)}  # the nodes as counted from the root: rank 2's node first


def test_commands_take_files(capsys, tmp_path):
    assert run(capsys, "verify", "--ranks", "1..9", "--json", f"{OWN}:own_line", f"{OWN}:own_star")["faults"] == 0
    found = run(capsys, "simulate", "all_reduce", "1M", "--ranks", "4", "--algorithm", f"{OWN}:own_line,ring", "--json")
    assert {row["algorithm"] for row in found["predictions"]} == {"own_line", "ring"}
    assert "broadcast by own_star, 8 ranks" in run(capsys, "draw", f"{OWN}:own_star", "-o", str(tmp_path / "a.svg"))
    assert "own_all" in run(capsys, "convert", f"{OWN}:own_all", "--ranks", "3", "-o", str(tmp_path / "a.xml"))
    from gpucoll.cli import main

    for words in (["draw", f"{OWN}:own_star", "--collective", "reduce", "-o", "x.svg"], ["verify", f"{OWN}:none"],
                  ["simulate", "reduce", "--algorithm", f"{OWN}:own_star"], ["convert", "ring", "-o", "ring.txt"],
                  ["convert", "ring", "-o", str(tmp_path / "no" / "x.xml")],
                  ["convert", "linear", "--collective", "scan", "-o", str(tmp_path / "x.xml")]):
        assert refused(capsys, main, words)


def test_a_wrong_file_is_a_fault_of_verify(capsys, tmp_path):
    file = tmp_path / "wrong.py"
    file.write_text("import gpucoll\n@gpucoll.algorithm('all_reduce', 'nothing', chunks=1)\ndef f(rank, size):\n"
                    "    yield ()\n")
    from gpucoll.cli import main

    assert main(["verify", "--ranks", "2", "--json", f"{file}:nothing"]) == 1
    fault = json.loads(capsys.readouterr().out)["algorithms"][0]["fault"]
    assert "rank 0, round 1, output chunk 0: at the end it holds nothing" in fault
