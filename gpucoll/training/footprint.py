"""The memory of a training on each rank by formula: an answer before a run, and without the memory of the model."""

from __future__ import annotations

from typing import NamedTuple

from gpucoll.errors import ArgumentError


class Footprint(NamedTuple):
    """Bytes kept by a rank during the optimizer's step, see `memory`.

    Parameters
    ----------
    parameters, gradients, optimizer : float
        Bytes of each.

    Examples
    --------
    >>> Footprint(4e9, 4e9, 8e9).total
    16000000000.0
    """

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """The sum of the three parts."""
        return sum(self)


def memory(parameters: float, ranks: int = 1, stage: int = 0, *, parameter_bytes: float = 4,
           gradient_bytes: float | None = None, optimizer_bytes: float = 8) -> Footprint:
    """Return how many bytes each rank keeps to train a model of `parameters` numbers.

    Activations, buckets under way and the layer that stage 3 has gathered come in addition.

    Parameters
    ----------
    parameters : float
        Number of parameters of the model, such as 170e9.
    ranks : int
        Ranks over which ZeRO divides the state.
    stage : int
        0 for data parallel training, which divides nothing. ZeRO divides the optimizer's state in stage 1, also the
        gradients in stage 2, also the parameters in stage 3.
    parameter_bytes : float
        Bytes of a parameter: 4 in float32, 2 in float16 or bfloat16.
    gradient_bytes : float, optional
        Bytes of a gradient; by default those of a parameter.
    optimizer_bytes : float
        Bytes of the optimizer's state for each parameter: 8 for Adam in float32, 4 for SGD with momentum, 0 for SGD; 12
        for Adam in mixed precision, which keeps a float32 copy of each parameter beside its two moments.

    Returns
    -------
    Footprint
        Bytes of ``parameters``, ``gradients`` and ``optimizer``, and their ``total``.

    Raises
    ------
    ArgumentError
        For fewer than one rank, another stage, or a negative number.

    See Also
    --------
    ZeRO : The training that divides its state; ``ZeRO.memory`` counts the bytes of its arrays.

    References
    ----------
    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv 1910.02054.

    Examples
    --------
    The parameters alone of the largest model of 2020, in float32, then all of its training by Adam on 64 ranks:

    >>> memory(170e9).parameters
    680000000000.0
    >>> [f"{memory(170e9, 64, stage).total / 1e9:.1f} GB" for stage in (0, 1, 2, 3)]
    ['2720.0 GB', '1381.2 GB', '711.9 GB', '42.5 GB']
    """
    sizes = (parameter_bytes, parameter_bytes if gradient_bytes is None else gradient_bytes, optimizer_bytes)
    if ranks < 1 or stage not in (0, 1, 2, 3) or not all(number >= 0 for number in (parameters, *sizes)):
        raise ArgumentError(f"memory: {parameters!r} parameters, {ranks!r} ranks, stage {stage!r}, bytes {sizes}: at "
                            "least 1 rank, a stage of 0, 1, 2 or 3, and no negative number are needed")
    divided = (stage == 3, stage >= 2, stage >= 1)
    return Footprint(*(parameters * each / (ranks if cut else 1) for each, cut in zip(sizes, divided, strict=True)))
