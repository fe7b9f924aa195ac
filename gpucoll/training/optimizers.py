"""Optimizers working element by element, so a rank can own any part of a parameter and of the optimizer's state.

The formulas are PyTorch's. The learning rate `lr` is a number or a function of the step number (from 1 up). A number
can be changed between steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, TypeAlias

import numpy

from gpucoll.errors import ArgumentError
from gpucoll.internal import Array, as_array, module_of

Rate: TypeAlias = float | Callable[[int], float]


class Optimizer:
    """The base class: the optimizer's state of each parameter, by name, and the number of steps."""

    # Arrays kept for each parameter, in its shape and dtype.
    state_names: tuple[str, ...] = ()

    def __init__(self, lr: Rate) -> None:
        if not callable(lr):
            self._check("lr", lr)
        self.lr = lr
        self.steps: int = 0
        self.state: dict[str, dict[str, Array]] = {}

    def _check(self, name: str, number: Any, least: float = 0.0, below: float = math.inf) -> None:
        """Raise ArgumentError unless `least` <= `number` < `below`: other values fail, or give NaN, in a step."""
        if not isinstance(number, Real) or not least <= float(number) < below:
            raise ArgumentError(f"{type(self).__name__}: {name} {number!r} is not a number of at least {least:g} and "
                                f"below {below:g}", code="GC-OPTIMIZER")

    @property
    def kind(self) -> list[str]:
        """The name of the class, and the names of the state's arrays: equal on all ranks."""
        return [type(self).__name__, *self.state_names]

    @property
    def rate(self) -> float:
        """The learning rate of the step under way."""
        return self.lr(self.steps) if callable(self.lr) else self.lr

    def step(self, parameters: Mapping[str, Any], gradients: Mapping[str, Any]) -> None:
        """Update every parameter in place by its gradient.

        After an error no parameter has changed.

        Parameters
        ----------
        parameters : mapping of str to array
            The parameters by name.
        gradients : mapping of str to array
            The gradients by name, of the shapes and dtypes of the parameters.

        Raises
        ------
        ArgumentError
            A gradient is missing (GC-NAME) or has another shape (GC-SHAPE).

        Examples
        --------
        >>> import numpy
        >>> from gpucoll.training import SGD
        >>> weights, optimizer = {"w": numpy.array([1.0])}, SGD(lr=0.1)
        >>> optimizer.step(weights, {"w": numpy.array([0.5])})
        >>> weights["w"]
        array([0.95])
        """
        pairs: dict[str, tuple[Array, Array]] = {}
        for name, given in parameters.items():
            if name not in gradients:
                raise ArgumentError(f"step: {name} has no gradient", code="GC-NAME")
            parameter = as_array("step", name, given)
            pairs[name] = parameter, gradient_of("step", name, gradients[name], parameter.shape)
        self.steps += 1
        for name, (parameter, gradient) in pairs.items():
            self._update(parameter, gradient, **self.state_of(name, parameter))

    def state_of(self, name: str, parameter: Array) -> dict[str, Array]:
        """Return the state arrays of a parameter, zeros before the first step.

        Parameters
        ----------
        name : str
            The name of the parameter.
        parameter : array
            The parameter.

        Returns
        -------
        dict of str to array
            The arrays by the names in ``state_names``.

        Examples
        --------
        >>> import numpy
        >>> from gpucoll.training import Adam
        >>> sorted(Adam().state_of("w", numpy.zeros(2)))
        ['mean', 'square']
        """
        if name not in self.state:
            zeros = module_of(parameter).zeros
            self.state[name] = {kind: zeros(parameter.shape, parameter.dtype) for kind in self.state_names}
        return self.state[name]

    def _update(self, parameter: Array, gradient: Array, **state: Array) -> None:
        raise NotImplementedError


