"""The page for those who come from elsewhere: both spellings of each program run and print the same."""

import re
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "gpucoll" / "MIGRATING.md").read_text()
PAIRS = re.findall(r"```python (\w+)\n(.*?)```\n\n```(?:python gpucoll|text)\n(.*?)```", PAGE, re.DOTALL)
# torch's launcher sets these; under mpiexec somebody must.
TORCHRUN = """
import os
from mpi4py import MPI
os.environ |= {"RANK": str(MPI.COMM_WORLD.rank), "WORLD_SIZE": str(MPI.COMM_WORLD.size), "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": "29511"}
"""


def printed(mpiexec, folder, program):
    (folder / "program.py").write_text(program)
    whole_lines = {"PYTHONUNBUFFERED": ""}  # else the ranks' lines get mixed up
    job = mpiexec(4, sys.executable, "program.py", cwd=folder, timeout=120, env=whole_lines)
    assert job.returncode == 0, job.stderr
    return sorted(job.stdout.splitlines())


@pytest.mark.parametrize(("kind", "theirs", "ours"), PAIRS, ids=[f"{i}-{pair[0]}" for i, pair in enumerate(PAIRS)])
def test_both_spellings_print_the_same(mpiexec, tmp_path, kind, theirs, ours):
    if kind == "cupyx":
        pytest.skip("cupyx.distributed runs on GPUs only")
    found = printed(mpiexec, tmp_path, ours)
    assert len(found) == 4
    if kind == "torch":
        pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
        theirs = TORCHRUN + theirs
    assert found == printed(mpiexec, tmp_path, theirs)


def test_every_program_of_the_page_is_in_a_pair():
    assert PAGE.count("```python") == 2 * len(PAIRS) - 1
