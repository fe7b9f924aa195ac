"""Messages in the order of links: proved, within the links' bandwidths, in few rounds on meshes, exact on threads."""

import collections
from fractions import Fraction

import pytest

import gpucoll as gc
from gpucoll.core.schedule import Recv
from gpucoll.core.transfers import Transfers
from gpucoll.lab.graphs.bounds import bound
from gpucoll.lab.graphs.link_graph import graph_of, load_graph
from gpucoll.lab.graphs.link_order import SERVED, in_link_order
from gpucoll.lab.graphs.synthesis import synthesis
from gpucoll.lab.synthesize import Maker
from programs.synthesised import check_on_threads, proved

pytestmark = pytest.mark.usefixtures("own_algorithms")
# Four ranks in a ring: links of 50 and 75 GB/s carry two and three pieces in equal times.
UNLIKE = {"kind": "graph", "name": "unlike", "ranks": ["a", "b", "c", "d"], "switches": [], "links": [
    {"from": one, "to": other, "GBps": speed, "us": 1.0, "both": True}
    for one, other, speed in (("a", "b", 50.0), ("b", "c", 75.0), ("c", "d", 50.0), ("d", "a", 75.0))]}
# Three ranks in a ring, twice as fast one way round as the other.
ONE_WAY = {"kind": "graph", "name": "one way", "ranks": ["a", "b", "c"], "switches": [], "links": [
    {"from": "abc"[src], "to": "abc"[(src + step) % 3], "GBps": 50.0 * step, "us": 1.0}
    for src in range(3) for step in (1, 2)]}

# Two pairs of ranks with a slow link between them.
BOXES = {"kind": "graph", "name": "boxes", "ranks": ["a", "b", "c", "d"], "switches": [], "links": [
    {"from": one, "to": other, "GBps": speed, "us": 1.0, "both": True}
    for one, other, speed in (("a", "b", 50.0), ("b", "c", 10.0), ("c", "d", 50.0))]}


def loaded(graph):
    return load_graph(graph) if isinstance(graph, str) else graph_of("made", graph)


def seconds(graph, name, nbytes, made):
    return Maker(graph, name, nbytes).seconds(made.chunks, made.rounds)


LINE = [[(0, 0, 1), (1, 1, 0), (1, 1, 2), (2, 2, 1)], [(0, 1, 2), (2, 1, 0)]]  # an all-gather of three ranks in a row


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("name", SERVED)
def test_messages_in_steps_are_a_schedule(name, chunks):
    gathers = [[(piece * chunks + index, src, dst) for piece, src, dst in step for index in range(chunks)]
               for step in LINE]
    sums = [[(piece, dst, src) for piece, src, dst in step] for step in reversed(gathers)]
    steps = {"all_gather": gathers, "reduce_scatter": sums, "all_reduce": [*sums, *gathers]}[name]
    made = Transfers(name, 3, chunks, steps, 0 if name == "all_gather" else 2)
    assert proved(name, 3, made.chunks, made.rounds)[0].rounds == len(steps)
    assert made.chunks == chunks * 3


def test_chunks_in_a_row_are_one_message():
    steps = [[(piece * 4 + index, src, dst) for piece, src, dst in step for index in range(4)] for step in LINE]
    (_, *messages), _ = Transfers("all_gather", 3, 4, steps).rounds(0)
    assert [step.dst.count for step in messages if isinstance(step, Recv)] == [4]


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("graph", ["grid(2x3)", "ring(5)", "torus(3x3)", "dgx1", UNLIKE, ONE_WAY, BOXES],
                         ids=lambda graph: graph if isinstance(graph, str) else graph["name"])
def test_every_collective_is_proved_near_the_bound(graph, name):
    """The bound of an all-reduce that scatters and gathers is half of the all-gather's."""
    graph, nbytes = loaded(graph), 1 << 30
    made = in_link_order(graph, name, nbytes)
    proved(name, made.size, made.chunks, made.rounds)
    algbw = bound(graph, "all_gather").algbw / (2 if name == "all_reduce" else 1)
    assert nbytes / 1e9 / seconds(graph, name, nbytes, made) > 0.98 * float(algbw)


@pytest.mark.parametrize(("graph", "nbytes", "steps", "rounds", "cut"), [
    ("dgx1", 1 << 10, 2, 3, 2), ("dgx1", 1 << 16, 2, 3, 2), ("dgx1", 1 << 28, 3, 7, 6),  # as in SCCL
    ("grid(5x5)", 1 << 30, 8, 12, 1), ("ring(5)", 1 << 30, 2, 2, 1)])
def test_short_messages_take_the_least_steps_and_long_ones_the_least_rounds(graph, nbytes, steps, rounds, cut):
    """In a round every link carries a piece: (P - 1) blocks over the links into the poorest rank are the least."""
    made = in_link_order(load_graph(graph), "all_gather", nbytes)
    loads = [collections.Counter(message[1:] for message in step) for step in made.steps]
    speeds = {link: edge.GBps for link, edge in load_graph(graph).edges.items()}
    longest = [max(Fraction(count, speeds[link] / min(speeds.values())) for link, count in load.items())
               for load in loads]
    assert (len(made.steps), sum(longest) / made.per_block) == (steps, Fraction(rounds, cut))


@pytest.mark.parametrize("name", SERVED)
def test_the_file_runs(tmp_path, name):
    graph, nbytes = load_graph("grid(2x3)"), 64 << 10
    maker = Maker(graph, name, nbytes)
    made, found = maker.steps(in_link_order(graph, name, nbytes)), synthesis(graph, name, nbytes)
    assert maker.best_trees(found).seconds == made.seconds < maker.trees(found).seconds
    check_on_threads(name, 6, gc.load(maker.written(made, str(tmp_path / "made.py"))))
