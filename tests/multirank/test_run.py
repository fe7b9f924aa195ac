"""`gpucoll run`: torchrun's variables, the program run as by Python, command lines, and wrong arguments."""

import json
import os
import sys
from argparse import Namespace

import pytest

from gpucoll.cli import jobs
from gpucoll.launch.binding import processors
from harness.commands import gpucoll_run
from harness.refusals import refused

UNSET = dict.fromkeys("RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT PYTHONUNBUFFERED".split())
SHOW = """
import os
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
found = {name: os.environ[name] for name in names}  # before any import
import json, sys
from neighbour import here  # beside the script
import gpucoll.distributed as dist
dist.init_process_group(rank=int(found["RANK"]), world_size=int(found["WORLD_SIZE"]))
comm = dist.group.WORLD.communicator
assert (comm.local_rank, comm.local_size) == (int(found["LOCAL_RANK"]), int(found["LOCAL_WORLD_SIZE"]))
found.update(name=__name__, file=__file__, arguments=sys.argv, first=sys.path[0])
print(json.dumps(found) + "\\n", end="")
"""


@pytest.fixture
def script(tmp_path):
    """Return `script(text)`, a function to write show.py with this text, and a module, and to return the folder."""
    def write(text):
        (tmp_path / "neighbour.py").write_text("here = True\n")
        (tmp_path / "show.py").write_text(text)
        return tmp_path
    return write


@pytest.mark.parametrize("options", [
    pytest.param(["--nproc-per-node", "4"], marks=pytest.mark.slow), ["--nproc_per_node=2", "--hosts", "localhost"]])
def test_the_program_finds_what_torchrun_would_tell_it(launcher, script, options):
    folder, given = script(SHOW), ["--nproc-per-node", "9", "--json", "-x", "a b", "--", "--help"]
    job = gpucoll_run(*options, "show.py", *given, cwd=folder, env=UNSET)
    assert job.returncode == 0, job.stderr
    size = 2 if "--hosts" in options else 4
    found = sorted(map(json.loads, job.stdout.splitlines()), key=lambda one: one["RANK"])
    assert [one["RANK"] for one in found] == [one["LOCAL_RANK"] for one in found] == [str(rank) for rank in range(size)]
    for one in found:
        assert one["WORLD_SIZE"] == one["LOCAL_WORLD_SIZE"] == str(size)
        assert one["MASTER_ADDR"] == ("localhost" if "--hosts" in options else "127.0.0.1")
        assert one["MASTER_PORT"] == found[0]["MASTER_PORT"]
        assert (one["name"], one["file"], one["first"]) == ("__main__", "show.py", str(folder))
        assert one["arguments"] == ["show.py", *given]


BOUND = """
import os
own = sorted(os.sched_getaffinity(0))
import json
import gpucoll as gc
with gc.init(executor="shared") as comm:
    comm.barrier()
    print(json.dumps([own, comm._core.host.executors[0].node_ranks.has_core]) + "\\n", end="")
"""


@pytest.mark.parametrize("how", [[], ["--standalone"]])
def test_a_rank_bound_to_a_core_has_it_alone(launcher, script, how):
    """Under mpiexec and without MPI, from the program's first line on; and the engine may spin there."""
    allowed = os.sched_getaffinity(0)
    job = gpucoll_run(*how, "-n", 2, "--bind", "core", "show.py", cwd=script(BOUND))
    expected = [[sorted(processors("core", rank, 2, allowed)), len(allowed) > 1] for rank in range(2)]
    assert sorted(map(json.loads, job.stdout.splitlines())) == sorted(expected), job.stderr


def test_wrong_arguments_are_one_line_and_exit_code_2(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jobs, "gpu_count", lambda: 0)
    for arguments, words in (
            ([], "required: script"), (["--nproc-per-node", "0", "x.py"], "'0' is not a whole number of at least 1"),
            (["."], "there is no file '.'"), (["--hosts", "a,a", "x.py"], "different host names"),
            (["--hosts", "a,,b", "x.py"], "'a,,b' is not a list"), (["--frob", "x.py"], "--frob"),
            (["-n", "many", "x.py"], "'many' is not a whole number"),
            (["-n", "gpu", "x.py"], "CuPy finds no GPU here"), (["-m", "no_such.module"], "no module 'no_such.module'"),
            (["-m", ".x"], "no module '.x'"), (["--standalone", "--hosts", "a", "x.py"], "give only one option")):
        assert words in refused(capsys, jobs.main, arguments, "gpucoll run")


HERE = Namespace(bind="none", nproc_per_node=3, hosts=(), script="x.py", arguments=["-v"], module=False)
THERE = Namespace(**{**vars(HERE), "nproc_per_node": 2, "hosts": ("a", "b"), "arguments": []})


@pytest.mark.parametrize(("version", "job", "root", "options"), [
    ("HYDRA build details:", HERE, True, ["-n", "3"]),
    ("Intel(R) MPI Library", THERE, False, ["-n", "4", "-genv", "I_MPI_PIN", "0", "-hosts", "a,b", "-ppn", "2"]),
    ("mpiexec (Open MPI) 5.0", HERE, False, ["-n", "3", "--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE"]),
    ("mpiexec (Open MPI) 5.0", THERE, True, ["-n", "4", "--bind-to", "none", "--host", "a:2,b:2", "--map-by",
                                             "slot:OVERSUBSCRIBE", "--allow-run-as-root"]),
])
def test_every_vendors_command_line(version, job, root, options):
    found = jobs.command("mpiexec", version, job, "--launcher=x", "a:1", root=root)
    assert found == ["mpiexec", *options, sys.executable, "-m", "gpucoll.cli.jobs", "--launcher=x", "a:1", "x.py",
                     *job.arguments]


@pytest.mark.parametrize(("gpus", "auto"), [(0, 3), (2, 2)])
def test_as_many_ranks_as_gpus_or_processors(monkeypatch, gpus, auto, tmp_path):
    monkeypatch.setattr(jobs, "gpu_count", lambda: gpus)
    monkeypatch.setattr(jobs.os, "sched_getaffinity", lambda process: {0, 1, 5})
    (tmp_path / "x.py").write_text("")
    counts = {word: jobs._parsed(["--nproc-per-node", word, str(tmp_path / "x.py")]).nproc_per_node
              for word in ("auto", "cpu", "7", *(["gpu"] if gpus else []))}
    assert counts == {"auto": auto, "cpu": 3, "7": 7, **({"gpu": gpus} if gpus else {})}
