"""Socket connections of all ranks to rank 0: frames, and the greeting that authenticates both ends.

A frame consists of two lengths, a JSON object and bytes; nothing is ever unpickled. Strangers may reach a port, so each
end trusts nothing before the other end has proved to know the job's token. Both proofs contain a nonce of each end, so
a recorded greeting cannot be replayed. Bad input from a stranger ends only the stranger's connection. Frames are
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
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard

from gpucoll.errors import BackendError
from gpucoll.version import __version__

if TYPE_CHECKING:
    from gpucoll.transport.applicants import Applicants

LENGTHS = struct.Struct("!II")  # the lengths of the JSON and of the bytes, in network order
MOST_JSON, MOST_BYTES = 1 << 16, 1 << 31  # reject longer frames before reading: the lengths may be a stranger's
GREETING = 10.0  # seconds for a whole greeting: long for a busy host, bounded so that strangers go away
# Greetings of strangers in progress at a time: each holds a thread and a file descriptor.
STRANGERS = 32
APPLICANT = -1  # in the place of the rank: a process that waits for a place in a new communicator
GRACE = 0.25  # seconds guaranteed to a greeting, even if other connections wait for a place
POLL_INTERVAL = 1e-2  # seconds between two tries of something that failed for the moment

Frame = tuple[dict[str, Any], bytes]
log = logging.getLogger("gpucoll")


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
        self.is_answered = False  # whether an applicant has its answer
        self.pad = b""  # of an applicant's connection: known to both ends alone, see `pad_of`

    def send(self, head: dict[str, Any], body: bytes = b"") -> None:
        """Send a frame, a JSON object and bytes; any thread may call this."""
        text = json.dumps(head).encode()
        # Head and JSON in one segment; the body apart, because joining would copy it.
        with self._sending:
            self.socket.sendall(LENGTHS.pack(len(text), len(body)) + text)
            if body:
                self.socket.sendall(body)

    def read(self, most: int = MOST_BYTES, deadline: float | None = None) -> Frame:
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

    def join(self, rank: int, size: int, token: str, timeout: float, **more: Any) -> dict[str, Any]:
        """Greet rank 0 and return the welcome frame; StoreError if either end rejects the other.

        `more` goes into the greeting: the fields of an applicant (see `gpucoll.transport.join_ports`).
        """
        # Rank 0 sends a nonce; this rank answers with a nonce and a proof; rank 0 answers with a proof.
        deadline = time.monotonic() + timeout
        if not self.is_own_users():
            raise StoreError("init: another user's process has taken the address of this job's store")
        asked = self.read(0, deadline)[0].get("nonce")
        if not _is_nonce(asked):
            raise StoreError("init: the process at the address of rank 0 is not gpucoll's rank 0: no nonce came")
        nonces = asked, secrets.token_hex(16)
        self.send({"rank": rank, "size": size, "version": __version__, "nonce": nonces[1],
                   "proof": proof(token, "rank", rank, nonces), **more})
        self.pad = pad_of(token, nonces)
        welcome = self.read(0, deadline)[0]
        if "error" in welcome:
            raise refused(welcome)
        if not _same(welcome.get("proof"), proof(token, "hub", rank, nonces)):
            raise StoreError("init: the process at the address of rank 0 does not know the token of this job")
        return welcome


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


def proof(token: str, end: str, rank: int, nonces: tuple[str, str]) -> str:
    """Return the proof (HMAC-SHA256) that an end of a connection knows the token.

    `end` is "rank" or "hub", so that a proof cannot be sent back as the other end's. `nonces`: the hub's, the rank's.
    """
    return hmac.new(token.encode(), f"{end} {rank} {' '.join(nonces)}".encode(), "sha256").hexdigest()


def pad_of(token: str, nonces: tuple[str, str]) -> bytes:
    """Return 32 bytes that only both ends of a greeting know, to hide another secret once."""
    return hmac.new(token.encode(), f"pad {' '.join(nonces)}".encode(), "sha256").digest()


def _is_nonce(given: object) -> TypeGuard[str]:
    return isinstance(given, str) and re.fullmatch("[0-9a-f]{32}", given) is not None


def _same(given: object, right: str) -> bool:
    # In constant time: the duration must not reveal how many characters of a guess are right.
    return isinstance(given, str) and hmac.compare_digest(given.encode(errors="replace"), right.encode())


class Hub:
    """Rank 0's end of all connections, with a thread per connection. `gone` holds the ranks with a broken connection.

    `answer` takes a frame of a rank (at most `most` bytes after the JSON) and returns the answer, or None. `lost` is
    called after a rank was added to `gone`. Other threads call both. `own` is the rank of this process. `applicants`
    receives the processes that come as applicants; without `applicants` the hub has none.
    """

    def __init__(self, size: int, token: str, answer: Callable[[int, Frame], Frame | None],
                 lost: Callable[[], None] = lambda: None, most: int = 0, own: int = 0,
                 applicants: Applicants | None = None) -> None:
        self.gone: dict[int, None] = {}  # ranks whose connections have broken, in this order
        self._size, self.token, self._own, self._applicants = size, token, own, applicants
        self._answer, self._lost, self._most = answer, lost, most
        self._here: dict[int, Connection] = {}  # the connected ranks
        self._unproved: dict[Connection, float] = {}  # greetings in progress, and their start times; the oldest first
        # Guards `gone`, `_here`, `_unproved` and `_listener`; notified when any of them changes. Reentrant.
        self._changed = threading.Condition()
        self._listener: socket.socket | None = None
        self._accepts = threading.Thread()

    def serve(self, listener: socket.socket) -> None:
        """Accept ranks from a listener until `shut`; from now on other threads call `answer` and `lost`."""
        # The queue of the kernel must hold all ranks at once: a rank that finds it full has to try again.
        listener.listen(self._size + STRANGERS)
        self._listener = listener
        self._accepts = threading.Thread(target=self._accept, args=[listener], name="gpucoll hub", daemon=True)
        self._accepts.start()

    def _accept(self, listener: socket.socket) -> None:
        # Compare the identity: `shut` and a later `serve` may have put another listener in place.
        while self._listener is listener:
            try:
                connected, _ = listener.accept()
                self._admit(Connection(connected))
            except OSError:  # the listener is shut, or for the moment no file descriptor is free
                time.sleep(POLL_INTERVAL)

    def _admit(self, connection: Connection) -> None:
        # Greet in another thread: a silent stranger must not block the accepting thread.
        with self._changed:
            is_let_in = connection.is_own_users() and self._makes_room()
            if is_let_in:
                self._unproved[connection] = time.monotonic()
        if is_let_in:
            with contextlib.suppress(RuntimeError):  # no thread is available for the moment: close the connection
                threading.Thread(target=self._serve, args=[connection], name="gpucoll hub", daemon=True).start()
                return
        self._forget(connection)

    def _makes_room(self) -> bool:
        """Wait for a free place for another greeting; return False if the hub is shut meanwhile.

        The oldest greeting is ended once its GRACE is over. Silent strangers therefore keep no rank out, and a flood of
        strangers does not drive out a greeting rank. The caller holds `_changed`; waiting releases it.
        """
        while len(self._unproved) >= self._size + STRANGERS and self._listener is not None:
            oldest, since = next(iter(self._unproved.items()))
            patience = since + GRACE - time.monotonic()
            if patience <= 0:
                oldest.hang_up()  # its thread then frees the place, in `_forget`
            self._changed.wait(max(patience, POLL_INTERVAL))
        return self._listener is not None

    def _forget(self, connection: Connection, rank: int = 0) -> bool:
        """Close a connection and free its place; return whether the connection was the rank's."""
        with self._changed:
            self._unproved.pop(connection, None)
            was_here = self._here.get(rank) is connection
            if was_here:
                del self._here[rank]
            self._changed.notify_all()
        connection.socket.close()
        return was_here

    def _serve(self, connection: Connection) -> None:
        """Serve a connection until the rank leaves; send a stranger the reason and close. The thread's body."""
        rank, said_bye = 0, False
        try:
            rank = self._greet(connection)
            while not said_bye:
                frame = connection.read(self._most)
                said_bye = "bye" in frame[0]
                answer = None if said_bye else self._answer(rank, frame)
                if answer is not None:
                    connection.send(*answer)
        except (OSError, EOFError):  # the connection broke off: `_leaves` counts the rank as gone
            pass
        except StoreError as error:
            with contextlib.suppress(OSError):
                connection.send({"error": error.args[0]})
        except Exception as error:  # must not leave this thread: `bootstrap.end_together` would end all ranks
            log.error("rank 0 has closed a connection, of rank %s, after an error: %a", rank or "unknown", error)
        self._leaves(connection, rank, said_bye)

    def _leaves(self, connection: Connection, rank: int, said_bye: bool) -> None:
        # A rank is lost if its connection ends without a goodbye of either end; `broadcast` and `close` clear `_here`.
        with self._changed:
            is_lost = self._here.get(rank) is connection and not said_bye
            self.gone.update({rank: None} if is_lost else {})
            self._forget(connection, rank)
        if is_lost:  # without the lock: `lost` sends to all ranks
            self._lost()

    def _greet(self, connection: Connection) -> int:
        """Return the rank that has connected; raise StoreError for a stranger.

        Types and ranges are checked before any use, because all values may come from a stranger.
        """
        deadline = time.monotonic() + GREETING
        connection.socket.settimeout(GREETING)
        nonce = secrets.token_hex(16)
        connection.send({"nonce": nonce})
        head, _ = connection.read(0, deadline)
        rank, size, answered = head.get("rank"), head.get("size"), head.get("nonce")
        # `type` and not `isinstance`: True is an instance of int.
        if type(rank) is not int or not _is_nonce(answered):
            raise StoreError("the greeting is not of this version of gpucoll: the rank or the nonce is missing; start "
                             "all ranks with one version")
        nonces = nonce, answered
        token = self._applicants.token(head) if rank == APPLICANT and self._applicants else self.token
        # Check the proof first: the errors below name versions and sizes, and so go to ranks of this job only.
        if token is None or not _same(head.get("proof"), proof(token, "rank", rank, nonces)):
            raise StoreError("this process has another token, so it belongs to another job")
        # An applicant has no rank here yet, so none of the checks below applies.
        if rank == APPLICANT and self._applicants is not None:
            self._welcome(connection, head, token, nonces)
        unfit = StoreError(f"its rank is not in 1..{self._size - 1}, or is taken; RANK must differ between "
                           "processes, and WORLD_SIZE must be the number of processes")
        if rank == self._own or not 0 <= rank < self._size:
            raise unfit
        if head.get("version") != __version__ or size != self._size:
            raise StoreError(f"rank {rank} counts {size} ranks of gpucoll {head.get('version')}, rank 0 "
                             f"counts {self._size} of {__version__}; start all ranks with the same version and number")
        # Welcome the rank under the lock: a concurrent `broadcast` must neither precede the welcome nor miss this rank.
        with self._changed:
            if rank in self._here:
                raise unfit
            connection.send({"proof": proof(self.token, "hub", rank, nonces), "gone": [*self.gone]})
            # No timeout from now on: healthy ranks may be silent for hours, and a dead rank's connection ends.
            connection.socket.settimeout(None)
            del self._unproved[connection]
            self._here[rank] = connection
            self._changed.notify_all()
        return rank

    def _welcome(self, connection: Connection, head: dict[str, Any], token: str, nonces: tuple[str, str]) -> None:
        """Welcome an applicant, and hand the applicant over until the connection ends; raises EOFError then."""
        assert self._applicants is not None
        if head.get("version") != __version__:
            raise StoreError(f"this process has gpucoll {head.get('version')}, and the ranks have {__version__}")
        # Before the answer: the applicant may be invited by another thread as soon as `receive` has it.
        connection.pad = pad_of(token, nonces)
        connection.send({"proof": proof(token, "hub", APPLICANT, nonces)})
        with self._changed:
            connection.socket.settimeout(None)
            del self._unproved[connection]  # an applicant may wait for long
            self._changed.notify_all()
        self._applicants.receive(connection, head)
        raise EOFError

    def lose(self, rank: int) -> None:
        """Count a rank that never came as gone, unless the rank is connected."""
        with self._changed:
            self.gone.update({rank: None} if rank not in self._here else {})

    def broadcast(self, head: dict[str, Any], *, last: bool = False) -> None:
        """Send a frame to all connected ranks; after the `last` frame, broken connections no longer count as deaths."""
        with self._changed:
            for connection in self._here.values():
                with contextlib.suppress(OSError):
                    connection.send(head)
                if last:
                    connection.hang_up()
            # Forget the ranks under the same lock, before their threads see the end: `_leaves` then finds no loss.
            if last:
                self._here.clear()

    def shut(self) -> None:
        """Stop accepting connections and end the greetings in progress; connected ranks stay."""
        with self._changed:
            listener, self._listener = self._listener, None
            for connection in self._unproved:
                connection.hang_up()
            self._changed.notify_all()
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread; closing alone would not
            self._accepts.join()
            listener.close()

    def is_left(self, patience: float = POLL_INTERVAL) -> bool:
        """Return whether all connected ranks leave within `patience` seconds."""
        # Ranks leave by a goodbye; their threads then notify `_changed`.
        with self._changed:
            return self._changed.wait_for(lambda: not self._here, patience)

    def close(self) -> None:
        """Shut the hub, and hang up on the ranks still connected."""
        with self._changed:
            for connection in self._here.values():
                connection.hang_up()
            self._here.clear()
        self.shut()

    def drop(self) -> None:
        """Close the sockets in the child of a fork, without a shutdown: the connections belong to the parent."""
        for held in (self._listener, *(connection.socket for connection in [*self._here.values(), *self._unproved])):
            if held is not None:
                held.close()
