"""Check a host with GPUs in one go: facts, tests, training, benchmark, bandwidth, host time.

Each part has a process and a time limit of its own; what cannot run is missing, with its reason, and the others go on.
What was found is printed as a table, and written to bench/results without names of people, hosts or folders.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import getpass
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from environment import launchers
from gpu_parts import FAILED, MISSING, PASSED, ROOT, SHORT, Finding, finding

SHARED = {"GPUCOLL_SHARE_GPU": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2", "NCCL_NVLS_ENABLE": "0",
          "NCCL_SOCKET_IFNAME": "lo"}
BENCH = ("all_reduce", "--device=cuda", "--algorithm=ring,tree,native", "--progress=off", "-b", "1K", "-f", "16")
LARGEST = 64  # MiB, in the benchmark
LOST = 5.0  # seconds that a part gets to end by itself


class Absent(Exception):
    """A part needs what this host does not have."""


class Check:
    """One run: what has been found so far, and how much time is left."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.parts: dict[str, dict[str, Any]] = {}
        self._deadline = time.monotonic() + 60 * options.minutes

    def part(self, name: str, seconds: float, run: Callable[[float], list[Finding]]) -> list[Finding]:
        """Run a part in what is left of its time, keep and show what it finds; none runs when time is up."""
        if self.options.only and name not in ("facts", *self.options.only):
            return []
        began, left = time.monotonic(), min(seconds, self._deadline - time.monotonic())
        try:
            found = run(left) if left > LOST else [finding(name, MISSING, reason="time is up")]
        except Absent as error:
            found = [finding(name, MISSING, reason=str(error))]
        found = [{key: _clean(value) for key, value in one.items()} for one in found]
        self.parts[name] = {"seconds": round(time.monotonic() - began, 1), "findings": found}
        print(f"\n{name}", flush=True)
        for one in found:
            more = ", ".join(_spoken(key, value) for key, value in one.items() if key not in ("name", "status"))
            print(f"  {one['status']:<12} {one['name']:<28} {more[:300]}", flush=True)
        return found

    def count(self, status: str) -> int:
        """Return how many findings have this status."""
        return sum(one["status"] == status for part in self.parts.values() for one in part["findings"])

    def write(self, gpus: Sequence[str]) -> Path:
        """Write what was found to a new file named after the GPU and the time; return its path."""
        now = datetime.datetime.now(datetime.UTC)
        name = re.sub(r"[^a-z0-9]+", "-", (gpus[0].partition(",")[0] if gpus else "no-gpu").lower()).strip("-")
        folder: Path = self.options.output
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}-{now:%Y-%m-%d-%H%M%S}.json"
        document = {"program": "scripts/gpu_check", "time": f"{now:%Y-%m-%dT%H:%M:%SZ}", "summary": self.summary(),
                    "parts": self.parts}
        path.write_text(json.dumps(document, indent=1) + "\n")
        return path

    def summary(self) -> str:
        """Return how much passed, failed and is missing."""
        return ", ".join(f"{self.count(status)} {status}" for status in (PASSED, FAILED, SHORT, MISSING))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts; zero where nothing failed, nothing is slower than it should be, and there is a GPU."""
    options = _options(arguments)
    check = Check(options)
    facts = {one["name"]: one for one in check.part("facts", 60, lambda left: _own(left, "facts"))}
    gpus = facts.get("GPUs", {}).get("value", [])
    check.part("tests", 480, lambda left: _own(left, "tests", options.keyword))
    check.part("training", 60, lambda left: training(left, len(gpus)))
    check.part("benchmark", 90, lambda left: benchmark(left, len(gpus), min(LARGEST, options.megabytes)))
    for name, seconds in (("bandwidth", 60), ("host time", 40), ("peer bandwidth", 60), ("peer latency", 60)):
        check.part(name, seconds, lambda left, name=name: _own(left, name, options.megabytes))  # type: ignore[misc]
    path = check.write(gpus)
    print(f"\n{check.summary()}\nwritten: {os.path.relpath(path, ROOT)}", flush=True)
    if not gpus:
        print("there is no GPU that CuPy can use: nothing was checked", flush=True)
    return 1 if check.count(FAILED) or check.count(SHORT) or not gpus else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description=__doc__, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=14.0, help="stop after so many (14)")
    parser.add_argument("--megabytes", type=int, default=256, help="how much the kernels move (256)")
    parser.add_argument("-k", dest="keyword", default="", help="the tests whose names have this in them")
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results", help="folder of the JSON file")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help="the facts, and these parts")
    return parser.parse_args(arguments)


# ---------------------------------------------------------------- the parts


def _own(left: float, name: str, argument: object = "") -> list[Finding]:
    """Return what a part of `gpu_parts` finds."""
    output, wrong = run([sys.executable, str(ROOT / "scripts" / "gpu_parts.py"), name, str(argument)], left)
    found = [json.loads(line) for line in output.splitlines() if line.startswith('{"name"')]
    return [*found, *([finding(name, FAILED, reason=wrong)] if wrong else [])]


def training(left: float, gpus: int) -> list[Finding]:
    """scripts/train.py on all GPUs, for three epochs."""
    _need(gpus, "mpi4py", "sklearn")
    output, wrong = run([*_mpiexec(gpus), sys.executable, str(ROOT / "scripts" / "train.py"), "--device=cuda",
                         "--epochs=3", "--progress=off"], left)
    accuracy = re.search(r"test accuracy ([\d.]+) %", output)
    if accuracy is None:
        return [finding("train.py", FAILED, reason=wrong or "it named no accuracy")]
    status = PASSED if float(accuracy[1]) > 80 else FAILED
    return [finding("train.py", status, ranks=gpus, accuracy=float(accuracy[1]))]


def benchmark(left: float, gpus: int, megabytes: int) -> list[Finding]:
    """Ring, tree and native: a rank on every GPU; where there is one, two ranks on it, if NCCL takes them."""
    _need(gpus, "mpi4py")
    tried: list[tuple[int, dict[str, str]]] = [(gpus, {})] if gpus > 1 else [(2, SHARED), (1, {})]
    found: list[Finding] = []
    for ranks, variables in tried:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "bench.json"
            _, wrong = run([*_mpiexec(ranks), sys.executable, "-m", "bench", *BENCH, "-e", f"{megabytes}M",
                            f"--json={path}"], left / len(tried), **variables)
            record = json.loads(path.read_text()) if path.exists() and path.stat().st_size else {"results": []}
        measured = [_measured(one, ranks) for one in record["results"]]
        if wrong or not measured:  # two ranks on one GPU may be refused, and what the next ones find counts
            status = MISSING if variables and not measured else FAILED
            found.append(finding(f"{ranks} ranks", status, reason=wrong or "it left no results"))
        found += measured
        if measured:
            break
    return found


def _measured(one: dict[str, Any], ranks: int) -> Finding:
    figures = one["out_of_place"]
    return finding(f"{one['algorithm']}, {one['size']} bytes", FAILED if figures["nwrong"] else PASSED, ranks=ranks,
                   microseconds=round(figures["time"], 1), bus_gigabytes_per_second=round(figures["bus_bw"], 2))


def _need(gpus: int, *modules: str) -> None:
    if not gpus:
        raise Absent("CuPy finds no GPU")
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise Absent(f"{module} is not installed for this Python")


def _mpiexec(ranks: int) -> list[str]:
    """Return the words that start so many ranks with the host's own mpiexec."""
    path = launchers.find_mpiexec()
    if path is None:
        raise Absent("there is no mpiexec beside this Python or on the PATH")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    return [path, "-n", str(ranks), *launchers.mpiexec_options(launchers.vendor_of(version))]


