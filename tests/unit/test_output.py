"""Words on outputs that are closed, full, or that nobody reads: who speaks gets no failure, and waits not for long."""

import errno
import os
import subprocess
import sys
import threading

import pytest

from gpucoll.core import output
from harness.jobs import same_gpucoll
from harness.pace import seconds


class Rude:
    def write(self, text):
        raise SystemExit(text)


@pytest.fixture
def streams(tmp_path):
    """Return streams that take no words, by name."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(tmp_path / "closed", "w") as closed:
        pass
    with open("/dev/full", "w") as full, open(writer, "w") as unread:
        yield {"closed": closed, "full": full, "no reader": unread, "rude": Rude()}


@pytest.mark.parametrize("name", ["closed", "full", "no reader", "rude"])
def test_what_cannot_be_said_raises_nothing(streams, name):
    assert not output.say("words\n", streams[name])


def test_who_speaks_waits_for_no_reader_for_ever():
    ends = threading.Event()
    assert not output.attempt(lambda: ends.wait(seconds(10)), 0.1)
    ends.set()


def test_an_output_without_room_gives_its_own_code():
    program = ("import errno, sys\nfrom gpucoll.core import output\nprint('words')\n"
               "assert output.settle() is False\nassert output.settle() is True\n"
               "sys.exit(output.code_without_output(OSError(errno.ENOSPC, 'full')))")
    with open("/dev/full", "w") as full:
        job = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True,
                             env={**os.environ, **same_gpucoll()} | {"PYTHONUNBUFFERED": ""}, timeout=seconds(60),
                             check=False)
    assert (job.returncode, job.stderr) == (1, "gpucoll: [Errno 28] full\n")
    assert output.code_without_output(BrokenPipeError()) == 141
    assert output.code_without_output(OSError(errno.ENOENT, "no such file")) is None
