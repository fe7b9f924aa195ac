"""README's examples on several ranks, and those of the pages in docs."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
PAGES = sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples_run_on_four_ranks(mpiexec, tmp_path, example):
    (tmp_path / "example.py").write_text(example)
    job = mpiexec(4, sys.executable, "example.py", cwd=tmp_path)
    assert job.returncode == 0, job.stderr


def test_the_first_example_prints_what_readme_says(mpiexec, tmp_path):
    promised = re.search(r"python example\.py\s+# (.*)", README).group(1)
    (tmp_path / "example.py").write_text(EXAMPLES[0])
    assert mpiexec(4, sys.executable, "example.py", cwd=tmp_path).stdout == promised + "\n"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "README.md"], ids=lambda page: page.stem)
def test_the_pages_examples_run_on_two_ranks_and_a_mesh_on_four(mpiexec, tmp_path, page):
    for example in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        (tmp_path / "example.py").write_text(example)
        job = mpiexec(4 if "Mesh" in example else 2, sys.executable, "example.py", cwd=tmp_path)
        assert job.returncode == 0, job.stderr
