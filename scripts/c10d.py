"""PyTorch's own tests of collectives over Gloo, from a checkout of PyTorch, with gpucoll instead of Gloo.

Every test runs in a separate process. The ranks are forked, not spawned, since importing torch takes longer than the
tests. Tests skipped by PyTorch count as not supported, with the reason, as do the tests named in the table below.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import unittest
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILES = ("test_c10d_gloo", "test_c10d_common", "test_c10d_object_collectives", "test_c10d_spawn_gloo",
         "test_distributed_spawn")
SECONDS = 120  # per test
RANKS = ("4", "8")  # numbers of ranks: the next if a test needs more
VARIABLES = {"BACKEND": "gloo", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
             "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(SECONDS - 20)}
NOT_SUPPORTED: dict[str, str] = {
    "sparse_all_?reduce|sparse_gradients": "sparse tensors: they are refused, and to_dense() named",
    "GlooTest.test_allgather_checks": "expects that lengths differing by rank are refused, which gpucoll gathers",
    "GlooProcess.*test_all_to_all_single": "expects that strided tensors are refused, which gpucoll takes",
    "test_monitored_barrier_(gloo|failure|wait)": "PyTorch offers monitored_barrier for Gloo alone, in Gloo's words",
    "test_init_process_group_for_all_backends": "expects that groups of all but PyTorch's own are named custom",
}
GPU = re.compile(r"cuda|gpu|nccl|accelerator", re.IGNORECASE)


def put_in_place() -> None:
    """Make PyTorch create groups of gpucoll instead of Gloo's, and make the tests fork their ranks."""
    import torch
    from torch.distributed import distributed_c10d
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test

    from gpucoll.torch import TorchProcessGroup

    class Options:
        """The options of Gloo set by tests: only the time-out matters here."""

    class ProcessGroupGloo(TorchProcessGroup):
        """A group of gpucoll, created like a group of Gloo."""

        _Options = Options
        create_device = create_default_device = staticmethod(lambda *given, **named: None)

        def __init__(self, store: Any, rank: int, size: int, options: Any = None, timeout: Any = None) -> None:
            limit = timeout or getattr(options, "_timeout", options) or SECONDS
            super().__init__(store, rank, size,
                             limit if isinstance(limit, datetime.timedelta) else datetime.timedelta(seconds=limit))

        def name(self) -> str:
            """Return the name expected by the tests."""
            return "gloo"

    def fork(case: Any) -> None:
        case._start_processes(multiprocessing.get_context("fork").Process)

    for module in (torch.distributed, distributed_c10d, torch._C._distributed_c10d):
        vars(module)["ProcessGroupGloo"] = ProcessGroupGloo
    common_distributed.MultiProcessTestCase._spawn_processes = fork
    for names in ("PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS"):
        vars(distributed_test)[names].clear()  # for these backends the tests expect special events in a profile


def tests(name: str) -> Iterator[Any]:
    """Yield the tests of a module, without imported tests."""
    for kind in vars(importlib.import_module(name)).values():
        if isinstance(kind, type) and issubclass(kind, unittest.TestCase) and kind.__module__ == name:
            yield from unittest.defaultTestLoader.loadTestsFromTestCase(kind)


def run(test: Any, folder: Path) -> None:
    """Run a test, in a separate process, and record the outcome."""
    os.setsid()
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    result = unittest.TestResult()
    test.run(result)
    wrong = [text for _, text in (*result.errors, *result.failures)]
    (folder / "end").write_text(json.dumps([wrong, [text for _, text in result.skipped]]))


def end_of(test: Any, folder: Path) -> tuple[str, str]:
    """Return "passed", "failed" or "not supported", and the reason."""
    for pattern, reason in NOT_SUPPORTED.items():
        if re.search(pattern, test.id()):
            return "not supported", reason
    (folder / "end").unlink(missing_ok=True)
    process = multiprocessing.get_context("fork").Process(target=run, args=(test, folder))
    process.start()
    process.join(SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    log = (folder / "log").read_text(errors="replace")
    if not (folder / "end").exists():
        return "failed", f"{log}\nended with {process.exitcode}, or not within {SECONDS} s"
    wrong, skipped = json.loads((folder / "end").read_text())
    if wrong:
        return "failed", "\n".join([log, *wrong])
    if not skipped:
        return "passed", ""
    reason = (re.findall("for following reason: (.*)", log) or skipped)[-1]
    return "not supported", "needs GPUs" if GPU.search(reason) else f"PyTorch skips it: {reason}"


def main() -> int:
    """Run the tests, print the outcome of each, and then the counts."""
    parser = argparse.ArgumentParser(prog="scripts/c10d", description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("checkout", type=Path, help="a checkout of PyTorch, of the version that is installed")
    parser.add_argument("-k", metavar="WORD", help="only tests with this in their names")
    parser.add_argument("--failures", action="store_true", help="print what failed tests have said")
    chosen = parser.parse_args()
    folder = chosen.checkout / "test" / "distributed"
    if not (folder / f"{FILES[0]}.py").exists():
        parser.error(f"{folder} has no {FILES[0]}.py")
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.update(VARIABLES, TEMP_DIR=scratch)
        (Path(scratch) / "barrier").touch()
        sys.argv[1:] = []  # read by PyTorch's modules
        sys.path[:0] = [str(folder), str(folder.parent)]
        put_in_place()
        counts: Counter[str] = Counter()
        reasons: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for name in FILES:
            for test in tests(name):
                if chosen.k and chosen.k not in test.id():
                    continue
                for ranks in RANKS:
                    os.environ["WORLD_SIZE"] = ranks
                    end, why = end_of(test, Path(scratch))
                    if "world size" not in why or end == "failed":
                        break
                counts[end] += 1
                reasons[end][why if end == "not supported" else test.id()] += 1
                print(f"{end:14}{test.id()}" + (f": {why}" if end == "not supported" else ""), flush=True)
                if end == "failed" and chosen.failures:
                    print(why, flush=True)
    for why, count in reasons["not supported"].most_common():
        print(f"not supported: {count:4}  {why}")
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['not supported']} not supported")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
