"""Full disks: no signal ends a rank, an error is typed, and no file of a user is lost or changed."""

import subprocess
import sys

import pytest

from gpucoll.health.report import stories
from harness.ranks import run_job

USER = ("rank-0.log", "manifest.json.new", "notes/rank-1.txt", "F-1.prom", "x.new")
# Others fill the disk in the middle of a job; a job with `fill` finds the disk full.
JOB = """
import os, sys, time
import numpy
import gpucoll as gc

def fill(path):
    try:
        with open(path, "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
    except OSError:
        pass
"""
RECORDS = JOB + """
folder, when = os.environ["GPUCOLL_DUMP_DIR"], sys.argv[1]
if when == "rank 1" and os.environ["RANK"] == "1":
    def posix_fallocate(file, *place, reserve=os.posix_fallocate):
        if folder in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(28, "No space left on device")
        reserve(file, *place)
    os.posix_fallocate = posix_fallocate
with gc.init(timeout=60) as comm:
    for step in range(1200):  # more than a ring of records
        if step == 5 and comm.rank == 0:
            fill(folder + "/other")
        assert comm.all_reduce(numpy.ones(8))[0] == comm.size
    with comm.split(0) as part:  # a second record finds the disk full
        part.barrier()
sys.stdout.write("DONE\\n")
"""
SAVES = JOB + """
from gpucoll.training import SGD, ZeRO
folder = sys.argv[1]
with gc.init(timeout=60) as comm:
    zero = ZeRO({"w": numpy.arange(20000.0)}, comm, SGD(1.0))
    zero.save(folder)
    zero.ready("w", numpy.ones(20000))
    zero.step()
    comm.barrier()
    if comm.rank == 0:
        fill(folder + "/other")
    comm.barrier()
    for _ in range(2):
        try:
            zero.save(folder)
        except (gc.BackendError, gc.PeerError) as error:
            assert error.code in ("GC-FILE", "GC-PEER"), error
        else:
            raise AssertionError("the disk is full")
        comm.barrier()
        assert not [name for name in os.listdir(folder) if name.endswith(".npz.new")]
        comm.barrier()
    assert (ZeRO.load(folder, comm, SGD(1.0)).parameters["w"] == numpy.arange(20000.0)).all()
    comm.barrier()
    if comm.rank == 0:
        os.remove(folder + "/other")
    comm.barrier()
    zero.save(folder)
    assert (ZeRO.load(folder, comm, SGD(1.0)).parameters["w"] == numpy.arange(20000.0) - 1).all()
    comm.barrier()
    if comm.rank == 0:
        assert sorted(name.split("-")[0] for name in os.listdir(folder) if name.endswith(("npz", ".json"))) == [
            "manifest.json", "rank", "rank"]
sys.stdout.write("DONE\\n")
"""


def on_small_disk(folder, kib, command, env=None):
    """Run a command with a file system of `kib` KiB in `folder`, in a mount namespace, beside files of a user."""
    tried = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/tmp"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"this user cannot mount in a namespace of its own: {tried.stderr.strip()}")
    script = f"""
mount -t tmpfs -o size={kib}k tmpfs {folder} && cd {folder} && mkdir notes || exit 99
for name in {" ".join(USER)}; do echo "own $name" > $name; done
"$@"; code=$?
for name in {" ".join(USER)}; do [ "$(cat $name)" = "own $name" ] || echo "LOST $name"; done
mkdir -p {folder}.kept; cp -r {folder}/. {folder}.kept; exit $code
"""
    job = run_job(["unshare", "-m", "sh", "-c", script, "sh", *command], 100.0, env)
    assert "LOST" not in job.stdout, job.stdout
    return job


def ranks_on(folder, kib, program, *arguments, env=None):
    program_file = folder.with_suffix(".py")
    program_file.write_text(program)
    return on_small_disk(folder, kib, [sys.executable, "-m", "gpucoll", "run", "--standalone", "-n", "2",
                                       str(program_file), *arguments], env)


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


@pytest.mark.parametrize(("kib", "when", "files"), [(1000, "later", 2), (64, "full", 0), (4000, "rank 1", 1)])
def test_a_disk_without_room_for_records_ends_no_job(disk, kib, when, files):
    job = ranks_on(disk, kib, RECORDS, when, env={"GPUCOLL_DUMP_DIR": str(disk)})
    assert (job.returncode, job.stdout.split()) == (0, ["DONE", "DONE"]), job.stdout + job.stderr
    groups, damaged = stories(disk.with_suffix(".kept"))
    assert damaged == []
    assert "without a record of its calls: [GC-FILE] GPUCOLL_DUMP_DIR" in job.stderr
    assert {story.rank for one in groups.values() for story in one} == {*range(files)}


def test_a_save_without_room_keeps_the_old_checkpoint(disk):
    job = ranks_on(disk, 600, SAVES, str(disk))
    assert (job.returncode, job.stdout.split().count("DONE")) == (0, 2), job.stdout + job.stderr


@pytest.mark.parametrize("command", ["draw ring --ranks 4 -o x.svg", "draw ring --ranks 4 -o x.html",
                                     "convert ring --ranks 4 -o x.xml", "report . --trace x.json"])
def test_commands_say_so_in_a_line(disk, command):
    filled = [sys.executable, "-c", f"""
import os, pathlib, subprocess, sys
from gpucoll.health.flight import Flight
Flight(pathlib.Path(), "job", 0, 1).began("barrier")
{JOB}
fill("other")
sys.exit(subprocess.call([sys.executable, "-m", "gpucoll", *sys.argv[1:]]))
"""]
    job = on_small_disk(disk, 500, [*filled, *command.split()])
    (line,) = job.stderr.splitlines()
    assert job.returncode in (1, 2)
    assert line.startswith("gpucoll")
    assert line.endswith("No space left on device")
