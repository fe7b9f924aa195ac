"""Jobs whose output is broken or whose error has no words, children of ranks, exit codes, and Ctrl-C in commands."""

import os
import signal
import subprocess
import sys
import uuid
from multiprocessing.connection import wait

import pytest

from gpucoll.cli.mpi_jobs import KILLED_CODES, _job_code
from harness.commands import gpucoll_run
from harness.jobs import JOB_MARK, kill_marked, marked, python, same_gpucoll
from harness.pace import seconds

STANDALONE = ["--standalone"]
FAILS = """
import gpucoll as gc
class Wordless(Exception):
    def __str__(self):
        raise KeyError("no words")
    __notes__ = property(lambda self: 1 / 0)
comm = gc.init(timeout=200)
comm.barrier()
if comm.rank == 1:
    raise Wordless
comm.barrier()
"""
WAITS = "import os, time\nos.write(1, b'here\\n')\ntime.sleep(300)\n"  # one write: lines of ranks must not mix


HEARS = "import os, signal, sys; signal.signal(2, signal.default_int_handler); os.execv(sys.argv[1], sys.argv[1:])"


def command(*words):
    return [sys.executable, "-m", "gpucoll", *map(str, words)]


def start(words, **pipes):
    """Start a command of which Ctrl-C is not ignored; return the process, and the mark of all its processes."""
    token = uuid.uuid4().hex
    process = subprocess.Popen([sys.executable, "-c", HEARS, *words], text=True, start_new_session=True,
                               env={**os.environ, **same_gpucoll(), JOB_MARK: token, "PYTHONUNBUFFERED": "1"},
                               **{"stdin": subprocess.DEVNULL, **pipes})
    return process, token


def left(token, within=0.0):
    """Return how many processes of the job live, each `within` seconds after a look."""
    handles = marked(JOB_MARK, token)
    try:
        return sum(not wait([handle], seconds(within)) for handle in handles)
    finally:
        for handle in handles:
            os.close(handle)


def ended(process, token, within=0.0):
    """Return the exit code; no process of the job is left, or none `within` seconds."""
    try:
        code = process.wait(seconds(60))
        assert left(token, within) == 0
        return code
    finally:
        process.kill()
        kill_marked(JOB_MARK, token)


@pytest.mark.parametrize("output", ["full", "no reader", "closed"])
@pytest.mark.parametrize("options", [STANDALONE, *(pytest.param(options, marks=pytest.mark.slow)
                                                 for options in ([], [*STANDALONE, "--survive"]))])
def test_a_failure_ends_the_job_whatever_happens_to_its_output(launcher, tmp_path, options, output):
    (tmp_path / "job.py").write_text(FAILS)
    words = command("run", *options, "-n", 2, tmp_path / "job.py")
    if output != "no reader":
        streams = ">/dev/full 2>&1" if output == "full" else "<&- >&- 2>&-"
        job = start(["/bin/sh", "-c", f'exec "$@" {streams}', "sh", *words])
    else:
        reader, writer = os.pipe()
        job = start(words, stdout=writer, stderr=writer)
        os.close(reader)
        os.close(writer)
    assert ended(*job) == 1


CALLBACKS = """
import os, signal, sys, threading
import gpucoll as gc
gc.on_terminate(lambda: 1 / 0)
gc.on_terminate(lambda: sys.exit(3))
gc.on_terminate(lambda: open("saved", "w").close())
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
try:
    print("does not fit")
except OSError:  # the test's environment may have no buffer
    pass
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_every_callback_runs_at_sigterm_whatever_the_others_raise(tmp_path):
    job = python("-c", CALLBACKS, cwd=tmp_path, env=same_gpucoll())
    assert job.returncode == 143, job.stderr
    assert (tmp_path / "saved").exists()
    assert "ZeroDivisionError" in job.stderr


# ---------------------------------------------------------------- exit codes


@pytest.mark.parametrize(("end", "code"), [
    ("sys.exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", 137),
    pytest.param("os._exit(9)", 9, marks=pytest.mark.slow), pytest.param("raise KeyError", 1, marks=pytest.mark.slow),
    pytest.param("os.kill(os.getpid(), signal.SIGSEGV)", 139, marks=pytest.mark.slow),
    pytest.param("os.kill(os.getpid(), signal.SIGTERM)", 143, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [[], pytest.param(STANDALONE, marks=pytest.mark.slow)])
def test_a_ranks_end_is_the_jobs_exit_code(launcher, tmp_path, options, end, code):
    (tmp_path / "job.py").write_text("import os, signal, sys, time\nif os.environ['RANK'] == '1':\n"
                                     f"    {end}\ntime.sleep(9999)\n")
    job = gpucoll_run(*options, "-n", 3, tmp_path / "job.py")
    assert job.returncode == code, job.stderr


DEAF = """
import os, signal, sys, time
import gpucoll as gc
if os.environ["RANK"] == "1":
    sys.exit(5)
signal.signal(signal.SIGTERM, lambda number, frame: open("told", "w").close())
while True:
    time.sleep(300)
