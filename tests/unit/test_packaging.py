"""Promises of pyproject.toml, and the scripts that make environments and run programs in them."""

import ast
import functools
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile

import pytest

import environment
from gpucoll.executors.engine import extension
from harness import packages
from harness.jobs import python, run_job
from harness.sources import ROOT, files, nodes_of


def test_packages_are_the_folders():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = [".".join([package, *marker.parent.relative_to(ROOT / folder).parts])
             for package, folder in listed["package-dir"].items() for marker in (ROOT / folder).rglob("__init__.py")
             if "_faces" not in marker.parts]  # they stand for other packages
    assert sorted(listed["packages"]) == sorted(found)


def test_every_dependency_has_a_lowest_version():
    """`scripts/test --lowest`, a part of CI, installs exactly these."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    rows = [*project["dependencies"], *(one for row in extras.values() for one in row if one != "gpucoll[test]")]
    assert [one for one in rows if not re.match(r"[\w-]+>=\d[\w.]*(,<\d[\w.]*)?$", one)] == []
    lowest = environment.lowest({"test", "train", "ucx"})
    assert "numpy==2.3" in lowest
    assert len({one.partition("==")[0] for one in lowest}) == len(lowest), "one dependency has two bounds"
    assert "scripts/test --lowest" in (ROOT / ".ci/run").read_text()


def test_the_packages_agree_about_the_version_and_the_dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    recipes = [(ROOT / "docs/packaging" / name).read_text() for name in
               ("conda-forge/recipe.yaml", "spack/package.py", "CITATION.cff")]
    version = re.escape(project["version"])
    assert all(re.search(rf'^ *version(: |\("){version}\b', text, re.MULTILINE) for text in recipes)
    for name, _, lowest in (row.partition(">=") for row in project["dependencies"]):
        assert f"- {name} >={lowest}\n" in recipes[0]
        assert re.search(rf"py-{name.replace('_', '-')}@{re.escape(lowest.removesuffix('.0'))}:", recipes[1]), name


def test_workflows_name_actions_by_their_hash():
    used = [line.split(maxsplit=2)[-1] for path in (ROOT / ".github/workflows").iterdir()
            for line in path.read_text().splitlines() if "uses: " in line]
    assert len(used) > 20
    assert [one for one in used if not re.fullmatch(r"(uses: )?[\w/.-]+@[0-9a-f]{40}  # v[\d.]+", one)] == []


def test_the_lowest_versions_are_constraints_of_their_environment_alone(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(environment, "followed", lambda step, *words: asked.append(words))
    for name in (".venv", environment.LOWEST):
        (tmp_path / name / "bin").mkdir(parents=True)
        environment.install(str(tmp_path / name / "bin" / "python"), {"dtypes"}, uv=False)
    assert ["--constraint" in words for words in asked] == [False, True]
    assert (tmp_path / environment.LOWEST / "lowest.txt").read_text().splitlines() == environment.lowest({"dtypes"})


def test_only_the_command_imports_the_benchmarks():
    """import-linter cannot see `gpucoll.bench`, as the folder of the benchmarks is outside the package's folder."""
    allowed = {ROOT / "gpucoll" / "cli" / "__init__.py", ROOT / "gpucoll" / "__main__.py"}
    for path in set(files("gpucoll")) - allowed:
        for node in nodes_of(path):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if "bench" in name.split(".")], path


def test_the_engine_is_there_wherever_it_can_be_built():
    if shutil.which("g++") and os.path.exists(f"{sysconfig.get_paths()['include']}/Python.h"):
        extension.library()  # a failed build raises with the reason


# Fields in use; a record of UCX goes on behind them.
PLACES = """ucp_params_t.features ucp_worker_params_t.thread_mode ucp_ep_params_t.address ucp_ep_params_t.err_mode
ucp_ep_params_t.err_handler ucp_err_handler_t.cb ucp_err_handler_t.arg ucp_tag_recv_info_t.length
ucp_request_param_t.flags ucp_request_param_t.request ucp_request_param_t.cb.send ucp_request_param_t.cb.recv
ucp_request_param_t.datatype ucp_request_param_t.user_data ucp_request_param_t.memory_type
ucp_request_param_t.recv_info.tag_info"""


