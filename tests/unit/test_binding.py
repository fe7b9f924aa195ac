"""The processors of a rank by `gpucoll run --bind`, on the trees of a host's files."""

import pytest

from gpucoll.launch.binding import near, numa_nodes, processors

LISTS = "0-3,8-11", "4-7,12-15"


@pytest.fixture
def host(tmp_path):
    """Return the tree of a host: two sockets with 4 cores of 2 threads each, and 4 GPUs, two of which are near each.

    As Linux numbers them, processor i + 8 is the other thread of core i; the first GPUs are near the second socket.
    """
    files = {f"devices/system/node/node{node}/cpulist": text for node, text in enumerate(LISTS)}
    files |= {f"devices/system/cpu/cpu{one}/topology/thread_siblings_list": f"{one % 8},{one % 8 + 8}"
              for one in range(16)}
    for gpu, node in {"0000:17:00.0": 1, "0000:3b:00.0": 1, "0000:9a:00.0": 0, "0000:c8:00.0": 0}.items():
        (tmp_path / "proc/driver/nvidia/gpus" / gpu).mkdir(parents=True)
        files |= {f"bus/pci/devices/{gpu}/numa_node": str(node), f"bus/pci/devices/{gpu}/local_cpulist": LISTS[node]}
    for name, text in files.items():
        (tmp_path / "sys" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys" / name).write_text(text + "\n")
    return tmp_path


ALL = {*range(16)}
FIRST, SECOND = {0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(("how", "size", "environment", "expected"), [
    ("numa", 4, {}, [SECOND, SECOND, FIRST, FIRST]), ("auto", 4, {}, [SECOND, SECOND, FIRST, FIRST]),
    ("numa", 2, {"CUDA_VISIBLE_DEVICES": "3,0"}, [FIRST, SECOND]), ("numa", 2, NO_GPU, [FIRST, SECOND]),
    ("numa", 3, {"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}, [FIRST, FIRST, SECOND]),
    ("core", 4, {}, [{4, 12}, {5, 13}, {0, 8}, {1, 9}]), ("core", 2, NO_GPU, [{0, 8}, {4, 12}]),
    ("core", 8, {"CUDA_VISIBLE_DEVICES": "0"}, [SECOND] * 8),  # more ranks than cores near the GPU
    ("auto", 3, {}, [ALL] * 3), ("auto", 2, NO_GPU, [ALL] * 2), ("none", 4, {}, [ALL] * 4),
    ("auto", 8, NO_GPU, [FIRST] * 4 + [SECOND] * 4), ("auto", 16, NO_GPU, [FIRST] * 8 + [SECOND] * 8),
    ("core", 9, NO_GPU, [ALL] * 9), ("numa", 17, NO_GPU, [ALL] * 17)])
def test_each_rank_has_processors_near_its_gpu_or_a_share(host, how, size, environment, expected):
    assert [processors(how, rank, size, ALL, root=host, environment=environment) for rank in range(size)] == expected


def test_only_processors_that_the_process_has_are_given(host):
    own = {2, 3, 10, 12}
    assert numa_nodes(own, host) == {0: {2, 3, 10}, 1: {12}}
    found = [processors("core", rank, 3, own, root=host, environment=NO_GPU) for rank in range(3)]
    assert found == [{2, 10}, {3}, {12}]
    assert processors("core", 1, 2, own, root=host, environment={}) == {12}  # its GPU's socket has one core here
    assert processors("core", 1, 2, {4, 5}, root=host / "proc", environment={}) == {5}  # a host that tells nothing


def test_the_processors_near_a_gpu(host):
    assert (near("00000000:9A:00.0", host), near("0000:00:00.0", host)) == (FIRST, set())
