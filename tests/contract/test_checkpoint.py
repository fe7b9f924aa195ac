"""Interrupted and damaged checkpoints: a folder holds the old checkpoint or the new checkpoint, complete."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

import gpucoll as gc
from contract import killed_saves
from contract.killed_saves import RANKS, saved
from gpucoll import training
from gpucoll.training import checkpoint
from harness.grids import SEED
from harness.thread_ranks import on_threads


def loaded(comm, folder):
    """Return the set of all values in the checkpoint."""
    trainer = training.ZeRO.load(folder, comm, training.Adam(), 1)
    return {float(value) for array in trainer.parameters.values() for value in array.flat}


@pytest.fixture
def killed_after():
    """Yield `killed_saves.killed_after`, run by a process of its own."""
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    # NumPy's own threads would make the process one of several threads.
    variables = {**os.environ, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, killed_saves.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          env=variables, text=True) as server:
        def ask(*request):
            server.stdin.write(json.dumps(request, default=str) + "\n")
            server.stdin.flush()
            return json.loads(server.stdout.readline())

        yield ask


# Files of a user, some with names like those of a checkpoint.
OWN = {"rank-0.log": "a log", "rank-table.csv": "1,2", "rank-0-0123456789ab.npz": "mine", "manifest.json.new": "mine",
       "rank-0-0123456789AB.npz.new": "mine", "rank-0-0123456789ab.npz.new.old": "mine", "rank-notes/day": "mine",
       "rank-1-0123456789ab.npz.new/day": "mine"}


def own_files(folder):
    """Write the user's files, and return a function that checks their content."""
    for name, text in OWN.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    def check():
        assert {name: (folder / name).read_text() for name in OWN} == OWN

    return check


def swept(killed_after, tmp_path, count, functions=()):
    """Interrupt a save at the first line, the last line and random lines; the folder must stay complete."""
    check, others = own_files(tmp_path), len(list(tmp_path.iterdir()))
    on_threads(RANKS, saved, tmp_path, 1.0)
    least, most = 0, 1
    while not killed_after(most, tmp_path, functions):
        least, most = most, 2 * most
    found = set()
    while most - least > 1:  # bisect the number of lines of a save
        middle = (least + most) // 2
        least, most = (least, middle) if killed_after(middle, tmp_path, functions) else (middle, most)
    for lines in sorted({0, least, *random.Random(SEED).sample(range(most), min(count, most))}):
        on_threads(RANKS, saved, tmp_path, 1.0)
        has_ended = killed_after(lines, tmp_path, functions)
        for size in (1, RANKS):
            (values,) = {frozenset(values) for values in on_threads(size, loaded, tmp_path)}
            check()
            assert values == {2.0} if has_ended else values in ({1.0}, {2.0}), f"seed {SEED}, {lines} lines"
        found |= values
    assert found == {1.0, 2.0}
    on_threads(RANKS, saved, tmp_path, 1.0)
    check()
    assert len(list(tmp_path.iterdir())) == others + RANKS + 1  # files left behind have been removed


def test_what_cannot_be_removed_is_no_failed_save(tmp_path, caplog):
    check = own_files(tmp_path)
    for value in (1.0, 2.0):
        on_threads(RANKS, saved, tmp_path, value)
        assert on_threads(RANKS, loaded, tmp_path) == [{value}] * RANKS
    check()
    assert "a file of an older checkpoint is left" in caplog.text


def refused_to_save(comm, folder, words):
    with pytest.raises((gc.BackendError, gc.PeerError), match=words) as found:
        saved(comm, folder, 2.0)
    return found.value.code


def test_a_manifest_of_the_user_is_not_overwritten(tmp_path):
    own, ours = tmp_path / "own", tmp_path / "ours"
    own.mkdir()
    (own / "manifest.json").write_text('{"name": "app"}')
    assert "GC-FILE" in on_threads(RANKS, refused_to_save, own, r"manifest\.json: is not of a checkpoint")
    assert [path.read_text() for path in own.iterdir()] == ['{"name": "app"}']
    on_threads(RANKS, saved, ours, 1.0)
    manifest = ours / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-5])  # damaged: nothing to lose
    on_threads(RANKS, saved, ours, 2.0)
    assert on_threads(RANKS, loaded, ours) == [{2.0}] * RANKS


def forged(folder, change):
    """Write the manifest with a change and a fitting checksum."""
    manifest = folder / checkpoint.MANIFEST
    found = json.loads(manifest.read_text())
    del found["sha256"]
    change(found)
    text = json.dumps(found, indent=1)
    manifest.write_text(f"{text[:-2]},\n {checkpoint._digest_of(text)}\n}}")


def elements(*parts):
    def change(found):
        for file, part in zip(found["files"], parts, strict=True):
            file["elements"]["w"] = part
    return change


# The files have the elements 0 to 105 and 105 to 210 of w.
@pytest.mark.parametrize("change", [
    elements([0, 105], [0, 105]), elements([0, 105], [104, 209]), elements([0, 105], [106, 210]),
    elements([105, 210], [210, 315]), elements([0, 105], [105, 209]), elements([0, 210], [105, 105]),
    elements([0, 105], [210, 105]), elements([0, 105], [105.0, 210]), elements([False, 105], [105, 210]),
    elements([0, 105], [105, 10 ** 400]), elements([0, 105], [105]), elements([0, 105], None),
    lambda found: found.update(steps=True), lambda found: found.update(steps=10 ** 400),
    lambda found: found.update(steps=-1), lambda found: found.update(steps=1.0), lambda found: found.update(steps="1"),
    lambda found: found.update(kept={"lost/w": {"shape": [True], "dtype": "float64"}}),
    lambda found: found["files"][1].update(name=found["files"][0]["name"]),
    lambda found: found["files"][1].update(name="rank-1.log"), lambda found: found["files"].pop(),
    lambda found: found["parameters"]["w"].update(shape=[1, True, 210])])
