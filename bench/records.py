"""The JSON of a run: nccl-tests' schema, version 3, with additional keys; making, writing and reading.

A record is one run. nccl-tests' keys and spellings are from its src/util.cu: booleans are the strings "true" and
"false", `root` is padded, times are us and bandwidths GB/s, `time` is `cpu_time` with -C, `nwrong` is null without
checking. `env` has only allowed variables; `nccl_version` 0 means no NCCL.

Our keys in every result (`experiment_name` is also the algorithm's name):

    collective, algorithm, ranks, device "cpu", "cuda" or "emulated", memory "ordinary" or "symmetric",
    factor (bus_bw / alg_bw),
    bound (bus_bw in GB/s at the measured copy bandwidth; null if no bytes move),
    share (out-of-place bus_bw / bound), skew_us and late_rank (out-of-place: see `summary.skew`),
    against {peer: {out_of_place, out_of_place_per_iter, in_place, in_place_per_iter as above,
                    ratio {out_of_place, in_place}}}        ratio: the peer's time / ours; above 1: gpucoll is faster

and the key `gpucoll` at the top:

    version, revision (git's, or ""), program "gpucoll bench", tests [..], interrupted,
    machine {host, cpu, cores, memory_gib, system, python, numpy, mpi, mpi4py, cupy, nccl, gpus [..], clock},
    copy {bandwidth (GB/s read and written by all ranks at once), bytes, per_rank [GB/s of each rank]},
    ratios {peer: {collective: {algorithm: geometric mean of the out-of-place ratios}}},
    left_out [{what, reason}].

A file holds one record, or the result of `scripts/bench`: {"suite": date, "host": name, "runs": [record, ..]}.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from typing import IO, Any

from gpucoll.errors import ArgumentError
from gpucoll.transport.rendezvous import by_first_rank

PLACEMENTS = ("out_of_place", "in_place")
COLUMNS = ("collective", "algorithm", "peer", "ranks", "device", "size", "count", "type", "redop", "root", "placement",
           "time_us", "alg_bw", "bus_bw", "nwrong", "min_us", "p50_us", "p99_us", "max_us", "bound", "ratio")
# Never the whole environment: variables may hold names of people and machines, paths and secrets.
ALLOWED = ("GPUCOLL_", "NCCL_", "MPIR_CVAR_", "OMPI_MCA_", "UCX_", "FI_", "OMP_", "CUDA_VISIBLE_DEVICES",
           "CUDA_DEVICE_MAX_CONNECTIONS")
PRIVATE_WORDS = ("PATH", "FILE", "DIR", "URI", "USER", "TOKEN", "SECRET", "PASSWORD", "KEY", "HOST", "ADDR", "COMM_ID")


def reserve(path: str) -> IO[str]:
    """Create a file and open the file for writing: `path`, or if `path` exists the first free of path.0, path.1, ...

    Raises ArgumentError if no file can be created.
    """
    attempt, number = path, 0
    while True:
        try:
            return open(attempt, "x", encoding="utf-8")
        except FileExistsError:
            attempt, number = f"{path}.{number}", number + 1
        except OSError as error:
            raise ArgumentError(f"cannot write {attempt}: {error.strerror}", code="GC-FILE") from None


def reserve_together(mpi: Any, paths: Mapping[str, str]) -> dict[str, IO[str]]:
    """Return the files of `reserve` on rank 0, {} elsewhere; raise ArgumentError on every rank if rank 0 fails."""
    files: dict[str, IO[str]] = {}
    by_first_rank(mpi, lambda: files.update({what: reserve(path) for what, path in paths.items()}))
    return files


def write(file: IO[str], record: Mapping[str, Any]) -> None:
    """Write a record and close the file."""
    with file:
        json.dump(record, file, indent=1)
        file.write("\n")


def read(path: str) -> list[dict[str, Any]]:
    """Return the records of a file, also of nccl-tests' own files; raise ArgumentError for any other content."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror}", code="GC-FILE") from None
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{path} is no JSON: {error}", code="GC-FILE") from None
    records = content.get("runs", [content]) if isinstance(content, dict) else []
    if not records or not all(isinstance(record, dict) and "results" in record for record in records):
        raise ArgumentError(f"{path} holds no results of a benchmark", code="GC-FILE")
    return list(records)


def csv_text(record: Mapping[str, Any]) -> str:
    """Return a header line and a line for each result, placement and peer."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for result in record["results"]:
        for peer, sides in {"": result, **result["against"]}.items():
            for placement in PLACEMENTS:
                body = sides[placement]
                writer.writerow({
                    **result, **sides[f"{placement}_per_iter"], **body, "peer": peer, "placement": placement,
                    "root": result["root"].strip(), "time_us": body.get("time", body.get("cpu_time")),
                    "ratio": sides["ratio"][placement] if peer else None})
    return text.getvalue()


def environment(variables: Mapping[str, str]) -> list[str]:
    """Return the variables relevant for speed, in nccl-tests' format, without paths and secrets."""
    return [f"{name}={value}" for name, value in sorted(variables.items())
            if name.startswith(ALLOWED) and not any(word in name for word in PRIVATE_WORDS) and os.sep not in value]


def words(arguments: Sequence[str]) -> list[str]:
    """Return a command line in nccl-tests' format, absolute paths reduced to the last part.

    >>> words(["all_reduce", "-J", "/home/x/run.json"])
    ['gpucoll.bench', 'all_reduce', '-J', 'run.json']
    """
    return ["gpucoll.bench", *(os.path.basename(word) if os.path.isabs(word) else word for word in arguments)]
