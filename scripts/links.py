"""Links that lose and delay frames, for network namespaces. netem does the same, where the kernel has this module.

A link is a pair of TAP devices, in two namespaces, and a process that carries the frames between the two. Frames that
leave the first namespace are delayed, and a share is lost.

    python scripts/links.py LOSS DELAY NAMESPACE:DEVICE=NAMESPACE:DEVICE ...    # DELAY in seconds

Prints "ready" as soon as all devices exist. The devices end with the process.
"""

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import sys
import time

NETWORK = 0x40000000  # CLONE_NEWNET
SET_DEVICE, TAP, BARE = 0x400454CA, 0x0002, 0x1000  # TUNSETIFF; frames of Ethernet; no further header
FRAME = 65536


def opened(end: str) -> int:
    """Create the TAP device NAMESPACE:DEVICE; return its descriptor."""
    namespace, _, device = end.partition(":")
    place = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(place, NETWORK):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace)
    os.close(place)
    found = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(found, SET_DEVICE, struct.pack("16sH22x", device.encode(), TAP | BARE))
    return found


def carry(loss: float, delay: float, pairs: "list[tuple[int, int]]") -> None:
    """Carry frames between the two ends of each pair, until this process is killed."""
    other = {a: b for pair in pairs for a, b in (pair, pair[::-1])}
    leaving = {first for first, _ in pairs}
    chances, number = random.Random(1), itertools.count()
    waiting: list[tuple[float, int, int, bytes]] = []  # frames under way: the time of arrival, a number, the end
    poll = select.poll()
    for end in other:
        poll.register(end, select.POLLIN)
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, end, frame = heapq.heappop(waiting)
            put(end, frame)
        patience = None if not waiting else max(0.0, 1000 * (waiting[0][0] - now))
        for end, _ in poll.poll(patience):
            frame = os.read(end, FRAME)
            if end not in leaving:
                put(other[end], frame)
            elif chances.random() >= loss:
                heapq.heappush(waiting, (time.monotonic() + delay, next(number), other[end], frame))


def put(end: int, frame: bytes) -> None:
    """Write a frame; the frame is lost if the device is down, or its queue is full."""
    with contextlib.suppress(OSError):
        os.write(end, frame)


if __name__ == "__main__":
    lost, later, *links = sys.argv[1:]
    ends = [tuple(map(opened, link.split("="))) for link in links]
    print("ready", flush=True)
    carry(float(lost), float(later), [(first, second) for first, second in ends])
