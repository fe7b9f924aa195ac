"""Files that need each other in a circle cannot be read one after the other: each circle has its reason here."""

import re
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[2]
INCLUDE = re.compile(r'^\s*#include "(.+)"', re.MULTILINE)
COMMUNICATOR = "gpucoll.communicator"
REASONS = {
    frozenset({COMMUNICATOR, *(f"{COMMUNICATOR}.{name}" for name in ("elastic", "methods"))}):
        "the one public class: `init` and `shrink` make communicators",
    frozenset(f"gpucoll.lab.graphs.{name}" for name in ("flows", "graph_routes", "link_graph")):
        "a graph is a topology of the simulator, which asks a topology for its routes",
}


def circles(edges):
    """Return the largest groups of names that all reach each other; `edges` has the neighbours of each name."""
    reached = {}
    for name in edges:
        found, new = set(), {*edges[name]}
        while new:
            found |= new
            new = {after for one in new for after in edges.get(one, ())} - found
        reached[name] = found
    return {frozenset(other for other in reached[name] if name in reached.get(other, ()))
            for name in edges if name in reached[name]}


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"e", "a"}}) == {
        frozenset("abc"), frozenset("e")}


def test_modules_form_no_circle_without_a_reason():
    # Imports for types alone do not count: a part may name the class of which it is a part.
    graph = grimp.build_graph("gpucoll", exclude_type_checking_imports=True, cache_dir=None)
    assert circles({name: graph.find_modules_directly_imported_by(name) for name in graph.modules}) == {*REASONS}


def test_headers_form_no_circle():
    folder = ROOT / "kernels"
    files = [path for path in folder.rglob("*") if path.suffix in (".h", ".cc", ".cu")]
    assert circles({str(path.relative_to(folder)): {*INCLUDE.findall(path.read_text())} for path in files}) == set()
