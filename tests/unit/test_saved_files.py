"""Readers of saved files return, or raise a typed error, whatever the content; nothing in a file is ever executed."""

import argparse
import hashlib
import io
import json
import zipfile
from unittest import mock

import numpy
import pytest
from hypothesis import strategies as st

import gpucoll as gc
from gpucoll import training
from gpucoll.health import report
from gpucoll.health.flight import MAGIC, PREAMBLE, Flight, read
from gpucoll.training import checkpoint
from harness.hostile import DEEP, any_content, exchanged, holds

FEW, MANY = 25, 400


class Content(bytes):
    """Bytes with a short repr: errors show only the beginning."""

    def __repr__(self):
        return f"{len(self)} bytes: {bytes(self[:300])!r}"


@pytest.fixture(params=[FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def count(request):
    return request.param


def test_a_clock_is_read_between_two_readings_of_the_other(tmp_path):
    """The process loses its core between the first two readings, for ten seconds of the clocks."""
    ticks = iter([0, 10**10, *range(10**10 + 1, 10**10 + 100)])
    with mock.patch("gpucoll.health.flight.time.monotonic_ns", side_effect=ticks), \
            mock.patch("gpucoll.health.flight.now", return_value=10**18):
        Flight(tmp_path, "job", 0, 2)
    path, = tmp_path.glob("*.flight")
    facts = json.loads(path.read_bytes()[24:PREAMBLE].partition(b"\0")[0])
    assert 10**18 - 10**10 - 100 < facts["wall"] < 10**18 - 10**10


def test_flight_records(tmp_path, count):
    flight = Flight(tmp_path, "job", 0, 2)
    for words in ("all_reduce", "broadcast"):
        flight.began(words)
        flight.ended(7, 9, 1, 2)
    path, = tmp_path.glob("*.flight")
    assert [(one.ended - one.began, one.own, one.waited) for one in read(path).calls] == [(2, 1, 2)] * 2
    whole = path.read_bytes()
    facts = json.loads(whole[24:PREAMBLE].partition(b"\0")[0])

    def body(content):
        path.write_bytes(content)
        report.written(tmp_path, tmp_path / "trace.json", as_json=True)
        report.written(tmp_path, None, as_json=False)

    def headed(found):
        text = json.dumps(found).encode()[:PREAMBLE - 24]
        return MAGIC.ljust(24, b"\2") + text.ljust(PREAMBLE - 24, b"\0") + whole[PREAMBLE:]

    rows = st.binary(min_size=256, max_size=1024).map(lambda row: whole[:PREAMBLE] + row + whole[PREAMBLE + len(row):])
    deep = DEEP.map(lambda text: MAGIC.ljust(24) + text.ljust(PREAMBLE)[:PREAMBLE - 24] + whole[PREAMBLE:])
    holds(st.one_of(any_content(whole), exchanged(lambda: facts).map(headed), rows, deep).map(Content), body, count)


def test_checkpoints(tmp_path, count):
    """Checksums fit the damaged content: deliberate damage would renew the checksums, too."""
    comm, = gc.init_local(1)
    with comm:
        training.ZeRO({"w": numpy.arange(6.0), "b": numpy.ones(2)}, comm, training.Adam(), 1).save(tmp_path)
        path, manifest = next(tmp_path.glob("*.npz")), tmp_path / checkpoint.MANIFEST
        packed, told = path.read_bytes(), json.loads(manifest.read_text())
        del told["sha256"]

        def body(drawn):
            document, content = drawn
            if isinstance(document, dict):
                for file in document["files"] if isinstance(document.get("files"), list) else ():
                    if isinstance(file, dict) and content is not None:
                        file["sha256"] = hashlib.sha256(content).hexdigest()
                text = json.dumps(document, indent=1)
                document = f"{text[:-2]},\n {checkpoint._digest_of(text)}\n}}".encode(errors="replace")
            manifest.write_bytes(document)
            path.write_bytes(packed if content is None else content)
            training.ZeRO.load(tmp_path, comm, training.Adam(), 1)

        headers = st.sampled_from((
            b"\x93NUMPY\1\0v\0{'descr': '|O', 'fortran_order': False, 'shape': (9,)}".ljust(127) + b"\n",
            b"\x93NUMPY\1\0v\0{'descr': '<f8', 'fortran_order': False, 'shape': (1 << 50,)}".ljust(127) + b"\n",
            b"\x93NUMPY\1\0\5\0((((\n", b"\x80\x04cos\nsystem\n"))
        names = st.sampled_from(("parameter/w.npy", "mean/w.npy", "x"))
        files = st.dictionaries(names, st.binary(max_size=99) | headers)
        holds(st.one_of(st.tuples(exchanged(lambda: told), st.none()),
                        st.tuples(any_content(manifest.read_bytes()), st.none()),
                        st.tuples(st.just(told), any_content(packed) | st.builds(zipped, files, st.integers(0, 99)))),
              body, count)


def zipped(files, method):
    room = io.BytesIO()
    with zipfile.ZipFile(room, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return room.getvalue().replace(b"\x14\0\0\0\0\0", b"\x14\0\0\0" + bytes([method, 0]))


def test_a_folder_without_records_is_told_in_one_line(tmp_path, capsys):
    asked = argparse.Namespace(folder=str(tmp_path), trace=None, json=False, stragglers=False)
    assert report.main(asked) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"gpucoll report: {tmp_path} has no file")
    assert "GPUCOLL_DUMP_DIR" in line
