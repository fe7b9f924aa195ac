"""The project's limits of length, lint, types and layers; files that need each other in a circle have a reason."""

import ast
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import grimp
import pytest

import gpucoll
from gpucoll.algorithms import registry
from gpucoll.communicator.transports import Transport
from harness.sources import PACKAGE, ROOT, code_lines, files, nodes_of, tree_of

SOURCES = files("gpucoll", "bench", "kernels", "scripts")


def functions(node):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        elif isinstance(child, ast.ClassDef):
            yield from functions(child)


def lengths():
    for path in SOURCES:
        for function in functions(tree_of(path)):
            body = function.body[bool(ast.get_docstring(function)):] or function.body
            yield body[-1].end_lineno - body[0].lineno + 1, f"{path.name}:{function.name}"


def test_functions_are_short():
    assert [name for length, name in lengths() if length > 50] == []


def test_files_are_short():
    long = [path for path in SOURCES if len(path.read_text().splitlines()) > 400]
    assert [path for path in long if code_lines(path.read_text()) > 400] == []
    assert [path.name for path in files("tests") if len(path.read_text().splitlines()) > 400] == []


def test_a_communicator_inherits_nothing():
    """Its methods delegate to parts, each with a class of its own."""
    assert gpucoll.Communicator.__bases__ == (object,)
    parts = vars(gpucoll.run_local(lambda comm: comm, 1)[0]).values()
    core = next(one for one in parts if hasattr(one, "life"))
    ours = [type(one) for one in [*parts, *vars(core).values()]
            if type(one).__module__.startswith("gpucoll.communicator") and not isinstance(one, Transport)]
    assert len(ours) >= 6
    assert {one.__bases__ for one in ours} == {(object,)}


def test_no_two_kernels_declare_one_type():
    """One text may hold any kernels, each with its headers."""
    names = [name for path in [*(ROOT / "kernels/device").glob("*.cu"), *(ROOT / "kernels/device").glob("*.h")]
             for name in re.findall(r"^(?:template <.*> )?struct (\w+) {", path.read_text(), re.MULTILINE)]
    assert len(names) > 50
    assert [name for name in set(names) if names.count(name) > 1] == []


def rooms_of(text):
    """Return the names at the beginnings of a map's lines."""
    return re.findall(r"^ *(\w+)  +\S", text, re.MULTILINE)


def test_every_module_is_in_a_room_and_the_maps_are_alike():
    package = ROOT / "gpucoll"
    assert {path.name for path in package.glob("*.py")} == {"__init__.py", "__main__.py", "errors.py", "internal.py",
                                                         "version.py"}
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    ordered = [name for line in layers for name in re.findall(r"\w+", line) if name not in ("__main__", "version")]
    assert rooms_of(gpucoll.__doc__) == ordered
    folders = {path.parent.name for path in package.glob("*/__init__.py")} - {"bench", "kernels"}  # made by wheels only
    assert folders == {*ordered} - {"errors", "internal"}
    block = (ROOT / "CONTRIBUTING.md").read_text().partition("```text\n")[2].partition("```")[0]
    assert block == textwrap.dedent(gpucoll.__doc__.partition("line.\n\n")[2]) != ""


def counts_by_hand(text):
    return re.findall(r"Py_(?:X?INCREF|X?DECREF|X?NewRef|CLEAR|X?SETREF)", text)


def test_only_the_owners_count_references_and_the_engine_knows_no_python():
    texts = {path.relative_to(ROOT / "kernels").as_posix(): path.read_text() for path in (ROOT / "kernels").rglob("*.*")
             if path.suffix in (".h", ".cc", ".cu")}
    assert {name for name, text in texts.items() if counts_by_hand(text)} == {"binding/owners.h"}
    python = {name.partition("/")[0] for name, text in texts.items() if "Python.h" in text or "nanobind" in text}
    assert python == {"binding"}


def test_a_process_has_one_hook_of_forks_and_one_way_to_a_port():
    """A part of the state of a process, or a connection, that stands alone is forgotten in a fork's child."""
    texts = [path.read_text() for path in files("gpucoll") if "emulation" not in path.parts]
    counts = {name: sum(text.count(f"{name}(") for text in texts) for name in ("register_at_fork", "create_connection")}
    assert counts == {"register_at_fork": 1, "create_connection": 1}


# Runs the programs of other files on engines with planted faults.
MUTANTS = "test_engine_mutants.py"


def imported_tests(nodes):
    """Return the test files imported by a module."""
    names = [f"{node.module}.{one.name}" for node in nodes if isinstance(node, ast.ImportFrom) for one in node.names]
    names += [one.name for node in nodes if isinstance(node, ast.Import) for one in node.names]
    return {word for name in names for word in name.split(".") if word.startswith("test_")}


def test_no_test_imports_from_another_test():
    found = {str(path): names for path in files("tests") if (names := imported_tests(nodes_of(path)))}
    assert [path for path in found if not path.endswith(MUTANTS)] == []
    text = "import multirank.test_a\nfrom multirank import test_b, jobs\nfrom multirank.test_c import ranks"
    assert imported_tests([*ast.walk(ast.parse(text))]) == {"test_a", "test_b", "test_c"}


