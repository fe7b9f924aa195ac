"""The networks for scripts/train.py, as layers: a strategy provides each layer's weights when needed.

Everything is written for an array module `xp` (NumPy or CuPy) and independent of ranks. A layer computes in two parts,
since tensor parallelism divides some layers over ranks. `forward` returns the part to be summed over ranks if the
layer `ends` a division; `finish` continues after the sum. `backward` returns the part to be summed if the layer
`begins` a division; `finish_backward` continues after the sum. `cut` has the axis along which each weight is divided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

import texts

Array = Any  # numpy.ndarray or cupy.ndarray; CuPy need not be installed
Weights = Mapping[str, Array]


class Layer:
    """A layer; by default without weights and not divided over ranks."""

    names: tuple[str, ...] = ()
    cut: Mapping[str, int] = {}
    begins = ends = False

    def initial(self, chance: np.random.Generator) -> dict[str, np.ndarray]:
        """Return new weights."""
        return {}

    def forward(self, xp: Any, w: Weights, x: Array) -> tuple[Array, Any]:
        """Return the output, or its part to be summed, and the data for `finish` and `backward`."""
        raise NotImplementedError

    def finish(self, xp: Any, w: Weights, x: Array, part: Array, kept: Any) -> tuple[Array, Any]:
        """Return the output, and the data for `backward`."""
        return part, kept

    def backward(self, xp: Any, w: Weights, kept: Any, dy: Array) -> tuple[Array, dict[str, Array]]:
        """Return the gradient of the input, or its part to be summed, and the gradients of the weights."""
        raise NotImplementedError

    def finish_backward(self, dy: Array, part: Array) -> Array:
        """Return the gradient of the input."""
        return part


class Dense(Layer):
    """act(x @ weight + bias) on the last axis; `act` is "tanh" or "" (identity)."""

    def __init__(self, name: str, inputs: int, outputs: int, act: str = "", divide: str = "") -> None:
        self.weight, self.bias = self.names = (f"{name}.weight", f"{name}.bias")
        self._shape, self._tanh = (inputs, outputs), act == "tanh"
        self.begins, self.ends = divide == "outputs", divide == "inputs"
        self.cut = {self.weight: 1, self.bias: 0} if self.begins else {self.weight: 0} if self.ends else {}

    def initial(self, chance: np.random.Generator) -> dict[str, np.ndarray]:
        return {self.weight: chance.standard_normal(self._shape) / math.sqrt(self._shape[0]),
                self.bias: np.zeros(self._shape[1])}

    def forward(self, xp: Any, w: Weights, x: Array) -> tuple[Array, Any]:
        return x @ w[self.weight], None

    def finish(self, xp: Any, w: Weights, x: Array, part: Array, kept: Any) -> tuple[Array, Any]:
        y = part + w[self.bias]
        y = xp.tanh(y) if self._tanh else y
        return y, (x, y)

    def backward(self, xp: Any, w: Weights, kept: Any, dy: Array) -> tuple[Array, dict[str, Array]]:
        x, y = kept
        if self._tanh:
            dy = dy * (1 - y * y)
        rows, flat = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        return dy @ w[self.weight].T, {self.weight: flat.T @ rows, self.bias: rows.sum(axis=0)}


class Convolution(Layer):
    """tanh of a 3 x 3 convolution, padded, of images (samples, height, width, channels)."""

    def __init__(self, name: str, inputs: int, outputs: int) -> None:
        self.weight, self.bias = self.names = (f"{name}.weight", f"{name}.bias")
        self._shape = 9 * inputs, outputs

    def initial(self, chance: np.random.Generator) -> dict[str, np.ndarray]:
        return {self.weight: chance.standard_normal(self._shape) / math.sqrt(self._shape[0]),
                self.bias: np.zeros(self._shape[1])}

    def forward(self, xp: Any, w: Weights, x: Array) -> tuple[Array, Any]:
        _, height, width, _ = x.shape
        padded = xp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        windows = xp.concatenate([padded[:, i:i + height, j:j + width] for i in range(3) for j in range(3)], axis=3)
        y = xp.tanh(windows @ w[self.weight] + w[self.bias])
        return y, (windows, y)

    def backward(self, xp: Any, w: Weights, kept: Any, dy: Array) -> tuple[Array, dict[str, Array]]:
        windows, y = kept
        dy = dy * (1 - y * y)
        rows = dy.reshape(-1, dy.shape[-1])
        found = {self.weight: windows.reshape(-1, windows.shape[-1]).T @ rows, self.bias: rows.sum(axis=0)}
        parts = xp.split(dy @ w[self.weight].T, 9, axis=3)
        samples, height, width, channels = parts[0].shape
        padded = xp.zeros((samples, height + 2, width + 2, channels), dy.dtype)
        for place, part in enumerate(parts):
            i, j = divmod(place, 3)
            padded[:, i:i + height, j:j + width] += part
        return padded[:, 1:-1, 1:-1], found


class Pool(Layer):
    """The means of 2 x 2 pixels."""

    def forward(self, xp: Any, w: Weights, x: Array) -> tuple[Array, Any]:
        samples, height, width, channels = x.shape
        return x.reshape(samples, height // 2, 2, width // 2, 2, channels).mean(axis=(2, 4)), None

    def backward(self, xp: Any, w: Weights, kept: Any, dy: Array) -> tuple[Array, dict[str, Array]]:
        return xp.repeat(xp.repeat(dy, 2, axis=1), 2, axis=2) / 4, {}


class Reshape(Layer):
    """Changes the shape of each sample."""

    def __init__(self, *shape: int) -> None:
        self._shape = shape

    def forward(self, xp: Any, w: Weights, x: Array) -> tuple[Array, Any]:
        return x.reshape(len(x), *self._shape), x.shape

    def backward(self, xp: Any, w: Weights, kept: Any, dy: Array) -> tuple[Array, dict[str, Array]]:
        return dy.reshape(kept), {}


class Embedding(Layer):
    """A row of `tokens` for each token of a text, plus a row of `places` for the token's position."""

    def __init__(self, name: str, tokens: int, length: int, width: int) -> None:
        self.tokens, self.places = self.names = (f"{name}.tokens", f"{name}.places")
        self._shapes = (tokens, width), (length, width)

    def initial(self, chance: np.random.Generator) -> dict[str, np.ndarray]:
        return {name: chance.standard_normal(shape) / 4 for name, shape in zip(self.names, self._shapes, strict=True)}

    def forward(self, xp: Any, w: Weights, x: Array) -> tuple[Array, Any]:
        return w[self.tokens][x] + w[self.places], x

    def backward(self, xp: Any, w: Weights, kept: Any, dy: Array) -> tuple[Array, dict[str, Array]]:
        one_hot = (kept.reshape(-1)[:, None] == xp.arange(self._shapes[0][0])).astype(dy.dtype)
        return dy[..., 0], {self.tokens: one_hot.T @ dy.reshape(-1, dy.shape[-1]), self.places: dy.sum(axis=0)}


