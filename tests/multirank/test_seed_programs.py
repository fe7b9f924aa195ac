"""The programs of five documents, as tests/seed_programs, against what the documents print, copied by hand."""

import json
import re
import sys
from pathlib import Path

import pytest

from commands import gpucoll_run
from grids import naming, sampled

PROGRAMS = Path(__file__).parents[1] / "seed_programs"


def everywhere(text):
    """The text as each of four ranks prints it, {r} being the rank."""
    return "".join("\n" + text.replace("{r}", str(rank)) for rank in range(4))


# A program's output, line by line, in the documents' own words. Tensors are arrays here, so that words and numbers are
# compared and brackets are not. Where all ranks print alike, one of them is written down and `everywhere` gives all.
PRINTED = {
    "primitives/broadcast": """
        before broadcast  Rank  1  has data  tensor([3, 4])
        before broadcast  Rank  0  has data  tensor([1, 2])
        before broadcast  Rank  2  has data  tensor([5, 6])
        before broadcast  Rank  3  has data  tensor([7, 8])
        after broadcast  Rank  1  has data  tensor([1, 2])
        after broadcast  Rank  0  has data  tensor([1, 2])
        after broadcast  Rank  2  has data  tensor([1, 2])
        after broadcast  Rank  3  has data  tensor([1, 2])""",
    "primitives/scatter": """
        before scatter  Rank  1  has data  tensor([3, 4])
        before scatter  Rank  0  has data  tensor([1, 2])
        before scatter  Rank  2  has data  tensor([5, 6])
        scater list: [tensor([0, 0]), tensor([1, 1]), tensor([2, 2]), tensor([3, 3])]
        before scatter  Rank  3  has data  tensor([7, 8])
        after scatter  Rank  1  has data  tensor([1, 1])
        after scatter  Rank  0  has data  tensor([0, 0])
        after scatter  Rank  3  has data  tensor([3, 3])
        after scatter  Rank  2  has data  tensor([2, 2])""",
    "primitives/gather": """
        before gather  Rank  0  has data  tensor([1, 2])
        before gather  Rank  3  has data  tensor([7, 8])
        after gather  Rank  3  has data  tensor([7, 8])
        before gather  Rank  1  has data  tensor([3, 4])
        before gather  Rank  2  has data  tensor([5, 6])
        after gather  Rank  1  has data  tensor([3, 4])
        after gather  Rank  2  has data  tensor([5, 6])
        after gather  Rank  0  has data  tensor([1, 2])
        gather_list: [tensor([1, 2]), tensor([3, 4]), tensor([5, 6]), tensor([7, 8])]""",
    # The document has Gloo's side effect on ranks 0 to 2: [16, 20], [15, 18], [12, 14]. Here they stay as they were.
    "primitives/reduce": """
        before reudce  Rank  3  has data  tensor([7, 8])
        before reudce  Rank  0  has data  tensor([1, 2])
        before reudce  Rank  2  has data  tensor([5, 6])
        before reudce  Rank  1  has data  tensor([3, 4])
        after reudce  Rank  1  has data  tensor([3, 4])
        after reudce  Rank  0  has data  tensor([1, 2])
        after reudce  Rank  3  has data  tensor([16, 20])
        after reudce  Rank  2  has data  tensor([5, 6])""",
    "primitives/all_gather": """
        before gather  Rank  1  has data  tensor([3, 4])
        before gather  Rank  0  has data  tensor([1, 2])
        before gather  Rank  2  has data  tensor([5, 6])
        before gather  Rank  3  has data  tensor([7, 8])
        after gather  Rank  1  has data  tensor([3, 4])
        after gather  Rank  0  has data  tensor([1, 2])
        after gather  Rank  3  has data  tensor([7, 8])
        after gather  Rank  2  has data  tensor([5, 6])""" + everywhere(
        "after gather  Rank  {r}  has gather list  [tensor([1, 2]), tensor([3, 4]), tensor([5, 6]), tensor([7, 8])]"),
    "primitives/all_reduce": """
        before reudce  Rank  3  has data  tensor([7, 8])
        before reudce  Rank  2  has data  tensor([5, 6])
        before reudce  Rank  0  has data  tensor([1, 2])
        before reudce  Rank  1  has data  tensor([3, 4])""" + everywhere(
        "after reudce  Rank  {r}  has data  tensor([16, 20])"),
    "parameter_server/multiprocess_launch": everywhere("Worldsize : 4 rank: {r}"),
    # The document's model is not given: what its last line says, and the weights that the data were made with.
    "parameter_server/parameter_server": """
        weights [1. -2. 3.]
        Done Training
        Done Training
        Done Training
        Done Training""",
    "launchers/object_broadcast": everywhere("rank {r} data is {'key1': [7, 2.72, (2+3j)], 'key2': ('abc', 'xyz')}"),
    "launchers/object_scatter": """
        rank 2 data is [0, 1, 2, 3]
        rank 1 data is [0, 1, 2]
        rank 0 data is [0, 1]
        rank 3 data is [0, 1, 2, 3, 4]""",
    "launchers/buffer_all_gather": everywhere("Rank {r} gathered data: [1 2 3 4]"),
    "launchers/buffer_reduce": "Result after Reduce: 10",
    "launchers/buffer_all_reduce": everywhere("Rank {r} has result after AllReduce: 10"),
    "launchers/broadcast": everywhere("[{r}] data = tensor([0.])"),
    "launchers/scatter": """
        Rank 2 received data tensor([3.])
        Rank 0 received data tensor([1.])
        Rank 1 received data tensor([2.])
        Rank 3 received data tensor([4.])""",
    "launchers/gather": "[0] data = [tensor([0.]), tensor([1.]), tensor([2.]), tensor([3.])]",
    # Printed by none: "all ranks will have [...]", and "only rank 0 will have four".
    "launchers/all_gather": everywhere("[{r}] data = [tensor([0.]), tensor([1.]), tensor([2.]), tensor([3.])]"),
    "launchers/reduce": """
        [0] data = 4.0
        [1] data = 1.0
        [2] data = 1.0
        [3] data = 1.0""",
    "launchers/all_reduce": everywhere("""Rank {r} has data tensor([[4., 4., 4.],
        [4., 4., 4.]])"""),
    # Printed for two ranks; here there are four.
    "launchers/send": "\n".join([
        *(f"local rank {rank} world size 4 world rank {rank}" for rank in range(4)),
        *(f"worker_0 sent data to Rank {rank}" for rank in range(1, 4)),
        *(line for rank in range(1, 4) for line in [
            f"worker_{rank} has received data tensor([[1., 1., 1., 1., 1., 1., 1., 1., 1., 1.],",
            *["[1., 1., 1., 1., 1., 1., 1., 1., 1., 1.],"] * 8,
            "[1., 1., 1., 1., 1., 1., 1., 1., 1., 1.]]) from rank 0"])]),
    # Not printed, but what the text says of each pattern.
    "communication_patterns/demo": everywhere("""
        broadcast [{r}] [0 1 2 3]
        all_reduce [{r}] [24 28 32 36]
        all_gather [{r}] [[0 1 2 3], [4 5 6 7], [8 9 10 11], [12 13 14 15]]""") + """
        reduce [0] [24 28 32 36]
        reduce [1] [4 5 6 7]
        reduce [2] [8 9 10 11]
        reduce [3] [12 13 14 15]
        gather [0] [[0 1 2 3], [4 5 6 7], [8 9 10 11], [12 13 14 15]]
        gather [1] None
        gather [2] None
        gather [3] None
        scatter [0] [0 1 2 3]
        scatter [1] [4 5 6 7]
        scatter [2] [8 9 10 11]
        scatter [3] [12 13 14 15]
        all_to_all [0] [[0 1 2 3], [4 5 6 7], [8 9 10 11], [12 13 14 15]]
        all_to_all [1] [[.25 1.25 2.25 3.25], [4.25 5.25 6.25 7.25], [8.25 9.25 10.25 11.25], """
    """[12.25 13.25 14.25 15.25]]
        all_to_all [2] [[.5 1.5 2.5 3.5], [4.5 5.5 6.5 7.5], [8.5 9.5 10.5 11.5], [12.5 13.5 14.5 15.5]]
        all_to_all [3] [[.75 1.75 2.75 3.75], [4.75 5.75 6.75 7.75], [8.75 9.75 10.75 11.75], """
    """[12.75 13.75 14.75 15.75]]
        group [0] [8 10 12 14]
        group [2] [8 9 10 11]""",
    "training/ddp_all_reduce": everywhere("[{r}] the gradient is that of the whole batch: True"),
    "training/gloo_all_reduce": everywhere("""[{r}] [[4. 8. 12.]
        [4. 8. 12.]]"""),
}
# Each with the line that every rank prints; what else is in it is not known beforehand.
OTHERS = {"parameter_server/process_group_spawn": r"(<.*ProcessGroup.*>|GroupMember.NON_GROUP_MEMBER) - rank: {r}",
          "parameter_server/process_group_launch": r"<.*ProcessGroup.*> - rank: {r}"}
