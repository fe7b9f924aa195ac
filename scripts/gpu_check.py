"""Check a host with GPUs in one go: facts, tests, training, benchmark, bandwidth, host time.

Each part has a process and a time limit of its own; what cannot run is missing, with its reason, and the others go on.
What was found is printed as a table, and written to bench/results without names of people, hosts or folders.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import getpass
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpu_parts import FAILED, MISSING, PASSED, ROOT, SHORT, Finding, finding

SHARED = {"GPUCOLL_SHARE_GPU": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2", "NCCL_NVLS_ENABLE": "0",
          "NCCL_SOCKET_IFNAME": "lo"}
REPORT = re.compile(r"::test_gpu\[(?P<name>.+)\] (?P<word>PASSED|FAILED|SKIPPED|ERROR)(?: \((?P<reason>.*)\))?")
WORDS = {"PASSED": PASSED, "FAILED": FAILED, "ERROR": FAILED, "SKIPPED": MISSING}
BENCH = ("all_reduce", "--device=cuda", "--algorithm=ring,tree,native", "--progress=off", "-b", "1K", "-f", "16")
LARGEST = 64  # MiB, in the benchmark
LOST = 5.0  # seconds that a part gets to end by itself


class Job(NamedTuple):
    """What a command wrote, its exit code, and whether it was stopped."""

    output: str
    code: int
    late: bool


class Check:
    """One run: what has been found so far, and how much time is left."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.parts: dict[str, dict[str, Any]] = {}
        self._deadline = time.monotonic() + 60 * options.minutes

    def part(self, name: str, seconds: float, run: Any) -> list[Finding]:
        """Run a part in what is left of its time, and keep what it finds; none runs when time is up."""
        if self.options.only and name not in ("facts", *self.options.only):
            return []
        began, left = time.monotonic(), min(seconds, self._deadline - time.monotonic())
        try:
            found = run(left) if left > LOST else [finding(name, MISSING, reason="time is up")]
        except Absent as error:
            found = [finding(name, MISSING, reason=str(error))]
        found = [{key: _clean(value) for key, value in one.items()} for one in found]
        self.parts[name] = {"seconds": round(time.monotonic() - began, 1), "findings": found}
        show(name, found)
        return found

    def failed(self) -> bool:
        """Return whether anything failed, or is slower than it should be."""
        return any(one["status"] in (FAILED, SHORT) for part in self.parts.values() for one in part["findings"])


class Absent(Exception):
    """A part needs what this host does not have."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts; zero where nothing failed and there is a GPU."""
    options = _options(arguments)
    check = Check(options)
    facts = {one["name"]: one for one in check.part("facts", 60, lambda left: _own(left, "facts"))}
    gpus = facts["GPUs"].get("value", []) if "GPUs" in facts else []
    check.part("tests", 480, lambda left: tests(left, options.keyword))
    check.part("training", 60, lambda left: training(left, len(gpus)))
    check.part("benchmark", 90, lambda left: benchmark(left, len(gpus), min(LARGEST, options.megabytes)))
    check.part("bandwidth", 60, lambda left: _own(left, "bandwidth", options.megabytes))
    check.part("host time", 40, lambda left: _own(left, "host time"))
    check.part("peer bandwidth", 60, lambda left: _own(left, "peer bandwidth", options.megabytes))
    check.part("peer latency", 60, lambda left: _own(left, "peer latency"))
    path = write(check, gpus)
    print(f"\n{summary(check)}\nwritten: {os.path.relpath(path, ROOT)}", flush=True)
    if not gpus:
        print("there is no GPU that CuPy can use: nothing was checked", flush=True)
    return 1 if check.failed() or not gpus else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description=__doc__, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=14.0, help="stop after so many (14)")
    parser.add_argument("--megabytes", type=int, default=256, help="how much the kernels move (256)")
    parser.add_argument("-k", dest="keyword", default="", help="the tests whose names have this in them")
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results", help="folder of the JSON file")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help="the facts, and these parts")
    return parser.parse_args(arguments)


