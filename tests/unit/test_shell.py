"""The verbs of the command and the names of the executors are those of the documents' tables."""

import argparse
import ast
import re

import pytest
from gpucoll.bench import arguments as bench

import gpucoll as gc
from gpucoll import cli
from gpucoll.launch import jobs
from gpucoll.launch.arguments import at_least, size_range
from gpucoll.launch.bootstrap import CHOICES
from harness.refusals import refused
from harness.sources import ROOT, files, nodes_of

VERBS = ("run bench tune explain simulate draw verify convert kernels doctor report bound synthesize precheck "
         "emulate").split()
BY_NAME = {"NodeEngine", "MpiExecutor"}  # their constructors take the name


def rows(page, title):
    """Return the cells of each row of the first table of a page with this title of the first column."""
    table = (ROOT / "docs/guide" / page).read_text().partition(f"| {title} |")[2].partition("\n\n")[0]
    return [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in table.splitlines()[2:]]


def test_the_verbs_are_those_of_the_page():
    assert {*cli._parser()[1]} == {*VERBS}
    assert {cells[0].strip("`").split()[0] for cells in rows("commands.md", "verb")} == {*VERBS}


def numbers():
    """Yield the words before a number, for each option with a number of the whole command."""
    _, verbs = cli._parser([jobs.parser()], [bench.parser()])
    for verb, options in verbs.items():
        for action in options._actions:
            assert action.type not in (int, float) or action.choices, f"{verb} {action.dest}: any number is accepted"
            if "at_least" in getattr(action.type, "__qualname__", "") or action.type in (bench.positive, size_range):
                yield f"{verb} {action.option_strings[0]}", action.type


@pytest.mark.parametrize(("words", "kind"), [*numbers()])
def test_a_number_out_of_range_is_refused_in_one_line(words, kind, capsys):
    for number in ["-1", "x", "1" * 5000, "\N{ARABIC-INDIC DIGIT TWO}"] + ["9" * 12] * (kind is not bench.positive):
        assert "is no" in refused(capsys, cli.main, [*words.split(), number])


@pytest.mark.parametrize("words", ["draw ring --ranks", "convert ring --ranks", "draw ring --segments", "precheck -n",
                                   "simulate all_reduce --ranks", "explain all_reduce --ranks", "kernels -j",
                                   "synthesize dgx1 all_gather --size", "run -n", "bench -n"])
def test_zero_is_refused_in_one_line(words, capsys):
    refused(capsys, cli.main, [*words.split(), "0"])


def test_ranges_of_numbers_end():
    assert (size_range("1..3,8"), at_least(0)("0"), at_least(2)("5")) == ([1, 2, 3, 8], 0, 5)
    for text in ("3..1", "1..99999999999", "0..4", "1..2..3", "", "4,"):
        with pytest.raises(argparse.ArgumentTypeError, match="at most 1048576"):
            size_range(text)


@pytest.mark.parametrize("words", ["precheck -n 2 nofile.py", "draw nofile.xml -o x.svg", "simulate all_reduc",
                                   "explain all_reduc", "run nofile.py",
                                   "verify nofile.py:ring", "bound nograph all_gather", "synthesize nograph scan"])
def test_a_refusal_names_its_verb_once(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    verb = words.partition(" ")[0]
    line = refused(capsys, cli.main, words.split(), f"gpucoll {verb}: ")
    assert f"{verb}:" not in line.removeprefix(f"gpucoll {verb}: ")


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
