"""gpucoll doctor on ranks: the command alone and launched, planted slow links and wrong results, who is to be heard."""

import contextlib
import io
import json
import os
import subprocess
import sys
import time

import numpy
import pytest

import gpucoll as gc
from gpucoll.doctor import findings, links, mpi, run, selftest

KEYS = ["advice", "differing", "exit_code", "hosts", "links", "missing", "mpi", "problems", "ranks", "schema",
        "self_test", "verdict", "versions"]
HOST_KEYS = {"name", "ranks", "cores", "usable_cores", "quota_cores", "affinity", "numa", "shm", "limits", "clock",
             "slots", "rdma", "gpus", "p2p", "paths", "devices", "missing"}


def alone(*arguments, env=None, script=None):
    """The `CompletedProcess` of `gpucoll doctor` without a launcher; `script` may prepare the shell before."""
    command = [sys.executable, "-m", "gpucoll", "doctor", *arguments]
    if script:
        command = ["sh", "-c", f'{script}; exec "$0" "$@"', *command]
    return subprocess.run(command, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=60)


def codes_of(problems):
    return [problem["code"] for problem in problems]


# ---------------------------------------------------------------- the command


def test_alone_it_is_one_json_object_with_stable_keys(launcher):
    job = alone("--json")
    report = json.loads(job.stdout)
    assert sorted(report) == KEYS
    assert [set(host) for host in report["hosts"]] == [HOST_KEYS]
    assert (job.returncode, report["exit_code"], report["problems"], report["ranks"]) == (0, 0, [], 1), job.stdout
    assert report["mpi"]["match"] is True
    assert report["links"] is None
    assert "mpiexec -n 4" in report["missing"]["links"]
    assert report["self_test"]["cpu"]["faults"] == []
    assert report["self_test"]["cpu"]["collectives"] == len(selftest.CALLS)
    assert all(report["missing"][f"versions.{name}"] for name, found in report["versions"].items() if found is None)


def launched(mpiexec, ranks, *arguments, env=None):
    """What the command prints, what it complains of, and the exit code of every rank."""
    script = '"$0" -m gpucoll doctor "$@"; echo "exit $?"'
    job = mpiexec(ranks, "sh", "-c", script, sys.executable, *arguments, timeout=60, env=env)
    lines = job.stdout.splitlines()
    codes = [int(line.split()[1]) for line in lines if line.startswith("exit ")]
    return [line for line in lines if not line.startswith("exit ")], job.stderr, codes


def test_launched_it_speaks_once(mpiexec):
    lines, errors, codes = launched(mpiexec, 2)  # one pair, which no other tests' load can make the slow one
    said = "\n".join(lines)
    assert codes == [0, 0], said + errors
    assert said.count("gpucoll doctor: 2 ranks on 1 host") == 1
    assert said.count("1 pair ") == 1
    assert lines[-1] == "verdict     fine"
    assert max(map(len, lines)) <= 110


def test_launched_it_is_one_json_object(mpiexec):
    (line,), errors, codes = launched(mpiexec, 2, "--json")
    report = json.loads(line)
    assert (codes, sorted(report), report["ranks"], errors) == ([0, 0], KEYS, 2, "")
    assert [(pair["ranks"], pair["class"], pair["slow"]) for pair in report["links"]["pairs"]] == \
        [([0, 1], "same node", False)]
    assert [kind["pairs"] for kind in report["links"]["classes"]] == [1]
    assert report["mpi"]["launched"] == report["mpi"]["ranks"] == 2


@pytest.mark.parametrize(("arguments", "env"), [(["--jsn"], None), (["x"], None), ([], {"GPUCOLL_TIMEOUT": "soon"})])
def test_wrong_arguments_are_one_line_and_code_2_on_every_rank(mpiexec, arguments, env):
    lines, errors, codes = launched(mpiexec, 2, *arguments, env=env)
    assert (lines, codes, errors.count("\n")) == ([], [2, 2], 1)


def test_few_file_handles_are_wrong(launcher):
    job = alone("--json", script="ulimit -n 64")
    assert job.returncode == 1
    assert codes_of(json.loads(job.stdout)["problems"]) == ["GC-FILES"]


def test_nothing_is_said_of_the_user_and_the_environment(launcher, tmp_path):
    secrets = {"HOME": str(tmp_path / "annelore"), "USER": "annelore", "LOGNAME": "annelore", "API_TOKEN": "s3cr3t"}
    for arguments in ([], ["--json"]):
        job = alone(*arguments, env=secrets)
        assert job.returncode == 0
        for secret in ("annelore", "s3cr3t", "API_TOKEN", str(tmp_path), os.path.dirname(sys.executable)):
            assert secret not in job.stdout + job.stderr


def test_a_launcher_of_another_mpi_is_one_sentence_and_starts_nothing(launcher):
    pmi = launcher.vendor.mark == "Open MPI"
    told = ("PMI_SIZE", "PMI_RANK") if pmi else ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
    job = alone("--json", env=dict(zip(told, ("4", "0"), strict=True)))
    report = json.loads(job.stdout)
    assert (job.returncode, codes_of(report["problems"])) == (1, ["GC-LAUNCHER"])
    other, own = ("MPICH", "Open MPI") if pmi else ("Open MPI", "MPICH")
    assert report["problems"][0]["text"].startswith(f"{other}'s mpiexec started 4 ranks, but mpi4py uses {own} ")
    assert report["problems"][0]["text"].endswith(f"; launch with {own}'s own mpiexec")
    assert report["mpi"]["match"] is False
    assert report["self_test"]["cpu"] is None
    assert report["missing"]["self_test.cpu"] == report["missing"]["links"] == "MPI cannot be started"


