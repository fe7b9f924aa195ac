"""gpucoll tune and explain on ranks: the table that is written is the one that auto goes by; bad ones are refused."""

import json
import sys
import tomllib
import warnings
from pathlib import Path

import numpy
import pytest

import gpucoll as gc
from gpucoll.calibration import probes, sweep
from gpucoll.cli import main
from gpucoll.device.store import user_store
from gpucoll.tuner import host
from gpucoll.tuner.table import Curve, Link, Shape, Table, as_toml, parse
from pace import seconds

LINKS = (Link("mpi", "node", 1e-5, 1e-9, 1e-10, 1e-6),)


def store(mpi):
    return str(user_store().folder)


@pytest.fixture(scope="module", autouse=True)
def kernels_stay_where_they_are(rank_pool):
    """A process has one store: it shall not be in the folders of these tests, where all would be compiled anew."""
    rank_pool.run(store, 8)


def at(folder):
    return {"GPUCOLL_CACHE": str(folder)}


def read(folder):
    path, = Path(folder).glob("tune-*")  # no draft is left
    return parse(str(path), path.read_bytes())


def tuned(mpi, *arguments):
    """`gpucoll tune` on these ranks, each measurement as short as can be; its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probes, "SECONDS", 0.0)
        patch.setattr(sweep, "SECONDS", 0.0)
        patch.setattr(gc, "init", lambda: gc.Communicator.from_mpi(mpi, timeout=seconds(60)))
        return main(["tune", *arguments])


def test_tune_writes_what_it_has_measured(ranks, tmp_path):
    """A sweep measures every way at every size; a plain tune adds its shape; a bad table is replaced."""
    assert ranks(tuned, 2, "--sweep", "--collective", "all_reduce,barrier", "--max-bytes", "8",
                 env=at(tmp_path)) == [0, 0]
    text = next(tmp_path.glob("tune-*")).read_text()
    assert text.startswith("# What gpucoll's auto knows of this machine")
    assert set(tomllib.loads(text)["host"]) == {"name", "processor", "cores", "mpi", "numpy", "gpucoll"}
    first, = read(tmp_path).shapes
    assert (first.ranks, first.nodes, first.device) == (2, 1, "cpu")
    assert ("mpi", "node") in {link[:2] for link in first.links}
    found = {curve[:3]: curve for curve in first.curves}
    for collective, sizes in (("all_reduce", (8,)), ("barrier", (0,))):
        names = [name for name in gc.algorithms(collective, size=2) if name != "hierarchical"]
        for way in [("native", "native"), *(("mpi", name) for name in names)]:
            assert found[collective, *way].bytes == sizes
            assert all(taken > 0 for taken in found[collective, *way].seconds)
    ranks(tuned, 3, "--collective", "barrier", env=at(tmp_path))
    same, second = read(tmp_path).shapes
    assert (same, [curve[:3] for curve in second.curves]) == (first, [("barrier", "native", "native")])
    next(tmp_path.glob("tune-*")).write_text("format = 7\n")
    ranks(tuned, 2, "--collective", "barrier", env=at(tmp_path))
    assert [shape.ranks for shape in read(tmp_path).shapes] == [2]


def serving(mpi):
    comms = [gc.Communicator.from_mpi(mpi, executor=executor) for executor in ("mpi", "native", "nccl")]
    return [(probes.serves(comm, "cpu"), comm.close())[0] for comm in comms]


def test_every_executor_that_serves_is_measured_whatever_auto_may_choose(ranks):
    assert ranks(serving, 2, env={"GPUCOLL_ALGO": "all_reduce:native"}) == [[True, True, False]] * 2


# ---------------------------------------------------------------- who goes by it


def calls(comm, count=256):
    """Make a call on exact data; return what `explain` says afterwards."""
    x = numpy.arange(count, dtype=numpy.float32) + comm.rank
    expected = comm.size * numpy.arange(count, dtype=numpy.float32) + sum(range(comm.size))
    assert comm.all_reduce(x).tobytes() == expected.tobytes()
    return dict(comm.explain("all_reduce", 4 * count))


def called(explanation):
    return {(row["executor"], row["algorithm"]): row["calls"] for row in explanation["candidates"] if row["calls"]}


def planted(mpi, folder, best, old="", new=""):
    """A table of this host by which `best`, executor and algorithm, is the quickest, and mpi's ring next."""
    if mpi.rank == 0:
        ways = {("mpi", "tree"): 1e-3, ("native", "native"): 1e-3, ("mpi", "ring"): 1e-4, best: 1e-6}
        curves = tuple(Curve("all_reduce", *way, (8, 1 << 20), (taken, taken)) for way, taken in ways.items())
        shapes = tuple(Shape(size, 1, "cpu", "2026", LINKS, curves) for size in (2, 3))
        text = as_toml(Table("planted", host.facts(), shapes))
        assert old in text
        host.table_path(host.facts(), at(folder)).write_bytes(text.replace(old, new).encode("latin-1"))
    mpi.Barrier()


def by_a_planted_table(mpi, folder, *table, counts=(256,)):
    """Warnings, and what `explain` says after calls."""
    planted(mpi, folder, *table)
    found = []
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for count in counts:
            with gc.Communicator.from_mpi(mpi, timeout=seconds(60)) as comm:
                found.append(calls(comm, count))
    return [str(warning.message) for warning in heard if warning.category is UserWarning], found


