"""Checkpoints of training that is divided over ranks: a file for each rank, and a manifest that makes them count.

A folder holds `manifest.json` and the files that it names, with their SHA-256. Files are written under new names; then
the manifest is replaced, in one step of the file system, and the old files go. Whoever is interrupted leaves the old
checkpoint or the new one, whole. The manifest says which elements each file has, so that any number of ranks can read
them. Its format is 1:

    {"format": 1, "steps": 7, "optimizer": "Adam", "state": ["mean", "square"],
     "parameters": {"w": {"shape": [300, 40], "dtype": "float64"}, ...},
     "files": [{"name": "rank-0-8f3a.npz", "sha256": "...", "elements": {"w": [0, 1500], ...}}, ...],
     "kept": {"lost/w": {"shape": [300, 40], "dtype": "float64"}, ...},
     "sha256": "..."}

The last line has the SHA-256 of what would be the manifest without it. `kept` are arrays of which every rank has one of
its own: what a compression has lost.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy

from gpucoll.arrays import Array
from gpucoll.communicator import Communicator, internal
from gpucoll.communicator.metadata import check_alike
from gpucoll.core import parsing
from gpucoll.core.dtypes import numpy_dtype, row_of
from gpucoll.errors import ArgumentError, BackendError
from gpucoll.training.optimizers import Optimizer
from gpucoll.training.parameters import Like, Parameters, on_host, to_array
from gpucoll.training.shards import owned

FORMAT = 1
MANIFEST = "manifest.json"
PARAMETER = "parameter"  # beside the names of an optimizer's state

States = Mapping[str, Parameters]  # of each parameter: its shard, and the shards of the optimizer's state


def _agreed(comm: Communicator, call: str, folder: Any) -> Path:
    """Return the folder as a path; raise ArgumentError for what is none, PeerError on the others. Collective."""
    error = None
    try:
        path = Path(folder)
    except TypeError:
        path, error = Path(), ArgumentError(f"{call}: folder {folder!r} is no path", code="GC-CHECKPOINT")
    internal.all_gather_metadata(comm, {} if error is None else {"error": str(error)}, call, error)
    return path


class Saving:
    """A checkpoint that is being written, of a copy of `states`. `wait` is a collective call."""

    def __init__(self, folder: str | Path, comm: Communicator, like: Mapping[str, Like], states: States,
                 optimizer: Optimizer, kept: Mapping[str, Array]) -> None:
        self._folder, self._comm, self._like = _agreed(comm, "save", folder), comm, like
        self._optimizer = {"steps": optimizer.steps, "optimizer": type(optimizer).__name__,
                           "state": list(optimizer.state_names)}
        told = internal.broadcast_metadata(comm, 0, {"token": os.urandom(6).hex()}, "save")
        self._token = told["token"]
        self._name = f"rank-{comm.rank}-{self._token}.npz"
        self._rows = {f"{kind}/{name}": numpy.array(on_host(row)) for name, state in states.items()
                      for kind, row in state.items()}
        self._kept = {name: {"shape": list(row.shape), "dtype": row_of(row.dtype).name} for name, row in kept.items()}
        self._rows |= {name: numpy.array(on_host(row)) for name, row in kept.items()}
        self._digest = ""
        self._error: BaseException | None = None
        self._has_ended = False
        self._thread = threading.Thread(target=self._write, name="gpucoll checkpoint", daemon=False)
        self._thread.start()

    def _write(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            content = _packed(self._rows)
            self._digest = hashlib.sha256(content).hexdigest()
            _write_through(self._folder / self._name, content)
        except BaseException as error:  # as for want of memory: whatever it is, there is no file
            self._error = error
        self._rows = {}

    def wait(self) -> None:
        """Return once the checkpoint counts; raise BackendError where this rank cannot write, PeerError elsewhere."""
        if self._has_ended:
            return
        self._has_ended = True
        self._thread.join()
        comm, error = self._comm, None
        if self._error is not None:
            error = BackendError(f"save: {self._folder / self._name}: {self._error!r}", code="GC-CHECKPOINT")
        metadata = {"sha256": self._digest} if error is None else {"error": str(error)}
        digests = [one["sha256"] for one in internal.all_gather_metadata(comm, metadata, "save", error)]
        error = None
        if comm.rank == 0:
            try:
                self._count(digests)
            except OSError as reason:
                error = BackendError(f"save: {self._folder / MANIFEST}: {reason}", code="GC-CHECKPOINT")
        internal.broadcast_metadata(comm, 0, {} if error is None else {"error": str(error)}, "save", error)

    def _count(self, digests: list[str]) -> None:
        """Let the new files be the checkpoint, and remove those of others."""
        files = []
        for rank, digest in enumerate(digests):
            own = {name: owned(one.size, rank, self._comm.size) for name, one in self._like.items()}
            files.append({"name": f"rank-{rank}-{self._token}.npz", "sha256": digest,
                          "elements": {name: [place.start, place.stop] for name, place in own.items()}})
        manifest = {"format": FORMAT, **self._optimizer, "files": files, "kept": self._kept,
                    "parameters": {name: {"shape": list(one.shape), "dtype": row_of(one.dtype).name}
                                   for name, one in self._like.items()}}
        text = json.dumps(manifest, indent=1)
        whole = f"{text[:-2]},\n {_digest_of(text)}\n}}"
        _write_through(self._folder / MANIFEST, whole.encode())
        kept = {one["name"] for one in files}
        for old in self._folder.glob("rank-*"):
            if old.name not in kept:
                old.unlink(missing_ok=True)


def _check_kinds(manifest: Mapping[str, Any]) -> None:
    """Raise ValueError where a manifest holds what no `Saving` writes, as names of files elsewhere."""
    names = [manifest["optimizer"], *manifest["state"], *(file["name"] for file in manifest["files"])]
    numbers = [manifest["steps"], *(side for one in manifest["parameters"].values() for side in one["shape"])]
    if not all(isinstance(name, str) and Path(name).name == name for name in names) \
            or not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise ValueError("it is not of a checkpoint's form")


def _digest_of(text: str) -> str:
    """Return the last line of a manifest: the SHA-256 of all before it."""
    return f'"sha256": "{hashlib.sha256(text.encode()).hexdigest()}"'


def _packed(rows: Mapping[str, Array]) -> bytes:
    room = io.BytesIO()
    numpy.savez(room, **{name: row.view(f"V{row.itemsize}") for name, row in rows.items()})  # type: ignore[arg-type]
    return room.getvalue()


def _row(rows: Any, name: str, dtype: numpy.dtype[Any]) -> numpy.ndarray[Any, Any]:
    array: numpy.ndarray[Any, Any] = parsing.array_of(rows, name)
    return array.view(dtype)


def _write_through(path: Path, content: bytes) -> None:
    """Write a file that is there under its name only when it is on disk."""
    new = path.with_name(f"{path.name}.new")
    with open(new, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class Checkpoint:
    """A checkpoint in a folder that all ranks see. Opening one is a collective call.

    Raises ArgumentError for what is no folder, BackendError, naming the file, where this rank cannot read it, PeerError
    on the others.
    """

    def __init__(self, folder: str | Path, comm: Communicator) -> None:
        folder = _agreed(comm, "load", folder)
        self._folder, self._comm = folder, comm
        found: dict[str, Any] = {}

        def read() -> None:
            content = (folder / MANIFEST).read_text()
            text, _, last = content.rpartition(",\n ")
            if last != f"{_digest_of(text + chr(10) + '}')}\n}}":
                raise ValueError("it is damaged: its SHA-256 is not that of its content")
            found.update(json.loads(content))
            if found["format"] != FORMAT:
                raise ValueError(f"format {found['format']} is not {FORMAT}")
            _check_kinds(found)
            self.like = {name: Like(tuple(one["shape"]), numpy_dtype(one["dtype"]), False)
                         for name, one in found["parameters"].items()}
            self.steps, self.optimizer = found["steps"], (found["optimizer"], *found["state"])
            self._files, self._kept = found["files"], found["kept"]
            missing = sum(one.size * one.dtype.itemsize for one in self.like.values())
            for file in self._files:  # before anything is allocated
                self._reading = file["name"]
                held = sum((stop - start) * self.like[name].dtype.itemsize
                           for name, (start, stop) in file["elements"].items())
                if held > (folder / file["name"]).stat().st_size:
                    raise ValueError("it is shorter than its elements")
                missing -= held
            self._reading = MANIFEST
            if missing > 0:
                raise ValueError("its files hold fewer elements than its parameters have")

        self._reading = MANIFEST
        self._together(read)
        everyone = internal.all_gather_metadata(comm, {"manifest": found["sha256"]}, "load")
        check_alike("load", everyone, "manifest", "GC-CHECKPOINT")

    def read(self, states: States) -> None:
        """Write this rank's elements of every parameter and of the optimizer's state into `states`. Collective."""
        def read() -> None:
            for file in self._files:
                wanted = {name: self._overlap(name, file["elements"][name]) for name in states}
                wanted = {name: here for name, here in wanted.items() if here.start < here.stop}
                if wanted:
                    self._read_file(file, states, wanted)

        self._together(read)

    def _overlap(self, name: str, elements: tuple[int, int]) -> slice:
        """Return which of this rank's elements lie in a file that has `elements`."""
        mine = owned(self.like[name].size, self._comm.rank, self._comm.size)
        return slice(max(mine.start, elements[0]), min(mine.stop, elements[1]))

    def _opened(self, file: Mapping[str, Any]) -> Any:
        self._reading = file["name"]
        content = (self._folder / file["name"]).read_bytes()
        if hashlib.sha256(content).hexdigest() != file["sha256"]:
            raise ValueError("it is damaged: its SHA-256 is not the manifest's")
        return parsing.arrays_of(content)

    def _read_file(self, file: Mapping[str, Any], states: States, wanted: Mapping[str, slice]) -> None:
        with self._opened(file) as rows:
            for name, here in wanted.items():
                mine = owned(self.like[name].size, self._comm.rank, self._comm.size)
                first = file["elements"][name][0]
                for kind, row in states[name].items():
                    there = _row(rows, f"{kind}/{name}", row.dtype)[here.start - first:here.stop - first]
                    to_array(row[here.start - mine.start:here.stop - mine.start], there)

    def read_kept(self) -> dict[str, Array]:
        """Return what every rank had of its own: this rank's, or the means of all where there were not as many.

        A collective call.
        """
        found: dict[str, Array] = {}

        def read() -> None:
            same = len(self._files) == self._comm.size
            for file in [self._files[self._comm.rank]] if same else self._files:
                with self._opened(file) as rows:
                    for name, one in self._kept.items():
                        row = _row(rows, name, numpy_dtype(one["dtype"]))
                        found[name] = found[name] + row if name in found else row
            for name, row in found.items() if not same else ():
                found[name] = row / row.dtype.type(len(self._files))

        if self._kept:
            self._together(read)
        return found

    def _together(self, action: Callable[[], None]) -> None:
        """Do what may fail on some ranks; raise its error on all."""
        error: BackendError | None = None
        try:
            action()
        except Exception as reason:  # what damaged files make their readers raise has no common name
            error = BackendError(f"load: {self._folder / self._reading}: {reason!r}", code="GC-CHECKPOINT")
        internal.all_gather_metadata(self._comm, {} if error is None else {"error": str(error)}, "load", error)
