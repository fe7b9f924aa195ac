"""Socket connections: frames, the greeting that authenticates both ends, and the ports where processes are let in.

A frame consists of two lengths, a JSON object and bytes; nothing is ever unpickled. A `Hub` lets processes in at a
port, each to a store (`kvstore.StoreServer`). Strangers may reach a port, so each end trusts nothing before the other
end has proved to know the store's token. Both proofs contain a nonce of each end, so a recorded greeting cannot be
replayed; the token itself is never sent. Bad input from a stranger ends only the stranger's connection. Frames are
neither encrypted nor signed: packets changed by the network are not detected.

The standard library's authenticated connections (`multiprocessing.connection`) are unsuitable. `Listener.accept`
challenges in the accepting thread without a deadline, so a silent stranger keeps all ranks out. A partial message
blocks the reader. The proofs, by MD5 in Python 3.11, do not name the rank.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import re
import secrets
import select
import socket
import struct
import threading
import time
from collections import ChainMap
from collections.abc import Mapping
from typing import Any, TypeGuard

from gpucoll.errors import BackendError
from gpucoll.transport.process import PROCESS
from gpucoll.version import __version__

LENGTHS = struct.Struct("!II")  # the lengths of the JSON and of the bytes, in network order
MOST_JSON, MOST_FRAME = 1 << 16, 1 << 31  # reject longer frames before reading: the lengths may be a stranger's
GREETING = 10.0  # seconds for a whole greeting: long for a busy host, bounded so that strangers go away
# Greetings of strangers in progress at a time: each holds a thread and a file descriptor.
STRANGERS = 32
GREETING_TIME = 0.25  # seconds guaranteed to a greeting, even if other connections wait for a place
RETRY_INTERVAL = 1e-2  # seconds between two tries of something that failed for the moment

Address = tuple[str, int]  # a host's name or number, and a TCP port
Frame = tuple[dict[str, Any], bytes]
Name = int | str  # of a process in a store: a rank, or an applicant's name
log: logging.Logger = logging.getLogger("gpucoll")
CHANGED: threading.Condition = PROCESS.changed


class StoreError(BackendError):
    """The store does not answer, or its other end sends anything but the store's protocol."""

    default_code = "GC-STORE"


class Connection:
    """A socket that carries frames; a frame read in part is kept, and completed by a later read."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        if connected.family != socket.AF_UNIX:
            # Frames are sent in two parts: without this option the second waits for the other end's acknowledgement.
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._came = bytearray()  # bytes received of the next frame
        self._sending = threading.Lock()  # frames of several threads must not interleave
        self.group: Any = None  # at a hub: the store that the process at the other end belongs to, and its name there
        self.name: Name = 0
        PROCESS.sockets.add(connected)

    def send(self, head: dict[str, Any], body: bytes = b"", patience: float = -1.0) -> None:
        """Send a frame, a JSON object and bytes; any thread may call this.

        With `patience`, send nothing if another thread's frame does not leave in so many seconds.
        """
        text = json.dumps(head).encode()
        if self._sending.acquire(timeout=patience):
            try:
                # Head and JSON in one segment; the body apart, because joining would copy it.
                self.socket.sendall(LENGTHS.pack(len(text), len(body)) + text)
                if body:
                    self.socket.sendall(body)
            finally:
                self._sending.release()

    def read(self, most: int = MOST_FRAME, deadline: float | None = None) -> Frame:
        """Return the next frame, of at most `most` bytes after the JSON.

        `deadline`, by the monotonic clock, holds for the whole frame: sending single bytes does not extend the time.
        Raises EOFError at the end, TimeoutError at the deadline, StoreError for bytes that are no frame.
        """
        self._fill(LENGTHS.size, deadline)
        length, count = LENGTHS.unpack_from(self._came)
        if length > MOST_JSON or count > most:
            raise StoreError(f"the data received is not a frame of gpucoll's store: lengths {length} and {count}")
        self._fill(LENGTHS.size + length + count, deadline)
        text = bytes(self._came[LENGTHS.size:LENGTHS.size + length])
        body = bytes(self._came[LENGTHS.size + length:LENGTHS.size + length + count])
        del self._came[:LENGTHS.size + length + count]
        try:
            head = json.loads(text)
        except (ValueError, RecursionError):
            head = None
        if not isinstance(head, dict):
            raise StoreError(f"the data received is not a frame of gpucoll's store: {text[:40]!r} is not a JSON object")
        return head, body

    def answer(self, deadline: float | None = None) -> Frame:
        """Return the next frame as `read` does; StoreError if the other end tells of an error."""
        frame = self.read(MOST_FRAME, deadline)
        if "error" in frame[0]:
            raise refused(frame[0])
        return frame

    def _fill(self, count: int, deadline: float | None) -> None:
        # Receive only the bytes of this frame, in parts of 1 MiB: a stranger's length must not allocate memory at once.
        while len(self._came) < count:
            if deadline is not None:
                left = deadline - time.monotonic()
                if left <= 0:  # a timeout of 0 would mean a non-blocking socket
                    raise TimeoutError
                self.socket.settimeout(left)
            part = self.socket.recv(min(1 << 20, count - len(self._came)))
            if not part:
                raise EOFError
            self._came += part

    def hang_up(self) -> None:
        """Shut the connection down and wake the reading thread; that thread closes the socket."""
        # `shutdown` and not `close`: closing here would not wake the reader, and would free a descriptor in use.
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def is_own_users(self) -> bool:
        """Return whether the other end belongs to this user, as the kernel knows for Unix sockets; True for TCP."""
        return self.socket.family != socket.AF_UNIX or belongs_to_user(self.socket)

    def join(self, name: Name, size: int, token: str, timeout: float, group: str = "") -> dict[str, Any]:
        """Greet a hub and return the welcome frame; StoreError if either end rejects the other."""
        # The hub sends a nonce; this process answers with a nonce and a proof; the hub answers with a proof.
        deadline = time.monotonic() + timeout
        with contextlib.ExitStack() as undo:
            # Of no use after an error: the hub knows this process already, or never will.
            undo.enter_context(self.socket)
            if not self.is_own_users():
                raise StoreError("init: another user's process has taken the address of this job's store")
            asked = self.read(0, deadline)[0].get("nonce")
            if not _is_nonce(asked):
                raise StoreError("init: the process at the address of rank 0 is not gpucoll's rank 0: no nonce came")
            nonces = asked, secrets.token_hex(16)
            self.send({"group": group, "name": name, "size": size, "version": __version__, "nonce": nonces[1],
                       "proof": proof(token, "rank", name, nonces)})
            welcome = self.answer(deadline)[0]
            # The hub proves itself, too: a stranger may have taken the port of an ended process.
            if not _same(welcome.get("proof"), proof(token, "hub", name, nonces)):
                raise StoreError("init: the process at the address of rank 0 does not know the token of this job")
            undo.pop_all()
        return welcome


def connect(place: str | Address, patience: float) -> Connection:
    """Return a connection to a host's port, or to an abstract name of this host; OSError if nobody listens there."""
    with contextlib.ExitStack() as undo:
        if isinstance(place, str):
            connected = undo.enter_context(socket.socket(socket.AF_UNIX))
            connected.settimeout(patience)  # `connect` would block for ever if the listener's queue stays full
            connected.connect(place)
        else:
            connected = undo.enter_context(socket.create_connection(place, patience))
            # The system may have chosen an ended process' port for this end: the socket is connected to itself.
            if connected.getsockname() == connected.getpeername():
                raise ConnectionRefusedError(f"no process listens at {place[0]}:{place[1]}")
        undo.pop_all()
    return Connection(connected)


