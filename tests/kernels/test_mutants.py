"""Every mutant of the kernels is caught by the default tier of this folder, run on a copy of the tree that has it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mutants import MUTANTS

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.kernel, pytest.mark.mutant, pytest.mark.nightly]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    copy = tmp_path_factory.mktemp("tree")
    for folder in ("gpucoll", "kernels", "tests"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


def run(tree):
    """The default tier of this folder, its objects kept beside the copy and not in the user's cache."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow and not nightly", "tests/kernels"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, env={
        **os.environ, "PYTHONPATH": str(tree), "GPUCOLL_CACHE": str(tree / "cache")})


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(tree, name):
    mutant = MUTANTS[name]
    file = tree / mutant.file
    whole = file.read_text()
    assert whole.count(mutant.old) == 1
    file.write_text(whole.replace(mutant.old, mutant.new))
    try:
        job = run(tree)
    finally:
        file.write_text(whole)
    assert job.returncode != 0, "nobody noticed"
    assert "ERROR collecting" not in job.stdout and "CompileError" not in job.stdout, job.stdout


def test_the_copy_without_a_mutant_passes(tree):
    job = run(tree)
    assert job.returncode == 0, job.stdout
