"""The environment that the scripts share: made where it is missing, completed where it lacks something.

README's commands work on a machine that has Python and nothing else. So this file uses the standard library only, and
Python 3.6 can read it too: it then hands over to a newer one (`require_python`), hence the types in quotes.

A stamp in the environment says what is installed there. A start that finds the stamp in order reads that one file and
runs no other program; everything else happens under a lock, so that scripts may start together on a fresh clone.
"""

import contextlib
import fcntl
import glob
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OLDEST_PYTHON = (3, 11)
OUR_MPIS = {"mpich", "openmpi"}  # extras of the same names
TIMED_OUT, INTERRUPTED = 124, 130  # exit codes, as `timeout` and the shell say them

# Where mpi4py finds a site's MPI, in its own order, leaving out the environment itself, where ours may lie.
SITE_LIBRARIES = os.pathsep.join([f"{sys.base_exec_prefix}/lib", "libmpi.so", "libmpi.so.12", "libmpi.so.40"])


class Stamp(NamedTuple):
    """What an environment holds and what it was made from; work is due where one of these no longer holds."""

    root: str = ""  # where the repository stood: an editable install points there
    interpreter: str = ""  # the Python behind bin/python: a system's upgrade can put another one there
    project: str = ""  # digest of pyproject.toml; empty while an installation is under way
    extras: "tuple[str, ...]" = ()
    seen: str = ""  # the mpiexec on PATH when the choice between the site's MPI and ours was made
    launcher: str = ""  # the mpiexec that was chosen
    vendor: str = ""  # and whose it is: mpich, openmpi or impi


# ---------------------------------------------------------------- small things


def say(text: str) -> None:
    """One line of progress, on standard error so that a script's own output stays clean."""
    print(text, file=sys.stderr, flush=True)


def refuse(text: str, code: int = 2) -> NoReturn:
    say(f"{os.path.relpath(sys.argv[0], ROOT)}: {text}")
    sys.exit(code)


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def python_of(folder: str) -> str:
    return os.path.join(folder, "bin", "python")


def output_of(command: "list[str]", **variables: str) -> str:
    """What a program prints; empty where it is missing, fails or takes longer than half a minute."""
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "universal_newlines": True}
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        result = subprocess.run(command, timeout=30, env={**os.environ, **variables}, check=False, **options)
        return str(result.stdout) if result.returncode == 0 else ""
    return ""


def quietly(command: "list[str]", failure: str) -> None:
    """Run a program whose output matters only when it fails.

    It inherits the lock: should this process be killed, the next one waits until the program has ended too.
    """
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "universal_newlines": True}
    result = subprocess.run(command, close_fds=False, errors="replace", check=False, **options)
    if result.returncode:
        say(result.stdout.rstrip())
        refuse(failure, code=1)


def require_python() -> None:
    """Go on under Python 3.11 or newer, starting again under one from PATH where the default one is older."""
    if sys.version_info >= OLDEST_PYTHON:
        return
    for name in ("python3.14", "python3.13", "python3.12", "python3.11"):
        # A name on PATH proves nothing: version managers put names there for Pythons that they do not have.
        found = shutil.which(name)
        if found and subprocess.call([found, "-c", "import ensurepip, venv"], stderr=subprocess.DEVNULL) == 0:
            os.execv(found, [found, *sys.argv])
    refuse(f"needs Python 3.11 or newer; this is {sys.version.split()[0]}, and PATH has no other")


# ---------------------------------------------------------------- the stamp


def stamp_file(folder: str) -> str:
    return os.path.join(folder, "gpucoll-stamp.json")


def read_stamp(folder: str) -> Stamp:
    """The environment's stamp; an empty one where there is none, or one of another version of this file."""
    with contextlib.suppress(OSError, ValueError, TypeError), open(stamp_file(folder)) as file:
        stamp = Stamp(**json.load(file))
        return stamp._replace(extras=tuple(stamp.extras))
    return Stamp()


