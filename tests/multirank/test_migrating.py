"""The migration page: both versions of each program, for mpi4py or torch and for gpucoll, print the same."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from pace import seconds

PAGE = (Path(__file__).parents[2] / "gpucoll" / "MIGRATING.md").read_text()
PAIRS = re.findall(r"```python (\w+)\n(.*?)```\n\n```(?:python gpucoll|text)\n(.*?)```", PAGE, re.DOTALL)
# torch's launcher sets these variables on every rank; mpiexec does not.
BOTH = """
import contextlib, io, json, os, sys
from mpi4py import MPI

os.environ |= {"RANK": str(MPI.COMM_WORLD.rank), "WORLD_SIZE": str(MPI.COMM_WORLD.size), "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": "29511"}
for programs in json.load(open(sys.argv[1])):
    printed = []
    for program in programs:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(program, {"__name__": "__main__"})
        printed.append(output.getvalue())
    assert printed[0].count("\\n") == 1 and set(printed) == {printed[0]}, printed
"""


@pytest.mark.parametrize("library", ["mpi4py", "torch"])
def test_both_spellings_print_the_same(mpiexec, tmp_path, library):
    there = library == "mpi4py" or importlib.util.find_spec("torch")
    pairs = [[ours, theirs] if there else [ours] for kind, theirs, ours in PAIRS if kind == library]
    (tmp_path / "programs.json").write_text(json.dumps(pairs))
    job = mpiexec(4, sys.executable, "-c", BOTH, tmp_path / "programs.json", timeout=seconds(120))
    assert job.returncode == 0, job.stderr
    if not there:
        pytest.skip("our spelling ran; theirs needs PyTorch: pip install torch")


def test_every_program_of_the_page_is_in_a_pair():
    """No program is left out; pairs for cupyx are not run here, since they need a GPU."""
    assert PAGE.count("```python") == 2 * len(PAIRS) - [kind for kind, *_ in PAIRS].count("cupyx")
