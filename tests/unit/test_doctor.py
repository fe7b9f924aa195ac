"""gpucoll doctor without MPI and without a GPU: rules, verdicts on links, NVML's facts from a stand-in, text."""

import copy
import ctypes
import itertools
import statistics
import sys
import types

import numpy
import pytest

import gpucoll as gc
from gpucoll.collectives import COLLECTIVES
from gpucoll.doctor import findings, gpus, links, machine, mpi, rules, run, selftest, text, versions

GIB = 1 << 30
OPEN_MPI = "Open MPI v5.0.11, package: Open MPI builder@farm Distribution, ident: 5.0.11"
MPICH = "MPICH Version:      5.0.2\nMPICH configure:    --prefix=/home/builder/mpich"


# ---------------------------------------------------------------- findings


def test_what_is_missing_says_why_and_hides_who_asks(monkeypatch):
    monkeypatch.setenv("HOME", "/data/people/annelore")
    monkeypatch.setattr(findings.getpass, "getuser", lambda: "annelore")
    raw = ("annelore may not open '/data/people/annelore/venv/lib/libx.so' nor /opt/site/of annelore/lib/liby.so.1, "
           "/dev/shm; see https://example.org/annelore")
    hidden = findings.scrubbed(raw)
    assert "annelore" not in hidden
    assert "/data" not in hidden
    assert "/opt" not in hidden
    assert "liby.so.1" in hidden
    assert "/dev/shm" in hidden
    assert findings.reason(gc.BackendError("no driver in /home/annelore/lib/x.so")) == "no driver in x.so"
    assert findings.reason(KeyError()) == "KeyError"


def test_one_missing_fact_spoils_no_other():
    found = findings.Findings()
    looks = {"a": lambda: 1, "b": lambda: {}["b"], "c": lambda: None}
    assert [found.look(name, look) for name, look in looks.items()] == [1, None, None]
    assert found.facts == {"a": 1, "b": None, "c": None}
    assert found.missing == {"b": "'b'"}


# ---------------------------------------------------------------- versions


def test_without_cupy_and_pynvml_the_other_versions_are_there(monkeypatch):
    for name in ("cupy", "pynvml"):
        monkeypatch.setitem(sys.modules, name, None)
    found = versions.versions()
    assert set(found.facts) == set(versions.NAMES)
    assert (found.facts["gpucoll"], found.facts["numpy"]) == (gc.__version__, numpy.__version__)
    for name in ("cupy", "nccl", "nccl_build", "cuda_runtime"):
        assert found.facts[name] is None
        assert found.missing[name].startswith("cupy")
        assert "is not installed: pip install 'gpucoll[cuda13]'" in found.missing[name]
    for name in ("cuda_driver", "nvidia_driver", "nvidia_ml_py"):
        assert found.missing[name] == "pynvml is not installed: pip install 'gpucoll[nvml]'"


def test_versions_of_a_stand_in_for_cupy(monkeypatch):
    cupy = types.ModuleType("cupy")
    cupy.__version__, cupy.cuda = "14.2.0", types.ModuleType("cupy.cuda")
    cupy.cuda.runtime = types.SimpleNamespace(driverGetVersion=lambda: 0, runtimeGetVersion=lambda: 13020)
    cupy.cuda.nccl = types.SimpleNamespace(available=False)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = versions.versions()
    assert (found.facts["cupy"], found.facts["cuda_runtime"]) == ("14.2.0", "13.2")
    assert "no libnccl" in found.missing["nccl"]
    assert found.missing["cuda_driver"] == "no NVIDIA driver is loaded"
    cupy.cuda.nccl = types.SimpleNamespace(available=True, get_version=lambda: 23203, get_build_version=lambda: 2804)
    found = versions.versions()
    assert (found.facts["nccl"], found.facts["nccl_build"]) == ("2.32.3", "2.8.4")


# ---------------------------------------------------------------- NVML, by a strict stand-in


class NVMLError(Exception):
    """As pynvml's: a class for each error."""


class NotSupported(NVMLError):
    """This GPU does not have it."""


class InvalidArgument(NVMLError):
    """There is no such link."""


