"""Checkpoints of training divided over ranks: a file for each rank, and a manifest naming the valid files.

A folder holds `manifest.json` and the files named in the manifest, with their SHA-256. Saving writes files under new
names ending in `.new`, replaces the manifest by one atomic rename, and then drops the ending and removes the old files.
An interruption leaves either the old or the new checkpoint complete: a named file may still have the ending. The
manifest lists the elements of each file, so any number of ranks can read the checkpoint. All other files of the folder
are the user's: only files named by a manifest, or `rank-N-<12 hex>.npz.new` and `manifest-<12 hex>.json.new`, are ever
removed. Format 1:

    {"format": 1, "steps": 7, "optimizer": "Adam", "state": ["mean", "square"],
     "parameters": {"w": {"shape": [300, 40], "dtype": "float64"}, ...},
     "files": [{"name": "rank-0-8f3a60b1c2d4.npz", "sha256": "...", "elements": {"w": [0, 1500], ...}}, ...],
     "replaced": ["rank-0-77e0d2419f5b.npz", ...],
     "kept": {"lost/w": {"shape": [300, 40], "dtype": "float64"}, ...},
     "sha256": "..."}

The last line has the SHA-256 of the manifest without this line. `replaced` names the files of older checkpoints that
are to be removed: an interruption may leave some. `kept` describes arrays private to each rank: the state
of the gradient compression (see `Compression.state`).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from gpucoll import Communicator, internal
from gpucoll.errors import ArgumentError, BackendError
from gpucoll.internal import Array, check_alike, numpy_dtype, parsing, row_of
from gpucoll.training.optimizers import Optimizer
from gpucoll.training.parameters import Like, Parameters, on_host, to_array
from gpucoll.training.shards import owned

SAVE_FORMAT = 1
MANIFEST = "manifest.json"
BEGINNING = b'{\n "format": '  # of a manifest: any other file of this name is the user's
SHARD = re.compile(r"rank-[0-9]{1,9}-[0-9a-f]{12}\.npz")
DRAFT = re.compile(rf"({SHARD.pattern}|manifest-[0-9a-f]{{12}}\.json)\.new")
log: logging.Logger = logging.getLogger("gpucoll")
PARAMETER = "parameter"  # key of a parameter's own shard, next to the names of the optimizer's state

States = Mapping[str, Parameters]  # by parameter: this rank's shard of the parameter and of the optimizer's state


def _agreed(comm: Communicator, call: str, folder: Any) -> Path:
    """Return the folder as a path. A collective call. Raises ArgumentError for no path, PeerError on other ranks."""
    error = None
    try:
        path = Path(folder)
    except TypeError:
        path, error = Path(), ArgumentError(f"{call}: folder {folder!r} is not a path", code="GC-FILE")
    internal.all_gather_metadata(comm, {}, call, error)
    return path


class Saving:
    """A checkpoint being written by a thread. The constructor and `wait` are collective calls."""

    def __init__(self, folder: str | Path, comm: Communicator, like: Mapping[str, Like], states: States,
                 optimizer: Optimizer, kept: Mapping[str, Array]) -> None:
        self._folder, self._comm, self._like = _agreed(comm, "save", folder), comm, like
        self._optimizer = {"steps": optimizer.steps, "optimizer": type(optimizer).__name__,
                           "state": list(optimizer.state_names)}
        self._before: dict[str, Any] = {}  # on rank 0 the manifest in force
        error = None
        if comm.rank == 0:
            try:
                self._before = _before(self._folder)
                _tidy(self._folder, self._before)  # now, to make room
            except (OSError, ValueError) as reason:
                error = BackendError(f"save: {self._folder / MANIFEST}: {reason}", code="GC-FILE")
        # A token common to all ranks makes the file names new: files of the checkpoint in the folder stay untouched.
        sent = internal.broadcast_metadata(comm, 0, {"token": os.urandom(6).hex()}, "save", error)
        self._token = sent["token"]
        self._draft = self._folder / f"rank-{comm.rank}-{self._token}.npz.new"
        # Copies, since training goes on and changes the arrays while the thread writes.
        self._rows = {f"{kind}/{name}": numpy.array(on_host(row)) for name, state in states.items()
                      for kind, row in state.items()}
        self._kept = {name: {"shape": list(row.shape), "dtype": row_of(row.dtype).name} for name, row in kept.items()}
        self._rows |= {name: numpy.array(on_host(row)) for name, row in kept.items()}
        self._digest = ""
        self._error: BaseException | None = None
        self._has_ended = False
        # No daemon: a program that ends must not cut off the file.
        self._thread = threading.Thread(target=self._write, name="gpucoll checkpoint", daemon=False)
        self._thread.start()

    def _write(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            content = _packed(self._rows)
            self._digest = hashlib.sha256(content).hexdigest()
            _write_through(self._draft, content)
        except BaseException as error:  # even MemoryError: `wait` reports the error on all ranks
            self._error = error
        self._rows = {}  # free the copies

    def wait(self) -> None:
        """Return once the checkpoint is valid; raise BackendError if this rank cannot write, PeerError on others."""
        # `ZeRO.save` waits for an earlier saving, even if the program has waited before.
        if self._has_ended:
            return
        self._has_ended = True
        self._thread.join()
        comm, error = self._comm, None
        if self._error is not None:
            error = BackendError(f"save: {self._draft}: {self._error!r}", code="GC-FILE")
        # All files are on disk before rank 0 writes the manifest; the ranks return after the manifest is on disk.
        try:
            everyone = internal.all_gather_metadata(comm, {"sha256": self._digest}, "save", error)
        except BaseException:
            with contextlib.suppress(OSError):  # a full disk has no room for a part of a file
                self._draft.unlink(missing_ok=True)
            raise
        error = None
        if comm.rank == 0:
            try:
                self._commit_manifest([one["sha256"] for one in everyone])
            except OSError as reason:
                error = BackendError(f"save: {self._folder / MANIFEST}: {reason}", code="GC-FILE")
                with contextlib.suppress(OSError, ValueError):
                    _tidy(self._folder, _before(self._folder))  # of the new files, unless they are in force
        internal.broadcast_metadata(comm, 0, {}, "save", error)

    def _commit_manifest(self, digests: list[str]) -> None:
        """Write the manifest naming the new files, then remove files of older checkpoints. Only rank 0 does this."""
        files = []
        for rank, digest in enumerate(digests):
            own = {name: owned(one.size, rank, self._comm.size) for name, one in self._like.items()}
            files.append({"name": f"rank-{rank}-{self._token}.npz", "sha256": digest,
                          "elements": {name: [place.start, place.stop] for name, place in own.items()}})
        # An interruption before the end of `_tidy` must not make the next save forget a file.
        replaced = _names(self._before, "files") + [name for name in _names(self._before, "replaced")
                                                    if (self._folder / name).exists()]
        manifest = {"format": SAVE_FORMAT, **self._optimizer, "files": files, "replaced": replaced, "kept": self._kept,
                    "parameters": {name: {"shape": list(one.shape), "dtype": row_of(one.dtype).name}
                                   for name, one in self._like.items()}}
        text = json.dumps(manifest, indent=1)
        whole = f"{text[:-2]},\n {_digest_of(text)}\n}}"
        if lost := [one["name"] for one in files if not (self._folder / f"{one['name']}.new").exists()]:
            raise OSError(f"{lost[0]}.new is gone: is another job saving into this folder?")
        draft = self._folder / f"manifest-{self._token}.json.new"
        _write_through(draft, whole.encode())
        os.replace(draft, self._folder / MANIFEST)
        _sync(self._folder)
        # Only now: until the rename the old files are the valid checkpoint.
        _tidy(self._folder, manifest)


def _before(folder: Path) -> dict[str, Any]:
    """Return the manifest in force, empty for none or a damaged one; raise ValueError if the file is not a manifest."""
    try:
        content = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        return {}
    if not BEGINNING.startswith(content[:len(BEGINNING)]):
        raise ValueError("is not of a checkpoint, and would be overwritten")
    with contextlib.suppress(ValueError, RecursionError):
        return _parsed(content)
    return {}


def _names(manifest: Mapping[str, Any], key: str) -> list[str]:
    """Return the names of files in a part of a manifest; no name of a file that `Saving` never writes."""
    return re.findall(rf'"({SHARD.pattern})"', json.dumps(manifest.get(key)))


def _tidy(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Give the files of the manifest in force their names; remove replaced files and those of interrupted saves.

    A failure is no failure of the save: the checkpoint in force is complete.
    """
    named = {f"{name}.new": name for name in _names(manifest, "files")}
    old = [*{*_names(manifest, "replaced")} - {*named.values()}]
    with contextlib.suppress(OSError):
        old += [name for name in os.listdir(folder) if DRAFT.fullmatch(name)]
    for name in old:
        try:
            if name in named:
                (folder / name).replace(folder / named[name])
            else:
                (folder / name).unlink(missing_ok=True)
        except OSError as error:
            log.warning("save: a file of an older checkpoint is left: %s", error)


