"""Algorithms of few steps: SCCL's frontier, small questions against a search of all states, exact data on threads."""

import functools
import itertools
import json
import math
import random
from fractions import Fraction

import pytest

import gpucoll as gc
from gpucoll.analysis.graphs.bounds import FORMULAS, bound
from gpucoll.analysis.graphs.few_steps import SERVED, FewSteps
from gpucoll.analysis.graphs.link_graph import Edge, LinkGraph, load_graph
from gpucoll.analysis.graphs.step_search import Point, StepSearch
from gpucoll.analysis.graphs.symmetry import free_group
from gpucoll.analysis.simulate import seconds_on, simulate
from gpucoll.cli import main
from gpucoll.core.schedule import Recv
from gpucoll.core.transfers import Transfers, pieces_of
from harness.refusals import refused
from programs import synthesised

pytestmark = pytest.mark.usefixtures("own_algorithms")


@pytest.fixture
def solver():
    pytest.importorskip("ortools", reason='pip install "gpucoll[solver]"')


def proved(made):
    """Return the proof of the schedules of all ranks, and the schedules."""
    return synthesised.proved(made.collective, made.size, made.chunks, made.rounds)


# Schedules from messages given by hand, without the solver.

LINE = [[(0, 0, 1), (1, 1, 0), (1, 1, 2), (2, 2, 1)], [(0, 1, 2), (2, 1, 0)]]  # an all-gather of three ranks in a row


def times(steps, chunks):
    """Return the same steps for blocks of several chunks."""
    return [[(piece * chunks + index, src, dst) for piece, src, dst in step for index in range(chunks)]
            for step in steps]


def backwards(steps):
    return [[(piece, dst, src) for piece, src, dst in step] for step in reversed(steps)]


def to_all(chunks):
    """Return the messages of an all-to-all of three ranks in a row."""
    def piece(src, dst, index):
        return (3 * src + dst) * chunks + index

    first = [(src, dst, src, 1 if src != 1 else dst) for src in range(3) for dst in range(3) if src != dst]
    steps = [[(piece(src, dst, index), one, other) for src, dst, one, other in first for index in range(chunks)]]
    return [*steps, [(piece(src, 2 - src, index), 1, 2 - src) for src in (0, 2) for index in range(chunks)]]


BY_HAND = {
    "all_gather": (LINE, 0), "reduce_scatter": (backwards(LINE), 2), "all_reduce": ([*backwards(LINE), *LINE], 2),
    "broadcast": ([[(0, 0, 1)], [(0, 1, 2)]], 0), "reduce": ([[(0, 2, 1)], [(0, 1, 0)]], 2),
    "scatter": ([[(1, 0, 1), (2, 0, 1)], [(2, 1, 2)]], 0), "gather": ([[(1, 1, 0), (2, 2, 1)], [(2, 1, 0)]], 0)}


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("name", [*BY_HAND, "all_to_all", "arrays"])
def test_messages_in_steps_are_a_schedule(name, chunks):
    steps, combining = (LINE, 0) if name == "arrays" else BY_HAND.get(name, ((), 0))
    steps = to_all(chunks) if name == "all_to_all" else times(steps, chunks)
    made = Transfers("all_reduce" if name == "arrays" else name, 3, chunks, steps, combining)
    assert proved(made)[0].rounds == len(steps) + (name == "arrays")
    assert made.chunks == chunks * (1 if name in ("broadcast", "reduce", "arrays") else 3)


def test_chunks_in_a_row_are_one_message():
    made = Transfers("all_gather", 3, 4, times(LINE, 4))
    (_, *messages), _ = made.rounds(0)
    assert [(type(step), step[0].count) for step in messages if isinstance(step, Recv)] == [(Recv, 4)]


def test_scratch_holds_the_passed_pieces_alone():
    made = Transfers("all_to_all", 3, 2, to_all(2))
    used = {step[0] for steps in made.rounds(1) for step in steps if step[0].buffer == "scratch"}
    assert max(part.first + part.count for part in used) == 4  # of two blocks: from rank 0 to 2, and back