class StandIn(types.ModuleType):
    """Two GPUs with 18 NVLinks, of which the second has one down, and a third behind another socket without any.

    As strict as the real one: nothing before nvmlInit or after nvmlShutdown, handles and indices of the right types.
    """

    NVML_NVLINK_MAX_LINKS = 36
    NVML_P2P_CAPS_INDEX_READ = (0,)  # pynvml's own slip
    NVMLError, NVMLError_NotSupported, NVMLError_InvalidArgument = NVMLError, NotSupported, InvalidArgument

    def __init__(self):
        super().__init__("pynvml")
        self.started, self.shut = 0, 0

    def need(self, *handles):
        if self.started <= self.shut:
            raise NVMLError("Uninitialized")
        for handle in handles:
            if not isinstance(handle, ctypes.c_void_p):
                raise ctypes.ArgumentError(f"no handle: {handle!r}")
        return [handle.value - 1 for handle in handles]

    def nvmlInit(self):
        self.started += 1

    def nvmlShutdown(self):
        self.need()
        self.shut += 1

    def nvmlSystemGetDriverVersion(self):
        self.need()
        return b"580.65.06"

    def nvmlSystemGetCudaDriverVersion(self):
        self.need()
        return 13000

    def nvmlDeviceGetCount(self):
        self.need()
        return 3

    def nvmlDeviceGetHandleByIndex(self, index):
        self.need()
        return self.__dict__.setdefault("handles", [ctypes.c_void_p(i + 1) for i in range(3)])[index]

    def nvmlDeviceGetName(self, handle):
        return f"NVIDIA H{self.need(handle)[0]}00"

    def nvmlDeviceGetPciInfo(self, handle):
        return types.SimpleNamespace(busId=f"00000000:{self.need(handle)[0] + 1:02X}:00.0".encode())

    def nvmlDeviceGetMemoryInfo(self, handle):
        if self.need(handle) == [1]:
            raise NotSupported("Not Supported")
        return types.SimpleNamespace(total=80 * GIB, free=79 * GIB)

    def nvmlDeviceGetNvLinkState(self, handle, link):
        gpu = self.need(handle)[0]
        if gpu == 2:
            raise NotSupported("Not Supported")
        if link >= 18:
            raise InvalidArgument("Invalid Argument")
        return int((gpu, link) != (1, 5))

    def nvmlDeviceGetP2PStatus(self, one, two, index):
        if not isinstance(index, int):
            raise ctypes.ArgumentError(f"no index: {index!r}")
        pair = set(self.need(one, two))
        if pair == {0, 2}:
            return 1
        return int(index == 2 and pair != {0, 1})

    def nvmlDeviceGetTopologyCommonAncestor(self, one, two):
        pair = self.need(one, two)
        if pair == [1, 2]:
            raise NVMLError("Unknown Error")
        return 50 if 2 in pair else 20


@pytest.fixture
def nvml(monkeypatch):
    module = StandIn()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_gpus_and_who_reaches_whom(nvml):
    found = gpus.gpus()
    assert [gpu["pci"] for gpu in found.facts["gpus"]] == [f"00000000:0{i}:00.0" for i in (1, 2, 3)]
    assert [gpu["name"] for gpu in found.facts["gpus"]] == ["NVIDIA H000", "NVIDIA H100", "NVIDIA H200"]
    assert [gpu["memory_bytes"] for gpu in found.facts["gpus"]] == [80 * GIB, None, 80 * GIB]
    assert [gpu["nvlinks"] for gpu in found.facts["gpus"]] == [
        {"up": 18, "down": 0}, {"up": 17, "down": 1}, {"up": 0, "down": 0}]
    assert found.facts["p2p"] == [["self", "NVLink", "no: chipset not supported"], ["NVLink", "self", "PCI"],
                                  ["no: chipset not supported", "PCI", "self"]]
    assert found.facts["paths"] == [["self", "PXB", "SYS"], ["PXB", "self", None], ["SYS", "SYS", "self"]]
    assert found.missing == {"gpus[1].memory_bytes": "Not Supported", "gpus[1].memory_free_bytes": "Not Supported",
                             "paths[1][2]": "Unknown Error"}
    assert (nvml.started, nvml.shut) == (1, 1)


def test_the_driver_by_nvml(nvml):
    found = versions.versions()
    assert (found.facts["cuda_driver"], found.facts["nvidia_driver"]) == ("13.0", "580.65.06")
    assert nvml.started == nvml.shut


