"""A small training problem, and its training on one rank, written independently: the oracle of gpucoll.training."""

import numpy

SHAPES = {"first.weight": (6, 21), "first.bias": (21,), "second.weight": (21, 5), "second.bias": (5,), "scale": ()}
LAYERS = (("first.weight", "first.bias"), ("second.weight", "second.bias", "scale"))


def parameters(seed=0, dtype="f8"):
    chance = numpy.random.default_rng(seed)
    return {name: numpy.asarray(chance.standard_normal(shape), dtype) for name, shape in SHAPES.items()}


def samples(step, rank):
    """Return a rank's samples of a step; all ranks have the same number."""
    chance = numpy.random.default_rng([step, rank])
    return chance.standard_normal((4, 6)), chance.standard_normal((4, 5))


def gradients(weights, x, y):
    """Return the loss, the mean over samples of |scale * tanh(x w + b) v + c - y|**2 / 2, and its gradients."""
    w, b, v, c, scale = (weights[name] for name in SHAPES)
    hidden = numpy.tanh(x @ w + b)
    drawn = hidden @ v
    error = (scale * drawn + c - y) / len(x)
    by_hidden = scale * error @ v.T * (1 - hidden * hidden)
    loss = len(x) * (error * error).sum() / 2
    found = {"first.weight": x.T @ by_hidden, "first.bias": by_hidden.sum(0), "second.weight": hidden.T @ error * scale,
             "second.bias": error.sum(0), "scale": (error * drawn).sum()}
    return loss, {name: numpy.asarray(found[name], weights[name].dtype) for name in SHAPES}


def mean_gradients(weights, step, ranks):
    """Return the mean gradients over the samples of all ranks."""
    all_of_them = [gradients(weights, *samples(step, rank))[1] for rank in range(ranks)]
    return {name: sum(one[name] for one in all_of_them) / ranks for name in SHAPES}


def adamw(weights, steps, ranks, *, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, decay=0.0):
    """Return the parameters after `steps` steps, by Loshchilov and Hutter's algorithm 2; without decay Adam."""
    weights = {name: array.copy() for name, array in weights.items()}
    m, v = ({name: numpy.zeros(shape) for name, shape in SHAPES.items()} for _ in range(2))
    for step in range(1, steps + 1):
        for name, g in mean_gradients(weights, step - 1, ranks).items():
            m[name] = betas[0] * m[name] + (1 - betas[0]) * g
            v[name] = betas[1] * v[name] + (1 - betas[1]) * g * g
            corrected = m[name] / (1 - betas[0] ** step), v[name] / (1 - betas[1] ** step)
            weights[name] = (1 - lr * decay) * weights[name] - lr * corrected[0] / (numpy.sqrt(corrected[1]) + eps)
    return weights


def sgd(weights, steps, ranks, *, lr, momentum=0.0):
    """Return the parameters after `steps` steps of Polyak's method."""
    weights = {name: array.copy() for name, array in weights.items()}
    velocity = {name: numpy.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(steps):
        for name, g in mean_gradients(weights, step, ranks).items():
            velocity[name] = momentum * velocity[name] + g
            weights[name] = weights[name] - lr * velocity[name]
    return weights


def apart(found, wanted):
    """Return the largest difference, relative to the largest value of each array."""
    return max(float(numpy.abs(found[name] - wanted[name]).max() / numpy.abs(wanted[name]).max()) for name in wanted)
