"""gpucoll doctor without MPI and GPU: facts from substitutes, verdicts on links, each rule, the self-test."""

import copy
import itertools
import sys
from types import SimpleNamespace
from unittest import mock

import numpy
import pytest

import gpucoll as gc
from gpucoll.core.collectives import COLLECTIVES
from gpucoll.doctor import facts, probes, remarks

GIB = 1 << 30
OPEN_MPI, MPICH = "Open MPI v5.0.11, package: Open MPI me@farm", "MPICH Version:      5.0.2\nMPICH configure:    /home"
MPIEXEC, OTHER = {"PMI_SIZE": "4", "PMI_RANK": "1"}, {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}


def test_gpus_their_links_and_what_they_reach(monkeypatch):
    """A substitute for pynvml has two GPUs; the second has an NVLink down and no readable memory."""
    error = type("NVMLError", (Exception,), {})
    library = mock.Mock(NVML_NVLINK_MAX_LINKS=4, NVMLError=error,
                        NVMLError_NotSupported=type("NotSupported", (error,), {}),
                        NVMLError_InvalidArgument=type("InvalidArgument", (error,), {}))
    library.nvmlDeviceGetCount.return_value = 2
    library.nvmlDeviceGetHandleByIndex = "ab".__getitem__
    library.nvmlDeviceGetName = "GPU {}".format
    library.nvmlDeviceGetPciInfo.return_value.busId = "00000000:0A:00.0"
    library.nvmlDeviceGetMemoryInfo.side_effect = [SimpleNamespace(free=GIB), library.NVMLError_NotSupported]
    library.nvmlDeviceGetNvLinkState = lambda handle, link: (handle, link) != ("b", 1)
    library.nvmlDeviceGetP2PStatus = lambda one, two, index: {2: int(one == "b"), 0: 0}[index]  # NVML's numbering
    monkeypatch.setitem(sys.modules, "pynvml", library)
    found = facts.host().facts["gpus"]
    assert [(gpu["name"], gpu["free_bytes"], gpu["nvlinks"], gpu["reaches"]) for gpu in found] == [
        ("GPU a", GIB, {"up": 4, "down": 0}, ["itself", "NVLink"]),
        ("GPU b", None, {"up": 3, "down": 1}, ["PCI", "itself"])]
    assert library.nvmlShutdown.called
    library.nvmlInit.side_effect = RuntimeError("no driver")
    assert facts.host().missing == {"gpus": "no driver"}


@pytest.mark.parametrize(("library", "environment", "mpiexec", "mismatch"), [
    (MPICH, OTHER, None, "Open MPI's mpiexec started 2 ranks, but mpi4py uses MPICH 5.0.2"),
    (MPICH, {}, "Open MPI's, 5.0.11", "is Open MPI's, 5.0.11, but mpi4py uses MPICH 5.0.2: each rank would be alone"),
    ("Some MPI 1.0", MPIEXEC, None, None), (OPEN_MPI, {**MPIEXEC, "SLURM_PROCID": "1"}, None, None)])
def test_a_launcher_of_another_mpi_is_one_sentence(monkeypatch, library, environment, mpiexec, mismatch):
    monkeypatch.setattr(facts, "mpi_module", lambda: SimpleNamespace(Get_library_version=lambda: library))
    monkeypatch.setattr(facts, "_mpiexec", lambda: mpiexec)
    found = facts.mpi(environment).facts
    assert (found["match"] is False) == (mismatch is not None)
    assert found["mismatch"] is None if mismatch is None else mismatch in found["mismatch"]


def network(hosts, late=(), narrow=()):
    """Return the verdict on the links of all pairs: figures spread by a half, and far worse for the named pairs."""
    links = {}
    for number, pair in enumerate(itertools.combinations(range(len(hosts)), 2)):
        latency, bandwidth = (2.0, 8e3) if len({hosts[rank] for rank in pair}) == 1 else (40.0, 100.0)
        spread = 1 + (number * 7 % 11) / 20
        links[pair] = (latency * spread * (100 if pair in late else 1),
                       bandwidth / spread / (10 if pair in narrow else 1))
    return probes.verdict(links, hosts)


