"""NumPy's functions under CuPy's names, by one rule: arrays of a GPU are unwrapped, and results are arrays of the GPU.

A ufunc is enqueued on the current stream, since its result's shape is known. Any other function may need the values, as
`nonzero` does: the host waits for the stream and calls NumPy at once. A NumPy array among the arguments is a TypeError,
as in CuPy.
"""

import functools
import inspect
import types

import numpy

from . import _array, _operands
from ._machine import MACHINE, check, on_device
from ._operands import indices, inside
from ._order import span, touched, written
from .cuda.stream import get_current_stream

# Functions of NumPy that return facts on arrays and dtypes, or the host's objects.
OF_DTYPES = """can_cast promote_types result_type min_scalar_type finfo iinfo issubdtype dtype ndindex isscalar
broadcast_shapes errstate printoptions set_printoptions index_exp s_ format_float_positional iscomplexobj isrealobj
ndim shape size broadcast shares_memory may_share_memory iterable""".split()


# CuPy calls the method of the argument, so these serve arrays of NumPy as well.
OF_ITS_ARGUMENT = ("all", "any", "argmax", "argmin", "max", "mean", "min", "prod", "std", "sum", "var")


def unwrapped(value):
    """Return a value for NumPy; raise TypeError for a NumPy array, as CuPy does."""
    value = _operands.like(value)
    if isinstance(value, _array.ndarray):
        _operands.check_elements(value)
        return value._host
    if isinstance(value, numpy.ndarray) and value.ndim:
        raise TypeError(f"Unsupported type {type(value)}")
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(map(unwrapped, value))
    if isinstance(value, dict):
        return {key: unwrapped(one) for key, one in value.items()}
    if isinstance(value, types.FunctionType | types.MethodType):
        return functools.partial(_called_back, value)
    return value._host if isinstance(value, Served) else value.numpy if isinstance(value, Ufunc) else value


def _called_back(function, *args):
    """Call a function of the program, which has arrays of the GPU, for NumPy or SciPy."""
    found = function(*wrapped(args))
    settled(arrays_in([found]), ())
    return found.get() if isinstance(found, _array.ndarray) else unwrapped(found)  # its memory may be reused


def wrapped(value, sources=()):
    """Return a result of NumPy as CuPy's: arrays and numbers are arrays of the GPU, a view stays a view."""
    if isinstance(value, numpy.generic) or (isinstance(value, numpy.ndarray) and value.dtype.kind not in "OUSV"):
        for source in sources:
            if value is source._host:
                return source
            if isinstance(value, numpy.ndarray) and value.size and numpy.may_share_memory(value, source._host):
                return source._window(value)
        return uploaded(value)
    if isinstance(value, list | tuple):
        kind = tuple if hasattr(value, "_fields") else type(value)
        return kind(wrapped(one, sources) for one in value)
    return served(type(value))(host=value) if type(value).__module__.startswith("scipy.") else value


def uploaded(value):
    """Return a new array of the GPU with the values, written in the order of the stream, as its memory is reused."""
    if MACHINE.is_idle():
        return _array.made(value)
    given = numpy.asarray(value)
    found = _array.ndarray(given.shape, given.dtype, order="F" if given.flags.fnc else "C")
    host = found._host
    _array.enqueue(lambda: numpy.copyto(host, given), found)
    return found


def arrays_in(values):
    for value in values:
        if isinstance(value, _array.ndarray):
            yield value
        elif isinstance(value, Served):
            yield from value._parts.values()
        elif isinstance(value, list | tuple):
            yield from arrays_in(value)
        elif isinstance(value, dict):
            yield from arrays_in(value.values())


def settled(reads, writes):
    """Wait for the current stream, whose work the function's arguments depend on; the function is work of its own."""
    queue = MACHINE.queue(get_current_stream().ptr)
    check(queue.capture is None, 900, "a function of the host, but the stream is capturing")
    MACHINE.submit(queue, lambda: lambda: True)
    touched(queue, [span(one) for one in reads], [span(one) for one in writes])
    get_current_stream().synchronize()


