"""Hostile greetings, made from a seed: possible messages of processes without the token to a port of the ranks.

    strangers = Strangers(connect, random.Random(1), recorded)
    strangers.attack(1000, look=lambda: None)    # `look` is called after each greeting
    strangers.leave()
"""

import contextlib
import json
import secrets
import socket
import struct
import time

from gpucoll.transport.connections import LENGTHS, MOST_JSON
from pace import seconds

OPEN = 16  # connections kept open and continued slowly: fewer than a hub allows to greet at once
BURST = 64  # connections at once: more than a hub allows
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets the connection
RANKS = (None, True, False, -1, 0, 1, 2, 3, 4, 1 << 31, 1 << 64, 10 ** 4000, 1.0, float("inf"), float("nan"), "1", "",
         "\ud800", "\0", [], [1], {}, {"rank": 1}, "9" * 5000)
GARBAGE = (b"GET / HTTP/1.1\r\nHost: rank0\r\n\r\n", b"SSH-2.0-OpenSSH_9.7\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01",
           b"\0" * 8, b"\xff" * 8, b"\r\n\r\n", b"")


def frame(text, body=b"", length=None, count=None):
    """Return a frame of JSON and bytes, possibly with wrong lengths."""
    return LENGTHS.pack(len(text) if length is None else length, len(body) if count is None else count) + text + body


class Strangers:
    """Connections made by `connect`. `recorded` are greetings of true ranks, as JSON objects."""

    def __init__(self, connect, draw, recorded):
        self._connect, self._draw, self._recorded = connect, draw, recorded
        self._open = []
        self.greetings, self.answers = 0, set()  # the number of greetings, and the keys of the JSON objects received
        self._kinds = (self._garbage, self._lengths, self._truncated, self._json, self._nested, self._values,
                       self._values, self._replayed, self._many_frames)

    def attack(self, count, look):
        while self.greetings < count:
            if self.greetings % 5000 == count % 5000 // 2:
                self._burst()
            self._one()
            look()

    def _one(self):
        self.greetings += 1
        connected = self._connect()
        said, end = self._draw.choice(self._kinds)(), self._draw.random()
        try:
            connected.sendall(said)
            if end < 0.03:
                self._slowly(connected, said)
                return
            if end < 0.1:
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            else:
                connected.shutdown(socket.SHUT_WR)
                if end < 0.5:
                    self._hear(connected)
        except TimeoutError:
            raise AssertionError(f"who said {said[:200]!r} is neither answered nor sent away") from None
        except OSError:  # disconnected before the end of the greeting
            pass
        connected.close()

    def _slowly(self, connected, said):
        """Keep a connection open, sending another byte of a frame now and then."""
        self._open.append(connected)
        for other in self._draw.sample(self._open, min(4, len(self._open))):
            with contextlib.suppress(OSError):
                other.send(said[:1] or b"\0", socket.MSG_DONTWAIT)
        if len(self._open) > OPEN:
            self._open.pop(0).close()

    def _burst(self):
        """Open many connections, and send nothing."""
        for _ in range(BURST):
            self.greetings += 1
            self._open.append(self._connect())
        self.leave()

    def silence(self, count):
        """Take `count` places, and keep them."""
        for _ in range(count):
            self._open.append(self._connect())

    def leave(self):
        while self._open:
            self._open.pop().close()

    def _hear(self, connected):
        """Read until the end of the connection, and note the answers."""
        came = b""
        while part := connected.recv(1 << 16):
            came += part
        while came:
            length, count = LENGTHS.unpack_from(came)
            self.answers |= json.loads(came[LENGTHS.size:LENGTHS.size + length]).keys()
            came = came[LENGTHS.size + length + count:]

    def _garbage(self):
        return self._draw.choice((*GARBAGE, self._draw.randbytes(self._draw.randrange(64))))

    def _lengths(self):
        wrong = (0, 1, 7, MOST_JSON, MOST_JSON + 1, 1 << 31, (1 << 32) - 1)
        return frame(b'{"rank": 1}', length=self._draw.choice(wrong), count=self._draw.choice((0, *wrong)))

    def _truncated(self):
        said = self._replayed()
        return said[:self._draw.randrange(len(said))]

    def _json(self):
        texts = (b"[]", b"1", b'"a"', b"null", b"{", b"{]", b"NaN", b"{}{}", b"\xff\xfe{\0}\0", b'{"a": \xff}',
                 b'"\\ud800"', b'{"rank": ' + b"9" * 5000 + b"}", b'{"rank": 1e999}', b"\xef\xbb\xbf{}", b"\0" * 100)
        return frame(self._draw.choice(texts))

    def _nested(self):
        depth = self._draw.choice((10, 300, 900, 990, 20_000))
        opens, ends = self._draw.choice(((b"[", b"]"), (b'{"a":', b"1}")))
        deep = opens * min(depth, MOST_JSON // 12) + b"1" * (opens == b"[") + ends * min(depth, MOST_JSON // 12)
        name = self._draw.choice((b"rank", b"size", b"nonce", b"proof", b"version"))
        greeting = json.dumps(self._greeting()).encode()
        return frame(self._draw.choice((deep, greeting[:-1] + b', "' + name + b'": ' + deep + b"}")))

    def _greeting(self):
        return {"rank": self._draw.choice((1, 2)), "size": 4, "version": "0", "nonce": secrets.token_hex(16),
                "proof": secrets.token_hex(32)}

    def _values(self):
        """Return a greeting with some values of other types or out of range, and some missing."""
        said = self._greeting()
        for name in self._draw.sample([*said], self._draw.randrange(1, 4)):
            said[name] = self._draw.choice((*RANKS, "\u00e9" * 32, "A" * 32, "0" * 64, "0" * 60_000))
        for name in self._draw.sample([*said], self._draw.choice((0, 0, 0, 1, 2))):
            del said[name]
        return frame(json.dumps(said).encode())

    def _replayed(self):
        """Return an earlier greeting of a rank, unchanged or with another rank's number."""
        said = {**self._draw.choice(self._recorded)}
        if self._draw.random() < 0.3:
            said["rank"] = self._draw.choice((1, 2, 3))
        return frame(json.dumps(said).encode())

    def _many_frames(self):
        said = [self._replayed(), self._values(), frame(b'{"bye": true}'), frame(b'{"call": "delete", "key": "key"}'),
                frame(b'{"waits": 1}'), frame(b'{"ask": 1}')]
        return b"".join(self._draw.choices(said, k=self._draw.randrange(2, 6)))


def connected_to(family, where):
    """Return a function connecting to a port, repeatedly if too many connections are waiting."""
    def connect():
        give_up = time.monotonic() + seconds(60)
        while True:
            connected = socket.socket(family)
            connected.settimeout(seconds(60))
            try:
                connected.connect(where)
                return connected
            except BlockingIOError:
                connected.close()
                assert time.monotonic() < give_up, "the port lets nobody in"
                time.sleep(1e-3)
    return connect