# ---------------------------------------------------------------- the parts


def _own(left: float, name: str, *arguments: object) -> list[Finding]:
    """Return what a part of `gpu_parts` finds."""
    script = str(ROOT / "scripts" / "gpu_parts.py")
    job = run([sys.executable, script, name, *map(str, arguments)], left)
    found = [json.loads(line) for line in job.output.splitlines() if line.startswith('{"name"')]
    return [*found, *_broken(name, job)]


def _broken(name: str, job: Job) -> list[Finding]:
    """Return the finding for a job that did not come to its end."""
    if job.late:
        return [finding(name, FAILED, reason=f"it did not end in its time; it said: {_tail(job.output)}")]
    return [finding(name, FAILED, reason=_tail(job.output))] if job.code else []


def tests(left: float, keyword: str) -> list[Finding]:
    """The cases of tests/gpu: by pytest, or without it by a runner of our own."""
    if _own_module("pytest") is None:
        return _own(left, "cases", keyword)
    job = run([sys.executable, "-m", "pytest", "tests/gpu", "-v", "-p", "no:cacheprovider", "--no-header",
               "--color=no", "-k", keyword], left, COLUMNS="400")
    found = [finding(match["name"], WORDS[match["word"]], **({"reason": match["reason"]} if match["reason"] else {}))
             for match in map(REPORT.search, job.output.splitlines()) if match]
    explained = [_explained(one, job.output) for one in found]
    return explained if found and not job.late else [*explained, *_broken("tests", job)]


def _explained(found: Finding, output: str) -> Finding:
    """Return the finding with what pytest says of a failure."""
    if found["status"] != FAILED:
        return found
    part = output.partition(f" test_gpu[{found['name']}] ")[2].partition("\n_____")[0]
    return {**found, "reason": _tail("\n".join(line for line in part.splitlines() if line.startswith("E")))}


def training(left: float, gpus: int) -> list[Finding]:
    """scripts/train.py on all GPUs, for three epochs."""
    _need(gpus, "mpi4py", "sklearn")
    job = run([*_mpiexec(gpus), sys.executable, str(ROOT / "scripts" / "train.py"), "--device=cuda", "--epochs=3",
               "--progress=off"], left)
    accuracy = re.search(r"test accuracy ([\d.]+) %", job.output)
    if accuracy is None:
        return _broken("train.py", job) or [finding("train.py", FAILED, reason="it named no accuracy")]
    status = PASSED if float(accuracy[1]) > 80 else FAILED
    return [finding("train.py", status, ranks=gpus, accuracy=float(accuracy[1]))]


def benchmark(left: float, gpus: int, megabytes: int) -> list[Finding]:
    """Ring, tree and native: a rank on every GPU; where there is one, two ranks on it, if NCCL takes them."""
    _need(gpus, "mpi4py")
    tried = [(gpus, {})] if gpus > 1 else [(2, SHARED), (1, {})]
    found: list[Finding] = []
    for ranks, variables in tried:
        job, record = _bench(ranks, megabytes, left / len(tried), variables)
        if record is not None:
            return [*found, *_bench_lines(record, ranks), *_broken(f"{ranks} ranks", job)]
        found += [{**one, "name": f"{ranks} ranks", "status": MISSING if variables else FAILED}
                  for one in _broken("", job) or [finding("", FAILED, reason="it left no results")]]
    return found


def _bench(ranks: int, megabytes: int, left: float,
           variables: dict[str, str]) -> tuple[Job, dict[str, Any] | None]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.json"
        job = run([*_mpiexec(ranks), sys.executable, "-m", "bench", *BENCH, "-e", f"{megabytes}M", f"--json={path}"],
                  left, **variables)
        with contextlib.suppress(OSError, ValueError):
            return job, json.loads(path.read_text())
    return job, None


def _bench_lines(record: dict[str, Any], ranks: int) -> list[Finding]:
    return [finding(f"{one['algorithm']}, {one['size']} bytes", FAILED if one["out_of_place"]["nwrong"] else PASSED,
                    ranks=ranks, microseconds=round(one["out_of_place"]["time"], 1),
                    bus_gigabytes_per_second=round(one["out_of_place"]["bus_bw"], 2)) for one in record["results"]]


