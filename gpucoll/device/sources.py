"""The kernels' sources: which file and which few lines more make the kernel of one op and dtype.

A source is one self-contained text, our headers in it, so that a cache need only look at the text.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import re
from importlib.resources.abc import Traversable
from typing import Literal, NamedTuple

from gpucoll.dtypes import DTYPES, Dtype
from gpucoll.errors import DtypeError
from gpucoll.ops import OPS, Op

Scale = Literal["divide", "multiply", "truth"]

UNITS = {1: "u8", 2: "u16", 4: "u32", 8: "u64", 16: "Word"}  # by how many bytes they have
COMPRESSING = ("shorten", "quantise", "dequantise")  # in one file
SHORT = ("float16", "bfloat16")  # what gradients are shortened to
MOMENTS = {row.name: row for row in (Dtype("mean16", "float", 2, "Mean16", None, None, "float32"),
                                     Dtype("square16", "float", 2, "Square16", None, None, "float32"))}
_INCLUDE = re.compile(r'#include "(.*)"\n')


class Instance(NamedTuple):
    """One kernel: its name in the compiled object, the file it is in, and the lines that make it after that file."""

    entry: str
    file: str
    lines: str


def reduce(op: Op, dtype: Dtype) -> Instance:
    """The kernel that combines two to eight arrays; ops that are alike on a GPU share it.

    >>> from gpucoll.dtypes import DTYPES
    >>> reduce(OPS["avg"], DTYPES["float16"]).entry
    'reduce_float16_sum'
    """
    return _of_op("reduce", "reduce.cu", "ReduceArguments", op, dtype)


def copy(width: int) -> Instance:
    """The kernel that copies elements of 1, 2, 4, 8 or 16 bytes."""
    return _instance("copy", str(width), UNITS[width])


def pack(width: int) -> Instance:
    """The kernel that makes strided units of 1, 2, 4, 8 or 16 bytes contiguous."""
    return _instance("pack", str(width), UNITS[width])


def unpack(width: int) -> Instance:
    """The kernel that puts contiguous units where the strides say."""
    return _instance("unpack", str(width), UNITS[width])


def scale(what: Scale, dtype: Dtype) -> Instance:
    """The kernel that divides or multiplies every element by a factor, or makes it 0 or 1."""
    return _instance("scale", f"{what}_{dtype.name}", f"{dtype.cuda}, {what.title()}")


def cast(source: Dtype, target: Dtype) -> Instance:
    """The kernel that converts every element; neither dtype is complex."""
    return _instance("cast", f"{source.name}_{target.name}", f"{source.cuda}, {target.cuda}")


def shorten(source: Dtype, target: Dtype) -> Instance:
    """The kernel that adds what was lost, rounds to a shorter dtype, and keeps what is lost."""
    return _instance("shorten", f"{source.name}_{target.name}", f"{source.cuda}, {target.cuda}")


def quantise(dtype: Dtype) -> Instance:
    """The kernel that makes bytes and scales of elements, and keeps what is lost."""
    return _instance("quantise", dtype.name, dtype.cuda)


def dequantise(dtype: Dtype) -> Instance:
    """The kernel that makes elements of bytes and scales, or the mean of several rows of them."""
    return _instance("dequantise", dtype.name, dtype.cuda)


def _instance(kernel: str, name: str, parameters: str) -> Instance:
    file = "pack" if kernel == "unpack" else "compress" if kernel in COMPRESSING else kernel
    arguments = "Pack" if kernel == "unpack" else kernel.title()
    entry = f"{kernel}_{name}"
    return Instance(entry, f"{file}.cu", f"GC_ENTRY({entry}, {arguments}Arguments, {kernel}<{parameters}>)\n")


def packets(op: Op, dtype: Dtype) -> Instance:
    """The all-reduce of ranks that write small messages into each other's memory."""
    return _of_op("packets", "peer_packets.cu", "PacketsArguments", op, dtype)


def shots(kernel: Literal["one_shot", "two_shot"], op: Op, dtype: Dtype) -> Instance:
    """The all-reduce of ranks that read each other's memory."""
    return _of_op(kernel, "peer_shots.cu", "ShotsArguments", op, dtype)


def steps(op: Op | None, dtype: Dtype) -> Instance:
    """The kernel that walks a schedule; without `op` one that only moves elements as wide as `dtype`.

    >>> from gpucoll.dtypes import DTYPES
    >>> steps(None, DTYPES["float16"]).entry
    'steps_2'
    """
    if op is None:
        return _reducing("steps", "peer_steps.cu", "StepsArguments", UNITS[dtype.itemsize], f"{dtype.itemsize}", "b")
    return _of_op("steps", "peer_steps.cu", "StepsArguments", op, dtype)


