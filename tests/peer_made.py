"""Kernels of the peer executor on the emulated device, made before ranks ask for them: at once, on every core."""

import functools

import oracle
from compiled import make_families
from gpucoll.device import sources
from gpucoll.dtypes import DTYPES
from gpucoll.ops import OPS

# Dtypes that are computed alike; every op is tried on one of each, on which one all of them take turns.
ALIKE = ("bool", "int8 int16 int32 int64", "uint8 uint16 uint32 uint64", "float16 float32 float64",
         "bfloat16 float8_e4m3fn float8_e5m2", "complex64 complex128")
TURNS = [(op, names.split()[turn % len(names.split())]) for turn, op in enumerate(oracle.OPS) for names in ALIKE]
PAIRS = [pair for pair in TURNS if oracle.legal(*pair)]

MAKERS = (sources.steps, sources.packets, functools.partial(sources.shots, "one_shot"),
          functools.partial(sources.shots, "two_shot"))


def make(pairs):
    """All kernels of these ops and dtypes, and those that only move elements; they stay in the user's cache."""
    made = [maker(OPS[op], DTYPES[name]) for op, name in pairs for maker in MAKERS]
    make_families([*made, sources.steps(None, DTYPES["int8"])])
