"""Progress: failures; without MPI."""

import threading

import pytest

from gpucoll.errors import BackendError, RankFailedError, RevokedError
from gpucoll.progress.operations import Work
from gpucoll.progress.waits import Progress
from harness.pace import seconds

PATIENCE = seconds(60)


def test_an_error_of_the_transport_between_polls_has_a_cause():
    """Such errors end a wait outside of an operation too, as of a call that waits for its turn."""
    waits = Progress(PATIENCE, foreign=(KeyError,))
    waits.hooks.append(failing(KeyError("a peer")))
    with pytest.raises(BackendError, match="test: 'a peer'"):
        waits.until(lambda: False, "test", float("inf"))
    waits.explain = lambda error: RankFailedError("rank 2 has ended", ranks=(2,))
    with pytest.raises(RankFailedError, match="rank 2 has ended"):
        waits.until(lambda: False, "test", float("inf"))


def failing(error):
    def fail():
        raise error

    return fail


def test_foreign_errors_are_backend_errors_and_interrupts_revoke():
    with pytest.raises(BackendError, match="truncated"):
        Progress(PATIENCE, foreign=(OSError,)).run(iter([failing(OSError("truncated"))]), "test")
    waits = Progress(PATIENCE)
    with pytest.raises(KeyboardInterrupt):
        waits.run(iter([failing(KeyboardInterrupt())]), "test")
    with pytest.raises(RevokedError):
        waits.check()


@pytest.mark.parametrize("threads", [True, False])
def test_an_error_of_another_kind_does_not_end_the_progress_thread(threads):
    """The thread waiting for the operation raises it, as a BackendError."""
    waits, ready = Progress(PATIENCE, threads=threads), threading.Event()

    def pending():
        if ready.is_set():
            raise MemoryError("no more")
        return False

    work = waits.start(Work(waits, iter([pending]), "test", None))
    ready.set()
    with pytest.raises(BackendError, match="MemoryError"):
        work.wait()
    with pytest.raises(RevokedError):
        waits.check()
    waits.close()
