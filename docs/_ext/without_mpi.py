"""Lets the site be built where mpi4py finds no MPI: what it says of `gpucoll.mpi` needs the names of mpi4py only."""

import sys
import types


class Known(type):
    """A class of which every attribute is such a class."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return Known(name, (), {})


class Names(types.ModuleType):
    """A module of which every name is a class."""

    def __getattr__(self, name: str) -> type:
        return Known.__getattr__(Known, name)


def setup(app: object) -> dict[str, bool]:
    """Let Sphinx load this as an extension."""
    put_substitutes()
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def put_substitutes() -> None:
    """Put names in the place of `mpi4py.MPI` where it cannot be imported."""
    try:
        import mpi4py.MPI  # noqa: F401
    except (ImportError, RuntimeError):  # the latter where mpi4py finds no library of MPI's
        sys.modules["mpi4py.MPI"] = Names("mpi4py.MPI")
