"""What the engine is built from: setup.py builds it, and what was built is held against its sources when it is loaded.

This file stands alone, so that it can be run by its path where nothing is installed.
"""

from __future__ import annotations

import hashlib
import re
from importlib.resources.abc import Traversable

MODULE = "gpucoll._engine"
FIRST = "engine.cc"
MACRO = "GC_SOURCES"  # holds the digest
_INCLUDE = re.compile(r'^#include "(.*)"', re.MULTILINE)


def sources(folder: Traversable) -> dict[str, str]:
    """Return the text of each file of the engine, by its name in `folder`: one source, and the headers behind it."""
    texts: dict[str, str] = {}
    names = [FIRST]
    for name in names:
        texts[name] = folder.joinpath(name).read_text(encoding="utf-8")
        names += [header for header in _INCLUDE.findall(texts[name]) if header not in names]
    return texts


def digest(folder: Traversable) -> str:
    """Return what tells these sources from any others."""
    return hashlib.sha256(repr(sources(folder)).encode()).hexdigest()
