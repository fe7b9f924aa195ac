"""Times of nccl-tests for several choices: the best choice for each size, and the file of NCCL's example tuner.

A file is the output of all_reduce_perf or another program of nccl-tests: text, with or without NCCL's log, or JSON. The
choice of a file is the value of NCCL_ALGO and NCCL_PROTO in the text, as a command line or NCCL's log has them, or in
the name of the file, such as ``ring_ll128.txt``. A file without a choice has the times of NCCL's own choice, "default".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from gpucoll.analysis.nccl_tuning.releases import ALGORITHMS, PROTOCOLS
from gpucoll.analysis.nccl_tuning.tuning import COLLECTIVES
from gpucoll.errors import ArgumentError

CODE = "GC-NCCL-TESTS"
NOISE = 0.02  # a saving of a smaller part of the time is no saving
DEFAULT = "default"
ROW = re.compile(r"(?<!\d)(\d+) +(\d+) +[a-z]\w+ +(\w+) +(?:(-?\d+) +)?(\d[\d.]*) +[\d.]+ +[\d.]+ +(\d[\de+-]*|N/A) ")
RANK = re.compile(r"#\s+Rank\s+(\d+)\s.*?\bon\s+(\S+)\s+device\s+\d+")
LOGGED = re.compile(r"NCCL INFO (\w+): *(\d+) Bytes -> Algo (\w+) +proto (\w+)"
                    r"(?: +channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\})?")
HEAD = """\
# collective,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks
# Build NCCL's example tuner with "*nChannels = 0;" in pluginGetCollInfo: with 1, as in NCCL 2.27.5 to 2.30.7,
# channels of -1 and all sizes without a row run on a single channel.
"""


class Run(NamedTuple):
    """A run of nccl-tests: times in us by size in bytes, out of place."""

    file: str
    collective: str
    ranks: int
    nodes: int
    algorithm: str  # "" where NCCL chooses
    protocol: str  # "" where NCCL chooses
    us: dict[int, float]
    logged: dict[int, tuple[str, str, int]]  # algorithm, protocol and channels by size, where NCCL's log has them

    @property
    def label(self) -> str:
        """The choice, such as Ring/LL128, or default."""
        return "/".join(filter(None, (self.algorithm, self.protocol))) or DEFAULT


class SizeResult(NamedTuple):
    """The runs at a size: the best, and the run of NCCL's own choice if there is one."""

    nbytes: int
    best: Run
    default: Run | None

    @property
    def saving(self) -> float:
        """The part of the default's time that the best choice saves."""
        if self.default is None:
            return 0.0
        usual = self.default.us[self.nbytes]
        return (usual - self.best.us[self.nbytes]) / usual

    @property
    def is_won(self) -> bool:
        """Whether another choice than NCCL's wins by more than noise."""
        return self.best is not self.default and self.saving > NOISE


def read_runs(files: Iterable[str]) -> list[Run]:
    """Read files of one collective on the same ranks; raise ArgumentError for others."""
    runs = []
    for file in files:
        try:
            runs.append(parse_run(Path(file).read_text(errors="replace"), file))
        except OSError as error:
            raise ArgumentError(f"cannot read {file}: {error.strerror}", code="GC-FILE") from None
    first = runs[0]
    for run in runs[1:]:
        if (run.collective, run.ranks, run.nodes) != (first.collective, first.ranks, first.nodes):
            raise ArgumentError(f"{run.file} is {run.collective} on {run.ranks} ranks of {run.nodes} nodes, "
                                f"{first.file} {first.collective} on {first.ranks} ranks of {first.nodes} nodes: "
                                "compare runs of one collective on the same ranks", code=CODE)
        if run.label in (other.label for other in runs[:runs.index(run)]):
            raise ArgumentError(f"{run.file} has the choice {run.label}, like another file: write choices into the "
                                "names of files, such as ring_ll128.txt", code=CODE)
    return runs


def parse_run(text: str, file: str) -> Run:
    """Return the run in an output of nccl-tests, text or the JSON that the option -J writes."""
    if text.lstrip().startswith("{"):
        text = _as_lines(text, file)
    us, columns = {}, None
    for found in ROW.finditer(text):
        if found[6].strip("0").isdigit():  # older programs print the error, such as 4e-07
            raise ArgumentError(f"{file}: {found[6]} wrong values at {found[1]} bytes", code=CODE)
        us[int(found[1])], columns = float(found[5]), (found[3], found[4] or "-1")
    hosts = dict(RANK.findall(text))
    if columns is None or len(hosts) < 2:
        raise ArgumentError(f"{file} is not output of nccl-tests on several GPUs: lines of '# Rank' and rows with "
                            "size, count, type, redop, root, time are missing", code=CODE)
    collective = _collective(text, file, *columns)
    algorithm, protocol = _forced(text, Path(file).stem)
    whole = len(hosts) if collective in ("all_gather", "reduce_scatter") else 1  # NCCL logs the bytes of a block
    logged = {int(nbytes) * whole: (_name(algo, ALGORITHMS), _name(proto, PROTOCOLS),
                                    int(last) - int(first) + 1 if last else -1)
              for name, nbytes, algo, proto, first, last in LOGGED.findall(text) if name == COLLECTIVES[collective]}
    return Run(file, collective, len(hosts), len(set(hosts.values())), algorithm, protocol, us, logged)


