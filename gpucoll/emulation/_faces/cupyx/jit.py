"""`cupyx.jit`: kernels written in Python. Every thread of a grid runs the function itself, as a generator.

A barrier, or a shuffle of a warp, suspends the thread's generator. So the function is compiled again, with a `yield
from` before each call that may suspend; within it NumPy stands for CuPy, since the elements of arrays are NumPy's.
"""

import ast
import inspect
import itertools
import textwrap
import threading

import cupy
import numpy
from cupy import _generic
from cupy._array import ndarray
from cupy._machine import MACHINE
from cupy._order import span, touched
from cupy._source import no_counterpart, three

BLOCK = "block"
warpsize = 32


class _Now(threading.local):
    """The thread of a grid that runs on this thread of the process, and the launch's bytes of shared memory."""

    thread, bytes = None, 0


_now = _Now()


class _Index:
    """`threadIdx` and its like."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, axis):
        return numpy.uint32(getattr(_now.thread, self._name)["xyz".index(axis)])


threadIdx, blockIdx, blockDim, gridDim = map(_Index, ("index", "block", "threads", "blocks"))


class _Thread:
    def __init__(self, number, index, block, threads, blocks):
        self.number, self.index, self.block, self.threads, self.blocks = number, index, block, threads, blocks
        self.waits, self.word, self.warp, self.shared, self.made = None, None, (), [], 0


def grid(ndim):
    """Return the thread's place in the grid, a number or a tuple."""
    return _by_axis(ndim, lambda now, axis: now.block[axis] * now.threads[axis] + now.index[axis])


def gridsize(ndim):
    return _by_axis(ndim, lambda now, axis: now.blocks[axis] * now.threads[axis])


def _by_axis(ndim, place):
    found = tuple(numpy.int64(place(_now.thread, axis)) for axis in range(ndim))
    return found[0] if ndim == 1 else found


def laneid():
    return _now.thread.number % warpsize


def range(*limits, unroll=None):
    return __builtins__["range"](*map(int, limits))


def shared_memory(dtype, size, alignment=None):
    """Return the array of the block for this call; without a size, the launch's `shared_mem`."""
    now = _now.thread
    now.made += 1
    if now.made > len(now.shared):
        now.shared.append(numpy.frombuffer(bytearray(b"\xcb" * (
            _now.bytes if size is None else size * numpy.dtype(dtype).itemsize)), dtype))
    return now.shared[now.made - 1]


def _atomic(name, function):
    def call(array, index, value, *more):
        before = array[index]
        array[index] = function(before, value, *more)
        return before

    call.__name__ = f"atomic_{name}"
    return call


atomic_add, atomic_sub, atomic_exch, atomic_min, atomic_max, atomic_and, atomic_or, atomic_xor, atomic_cas = (
    _atomic(name, function) for name, function in {
        "add": lambda old, value: old + value, "sub": lambda old, value: old - value, "exch": lambda _, value: value,
        "min": min, "max": max, "and": lambda old, value: old & value, "or": lambda old, value: old | value,
        "xor": lambda old, value: old ^ value, "cas": lambda old, compared, value: value if old == compared else old,
    }.items())
atomic_inc = _atomic("inc", lambda old, most: 0 if old >= most else old + 1)
atomic_dec = _atomic("dec", lambda old, most: most if old == 0 or old > most else old - 1)


# What suspends a thread


def syncthreads():
    yield BLOCK


def syncwarp(mask=0xFFFFFFFF):
    yield mask


def _shuffle(source):
    def call(mask, var, given, width=32):
        now = _now.thread
        now.word = var
        yield mask
        lane, first = now.number % 32, now.number % 32 // width * width
        wanted = source(lane, int(given), first, width)
        found = now.warp[wanted].word if first <= wanted < min(first + width, len(now.warp)) else var
        yield mask
        return found

    return call


shfl_sync = _shuffle(lambda lane, given, first, width: first + given % width)
shfl_up_sync = _shuffle(lambda lane, given, first, width: lane - given)
shfl_down_sync = _shuffle(lambda lane, given, first, width: lane + given)
shfl_xor_sync = _shuffle(lambda lane, given, first, width: lane ^ given)
SUSPENDING = (syncthreads, syncwarp, shfl_sync, shfl_up_sync, shfl_down_sync, shfl_xor_sync)


def __getattr__(name):
    if name in ("cg", "cub", "thrust"):
        raise no_counterpart(f"cupyx.jit.{name}")
    raise AttributeError(f"module 'cupyx.jit' has no attribute {name!r}")


