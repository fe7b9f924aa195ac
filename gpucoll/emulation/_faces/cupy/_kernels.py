"""CuPy's `ElementwiseKernel`, `ReductionKernel` and `fuse`: loops around the program's own C++, compiled by g++.

A kernel is compiled once for its types. Parameters that are not `raw` are broadcast, read and written by element;
letters stand for types found from the arguments.
"""

import functools
import re

import numpy

from . import _operands
from ._array import ndarray
from ._machine import MACHINE
from ._order import span, touched
from ._raw import check_addresses, enqueue_kernel
from ._source import HostFunction, library, split_options
from .cuda.stream import get_current_stream

CPP = {"?": "bool", "b": "signed char", "B": "unsigned char", "h": "short", "H": "unsigned short", "i": "int",
       "I": "unsigned int", "l": "long long", "L": "unsigned long long", "q": "long long",
       "Q": "unsigned long long", "e": "float16", "f": "float", "d": "double", "F": "complex<float>",
       "D": "complex<double>"}
PARAMETER = re.compile(r"(?:(raw|_raw)\s+)?(?:(?:const|nonatomic)\s+)?(\w+)\s+(\w+)$")
WORDS = numpy.dtype("i8")


class Parameter:
    def __init__(self, text):
        found = PARAMETER.match(text.strip())
        if found is None:
            raise ValueError(f"Invalid parameter: {text!r}")
        self.is_raw, self.type, self.name = found[1] == "raw", found[2], found[3]
        # One letter stands for any type; other names are NumPy's.
        self.dtype = None if len(self.type) == 1 else numpy.dtype(self.type)

    def resolved(self, types):
        return self.dtype if self.dtype is not None else types[self.type]


def checked_name(name):
    if not name.isidentifier():
        raise ValueError(f"Invalid kernel name: {name!r}")
    return name


def parameters(text):
    return [Parameter(one) for one in text.split(",")] if text.strip() else []


def cpp(dtype):
    return CPP[dtype.char]


def letters(params, args):
    """Return the types of the letters, from the arguments: arrays before Python's numbers."""
    types = {}
    for param, arg in zip(params, args, strict=True):
        if param.dtype is None and isinstance(arg, ndarray | numpy.generic) \
                and types.setdefault(param.type, arg.dtype) != arg.dtype:
            raise TypeError(f"Type is mismatched. {param.name} {arg.dtype} {types[param.type]}")
    for param, arg in zip(params, args, strict=True):
        if param.dtype is None and param.type not in types:
            types[param.type] = numpy.asarray(arg).dtype
    return types


class KernelArgument:
    """An argument in memory: address, lengths and steps in bytes; a number has memory of the host."""

    def __init__(self, value, dtype, shape=None):
        self.dtype = dtype
        if isinstance(value, ndarray):
            host = value._host if shape is None else numpy.broadcast_to(value._host, shape)
            self.held, self.address = value, value.data.ptr if value.size else 0
            self.shape, self.strides = host.shape, host.strides
        else:
            self.held = numpy.array(value, dtype)
            self.address, self.shape = self.held.ctypes.data, shape or ()
            self.strides = (0,) * len(self.shape)

    def words(self):
        """Return the bytes of address, number of elements, number of axes, lengths and steps."""
        count = int(numpy.prod(self.shape, dtype=WORDS))
        return numpy.array([self.address, count, len(self.shape), *self.shape, *self.strides], WORDS).tobytes()


def launched(name, code, places, words, reads, options=()):
    """Enqueue a generated kernel of one thread that loops over all elements."""
    function = HostFunction(library(code, (name,), split_options(options)), 0, name)
    arguments = [*(place.words() for place in places), *(int(one).to_bytes(8, "little", signed=True) for one in words)]
    stack = [numpy.frombuffer(one, numpy.uint8) for one in arguments[:len(places)]]
    given = [int(row.ctypes.data).to_bytes(8, "little") for row in stack] + arguments[len(places):]
    queue = MACHINE.queue(get_current_stream().ptr)
    addresses = [place.address for place in places if isinstance(place.held, ndarray)]
    check_addresses(name, numpy.array(addresses, numpy.uint64), queue.device)
    numbers = [place.held for place in places if not isinstance(place.held, ndarray)]
    arrays = [place.held for place in places if isinstance(place.held, ndarray)]

    def run(_kept=(stack, numbers)):
        function.run((1, 1, 1), (1, 1, 1), given, 0)

    enqueue_kernel(queue, name, run, arrays[:reads], addresses)
    spans = [*map(span, arrays)]
    touched(queue, spans[:reads], spans[reads:])


