"""NumPy's functions under CuPy's names, by one rule: arrays of a GPU are unwrapped, and results are arrays of the GPU.

A ufunc is enqueued on the current stream, since its result's shape is known. Any other function may need the values, as
`nonzero` does: the host waits for the stream and calls NumPy at once. A NumPy array among the arguments is a TypeError,
as in CuPy.
"""

import functools

import numpy

from . import _array
from ._machine import MACHINE, check, on_device
from ._order import span, touched, written
from .cuda.stream import get_current_stream

# Functions of NumPy that return facts on arrays and dtypes, or the host's objects.
OF_DTYPES = ("can_cast", "promote_types", "result_type", "min_scalar_type", "finfo", "iinfo", "issubdtype", "dtype",
             "ndindex", "isscalar", "broadcast_shapes", "errstate", "printoptions", "set_printoptions", "index_exp",
             "s_", "format_float_positional", "iscomplexobj", "isrealobj", "ndim", "shape", "size", "broadcast")


# CuPy calls the method of the argument, so these serve arrays of NumPy as well.
OF_ITS_ARGUMENT = ("all", "any", "argmax", "argmin", "max", "mean", "min", "prod", "std", "sum", "var")


def unwrapped(value):
    """Return a value for NumPy; raise TypeError for a NumPy array, as CuPy does."""
    if isinstance(value, _array.ndarray):
        _array.check_elements(value)
        return value._host
    if isinstance(value, numpy.ndarray) and value.ndim:
        raise TypeError(f"Unsupported type {type(value)}")
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(map(unwrapped, value))
    if isinstance(value, dict):
        return {key: unwrapped(one) for key, one in value.items()}
    return value.numpy if isinstance(value, Ufunc) else value


def wrapped(value, sources=()):
    """Return a result of NumPy as CuPy's: arrays and numbers are arrays of the GPU, a view stays a view."""
    if isinstance(value, numpy.generic) or (isinstance(value, numpy.ndarray) and value.dtype.kind not in "OUSV"):
        for source in sources:
            if isinstance(value, numpy.ndarray) and value.size and numpy.may_share_memory(value, source._host):
                return source._window(value)
        return uploaded(value)
    if isinstance(value, list | tuple):
        kind = tuple if hasattr(value, "_fields") else type(value)
        return kind(wrapped(one, sources) for one in value)
    return value


def uploaded(value):
    """Return a new array of the GPU with the values, written in the order of the stream, as its memory is reused."""
    given = numpy.asarray(value)
    found = _array.ndarray(given.shape, given.dtype, order="F" if given.flags.fnc else "C")
    host = found._host
    _array.enqueue(lambda: numpy.copyto(host, given), found)
    return found


def arrays_in(values):
    for value in values:
        if isinstance(value, _array.ndarray):
            yield value
        elif isinstance(value, list | tuple):
            yield from arrays_in(value)
        elif isinstance(value, dict):
            yield from arrays_in(value.values())


def settled():
    """Wait for the current stream, whose work the function's arguments depend on."""
    check(MACHINE.queue(get_current_stream().ptr).capture is None, 900, "a function of the host in a capture")
    get_current_stream().synchronize()


def at_once(function, args, kwargs):
    """Call a function of NumPy on the values of the arrays, now; `out` is the array that was passed."""
    sources = [*arrays_in(args), *arrays_in(kwargs.values())]
    given, named = unwrapped(list(args)), unwrapped(kwargs)
    queue = MACHINE.queue(get_current_stream().ptr)
    settled()
    if function.__name__ in OF_ITS_ARGUMENT:
        written(sources)()
    out = kwargs.get("out")
    touched(queue, [span(one) for one in sources], [span(out)] if isinstance(out, _array.ndarray) else [])
    with _array.FILTERS, numpy.errstate(all="ignore"):
        result = function(*given, **named)
    return out if isinstance(out, _array.ndarray) else wrapped(result, sources)


def generic(function):
    """Return CuPy's function of the same name as a function of NumPy."""
    @functools.wraps(function, updated=())
    def call(*args, **kwargs):
        kwargs.pop("blocking", None)
        if args and isinstance(args[0], numpy.ndarray) and function.__name__ in OF_ITS_ARGUMENT:
            return function(*args, **kwargs)
        return at_once(function, args, kwargs)

    return call


