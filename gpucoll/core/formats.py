"""The table of block-scaled formats: elements of 8 or 4 bits, and a scale for each block of elements.

A value is element * scale. Elements are rounded to the nearest, ties to even, and never beyond the largest element. A
block with a NaN or an infinity becomes NaN. Sources: OCP Microscaling Formats (MX) 1.0, part 6.3, for the mx formats;
NVIDIA, arXiv 2509.25149, appendix C, for nvfp4; Dettmers et al., arXiv 2110.02861, for int8.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import numpy

from gpucoll.errors import ArgumentError, nearest

Values = numpy.ndarray[tuple[int], numpy.dtype[numpy.float64]]


class Format(NamedTuple):
    """A row of the table.

    `bits` is the length of an element, `block` the number of elements that share a scale, `cuda` the name of the type
    in ``kernels/device/blocks.h``. `exponent` and `mantissa` are the bits of a floating-point element; integers have no
    exponent. `largest` is the largest element.

    `scale` is the form of a scale: "float32", the largest magnitude of the block divided by `largest`; "e8m0", a power
    of two that gives this magnitude the exponent of `largest`; "e4m3", a float8 for each block and a float32 for
    each row. `error` bounds the error of a value, in scales: half a step between the largest two elements, or the
    distance from the largest element to a larger number of the block.
    """

    name: str
    cuda: str
    bits: int
    block: int
    scale: Literal["float32", "e8m0", "e4m3"]
    exponent: int
    mantissa: int
    largest: float
    error: float

    @property
    def scale_bytes(self) -> int:
        """The bytes of a block's scale."""
        return 4 if self.scale == "float32" else 1

    @property
    def wire_bits(self) -> float:
        """The bits sent for an element, with its part of the scale."""
        return self.bits + 8 * self.scale_bytes / self.block


FORMATS: dict[str, Format] = {
    row.name: row
    for row in (
        Format("int8", "Int8", 8, 256, "float32", 0, 7, 127, 0.5),
        Format("mxfp8_e4m3", "Mxfp8E4m3", 8, 32, "e8m0", 4, 3, 448, 64),
        Format("mxfp8_e5m2", "Mxfp8E5m2", 8, 32, "e8m0", 5, 2, 57344, 8192),
        Format("mxfp4", "Mxfp4", 4, 32, "e8m0", 2, 1, 6, 2),
        Format("nvfp4", "Nvfp4", 4, 16, "e4m3", 2, 1, 6, 1),
    )
}


def format_of(name: object) -> Format:
    """Return the row of a format by its name; raise ArgumentError for another name.

    >>> format_of("mxfp8_e4m3").wire_bits
    8.25
    """
    if not isinstance(name, str) or name not in FORMATS:
        raise ArgumentError(f"no block-scaled format is named {name!r}{nearest(str(name), FORMATS)}",
                            code="GC-COMPRESSION")
    return FORMATS[name]


@functools.cache
def magnitudes(exponent: int, mantissa: int, largest: float) -> Values:
    """Return the non-negative elements by their codes, up to `largest`; without exponent, the integers.

    >>> magnitudes(2, 1, 6).tolist()
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    """
    if exponent == 0:
        return numpy.arange(largest + 1)
    codes = numpy.arange(1 << (exponent + mantissa))
    power, rest = codes >> mantissa, codes & ((1 << mantissa) - 1)
    bias = (1 << (exponent - 1)) - 1
    values = numpy.ldexp(rest + (power > 0) * 2.0**mantissa, numpy.maximum(power, 1) - bias - mantissa)
    return values[values <= largest]


def nearest_code(amounts: Values, number: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
    """Return the index in `amounts`, in ascending order, of the amount nearest to `number`; of two, the even index.

    >>> nearest_code(magnitudes(2, 1, 6), numpy.array([0.2, 2.5, 5.0, 5.1])).tolist()
    [0, 4, 6, 7]
    """
    after = numpy.searchsorted(amounts, number).clip(1, len(amounts) - 1)
    low, high = amounts[after - 1], amounts[after]
    up = (number - low > high - number) | ((number - low == high - number) & (after % 2 == 0))
    found: numpy.ndarray[Any, Any] = after - 1 + up
    return found