class _Suspends(ast.NodeTransformer):
    """Put `yield from` before calls that may suspend."""

    def __init__(self, names):
        self.names = names

    def visit_Call(self, node):
        self.generic_visit(node)
        try:
            called = eval(ast.unparse(node.func), dict(self.names))
        except Exception:  # a local name, or a call of its own
            return node
        suspends = called in SUSPENDING or isinstance(called, _RawKernel)
        return ast.copy_location(ast.YieldFrom(node), node) if suspends else node


class _RawKernel:
    def __init__(self, function, mode="cuda", device=False):
        self._function, self._device, self._body = function, device, None
        self.__name__, self.__doc__ = function.__name__, function.__doc__

    def _compiled(self):
        """Return the function as a generator function."""
        if self._body is None:
            lines, first = inspect.getsourcelines(self._function)
            found = inspect.getclosurevars(self._function)
            names = {**found.builtins, **self._function.__globals__, **found.nonlocals}
            tree = ast.parse(textwrap.dedent("".join(lines)))
            given = tree.body[0]
            given.decorator_list, given.returns = [], None
            self.stored = {one.value.id for one in ast.walk(given) if isinstance(one, ast.Subscript)
                           and isinstance(one.ctx, ast.Store) and isinstance(one.value, ast.Name)} | {
                one.id for call in ast.walk(given) if isinstance(call, ast.Call)
                for one in call.args if isinstance(one, ast.Name)}
            given.body.append(ast.parse("if False: yield").body[0])
            tree = ast.fix_missing_locations(_Suspends(names).visit(tree))
            ast.increment_lineno(tree, first - 1)
            names = {name: numpy if one is cupy else one.numpy if isinstance(one, _generic.Ufunc) else one
                     for name, one in names.items()}
            exec(compile(tree, inspect.getsourcefile(self._function), "exec"), names)
            self._body = names[given.name]
            self.parameters = [one.arg for one in given.args.args]
        return self._body

    def __getitem__(self, sizes):
        grid_size, block_size = sizes
        return lambda *args, **options: self(grid_size, block_size, args, **options)

    def __call__(self, *given, **options):
        if _now.thread is not None:
            return self._compiled()(*given)
        if self._device:
            raise TypeError("a device function is called in a kernel only")
        return self._launch(*given, **options)

    def _launch(self, grid, block, args, shared_mem=0, stream=None):
        body, blocks, threads = self._compiled(), three(grid, "grid"), three(block, "block")
        for one in args:
            if isinstance(one, numpy.ndarray):
                raise TypeError(f"Unsupported type {type(one)}")
        queue = MACHINE.queue((cupy.cuda.get_current_stream() if stream is None else stream).ptr)
        given = [one._host if isinstance(one, ndarray) else one for one in args]

        def run():
            with numpy.errstate(all="ignore"):
                for place in numpy.ndindex(blocks[::-1]):
                    _run_block(body, given, place[::-1], threads, blocks, shared_mem)
            return True

        MACHINE.submit(queue, lambda: run, kernel=True)
        spans = [(name in self.stored, span(one)) for name, one in zip(self.parameters, args, strict=True)
                 if isinstance(one, ndarray)]
        touched(queue, [one for stored, one in spans if not stored], [one for stored, one in spans if stored])


def _run_block(body, given, block, threads, blocks, shared_bytes):
    places = itertools.product(*(__builtins__["range"](length) for length in reversed(threads)))
    everyone = [_Thread(number, place[::-1], block, threads, blocks) for number, place in enumerate(places)]
    shared, _now.bytes = [], shared_bytes
    for thread in everyone:
        first = thread.number // warpsize * warpsize
        thread.warp, thread.shared = everyone[first:first + warpsize], shared
    running = {thread: body(*given) for thread in everyone}
    while running:
        for thread in [one for one in running if one.waits is None]:
            _now.thread = thread
            try:
                thread.waits = next(running[thread])
            except StopIteration:
                del running[thread]
                thread.waits = "ended"
            finally:
                _now.thread = None
        _let_go(running)


def _let_go(running):
    """Let threads go on whose barriers all awaited threads have come to."""
    free = [one for one in running if one.waits is None]
    if running and all(one.waits == BLOCK for one in running):
        free = list(running)
    for one in running:
        if isinstance(one.waits, int | numpy.integer) and not any(
                one.waits >> lane & 1 and (other.waits is None or other.waits == BLOCK)
                for lane, other in enumerate(one.warp)):
            free.append(one)
    if running and not free:
        raise RuntimeError("a barrier that not all threads come to")
    for one in free:
        one.waits = None


def rawkernel(*, mode="cuda", device=False):
    """Return the decorator that makes a kernel of a function."""
    return lambda function: _RawKernel(function, mode, device)
