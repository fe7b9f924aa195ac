"""gpucoll tune and explain on ranks: the table that is written is the one that auto goes by; bad ones are refused."""

import json
import sys
import tomllib
import warnings
from pathlib import Path

import numpy
import pytest

import gpucoll as gc
from gpucoll.calibration import probes
from gpucoll.tuner import host
from gpucoll.tuner.table import Curve, Link, Shape, Table, as_toml, parse

SIZES = (8, 1024, 4096)
LINKS = (Link("mpi", "node", 1e-5, 1e-9, 1e-10, 1e-6),)


def tune(mpiexec, ranks, folder, *arguments):
    """The command has ended well; what it printed, and the table that it left in `folder`."""
    job = mpiexec(ranks, sys.executable, "-m", "gpucoll", "tune", *arguments, env=at(folder), timeout=120)
    assert job.returncode == 0, job.stdout + job.stderr
    path, = folder.glob("tune-*")  # no draft is left
    return job, parse(str(path), path.read_text())


def at(folder):
    return {"GPUCOLL_CACHE": str(folder)}


@pytest.fixture(scope="module")
def swept(launcher, tmp_path_factory):
    """The folder, the job and the table of a small sweep on two ranks."""
    from ranks import launch

    folder = tmp_path_factory.mktemp("swept")
    return folder, *tune(launch, 2, folder, "--sweep", "--collective", "all_reduce,barrier", "--max-bytes", "4K",
                         "--json")


# ---------------------------------------------------------------- what tune writes


def test_a_sweep_measures_every_way_at_every_size(swept):
    _, _, table = swept
    shape, = table.shapes
    assert (shape.ranks, shape.nodes, shape.device) == (2, 1, "cpu")
    assert ("mpi", "node") in {link[:2] for link in shape.links}
    found = {curve[:3]: curve for curve in shape.curves}
    for collective, sizes in (("all_reduce", SIZES), ("barrier", (0,))):
        names = [name for name in gc.algorithms(collective, size=2) if name != "hierarchical"]
        for way in [("native", "native"), *(("mpi", name) for name in names)]:
            assert found[collective, *way].bytes == sizes
            assert all(seconds > 0 for seconds in found[collective, *way].seconds)
    assert {key[0] for key in found} == {"all_reduce", "barrier"}


def test_what_is_printed_is_what_is_written(swept):
    folder, job, table = swept
    told, = map(json.loads, job.stdout.splitlines())
    shape, = table.shapes
    assert told["file"] == str(next(folder.glob("tune-*")))
    assert [curve["algorithm"] for curve in told["curves"]] == [curve.algorithm for curve in shape.curves]
    assert [link["alpha"] for link in told["links"]] == pytest.approx([link.alpha for link in shape.links], rel=1e-3)
    assert f"{told['file']}: 2 ranks on 1 node" in job.stderr
    assert job.stderr.count("all_reduce") == len(SIZES)


def test_the_table_is_readable_toml_with_a_heading(swept):
    text = next(swept[0].glob("tune-*")).read_text()
    assert text.startswith("# What gpucoll's auto knows of this machine")
    assert set(tomllib.loads(text)["host"]) == {"name", "processor", "cores", "mpi", "numpy", "gpucoll"}


def test_a_plain_tune_keeps_the_other_shapes(mpiexec, swept, tmp_path):
    folder, _, before = swept
    for path in folder.glob("tune-*"):
        (tmp_path / path.name).write_text(path.read_text())
    job, table = tune(mpiexec, 3, tmp_path, "--collective", "all_reduce")
    assert [shape.ranks for shape in table.shapes] == [2, 3]
    assert table.shapes[0] == before.shapes[0]
    assert [curve[:3] for curve in table.shapes[1].curves] == [("all_reduce", "native", "native")]
    assert job.stdout == ""
    _, again = tune(mpiexec, 2, tmp_path, "--collective", "barrier")
    assert again.shapes[1] == table.shapes[1]
    assert {curve.collective for curve in again.shapes[0].curves} == {"all_reduce", "barrier"}


# ---------------------------------------------------------------- who goes by it


def calls(comm, collective="all_reduce", count=256, algorithm="auto"):
    """Make a call on exact data; return what `explain` says afterwards."""
    x = numpy.arange(count, dtype=numpy.float32) + comm.rank
    found = comm.all_reduce(x, algorithm=algorithm)
    expected = comm.size * numpy.arange(count, dtype=numpy.float32) + sum(range(comm.size))
    assert found.tobytes() == expected.tobytes()
    return dict(comm.explain(collective, 4 * count))


