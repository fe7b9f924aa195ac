"""Processes without the token at a port of the ranks: drawn greetings, each on a connection of its own."""

import json
import socket
import struct
import time

from hypothesis import strategies as st

from gpucoll.transport.connections import LENGTHS
from harness.hostile import greetings, holds
from harness.pace import seconds

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets the connection


def attack(connect, recorded, count, look):
    """Send `count` greetings by connections of `connect`, call `look` after each; return the keys of all answers."""
    answers = set()

    def greet(drawn):
        said, resets = drawn
        with connect() as connected:
            try:
                connected.sendall(said)
                if resets:
                    connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                else:
                    connected.shutdown(socket.SHUT_WR)
                    answers.update(*heard(connected))
            except TimeoutError:
                raise AssertionError(f"who said {said[:200]!r} is neither answered nor sent away") from None
            except OSError:  # disconnected before the end of the greeting
                pass
        look()

    holds(st.tuples(greetings(recorded), st.booleans()), greet, count)
    return answers


def heard(connected):
    """Yield the keys of each answer until the end of the connection."""
    came = b""
    while part := connected.recv(1 << 16):
        came += part
    while came:
        length, count = LENGTHS.unpack_from(came)
        yield json.loads(came[LENGTHS.size:LENGTHS.size + length]).keys()
        came = came[LENGTHS.size + length + count:]


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
