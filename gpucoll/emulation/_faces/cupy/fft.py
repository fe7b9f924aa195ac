"""`cupy.fft` by NumPy's functions of the same names."""

from types import SimpleNamespace

import numpy.fft

from . import _generic

_cache = SimpleNamespace(clear=lambda: None, set_size=lambda size: None, set_memsize=lambda size: None,
                         get_size=lambda: 16, get_memsize=lambda: -1, get_curr_size=lambda: 0, show_info=lambda: None)
config = SimpleNamespace(enable_nd_planning=True, use_multi_gpus=False, get_plan_cache=lambda: _cache, **dict.fromkeys(
    "set_cufft_gpus set_plan_cache_size clear_plan_cache show_plan_cache_info".split(), lambda *_, **__: None))


def __getattr__(name):
    return _generic.found_in(numpy.fft, name, "cupy.fft")
