"""Mutants of the kernels: changes of texts of kernels/; the default tier's tests must fail for each mutant."""

from typing import NamedTuple


class Mutant(NamedTuple):
    old: str
    new: str


MUTANTS = {
    "a word too many": Mutant("words = (count - head) / PER_WORD", "words = (count - head + 1) / PER_WORD"),
    "the last edge is forgotten": Mutant(
        "return {head, words, count - words * PER_WORD}",
        "return {head, words, count - words * PER_WORD - (count > words * PER_WORD)}"),
    "the head is taken for the tail": Mutant("(i < head ? i : i + skipped)", "(i + skipped)"),
    "the head is forgotten": Mutant("{layout.head * sizeof(T), sizeof(Word)}", "{0, sizeof(Word)}"),
    "a source is skipped": Mutant("for (u32 k = 2; k < a.source_count;", "for (u32 k = 3; k < a.source_count;"),
    "a source is taken twice": Mutant("for (u32 k = 2; k < a.source_count;", "for (u32 k = 1; k < a.source_count;"),
    "the second source is the first": Mutant(
        "batch.read(second, a.sources[1], place)", "batch.read(second, a.sources[0], place)"),
    "rounded at every step": Mutant(
        "total[i][j] = Op::of(total[i][j], wide[j]);",
        "{ T stored; down(stored, Op::of(total[i][j], wide[j])); total[i][j] = up(stored); }"),
    "a number wins over NaN": Mutant("b > a || b != b ? b : a", "b > a ? b : a"),
    "words where addresses differ": Mutant("differences % sizeof(Word) != 0 || ", ""),
    "a stride too far": Mutant(
        "first < tiled; first += gridDim.x * tile)", "first < tiled; first += 2 * gridDim.x * tile)"),
    "a block's share twice": Mutant("first < tiled; first += gridDim.x * tile)", "first < tiled; first += tile)"),
    "the rest of the tiles is forgotten": Mutant(
        "first < count; first += gridDim.x * threads)", "first < count && !tiled; first += gridDim.x * threads)"),
    "bfloat16 is cut off": Mutant("((127 - Small::BIAS) << 23) + half)", "((127 - Small::BIAS) << 23))"),
    "ties away from even": Mutant("- 1 + (magnitude >> Small::SHIFT & 1)", ""),
    "float8 saturates": Mutant("code, Small::TOO_LARGE);", "code, Small::TOO_LARGE - 1);"),
    "subnormal numbers are flushed": Mutant(
        "small = bits_of(float_of(magnitude) + float_of(Small::STEP)) - Small::STEP;", "small = 0;"),
    "NaN becomes infinity": Mutant("NOT_A_NUMBER = SIGN - 1", "NOT_A_NUMBER = TOO_LARGE"),
    "infinity is a number": Mutant("bits |= either(i32(magnitude) >= i32(Small::TOO_LARGE), 0x7F800000, 0);", ""),
    "the sign of a product": Mutant("a.re * b.re - a.im * b.im", "a.re * b.re + a.im * b.im"),
    "a gap is written": Mutant(
        "batch.write(a.dst, units, to);",
        "batch.write(a.dst, units, to); batch.write((u8*)a.dst + sizeof(Unit), units, to);"),
    "the strides are confused": Mutant("* a.strides[axis]", "* a.strides[0]"),
    "an offset of 32 bits": Mutant("i64 offset = 0;", "i32 offset = 0;"),
    "a factor of 32 bits": Mutant("i64(rest) * a.strides[0]", "i64(rest * u32(a.strides[0]))"),
    "rounded twice": Mutant("of(double x) { return odd_float(x); }", "of(double x) { return float(x); }"),
    "not brought to odd": Mutant("if (absolute(nearest) > absolute(x)) --bits;", ""),
    "the factor is rounded": Mutant(
        "wide[j] = What::of(wide[j], factor);",
        "{ T stored; down(stored, factor); wide[j] = What::of(wide[j], up(stored)); }"),
    "NaN is false": Mutant("return W(x != W(0));", "return W(x < W(0) || x > W(0));"),
    "what was lost is lost for good": Mutant("down(stored, x + before);", "down(stored, x);"),
    "an infinity is lost for ever": Mutant("return x - x == W(0) ? x : W(0);", "return x;"),
    "a thread looks at its first part alone": Mutant(
        "absolute(sum[i]));\n        }\n        return largest_of_threads",
        "absolute(sum[i]));\n            break;\n        }\n        return largest_of_threads"),
    "int8 has an infinite scale": Mutant("scale - scale == 0 ? scale : float_of(0x7FC00000)", "scale"),
    "a row's scales after its elements": Mutant("to + a.scales + place", "to + a.share + place"),
    "the last term is left out": Mutant("term < a.terms; ++term, row += a.stride) {\n        Items",
                                        "term + 1 < a.terms || term == 0; ++term, row += a.stride) {\n        Items"),
    "beyond the end is read": Mutant("if (first + i < a.count)", "if (true)"),
    "the moment's exponent is off by one": Mutant("Mean16;", "Mean15; typedef SmallFloat<u16, 6, 9, true, 47> Mean16;"),
    "alone, a block is measured without what was lost": Mutant(
        "order_of(before ? sum_of<S>(up(src[i]), up(before[i])) : up(src[i]))", "order_of(up(src[i]))"),
    "the scale of the first block": Mutant("a.scales + place / a.block * sizeof(typename F::Scale)", "a.scales"),
    "a thread has a scale of its own": Mutant("for (u32 k = 1; k < GROUP; ++k) found", "if (false) found"),
    "a power of two too large": Mutant("exponent_of(most) - TOP;", "exponent_of(most) - TOP + 1;"),
    "the smallest scale is zero": Mutant("scale == 0 ? 0x00400000 : u32(scale) << 23", "u32(scale) << 23"),
    "an infinity has a scale": Mutant("!is_finite || exponent > 254 ? 255", "exponent > 254 ? 254"),
    "an element is rounded twice": Mutant("to_float(double x) { return odd_float(x); }",
                                          "to_float(double x) { return float(x); }"),
    "no end of the elements": Mutant("x > most ? most : x > -most ? x : -most", "x > -most ? x : -most"),
    "1.5 is 1": Mutant("0xC8643210", "0xC8642210"),
    "a second element takes the place of the first": Mutant("code << i % F::PER_BYTE * 4", "code"),
    "a row's scale is not stored": Mutant("if (a.maxima != nullptr && place == 0)", "if (false)"),
    "alone, a row's scale is not stored": Mutant("if (a.maxima != nullptr) *(float*)", "if (false) *(float*)"),
    "the largest of the first part": Mutant("part = number % a.parts, start", "part = 0, start"),
    "a block's scale without the row's": Mutant("most / W(6) / W(row);", "most / W(6);"),
}
