"""The store of compiled kernels: built once, verified, the user's own; every check has a mutant that it catches."""

import contextlib
import errno
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gpucoll.device import store as real
from pace import seconds

SOURCE = Path(real.__file__).read_text()
ARTIFACT = b"artifact " * 1000

# What the other processes run: they load the same store, mutant or not, and say what they do, line by line.
CHILD = """
import importlib.util, logging, os, signal, sys
from pathlib import Path
file, folder, dies_at = sys.argv[1:]
spec = importlib.util.spec_from_file_location("store", file)
store = importlib.util.module_from_spec(spec)
spec.loader.exec_module(store)

class Aloud(logging.Handler):
    def emit(self, record):
        if "waiting" in record.msg:
            print("waits", flush=True)
            logging.getLogger("filelock").removeHandler(self)

logging.getLogger("filelock").setLevel(logging.DEBUG)
logging.getLogger("filelock").addHandler(Aloud())

def build():
    print("builds", flush=True)
    if dies_at == "build":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.readline()
    return b"artifact " * 1000

if dies_at == "replace":
    os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
sys.stdin.readline()
path = store.Store(Path(folder)).path("source", ".so", build)
print(path, path.read_bytes() == b"artifact " * 1000, flush=True)
"""


def load(file):
    """The store as a module of its own."""
    spec = importlib.util.spec_from_file_location("store", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Builder:
    """Builds the artifact, and counts."""

    def __init__(self, content=ARTIFACT):
        self.content, self.calls = content, 0

    def __call__(self):
        self.calls += 1
        return self.content


def ask(store, folder, builder, source="source", suffix=".so", flags=""):
    """A store that is opened anew, as by another process, returns the whole artifact."""
    opened = store.Store(folder)
    path = opened.path(source, suffix, builder, flags=flags)
    assert path.read_bytes() == builder.content
    return opened, path


def assert_private(opened, folder):
    """It is the user's alone, away from the folder asked for, and it says why."""
    assert not opened.folder.is_relative_to(folder)
    assert opened.folder.stat().st_mode & 0o777 == 0o700
    assert str(folder) in opened.trouble


# ---------------------------------------------------------------- what must hold; each is run on the store and mutants


def check_built_and_verified_once(store, folder):
    builder, reads, read = Builder(), [], store._read
    opened, path = ask(store, folder, builder)
    assert ask(store, folder, builder)[1] == path
    store._read = lambda path: reads.append(path) or read(path)
    assert opened.path("source", ".so", builder) == path
    assert (reads, builder.calls) == ([], 1)


def check_everything_counts(store, folder):
    cases = [("a", "b", ".c"), ("ab", "", ".c"), ("a", "bb", ".c"), ("a", "b", ".d")]
    builders = [Builder(b"%d" % number) for number in range(len(cases))]
    opened = store.Store(folder)
    for (source, flags, suffix), builder in 2 * list(zip(cases, builders, strict=True)):
        assert opened.path(source, suffix, builder, flags=flags).read_bytes() == builder.content
        assert ask(store, folder, builder, source, suffix, flags)[1].suffix == suffix
        assert builder.calls == 1, (source, flags, suffix)


def check_whatever_is_broken_is_built_again(store, folder):
    def linked(path):
        path.rename(folder / "elsewhere")
        path.symlink_to(folder / "elsewhere")

    harms = {"truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
             "changed": lambda path: path.write_bytes(b"x" + path.read_bytes()[1:]),
             "lost": lambda path: path.unlink(), "a link": linked,
             "writable by a group": lambda path: path.chmod(0o620), "by all": lambda path: path.chmod(0o602)}
    for what, harm in harms.items():
        harm(ask(store, folder, Builder())[1])
        builder = Builder()
        assert not ask(store, folder, builder)[1].is_symlink()
        assert builder.calls == 1, what


def check_no_kernel_passes_for_another(store, folder):
    _, one = ask(store, folder, Builder())
    _, other = ask(store, folder, Builder(b"other"), source="other")
    one.rename(one.with_name(f"{other.name.partition('-')[0]}-{one.name.partition('-')[2]}"))
    other.unlink()
    ask(store, folder, Builder(b"other"), source="other")


def check_files_of_others_are_not_read(store, folder):
    _, path = ask(store, folder, Builder())
    builder = Builder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fstat", disowning(os.fstat, path))
        ask(store, folder, builder)
    assert builder.calls == 1


def disowning(stat, path):
    """It says of this file that it is another user's."""
    number = path.stat().st_ino

    def told(file):
        status = stat(file)
        return os.stat_result((*status[:4], status.st_uid + (status.st_ino == number), *status[5:]))

    return told


def check_folders_of_others_are_left_alone(store, folder):
    for mode in (0o770, 0o707):
        opened, _ = ask(store, folder / str(mode), Builder(b"planted"))
        opened.folder.chmod(mode)
        assert_private(ask(store, folder / str(mode), Builder())[0], folder / str(mode))
    opened, _ = ask(store, folder, Builder(b"planted"))
    opened.folder.rename(folder / "elsewhere")
    opened.folder.symlink_to(folder / "elsewhere")
    assert_private(ask(store, folder, Builder())[0], folder)
    opened, _ = ask(store, folder / "another's", Builder(b"planted"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "lstat", disowning(Path.lstat, opened.folder))
        assert_private(ask(store, folder / "another's", Builder())[0], folder)


def check_without_a_folder_a_private_one_serves(store, folder):
    (folder / "file").write_text("in the way")
    opened, _ = ask(store, folder / "file", Builder())
    assert_private(opened, folder)
    assert opened.path("source", ".so", Builder()).parent == opened.folder

    written = store._written
    store._written = lambda path, *rest: no_room() if path.is_relative_to(folder) else written(path, *rest)
    opened, _ = ask(store, folder, Builder())
    assert_private(opened, folder)
    assert os.strerror(errno.ENOSPC) in opened.trouble


def no_room():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def check_hung_builder_stops_nobody(store, folder):
    """It keeps its lock for ever: who waits goes on alone."""
    _, path = ask(store, folder, Builder())
    path.unlink()
    store.PATIENCE = 0
    with store.filelock.FileLock(path.with_name(f"{path.name.partition('-')[0]}.lock")):
        assert_private(ask(store, folder, Builder())[0], folder)


def check_failed_build_leaves_nothing(store, folder):
    for error in (ValueError("refused"), OSError("refused")):
        def fail(error=error):
            raise error

        opened = store.Store(folder)
        with pytest.raises(type(error), match="refused"):
            opened.path("source", ".so", fail)
        assert opened.trouble == ""
    ask(store, folder, Builder())


def check_nobody_else_may_look(store, folder):
    mask = os.umask(0)
    try:
        opened, _ = ask(store, folder, Builder())
    finally:
        os.umask(mask)
    assert opened.folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in opened.folder.iterdir()} == {0o600}


def check_artifacts_are_never_written_in_place(store, folder):
    """Whoever has mapped the old one keeps it."""
    _, path = ask(store, folder, Builder())
    path.chmod(0o620)  # so that it is built again
    with path.open("rb") as mapped:
        ask(store, folder, Builder())
        assert os.fstat(mapped.fileno()).st_ino != path.stat().st_ino


def check_threads_share_a_folder(store, folder):
    """All of them ask while the first still builds, in a store that has to retreat."""
    opened, come, building, found = store.Store(folder), threading.Semaphore(0), [], []
    opened.folder = folder / "lost"
    lock = opened._missing

    class Announced:
        """A lock that says who comes before it lets him wait."""

        def __enter__(self):
            come.release()
            lock.acquire()

        def __exit__(self, *_):
            lock.release()

    def build():
        building.append(all(come.acquire(timeout=seconds(20)) for _ in range(4)))
        return ARTIFACT

    def run():
        with contextlib.suppress(OSError):  # it is missed among those found
            found.append(opened.path("source", ".so", build))

    opened._missing = Announced()
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert building == [True]
    assert (len(set(found)), len(found)) == (1, 4)


@contextlib.contextmanager
def child(store, folder, dies_at=""):
    command = [sys.executable, "-c", CHILD, store.__file__, str(folder), dies_at]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as job:
        try:
            yield job
        finally:
            job.kill()


def check_processes_build_once(store, folder):
    """The builder goes on when each of the others has met its lock, or builds too; a killed one leaves nothing."""
    for moment in ("build", "replace"):
        with child(store, folder, moment) as job:
            job.communicate("go\nfinish\n")
        assert job.returncode == -signal.SIGKILL, moment
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(child(store, folder)) for _ in range(3)]
        for job in jobs:
            job.stdin.write("go\n")
        words = [job.stdout.readline().strip() for job in jobs]
        for job in jobs:
            with contextlib.suppress(BrokenPipeError):
                job.stdin.write("finish\n")
        ends = [job.stdout.readline().strip() for job in jobs]
    assert sorted(words) == ["builds", "waits", "waits"]
    assert len(set(ends)) == 1
    assert ends[0].endswith(".so True")
    assert ends[0].startswith(str(folder))


