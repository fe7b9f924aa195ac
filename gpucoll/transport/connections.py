"""Connections of ranks to rank 0 by sockets: frames, and the greeting by which both ends know each other.

A frame is two lengths, a JSON object and bytes; nothing is ever unpickled. A port may be reached by strangers, so that
an end believes nothing before the other end has proved that it knows the job's token. Each end has a nonce of its own
in both proofs: a recorded greeting is worth nothing. Whatever a stranger sends ends its own connection, no more. Frames
are neither encrypted nor signed: a network that changes packets under way is not guarded against.

The standard library's authenticated connections, `multiprocessing.connection`, do not serve. `Listener.accept` makes
its challenge in the accepting thread and without a deadline, so that one silent stranger keeps all ranks out; a message
that came in part blocks its reader; and its proofs, by MD5 in Python 3.11, do not name the rank that they speak for.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import re
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, TypeGuard

from gpucoll.errors import BackendError
from gpucoll.version import __version__

LENGTHS = struct.Struct("!II")  # of the JSON and of the bytes that follow
MOST_JSON, MOST_BYTES = 1 << 16, 1 << 31  # a longer frame is none of ours
GREETING = 10.0  # seconds that a greeting may take, from its first byte to its last
STRANGERS = 32  # connections that may greet at a time, beside one for each rank
GRACE = 0.25  # seconds that a connection has to greet although others wait for its place
NAP = 1e-2

Frame = tuple[dict[str, Any], bytes]
log = logging.getLogger("gpucoll")


class StoreError(BackendError):
    """The store does not answer, or its other end sends anything but the store's protocol."""

    default_code = "GC-STORE"


