"""Numbers of bytes as read from a user by bench, draw and simulate, and as written by pages and pictures."""

import pytest

from gpucoll.errors import ArgumentError
from gpucoll.lab.sizes import MOST_SIZE, byte_size, byte_text

READ = {"0": 0, "8": 8, "8B": 8, "64k": 65536, "8KB": 8192, "1.5M": 1572864, "16MiB": 1 << 24, " 8 K ": 8192, "0.3": 0,
        "2g": 1 << 31, "1.1T": (11 << 40) // 10, "1023.9999999999999T": MOST_SIZE - 1, "1125899906842624": MOST_SIZE}
WRITTEN = {0: "0 B", 1023: "1023 B", 1024: "1 KiB", 1536: "1.5 KiB", 1365: "1.333 KiB", 64 << 20: "64 MiB",
           MOST_SIZE: "1024 TiB"}
REFUSED = ["", "K", "8X", "8iB", "8Ki", "8KK", "-8", "+8", "1e3", "8 8", "0x8", "nan", "1.", ".5", "1,2",
           "1125899906842625", "1025T", "9" * 5000, "\N{ARABIC-INDIC DIGIT TWO}", "8\N{KELVIN SIGN}"]


def test_sizes_are_read_exactly_and_written():
    assert {text: byte_size(text) for text in READ} == READ
    assert {nbytes: byte_text(nbytes) for nbytes in WRITTEN} == WRITTEN
    assert all(byte_size(byte_text(nbytes)) == nbytes for nbytes in (0, 8, 1536, 64 << 20, 3 << 40))


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ArgumentError, match=r"GC-SIZE.*is not a number of bytes"):
        byte_size(text)
