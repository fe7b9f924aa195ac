"""The two compilers of the device layer: what they make, and what they say of a source that is wrong."""

import ctypes
import importlib.machinery
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from gpucoll.device import compilers, gxx, nvrtc
from gpucoll.errors import BackendError

EXTERN = 'extern "C" '
WRONG = "\nunknown x;"


@pytest.fixture
def library():
    """NVRTC's versions, where it is installed."""
    try:
        return nvrtc.version()
    except BackendError as error:
        pytest.skip(str(error))


@pytest.fixture
def fresh(monkeypatch):
    """Libraries are looked for anew, and forgotten afterwards."""
    nvrtc._library.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    nvrtc._library.cache_clear()


# ---------------------------------------------------------------- what compilers say


@pytest.mark.parametrize(
    ("log", "place", "line"),
    [
        ('k.cu(7): error: identifier "x" is undefined\n  x;\n  ^\n\n1 error detected\n', " at k.cu:7",
         'identifier "x" is undefined'),
        ("a/b/k.cu(1): warning #1-D: last line\n/a/k.cu(12): error #20: no\n", " at k.cu:12", "no"),
        ("k.cu(1): catastrophic error: #error directive: bad\n", " at k.cu:1", "#error directive: bad"),
        ('At end of source: error: expected a ";"\n', "", 'expected a ";"'),
        ("nvrtc: error: invalid value for --gpu-architecture (-arch)\n", "",
         "invalid value for --gpu-architecture (-arch)"),
        ("ptxas application ptx input, line 23; error   : Unknown modifier '.bar'\nptxas fatal   : aborted\n", "",
         "Unknown modifier '.bar'"),
        ("ptxas info    : 0 bytes gmem\nptxas fatal   : Unresolved extern function 'f'\n", "",
         "Unresolved extern function 'f'"),
        ("k.cu: In function 'int f()':\nk.cu:3:9: error: 'x' was not declared\n", " at k.cu:3", "'x' was not declared"),
        ("k.cu:1:10: fatal error: foo.h: No such file or directory\ncompilation terminated.\n", " at k.cu:1",
         "foo.h: No such file or directory"),
        ("k.cu: Assembler messages:\nk.cu:1: Error: no such instruction: `foo'\n", " at k.cu:1",
         "no such instruction: `foo'"),
        ("collect2: error: ld returned 1 exit status\n", "", "ld returned 1 exit status"),
        ("\n  Killed\n", "", "Killed"),
        ("", "", "it failed and did not say why"),
    ],
)
def test_first_error(log, place, line):
    assert compilers.first_error(log) == (place, line)


def test_compile_error_survives_pickling():
    """So does every error of the library: it may be another rank's."""
    error = compilers.CompileError.of("g++", "k.cu:3:9: error: no")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is compilers.CompileError
    assert isinstance(copy, BackendError)
    assert (str(copy), copy.log, copy.line) == ("[GC-COMPILE] g++ at k.cu:3: no", "k.cu:3:9: error: no", "no")


# ---------------------------------------------------------------- g++


def test_shared_object_can_be_loaded_and_called(tmp_path):
    (tmp_path / "f.so").write_bytes(gxx.compile_shared(EXTERN + "int f(int x) { return x + 1; }"))
    assert ctypes.CDLL(str(tmp_path / "f.so")).f(41) == 42


def test_same_source_makes_the_same_bits():
    source = EXTERN + "int f(int x) { return x + 1; }"
    assert gxx.compile_shared(source) == gxx.compile_shared(source)


ARITHMETIC = EXTERN + """float fused(float a, float b, float c) { return a * b + c; }
extern "C" int overflows(int a) { return a + 1 > a; }
extern "C" float punned(float* a, int* b) { *a = 1; *b = 0; return *a; }"""


def bits_are_kept(file):
    """No product is fused into a sum, integers wrap, and a float may be written as an integer."""
    library = ctypes.CDLL(str(file))
    library.fused.argtypes, library.fused.restype = [ctypes.c_float] * 3, ctypes.c_float
    library.punned.argtypes, library.punned.restype = [ctypes.c_void_p] * 2, ctypes.c_float
    word = ctypes.create_string_buffer(4)
    almost_one = 1 + 2.0**-23
    return (library.fused(almost_one, almost_one, -1 - 2.0**-22), library.overflows(2**31 - 1),
            library.punned(word, word)) == (0, 0, 0)


