"""The wire without MPI: messages of processes, or of threads, as files in a folder, as far as `_wire` needs MPI."""

import atexit
import collections
import contextlib
import functools
import os
import pickle
import tempfile
import time
import types
from pathlib import Path

from gpucoll.errors import UsageError


@functools.cache
def folder_of(name):
    """Return EMULATED_FOLDER, or a folder of this user for a communicator's name, removed by the last process."""
    if "EMULATED_FOLDER" in os.environ:
        return Path(os.environ["EMULATED_FOLDER"])
    folder = Path(tempfile.gettempdir(), f"gpucoll-emulation-{name}")
    folder.mkdir(0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise UsageError(f"{folder} belongs to another user", code="GC-EMULATION")
    atexit.register(_leave, folder)
    return folder


def _leave(folder):
    with contextlib.suppress(OSError):  # other ranks have messages there
        folder.rmdir()


class FileComm:
    """A communicator; `name` is its own among all communicators of the folder."""

    def __init__(self, name, rank, size, folder):
        self.rank, self.size, self._name, self._folder = rank, size, name, folder
        self._numbers = collections.Counter()  # messages so far, by way, other rank and tag; and the splits

    def _next(self, sends, peer, tag):
        """Return the place of the next message."""
        number = self._numbers[sends, peer, tag]
        self._numbers[sends, peer, tag] += 1
        return self._place(sends, peer, tag, number)

    def _place(self, sends, peer, tag, number):
        way = (self.rank, peer) if sends else (peer, self.rank)
        return Path(self._folder, f"{self._name} {way[0]} to {way[1]}, {tag}, {number}")

    def Isend(self, buffer, peer, tag=0):
        _write(self._next(True, peer, tag), bytes(buffer[0]))
        return ENDED

    def Irecv(self, buffer, peer, tag=0):
        return _Receive(self._next(False, peer, tag), buffer[0])

    def isend(self, value, peer, tag=0):
        _write(self._next(True, peer, tag), pickle.dumps(value))
        return ENDED

    def iprobe(self, source, tag):
        return self._place(False, source, tag, self._numbers[False, source, tag]).exists()

    def recv(self, source, tag):
        return pickle.loads(_read(self._next(False, source, tag)))

    def Split(self, color, key):
        self._numbers["splits"] += 1
        name = f"{self._name}, part {self._numbers['splits']}"
        everyone = met(name, self.rank, self.size, (color, key, self.rank), self._folder)
        mine = sorted(one[1:] for one in everyone if one[0] == color)
        return None if color is None else FileComm(f"{name}.{color}", mine.index((key, self.rank)), len(mine),
                                                  self._folder)

    def Free(self):
        return


ENDED = types.SimpleNamespace(Test=lambda: True, test=lambda: (True, None))  # a request


class _Receive:
    def __init__(self, place, room):
        self._place, self._room = place, room

    def Test(self):
        if self._place is not None and self._place.exists():
            self._room[:] = memoryview(_read(self._place))
            self._place = None
        return self._place is None


def _write(place, data):
    unfinished = place.with_name(f"{place.name}.tmp")
    while True:
        try:
            unfinished.write_bytes(data)
            break
        except FileNotFoundError:  # a rank that has ended has removed the folder
            place.parent.mkdir(0o700, exist_ok=True)
    unfinished.rename(place)


def _read(place):
    data = place.read_bytes()
    place.unlink()
    return data


def met(name, rank, size, value, folder):
    """Return the values of all ranks, in rank order."""
    places = [Path(folder, f"{name}, meeting {one}") for one in range(size)]
    _write(places[rank], pickle.dumps(value))
    while not all(place.exists() for place in places):
        time.sleep(1e-3)
    found = [pickle.loads(place.read_bytes()) for place in places]
    # The last rank to have read everything removes the files of the meeting.
    _write(places[rank].with_name(f"{places[rank].name}, read"), b"")
    done = [place.with_name(f"{place.name}, read") for place in places]
    if all(place.exists() for place in done):
        for place in [*places, *done]:
            place.unlink(missing_ok=True)
    return found
