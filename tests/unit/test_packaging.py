"""What pyproject.toml promises, and the scripts that make environments from it; only the slow test needs a network."""

import ast
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter

import pytest

import environment
import gpucoll

ROOT = pathlib.Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
MARKERS = ["kernel", "multirank", "emulated", "mutant", "gpu", "slow"]
EXTRAS = ["cuda12", "cuda13", "nvml", "mpich", "openmpi", "dtypes", "plot", "train", "test", "dev"]


def load_script(name):
    """A script without the ending .py, as a module."""
    loader = importlib.machinery.SourceFileLoader(f"scripts_{name}", str(ROOT / "scripts" / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


# ---------------------------------------------------------------- pyproject.toml


def packages_below(package, folder):
    for marker in (ROOT / folder).rglob("__init__.py"):
        yield ".".join([package, *marker.parent.relative_to(ROOT / folder).parts])


def test_packages_are_the_folders():
    found = [name for package, folder in SETUPTOOLS["package-dir"].items() for name in packages_below(package, folder)]
    assert sorted(SETUPTOOLS["packages"]) == sorted(found)


def test_nothing_that_is_large_is_required():
    assert PROJECT["project"]["dependencies"] == ["numpy", "mpi4py>=4.1", "platformdirs", "filelock>=3.20.1"]


def test_no_extra_brings_an_mpi_unasked():
    extras = PROJECT["project"]["optional-dependencies"]
    assert set(EXTRAS) <= set(extras)
    bringing = {name for name, packages in extras.items() if {"mpich", "openmpi"} & set(packages)}
    assert bringing == {"mpich", "openmpi"}


def test_version_is_the_one_that_the_package_says():
    assert PROJECT["project"]["version"] == gpucoll.__version__


def test_command_leads_to_a_function():
    module, function = PROJECT["project"]["scripts"]["gpucoll"].split(":")
    tree = ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text())
    assert function in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


def test_every_marker_has_a_description():
    described = dict(line.split(": ", 1) for line in PROJECT["tool"]["pytest"]["ini_options"]["markers"])
    assert set(MARKERS) <= set(described)
    assert all(described.values())


def imported_names(source, package):
    """Every module or name that a module of this package imports, in full."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def test_only_the_command_imports_the_benchmarks():
    """import-linter cannot see `gpucoll.bench`: its folder stands outside of the package's."""
    allowed = {ROOT / "gpucoll" / "cli.py", ROOT / "gpucoll" / "__main__.py"}
    for path in set((ROOT / "gpucoll").rglob("*.py")) - allowed:
        names = imported_names(path.read_text(), path.relative_to(ROOT).parent.parts)
        assert not [name for name in names if f"{name}.".startswith("gpucoll.bench.")], path


def test_imported_names_are_found_in_every_spelling():
    source = "import gpucoll.bench\nfrom gpucoll import bench\nfrom .. import bench\nfrom ..bench import sweep"
    assert list(imported_names(source, ("gpucoll", "device"))) == ["gpucoll.bench"] * 3 + ["gpucoll.bench.sweep"]


def installed():
    return any(importlib.metadata.distributions(name="gpucoll"))


@pytest.mark.skipif(not installed(), reason="gpucoll runs from a checkout here and is not installed")
def test_folders_beside_the_package_are_installed_in_it():
    import gpucoll.bench
    import gpucoll.kernels

    assert gpucoll.bench.__doc__
    assert gpucoll.kernels.__doc__


@pytest.mark.slow
def test_wheel_holds_everything(tmp_path):
    copy_project(tmp_path / "project")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", tmp_path]
    subprocess.run([*command, tmp_path / "project"], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = [path.name for path in (ROOT / "kernels").iterdir() if path.suffix in (".cu", ".cuh", ".h")]
    assert {f"gpucoll/kernels/{name}" for name in [*sources, "__init__.py"]} <= names
    assert {"gpucoll/py.typed", "gpucoll/bench/__init__.py"} <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"gpucoll"}


def copy_project(target):
    """What a build reads, away from the checkout, where it would leave its own files."""
    for name in ("gpucoll", "bench", "kernels"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, target)


# ---------------------------------------------------------------- scripts: what they make of words


@pytest.mark.parametrize("name", ["train", "test", "environment.py"])
def test_old_pythons_can_read_the_scripts(name):
    """They hand over to a newer Python, for which they have to be read first."""
    ast.parse((ROOT / "scripts" / name).read_text(), feature_version=(3, 6))


@pytest.mark.parametrize("name", ["scripts/train", "scripts/test", ".ci/run"])
def test_scripts_can_be_run(name):
    assert os.access(ROOT / name, os.X_OK)


@pytest.mark.parametrize(
    ("words", "ranks", "rest"),
    [
        (["--ranks", "4"], 4, []),
        (["--ranks=4", "--epochs", "2"], 4, ["--epochs", "2"]),
        (["--epochs", "2", "--ranks", "3", "--seed=1"], 3, ["--epochs", "2", "--seed=1"]),
        (["--ranks", "3", "--ranks=5"], 5, []),
        (["--ranksom", "3", "--ranks", "2"], 2, ["--ranksom", "3"]),
    ],
)
def test_ranks_are_taken_out_of_the_command_line(words, ranks, rest):
    assert environment.split_ranks(words) == (ranks, rest)


@pytest.mark.parametrize(("cores", "ranks"), [(1, 2), (2, 2), (5, 5), (8, 8), (64, 8)])
def test_without_ranks_every_core_works(monkeypatch, cores, ranks):
    monkeypatch.setattr(environment, "cores", lambda: cores)
    assert environment.split_ranks(["--epochs", "1"]) == (ranks, ["--epochs", "1"])


@pytest.mark.parametrize("words", [["--ranks", "0"], ["--ranks", "x"], ["--ranks=-1"], ["--ranks=1.5"], ["--ranks"]])
def test_wrong_ranks_end_in_one_line_and_code_2(words):
    result = subprocess.run([sys.executable, ROOT / "scripts" / "train", *words], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith("scripts/train: --ranks ")


@pytest.mark.parametrize(
    ("vendor", "ranks", "superuser", "options"),
    [
        ("mpich", 9, True, []),
        ("impi", 9, True, []),
        ("openmpi", 4, False, []),
        ("openmpi", 5, False, ["--oversubscribe"]),
        ("openmpi", 4, True, ["--allow-run-as-root"]),
        ("openmpi", 5, True, ["--oversubscribe", "--allow-run-as-root"]),
    ],
)
def test_launch_command_of_each_vendor(vendor, ranks, superuser, options):
    stamp = environment.Stamp(launcher="/mpi/bin/mpiexec", vendor=vendor)
    command = environment.launch_command(stamp, ranks, available=4, superuser=superuser)
    assert command == ["/mpi/bin/mpiexec", "-n", str(ranks), *options]


@pytest.mark.parametrize(
    ("text", "vendor"),
    [
        ("HYDRA build details:\n    Version:     5.0.2\n", "mpich"),
        ("MPICH Version:      5.0.2\nMPICH Device:       ch4:ucx ofi\n", "mpich"),
        ("MVAPICH2 Version      :     2.3.7\n", "mpich"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.19 Build 20260801\n", "impi"),
        ("mpiexec (OpenRTE) 4.1.4\n", "openmpi"),
        ("mpiexec (Open MPI) 5.0.11\n", "openmpi"),
        ("Open MPI v5.0.11, package: Open MPI user@localhost Distribution\n", "openmpi"),
        ("slurm 24.05\n", ""),
        ("", ""),
    ],
)
def test_vendor_of_launchers_and_libraries(text, vendor):
    assert environment.vendor_of(text) == vendor


@pytest.mark.parametrize(
    ("report", "extra"),
    [
        ("| NVIDIA-SMI 535.104.05   Driver Version: 535.104.05   CUDA Version: 12.2     |", "cuda12"),
        ("| NVIDIA-SMI 580.65.06    Driver Version: 580.65.06    CUDA Version: 13.0     |", "cuda13"),
        ("| NVIDIA-SMI 610.43.02    KMD Version: 610.43.02   CUDA UMD Version: 13.3     |", "cuda13"),
        ("    CUDA Version                              : 14.0\n", "cuda13"),
        ("| NVIDIA-SMI 470.57.02    Driver Version: 470.57.02    CUDA Version: 11.4     |", ""),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", ""),
        ("", ""),
    ],
)
def test_driver_chooses_the_extra(report, extra):
    assert environment.driver_extra(report) == extra


@pytest.mark.parametrize(
    ("variables", "rank"),
    [
        ({}, ""),
        ({"SLURM_NTASKS": "8"}, ""),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, ""),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}, "3"),
        ({"PMI_RANK": "1"}, "1"),
        ({"PMIX_RANK": "2"}, "2"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "0"),
    ],
)
def test_launchers_are_recognised(variables, rank):
    assert environment.launcher_rank(variables) == rank


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_training_refuses_a_second_launch(rank, lines):
    variables = {**os.environ, "PMI_RANK": rank}
    command = [sys.executable, ROOT / "scripts" / "train"]
    result = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", lines)


