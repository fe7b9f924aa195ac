"""Kernels compiled for the CPU by g++, or the compiler named in CXX, and a cache of all compiled kernels.

The cache is a folder of the user: an artifact is built once for all processes and sessions.

The name of an artifact holds a key, the hash of all inputs of the build, and a digest of the key and the content.
Artifacts are executable code. Therefore the store uses a folder only if no other user can write to the folder or
replace a parent folder. Lost or damaged artifacts are built again, so the folder may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import shlex
import stat
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from gpucoll.device import SOURCE_NAME, CompileError
from gpucoll.errors import BackendError

# Seconds to wait for another process building the same artifact: a hung process must not block all.
LOCK_TIMEOUT = 120.0
READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
# Prefix of the temporary folders removed at the end of the process.
PRIVATE_PREFIX = "gpucoll-private-"
# A private folder younger than this many seconds is never swept, since the owner may not hold the lock yet.
YOUNG = 60.0
COMPILER_TIMEOUT = 600.0  # seconds for one run of the compiler
# -O1: with -O2 the emulated kernels took twice as long to compile and ran no faster, since most time goes into switches
# between fibers. Callers may pass a higher level. The last three options keep the bits of a GPU's arithmetic: no fused
# multiply-add, integers wrap, and memory written as words may be read as numbers. No -march=native: hosts with
# different CPUs may share the home directory with the objects.
OPTIONS = ("-O1", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-fwrapv", "-fno-strict-aliasing")
T = TypeVar("T")


def default_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder named by GPUCOLL_CACHE, else the folder `gpucoll` in the user's cache directory.

    >>> default_folder({"GPUCOLL_CACHE": "/scratch/me"})
    PosixPath('/scratch/me')
    """
    chosen = environment.get("GPUCOLL_CACHE")
    if chosen:
        return Path(chosen)
    import tempfile

    import platformdirs

    folder = platformdirs.user_cache_path("gpucoll")
    # A user without a home directory gets a relative path.
    return folder if folder.is_absolute() else Path(tempfile.gettempdir(), "gpucoll")


@functools.cache
def user_store() -> Store:
    """Return the store of this user, one object per process."""
    return Store(default_folder())


class Store:
    """The artifacts of one user, in a subfolder of `folder`.

    If other users may write to the subfolder, or this user cannot, a private folder serves until the process ends.
    `unavailable_reason` is the reason; an empty string means that the store is in order.
    """

    def __init__(self, folder: Path) -> None:
        self.unavailable_reason: str = ""
        self.folder: Path = folder / f"kernels-{os.geteuid()}"
        # One thread at a time looks for or builds an artifact: threads must not retreat into several private folders.
        self._missing = threading.Lock()
        self._found: dict[str, Path] = {}  # by key
        self._or_retreat(self._prepare)

    def path(self, source: str, suffix: str, build: Callable[[], bytes], *, flags: str = "") -> Path:
        """Return the file with the result of `build` for `source`; only one process builds an artifact.

        `flags` holds all other inputs of the build: options, the tool's version (see the compilers' `recipe`).
        Exceptions of `build` are passed on, and the next call builds again.
        """
        # Hash the hashes, so that no shift of characters between source, flags and suffix gives the same key.
        key = _digest(*(_digest(part.encode()).encode() for part in (source, flags, suffix)))
        if key not in self._found:
            with self._missing:
                self._found[key] = self._find(key, suffix) or self._make(key, suffix, build)
        return self._found[key]

    def _find(self, key: str, suffix: str) -> Path | None:
        """Return the artifact of `key`, or None if no artifact with a matching digest exists."""
        for artifact in self.folder.glob(f"{key}-*{suffix}"):
            # A file may vanish or be unreadable: then the artifact counts as missing.
            with contextlib.suppress(OSError):
                if artifact.name == _name(key, suffix, artifact.read_bytes()):
                    return artifact
        return None

    def _make(self, key: str, suffix: str, build: Callable[[], bytes]) -> Path:
        """Build the artifact while holding the file lock of `key`; the system releases the lock if the process dies."""
        # Imported here, because the import is slow and most processes build nothing.
        import filelock

        with contextlib.ExitStack() as held:
            self._or_retreat(lambda: held.enter_context(
                filelock.FileLock(self.folder / f"{key}.lock", LOCK_TIMEOUT, mode=0o600)))
            # Look again: another process may have built the artifact while this process waited for the lock.
            artifact = self._find(key, suffix)
            if artifact is not None:
                return artifact
            content = build()
            return self._or_retreat(lambda: _written(self.folder / _name(key, suffix, content), content))

    def _prepare(self) -> None:
        """Make the folder; raise PermissionError if another user may write to the folder or replace the folder."""
        make_private(self.folder)
        status = self.folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise PermissionError(f"{self.folder} is not a folder writable by this user alone")
        check_way(self.folder)

    def _or_retreat(self, act: Callable[[], T]) -> T:
        """Return `act()`; if the folder is unusable, switch to a private folder for good and call `act` again."""
        try:
            return act()
        # `filelock` raises NotImplementedError on a file system without locks.
        except (OSError, NotImplementedError) as error:
            if self.unavailable_reason:
                raise
            reason = getattr(error, "strerror", None) or error
            self.unavailable_reason = f"kernels are not kept in {self.folder}: {reason}"
            self.folder, remove = private_folder()
            weakref.finalize(self, remove)
            return act()


