"""Options, launchers, GPUs and command lines, without MPI."""

import sys
import types
from unittest import mock

import numpy
import pytest

from gpucoll.cli import arguments, main
from gpucoll.communicator.gpu import make_gpu
from gpucoll.device import gpus
from gpucoll.errors import ArgumentError, BackendError, CollectiveTimeout, UsageError
from gpucoll.launch import bootstrap
from gpucoll.progress.waits import Progress

H200 = gpus.ClaimedGpu(0, "01:00.0", "H200")


def test_arguments_win_over_the_environment():
    environment = {"GPUCOLL_TIMEOUT": "9", "GPUCOLL_CHECK": "off", "GPUCOLL_EXECUTOR": "mpi"}
    assert bootstrap.options({}, environment)[:3] == (9.0, "off", "mpi")
    assert bootstrap.options({"timeout": 1, "check": "full", "executor": "native"}, environment)[:3] == \
        (1.0, "full", "native")
    assert bootstrap.options({"timeout": None}, {}).timeout == 300
    timeouts = ({"timeout": wrong} for wrong in (-1, "x", True, numpy.True_, b"3", 10 ** 400))
    for wrong in (*timeouts, {"check": "fast"}, {"executor": "mpy"}):
        with pytest.raises(ArgumentError):
            bootstrap.options(wrong, {})
    for wrong in ("x", 1, 0, None, ["exact"]):
        with pytest.raises(UsageError, match="neither True nor False nor 'exact'"):
            bootstrap.options({"deterministic": wrong}, {})
    assert [bootstrap.options({"deterministic": bits}, {}).deterministic for bits in (numpy.True_, "exact")] == \
        [True, "exact"]
    said = [bootstrap.options({}, {"GPUCOLL_DETERMINISTIC": text}).deterministic for text in ("", "0", "1", "exact")]
    assert said == [False, False, True, "exact"]
    assert bootstrap.options({"deterministic": False}, {"GPUCOLL_DETERMINISTIC": "exact"}).deterministic is False
    with pytest.raises(UsageError, match="the environment has 0, 1 or exact"):
        bootstrap.options({}, {"GPUCOLL_DETERMINISTIC": "True"})
    with pytest.raises(ArgumentError, match="did you mean native"):
        bootstrap.options({}, {"GPUCOLL_EXECUTOR": "natve"})


def test_a_device_is_named_by_its_ordinal(monkeypatch):
    for given, environment, device in (({}, {}, None), ({}, {"GPUCOLL_DEVICE": "2"}, 2), ({"device": 0}, {}, 0),
                                       ({"device": 1}, {"GPUCOLL_DEVICE": "emulated"}, 1),
                                       ({}, {"GPUCOLL_DEVICE": "emulated"}, "emulated")):
        options = bootstrap.options(given, environment)
        assert (options.device, options.emulated) == (device, device == "emulated")
        assert options.ordinal == (None if device == "emulated" else device)
    for wrong in (-1, True, 1.0, "gpu", "1.5"):
        with pytest.raises(ArgumentError, match="GC-DEVICE"):
            bootstrap.options({"device": wrong}, {})
    monkeypatch.setattr(gpus, "gpu_count", lambda: 4)
    assert [gpus.device_of(index, ordinal) for index, ordinal in ((0, None), (5, None), (0, 3))] == [0, 1, 3]
    with pytest.raises(ArgumentError, match=r"GC-DEVICE.* has 4 GPUs"):
        gpus.device_of(0, 4)


def test_a_rank_that_a_signal_takes_out_of_the_first_meeting_is_named(monkeypatch):
    """No communicator is made, because the second meeting reaches the deadline."""
    mpi = types.SimpleNamespace(Query_thread=lambda: 0, THREAD_MULTIPLE=3, ANY_SOURCE=-1, Status=object)
    monkeypatch.setitem(sys.modules, "mpi4py", types.SimpleNamespace(MPI=mpi))
    monkeypatch.setattr(bootstrap.RollCall, "missing", lambda roll: (1,))
    monkeypatch.setattr(bootstrap, "end_together", lambda: None)
    monkeypatch.setattr(bootstrap.PROCESS, "limits", [])
    barriers = iter([lambda: True, lambda: False])
    comm = types.SimpleNamespace(size=2, rank=0, Iprobe=lambda *_: False,
                                 Ibarrier=lambda: types.SimpleNamespace(Test=next(barriers)))
    with pytest.raises(CollectiveTimeout, match="ranks 1 to make") as late:
        bootstrap.meet(comm, 0.1, lambda: pytest.fail("made"))
    assert late.value.ranks == (1,)


def test_why_there_is_no_gpu(monkeypatch):
    error = RuntimeError("cudaErrorSystemNotReady: system not yet initialized")
    runtime = types.SimpleNamespace(getDeviceCount=mock.Mock(side_effect=error))
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime)))
    assert (gpus.gpu_count(), gpus.no_gpu()) == (0, str(error))
    with pytest.raises(BackendError, match=r"GC-NO-GPU.*system not yet initialized"):
        make_gpu("cuda", None, Progress(1.0), None, {})
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert (gpus.gpu_count(), "CuPy cannot be imported" in gpus.no_gpu()) == (0, True)


def test_gpus_are_owned_by_one_rank_of_a_host():
    gpus.check_gpus([("a", H200), ("b", H200)], share=False)
    gpus.check_gpus([("a", H200), ("a", H200)], share=True)
    with pytest.raises(UsageError) as error:
        gpus.check_gpus([("a", H200), ("b", H200), ("a", H200)], share=False)
    assert error.value.ranks == (0, 2)
    parts = [(host, H200._replace(identity=f"MIG-{number}")) for number, host in enumerate("abba")]
    gpus.check_gpus(parts, share=True)
    gpus.check_gpus(parts[:2], share=False)
    with pytest.raises(UsageError, match=r"parts.*NCCL takes one rank") as error:
        gpus.check_gpus(parts, share=False)
    assert error.value.ranks == (0, 3)
    with pytest.raises(BackendError) as missing:
        gpus.check_gpus([("a", H200), ("a", None)], share=True)
    assert missing.value.ranks == (1,)


@pytest.mark.parametrize(("given", "words"), [
    (["verify", "--ranks", "x"], "--ranks"), (["dance"], "dance"), (["verify", "--algorithm", "rng"], "rng")])
def test_wrong_arguments_are_one_line_of_all_ranks_and_exit_code_2(given, words, capsys, monkeypatch):
    for rank in (0, 1):
        monkeypatch.setattr(arguments, "launched", lambda rank=rank: (1, rank))
        with pytest.raises(SystemExit) as end:
            main(given)
        error = capsys.readouterr().err
        assert (end.value.code, error.count("\n"), words in error) == (2, 1 - rank, rank == 0)


