"""Debian's Prometheus reads the counters of four ranks."""

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
import uuid

import pytest

from harness.jobs import end_job, ends_within, require_launcher, same_gpucoll, start_job
from harness.pace import Patience, seconds

pytestmark = pytest.mark.nightly

RANKS = 4
PROGRAM = """
import os, sys
import numpy as np, gpucoll as gc
with gc.init() as comm:
    go_on = True
    while go_on:
        comm.all_reduce(np.ones(1000))
        comm.barrier()
        go_on = comm.broadcast(np.array([not os.path.exists(sys.argv[1])]))[0]
"""
def read(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=seconds(10)) as answer:
        return answer.read().decode()


def asked(port, query):
    """Return Prometheus' answer to a query; [] before Prometheus answers."""
    try:
        return json.loads(read(port, f"api/v1/query?{urllib.parse.urlencode({'query': query})}"))["data"]["result"]
    except (urllib.error.URLError, ConnectionError):
        return []


def consecutive_ports(count):
    """Return the first of free ports, one after the other: the ranks' ports count up from the first."""
    for _ in range(100):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for port in range(first + 1, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError("there are no free ports in a row")


@contextlib.contextmanager
def prometheus(folder, ports):
    """Run Prometheus, which reads the ports but the last every second; Prometheus itself answers at the last."""
    program, rules = shutil.which("prometheus"), folder / "prometheus.yml"
    if program is None:
        pytest.skip("Prometheus is not installed: apt-get install prometheus")
    targets = [f"127.0.0.1:{port}" for port in ports[:-1]]
    rules.write_text(json.dumps({  # JSON is YAML
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [{"job_name": "gpucoll", "static_configs": [{"targets": targets}]}]}))
    with open(folder / "prometheus.log", "wb") as log, subprocess.Popen(
            [program, f"--config.file={rules}", f"--storage.tsdb.path={folder / 'data'}",
             f"--web.listen-address=127.0.0.1:{ports[-1]}"], stdout=log, stderr=log) as process:
        try:
            yield process
        finally:
            process.terminate()


def test_prometheus_reads_a_job_of_four_ranks(tmp_path):
    first, stop, token = consecutive_ports(RANKS + 1), tmp_path / "stop", uuid.uuid4().hex
    ports = range(first, first + RANKS + 1)
    with prometheus(tmp_path, ports) as server, open(tmp_path / "job.log", "wb") as log:
        job = start_job(require_launcher().command(RANKS, [sys.executable, "-c", PROGRAM, stop]), token, log,
                        environment={**same_gpucoll(), "GPUCOLL_METRICS": f"port:{first}"})
        try:
            patience, found = Patience(60), []
            while len(found) < 3 * RANKS and patience.left() and not ends_within(job, 0.2) and server.poll() is None:
                found = asked(ports[-1], "gpucoll_calls_total")
            assert len(found) == 3 * RANKS, \
                (tmp_path / "prometheus.log").read_text() + (tmp_path / "job.log").read_text()
            assert {row["metric"]["rank"] for row in found} == set(map(str, range(RANKS)))
            assert {row["metric"]["collective"] for row in found} == {"all_reduce", "barrier", "broadcast"}
            said = subprocess.run([shutil.which("promtool"), "check", "metrics"], input=read(first, "metrics"),
                                  capture_output=True, text=True, check=False)
            assert (said.returncode, said.stdout, said.stderr) == (0, "", "")
            stop.touch()
            assert ends_within(job, seconds(60))
            assert job.returncode == 0
        finally:
            end_job(job, token)