SIZE = 4
BUFFERED = {"PYTHONUNBUFFERED": None}  # what a rank prints comes in one piece


def words(line):
    """The words of a line, numbers as numbers, without what tensors and arrays put around them."""
    line = re.sub(r"tensor|array|,?\s*device='cuda:\d'|,?\s*dtype=\w+", " ", line)
    return [number(word) for word in re.split(r"[\s\[\](),]+", line) if word]


def number(word):
    try:
        return str(float(word))
    except ValueError:
        return word


def lines_of(text):
    """The lines that have words, in order: ranks print in any order."""
    return sorted(found for line in text.splitlines() if (found := words(line)))


def check(name, text):
    """The ranks have printed `text` together, and that is what the document prints."""
    if name in PRINTED:
        assert lines_of(text) == lines_of(PRINTED[name])
    else:
        found = [line for line in text.splitlines() if line]
        assert len(found) == SIZE
        for rank in range(SIZE):
            assert any(re.fullmatch(OTHERS[name].replace("{r}", str(rank)), line) for line in found)


NAMES = [*PRINTED, *OTHERS]


def start(mpiexec, starter, *argv):
    """The job of four ranks, started by mpiexec or by `gpucoll run`."""
    if starter == "mpiexec":
        return mpiexec(SIZE, sys.executable, *argv, env=BUFFERED)
    return gpucoll_run("--nproc-per-node", SIZE, *argv, env=BUFFERED)


