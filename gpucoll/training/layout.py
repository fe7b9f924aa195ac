"""Global arrays over a mesh of ranks: each axis of an array is whole, or divided along axes of the mesh.

A specification has an entry for each axis of the array: None (whole), the name of a mesh axis, or a tuple of names with
the coarsest division first. Ranks along a mesh axis not named by any entry hold copies. An array may also be `partial`
along mesh axes: its value is the sum over the ranks along these axes. A product with a divided inner axis is partial.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from gpucoll.errors import ArgumentError
from gpucoll.internal import Array, as_array, on_gpu
from gpucoll.training.mesh import Mesh, Spec
from gpucoll.training.redistribution import Redistribution, apply, planned


class ShardedArray:
    """A global array of `shape` divided over `mesh` by `spec`; ``local`` is this rank's part.

    Made by `shard`, `matmul` and `redistribute`.

    Parameters
    ----------
    local : array
        The part of this rank.
    mesh : Mesh
        The ranks, as a grid.
    shape : tuple of int
        The shape of the global array.
    spec : sequence
        An entry for each axis of the array: None (whole), the name of a mesh axis, or a tuple of names with the
        coarsest division first.
    partial : iterable of str, optional
        Mesh axes over whose ranks the value is the sum.

    See Also
    --------
    shard : Divides an array.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll as gc
    >>> from gpucoll.training import Mesh, shard
    >>> def program(comm):
    ...     mesh = Mesh(comm, (2,), ("ranks",))
    ...     a = shard(numpy.arange(4.0).reshape(2, 2), mesh, ("ranks", None))
    ...     return a
    >>> gc.run_local(program, 2)[0]
    <ShardedArray (2, 2) float64 ('ranks', None)>
    """

    def __init__(self, local: Array, mesh: Mesh, shape: tuple[int, ...], spec: Spec,
                 partial: Iterable[str] = ()) -> None:
        self.local: Array = local
        self.mesh: Mesh = mesh
        self.shape: tuple[int, ...] = shape
        self.spec: Spec = spec
        self.partial: tuple[str, ...] = tuple(name for name in mesh.names if name in set(partial))

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the elements."""
        return self.local.dtype

    @property
    def T(self) -> ShardedArray:
        """The transposed array: no rank sends anything."""
        return ShardedArray(self.local.T, self.mesh, self.shape[::-1], self.spec[::-1], self.partial)

    def gather(self) -> Array:
        """Return the global array, on every rank.

        A collective call.

        Returns
        -------
        array
            The global array.

        See Also
        --------
        redistribute : Any other layout.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> from gpucoll.training import Mesh, shard
        >>> def program(comm):
        ...     mesh = Mesh(comm, (2,), ("ranks",))
        ...     a = shard(numpy.arange(4.0).reshape(2, 2), mesh, ("ranks", None))
        ...     return a.gather()
        >>> gc.run_local(program, 2)[0]
        array([[0., 1.],
               [2., 3.]])
        """
        return redistribute(self, (None,) * self.ndim).local

    def __repr__(self) -> str:
        spec = tuple(entry[0] if len(entry) == 1 else entry or None for entry in self.spec)
        return f"<ShardedArray {self.shape} {self.dtype} {spec}{f' partial {self.partial}' if self.partial else ''}>"


def shard(x: Any, mesh: Mesh, spec: Any) -> ShardedArray:
    """Return the global array `x`, given on every rank, divided over `mesh`.

    The call copies this rank's part, and sends nothing.

    Parameters
    ----------
    x : array
        The global array, given on every rank.
    mesh : Mesh
        The ranks, as a grid.
    spec : sequence
        An entry for each axis of the array: None (whole), the name of a mesh axis, or a tuple of names with the
        coarsest division first.

    Returns
    -------
    ShardedArray
        The divided array.

    Raises
    ------
    ArgumentError
        Not a `ShardedArray`, or a wrong specification (GC-SPEC).

    See Also
    --------
    redistribute : Another layout.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll as gc
    >>> from gpucoll.training import Mesh, shard
    >>> def program(comm):
    ...     mesh = Mesh(comm, (2,), ("ranks",))
    ...     a = shard(numpy.arange(4.0).reshape(2, 2), mesh, ("ranks", None))
    ...     return a.local
    >>> gc.run_local(program, 2)[0]
    array([[0., 1.]])
    """
    array = as_array("shard", "x", x)
    found = mesh.spec("shard", spec, array.shape)
    return ShardedArray(array[mesh.box(found, array.shape, mesh.comm.rank)].copy(), mesh, array.shape, found)