def test_a_forged_manifest_is_refused(tmp_path, change):
    on_threads(RANKS, saved, tmp_path, 1.0)
    forged(tmp_path, change)
    on_threads(RANKS, refused, tmp_path, r"manifest\.json|rank-\d-")


def test_a_forged_manifest_takes_no_file_of_the_user(tmp_path):
    check = own_files(tmp_path)
    for change in (lambda found: found.update(replaced=["rank-0.log", "../x", "rank-notes", 3]),
                   lambda found: found.update(replaced=3, files=[3, {"name": "rank-table.csv"}]),
                   lambda found: found.update(files=3, replaced={"rank-0.log": 1})):
        on_threads(RANKS, saved, tmp_path, 1.0)
        forged(tmp_path, change)
        on_threads(RANKS, saved, tmp_path, 2.0)
        check()
        assert on_threads(RANKS, loaded, tmp_path) == [{2.0}] * RANKS


@pytest.mark.parametrize("count", [12, pytest.param(1000, marks=pytest.mark.nightly)])
def test_an_interrupted_checkpoint(killed_after, tmp_path, count):
    """A save interrupted in the functions changing the folder is harmless; `--nightly` tries every line."""
    swept(killed_after, tmp_path, count, ("_count", "_write_through", "_tidy"))


@pytest.mark.nightly
def test_a_checkpoint_interrupted_anywhere(killed_after, tmp_path):
    swept(killed_after, tmp_path, 1000)


@pytest.mark.nightly
def test_a_job_killed_at_any_time_has_a_checkpoint(killed_after, tmp_path):
    """A job that saves again and again is killed fifty times, at random moments."""
    check, draws, value = own_files(tmp_path), random.Random(SEED), 1.0
    on_threads(RANKS, saved, tmp_path, value)
    for _ in range(50):
        least = killed_after(draws.uniform(0.01, 0.5), tmp_path, value)
        ((value,),) = {frozenset(values) for size in (1, RANKS) for values in on_threads(size, loaded, tmp_path)}
        assert value in (least, least + 1), f"seed {SEED}"
        check()


def refused(comm, folder, name):
    with pytest.raises((gc.BackendError, gc.PeerError), match=name) as found:
        loaded(comm, folder)
    return type(found.value)


def test_a_damaged_file_is_named_on_every_rank(tmp_path):
    on_threads(RANKS, saved, tmp_path, 1.0)
    for path in tmp_path.iterdir():
        content = path.read_bytes()
        for damaged in (content[:-1], content[:50] + bytes([content[50] ^ 1]) + content[51:], b"", None):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            kinds = on_threads(3, refused, tmp_path, path.name)
            assert gc.BackendError in kinds
            path.write_bytes(content)
    assert on_threads(3, loaded, tmp_path) == [{1.0}] * 3


def test_a_folder_that_nobody_can_write(tmp_path):
    (tmp_path / "file").write_text("")

    def program(comm):
        with pytest.raises((gc.BackendError, gc.PeerError), match="file"):
            saved(comm, tmp_path / "file", 1.0)
        return comm.all_reduce(numpy.ones(1))[0]

    assert on_threads(3, program) == [3, 3, 3]


def overlapping(comm, folder):
    """A save first ends the previous save; the order of the waits does not matter."""
    trainer = training.ZeRO({"w": numpy.full(50, 1.0)}, comm, training.SGD(1.0), 1)
    first = trainer.save(folder, async_op=True)
    trainer.ready("w", numpy.full(50, 3.0))
    trainer.step()
    second = trainer.save(folder, async_op=True)
    for saving in (second, first):
        saving.wait()
    assert set(training.ZeRO.load(folder, comm, training.SGD(1.0)).parameters["w"]) == {-2.0}


def test_saves_that_overlap(tmp_path):
    on_threads(RANKS, overlapping, tmp_path)


def test_whatever_a_writer_dies_of_the_old_checkpoint_counts(tmp_path, monkeypatch):
    on_threads(RANKS, saved, tmp_path, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_packed", lambda rows: (_ for _ in ()).throw(MemoryError("no room")))

        def program(comm):
            with pytest.raises((gc.BackendError, gc.PeerError), match="no room"):
                saved(comm, tmp_path, 2.0)

        on_threads(RANKS, program)
    assert on_threads(RANKS, loaded, tmp_path) == [{1.0}] * RANKS


def one_without_a_folder(comm, folder, value):
    """If the last rank's folder is no path, all ranks get an error, and nothing is written."""
    last = comm.rank == comm.size - 1
    kind = gc.ArgumentError if last else gc.PeerError
    zero = training.ZeRO({"w": numpy.arange(9.0)}, comm, training.SGD(0.5))
    with pytest.raises(kind, match=f"save: folder {value!r} is not a path"):
        zero.save(value if last else folder)
    assert not list(folder.iterdir())
    zero.save(folder)
    with pytest.raises(kind, match=f"load: folder {value!r} is not a path"):
        training.ZeRO.load(value if last else folder, comm, training.SGD(0.5))
    assert training.ZeRO.load(folder, comm, training.SGD(0.5)).parameters["w"].tolist() == list(range(9))


@pytest.mark.parametrize("value", [None, 3])
def test_a_folder_that_is_no_path(tmp_path, value):
    on_threads(3, one_without_a_folder, tmp_path, value)