def write_stamp(folder: str, stamp: Stamp) -> None:
    """Put a new stamp in the place of the old one, in one stroke: a reader sees one or the other."""
    unfinished = stamp_file(folder) + ".new"
    with open(unfinished, "w") as file:
        json.dump(stamp._asdict(), file, indent=1)
    os.replace(unfinished, stamp_file(folder))


def project_digest() -> str:
    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def stands_here(folder: str, stamp: Stamp) -> bool:
    """Whether the environment was made at this place and still runs the Python that it was made with."""
    python = python_of(folder)
    return os.access(python, os.X_OK) and (stamp.root, stamp.interpreter) == (ROOT, os.path.realpath(python))


def is_current(folder: str, extras: "set[str]") -> bool:
    """Whether nothing is left to do, found out from the stamp."""
    stamp = read_stamp(folder)
    return (
        stands_here(folder, stamp)
        and stamp.project == project_digest()
        and extras | driver_extras(stamp) <= set(stamp.extras)
        and stamp.seen == outside_mpiexec()
        and os.access(stamp.launcher, os.X_OK)
    )


# ---------------------------------------------------------------- what this machine has


def outside_mpiexec() -> str:
    """The first mpiexec on PATH that stands in none of our environments; empty where there is none."""
    ours = os.path.join(ROOT, ".venv")
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return shutil.which("mpiexec", path=os.pathsep.join(f for f in folders if not f.startswith(ours))) or ""


def vendor_of(version: str) -> str:
    """Whose MPI describes itself like this, a launcher or a library; empty where that is unknown."""
    names = {"Intel(R) MPI": "impi", "Open MPI": "openmpi", "OpenRTE": "openmpi"}
    names.update({"MVAPICH": "mpich", "MPICH": "mpich", "HYDRA": "mpich"})
    return next((vendor for name, vendor in names.items() if name in version), "")


def library_vendor(python: str) -> str:
    """Whose MPI library mpi4py loads from the site, one in the environment left out."""
    libraries = os.environ.get("MPI4PY_LIBMPI", SITE_LIBRARIES)
    return vendor_of(output_of([python, "-m", "mpi4py", "--mpi-lib-version"], MPI4PY_LIBMPI=libraries))


def driver_extra(report: str) -> str:
    """The extra for the CUDA version that nvidia-smi reports the driver to support; empty where none fits."""
    found = re.search(r"CUDA (?:UMD )?Version\s*:\s*(\d+)", report)  # drivers from 610 on write UMD
    major = int(found.group(1)) if found else 0
    return "cuda13" if major >= 13 else "cuda12" if major == 12 else ""


def driver_extras(stamp: Stamp) -> "set[str]":
    """The CUDA extras still missing here: CuPy and NCCL, and what CuPy multiplies matrices by.

    The driver is asked only where none is installed.
    """
    if {"cuda12", "cuda13"} & set(stamp.extras) or not shutil.which("nvidia-smi"):
        return set()
    found = driver_extra(output_of(["nvidia-smi"]))
    return {found, found.replace("cuda", "cublas")} - {""}


# ---------------------------------------------------------------- making and completing


def ensure(extras: "set[str]", name: str = ".venv") -> str:
    """The path of a Python that has gpucoll with these extras and an MPI, made or completed where that is due.

    `mpich` or `openmpi` among the extras decides which MPI; otherwise the site's is used where mpi4py can, else MPICH.
    """
    folder = os.path.join(ROOT, name)
    if not is_current(folder, extras):
        with locked():
            if not is_current(folder, extras):  # another script may have done it while this one waited
                update(folder, extras)
    return python_of(folder)


