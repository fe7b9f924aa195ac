"""Mutants of the kernels: each plants one fault in their sources, and is run in a process of its own: some die of it.

`python mutants.py NAME` ends with 0 where the check passes; without a name all checks run on the real sources.
"""

import functools
import sys
from typing import NamedTuple

import checks
import test_fibers
from emulation import kernels

from gpucoll.device import sources
from gpucoll.dtypes import DTYPES
from gpucoll.ops import OPS, elementwise_op

WIDTHS = (1, 2, 4, 8, 16)


class Mutant(NamedTuple):
    """What becomes of which text, and the check that must notice."""

    old: str
    new: str
    check: object


@functools.cache
def reduction(op, name):
    def check(change):
        checks.check_reduce(kernels(sources.reduce(OPS[op], DTYPES[name]), change=change), OPS[op], name)

    return check


def misaligned(name):
    def check(change):
        checks.check_misaligned(kernels(sources.reduce(OPS["sum"], DTYPES[name]), change=change), name)

    return check


def expression(text, name, function):
    def check(change):
        op = elementwise_op(text)
        checks.check_expression(kernels(sources.reduce(op, DTYPES[name]), change=change), op, name, function)

    return check


@functools.cache
def conversions(name):
    def check(change):
        both = sources.cast(DTYPES[name], DTYPES["float32"]), sources.cast(DTYPES["float32"], DTYPES[name])
        checks.check_conversions(kernels(*both, change=change), name)

    return check


@functools.cache
def casting(name, target):
    def check(change):
        checks.check_cast(kernels(sources.cast(DTYPES[name], DTYPES[target]), change=change), name, target, (20_000,))

    return check


def scaling(what, name):
    def check(change):
        checks.check_scale(kernels(sources.scale(what, DTYPES[name]), change=change), what, name)

    return check


@functools.cache
def moving(make, check):
    return lambda change: check(kernels(*map(make, WIDTHS), *map(sources.copy, WIDTHS), change=change))


def fibers(change):
    test_fibers.check_rotation(change=change)