def is_readable(source: Any) -> bool:
    """Return whether a socket or a file descriptor can be read at once."""
    poll = select.poll()  # `select.select` takes no descriptors from 1024 on
    poll.register(source, select.POLLIN)
    return bool(poll.poll(0))


def belongs_to_user(connected: socket.socket) -> bool:
    """Return whether the other end of a Unix socket belongs to this user, as the kernel reports."""
    # The credentials are three integers: process, user, group.
    _, user, _ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(user) == os.geteuid()


def refused(answer: dict[str, Any]) -> StoreError:
    """Return the exception for an error frame, without control characters: the text may come from a stranger."""
    why = answer.get("error")
    text = why[:500] if isinstance(why, str) else "it does not say why"
    return StoreError("init: rank 0 refused this process: " + "".join(c if c.isprintable() else "?" for c in text))


def keyed_digest(token: str, text: str) -> str:
    """Return what nobody can compute without the token (HMAC-SHA256)."""
    return hmac.new(token.encode(), text.encode(), "sha256").hexdigest()


def proof(token: str, end: str, name: Name, nonces: tuple[str, str]) -> str:
    """Return the proof that an end of a connection knows the token.

    `end` is "rank" or "hub", so that a proof cannot be sent back as the other end's. `nonces`: the hub's, the rank's.
    """
    return keyed_digest(token, f"{end} {name} {' '.join(nonces)}")


def _is_nonce(given: object) -> TypeGuard[str]:
    return isinstance(given, str) and re.fullmatch("[0-9a-f]{32}", given) is not None


def _same(given: object, right: str) -> bool:
    # In constant time: the duration must not reveal how many characters of a guess are right.
    return isinstance(given, str) and hmac.compare_digest(given.encode(errors="replace"), right.encode())


