"""The store of compiled kernels: built once, verified, the user's own; every check has a mutant that it catches."""

import contextlib
import errno
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest

from gpucoll.device import store as real

SOURCE = Path(real.__file__).read_text()
ARTIFACT = b"artifact " * 1000
PROCESSES = 8

# What the other processes run: they load the same store, mutant or not, and say what they do, line by line.
CHILD = """
import importlib.util, os, signal, sys
from pathlib import Path
file, folder, dies_at = sys.argv[1:]
spec = importlib.util.spec_from_file_location("store", file)
store = importlib.util.module_from_spec(spec)
spec.loader.exec_module(store)
said, replaced, try_lock, replace = set(), [], store._try_lock, os.replace

def say(word):
    if word not in said:
        print(word, flush=True)
    said.add(word)

def build():
    say("builds")
    if dies_at == "build":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.readline()
    return b"artifact " * 1000

def try_lock_aloud(descriptor):
    locked = try_lock(descriptor)
    if not locked:
        say("waits")
    return locked

def replace_or_die(draft, path):
    if dies_at == f"replace {len(replaced)}":
        os.kill(os.getpid(), signal.SIGKILL)
    replaced.append(path)
    replace(draft, path)

store._try_lock, os.replace = try_lock_aloud, replace_or_die
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
    assert path.suffix == suffix
    return opened, path


def entry_of(folder):
    """The only entry of the store, which has no ending."""
    (entry,) = (path for path in folder.iterdir() if not path.suffix)
    return entry


# ---------------------------------------------------------------- what must hold; each is run on the store and mutants


def check_built_once(store, folder):
    builder = Builder()
    assert ask(store, folder, builder)[1] == ask(store, folder, builder)[1]
    assert builder.calls == 1


def check_verified_once(store, folder):
    builder, reads, read = Builder(), [], store._read
    opened, path = ask(store, folder, builder)
    store._read = lambda path: reads.append(path) or read(path)
    assert opened.path("source", ".so", builder) == path
    assert (reads, builder.calls) == ([], 1)


def check_everything_counts(store, folder):
    cases = [("a", "b", ".c"), ("ab", "", ".c"), ("a", "bb", ".c"), ("a", "b", ".d")]
    builders = [Builder(b"%d" % number) for number in range(len(cases))]
    for (source, flags, suffix), builder in 2 * list(zip(cases, builders, strict=True)):
        ask(store, folder, builder, source, suffix, flags)
        assert builder.calls == 1, (source, flags, suffix)


def check_named_by_its_digest(store, folder):
    builder = Builder()
    assert ask(store, folder, builder)[1] == ask(store, folder, builder, source="another of the same result")[1]


def check_whatever_is_broken_is_built_again(store, folder):
    for part in ("artifact", "entry"):
        for harm in (truncate, change, blank, lose):
            builder = Builder()
            opened, path = ask(store, folder, Builder())
            harm(path if part == "artifact" else entry_of(opened.folder))
            ask(store, folder, builder)
            assert builder.calls == 1, (part, harm)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def change(path):
    path.write_bytes(b"x" + path.read_bytes()[1:])


def blank(path):
    """What a file system may leave behind when the power fails."""
    path.write_bytes(path.read_bytes()[:-9] + bytes(9))


def lose(path):
    path.unlink()


def check_entries_are_bound_to_their_keys(store, folder):
    """An entry that took another's name would pass off one kernel as another."""
    opened, _ = ask(store, folder, Builder())
    first = entry_of(opened.folder)
    content = first.read_bytes()
    first.unlink()
    ask(store, folder, Builder(b"other"), source="other")
    entry_of(opened.folder).write_bytes(content)
    ask(store, folder, Builder(b"other"), source="other")


def check_links_are_not_followed(store, folder):
    _, path = ask(store, folder, Builder())
    path.rename(folder / "elsewhere")
    path.symlink_to(folder / "elsewhere")
    builder = Builder()
    ask(store, folder, builder)
    assert builder.calls == 1
    assert not path.is_symlink()