def test_the_binding_declares_what_the_headers_of_ucx_declare(tmp_path):
    (package,) = pytest.importorskip("libucx").__path__
    names = re.findall(r"\bUC[SP]_[A-Z_]+(?= = )|\bucp_\w+(?=\()", (ROOT / "kernels/binding/ucx.h").read_text())
    lines = [f"say({name});" if name.isupper() else f"std::puts(typeid({name}).name());" for name in names]
    lines += [f"say(offsetof({kind}, {field})); std::puts(typeid({kind}{{}}.{field}).name());"
              for kind, _, field in (place.partition(".") for place in PLACES.split())]
    told = []
    for header, folder in (("binding/ucx.h", ROOT / "kernels"), ("ucp/api/ucp.h", f"{package}/include")):
        text = "".join(f"#include <{name}>\n" for name in ("cstddef", "cstdio", "typeinfo", header))
        text += 'void say(long long x) { std::printf("%lld\\n", x); }\nint main() {' + "\n".join(lines) + "}"
        subprocess.run(["g++", "-x", "c++", f"-I{folder}", "-w", "-o", tmp_path / "told", "-"], input=text, text=True,
                       check=True)
        told.append(subprocess.run([tmp_path / "told"], capture_output=True, text=True, check=True).stdout.splitlines())
    assert len(told[0]) == len(names) + 2 * len(PLACES.split()) > 70
    assert told[0] == told[1]


@pytest.fixture
def source(tmp_path):
    """Copy the sources of the package, because a build leaves files in the sources."""
    for name in ("gpucoll", "bench", "kernels"):
        shutil.copytree(ROOT / name, tmp_path / "source" / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "setup.py", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, tmp_path / "source")
    return tmp_path / "source"


@pytest.mark.nightly
def test_wheel_holds_everything(source, tmp_path):
    """uv builds the wheel from the source archive, so that the archive is tested too."""
    wheel = ["uv", "build", "--out-dir"] if shutil.which("uv") else \
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir"]
    subprocess.run([*wheel, tmp_path / "made", source], check=True)
    names = set(zipfile.ZipFile(*(tmp_path / "made").glob("*.whl")).namelist())
    kernels = {f"gpucoll/{path.relative_to(ROOT)}" for path in (ROOT / "kernels").rglob("*.*")
               if path.suffix in (".cc", ".cu", ".h")}
    engine = f"gpucoll/_engine{sysconfig.get_config_var('EXT_SUFFIX')}"
    assert {*kernels, engine, "gpucoll/py.typed", "gpucoll/bench/__init__.py"} <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"gpucoll"}


# Hide editable installations: these would supply parts missing from the tested installation.
ALONE = """
import sys
sys.meta_path = [one for one in sys.meta_path if not getattr(one, "__module__", "").startswith("__editable__")]
"""
SUMS = ALONE + """
import numpy, gpucoll
assert gpucoll.__file__.startswith(sys.argv[1])
for executor in ("shared", "mpi", None):
    with gpucoll.init(executor=executor) as comm:
        for _ in range(3):
            assert (comm.all_reduce(numpy.full(1000, comm.rank + 1.0)) == 3).all()
"""


@pytest.mark.nightly
def test_an_installation_serves(source, tmp_path, mpiexec):
    try:
        packages.install("--no-deps", "--target", tmp_path / "made", source)
    except packages.NoNetwork as error:
        pytest.skip(str(error))
    made = {"PYTHONPATH": str(tmp_path / "made")}
    job = mpiexec(2, sys.executable, "-c", SUMS, tmp_path / "made", timeout=120, env=made, cwd=tmp_path)
    assert job.returncode == 0, job.stdout + job.stderr
    doctor = f"{ALONE}from gpucoll.cli import main; main(['doctor'])"
    assert "engine: installed" in run_job([sys.executable, "-c", doctor], 120, made, tmp_path).stdout