def test_without_a_driver_there_is_the_reason(nvml, monkeypatch):
    def no_driver():
        raise NVMLError("Driver Not Loaded")

    monkeypatch.setattr(nvml, "nvmlInit", no_driver)
    found = gpus.gpus()
    assert found.facts == {"gpus": None, "p2p": None, "paths": None}
    assert found.missing == {"gpus": "Driver Not Loaded"}


@pytest.mark.mutant
def test_pynvmls_own_index_would_be_noticed(nvml, monkeypatch):
    monkeypatch.setattr(gpus, "READ", nvml.NVML_P2P_CAPS_INDEX_READ)
    found = gpus.gpus()
    assert found.facts["p2p"][1][2] is None
    assert "no index" in found.missing["p2p[1][2]"]


# ---------------------------------------------------------------- launchers


@pytest.mark.parametrize(("environment", "name", "family"), [
    ({"PMI_SIZE": "4", "PMI_RANK": "1", "MPI_LOCALNRANKS": "4"}, "MPICH's mpiexec", "MPICH"),
    ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}, "Open MPI's mpiexec", "Open MPI"),
    ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}, "Slurm's srun", None),
    ({"PMI_SIZE": "4", "PMI_RANK": "1", "SLURM_PROCID": "1"}, "Slurm's srun", None)])
def test_launchers_are_known(environment, name, family):
    assert mpi.launcher(environment) == (name, family, 4)


@pytest.mark.parametrize(("library", "launcher", "words"), [
    (OPEN_MPI, ("MPICH's mpiexec", "MPICH", 4),
     "started 4 ranks, but mpi4py uses Open MPI 5.0.11; launch with Open MPI's"),
    (MPICH, ("Open MPI's mpiexec", "Open MPI", 2), "started 2 ranks, but mpi4py uses MPICH 5.0.2; launch with MPICH's"),
    (MPICH, ("MPICH's mpiexec", "MPICH", 2), None),
    (MPICH, ("Slurm's srun", None, 2), None),
    ("Some MPI 1.0", ("MPICH's mpiexec", "MPICH", 2), None),
    ("Intel(R) MPI Library 2021.19 for Linux* OS", ("MPICH's mpiexec", "MPICH", 2), None),
    (None, ("MPICH's mpiexec", "MPICH", 2), None)])
def test_a_launcher_of_another_mpi_is_one_sentence(library, launcher, words):
    found = mpi.mismatch(library, mpi.Launcher(*launcher))
    assert (found is None) == (words is None)
    assert words is None or (words in found and "\n" not in found)


@pytest.mark.parametrize(("says", "matches"), [
    ("HYDRA build details:\n    Version:      5.0.2", True), ("mpiexec (Open MPI) 5.0.11", False), ("slurm 24", None)])
def test_the_mpiexec_of_a_process_without_a_launcher(monkeypatch, says, matches):
    monkeypatch.setattr(mpi, "_mpiexec_version", lambda: says)
    found = findings.Findings()
    mpi.launcher_facts(found, MPICH, None)
    assert (found.facts["mismatch"] is None) == (matches is not False)
    assert matches is None or found.facts["match"] == matches


def test_names_of_libraries_hide_their_builders():
    assert [mpi.short(library) for library in (OPEN_MPI, MPICH)] == ["Open MPI 5.0.11", "MPICH 5.0.2"]


# ---------------------------------------------------------------- links


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1], [0, 0, 0, 1, 1, 2], [0, 1, 2, 3, 4], [0] * 7,
                                   [0, 1, 0, 1, 2, 3, 2, 0]])
def test_rounds_hold_every_pair_once_and_a_host_in_one_pair(nodes):
    pairs = list(itertools.combinations(range(len(nodes)), 2))
    planned = list(links.rounds(pairs, nodes))
    assert sorted(itertools.chain(*planned)) == pairs
    for together in planned:
        hosts = [host for one, two in together for host in {nodes[one], nodes[two]}]
        assert len(hosts) == len(set(hosts))


def network(nodes, slow_latency=(), slow_bandwidth=()):
    """Links with figures that differ by a half from each other, and those of the named pairs ten times as bad."""
    found = []
    for number, (one, two) in enumerate(itertools.combinations(range(len(nodes)), 2)):
        kind, latency, bandwidth = ("same node", 2e-6, 8e9) if nodes[one] == nodes[two] else ("across nodes", 4e-5, 1e8)
        spread = 1 + (number * 7 % 11) / 20
        found.append(links.Link(one, two, kind, latency * spread * (100 if (one, two) in slow_latency else 1),
                                bandwidth / spread / (10 if (one, two) in slow_bandwidth else 1)))
    return found