def array_lines(params, dtypes):
    """Return declarations of the arrays of a generated kernel, from their words."""
    lines = []
    for param, dtype in zip(params, dtypes, strict=True):
        name = param.name if param.is_raw else f"_{param.name}"
        lines.append(f"CArray<{cpp(dtype)}> {name} = {{({cpp(dtype)}*)_w_{param.name}[0], _w_{param.name}[1], "
                     f"int(_w_{param.name}[2]), (ptrdiff_t*)_w_{param.name} + 3, "
                     f"(ptrdiff_t*)_w_{param.name} + 3 + _w_{param.name}[2]}};")
    return "\n".join(lines)


class ElementwiseKernel:
    def __init__(self, in_params, out_params, operation, name="kernel", reduce_dims=True, preamble="", no_return=False,
                 return_tuple=False, doc="", *, loop_prep="", after_loop="", options=()):
        self.in_params, self.out_params = parameters(in_params), parameters(out_params)
        self.params = [*self.in_params, *self.out_params]
        self.nin, self.nout = len(self.in_params), len(self.out_params)
        self.operation, self.name, self.preamble, self.__doc__ = operation, checked_name(name), preamble, doc
        self.no_return, self.return_tuple, self.options = no_return, return_tuple, options
        self.loop_prep, self.after_loop = loop_prep, after_loop
        self.nargs, self._code = self.nin + self.nout, functools.cache(self._code_of)

    def __call__(self, *args, size=None, stream=None, block_size=128):
        if len(args) not in (self.nin, self.nargs):
            raise TypeError(f"Wrong number of arguments for {self.name!r}: {len(args)}, not {self.nin} or {self.nargs}")
        args = [_operands.like(one) for one in args]
        _operands.hosts(args)  # raises TypeError for arrays of NumPy
        ins, outs = args[:self.nin], tuple(args[self.nin:])
        types = letters(self.params if outs else self.in_params, args)
        plain = [one for param, one in zip(self.params, args, strict=False) if not param.is_raw]
        if block_size < 1:
            raise ValueError(f"block_size={block_size} must be greater than zero")
        if size is not None:
            if any(isinstance(one, ndarray) for one in plain):
                raise ValueError("Specified 'size' can be used only if all of the ndarray are 'raw'.")
            shape = (int(size),)
        elif not any(isinstance(one, ndarray) for one in plain):
            raise ValueError("Loop size is undecided.")
        else:
            shape = numpy.broadcast_shapes(*[getattr(one, "shape", ()) for one in plain])
        if not outs:
            if size is None and any(param.is_raw for param in self.out_params):
                raise ValueError("Output array size is Undecided")
            outs = tuple(ndarray(shape, param.resolved(types)) for param in self.out_params)
        for param, out in zip(self.out_params, outs, strict=True):
            if not isinstance(out, ndarray):
                raise TypeError("Unsupported type for an output")
            if not param.is_raw and out.shape != shape:
                raise ValueError(f"Out shape is mismatched: {out.shape}, expected {shape}")
        kinds = tuple(param.resolved(types) for param in self.params)
        self._launch(ins, outs, kinds, shape)
        if self.no_return:
            return None
        return outs[0] if self.nout == 1 and not self.return_tuple else outs

    def _launch(self, ins, outs, kinds, shape):
        if 0 in shape:
            return
        places = []
        for param, one, kind in zip(self.params, (*ins, *outs), kinds, strict=True):
            if isinstance(one, ndarray) and one.dtype != kind:
                one = one.astype(kind)
            places.append(KernelArgument(one, kind, None if param.is_raw else shape))
        places.append(KernelArgument(False, numpy.dtype(bool), shape))
        types = {param.type: kind for param, kind in zip(self.params, kinds, strict=True) if param.dtype is None}
        code = self._code(kinds, tuple(types.items()))
        launched(self.name, code, places, (), sum(isinstance(one, ndarray) for one in ins), self.options)

    def _code_of(self, kinds, types):
        named = "\n".join(f"typedef {cpp(dtype)} {letter};" for letter, dtype in types)
        words = ", ".join(f"const ptrdiff_t* _w_{param.name}" for param in self.params)
        elements = "\n".join(
            f"const {cpp(kind)} {param.name} = _{param.name}[i];" if position < self.nin else
            f"{cpp(kind)}& {param.name} = _{param.name}[i];"
            for position, (param, kind) in enumerate(zip(self.params, kinds, strict=True)) if not param.is_raw)
        return f"""{named}
{self.preamble}
extern "C" __global__ void {self.name}({words}{', ' if words else ''}const ptrdiff_t* _w_indices) {{
{array_lines(self.params, kinds)}
CIndexer _ind = {{_w_indices[1], int(_w_indices[2]), _w_indices + 3, {{}}}};
const ptrdiff_t n = _ind.size(); (void)n;
{self.loop_prep};
for (ptrdiff_t i = 0; i < _ind.size(); ++i) {{
_ind.set(i);
{elements}
[&]() {{ do {{
{self.operation};
}} while (false); }}();
}}
{self.after_loop};
}}
"""


