"""Doctests and README's examples run, README's generated parts are what the code generates, pages what it counts."""

import doctest
import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gpucoll.bench import strategies

import gpucoll
from gpucoll import cli
from gpucoll.algorithms import registry
from gpucoll.collectives import COLLECTIVES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = sorted((ROOT / "docs").rglob("*.md"))
MODULES = [module.name for module in pkgutil.walk_packages(gpucoll.__path__, "gpucoll.")
           if not module.name.endswith(("__main__", "executors.mpi", "executors.native", "device.cuda", "device.nccl",
                                        "device.local", "nccl.native", "peer.ipc"))  # these need MPI or CuPy
           and (importlib.util.find_spec("torch") is not None or not module.name.startswith("gpucoll.torch"))]


def test_doctests():
    failed = [name for name in ("gpucoll", "grids", *MODULES) if doctest.testmod(importlib.import_module(name)).failed]
    assert not failed


@pytest.mark.slow
@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_readme_examples_run(block, tmp_path):
    """Alone each example is a world of one; tests/multirank/test_readme.py runs them on several ranks."""
    (tmp_path / "example.py").write_text(block)
    job = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True)
    assert job.returncode == 0, job.stderr


def test_readmes_table_is_generated():
    """Of collectives x algorithms, from the registry; every word of it is explained."""
    lines = ["| collective | algorithm | rounds | bytes on the longest path | most bytes sent | received |",
             "|---|---|---|---|---|---|"]
    for collective in COLLECTIVES:
        for (kind, name), found in registry().items():
            if kind == collective:
                figures = " | ".join(f"`{formula}`" for formula in found.cost[:4])
                lines.append(f"| {kind} | {name} | {figures} |")
    table = "\n".join(lines)
    assert table in README, f"put this into README.md:\n{table}"
    legend = "\n".join(re.findall(r"^\| (`.*?) \|", README.partition("| in a formula |")[2].partition("\n\n")[0], re.M))
    known = set(re.findall(r"`(\w+)(?:\(x\))?`", legend))
    formulas = " ".join(re.findall(r"`([^`]*)`", table))
    assert set(re.findall(r"[A-Za-z]\w*", formulas)) <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_shows_is_there_and_what_it_quotes_is_true(page):
    """Files, and the tables of bench.strategies: each figure is its formula's. How long a step took is not checked."""
    text = page.read_text()
    assert all((page.parent / name).is_file() for name in re.findall(r"\]\((?!http)([^)]*)\)", text))
    names = {}
    for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()):
        if cells[0].startswith("P = "):
            names = {name: int(value.replace(",", "")) for name, value in re.findall(r"(\w) = ([\d,]*\d)", cells[0])}
        elif cells[0] in strategies.FORMULAS and len(cells) == 6:
            formulas = strategies.FORMULAS[cells[0]]
            assert cells[1:5:2] == [f"{eval(formula, dict(names)):,.0f}" for formula in formulas]
            assert cells[2:6:2] == [formula.replace(" *", "") for formula in formulas]


def test_the_page_of_own_algorithms_is_true(tmp_path, monkeypatch, capsys, own_algorithms):
    """Its first block is the file that its commands name; on ranks its blocks run in tests/multirank/test_readme.py."""
    text = (ROOT / "docs/algorithms.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "line.py").write_text(blocks[0])
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        exec(compile(block, "a block", "exec"), {"__name__": "page"})
    shown = "".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
    commands = [line.split() for line in shown.splitlines()]
    assert len(commands) >= 6
    for words in commands:
        assert (words[0], cli.main(words[1:])) == ("gpucoll", 0)
    assert "no faults" in capsys.readouterr().out