def test_bits_are_kept(tmp_path):
    (tmp_path / "f.so").write_bytes(gxx.compile_shared(ARITHMETIC))
    assert bits_are_kept(tmp_path / "f.so")


@pytest.mark.mutant
@pytest.mark.parametrize("dropped", ["-fwrapv", "-fno-strict-aliasing"])
def test_options_are_needed(tmp_path, monkeypatch, dropped):
    monkeypatch.setattr(gxx, "OPTIONS", tuple(option for option in gxx.OPTIONS if option != dropped))
    (tmp_path / "f.so").write_bytes(gxx.compile_shared(ARITHMETIC, "-O2"))
    assert not bits_are_kept(tmp_path / "f.so")


@pytest.mark.mutant
def test_contraction_is_what_the_option_forbids(tmp_path, monkeypatch):
    """It takes a processor with such an instruction, and an option that lets g++ use it."""
    if "fma" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no fused multiply-add, or Linux does not say so by that name")
    allowed = tuple(option for option in gxx.OPTIONS if option != "-ffp-contract=off")
    for options, kept in ((allowed, False), (gxx.OPTIONS, True)):
        monkeypatch.setattr(gxx, "OPTIONS", (*options, "-mfma"))
        (tmp_path / f"{kept}.so").write_bytes(gxx.compile_shared(ARITHMETIC, "-O2"))
        assert bits_are_kept(tmp_path / f"{kept}.so") == kept


def test_gxx_shows_the_line_of_a_wrong_source():
    with pytest.raises(compilers.CompileError, match=r"\[GC-COMPILE\] g\+\+ at kernels.cu:2: 'unknown' does not name"):
        gxx.compile_shared(WRONG)


def test_missing_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    for call in (gxx.recipe, lambda: gxx.compile_shared("")):
        with pytest.raises(BackendError, match=r"no-such-compiler cannot be run .*; install g\+\+, or name .* CXX"):
            call()


def test_compiler_and_options_are_in_the_recipe(monkeypatch):
    usual = gxx.recipe()
    monkeypatch.setenv("CXX", "g++ -DNDEBUG")
    assert gxx.recipe() != usual
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(gxx, "OPTIONS", (*gxx.OPTIONS, "-DNDEBUG"))
    assert gxx.recipe() != usual


# ---------------------------------------------------------------- NVRTC: where it is looked for


def spec_of(*folders):
    spec = importlib.machinery.ModuleSpec("nvidia", None, is_package=True)
    spec.submodule_search_locations = list(folders)
    return lambda name: spec


def test_places_in_their_order(monkeypatch):
    monkeypatch.setattr(nvrtc.importlib.util, "find_spec", spec_of("/site/nvidia", "/user/nvidia"))
    assert list(nvrtc._places((13, 12), {"CUDA_PATH": "/cuda"})) == [
        "/cuda/lib64/libnvrtc.so.13",
        "/cuda/lib64/libnvrtc.so.12",
        "/site/nvidia/cu13/lib/libnvrtc.so.13",
        "/site/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
        "/user/nvidia/cu13/lib/libnvrtc.so.13",
        "/user/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
        "libnvrtc.so.13",
        "libnvrtc.so.12",
    ]


def test_places_of_one_version(monkeypatch):
    monkeypatch.setattr(nvrtc.importlib.util, "find_spec", spec_of("/site/nvidia"))
    assert list(nvrtc._places((12,), {})) == ["/site/nvidia/cuda_nvrtc/lib/libnvrtc.so.12", "libnvrtc.so.12"]
    monkeypatch.setattr(nvrtc.importlib.util, "find_spec", lambda name: None)
    assert list(nvrtc._places((12,), {"CUDA_PATH": ""})) == ["libnvrtc.so.12"]