# ---------------------------------------------------------------- scripts/environment.py: what is still in order


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A repository with an environment that is in order, seen from outside: no program is run in it."""
    folder = tmp_path / ".venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / "bin" / "mpiexec").write_text("")
    (folder / "bin" / "mpiexec").chmod(0o755)
    (tmp_path / "pyproject.toml").write_text("[project]")
    monkeypatch.setattr(environment, "ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", str(folder / "bin"))
    environment.finish(str(folder), {"mpich", "train"}, "", str(folder / "bin" / "mpiexec"), "mpich")
    return folder


def test_current_environment_is_left_alone(place, monkeypatch):
    monkeypatch.setattr(environment, "update", lambda *arguments: pytest.fail("there was nothing to do"))
    assert environment.ensure({"train"}) == str(place / "bin" / "python")
    assert environment.mpiexec(str(place / "bin" / "python"), 3) == [str(place / "bin" / "mpiexec"), "-n", "3"]


def change_project(place, monkeypatch):
    (place.parent / "pyproject.toml").write_text("[project]\nname = 'other'")


def lose_the_launcher(place, monkeypatch):
    (place / "bin" / "mpiexec").unlink()


def exchange_the_interpreter(place, monkeypatch):
    (place / "bin" / "python").unlink()
    (place / "bin" / "python").write_text("#!/bin/sh")
    (place / "bin" / "python").chmod(0o755)


def move(place, monkeypatch):
    monkeypatch.setattr(environment, "ROOT", str(place.parent / "elsewhere"))
    (place.parent / "elsewhere").mkdir()
    (place.parent / "elsewhere" / "pyproject.toml").write_text("[project]")


def offer_a_site_mpi(place, monkeypatch):
    (place.parent / "mpiexec").write_text("")
    (place.parent / "mpiexec").chmod(0o755)
    monkeypatch.setenv("PATH", f"{place / 'bin'}{os.pathsep}{place.parent}")


def interrupt(place, monkeypatch):
    environment.prepare(str(place))


def spoil_the_stamp(place, monkeypatch):
    pathlib.Path(environment.stamp_file(str(place))).write_text('{"root": ')


CHANGES = [change_project, lose_the_launcher, exchange_the_interpreter, move, offer_a_site_mpi, interrupt]


@pytest.mark.parametrize("change", [*CHANGES, spoil_the_stamp])
def test_whatever_has_changed_is_noticed(place, monkeypatch, change):
    monkeypatch.setattr(environment, "quietly", lambda *arguments: None)
    assert environment.is_current(str(place), {"train"})
    change(place, monkeypatch)
    assert not environment.is_current(str(place), {"train"})


def test_missing_extra_is_noticed(place):
    assert not environment.is_current(str(place), {"train", "plot"})


def test_driver_is_noticed_until_its_extra_is_there(place, monkeypatch):
    monkeypatch.setattr(environment.shutil, "which", lambda name, path=None: name if name == "nvidia-smi" else None)
    monkeypatch.setattr(environment, "output_of", lambda command: "CUDA Version: 12.4")
    assert environment.driver_extras(environment.Stamp()) == {"cuda12", "cublas12"}
    assert environment.driver_extras(environment.Stamp(extras=("cuda13", "train"))) == set()


def test_stamp_of_another_version_counts_as_none(tmp_path):
    pathlib.Path(environment.stamp_file(str(tmp_path))).write_text(json.dumps({"root": "/", "colour": "red"}))
    assert environment.read_stamp(str(tmp_path)) == environment.Stamp()


def test_interrupted_installation_keeps_the_list_of_extras(place):
    site_packages = place / "lib" / "python3.11" / "site-packages"
    for name, files in {"pip-26.0": ["INSTALLER"], "numpy-2.4": ["INSTALLER"], "mpi4py-4.1": ["METADATA"]}.items():
        (site_packages / f"{name}.dist-info").mkdir(parents=True)
        for file in files:
            (site_packages / f"{name}.dist-info" / file).write_text("pip")
    stamp = environment.prepare(str(place))
    assert set(stamp.extras) == set(environment.read_stamp(str(place)).extras) == {"mpich", "train"}
    assert {path.name for path in site_packages.iterdir()} == {"pip-26.0.dist-info", "numpy-2.4.dist-info"}


@pytest.fixture
def installations(place, monkeypatch):
    """What would be installed, and which library mpi4py would find."""
    asked = []
    (place.parent / "mpiexec").write_text("#!/bin/sh\necho 'mpiexec (Open MPI) 5.0.11'")
    (place.parent / "mpiexec").chmod(0o755)
    monkeypatch.setattr(environment, "quietly", lambda *arguments: None)
    monkeypatch.setattr(environment, "pip", lambda folder, *words: asked.append(words))
    return asked


@pytest.mark.parametrize(
    ("extras", "on_path", "library", "vendor", "installed"),
    [
        ({"train"}, False, "", "mpich", {"mpich", "train"}),
        ({"train"}, True, "openmpi", "openmpi", {"train"}),
        ({"train"}, True, "mpich", "mpich", {"mpich", "train"}),
        ({"train"}, True, "", "mpich", {"mpich", "train"}),
        ({"train", "openmpi"}, True, "openmpi", "openmpi", {"openmpi", "train"}),
    ],
)
def test_choice_of_the_mpi(place, installations, monkeypatch, extras, on_path, library, vendor, installed):
    monkeypatch.setenv("PATH", f"{place.parent if on_path else place}")
    monkeypatch.setattr(environment, "library_vendor", lambda python: library)
    environment.write_stamp(str(place), environment.Stamp())
    environment.update(str(place), extras)
    stamp = environment.read_stamp(str(place))
    assert (stamp.vendor, set(stamp.extras)) == (vendor, installed)
    ours = {"mpich", "openmpi"} & installed
    assert stamp.launcher == str(place / "bin" / "mpiexec" if ours else place.parent / "mpiexec")
    assert installations[-1][-1] == f"{place.parent}[{','.join(sorted(installed))}]"


# ---------------------------------------------------------------- programs that are run


def test_exit_codes_come_back():
    assert environment.run([sys.executable, "-c", "raise SystemExit(7)"], signal.SIGTERM) == 7
    assert environment.run(["sh", "-c", "kill -9 $$"], signal.SIGTERM) == 137


def test_time_limit_ends_a_program():
    assert environment.run(["sleep", "60"], signal.SIGTERM, limit=0.1) == environment.TIMED_OUT


def heeding_interrupts():
    """A shell lets what it runs in the background ignore Ctrl-C, and so all that these tests start from there."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_interrupted_launcher_ends_its_program(tmp_path):
    """A program that a script has started does not outlive it, and neither of them says a word."""
    main = f"environment.run(['sh', '-c', 'echo $$ > {tmp_path}/pid; exec sleep 60'], 15)"
    command = [sys.executable, "-c", f"import environment; environment.start(lambda: {main})"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    script = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              preexec_fn=heeding_interrupts)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert script.poll() is None
    script.send_signal(signal.SIGINT)
    assert (script.communicate(timeout=30)[0], script.returncode) == (b"", 130)
    assert not os.path.exists(f"/proc/{(tmp_path / 'pid').read_text().strip()}/cmdline")


