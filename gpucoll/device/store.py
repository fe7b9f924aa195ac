"""A store of what compilers made: built once for all processes and sessions, in a folder of the user's own.

An artifact's name has the hash of everything that it depends on, and the digest of that and of its content. Only a
folder is used that nobody else may write to, nor exchange, from the root of the file system on: a shared object is
code that will run. What is lost or broken is built again, so that the folder may be deleted at any time.
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

PATIENCE = 120.0  # seconds to wait for another process that builds the same; a hung one must not stop everybody
READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
PRIVATE = "gpucoll-private-"  # how names of folders in the temporary directory begin that end with their process
YOUNG = 60.0  # seconds in which one may not have been locked yet
T = TypeVar("T")


def default_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder that GPUCOLL_CACHE names, else `gpucoll` among the user's caches.

    >>> default_folder({"GPUCOLL_CACHE": "/scratch/me"})
    PosixPath('/scratch/me')
    """
    chosen = environment.get("GPUCOLL_CACHE")
    if chosen:
        return Path(chosen)
    import platformdirs

    folder = platformdirs.user_cache_path("gpucoll")
    return folder if folder.is_absolute() else Path(tempfile.gettempdir(), "gpucoll")  # a user without a home


@functools.cache
def user_store() -> Store:
    """Return this user's store, the same for everybody in the process."""
    return Store(default_folder())


class Store:
    """The artifacts of one user, in a folder of their own below `folder`.

    Where that folder is not the user's alone, or cannot be written, a private one serves until the process ends, and
    `trouble` says why; it is empty where all is well.
    """

    def __init__(self, folder: Path) -> None:
        self.trouble = ""
        self.folder = folder / f"kernels-{os.geteuid()}"
        self._missing = threading.Lock()  # the threads of a process must not retreat into several folders
        self._found: dict[str, Path] = {}  # by key
        self._or_retreat(self._prepare)

    def path(self, source: str, suffix: str, build: Callable[[], bytes], *, flags: str = "") -> Path:
        """Return the file that holds what `build` made of `source`; no two processes build the same.

        `flags` is what the artifact depends on besides `source`: options, the tool's version (see the compilers'
        `recipe`). What `build` raises is passed on, and nothing is kept of it.
        """
        key = _digest(*(_digest(part.encode()).encode() for part in (source, flags, suffix)))
        if key not in self._found:
            with self._missing:
                self._found[key] = self._find(key, suffix) or self._make(key, suffix, build)
        return self._found[key]

    def _find(self, key: str, suffix: str) -> Path | None:
        """Return the artifact of `key` if it is there, and whole."""
        for artifact in self.folder.glob(f"{key}-*{suffix}"):
            with contextlib.suppress(OSError):
                if artifact.name == _name(key, suffix, artifact.read_bytes()):
                    return artifact
        return None

    def _make(self, key: str, suffix: str, build: Callable[[], bytes]) -> Path:
        """Build the artifact under a lock of its own, which the system releases if this process dies."""
        import filelock  # slow to import, and most processes build nothing

        with contextlib.ExitStack() as held:
            self._or_retreat(lambda: held.enter_context(
                filelock.FileLock(self.folder / f"{key}.lock", PATIENCE, mode=0o600)))
            artifact = self._find(key, suffix)  # another process may have built it while this one waited
            if artifact is not None:
                return artifact
            content = build()
            return self._or_retreat(lambda: _written(self.folder / _name(key, suffix, content), content))

    def _prepare(self) -> None:
        """Make the folder; raise PermissionError if anybody else may write to it, or choose what it is."""
        make_private(self.folder)
        status = self.folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise PermissionError(f"{self.folder} is not a folder that only this user may write to")
        check_way(self.folder)

    def _or_retreat(self, act: Callable[[], T]) -> T:
        """Return what `act` returns: where the folder does not serve, in one that nobody else knows, from then on."""
        try:
            return act()
        except (OSError, NotImplementedError) as error:  # the latter from filelock: a file system without locks
            if self.trouble:
                raise
            reason = getattr(error, "strerror", None) or error
            self.trouble = f"kernels are not kept in {self.folder}: {reason}"
            self.folder, remove = private_folder()
            weakref.finalize(self, remove)
            return act()


def private_folder() -> tuple[Path, Callable[[], None]]:
    """Return a new folder that nobody else knows, and what removes it; remove those of processes that were killed.

    The system releases the lock on such a folder when its process ends, however that ends, whatever its number.
    """
    _sweep()
    folder, owner = Path(tempfile.mkdtemp(prefix=PRIVATE)), os.getpid()
    held = os.open(folder, READ | os.O_DIRECTORY)
    with contextlib.suppress(OSError):  # no locks in this file system: nobody gets one, and removes nothing
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove() -> None:
        if os.getpid() == owner:  # a fork that ends must not take it away from the others
            shutil.rmtree(folder, ignore_errors=True)
            os.close(held)

    return folder, remove


def _sweep() -> None:
    """Remove private folders of this user whose processes have ended."""
    for place in Path(tempfile.gettempdir()).glob(f"{PRIVATE}*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            descriptor = os.open(place, READ | os.O_DIRECTORY)
            held.callback(os.close, descriptor)
            status = os.fstat(descriptor)
            if status.st_uid == os.geteuid() and time.time() - status.st_mtime > YOUNG:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(place, ignore_errors=True)  # it follows no link


def make_private(folder: Path) -> None:
    """Make a folder and those above it that are missing, for this user alone whatever the umask is."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def check_way(place: Path) -> None:
    """Raise PermissionError if anybody but this user and root may exchange a folder on the way to `place`."""
    for folder in place.parent.resolve().joinpath(place.name).parents:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(f"{folder} is no folder")
        others = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
        if others or status.st_uid not in (0, os.geteuid()):
            raise PermissionError(f"others than this user may change what is in {folder}")


def read_trusted(place: Path) -> bytes:
    """Return the content of a file that nobody but this user and root can have written; else PermissionError."""
    check_way(place)
    with place.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
            raise PermissionError(f"others than this user may write to {place}")
        return file.read()


def _name(key: str, suffix: str, content: bytes) -> str:
    """Return the name of an artifact: the key is in its digest too, so that no kernel passes for another."""
    return f"{key}-{_digest(key.encode(), content)}{suffix}"


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _written(path: Path, content: bytes) -> Path:
    """Let `path` hold `content`, in one step: no reader ever sees half of it."""
    draft = path.with_suffix(".new")
    draft.write_bytes(content)
    draft.replace(path)
    return path