def run(command: Sequence[str], seconds: float, **variables: str) -> tuple[str, str]:
    """Run a command in a session of its own, all of which is killed at the end of its time.

    Return what it wrote, and, where it did not come to its end, why not, with the last that it said.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
                             stderr=subprocess.STDOUT, start_new_session=True, errors="replace",
                             env={**os.environ, "PYTHONPATH": path, **variables})
    try:
        output, _ = child.communicate(timeout=max(seconds - LOST, 1.0))
        return output, f"exit code {child.returncode}: {output.strip()[-600:]}" if child.returncode else ""
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGTERM)  # mpiexec ends its ranks, which have sessions of their own
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(LOST - 2)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        output, _ = child.communicate()
        return output, f"it did not end in its time; it said: {output.strip()[-600:]}"


def _spoken(key: str, value: object) -> str:
    plain = "; ".join(map(str, value)) if isinstance(value, list) else " ".join(str(value).split())
    return plain if key in ("value", "reason") else f"{plain} {key.replace('_', ' ')}"


def _clean(value: Any) -> Any:
    """Return a finding's value without names of people and hosts, and without folders of this machine."""
    if isinstance(value, list):
        return [_clean(one) for one in value]
    if not isinstance(value, str):
        return value
    private = {str(ROOT): ".", str(Path.home()): "~", socket.gethostname(): "this host"}
    with contextlib.suppress(KeyError, OSError):  # a container's user may have no name
        private[getpass.getuser()] = "somebody"
    for text, instead in private.items():
        if len(text) > 3:
            value = value.replace(text, instead)
    return re.sub(r"(?<![\w.~])/(?:[\w.+-]+/)+", ".../", value)