@pytest.mark.nightly
def test_no_installation_lacks_the_engine(source, tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "/bin/false")
    monkeypatch.setenv("CXX", "/bin/false")
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, source]
    assert subprocess.run(build, capture_output=True).returncode
    assert not [*tmp_path.glob("*.whl")]


@pytest.mark.parametrize("name", ["train", "test", "bench", "c10d", "raytests", "environment.py"])
def test_old_pythons_can_read_the_scripts(name):
    """An old Python must parse a whole script to reach the line refusing old Pythons."""
    ast.parse((ROOT / "scripts" / name).read_text(), feature_version=(3, 7))


def test_ranks_are_taken_out_of_the_command_line(monkeypatch):
    split = runpy.run_path(str(ROOT / "scripts" / "train"))["split_ranks"]
    assert split(["--epochs", "2", "--ranks", "3", "--seed=1"]) == (3, ["--epochs", "2", "--seed=1"])
    assert split(["--ranksom", "3", "--ranks=5"]) == (5, ["--ranksom", "3"])
    for cores, ranks in ((1, 2), (5, 5), (64, 8)):
        monkeypatch.setattr(environment, "cores", lambda cores=cores: cores)
        assert split([]) == (ranks, [])


@pytest.mark.parametrize(("words", "variables", "lines"), [
    (["--ranks", "0"], {}, 1), (["--ranks=1.5"], {}, 1), ([], {"PMI_RANK": "1", "PMI_SIZE": "2"}, 0)])
def test_what_training_refuses_is_one_line_of_all_ranks(words, variables, lines):
    job = python(ROOT / "scripts" / "train", *words, env=variables)
    assert (job.returncode, job.stdout, job.stderr.count("\n")) == (2, "", lines)


def test_the_driver_chooses_the_extra():
    for report, major in (("CUDA Version: 12.2     |", 12), ("CUDA UMD Version: 13.3     |", 13),
                          ("CUDA Version              : 14.0\n", 13)):
        assert environment.driver_extras(report) == {f"cuda{major}", f"cublas{major}"}
    assert environment.driver_extras("CUDA Version: 11.4") == environment.driver_extras("failed") == set()


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Make a checkout with a Python in .venv and Open MPI's mpiexec on PATH; list commands instead of running any."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    for path, text in ((tmp_path / ".venv" / "bin" / "mpiexec", ""),
                       (tmp_path / "mpiexec", "#!/bin/sh\necho 'mpiexec (Open MPI) 5.0.11'")):
        path.write_text(text)
        path.chmod(0o755)
    (tmp_path / "kernels" / "binding").mkdir(parents=True)
    for name, text in (("pyproject.toml", "[project]"), ("setup.py", ""),
                       ("kernels/binding/engine.cc", '#include "binding/calls.h"'),
                       ("kernels/binding/calls.h", ""), ("kernels/binding/ucx.cc", ""), ("kernels/binding/ucx.h", "")):
        (tmp_path / name).write_text(text)
    asked, real = [], functools.cache(lambda *words, output_of=environment.output_of: output_of([*words]))
    monkeypatch.setattr(environment, "output_of", lambda words, **_: real(*words))
    monkeypatch.setattr(environment, "ROOT", str(tmp_path))
    monkeypatch.setattr(environment, "followed", lambda step, *words: asked.append(words))
    monkeypatch.setenv("PATH", str(tmp_path / ".venv" / "bin"))
    return tmp_path, asked


def test_an_environment_is_made_once_and_whatever_changes_is_noticed(place):
    folder, asked = place

    def is_made(extras=("train",)):
        del asked[:]
        assert environment.ensure(set(extras)) == str(folder / ".venv" / "bin" / "python")
        return bool(asked)

    assert is_made()
    assert not is_made()
    assert is_made(["plot"])
    assert asked[-1][-1] == f"{folder}[mpich,plot,train]"
    for name in ("pyproject.toml", "setup.py", "kernels/binding/calls.h", "kernels/binding/ucx.h"):
        with open(folder / name, "a") as file:
            file.write("\n")
        assert is_made()
        assert not is_made()
    (folder / ".venv" / "gpucoll-stamp.json").write_text('{"root": ')  # left by an interrupted installation
    assert is_made()
