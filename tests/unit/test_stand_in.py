"""The stand-in for CuPy is held against CuPy itself, where that is installed; neither a GPU nor a driver is needed."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = ROOT / "tests" / "stand_in"
USERS = [*sorted((ROOT / "gpucoll").rglob("*.py")), *sorted((ROOT / "bench").rglob("*.py")),
         *sorted((ROOT / "scripts").glob("*.py")), ROOT / "tests" / "gpu_programs.py", ROOT / "tests" / "mirrored.py",
         *sorted((ROOT / "tests" / "gpu").glob("*.py"))]
FACTS = """
import importlib, inspect, json, sys
def find(name):
    parts = name.split(".")
    found = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[:number]))
        found = getattr(found, part)
    return found
def there(name):
    try:
        find(name)
    except (AttributeError, ImportError):
        return False
    return True
print(json.dumps({name: there(name) for name in json.load(sys.stdin)}))
"""


def names_of_cupy(path):
    """What a file calls `cupy....`, and what it imports from there."""
    tree = ast.parse(path.read_text())
    known = {"cupy": "cupy"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "cupy":
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    if "cupy" not in path.read_text():
        return set()
    return {name for node in ast.walk(tree) if isinstance(node, ast.Attribute) and (name := spelled(node, known))}


def spelled(node, known):
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    first = known.get(node.id) if isinstance(node, ast.Name) else None
    return first and ".".join([first, *reversed(parts)])


def public_names():
    """Every public name of the stand-in's modules and classes."""
    code = ("import cupy, json, inspect, cupy.cuda.nccl\n"
            "found = []\n"
            "for module in (cupy, cupy.cuda, cupy.cuda.runtime, cupy.cuda.driver, cupy.cuda.stream, cupy.cuda.nccl):\n"
            "    for name, value in vars(module).items():\n"
            "        own = getattr(value, '__module__', module.__name__) == module.__name__\n"
            "        given = name in getattr(module, '__all__', ())\n"
            "        if (own or given) and name[0] != '_' and not inspect.ismodule(value):\n"
            "            found.append(f'{module.__name__}.{name}')\n"
            "            if inspect.isclass(value):\n"
            "                found += [f'{module.__name__}.{name}.{one}' for one in vars(value) if one[0] != '_']\n"
            "print(json.dumps(found))")
    return json.loads(run(code, "", path=STAND_IN))


def run(code, given, path=None):
    places = [str(one) for one in (path, ROOT) if one]
    job = subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {places!r}\n{code}"], input=given,
                         text=True, capture_output=True, check=False)
    assert job.returncode == 0, job.stderr
    return job.stdout


def lacking(names, path=None):
    return sorted(name for name, there in json.loads(run(FACTS, json.dumps(sorted(names)), path)).items() if not there)


# The one from CuPy 14 on, the other until then: the library looks before it calls.
BY_VERSION = {"cupy.cuda.Stream.from_external", "cupy.cuda.ExternalStream"}


def used():
    """What we call; what begins with an underscore is the stand-in's own."""
    return {name for name in set().union(*map(names_of_cupy, USERS)) if "._" not in name}


def test_the_stand_in_has_every_name_that_is_used():
    pytest.importorskip("ml_dtypes", reason="pip install gpucoll[dtypes]")
    assert lacking(used(), STAND_IN) == []


def test_cupy_has_every_name_that_is_used():
    pytest.importorskip("cupy", reason="pip install gpucoll[cuda13]")
    assert [name for name in lacking(used()) if name not in BY_VERSION] == []


def test_cupy_has_every_public_name_of_the_stand_in():
    pytest.importorskip("cupy", reason="pip install gpucoll[cuda13]")
    own = public_names()
    absent = lacking(own)
    assert not absent, " ".join(absent)
    assert len(own) > 120
