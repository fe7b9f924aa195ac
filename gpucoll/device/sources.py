"""The source text of each kernel instance: a file of kernels/device and a few lines naming the op and the dtype.

A source is one text with all of gpucoll's headers inlined, so the text alone identifies the source in a cache.
"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path
from typing import Literal, NamedTuple

from gpucoll.core.dtypes import DTYPES, Dtype
from gpucoll.core.formats import FORMATS, Format
from gpucoll.core.ops import EXACT, EXACT_NAMES, OPS, Op
from gpucoll.errors import DtypeError

Scale = Literal["divide", "multiply", "truth"]

UNIT_TYPES = {1: "u8", 2: "u16", 4: "u32", 8: "u64", 16: "Word"}  # C type of a unit by size in bytes
FILES = {  # kernel: source file, and prefix of the C struct of the arguments
    "copy": ("device/copy.cu", "Copy"),
    "pack": ("device/pack.cu", "Pack"),  # makes strided units contiguous
    "unpack": ("device/pack.cu", "Pack"),
    "scale": ("device/scale.cu", "Scale"),  # divides or multiplies every element by a factor, or replaces it by 0 or 1
    "shorten": ("device/compress.cu", "Shorten"),  # adds the previous error, rounds, stores the new error
    "quantise": ("device/quantise.cu", "Quantise"),  # adds the previous error, stores codes, scales, the new error
    "dequantise": ("device/quantise.cu", "Dequantise"),  # makes elements of codes and scales, or a sum of rows
    "maxima": ("device/quantise.cu", "Maxima"),  # finds the largest magnitudes of rows
    "reduce": ("device/reduce.cu", "Reduce"),  # combines two or more arrays
    "packets": ("device/peer_packets.cu", "Packets"),  # all-reduce by small messages into the peers' memory
    "ll128": ("device/peer_ll128.cu", "Packets"),  # the same by packets of 128 bytes, over NVLink
    "fold_all": ("device/peer_shots.cu", "Shots"),  # all-reduce in the peers' memory: every rank reduces all elements
    "fold_share": ("device/peer_shots.cu", "Shots"),  # all-reduce: every rank reduces a share and writes it to all
    "multimem_share": ("device/peer_multimem.cu", "Shots"),  # the same, reduced and written by the NVLink switch
    "multimem_gather": ("device/peer_multimem.cu", "Shots"),  # all-gather: the switch writes a block to all ranks
    "steps": ("device/peer_steps.cu", "Steps"),  # executes any schedule
}
IN_PEER = ("steps", "packets", "ll128", "fold_all", "fold_share")
IN_PACKETS = ("packets", "ll128")  # read once and combined on arrival; an exact sum may read its operands twice
# The ops of the NVLink switch by CUDA expression, and the dtypes; floats are only added. See multimem.h.
SWITCH_OPS = {"add(a, b)": "M_ADD", "minimum(a, b)": "M_MIN", "maximum(a, b)": "M_MAX", "a & b": "M_AND",
              "a | b": "M_OR", "a ^ b": "M_XOR"}
SWITCH_DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "uint32", "int64", "uint64")
MOVE_KERNELS = ("copy", "pack", "unpack")
SHORT_FLOATS = ("float16", "bfloat16")  # dtypes of compressed gradients
_INCLUDE = re.compile(r'#include "(.*)"\n')


class Instance(NamedTuple):
    """One kernel: name in the compiled object, source file, and the lines appended to the file."""

    entry: str
    file: str
    lines: str


def instance(kernel: str, *parameters: int | str | Dtype | Format) -> Instance:
    """Return the instance of `kernel` for `parameters`.

    The parameter is the size of a unit for copy, pack and unpack, and one or two dtypes for the other kernels. `scale`
    takes the `Scale` first; `quantise` and `dequantise` take a dtype and a format.

    >>> instance("copy", 4).entry, instance("scale", "divide", DTYPES["float16"]).entry
    ('copy_4', 'scale_divide_float16')
    """
    names = [one.name if isinstance(one, Dtype | Format) else str(one) for one in parameters]
    types = [one.cuda if isinstance(one, Dtype | Format) else UNIT_TYPES[one] if isinstance(one, int) else one.title()
             for one in sorted(parameters, key=lambda one: isinstance(one, str))]
    file, arguments = FILES[kernel]
    entry = "_".join([kernel, *names])
    return Instance(entry, file, f"GC_ENTRY({entry}, {arguments}Arguments, {kernel}<{', '.join(types)}>)\n")


def reducing(kernel: str, op: Op | None, dtype: Dtype) -> Instance:
    """Return the instance of a reducing kernel; without `op`, the instance of `steps` moving elements of this width.

    Ops with the same CUDA expression share an instance. DtypeError if `op` calls a function and `dtype` is complex.

    >>> reducing("reduce", OPS["avg"], DTYPES["float16"]).entry, reducing("steps", None, DTYPES["float16"]).entry
    ('reduce_float16_sum', 'steps_2')
    """
    if op is None:
        cuda, name, expression = UNIT_TYPES[dtype.itemsize], f"{dtype.itemsize}", "b"
    else:
        cuda, name, expression = dtype.cuda, f"{dtype.name}_{_name(op)}", op.cuda
        if op.expression and dtype.kind == "complex" and re.search(r"[a-z]\(", op.expression):
            raise DtypeError(f"op {op.expression} calls a function, and on a GPU none is defined for {dtype.name}",
                             code="GC-OP-DTYPE")
    file, arguments = FILES[kernel]
    entry = f"{kernel}_{name}"
    lines = (f"struct Op_{entry} {{\n    typedef Wide<{cuda}> W;\n"
             f"    static GC_DEV W of(W a, W b) {{ return W({expression}); }}\n")
    if kernel == "multimem_share":
        lines += f"    static constexpr u32 MULTIMEM = {SWITCH_OPS[expression]};\n"
    lines += "};\n"
    if op is not None and op.name in EXACT_NAMES:
        lines = f"typedef {op.cuda} Op_{entry};\n"
    return Instance(entry, file, f"{lines}GC_ENTRY({entry}, {arguments}Arguments, {kernel}<{cuda}, Op_{entry}>)\n")


def is_switched(op: Op, dtype: Dtype) -> bool:
    return dtype.name in SWITCH_DTYPES and (op.cuda == "add(a, b)" if dtype.kind == "float" else op.cuda in SWITCH_OPS)


def _name(op: Op) -> str:
    """Return the name of the first built-in op with the same CUDA expression, or a digest for a user's op."""
    alike = next((row.name for row in (*OPS.values(), *EXACT.values()) if row.cuda == op.cuda), None)
    return alike or hashlib.sha256(op.cuda.encode()).hexdigest()[:16]


