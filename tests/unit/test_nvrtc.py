"""The device layer's two compilers: the bits of the code, its recipes, and the errors for wrong sources."""

import ctypes
from unittest import mock

import pytest

from gpucoll.device import CompileError, nvrtc, store
from gpucoll.errors import BackendError

EXTERN = 'extern "C" '
WRONG = "\nunknown x;"
KERNEL = EXTERN + "__global__ void kernel(float* x) { *x += 1; }"


ARITHMETIC = EXTERN + """float fused(float a, float b, float c) { return a * b + c; }
extern "C" int overflows(int a) { return a + 1 > a; }
extern "C" float punned(float* a, int* b) { *a = 1; *b = 0; return *a; }"""


def test_bits_are_kept_and_the_same_each_time(tmp_path):
    """Compilations repeat bit for bit; no product is fused into a sum, integers wrap, and type punning works."""
    file = tmp_path / "f.so"
    file.write_bytes(store.compile_shared(ARITHMETIC, "-O2"))
    assert file.read_bytes() == store.compile_shared(ARITHMETIC, "-O2")
    library = ctypes.CDLL(str(file))
    library.fused.argtypes, library.fused.restype = [ctypes.c_float] * 3, ctypes.c_float
    library.punned.argtypes, library.punned.restype = [ctypes.c_void_p] * 2, ctypes.c_float
    word = ctypes.create_string_buffer(4)
    almost_one = 1 + 2.0**-23
    assert (library.fused(almost_one, almost_one, -1 - 2.0**-22), library.overflows(2**31 - 1),
            library.punned(word, word)) == (0, 0, 0)


def test_cubin_and_the_report_of_ptxas(nvrtc_release):
    assert {75, 80, 90} <= set(nvrtc.archs())
    assert nvrtc.version(nvrtc_release[0]) == nvrtc_release >= (12, 0)
    cubin, log = nvrtc.compile_cubin(KERNEL, "sm_90")
    assert cubin.startswith(b"\x7fELF")
    assert "Compiling entry function 'kernel' for 'sm_90'" in log
    assert nvrtc.compile_cubin(KERNEL, "sm_90")[0] == cubin


def test_nvrtc_says_what_is_wrong(nvrtc_release):
    with pytest.raises(CompileError) as caught:
        nvrtc.compile_cubin(WRONG, "sm_90")
    assert str(caught.value) == '[GC-COMPILE] NVRTC at kernels.cu:2: identifier "unknown" is undefined'
    major, minor = nvrtc_release
    for arch in ("sm_999", "90"):
        with pytest.raises(BackendError, match=rf"NVRTC {major}\.{minor} does not compile for {arch}, only"):
            nvrtc.compile_cubin("", arch)


def test_what_nvrtc_opens_by_name_is_loaded_from_beside_it(tmp_path, monkeypatch):
    """The library's folder is searched for the builtins: NVRTC of the 13.0 wheels does not search this folder."""
    for name in ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0", "libnvrtc-builtins.alt.so.13.0"):
        (tmp_path / name).touch()
    loaded = []
    monkeypatch.setattr(nvrtc.ctypes, "CDLL", lambda path: loaded.append(path) or mock.Mock())
    nvrtc._load(f"{tmp_path}/libnvrtc.so.13")
    nvrtc._load("libnvrtc.so.13")
    assert loaded == [f"{tmp_path}/libnvrtc-builtins.so.13.0", f"{tmp_path}/libnvrtc.so.13", "libnvrtc.so.13"]


def test_all_that_decides_the_bits_is_in_the_recipes(nvrtc_release, monkeypatch):
    recipes = [store.recipe(), nvrtc.recipe("sm_80"), nvrtc.recipe("sm_90")]
    for compiler in (store, nvrtc):
        monkeypatch.setattr(compiler, "OPTIONS", (*compiler.OPTIONS, "-DNDEBUG"))
    recipes += [store.recipe(), nvrtc.recipe("sm_90")]
    monkeypatch.setattr(nvrtc, "version", lambda major=None: (11, 8))
    monkeypatch.setenv("CXX", "g++ -O1")
    assert len({*recipes, store.recipe(), nvrtc.recipe("sm_90")}) == 7