def _need(gpus: int, *modules: str) -> None:
    if not gpus:
        raise Absent("CuPy finds no GPU")
    for module in modules:
        if _own_module(module) is None:
            raise Absent(f"{module} is not installed for this Python")


def _own_module(name: str) -> object:
    import importlib.util

    return importlib.util.find_spec(name)


def _mpiexec(ranks: int) -> list[str]:
    """Return the words that start so many ranks with the host's own mpiexec."""
    beside = Path(sys.executable).with_name("mpiexec")
    path = str(beside) if beside.exists() else shutil.which("mpiexec")
    if path is None:
        raise Absent("there is no mpiexec beside this Python or on the PATH")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    open_mpi = ["--oversubscribe", "--allow-run-as-root"] if "Open MPI" in version else []
    return [path, "-n", str(ranks), *open_mpi]


def run(command: Sequence[str], seconds: float, **variables: str) -> Job:
    """Run a command in a session of its own; at the end of its time all of it is killed."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
                             stderr=subprocess.STDOUT, start_new_session=True, errors="replace",
                             env={**os.environ, "PYTHONPATH": path, **variables})
    try:
        output, _ = child.communicate(timeout=max(seconds - LOST, 1.0))
        return Job(output, child.returncode, False)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGTERM)  # mpiexec ends its ranks, which have sessions of their own
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(LOST - 2)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        return Job(child.communicate()[0], child.returncode, True)


# ---------------------------------------------------------------- what is shown and kept


def show(name: str, found: Iterable[Finding]) -> None:
    """Print a part of the table."""
    print(f"\n{name}", flush=True)
    for one in found:
        more = ", ".join(_spoken(key, value) for key, value in one.items() if key not in ("name", "status"))
        print(f"  {one['status']:<12} {one['name']:<28} {more[:300]}", flush=True)


def _spoken(key: str, value: object) -> str:
    plain = "; ".join(map(str, value)) if isinstance(value, list) else " ".join(str(value).split())
    return plain if key in ("value", "reason") else f"{plain} {key.replace('_', ' ')}"


def summary(check: Check) -> str:
    """Return how much passed, failed and is missing."""
    states = [one["status"] for part in check.parts.values() for one in part["findings"]]
    return ", ".join(f"{states.count(word)} {word}" for word in (PASSED, FAILED, SHORT, MISSING))


def write(check: Check, gpus: Sequence[str]) -> Path:
    """Write what was found to a new file named after the GPU and the day; return its path."""
    now = datetime.datetime.now(datetime.UTC)
    name = re.sub(r"[^a-z0-9]+", "-", (gpus[0].partition(",")[0] if gpus else "no-gpu").lower()).strip("-")
    folder: Path = check.options.output
    folder.mkdir(parents=True, exist_ok=True)
    numbers = ["", *(f"-{number}" for number in range(2, 100))]
    path = next(path for number in numbers if not (path := folder / f"{name}-{now:%Y-%m-%d}{number}.json").exists())
    document = {"program": "scripts/gpu_check", "time": f"{now:%Y-%m-%dT%H:%M:%SZ}", "summary": summary(check),
                "parts": check.parts}
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def _clean(value: Any) -> Any:
    """Return a finding's value without names of people and hosts, and without folders of this machine."""
    if isinstance(value, list):
        return [_clean(one) for one in value]
    if not isinstance(value, str):
        return value
    private = {str(ROOT): ".", str(Path.home()): "~", socket.gethostname(): "this host", _user(): "somebody"}
    for text, instead in private.items():
        if len(text) > 3:
            value = value.replace(text, instead)
    return re.sub(r"(?<![\w.~])/(?:[\w.+-]+/)+", ".../", value)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return ""


def _tail(text: str) -> str:
    """Return the end of what a job said."""
    return text.strip()[-600:]
