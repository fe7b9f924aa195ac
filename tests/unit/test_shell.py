"""The verbs of the command and the names of the executors are those of the documents' tables."""

import argparse
import ast
import re
import shlex

import pytest
from gpucoll.bench import arguments as bench

import gpucoll as gc
from gpucoll import cli
from gpucoll.cli import jobs
from gpucoll.cli.arguments import at_least, size_range
from gpucoll.launch.bootstrap import CHOICES
from harness.refusals import refused
from harness.sources import ROOT, files, nodes_of

VERBS = ("run bench tune explain simulate draw verify convert kernels doctor report bound synthesize precheck "
         "emulate").split()
BY_NAME = {"NodeEngine"}  # its constructor takes the name


def rows(page, title):
    """Return the cells of each row of the first table of a page with this title of the first column."""
    table = (ROOT / "docs/guide" / page).read_text().partition(f"| {title} |")[2].partition("\n\n")[0]
    return [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in table.splitlines()[2:]]


def test_the_verbs_are_those_of_the_page():
    assert {*cli._parser()[1]} == {*VERBS}
    assert {cells[0].strip("`").split()[0] for cells in rows("commands.md", "verb")} == {*VERBS}


def numbers():
    """Yield the words before a number, for each option with a number of the whole command."""
    verbs = {**cli._parser()[1], "run": jobs.parser(), "bench": bench.parser()}
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


# By command: what the line says.
REFUSED = {
    "bound 'torus(4x4, GBps=0)' all_gather": "GBps 0 is no bandwidth",
    "bound dgx1(0) all_gather": "dgx1 takes a number of boxes from 1 to 128",
    "bound dgx11 all_gather": "no graph is named 'dgx11'; did you mean dgx1?", "bound nograph all_gather": "nograph",
    "bound nothere.toml gather": "cannot read graph nothere",
    "bound ring(4) gather --root 4": "root 4 is not in 0..3",
    "bound torus(1x1) all_gather": "torus takes 1 to 3 sides, and 1024 ranks at most",
    "bound torus(4x4) all_gathr": "did you mean all_gather", "bound torus(4x4) scan": "no bound is known for scan",
    "draw nofile.xml -o x.svg": "file", "draw ring": "-o", "draw ring -o no/x.svg": "cannot write no/x.svg",
    "draw ring -o x.html --ranks 64 --segments 9": "576 chunks", "draw ring -o x.html --ranks 65": "65 ranks",
    "draw ring -o x.png": ".html page or an .svg picture",
    "draw ring -o x.svg --ranks 64": "states of chunks in an .svg", "draw rng -o x.html": "did you mean ring",
    "explain": "required: collective", "explain all_reduc": "did you mean all_reduce",
    "explain all_reduce 8 --ranks 10000000": "at most 1048576",
    "explain all_reduce 8 --topology bad.toml": "alpha 'soon' is not",
    "explain all_reduce 8 --topology swich": "did you mean switch",
    "explain all_reduce 8X": "'8X' is not a number of bytes", "kernels --arch sm_61": "compute capability 7.0",
    "kernels --arch sm_90 --nvrtc /etc/passwd": "no NVRTC can be loaded from /etc/passwd",
    "kernels --arch sm_90 --nvrtc 11": "neither 12 nor 13 nor an existing library",
    "kernels --arch sm_90 -j x": "'x' is not a whole", "kernels --arch sm_90,90": "does not compile for 90",
    "precheck -n 2 nofile.py": "nofile.py", "run nofile.py": "nofile.py",
    "simulate all_reduc": "did you mean all_reduce", "simulate all_reduce --algorithm rng": "did you mean ring",
    "simulate all_reduce --ranks 1048577": "1048576", "simulate all_reduce --segments 0": "'0'",
    "simulate all_reduce --topology /nope.toml": "nope",
    "simulate all_reduce --topology fat_tre": "did you mean fat_tree",
    "simulate all_reduce --topology nvlink_node --ranks 16": "16",
    "simulate all_reduce 1M --topology ring(4) --ranks 8": "has 4 ranks, not 8", "simulate all_reduce 5X": "5X",
    "simulate all_reduce 9999999T": "T", "simulate reduce --root 8": "8",
    "synthesize ndv2(4) all_gather --time-limit 0": "no trees were found within the time limit",
    "synthesize nograph scan": "nograph",
    "synthesize ring(4) all_gather -o x.txt": "x.txt ends neither in .py nor in .xml",
    "synthesize ring(4) scan": "no algorithm is synthesised for scan", "tune --device tpu": "'tpu'",
    "tune --max-bytes 4": "below the smallest size", "verify nofile.py:ring": "nofile.py"}


@pytest.mark.parametrize("words", REFUSED)
def test_a_refusal_names_its_verb_once(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.toml").write_text("[[level]]\nname = 'x'\nalpha = 'soon'\nbeta = 1")
    verb = words.partition(" ")[0]
    line = refused(capsys, cli.main, shlex.split(words), f"gpucoll {verb}: ")
    assert REFUSED[words] in line
    assert f"{verb}:" not in line.removeprefix(f"gpucoll {verb}: ")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.toml"]


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
