"""Messages as flows: times by hand, on hosts joined by one switch."""

import functools
from fractions import Fraction

import pytest

from gpucoll.algorithms import schedules
from gpucoll.core.schedule import Recv, Schedule, Send, Slice
from gpucoll.lab.graphs import flows
from gpucoll.lab.graphs.flows import seconds_on
from gpucoll.lab.graphs.link_graph import load_graph, parse_graph
from gpucoll.simulator import simulate

HOSTS = load_graph("crossbar(4, GBps=1, us=2)")._replace(sharing=Fraction(4, 5))
N = 1 << 30
UNIT = N / 1e9  # seconds of the array through a port


@pytest.mark.parametrize(("collective", "algorithm", "units", "rounds"), [
    ("broadcast", "linear", 3, 1),     # of a port's messages none is slowed
    ("broadcast", "chain", 3, 3),
    ("broadcast", "binomial", 3, 2),   # the root's messages share its port: rank 2 has the array after two units
    ("all_gather", "ring", 3 / 4, 3),  # a message meets no other
    ("all_gather", "direct", 3 / 4 / (4 / 5), 1),  # three leave and three arrive
    ("gather", "linear", 3 / 4, 1)])
def test_times_by_hand(collective, algorithm, units, rounds):
    found = simulate(collective, algorithm, 4, N, HOSTS)
    assert (found.latency, found.bandwidth) == pytest.approx((rounds * 2e-6, units * UNIT), rel=1e-4)


UNLIKE = """
kind = "graph"
ranks = ["a", "b", "c", "d"]
switches = ["s"]
sharing = 1
""" + "".join(f'[[links]]\nfrom = "{src}"\nto = "{dst}"\nGBps = {speed}\nus = 0\n' for src, dst, speed in (
    ("a", "s", 2.5), ("b", "s", 10), ("s", "c", 4), ("s", "d", 1), ("c", "s", 1), ("d", "s", 1), ("s", "a", 1),
    ("s", "b", 1)))


def seconds_of(messages):
    """Return the time of messages of a GB each in a single round, given by sender, receiver and number."""
    def rounds(rank):
        yield tuple(kind(Slice("output", 0, count), peer) for src, dst, count in messages
                    for kind, one, peer in ((Send, src, dst), (Recv, dst, src)) if one == rank)

    everyone = [Schedule("all_to_all", "drawn", rank, 4, 10, functools.partial(rounds, rank)) for rank in range(4)]
    return seconds_on(parse_graph("unlike", UNLIKE.encode()), everyone, 10 * 10**9)


def test_links_left_free_by_slow_flows_are_used_by_the_others():
    """Of a's 2.5 GB/s, d takes 1 and c 1.5; c has 2.5 left for b, and all 4 once a's message has ended."""
    assert seconds_of([(0, 2, 3), (0, 3, 2)]) == pytest.approx(2)
    assert seconds_of([(0, 2, 3), (0, 3, 2), (1, 2, 8)]) == pytest.approx(2 + (8 - 2 * 2.5) / 4)
    assert seconds_of([(0, 2, 6), (0, 3, 1), (1, 2, 2)]) == pytest.approx(1 + (6 - 1.5) / 2.5)


def test_an_algorithm_before_it_has_a_name_has_flows():
    everyone = schedules("broadcast", "binomial", size=4)
    assert seconds_on(HOSTS, everyone, N) == pytest.approx(3 * UNIT, rel=1e-4)


def test_a_graph_without_sharing_or_of_many_ranks_has_waves():
    assert simulate("broadcast", "binomial", 4, N, HOSTS._replace(sharing=None)).bandwidth == pytest.approx(2 * UNIT)
    many = load_graph(f"crossbar({flows.MOST_FLOW_RANKS + 1})")._replace(sharing=Fraction(1))
    assert [flows.serves(graph) for graph in (HOSTS, HOSTS._replace(sharing=None), many)] == [True, False, False]
