"""A digest of the engine's sources: setup.py builds the digest into the engine, and the loader compares.

This file imports nothing else of the package: setup.py runs the file by its path, before installation.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

MODULE = "gpucoll._engine"
FIRST_SOURCE = "binding/engine.cc"
MACRO = "GC_SOURCES"  # holds the digest
_INCLUDE = re.compile(r'^#include "(.*)"', re.MULTILINE)


def sources(folder: Path) -> dict[str, str]:
    """Return the text of each source file of the engine, by path in `folder`: FIRST_SOURCE and all headers."""
    texts: dict[str, str] = {}
    names = [FIRST_SOURCE]
    for name in names:
        texts[name] = folder.joinpath(name).read_text(encoding="utf-8")
        names += [header for header in _INCLUDE.findall(texts[name]) if header not in names]
    return texts


def digest(folder: Path) -> str:
    """Return a hash of all sources of the engine."""
    return hashlib.sha256(repr(sources(folder)).encode()).hexdigest()
