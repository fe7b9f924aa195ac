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

ARTIFACT = b"artifact " * 1000

# What the other processes run: they load the same store, mutant or not, and say what they do, line by line.
CHILD = """
import importlib.util, logging, os, signal, sys
from pathlib import Path
file, folder, dies = sys.argv[1:]
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
    sys.stdin.readline()
    return b"artifact " * 1000

if dies:
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


def ask(store, folder, content=ARTIFACT, source="source", builds=None):
    """A store that is opened anew, as by another process, returns the whole artifact, and `builds` it or not."""
    opened, calls = store.Store(folder), []
    path = opened.path(source, ".so", lambda: calls.append(1) or content)
    assert path.read_bytes() == content
    assert builds in (None, bool(calls))
    return opened, path


def assert_private(opened, folder):
    """It is the user's alone, away from the folder asked for, and it says why."""
    assert not opened.folder.is_relative_to(folder)
    assert opened.folder.stat().st_mode & 0o777 == 0o700
    assert str(folder) in opened.trouble


def disowning(stat, path):
    """It says of this file that it is another user's."""
    number = path.stat().st_ino

    def told(file):
        status = stat(file)
        return os.stat_result((*status[:4], status.st_uid + (status.st_ino == number), *status[5:]))

    return told


# ---------------------------------------------------------------- what must hold; each is run on the store and mutants


def check_built_and_verified_once(store, folder):
    opened, path = ask(store, folder, builds=True)
    assert ask(store, folder, builds=False)[1] == path
    store._read = lambda path: pytest.fail("read again")
    assert opened.path("source", ".so", lambda: pytest.fail("built again")) == path


def check_everything_counts(store, folder):
    opened = store.Store(folder)
    for reader in (opened, store.Store(folder)):
        for case in (("a", "b", ".c"), ("ab", "", ".c"), ("a", "bb", ".c"), ("a", "b", ".d")):
            source, flags, suffix = case
            assert reader.path(source, suffix, str(case).encode, flags=flags).read_bytes() == str(case).encode()
    _, one = ask(store, folder)
    _, other = ask(store, folder, b"other", source="other")
    one.rename(one.with_name(f"{other.name.partition('-')[0]}-{one.name.partition('-')[2]}"))
    other.unlink()
    ask(store, folder, b"other", source="other")  # no kernel passes for another


def check_whatever_is_broken_is_built_again(store, folder):
    def linked(path):
        path.rename(folder / "elsewhere")
        path.symlink_to(folder / "elsewhere")

    harms = (linked, Path.unlink, lambda path: path.write_bytes(b"x" + path.read_bytes()[1:]),
             lambda path: path.chmod(0o620), lambda path: path.chmod(0o602))
    for harm in harms:
        harm(ask(store, folder)[1])
        assert not ask(store, folder, builds=True)[1].is_symlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fstat", disowning(os.fstat, ask(store, folder)[1]))
        ask(store, folder, builds=True)


def check_folders_of_others_are_left_alone(store, folder):
    for mode in (0o770, 0o707):
        ask(store, folder / str(mode), b"planted")[0].folder.chmod(mode)
        assert_private(ask(store, folder / str(mode))[0], folder / str(mode))
    opened, _ = ask(store, folder, b"planted")
    opened.folder.rename(folder / "elsewhere")
    opened.folder.symlink_to(folder / "elsewhere")
    assert_private(ask(store, folder)[0], folder)
    opened, _ = ask(store, folder / "another's", b"planted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "lstat", disowning(Path.lstat, opened.folder))
        assert_private(ask(store, folder / "another's")[0], folder)


def check_nobody_else_has_a_say_on_the_way(store, folder):
    for mode in (0o770, 0o707):
        way = folder / str(mode) / "deep"
        ask(store, way, b"planted")
        way.parent.chmod(mode)
        assert_private(ask(store, way)[0], way)
        with pytest.raises(PermissionError):
            store.read_trusted(way / "table")
        way.parent.chmod(mode | 0o1000)  # as of a temporary folder, where nobody can exchange what is another's
        assert ask(store, way, b"planted")[0].trouble == ""
    mask = os.umask(0)
    try:
        assert ask(store, folder / "open" / "wide")[0].trouble == ""
    finally:
        os.umask(mask)
    assert (folder / "open").stat().st_mode & 0o777 == 0o700


def check_what_is_loaded_is_what_was_verified(store, folder):
    opened, path = ask(store, folder)
    good = opened.loadable("source", ".so", lambda: pytest.fail("built again"))
    other, _ = ask(store, folder)
    os.replace(path, folder / "kept")
    path.write_bytes(b"exchanged")
    path.chmod(0o600)
    assert Path(good).read_bytes() == Path(opened.loadable("source", ".so", None)).read_bytes() == ARTIFACT
    with pytest.raises(OSError, match="changed"):
        other.loadable("source", ".so", None)


def check_without_a_folder_a_private_one_serves(store, folder):
    (folder / "file").write_text("in the way")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUCOLL_CACHE", str(folder / "file"))
        assert store.default_folder() == folder / "file"
    assert_private(ask(store, folder / "file")[0], folder)
    _, path = ask(store, folder)
    path.unlink()
    store.PATIENCE = 0
    with store.filelock.FileLock(path.with_name(f"{path.name.partition('-')[0]}.lock")):  # by a process that hangs
        assert_private(ask(store, folder)[0], folder)
    written = store._written
    store._written = lambda path, *rest: no_room() if path.is_relative_to(folder) else written(path, *rest)
    opened, _ = ask(store, folder)
    assert_private(opened, folder)
    assert os.strerror(errno.ENOSPC) in opened.trouble


def no_room():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def check_failed_build_leaves_nothing(store, folder):
    opened = store.Store(folder)
    with pytest.raises(OSError, match="No space"):  # which is no failure of the folder's
        opened.path("source", ".so", no_room)
    assert opened.trouble == ""
    ask(store, folder, builds=True)


def check_nobody_else_may_look_and_nothing_is_written_in_place(store, folder):
    mask = os.umask(0)
    try:
        opened, path = ask(store, folder)
    finally:
        os.umask(mask)
    assert opened.folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in opened.folder.iterdir()} == {0o600}
    path.chmod(0o620)  # so that it is built again; whoever has mapped the old one keeps it
    with path.open("rb") as mapped:
        ask(store, folder, builds=True)
        assert os.fstat(mapped.fileno()).st_ino != path.stat().st_ino


