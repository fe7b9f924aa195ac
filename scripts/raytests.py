"""Ray's own tests of collectives on the CPUs of one node, from a checkout of Ray, with gpucoll instead of Gloo."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import ray
import ray.util.collective
from ray import cloudpickle
from ray.util.collective.types import Backend

import gpucoll.ray

FOLDER = "python/ray/util/collective"
GLOO_ALONE = "test_gloo_group_isolation.py"  # looks into Gloo's own store


def in_worker() -> None:
    """Register gpucoll in a process of Ray's."""
    import gpucoll.ray

    gpucoll.ray.register()


def main() -> int:
    """Run the tests of the checkout; return pytest's exit code."""
    folder = Path(sys.argv[1], FOLDER)
    # The tests import helpers by Ray's name. The installed Ray has none of these, nor do its workers.
    ray.util.collective.__path__.append(str(folder))
    Backend.GLOO = Backend.NCCL = gpucoll.ray.BACKEND
    gpucoll.ray.register()
    from ray.util.collective.tests import cpu_util

    cloudpickle.register_pickle_by_value(cpu_util)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    # One start of Ray for all tests: a start takes longer than a test.
    started = ray.init(num_cpus=8, include_dashboard=False, runtime_env={"worker_process_setup_hook": in_worker})
    stop, ray.init, ray.shutdown = ray.shutdown, lambda **named: started, lambda: None
    tests = folder / "tests" / "single_node_cpu_tests"
    # No configuration of pytest but the checkout's fixtures.
    code = pytest.main(["-c", "/dev/null", f"--rootdir={tests.parent}", f"--confcutdir={tests.parent}", str(tests),
                        f"--ignore={tests / GLOO_ALONE}", "-p", "no:cacheprovider", *sys.argv[2:]])
    stop()
    return code


if __name__ == "__main__":
    sys.exit(main())
