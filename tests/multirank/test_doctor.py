"""gpucoll doctor on ranks: the command alone and launched, and a planted wrong result."""

import contextlib
import io
import json
import os
import re
import sys
from unittest import mock

import gpucoll as gc
from gpucoll import doctor
from gpucoll.doctor import facts
from harness.commands import gpucoll_run, without_mpi4py
from harness.jobs import python
from harness.pace import seconds
from harness.ranks import run_job

# The command with a single round of the self-test, to save time.
QUICK = ("import gpucoll.cli, os, sys, gpucoll.doctor as doctor; doctor.TEST_SECONDS = 0.0; {}; "
         "code = gpucoll.cli.main(['doctor', *sys.argv[1:]]); print(f'exit {{code}}', file=sys.stderr); sys.exit(code)")


def test_launched_it_speaks_once_and_ends_alike(mpiexec):
    job = mpiexec(2, sys.executable, "-c", QUICK.format("pass"), timeout=seconds(60))
    assert (job.returncode, job.stderr.count("exit 0")) == (0, 2), job.stdout + job.stderr
    assert job.stdout.count("gpucoll doctor: ranks 0, 1 on ") == job.stdout.count("same node: 1 pairs") == 1
    assert job.stdout.endswith("verdict     fine\n")


def test_without_mpi_every_command_works(tmp_path):
    """The doctor finds nothing wrong, the benchmark has a table, and `auto` uses the table of `tune`."""
    env = {**without_mpi4py(tmp_path), "GPUCOLL_CACHE": str(tmp_path)}
    alone = python("-c", QUICK.format("pass"), timeout=120, env=env)
    assert (alone.returncode, "MPI         no MPI: ranks by store\n" in alone.stdout) == (0, True), alone.stdout
    bench = gpucoll_run("--standalone", "-n", 2, "-m", "gpucoll.bench", "all_reduce", "-b", 8, "-e", 8, env=env)
    assert re.search(r"\n +8 +2 +float +sum .* 0\n", bench.stdout), bench.stdout + bench.stderr
    wrong = gpucoll_run("--standalone", "-n", 2, "-m", "gpucoll.bench", "all_reduced", env=env)
    assert (wrong.returncode, wrong.stderr.count("no collective is named 'all_reduced'")) == (2, 1)
    tune = gpucoll_run("--standalone", "-n", 2, "-m", "gpucoll", "tune", "--collective", "barrier", env=env)
    assert tune.returncode == 0, tune.stderr
    explained = gpucoll_run("--standalone", "-n", 2, "-m", "gpucoll", "explain", "all_reduce", "1M", env=env).stdout
    assert explained.count(f"by the table {tmp_path}") == 1
    assert " on shared" in explained.partition("choice: ")[2]


def test_without_mpi_a_benchmark_measures_executors_of_gpus(tmp_path):
    """The facts of the ranks, on the host, go another way than the arrays."""
    (tmp_path / "bench.py").write_text("import sys\nimport gpucoll.bench.__main__ as bench\n"
                                       "sys.exit(bench.main(sys.argv[1:]))\n")
    job = gpucoll_run("--standalone", "-n", 2, "-m", "gpucoll", "emulate", "--gpus", 2, "bench.py", "all_reduce", "-b",
                      8, "-e", 8, "--device", "cuda", "--executor", "peer", cwd=tmp_path, env=without_mpi4py(tmp_path))
    assert re.search(r"\n +8 +2 +float +sum .* 0\n", job.stdout), job.stdout + job.stderr


def test_alone_it_is_one_json_object_that_says_nothing_of_the_user(launcher):
    job = run_job([sys.executable, "-c", QUICK.format("pass"), "--json"], seconds(60),
                  {"USER": "annelore", "LOGNAME": "annelore", "API_TOKEN": "s3cr3t"})
    found = json.loads(job.stdout)
    assert (job.returncode, found["exit_code"], found["problems"], found["ranks"]) == (0, 0, [], 1)
    assert (found["mpi"]["match"], found["links"], found["self_test"]["cpu"]["faults"]) == (True, None, [])
    assert all(found["missing"][name] for name, version in found["versions"].items() if version is None)
    for secret in ("annelore", "s3cr3t", "API_TOKEN", os.path.dirname(sys.executable)):
        assert secret not in job.stdout + job.stderr


def examined(comm):
    """Return the exit code and the output of the doctor, with wrong results on rank 1."""
    output = io.StringIO()
    quick = mock.patch.object(doctor, "TEST_SECONDS", 0.0)
    with gc.Communicator.from_mpi(comm) as own, contextlib.redirect_stdout(output), quick:
        right = own.all_gather
        own.all_gather = lambda x, **options: right(x, **options) + (own.rank == 1)  # the planted fault
        return doctor.examine(own, facts.mpi({}), as_json=True), output.getvalue()


def test_a_wrong_result_on_one_rank_is_everyones_exit_code(ranks):
    (code, text), *others = ranks(examined, 3, timeout=seconds(60))
    assert (code, others) == (1, [(1, ""), (1, "")])
    found = json.loads(text)
    assert [fault["ranks"] for fault in found["self_test"]["cpu"]["faults"]] == [[1]]
    assert any("all_gather" in problem["text"] and "on rank 1" in problem["text"] for problem in found["problems"])