def private_folder() -> tuple[Path, Callable[[], None]]:
    """Return a new private folder and a function removing the folder; first remove the folders of dead processes.

    A process locks its private folder. The system releases the lock at the end of the process, even after a kill.
    Process ids would not do, since the system reuses the id of a dead process.
    """
    import shutil
    import tempfile

    _sweep()
    folder, owner = Path(tempfile.mkdtemp(prefix=PRIVATE_PREFIX)), os.getpid()
    held = os.open(folder, READ_FLAGS | os.O_DIRECTORY)
    # On a file system without locks no process gets a lock, and `_sweep` removes nothing.
    with contextlib.suppress(OSError):
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove() -> None:
        # A forked child inherits this function and must not remove the parent's folder.
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(held)

    return folder, remove


def _sweep() -> None:
    """Remove this user's private folders of dead processes."""
    import shutil
    import tempfile

    for place in Path(tempfile.gettempdir()).glob(f"{PRIVATE_PREFIX}*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            descriptor = os.open(place, READ_FLAGS | os.O_DIRECTORY)
            held.callback(os.close, descriptor)
            status = os.fstat(descriptor)
            if status.st_uid == os.geteuid() and time.time() - status.st_mtime > YOUNG:
                # Raises OSError, and so skips the removal, while the owner is alive.
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # `rmtree` follows no symbolic links.
                shutil.rmtree(place, ignore_errors=True)


def make_private(folder: Path) -> None:
    """Make a folder and all missing parents, accessible to this user only, whatever the umask."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def check_way(place: Path) -> None:
    """Raise PermissionError if a user other than this user and root may replace a folder on the path to `place`."""
    for folder in place.parent.resolve().joinpath(place.name).parents:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(f"{folder} is not a folder")
        # In a sticky folder such as /tmp only the owner of an entry may rename or delete the entry.
        others = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
        if others or status.st_uid not in (0, os.geteuid()):
            raise PermissionError(f"other users may change the content of {folder}")


def read_trusted(place: Path) -> bytes:
    """Return the content of a file; raise PermissionError unless only this user and root may write to the file."""
    check_way(place)
    with place.open("rb") as file:
        # Check the open file, not the path: the path may name another file by now.
        status = os.fstat(file.fileno())
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
            raise PermissionError(f"other users may write to {place}")
        return file.read()


def _name(key: str, suffix: str, content: bytes) -> str:
    """Return the name of an artifact. The digest includes the key, so a renamed artifact fails the check."""
    return f"{key}-{_digest(key.encode(), content)}{suffix}"


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _written(path: Path, content: bytes) -> Path:
    """Write `content` to `path` atomically, so that no reader sees a partial file; return `path`."""
    draft = path.with_suffix(".new")
    draft.write_bytes(content)
    draft.replace(path)
    return path


def compile_shared(source: str, *options: str) -> bytes:
    """Return the shared object compiled from `source`, with additional `options`.

    Raises CompileError if the compiler rejects the source, BackendError if no compiler can be run.
    """
    folder, remove = private_folder()
    try:
        target = folder / "kernels.so"
        # Source by standard input, so that neither the object nor the messages contain a path.
        job = _run(*OPTIONS, *options, "-x", "c++", "-", "-o", str(target), text=f'#line 1 "{SOURCE_NAME}"\n{source}')
        if job.returncode != 0:
            raise CompileError.of(_compiler()[0], job.stderr)
        return target.read_bytes()
    finally:
        remove()


def recipe() -> str:
    """Return all inputs of a build besides the source: compiler, version, options, machine and C library."""
    words = _compiler()
    return "\n".join([*words, _version(words), *OPTIONS, platform.machine(), os.confstr("CS_GNU_LIBC_VERSION") or ""])


@functools.cache
def _version(words: tuple[str, ...]) -> str:
    return _run("--version").stdout


def _compiler() -> tuple[str, ...]:
    """Return the command in CXX, split into words, or g++."""
    try:
        return tuple(shlex.split(os.environ.get("CXX", ""))) or ("g++",)
    except ValueError as error:
        raise BackendError(f"CXX={os.environ['CXX']!r} is not a command: {error}") from None


def _run(*arguments: str, text: str = "") -> Any:
    """Run the compiler with messages in English, whatever the user's language."""
    import subprocess  # not needed by every program

    words = _compiler()
    try:
        return subprocess.run([*words, *arguments], input=text, capture_output=True, encoding="utf-8",
                              errors="replace", env={**os.environ, "LC_ALL": "C"}, timeout=COMPILER_TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise BackendError(f"{words[0]} has not ended within {COMPILER_TIMEOUT:g} s; does CXX name the intended "
                           "compiler?") from error
    except OSError as error:
        raise BackendError(f"the kernels need a C++ compiler on the CPU, and {words[0]} cannot be run "
                           f"({error.strerror}); install g++, or name a compiler in CXX") from error