OF_HOST_C = [(one, two) for one in range(4) for two in (4, 5)]


@pytest.mark.parametrize(("hosts", "late", "narrow"), [
    ("aaaaaaaa", [], []), ("ab", [], []), ("aabbcc", [(2, 3)], [(1, 4)]),
    ("aabbcc", [], OF_HOST_C)])  # a slow host of three is found, although most links between hosts lead to this host
def test_the_planted_slow_links_are_found_and_no_other(hosts, late, narrow):
    pairs = network(hosts, late, narrow)["pairs"]
    assert [tuple(pair["ranks"]) for pair in pairs if pair["slow"]] == [*late, *narrow]


GPU = {"name": "H200", "pci": "01:00.0", "free_bytes": GIB, "nvlinks": {"up": 18, "down": 0}, "reaches": ["itself"]}
CUDA = {"versions.cupy": "14.2.0", "versions.cuda_driver": "13.0", "versions.cuda_runtime": "13.4",
        "versions.nccl": "2.32.3"}
FAULT = {"call": "scan, ring", "ranks": [2], "what": "1 elements are wrong"}


def examined(size=4, links=None, **changes):
    """Return the judged report, and its text, of a healthy job with `changes`, such as `versions.cupy`."""
    places = {
        "versions": {"numpy": "2.4.6", "cupy": None, "nccl": None, "cuda_runtime": None, "cuda_driver": None},
        "mpi": {"store": False, "library": "MPICH 5.0.2", "launcher": "MPICH's mpiexec", "launched": size,
                "mpiexec": None, "mismatch": None, "match": True},
        "host": {"name": "a", "ranks": list(range(size)), "cores": 8, "bound": {"0-7": list(range(size))}, "far": [],
                 "shm_free": 60 * GIB, "engine": "installed", "gpus": None,
                 "missing": {"gpus": "no pynvml", "shm_free": "no folder", "engine": "there is none"}},
        "test": {"calls": 100, "collectives": 16, "seconds": 2.0, "faults": []}, "missing": {}}
    for name, value in changes.items():
        place, _, key = name.partition(".")
        places[place][key] = copy.deepcopy(value)
    found = {"ranks": size, "versions": places["versions"], "mpi": places["mpi"], "hosts": [places["host"]],
             "missing": places["missing"], "links": links, "self_test": {"cpu": places["test"]}}
    remarks.judge(found)
    lines = [*remarks.facts(found), *remarks.tests(found)]
    assert max(map(len, lines)) <= remarks.WIDTH
    return found, "\n".join(lines)


def test_where_all_is_well_nothing_is_said():
    for changes in ({}, {**CUDA, "versions.cuda_driver": None}, {**CUDA, "host.gpus": [GPU]}):
        found, text = examined(links=network("aaaa"), **changes)
        assert (found["problems"], found["advice"], found["verdict"], found["exit_code"]) == ([], [], "fine", 0)
        assert text.endswith("verdict     fine")


