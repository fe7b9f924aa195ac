"""torch's meshes: the ranks of the world as an array, with groups along each dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from gpucoll.distributed.groups import get_rank, get_world_size, is_initialized
from gpucoll.distributed.start import init_process_group, new_subgroups_by_enumeration
from gpucoll.errors import ArgumentError


class DeviceMesh:
    """Ranks of the world in an array `mesh`, each of them once; a collective call of the world.

    Each dimension has a group along it on each rank of the mesh, `get_group`. ``mesh["rows"]`` is the part of the mesh
    along a named dimension, or along a tuple of them, with this rank in it.

    Parameters
    ----------
    device_type : str
        Has no effect: the arrays decide where work runs.
    mesh : array of int
        The ranks of the world.
    mesh_dim_names : sequence of str or None, optional
        A name for each dimension.

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    >>> mesh["tp"].size()
    1
    >>> dist.destroy_process_group()
    """

    def __init__(self, device_type: str, mesh: Any, *, mesh_dim_names: Sequence[str] | None = None) -> None:
        self._lay(device_type, numpy.asarray(mesh), mesh_dim_names)
        lines = [numpy.moveaxis(self.mesh, axis, -1).reshape(-1, length).tolist()
                 for axis, length in enumerate(self.shape)]
        self._groups = [new_subgroups_by_enumeration(line)[0] for line in lines]

    def _lay(self, device_type: str, mesh: numpy.ndarray, mesh_dim_names: Sequence[str] | None) -> None:
        self.device_type: str = device_type
        self.mesh: Any = mesh
        self.mesh_dim_names: tuple[str, ...] | None = None if mesh_dim_names is None else tuple(mesh_dim_names)
        self.shape: tuple[int, ...] = self.mesh.shape
        self.ndim: int = self.mesh.ndim
        if self.mesh_dim_names is not None and len({*self.mesh_dim_names}) != self.ndim:
            raise ArgumentError(f"DeviceMesh: mesh_dim_names {mesh_dim_names!r} are not {self.ndim} different names",
                                code="GC-GROUP")

    def __getitem__(self, names: str | Sequence[str]) -> DeviceMesh:
        kept = [self._axis(name) for name in ((names,) if isinstance(names, str) else names)]
        place = self.get_coordinate()
        if place is None or kept != sorted(kept):
            raise ArgumentError(f"DeviceMesh: {names!r} are not dimensions in the order of {self.mesh_dim_names}, or "
                                "this rank is not in the mesh", code="GC-GROUP")
        ranks = self.mesh[tuple(slice(None) if axis in kept else here for axis, here in enumerate(place))]
        part, known = object.__new__(DeviceMesh), self.mesh_dim_names or ()
        part._lay(self.device_type, ranks, [known[axis] for axis in kept])
        part._groups = [self._groups[axis] for axis in kept]
        return part

    def _axis(self, dim: int | str | None) -> int:
        names = self.mesh_dim_names or ("",) * self.ndim
        axes = [axis for axis, name in enumerate(names) if dim is None or dim in (axis, name)]
        if len(axes) != 1:
            raise ArgumentError(f"DeviceMesh: mesh_dim={dim!r} is none of the dimensions 0..{self.ndim - 1}, "
                                f"{self.mesh_dim_names}", code="GC-GROUP")
        return axes[0]

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        """Return the group of this rank along a dimension, by number or name; None suffices for one dimension.

        Parameters
        ----------
        mesh_dim : int, str or None, optional
            A dimension, by number or name; None: the only one.

        Returns
        -------
        ProcessGroup
            The group.

        Examples
        --------
        >>> import gpucoll.distributed as dist
        >>> dist.init_process_group()  # without a launcher: one rank
        >>> mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        >>> mesh.get_group("tp").size()
        1
        >>> dist.destroy_process_group()
        """
        return self._groups[self._axis(mesh_dim)]

    def get_all_groups(self) -> list[Any]:
        """Return the group of this rank along each dimension.

        Returns
        -------
        list
            The groups.

        Examples
        --------
        >>> import gpucoll.distributed as dist
        >>> dist.init_process_group()  # without a launcher: one rank
        >>> mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        >>> len(mesh.get_all_groups())
        2
        >>> dist.destroy_process_group()
        """
        return [*self._groups]

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Return the place of this rank in the mesh, None outside.

        Returns
        -------
        tuple or None
            The place.

        Examples
        --------
        >>> import gpucoll.distributed as dist
        >>> dist.init_process_group()  # without a launcher: one rank
        >>> mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        >>> mesh.get_coordinate()
        (0, 0)
        >>> dist.destroy_process_group()
        """
        return next((tuple(map(int, place)) for place in numpy.argwhere(self.mesh == get_rank())), None)

    def get_rank(self) -> int:
        """Return the number of this rank in the world.

        Returns
        -------
        int
            The rank.

        Examples
        --------
        >>> import gpucoll.distributed as dist
        >>> dist.init_process_group()  # without a launcher: one rank
        >>> mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        >>> mesh.get_rank()
        0
        >>> dist.destroy_process_group()
        """
        return get_rank()

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return the number of this rank along a dimension.

        Parameters
        ----------
        mesh_dim : int, str or None, optional
            A dimension, by number or name; None: the only one.

        Returns
        -------
        int
            The place along the dimension.

        Examples
        --------
        >>> import gpucoll.distributed as dist
        >>> dist.init_process_group()  # without a launcher: one rank
        >>> mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        >>> mesh.get_local_rank("dp")
        0
        >>> dist.destroy_process_group()
        """
        return int(self.get_group(mesh_dim).rank())

    def size(self, mesh_dim: int | None = None) -> int:
        """Return the number of ranks, in all or along a dimension.

        Parameters
        ----------
        mesh_dim : int, str or None, optional
            A dimension, by number or name; None: the only one.

        Returns
        -------
        int
            The number.

        Examples
        --------
        >>> import gpucoll.distributed as dist
        >>> dist.init_process_group()  # without a launcher: one rank
        >>> mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        >>> mesh.size(), mesh.size(0)
        (1, 1)
        >>> dist.destroy_process_group()
        """
        return self.mesh.size if mesh_dim is None else self.shape[mesh_dim]

    def __repr__(self) -> str:
        return f"DeviceMesh({self.device_type!r}, {self.mesh.tolist()}, mesh_dim_names={self.mesh_dim_names})"


def init_device_mesh(device_type: str, mesh_shape: Sequence[int], *, mesh_dim_names: Sequence[str] | None = None,
                     backend_override: Any = None) -> DeviceMesh:
    """Return the mesh of all ranks in C order; a collective call, which makes the default group if none exists.

    `device_type` and `backend_override` have no effect: the arrays decide where work runs.

    Parameters
    ----------
    device_type : str
        Has no effect: the arrays decide where work runs.
    mesh_shape : sequence of int
        The lengths of the dimensions; their product is the number of ranks.
    mesh_dim_names : sequence of str or None, optional
        A name for each dimension.
    backend_override : object, optional
        Has no effect.

    Returns
    -------
    DeviceMesh
        The mesh.

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> dist.init_device_mesh("cpu", (1,))
    DeviceMesh('cpu', [0], mesh_dim_names=None)
    >>> dist.destroy_process_group()
    """
    if not is_initialized():
        init_process_group()
    if numpy.prod(mesh_shape) != get_world_size():
        raise ArgumentError(f"init_device_mesh: mesh_shape {mesh_shape!r} does not have {get_world_size()} ranks",
                            code="GC-GROUP")
    return DeviceMesh(device_type, numpy.arange(get_world_size()).reshape(mesh_shape), mesh_dim_names=mesh_dim_names)