# ---------------------------------------------------------------- scripts/test


@pytest.fixture(scope="module")
def test_script():
    return load_script("test")


@pytest.mark.parametrize(
    ("words", "marks"),
    [
        ([], ""),
        (["-k", "ring", "-x"], ""),
        (["-m", "slow"], "slow"),
        (["-mslow"], "slow"),
        (["-m=slow and gpu", "-x"], "slow and gpu"),
        (["-m", "slow", "-m", "kernel"], "kernel"),
    ],
)
def test_chosen_marks(test_script, words, marks):
    assert test_script.chosen_marks(words) == marks


@pytest.mark.parametrize(("marks", "combined"), [
    ([], "multirank and (not slow)"), (["-m", "a or b"], "multirank and (a or b)")])
@pytest.mark.parametrize(("vendor", "other"), [("mpich", "openmpi"), ("impi", "openmpi"), ("openmpi", "mpich")])
def test_second_part_uses_the_other_mpi(test_script, monkeypatch, marks, combined, vendor, other):
    ensured = []
    monkeypatch.setattr(environment, "stamp_of", lambda python: environment.Stamp(vendor=vendor))
    monkeypatch.setattr(environment, "ensure", lambda *arguments: ensured.append(arguments) or "python")
    assert test_script.other_part(["-x", *marks], "first") == ("python", ["-x", *marks, "-m", combined])
    assert ensured == [({other, "dtypes", "test", "train"}, f".venv-{other}")]