def pairs_of(found):
    return [(bad.link.one, bad.link.two) for bad in found]


NODES = [0, 0, 1, 1, 2, 2]
OF_HOST_2 = [(one, two) for one in range(4) for two in (4, 5)]


@pytest.mark.parametrize("nodes", [NODES, [0] * 8, [0, 1], [0, 1, 2]])
def test_links_alike_are_not_slow(nodes):
    assert links.slow(network(nodes)) == []


def test_the_planted_slow_links_are_found_and_no_other():
    assert pairs_of(links.slow(network(NODES, slow_latency=[(0, 3)]))) == [(0, 3)]
    assert pairs_of(links.slow(network(NODES, slow_latency=[(2, 3)], slow_bandwidth=[(1, 4)]))) == [(2, 3), (1, 4)]
    assert pairs_of(links.slow(network([0] * 4, slow_bandwidth=[(1, 2)]))) == [(1, 2)]


def test_a_slow_host_of_three_is_found_though_most_links_are_its():
    assert pairs_of(links.slow(network(NODES, slow_bandwidth=OF_HOST_2))) == OF_HOST_2


@pytest.mark.mutant
def test_the_median_would_not_find_it(monkeypatch):
    monkeypatch.setattr(links, "_quarter", statistics.median)
    assert pairs_of(links.slow(network(NODES, slow_bandwidth=OF_HOST_2))) == []


def test_a_scheduler_is_not_held_against_a_link():
    quick = [links.Link(0, rank, "same node", 1e-6, 5e9) for rank in range(1, 5)]
    assert links.slow([*quick, links.Link(1, 2, "same node", 40e-6, 5e9)]) == []


@pytest.mark.parametrize(("again", "latency", "bandwidth", "slow"), [
    ((2e-6, 7e9), 2e-6, 7e9, []), ((3e-3, 4e8), 2e-3, 4e8, [(0, 1)]), ((3e-3, 1e8), 2e-3, 2e8, [(0, 1)])])
def test_what_looks_slow_is_measured_again_and_the_better_figures_count(monkeypatch, again, latency, bandwidth, slow):
    first = {(0, 1): (2e-3, 2e8), (0, 2): (2e-6, 8e9), (1, 2): (2e-6, 8e9)}
    asked = []

    def answer(probe, pairs):
        asked.append(list(pairs))
        figures = first if len(asked) == 1 else {(0, 1): again}
        return {pair: links.Link(*pair, "same node", *figures[pair]) for pair in pairs}

    monkeypatch.setattr(links._Probe, "run", answer)
    monkeypatch.setattr(links, "REST", (0.0,))
    found = links.measure(types.SimpleNamespace(rank=0, size=3, bcast=lambda value: value), [0] * 3, 1.0)
    assert asked == [list(first), [(0, 1)]]
    assert found[0][3:] == (latency, bandwidth)
    assert pairs_of(links.slow(found)) == slow


# ---------------------------------------------------------------- rules


def rank_facts(rank, node=0, name="a", **changed):
    """What a rank tells of a machine on which all is well."""
    numbers = {"gpucoll": "0.1.0", "python": "3.11.7", "numpy": "2.4.6", "mpi4py": "4.1.2", "ml_dtypes": "0.6.0",
               "cupy": None, "nccl": None, "nccl_build": None, "nvrtc": None, "cuda_runtime": None,
               "cuda_driver": None, "nvidia_driver": None, "nvidia_ml_py": None}
    limit = {"soft": "unlimited", "hard": "unlimited"}
    host = {"cores": 8, "affinity": "0-7", "quota_cores": None, "numa": [{"node": 0, "cores": "0-7"}],
            "slots": True, "shm": {"size": 64 * GIB, "free": 60 * GIB},
            "limits": {"memlock": limit, "nofile": limit, "stack": limit},
            "clock": {"source": "tsc", "resolution_ns": 1, "step_ns": 40}, "rdma": [], "gpus": None, "p2p": None,
            "paths": None}
    return {"rank": rank, "node": node, "name": name, "versions": {**numbers, **changed.pop("versions", {})},
            "versions_missing": dict.fromkeys(numbers, "not there"), "machine": {**host, **changed.pop("machine", {})},
            "missing": {"gpus": "no pynvml"}, "device": None, "device_missing": "no CuPy", "cores": list(range(8)),
            **changed}


