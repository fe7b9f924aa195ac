"""No wait outside of gpucoll/progress is unknown: each needs a reason, or the hooks of `Progress`."""

import ast
import types
from pathlib import Path
from unittest import mock

import pytest

from gpucoll import internal
from gpucoll.errors import RankFailedError
from gpucoll.progress.waits import Progress
from unit.wait_places import PACKAGE, places


def test_every_wait_is_in_progress_or_known():
    text = (Path(__file__).parent / "known_waits.txt").read_text()
    known = [row.strip() for row in text.splitlines() if row.startswith("    ")]
    found = [row for row in places() if not row.startswith(("precheck/", "emulation/"))]
    assert len(known) == len({*known})
    assert sorted({*found} - {*known}) == [], "wait in gpucoll/progress, or give a reason in tests/unit/known_waits.txt"
    assert sorted({*known} - {*found}) == []


def test_a_receive_from_any_rank_runs_the_hooks():
    """It looks for a message again and again: without hooks, nobody would see that a rank has died."""
    waits = Progress(1.0)
    waits.hooks.append(mock.Mock(side_effect=RankFailedError("rank 1 has ended", ranks=(1,))))
    points = types.SimpleNamespace(seen=lambda source, tag: None)
    with pytest.raises(RankFailedError, match="has ended"):
        internal.sender_of(types.SimpleNamespace(_core=types.SimpleNamespace(waits=waits), _points=points), 0)


def test_making_what_all_ranks_make_takes_the_waits_of_the_communicator():
    """A `Progress` of its own runs no hooks: neither a death nor a failure of a rank would end the wait."""
    own = {path.relative_to(PACKAGE).as_posix(): count for path in sorted(PACKAGE.rglob("*.py"))
           if (count := path.read_text().count(" Progress(") + path.read_text().count("(Progress("))}
    assert own == {
        # Before any hook.
        "executors/engine/between_nodes.py": 1, "communicator/elastic.py": 1, "launch/bootstrap.py": 1,
        "communicator/transports.py": 1,  # the communicator's
        "executors/engine/__init__.py": 1,  # with the hooks given
        "device/nccl.py": 1}  # at the end, when other ranks may have ended


def test_a_failure_that_is_recorded_is_told():
    """`Progress.broken` tells the other ranks of a failure; only the home of waits and of the end sets it alone."""
    alone = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") for node in ast.walk(
        ast.parse(path.read_text())) if isinstance(node, ast.Assign) and any(
            ast.unparse(target).endswith("waits.failure") for target in node.targets)}
    assert alone == {"communicator/elastic.py", "communicator/leaving.py"}