CHECKS = {name: check for name, check in globals().items() if name.startswith("check_")}
OWN = "return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)"
LOCK = "filelock.FileLock(self.folder"
MUTANTS = [
    ("check_built_and_verified_once", "self._find(key, suffix) or self._make(key, suffix, build)",
     "self._make(key, suffix, build)", "found = self._find(key, suffix)", "found = None"),
    ("check_built_and_verified_once", "if key not in self._verified:", "if True:"),
    ("check_everything_counts", "in (source, flags, suffix)", "in (source, suffix)"),
    ("check_everything_counts", "in (source, flags, suffix)", "in (source, flags)"),
    ("check_everything_counts", "_digest(part.encode()).encode() for", "part.encode() for"),
    ("check_whatever_is_broken_is_built_again", "and artifact.name == _name(key, suffix, content)", ""),
    ("check_whatever_is_broken_is_built_again", "os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW",
     "os.O_RDONLY | os.O_CLOEXEC"),
    ("check_whatever_is_broken_is_built_again", OWN, OWN.replace(" | stat.S_IWOTH", "")),
    ("check_whatever_is_broken_is_built_again", OWN, OWN.replace("stat.S_IWGRP | ", "")),
    ("check_no_kernel_passes_for_another", "_digest(key.encode(), content)}", "_digest(content)}"),
    ("check_files_of_others_are_not_read", "and _is_own(status) else None", "else None"),
    ("check_files_of_others_are_not_read", OWN, "return not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)"),
    ("check_folders_of_others_are_left_alone", "or not _is_own(status)", ""),
    ("check_folders_of_others_are_left_alone", OWN, "return status.st_uid == os.geteuid()"),
    ("check_folders_of_others_are_left_alone", "self.folder.lstat()", "self.folder.stat()"),
    ("check_without_a_folder_a_private_one_serves", "except (OSError, NotImplementedError)", "except PermissionError"),
    ("check_hung_builder_stops_nobody", LOCK, "_NoLock(self.folder"),
    ("check_failed_build_leaves_nothing", "content = build()", "content = self._or_retreat(build)"),
    ("check_failed_build_leaves_nothing", "content = build()", "content = _attempt(build)"),
    ("check_nobody_else_may_look", "mode=0o700", "mode=0o755"),
    ("check_nobody_else_may_look", "os.open(draft, WRITE, 0o600)", "os.open(draft, WRITE, 0o644)"),
    ("check_nobody_else_may_look", "PATIENCE, mode=0o600", "PATIENCE, mode=0o644"),
    ("check_artifacts_are_never_written_in_place", "open(os.open(draft,", "open(os.open(path,",
     "os.replace(draft, path)", ""),
    ("check_threads_share_a_folder", "with self._missing:", "with contextlib.nullcontext():"),
    ("check_processes_build_once", LOCK, "_NoLock(self.folder"),
    ("check_processes_build_once", "found = self._find(key, suffix)", "found = None"),
]
# What a mutant may call instead of what is right.
HELPERS = '''

def _attempt(build):
    try:
        return build()
    except ValueError:
        return b""


def _NoLock(*_, **__):
    return contextlib.nullcontext()
'''