class Hub:
    """A port where processes come to stores, of `groups` and of applicants, by the key in the greeting."""

    def __init__(self, groups: Mapping[str, Any], listener: socket.socket, size: int = 1) -> None:
        self._groups, self._size = ChainMap(dict(groups), PROCESS.applicants), size
        self._unproved: dict[Connection, float] = {}  # greetings in progress, and their start times; the oldest first
        self._listener: socket.socket | None = listener
        self.port: int = 0 if listener.family == socket.AF_UNIX else int(listener.getsockname()[1])
        self._accepts = threading.Thread(target=self._accept, args=[listener], name="gpucoll hub", daemon=True)
        PROCESS.sockets.add(listener)

    def serve(self) -> None:
        """Let processes in from now on; do nothing if the hub does already."""
        # A port may be open, and its queue filled, long before it is served.
        if self._accepts.ident is None and self._listener is not None:
            # The queue of the kernel must hold all ranks at once: a rank that finds it full has to try again.
            self._listener.listen(self._size + STRANGERS)
            self._accepts.start()

    def _accept(self, listener: socket.socket) -> None:
        while self._listener is not None:
            try:
                connected, _ = listener.accept()
                self._admit(Connection(connected))
            except OSError:  # the listener is shut, or for the moment no file descriptor is free
                time.sleep(RETRY_INTERVAL)

    def _admit(self, connection: Connection) -> None:
        # Greet in another thread: a silent stranger must not block the accepting thread.
        with CHANGED:
            is_let_in = connection.is_own_users() and self._makes_room()
            if is_let_in:
                self._unproved[connection] = time.monotonic()
        if is_let_in:
            with contextlib.suppress(RuntimeError):  # no thread is available for the moment: close the connection
                threading.Thread(target=self._serve, args=[connection], name="gpucoll hub", daemon=True).start()
                return
        self._forget(connection)

    def _makes_room(self) -> bool:
        """Wait for a free place for another greeting; return False if the hub is closed meanwhile.

        The oldest greeting is ended once its GREETING_TIME is over. Silent strangers therefore keep no rank out, and a
        flood of strangers does not drive out a greeting rank. The caller holds `CHANGED`; waiting releases it.
        """
        while len(self._unproved) >= self._size + STRANGERS and self._listener is not None:
            oldest, since = next(iter(self._unproved.items()))
            patience = since + GREETING_TIME - time.monotonic()
            if patience <= 0:
                oldest.hang_up()  # its thread then frees the place, in `_forget`
            CHANGED.wait(max(patience, RETRY_INTERVAL))
        return self._listener is not None

    def _forget(self, connection: Connection) -> None:
        """Close a connection and free its place."""
        with CHANGED:
            self._unproved.pop(connection, None)
            CHANGED.notify_all()
        connection.socket.close()

    def _serve(self, connection: Connection) -> None:
        """Serve a connection until its end; send a stranger the reason and close. The thread's body."""
        said_bye = False
        try:
            self._greet(connection)
            while not said_bye and connection.group is not None:
                frame = connection.read()
                said_bye = "bye" in frame[0]
                answer = None if said_bye else connection.group.answer(connection.name, frame)
                if answer is not None:
                    connection.send(*answer)
        except (OSError, EOFError):  # the connection broke off: a member is lost
            pass
        except StoreError as error:
            with contextlib.suppress(OSError):
                connection.send({"error": error.args[0]})
        except Exception as error:  # must not leave this thread: `bootstrap.end_together` would end all ranks
            log.error("rank 0 has closed a connection, of rank %s, after an error: %a", connection.name or "unknown",
                      error)
        with CHANGED:  # the process may just be taken into another group
            if connection.group is not None:
                connection.group.leave(connection, said_bye=said_bye)
        self._forget(connection)

    def _greet(self, connection: Connection) -> None:
        """Let a process into its group; raise StoreError for a stranger.

        Types and ranges are checked before any use, because all values may come from a stranger.
        """
        deadline = time.monotonic() + GREETING
        connection.socket.settimeout(GREETING)
        nonce = secrets.token_hex(16)
        connection.send({"nonce": nonce})
        head, _ = connection.read(0, deadline)
        key, name, answered = head.get("group"), head.get("name"), head.get("nonce")
        # `type` and not `isinstance`: True is an instance of int.
        if not (type(name) is int or (isinstance(name, str) and name.isascii())) or not isinstance(key, str) \
                or not _is_nonce(answered):
            raise StoreError("the greeting is not of this version of gpucoll: the rank or the nonce is missing; start "
                             "all ranks with one version")
        group, nonces = self._groups.get(key), (nonce, answered)
        # Check the proof first: the errors below name versions and sizes, and so go to ranks of this job only.
        if group is None or not _same(head.get("proof"), proof(group.token, "rank", name, nonces)):
            raise StoreError("this process has another token, so it belongs to another job")
        # Welcome the process under the lock: a concurrent `broadcast` must neither precede the welcome nor miss it.
        with CHANGED:
            if why := group.refusal(name, head):
                raise StoreError(why)
            connection.send({"proof": proof(group.token, "hub", name, nonces), "gone": [*group.gone]})
            # No timeout from now on: healthy ranks may be silent for hours, and a dead rank's connection ends.
            connection.socket.settimeout(None)
            del self._unproved[connection]
            group.take(connection, name)

    def close(self) -> None:
        """Stop accepting connections and end the greetings in progress; members of groups stay."""
        with CHANGED:
            listener, self._listener = self._listener, None
            for connection in self._unproved:
                connection.hang_up()
            CHANGED.notify_all()
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread; closing alone would not
            if self._accepts.ident is not None:
                self._accepts.join()
            listener.close()