def family(kernel: Instance) -> tuple[Instance, ...]:
    """Return the kernels compiled for the CPU together with `kernel`, including `kernel`.

    Compiling several kernels takes little longer than compiling one kernel, and programs using one kernel of a family
    soon use the others. The kernel of a user's op forms a family alone.

    >>> [one.entry for one in family(instance("copy", 4)) if one.file == "device/copy.cu"]
    ['copy_1', 'copy_2', 'copy_4', 'copy_8', 'copy_16']
    """
    return _families().get(kernel, (kernel,))


@functools.cache
def _families() -> dict[Instance, tuple[Instance, ...]]:
    """Return the families by kernel: moving kernels; reduce and scale of a dtype; peer kernels of an op and dtype; ...
    """
    families = [*compressing_families(), [instance(kernel, width) for kernel in MOVE_KERNELS for width in UNIT_TYPES],
                [instance("multimem_gather", width) for width in UNIT_TYPES],
                [reducing("steps", None, row) for row in {row.itemsize: row for row in DTYPES.values()}.values()]]
    for dtype in DTYPES.values():
        ops = [op for op in OPS.values() if dtype.kind in op.kinds]
        scales: list[Scale] = ["truth", "divide", "multiply"] if dtype.kind in ("float", "complex") else ["truth"]
        families.append([*(reducing("reduce", op, dtype) for op in ops),
                         *(instance("scale", what, dtype) for what in scales)])
        families += [[reducing(kernel, op, dtype) for kernel in IN_PEER] for op in ops]
        exact = [op for op in EXACT.values() if dtype.kind in op.kinds]
        families += [[reducing("reduce", op, dtype) for op in exact],
                     *([reducing(kernel, op, dtype) for kernel in IN_PEER if kernel not in IN_PACKETS] for op in exact)]
    return {member: tuple(dict.fromkeys(one)) for one in families for member in one}


def compressing_families() -> list[list[Instance]]:
    """Return the kernels that compress gradients, by families.

    A family for each pair of a dtype and a block-scaled format.
    """
    real = [DTYPES[name] for name in ("float32", "float64", *SHORT_FLOATS)]
    return [[instance("maxima", dtype) for dtype in real],
            [instance("shorten", dtype, DTYPES[name]) for dtype in real for name in SHORT_FLOATS],
            *([instance(kernel, dtype, form) for kernel in ("quantise", "dequantise")]
              for form in FORMATS.values() for dtype in real)]


def text(*instances: Instance) -> str:
    """Return the translation unit with the kernels of `instances`, each kernel once."""
    distinct, known = dict.fromkeys(instances), set[str]()
    return "".join([*(inlined(one.file, known) for one in distinct), *(one.lines for one in distinct)])


def inlined(name: str, known: set[str]) -> str:
    """Return the text of a file with gpucoll's headers inlined, except the files in `known`, which is extended."""
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
def folder() -> Path:
    """Return the folder of the kernels: inside the installed package, or next to the package in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "kernels"
    return installed if installed.is_dir() else package.parent / "kernels"
