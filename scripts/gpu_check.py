"""Check a host with GPUs in one go: the kernels, every way in which data move, failures, training, and how fast it is.

Each part prints its purpose and time limit, and runs in a separate process within the limit. A part ends as `ok`,
`FAILED` with one line and a file, or `missing` with the software to install; the other parts go on. A summary, without
names of people, hosts or folders, is written to bench/results: a file to attach to a report.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import functools
import getpass
import importlib.util
import itertools
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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from environment import launchers
from gpu_parts import FAILED, MISSING, PASSED, ROOT, SHORT, Finding, finding

DRIVER = ("/usr/local/nvidia/bin",)  # the driver's programs in containers
SHARED = {"GPUCOLL_SHARE_GPU": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "16", "NCCL_NVLS_ENABLE": "0",
          "NCCL_SOCKET_IFNAME": "lo"}
CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}  # ranks on one GPU: no stream is queued behind another stream
BENCH = ("--device=cuda", "--progress=off")
CONTESTANTS = {"": "ring,tree,native", "peer ": "one_shot,two_shot,ring"}  # by NCCL, and by the peer executor
GRAPHS = [["-b", "8", "-f", "8", "-e", "8K", "-G", "20"]]  # small sizes
CHECKED = 64  # MiB of the largest messages checked on the host
LOST = 5.0  # seconds for a part to end by itself
OBSERVED = ("--query-gpu=utilization.gpu,memory.used,clocks.sm,clocks.mem,clocks_event_reasons.active",
            "--query-compute-apps=pid,used_memory")  # a line for each GPU, and for each process on a GPU
FORMER = ("clocks_event_reasons", "clocks_throttle_reasons")  # the name of a field in drivers before 535
OF_KERNELS = ("dram__throughput.avg.pct_of_peak_sustained_elapsed", "launch__registers_per_thread")  # asked of ncu

BY_PROCESSES = ("NCCL", "schedules", "peer", "a killed rank", "PyTorch")  # on one GPU, two processes or more


class Absent(Exception):
    """A part needs something missing on this host."""


class Part(NamedTuple):
    """The purpose of a part, and its time limit in seconds."""

    name: str
    seconds: float
    does: str


PARTS = (
    Part("facts", 60, "what this host has: GPUs, driver, CuPy, NCCL, MPI, links"),
    Part("compile", 600, "compiles every kernel for these GPUs, on all cores, into the cache of all programs"),
    Part("contexts", 60, "a rank on every GPU: which processes have a context on which GPU"),
    Part("pairs", 120, "a rank on every GPU: what each writes into the memory of each, and how fast"),
    Part("training", 240, "scripts/train.py for three epochs, a rank on every GPU, with MPI and without"),
    Part("collectives", 600, "a rank on every GPU: all collectives by size"),
    Part("kernels", 300, "each kernel on every op and dtype, against NumPy, bit for bit"),
    Part("bandwidth", 60, "how fast the kernels move memory, against the GPU's own copy"),
    Part("NCCL", 180, "NCCL's own collectives, on one GPU and on all"),
    Part("schedules", 480, "every way of ours over NCCL's messages: on one GPU, and a rank on every GPU"),
    Part("peer", 480, "kernels that read other ranks' memory: processes on one GPU, and a rank on every GPU"),
    Part("graphs", 400, "calls in CUDA graphs, plans, and memory that nobody holds any more"),
    Part("threads", 600, "ranks that are threads on one GPU"),
    Part("two communicators", 120, "calls of two communicators side by side"),
    Part("a killed rank", 180, "one of two ranks is killed, or does not come; the other one is told"),
    Part("PyTorch", 180, "PyTorch's tensors and streams, and torch.distributed on GPU tensors"),
    Part("strategies", 300, "data parallel, ZeRO, parameter servers, compression and layouts, on one GPU and on all"),
    Part("compute-sanitizer", 450, "the kernels under NVIDIA's memcheck"),
    Part("benchmark", 490, "all-reduces by size: over NCCL's messages, NCCL's own, and the peer executor's"),
    Part("host time", 120, "how long the host is busy with one call, of a lone rank and of two"),
    Part("waits", 30, "which calls of CUDA and NCCL wait while another thread copies behind a busy stream"),
    Part("ncu", 60, "registers and share of the memory's peak of kernels that wait for no rank, by NVIDIA's profiler"),
)
# The parts of a run of less than 20 minutes, with their seconds: first what no GPU has shown yet.
IN_HASTE = {"facts": 20, "waits": 20, "a killed rank": 80, "PyTorch": 90, "NCCL": 60, "peer": 80, "host time": 30,
            "compute-sanitizer": 80, "ncu": 30, "benchmark": 120, "kernels": 40, "graphs": 30,
            "training": 40}
MEASURED = ("facts", "contexts", "pairs", "collectives", "bandwidth", "benchmark", "host time",
            "waits", "ncu")  # all findings are shown


class Check:
    """One run: the findings so far, and the remaining time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.parts: dict[str, dict[str, Any]] = {}
        self._deadline = time.monotonic() + 60 * options.minutes
        now = datetime.datetime.now(datetime.UTC)
        self._time, self._stem = f"{now:%Y-%m-%dT%H:%M:%SZ}", f"{now:%Y-%m-%d-%H%M%S}"

    def part(self, part: Part, run: Callable[[float], list[Finding]]) -> list[Finding]:
        """Run a part in the remaining time, keep and show its findings; no part starts once the time is up."""
        if self.options.only and part.name not in ("facts", *self.options.only):
            return []
        print(f"\n{part.name}: {part.does}; at most {part.seconds / 60:.0f} min", flush=True)
        began, left = time.monotonic(), min(part.seconds, self._deadline - time.monotonic())
        try:
            found = run(left) if left > LOST else [finding(part.name, MISSING, reason="time is up")]
        except Absent as error:
            found = [finding(part.name, MISSING, reason=str(error))]
        found = [{key: _clean(value) for key, value in one.items()} for one in found]
        taken = round(time.monotonic() - began, 1)
        self.parts[part.name] = {"seconds": taken, "findings": found, "nvidia-smi": _clean(observed())}
        self._show(part.name, found, taken)
        print(f"  nvidia-smi   {'; '.join(self.parts[part.name]['nvidia-smi'])}", flush=True)
        return found

    def _show(self, name: str, found: list[Finding], seconds: float) -> None:
        wrong = [one for one in found if one["status"] in (FAILED, SHORT)]
        absent = [one for one in found if one["status"] == MISSING]
        for one in found if name in MEASURED else [*wrong, *absent]:
            more = ", ".join(_spoken(key, value) for key, value in one.items() if key not in ("name", "status"))
            print(f"  {one['status']:<12} {one['name']:<28} {more[-300:]}", flush=True)
        if wrong:
            path = self._write(f"{self._stem}-{name.replace(' ', '-')}.txt", "\n\n".join(
                f"{one['name']}: {one['status']}\n{one.get('reason', json.dumps(one))}" for one in wrong))
            print(f"FAILED   {name}: {len(wrong)} of {len(found)}, first {wrong[0]['name']}; see {path}", flush=True)
        elif found and len(absent) == len(found):
            print(f"missing  {name}: {_spoken('reason', absent[0].get('reason', ''))[-200:]}", flush=True)
        else:
            left_out = f", {len(absent)} missing" if absent else ""
            print(f"ok       {name}: {len(found) - len(absent)} of {len(found)}{left_out}, {seconds:.0f} s", flush=True)

    def count(self, status: str) -> int:
        """Return the number of findings with this status."""
        return sum(one["status"] == status for part in self.parts.values() for one in part["findings"])

    def write(self, gpus: Sequence[str]) -> str:
        """Write the findings to a new file named after the GPU and the time; return the file's path."""
        name = re.sub(r"[^a-z0-9]+", "-", (gpus[0].partition(",")[0] if gpus else "no-gpu").lower()).strip("-")
        document = {"program": "scripts/gpu_check", "time": self._time, "summary": self.summary(), "parts": self.parts}
        return self._write(f"{name}-{self._stem}.json", json.dumps(document, indent=1))

    def _write(self, name: str, text: str) -> str:
        folder: Path = self.options.output
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")
        return os.path.relpath(folder / name, ROOT)

    def summary(self) -> str:
        """Return the numbers of findings passed, failed and missing."""
        return ", ".join(f"{self.count(status)} {status}" for status in (PASSED, FAILED, SHORT, MISSING))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts; return 0 if nothing failed, nothing was below its target, and there is a GPU."""
    options = _options(arguments)
    check = Check(options)
    gpus: list[str] = []
    for part in parts(options.minutes):
        found = check.part(part, functools.partial(_run_part, part.name, len(gpus), options))
        gpus = gpus or {one["name"]: one for one in found}.get("GPUs", {}).get("value", [])
        path = check.write(gpus)  # each time: the run may be ended from outside
    tables, _ = run([sys.executable, "-m", "bench.readme", path], 60.0)
    print(f"\n{tables}\n{check.summary()}\nwritten: {path}", flush=True)
    if not gpus:
        print("there is no GPU that CuPy can use: nothing was checked", flush=True)
    return 1 if check.count(FAILED) or check.count(SHORT) or not gpus else 0


def parts(minutes: float) -> list[Part]:
    """Return the parts of a run, in order."""
    there = {part.name: part for part in PARTS}
    return [*PARTS] if minutes >= 20 else [there[name]._replace(seconds=limit) for name, limit in IN_HASTE.items()]


def _run_part(name: str, gpus: int, options: argparse.Namespace, left: float) -> list[Finding]:
    own = {"training": training, "compile": compiled, "host time": host_time, "ncu": profiled}
    if name in own:
        return own[name](left, gpus)
    if name == "benchmark":
        return benchmark(left, gpus, 4 * options.megabytes)
    if name in ("contexts", "pairs", "collectives"):
        return on_every_gpu(left, name, gpus, options.megabytes)
    if name in ("facts", "bandwidth", "waits"):
        return _own(left, name, options.megabytes)
    _need(gpus)
    with side_by_side(gpus, name in BY_PROCESSES) as variables:
        return _own(left, "cases", f"{name}:{options.keyword if name == 'kernels' else ''}", **variables)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description=__doc__, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after so many (60)")
    parser.add_argument("--megabytes", type=int, default=256,
                        help="how much the kernels move (256); calls of several ranks up to four times as much")
    parser.add_argument("-k", dest="keyword", default="", help="of the kernels, those whose names have this in them")
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results", help="folder of the JSON file")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help="the facts, and these parts")
    return parser.parse_args(arguments)


# ---------------------------------------------------------------- the parts


def _own(left: float, name: str, argument: object = "", start: Sequence[str] = (), program: str = "gpu_parts",
         **variables: str) -> list[Finding]:
    """Return the findings of a part of `gpu_parts` or another program, started by the words `start`, if any."""
    command = [*start, sys.executable, str(ROOT / "scripts" / f"{program}.py"), name, str(argument)]
    output, wrong = run(command, left, **variables)
    found = [json.loads(line) for line in output.splitlines() if line.startswith('{"name"')]
    return [*found, *([finding(name if name != "cases" else str(argument), FAILED, reason=wrong)] if wrong else [])]


def compiled(left: float, gpus: int) -> list[Finding]:
    """Compile all kernels for these GPUs, side by side, so that later parts do not measure the compiler."""
    _need(gpus)
    output, wrong = run([sys.executable, "-m", "gpucoll", "kernels", "--all", "--json"], left)
    if wrong:
        return [finding("kernels", FAILED, reason=wrong)]
    kinds = Counter(one["kind"] for one in json.loads(output[output.index("{"):])["kernels"])
    return [finding("kernels", PASSED, value=[f"{kind}: {count}" for kind, count in kinds.items()])]


def on_every_gpu(left: float, name: str, gpus: int, megabytes: int) -> list[Finding]:
    """Return the findings needing several GPUs: contexts, memory of other GPUs, and all collectives."""
    _need(gpus, "mpi4py", *["pynvml"] * (name == "contexts"))
    if gpus < 2:
        raise Absent("there is one GPU")
    if name == "collectives":
        return _benched(gpus, left, "all", {"": "auto"}, _sizes(4 * megabytes))
    return _own(left, name, megabytes, _mpiexec(gpus), "gpu_nodes")


def host_time(left: float, gpus: int) -> list[Finding]:
    """Measure the host's time of a single rank, then of two ranks, on separate GPUs if possible.

    Processes taking turns on a GPU would fill the queues of the GPU, and the host would wait.
    """
    alone = _own(left / 2, "host time")
    try:
        _need(gpus, "mpi4py")
        with side_by_side(gpus) as variables:
            together = _own(left / 2, "host time", start=_mpiexec(2), **variables)
    except Absent as error:
        together = [finding("two ranks", MISSING, reason=str(error))]
    # NCCL before 2.30 refuses two ranks on one GPU.
    together = [one | {"status": MISSING} if gpus == 1 and one["status"] == FAILED else one for one in together]
    return [*alone, *together]


def training(left: float, gpus: int) -> list[Finding]:
    """Run scripts/train.py on all GPUs, for three epochs: by mpiexec, by `gpucoll run` without MPI, by torchrun."""
    _need(gpus, "mpi4py", "sklearn")
    starts = {"train.py": [*_mpiexec(gpus), sys.executable],
              "train.py without MPI": [sys.executable, "-m", "gpucoll", "run", "--standalone", "-n", str(gpus)],
              "train.py by torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone",
                                      f"--nproc-per-node={gpus}"]}
    if importlib.util.find_spec("torch") is None:
        del starts["train.py by torchrun"]
    return [_trained(name, gpus, start, left / len(starts)) for name, start in starts.items()]


def _trained(name: str, gpus: int, start: Sequence[str], left: float) -> Finding:
    output, wrong = run([*start, str(ROOT / "scripts" / "train.py"), "--device=cuda", "--epochs=3", "--progress=off"],
                        left)
    accuracy = re.search(r"test accuracy ([\d.]+) %", output)
    if accuracy is None and "cublas" in wrong:
        raise Absent("CuPy multiplies matrices by cuBLAS: pip install 'gpucoll[cublas13]', or cublas12")
    if accuracy is None:
        return finding(name, FAILED, reason=wrong or "it named no accuracy")
    return finding(name, PASSED if float(accuracy[1]) > 80 else FAILED, ranks=gpus, accuracy=float(accuracy[1]))


def benchmark(left: float, gpus: int, megabytes: int) -> list[Finding]:
    """Measure a rank on every GPU; on a single GPU two ranks, if NCCL permits, concurrently if there is MPS."""
    _need(gpus, "mpi4py")
    sizes, part = _sizes(megabytes), left / (1 + (gpus < 2))
    with side_by_side(gpus) as variables:
        found = _benched(max(gpus, 2), 0.8 * part, "all_reduce", CONTESTANTS, sizes, **variables)
        found += _benched(max(gpus, 2), 0.2 * part, "all_reduce", {"peer in a graph ": "one_shot"}, GRAPHS, **variables)
    # Two ranks on one GPU may be refused: then a single rank counts.
    if gpus < 2 and all(one["status"] != PASSED for one in found):
        found = [one | {"status": MISSING} for one in found]
        found += _benched(1, left / 2, "all_reduce", CONTESTANTS, sizes)
    return found


def _sizes(megabytes: int) -> list[list[str]]:
    """Return the options for sizes up to `megabytes`. The largest are not checked: that takes minutes on the host."""
    return [["-b", "1K", "-f", "16", "-e", f"{min(CHECKED, megabytes)}M"],
            *([["-b", f"{megabytes}M", "-c", "0"]] if megabytes > CHECKED else [])]


def _benched(ranks: int, left: float, test: str, contestants: dict[str, str], sizes: list[list[str]],
             **variables: str) -> list[Finding]:
    """Return the results of the benchmark `test` for each algorithm of each executor, by size."""
    runs = list(itertools.product(sizes, contestants.items()))
    found: list[Finding] = []
    for size, (executor, algorithms) in runs:
        chosen = {"GPUCOLL_EXECUTOR": executor.split()[0]} if executor else {}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "bench.json"
            _, wrong = run([*_mpiexec(ranks), sys.executable, "-m", "bench", test, *BENCH, *size,
                            f"--algorithm={algorithms}", f"--json={path}"], left / len(runs), **variables, **chosen)
            record = json.loads(path.read_text()) if path.exists() and path.stat().st_size else {"results": []}
        found += [_measured(executor, one, ranks) for one in record["results"]]
        if wrong or not record["results"]:
            found.append(finding(f"{executor}{ranks} ranks", FAILED, reason=wrong or "it left no results"))
    return found


@contextlib.contextmanager
def side_by_side(gpus: int, is_shared: bool = True) -> Iterator[dict[str, str]]:
    """Let processes use a single GPU at the same time, by NVIDIA's MPS; without MPS, the processes take turns.

    Nothing is needed with several GPUs, nor where a single process uses the GPU.
    """
    if gpus > 1 or not is_shared:
        yield {}
        return
    program = _of_driver("nvidia-cuda-mps-control")
    if program is None:
        yield SHARED
        return
    with tempfile.TemporaryDirectory() as folder:
        variables = {f"CUDA_MPS_{what.upper()}_DIRECTORY": f"{folder}/{what}" for what in ("pipe", "log")}
        for path in variables.values():
            os.mkdir(path)
        told = functools.partial(subprocess.run, env={**os.environ, **variables}, check=False, capture_output=True)
        told([program, "-d"])
        # The daemon would spoil all later runs: it also ends with this process, when the pipe closes.
        end = subprocess.Popen(["sh", "-c", f"cat; echo quit | {program}"], stdin=subprocess.PIPE,
                               start_new_session=True, env={**os.environ, **variables})
        try:
            yield SHARED | variables
        finally:
            end.communicate()


def _of_driver(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *DRIVER]))


def observed() -> list[str]:
    """Return what nvidia-smi says after a part, also of a lost GPU or a process left behind: the lines of OBSERVED."""
    program = _of_driver("nvidia-smi")
    if program is None:
        return ["nvidia-smi is missing"]
    said = [run([program, query, "--format=csv,noheader"], 2 * LOST) for query in OBSERVED]
    if "not a valid field" in said[0][0]:
        said[0] = run([program, OBSERVED[0].replace(*FORMER), "--format=csv,noheader"], 2 * LOST)
    return [line for output, wrong in said for line in (wrong or output).splitlines()]


def profiled(left: float, gpus: int) -> list[Finding]:
    """Return ncu's figures of each kernel of the part `bandwidth`; ncu may lack the permission to read counters."""
    _need(gpus)
    program = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")
    if program is None:
        raise Absent("ncu is not installed")
    output, wrong = run([program, "--clock-control=none", "--csv", "--launch-count=60", "-k", "regex:reduce|copy|pack",
                         f"--metrics={','.join(OF_KERNELS)}", sys.executable, str(ROOT / "scripts" / "gpu_parts.py"),
                         "bandwidth", "64"], left)
    if wrong:
        raise Absent(f"ncu: {wrong}")
    rows = [row for row in csv.reader(output.splitlines()) if len(row) > 3 and row[-3] in OF_KERNELS]
    figures = {(row[4], row[-3]): row[-1] for row in rows}  # of the last launch of a kernel
    return [finding(kernel, PASSED, **{name.partition("__")[0]: figures[kernel, name] for name in OF_KERNELS})
            for kernel in dict.fromkeys(kernel for kernel, _ in figures)]