def at_once(function, args, kwargs, owner=None):
    """Call a function of NumPy on the values of the arrays, now; `out` is the array that was passed."""
    sources = [*arrays_in((owner, *args)), *arrays_in(kwargs.values())]
    given, named = unwrapped(list(args)), unwrapped(kwargs)
    out = kwargs.get("out")
    if getattr(function, "__module__", "") == "numpy.fft" and MACHINE.is_capturing(get_current_stream().ptr):
        return late(function)(*args, **kwargs)
    if not MACHINE.is_idle():
        settled(sources, [out] if isinstance(out, _array.ndarray) else [])
        if getattr(function, "__name__", "") in OF_ITS_ARGUMENT:
            written(sources)()
    with _array.FILTERS, numpy.errstate(all="ignore"):
        result = function(*given, **named)
    if owner is not None and result is owner._host:  # such as `tocsr` of a matrix that is one
        return owner
    return out if isinstance(out, _array.ndarray | tuple) else wrapped(result, sources)


def generic(function, owner=None):
    """Return CuPy's function of the same name as a function of NumPy, or the method of an owner."""
    @functools.wraps(function, updated=())
    def call(*args, **kwargs):
        for name in ("blocking", "plan"):  # of CuPy alone
            kwargs.pop(name, None)
        if "tol" in kwargs and "rtol" in inspect.signature(function).parameters:
            kwargs["rtol"] = kwargs.pop("tol")  # SciPy has renamed the tolerance of its solvers
        if args and isinstance(args[0], numpy.ndarray) and getattr(function, "__name__", "") in OF_ITS_ARGUMENT:
            return function(*args, **kwargs)
        if getattr(function, "__name__", "") in ("allclose", "isclose"):  # these take arrays of NumPy as well
            args = [uploaded(one) if isinstance(one, numpy.ndarray) else one for one in args]
        return at_once(function, args, kwargs, owner)

    return call


def late(function):
    """Return a function whose result's shape follows from the shapes alone: it is enqueued."""
    @functools.wraps(function, updated=())
    def call(*args, out=None, **options):
        if out is not None:
            return at_once(function, args, {**options, "out": out})
        return _array.call(functools.partial(function, **options), *args)

    return call


def scatter(ufunc):
    """Return a function that applies a ufunc at an index, as often as an element is named there."""
    def apply(a, slices, value):
        parts = indices(slices)
        value = uploaded(numpy.asarray(value, a.dtype)) if isinstance(value, numpy.ndarray | list | tuple) else value
        _array.write(a, lambda host, given, *chosen: ufunc.at(host, inside(host, chosen), given), value, *parts)

    return apply


class Ufunc:
    """A ufunc on arrays of the GPU."""

    def __init__(self, function):
        self.numpy, self.__name__, self.__doc__ = function, function.__name__, function.__doc__
        self.nin, self.nout, self.nargs, self.types = function.nin, function.nout, function.nargs, function.types

    def __repr__(self):
        return f"<ufunc 'cupy_{self.__name__}'>"

    def __call__(self, *args, out=None, dtype=None, casting="same_kind", where=True):
        out = args[self.nin] if len(args) > self.nin else out
        out = out[0] if isinstance(out, tuple) and self.nout == 1 else out
        operands = [*map(_operands.like, args[:self.nin])]
        if self.nout > 1 or where is not True or any(isinstance(one, list | tuple) for one in operands):
            options = {"out": out, "dtype": dtype, "where": where}
            return at_once(self.numpy, operands, {key: one for key, one in options.items() if one is not None})
        given = _operands.hosts(operands)
        if out is None and MACHINE.is_idle():
            with numpy.errstate(all="ignore"):
                return _array.made(self.numpy(*given, casting=casting, **({} if dtype is None else {"dtype": dtype})))
        if out is None:
            types = [type(one) if type(one) in (int, float, complex) else numpy.asarray(one).dtype for one in given]
            kind = self.numpy.resolve_dtypes((*types, None), casting=casting, **(
                {} if dtype is None else {"signature": (None,) * self.nin + (numpy.dtype(dtype),)}))[-1]
            axes = [numpy.asarray(one) for one in given if not isinstance(one, bool | int | float | complex)]
            orders = [one for one in axes if one.ndim]
            out = _array.ndarray(numpy.broadcast_shapes(*[one.shape for one in axes]), kind,
                                 order="F" if orders and all(one.flags.fnc for one in orders) else "C")
        elif not isinstance(out, _array.ndarray):
            raise TypeError("return arrays must be of ArrayType")
        else:
            _operands.check_elements(out)
        host, function, options = out._host, self.numpy, {} if dtype is None else {"dtype": numpy.dtype(dtype)}
        _array.enqueue(lambda: function(*given, out=host, casting=casting, **options), out, operands, operands)
        return out

    def __getattr__(self, name):
        if name == "at":
            return scatter(self.numpy)
        if name in ("reduce", "accumulate", "outer", "reduceat"):
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
    if isinstance(value, type) and (value.__module__.startswith("scipy.") or value in (numpy.vectorize, numpy.poly1d)):
        return served(value)
    if name in ("mgrid", "ogrid", "r_", "c_"):
        return IndexMaker(value)
    if isinstance(value, type) or not callable(value):
        return value
    return fact(value) if name in OF_DTYPES else generic(value)