class Residual(Layer):
    """x plus a function of x, divided over ranks; the weights have `shapes`."""

    begins = ends = True
    shapes: tuple[tuple[int, ...], ...] = ()

    def initial(self, chance: np.random.Generator) -> dict[str, np.ndarray]:
        return {name: chance.standard_normal(shape) / math.sqrt(shape[0]) / 2
                for name, shape in zip(self.names, self.shapes, strict=True)}

    def finish(self, xp: Any, w: Weights, x: Array, part: Array, kept: Any) -> tuple[Array, Any]:
        return x + part, kept

    def finish_backward(self, dy: Array, part: Array) -> Array:
        return dy + part


class Attention(Residual):
    """x plus causal attention of `heads` to the normalised x, over the axis before the last; divided by heads."""

    def __init__(self, name: str, width: int, heads: int) -> None:
        self.into, self.out = self.names = (f"{name}.into", f"{name}.out")
        self.cut = {self.into: 2, self.out: 0}
        self.shapes = (width, 3, width), (width, width)
        self._width, self._each = width, width // heads

    def _split(self, x: Array) -> Array:
        samples, length, width = x.shape
        return x.reshape(samples, length, width // self._each, self._each).transpose(0, 2, 1, 3)

    def _join(self, x: Array) -> Array:
        samples, heads, length, _ = x.shape
        return x.transpose(0, 2, 1, 3).reshape(samples, length, heads * self._each)

    def forward(self, xp: Any, w: Weights, x: Array) -> tuple[Array, Any]:
        normal, scale = normalised(xp, x)
        q, k, v = (self._split(normal @ w[self.into][:, part]) for part in range(3))
        scores = q @ k.transpose(0, 1, 3, 2) / math.sqrt(self._each)
        scores = xp.where(xp.triu(xp.ones(scores.shape[-2:], bool), 1), -xp.inf, scores)  # later positions are hidden
        weights = xp.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = self._join(weights @ v)
        return mixed @ w[self.out], (normal, scale, q, k, v, weights, mixed)

    def backward(self, xp: Any, w: Weights, kept: Any, dy: Array) -> tuple[Array, dict[str, Array]]:
        normal, scale, q, k, v, weights, mixed = kept
        rows, flat = dy.reshape(-1, self._width), normal.reshape(-1, self._width)
        by_mixed = self._split(dy @ w[self.out].T)
        by_weights = by_mixed @ v.transpose(0, 1, 3, 2)
        by_scores = weights * (by_weights - (by_weights * weights).sum(axis=-1, keepdims=True)) / math.sqrt(self._each)
        parts = [self._join(part) for part in (by_scores @ k, by_scores.transpose(0, 1, 3, 2) @ q,
                                               weights.transpose(0, 1, 3, 2) @ by_mixed)]
        by_into = xp.stack([flat.T @ part.reshape(-1, part.shape[-1]) for part in parts], axis=1)
        by_normal = sum(part @ w[self.into][:, number].T for number, part in enumerate(parts))
        found = {self.into: by_into, self.out: mixed.reshape(-1, mixed.shape[-1]).T @ rows}
        return unnormalised(normal, scale, by_normal), found


class FeedForward(Residual):
    """x plus tanh(normalised x @ wide) @ narrow; divided by hidden elements."""

    def __init__(self, name: str, width: int, hidden: int) -> None:
        self.wide, self.narrow = self.names = (f"{name}.wide", f"{name}.narrow")
        self.cut = {self.wide: 1, self.narrow: 0}
        self.shapes = (width, hidden), (hidden, width)

    def forward(self, xp: Any, w: Weights, x: Array) -> tuple[Array, Any]:
        normal, scale = normalised(xp, x)
        hidden = xp.tanh(normal @ w[self.wide])
        return hidden @ w[self.narrow], (normal, scale, hidden)

    def backward(self, xp: Any, w: Weights, kept: Any, dy: Array) -> tuple[Array, dict[str, Array]]:
        normal, scale, hidden = kept
        by_hidden = dy @ w[self.narrow].T * (1 - hidden * hidden)
        rows, flat = dy.reshape(-1, dy.shape[-1]), normal.reshape(-1, dy.shape[-1])
        found = {self.wide: flat.T @ by_hidden.reshape(-1, hidden.shape[-1]),
                 self.narrow: hidden.reshape(-1, hidden.shape[-1]).T @ rows}
        return unnormalised(normal, scale, by_hidden @ w[self.wide].T), found


def normalised(xp: Any, x: Array) -> tuple[Array, Array]:
    """Return x with mean 0 and variance 1 along the last axis, and the scale factor."""
    centred = x - x.mean(axis=-1, keepdims=True)
    scale = 1 / xp.sqrt((centred * centred).mean(axis=-1, keepdims=True) + 1e-5)
    return centred * scale, scale


def unnormalised(normal: Array, scale: Array, dy: Array) -> Array:
    """Return the gradient of the input of `normalised`."""
    return scale * (dy - dy.mean(axis=-1, keepdims=True) - normal * (dy * normal).mean(axis=-1, keepdims=True))


def initial(layers: list[Layer], seed: int, dtype: str) -> dict[str, np.ndarray]:
    """Return new weights on the host, in the order of the layers."""
    chance = np.random.default_rng(seed)
    return {name: weight.astype(dtype) for layer in layers for name, weight in layer.initial(chance).items()}


def loss(xp: Any, scores: Array, targets: Array) -> tuple[float, Array]:
    """Return the cross entropy of softmax(scores) with the rows of `targets`, summed over samples, and its gradient.

    Over the other axes except the last, the mean is taken: a text of 64 tokens is one sample.
    """
    scores = scores - scores.max(axis=-1, keepdims=True)  # so that exp cannot overflow
    logarithms = scores - xp.log(xp.exp(scores).sum(axis=-1, keepdims=True))
    parts = math.prod(scores.shape[1:-1])
    return -(targets * logarithms).sum() / parts, (xp.exp(logarithms) - targets) / parts


def mlp() -> list[Layer]:
    """Two layers, 64 -> 128 (tanh) -> 10, on digits."""
    return [Dense("hidden", 64, 128, act="tanh", divide="outputs"), Dense("classes", 128, 10, divide="inputs")]


def cnn() -> list[Layer]:
    """Two convolutions of 16 and 32 channels, each followed by a pool, and two layers as `mlp`'s, on digits."""
    return [Reshape(8, 8, 1), Convolution("first", 1, 16), Pool(), Convolution("second", 16, 32), Pool(), Reshape(128),
            Dense("hidden", 128, 64, act="tanh", divide="outputs"), Dense("classes", 64, 10, divide="inputs")]


def transformer() -> list[Layer]:
    """Two blocks of 4 heads, 64 wide, on characters: each character is predicted from the characters before."""
    blocks = [layer for block in ("first", "second")
              for layer in (Attention(f"{block}.attention", 64, 4), FeedForward(f"{block}.feedforward", 64, 256))]
    return [Embedding("embedding", texts.TOKENS, texts.LENGTH, 64), *blocks, Dense("characters", 64, texts.TOKENS)]


MODELS = {"mlp": mlp, "cnn": cnn, "transformer": transformer}
