"""Which MPI mpi4py uses, who launched this process, and whether the two belong together; found without starting MPI."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from gpucoll.doctor.findings import Findings
from gpucoll.launchers import find_mpiexec, started, vendor_of

SECONDS = 10.0  # for `mpiexec --version`

class Launcher(NamedTuple):
    """Who started this process: `family` None where it can start ranks of any MPI; `size` ranks."""

    name: str
    family: str | None
    size: int


def family(text: str) -> str | None:
    """Return whose a library or a launcher is, after what it says of its version; None for an unknown one.

    >>> family("HYDRA build details:"), family("Open MPI v5.0.11"), family("slurm 24.05")
    ('MPICH', 'Open MPI', None)
    """
    vendor = vendor_of(text)
    return vendor and vendor.family


def launcher(environment: Mapping[str, str]) -> Launcher | None:
    """Return who launched this process, None for nobody.

    >>> launcher({"PMI_SIZE": "4", "PMI_RANK": "0"})
    Launcher(name="MPICH's mpiexec", family='MPICH', size=4)
    """
    told = started(environment)
    return told and Launcher(told.launcher.name, told.launcher.family, told.size)


def short(library: str) -> str:
    """Return name and version of an MPI library: not who built it, where and with which options.

    >>> short("Open MPI v5.0.11, package: Open MPI somebody@host Distribution")
    'Open MPI 5.0.11'
    >>> short("MPICH Version:      5.0.2\\nMPICH configure:    --prefix=/home/somebody")
    'MPICH 5.0.2'
    """
    line = library.strip("\0").strip().partition("\n")[0].partition(",")[0]
    return " ".join(re.sub(r"\bversion\b\s*:?|\bv(?=\d)", " ", line, flags=re.IGNORECASE).split())


def library_facts(found: Findings) -> str | None:
    """Find library and standard without starting MPI; return what the library says of itself."""
    says = Findings()
    text = says.look("library", lambda: _module().Get_library_version())
    found.facts["library"] = text and short(text)
    found.missing.update(says.missing)
    found.look("standard", lambda: ".".join(map(str, _module().Get_version())))
    return str(text) if text else None


def _module() -> Any:
    """Return mpi4py's MPI, not started where this is its first import: a library under another's launcher may die."""
    if "mpi4py.MPI" not in sys.modules:
        import mpi4py

        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    from mpi4py import MPI

    return MPI


def start() -> None:
    """MPI is started."""
    mpi = _module()
    if not mpi.Is_initialized():
        mpi.Init_thread(mpi.THREAD_MULTIPLE)


def mismatch(library: str | None, started_by: Launcher | None) -> str | None:
    """Return the sentence on a launcher of another MPI than mpi4py's; None where they match or nobody can tell.

    >>> mismatch("Open MPI v5.0.11", Launcher("MPICH's mpiexec", "MPICH", 4))
    "MPICH's mpiexec started 4 ranks, but mpi4py uses Open MPI 5.0.11; launch with Open MPI's own mpiexec"
    """
    if library is None or started_by is None or None in (family(library), started_by.family):
        return None
    if family(library) == started_by.family:
        return None
    return (f"{started_by.name} started {started_by.size} ranks, but mpi4py uses {short(library)}; launch with "
            f"{family(library)}'s own mpiexec")


def launcher_facts(found: Findings, library: str | None, started_by: Launcher | None) -> None:
    """Find who launched this process, or who would, and whether that goes with mpi4py's library."""
    found.facts.update(launcher=started_by and started_by.name, launched=started_by and started_by.size, mpiexec=None,
                       threads=None, ranks=None)
    sentence = mismatch(library, started_by) if started_by else own_mpiexec(found, library)
    known = library and (found.facts["mpiexec"] or (started_by and started_by.family))
    found.facts.update(mismatch=sentence, match=sentence is None if known else None)


def world_facts(found: Findings, size: int) -> None:
    """Find what MPI tells once it is started: `size` ranks, and what threads may do."""
    mpi = _module()
    levels = {mpi.THREAD_SINGLE: "single", mpi.THREAD_FUNNELED: "funneled", mpi.THREAD_SERIALIZED: "serialized",
              mpi.THREAD_MULTIPLE: "multiple"}
    found.facts["ranks"] = size
    if found.facts["launched"]:
        found.facts["match"] = found.facts["launched"] == size
    found.look("threads", lambda: levels[mpi.Query_thread()])


def own_mpiexec(found: Findings, library: str | None) -> str | None:
    """Find the mpiexec that a job would be launched with; return the sentence on one of another MPI than mpi4py's."""
    text = found.look("mpiexec", _mpiexec_version)
    if text is None:
        return None
    other = family(text)
    found.facts["mpiexec"] = _mpiexec_name(text)
    if library is None or None in (other, family(library)) or other == family(library):
        return None
    return (f"the mpiexec that comes first is {found.facts['mpiexec']}, but mpi4py uses {short(library)}: each rank "
            f"would be alone; launch with {family(library)}'s own mpiexec")


def _mpiexec_version() -> str:
    path = find_mpiexec()
    if path is None:
        raise LookupError("no mpiexec beside this Python or on the PATH; pip install 'gpucoll[mpich]'")
    job = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=SECONDS)
    return job.stdout


def _mpiexec_name(text: str) -> str:
    """Return whose an mpiexec is, and its version.

    >>> _mpiexec_name("HYDRA build details:\\n    Version:  5.0.2\\n"), _mpiexec_name("mpiexec (Open MPI) 5.0.11")
    ("MPICH's, 5.0.2", "Open MPI's, 5.0.11")
    """
    number = re.search(r"\d+(\.\d+)+", text)
    return f"{family(text) or 'unknown'}'s, {number.group() if number else 'of unknown version'}"
