"""bench.training and bench.neighbours on ranks: rows and summaries; bytes are exact, times decide nothing."""

import contextlib
import functools
import importlib.util
import io
import re
import sys
from unittest import mock

import numpy
import pytest

import gpucoll as gc

pytest.importorskip("gpucoll.bench.cases", reason="gpucoll runs from a checkout here and is not installed")

from gpucoll.bench import neighbours


def command(mpi, line):
    """Run the command on ranks of the pool; return the output."""
    from gpucoll.bench import training

    own = functools.partial(gc.Communicator.from_mpi, mpi)
    with mock.patch.object(sys, "argv", ["training", *line.split()]), mock.patch.object(gc, "init", own), \
            contextlib.redirect_stdout(io.StringIO()) as output:
        training.main()
    return output.getvalue()


@pytest.fixture
def lines(rank_pool):
    """Return `lines(ranks, line)`, a function to run a command and return the printed lines."""
    def run(ranks, line):
        output, *others = rank_pool.run(command, ranks, line, timeout=120)
        assert others == [""] * (ranks - 1)
        return output.splitlines()

    return run


def test_buckets_are_held_against_a_call_for_each_gradient(lines):
    head, *rows = lines(2, "--gradients 5 --elements 10")
    assert head == "5 gradients of 10 float32, 2 ranks, 15 repeats"
    assert [row.split("  ")[0] for row in rows] == ["buckets", "a call for each", "copied into one array"]


def test_formats_are_held_against_float32(lines):
    head, *rows = lines(2, "formats --bytes 64K --repeats 1")
    assert head == "0.0625 MiB of float32, 2 ranks on 1 nodes, 1 repeats"
    bits = {"float32": "32.000", "int8": "8.125", "mxfp8_e4m3": "8.250", "mxfp8_e5m2": "8.250", "mxfp4": "4.250",
            "nvfp4": "4.500"}
    assert {row.split()[0]: row.split()[1] for row in rows} == bits


@pytest.mark.parametrize("batch", ["", "--batch 3"])
def test_overlap_holds_a_step_against_its_parts(lines, batch):
    head, *rows = lines(2, f"overlap --layers 3 --width 64 --bucket-bytes 16K --repeats 2 {batch}")
    chosen = re.fullmatch(r"3 layers of 64, batch (\d+), 0.046875 MiB of gradients in buckets of 0.015625 MiB, "
                          r"2 ranks on 1 nodes, 2 repeats", head)
    assert chosen[1] == "3" if batch else int(chosen[1]) > 0
    assert [re.split(r"\s+(?=\d)", row)[0] for row in rows] == [
        "forward", "compute", "communication", "step", "step / max(compute, communication)", "and at least"]


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed: pip install torch")
def test_ddp_has_the_same_gradients_as_pytorch(mpiexec):
    """In ranks of its own: PyTorch leaves hooks and descriptors behind."""
    words = "ddp --layers 2 --width 16 --batch 3 --repeats 2".split()
    job = mpiexec(2, sys.executable, "-m", "gpucoll.bench.training", *words, timeout=120)
    assert job.returncode == 0, job.stderr
    head, names, *rows = job.stdout.splitlines()
    assert head.startswith("2 layers of 16, 544 parameters of float32, batch 3, 2 ranks, PyTorch ")
    assert names.split("  ")[-1] == "communication ms"
    assert [row.split("  ")[0] for row in rows[:3]] == ["gpucoll", "ddp", "ddp, views"]
    assert rows[3].startswith("communication, ddp / gpucoll ")


def test_ddp_without_pytorch_is_one_line(mpiexec, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('none here')")
    code = "import sys; sys.path.insert(0, sys.argv.pop()); from gpucoll.bench.training import main; main()"
    job = mpiexec(2, sys.executable, "-c", code, "ddp", tmp_path, timeout=60)
    assert (job.returncode, job.stdout) == (2, "")
    ours = [line for line in job.stderr.splitlines() if line.startswith("bench.training: ")]  # mpiexec may add lines
    assert ours == ["bench.training: PyTorch is not installed: pip install torch"]
    assert "Traceback" not in job.stderr


def test_servers_move_what_the_formulas_say(lines):
    """Bytes match the formulas: a worker moves the whole array each way; a server, 1/N of the array per worker."""
    ranks, elements = 4, 1 << 18
    *heads, first, second, third, ring, auto, verdict = lines(ranks, "servers --bytes 1M --repeats 1")
    assert heads[0].startswith("1 MiB of float32, 4 ranks;")
    for servers, row in enumerate((first, second, third), 1):
        each = (ranks - servers) * -(-elements // servers) * 4 / (1 << 20)
        assert row.split()[:6] == [f"{servers}", f"{ranks - servers}", *[f"{each:.2f}"] * 2, "1.00", "1.00"]
    assert (ring.split()[:4], auto.split()[:2]) == (["ring", "4", "1.50", "1.50"], ["auto", "4"])
    assert verdict.startswith("With 1 servers their links are the bottleneck, and a step takes up to 3.8 times")
    assert "; with 2, 3, 1.20 to 1.27 times: " in verdict
    assert verdict.endswith("is confirmed.")


def same_results(mpi, name, nbytes):
    """Return the arrays left by each contestant's call on this rank."""
    with gc.Communicator.from_mpi(mpi) as comm:
        found = []
        for call in neighbours.contestants(comm, name, nbytes):
            call()
            rows = [cell.cell_contents for cell in call.__closure__]
            found.append([row.tolist() for row in rows if isinstance(row, numpy.ndarray)])
        return found


@pytest.mark.parametrize("name", neighbours.COLLECTIVES)
def test_contestants_among_neighbours_do_the_same(ranks, name):
    for ours, mpi in ranks(same_results, 2, name, 64):
        assert ours == mpi


def test_the_summary_of_neighbours():
    rows = [neighbours.Row(1, "scan", 8, 2.0, 1.0), neighbours.Row(1, "scan", 4096, 1.0, 8.0),
            neighbours.Row(2, "scan", 8, 1.0, 3.0)]
    assert neighbours.summary(rows) == ["# 1 neighbours: geometric mean 2.00, least 0.50",
                                        "# 2 neighbours: geometric mean 3.00, least 3.00"]
