"""Algorithms from files: Python files registering algorithms, and MSCCL's XML."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import types
from collections.abc import Iterable
from pathlib import Path

from gpucoll import msccl
from gpucoll.algorithms import names_of, registry
from gpucoll.core import parsing
from gpucoll.errors import ArgumentError, nearest

MOST_FILE_BYTES = 1 << 26  # limit of a file's size
FILE = re.compile(r"(?P<file>.+\.py):(?P<name>[^:/\\]*)|(?P<xml>.+\.xml)", re.IGNORECASE | re.DOTALL)


def is_file(text: str) -> bool:
    """Return whether `text` names a file with an algorithm instead of an algorithm.

    >>> is_file("mine.py:star"), is_file("a/b.xml"), is_file("ring")
    (True, True, False)
    """
    return FILE.fullmatch(text) is not None


def load(path: str) -> str:
    """Register the algorithm in a file and return the name, usable like any other algorithm's name.

    A file with MSCCL's XML is proved at once.

    Parameters
    ----------
    path : str
        ``"file.py:name"``: the file is run, and registers the algorithm by `algorithm`. ``"algorithm.xml"``: a file
        written by MSCCL's tools.

    Returns
    -------
    str
        The name of the algorithm.

    Raises
    ------
    ArgumentError
        The file cannot be read or run, or registers no algorithm of this name (GC-FILE); wrong XML (GC-XML); a wrong
        algorithm (GC-PROOF).

    See Also
    --------
    algorithm : The decorator.

    Examples
    --------
    >>> import gpucoll as gc
    >>> gc.load("missing.xml")
    Traceback (most recent call last):
    gpucoll.errors.ArgumentError: [GC-FILE] cannot read 'missing.xml': No such file or directory
    """
    return loaded(path)[0][1]


def loaded(path: str | os.PathLike[str]) -> list[tuple[str, str]]:
    """Return collective and name of each algorithm given by `path` (see `load`): one name may have several."""
    match = FILE.fullmatch(os.fspath(path)) if isinstance(path, str | os.PathLike) else None
    if match is None:
        raise ArgumentError(f"{path!r} is neither file.py:name nor algorithm.xml", code="GC-FILE")
    if match["xml"]:
        return [msccl.register(_content(match["xml"]), match["xml"])]
    name, there = match["name"], registered(match["file"], _content(match["file"]))
    chosen = [key for key in there if key[1] == name]
    if not chosen:
        names = sorted({name for _, name in there})
        raise ArgumentError(f"{match['file']} registers no algorithm {name!r}, but "
                            f"{', '.join(names) or 'none'}{nearest(name, names)}", code="GC-FILE")
    return chosen


def registered(file: str, content: bytes) -> list[tuple[str, str]]:
    """Run the `content` of a Python file; return collective and name of each algorithm registered by the file."""
    _run(Path(file), content)
    return sorted(key for key, entry in registry().items()
                  if entry.own and getattr(entry.make, "__module__", "") == _module(file, content))


def named(text: str, *collectives: str) -> str:
    """Return the comma-separated list `text` with each file replaced by its algorithm's name.

    Raises ArgumentError if a file's algorithm is for none of `collectives`.
    """
    return ",".join(_named(one, collectives) if is_file(one) else one for one in names_of(text))


def _named(path: str, collectives: Iterable[str]) -> str:
    there = loaded(path)
    if not {kind for kind, _ in there} & {*collectives}:
        raise ArgumentError(f"{path} is for {there[0][0]}, not for {' or '.join(collectives)}", code="GC-FILE")
    return there[0][1]


def _content(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ArgumentError(f"cannot read {path!r}: {why}", code="GC-FILE") from None
    if len(content) > MOST_FILE_BYTES:
        raise ArgumentError(f"{path}: more than {MOST_FILE_BYTES >> 20} MiB cannot be an algorithm", code="GC-FILE")
    return content


def _module(path: str, content: bytes) -> str:
    """Return the module name for a file, made from path and content: a changed file becomes a new module."""
    digest = hashlib.blake2b(os.path.abspath(path).encode(errors="surrogateescape") + b"\0" + content, digest_size=8)
    return f"gpucoll_file_{digest.hexdigest()}"


def _run(path: Path, content: bytes) -> None:
    """Run a file as a module, unless path and content have been run before."""
    name = _module(str(path), content)
    if name in sys.modules:
        return
    module = types.ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # before running, as in an import: classes look up their module
    try:
        exec(parsing.code_of(content, str(path), "exec"), vars(module))
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, Exception | SystemExit):
            code = error.code if isinstance(error, ArgumentError) else "GC-FILE"
            raise ArgumentError(f"{path}: the program raised {type(error).__name__}: {error}", code=code) from error
        raise