def _check_sharded(call: str, **arrays: Any) -> None:
    for name, array in arrays.items():
        if not isinstance(array, ShardedArray):
            raise ArgumentError(f"{call}: {name} is {type(array).__name__}, not a ShardedArray as made by shard(...)",
                                code="GC-SPEC")


def plan(a: ShardedArray, spec: Any) -> Redistribution:
    """Return the collectives that `redistribute` would make for `a` and `spec`; send nothing.

    Parameters
    ----------
    a : ShardedArray
        A global array.
    spec : sequence
        An entry for each axis of the array: None (whole), the name of a mesh axis, or a tuple of names with the
        coarsest division first.

    Returns
    -------
    Redistribution
        The steps, and their bytes.

    Raises
    ------
    ArgumentError
        Not a `ShardedArray`, or a wrong specification (GC-SPEC).

    See Also
    --------
    redistribute : Makes the steps.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll as gc
    >>> from gpucoll.training import Mesh, shard, plan
    >>> def program(comm):
    ...     mesh = Mesh(comm, (2,), ("ranks",))
    ...     a = shard(numpy.arange(4.0).reshape(2, 2), mesh, ("ranks", None))
    ...     return len(plan(a, (None, None)).steps)
    >>> gc.run_local(program, 2)[0]
    1
    """
    _check_sharded("plan", a=a)
    target = a.mesh.spec("plan", spec, a.shape)
    return planned(a.mesh, a.shape, a.dtype.itemsize, a.spec, a.partial, target, "cuda" if on_gpu(a.local) else None)


def redistribute(a: ShardedArray, spec: Any) -> ShardedArray:
    """Return `a` with layout `spec` and complete sums, in the steps of `plan`.

    A collective call.

    Parameters
    ----------
    a : ShardedArray
        A global array.
    spec : sequence
        An entry for each axis of the array: None (whole), the name of a mesh axis, or a tuple of names with the
        coarsest division first.

    Returns
    -------
    ShardedArray
        The same global array in the new layout.

    Raises
    ------
    ArgumentError
        Not a `ShardedArray`, or a wrong specification (GC-SPEC).

    See Also
    --------
    plan : The steps alone.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll as gc
    >>> from gpucoll.training import Mesh, shard, redistribute
    >>> def program(comm):
    ...     mesh = Mesh(comm, (2,), ("ranks",))
    ...     a = shard(numpy.arange(4.0).reshape(2, 2), mesh, ("ranks", None))
    ...     return redistribute(a, (None, "ranks")).local
    >>> gc.run_local(program, 2)[0]
    array([[0.],
           [2.]])
    """
    _check_sharded("redistribute", a=a)
    local, here, steps = a.local, a.spec, plan(a, spec).steps
    if not steps:
        local = local.copy()
    for step in steps:
        local, here = apply(local, here, step, a.shape, a.mesh), step.spec
    return ShardedArray(local, a.mesh, a.shape, here)


def summed(a: ShardedArray) -> ShardedArray:
    """Return `a` with its sums formed and the layout unchanged. A collective call if `a` is partial."""
    _check_sharded("summed", a=a)
    return redistribute(a, a.spec) if a.partial else a


def matmul(a: ShardedArray, b: ShardedArray) -> ShardedArray:
    """Return a @ b for `a` of any number of axes and `b` of two, with equal division of the inner axis.

    The call sends nothing. The product is partial along the mesh axes that divide the inner axis; `redistribute`
    computes the sum. A weight divided by columns gives a product divided by columns. A weight divided by rows
    multiplies this product and gives a partial product. So two layers need one sum forward and one sum backward.

    Parameters
    ----------
    a : ShardedArray
        A global array.
    b : ShardedArray
        A global array of two axes.

    Returns
    -------
    ShardedArray
        The product.

    Raises
    ------
    ArgumentError
        The shapes or layouts do not fit (GC-SHAPE, GC-SPEC).

    See Also
    --------
    Linear : A layer with a backward pass.

    References
    ----------
    Shoeybi et al., arXiv 1909.08053.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll as gc
    >>> from gpucoll.training import Mesh, shard, matmul
    >>> def program(comm):
    ...     mesh = Mesh(comm, (2,), ("ranks",))
    ...     a = shard(numpy.arange(4.0).reshape(2, 2), mesh, ("ranks", None))
    ...     return matmul(a, shard(numpy.eye(2), mesh, (None, None))).local
    >>> gc.run_local(program, 2)[0]
    array([[0., 1.]])
    """
    _check_sharded("matmul", a=a, b=b)
    if b.ndim != 2 or a.ndim < 1 or a.shape[-1] != b.shape[0]:
        raise ArgumentError(f"matmul: shapes {a.shape} and {b.shape} do not fit", code="GC-SHAPE")
    if a.mesh is not b.mesh or a.spec[-1] != b.spec[0]:
        raise ArgumentError(f"matmul: the inner axis is divided by {a.spec[-1]} in a and by {b.spec[0]} in b; "
                            "redistribute one factor", code="GC-SPEC")
    if a.partial or b.partial:
        raise ArgumentError("matmul: a factor is partial; redistribute the factor first", code="GC-SPEC")
    spec = (*a.spec[:-1], b.spec[1])
    named = [name for entry in spec for name in entry]
    if len(set(named)) < len(named) or set(named) & set(a.spec[-1]):
        raise ArgumentError(f"matmul: {a!r} and {b!r} divide different axes by the same mesh axis", code="GC-SPEC")
    return ShardedArray(a.local @ b.local, a.mesh, (*a.shape[:-1], b.shape[1]), spec, a.spec[-1])