"""


@pytest.mark.slow
def test_a_rank_that_does_not_end_at_sigterm_is_killed(launcher, tmp_path):
    (tmp_path / "job.py").write_text(DEAF)
    job = gpucoll_run("-n", 2, "job.py", cwd=tmp_path)
    assert job.returncode == 5, job.stderr
    assert "rank 1 ended with status 5; the other ranks are ended" in job.stderr or "Open MPI" in launcher.version


@pytest.mark.parametrize("options", [[], STANDALONE])
def test_where_the_launcher_is_killed_its_mpiexec_and_ranks_are(launcher, tmp_path, options):
    (tmp_path / "job.py").write_text(WAITS)
    process, token = start(command("run", *options, "-n", 2, tmp_path / "job.py"), stdout=subprocess.PIPE)
    assert [process.stdout.readline() for _ in range(2)] == ["here\n"] * 2
    process.kill()
    process.communicate(timeout=seconds(60))  # returns once no process has the pipe open
    # mpiexec's helper on this host, without the pipe, ends by itself.
    assert ended(process, token, within=20) == -signal.SIGKILL


def test_the_first_code_counts_where_mpiexec_joins_codes():
    assert (_job_code(7, [3, 4]), _job_code(4, [3, 4]), _job_code(255, [1])) == (3, 4, 1)
    assert (_job_code(9, [137]), _job_code(9, [143]), _job_code(9, [9]), _job_code(9, [])) == (137, 143, 9, 9)
    assert (_job_code(1, [*KILLED_CODES]), _job_code(-13, []), _job_code(0, [])) == (1, 141, 0)


# ---------------------------------------------------------------- children of ranks

CHILDREN = """
import concurrent.futures, multiprocessing, os, subprocess, sys
import gpucoll as gc
PROGRAM = "import gpucoll.distributed as dist; dist.init_process_group()"
OWN = "import gpucoll as gc; print(gc.init(store='tcp://127.0.0.1:1', rank=0, size=1).size)"

def work(_):
    try:
        return gc.init(timeout=100).size
    except gc.UsageError as error:
        return str(error)

if __name__ == "__main__":
    with gc.init(timeout=200) as comm:
        texts = []
        for method in ("spawn", "forkserver"):
            with multiprocessing.get_context(method).Pool(1) as pool:
                texts += pool.map_async(work, [1]).get(100)
        with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            texts.append(pool.submit(work, 1).result(100))
        child = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
        texts.append(child.stderr)
        for text in texts:
            assert f"is a child of rank {comm.rank} (process {os.getpid()})" in text and "[GC-FORK]" in text, text
        if comm.rank == 0:
            for how in ([], ["--standalone"]):
                job = subprocess.run([sys.executable, "-m", "gpucoll", "run", *how, "-n", "2", "nested.py"])
                assert job.returncode == 0
        comm.barrier()
"""
NESTED = "import gpucoll as gc\nwith gc.init(timeout=100) as comm:\n    assert comm.size == 2\n    comm.barrier()\n"


@pytest.mark.parametrize("options", [[], pytest.param(STANDALONE, marks=pytest.mark.slow)])
def test_a_child_of_a_rank_is_refused_and_a_job_inside_a_rank_is_not(launcher, tmp_path, options):
    (tmp_path / "job.py").write_text(CHILDREN)
    (tmp_path / "nested.py").write_text(NESTED)
    job = gpucoll_run(*options, "-n", 2, "job.py", cwd=tmp_path, timeout=150)
    assert job.returncode == 0, job.stdout + job.stderr


ALONE = """
import os, subprocess, sys
import gpucoll.launch.descent as descent
os.environ.update(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29501")
descent.mark_rank(1)
descent.refuse_children()  # the rank itself
os.environ["LOCAL_RANK"] = "0"  # set after the mark
PROGRAM = "import gpucoll as gc; gc.init(timeout=1)"
print(subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True).stderr)
check = [sys.executable, "-c", "import gpucoll.launch.descent as descent; descent.refuse_children()"]
assert subprocess.run(check, env={**os.environ, "RANK": "0"}).returncode == 0  # another rank, started on purpose
"""


def test_a_child_of_torchruns_rank_is_refused():
    job = python("-c", ALONE)
    assert job.returncode == 0, job.stderr
    assert "[GC-FORK] init: this process" in job.stdout
    assert "is a child of rank 1 (process" in job.stdout


# ---------------------------------------------------------------- commands

BUSY = """
import sys, numpy, gpucoll as gc
comm = gc.init()
x = numpy.ones((2000, 2000))
print("on", file=sys.stderr, flush=True)
while True:
    x = x @ x / 2000
"""


@pytest.mark.parametrize("words", [
    ["verify"], ["precheck", "-n", "2", "busy.py"],
    pytest.param(["verify", "--ranks", "1..16,40,41,42,43,44"], marks=pytest.mark.slow)])
def test_ctrl_c_ends_a_command_with_one_line(tmp_path, words, monkeypatch):
    (tmp_path / "busy.py").write_text(BUSY)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process, token = start(command(*words), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    (process.stderr if words[0] == "precheck" else process.stdout).readline()  # in the midst of its work
    os.killpg(process.pid, signal.SIGINT)
    errors = process.communicate(timeout=seconds(20))[1]
    assert ended(process, token) == 130
    assert errors.removeprefix("on\n") == f"gpucoll {words[0]}: interrupted\n"
    assert [one.name for one in tmp_path.iterdir()] == ["busy.py"]  # no file is left


GOES_ON = """
import os, signal, sys
from gpucoll.cli.ctrl_c import ended_well
sys.setswitchinterval(60)  # no other thread runs before this one waits
signal.signal(signal.SIGINT, signal.default_int_handler)
ended_well(lambda: os.kill(os.getpid(), signal.SIGINT) or print("goes on"), "gpucoll verb")
"""


def test_a_command_does_nothing_after_ctrl_c():
    job = python("-c", GOES_ON)
    assert (job.returncode, job.stdout, job.stderr) == (130, "", "gpucoll verb: interrupted\n")