# Symmetries.

@pytest.mark.parametrize(("graph", "size"), [("ring(7)", 7), ("torus(4x4)", 16), ("dgx1", 4), ("ndv2", 8),
                                            ("grid(5)", 1), ("dgx_a100", 4), ("grid(4x4)", 4)])
def test_a_group_keeps_the_links_and_moves_every_rank(graph, size):
    graph = load_graph(graph)
    group = free_group(graph)
    assert len(group) == len({*group}) == size
    for one in group:
        assert {(one[src], one[dst]): edge for (src, dst), edge in graph.edges.items()} == graph.edges
        assert one == tuple(range(graph.size)) or all(one[rank] != rank for rank in range(graph.ranks))
        assert {tuple(other[node] for node in one) for other in group} == {*group}


# Small questions against all states that ranks can reach: no solver, no distances, no symmetry.

def drawn(number):
    """Return a small random graph of direct links whose ranks all reach each other, or None."""
    draw = random.Random(number)
    ranks = draw.choice([3, 3, 4])
    edges = {pair: Edge(Fraction(draw.choice([1, 1, 2, 3]), draw.choice([1, 2])), Fraction(1, 2))
             for pair in itertools.permutations(range(ranks), 2) if draw.random() < 0.55}
    graph = LinkGraph("drawn", tuple(f"n{rank}" for rank in range(ranks)), ranks, edges)
    return graph if min(*graph.hops(0), *graph.reversed().hops(0)) >= 0 else None


DRAWN = [graph for graph in map(drawn, range(60)) if graph is not None]


def reachable(graph, name, point):
    """Return whether ranks can have their pieces after the steps: every link carries any pieces that it has room for.

    To hold more never harms, so that a link carries as many pieces as fit.
    """
    pieces = pieces_of(name, graph.ranks, point.chunks)
    slowest = min(edge.GBps for edge in graph.edges.values())
    begun = tuple(frozenset(number for number, piece in enumerate(pieces) if piece.source == rank)
                  for rank in range(graph.ranks))
    needed = [{number for number, piece in enumerate(pieces) if piece.target in (None, rank)}
              for rank in range(graph.ranks)]

    @functools.cache
    def ends(state, steps, rounds):
        if all(need <= held for need, held in zip(needed, state, strict=True)):
            return True
        if not steps:
            return False
        for used in range(1, rounds - steps + 2):
            choices = []
            for (src, dst), edge in graph.edges.items():
                room, there = math.floor(used * edge.GBps / slowest), state[src] - state[dst]
                choices.append([(dst, some) for some in itertools.combinations(sorted(there), min(room, len(there)))])
            for chosen in itertools.product(*choices):
                after = [{*held} for held in state]
                for dst, some in chosen:
                    after[dst].update(some)
                if ends(tuple(map(frozenset, after)), steps - 1, rounds - used):
                    return True
        return False

    return ends(begun, point.steps, point.rounds)


COPIES = ("all_gather", "broadcast", "gather", "scatter", "all_to_all")
SMALL = [(1, 1, 1), (1, 2, 1), (2, 2, 1), (2, 3, 1), (3, 3, 1), (2, 3, 2)]


@pytest.mark.usefixtures("solver")
@pytest.mark.parametrize("name", COPIES)
def test_answers_are_those_of_a_search_of_all_states(name):
    counts = {True: 0, False: 0}
    for graph, point in itertools.product(DRAWN, map(Point._make, SMALL)):
        if len(pieces_of(name, graph.ranks, point.chunks)) > 9 or point.steps * len(graph.edges) > 14:
            continue  # too many states
        answer = FewSteps(graph, name).ask(point)
        assert (answer.transfers is not None) == reachable(graph, name, point), (graph, point, answer)
        assert answer.is_proved == (answer.transfers is None)
        counts[answer.is_proved] += 1
        if answer.transfers is not None:
            proved(answer.transfers)
    assert min(counts.values()) >= 5, counts