class Linear:
    """A layer x @ weight over a mesh, with forward and backward pass.

    The inner axis of `x` and `weight` is divided in the same way, the other axes along different mesh axes. The
    backward pass returns the gradients of x and of the weight, in the layouts of x and of the weight.

    Parameters
    ----------
    weight : ShardedArray
        The weight, of two axes.

    Raises
    ------
    ArgumentError
        Not a `ShardedArray`, or a wrong specification (GC-SPEC).

    See Also
    --------
    matmul : The product alone.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll as gc
    >>> from gpucoll.training import Mesh, shard, Linear
    >>> def program(comm):
    ...     mesh = Mesh(comm, (2,), ("ranks",))
    ...     a = shard(numpy.arange(4.0).reshape(2, 2), mesh, ("ranks", None))
    ...     return Linear(shard(2 * numpy.eye(2), mesh, (None, None))).forward(a).local
    >>> gc.run_local(program, 2)[0]
    array([[0., 2.]])
    """

    def __init__(self, weight: ShardedArray) -> None:
        _check_sharded("Linear", weight=weight)
        self.weight = weight
        self._x: ShardedArray | None = None

    def forward(self, x: ShardedArray) -> ShardedArray:
        """Return the product with its sums formed.

        A collective call if the weight is divided by rows.

        Parameters
        ----------
        x : ShardedArray
            The input of the layer.

        Returns
        -------
        ShardedArray
            The output of the layer.

        Raises
        ------
        ArgumentError
            Not a `ShardedArray`, or a wrong specification (GC-SPEC).

        See Also
        --------
        backward : The gradients.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> from gpucoll.training import Mesh, shard, Linear
        >>> def program(comm):
        ...     mesh = Mesh(comm, (2,), ("ranks",))
        ...     a = shard(numpy.arange(4.0).reshape(2, 2), mesh, ("ranks", None))
        ...     return Linear(shard(2 * numpy.eye(2), mesh, (None, None))).forward(a).local
        >>> gc.run_local(program, 2)[0]
        array([[0., 2.]])
        """
        self._x = x
        return summed(matmul(x, self.weight))

    def backward(self, gradient: ShardedArray) -> tuple[ShardedArray, ShardedArray]:
        """Return the gradients of x and of the weight, given the gradient of the product.

        A collective call.

        Parameters
        ----------
        gradient : ShardedArray
            The gradient of the output of `forward`.

        Returns
        -------
        x : ShardedArray
            The gradient of the input.
        weight : ShardedArray
            The gradient of the weight.

        Raises
        ------
        ArgumentError
            `forward` was not called before (GC-SPEC).

        See Also
        --------
        forward : The product.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> from gpucoll.training import Mesh, shard, Linear
        >>> def backward_of(layer, a):
        ...     return layer.backward(layer.forward(a))[0].local
        >>> def program(comm):
        ...     mesh = Mesh(comm, (2,), ("ranks",))
        ...     a = shard(numpy.arange(4.0).reshape(2, 2), mesh, ("ranks", None))
        ...     return backward_of(Linear(shard(2 * numpy.eye(2), mesh, (None, None))), a)
        >>> gc.run_local(program, 2)[0]
        array([[0., 4.]])
        """
        x = self._x
        if x is None:
            raise ArgumentError("backward: call forward first", code="GC-SPEC")
        rows = math.prod(x.local.shape[:-1])
        flat_x = x.local.reshape(rows, x.local.shape[-1])  # not -1: a rank may have no row
        flat_gradient = gradient.local.reshape(rows, gradient.local.shape[-1])
        weight = ShardedArray(flat_x.T @ flat_gradient, x.mesh, self.weight.shape, self.weight.spec,
                              [name for entry in x.spec[:-1] for name in entry])
        return summed(matmul(gradient, self.weight.T)), summed(weight)
