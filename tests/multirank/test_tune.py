"""gpucoll tune and explain on ranks: auto follows the written table, and bad tables are refused."""

import contextlib
import io
import json
import warnings
from pathlib import Path

import numpy
import pytest

import gpucoll as gc
from gpucoll.calibration import fit
from gpucoll.cli import main
from gpucoll.device.store import user_store
from gpucoll.tuner import table as tables
from gpucoll.tuner.table import Curve, LinkCost, Shape, Table, as_json, parse
from harness.pace import seconds


def store(mpi):
    return str(user_store().folder)


@pytest.fixture(scope="module", autouse=True)
def kernels_stay_where_they_are(rank_pool):
    """Fix each process' single store of kernels first: in the folders of these tests all kernels would be compiled."""
    rank_pool.run(store, 8)


def at(folder):
    return {"GPUCOLL_CACHE": str(folder)}


def read(folder):
    path, = Path(folder).glob("tune-*")  # a single file: no draft is left
    return parse(str(path), path.read_bytes()).shapes


def tuned(mpi, *arguments):
    """Run `gpucoll tune` on these ranks with the shortest measurements; return exit code, output and errors."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed, \
            contextlib.redirect_stderr(io.StringIO()) as said:
        patch.setattr(fit, "PROBE_SECONDS", 0.0)
        patch.setattr(fit, "SWEEP_SECONDS", 0.0)
        patch.setattr(gc, "init", lambda: gc.Communicator.from_mpi(mpi, timeout=seconds(60)))
        return main(["tune", *arguments]), printed.getvalue(), said.getvalue()


def test_tune_writes_what_it_has_measured(ranks, tmp_path):
    """A sweep measures every way at every size, whatever auto would choose; a plain tune adds another shape."""
    first, second = ranks(tuned, 2, "--sweep", "--collective", "all_reduce,barrier", "--max-bytes", "8", "--json",
                          env={**at(tmp_path), "GPUCOLL_ALGO": "all_reduce:native"})
    assert (first[0], second) == (0, (0, "", ""))
    shape, = read(tmp_path)
    assert (shape.ranks, shape.nodes, shape.device) == (2, 1, "cpu")
    assert ("mpi", "node") in {link[:2] for link in shape.links}
    found = {curve[:3]: curve for curve in shape.curves}
    for collective, sizes in (("all_reduce", (8,)), ("barrier", (0,))):
        names = [name for name in gc.algorithms(collective, size=2) if name != "hierarchical"]
        for way in [("native", "native"), *(("mpi", name) for name in names)]:
            assert found[collective, *way].bytes == sizes
            assert all(taken > 0 for taken in found[collective, *way].seconds)
    assert len(json.loads(first[1])["curves"]) == len(shape.curves)
    assert ": 2 ranks on 1 node" in first[2]
    ranks(tuned, 3, "--collective", "barrier", env=at(tmp_path))
    same, other = read(tmp_path)
    assert (same, [curve[:3] for curve in other.curves]) == (shape, [("barrier", "native", "native")])


def called(comm):
    """Make a call; return the result of `explain` afterwards, and the number of calls per executor and algorithm."""
    assert comm.all_reduce(numpy.ones(256, "f4")).tolist() == [comm.size] * 256
    found = comm.explain("all_reduce", 1024)
    return dict(found), {(row["executor"], row["algorithm"]): row["calls"] for row in found.candidates if row["calls"]}


def planted(mpi, folder, best, old="", new=""):
    """Write a table of this host with `best` (executor, algorithm) as the quickest way, and mpi's ring as the next."""
    if mpi.rank == 0:
        ways = {("mpi", "tree"): 1e-3, ("native", "native"): 1e-3, ("mpi", "ring"): 1e-4, best: 1e-6}
        curves = tuple(Curve("all_reduce", *way, (8, 1 << 20), (taken, taken)) for way, taken in ways.items())
        link = LinkCost("mpi", "node", 1e-5, 1e-9, 1e-10, 1e-6)
        shapes = tuple(Shape(size, 1, "cpu", "2026", (link,), curves) for size in (2, 3))
        text = as_json(Table("planted", tables.facts(), shapes)).decode()
        assert old in text
        tables.table_path(tables.facts(), at(folder)).write_bytes(text.replace(old, new).encode("latin-1"))
    mpi.Barrier()


def by_a_planted_table(mpi, folder, *table):
    """Plant a table; return the warnings, and the result of `called`."""
    planted(mpi, folder, *table)
    with warnings.catch_warnings(record=True, action="always") as heard, \
            gc.Communicator.from_mpi(mpi, timeout=seconds(60)) as comm:
        return [str(warning.message) for warning in heard if warning.category is UserWarning], *called(comm)


@pytest.mark.parametrize(("best", "algo", "runs"), [
    (("native", "native"), None, ("native", "native")), (("mpi", "star"), "all_reduce:tree", ("mpi", "tree"))])
def test_the_choice_is_what_then_runs(ranks, tmp_path, best, algo, runs):
    env = {**at(tmp_path), "GPUCOLL_ALGO": algo}
    for heard, one, ran in ranks(by_a_planted_table, 3, str(tmp_path), best, env=env):
        assert (heard, one["executor"], one["choice"], ran) == ([], *runs, {runs: 1})
        assert one["basis"].startswith(f"the table {tmp_path}")


@pytest.mark.parametrize(("old", "new", "reason"), [
    ("1e-05", "\xff", "can't decode"),
    (f'"gpucoll": "{gc.__version__}"', '"gpucoll": "0.0.1"', f"gpucoll '0.0.1', but here it is '{gc.__version__}'")])
def test_a_bad_old_or_foreign_table_is_refused_once_with_the_reason(ranks, tmp_path, old, new, reason):
    found = ranks(by_a_planted_table, 3, str(tmp_path), ("mpi", "star"), old, new, env=at(tmp_path))
    (warning,), *others = [heard for heard, *_ in found]
    assert reason in warning
    assert str(tmp_path) in warning
    assert others == [[], []]
    for _, one, ran in found:
        assert one["basis"].startswith("the table built-in: ")
        assert list(ran) == [(one["executor"], one["choice"])]
