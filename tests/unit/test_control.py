"""Requests of an MPI that goes on after a death: the other rank's death is no error of the test."""

import sys
from types import SimpleNamespace

import pytest

from gpucoll.transport.control import LossyRequest

FAILED, OTHER = 75, 15


class Refused(Exception):
    def __init__(self, kind):
        super().__init__(kind)
        self.kind = kind

    def Get_error_class(self):
        return self.kind


class Request:
    """As in MPI, the request is forgotten at its error, and then counts as ended."""

    def __init__(self, error):
        self.error, self.cancelled = error, False

    def Test(self):
        error, self.error = self.error, None
        if error is not None:
            raise error
        return True

    def Cancel(self):
        self.cancelled = True


@pytest.fixture(autouse=True)
def mpi(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", SimpleNamespace(Exception=Refused, ERR_PROC_FAILED=FAILED))


@pytest.mark.parametrize("ended", [True, False])
def test_a_request_of_a_dead_rank_stays_as_told(ended):
    request = Request(Refused(FAILED))
    tested = LossyRequest(request, ended=ended)
    assert [tested.Test(), tested.Test()] == [ended, ended]
    tested.Cancel()
    assert not request.cancelled


def test_other_errors_are_raised():
    with pytest.raises(Refused):
        LossyRequest(Request(Refused(OTHER)), ended=False).Test()


def test_a_request_without_an_error_is_tested_and_cancelled():
    request = Request(None)
    tested = LossyRequest(request, ended=False)
    assert tested.Test()
    tested.Cancel()
    assert request.cancelled
