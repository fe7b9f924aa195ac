"""The reference describes each public name whole: parameters, results and an example that test_docs.py runs."""

import importlib.util
import inspect
import os
import re

import pytest

from gpucoll.calibration.commands import TEXTBOOK_NAMES
from gpucoll.launch.launchers import LAUNCHERS
from harness.jobs import python
from harness.sources import ROOT

CODES = re.compile("GL0[1-9]|GL10|SS0[1-6]|PR0[1-9]|PR10|RT0[134]|RT05|YD01|EX01|SA0[2-4]")  # of numpydoc
DOORS = ("torch", "torchft", "ray", "distributed")  # imitated where they are not installed
# Their constructors are those of Python and of torchft.
NOT_OURS = ("gpucoll.ReduceOp", "gpucoll.torch.torchft.ProcessGroupGpucoll")
API = ROOT / "docs/api"


def described(load):
    """Yield the names that the pages of the reference describe, with the methods of each class."""
    for page in sorted(API.glob("*.md")):
        found = re.findall(r"^\.\. auto(?:class|function|method):: ([\w.]+)\n((?: +:.*\n)*)", page.read_text(), re.M)
        for name, options in found:
            yield name
            members = re.search(":members:(.*)", options)
            for method in (members[1].replace(",", " ").split() or dir(load(name))) if members else ():
                value, own = getattr(load(name), method), method in vars(load(name)) or "inherited" in options
                if own and method[0] != "_" and inspect.isroutine(value) and value.__module__.startswith("gpucoll"):
                    yield f"{name}.{method}"


def main():
    """Print what is missing, by name; in a process of its own, because imitated packages change the importing ones."""
    from numpydoc.validate import Validator, validate
    from sphinx.ext.autodoc.mock import mock

    with mock([door for door in DOORS if importlib.util.find_spec(door) is None]):
        for name in described(Validator._load_obj):
            errors = [] if name in NOT_OURS else validate(name)["errors"]
            print(name, *(f"{code} {text}" for code, text in errors if CODES.fullmatch(code)), sep="; ")


def test_the_reference_is_complete():
    pytest.importorskip("numpydoc", reason="the site needs the extra docs: scripts/docs brings it")
    job = python(__file__, timeout=300, env={"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"})
    assert len(job.stdout.splitlines()) > 200, job.stderr
    assert [line for line in job.stdout.splitlines() if ";" in line] == []


def test_explain_knows_the_names_of_the_page():
    page = (ROOT / "docs/guide/names.md").read_text().partition("## Words")[0]
    headings = re.findall(r"^### (.+)\n\n`(?:comm\.)?(\w+)", page, re.M)
    assert {other: name for others, name in headings for other in others.split(", ")} == TEXTBOOK_NAMES
    assert len({re.sub(r"[\W_]", "", name.lower()) for name in TEXTBOOK_NAMES}) == len(TEXTBOOK_NAMES)


def test_each_known_launcher_is_in_the_reference():
    page = (API / "launch.md").read_text()
    assert all(f"| {one.name} |" in page and f"`{one.rank}`" in page for one in LAUNCHERS)


if __name__ == "__main__":
    main()
