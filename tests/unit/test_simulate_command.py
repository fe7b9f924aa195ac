"""Topologies from files, many predictions at once, and `gpucoll simulate`: the table and the JSON object."""

import json

import pytest

from gpucoll.cli import main
from gpucoll.errors import ArgumentError
from gpucoll.simulator import load, names, shipped, simulate


def test_the_package_brings_topologies():
    assert {"switch", "mesh", "nvlink_node", "pcie_node", "fat_tree", "torus_2d", "torus_3d", "two_hosts"} == {*names()}
    for name in names():
        topology = shipped(name)
        assert (topology.name, topology.about.endswith(".")) == (name, True)
        assert simulate("all_reduce", "ring", 8, 1 << 20, topology).seconds > 0


LEVEL = "[[level]]\nname = 'x'\nalpha = 1e-6\nbeta = 1e-9\n"


@pytest.mark.parametrize(("text", "words"), [
    ("[[level", "TOML"), ("\udcff", "TOML"), ("", r"no \[\[level\]\]"), ("abuot = 'x'\n" + LEVEL, "did you mean about"),
    (LEVEL.replace("alpha", "gap"), "level 1.* alpha"), (LEVEL.replace("'x'", "3"), "name 3"),
    (LEVEL.replace("1e-6", "nan"), "alpha nan"), (LEVEL.replace("1e-9", "true"), "beta True"),
    (LEVEL + "medium = 'ring'", "'ring'.* switch, bus, mesh, torus"),
    (LEVEL + "hop = 1e-7", "hop belongs to a torus, not to a switch"), (LEVEL + "ranks = 0", "ranks 0"),
    (LEVEL + "groups = 2", "groups belongs to the first"), (LEVEL + LEVEL, "level 1.* ranks is missing"),
    (LEVEL + "ranks = 4\n" + LEVEL + "ranks = 6", "level 2.* ranks 6 is no multiple of 4"),
    (LEVEL + "groups = 2\n" + LEVEL + "ranks = 6", "ranks cannot stand above groups"),
])
def test_a_malformed_topology_is_refused(text, words, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ArgumentError, match=words) as caught:
        load(str(file))
    assert (caught.value.code, "mine" in str(caught.value)) == ("GC-TOPOLOGY", True)


def test_the_command_prints_a_table_and_an_object(capsys):
    main(["simulate", *"all_reduce 64M --ranks 8,16 --algorithm ring,tree --topology fat_tree".split()])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("all_reduce on fat_tree: Nodes of eight GPUs")
    assert [line.split()[:3] for line in lines[2:4]] == [["8", "67108864", "ring"], ["8", "67108864", "tree"]]
    main(["simulate", *"all_reduce 64M --algorithm ring --json".split()])
    found = json.loads(capsys.readouterr().out)
    (only,) = found["predictions"]
    assert (found["topology"], only["algorithm"], only["ranks"], only["nbytes"]) == ("switch", "ring", 8, 1 << 26)
    assert only["seconds"] == simulate("all_reduce", "ring", 8, 1 << 26).seconds
    assert only["seconds"] == only["latency"] + only["bandwidth"] + only["reduction"]
