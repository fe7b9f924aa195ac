"""`cupyx.cusparse`: sorted indices, by SciPy's matrices; all else is refused by name."""

from cupy._source import no_counterpart


def csrsort(x):
    x.sort_indices()


cscsort = csrsort


def __getattr__(name):
    raise AttributeError(name) if name.startswith("__") else no_counterpart(f"cupyx.cusparse.{name}")