class ReductionKernel:
    def __init__(self, in_params, out_params, map_expr, reduce_expr, post_map_expr, identity, name="reduce_kernel",
                 reduce_type=None, reduce_dims=True, preamble="", options=()):
        self.in_params, self.out_params = parameters(in_params), parameters(out_params)
        self.nin, self.nout = len(self.in_params), len(self.out_params)
        self.nargs, self.identity = self.nin + self.nout, identity
        self.map_expr, self.reduce_expr, self.post_map_expr = map_expr, reduce_expr, post_map_expr
        self.name, self.reduce_type, self.preamble, self.options = checked_name(name), reduce_type, preamble, options
        self._code = functools.cache(self._code_of)

    def __call__(self, *args, out=None, axis=None, keepdims=False, stream=None):
        if len(args) not in (self.nin, self.nargs):
            raise TypeError(f"Wrong number of arguments for {self.name!r}")
        if len(args) == self.nargs:
            out = args[self.nin]
        args = [_operands.like(one) for one in args[:self.nin]]
        _operands.hosts(args)  # raises TypeError for arrays of NumPy
        types = letters(self.in_params, args)
        if out is not None and self.out_params[0].dtype is None:
            types.setdefault(self.out_params[0].type, out.dtype)
        plain = [one for param, one in zip(self.in_params, args, strict=True) if not param.is_raw]
        shape = numpy.broadcast_shapes(*[getattr(one, "shape", ()) for one in plain])
        axes = range(len(shape)) if axis is None else [one % len(shape) for one in numpy.atleast_1d(axis)]
        kept = [one for one in range(len(shape)) if one not in axes]
        if self.identity in (None, "") and 0 in [shape[one] for one in axes]:
            raise ValueError("zero-size array to reduction operation without identity")
        lengths = [shape[one] for one in kept]
        full = [1 if one in axes else shape[one] for one in range(len(shape))] if keepdims else lengths
        kind = self.out_params[0].resolved(types)
        out = ndarray(tuple(full), kind) if out is None else out
        order = [*kept, *axes]
        turned = tuple(shape[one] for one in order)
        places = []
        for param, one in zip(self.in_params, args, strict=True):
            wanted = param.resolved(types)
            one = one.astype(wanted) if isinstance(one, ndarray) and one.dtype != wanted else one
            place = KernelArgument(one, wanted, None if param.is_raw else shape)
            if not param.is_raw:
                place.strides, place.shape = tuple(place.strides[number] for number in order), turned
            places.append(place)
        target = out.reshape(tuple(lengths)) if keepdims else out
        places.append(KernelArgument(target, kind))
        inner = int(numpy.prod([shape[one] for one in axes], dtype=WORDS))
        kinds = tuple(param.resolved(types) for param in (*self.in_params, self.out_params[0]))
        if out.size:
            code = self._code(kinds, tuple(sorted(types.items())))
            launched(self.name, code, places, (inner,), sum(isinstance(one, ndarray) for one in args), self.options)
        return out

    def _code_of(self, kinds, types):
        params = [*self.in_params, self.out_params[0]]
        named = "\n".join(f"typedef {cpp(dtype)} {letter};" for letter, dtype in types)
        words = ", ".join(f"const ptrdiff_t* _w_{param.name}" for param in params)
        elements = "\n".join(f"const {cpp(kind)} {param.name} = _{param.name}[_i];"
                             for param, kind in zip(self.in_params, kinds, strict=False) if not param.is_raw)
        kind = self.reduce_type or cpp(kinds[-1])
        out = self.out_params[0].name
        begin = "" if self.identity in (None, "") else f"_s = _type_reduce({self.identity}); _any = true;"
        return f"""{named}
{self.preamble}
extern "C" __global__ void {self.name}({words}, ptrdiff_t _inner) {{
typedef {kind} _type_reduce;
{array_lines(params, kinds)}
for (ptrdiff_t _o = 0; _o < _{out}.size(); ++_o) {{
{kind} _s = _type_reduce(); bool _any = false;
{begin}
for (ptrdiff_t _j = 0; _j < _inner; ++_j) {{
const ptrdiff_t _i = _o * _inner + _j; (void)_i;
{elements}
{kind} _value = _type_reduce({self.map_expr});
if (_any) {{ {kind} a = _s, b = _value; _s = _type_reduce({self.reduce_expr}); }} else {{ _s = _value; _any = true; }}
}}
{kind} a = _s; {cpp(kinds[-1])}& {out} = _{out}[_o];
{self.post_map_expr};
}}
}}
"""


def fuse(*args, **options):
    """Return the function itself: each operation runs by itself, with the same result."""
    return args[0] if args and callable(args[0]) else (lambda function: function)


