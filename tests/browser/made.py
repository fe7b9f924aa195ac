"""Records of runs with simple numbers, in the schema of `bench/records.py`."""

import json
from pathlib import Path

FACTORS = {"all_reduce": lambda ranks: 2 * (ranks - 1) / ranks, "broadcast": lambda ranks: 1.0}
NCCL_TESTS = json.loads((Path(__file__).parents[1] / "samples" / "nccl_tests.json").read_text())


def result(name, size, time, *, collective="all_reduce", ranks=4, wrong=0, times=None, bound=None, against=None):
    """Return one line: `time` us out of place, half in place; `against` are times of peers."""
    def sides(taken, repetitions, wrong=0):
        found = {}
        for placement, part in (("out_of_place", 1), ("in_place", 2)):
            algbw, row = size / taken * part / 1e3, [time / part for time in repetitions]
            found[placement] = {"time": taken / part, "alg_bw": algbw, "bus_bw": algbw * FACTORS[collective](ranks),
                                "nwrong": wrong if part == 1 else 0}
            found[f"{placement}_per_iter"] = {"skipped_iterations": 0, "p99_us": max(row), "times_us": row}
        return found

    peers = {peer: {**sides(taken, [taken] * 5), "ratio": {"out_of_place": taken / time, "in_place": taken / time}}
             for peer, taken in (against or {}).items()}
    return {"size": size, "count": size // 4, "type": "float", "redop": "sum", "root": "    -1",
            **sides(time, times or [time * step for step in (0.9, 1.0, 1.0, 1.1, 1.2)], wrong), "experiment_name": name,
            "collective": collective, "algorithm": name, "ranks": ranks, "device": "cpu", "bound": bound,
            "skew_us": 3.25, "late_rank": 1, "against": peers}


def record(results, **extra):
    """Return a run with these results; `extra` goes beside the machine's facts."""
    wrong, ranks = sum(one["out_of_place"]["nwrong"] for one in results), results[0]["ranks"] if results else 4
    return {"version": 3, "start_time": "2026-11-21 10:00:00", "args": ["gpucoll.bench", "all_reduce"],
            "env": ["OMP_NUM_THREADS=1"], "nccl_version": 0,
            "config": {"warmup_iters": 1, "iterations": 5,
                       "devices": [{"rank": rank, "pid": 100 + rank, "hostname": "host", "device": -1,
                                    "device_hex": "cpu", "device_info": "a CPU"} for rank in range(ranks)]},
            "results": results, "errors": [], "out_of_bounds": {"count": wrong, "okay": "false" if wrong else "true"},
            "average_bus_bandwidth": {"bandwidth": 1.5, "okay": "unchecked"},
            "gpucoll": {"version": "0.1.0", "program": "gpucoll bench", "machine": {"host": "host", "cores": 2},
                        "copy": {"bandwidth": 16.0, "per_rank": [4.0] * ranks}, "ratios": {}, "left_out": [],
                        **extra}}


def sweep(names=("ring", "tree"), sizes=(8, 1024, 1 << 20), *, speed=1.0, **options):
    """Return a run over sizes: 10 us and 1 GB/s for the first algorithm, twice the time for each further one."""
    return record([result(name, size, (10 + size / 1e3) * 2**place / speed, bound=8.0, **options)
                   for size in sizes for place, name in enumerate(names)])