def _parsed(content: bytes) -> dict[str, Any]:
    """Return the manifest; raise ValueError if damaged."""
    text, _, last = content.decode().rpartition(",\n ")
    if last != f"{_digest_of(text + chr(10) + '}')}\n}}":
        raise ValueError("damaged: the SHA-256 differs from the content")
    found: dict[str, Any] = json.loads(content)
    return found


def _check_kinds(manifest: Mapping[str, Any]) -> None:
    """Raise ValueError for names and numbers never written by `Saving`, as paths of files in other folders."""
    files, names = manifest["files"], [manifest["optimizer"], *manifest["state"]]
    sides = [one["shape"] for one in (*manifest["parameters"].values(), *manifest["kept"].values())]
    parts = [file["elements"][name] for file in files for name in manifest["parameters"]]
    # `type` and not `isinstance`: true is no number.
    if not all(type(name) is str for name in names) or not len(files) == len({file["name"] for file in files}) \
            or not all(SHARD.fullmatch(file["name"]) for file in files) or any(part != sorted(part) for part in parts) \
            or not all(type(number) is int and 0 <= number < 1 << 63
                       for number in itertools.chain([manifest["steps"]], *sides, *parts)):
        raise ValueError("not in the form of a checkpoint")


def _check_tiles(name: str, size: int, parts: Sequence[list[int]]) -> None:
    """Raise ValueError unless the parts of an array tile its elements: each belongs to one file."""
    filled = [(start, stop) for start, stop in sorted(parts) if start < stop]
    if [0, *(stop for _, stop in filled)] != [*(start for start, _ in filled), size]:
        raise ValueError(f"the files do not have each of the {size} elements of {name} once")