ONE_OF_A_KIND = ["primitives/all_gather", "parameter_server/parameter_server", "parameter_server/process_group_spawn",
                 "launchers/send", "launchers/object_scatter", "communication_patterns/demo",
                 "training/ddp_all_reduce"]


@pytest.mark.parametrize(("starter", "names"), [
    pytest.param("mpiexec", ONE_OF_A_KIND, id="one of a kind"),
    pytest.param("mpiexec", NAMES, id="mpiexec", marks=pytest.mark.slow),
    pytest.param("gpucoll run", NAMES, id="gpucoll run", marks=pytest.mark.slow)])
def test_programs_print_what_their_documents_say(mpiexec, tmp_path, starter, names):
    """All in one job, one after the other."""
    job = start(mpiexec, starter, PROGRAMS / "together.py", tmp_path, *(PROGRAMS / f"{name}.py" for name in names))
    assert job.returncode == 0, job.stderr
    printed = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(SIZE)]
    for name in names:
        with naming(name):
            check(name, "".join(rank[str(PROGRAMS / f"{name}.py")] for rank in printed))


ALONE = [(name, ("mpiexec", "gpucoll run")[number % 2]) for number, name in enumerate(NAMES)]  # in turns


@pytest.mark.slow
@pytest.mark.parametrize(("name", "starter"), sampled(ALONE, keep=1, seed=14))
def test_program_in_a_job_of_its_own(mpiexec, name, starter):
    job = start(mpiexec, starter, PROGRAMS / f"{name}.py")
    assert job.returncode == 0, job.stderr
    check(name, job.stdout)


@pytest.mark.slow
def test_the_message_of_two_ranks_arrives(mpiexec):
    job = mpiexec(2, sys.executable, PROGRAMS / "parameter_server" / "point_to_point.py", env=BUFFERED)
    assert job.returncode == 0, job.stderr
    lines = re.sub(r"rank \d: ", "", job.stdout).splitlines()  # of both ranks, mingled
    assert len(lines) == 4
    assert all(lines.count(line) == 2 for line in lines)


def test_every_program_is_tested():
    found = {str(path.relative_to(PROGRAMS).with_suffix("")) for path in PROGRAMS.glob("*/*.py")}
    assert found == {*NAMES, "parameter_server/point_to_point"}