MUTANTS = {
    "a word too many": Mutant(
        "words = (count - head) / PER_WORD",
        "words = (count - head + 1) / PER_WORD",
        reduction("sum", "float32")),
    "the last edge is forgotten": Mutant(
        "return {head, words, count - words * PER_WORD}",
        "return {head, words, count - words * PER_WORD - (count > words * PER_WORD)}",
        reduction("sum", "float32")),
    "the head is taken for the tail": Mutant(
        "(i < head ? i : i + skipped)",
        "(i + skipped)",
        reduction("sum", "int16")),
    "the head is forgotten": Mutant(
        "{layout.head * sizeof(T), sizeof(Word)}",
        "{0, sizeof(Word)}",
        reduction("bxor", "int32")),
    "a source is skipped": Mutant("for (u32 k = 2;", "for (u32 k = 3;", reduction("sum", "float64")),
    "a source is taken twice": Mutant("for (u32 k = 2;", "for (u32 k = 1;", reduction("sum", "float64")),
    "the second source is the first": Mutant(
        "batch.read(second, a.sources[1], place)",
        "batch.read(second, a.sources[0], place)",
        reduction("bxor", "uint8")),
    "rounded at every step": Mutant(
        "total[i][j] = Op::of(total[i][j], wide[j]);",
        "{ T stored; down(stored, Op::of(total[i][j], wide[j])); total[i][j] = up(stored); }",
        reduction("sum", "float16")),
    "a number wins over NaN": Mutant(
        "b > a || b != b ? b : a",
        "b > a ? b : a",
        reduction("max", "float32")),
    "words where addresses differ": Mutant("differences % sizeof(Word) != 0 || ", "", misaligned("float32")),
    "a stride too far": Mutant(
        "first < tiled; first += gridDim.x * tile)",
        "first < tiled; first += 2 * gridDim.x * tile)",
        reduction("sum", "float32")),
    "a block's share twice": Mutant(
        "first < tiled; first += gridDim.x * tile)",
        "first < tiled; first += tile)",
        reduction("sum", "float32")),
    "the rest of the tiles is forgotten": Mutant(
        "first < count; first += gridDim.x * threads)",
        "first < count && !tiled; first += gridDim.x * threads)",
        reduction("sum", "int8")),
    "bfloat16 is cut off": Mutant(
        "((127 - Small::BIAS) << 23) + half)",
        "((127 - Small::BIAS) << 23))",
        conversions("bfloat16")),
    "ties away from even": Mutant("- 1 + (magnitude >> Small::SHIFT & 1)", "", conversions("float16")),
    "float8 saturates": Mutant(
        "code : Small::TOO_LARGE;",
        "code : Small::TOO_LARGE - 1;",
        conversions("float8_e4m3fn")),
    "float8_e5m2 saturates": Mutant(
        "code : Small::TOO_LARGE;",
        "code : Small::TOO_LARGE - 1;",
        conversions("float8_e5m2")),
    "subnormal numbers are flushed": Mutant(
        "return bits_of(float_of(magnitude) + float_of(Small::STEP)) - Small::STEP;",
        "return 0;",
        conversions("float16")),
    "NaN becomes infinity": Mutant("NOT_A_NUMBER = SIGN - 1", "NOT_A_NUMBER = TOO_LARGE", conversions("float16")),
    "infinity is a number": Mutant(
        "if (magnitude >= Small::TOO_LARGE) bits |= 0x7F800000;",
        "",
        conversions("float8_e5m2")),
    "the sign of a product": Mutant(
        "a.re * b.re - a.im * b.im",
        "a.re * b.re + a.im * b.im",
        reduction("prod", "complex64")),
    "a gap is written": Mutant(
        "batch.write(a.dst, units, to);",
        "batch.write(a.dst, units, to); batch.write((u8*)a.dst + sizeof(Unit), units, to);",
        moving(sources.unpack, checks.check_unpack)),
    "the strides are confused": Mutant("* a.strides[axis]", "* a.strides[0]", moving(sources.pack, checks.check_pack)),
    "an offset of 32 bits": Mutant("i64 offset = 0;", "i32 offset = 0;", moving(sources.pack, checks.check_far_inside)),
    "a factor of 32 bits": Mutant(
        "i64(rest) * a.strides[0]",
        "i64(rest * u32(a.strides[0]))",
        moving(sources.pack, checks.check_far)),
    "rounded twice": Mutant("return odd_float(x);", "return float(x);", casting("float64", "float16")),
    "not brought to odd": Mutant("if (absolute(nearest) > absolute(x)) --bits;", "", casting("float64", "float16")),
    "widened where it wraps": Mutant(
        "typedef Wide<i8> W;",
        "typedef i32 W;",
        expression("max(a + b, b)", "int8", checks.wrapping)),
    "the factor is rounded": Mutant(
        "wide[j] = What::of(wide[j], factor);",
        "{ T stored; down(stored, factor / 7); wide[j] = What::of(wide[j], up(stored) * 7); }",
        scaling("divide", "float8_e4m3fn")),
    "NaN is false": Mutant("return W(x != W(0));", "return W(x < W(0) || x > W(0));", scaling("truth", "float32")),
    "the first barrier is dropped": Mutant("__syncthreads();\n    others", "others", fibers),
    "the second barrier is dropped": Mutant("% size];\n    __syncthreads();", "% size];", fibers),
}


def change(mutant, source):
    if source.count(mutant.old) != 1:
        raise LookupError(f"{mutant.old!r} is in the source {source.count(mutant.old)} times")
    return source.replace(mutant.old, mutant.new)


def main(names):
    for name in names:
        MUTANTS[name].check(functools.partial(change, MUTANTS[name]))
    for check in {mutant.check for mutant in MUTANTS.values() if not names}:
        check(lambda source: source)


if __name__ == "__main__":
    main(sys.argv[1:])