def mpi_facts(**changed):
    found = findings.Findings()
    found.facts = {"library": "MPICH 5.0.2", "standard": "5.0", "launcher": "MPICH's mpiexec", "launched": 4,
                   "mpiexec": None, "threads": "multiple", "ranks": 4, "mismatch": None, "match": True, **changed}
    return found


def examined(told, found_links=(), self_test=None, **mpi_changed):
    """The report of what ranks tell, judged."""
    report = run.assemble(told, mpi_facts(**mpi_changed))
    names = {rank: host["name"] for host in report["hosts"] for rank in host["ranks"]}
    report["links"] = run.links_as_json(found_links, names) if found_links else None
    report["missing"] |= {} if found_links else {"links": "one rank"}
    report["self_test"]["cpu"] = self_test or {"calls": 100, "collectives": 17, "seconds": 2.0, "faults": []}
    report["missing"]["self_test.cuda"] = "no CuPy"
    rules.judge(report)
    return report


def alike(size=4, **changed):
    return [rank_facts(rank, **copy.deepcopy(changed)) for rank in range(size)]


def test_where_all_is_well_nothing_is_said():
    report = examined(alike(), network([0] * 4))
    assert (report["problems"], report["advice"], report["verdict"], report["exit_code"]) == ([], [], "fine", 0)


def soft(name, value):
    limits = {kind: {"soft": "unlimited", "hard": "unlimited"} for kind in ("memlock", "nofile", "stack")}
    return {"limits": {**limits, name: {"soft": value, "hard": value}}}


CUDA = {"cupy": "14.2.0", "cuda_driver": "13.0", "cuda_runtime": "13.4", "nccl": "2.32.3", "nccl_build": "2.27.7"}
GPU = {"index": 0, "pci": "01:00.0", "name": "H200", "memory_bytes": GIB, "memory_free_bytes": GIB,
       "nvlinks": {"up": 18, "down": 0}}
BAD_FAULT = {"calls": 3, "collectives": 3, "seconds": 0.1,
             "faults": [{"call": "scan, algorithm linear, 1 elements of int64", "ranks": [2],
                         "what": "1 elements are wrong"}]}


@pytest.mark.parametrize(("told", "code", "serious", "words"), [
    (alike(machine=soft("nofile", 64)), "GC-FILES", True, "may open 64 files"),
    (alike(machine=soft("nofile", 512)), "GC-FILES", False, "ulimit -n 1024"),
    (alike(machine=soft("stack", 1 << 20)), "GC-STACK", False, "1.0 MiB"),
    (alike(machine={**soft("memlock", 8 << 20), "rdma": ["mlx5_0"]}), "GC-MEMLOCK", False, "mlx5_0"),
    (alike(machine={"shm": {"size": 64 << 20, "free": 60 << 20}}), "GC-SHM", False, "60 MiB free for ranks 0-3"),
    (alike(machine={"shm": {"size": 64 << 20, "free": 1 << 20}}), "GC-SHM", True, "1 MiB free"),
    (alike(machine={"slots": None}, missing={"slots": "no compiler"}), "GC-COMPILER", False, "python3-dev"),
    (alike(machine={"shm": None}, missing={"shm": "No such file"}), "GC-SHM", True, "No such file"),
    (alike(cores=[0, 1]), "GC-CORES", False, "4 ranks share 2 cores of a"),
    (alike(machine={"quota_cores": 1.5}), "GC-CORES", False, "4 ranks share 1.5 cores of a"),
    (alike(machine={"affinity": "3"}), "GC-BINDING", False, "ranks 0-3 of a are bound to one core, 3"),
    (alike(machine={"clock": {"source": "hpet", "resolution_ns": 1, "step_ns": 700}}), "GC-CLOCK", False, "hpet"),
    ([*alike(3), rank_facts(3, versions={"numpy": "2.3.0"})], "GC-VERSIONS", True, "2.3.0 on ranks 3"),
    (alike(versions={**CUDA, "cuda_driver": "12.9"}), "GC-DRIVER", True, "older than the CUDA 13.4 of CuPy"),
    (alike(versions={**CUDA, "nccl": "2.20.5"}), "GC-NCCL", False, "2.20.5 is older than the 2.27.7"),
    (alike(versions={**CUDA, "nccl": None}), "GC-NCCL", False, "no NCCL"),
    (alike(machine={"gpus": [GPU]}), "GC-CUPY", False, "NVML sees 1 GPUs, but there is no CuPy"),
    (alike(2, versions=CUDA, device={"ordinal": 0, "pci": "01:00.0"}), "GC-SHARED-GPU", False, "ranks 0-1 would share"),
    (alike(1, versions=CUDA, machine={"gpus": [GPU, {**GPU, "index": 1, "nvlinks": {"up": 17, "down": 1}}]}),
     "GC-NVLINK", False, "GPU 1 (01:00.0) of a has 17"),
    (alike(1, versions=CUDA, machine={"gpus": [GPU, GPU], "p2p": [["self", "no: not supported"]] * 2}),
     "GC-P2P", False, "0-1 (not supported)")])
