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

from gpucoll.core.dtypes import DTYPES, Dtype
from gpucoll.core.ops import OPS, Op
from gpucoll.errors import DtypeError

Scale = Literal["divide", "multiply", "truth"]

UNITS = {1: "u8", 2: "u16", 4: "u32", 8: "u64", 16: "Word"}  # by how many bytes they have
FILES = {  # in which a kernel is, and whose arguments it takes
    "copy": ("copy.cu", "Copy"),
    "pack": ("pack.cu", "Pack"),  # makes strided units contiguous
    "unpack": ("pack.cu", "Pack"),
    "scale": ("scale.cu", "Scale"),  # divides or multiplies every element by a factor, or makes it 0 or 1
    "cast": ("cast.cu", "Cast"),  # converts every element; neither dtype is complex
    "shorten": ("compress.cu", "Shorten"),  # adds what was lost, rounds to a shorter dtype, keeps what is lost
    "quantise": ("compress.cu", "Quantise"),  # makes bytes and scales of elements, and keeps what is lost
    "dequantise": ("compress.cu", "Dequantise"),  # makes elements of those, or the mean of several rows of them
    "reduce": ("reduce.cu", "Reduce"),  # combines two to eight arrays
    "packets": ("peer_packets.cu", "Packets"),  # all-reduces by small messages into each other's memory
    "fold_all": ("peer_shots.cu", "Shots"),  # all-reduces in each other's memory: every rank reduces all elements
    "fold_share": ("peer_shots.cu", "Shots"),  # every rank reduces its share, and writes it to all
    "steps": ("peer_steps.cu", "Steps"),  # walks a schedule
}
PEER = ("steps", "packets", "fold_all", "fold_share")
MOVES = ("copy", "pack", "unpack")
SHORT = ("float16", "bfloat16")  # what gradients are shortened to
MOMENTS = {row.name: row for row in (Dtype("mean16", "float", 2, "Mean16", None, None, "float32"),
                                     Dtype("square16", "float", 2, "Square16", None, None, "float32"))}
_INCLUDE = re.compile(r'#include "(.*)"\n')


class Instance(NamedTuple):
    """One kernel: its name in the compiled object, the file it is in, and the lines that make it after that file."""

    entry: str
    file: str
    lines: str


def instance(kernel: str, *parameters: int | str | Dtype) -> Instance:
    """Return a kernel of types: bytes of a unit for what moves, dtypes for the others, and first what `scale` does.

    >>> instance("copy", 4).entry, instance("scale", "divide", DTYPES["float16"]).entry
    ('copy_4', 'scale_divide_float16')
    """
    names = [one.name if isinstance(one, Dtype) else str(one) for one in parameters]
    types = [one.cuda if isinstance(one, Dtype) else UNITS[one] if isinstance(one, int) else one.title()
             for one in sorted(parameters, key=lambda one: isinstance(one, str))]
    file, arguments = FILES[kernel]
    entry = "_".join([kernel, *names])
    return Instance(entry, file, f"GC_ENTRY({entry}, {arguments}Arguments, {kernel}<{', '.join(types)}>)\n")


def reducing(kernel: str, op: Op | None, dtype: Dtype) -> Instance:
    """Return a kernel that combines elements; without `op`, of `steps`, one that only moves those as wide as `dtype`.

    Ops that are alike on a GPU share it. Raises DtypeError for what is defined for no elements of `dtype`.

    >>> reducing("reduce", OPS["avg"], DTYPES["float16"]).entry, reducing("steps", None, DTYPES["float16"]).entry
    ('reduce_float16_sum', 'steps_2')
    """
    if op is None:
        cuda, name, expression = UNITS[dtype.itemsize], f"{dtype.itemsize}", "b"
    else:
        cuda, name, expression = dtype.cuda, f"{dtype.name}_{_name(op)}", op.cuda
        if op.expression and dtype.kind == "complex" and re.search(r"[a-z]\(", op.expression):
            raise DtypeError(f"op {op.expression} calls a function, and on a GPU none is defined for {dtype.name}",
                             code="GC-OP-DTYPE")
    file, arguments = FILES[kernel]
    entry = f"{kernel}_{name}"
    lines = (f"struct Op_{entry} {{\n    typedef Wide<{cuda}> W;\n"
             f"    static GC_DEV W of(W a, W b) {{ return W({expression}); }}\n}};\n")
    return Instance(entry, file, f"{lines}GC_ENTRY({entry}, {arguments}Arguments, {kernel}<{cuda}, Op_{entry}>)\n")


def _name(op: Op) -> str:
    """Return the first op of the table with the same CUDA text; ops of the user's own are named by a digest."""
    alike = next((row.name for row in OPS.values() if row.cuda == op.cuda), None)
    return alike or hashlib.sha256(op.cuda.encode()).hexdigest()[:16]


def family(kernel: Instance) -> tuple[Instance, ...]:
    """Return the kernels that are compiled for the CPU together with `kernel`, itself among them.

    A unit of several kernels takes little longer than one of a single kernel, and programs that use one of a family
    soon use the others. A kernel of the user's own op is alone.

    >>> [one.entry for one in family(instance("copy", 4)) if one.file == "copy.cu"]
    ['copy_1', 'copy_2', 'copy_4', 'copy_8', 'copy_16']
    """
    return _families().get(kernel, (kernel,))


@functools.cache
def _families() -> dict[Instance, tuple[Instance, ...]]:
    """Return all families: what moves elements, what combines or scales one dtype, peer kernels of an op and dtype."""
    families = [compressing(), [instance(kernel, width) for kernel in MOVES for width in UNITS],
                [reducing("steps", None, row) for row in {row.itemsize: row for row in DTYPES.values()}.values()]]
    for dtype in DTYPES.values():
        ops = [op for op in OPS.values() if dtype.kind in op.kinds]
        scales: list[Scale] = ["truth", "divide", "multiply"] if dtype.kind in ("float", "complex") else ["truth"]
        families.append([*(reducing("reduce", op, dtype) for op in ops),
                         *(instance("scale", what, dtype) for what in scales)])
        families += [[reducing(kernel, op, dtype) for kernel in PEER] for op in ops]
    return {member: tuple(dict.fromkeys(one)) for one in families for member in one}


def compressing() -> list[Instance]:
    """Return the kernels that make gradients shorter, and those that pack Adam's moments."""
    wide = [DTYPES[name] for name in ("float32", "float64")]
    real = [*wide, *(DTYPES[name] for name in SHORT)]
    return [*(instance("shorten", dtype, DTYPES[name]) for dtype in real for name in SHORT),
            *(instance(kernel, dtype) for kernel in ("quantise", "dequantise") for dtype in real),
            *(instance("cast", *pair) for moment in MOMENTS.values() for dtype in wide for pair in
              ((dtype, moment), (moment, dtype)))]


def text(*instances: Instance) -> str:
    """Return the translation unit that holds the kernels of `instances`, each once."""
    distinct, known = dict.fromkeys(instances), set[str]()
    return "".join([*(inlined(one.file, known) for one in distinct), *(one.lines for one in distinct)])


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
