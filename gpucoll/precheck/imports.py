"""The imports of virtual ranks: each rank imports the program's modules for itself, and all share the libraries."""

from __future__ import annotations

import contextlib
import importlib.machinery
from collections.abc import Callable, Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def followed(after: Mapping[str, Callable[[], object]]) -> Iterator[None]:
    """Compile, or read, a module once for all ranks; call ``after[name]()`` after the import of the module `name`."""
    loader: Any = importlib.machinery.SourceFileLoader
    known: dict[tuple[str, str], Any] = {}

    def get_code(self: Any, fullname: str) -> Any:
        key = self.path, fullname
        if key not in known:
            known[key] = super(loader, self).get_code(fullname)
        return known[key]

    def exec_module(self: Any, module: Any) -> None:
        super(loader, self).exec_module(module)
        after.get(module.__name__, lambda: None)()

    loader.get_code, loader.exec_module = get_code, exec_module
    try:
        yield
    finally:
        del loader.get_code, loader.exec_module