def check_threads_share_a_folder(store, folder):
    """All of them ask while the first still builds, in a store that has to retreat."""
    opened, come, building, found = store.Store(folder), threading.Semaphore(0), [], []
    opened.folder, lock = folder / "lost", opened._missing

    class Announced:
        __enter__ = staticmethod(lambda: (come.release(), lock.acquire()))
        __exit__ = staticmethod(lambda *_: lock.release())

    def build():
        building.append(all(come.acquire(timeout=seconds(5)) for _ in range(4)))
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
def child(store, folder, dies=False):
    command = [sys.executable, "-c", CHILD, store.__file__, str(folder), "dies" if dies else ""]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as job:
        try:
            yield job
        finally:
            job.kill()


def check_processes_build_once(store, folder):
    """A killed builder leaves nothing; a living one goes on when each of the others has met its lock, or builds too."""
    with child(store, folder, dies=True) as job:
        job.communicate("go\nfinish\n")
    assert job.returncode == -signal.SIGKILL
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(child(store, folder)) for _ in range(3)]
        for job in jobs:
            job.stdin.write("go\n")
        words = [job.stdout.readline().strip() for job in jobs]
        for job in jobs:
            with contextlib.suppress(BrokenPipeError):
                job.stdin.write("finish\n")
        ends = {job.stdout.readline().strip() for job in jobs}
    assert sorted(words) == ["builds", "waits", "waits"]
    assert [end.endswith(".so True") and end.startswith(str(folder)) for end in ends] == [True]


CHECKS = {name.removeprefix("check_"): check for name, check in globals().items() if name.startswith("check_")}
OWN = "return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)"
MUTANTS = [
    ("built_and_verified_once", "self._find(key, suffix) or self._make(", "self._make(",
     "found = self._find(key, suffix)", "found = None"),
    ("built_and_verified_once", "if key not in self._verified:", "if True:"),
    ("everything_counts", "in (source, flags, suffix)", "in (source, flags)"),
    ("whatever_is_broken_is_built_again", "and artifact.name == _name(key, suffix, content)", ""),
    ("whatever_is_broken_is_built_again", "os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW", "os.O_RDONLY | os.O_CLOEXEC"),
    ("whatever_is_broken_is_built_again", OWN, OWN.replace(" | stat.S_IWOTH", "")),
    ("whatever_is_broken_is_built_again", "and _is_own(status) else None", "else None"),
    ("everything_counts", "_digest(key.encode(), content)}", "_digest(content)}"),
    ("folders_of_others_are_left_alone", OWN, "return not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)"),
    ("folders_of_others_are_left_alone", OWN, OWN.replace("stat.S_IWGRP | ", "")),
    ("folders_of_others_are_left_alone", "self.folder.lstat()", "self.folder.stat()"),
    ("nobody_else_has_a_say_on_the_way", "        check_way(self.folder)\n", ""),
    ("nobody_else_has_a_say_on_the_way", "    check_way(place)\n", ""),
    ("nobody_else_has_a_say_on_the_way", "make_private(self.folder)", "self.folder.mkdir(0o700, True, True)"),
    ("what_is_loaded_is_what_was_verified", "_name(path.name.partition(\"-\")[0], suffix, content)", "path.name"),
    ("what_is_loaded_is_what_was_verified", 'f"/proc/self/fd/{self._opened[path]}"', "str(path)"),
    ("without_a_folder_a_private_one_serves", "except (OSError, NotImplementedError)", "except PermissionError"),
    ("failed_build_leaves_nothing", "content = build()", "content = self._or_retreat(build)"),
    ("nobody_else_may_look_and_nothing_is_written_in_place", "mode=0o700", "mode=0o755"),
    ("nobody_else_may_look_and_nothing_is_written_in_place", "os.open(draft, WRITE, 0o600)",
     "os.open(draft, WRITE, 0o644)"),
    ("nobody_else_may_look_and_nothing_is_written_in_place", "open(os.open(draft,", "open(os.open(path,",
     "os.replace(draft, path)", ""),
    ("threads_share_a_folder", "with self._missing:", "with contextlib.nullcontext():"),
    ("processes_build_once", 'filelock.FileLock(self.folder / f"{key}.lock", PATIENCE, mode=0o600)',
     "contextlib.nullcontext()"),
    ("processes_build_once", "found = self._find(key, suffix)", "found = None"),
]


@pytest.mark.parametrize("name", CHECKS)
def test_store(name, tmp_path):
    CHECKS[name](load(real.__file__), tmp_path)


@pytest.mark.mutant
@pytest.mark.nightly
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant[0]}: {mutant[2][:30]}")
def test_mutants_are_caught(mutant, tmp_path):
    name, *changes = mutant
    text = Path(real.__file__).read_text()
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (tmp_path / "store.py").write_text(text)
    with pytest.raises((AssertionError, OSError, ValueError, pytest.fail.Exception)):
        CHECKS[name](load(tmp_path / "store.py"), tmp_path)