@contextlib.contextmanager
def locked() -> "Iterator[None]":
    """One script at a time makes and installs; the lock lasts until those that inherited the file have ended too."""
    with open(os.path.join(ROOT, ".venv.lock"), "w") as file:
        os.set_inheritable(file.fileno(), True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another script that is installing ...")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # some parallel file systems have no locks
            say(f"no locks on this file system ({error.strerror}): start no second script while this one installs")
        yield


def update(folder: str, extras: "set[str]") -> None:
    """Bring an environment in step with pyproject.toml, the machine and the extras, and stamp it, last of all."""
    old = prepare(folder)
    wanted = extras | set(old.extras) | driver_extras(old)
    seen = outside_mpiexec()
    site = vendor_of(output_of([seen, "--version"])) if seen and not OUR_MPIS & extras else ""
    if site:
        install(folder, wanted - OUR_MPIS, old)  # brings the mpi4py that is then asked
        if library_vendor(python_of(folder)) == site:
            withdraw_our_mpi(folder)
            finish(folder, wanted - OUR_MPIS, seen, launcher=seen, vendor=site)
            return
    ours = min(OUR_MPIS & extras or OUR_MPIS & wanted or {"mpich"})
    wanted = wanted - OUR_MPIS | {ours}
    install(folder, wanted, old)
    finish(folder, wanted, seen, launcher=os.path.join(folder, "bin", "mpiexec"), vendor=ours)


def prepare(folder: str) -> Stamp:
    """Make sure of a Python and a pip; the stamp of what is there, on disk marked as unfinished from now on."""
    stamp = read_stamp(folder)
    python = python_of(folder)
    if not os.access(python, os.X_OK) or (stamp.root and not stands_here(folder, stamp)):
        make(folder)
        stamp = Stamp()
    discard_half_installed(folder)
    if not glob.glob(os.path.join(site_packages(folder), "pip-*.dist-info")):  # the making was interrupted
        quietly([python, "-m", "venv", folder], f"could not complete {folder}")
    write_stamp(folder, stamp._replace(root=ROOT, interpreter=os.path.realpath(python), project=""))
    return stamp


def make(folder: str) -> None:
    """A new environment in the place of whatever was there."""
    if not importlib.util.find_spec("ensurepip"):
        refuse("this Python lacks venv and ensurepip; install them (on Debian and Ubuntu: apt install python3-venv)")
    say(f"making {os.path.relpath(folder, ROOT)} with Python {sys.version.split()[0]} ...")
    quietly([sys.executable, "-m", "venv", "--clear", folder], f"could not make {folder}")


def site_packages(folder: str) -> str:
    return os.path.join(folder, "lib", "python3*", "site-packages")


def discard_half_installed(folder: str) -> None:
    """Make pip forget what it was installing when interrupted: it writes INSTALLER after a package's other files."""
    for record in glob.glob(os.path.join(site_packages(folder), "*.dist-info")):
        if not os.path.exists(os.path.join(record, "INSTALLER")):
            shutil.rmtree(record)


def install(folder: str, extras: "set[str]", old: Stamp) -> None:
    """Have gpucoll and the extras in an environment; no work where the old stamp says that they are."""
    if old.project == project_digest() and extras <= set(old.extras):
        return
    package = f"gpucoll[{','.join(sorted(extras))}]"
    say(f"installing {package} in {os.path.relpath(folder, ROOT)} ... (once)")
    pip(folder, "install", "--editable", ROOT + package[len("gpucoll") :])


def withdraw_our_mpi(folder: str) -> None:
    """Take an MPI from PyPI out of an environment, where mpi4py would load it in the place of the site's."""
    ours = [name for name in OUR_MPIS if glob.glob(os.path.join(site_packages(folder), f"{name}-*.dist-info"))]
    if ours:
        say(f"removing {' '.join(ours)} from {os.path.relpath(folder, ROOT)}: this machine has an MPI of its own ...")
        pip(folder, "uninstall", "--yes", *ours)


def pip(folder: str, *arguments: str) -> None:
    command = [python_of(folder), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    quietly(command, f"pip {arguments[0]} failed; what it said stands above")


def finish(folder: str, extras: "set[str]", seen: str, launcher: str, vendor: str) -> None:
    interpreter = os.path.realpath(python_of(folder))
    write_stamp(folder, Stamp(ROOT, interpreter, project_digest(), tuple(sorted(extras)), seen, launcher, vendor))


# ---------------------------------------------------------------- starting ranks and other programs


def split_ranks(arguments: "list[str]") -> "tuple[int, list[str]]":
    """Take `--ranks N` or `--ranks=N` out of a command line; without it, a rank per core, at least 2 and at most 8."""
    ranks, rest = max(2, min(8, cores())), []
    words = iter(arguments)
    for word in words:
        if word == "--ranks" or word.startswith("--ranks="):
            ranks = positive(word[len("--ranks=") :] if "=" in word else next(words, ""))
        else:
            rest.append(word)
    return ranks, rest


def positive(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        refuse(f"--ranks takes a whole number from 1 on, not '{text}'")
    return int(text)


def launcher_rank(variables: "Mapping[str, str]") -> str:
    """This process's rank where a launcher has started it already, else empty."""
    names = ["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"]
    if int(variables.get("SLURM_NTASKS", "1")) > 1:
        names.append("SLURM_PROCID")
    return next((variables[name] for name in names if name in variables), "")


def launch_command(stamp: Stamp, ranks: int, available: int, superuser: bool) -> "list[str]":
    """The words that start so many ranks; Open MPI asks for consent to more ranks than cores and to running as root."""
    words = [stamp.launcher, "-n", str(ranks)]
    if stamp.vendor == "openmpi":
        words += ["--oversubscribe"] * (ranks > available) + ["--allow-run-as-root"] * superuser
    return words


def stamp_of(python: str) -> Stamp:
    return read_stamp(os.path.dirname(os.path.dirname(python)))


def mpiexec(python: str, ranks: int) -> "list[str]":
    """The words that start so many ranks with the MPI that belongs to this Python of `ensure`."""
    return launch_command(stamp_of(python), ranks, cores(), superuser=os.geteuid() == 0)


def launch(python: str, ranks: int, arguments: "list[str]") -> int:
    """Run a Python program on so many ranks; its exit code."""
    # Ranks that each start a thread per core are slower than one; whoever sets the variable knows better.
    variables = {"OMP_NUM_THREADS": str(max(1, cores() // ranks)), **os.environ}
    # What ends the ranks without a word: MPICH's mpiexec reports any other signal, Open MPI's would leave ranks behind.
    stop = signal.SIGTERM if stamp_of(python).vendor == "openmpi" else signal.SIGKILL
    return run([*mpiexec(python, ranks), python, *arguments], stop, stdin=subprocess.DEVNULL, env=variables)


STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(command: "list[str]", stop: int, limit: "float | None" = None, **options: Any) -> int:
    """Run a program until it ends by itself, its time in seconds is over, or this process is to end; the exit code.

    The program has a session of its own: Ctrl-C reaches this process only, which passes on the signal `stop` instead.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    held = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # until there is somebody who ends the program
    try:
        child = subprocess.Popen(command, start_new_session=True, **options,
                                 preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, held))
    except BaseException:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        raise
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        code = child.wait(limit)
        return code if code >= 0 else 128 - code
    except subprocess.TimeoutExpired:
        return TIMED_OUT
    finally:
        end(child, stop)


def end(child: "subprocess.Popen[Any]", stop: int) -> None:
    """Stop a program that is still running, and all of its session where it does not obey or a second Ctrl-C comes."""
    if child.poll() is not None:
        return
    child.send_signal(stop)
    try:
        child.wait(20)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        os.killpg(child.pid, signal.SIGKILL)


def start(main: "Callable[[], int]") -> NoReturn:
    """Run a script's main function under a Python that is new enough; Ctrl-C ends it without a traceback."""
    try:
        require_python()
        code = main()
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)
