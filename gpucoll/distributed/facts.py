"""What can be used here, asked by torch's names."""

from __future__ import annotations

import datetime
import os
from typing import Any

from gpucoll.core.ops import op_of
from gpucoll.device.gpus import gpu_count
from gpucoll.distributed.groups import groups
from gpucoll.distributed.start import BACKENDS, check_backend
from gpucoll.errors import UsageError
from gpucoll.launch.bootstrap import Options
from gpucoll.launch.launchers import RUN

default_pg_timeout: datetime.timedelta = datetime.timedelta(seconds=Options().timeout)


class BackendName(str):
    """The name of a backend in lower case; ArgumentError for a name not known here.

    Parameters
    ----------
    name : str
        A name in any case, or pairs such as "cpu:gloo,cuda:nccl".

    Examples
    --------
    >>> BackendName("GLOO") == BackendName.GLOO == "gloo"
    True
    """

    __slots__ = ()
    GLOO, MPI, NCCL, UNDEFINED = "gloo", "mpi", "nccl", "undefined"

    def __new__(cls, name: str) -> BackendName:
        check_backend("Backend", name)
        return super().__new__(cls, name.lower())


def is_nccl_available() -> bool:
    """Return whether GPU arrays can be used: CuPy finds a GPU.

    Returns
    -------
    bool
        The answer.

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.is_nccl_available() in (True, False)
    True
    """
    return gpu_count() > 0


def is_gloo_available() -> bool:
    """Return True: "gloo" is a name for host arrays.

    Returns
    -------
    bool
        True.

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.is_gloo_available(), dist.is_mpi_available()
    (True, True)
    """
    return True


is_mpi_available = is_gloo_available


def is_ucc_available() -> bool:
    """Return False: gpucoll has no such backend.

    Returns
    -------
    bool
        False.

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.is_ucc_available(), dist.is_xccl_available()
    (False, False)
    """
    return False


is_xccl_available = is_ucc_available


def is_backend_available(backend: str) -> bool:
    """Return whether a backend, or each of pairs such as "cpu:gloo,cuda:nccl", can be used.

    Parameters
    ----------
    backend : str
        A name, or pairs such as "cpu:gloo,cuda:nccl".

    Returns
    -------
    bool
        The answer.

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.is_backend_available("cpu:gloo"), dist.is_backend_available("ucc")
    (True, False)
    """
    names = [pair.rpartition(":")[2] for pair in backend.lower().split(",")]
    return all(name in BACKENDS and (name != "nccl" or is_nccl_available()) for name in names)


def is_torchelastic_launched() -> bool:
    """Return whether torchrun, or ``gpucoll run`` without MPI, has started this process.

    Returns
    -------
    bool
        The answer.

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.is_torchelastic_launched()
    False
    """
    return RUN in os.environ


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return LOCAL_RANK, else `fallback_rank`; UsageError without both.

    Parameters
    ----------
    fallback_rank : int or None, optional
        The result without LOCAL_RANK.

    Returns
    -------
    int
        The number of this rank on its host.

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.get_node_local_rank(fallback_rank=0)
    0
    """
    found = os.environ.get("LOCAL_RANK", fallback_rank)
    if found is None:
        raise UsageError("get_node_local_rank: LOCAL_RANK is not set; call init_process_group() first, or pass "
                         "fallback_rank", code="GC-INIT")
    return int(found)


def get_default_backend_for_device(device: Any) -> str:
    """Return the name of the backend for arrays on `device`: "nccl" for a GPU, else "gloo".

    Parameters
    ----------
    device : object
        A device of PyTorch, or its name.

    Returns
    -------
    str
        The name.

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.get_default_backend_for_device("cpu")
    'gloo'
    """
    return "nccl" if str(device).startswith("cuda") else "gloo"


def get_pg_count() -> int:
    """Return the number of groups of this process.

    Returns
    -------
    int
        The number.

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> dist.get_pg_count()
    1
    >>> dist.destroy_process_group()
    """
    return len(groups)


def supports_complex(reduceOp: Any) -> bool:
    """Return whether an op reduces complex numbers.

    Parameters
    ----------
    reduceOp : str or ReduceOp
        The reduction.

    Returns
    -------
    bool
        The answer.

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.supports_complex(dist.ReduceOp.SUM), dist.supports_complex("max")
    (True, False)
    """
    return "complex" in op_of(reduceOp).kinds
