"""Choices of `auto` by tables in this file, by curves and by the built-in table; and the explanations."""

import itertools
import json
import re
import warnings

import pytest
from gpucoll.bench.readme import machine

from gpucoll.algorithms import algorithms, find
from gpucoll.calibration.fit import Probe, fit
from gpucoll.core.collectives import COLLECTIVES
from gpucoll.device.gpus import ClaimedGpu
from gpucoll.errors import ArgumentError
from gpucoll.simulator import Level, Topology, simulate
from gpucoll.tuner import Tuner, built_in, rules, segments
from gpucoll.tuner import choice as chosen
from gpucoll.tuner import table as tables
from gpucoll.tuner.choice import TIE, Candidate, link_load, ranked
from gpucoll.tuner.explanation import reason
from gpucoll.tuner.table import MACHINES, Curve, LinkCost, Shape, Table, as_json, parse, plain
from harness.sources import ROOT

BOTH = ("mpi", "native")
MESSAGES = LinkCost("mpi", "node", 1e-5, 1e-9, 1e-10, 1e-6)
QUICK_NATIVE = LinkCost("native", "node", 1e-6, 5e-9, 1e-9, 0.0)
RING = Curve("all_reduce", "mpi", "ring", (1024, 4096), (1e-5, 4e-5))
TREE = Curve("all_reduce", "mpi", "tree", (1024, 4096), (2e-5, 3e-5))


def table(*links, curves=(), ranks=4, nodes=1):
    return Table("mine", {}, (Shape(ranks, nodes, "cpu", "2026-01-01", links or (MESSAGES, QUICK_NATIVE), curves),))


def choice(found, collective, nbytes, executors=BOTH, size=4, algorithm="auto", prefer=""):
    return Tuner((0,) * size, found, prefer).choose(collective, algorithm, nbytes, executors)


def test_latency_bandwidth_and_executors_decide():
    slow = MESSAGES._replace(executor="slow", alpha=1e-3)
    for found, nbytes, options, wanted in (
            (table(), 8, {}, ("native", "native")), (table(), 1 << 26, {}, ("mpi", "ring")),
            (table(), 8, {"executors": ("mpi",)}, ("mpi", "one_shot")),
            (table(), 1 << 26, {"executors": ("native",)}, ("native", "native")),
            (table(), 1 << 20, {"algorithm": "tree"}, ("mpi", "tree")),
            # A named algorithm stays and takes the best executor.
            (table(slow, MESSAGES), 8, {"executors": ("slow", "mpi"), "algorithm": "ring"}, ("mpi", "ring"))):
        assert choice(found, "all_reduce", nbytes, **options)[:2] == wanted
    assert choice(table(), "all_reduce", 1 << 26, size=1)[0] == "mpi"  # a lone rank sends nothing: NumPy copies
    assert choice(Table("mine", {}, ()), "scan", 8, ("unheard",)).executor == "unheard"  # no prediction exists


def test_a_built_in_constant_is_an_estimate_with_a_source():
    for shape in built_in().shapes:
        assert shape.measured == "", "a measured shape needs a file of the measurement in bench/results"
        assert Tuner((0,) * shape.ranks, built_in()).source(shape.device).endswith(" on 1 node, estimated")
        for link in shape.links:
            assert link.basis.startswith(("assumed: ", "docs/", "fits on 2 cores that no file has")), link
            assert all((ROOT / path).is_file() for path in re.findall(r"(?:docs|bench)/[\w./-]*\w", link.basis)), link


ESTIMATES = {("native", "native"): "`native`", ("peer", "one_shot"): "`peer`, `one_shot`",
             ("peer", "two_shot"): "`peer`, `two_shot`, memory of `comm.empty`",
             ("nccl", "ring"): "`ring`, NCCL's messages"}


