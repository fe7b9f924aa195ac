"""A user's own algorithms and a file of MSCCL's XML, on every executor: equal to the oracle bit for bit."""

from pathlib import Path

import pytest

import gpucoll as gc
import mixture
from harness.grids import generator, sampled
from programs.msccl_files import FILES, written

NAMES = {"own_all": "all_reduce", "own_line": "all_reduce", "own_star": "broadcast", "own_turns": "all_to_all",
         "own_direct": "reduce_scatter", "own_gather": "all_gather_v"}
OWN = str(Path(__file__).parents[1] / "programs" / "own.py")
pytestmark = pytest.mark.usefixtures("own_algorithms")


@pytest.mark.parametrize("name", NAMES)
def test_a_users_algorithm(executor, name):
    assert gc.load(f"{OWN}:{name}") == name
    random = generator(f"{executor.name}/{name}")
    for size in (1, 3, 4):
        calls = [(NAMES[name], name, *random.choice(executor.pairs), length, random.random())
                 for length in (0, 1, 5, 1000)]
        executor.run(size, mixture.called, calls)


@pytest.mark.parametrize("kind", sampled(FILES, 4, 8, ("linear_gather",)))
def test_xml(executor, tmp_path, kind):
    """A file of each kind is right, on the number of ranks of the file."""
    collective, _, sizes = FILES[kind]
    size = next(size for size in reversed(sizes) if size <= 4)
    path = tmp_path / "algorithm.xml"
    path.write_text(written(kind, size))
    name, random = gc.load(str(path)), generator(f"{executor.name}/{kind}")
    calls = [(collective, name, *random.choice(executor.pairs), length, random.random()) for length in (0, 3, 1000)]
    executor.run(size, mixture.called, calls)
