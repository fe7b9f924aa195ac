"""Programs adapted from documents, in tests/seed_programs, print the output shown or described in the documents."""

import importlib.util
import json
import re
import sys

import pytest

from harness.commands import gpucoll_run
from harness.grids import naming
from harness.jobs import python
from harness.sources import ROOT

PROGRAMS = ROOT / "tests" / "seed_programs"
SIZE = 4
ALL = "[0 1 2 3], [4 5 6 7], [8 9 10 11], [12 13 14 15]"


def everywhere(text):
    """Return the line printed by each rank, with the rank in place of {r}."""
    return [text.replace("{r}", str(rank)) for rank in range(SIZE)]


def each(text, *results):
    """Return `everywhere(text)` with each rank's result appended."""
    return [f"{line} {result}" for line, result in zip(everywhere(text), results, strict=True)]


# Brackets are ignored: tensors print as arrays here.
PRINTED = {
    "object_scatter": each("rank {r} data is", [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]),
    "scatter": each("Rank {r} received data", "1.", "2.", "3.", "4."),
    # The document prints two ranks; this test has four.
    "send": [
        *everywhere("local rank {r} world size 4 world rank {r}"),
        *[line for rank in range(1, SIZE) for line in [
            f"worker_0 sent data to Rank {rank}", f"worker_{rank} has received data" + 10 * " 1.",
            *[" ".join(["1."] * 10)] * 8, 10 * " 1." + " from rank 0"]]],
    # The document lacks the model: expect its last line, and the weights used to make the data.
    "parameter_server": ["weights [ 1. -2.  3.]", *["Done Training"] * SIZE],
    # The document prints nothing: expect the patterns described in the text.
    "patterns": [
        *everywhere("broadcast [{r}] [0 1 2 3]"), *everywhere("all_reduce [{r}] [24 28 32 36]"),
        *everywhere("all_gather [{r}] " + ALL),
        # Gloo leaves partial sums on all ranks but `dst`; gpucoll leaves these arrays unchanged.
        *each("reduce [{r}]", "24 28 32 36", "4 5 6 7", "8 9 10 11", "12 13 14 15"),
        *each("gather [{r}]", ALL, None, None, None),
        *each("scatter [{r}]", "0 1 2 3", "4 5 6 7", "8 9 10 11", "12 13 14 15"),
        *each("all_to_all [{r}]", *(" ".join(f"{number + rank / SIZE}".removesuffix("0") for number in range(16))
                                    for rank in range(SIZE))),
        "group [0] [8 10 12 14]", "group [2] [8 9 10 11]"],
    "process_group_spawn": [f"{'ProcessGroup' if rank < 2 else 'GroupMember.NON_GROUP_MEMBER'} - rank: {rank}"
                            for rank in range(SIZE)],
}

# Starting a job takes longer than a program: one job runs all programs in turn. Rank 0 prints the output of each.
TOGETHER = """
import contextlib, io, json, runpy, sys
import gpucoll.distributed as dist
from mpi4py import MPI
scripts, found = sys.argv[1:], []
for sys.argv[:] in ([script] for script in scripts):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(sys.argv[0], run_name="__main__")
    dist.destroy_process_group()
    found.append(output.getvalue())
everyones = MPI.COMM_WORLD.gather(found)
if everyones:
    print(json.dumps(["".join(printed) for printed in zip(*everyones)]))
"""


def words(lines):
    """Return the words of each line, with sorted lines: ranks print in any order. A group becomes its class name."""
    lines = [re.sub(r"<[\w.]*?(\w+) rank=.*?>|array", r"\1", line) for line in lines]
    return sorted(found for line in lines if (found := re.findall(r"[^\s\[\](),]+", line)))


@pytest.mark.parametrize("starter", ["mpiexec", pytest.param("gpucoll run", marks=pytest.mark.slow),
                                     *(pytest.param(one, marks=pytest.mark.nightly) for one in ("nccl", "peer"))])
def test_programs_print_what_their_documents_say(request, mpiexec, monkeypatch, tmp_path, starter):
    if starter in ("nccl", "peer"):
        request.getfixturevalue("emulated_kernels")
        for name, value in (("DEVICE", "emulated"), ("EXECUTOR", starter)):
            monkeypatch.setenv(f"GPUCOLL_{name}", value)
    assert {path.stem for path in PROGRAMS.glob("*.py")} == {*PRINTED}
    (tmp_path / "together.py").write_text(TOGETHER)
    argv = [tmp_path / "together.py", *(PROGRAMS / f"{name}.py" for name in PRINTED)]
    job = mpiexec(SIZE, sys.executable, *argv) if starter != "gpucoll run" else gpucoll_run(
        "--nproc-per-node", SIZE, *argv)
    assert job.returncode == 0, job.stderr
    for (name, expected), text in zip(PRINTED.items(), json.loads(job.stdout), strict=True):
        with naming(name):
            assert words(text.splitlines()) == words(expected)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed: pip install torch")
def test_programs_that_start_their_ranks_run_as_written(tmp_path, monkeypatch):
    """Only the import differs; the tensors, and `torch.multiprocessing`, are PyTorch's."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # else ranks print into each other's lines
    blocks = re.findall(r"```\w+\n(.*?)```", (PROGRAMS / "standard_form.md").read_text(), re.DOTALL)
    for program, text in zip(blocks[::2], blocks[1::2], strict=True):
        (tmp_path / "program.py").write_text(program.replace("torch.distributed as", "gpucoll.distributed as"))
        job = python("program.py", cwd=tmp_path, timeout=240, env={"PYTHONPATH": str(ROOT)})
        assert job.returncode == 0, job.stderr
        partial = re.compile("after reudce.*" + ("Rank  [012]" if "dist.reduce(" in program else "no line"))
        assert words(line for line in job.stdout.splitlines() if not partial.match(line)) == \
            words(line for line in text.splitlines() if not partial.match(line))
    assert len(blocks) == 14