def _as_lines(text: str, file: str) -> str:
    """Return nccl-tests' JSON as the lines that nccl-tests prints."""
    try:
        content = json.loads(text)
        lines = [*map(str, content["args"]), *map(str, content["env"])]
        for gpu in content["config"]["devices"]:
            lines.append(f"# Rank {gpu['rank']} on {gpu['hostname']} device {gpu['device']}")
        for row in content["results"]:
            found, words = row["out_of_place"], [row[key] for key in ("size", "count", "type", "redop", "root")]
            lines.append(" ".join(map(str, words)) + f" {found['time']:.2f} 0 0 {int(found['nwrong'])} ")
        return "\n".join(lines)
    except (KeyError, TypeError, ValueError):
        raise ArgumentError(f"{file} is not JSON of nccl-tests", code=CODE) from None


def _collective(text: str, file: str, redop: str, root: str) -> str:
    """Return the collective by the name of the program, else by the columns of the rows."""
    program = re.search(r"\b(\w+?)_perf\b", text)
    name = program[1] if program else {(True, True): "broadcast", (False, True): "reduce",
                                       (True, False): "all_gather"}.get((redop == "none", root != "-1"), "all_reduce")
    if name not in COLLECTIVES:
        raise ArgumentError(f"{file} is of {name}: NCCL chooses an algorithm for {', '.join(COLLECTIVES)}", code=CODE)
    return name


def _forced(text: str, stem: str) -> tuple[str, str]:
    """Return the algorithm and the protocol of NCCL_ALGO and NCCL_PROTO, or of the name of the file; "" for none."""
    found = []
    for variable, names in (("NCCL_ALGO", ALGORITHMS), ("NCCL_PROTO", PROTOCOLS)):
        value = re.search(rf"{variable}(?:=| set by environment to )\"?([\w,^:;]+)", text)
        spellings = {_plain(name): name for name in names}
        tokens = [_plain(value[1])] if value else re.findall(r"nvls[-_]?tree|collnet[-_]?\w+|[a-z]+\d*", stem.lower())
        named = [spellings[_plain(token)] for token in tokens if _plain(token) in spellings]
        found.append(named[0] if len(named) == 1 else "")
    return found[0], found[1]


def _plain(name: str) -> str:
    return re.sub("[-_]", "", name.lower())


def _name(text: str, names: Sequence[str]) -> str:
    """Return NCCL's spelling of a name in a log, where older releases have numbers."""
    if text.isdigit():
        return names[int(text)]
    return next(name for name in names if _plain(name) == _plain(text))


def compare(runs: Sequence[Run], chosen: Callable[[int], tuple[str, str]] | None = None) -> list[SizeResult]:
    """Return the best run for each size that all runs have, and the run of NCCL's choice.

    The run of NCCL's choice is the file without a choice; without such a file, `chosen` names NCCL's algorithm and
    protocol at a size.
    """
    usual = next((run for run in runs if run.label == DEFAULT), None)
    rows = []
    for nbytes in sorted(set.intersection(*(set(run.us) for run in runs))):
        default = usual
        if usual is None and chosen is not None:
            pair = chosen(nbytes)
            default = next((run for run in runs
                            if run.algorithm in ("", pair[0]) and run.protocol in ("", pair[1])), None)
        rows.append(SizeResult(nbytes, min(runs, key=lambda run: run.us[nbytes]), default))
    if not rows:
        raise ArgumentError("the files have no size in common", code=CODE)
    return rows


def tuner_file(rows: Sequence[SizeResult], chosen: Callable[[int, str, str], tuple[str, str]] | None = None) -> str:
    """Return the configuration of NCCL's example tuner that fixes the best choices where NCCL's own is not best.

    The format is that of plugins/tuner/example/plugin.c (NCCL 2.27.5 and newer). A choice holds from its size up to the
    next measured size, the last one at its size only. `chosen` completes a choice that leaves the algorithm or the
    protocol to NCCL. The number of channels is the logged one, or -1.
    """
    run = rows[0].best
    lines: list[tuple[str, int, int]] = []
    ends = [row.nbytes - 1 for row in rows[1:]] + [rows[-1].nbytes]
    for row, end in zip(rows, ends, strict=True):
        if row.best.label == DEFAULT or (row.default is not None and not row.is_won):
            continue
        algorithm, protocol = _complete(row, chosen)
        channels = row.best.logged.get(row.nbytes, ("", "", -1))[2]
        spelling = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=NVLS)(?=T)", "_", algorithm)
        choice = f"{spelling},{protocol},{channels}".lower()
        if lines and lines[-1][0] == choice and lines[-1][2] == row.nbytes - 1:
            lines[-1] = (choice, lines[-1][1], end)
        else:
            lines.append((choice, row.nbytes, end))
    kind = run.collective.replace("_", "")
    return HEAD + "".join(f"{kind},{low},{high},{choice},{run.nodes},{run.ranks}\n" for choice, low, high in lines)


def _complete(row: SizeResult, chosen: Callable[[int, str, str], tuple[str, str]] | None) -> tuple[str, str]:
    """Return the algorithm and the protocol of the best run, as forced, as logged, or as NCCL's model has them."""
    best = row.best
    if best.algorithm and best.protocol:
        return best.algorithm, best.protocol
    if row.nbytes in best.logged:
        return best.logged[row.nbytes][:2]
    if chosen is None:
        raise ArgumentError(f"{best.file} forces {best.label} only, and a tuner file names algorithm and protocol: set "
                            "NCCL_ALGO and NCCL_PROTO, or NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=TUNING, or name --machine",
                            code=CODE)
    return chosen(row.nbytes, best.algorithm, best.protocol)