def check_optimizer(call: str, optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(f"{call}: optimizer {optimizer!r} is not an optimizer; pass SGD(...), Adam(...) or "
                            "AdamW(...)", code="GC-OPTIMIZER")


def gradient_of(call: str, name: str, gradient: Any, shape: tuple[int, ...]) -> Array:
    """Return a gradient as an array; raise ArgumentError unless its shape is `shape`."""
    if isinstance(gradient, numpy.generic):  # NumPy returns scalars for arrays without axes
        gradient = numpy.asarray(gradient)
    array = as_array(call, f"the gradient of {name}", gradient)
    if array.shape != shape:
        raise ArgumentError(f"{call}: the gradient of {name} has shape {array.shape}, the parameter {shape}",
                            code="GC-SHAPE")
    return array


class SGD(Optimizer):
    """Stochastic gradient descent: v = momentum * v + gradient, then parameter -= lr * v.

    Parameters
    ----------
    lr : float or callable
        The learning rate, in units of the parameters per gradient: a number, or a function of the step number (from 1
        up).
    momentum : float, optional
        0 to below 1: the share of the last step's velocity.

    Raises
    ------
    ArgumentError
        A number is out of range (GC-OPTIMIZER).

    See Also
    --------
    Adam : With moving means.

    Examples
    --------
    >>> import numpy
    >>> from gpucoll.training import SGD
    >>> weights, optimizer = {"w": numpy.array([1.0])}, SGD(lr=0.1)
    >>> optimizer.step(weights, {"w": numpy.array([0.5])})
    >>> weights["w"]
    array([0.95])
    """

    def __init__(self, lr: Rate, momentum: float = 0.0) -> None:
        super().__init__(lr)
        self._check("momentum", momentum)
        self.momentum = momentum
        if momentum:
            self.state_names: tuple[str, ...] = ("momentum",)  # without it there is nothing to remember

    def _update(self, parameter: Array, gradient: Array, **state: Array) -> None:
        if not state:
            parameter -= self.rate * gradient
            return
        velocity = state["momentum"]
        velocity *= self.momentum
        velocity += gradient
        parameter -= self.rate * velocity


class Adam(Optimizer):
    """Adam: parameter -= lr * m' / (sqrt(v') + eps), with m and v the moving means of the gradient and its square.

    m' and v' are m and v divided by 1 - beta**steps.

    Parameters
    ----------
    lr : float or callable
        The learning rate, in units of the parameters per gradient: a number, or a function of the step number (from 1
        up).
    betas : tuple of float, optional
        The shares kept of the moving means of the gradient and of its square.
    eps : float, optional
        Added to the root of the square's mean.

    Raises
    ------
    ArgumentError
        A number is out of range (GC-OPTIMIZER).

    See Also
    --------
    AdamW : With decay of the weights.

    References
    ----------
    Kingma and Ba, arXiv 1412.6980, algorithm 1.

    Examples
    --------
    >>> import numpy
    >>> from gpucoll.training import Adam
    >>> weights, optimizer = {"w": numpy.array([1.0])}, Adam(lr=0.1)
    >>> optimizer.step(weights, {"w": numpy.array([0.5])})
    >>> weights["w"]
    array([0.9])
    """

    state_names: tuple[str, ...] = ("mean", "square")

    def __init__(self, lr: Rate = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> None:
        super().__init__(lr)
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise ArgumentError(f"{type(self).__name__}: betas {betas!r} are not two numbers", code="GC-OPTIMIZER")
        for beta in betas:
            self._check("beta", beta, below=1.0)
        self._check("eps", eps)
        self.betas: tuple[float, float] = betas
        self.eps: float = eps

    def _update(self, parameter: Array, gradient: Array, **state: Array) -> None:
        (mean, square), (beta1, beta2) = (state[kind] for kind in self.state_names), self.betas
        mean *= beta1
        mean += (1 - beta1) * gradient
        square *= beta2
        square += (1 - beta2) * (gradient * gradient)
        divisor = (square / (1 - beta2**self.steps)) ** 0.5
        divisor += self.eps
        parameter -= (self.rate / (1 - beta1**self.steps)) * mean / divisor


class AdamW(Adam):
    """Adam after ``parameter *= 1 - lr * weight_decay``.

    Parameters
    ----------
    lr : float or callable
        The learning rate, in units of the parameters per gradient: a number, or a function of the step number (from 1
        up).
    betas : tuple of float, optional
        The shares kept of the moving means of the gradient and of its square.
    eps : float, optional
        Added to the root of the square's mean.
    weight_decay : float, optional
        The decay of the parameters for each unit of the learning rate.

    Raises
    ------
    ArgumentError
        A number is out of range (GC-OPTIMIZER).

    See Also
    --------
    Adam : Without decay.

    References
    ----------
    Loshchilov and Hutter, arXiv 1711.05101.

    Examples
    --------
    >>> import numpy
    >>> from gpucoll.training import AdamW
    >>> weights, optimizer = {"w": numpy.array([1.0])}, AdamW(lr=0.1, weight_decay=0.0)
    >>> optimizer.step(weights, {"w": numpy.array([0.5])})
    >>> weights["w"]
    array([0.9])
    """

    def __init__(self, lr: Rate = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 1e-2) -> None:
        super().__init__(lr, betas, eps)
        self._check("weight_decay", weight_decay)
        self.weight_decay = weight_decay

    def _update(self, parameter: Array, gradient: Array, **state: Array) -> None:
        parameter *= 1 - self.rate * self.weight_decay
        super()._update(parameter, gradient, **state)