def test_counts_take_errors_as_failures(test_script, tmp_path):
    cases = ["", "", "<failure/>", "<error/>", "<failure/><error/>", "<skipped/>"]
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuite>{''.join(f'<testcase>{case}</testcase>' for case in cases)}</testsuite>")
    assert test_script.counts(report) == {"passed": 2, "failed": 3, "skipped": 1}
    assert test_script.counts(tmp_path / "none.xml") == Counter()


@pytest.mark.parametrize(
    ("parts", "line", "code"),
    [
        ([(0, {"passed": 812, "skipped": 12})], "total: 812 passed, 0 failed, 12 skipped", 0),
        ([(0, {"passed": 3}), (1, {"passed": 1, "failed": 2})], "total: 4 passed, 2 failed, 0 skipped", 1),
        ([(0, {"passed": 3}), (5, {})], "total: 3 passed, 0 failed, 0 skipped", 0),
        ([(5, {}), (5, {})], "total: 0 passed, 0 failed, 0 skipped", 5),
        ([(124, {"failed": 1}), (0, {"passed": 1})], "total: 1 passed, 1 failed, 0 skipped", 124),
    ],
)
def test_totals_and_exit_code(test_script, capsys, parts, line, code):
    assert test_script.conclude([(code, Counter(found)) for code, found in parts]) == code
    assert capsys.readouterr().out == line + "\n"


def test_part_that_breaks_down_has_failed(test_script):
    code, found = test_script.run_part(sys.executable, ["--no-such-option"], minutes=1)
    assert (code, found["failed"]) == (4, 1)