@pytest.mark.parametrize(("executor", "algorithm"), ESTIMATES)
def test_the_constants_of_gpus_give_the_times_of_the_page(executor, algorithm):
    row = next(line for line in (ROOT / "docs/eight-gpus.md").read_text().splitlines()
               if line.startswith(f"| {ESTIMATES[executor, algorithm]} |"))
    for nbytes, cell in zip((1 << 13, 1 << 18, 1 << 28), row.split("|")[2:5], strict=True):
        if not (figures := [float(figure) for figure in re.findall(r"\d+", cell.partition(";")[0])]):
            continue
        (found,) = Tuner((0,) * 8, built_in()).candidates("all_reduce", nbytes, [executor], "cuda", algorithm)
        value = 1e6 * found.seconds if "us" in cell else 1.75 * nbytes / found.seconds / 1e9  # busbw of 8 ranks
        assert 0.9 * min(figures) <= value <= 1.1 * max(figures), (nbytes, cell, value)


@pytest.mark.parametrize("size", [1, 13, 200])
def test_every_collective_has_a_choice_that_can_be_run(size):
    tuner = Tuner((0,) * size, built_in())
    for collective in COLLECTIVES:
        for nbytes in (0, 8, 1 << 16, 1 << 26):
            assert tuner.choose(collective, "auto", nbytes, ("mpi",)).algorithm in algorithms(collective, size=size)
    for nodes in ((0, 0, 1, 1), (0, 0, 0, 0)):  # the network between nodes is slow: hierarchical sends the least across
        names = [one.algorithm for one in Tuner(nodes, built_in()).candidates("all_reduce", 1 << 20, ("mpi",))]
        assert names.index("hierarchical") == 0 if any(nodes) else "hierarchical" not in names


