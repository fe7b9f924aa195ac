"""The examples of README and of the documentation pages, on several ranks; both spellings of programs to migrate."""

import importlib.util
import json
import os
import re
import sys

import pytest

from harness.pace import seconds
from harness.sources import PAGES, ROOT

README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def blocks(kind):
    """Yield the examples of a kind on the documentation pages, without README's examples."""
    for page in PAGES:
        for number, example in enumerate(re.findall(rf"```{kind}\n(.*?)```", page.read_text(), re.DOTALL)):
            if example not in EXAMPLES:
                yield pytest.param(example, id=f"{page.stem}-{number}")


def run(mpiexec, folder, ranks, example):
    (folder / "example.py").write_text(example)
    job = mpiexec(ranks, sys.executable, "example.py", cwd=folder)
    assert job.returncode == 0, job.stderr
    return job.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples_run_on_four_ranks(mpiexec, tmp_path, example):
    promised = re.search(r"python example\.py\s+# (.*)", README).group(1)
    printed = run(mpiexec, tmp_path, 4, example)
    assert example is not EXAMPLES[0] or printed == promised + "\n"


def test_the_sites_first_program_is_readmes():
    for page in ("index.md", "start.md"):
        text = (ROOT / "docs" / page).read_text()
        assert EXAMPLES[0] in text
        assert set(re.findall(r"python example\.py .*", text)) <= {*re.findall(r"python example\.py .*", README)}


# One job runs all examples in turn: a job takes longer to start than an example.
TOGETHER = """
import runpy, sys
import gpucoll as gc
for script in sys.argv[1:]:
    try:
        runpy.run_path(script, run_name="__main__")
        comm = gc.init()
        comm.close()
    except BaseException as error:
        error.add_note(f"in {script}")
        raise
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_the_pages_examples_run_on_two_ranks_and_a_mesh_on_four(mpiexec, tmp_path, size):
    scripts = []
    for example in blocks("python"):
        if ("Mesh" in example.values[0]) == (size == 4):
            scripts.append(f"{example.id}.py")
            (tmp_path / scripts[-1]).write_text(example.values[0])
    job = mpiexec(size, sys.executable, "-c", TOGETHER, *scripts, cwd=tmp_path, timeout=200)
    assert job.returncode == 0, job.stderr


@pytest.mark.kernel
@pytest.mark.emulated
@pytest.mark.parametrize("example", [*blocks("python gpu")])
def test_the_pages_examples_for_gpus_run_on_emulated_ones(mpiexec, emulated_kernels, tmp_path, monkeypatch, example):
    places = [ROOT / "gpucoll/emulation/_faces", ROOT / "tests", ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, places)))
    monkeypatch.setenv("EMULATED_GPUS", "8")
    run(mpiexec, tmp_path, 2, example)


MIGRATING = (ROOT / "gpucoll" / "MIGRATING.md").read_text()
PAIRS = re.findall(r"```python (\w+)\n(.*?)```\n\n```(?:python gpucoll|text)\n(.*?)```", MIGRATING, re.DOTALL)
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
    assert MIGRATING.count("```python") == 2 * len(PAIRS) - [kind for kind, *_ in PAIRS].count("cupyx")