def _measured(executor: str, one: dict[str, Any], ranks: int) -> Finding:
    figures = one["out_of_place"]
    return finding(f"{executor}{one['collective']}, {one['algorithm']}, {one['size']} bytes",
                   FAILED if figures["nwrong"] else PASSED, ranks=ranks,
                   microseconds=round(figures["time"], 1), bus_gigabytes_per_second=round(figures["bus_bw"], 2))


def _need(gpus: int, *modules: str) -> None:
    if not gpus:
        raise Absent("CuPy finds no GPU")
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise Absent(f"{module} is not installed for this Python")


def _mpiexec(ranks: int) -> list[str]:
    """Return the words starting `ranks` ranks with the host's mpiexec."""
    path = launchers.find_mpiexec()
    if path is None:
        raise Absent("there is no mpiexec beside this Python or on the PATH")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    return [path, "-n", str(ranks), *launchers.mpiexec_options(launchers.vendor_of(version))]


def run(command: Sequence[str], seconds: float, **variables: str) -> tuple[str, str]:
    """Run a command in a new session; kill the whole session at the end of the time limit.

    Return the output, and, after a failure, the reason with the end of the output.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
                             stderr=subprocess.STDOUT, start_new_session=True, errors="replace",
                             env={**os.environ, **CONNECTIONS, "PYTHONPATH": path, **variables})
    try:
        output, _ = child.communicate(timeout=max(seconds - LOST, 1.0))
        return output, f"exit code {child.returncode}: {output.strip()[-600:]}" if child.returncode else ""
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGTERM)  # mpiexec ends its ranks, running in their own sessions
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
