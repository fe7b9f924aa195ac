"""Numbers of bytes as text, parsed and formatted; K, M, G and T are powers of 1024."""

from __future__ import annotations

import re
from fractions import Fraction

from gpucoll.errors import ArgumentError

MOST_SIZE = 1 << 50  # bytes accepted; the pattern below bounds digits, so parsing is always fast
SIZE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def byte_size(text: str) -> int:
    """Return the number of bytes written in `text`, rounded down to a whole byte; raise ArgumentError.

    >>> byte_size("8"), byte_size("64K"), byte_size("1.5MiB")
    (8, 65536, 1572864)
    """
    match = re.fullmatch(r"(\d{1,16}(?:\.\d{1,16})?)\s*(B|[KMGT](?:I?B)?)?", text.strip(), re.ASCII | re.IGNORECASE)
    nbytes = match and Fraction(match[1]) * 1024 ** "BKMGT".index((match[2] or "B")[0].upper())
    if nbytes is None or nbytes > MOST_SIZE:
        raise ArgumentError(f"{text!r} is not a number of bytes such as 8, 64K, 1.5M or 2G, up to "
                            "1024T", code="GC-SIZE")
    return int(nbytes)


def byte_text(nbytes: int) -> str:
    """Return a number of bytes as text with a unit, to 4 digits.

    >>> byte_text(8), byte_text(1536), byte_text(1 << 20)
    ('8 B', '1.5 KiB', '1 MiB')
    """
    power = min(len(SIZE_UNITS) - 1, max(0, nbytes.bit_length() - 1) // 10)
    return f"{nbytes / 1024 ** power:.4g} {SIZE_UNITS[power]}"
