"""The reference: constructors of classes that a program does not call are left out; names of other projects are links.

The inventories of other projects are fetched. Without a network the site is built all the same, with the names below.
"""

import importlib.util
import zlib
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.config import Config

NOT_CALLED = "A program does not call the class."
OPTIONAL = ("torch", "torchft", "ray", "distributed")  # packages of the doors, imitated where they are not installed
PROJECTS = {
    "python": ("https://docs.python.org/3/", {
        "library/functions.html": "int str float bool", "library/stdtypes.html": "list tuple dict"}),
    "numpy": ("https://numpy.org/doc/stable/", {
        "reference/generated/numpy.ndarray.html": "numpy.ndarray", "reference/arrays.dtypes.html": "numpy.dtype",
        "reference/generated/numpy.argmax.html": "numpy.argmax"}),
    "cupy": ("https://docs.cupy.dev/en/stable/", {
        "reference/generated/cupy.ndarray.html": "cupy.ndarray",
        "reference/generated/cupy.cuda.Stream.html": "cupy.cuda.Stream"}),
    "mpi4py": ("https://mpi4py.readthedocs.io/en/stable/", {
        f"reference/mpi4py.MPI.{name}.html": f"mpi4py.MPI.{name}"
        for name in ("Comm", "Intracomm", "Op", "Request", "Status", "Info")}),
    "torch": ("https://docs.pytorch.org/docs/stable/", {
        "tensors.html": "torch.Tensor", "distributed.html": "torch.distributed.Store"}),
}


def setup(app: Sphinx) -> dict[str, bool]:
    """Let Sphinx load this as an extension."""
    app.connect("config-inited", _link, priority=100)  # before intersphinx reads its setting
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-process-docstring", _docstring, priority=100)  # before numpydoc
    app.connect("html-collect-pages", _forget, priority=100)  # before viewcode
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _forget(app: Sphinx) -> list[Any]:
    """Forget the modules without a source in Python: viewcode would list them, but makes no page of them."""
    found = getattr(app.env, "_viewcode_modules", {})
    for name in [name for name, entry in found.items() if not entry]:
        del found[name]
    return []


def _link(app: Sphinx, config: Config) -> None:
    """Name the inventory of each project, and after it a small one on this machine."""
    folder = Path(app.doctreedir, "inventories")
    folder.mkdir(parents=True, exist_ok=True)
    for project, (address, pages) in PROJECTS.items():
        file = folder / f"{project}.inv"
        rows = "".join(f"{name} py:class 1 {page}#{name} -\n"
                       for page, names in pages.items() for name in names.split())
        head = (f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n"
                "# The remainder of this file is compressed using zlib.\n")
        file.write_bytes(head.encode() + zlib.compress(rows.encode()))
        config.intersphinx_mapping[project] = (address, (None, str(file)))


def _signature(app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str,
               returned: str) -> tuple[str, str] | None:
    return ("", "") if what == "class" and NOT_CALLED in " ".join((obj.__doc__ or "").split()) else None


def _docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Drop the parameters of a constructor that is left out."""
    if what == "class" and NOT_CALLED in " ".join(lines) and "Parameters" in lines:
        begin = lines.index("Parameters")
        ends = (at for at in range(begin + 2, len(lines) - 1) if lines[at + 1] and not lines[at + 1].strip("-"))
        del lines[begin:next(ends, len(lines))]


def absent() -> list[str]:
    """Return the packages to imitate."""
    return [name for name in OPTIONAL if importlib.util.find_spec(name) is None]