def test_missing_library_says_where_it_was_looked_for(fresh, tmp_path):
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libnvrtc.so.13").write_text("no library")
    fresh.setenv("CUDA_PATH", str(tmp_path))
    fresh.setattr(nvrtc.importlib.util, "find_spec", spec_of("/site/nvidia"))
    fresh.setattr(nvrtc, "_file", lambda major: f"libnvrtc.so.{major}" if major == 13 else "libnone.so")
    fresh.setattr(nvrtc.ctypes, "CDLL", refusing(nvrtc.ctypes.CDLL, "libnvrtc.so.13"))
    with pytest.raises(BackendError) as caught:
        nvrtc.compile_cubin("", "sm_90")
    message = str(caught.value)
    places = [f"{tmp_path}/lib64/libnvrtc.so.13: ", "/site/nvidia/cu13/lib/libnvrtc.so.13: ", "libnone.so: "]
    assert all(place in message for place in places), message
    assert "pip install 'gpucoll[cuda13]'" in message


def refusing(load, name):
    """Loads as ever, but for the system's library of that name, which this machine may have."""
    def loaded(path):
        if path == name:
            raise OSError(f"{name}: hidden")
        return load(path)
    return loaded


# ---------------------------------------------------------------- NVRTC: what it makes


def test_version_and_architectures(library):
    assert library >= (12, 0)
    known = nvrtc.archs()
    assert list(known) == sorted(set(known))
    assert {75, 80, 90} <= set(known)
    assert nvrtc.version(library[0]) == library


def test_cubin_and_the_report_of_ptxas(library):
    cubin, log = nvrtc.compile_cubin(EXTERN + "__global__ void kernel(float* x) { *x += 1; }", "sm_90")
    assert cubin.startswith(b"\x7fELF")
    assert b"kernel" in cubin
    assert "Compiling entry function 'kernel' for 'sm_90'" in log
    assert "\0" not in log


def test_same_source_makes_the_same_cubin(library):
    source = EXTERN + "__global__ void kernel(float* x) { *x += 1; }"
    assert nvrtc.compile_cubin(source, "sm_80")[0] == nvrtc.compile_cubin(source, "sm_80")[0]


def test_nvrtc_shows_the_line_of_a_wrong_source(library):
    with pytest.raises(compilers.CompileError) as caught:
        nvrtc.compile_cubin(WRONG, "sm_90")
    assert str(caught.value) == '[GC-COMPILE] NVRTC at kernels.cu:2: identifier "unknown" is undefined'
    assert caught.value.line == 'identifier "unknown" is undefined'
    assert "errors detected" in caught.value.log


def test_assemblers_errors_are_shown(library):
    with pytest.raises(compilers.CompileError, match="NVRTC: Not a name of any known instruction: 'foo'"):
        nvrtc.compile_cubin(EXTERN + '__global__ void kernel() { asm("foo;"); }', "sm_90")


@pytest.mark.parametrize("arch", ["sm_35", "sm_999", "90", "compute_90"])
def test_unknown_architecture(library, arch):
    with pytest.raises(BackendError, match=rf"NVRTC {library[0]}\.{library[1]} does not compile for {arch}, only for "):
        nvrtc.compile_cubin("", arch)


def test_version_options_and_architecture_are_in_the_recipe(library, monkeypatch):
    recipes = [nvrtc.recipe("sm_80"), nvrtc.recipe("sm_90")]
    monkeypatch.setattr(nvrtc, "OPTIONS", (*nvrtc.OPTIONS, "-DNDEBUG"))
    recipes.append(nvrtc.recipe("sm_90"))
    monkeypatch.setattr(nvrtc, "version", lambda major=None: (11, 8))
    recipes.append(nvrtc.recipe("sm_90"))
    assert len(set(recipes)) == 4


def test_neither_driver_nor_cupy_is_loaded(library):
    program = "import sys; from gpucoll.device import nvrtc; nvrtc.compile_cubin('', 'sm_90'); " \
              "print('cupy' in sys.modules, 'libcuda.so' in open('/proc/self/maps').read())"
    job = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True,
                         env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert job.stdout == "False False\n"