def called(explanation):
    return {(row["executor"], row["algorithm"]): row["calls"] for row in explanation["candidates"] if row["calls"]}


def one_call(mpi):
    with gc.Communicator.from_mpi(mpi, timeout=60) as comm:
        return calls(comm)


def test_a_new_communicator_goes_by_the_table(ranks, swept):
    folder, _, table = swept
    path = next(folder.glob("tune-*"))
    curves = {(curve.executor, curve.algorithm): curve.at(1024) for curve in table.shapes[0].curves
              if curve.collective == "all_reduce"}
    found = ranks(one_call, 2, env=at(folder))
    assert found[0]["basis"] == f"the table {path}: 2 ranks on 1 node, measured {table.shapes[0].measured}"
    for one in found:
        way = one["executor"], one["choice"]
        assert called(one) == {way: 1}
        assert curves[way] <= min(curves.values()) * 1.02  # as the tuner promises
        assert {(row["executor"], row["algorithm"]): row["seconds"] for row in one["candidates"] if row["tuned"]} \
            == pytest.approx(curves)
        assert one["candidates"][0]["measured"] > 0
        assert (one["choice"], one["basis"], one["reason"]) == tuple(found[0][key] for key in
                                                                     ("choice", "basis", "reason"))


def planted(folder, ranks, best, seconds=1e-6, facts=None):
    """A table of this host by which `best`, an executor and an algorithm, is far the quickest; its path."""
    curves = tuple(Curve("all_reduce", *way, (8, 1 << 20), (taken, taken)) for way, taken in
                   {("mpi", "ring"): 1e-3, ("mpi", "tree"): 1e-3, ("native", "native"): 1e-3, best: seconds}.items())
    facts = facts or host.facts()
    path = host.table_path(facts, at(folder))
    path.write_text(as_toml(Table("planted", facts, (Shape(ranks, 1, "cpu", "2026-01-01", LINKS, curves),))))
    return path


def by_a_planted_table(mpi, folder, best, algorithm="auto"):
    if mpi.rank == 0:
        planted(Path(folder), mpi.size, best)
    mpi.Barrier()
    with gc.Communicator.from_mpi(mpi, timeout=60) as comm:
        return calls(comm, algorithm=algorithm)


@pytest.mark.parametrize("best", [("mpi", "star"), ("mpi", "ring"), ("native", "native")])
def test_the_choice_is_what_then_runs(ranks, tmp_path, best):
    for one in ranks(by_a_planted_table, 3, str(tmp_path), best, env=at(tmp_path)):
        assert (one["executor"], one["choice"]) == best
        assert called(one) == {best: 1}
        assert one["candidates"][0]["tuned"] is True
        assert "measured" in one["reason"]


@pytest.mark.parametrize(("algo", "runs"), [("all_reduce:tree", "tree"), ("^star", "ring"),
                                            ("all_reduce:native", "native"), ("broadcast:tree", "star")])
def test_gpucoll_algo_overrides_the_table(ranks, tmp_path, algo, runs):
    env = {**at(tmp_path), "GPUCOLL_ALGO": algo}
    for one in ranks(with_ring_second, 3, str(tmp_path), env=env):
        assert one["choice"] == runs
        assert [name for _, name in called(one)] == [runs]


def crossing(mpi, folder):
    """Calls of sizes between powers of two, by a table in which the star's curve crosses the ring's at 1536 bytes."""
    if mpi.rank == 0:
        path = planted(Path(folder), mpi.size, ("mpi", "star"))
        text = path.read_text()
        for name, seconds in (("ring", "[2e-5, 2e-5]"), ("star", "[1e-5, 3e-5]")):
            before, name, after = text.partition(f'"{name}"\nbytes = ')
            text = before + name + f"[1024, 2048]\nseconds = {seconds}\n\n" + after.partition("\n\n")[2]
        path.write_text(text)
    mpi.Barrier()
    found = []
    for count in (257, 300, 383, 385, 450, 511):
        with gc.Communicator.from_mpi(mpi, timeout=60) as comm:
            found.append(calls(comm, count=count))
    return found


def test_between_powers_of_two_the_choice_is_what_runs_too(ranks, tmp_path):
    for found in ranks(crossing, 3, str(tmp_path), env=at(tmp_path)):
        for one in found:
            assert called(one) == {(one["executor"], one["choice"]): 1}, one["bytes"]


