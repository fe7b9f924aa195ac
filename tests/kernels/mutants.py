"""Mutants of the kernels: each plants one fault in their sources, and the tests of the default tier must fail of it."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """In which file what becomes of a text that is there once."""

    file: str
    old: str
    new: str


MUTANTS = {
    "a word too many": Mutant(
        "kernels/walk.h", "words = (count - head) / PER_WORD", "words = (count - head + 1) / PER_WORD"),
    "the last edge is forgotten": Mutant(
        "kernels/walk.h", "return {head, words, count - words * PER_WORD}",
        "return {head, words, count - words * PER_WORD - (count > words * PER_WORD)}"),
    "the head is taken for the tail": Mutant("kernels/walk.h", "(i < head ? i : i + skipped)", "(i + skipped)"),
    "the head is forgotten": Mutant("kernels/walk.h", "{layout.head * sizeof(T), sizeof(Word)}", "{0, sizeof(Word)}"),
    "a source is skipped": Mutant("kernels/reduce.cu", "for (u32 k = 2;", "for (u32 k = 3;"),
    "a source is taken twice": Mutant("kernels/reduce.cu", "for (u32 k = 2;", "for (u32 k = 1;"),
    "the second source is the first": Mutant(
        "kernels/reduce.cu", "batch.read(second, a.sources[1], place)", "batch.read(second, a.sources[0], place)"),
    "rounded at every step": Mutant(
        "kernels/reduce.cu", "total[i][j] = Op::of(total[i][j], wide[j]);",
        "{ T stored; down(stored, Op::of(total[i][j], wide[j])); total[i][j] = up(stored); }"),
    "a number wins over NaN": Mutant("kernels/functions.h", "b > a || b != b ? b : a", "b > a ? b : a"),
    "words where addresses differ": Mutant("kernels/walk.h", "differences % sizeof(Word) != 0 || ", ""),
    "a stride too far": Mutant(
        "kernels/walk.h", "first < tiled; first += gridDim.x * tile)", "first < tiled; first += 2 * gridDim.x * tile)"),
    "a block's share twice": Mutant(
        "kernels/walk.h", "first < tiled; first += gridDim.x * tile)", "first < tiled; first += tile)"),
    "the rest of the tiles is forgotten": Mutant(
        "kernels/walk.h", "first < count; first += gridDim.x * threads)",
        "first < count && !tiled; first += gridDim.x * threads)"),
    "bfloat16 is cut off": Mutant(
        "kernels/number.h", "((127 - Small::BIAS) << 23) + half)", "((127 - Small::BIAS) << 23))"),
    "ties away from even": Mutant("kernels/number.h", "- 1 + (magnitude >> Small::SHIFT & 1)", ""),
    "float8 saturates": Mutant("kernels/number.h", "code : Small::TOO_LARGE;", "code : Small::TOO_LARGE - 1;"),
    "subnormal numbers are flushed": Mutant(
        "kernels/number.h", "return bits_of(float_of(magnitude) + float_of(Small::STEP)) - Small::STEP;", "return 0;"),
    "NaN becomes infinity": Mutant("kernels/number.h", "NOT_A_NUMBER = SIGN - 1", "NOT_A_NUMBER = TOO_LARGE"),
    "infinity is a number": Mutant("kernels/number.h", "if (magnitude >= Small::TOO_LARGE) bits |= 0x7F800000;", ""),
    "the sign of a product": Mutant("kernels/functions.h", "a.re * b.re - a.im * b.im", "a.re * b.re + a.im * b.im"),
    "a gap is written": Mutant(
        "kernels/pack.cu", "batch.write(a.dst, units, to);",
        "batch.write(a.dst, units, to); batch.write((u8*)a.dst + sizeof(Unit), units, to);"),
    "the strides are confused": Mutant("kernels/pack.cu", "* a.strides[axis]", "* a.strides[0]"),
    "an offset of 32 bits": Mutant("kernels/pack.cu", "i64 offset = 0;", "i32 offset = 0;"),
    "a factor of 32 bits": Mutant("kernels/pack.cu", "i64(rest) * a.strides[0]", "i64(rest * u32(a.strides[0]))"),
    "rounded twice": Mutant("kernels/cast.cu", "return odd_float(x);", "return float(x);"),
    "not brought to odd": Mutant("kernels/cast.cu", "if (absolute(nearest) > absolute(x)) --bits;", ""),
    "widened where it wraps": Mutant(
        "gpucoll/device/sources.py", "typedef Wide<{cuda}> W;", "typedef Wide<{cuda.replace('i8', 'i32')}> W;"),
    "the factor is rounded": Mutant(
        "kernels/scale.cu", "wide[j] = What::of(wide[j], factor);",
        "{ T stored; down(stored, factor); wide[j] = What::of(wide[j], up(stored)); }"),
    "NaN is false": Mutant("kernels/scale.cu", "return W(x != W(0));", "return W(x < W(0) || x > W(0));"),
    "the first barrier is dropped": Mutant("tests/kernels/test_fibers.py", "__syncthreads();\n    others", "others"),
    "the second barrier is dropped": Mutant(
        "tests/kernels/test_fibers.py", "% size];\n    __syncthreads();", "% size];"),
}
