"""`gpucoll tune --topology`: predictions on a graph decide `auto`; files of algorithms are checked."""

import hashlib
import json
import os

import pytest

from gpucoll.algorithms import algorithms, find, own_names, schedules
from gpucoll.calibration import commands, on_graph
from gpucoll.cli import main
from gpucoll.errors import ArgumentError
from gpucoll.lab.graphs.link_graph import load_graph
from gpucoll.simulator import simulate
from gpucoll.tuner import Tuner, rules, segments
from gpucoll.tuner.table import (
    ANY,
    AlgorithmFile,
    Curve,
    GraphTable,
    LinkCost,
    Shape,
    Table,
    as_json,
    parse,
    read,
)
from harness.refusals import refused

pytestmark = pytest.mark.usefixtures("own_algorithms")
LINK = LinkCost("mpi", "node", 1e-5, 1e-9, 1e-10, 1e-6)
SWEPT = tuple(Curve("all_reduce", "mpi", name, (8, 1 << 20), (1e-6, 1e-6)) for name in ("ring", "tree"))
ON_GRAPH = (Curve("all_reduce", ANY, "star", (8, 1 << 20), (1e-5, 2e-5)),
            Curve("all_reduce", ANY, "tree", (8, 1 << 20), (2e-5, 1e-5)))
FILE = AlgorithmFile("made.py", "all_reduce", ("mine_1",), "0" * 64)
GRAPH = GraphTable("here", 4, "cpu", "2026-01-01", (FILE,), ON_GRAPH, "5e0f")
PLAIN = GRAPH._replace(files=())


def table(*graphs, ranks=4):
    return Table("mine", {}, (Shape(ranks, 1, "cpu", "2026-01-01", (LINK,), SWEPT),), graphs)


def uneven(folder):
    """Write a graph of four ranks in which a ring in the order of the ranks crosses narrow links; return the file."""
    file = folder / "uneven.toml"
    links = [(0, 2, 50), (2, 1, 50), (1, 3, 50), (3, 0, 50), (0, 1, 5), (2, 3, 5)]
    file.write_text('kind = "graph"\nname = "uneven"\nranks = ["a", "b", "c", "d"]\n' + "".join(
        f'[[links]]\nfrom = "{"abcd"[one]}"\nto = "{"abcd"[other]}"\nGBps = {speed}\nus = 1.0\nboth = true\n'
        for one, other, speed in links))
    return file


def tuned(folder, monkeypatch, *words, graph=None):
    """Run `gpucoll tune --topology` on a graph, by default the uneven one; return the path of the table."""
    monkeypatch.setenv("GPUCOLL_CACHE", str(folder / "cache"))
    for module in (on_graph, commands):  # without MPI in this process
        monkeypatch.setattr(module, "facts", lambda: {"name": "a", "processor": "b", "cores": 2, "mpi": "c"})
    assert main(["tune", "--topology", graph or str(uneven(folder)), *words]) == 0
    path, = (folder / "cache").glob("*.json")
    return path


def test_a_graph_decides_for_its_ranks_before_measured_times():
    best = {8: "star", 1 << 20: "tree"}
    for nbytes, name in best.items():
        choice = Tuner((0,) * 4, table(PLAIN)).choose("all_reduce", "auto", nbytes, ("mpi", "native"))
        assert choice[:2] == ("mpi", name)
    first, second, *others = Tuner((0,) * 4, table(PLAIN)).candidates("all_reduce", 8, ("shared", "mpi", "native"))
    assert (first[:2], first.graph, second[:2]) == (("shared", "star"), "here", ("shared", "tree"))
    assert not any(one.graph or one.algorithm in ("star", "tree") for one in others)
    assert others[0][:2] == ("mpi", "ring")  # then what was measured
    for graph, size in ((PLAIN, 8), (PLAIN._replace(device="cuda"), 4), (PLAIN._replace(ranks=3), 4)):
        assert Tuner((0,) * size, table(graph, ranks=size)).choose("all_reduce", "auto", 8, ("mpi",))[1] == "ring"
    tuner = Tuner((0,) * 4, table(PLAIN), "all_reduce:ring")
    assert tuner.choose("all_reduce", "auto", 8, ("mpi",))[1] == "ring"
    assert not tuner.candidates("all_reduce", 8, ("mpi",))[0].graph


