"""Hosts on one machine: network namespaces joined by a bridge, for programs that cross a network. Linux, as root.

The bridge is in a namespace of its own, the head: the machine's addresses and firewall are not affected. Programs find
the head and the hosts by name, `head` and `node1` to `nodeN`.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from typing import NamedTuple

import links

LINK, NETWORK, HEAD = "e0", "10.77.0", 254
# UCX finds the memory that these hosts share, and its users, MPICH among them, take the hosts for one.
SOCKETS = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": LINK}
QUEUE = ("burst", "64kb", "limit", "16mb")  # frames of all senders wait, and none is lost
NAMES = "/etc/netns"  # `ip netns exec` shows the files of NAMES/NAMESPACE at /etc
SHELL = 'hostname "$0"; exec "$@"'
# The first process of a host reaps the processes left by others, as init does.
INIT = 'hostname "$0"; mount -t tmpfs tmpfs /dev/shm; "$@" & wait $!'


class Host(NamedTuple):
    """A host: its namespace and name, and its address on the network."""

    namespace: str
    name: str
    address: str

    def within(self, *command: str) -> "list[str]":
        """Return the words of a command on the host, with the host's name, and the machine's processes in view."""
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", SHELL, self.name, *command]

    def apart(self, *command: str) -> "list[str]":
        """Return the words of a command on the host with process numbers and shared memory of its own.

        If the command's first process is killed, all processes of the command are killed.
        """
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "--pid", "--fork", "--kill-child",
                "--mount-proc", "sh", "-c", INIT, self.name, *command]


def ip(*words: str) -> str:
    """Run iproute2's `ip`; return its output, or raise CalledProcessError."""
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def lacking() -> str:
    """Return the reason why this machine cannot have hosts; "" if it can."""
    if os.geteuid():
        return "hosts are network namespaces, made by root"
    missing = [name for name in ("ip", "unshare", "hostname") if shutil.which(name) is None]
    if missing:
        return f"hosts need the programs {', '.join(missing)}"
    tried = subprocess.run(["unshare", "--net", "--uts", "--pid", "--fork", "--mount-proc", "true"],
                           capture_output=True, text=True)
    return f"hosts are network namespaces, and cannot be made: {tried.stderr.strip()}" if tried.returncode else ""


@contextlib.contextmanager
def made(count: int = 2, loss: float = 0.0, delay: float = 0.0, rate: str = "") -> "Iterator[list[Host]]":
    """Create the head and `count` hosts, all joined by a bridge; delete all on leaving. The head comes first.

    Each frame that leaves a host arrives `delay` seconds later, and a share `loss` of the frames never arrives. A host
    sends, and at the same time receives, at most `rate`, such as "100mbit": frames wait at the host and at the bridge.
    """
    mark = f"gpucoll-{uuid.uuid4().hex[:8]}"
    everyone = [Host(f"{mark}-0", "head", f"{NETWORK}.{HEAD}"),
                *(Host(f"{mark}-{number}", f"node{number}", f"{NETWORK}.{number}") for number in range(1, count + 1))]
    names = "".join(f"{host.address} {host.name}\n" for host in everyone)
    with contextlib.ExitStack() as stack:
        for host in everyone:
            ip("netns", "add", host.namespace)
            stack.callback(ip, "netns", "del", host.namespace)
            os.makedirs(f"{NAMES}/{host.namespace}")
            stack.callback(shutil.rmtree, f"{NAMES}/{host.namespace}")
            with open(f"{NAMES}/{host.namespace}/hosts", "w") as file:
                file.write(f"127.0.0.1 localhost\n{names}")
        head = everyone[0]
        ip("-n", head.namespace, "link", "add", LINK, "type", "bridge")
        ip("-n", head.namespace, "addr", "add", f"{head.address}/24", "dev", LINK)
        if loss or delay:
            stack.enter_context(carried(loss, delay, head, everyone[1:]))
        for number, host in enumerate(everyone[1:], 1):
            if not loss and not delay:
                ip("-n", host.namespace, "link", "add", LINK, "type", "veth", "peer", "name", f"port{number}",
                   "netns", head.namespace)
            ip("-n", head.namespace, "link", "set", f"port{number}", "master", LINK, "up")
            ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", LINK)
            for namespace, device in ((host.namespace, LINK), (head.namespace, f"port{number}")) if rate else ():
                subprocess.run(["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", "rate", rate,
                                *QUEUE], check=True, capture_output=True)
        for host in everyone:
            for device in (LINK, "lo"):
                ip("-n", host.namespace, "link", "set", device, "up")
        yield everyone


@contextlib.contextmanager
def carried(loss: float, delay: float, head: Host, hosts: "list[Host]") -> "Iterator[None]":
    """Join each host with the head by a link that loses and delays frames: see `links.py`."""
    ends = [f"{host.namespace}:{LINK}={head.namespace}:port{number}" for number, host in enumerate(hosts, 1)]
    command = [sys.executable, links.__file__, str(loss), str(delay), *ends]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as carrier:
        try:
            assert carrier.stdout is not None
            if carrier.stdout.readline().strip() != "ready":
                raise RuntimeError("the links could not be made")
            yield
        finally:
            carrier.kill()
