"""Faults in the contract of bits, planted as those of `planted.py`."""

PLANTED_BITS = [
    ("product", "bits: a rank adds its own contribution first", "gpucoll/executors/engine/instructions.py",
     "sources = tuple(self._part(span, is_read=True) for span in form.sources)",
     "sources = tuple(sorted((self._part(span, is_read=True) for span in form.sources), "
     "key=lambda part: part[0] != self._rank))"),
    ("product", "bits: a scan in steps rounds once", "gpucoll/algorithms/__init__.py",
     "at_once=in_rank_order == \"1\"", "at_once=in_rank_order != \"0\""),
    ("product", "bits: the user's algorithms are taken for ordered", "gpucoll/tuner/choice.py",
     "return self._check_order(collective, allowed(self._prefer, collective, ordered), order)",
     "return [*allowed(self._prefer, collective, ordered)]"),
    ("product", "bits: a complex number is divided part by part", "kernels/device/scale.cu",
     "    template <class W> static GC_DEV W of(W x, W factor) { return divide(x, factor); }",
     "    template <class W> static GC_DEV W of(W x, W factor) { return divide(x, factor); }\n"
     "    template <class R> static GC_DEV Complex<R> of(Complex<R> x, Complex<R> factor) {\n"
     "        return {x.re / factor.re, x.im / factor.re};\n    }"),
    ("product", "exact: a narrow result is rounded twice", "kernels/device/exact.h",
     "static GC_DEV float of(double value) { return odd_float(value); }",
     "static GC_DEV float of(double value) { return float(value); }"),
    ("product", "exact: bits lost by a running sum are forgotten", "kernels/device/exact.h",
     "bool certain = total.lost == 0;", "bool certain = true;"),
    ("product", "exact: a rank without the engine rounds twice", "gpucoll/arrays/exact.py",
     "if is_last or Fraction(value) == exact or", "if True or"),
    ("product", "formats: the bound of a share is taken for all", "gpucoll/block_scaled/__init__.py",
     'return self._comm.all_reduce(bound, out=bound, op="max")', "return bound"),
    ("product", "formats: large numbers of a host travel before they cancel out", "gpucoll/block_scaled/__init__.py",
     "if len(hosts) > 1 and min(hosts) == max(hosts) > 1:", "if False:"),
    ("product", "formats: a bound without the last elements", "gpucoll/core/formats.py",
     '"e8m0", 4, 3, 448, 64)', '"e8m0", 4, 3, 448, 16)'),
    ("product", "formats: ranks with other formats agree", "gpucoll/block_scaled/__init__.py",
     ', "format": "GC-COMPRESSION"}', "}"),
    ("product", "formats: NaN has a bound", "gpucoll/block_scaled/__init__.py",
     "xp.where(most == most, most, numpy.inf)", "xp.where(most == most, most, 0)"),
    ("product", "formats: a strided result is left where it was formed", "gpucoll/block_scaled/__init__.py",
     "                target[...] = place\n", "                pass\n"),
]