def check_files_of_others_are_not_read(store, folder):
    opened, path = ask(store, folder, Builder())
    for file in (path, entry_of(opened.folder)):
        builder = Builder()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fstat", disowning(os.fstat, file.stat().st_ino))
            ask(store, folder, builder)
        assert builder.calls == 1, file


def disowning(fstat, number):
    """It says of the file with this number that it is another user's."""
    def told(descriptor):
        status = fstat(descriptor)
        return types.SimpleNamespace(st_mode=status.st_mode, st_uid=status.st_uid + (status.st_ino == number),
                                     st_size=status.st_size, st_blksize=status.st_blksize)
    return told


def check_files_that_others_may_write_are_not_read(store, folder):
    opened, path = ask(store, folder, Builder())
    for file in (path, entry_of(opened.folder)):
        for mode in (0o620, 0o602):
            file.chmod(mode)
            builder = Builder()
            ask(store, folder, builder)
            assert builder.calls == 1, (file, mode)


def check_folder_of_another_is_left_alone(store, folder):
    opened, _ = ask(store, folder, Builder(b"planted"))
    other = os.geteuid() + 1
    opened.folder.rename(folder / f"kernels-{other}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: other)
        opened = store.Store(folder)
    assert_private(opened, folder)


def check_folder_that_others_may_write_is_left_alone(store, folder):
    for mode in (0o770, 0o707):
        opened, _ = ask(store, folder / str(mode), Builder(b"planted"))
        opened.folder.chmod(mode)
        assert_private(ask(store, folder / str(mode), Builder())[0], folder / str(mode))


def check_linked_folder_is_left_alone(store, folder):
    opened, _ = ask(store, folder, Builder(b"planted"))
    opened.folder.rename(folder / "elsewhere")
    opened.folder.symlink_to(folder / "elsewhere")
    assert_private(ask(store, folder, Builder())[0], folder)


def check_folder_that_cannot_be(store, folder):
    (folder / "file").write_text("in the way")
    assert_private(ask(store, folder / "file", Builder())[0], folder)


def assert_private(opened, folder):
    """It is the user's alone, away from the folder asked for, and it says why."""
    assert not opened.folder.is_relative_to(folder)
    assert opened.folder.stat().st_mode & 0o777 == 0o700
    assert str(folder) in opened.trouble


def check_full_disk(store, folder):
    write = store._write
    store._write = lambda path, *rest: no_room() if path.is_relative_to(folder) else write(path, *rest)
    opened, _ = ask(store, folder, Builder())
    assert_private(opened, folder)
    assert os.strerror(errno.ENOSPC) in opened.trouble


def no_room():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def check_hung_builder_stops_nobody(store, folder):
    """It keeps its lock for ever: who waits goes on alone."""
    opened, path = ask(store, folder, Builder())
    path.unlink()
    descriptor = store._lock(entry_of(opened.folder).with_suffix(".lock"), 0)
    store.PATIENCE = 0
    assert_private(ask(store, folder, Builder())[0], folder)
    os.close(descriptor)


def check_failed_build_leaves_nothing(store, folder):
    def fail():
        raise ValueError("refused")

    for _ in range(2):
        with pytest.raises(ValueError, match="refused"):
            store.Store(folder).path("source", ".so", fail)
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
    """Whoever has mapped the old one keeps it, whole."""
    _, path = ask(store, folder, Builder())
    with path.open("rb") as mapped:
        ask(store, folder, Builder(), source="another of the same result")
        assert mapped.read() == ARTIFACT
        assert os.fstat(mapped.fileno()).st_ino != path.stat().st_ino


def check_fork_does_not_keep_the_lock(store, folder):
    children = []

    def build():
        ends = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(ends[1])
            os.read(ends[0], 1)  # until the parent closes its end
            os._exit(0)
        children.append((child, *ends))
        return ARTIFACT

    path = store.Store(folder).path("source", ".so", build)
    try:
        os.close(store._lock(entry_of(path.parent).with_suffix(".lock"), 0))
    finally:
        for child, *ends in children:
            for end in ends:
                os.close(end)
            os.waitpid(child, 0)


def check_threads_share_a_folder(store, folder):
    """All of them ask while the first still builds, in a store that has to retreat."""
    opened, come, building, found = store.Store(folder), threading.Semaphore(0), [], []
    opened.folder = folder / "lost"
    opened._missing = Announced(opened._missing, come)

    def build():
        building.append(all(come.acquire(timeout=1) for _ in range(PROCESSES)))
        return ARTIFACT

    def run():
        with contextlib.suppress(OSError):  # it is missed among those found
            found.append(opened.path("source", ".so", build))

    threads = [threading.Thread(target=run) for _ in range(PROCESSES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert building == [True]
    assert (len(set(found)), len(found)) == (1, PROCESSES)


class Announced:
    """A lock that says who comes before it lets him wait."""

    def __init__(self, lock, come):
        self.lock, self.come = lock, come

    def __enter__(self):
        self.come.release()
        self.lock.acquire()

    def __exit__(self, *_):
        self.lock.release()


# ---------------------------------------------------------------- the same of several processes


@contextlib.contextmanager
def child(store, folder, dies_at=""):
    command = [sys.executable, "-S", "-c", CHILD, store.__file__, str(folder), dies_at]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as job:
        try:
            yield job
        finally:
            job.kill()


def check_race_builds_once(store, folder):
    """The builder goes on when each of the others has met its lock, or builds too."""
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(child(store, folder)) for _ in range(PROCESSES)]
        for job in jobs:
            job.stdin.write("go\n")
        words = [job.stdout.readline().strip() for job in jobs]
        for job in jobs:
            with contextlib.suppress(BrokenPipeError):
                job.stdin.write("finish\n")
        ends = [job.stdout.readline().strip() for job in jobs]
    assert sorted(words) == ["builds"] + ["waits"] * (PROCESSES - 1)
    assert len(set(ends)) == 1
    assert ends[0].endswith(".so True")


def check_killed_builder_leaves_nothing_broken(store, folder):
    for number, moment in enumerate(("build", "replace 0", "replace 1")):
        builder = Builder()
        with child(store, folder / str(number), moment) as job:
            job.communicate("go\nfinish\n")
        assert job.returncode == -signal.SIGKILL, moment
        store.PATIENCE = 0  # its lock must be free
        opened, _ = ask(store, folder / str(number), builder)
        assert (builder.calls, opened.trouble) == (1, ""), moment
        assert not list(opened.folder.glob("*.new"))


CHECKS = {name: check for name, check in globals().items() if name.startswith("check_")}
OWN = "return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)"
FOUND = "return artifact if content is not None and _digest(content) == digest else None"
MUTANTS = [
    ("check_built_once", "self._find(key, suffix) or self._make(key, suffix, build)", "self._make(key, suffix, build)",
     "found = self._find(key, suffix)", "found = None"),
    ("check_verified_once", "if key not in self._verified:", "if True:"),
    ("check_everything_counts", "(source, flags, suffix)", "(source, suffix)"),
    ("check_everything_counts", "(source, flags, suffix)", "(source, flags)"),
    ("check_everything_counts", "_digest(part.encode()) for part", "part for part"),
    ("check_named_by_its_digest", "digest = _digest(content)\n        try", "digest = key\n        try"),
    ("check_whatever_is_broken_is_built_again", FOUND, "return artifact if content is not None else None"),
    ("check_whatever_is_broken_is_built_again", FOUND, "return artifact"),
    ("check_whatever_is_broken_is_built_again", "contextlib.suppress(OSError, ValueError)",
     "contextlib.suppress(OSError)"),
    ("check_entries_are_bound_to_their_keys", "if named != key:", "if not named:"),
    ("check_links_are_not_followed", "READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW",
     "READ = os.O_RDONLY | os.O_CLOEXEC"),
    ("check_files_of_others_are_not_read", "and _is_own(status) else None", "else None"),
    ("check_files_of_others_are_not_read", OWN, "return not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)"),
    ("check_files_that_others_may_write_are_not_read", OWN, "return status.st_uid == os.geteuid()"),
    ("check_files_that_others_may_write_are_not_read", OWN, OWN.replace(" | stat.S_IWOTH", "")),
    ("check_files_that_others_may_write_are_not_read", OWN, OWN.replace("stat.S_IWGRP | ", "")),
    ("check_folder_of_another_is_left_alone", "            _check_private(self.folder)\n", ""),
    ("check_folder_of_another_is_left_alone", OWN, "return not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)"),
    ("check_folder_that_others_may_write_is_left_alone", OWN, "return status.st_uid == os.geteuid()"),
    ("check_linked_folder_is_left_alone", "folder.lstat()", "folder.stat()"),
    ("check_folder_that_cannot_be", "        except OSError as error:\n            self._retreat(error)\n\n",
     "        except FileExistsError as error:\n            self._retreat(error)\n\n"),
    ("check_full_disk", "except OSError as error:  # no room left", "except PermissionError as error:  # no room left"),
    ("check_hung_builder_stops_nobody", 
     'raise TimeoutError(f"another process has held {path} for {patience:g} s")', "break"),
    ("check_failed_build_leaves_nothing", "return found or self._keep(key, suffix, build())",
     "return found or self._keep(key, suffix, _attempt(build))"),
    ("check_nobody_else_may_look", "mode=0o700", "mode=0o755"),
    ("check_nobody_else_may_look", "os.open(draft, WRITE, 0o600)", "os.open(draft, WRITE, 0o644)"),
    ("check_nobody_else_may_look", "os.open(path, WRITE, 0o600)", "os.open(path, WRITE, 0o644)"),
    ("check_artifacts_are_never_written_in_place", "open(os.open(draft,", "open(os.open(path,",
     "os.replace(draft, path)", ""),
    ("check_fork_does_not_keep_the_lock", "fcntl.flock(descriptor, fcntl.LOCK_UN)", "pass"),
    ("check_threads_share_a_folder", "with self._missing:", "with contextlib.nullcontext():"),
    ("check_race_builds_once", "except BlockingIOError:\n        return False",
     "except BlockingIOError:\n        return True"),
    ("check_race_builds_once", "found = self._find(key, suffix)", "found = None"),
    ("check_killed_builder_leaves_nothing_broken", "with self._locked(key):", "with _by_existence(self.folder / key):"),
]
# What a mutant may call instead of what is right.
HELPERS = '''

def _attempt(build):
    try:
        return build()
    except ValueError:
        return b""


@contextlib.contextmanager
def _by_existence(path):
    """A lock that outlives the process that holds it."""
    path.with_suffix(".held").touch(exist_ok=False)
    yield
    path.with_suffix(".held").unlink()
'''


def written(folder, changes):
    """The store with these changes, each of which must match exactly once."""
    text = SOURCE
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    file = folder / "store.py"
    file.write_text(text + HELPERS)
    return load(file)


@pytest.mark.parametrize("name", CHECKS)
def test_store(name, tmp_path):
    CHECKS[name](load(real.__file__), tmp_path)


@pytest.mark.mutant
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant[0].removeprefix('check_')}: {mutant[2][:30]}")
def test_mutants_are_caught(mutant, tmp_path):
    name, *changes = mutant
    with pytest.raises((AssertionError, OSError, ValueError, pytest.fail.Exception)):
        CHECKS[name](written(tmp_path, changes), tmp_path)


def test_every_check_has_a_mutant():
    assert {name for name, *_ in MUTANTS} == set(CHECKS)


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"GPUCOLL_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"GPUCOLL_CACHE": "", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/gpucoll"),
        ({"XDG_CACHE_HOME": "b", "HOME": "/c"}, "/c/.cache/gpucoll"),
        ({"XDG_CACHE_HOME": "", "HOME": "/c"}, "/c/.cache/gpucoll"),
    ],
)
def test_default_folder(environment, folder):
    assert real.default_folder(environment) == Path(folder)


def test_default_folder_without_a_home():
    assert real.default_folder({}).is_absolute()


def test_one_store_for_the_process(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUCOLL_CACHE", str(tmp_path))
    real.user_store.cache_clear()
    try:
        assert real.user_store() is real.user_store()
        assert real.user_store().folder.parent == tmp_path
    finally:
        real.user_store.cache_clear()