@pytest.mark.parametrize(("best", "algo", "runs"), [
    (("mpi", "star"), None, ("mpi", "star")), (("native", "native"), None, ("native", "native")),
    (("mpi", "star"), "all_reduce:tree", ("mpi", "tree")), (("mpi", "star"), "^star", ("mpi", "ring"))])
def test_the_choice_is_what_then_runs(ranks, tmp_path, best, algo, runs):
    for heard, (one,) in ranks(by_a_planted_table, 3, str(tmp_path), best, env={**at(tmp_path), "GPUCOLL_ALGO": algo}):
        assert heard == []
        assert (one["executor"], one["choice"]) == runs
        assert called(one) == {runs: 1}
        assert one["candidates"][0]["tuned"] is True
        assert one["basis"].startswith(f"the table {tmp_path}")


def test_between_powers_of_two_the_choice_is_what_runs_too(ranks, tmp_path):
    """By a table in which the star's curve crosses the ring's at 1536 bytes."""
    old = '"star"\nbytes = [8, 1048576]\nseconds = [1e-06, 1e-06]'
    new = '"star"\nbytes = [1024, 2048]\nseconds = [5e-05, 0.00015]'
    for _, found in ranks(by_a_planted_table, 3, str(tmp_path), ("mpi", "star"), old, new, env=at(tmp_path),
                          counts=(257, 300, 383, 385, 450, 511)):
        assert [called(one) for one in found] == [{(one["executor"], one["choice"]): 1} for one in found]


def parts(mpi, folder):
    """What a part of a part goes by; the file is gone before it is made."""
    planted(mpi, folder, ("mpi", "star"))
    with gc.Communicator.from_mpi(mpi, timeout=seconds(60)) as comm:
        mpi.Barrier()
        if mpi.rank == 0:
            next(Path(folder).glob("tune-*")).unlink()
        mpi.Barrier()
        with comm.split(comm.rank % 2) as half, half.split(0, key=-half.rank) as again:
            return comm.explain("all_reduce", 1024)["basis"], calls(again)


def test_parts_of_a_communicator_go_by_its_table(ranks, tmp_path):
    for whole, one in ranks(parts, 4, str(tmp_path), env=at(tmp_path)):
        assert str(tmp_path) in whole
        assert (one["choice"], called(one)) == ("star", {("mpi", "star"): 1})


@pytest.mark.parametrize(("old", "new", "reason"), [
    ("format = 1", "format = 0", "its format is 0, not 1"), ("1e-05", "\xff", "it is no TOML"),
    (f'gpucoll = "{gc.__version__}"', 'gpucoll = "0.0.1"', f"gpucoll '0.0.1', and here it is '{gc.__version__}'")])
def test_a_bad_old_or_foreign_table_is_refused_once_with_the_reason(ranks, tmp_path, old, new, reason):
    found = ranks(by_a_planted_table, 3, str(tmp_path), ("mpi", "star"), old, new, env=at(tmp_path))
    (warning,), *others = [heard for heard, _ in found]
    assert reason in warning
    assert str(tmp_path) in warning
    assert warning.endswith("`gpucoll tune` makes a new one; until then the built-in table serves")
    assert others == [[], []]
    for _, (one,) in found:
        assert one["basis"].startswith("the table built-in: ")
        assert list(called(one)) == [(one["executor"], one["choice"])]


# ---------------------------------------------------------------- the commands


def launched(mpiexec, *arguments, env):
    """Output, errors and the exit codes of two ranks."""
    job = mpiexec(2, "sh", "-c", '"$0" -m gpucoll "$@"; echo "exit $?"', sys.executable, *arguments, env=env,
                  timeout=seconds(120))
    lines = job.stdout.splitlines()
    return [line for line in lines if "exit" not in line], job.stderr, [line for line in lines if "exit" in line]


@pytest.mark.slow
def test_the_commands_print_once_what_they_found(mpiexec, tmp_path):
    (line,), errors, codes = launched(mpiexec, "tune", "--collective", "all_reduce", "--json", env=at(tmp_path))
    told, (shape,) = json.loads(line), read(tmp_path).shapes
    assert [curve["algorithm"] for curve in told["curves"]] == [curve.algorithm for curve in shape.curves]
    assert [link["alpha"] for link in told["links"]] == pytest.approx([link.alpha for link in shape.links], rel=1e-3)
    assert f"{told['file']}: 2 ranks on 1 node" in errors
    (line,), _, more = launched(mpiexec, "explain", "all_reduce", "1K", "--json", env=at(tmp_path))
    assert str(tmp_path) in json.loads(line)["basis"]
    assert codes + more == ["exit 0"] * 4


@pytest.mark.parametrize(("arguments", "env"), [
    ("tune --device cuda", {"CUDA_VISIBLE_DEVICES": ""}),
    pytest.param("tune", {"GPUCOLL_CACHE": "/dev/null"}, marks=pytest.mark.slow)])
def test_what_is_wrong_is_one_line_and_code_2_on_every_rank(mpiexec, arguments, env):
    lines, errors, codes = launched(mpiexec, *arguments.split(), env=env)
    assert (lines, codes, errors.count("\n")) == ([], ["exit 2"] * 2, 1), errors
    assert errors.startswith("gpucoll")
