"""Numbers of bytes as bench, draw and simulate read them from a user, and as pages and pictures write them."""

import pytest

from gpucoll.analysis.sizes import MOST, byte_size, byte_text
from gpucoll.errors import ArgumentError


@pytest.mark.parametrize(("text", "nbytes"), [
    ("0", 0), ("8", 8), ("8B", 8), ("1K", 1024), ("64k", 65536), ("8KB", 8192), ("1.5M", 1572864), ("16MiB", 1 << 24),
    ("1.5GiB", 3 << 29), ("2g", 1 << 31), ("1t", 1 << 40), (" 8 K ", 8192), ("0.3", 0)])
def test_sizes_are_read_in_base_two(text, nbytes):
    assert byte_size(text) == nbytes


@pytest.mark.parametrize(("text", "nbytes"), [
    ("1125899906842623", MOST - 1), ("1125899906842624", MOST), ("1024T", MOST),
    ("1.1T", (11 << 40) // 10), ("1023.9999999999999T", MOST - 1)])
def test_sizes_are_exact(text, nbytes):
    assert byte_size(text) == nbytes


@pytest.mark.parametrize("text", [
    "", "K", "B", "8X", "8iB", "8Ki", "8KK", "-8", "+8", "1e3", "8 8", "0x8", "nan", "1.", ".5", "1,2",
    "1125899906842625", "1025T", "9999999T", "9" * 5000, "\N{ARABIC-INDIC DIGIT TWO}", "8\N{KELVIN SIGN}"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ArgumentError) as refused:
        byte_size(text)
    assert refused.value.code == "GC-SIZE"


def test_the_code_is_the_callers():
    with pytest.raises(ArgumentError, match="'1Q' is no number of bytes") as refused:
        byte_size("1Q", "GC-DRAW")
    assert refused.value.code == "GC-DRAW"


@pytest.mark.parametrize(("nbytes", "text"), [
    (0, "0 B"), (1, "1 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (1365, "1.333 KiB"),
    (64 << 20, "64 MiB"), (3 << 29, "1.5 GiB"), (1 << 40, "1 TiB"), (MOST, "1024 TiB")])
def test_sizes_are_written(nbytes, text):
    assert byte_text(nbytes) == text


@pytest.mark.parametrize("nbytes", [0, 8, 1024, 1536, 64 << 20, 3 << 40])
def test_what_is_written_is_read(nbytes):
    assert byte_size(byte_text(nbytes)) == nbytes