@pytest.mark.parametrize(("changes", "code", "serious", "words"), [
    ({"mpi.library": None, "missing.library": "no libmpi"}, "GC-LAUNCHER", True, "no libmpi; pip install"),
    ({"mpi.mismatch": "another one", "mpi.match": False}, "GC-LAUNCHER", True, "another one"),
    ({"missing.mpiexec": "no mpiexec"}, "GC-LAUNCHER", False, "cannot be launched: no mpiexec"),
    ({"host.shm_free": 1 << 20}, "GC-SHM", True, "1,048,576 bytes free for ranks 0, 1, 2, 3"),
    ({"host.shm_free": 60 << 20}, "GC-SHM", False, "--shm-size=1g"),
    ({"host.engine": None}, "GC-ENGINE", True, "a: there is none"),
    ({"host.cores": 2}, "GC-CORES", False, "ranks 0, 1, 2, 3 share 2 cores of a"),
    ({"host.bound": {"0-3": [0, 2], "4-7": [1, 3]}, "host.far": [1, 2]}, "GC-CORES", False,
     "ranks 1, 2 of a may not use the processors near their GPUs: gpucoll run --bind numa"),
    ({"test.faults": [FAULT]}, "GC-RESULT", True, "self-test on cpu: scan, ring: 1 elements are wrong on rank 2"),
    ({**CUDA, "versions.cuda_driver": "12.9"}, "GC-NO-GPU", True, "CUDA 12.9, older than CuPy's 13.4"),
    ({**CUDA, "versions.nccl": None, "missing.nccl": "no libnccl"}, "GC-NCCL", False, "no libnccl"),
    ({"host.gpus": [GPU], "missing.cupy": "not there"}, "GC-NO-GPU", False, "no CuPy: not there"),
    ({"host.gpus": [GPU, {**GPU, "nvlinks": {"up": 17, "down": 1}}]}, "GC-LINK", False, "GPU 1 (01:00.0) of a"),
    ({"host.gpus": [GPU, {**GPU, "reaches": ["none", "itself"]}]}, "GC-LINK", False, "IOMMU")])
def test_each_rule_speaks_of_its_matter_alone(changes, code, serious, words):
    found, text = examined(**changes)
    assert [remark["code"] for remark in found["problems"] + found["advice"]] == [code]
    assert words in found["problems" if serious else "advice"][0]["text"]
    assert found["exit_code"] == int(serious)
    assert f"[{code}]" in text


@pytest.mark.parametrize(("name", "spoil", "words"), [
    (None, None, None),
    ("all_reduce", lambda x: x + (numpy.arange(x.size) == 7).astype(x.dtype), "1 elements are wrong"),
    ("scan", lambda x: x.astype("float64"), "the result is float64 of shape (1000,), expected float32"),
    ("gather_v", lambda xs: [xs[0][::-1]], "elements are wrong"),
    ("barrier", lambda x: numpy.ones(1), "expected None")])
def test_the_self_test_finds_a_wrong_result_and_no_other(name, spoil, words):
    seen = {case[:2] for case in itertools.islice(probes.cases(4, "cpu"), 40 * len(COLLECTIVES))}
    assert {(kind, algorithm) for kind in COLLECTIVES for algorithm in gc.algorithms(kind, size=4)} <= seen
    (comm,) = gc.init_local(1)
    if name:
        right = getattr(comm, name)
        setattr(comm, name, lambda *given, **options: spoil(right(*given, **options)))
    def alone(own):
        return [own]

    outcome = probes.self_test(comm, alone, "cpu", numpy, 0.0)
    assert outcome["calls"] == outcome["collectives"] == len(COLLECTIVES)
    assert [fault["ranks"] for fault in outcome["faults"]] == ([[0]] if name else [])
    assert all(fault["call"].startswith(f"{name}, ") and words in fault["what"] for fault in outcome["faults"])
    lists, broken = SimpleNamespace(asarray=list), SimpleNamespace(asarray=lambda x: {}["no memory"])
    # An array type refused by all ranks is no fault; a refusal by one of two ranks is a fault.
    assert "not an array" in probes.self_test(comm, alone, "cuda", lists, 0.0)["refused"]
    another = probes.self_test(comm, lambda own: [own, (None, None, 0.0)], "cuda", lists, 0.0)  # one of two refuses
    assert ([fault["ranks"] for fault in another["faults"]], another["refused"]) == ([[0]], None)
    failed = probes.self_test(comm, alone, "cuda", broken, 0.0)
    assert (failed["faults"][0]["what"], failed["calls"], failed["refused"]) == ("'no memory'", 1, None)