def with_ring_second(mpi, folder):
    """By the table the star is the quickest, and the ring comes next."""
    if mpi.rank == 0:
        path = planted(Path(folder), mpi.size, ("mpi", "star"))
        path.write_text(path.read_text().replace('"ring"\nbytes = [8, 1048576]\nseconds = [0.001, 0.001]',
                                                 '"ring"\nbytes = [8, 1048576]\nseconds = [0.0001, 0.0001]'))
    mpi.Barrier()
    with gc.Communicator.from_mpi(mpi, timeout=60) as comm:
        return calls(comm)


def test_a_named_algorithm_is_not_overridden(ranks, tmp_path):
    for one in ranks(by_a_planted_table, 2, str(tmp_path), ("mpi", "star"), "tree", env=at(tmp_path)):
        assert called(one) == {("mpi", "tree"): 1}


def parts(mpi, folder):
    """What two halves, and a part of a part, go by; the file is gone before they are made."""
    if mpi.rank == 0:
        planted(Path(folder), mpi.size // 2, ("mpi", "star"))
    mpi.Barrier()
    with gc.Communicator.from_mpi(mpi, timeout=60) as comm:
        whole = comm.explain("all_reduce", 1024)["basis"]
        mpi.Barrier()
        if mpi.rank == 0:
            next(Path(folder).glob("tune-*")).unlink()
        mpi.Barrier()
        with comm.split(comm.rank % 2) as half, half.split(0, key=-half.rank) as again:
            found = calls(half), calls(again)
    with gc.Communicator.from_mpi(mpi, timeout=60) as new:
        return whole, found, new.explain("all_reduce", 1024)["basis"]


def test_parts_of_a_communicator_go_by_its_table(ranks, tmp_path):
    for whole, found, new in ranks(parts, 4, str(tmp_path), env=at(tmp_path)):
        assert str(tmp_path) in whole
        for one in found:
            assert one["basis"] == whole
            assert called(one) == {("mpi", "star"): 1}  # on two ranks the table says so
        assert new.startswith("the table built-in: ")


# ---------------------------------------------------------------- tables that are refused


def refused(mpi, folder, old, new):
    """Warnings, basis and result on a rank, where `old` in this host's table is `new`."""
    if mpi.rank == 0:
        path = planted(Path(folder), mpi.size, ("mpi", "star"))
        text = path.read_text()
        assert old in text
        path.write_bytes(text.replace(old, new, 1).encode("latin-1"))
    mpi.Barrier()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with gc.Communicator.from_mpi(mpi, timeout=60) as comm:
            found = calls(comm)
    return [str(warning.message) for warning in heard if warning.category is UserWarning], found


@pytest.mark.parametrize(("old", "new", "reason"), [
    ("format = 1", "format = 0", "its format is 0, not 1"), ("format = 1", "format = ", "it is no TOML"),
    ("alpha = 1e-05", "alpha = -1", "alpha -1 of mpi"), ("ranks = 3", "ranks = three", "it is no TOML"),
    (f'gpucoll = "{gc.__version__}"', 'gpucoll = "0.0.1"', f"gpucoll '0.0.1', and here it is '{gc.__version__}'"),
    ('name = "', 'name = "other-', "measured with name 'other-"), ("cores = ", "cores = 1", "measured with cores"),
    ("seconds = [1e-06, 1e-06]", "seconds = [1e-", "it is no TOML"), ("1e-05", "\xff", "cannot be read"),
    ("[host]", "[hosts]", "a [host] and [[shape]]s only")])
def test_a_bad_old_or_foreign_table_is_refused_once_with_the_reason(ranks, tmp_path, old, new, reason):
    found = ranks(refused, 3, str(tmp_path), old, new, env=at(tmp_path))
    (warning,), *others = [heard for heard, _ in found]
    assert reason in warning
    assert str(tmp_path) in warning
    assert "`gpucoll tune` makes a new one" in warning or "cannot be read" in warning
    assert warning.endswith("until then the built-in table serves")
    assert others == [[], []]
    for _, one in found:
        assert one["basis"].startswith("the table built-in: ")
        assert one["choice"] == found[0][1]["choice"] != "star"
        assert list(called(one)) == [(one["executor"], one["choice"])]


def test_the_good_table_is_not_refused(ranks, tmp_path):
    """What those tests plant faults in has none."""
    for heard, found in ranks(refused, 3, str(tmp_path), "1e-05", "1e-05", env=at(tmp_path)):
        assert heard == []
        assert found["choice"] == "star"


def test_tune_replaces_a_table_that_is_refused(mpiexec, swept, tmp_path):
    name = next(swept[0].glob("tune-*")).name
    (tmp_path / name).write_text("format = 7\n")
    job, table = tune(mpiexec, 2, tmp_path, "--collective", "barrier")
    assert [shape.ranks for shape in table.shapes] == [2]
    assert "replaced: " in job.stderr
    assert "its format is 7" in job.stderr


# ---------------------------------------------------------------- the commands


def launched(mpiexec, ranks, *arguments, env=None):
    """Output, errors and the exit code of every rank."""
    job = mpiexec(ranks, "sh", "-c", '"$0" -m gpucoll "$@"; echo "exit $?"', sys.executable, *arguments, env=env)
    lines = job.stdout.splitlines()
    return ([line for line in lines if not line.startswith("exit ")], job.stderr,
            [line.split()[1] for line in lines if line.startswith("exit ")])


def explained(mpi, collective, nbytes):
    with gc.Communicator.from_mpi(mpi) as comm:
        return str(comm.explain(collective, nbytes)), dict(comm.explain(collective, nbytes))


@pytest.mark.parametrize("size", [2, 3])
def test_explain_prints_once_what_a_communicator_explains(mpiexec, ranks, swept, size):
    env = at(swept[0])
    (text, found), *others = ranks(explained, size, "all_reduce", 1 << 12, env=env)
    assert all(one == (text, found) for one in others)
    lines, errors, codes = launched(mpiexec, size, "explain", "all_reduce", "4K", env=env)
    assert (lines, errors, codes) == (text.splitlines(), "", ["0"] * size)
    (line,), _, _ = launched(mpiexec, size, "explain", "all_reduce", "4K", "--json", env=env)
    assert json.loads(line) == found
    assert (found["bytes"], found["ranks"]) == (1 << 12, size)
    assert any(row["tuned"] for row in found["candidates"]) == (size == 2)  # curves are of two ranks


@pytest.mark.parametrize(("arguments", "words"), [
    ("tune --collective all_reduc", "did you mean all_reduce"), ("tune --max-bytes 8X", "'8X' is no number of bytes"),
    ("tune --max-bytes 4", "below the least size"), ("tune --frob", "--frob"), ("tune --device tpu", "'tpu'"),
    ("tune --device cuda", "no CUDA device"), ("explain", "required: collective"),
    ("explain all_reduc", "did you mean all_reduce"), ("explain all_reduce 8X", "'8X' is no number of bytes"),
    ("explain all_reduce 8 --dtype float31", "'float31'"), ("explain all_reduce 8 --device tpu", "'tpu' is none of"),
    ("explain all_reduce 8 --ranks 0", "0 ranks are none"), ("explain all_reduce 8 9", "9")])
def test_wrong_arguments_are_one_line_and_code_2_on_every_rank(mpiexec, tmp_path, arguments, words):
    lines, errors, codes = launched(mpiexec, 2, *arguments.split(), env={**at(tmp_path), "CUDA_VISIBLE_DEVICES": ""})
    assert (lines, codes, errors.count("\n")) == ([], ["2", "2"], 1), errors
    assert words in errors
    assert errors.startswith("gpucoll")
    assert list(tmp_path.glob("tune-*")) == []


@pytest.mark.parametrize(("arguments", "env"), [
    ("tune", {"GPUCOLL_ALGO": "rng"}), ("explain all_reduce", {"GPUCOLL_ALGO": "rng"}),
    ("tune", {"GPUCOLL_CACHE": "/dev/null"})])
def test_a_wrong_environment_is_one_line_and_code_2_on_every_rank(mpiexec, arguments, env):
    lines, errors, codes = launched(mpiexec, 2, *arguments.split(), env=env)
    assert (lines, codes, errors.count("\n")) == ([], ["2", "2"], 1), errors


def test_one_rank_has_nothing_to_choose(mpiexec, tmp_path):
    lines, errors, codes = launched(mpiexec, 1, "tune", env=at(tmp_path))
    assert (lines, codes, errors.count("\n")) == ([], ["2"], 1)
    assert "mpiexec -n 8 gpucoll tune" in errors


def serving(mpi):
    """Which executors are measured does not depend on what auto may choose."""
    found = []
    for executor in ("mpi", "native", "nccl"):
        with gc.Communicator.from_mpi(mpi, executor=executor) as comm:
            found.append(probes.serves(comm, "cpu"))
    return found


@pytest.mark.parametrize("algo", [None, "all_reduce:native", "^native", "tree"])
def test_every_executor_that_serves_is_measured(ranks, algo):
    assert ranks(serving, 2, env={"GPUCOLL_ALGO": algo}) == [[True, True, False]] * 2