@pytest.mark.parametrize("per_node", [4, 8])
def test_above_the_simulated_ranks_rounds_inside_nodes_cost_what_the_node_costs(per_node):
    """Hierarchical sends the least between nodes, whether its time comes from the simulator or from the formulas."""
    for count in (32 // per_node, 64 // per_node, 256 // per_node):
        nodes = tuple(rank // per_node for rank in range(per_node * count))
        for collective in ("all_reduce", "all_gather", "reduce_scatter"):
            names = [one.algorithm for one in Tuner(nodes, built_in()).candidates(collective, 1 << 20, ("hybrid",))]
            assert names[0] == "hierarchical", (collective, len(nodes), names[:3])


def test_the_formulas_on_several_nodes_agree_with_the_simulator(monkeypatch):
    nodes = tuple(rank // 4 for rank in range(16))
    for collective, name, nbytes in itertools.product(
            ("all_reduce", "all_gather", "reduce_scatter"), ("hierarchical", "ring", "circulant"), (8, 65536, 1 << 20)):
        rows = []
        for most in (chosen.SIMULATED, 0):
            monkeypatch.setattr(chosen, "SIMULATED", most)
            rows.append(Tuner(nodes, built_in()).candidates(collective, nbytes, ("mpi",), algorithm=name))
        assert rows[0][0].seconds == pytest.approx(rows[1][0].seconds, rel=0.02), (collective, nbytes, name)
        monkeypatch.undo()


@pytest.mark.parametrize(("executor", "device"), [("nccl", "cuda"), ("peer", "cuda"), ("mpi", "cpu"), ("ucx", "cpu")])
def test_a_pipeline_has_the_segments_of_least_time_on_its_executor(executor, device):
    tuner = Tuner((0,) * 8, built_in(), "")
    link = next(link for shape in built_in().shapes if shape.device == device for link in shape.links
                if link[:2] == ("mpi" if executor == "ucx" else executor, "node"))
    for collective, name in (("all_reduce", "tree"), ("broadcast", "chain"), ("reduce", "double_tree")):
        for nbytes in (1 << power for power in range(27)):
            price = find(collective, name).price
            costs = {pieces: price(8, nbytes, pieces, (0,) * 8) for pieces in (1, 2, 4, 8, 16, 32)}
            times = {pieces: cost["rounds"] * link.alpha + cost["gaps"] * link.gap + cost["reduced"] * link.gamma
                     + max(cost["path"], cost["received"], cost["sent"] * (executor != "peer")) * link.beta
                     for pieces, cost in costs.items()}
            found = tuner.choose(collective, name, nbytes, (executor,), device).segments
            assert times[found] == pytest.approx(min(times.values())), (name, nbytes)
    assert tuner.choose("all_reduce", "tree", 1 << 22, ("nccl",), "cuda").segments == 2
    assert tuner.choose("all_reduce", "tree", 1 << 22, ("shared",)).segments == 32


def test_curves_win_over_the_model():
    times = [RING.at(nbytes) for nbytes in (8, 1024, 2560, 4096, 8192)]
    assert times == pytest.approx([1e-5, 1e-5, 2.5e-5, 4e-5, 8e-5])
    found = table(curves=(RING, TREE))
    assert choice(found, "all_reduce", 1024)[:2] == ("mpi", "ring")
    assert choice(found, "all_reduce", 4096)[:2] == ("mpi", "tree")
    assert choice(found, "all_reduce", 1024, size=8)[:2] == ("native", "native")  # curves of 4 ranks do not count here
    native = table(MESSAGES, curves=(Curve("all_reduce", "native", "native", (8,), (1e-4,)),))
    here, more = (next(one.seconds for one in Tuner((0,) * size, native).candidates("all_reduce", 8, BOTH)
                       if one.executor == "native") for size in (4, 16))
    assert here == 1e-4 < more  # but a native curve is scaled to another number of ranks


def test_each_figure_says_where_it_comes_from():
    def origins(found, nodes, device="cpu", nbytes=1024):
        rows = Tuner(nodes, found).candidates("all_reduce", nbytes, ("mpi", "nccl", "native"), device)
        return {row.origin for row in rows}, {row.algorithm for row in rows if row.origin == "measured"}

    assert origins(table(curves=(RING,)), (0,) * 4) == ({"measured", "estimated"}, {"ring"})
    assert origins(table(curves=(RING,)), (0,) * 4, nbytes=1 << 20) == ({"estimated"}, set())  # beyond the curve
    assert origins(built_in(), (0, 0, 1, 1)) == ({"assumed"}, set())
    assert origins(built_in(), (0,) * 4, "cuda") == ({"estimated"}, set())


def test_what_tune_would_try_is_told_on_gpus_where_nothing_is_measured():
    mine = Table("mine", {}, (Shape(4, 1, "cuda", "2026", (MESSAGES._replace(executor="nccl"),), ()),))
    told = Tuner((0,) * 4, built_in()).untried("cuda")
    assert "mpiexec -n 4 gpucoll tune --device cuda" in told
    assert "peer and nccl" in told
    silent = (built_in(), 4, "cpu"), (built_in(), 1, "cuda"), (mine, 4, "cuda")
    assert [Tuner((0,) * size, found).untried(device) for found, size, device in silent] == ["", "", ""]


def test_on_gpus_own_kernels_are_taken_where_such_a_machine_was_measured_and_they_won():
    """The times of a kind of machine are those of its file; elsewhere NCCL's own collective is taken."""
    one, executors = ClaimedGpu(0, "1", "NVIDIA H100 80GB HBM3", "a", 90, by_mps=True), ("peer", "nccl", "native")
    mine = Table("mine", {}, (Shape(2, 1, "cuda", "2026", (), (Curve("all_reduce", "peer", "tree", (8,), (1e-9,)),)),))

    def taken(gpus, table=None, collective="all_reduce"):
        tuner = Tuner((0,) * len(gpus), table or built_in())
        tuner.choose(collective, "auto", 8, executors, "cuda")
        tuner.follow(gpus)
        rows = [tuner.candidates(collective, 1 << power, executors, "cuda")[0] for power in (10, 14, 18, 22, 26)]
        return [row.algorithm for row in rows], tuner.source("cuda"), tuner.untried("cuda"), reason(tuner.candidates(
            collective, 1 << 10, executors, "cuda"))

    won, source, advice, why = taken([one, one])
    assert (won, advice) == ([*["one_shot"] * 2, "native", *["one_shot"] * 2], "")
    assert re.fullmatch(r"measured 1\.52 times as fast as native on native, .*", why)
    path = ROOT / source.partition(" in ")[2]
    assert json.loads(MACHINES.read_text()) == [plain(machine(path))]
    for gpus in ([one._replace(by_mps=False)] * 2, [one, one._replace(identity="b")], [one] * 3,
                 [one._replace(name="NVIDIA H200")] * 2):
        won, source, advice, why = taken(gpus)
        assert (set(won), source[:9], "would try" in advice) == ({"native"}, "built-in:", True)
        assert why.endswith("on peer is estimated to be quicker, but not measured on such GPUs")
    assert set(taken([one, one], collective="all_gather")[0]) == {"native"}
    assert taken([one, one], mine)[1].startswith("mine")
    spoilt = mine._replace(shapes=(mine.shapes[0]._replace(excluded=("fold_all",)),))
    there, left = ({row.algorithm for row in Tuner((0, 0), some).candidates("all_reduce", 8, ("peer",), "cuda")}
                   for some in (mine, parse("", as_json(spoilt))))
    assert there - left == {"one_shot"}


def test_of_those_that_tie_the_one_with_the_fewest_partners_is_chosen():
    rows = [Candidate("mpi", name, 1, taken, taken, 0.0, 0.0, False)
            for name, taken in (("many", 1.0), ("few", 1.0 + TIE / 2), ("slow", 1.0 + 2 * TIE))]
    partners = {"many": 14, "few": 2}  # ties alone are asked for the number of partners, thus not the slow candidate
    assert [row.algorithm for row in ranked(rows, lambda row: partners[row.algorithm])] == ["few", "many", "slow"]
    assert [link_load("all_reduce", name, (0,) * 8) for name in ("ring", "one_shot", "two_shot")] == [2, 14, 14]
    cases = [("tree", 1 << 20), ("ring", 100), ("ring", 1 << 26)]
    assert [segments("all_reduce", *case, 4) for case in cases] == [16, 1, 4]


def test_a_table_is_read_as_it_was_written_and_a_new_shape_replaces_the_old_one():
    whole = Table("mine", {"name": 'a "host"', "cores": 2}, (
        Shape(4, 1, "cpu", "2026-01-01", (MESSAGES, QUICK_NATIVE), (RING, TREE)),
        Shape(8, 2, "cuda", "2026-01-02", (MESSAGES._replace(name="network"),), ())))
    assert parse("mine", as_json(whole)) == whole
    new = whole.merged(Shape(4, 1, "cpu", "2027-01-01", (), (RING._replace(seconds=(1.0, 2.0)),)))
    assert [(shape.ranks, shape.measured) for shape in new.shapes] == [(4, "2027-01-01"), (8, "2026-01-02")]
    assert new.shapes[0].curves == (RING._replace(seconds=(1.0, 2.0)), TREE)  # curves not measured again stay


GOOD = as_json(table(curves=(RING,))).decode()


@pytest.mark.parametrize(("old", "new", "reason"), [
    ('"format": 2', '"format": ', "Expecting value"), ('"nodes": 1,', "", "'nodes'"),
    ('"nodes": 1', '"node": 1', "'node'"), ('"format": 2', '"format": 1', "its format is not 2"),
    ('"shapes": [', '"shapes": [3, ', "'int' object")])
def test_a_bad_table_is_refused_with_the_reason(old, new, reason):
    assert old in GOOD
    with pytest.raises(ArgumentError) as refused:
        parse("mine", GOOD.replace(old, new, 1).encode())
    assert refused.value.code == "GC-TABLE"
    assert reason in str(refused.value)


HERE = {"name": "a", "processor": "b", "cores": 2, "mpi": "c", "numpy": "2", "gpucoll": "0.1"}


def test_a_table_belongs_to_its_host(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    assert tables.read(path, HERE) is None
    path.write_bytes(as_json(table()._replace(host=HERE)))
    assert tables.read(path, HERE).shapes == table().shapes
    for key in HERE:
        with pytest.raises(ArgumentError, match=f"measured with {key}"):
            tables.read(path, HERE | {key: "other"})
    paths = {tables.table_path(HERE | {key: "other"}, {"GPUCOLL_CACHE": "/cache"}) for key in HERE}
    assert len(paths) == 5  # name, processor, cores and mpi change the path; versions of numpy and gpucoll do not

    monkeypatch.setenv("GPUCOLL_CACHE", str(tmp_path))
    monkeypatch.setattr(tables, "facts", lambda by_mpi: HERE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tables.load() is built_in()
    tables.table_path(HERE).write_text('{"format": 7}')
    with pytest.warns(UserWarning, match="its format is not 2.*built-in table serves"):
        assert tables.load() is built_in()


@pytest.mark.parametrize(("text", "collective", "nbytes", "chosen"), [
    ("tree", "all_reduce", 1 << 24, "tree"), ("tree", "all_gather", 1 << 26, "ring"),
    ("AllReduce:Star;broadcast:^native", "all_reduce", 8, "star"),
    ("star,ring", "all_reduce", 1 << 26, "ring"), ("all_reduce:torus(4x1)", "all_reduce", 8, "torus(4x1)"),
    ("reducescatter:ring", "reduce_scatter", 8, "ring"), ("", "all_reduce", 8, "native"),
    ("ring,collnetdirect;allreduce:tree,collnetdirect;broadcast:ring", "broadcast", 8, "chain"),  # NCCL's own example
    ("ring", "reduce", 1 << 24, "chain")])
def test_gpucoll_algo_overrides_auto(text, collective, nbytes, chosen):
    assert choice(table(), collective, nbytes, prefer=text).algorithm == chosen
    assert choice(table(), collective, nbytes, prefer=text, algorithm="native").algorithm == "native"


def test_gpucoll_algo_must_be_met_where_it_names_the_collective():
    with pytest.raises(ArgumentError, match="GPUCOLL_ALGO excludes all algorithms of all_reduce"):
        choice(table(), "all_reduce", 8, ("mpi",), prefer="all_reduce:native")
    assert choice(table(), "all_reduce", 8, ("mpi",), prefer="native").algorithm == "one_shot"
    for text in ("rng", "all_reduce:tree,", "allreduc:ring", ":ring", "^"):
        with pytest.raises(ArgumentError, match="GPUCOLL_ALGO"):
            rules(text)


def test_the_fit_finds_the_constants_of_a_simulated_network():
    """Times come from the simulator, and the counts from simulations with a single constant."""
    constants = {"alpha": 1.5e-5, "beta": 3e-10, "gamma": 2e-10, "gap": 4e-6}
    cases = [("all_reduce", "recursive_doubling", 8), ("all_gather", "direct", 64), ("all_gather", "ring", 1 << 22),
             ("reduce_scatter", "ring", 1 << 22), ("all_reduce", "two_shot", 1 << 16)]

    def seconds(case, **values):
        level = Level("link", **({"alpha": 0.0, "beta": 0.0} | values))
        collective, algorithm, nbytes = case
        return simulate(collective, algorithm, 8, nbytes, Topology("net", (level,))).seconds

    probes = [Probe(*(seconds(case, **{name: 1.0}) for name in constants), seconds(case, **constants))
              for case in cases]
    assert fit(probes) == pytest.approx(constants, rel=1e-6)
    assert fit([Probe(1, 0, 0, 0, 1e-5), Probe(1, 1000, 0, 0, 9e-6)])["beta"] == 0.0  # no constant is below 0