def _of_op(kernel: str, file: str, arguments: str, op: Op, dtype: Dtype) -> Instance:
    """Return the instance of a kernel that combines elements; DtypeError for what is defined for none of them."""
    if op.expression and dtype.kind == "complex" and re.search(r"[a-z]\(", op.expression):
        raise DtypeError(f"op {op.expression} calls a function, and on a GPU none is defined for {dtype.name}",
                         code="GC-OP-DTYPE")
    return _reducing(kernel, file, arguments, dtype.cuda, f"{dtype.name}_{_name(op)}", op.cuda)


def _reducing(kernel: str, file: str, arguments: str, cuda: str, name: str, expression: str) -> Instance:
    """Return the instance of a kernel that takes the type of elements and an op on their wide type."""
    entry = f"{kernel}_{name}"
    lines = (f"struct Op_{entry} {{\n    typedef Wide<{cuda}> W;\n"
             f"    static GC_DEV W of(W a, W b) {{ return W({expression}); }}\n}};\n")
    return Instance(entry, file, f"{lines}GC_ENTRY({entry}, {arguments}, {kernel}<{cuda}, Op_{entry}>)\n")


def _name(op: Op) -> str:
    """Return the first op of the table with the same CUDA text; ops of the user's own are named by a digest."""
    alike = next((row.name for row in OPS.values() if row.cuda == op.cuda), None)
    return alike or hashlib.sha256(op.cuda.encode()).hexdigest()[:16]


def family(instance: Instance) -> tuple[Instance, ...]:
    """Return the kernels that are compiled for the CPU together with `instance`, itself among them.

    A unit of several kernels takes little longer than one of a single kernel, and programs that use one of a family
    soon use the others. A kernel of the user's own op is alone.

    >>> [one.entry for one in family(copy(4)) if one.file == "copy.cu"]
    ['copy_1', 'copy_2', 'copy_4', 'copy_8', 'copy_16']
    """
    return _families().get(instance, (instance,))


@functools.cache
def _families() -> dict[Instance, tuple[Instance, ...]]:
    """Return all families: what moves elements, what combines or scales one dtype, peer kernels of an op and dtype."""
    families = [compressing(), [make(width) for make in (copy, pack, unpack) for width in UNITS],
                [steps(None, row) for row in {row.itemsize: row for row in DTYPES.values()}.values()]]
    for dtype in DTYPES.values():
        ops = [op for op in OPS.values() if dtype.kind in op.kinds]
        scales: list[Scale] = ["truth", "divide", "multiply"] if dtype.kind in ("float", "complex") else ["truth"]
        families.append([*(reduce(op, dtype) for op in ops), *(scale(what, dtype) for what in scales)])
        families += [[steps(op, dtype), packets(op, dtype), shots("one_shot", op, dtype), shots("two_shot", op, dtype)]
                     for op in ops]
    return {instance: tuple(dict.fromkeys(one)) for one in families for instance in one}


def compressing() -> list[Instance]:
    """Return the kernels that make gradients shorter, and those that pack Adam's moments."""
    wide = [DTYPES[name] for name in ("float32", "float64")]
    real = [*wide, *(DTYPES[name] for name in SHORT)]
    return [*(shorten(dtype, DTYPES[name]) for dtype in real for name in SHORT),
            *(make(dtype) for make in (quantise, dequantise) for dtype in real),
            *(cast(*pair) for moment in MOMENTS.values() for dtype in wide for pair in
              ((dtype, moment), (moment, dtype)))]


def text(*instances: Instance) -> str:
    """Return the translation unit that holds the kernels of `instances`, each once."""
    distinct = dict.fromkeys(instances)
    known: set[str] = set()
    files = [inlined(instance.file, known) for instance in distinct]
    return "".join([*files, *(instance.lines for instance in distinct)])


def inlined(name: str, known: set[str]) -> str:
    """Return the file with our headers in the place of their includes, each in the place of its first."""
    if name in known:
        return ""
    known.add(name)
    parts = _INCLUDE.split(_read(name))
    return parts[0] + "".join(inlined(header, known) + rest for header, rest in zip(parts[1::2], parts[2::2],
                                                                                    strict=True))


@functools.cache
def _read(name: str) -> str:
    return folder().joinpath(name).read_text(encoding="utf-8").replace("#pragma once\n", "")


@functools.cache
def folder() -> Traversable:
    """Return the kernels' folder: inside the installed package, or beside the package in a checkout."""
    package = importlib.resources.files("gpucoll")
    installed = package.joinpath("kernels")
    return installed if installed.is_dir() else package.joinpath("..", "kernels")
