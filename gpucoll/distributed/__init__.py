"""torch.distributed's names and calling conventions, for NumPy arrays, PyTorch tensors and other DLPack arrays.

    import gpucoll.distributed as dist

    dist.init_process_group()
    dist.all_reduce(x)                  # in place; `group=` and `async_op=True` as in torch

    start          init_process_group, destroy_process_group, new_group, new_subgroups, monitored_barrier
    facts          is_nccl_available, get_node_local_rank, Backend, ...
    stores, mesh   TCPStore; init_device_mesh
    groups         ProcessGroup, ranks of the world and ranks of a group
    functions      all_reduce, broadcast, ..., all_to_all_single, barrier; collectives of pickled objects
    send_recv      send, recv, isend, irecv, batch_isend_irecv
    shapes, work   lists of arrays checked and filled; the handle of ``async_op=True``

Functions return None, or a `Work` with ``async_op=True``; results are written into the arrays passed. `src` and `dst`
are always ranks of the world; `group_src` and `group_dst` are ranks of the group. On a rank outside `group` a call
warns and returns. Errors are gpucoll's: UsageError before `init_process_group`, ArgumentError and DtypeError before
data is sent. Source: PyTorch 2.13, ``torch/distributed/distributed_c10d.py``.
"""

from gpucoll.core.ops import ReduceOp
from gpucoll.distributed import groups as distributed_c10d  # programs take `_get_default_group` from here
from gpucoll.distributed.facts import BackendName as Backend
from gpucoll.distributed.facts import (
    default_pg_timeout,
    get_default_backend_for_device,
    get_node_local_rank,
    get_pg_count,
    is_backend_available,
    is_gloo_available,
    is_mpi_available,
    is_nccl_available,
    is_torchelastic_launched,
    is_ucc_available,
    is_xccl_available,
    supports_complex,
)
from gpucoll.distributed.functions import (
    all_gather,
    all_gather_into_tensor,
    all_gather_object,
    all_gather_single,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    reduce,
    reduce_scatter,
    reduce_scatter_single,
    reduce_scatter_tensor,
    scatter,
    scatter_object_list,
)
from gpucoll.distributed.groups import (
    GroupMember,
    ProcessGroup,
    get_backend,
    get_global_rank,
    get_group_rank,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    group,
    is_available,
    is_initialized,
)
from gpucoll.distributed.mesh import DeviceMesh, init_device_mesh
from gpucoll.distributed.send_recv import (
    P2POp,
    batch_isend_irecv,
    irecv,
    isend,
    recv,
    recv_object_list,
    send,
    send_object_list,
)
from gpucoll.distributed.start import (
    destroy_process_group,
    init_process_group,
    monitored_barrier,
    new_group,
    new_subgroups,
    new_subgroups_by_enumeration,
    split_group,
)
from gpucoll.distributed.stores import TCPStore
from gpucoll.distributed.work import DistributedWork as Work

reduce_op = ReduceOp  # torch's old name
__all__ = [
    "Backend", "DeviceMesh", "GroupMember", "P2POp", "ProcessGroup", "ReduceOp", "TCPStore", "Work", "all_gather",
    "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce", "all_reduce_coalesced",
    "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list",
    "default_pg_timeout", "destroy_process_group", "distributed_c10d", "gather", "gather_object", "get_backend",
    "get_default_backend_for_device", "get_global_rank", "get_group_rank", "get_node_local_rank", "get_pg_count",
    "get_process_group_ranks", "get_rank", "get_world_size", "group", "init_device_mesh", "init_process_group",
    "irecv", "is_available", "is_backend_available", "is_gloo_available", "is_initialized", "is_mpi_available",
    "is_nccl_available", "is_torchelastic_launched", "is_ucc_available", "is_xccl_available", "isend",
    "monitored_barrier", "new_group", "new_subgroups", "new_subgroups_by_enumeration", "recv", "recv_object_list",
    "reduce", "reduce_op", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter",
    "scatter_object_list", "send", "send_object_list", "split_group", "supports_complex",
]
