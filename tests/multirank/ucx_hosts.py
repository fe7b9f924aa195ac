"""Launchers of pretended hosts, joined by UCX over TCP, and a stranger at their ports."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from gpucoll.launch import launchers
from gpucoll.transport.rendezvous import becomes
from harness.jobs import run_job, same_gpucoll
from harness.pace import seconds

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

JOB = os.path.join(ROOT, "multirank", "ucx_job.py")

# TCP alone, as between hosts: UCX would detect that these hosts share memory.
ENVIRONMENT = {**same_gpucoll(), "PYTHONPATH": os.pathsep.join([ROOT, *sys.path]), "UCX_TLS": "tcp,self"}


def on_hosts(ranks, *argv, secrets=("s", "s"), variables=None):
    """Run a rank's program by one launcher for each host, `ranks` ranks on each; return the outputs and exit codes."""
    environment = {**ENVIRONMENT, **(variables or {})}
    place = f"127.0.0.1:{launchers.free_port()}"
    commands = [[sys.executable, "-m", "gpucoll", "run", "--nnodes", str(len(secrets)), "--node-rank", str(node),
                 "--rendezvous", place, "-n", str(ranks), JOB, *argv] for node in range(len(secrets))]
    jobs = [subprocess.Popen(command, env={**os.environ, **environment, "GPUCOLL_SECRET": secret}, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            for command, secret in zip(commands[:-1], secrets, strict=False)]
    try:
        ended = run_job(commands[-1], seconds(120), {**environment, "GPUCOLL_SECRET": secrets[-1]})
        for job in jobs if len({*secrets}) > 1 else ():  # waits in vain
            job.terminate()
        outputs = [job.communicate(timeout=seconds(60))[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    return [*outputs, ended.stdout + ended.stderr], [*(job.returncode for job in jobs), ended.returncode]

GARBAGE = [b"", b"\0" * 3, b"\xff" * 64, bytes(range(256)) * 20, b"GET / HTTP/1.0\r\n\r\n",
           (1 << 62).to_bytes(8, "little") + b"\xff" * 2000]

HELD = 200  # connections kept open by the stranger at each port


def attacked_by_strangers(folder, **options):
    """Run calls on two hosts while a stranger attacks all their ports; return outputs, codes, the number of ports."""
    def attack():
        came = becomes(lambda: all((folder / str(rank)).exists() for rank in range(2)), seconds(60))
        places = {tuple(place) for rank in range(2 * came) for place in json.loads((folder / str(rank)).read_text())}
        with contextlib.ExitStack() as held:
            for place in places:
                for number in range(HELD):
                    with contextlib.suppress(OSError):  # a place without room for a stranger refuses or is silent
                        held.enter_context(socket.create_connection(place, 0.2)).sendall(GARBAGE[number % len(GARBAGE)])
            (folder / "done").touch()
        return len(places)

    with ThreadPoolExecutor(1) as threads:
        attacked = threads.submit(attack)
        return *on_hosts(1, "attacked", str(folder), **options), attacked.result()
