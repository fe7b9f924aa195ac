"""Several hosts on one machine, for what crosses a network: a network namespace each, joined by a bridge.

    with hosts(2) as made:
        made.launch(4, sys.executable, "script.py")     # 4 ranks on each host, over TCP

The bridge has a namespace of its own, so that neither the machine's addresses nor its firewall know of any of this, and
nothing is left once the namespaces are gone. In a host its link is `e0`; /sys shows that host's devices. Needs root and
iproute2. Of the two MPIs, MPICH can be told to keep its hands off the memory that these hosts share.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
import uuid
from pathlib import Path

from ranks import find_launcher, run_job

NETWORK = "10.77.0"
LINK = "e0"
# UCX would find that "hosts" share memory, and use it; so inside a host, too, it has TCP only.
NO_SHARED_MEMORY = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": LINK}
# What MPICH's mpiexec calls in place of ssh: it is given options, an address, and a command for a shell there.
LOGIN = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec ip netns exec "NAME-${host##*.}" sh -c "$*"
"""


def missing():
    """Why there can be no hosts here, None if there can."""
    launcher = find_launcher()
    if shutil.which("ip") is None:
        return "hosts are made by ip, of iproute2, and there is none"
    if launcher is None or launcher.vendor.mark != "HYDRA":
        return "only MPICH can be kept off the memory that hosts on one machine share"
    try:
        with hosts(1):
            return None
    except subprocess.CalledProcessError as error:
        return f"hosts are network namespaces joined by a bridge, and cannot be made: {error.stderr.strip()}"


def ip(*words):
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


class Hosts:
    """Hosts that are up: host i has the address NETWORK.i+1 and is the namespace NAME-i+1."""

    def __init__(self, name, count, folder):
        self.name, self.count = name, count
        self._login = folder / "login"
        self._login.write_text(LOGIN.replace("NAME", name))
        self._login.chmod(0o700)

    def launch(self, ranks, *argv, timeout=120.0, env=None):
        """The `subprocess.CompletedProcess` of `argv` on `ranks` ranks of every host, the first host's ranks first."""
        addresses = ",".join(f"{NETWORK}.{host + 1}" for host in range(self.count))
        mpiexec = [find_launcher().path, "-launcher", "ssh", "-launcher-exec", str(self._login), "-hosts", addresses,
                   "-iface", LINK, "-ppn", str(ranks), "-n", str(ranks * self.count)]
        command = ["ip", "netns", "exec", f"{self.name}-1", *mpiexec, *map(os.fspath, argv)]
        return run_job(command, timeout, {**NO_SHARED_MEMORY, **(env or {})})


@contextlib.contextmanager
def hosts(count):
    """`count` hosts that are up inside the block; nothing of them is left after it."""
    name = f"gpucoll-{uuid.uuid4().hex[:8]}"
    names = [f"{name}-{number}" for number in range(count + 1)]  # that of the bridge first
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        for namespace in names:
            ip("netns", "add", namespace)
            stack.callback(ip, "netns", "del", namespace)
        ip("-n", names[0], "link", "add", "bridge", "type", "bridge")
        ip("-n", names[0], "link", "set", "bridge", "up")
        for number, namespace in enumerate(names[1:], 1):
            join(names[0], namespace, number)
        yield Hosts(name, count, Path(folder))


def join(switch, namespace, number):
    """A host has its link, its address and itself (lo), and the bridge has the link's other end."""
    ip("-n", namespace, "link", "add", LINK, "type", "veth", "peer", "name", f"port{number}", "netns", switch)
    ip("-n", switch, "link", "set", f"port{number}", "master", "bridge", "up")
    ip("-n", namespace, "addr", "add", f"{NETWORK}.{number}/24", "dev", LINK)
    for device in (LINK, "lo"):
        ip("-n", namespace, "link", "set", device, "up")