@pytest.mark.parametrize("name", ["broadcast", "gather", "scatter"])
def test_the_least_rounds_of_a_bound_are_those_of_a_search_of_all_states(name):
    for graph in DRAWN:
        least = bound(graph, name).rounds
        assert reachable(graph, name, Point(least, 12, 1)), graph
        assert least == 1 or not reachable(graph, name, Point(least - 1, 12, 1)), graph


def check_links(made, graph, rounds):
    """Check that messages take the links of the graph, none of them more than fit into so many rounds."""
    slowest = min(edge.GBps for edge in graph.edges.values())
    for step in made.steps:
        assert {message[1:] for message in step} <= graph.edges.keys()
        for link, edge in graph.edges.items():
            assert sum(message[1:] == link for message in step) * slowest <= rounds * edge.GBps


@pytest.mark.usefixtures("solver")
def test_an_all_reduce_of_shared_chunks_takes_the_links_of_both_halves():
    for graph in DRAWN:
        least, ranks = bound(graph, "all_reduce").rounds, graph.ranks
        made = FewSteps(graph, "all_reduce").ask(Point(2 * least, 4 * ranks, ranks)).transfers
        assert (made.combining, proved(made)[0].rounds) == (least, 2 * least)
        check_links(made, graph, 2 * ranks)


@pytest.mark.usefixtures("solver")
@pytest.mark.parametrize("name", [name for name in SERVED if name in FORMULAS])
def test_the_least_rounds_of_a_bound_have_an_algorithm(name):
    for graph in DRAWN:
        least = bound(graph, name).rounds
        made = FewSteps(graph, name).ask(Point(least, 6 * graph.ranks, 1)).transfers
        assert proved(made)[0].rounds == least + (name == "all_reduce")  # the sums of arrays are a round of their own
        check_links(made, graph, 6 * graph.ranks)
        assert FewSteps(graph, name).ask(Point(least - 1 or 1, 40, 1)).is_proved or least == 1


# SCCL's published points for a DGX-1: SYNTHESIS.md and the tests of microsoft/msccl-tools.

FRONTIER = [  # collective, steps, rounds, chunks, whether an algorithm exists
    ("all_gather", 1, 1, 1, False), ("all_gather", 2, 2, 1, True), ("all_gather", 2, 3, 2, True),
    ("all_gather", 2, 4, 3, False), ("all_gather", 3, 4, 3, True), ("all_gather", 3, 5, 4, True),
    ("all_gather", 3, 6, 5, True), ("all_gather", 3, 7, 6, True), ("all_gather", 3, 6, 6, False),
    ("reduce_scatter", 1, 1, 1, False), ("reduce_scatter", 2, 2, 1, True), ("reduce_scatter", 2, 3, 2, True),
    ("all_reduce", 1, 1, 1, False), ("all_reduce", 2, 2, 1, True), ("all_reduce", 4, 6, 16, True),
    ("gather", 2, 2, 1, True), ("scatter", 2, 2, 1, True), ("all_to_all", 2, 8, 3, True)]


@pytest.mark.usefixtures("solver")
@pytest.mark.parametrize(("name", "steps", "rounds", "chunks", "exists"), FRONTIER)
def test_the_frontier_of_a_dgx1(name, steps, rounds, chunks, exists):
    graph, point = load_graph("dgx1"), Point(steps, rounds, chunks)
    answer = FewSteps(graph, name).ask(point)
    assert (answer.transfers is not None, answer.is_proved) == (exists, not exists)
    if exists:
        proof, schedules = proved(answer.transfers)
        assert proof.rounds == steps + answer.transfers.gathers
        # The links carry what the rounds allow: the time by the simulator is that of steps and rounds.
        nbytes = 25_000 * answer.transfers.chunks  # a chunk takes a us on the slowest link
        assert seconds_on(graph, schedules, nbytes) <= (0.7 * steps + rounds) * 1e-6 * (1 + 1e-9)


