"""`cupyx.cusparse`: sorted indices, by SciPy's matrices; all else is refused by name."""

from gpucoll.errors import UsageError


def csrsort(x):
    x.sort_indices()


cscsort = csrsort


def __getattr__(name):
    raise (AttributeError(name) if name.startswith("__") else
           UsageError(f"cupyx.cusparse.{name} has no counterpart on the host", code="GC-EMULATION"))
