"""bench.training on ranks: rows and summaries; bytes are exact, times decide nothing."""

import contextlib
import functools
import importlib.util
import io
import re
import sys
from unittest import mock

import pytest

import gpucoll as gc

pytest.importorskip("gpucoll.bench.cases", reason="gpucoll runs from a checkout here and is not installed")



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
