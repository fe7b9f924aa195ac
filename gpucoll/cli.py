"""The command `gpucoll VERB`; a verb's module is imported when it is used."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from gpucoll.arguments import Parser, size_range


def main(arguments: list[str] | None = None) -> int:
    """Run one verb and return its exit code: 0, 1 for what was found wrong, 2 for wrong arguments."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["bench"]:  # its flags are nccl-tests', parsed by itself
        from gpucoll.bench.__main__ import main as bench

        return bench(given[1:])
    if given[:1] == ["run"]:  # what follows the script is the script's
        from gpucoll.launch import main as launch

        return launch(given[1:])
    options = _parser().parse_args(given)
    return options.run(options)


def _parser() -> Parser:
    parser = Parser("gpucoll", description="Collective communication for NumPy and CuPy programs under MPI.")
    verbs = parser.add_subparsers(dest="verb", required=True, parser_class=Parser)
    verbs.add_parser("run", help="launch a program under mpiexec with torchrun's variables", add_help=False)
    verbs.add_parser("bench", help="measure collectives (under mpiexec); report F.json: make a page", add_help=False)
    verify = verbs.add_parser("verify", help="prove every schedule")
    verify.add_argument("--ranks", type=size_range, default="1..64", metavar="1..64", help="sizes to prove")
    verify.add_argument("--collective", help="only this collective")
    verify.add_argument("--algorithm", help="only this algorithm")
    verify.add_argument("--segments", type=size_range, default="1,3", metavar="1,3", help="pipelining to prove")
    verify.add_argument("--json", action="store_true", help="print one JSON object")
    verify.set_defaults(run=_verify)
    doctor = verbs.add_parser("doctor", help="examine this machine, and under mpiexec this job")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.set_defaults(run=_doctor)
    return parser


def _verify(options: Any) -> int:
    """Prove what was asked for; print a line per algorithm and a last line with the total."""
    from gpucoll.analysis.verify import prove_registry
    from gpucoll.arguments import refuse

    started, rows, faults = time.perf_counter(), [], 0
    for row in prove_registry(options.ranks, options.segments, options.collective, options.algorithm):
        rows.append(row._asdict())
        faults += row.fault is not None
        if not options.json:
            print(f"{row.collective:16} {row.algorithm:20} {row.schedules:6} schedules  {row.fault or 'proved'}")
    if not rows:
        refuse("gpucoll verify", f"no algorithm {options.algorithm!r} of collective {options.collective!r}")
    seconds = round(time.perf_counter() - started, 1)
    total = sum(row["schedules"] for row in rows)
    if options.json:
        print(json.dumps({"seconds": seconds, "schedules": total, "faults": faults, "algorithms": rows}))
    else:
        print(f"{total} schedules of {len(rows)} algorithms in {seconds} s: {faults or 'no'} faults")
    return 1 if faults else 0


def _doctor(options: Any) -> int:
    from gpucoll.doctor import main as doctor

    return doctor(as_json=options.json)