def _digest_of(text: str) -> str:
    """Return the last line of a manifest: the SHA-256 of `text`, the manifest without this line."""
    return f'"sha256": "{hashlib.sha256(text.encode()).hexdigest()}"'


def _packed(rows: Mapping[str, Array]) -> bytes:
    room = io.BytesIO()
    # Raw bytes: NumPy's file format has no bfloat16. `_row` restores the dtype.
    numpy.savez(room, **{name: row.view(f"V{row.itemsize}") for name, row in rows.items()})  # type: ignore[arg-type]
    return room.getvalue()


def _row(rows: Any, name: str, dtype: numpy.dtype[Any], shape: tuple[int, ...]) -> numpy.ndarray[Any, Any]:
    array: numpy.ndarray[Any, Any] = parsing.array_of(rows, name).view(dtype)
    if array.shape != shape:
        raise ValueError(f"{name} has the shape {array.shape}, the manifest {shape}")
    return array


def _write_through(path: Path, content: bytes) -> None:
    """Write a new file, on disk when this returns."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Return when the names of the folder are on disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


class Checkpoint:
    """A checkpoint in a folder visible to all ranks. Opening a checkpoint is a collective call.

    Raises ArgumentError if `folder` is not a path, BackendError, naming the file, if this rank cannot read the file,
    PeerError on other ranks, and MismatchError if ranks see different manifests.
    """

    def __init__(self, folder: str | Path, comm: Communicator) -> None:
        folder = _agreed(comm, "load", folder)
        self._folder, self._comm = folder, comm
        found: dict[str, Any] = {}

        def read() -> None:
            found.update(_parsed((folder / MANIFEST).read_bytes()))
            if found["format"] != SAVE_FORMAT:
                raise ValueError(f"format {found['format']} is not {SAVE_FORMAT}")
            _check_kinds(found)
            self.like = {name: Like(tuple(one["shape"]), numpy_dtype(one["dtype"]), False)
                         for name, one in found["parameters"].items()}
            self.steps, self.optimizer = found["steps"], [found["optimizer"], *found["state"]]
            self._files, self._kept = found["files"], found["kept"]
            for name, one in self.like.items():
                _check_tiles(name, one.size, [file["elements"][name] for file in self._files])
            # Compare with the sizes of the files first: a wrong manifest must not make the reader allocate memory.
            for file in self._files:
                self._reading = file["name"]
                held = sum((stop - start) * self.like[name].dtype.itemsize
                           for name, (start, stop) in file["elements"].items())
                if held > self._path(file["name"]).stat().st_size:
                    raise ValueError("shorter than its elements")

        self._reading = MANIFEST
        self._together(read)
        # Folders may differ between hosts: compare the manifests read by the ranks.
        everyone = internal.all_gather_metadata(comm, {"manifest": found["sha256"]}, "load")
        check_alike("load", everyone, "manifest", "GC-FILE")

    def read(self, states: States) -> None:
        """Read this rank's elements of every parameter and of the optimizer's state into `states`. Collective."""
        def read() -> None:
            for file in self._files:
                wanted = {name: self._overlap(name, file["elements"][name]) for name in states}
                wanted = {name: here for name, here in wanted.items() if here.start < here.stop}
                if wanted:
                    self._read_file(file, states, wanted)

        self._together(read)

    def _overlap(self, name: str, elements: tuple[int, int]) -> slice:
        """Return the elements owned by this rank and stored in a file with `elements` (start, stop)."""
        mine = owned(self.like[name].size, self._comm.rank, self._comm.size)
        return slice(max(mine.start, elements[0]), min(mine.stop, elements[1]))

    def _path(self, name: str) -> Path:
        """Return the place of a file: an interrupted save leaves the ending of a name."""
        draft = self._folder / f"{name}.new"
        return draft if draft.exists() else self._folder / name

    def _opened(self, file: Mapping[str, Any]) -> Any:
        self._reading = file["name"]
        # Read the file once: the arrays must be parsed from the same bytes as checked by the digest.
        content = self._path(file["name"]).read_bytes()
        if hashlib.sha256(content).hexdigest() != file["sha256"]:
            raise ValueError("damaged: the SHA-256 differs from the manifest")
        return parsing.arrays_of(content)

    def _read_file(self, file: Mapping[str, Any], states: States, wanted: Mapping[str, slice]) -> None:
        with self._opened(file) as rows:
            for name, here in wanted.items():
                mine = owned(self.like[name].size, self._comm.rank, self._comm.size)
                first, end = file["elements"][name]
                for kind, row in states[name].items():
                    there = _row(rows, f"{kind}/{name}", row.dtype, (end - first,))
                    to_array(row[here.start - mine.start:here.stop - mine.start],
                             there[here.start - first:here.stop - first])

    def read_kept(self) -> dict[str, Array]:
        """Return the arrays private to each rank: this rank's own, or the means over all files.

        The means are returned if the number of ranks differs from the number at saving. A collective call.
        """
        found: dict[str, Array] = {}

        def read() -> None:
            # A mean over ranks sees only the average of private arrays, so a mean on every rank loses nothing.
            same = len(self._files) == self._comm.size
            for file in [self._files[self._comm.rank]] if same else self._files:
                with self._opened(file) as rows:
                    for name, one in self._kept.items():
                        row = _row(rows, name, numpy_dtype(one["dtype"]), tuple(one["shape"]))
                        found[name] = found[name] + row if name in found else row
            for name, row in found.items() if not same else ():
                found[name] = row / row.dtype.type(len(self._files))

        if self._kept:
            self._together(read)
        return found

    def _together(self, action: Callable[[], None]) -> None:
        """Run `action` on all ranks; if `action` fails on a rank, raise BackendError there and PeerError elsewhere."""
        error: BackendError | None = None
        try:
            action()
        except Exception as reason:  # damaged files make their readers raise errors without a common base class
            error = BackendError(f"load: {self._folder / self._reading}: {reason!r}", code="GC-FILE")
        internal.all_gather_metadata(self._comm, {}, "load", error)