@pytest.mark.parametrize("name", CHECKS)
def test_store(name, tmp_path):
    CHECKS[name](load(real.__file__), tmp_path)


@pytest.mark.mutant
@pytest.mark.nightly
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant[0].removeprefix('check_')}: {mutant[2][:30]}")
def test_mutants_are_caught(mutant, tmp_path):
    name, *changes = mutant
    text = SOURCE
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (tmp_path / "store.py").write_text(text + HELPERS)
    with pytest.raises((AssertionError, OSError, ValueError, pytest.fail.Exception)):
        CHECKS[name](load(tmp_path / "store.py"), tmp_path)


@pytest.mark.parametrize(("environment", "folder"), [
    ({"GPUCOLL_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
    ({"GPUCOLL_CACHE": "", "XDG_CACHE_HOME": "/b"}, "/b/gpucoll"),
    ({"XDG_CACHE_HOME": "", "HOME": "/c"}, "/c/.cache/gpucoll")])
def test_default_folder(environment, folder, monkeypatch):
    for name in ("GPUCOLL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert real.default_folder() == Path(folder)


def test_one_store_for_the_process(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUCOLL_CACHE", str(tmp_path))
    monkeypatch.setattr(real, "user_store", real.functools.cache(real.user_store.__wrapped__))
    assert real.user_store() is real.user_store()
    assert real.user_store().folder.parent == tmp_path