def test_the_latest_tuning_counts():
    both = table(PLAIN, PLAIN._replace(device="cuda"))
    assert both.predicted(PLAIN._replace(graph="other")).graphs == (both.graphs[1], PLAIN._replace(graph="other"))
    assert both.merged(both.shapes[0]).graphs == (both.graphs[1],)
    assert both.merged(both.shapes[0]._replace(ranks=8)).graphs == both.graphs


def test_a_table_with_a_graph_is_read_as_it_was_written():
    assert parse("mine", as_json(table(GRAPH))) == table(GRAPH)


def test_a_missing_or_changed_file_is_refused(tmp_path):
    path, content = tmp_path / "table.json", b"x = 1\n"
    good = GRAPH._replace(files=(FILE._replace(sha256=hashlib.sha256(content).hexdigest()),))
    path.write_bytes(as_json(table(good)))
    (tmp_path / "made.py").write_bytes(content)
    assert read(path, {}).graphs[0].files[0].content == content
    (tmp_path / "made.py").write_bytes(content + b"#")
    with pytest.raises(ArgumentError, match=r"GC-TABLE.*made.py of mine_1 has changed since the table was written"):
        read(path, {})
    (tmp_path / "made.py").unlink()
    with pytest.raises(ArgumentError, match=r"made.py of mine_1 cannot be read: No such file.*tune --topology"):
        read(path, {})


def test_tune_predicts_and_auto_takes_the_quickest_by_size(tmp_path, monkeypatch, capsys):
    path = tuned(tmp_path, monkeypatch, "--collective", "reduce_scatter,all_to_all", "--json")
    row = json.loads(capsys.readouterr().out)
    assert (row["file"], row["graph"], row["ranks"]) == (str(path), "uneven", 4)
    found = read(path, {})
    assert as_json(found) == path.read_bytes()
    graph, links = found.graph(4, "cpu"), load_graph(str(tmp_path / "uneven.toml"))
    (file,) = (one for one in graph.files if one.collective == "reduce_scatter")
    assert [str(path.with_name(one.name)) for one in graph.files] == row["files"]
    names = [name for name in algorithms("reduce_scatter", size=4)
             if "nodes" not in find("reduce_scatter", name).options]
    predicted = {name: {nbytes: simulate("reduce_scatter", name, 4, nbytes, links, segments=segments(
        "reduce_scatter", name, nbytes, 4)).seconds for nbytes in (8, 1 << 20, 1 << 30)} for name in names}
    for curve in graph.curves:
        if curve.collective == "reduce_scatter":
            assert {nbytes: curve.at(nbytes) for nbytes in (8, 1 << 20, 1 << 30)} == pytest.approx(
                predicted.pop(curve.algorithm), rel=1e-3), curve.algorithm
    assert all(name in own_names("reduce_scatter") for name in predicted), "all built-in algorithms are in the table"
    assert rules(f"reduce_scatter:{file.algorithms[0]}")["reduce_scatter"].names == file.algorithms[:1]
    tuner = Tuner((0,) * 4, found)
    small, large = (tuner.choose("reduce_scatter", "auto", nbytes, ("shared",)) for nbytes in (8, 1 << 26))
    assert small.algorithm not in file.algorithms
    assert large.algorithm in file.algorithms
    times = {curve.algorithm: curve.at(1 << 26) for curve in graph.curves if curve.collective == "reduce_scatter"}
    assert times[large.algorithm] == min(times.values()) < times["ring"] / 10
    assert tuner.file("reduce_scatter", large.algorithm, "cpu") == str(path.with_name(file.name))
    assert tuner.file("reduce_scatter", "ring", "cpu") is None
    # A promise of order excludes trees, and a graph of more ranks does not count.
    for other in (tuner.choose("reduce_scatter", "auto", 1 << 26, ("shared",), order="in order"),
                  Tuner((0,) * 3, found).choose("reduce_scatter", "auto", 1 << 26, ("shared",))):
        assert other.algorithm not in file.algorithms