@pytest.mark.usefixtures("solver")
def test_the_bounds_in_rounds_are_sccls():
    graph = load_graph("dgx1")
    found = {name: FewSteps(graph, name).rounds_per_chunk for name in SERVED}
    assert found["all_gather"] == found["reduce_scatter"] == found["gather"] == found["scatter"] == Fraction(7, 6)
    assert (found["all_to_all"], found["all_reduce"] * 8) == (Fraction(8, 3), Fraction(7, 3))


@pytest.mark.usefixtures("solver")
@pytest.mark.parametrize(("graph", "point", "exists"), [
    ("crossbar(4)", (1, 3, 1), True), ("crossbar(4)", (2, 2, 1), False), ("crossbar(4)", (3, 3, 1), True),
    ("torus(4x4)", (4, 15, 4), True), ("fat_tree(2x2x1)", (1, 4, 1), True), ("fat_tree(2x2x1)", (1, 3, 1), False)])
def test_symmetry_and_switches(graph, point, exists):
    """A rank on a switch receives three blocks by one link; an uplink of a leaf carries four blocks in a step.

    Where the solver has to tell, switches leave other ways: that is no proof.
    """
    answer = FewSteps(load_graph(graph), "all_gather").ask(Point(*point))
    assert (answer.transfers is not None, answer.is_proved) == (exists, not exists and graph != "fat_tree(2x2x1)")
    if exists:
        proved(answer.transfers)


@pytest.mark.usefixtures("solver")
def test_ways_that_share_a_message_carry_a_part_each():
    """Two switches between two ranks: a round carries both chunks of a block."""
    both = {pair: Edge(Fraction(1), Fraction(1)) for one, other in itertools.product((0, 1), (2, 3))
            for pair in ((one, other), (other, one))}
    few = FewSteps(LinkGraph("two ways", ("a", "b", "s", "t"), 2, both), "all_gather")
    assert few.ask(Point(1, 1, 2)).transfers is not None
    assert few.ask(Point(1, 1, 3)).is_proved


@pytest.mark.usefixtures("solver")
def test_symmetric_algorithms_prove_nothing():
    """Narrow links of a rank: algorithms that use all links alike would be too slow."""
    edges = {pair: Edge(Fraction(1 if pair[0] == 2 else 2), Fraction(1))
             for pair in itertools.permutations(range(3), 2)}
    search = StepSearch(LinkGraph("uneven", ("a", "b", "c"), 3, edges), "all_gather")
    assert len(search.group) == 1
    search.group = [(0, 1, 2), (1, 2, 0), (2, 0, 1)]
    assert search.answer(Point(2, 2, 3), math.inf) is not None


@pytest.mark.usefixtures("solver")
def test_a_line_exchanges_all_blocks_in_two_steps():
    few = FewSteps(load_graph("grid(3)"), "all_to_all")
    assert few.ask(Point(1, 4, 1)).is_proved
    assert few.ask(Point(2, 2, 1)).transfers is not None


# The command.

@pytest.mark.usefixtures("solver")
@pytest.mark.parametrize(("name", "ending"), [*((name, "py") for name in SERVED), ("all_gather", "xml"),
                                             ("all_to_all", "xml"), ("reduce_scatter", "xml")])
def test_results_are_exact_on_threads(tmp_path, capsys, name, ending):
    path = tmp_path / f"made.{ending}"
    steps = "4" if name == "all_reduce" else "3"
    rounds = {"all_to_all": "6", "all_reduce": "6"}.get(name, "3")
    words = ["synthesize", "ring(4)", name, "--steps", steps, "--rounds", rounds,
             "--chunks", "8" if name == "all_reduce" else "2", "-o", str(path), "--json"]
    assert main(words) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["point"]["steps"] == int(steps)
    assert row["rounds"] == int(steps) or ending == "xml"  # MSCCL's steps have an order of their own
    assert main(["verify", row["algorithm"], "--ranks", "4"]) == 0
    assert main(["draw", row["algorithm"], "--collective", name, "--ranks", "4", "-o", str(tmp_path / "a.svg")]) == 0
    algorithm = gc.load(row["algorithm"])
    predicted = simulate(name, algorithm, 4, 256 << 20, load_graph("ring(4)")).seconds
    assert row["algbw_GBps"] == pytest.approx((256 << 20) / predicted / 1e9)
    synthesised.check_on_threads(name, 4, algorithm)


