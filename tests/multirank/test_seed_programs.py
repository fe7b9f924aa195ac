"""Programs of documents, one of each kind, as tests/seed_programs, against what the documents print or say."""

import json
import re
import sys
from pathlib import Path

import pytest

from commands import gpucoll_run
from grids import naming

PROGRAMS = Path(__file__).parents[1] / "seed_programs"
SIZE = 4
ALL = "[0 1 2 3], [4 5 6 7], [8 9 10 11], [12 13 14 15]"


def everywhere(text):
    """The line as each rank prints it, {r} being the rank."""
    return [text.replace("{r}", str(rank)) for rank in range(SIZE)]


def each(text, *results):
    """The same with a result of each rank's own."""
    return [f"{line} {result}" for line, result in zip(everywhere(text), results, strict=True)]


# Brackets do not count: tensors are arrays here.
PRINTED = {
    "object_scatter": each("rank {r} data is", [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]),
    "scatter": each("Rank {r} received data", "1.", "2.", "3.", "4."),
    # Printed for two ranks; here there are four.
    "send": [
        *everywhere("local rank {r} world size 4 world rank {r}"),
        *[line for rank in range(1, SIZE) for line in [
            f"worker_0 sent data to Rank {rank}", f"worker_{rank} has received data" + 10 * " 1.",
            *[" ".join(["1."] * 10)] * 8, 10 * " 1." + " from rank 0"]]],
    # The document's model is not given: what its last line says, and the weights that the data were made with.
    "parameter_server": ["weights [ 1. -2.  3.]", *["Done Training"] * SIZE],
    # Not printed, but what the text says of each pattern.
    "patterns": [
        *everywhere("broadcast [{r}] [0 1 2 3]"), *everywhere("all_reduce [{r}] [24 28 32 36]"),
        *everywhere("all_gather [{r}] " + ALL),
        # Gloo leaves partial sums on the ranks that are not `dst`; here they stay as they were.
        *each("reduce [{r}]", "24 28 32 36", "4 5 6 7", "8 9 10 11", "12 13 14 15"),
        *each("gather [{r}]", ALL, None, None, None),
        *each("scatter [{r}]", "0 1 2 3", "4 5 6 7", "8 9 10 11", "12 13 14 15"),
        *each("all_to_all [{r}]", *(" ".join(f"{number + rank / SIZE}".removesuffix("0") for number in range(16))
                                    for rank in range(SIZE))),
        "group [0] [8 10 12 14]", "group [2] [8 9 10 11]"],
    "process_group_spawn": [f"{'ProcessGroup' if rank < 2 else 'GroupMember.NON_GROUP_MEMBER'} - rank: {rank}"
                            for rank in range(SIZE)],
}

# Starting a job takes longer than a program: all run in one, one after the other. Rank 0 prints what each has printed.
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
    """The words of the lines, which ranks print in any order; a group is the name of its class."""
    lines = [re.sub(r"<[\w.]*?(\w+) rank=.*?>|array", r"\1", line) for line in lines]
    return sorted(found for line in lines if (found := re.findall(r"[^\s\[\](),]+", line)))


@pytest.mark.parametrize("starter", ["mpiexec", pytest.param("gpucoll run", marks=pytest.mark.slow)])
def test_programs_print_what_their_documents_say(mpiexec, tmp_path, starter):
    assert {path.stem for path in PROGRAMS.glob("*.py")} == {*PRINTED}
    (tmp_path / "together.py").write_text(TOGETHER)
    argv = [tmp_path / "together.py", *(PROGRAMS / f"{name}.py" for name in PRINTED)]
    job = mpiexec(SIZE, sys.executable, *argv) if starter == "mpiexec" else gpucoll_run("--nproc-per-node", SIZE, *argv)
    assert job.returncode == 0, job.stderr
    for (name, expected), text in zip(PRINTED.items(), json.loads(job.stdout), strict=True):
        with naming(name):
            assert words(text.splitlines()) == words(expected)