class Connection:
    """A socket, frame by frame; a frame that came in part is completed later."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._came = bytearray()
        self._sending = threading.Lock()

    def send(self, head: dict[str, Any], body: bytes = b"") -> None:
        """Send a JSON object and bytes; any thread may."""
        text = json.dumps(head).encode()
        with self._sending:
            self.socket.sendall(LENGTHS.pack(len(text), len(body)) + text)
            if body:
                self.socket.sendall(body)

    def read(self, most: int = MOST_BYTES, deadline: float | None = None) -> Frame:
        """Return the next frame, of at most `most` bytes beside its JSON.

        `deadline`, by the monotonic clock, is that of the whole frame: a sender of single bytes does not extend it.
        Raises EOFError at the end, TimeoutError at the deadline, StoreError where the bytes are no frame.
        """
        self._fill(LENGTHS.size, deadline)
        length, count = LENGTHS.unpack_from(self._came)
        if length > MOST_JSON or count > most:
            raise StoreError(f"what came is no frame of gpucoll's store: it would be {length} and {count} bytes long")
        self._fill(LENGTHS.size + length + count, deadline)
        text = bytes(self._came[LENGTHS.size:LENGTHS.size + length])
        body = bytes(self._came[LENGTHS.size + length:LENGTHS.size + length + count])
        del self._came[:LENGTHS.size + length + count]
        try:
            head = json.loads(text)
        except (ValueError, RecursionError):
            head = None
        if not isinstance(head, dict):
            raise StoreError(f"what came is no frame of gpucoll's store: {text[:40]!r} is no JSON object")
        return head, body

    def _fill(self, count: int, deadline: float | None) -> None:
        while len(self._came) < count:
            if deadline is not None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                self.socket.settimeout(left)
            part = self.socket.recv(min(1 << 20, count - len(self._came)))
            if not part:
                raise EOFError
            self._came += part

    def hang_up(self) -> None:
        """End the connection and wake the thread that reads it, which closes the socket."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def is_own_users(self) -> bool:
        """Return whether the kernel has a process of this user at the other end; of TCP it does not know."""
        if self.socket.family != socket.AF_UNIX:
            return True
        _, user, _ = struct.unpack("3i", self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return int(user) == os.geteuid()

    def join(self, rank: int, size: int, token: str, timeout: float) -> dict[str, Any]:
        """Greet rank 0 and return its welcome; StoreError where either end does not believe the other."""
        deadline = time.monotonic() + timeout
        if not self.is_own_users():
            raise StoreError("init: another user's process has taken the place where the ranks of this job meet")
        asked = self.read(0, deadline)[0].get("nonce")
        if not _is_nonce(asked):
            raise StoreError("init: what answers in the place of rank 0 is no rank 0 of gpucoll's: it sends no nonce")
        nonces = asked, secrets.token_hex(16)
        self.send({"rank": rank, "size": size, "version": __version__, "nonce": nonces[1],
                   "proof": proof(token, "rank", rank, nonces)})
        welcome = self.read(0, deadline)[0]
        if "error" in welcome:
            raise refused(welcome)
        if not _same(welcome.get("proof"), proof(token, "hub", rank, nonces)):
            raise StoreError("init: what answers in the place of rank 0 does not know the token of this job")
        return welcome


def refused(answer: dict[str, Any]) -> StoreError:
    """Return the error for an answer that is one; the text may be a stranger's, and is shown without its controls."""
    why = answer.get("error")
    text = why[:500] if isinstance(why, str) else "it does not say why"
    return StoreError("init: rank 0 refused this process: " + "".join(c if c.isprintable() else "?" for c in text))


def proof(token: str, end: str, rank: int, nonces: tuple[str, str]) -> str:
    """Return the proof that an end of a connection knows the token.

    `end` is "rank" or "hub", so that neither end's proof serves as the other's. `nonces` are the hub's and the rank's.
    """
    return hmac.new(token.encode(), f"{end} {rank} {' '.join(nonces)}".encode(), "sha256").hexdigest()


def _is_nonce(given: object) -> TypeGuard[str]:
    return isinstance(given, str) and re.fullmatch("[0-9a-f]{32}", given) is not None


def _same(given: object, right: str) -> bool:
    return isinstance(given, str) and hmac.compare_digest(given.encode(errors="replace"), right.encode())


class Hub:
    """Rank 0's end of all connections; each has a thread. `gone` are the ranks whose connections broke off.

    `hear` is told what a rank says, in frames with at most `most` bytes, and returns the answer, or None. `lost` is
    called when a rank is gone.
    """

    def __init__(self, size: int, token: str, hear: Callable[[int, Frame], Frame | None],
                 lost: Callable[[], None] = lambda: None, most: int = 0) -> None:
        self.gone: set[int] = set()
        self._size, self.token = size, token
        self._hear, self._lost, self._most = hear, lost, most
        self._here: dict[int, Connection] = {}
        self._unproved: dict[Connection, float] = {}  # connections that greet, and since when; the oldest first
        self._changed = threading.Condition()
        self._listener: socket.socket | None = None
        self._accepts = threading.Thread()

    def serve(self, listener: socket.socket) -> None:
        """Let ranks in by a listener, until `shut`: from now on other threads may call `hear` and `lost`."""
        listener.listen(self._size + STRANGERS)
        self._listener = listener
        self._accepts = threading.Thread(target=self._accept, args=[listener], name="gpucoll hub", daemon=True)
        self._accepts.start()

    def _accept(self, listener: socket.socket) -> None:
        while self._listener is listener:
            try:
                connected, _ = listener.accept()
                self._admit(Connection(connected))
            except OSError:  # shut; or no descriptor is free, which passes
                time.sleep(NAP)

    def _admit(self, connection: Connection) -> None:
        with self._changed:
            is_let_in = connection.is_own_users() and self._makes_room()
            if is_let_in:
                self._unproved[connection] = time.monotonic()
        if is_let_in:
            with contextlib.suppress(RuntimeError):  # no thread is to be had, which passes
                threading.Thread(target=self._serve, args=[connection], name="gpucoll hub", daemon=True).start()
                return
        self._forget(connection)

    def _makes_room(self) -> bool:
        """Wait until fewer connections greet than may; return False where the hub is shut meanwhile.

        The oldest has to go once it has had its grace. So silent strangers keep no rank out, and a flood of them does
        not drive out a rank that greets.
        """
        while len(self._unproved) >= self._size + STRANGERS and self._listener is not None:
            oldest, since = next(iter(self._unproved.items()))
            patience = since + GRACE - time.monotonic()
            if patience <= 0:
                oldest.hang_up()  # its thread forgets it
            self._changed.wait(max(patience, NAP))
        return self._listener is not None

    def _forget(self, connection: Connection, rank: int = 0) -> bool:
        """Close a connection; return whether it was that rank's."""
        with self._changed:
            self._unproved.pop(connection, None)
            was_here = self._here.get(rank) is connection
            if was_here:
                del self._here[rank]
            self._changed.notify_all()
        connection.socket.close()
        return was_here

    def _serve(self, connection: Connection) -> None:
        """Hear one process until it leaves; a stranger is told why, and sent away."""
        rank, said_bye = 0, False
        try:
            rank = self._greet(connection)
            while not said_bye:
                frame = connection.read(self._most)
                said_bye = "bye" in frame[0]
                answer = None if said_bye else self._hear(rank, frame)
                if answer is not None:
                    connection.send(*answer)
        except (OSError, EOFError):
            pass
        except StoreError as error:
            with contextlib.suppress(OSError):
                connection.send({"error": error.args[0]})
        except Exception as error:  # which would end all ranks: `bootstrap.end_together` sees what threads raise
            log.error("rank 0 has closed a connection, of rank %s, after an error: %a", rank or "unknown", error)
        self._leaves(connection, rank, said_bye)

    def _leaves(self, connection: Connection, rank: int, said_bye: bool) -> None:
        with self._changed:
            is_lost = self._here.get(rank) is connection and not said_bye
            self.gone.update([rank] if is_lost else [])
            self._forget(connection, rank)
        if is_lost:
            self._lost()

    def _greet(self, connection: Connection) -> int:
        """Return the rank that has connected; raise StoreError for a stranger.

        Types and ranges come first: nothing is made of a stranger's values but the answer whether they are right.
        """
        deadline = time.monotonic() + GREETING
        connection.socket.settimeout(GREETING)
        nonce = secrets.token_hex(16)
        connection.send({"nonce": nonce})
        head, _ = connection.read(0, deadline)
        rank, size, answered = head.get("rank"), head.get("size"), head.get("nonce")
        unfit = StoreError(f"its rank is not in 1..{self._size - 1}, or is there already; RANK must be another one in "
                           "each process, and WORLD_SIZE how many there are")
        if type(rank) is not int or not 0 < rank < self._size:
            raise unfit
        if not _is_nonce(answered):
            raise StoreError("its greeting is none of this version of gpucoll: it has no nonce; start all ranks alike")
        nonces = nonce, answered
        if not _same(head.get("proof"), proof(self.token, "rank", rank, nonces)):
            raise StoreError("this process does not belong to the job: it has another token")
        if head.get("version") != __version__ or size != self._size:
            raise StoreError(f"rank {rank} says that there are {size} ranks of gpucoll {head.get('version')}, rank 0 "
                             f"that there are {self._size} of {__version__}; start all ranks alike")
        with self._changed:
            if rank in self._here:
                raise unfit
            connection.send({"proof": proof(self.token, "hub", rank, nonces), "gone": sorted(self.gone)})
            connection.socket.settimeout(None)
            del self._unproved[connection]
            self._here[rank] = connection
            self._changed.notify_all()
        return rank

    def tell(self, head: dict[str, Any], *, last: bool = False) -> None:
        """Send all ranks that are there a frame, with `last` the last one: what breaks off after it is no death."""
        with self._changed:
            for connection in self._here.values():
                with contextlib.suppress(OSError):
                    connection.send(head)
                if last:
                    connection.hang_up()
            if last:
                self._here.clear()

    def shut(self) -> None:
        """Let nobody in any more, and send strangers away; the ranks that are there stay."""
        with self._changed:
            listener, self._listener = self._listener, None
            for connection in self._unproved:
                connection.hang_up()
            self._changed.notify_all()
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # which wakes the thread that accepts
            self._accepts.join()
            listener.close()

    def close(self, patience: float = 0.0) -> None:
        """End, once all ranks that are there have left, or after `patience` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._here, patience)
            for connection in self._here.values():
                connection.hang_up()
            self._here.clear()
        self.shut()

    def drop(self) -> None:
        """Close what this process has open, and end nothing: in a fork's child the connections are its parent's."""
        for held in (self._listener, *(connection.socket for connection in [*self._here.values(), *self._unproved])):
            if held is not None:
                held.close()
