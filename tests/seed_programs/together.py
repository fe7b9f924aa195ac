"""Run seed programs one after the other in one job: `together.py FOLDER SCRIPT ...`.

Each rank writes what each program has printed to FOLDER/RANK.json. Starting a job takes longer than a program.
"""

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path

import gpucoll.distributed as dist


def printed_by(script):
    sys.argv[:] = [script]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(script, run_name="__main__")
    rank = dist.get_rank()
    dist.destroy_process_group()
    return rank, output.getvalue()


folder, *scripts = sys.argv[1:]
found = {script: printed_by(script) for script in scripts}
(rank,) = {rank for rank, _ in found.values()}
Path(folder, f"{rank}.json").write_text(json.dumps({script: output for script, (_, output) in found.items()}))
