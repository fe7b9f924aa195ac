"""GPUCOLL_METRICS: Prometheus' text in a file or at a port; and the summary at the end."""

import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import numpy
import pytest
from prometheus_client.parser import text_string_to_metric_families

import gpucoll as gc
from gpucoll.health import metrics
from gpucoll.health.flight import CallRecord
from gpucoll.health.report import shares_table
from harness.pace import seconds
from harness.thread_ranks import all_on_threads


def parsed(text):
    """Return the samples by name and labels."""
    families = [*text_string_to_metric_families(text)]
    assert {family.type for family in families} == {"counter"}
    return {(one.name, tuple(sorted(one.labels.items()))): one.value for family in families for one in family.samples}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def sample(stats, rank):
    """Return what `parsed` should find for the figures of a rank."""
    return {(metrics.COUNTERS[name][0], (("collective", kind), ("rank", str(rank)), ("size_class", str(size)))): value
            for (kind, size), figures in stats.items() for name, value in figures.items()}


def run(program, wanted, **more):
    """Run a program with a value of GPUCOLL_METRICS, and `more` variables; return its standard error."""
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    return subprocess.run([sys.executable, "-c", program], check=True, timeout=seconds(60), stderr=subprocess.PIPE,
                          text=True, env={**os.environ, "GPUCOLL_METRICS": wanted, "PYTHONPATH": path, **more}).stderr


def call_and_fork():
    """Make calls on closed and open communicators; the child of a fork prints no summary."""
    for comm in gc.init_local(1) + gc.init_local(1):
        for _ in range(3):
            comm.all_reduce(numpy.ones(1000))
        comm.barrier()
    comm.close()
    if os.fork() == 0:
        sys.exit()
    os.wait()


def test_a_summary_at_the_end():
    program = "import test_metrics; test_metrics.call_and_fork()"
    head, titles, *rows = run(program, "", GPUCOLL_SUMMARY="1").splitlines()
    assert head.startswith("gpucoll: rank 0 ran for ")
    assert titles.split() == "collective bytes from calls seconds own % waiting % moving % GB/s".split()
    cells = {row.split()[0]: row.split()[1:] for row in rows[:2]}
    assert cells["all_reduce"][:2] == ["4096", "6"]
    assert cells["barrier"][:2] == ["0", "2"]
    assert len(rows) == 2
    assert run(program, "", GPUCOLL_SUMMARY="0") == ""


def test_the_dearest_calls_of_many():
    """A row for ten kinds of calls, in the order of their seconds, and the number of the rest."""
    record = CallRecord()
    record.python |= {("all_reduce", bits + 1): [2000, 1e9, 0.0, 0.0, float(bits)] for bits in range(13)}
    record.python["scan", 21] = [1, 1 << 20, 90.0, 9.0, 1.0]
    record.delays |= {f"train.py:{number}": float(number) for number in range(7)} | {"": 9.0}
    _, *rows = shares_table(record)
    assert rows[0].split() == "scan 1048576 1 100.000 90.0 9.0 1.0 0.00".split()
    assert rows[1].split() == "all_reduce 4096 2000 12.000 0.0 0.0 100.0 0.08".split()
    assert rows[10] == "4 more kinds of calls took less time"
    assert rows[11:] == ["late by 9.000 s before asynchronous calls", *(
        f"late by {number}.000 s before train.py:{number}" for number in (6, 5, 4, 3))]
    assert shares_table(CallRecord()) == ["no call"]


def ask_the_port(port):
    """Compare the answers of a port with the figures: in a process of its own, since an export lasts until the end."""
    comms = gc.init_local(2)

    def read():
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            return answer.headers["Content-Type"], answer.read().decode()

    all_on_threads(comms, lambda comm: (comm.all_reduce(numpy.ones(3)), comm.barrier()))
    expected = {**sample(comms[0].stats(), 0), **sample(comms[1].stats(), 1)}
    kind, text = read()
    assert kind.startswith("text/plain; version=")
    assert parsed(text) == expected
    assert len(expected) == 2 * 2 * 5
    for comm in comms:  # a counter never decreases
        comm.close()
    assert parsed(read()[1]) == expected
    more, = gc.init_local(1)
    more.barrier()
    key = "gpucoll_calls_total", (("collective", "barrier"), ("rank", "0"), ("size_class", "0"))
    assert parsed(read()[1])[key] == expected[key] + 1
    more.close()


def test_the_port_answers_with_the_figures_of_all_ranks():
    port = free_port()
    run(f"import test_metrics; test_metrics.ask_the_port({port})", f"port:{port}")


PROGRAM = """
import numpy
import gpucoll as gc
with gc.init() as comm:
    for _ in range(3):
        comm.all_reduce(numpy.ones(4))
"""


def test_the_file_is_complete_at_the_end(tmp_path):
    path = tmp_path / "job.prom"
    run(PROGRAM, f"file:{path}")
    found = parsed(path.read_text())
    assert found["gpucoll_calls_total", (("collective", "all_reduce"), ("rank", "0"), ("size_class", "32"))] == 3
    assert [one.name for one in tmp_path.iterdir()] == ["job.prom"]


def test_local_ranks_write_files_and_ports_of_their_own(tmp_path):
    assert [metrics._path(tmp_path / "F.prom", rank).name for rank in (0, 3)] == ["F.prom", "F-3.prom"]


@pytest.mark.parametrize("wanted", ["on", "files:F.prom", "file:", "port:", "port:http", "port:0", "port:65536",
                                    "port:-1", "otel", "summary"])
def test_unknown_values_are_refused_at_the_start(monkeypatch, wanted):
    monkeypatch.setenv("GPUCOLL_METRICS", wanted)
    with pytest.raises(gc.ArgumentError, match=r"GC-OPTION.*file:F\.prom.*port:9400"):
        gc.init_local(1)


def test_a_port_that_is_taken_and_a_folder_that_is_not_there(monkeypatch, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        for wanted in (f"port:{server.getsockname()[1]}", f"file:{tmp_path}/none/F.prom"):
            monkeypatch.setenv("GPUCOLL_METRICS", wanted)
            with pytest.raises(gc.BackendError, match="GC-OPTION"):
                gc.init_local(1)