def tool(*command):
    path = Path(sys.executable).with_name(command[0])
    if not path.exists():
        pytest.skip(f"{command[0]} is not installed beside this Python: pip install gpucoll[test]")
    job = subprocess.run([path, *command[1:]], cwd=ROOT, capture_output=True, text=True,
                         env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"})
    assert job.returncode == 0, job.stdout + job.stderr


@pytest.mark.parametrize("command", ["ruff check .", "lint-imports", pytest.param("mypy", marks=pytest.mark.slow)])
def test_lint_types_and_layers(command):
    tool(*command.split())


# Shapes of links, not algorithms.
OTHER_MEANINGS = {"torus": {"simulator/topologies.py", "lab/graphs/named.py"},
                  "ring": {"lab/graphs/named.py", "executors/nccl/nccl_collectives.py"},
                  "tree": {"executors/nccl/nccl_collectives.py"}}


def named_algorithms(nodes):
    """Return the names of algorithms, without parameters, in a module's code."""
    left_out = {id(node.body[0].value) for node in nodes
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node)}
    values = [node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in left_out]
    names = {name for _, name in registry()}
    return {base for value in values if isinstance(value, str) and (base := value.partition("(")[0]) in names}


def test_only_algorithms_name_algorithms():
    """Modules outside algorithms/ name no algorithm: a needed property is a trait in the algorithm's row."""
    found = {}
    for path in files("gpucoll"):
        place = str(path.relative_to(PACKAGE))
        names = {name for name in named_algorithms(nodes_of(path)) if place not in OTHER_MEANINGS.get(name, ())}
        if names and not place.startswith("algorithms/"):
            found[place] = names
    assert found == {}
    text = '"""ring"""\nDIRECT = ("one_shot", "torus(4x2)")'
    assert named_algorithms([*ast.walk(ast.parse(text))]) == {"one_shot", "torus"}


COMMUNICATORS = {"comm", "_comm", "communicator"}  # names of communicators in modules


def private_uses(nodes):
    """Return a module's uses of private names of a communicator."""
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)
            and node.attr.startswith("_") and not node.attr.startswith("__")
            and getattr(node.value, "id", getattr(node.value, "attr", "")) in COMMUNICATORS}


def test_a_communicator_has_no_private_name_outside_of_its_room():
    """Upper rooms use `gpucoll.internal`; an executor's `_comm` is MPI's communicator."""
    inside = {"communicator", "emulation"}
    places = [path for path in SOURCES if path.name != "internal.py" and not inside & {*path.parts}]
    assert {str(path): names for path in places if (names := private_uses(nodes_of(path)))} == {}
    text = "comm._waits, pg.communicator._link, self._comm.size"
    assert private_uses(ast.walk(ast.parse(text))) == {"_waits", "_link"}


def variables_of(node):
    """Return the object whose variables an expression gives, `vars(x)` or `x.__dict__`; None for other expressions."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "vars" and node.args:
        return node.args[0]
    return node.value if isinstance(node, ast.Attribute) and node.attr == "__dict__" else None


CHANGES = {"update", "setdefault", "pop", "popitem", "clear", "__setitem__", "__delitem__", "__ior__"}


def written_variables(nodes):
    """Return the objects, other than `self` and modules, whose variables are written behind their properties."""
    targets = [node.value for node in nodes if isinstance(node, ast.Subscript)
               and isinstance(node.ctx, ast.Store | ast.Del)]
    targets += [node.target for node in nodes if isinstance(node, ast.AugAssign)]
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    targets += [call.func.value for call in calls if call.func.attr in CHANGES]
    found = [variables_of(target) for target in targets]
    found += [node.value for node in nodes if isinstance(node, ast.Attribute) and node.attr == "__dict__"
              and not isinstance(node.ctx, ast.Load)]
    found += [call.args[0] for call in calls if call.func.attr in ("__setattr__", "__delattr__") and call.args
              and isinstance(call.func.value, ast.Name) and call.func.value.id in ("object", "type")]
    return [name for one in found if one is not None and (name := ast.unparse(one)) not in ("self", "module")]


def test_no_object_is_changed_behind_its_properties():
    """A property hides an entry of its name in `__dict__`: the write would be in vain."""
    assert {path.name: found for path in files("gpucoll") if (found := written_variables(nodes_of(path)))} == {}
    text = """vars(a)["x"] = 1; b.__dict__["x"] = 1; c.__dict__.update(x=1); object.__setattr__(d, "x", 1)
e.__dict__ |= {}; del vars(f)["x"]; g.__dict__ = {}; vars(self)["x"] = vars(h)["x"]; vars(module).update(x=1)"""
    assert {*written_variables([*ast.walk(ast.parse(text))])} == {*"abcdefg"}


INCLUDE = re.compile(r'^\s*#include "(.+)"', re.MULTILINE)
COMMUNICATOR = "gpucoll.communicator"
REASONS = {
    frozenset({COMMUNICATOR, *(f"{COMMUNICATOR}.{name}" for name in ("elastic", "methods"))}):
        "the one public class: `init` and `shrink` make communicators",
    frozenset(f"gpucoll.lab.graphs.{name}" for name in ("graph_routes", "link_graph")):
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
