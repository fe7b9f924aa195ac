"""gpucoll.distributed without MPI: names, signatures, and a lone rank."""

import contextlib
import datetime
import importlib.util
import inspect
import os
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy
import pytest

import gpucoll as gc
import gpucoll.distributed as dist
from gpucoll.distributed import start

# The contract: names, order and defaults of positional parameters; `group` and `async_op` as in torch.
SIGNATURES = {
    "init_process_group": "backend=None, init_method=None, timeout=None, world_size=-1, rank=-1",
    "is_initialized": "",
    "destroy_process_group get_rank get_world_size get_backend": "group=None",
    "new_group": "ranks=None",
    "broadcast": "tensor, src=0, group=None, async_op=False",
    "reduce": "tensor, dst=0, op=SUM, group=None, async_op=False",
    "all_reduce": "tensor, op=SUM, group=None, async_op=False",
    "gather": "tensor, gather_list=None, dst=0, group=None, async_op=False",
    "all_gather": "tensor_list, tensor, group=None, async_op=False",
    "all_gather_into_tensor": "output, input, group=None, async_op=False",
    "scatter": "tensor, scatter_list=None, src=0, group=None, async_op=False",
    "reduce_scatter": "output, input_list, op=SUM, group=None, async_op=False",
    "reduce_scatter_tensor": "output, input, op=SUM, group=None, async_op=False",
    "all_to_all": "output_list, input_list, group=None, async_op=False",
    "all_to_all_single": "output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False",
    "barrier": "group=None, async_op=False",
    "monitored_barrier": "group=None, timeout=None",
    "send isend": "tensor, dst=None, group=None, tag=0",
    "recv irecv": "tensor, src=None, group=None, tag=0",
    "P2POp": "op, tensor, peer=None, group=None, tag=0",
    "batch_isend_irecv": "p2p_op_list",
    "broadcast_object_list": "object_list, src=0, group=None",
    "all_gather_object": "object_list, obj, group=None",
    "gather_object": "obj, object_gather_list=None, dst=0, group=None",
    "scatter_object_list": "scatter_object_output_list, scatter_object_input_list=None, src=0, group=None",
}
# The CUDA array interface of an array on a GPU.
ON_GPU = {"shape": (4,), "typestr": "<f8", "data": (0, False), "version": 3}


def shown(parameter):
    default = "SUM" if parameter.default is dist.ReduceOp.SUM else parameter.default
    return parameter.name if default is inspect.Parameter.empty else f"{parameter.name}={default}"


def test_signatures_are_the_contracts():
    for name, promised in ((name, promised) for names, promised in SIGNATURES.items() for name in names.split()):
        parameters = [shown(one) for one in inspect.signature(getattr(dist, name)).parameters.values()]
        promised = [one for one in promised.split(", ") if one]
        assert parameters[:len(promised)] == promised, name
    assert all(getattr(dist, name).__doc__ for name in dist.__all__ if name != "distributed_c10d")
    assert dist.ReduceOp.PREMUL_SUM(0.5) == gc.premul_sum(0.5)


def test_the_page_of_habits_has_each_name():
    """Names said to be the same exist; with PyTorch installed, the names are all of torch's, and arguments torch's."""
    page = (Path(__file__).parents[2] / "docs" / "guide" / "habits.md").read_text()
    rows = [row.split(" | ") for row in page.partition("| `gpucoll.distributed` |")[2].strip().splitlines()[1:]]
    same = {name for names, told in rows for name in re.findall(r"`(\w+)`", names) if told.startswith("the same")}
    assert same == {*dist.__all__} - {"distributed_c10d"}
    if importlib.util.find_spec("torch") is None:
        return
    import torch.distributed as theirs
    others = {name for names, told in rows for name in re.findall(r"`(\w+)`", names) if told.startswith("not here")}
    assert same | others == {name for name, one in vars(theirs).items() if not name.startswith("_")
                             and not issubclass(type(one), ModuleType)} - {"timedelta"}
    for name in same - {"ReduceOp", "reduce_op", "GroupMember", "group", "ProcessGroup", "Work"}:
        if inspect.isfunction(ours := getattr(dist, name)) and not hasattr(ours, "__wrapped__"):  # takes both names
            wanted = [one for one in inspect.signature(getattr(theirs, name)).parameters if not one.startswith("_")]
            assert [*inspect.signature(ours).parameters][:len(wanted)] == wanted, name


def test_one_rank_by_itself(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    start._init_from(gc.init_local(1)[0])  # without MPI
    try:
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"]) == ("0", "1", "127.0.0.1")
        dist.monitored_barrier()
        with pytest.raises(gc.UsageError, match="pass a source"):
            dist.recv(numpy.arange(3.0))
        assert dist.get_backend() == "mpi"
        with contextlib.suppress(gc.GpucollError):
            dist.all_reduce(SimpleNamespace(__cuda_array_interface__=ON_GPU))
        assert dist.get_backend() == "nccl", "it is that of the arrays"
    finally:
        dist.destroy_process_group()
    assert "RANK" not in os.environ


def test_timeouts_and_backends():
    assert start.seconds_of("x", datetime.timedelta(milliseconds=5)) == 0.005
    assert start.seconds_of("x", 3) == 3.0
    assert start.seconds_of("x", None) is None
    for wrong in (0, -1, True, "3", float("nan")):
        with pytest.raises(gc.ArgumentError, match="timedelta"):
            start.seconds_of("x", wrong)
    for known in (None, "nccl", "NCCL", "mpi", "gloo", "cpu:gloo,cuda:nccl", "cuda:nccl", "cpu:mpi, cuda:nccl"):
        start.check_backend("x", known)
    for wrong in ("", "ncc", "cpu:", "tpu:gloo", "cpu:gloo,", 3, "cpu:cuda:nccl"):
        with pytest.raises(gc.ArgumentError, match="backend"):
            start.check_backend("x", wrong)
