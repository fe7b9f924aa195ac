"""Messages as flows: times by hand, on hosts joined by one switch."""

from fractions import Fraction

import pytest

import gpucoll as gc
from gpucoll.analysis.graphs.link_graph import load_graph, parse_graph
from gpucoll.analysis.simulate import flows, simulate

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


def test_a_graph_without_sharing_or_of_many_ranks_has_waves():
    assert simulate("broadcast", "binomial", 4, N, HOSTS._replace(sharing=None)).bandwidth == pytest.approx(2 * UNIT)
    many = load_graph(f"crossbar({flows.MOST_RANKS + 1})")._replace(sharing=Fraction(1))
    assert [flows.serves(graph) for graph in (HOSTS, HOSTS._replace(sharing=None), many)] == [True, False, False]


@pytest.mark.parametrize(("value", "reason"), [("0", "sharing 0 is no share"), ("1.5", "is not a number, 0 to 1"),
                                               ('"a"', "is not a number")])
def test_a_wrong_share_is_refused(value, reason):
    text = (f'kind = "graph"\nsharing = {value}\nranks = ["a", "b"]\n'
            '[[links]]\nfrom = "a"\nto = "b"\nGBps = 1\nus = 1\nboth = true\n')
    with pytest.raises(gc.ArgumentError, match=reason):
        parse_graph("pair", text.encode())
    assert parse_graph("pair", text.replace(value, "0.25", 1).encode()).sharing == Fraction(1, 4)
