"""`gpucoll report DIR --torch OUT`: the files' form, and what PyTorch's own analyser says about the files."""

import importlib.util
import pickle
import subprocess
import sys

import pytest

from gpucoll.core.signature import Signature
from gpucoll.health.flight import CLOSED, RecordedCall, Story
from gpucoll.health.torch_trace import dumps, write
from pace import seconds

SIZE = 4
SHAPES = {  # of input and output, by NumPy's rules for blocks (2, 3) of four ranks
    "all_reduce": ([2, 3], [2, 3]), "reduce": ([2, 3], [2, 3]), "broadcast": ([2, 3], [2, 3]),
    "scan": ([2, 3], [2, 3]), "exscan": ([2, 3], [2, 3]),
    "all_gather": ([2, 3], [4, 2, 3]), "gather": ([2, 3], [4, 2, 3]),
    "reduce_scatter": ([4, 2, 3], [2, 3]), "scatter": ([4, 2, 3], [2, 3]), "all_to_all": ([4, 2, 3], [4, 2, 3])}
OTHER_LENGTHS = ("all_gather_v", "reduce_scatter_v", "gather_v", "scatter_v", "all_to_all_v")


def signatures():
    """Return a call of each collective."""
    yield from (Signature(name, 24, "float32", shape=(2, 3), algorithm="ring") for name in SHAPES)
    yield from (Signature(name, 24, "float32", algorithm="ring") for name in OTHER_LENGTHS)
    yield Signature("barrier", 0, "uint8", algorithm="dissemination")


def story(rank, calls, group="world", size=SIZE, ended=True, first=1, process=None):
    """Return the record of a rank; the last call has not ended unless `ended`."""
    made = [RecordedCall(number, 100 * number + rank, None if number == first + len(calls) - 1 and not ended
                         else 100 * number + 50, call.nbytes, call, f"train.py:{number}")
            for number, call in enumerate(calls, first)]
    return Story(group, rank, size, 70 + rank if process is None else process, "host", tuple(made))


def test_entries_have_shapes_and_the_place_of_the_call():
    found = dumps({"world": [story(rank, [*signatures()]) for rank in range(SIZE)]})
    assert len(found) == SIZE
    for dump in found:
        assert dump["pg_config"] == {"world": {"name": "world", "desc": "undefined", "ranks": "[0, 1, 2, 3]"}}
        for number, (entry, (name, shapes)) in enumerate(zip(dump["entries"], SHAPES.items(), strict=False), 1):
            assert (entry["collective_seq_id"], entry["input_sizes"], entry["output_sizes"]) == (
                number, [shapes[0]], [shapes[1]])
            assert name in entry["frames"][0]["name"]
            assert (entry["frames"][0]["filename"], entry["frames"][0]["line"]) == ("train.py", str(number))
            assert (entry["input_dtypes"], entry["output_dtypes"]) == (["float32"], ["float32"])


def test_groups_have_the_ranks_of_the_largest_communicator():
    call = [Signature("barrier", algorithm="dissemination")]
    world = [story(rank, call) for rank in range(SIZE)]
    part = [story(0, call, "part", 2, process=73), story(1, call, "part", 2, process=71)]
    foreign = [story(0, call, "foreign", 1, process=5)]
    found = dumps({"part": part, "world": world, "foreign": foreign})
    assert [sorted(dump["pg_config"]) for dump in found] == [["world"], ["part", "world"], ["world"], ["part", "world"]]
    assert found[3]["pg_config"]["part"]["ranks"] == "[1, 3]"


def test_of_two_runs_the_latest_counts():
    call = [Signature("barrier", algorithm="dissemination")]
    old, new = ([story(rank, call, name, first=first, process=10 * first + rank) for rank in range(SIZE)]
                for name, first in (("a", 1), ("b", 9)))
    for groups in ({"a": old, "b": new}, {"b": new, "a": old}):
        assert [[*dump["pg_config"]] for dump in dumps(groups)] == [["b"]] * SIZE


def test_ranks_that_are_threads_have_no_parts():
    call = [Signature("barrier", algorithm="dissemination")]
    world = [story(rank, call, process=9) for rank in range(SIZE)]
    found = dumps({"world": world, "part": [story(0, call, "part", 1, process=9)]})
    assert [[*dump["pg_config"]] for dump in found] == [["world"]] * SIZE


def analysed(folder, groups):
    """Return what PyTorch's analyser prints about the files."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed: pip install torch")
    write(folder, groups)
    job = subprocess.run([sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder)],
                         capture_output=True, text=True, timeout=seconds(120), check=False)
    assert job.returncode == 0, job.stderr
    return job.stdout + job.stderr


def test_pytorch_finds_no_error_in_equal_calls(tmp_path):
    closed = Signature(CLOSED)
    said = analysed(tmp_path, {"world": [story(rank, [*signatures(), closed][rank % 2:], first=1 + rank % 2)
                                         for rank in range(SIZE)]})
    assert not any(word in said for word in ("error", "Not all", "cannot decide")), said


DIFFERENT = {
    "another collective": (Signature("broadcast", 24, "float32", shape=(2, 3), algorithm="ring"), "TYPE_MISMATCH"),
    "another shape": (Signature("all_reduce", 28, "float32", shape=(7,), algorithm="ring"), "SIZE_OR_SYNTAX_MISMATCH"),
    "another dtype": (Signature("all_reduce", 48, "float64", shape=(2, 3), algorithm="ring"), "DTYPE_MISMATCH"),
    "scan": (Signature("scan", 24, "float32", shape=(2, 3), algorithm="ring"), "TYPE_MISMATCH"),
    "no call": (None, "missing ranks: {2}")}


@pytest.mark.parametrize("how", ["another collective", *(pytest.param(one, marks=pytest.mark.slow) for one in DIFFERENT
                                                        if one != "another collective")])
def test_pytorch_names_the_rank_and_the_line_of_another_call(tmp_path, how):
    call, words = DIFFERENT[how]
    calls, wrong = [next(signatures())] * 5, [next(signatures())] * 4 + ([call] if call else [])
    world = [story(rank, wrong if rank == 2 else calls, ended=rank == 2 and not call) for rank in range(SIZE)]
    said = analysed(tmp_path, {"world": world})
    assert "collective state: started" in said, said
    assert words in said, said
    assert "sequence number: 5" in said, said
    assert "train.py:5" in said, said


def test_a_rank_without_a_file_has_an_empty_one(tmp_path):
    groups = {"world": [story(rank, [*signatures()]) for rank in (0, 1, 3)]}
    write(tmp_path, groups)
    assert pickle.loads((tmp_path / "trace_rank_2").read_bytes())["entries"] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"trace_rank_{rank}" for rank in range(SIZE)]
