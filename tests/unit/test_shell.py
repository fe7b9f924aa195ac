"""The verbs of the command and the names of the executors are those of the documents' tables."""

import ast
import re

import gpucoll as gc
from gpucoll import cli
from gpucoll.launch.bootstrap import CHOICES
from harness.sources import ROOT, files, nodes_of

VERBS = "run bench tune explain simulate draw verify convert kernels doctor report bound synthesize precheck".split()
BY_NAME = {"EngineExecutor", "MpiExecutor"}  # their constructors take the name


def rows(page, title):
    """Return the cells of each row of the first table of a page with this title of the first column."""
    table = (ROOT / "docs/guide" / page).read_text().partition(f"| {title} |")[2].partition("\n\n")[0]
    return [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in table.splitlines()[2:]]


def test_the_verbs_are_those_of_the_page():
    assert {*cli._parser()[1]} == {*VERBS}
    assert {cells[0].strip("`").split()[0] for cells in rows("commands.md", "verb")} == {*VERBS}


def test_the_executors_are_those_of_the_page():
    table = {cells[0].strip("`"): {*re.findall(r"`(\w+)`", cells[3])} for cells in rows("choosing.md", "name")}
    assert {*table} == {*CHOICES["executor"][1], "hybrid"}
    named = {}
    for node in (node for path in files("gpucoll/executors") for node in nodes_of(path)):
        for line in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "name":
                named.setdefault(ast.literal_eval(line.value), set()).add(node.name)
    assert {name: classes - BY_NAME for name, classes in table.items() if classes - BY_NAME} == {
        name: classes - BY_NAME for name, classes in named.items() if classes - BY_NAME}

    def made(comm):
        return [(one.name, type(one).__name__) for one in comm._core.host.executors]

    for name, kind in gc.run_local(made, 2)[0]:
        assert kind in table[name]
