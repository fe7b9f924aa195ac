"""Numbers shared by the engine and Python, and the generator of the C++ header with these numbers.

All tables are defined here, or derived from Python's tables of dtypes and ops. Run by its path, this file prints
`kernels/engine/tables.h`; a test compares the header with the output.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping

from gpucoll.core.dtypes import CODES, DTYPES, Dtype
from gpucoll.core.ops import EXACT, OPS
from gpucoll.executors import IN_PLACE, WAITS

OPCODES = ("WAIT", "PUBLISH", "REDUCE", "CALL", "SEND", "RECEIVE", "END", "OPEN", "TAKE", "AGREE")
# Buffers of a rank. Peers may read the first three. GIVEN and RESULT are the caller's arrays; INPUT and OUTPUT may lie
# elsewhere, as in a workspace.
PLACES = ("INPUT", "OUTPUT", "SCRATCH", "PRIVATE", "GIVEN", "RESULT")
OP_NAMES = (*OPS, *(one.name for one in EXACT.values()))
CHECKS = ("OFF", "PEERS", "ALL")  # a rank compares its call with no rank, the ranks to be read from, or all
WAIT, PUBLISH, REDUCE, CALL, SEND, RECEIVE, END, OPEN, TAKE, AGREE = map(OPCODES.index, OPCODES)
INPUT, OUTPUT, SCRATCH, PRIVATE, GIVEN, RESULT = map(PLACES.index, PLACES)
OFF, PEERS, ALL = map(CHECKS.index, CHECKS)

TEXT = 256  # bytes of the description of a call
ROUNDS = 20  # bits of a progress counter for the position in a call; the bits above are the call's number
SHOWN = 3  # buffers of a rank readable by others
SLOTS, SLOT = 64, 1 << 14  # slots for eager calls of a rank, and bytes of input in a slot
OPENING = 1 << 13  # most bytes of data in the first message of a call between two nodes
PAGE, CACHE_LINE = 4096, 64  # bytes
# The head of a control segment: its bytes, and the places of its 64-bit words read by Python. Then the bytes of a slot.
HEAD, COUNTER, FAILURE, ARRIVED, TOKEN, BEGUN, ENDED, LEFT = 768, 0, 4, 5, 86, 90, 91, 92
SLOT_BYTES = SLOT + 320
# The numbers in the header, by type in C++.
NUMBERS: dict[str, tuple[str, ...]] = {"int": ("TEXT", "ROUNDS"), "uint32_t": ("SHOWN",), "int64_t": ("SLOTS",),
           "uint64_t": ("SLOT", "OPENING", "PAGE", "CACHE_LINE", "HEAD", "COUNTER", "FAILURE", "ARRIVED", "TOKEN",
                        "BEGUN", "ENDED", "LEFT", "SLOT_BYTES")}


class PlanFlag(enum.IntFlag):
    """Properties of a plan."""

    IN_CONTROL = enum.auto()  # the buffers of all ranks are in the control segments
    OWN_IN_CONTROL = enum.auto()  # the buffers of this rank are in its control segment
    COPIES_INPUT = enum.auto()  # works on a copy of the input
    KEEPS_OUTPUT = enum.auto()  # the caller's array is the result already: root of a broadcast
    OVERWRITES = enum.auto()  # a broadcast: the caller's array is input and result at once
    REFUSES = enum.auto()  # tells the other ranks: this rank refuses the arguments of the call
    ANNOUNCED = enum.auto()  # the other ranks learn of the call from the root's descriptor
    ONLY_COMPARES = enum.auto()  # another executor moves the data and records the call
    DEFERRED = enum.auto()  # compared only when the next call begins


_KINDS = "biufc"  # kinds of NumPy's own dtypes
_ROWS = {"bool": "whole_row", "int": "whole_row", "float": "real_row", "complex": "complex_row"}


def _codes(dtypes: Mapping[str, Dtype], codes: Mapping[str, int]) -> str:
    """Return the codes of NumPy's own dtypes, by kind and by binary logarithm of the size."""
    rows = []
    for kind in _KINDS:
        row = [0] * 5
        for name, dtype in dtypes.items():
            if dtype.wide is None or name == "float16":
                its = {"bool": "b", "float": "f", "complex": "c"}.get(dtype.kind, "u" if name.startswith("u") else "i")
                if its == kind:
                    row[dtype.itemsize.bit_length() - 1] = codes[name]
        rows.append("{" + ", ".join(map(str, row)) + "}")
    return "{" + ", ".join(rows) + "}"


def header(dtypes: Mapping[str, Dtype] = DTYPES, ops: Iterable[str] = OP_NAMES,
           codes: Mapping[str, int] = CODES) -> str:
    """Return the text of the header.

    >>> header().count("enum")
    5
    """
    made = [f"{_ROWS[one.kind]}<{one.cuda}>()" for one in dtypes.values()]
    numbers = [f"static const {kind} {name} = {globals()[name]};" for kind, names in NUMBERS.items() for name in names]
    lines = [
        "// Printed by gpucoll/executors/engine/tables.py, which has the tables for both sides: not to be edited.",
        "#pragma once", "#include <cstdint>", "", "namespace gpucoll {", "", *numbers, "",
        f"#define GC_OPCODES {', '.join(OPCODES)}",
        f"enum Buffer : uint32_t {{ {', '.join(PLACES)} }};",
        f"enum Check : uint32_t {{ {', '.join(CHECKS)} }};",
        f"enum Mode : uint32_t {{ WAITS = {WAITS}, IN_PLACE = {IN_PLACE} }};",
        f"enum PlanFlag : uint32_t {{ {', '.join(f'{flag.name} = {flag.value}' for flag in PlanFlag)} }};",
        f"enum OpPlace {{ {', '.join(name.upper() for name in ops)} }};",
        "", "// What there is for each dtype, in the order of Python's table (`combine.h`).",
        "#define GC_ROWS \\", " \\\n".join(f"    {one}," for one in made), "",
        f"// The code of a dtype of NumPy's own in a message, by its kind ({', '.join(_KINDS)}) and log2 of its bytes.",
        f"static const uint16_t CODES[{len(_KINDS)}][5] = {_codes(dtypes, codes)};", "", "}  // namespace gpucoll", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(header(), end="")
