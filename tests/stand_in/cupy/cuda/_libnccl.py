"""A library that answers to the name libnccl.so.2, for what is called by ctypes: it calls back into the stand-in."""

import ctypes
import functools
import shutil
import sys

from gpucoll.device.gxx import compile_shared, recipe
from gpucoll.device.store import user_store

SOURCE = """
#pragma GCC diagnostic ignored "-Wunused"
typedef int (*Collective)(const char*, const void*, void*, unsigned long, int, int, long, long);
typedef const char* (*Words)();
extern "C" {
    Collective stand_in_collective;
    Words stand_in_words;
    int ncclAlltoAll(const void* s, void* r, unsigned long n, int t, long c, long q) {
        return stand_in_collective("ncclAlltoAll", s, r, n, t, 0, c, q); }
    int ncclGather(const void* s, void* r, unsigned long n, int t, int root, long c, long q) {
        return stand_in_collective("ncclGather", s, r, n, t, root, c, q); }
    int ncclScatter(const void* s, void* r, unsigned long n, int t, int root, long c, long q) {
        return stand_in_collective("ncclScatter", s, r, n, t, root, c, q); }
    const char* ncclGetLastError(long) { return stand_in_words(); }
}
"""
NAME = "-Wl,-soname,libnccl.so.2"  # dlopen finds what is loaded by this name
COLLECTIVE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t,
                              ctypes.c_int, ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t)
WORDS = ctypes.CFUNCTYPE(ctypes.c_void_p)
_kept = []


def nccl():
    return sys.modules[f"{__package__}.nccl"]


@COLLECTIVE
def collective(name, source, target, count, datatype, root, comm, stream):
    try:
        found = nccl()._communicators.get(comm)
        if found is None:
            nccl()._refuse(4, f"{comm:#x} is no communicator")
        found._foreign(name.decode(), source or 0, target or 0, count, datatype, root, stream or 0)
    except nccl().NcclError as error:
        return error.status
    return 0


@WORDS
def words():
    _kept[1:] = [ctypes.create_string_buffer(nccl()._last_error.encode())]
    return ctypes.addressof(_kept[1])


def load():
    """From here on ``CDLL("libnccl.so.2")`` is this library."""
    if shutil.which("g++") is None:
        return
    from gpucoll.device import gxx

    before = gxx.OPTIONS
    gxx.OPTIONS = (*before, NAME)
    try:
        path = user_store().path(SOURCE, ".so", functools.partial(compile_shared, SOURCE), flags=recipe())
    finally:
        gxx.OPTIONS = before
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    for name, function in (("stand_in_collective", collective), ("stand_in_words", words)):
        ctypes.c_void_p.in_dll(library, name).value = ctypes.cast(function, ctypes.c_void_p).value
    _kept[:1] = [library]