def late(function):
    """Return a function whose result's shape follows from the shapes alone: it is enqueued."""
    @functools.wraps(function, updated=())
    def call(*args, out=None, **options):
        if out is not None:
            return at_once(function, args, {**options, "out": out})
        return _array.call(lambda *given: function(*given, **options), *args)

    return call


class Ufunc:
    """A ufunc on arrays of the GPU."""

    def __init__(self, function):
        self.numpy, self.__name__, self.__doc__ = function, function.__name__, function.__doc__
        self.nin, self.nout, self.nargs, self.types = function.nin, function.nout, function.nargs, function.types

    def __repr__(self):
        return f"<ufunc 'cupy_{self.__name__}'>"

    def __call__(self, *args, out=None, dtype=None, casting="same_kind", where=True):
        out = args[self.nin] if len(args) > self.nin else out
        out = out[0] if isinstance(out, tuple) else out
        operands = args[:self.nin]
        if self.nout > 1 or where is not True or any(isinstance(one, list | tuple) for one in operands):
            options = {"out": out, "dtype": dtype, "where": where}
            return at_once(self.numpy, operands, {key: one for key, one in options.items() if one is not None})
        given = _array.hosts(operands)
        if out is None:
            types = [type(one) if isinstance(one, bool | int | float | complex) else numpy.asarray(one).dtype
                     for one in given]
            kind = self.numpy.resolve_dtypes((*types, None), casting=casting, **(
                {} if dtype is None else {"signature": (None,) * self.nin + (numpy.dtype(dtype),)}))[-1]
            axes = [numpy.asarray(one) for one in given if not isinstance(one, bool | int | float | complex)]
            orders = [one for one in axes if one.ndim]
            out = _array.ndarray(numpy.broadcast_shapes(*[one.shape for one in axes]), kind,
                                 order="F" if orders and all(one.flags.fnc for one in orders) else "C")
        elif not isinstance(out, _array.ndarray):
            raise TypeError("return arrays must be of ArrayType")
        else:
            _array.check_elements(out)
        host, function, options = out._host, self.numpy, {} if dtype is None else {"dtype": numpy.dtype(dtype)}
        _array.enqueue(lambda: function(*given, out=host, casting=casting, **options), out, operands, operands)
        return out

    def __getattr__(self, name):
        if name in ("reduce", "accumulate", "outer", "reduceat", "at"):
            return generic(getattr(self.numpy, name))
        raise AttributeError(name)


@functools.cache
def found_in(module, name, library="cupy"):
    """Return CuPy's counterpart of a name of NumPy or SciPy; raise AttributeError."""
    try:
        value = getattr(module, name)
    except AttributeError:
        raise AttributeError(f"module {library!r} has no attribute {name!r}") from None
    if name.startswith("_") or name in ("matrix", "char", "rec", "ma", "memmap", "chararray", "recarray"):
        raise AttributeError(f"module {library!r} has no attribute {name!r}")
    if isinstance(value, numpy.ufunc):
        return Ufunc(value) if value.signature is None else late(value)
    return value if isinstance(value, type) or name in OF_DTYPES or not callable(value) else generic(value)


METHODS = """argmin argpartition argsort choose clip compress conj conjugate cumprod cumsum dot flatten nonzero
partition prod repeat round searchsorted sort std take trace var put""".split()


def _method(name):
    def method(self, *args, **kwargs):
        with on_device(self.data.device_id):
            return at_once(lambda host, *given, **named: getattr(host, name)(*given, **named), (self, *args), kwargs)

    method.__name__ = name
    return method


for _name in METHODS:
    setattr(_array.ndarray, _name, _method(_name))
for _name, _function in {"floordiv": "floor_divide", "mod": "remainder", "or": "bitwise_or", "xor": "bitwise_xor",
                         "lshift": "left_shift", "rshift": "right_shift", "le": "less_equal",
                         "ge": "greater_equal"}.items():
    _array.operators(_name, getattr(numpy, _function))