def test_each_rule_speaks_of_its_matter_alone(told, code, serious, words):
    report = examined(told)
    found = report["problems"] if serious else report["advice"]
    assert [remark["code"] for remark in report["problems"] + report["advice"]] == [code]
    assert words in found[0]["text"]
    assert report["exit_code"] == int(serious)


@pytest.mark.parametrize(("mpi_changed", "code", "serious"), [
    ({"library": None}, "GC-MPI", True), ({"mismatch": "another one", "match": False}, "GC-LAUNCHER", True),
    ({"launcher": None}, "GC-LAUNCHER", False), ({"threads": "single"}, "GC-THREADS", False)])
def test_rules_on_mpi(mpi_changed, code, serious):
    report = examined(alike(), **mpi_changed)
    assert [(remark["code"], remark in report["problems"]) for remark in report["problems"] + report["advice"]] == \
        [(code, serious)]


def on_hosts(count=3):
    return [rank_facts(rank, node=rank // 2, name="abc"[rank // 2]) for rank in range(2 * count)]


def test_a_slow_link_is_named_with_ranks_and_hosts():
    report = examined(on_hosts(), network(NODES, slow_bandwidth=[(1, 4)]))
    (problem,) = report["problems"]
    assert (problem["code"], problem["ranks"], problem["hosts"]) == ("GC-LINK", [1, 4], ["a", "c"])
    assert "between hosts a and c: rank pairs 1-4:" in problem["text"]
    assert [pair["ranks"] for pair in report["links"]["pairs"] if pair["slow"]] == [[1, 4]]
    assert report["exit_code"] == 1


def test_a_slow_host_is_the_culprit():
    report = examined(on_hosts(), network(NODES, slow_bandwidth=OF_HOST_2))
    assert [problem["hosts"] for problem in report["problems"]] == [["a", "c"], ["b", "c"]]
    assert [advice["hosts"] for advice in report["advice"]] == [["c"]]
    assert "lead to host c" in report["advice"][0]["text"]


def test_two_hosts_joined_too_slowly_have_no_better_link_to_be_compared_with():
    slow = [link._replace(bandwidth=link.bandwidth / 10) if link.kind == "across nodes" else link
            for link in network([0, 0, 1, 1])]
    report = examined(on_hosts(2), slow)
    assert [(problem["code"], problem["hosts"]) for problem in report["problems"]] == [("GC-NETWORK", ["a", "b"])]


def test_a_wrong_result_is_named():
    report = examined(alike(), self_test=BAD_FAULT)
    assert [(problem["code"], problem["ranks"]) for problem in report["problems"]] == [("GC-RESULT", [2])]


def test_two_nodes_of_one_name_are_told_apart():
    report = examined([rank_facts(0, 0, "vm"), rank_facts(1, 1, "vm")])
    assert [host["name"] for host in report["hosts"]] == ["vm (node 0)", "vm (node 1)"]


# ---------------------------------------------------------------- text


def test_the_text_is_narrow_and_says_what_the_report_says(nvml):
    boards = gpus.gpus()
    told = [rank_facts(0, versions=CUDA, machine=boards.facts, missing=boards.missing)]
    lines = list(text.lines(examined(told, self_test=BAD_FAULT)))
    assert max(map(len, lines)) <= text.WIDTH
    said = "\n".join(lines)
    for words in ("CuPy 14.2.0", "00000000:02:00.0  NVIDIA H100  memory not known  17 of 18 NVLinks up",
                  "  1  NVLink PXB    -             PCI", "no paths[1][2]: Unknown Error", "[GC-RESULT]",
                  "1 thing wrong", "links       not tested: one rank"):
        assert words in said, said
    assert text.WIDTH < 120


def test_a_report_of_nothing_but_reasons_is_still_readable():
    empty = dict.fromkeys(rank_facts(0)["machine"])
    missing = dict.fromkeys(empty, "sandboxed")
    lines = list(text.lines(examined(alike(2, machine=empty, missing=missing, cores=None))))
    assert any("sandboxed" in line for line in lines)
    assert any("GC-SHM" in line for line in lines)


# ---------------------------------------------------------------- this machine, and the self-test


def test_facts_of_this_machine():
    found = machine.machine()
    assert found.facts["cores"] >= 1
    assert found.facts["clock"]["resolution_ns"] >= 1
    assert set(found.facts["limits"]) == {"memlock", "nofile", "stack"}
    assert machine.ranges([]) == ""
    assert machine.host_name({"PMI_HOSTNAME": "n1"}) == machine.host_name({"PMIX_HOSTNAME": "n1"}) == "n1"


class Alone:
    """What tells ranks of each other, for a world of one."""

    @staticmethod
    def allgather(value):
        return [value]


def test_the_self_test_has_every_collective_and_algorithm():
    assert set(COLLECTIVES) <= set(selftest.CALLS)
    seen = list(itertools.islice(selftest.cases(4, "cpu"), 40 * len(selftest.CALLS)))
    assert [case.collective for case in seen[:len(selftest.CALLS)]] == list(selftest.CALLS)
    tried = {(case.collective, case.algorithm) for case in seen}
    assert {(name, algorithm) for name in COLLECTIVES for algorithm in gc.algorithms(name, size=4)} <= tried
    assert {(case.length, case.dtype) for case in seen} == set(itertools.product(selftest.COUNTS, selftest.DTYPES))


def test_the_self_test_alone():
    (comm,) = gc.init_local(1)
    with comm:
        outcome = selftest.self_test(comm, Alone, selftest.HOST, 0.0)
    assert (outcome["calls"], outcome["collectives"], outcome["faults"]) == (17, 17, [])


@pytest.mark.mutant
@pytest.mark.parametrize(("name", "spoil", "words"), [
    ("all_reduce", lambda x: x + (numpy.arange(x.size) == 7).astype(x.dtype), "1 elements are wrong"),
    ("scan", lambda x: x.astype("float64"), "the result is float64 of shape (1000,), expected float32"),
    ("all_gather", lambda x: x[:, :-1], "shape (1, 999), expected float32 of shape (1, 1000)"),
    ("gather_v", lambda xs: [xs[0][::-1]], "elements are wrong"),
    ("barrier", lambda x: numpy.ones(1), "expected None")])
def test_a_wrong_result_is_found(name, spoil, words):
    (comm,) = gc.init_local(1)
    right = getattr(comm, name)
    setattr(comm, name, lambda *given, **options: spoil(right(*given, **options)))
    outcome = selftest.self_test(comm, Alone, selftest.HOST, 0.0)
    assert [fault["ranks"] for fault in outcome["faults"]] == [[0]]
    assert outcome["faults"][0]["call"].startswith(name)
    assert words in outcome["faults"][0]["what"]


class WithAnother(Alone):
    """The same beside a second rank on which all is well."""

    @staticmethod
    def allgather(value):
        return [value, (None, None, 0.0)]


def test_what_one_rank_alone_refuses_is_a_fault():
    (comm,) = gc.init_local(1)
    outcome = selftest.self_test(comm, WithAnother, selftest.Memory("cuda", list, numpy.asarray), 0.0)
    assert [fault["ranks"] for fault in outcome["faults"]] == [[0]]


def test_refused_arrays_are_a_reason_and_other_errors_a_fault():
    (comm,) = gc.init_local(1)
    refused = selftest.self_test(comm, Alone, selftest.Memory("cuda", list, numpy.asarray), 0.0)
    assert refused.keys() == {"refused"}
    assert "not an array" in refused["refused"]

    def fail(x):
        raise MemoryError("no room")

    failed = selftest.self_test(comm, Alone, selftest.Memory("cuda", fail, numpy.asarray), 0.0)
    assert [(fault["ranks"], fault["what"]) for fault in failed["faults"]] == [([0], "no room")]
    assert failed["calls"] == 1