@pytest.mark.usefixtures("solver")
@pytest.mark.parametrize(("name", "size"), [("broadcast", "1K"), ("all_reduce", "1K"), ("all_to_all", "64K")])
def test_the_least_predicted_time_is_chosen(tmp_path, capsys, name, size):
    words = ["synthesize", "dgx1", name, "--size", size, "-o", str(tmp_path / "made.py")]
    assert main([*words, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["proved"]
    assert row["point"]["steps"] == 2
    if name != "all_to_all":
        assert row["trees_predicted_GBps"] < row["algbw_GBps"] < row["bound_GBps"]
    assert main(words) == 0
    assert f"{row['point']['steps']} steps, " in capsys.readouterr().out


@pytest.mark.usefixtures("solver")
def test_trees_are_kept_where_few_steps_win_nothing(tmp_path, capsys):
    assert main(["synthesize", "dgx_a100", "all_gather", "--size", "1M", "-o", str(tmp_path / "made.py")]) == 0
    output = capsys.readouterr().out
    assert "few steps: none with less time was found" in output
    assert "Forest" in (tmp_path / "made.py").read_text()


@pytest.mark.usefixtures("no_solver")
def test_without_the_solver_there_are_trees(tmp_path, capsys):
    path = str(tmp_path / "made.py")
    assert main(["synthesize", "dgx1", "all_gather", "--size", "1K", "-o", path]) == 0
    assert 'few steps: not tried: algorithms of few steps need OR-Tools: pip install "gpucoll[solver]"' in \
        capsys.readouterr().out
    assert "OR-Tools" in refused(capsys, main, ["synthesize", "dgx1", "gather", "-o", path], "gpucoll synthesize: ")


@pytest.mark.usefixtures("solver")
def test_an_impossible_point_is_a_sentence_and_exit_code_1(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["synthesize", "dgx1", "all_gather", "--steps", "2", "--rounds", "4", "--chunks", "3"]
    assert main(words) == 1
    assert "all_gather on dgx1 in 2 steps, 4 rounds, 3 chunks: impossible: " in capsys.readouterr().out
    assert main([*words, "--json"]) == 1
    row = json.loads(capsys.readouterr().out)
    assert row["possible"] is False
    assert row["point"] == {"steps": 2, "rounds": 4, "chunks": 3}
    assert main(["synthesize", "dgx1", "all_reduce", "--steps", "3", "--chunks", "8", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["possible"] is None
    assert not [*tmp_path.iterdir()]


@pytest.mark.usefixtures("solver")
@pytest.mark.parametrize(("words", "said"), [
    (["dgx1", "gather", "--rounds", "2"], "--rounds needs --steps"),
    (["dgx1", "gather", "--steps", "0"], "steps, rounds and chunks must be at least 1"),
    (["dgx1", "scan"], "no algorithm is synthesised for scan"),
    (["dgx_h100_nvls", "gather", "--steps", "1"], "its switches copy"),
    (["torus(20x20)", "all_gather", "--steps", "32"], "are too many for algorithms of few steps"),
    (["torus(4x4)", "all_gather", "--steps", "4", "--rounds", "15", "--chunks", "4", "--time-limit", "0.001"],
     "neither an algorithm nor a proof was found: give more time")])
def test_wrong_arguments_are_refused_in_a_sentence(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    assert said in refused(capsys, main, ["synthesize", *words], "gpucoll synthesize: ")
    assert not [*tmp_path.iterdir()]