def test_a_launcher_that_mpi_does_not_understand(launcher):
    job = alone("--json", env={"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"})
    report = json.loads(job.stdout)
    assert (job.returncode, codes_of(report["problems"])) == (1, ["GC-LAUNCHER"])
    assert "which sees only itself" in report["problems"][0]["text"]


# ---------------------------------------------------------------- planted faults


class Delayed:
    """An mpi4py communicator on which messages between two ranks are late."""

    def __init__(self, comm, pair):
        self._comm, self._pair = comm, pair

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def Isend(self, buffer, peer, tag):
        if {self._comm.rank, peer} == set(self._pair):
            time.sleep(2e-3)  # the planted fault
        return self._comm.Isend(buffer, peer, tag)


def measured(comm, pair, nodes):
    own = comm.Dup()
    try:
        found = links.measure(Delayed(own, pair) if pair else own, nodes, 20.0)
        return [link[:3] for link in found], [bad.link[:2] for bad in links.slow(found)]
    finally:
        own.Free()


@pytest.mark.mutant
@pytest.mark.parametrize(("pair", "nodes"), [((1, 2), [0, 0, 0, 0]), ((0, 3), [0, 1, 0, 2])])
def test_a_delaying_link_is_found_and_named(ranks, pair, nodes):
    (found, slow), *others = ranks(measured, 4, pair, nodes)
    assert sorted(found) == [(one, two, "same node" if nodes[one] == nodes[two] else "across nodes")
                             for one in range(4) for two in range(one + 1, 4)]
    assert pair in slow
    assert others == [([], [])] * 3


def examined(comm, plant, device=None, memory=None):
    """The exit code and report of an examination of the pool's ranks, spoilt by `plant`; GPUs by stand-ins."""
    output, kept = io.StringIO(), (selftest.SECONDS, selftest.gpu, run.bootstrap.describe_gpu)
    found = findings.Findings()
    mpi.launcher_facts(found, mpi.library_facts(found), None)
    selftest.SECONDS, selftest.gpu = 0.0, lambda: memory
    run.bootstrap.describe_gpu = lambda ordinal: run.bootstrap.Gpu(ordinal, f"0{ordinal}:00.0", "H200")
    sys.modules.setdefault("cupy", selftest)  # it is looked for, and nothing of it used
    try:
        with gc.Communicator.from_mpi(comm) as own, contextlib.redirect_stdout(output):
            own.__dict__["device"] = own.rank if device is None or own.rank in device else None
            plant(own)
            return run._together(own, found, as_json=True), json.loads(output.getvalue() or "null")
    finally:
        selftest.SECONDS, selftest.gpu, run.bootstrap.describe_gpu = kept
        if sys.modules["cupy"] is selftest:
            del sys.modules["cupy"]


def nothing(comm):
    """Plant no fault."""


def wrong_on_rank_1(comm):
    right = comm.all_gather
    comm.all_gather = lambda x, **options: right(x, **options) + (comm.rank == 1)


@pytest.mark.mutant
def test_a_wrong_result_on_one_rank_is_everyones_exit_code(ranks):
    (code, report), *others = ranks(examined, 3, wrong_on_rank_1, (), None)
    assert [code, *(other for other, _ in others)] == [1, 1, 1]
    assert [text for _, text in others] == [None, None]
    faults = [problem for problem in report["problems"] if problem["code"] == "GC-RESULT"]
    assert [fault["ranks"] for fault in faults] == [[1]]
    assert "all_gather" in faults[0]["text"]
    assert report["missing"]["self_test.cuda"] == "the test before has failed"


def give_a_list(x):
    return x.tolist()


def gpu_arrays(give):
    return selftest.Memory("cuda", give, numpy.asarray)


def test_where_every_rank_has_a_gpu_its_arrays_are_tested_too(ranks):
    _, report = ranks(examined, 2, nothing, None, gpu_arrays(numpy.array))[0]
    assert report["self_test"]["cuda"]["faults"] == []
    assert report["self_test"]["cuda"]["collectives"] == len(selftest.CALLS)
    devices = {str(rank): {"ordinal": rank, "pci": f"0{rank}:00.0"} for rank in (0, 1)}
    assert report["hosts"][0]["devices"] == devices


def test_gpu_arrays_that_are_refused_are_a_reason_and_no_fault(ranks):
    _, report = ranks(examined, 2, nothing, None, gpu_arrays(give_a_list))[0]
    assert report["self_test"]["cuda"] is None
    assert "not an array" in report["missing"]["self_test.cuda"]
    assert "GC-RESULT" not in codes_of(report["problems"])


def test_gpus_on_some_ranks_only_are_a_reason(ranks):
    _, report = ranks(examined, 3, nothing, (1,), gpu_arrays(numpy.array))[0]
    assert report["self_test"]["cuda"] is None
    assert "(ranks 0,2)" in report["missing"]["self_test.cuda"]


# ---------------------------------------------------------------- a link that is dead

DEAD = """
import sys, time
from gpucoll.cli import main
from gpucoll.doctor import links
if {rank} in (int(__import__("os").environ.get(name, -1)) for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK")):
    links._Probe._measure = lambda probe, pair: time.sleep(60)  # the planted fault: it never answers
sys.exit(main(["doctor"]))
"""


def test_a_rank_that_never_answers_is_named_and_ends_the_job(mpiexec):
    started = time.monotonic()
    job = mpiexec(3, sys.executable, "-c", DEAD.format(rank=2), timeout=50, env={"GPUCOLL_TIMEOUT": "3"})
    assert job.returncode != 0
    assert "has heard nothing from rank 2 for 3 s" in job.stderr
    assert time.monotonic() - started < 30
