"""The table of this machine: where it lies, and whether it is this machine's."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpucoll.device.store import default_folder, read_trusted
from gpucoll.errors import ArgumentError
from gpucoll.tuner.table import CODE, Table, built_in, parse
from gpucoll.version import __version__

PROCESSORS = Path("/proc/cpuinfo")


def facts() -> dict[str, Any]:
    """Return what a table belongs to: another host, MPI, or version of ours has other figures."""
    import numpy
    from mpi4py import MPI

    library = MPI.Get_library_version().splitlines()[0].split(",")[0]
    return {"name": socket.gethostname(), "processor": processor(), "cores": len(os.sched_getaffinity(0)),
            "mpi": " ".join(library.replace("Version:", "").split()), "numpy": numpy.__version__,
            "gpucoll": __version__}


def processor(text: str | None = None) -> str:
    """Return the processor's name as the kernel gives it.

    >>> processor("vendor_id : x\\nmodel name\\t: Some CPU  @ 2 GHz\\n")
    'Some CPU @ 2 GHz'
    """
    if text is None:
        text = PROCESSORS.read_text() if PROCESSORS.exists() else ""
    named = (line.partition(":")[2] for line in text.splitlines() if line.startswith("model name"))
    return " ".join(next(named, platform.machine()).split())


def table_path(host: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Path:
    """Return the file of a host's table: one for each name, processor, number of cores and MPI."""
    mark = repr([host[key] for key in ("name", "processor", "cores", "mpi")])
    return default_folder(environment) / f"tune-{hashlib.sha256(mark.encode()).hexdigest()[:12]}.toml"


def read(path: Path, host: Mapping[str, Any]) -> Table | None:
    """Return the table at `path`, None where there is none; ArgumentError for one that is bad, old or another's."""
    try:
        table = parse(str(path), read_trusted(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ArgumentError(f"tuning table {path}: it cannot be read: {error}", code=CODE) from None
    for key, value in host.items():
        if table.host.get(key) != value:
            raise ArgumentError(f"tuning table {path}: it was measured with {key} {table.host.get(key)!r}, and here it "
                                f"is {value!r}; `gpucoll tune` makes a new one", code=CODE)
    return table


def load() -> Table:
    """Return this host's table, or the built-in one: where it has none, and with a warning where it is refused."""
    host = facts()
    try:
        return read(table_path(host), host) or built_in()
    except ArgumentError as error:
        warnings.warn(f"{error}; until then the built-in table serves", stacklevel=2)
        return built_in()
