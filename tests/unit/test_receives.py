"""Receives by length, on a communicator filled by the test, and requests of an MPI that goes on after a death."""

import collections
import sys
import threading
from types import SimpleNamespace

import numpy
import pytest

from gpucoll.executors import messages
from gpucoll.executors.messages import MatchedReceives, receiver
from gpucoll.transport.control import LossyRequest

TRUNCATE, FAILED = 15, 75


class Refused(Exception):
    def __init__(self, kind):
        super().__init__(kind)
        self.kind = kind

    def Get_error_class(self):
        return self.kind


class Comm:
    """One rank's side: `came` has arrived messages by source and tag; as in Open MPI, receives write whole messages."""

    def __init__(self):
        self.came = collections.defaultdict(collections.deque)

    def Improbe(self, source, tag, status):
        if not self.came[source, tag]:
            return None
        row = self.came[source, tag].popleft()
        status.count = len(row)

        def receive(buffer):
            assert len(buffer[0]) >= len(row), "written beyond the room"
            buffer[0][:len(row)] = numpy.frombuffer(row, numpy.uint8)
            return SimpleNamespace(Test=lambda status=None: True, Wait=lambda status: None)

        return SimpleNamespace(Irecv=receive)


@pytest.fixture
def comm(monkeypatch):
    def status():
        made = SimpleNamespace(count=0, cancelled=False)
        made.Set_cancelled = lambda value: setattr(made, "cancelled", value)
        return made

    fake = SimpleNamespace(Status=status, Exception=Refused, ERR_TRUNCATE=TRUNCATE)
    monkeypatch.setattr(messages, "_mpi", lambda: fake)
    return Comm()


def room(count):
    return numpy.zeros(count, numpy.uint8)


def test_receives_take_messages_in_the_order_in_which_they_began(comm):
    """The order holds whichever receive is tested first."""
    first, second, probing = room(2), room(2), MatchedReceives(comm)
    one, other = (probing.Irecv([row, "B"], 3, 5) for row in (first, second))
    assert not one.Test()
    assert not other.Test()
    comm.came[3, 5].extend([b"ab", b"cd"])
    comm.came[3, 6].append(b"no")
    assert other.Test()
    assert one.Test()
    assert (first.tobytes(), second.tobytes()) == (b"ab", b"cd")
    assert list(comm.came[3, 6]) == [b"no"]


def test_a_receive_is_posted_in_one_step(comm):
    """Another thread matches while a receive is posted: it must not drop the queue to which the receive is added."""
    class Queues(dict):
        def setdefault(self, *given):
            found = super().setdefault(*given)
            other = threading.Thread(target=probing.match)
            other.start()
            other.join()
            return found

    row, probing = room(2), MatchedReceives(comm)
    probing._waiting = Queues()
    request = probing.Irecv([row, "B"], 3)
    comm.came[3, 0].append(b"ab")
    assert request.Test()
    assert row.tobytes() == b"ab"


def test_nothing_is_written_of_a_message_that_is_too_long(comm):
    row, probing = room(2), MatchedReceives(comm)
    request = probing.Irecv([row, "B"], 3)
    comm.came[3, 0].extend([b"abc", b"de"])
    with pytest.raises(Refused) as told:
        request.Test()
    assert told.value.kind == TRUNCATE
    assert request.Test()
    assert row.tobytes() == bytes(2)
    assert probing.Irecv([row, "B"], 3).Test()
    assert row.tobytes() == b"de"


def test_a_cancelled_receive_takes_no_message(comm):
    first, second, probing = room(2), room(2), MatchedReceives(comm)
    one, other = (probing.Irecv([row, "B"], 3, 5) for row in (first, second))
    one.Cancel()
    status = messages._mpi().Status()
    one.Wait(status)
    assert one.Test()
    assert status.cancelled
    comm.came[3, 5].append(b"ab")
    assert other.Test()
    assert (first.tobytes(), second.tobytes()) == (bytes(2), b"ab")


@pytest.mark.parametrize(("vendor", "probes"), [("Open MPI v5.0.11", True), ("MPICH Version: 5.0.2", False)])
def test_only_where_mpi_writes_too_much_lengths_are_looked_at(comm, monkeypatch, vendor, probes):
    messages._mpi().Get_library_version = lambda: vendor
    monkeypatch.setattr(messages, "overruns", messages.overruns.__wrapped__)
    assert isinstance(receiver(comm), MatchedReceives) == probes
    assert receiver(plain := SimpleNamespace(Irecv=None)) is plain


# Requests of an MPI that goes on after a death: the other rank's death is no error.


class Request:
    """As in MPI, the request is forgotten at its error, and then counts as ended."""

    def __init__(self, error):
        self.error = error

    def Test(self):
        error, self.error = self.error, None
        if error is not None:
            raise error
        return True


@pytest.fixture(autouse=True)
def failures(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", SimpleNamespace(Exception=Refused, ERR_PROC_FAILED=FAILED))


@pytest.mark.parametrize("ended", [True, False])
def test_a_request_of_a_dead_rank_stays_as_told(ended):
    request = Request(Refused(FAILED))
    tested = LossyRequest(request, ended=ended)
    assert [tested.Test(), tested.Test()] == [ended, ended]