@pytest.mark.parametrize(("collective", "graph"), [("all_gather", None), ("broadcast", "crossbar(3)")])
def test_every_algorithm_in_the_files_is_the_quickest_somewhere(tmp_path, monkeypatch, collective, graph):
    (graph,) = read(tuned(tmp_path, monkeypatch, "--collective", collective, graph=graph), {}).graphs
    best = {min((curve for curve in graph.curves), key=lambda curve, place=place: curve.seconds[place]).algorithm
            for place in range(len(graph.curves[0].bytes))}
    assert {name for file in graph.files for name in file.algorithms} == best & {*own_names(collective)}


def test_short_messages_have_algorithms_of_few_rounds(tmp_path, monkeypatch, capsys):
    """On a DGX-1 the data of all ranks arrive in two rounds, by no algorithm of the library in as little time."""
    (graph,) = read(tuned(tmp_path, monkeypatch, "--collective", "all_gather", graph="dgx1"), {}).graphs
    best = min(graph.curves, key=lambda curve: curve.at(1 << 16))
    assert "_2_rounds_" in best.algorithm
    assert best.at(1 << 16) < 0.8 * min(curve.at(1 << 16) for curve in graph.curves if "rounds" not in curve.algorithm)
    everyone = schedules("all_gather", best.algorithm, size=8)
    assert {sum(map(bool, rounds)) for rounds in everyone} == {2}


def test_a_table_is_for_this_user_alone_whatever_the_umask(tmp_path, monkeypatch):
    before = os.umask(0o002)
    try:
        path = tuned(tmp_path, monkeypatch, "--collective", "all_gather")
    finally:
        os.umask(before)
    assert read(path, {}).graphs[0].files[0].content


@pytest.mark.parametrize(("words", "said"), [
    (["--topology", "dgx11"], "did you mean dgx1"), (["--topology", "two_hosts"], "no graph is named 'two_hosts'"),
    (["--topology", "ring(4)", "--sweep"], "omit one"),
    (["--topology", "ring(4)", "--collective", "all_reduc"], "did you mean all_reduce")])
def test_wrong_arguments_are_one_line(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.setenv("GPUCOLL_CACHE", str(tmp_path))
    assert said in refused(capsys, main, ["tune", *words], "gpucoll tune: ")
    assert not [*tmp_path.iterdir()]


def test_predictions_for_other_collectives_are_kept():
    gathers = Curve("all_gather", ANY, "ring", (8,), (1e-5,))
    later = GRAPH._replace(files=(), curves=(gathers,))
    both, = table(GRAPH).predicted(later).graphs
    assert (both.files, both.curves) == ((FILE,), (gathers, *ON_GRAPH))
    other, = table(GRAPH).predicted(later._replace(graph="there")).graphs
    assert other.curves == (gathers,)


def test_the_quickest_on_a_graph_is_taken_however_near_the_next_is():
    near = tuple(Curve("all_reduce", ANY, name, (8, 1 << 20), (seconds, seconds))
                 for name, seconds in (("one_shot", 1.01e-5), ("ring", 1.02e-5), ("bine", 1e-5)))
    chosen = Tuner((0,) * 4, table(PLAIN._replace(curves=near))).choose("all_reduce", "auto", 8, ("mpi",))
    assert chosen[:2] == ("mpi", "bine")  # for groups, and predicted for this node


def test_predictions_with_a_file_that_cannot_be_registered_are_left_out():
    broken = GRAPH._replace(files=(FILE._replace(content=b"raise ValueError('planted')"),))
    with pytest.warns(UserWarning, match="planted.*the predictions on the graph here are left out"):
        tuner = Tuner((0,) * 4, table(broken))
    assert tuner.choose("all_reduce", "auto", 8, ("mpi",))[1] in ("ring", "tree")  # by measured times


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\x01b"])
def test_a_name_that_would_end_a_text_of_python_is_refused(tmp_path, name):
    file = tmp_path / "graph.toml"
    file.write_text(f'kind = "graph"\nranks = ["a", "b"]\nname = {json.dumps(name)}\n'
                    '[[links]]\nfrom = "a"\nto = "b"\nGBps = 1.0\nus = 1.0\nboth = true\n')
    with pytest.raises(ArgumentError, match=r"GC-TOPOLOGY.*a quote, a backslash or a control character"):
        load_graph(str(file))
