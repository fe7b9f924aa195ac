"""A store of what compilers made: built once for all processes and sessions, and verified before it is used.

An entry, named by the hash of everything that the artifact depends on, holds the artifact's digest; the artifact is
named by that digest. Only files of the user's own are read, in a folder that nobody else may write to: a shared object
is code that will run. Whatever is lost or broken is built again, so that the folder may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import stat
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

PATIENCE = 120.0  # seconds to wait for another process that builds the same; a hung one must not stop everybody
NAP = 5e-3  # seconds
READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW


def default_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder that GPUCOLL_CACHE names, else `gpucoll` among the user's caches.

    >>> default_folder({"GPUCOLL_CACHE": "/scratch/me", "HOME": "/home/me"})
    PosixPath('/scratch/me')
    >>> default_folder({"HOME": "/home/me"})
    PosixPath('/home/me/.cache/gpucoll')
    """
    chosen, caches = environment.get("GPUCOLL_CACHE"), environment.get("XDG_CACHE_HOME", "")
    if chosen:
        return Path(chosen)
    if not os.path.isabs(caches):  # as the XDG specification has it: unset, empty and relative count as none
        caches = os.path.join(environment.get("HOME") or tempfile.gettempdir(), ".cache")
    return Path(caches) / "gpucoll"


@functools.cache
def user_store() -> Store:
    """Return this user's store, the same for everybody in the process."""
    return Store(default_folder(os.environ))


class Store:
    """The artifacts of one user, in a folder of their own below `folder`.

    Where that folder is not the user's alone, or cannot be written, a private one serves until the process ends, and
    `trouble` says why; it is empty where all is well.
    """

    def __init__(self, folder: Path) -> None:
        self.trouble = ""
        self._missing = threading.Lock()  # the threads of a process must not retreat into several folders
        self._retreated = False
        self._verified: dict[str, Path] = {}  # by key; what this process has seen to be good
        self.folder = folder / f"kernels-{os.geteuid()}"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_private(self.folder)
        except OSError as error:
            self._retreat(error)

    def path(self, source: str, suffix: str, build: Callable[[], bytes], *, flags: str = "") -> Path:
        """Return the file that holds what `build` made of `source`; no two processes build the same.

        `flags` is what the artifact depends on besides `source`: options, the tool's version (see the compilers'
        `recipe`). What `build` raises is passed on, and nothing is kept of it.
        """
        key = _digest("".join(_digest(part.encode()) for part in (source, flags, suffix)).encode())
        if key not in self._verified:
            with self._missing:
                self._verified[key] = self._find(key, suffix) or self._make(key, suffix, build)
        return self._verified[key]

    def _find(self, key: str, suffix: str) -> Path | None:
        """Return the artifact of `key` if it is there, whole and the user's own."""
        named, _, digest = (_read(self.folder / key) or b"").decode(errors="replace").partition(" ")
        if named != key:  # a renamed entry would pass off one kernel as another
            return None
        artifact = self.folder / f"{digest}{suffix}"
        content = _read(artifact)
        return artifact if content is not None and _digest(content) == digest else None

    def _make(self, key: str, suffix: str, build: Callable[[], bytes]) -> Path:
        with self._locked(key):
            found = self._find(key, suffix)  # another process may have built it while this one waited
            return found or self._keep(key, suffix, build())

    def _keep(self, key: str, suffix: str, content: bytes) -> Path:
        """Write artifact and entry, in this order: an entry never names what is not there yet."""
        digest = _digest(content)
        try:
            _write(self.folder / f"{digest}{suffix}", content, self.folder / f"{key}.new")
            _write(self.folder / key, f"{key} {digest}".encode(), self.folder / f"{key}.new")
        except OSError as error:  # no room left, or a folder that can only be read
            if self._retreated:
                raise
            self._retreat(error)
            return self._keep(key, suffix, content)
        return self.folder / f"{digest}{suffix}"

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Hold the lock of `key`, which the system releases if this process dies."""
        descriptor = self._lock(key)
        try:
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough where a fork has a copy of the descriptor
            os.close(descriptor)

    def _lock(self, key: str) -> int:
        try:
            return _lock(self.folder / f"{key}.lock", PATIENCE)
        except OSError as error:
            if self._retreated:
                raise
            self._retreat(error)
            return self._lock(key)

    def _retreat(self, error: OSError) -> None:
        """From now on use a folder that nobody else knows, gone when the process ends."""
        self.trouble = f"kernels are not kept in {self.folder}: {error.strerror or error}"
        self._retreated = True
        self.folder = Path(tempfile.mkdtemp(prefix="gpucoll-"))  # it makes the folder for this user alone
        weakref.finalize(self, _remove, self.folder, os.getpid())


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a fork that ends must not take it away from the others
        shutil.rmtree(folder, ignore_errors=True)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _check_private(folder: Path) -> None:
    """Raise PermissionError if anybody else may write to `folder`, or choose what it is."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or not _is_own(status):
        raise PermissionError(f"{folder} is not a folder that only this user may write to")


def _is_own(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _read(path: Path) -> bytes | None:
    """Return the content of a file of the user's own; None for anything else, and where there is none."""
    # A name that a broken entry made up may hold a zero byte, which is a ValueError.
    with contextlib.suppress(OSError, ValueError), open(os.open(path, READ), "rb") as file:
        status = os.fstat(file.fileno())  # of what was opened: a name may be exchanged meanwhile
        return file.read() if stat.S_ISREG(status.st_mode) and _is_own(status) else None
    return None


def _write(path: Path, content: bytes, draft: Path) -> None:
    """Let `path` hold `content`, in one step: no reader ever sees half of it."""
    with open(os.open(draft, WRITE, 0o600), "wb") as file:
        file.write(content)
    os.replace(draft, path)


def _lock(path: Path, patience: float) -> int:
    """Return a descriptor that holds the lock of `path`; TimeoutError if another holds it for `patience` seconds."""
    descriptor = os.open(path, WRITE, 0o600)
    deadline = time.monotonic() + patience
    try:
        while not _try_lock(descriptor):
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process has held {path} for {patience:g} s")
            time.sleep(NAP)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
