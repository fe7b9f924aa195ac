"""The stand-in for CuPy is held against CuPy itself, where that is installed; neither a GPU nor a driver is needed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

STAND_IN = Path(__file__).resolve().parents[1] / "stand_in"
PUBLIC = """
import cupy, inspect, json, cupy.cuda.nccl
found = []
for module in (cupy, cupy.cuda, cupy.cuda.runtime, cupy.cuda.driver, cupy.cuda.stream, cupy.cuda.nccl):
    for name, value in vars(module).items():
        own = getattr(value, "__module__", module.__name__) == module.__name__
        given = name in getattr(module, "__all__", ())
        if (own or given) and name[0] != "_" and not inspect.ismodule(value):
            found.append(f"{module.__name__}.{name}")
            if inspect.isclass(value):
                found += [f"{module.__name__}.{name}.{one}" for one in vars(value) if one[0] != "_"]
print(json.dumps(found))
"""
LACKING = """
import cupy, json, sys, cupy.cuda.nccl
def there(name):
    found = cupy
    for part in name.split(".")[1:]:
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True
print(json.dumps([name for name in json.load(sys.stdin) if not there(name)]))
"""


def run(code, given="", *places):
    job = subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {list(map(str, places))!r}\n{code}"],
                         input=given, text=True, capture_output=True, check=False)
    assert job.returncode == 0, job.stderr
    return json.loads(job.stdout)


def test_cupy_has_every_public_name_of_the_stand_in():
    """And so every name that the library uses: programs run on the stand-in, which has no others."""
    pytest.importorskip("ml_dtypes", reason="pip install gpucoll[dtypes]")
    names = run(PUBLIC, "", STAND_IN, STAND_IN.parents[1])
    assert len(names) > 90
    assert run(LACKING, json.dumps(names), STAND_IN, STAND_IN.parents[1]) == []
    pytest.importorskip("cupy", reason="pip install gpucoll[cuda13]")
    absent = run(LACKING, json.dumps(names))
    assert not absent, " ".join(absent)
