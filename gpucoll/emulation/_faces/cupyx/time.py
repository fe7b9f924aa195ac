"""`cupyx.time`, the old name of `cupyx.profiler.benchmark`."""

from .profiler import benchmark as repeat