class IndexMaker:
    """An object of NumPy that makes arrays from an index."""

    def __init__(self, given):
        self._given = given

    def __getitem__(self, index):
        return at_once(lambda one: self._given[tuple(one) if isinstance(index, tuple) else one[0]], (
            list(index) if isinstance(index, tuple) else [index],), {})


def fact(function):
    """Return a function of shapes and dtypes alone, for which nobody waits."""
    @functools.wraps(function, updated=())
    def call(*args, **kwargs):
        return function(*[one._host if isinstance(one, _array.ndarray) else one for one in args], **kwargs)

    return call


class Served:
    """An object of SciPy, such as a sparse matrix or an operator, with arrays of the GPU in place of NumPy's.

    The arrays that make a sparse matrix are in memory of the GPU, so that kernels of the program can have them.
    """

    __array_priority__ = 101  # an operator between an array and this object is this object's
    __array_ufunc__ = None

    def __init__(self, *args, host=None, **kwargs):
        self._parts, self._given = {}, (args, kwargs)  # SciPy keeps views of what was given
        if host is None:
            settled(arrays_in([args, kwargs]), ())
            host = self._kind(*unwrapped(args), **unwrapped(kwargs))
        self._host = host
        for name in ("data", "indices", "indptr", "row", "col", "offsets") if hasattr(host, "nnz") else ():
            if isinstance(getattr(host, name, None), numpy.ndarray):
                setattr(self, name, self._parts.setdefault(name, uploaded(getattr(host, name))))

    def __setattr__(self, name, value):
        if name in self.__dict__.get("_parts", ()):
            self._parts[name] = value
            setattr(self._host, name, value._host)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name):
        if name in ("_host", "_parts"):
            raise AttributeError(name)
        if name in self._parts:
            return self._parts[name]
        if name == "get":  # the matrix on the host
            return lambda *_: settled(self._parts.values(), ()) or self._host.copy()
        if isinstance(getattr(type(self._host), name, None), property) and not MACHINE.is_idle():
            settled(self._parts.values(), ())  # such as `T`, which reads the parts
        value = getattr(self._host, name)
        return generic(value, self) if callable(value) else wrapped(value)

    def __call__(self, *args, **kwargs):
        return generic(self._host, self)(*args, **kwargs)

    def __repr__(self):
        return repr(self._host)


OPERATORS = [f"__{name}__" for name in """add radd sub rsub mul rmul truediv matmul rmatmul pow neg abs eq ne lt gt le
ge getitem""".split()]


@functools.cache
def served(kind):
    """Return the class for objects of a class of SciPy."""
    bases = [served(base) for base in kind.__bases__ if base.__module__.startswith("scipy.")] or [Served]
    operators = {name: lambda self, *args, name=name: generic(getattr(self._host, name), self)(*args)
                 for name in OPERATORS if name in vars(kind)}
    return type(kind.__name__, tuple(bases), {"_kind": kind, **operators})


METHODS = """argmin argpartition argsort byteswap choose clip compress conj conjugate cumprod cumsum dot flatten nonzero
partition prod repeat round searchsorted sort std take trace var put""".split()


def _method(name):
    def method(self, *args, **kwargs):
        with on_device(self.data.device_id):
            return at_once(lambda host, *given, **named: getattr(host, name)(*given, **named), (self, *args), kwargs)

    method.__name__ = name
    return method


for _name in METHODS:
    setattr(_array.ndarray, _name, _method(_name))
for _name, _function in {"add": numpy.add, "max": numpy.maximum, "min": numpy.minimum}.items():
    setattr(_array.ndarray, f"scatter_{_name}", scatter(_function))
for _name, _function in {"floordiv": "floor_divide", "mod": "remainder", "or": "bitwise_or", "xor": "bitwise_xor",
                         "lshift": "left_shift", "rshift": "right_shift", "le": "less_equal",
                         "ge": "greater_equal"}.items():
    _array.operators(_name, getattr(numpy, _function))
