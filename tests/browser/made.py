"""Records of runs with numbers that are easy to follow, in the schema of `bench/records.py`."""

FACTORS = {"all_reduce": lambda ranks: 2 * (ranks - 1) / ranks, "broadcast": lambda ranks: 1.0}


def side(size, time, factor, wrong=0):
    """nccl-tests' four figures."""
    algbw = size / time / 1e3
    return {"time": time, "alg_bw": algbw, "bus_bw": algbw * factor, "nwrong": wrong}


def spread(times, skipped=0):
    """As much of the statistics as a page reads."""
    return {"skipped_iterations": skipped, "p99_us": max(times), "times_us": list(times)}


def result(name, size, time, *, collective="all_reduce", ranks=4, wrong=0, times=None, bound=None, against=None,
           **other):
    """One line: `time` us out of place, half of it in place; `against` are times of peers."""
    factor = FACTORS[collective](ranks)
    times = times or [time * step for step in (0.9, 1.0, 1.0, 1.1, 1.2)]

    def sides(taken, repetitions, wrong=0):
        return {"out_of_place": side(size, taken, factor, wrong), "out_of_place_per_iter": spread(repetitions),
                "in_place": side(size, taken / 2, factor), "in_place_per_iter": spread([t / 2 for t in repetitions])}

    peers = {peer: {**sides(taken, [taken] * 5), "ratio": {"out_of_place": taken / time, "in_place": taken / time}}
             for peer, taken in (against or {}).items()}
    return {"size": size, "count": size // 4, "type": "float", "redop": "sum", "root": "    -1",
            **sides(time, times, wrong), "actual_iterations": len(times), "experiment_name": name,
            "collective": collective, "algorithm": name, "ranks": ranks, "device": "cpu", "factor": factor,
            "bound": bound, "share": None, "skew_us": 3.25, "late_rank": 1, "against": peers, **other}


def record(results, **extra):
    """A run with these results; `extra` goes beside the machine's facts."""
    wrong = sum(one["out_of_place"]["nwrong"] for one in results)
    busbw = [one["out_of_place"]["bus_bw"] for one in results]
    ranks = results[0]["ranks"] if results else 4
    return {"version": 3, "start_time": "2026-11-21 10:00:00", "args": ["gpucoll.bench", "all_reduce"],
            "env": ["OMP_NUM_THREADS=1"], "nccl_version": 0,
            "config": {"warmup_iters": 1, "iterations": 5,
                       "devices": [{"rank": rank, "group": 0, "pid": 100 + rank, "hostname": "host", "device": -1,
                                    "device_hex": "cpu", "device_info": "a CPU"} for rank in range(ranks)]},
            "results": results, "errors": [],
            "out_of_bounds": {"count": wrong, "okay": "false" if wrong else "true"},
            "average_bus_bandwidth": {"bandwidth": sum(busbw) / max(1, len(busbw)), "okay": "unchecked"},
            "gpucoll": {"version": "0.1.0", "program": "gpucoll bench", "tests": ["all_reduce"],
                        "machine": {"host": "host", "cores": 2}, "copy": {"bandwidth": 16.0, "per_rank": [4.0] * ranks},
                        "ratios": {}, "left_out": [], "findings": [], "pairs": [], "overlap": [], **extra}}


def sweep(names=("ring", "tree"), sizes=(8, 1024, 1 << 20), *, speed=1.0, **options):
    """A run over sizes: each algorithm half as fast as the one before it, a fixed cost of 10 us and 1 GB/s."""
    return record([result(name, size, (10 + size / 1e3) * 2**place / speed, bound=8.0, **options)
                   for size in sizes for place, name in enumerate(names)])


def pair(source, target, bandwidth, size=1 << 20, *, slow=False):
    """One link."""
    return {"size": size, "source": source, "target": target, "time_us": size / bandwidth / 1e3, "bandwidth": bandwidth,
            "nwrong": 0, "slow": slow}


def links(ranks=4, slow=(1, 2)):
    """A run of sendrecv --pairs: 4 GB/s everywhere but on one link."""
    found = [(source, target) for source in range(ranks) for target in range(ranks) if source != target]
    return record([], pairs=[pair(*link, 0.5 if link == slow else 4.0, slow=link == slow) for link in found],
                  findings=["the link from rank 1 to rank 2 is slow: 0.5 GB/s"])


# As nccl-tests' src/util.cu writes it: no key of ours, the name of the collective in the program's alone.
NCCL_TESTS = {
    "version": 3, "start_time": "2026-11-20 09:00:00", "args": ["./build/all_reduce_perf", "-g", "4"],
    "env": ["NCCL_ALGO=Ring"], "nccl_version": 23007,
    "config": {"nthreads": 1, "ngpus": 4, "iterations": 20, "warmup_iters": 1, "graph": 0,
               "devices": [{"rank": rank, "group": 0, "pid": 7, "hostname": "node", "device": rank,
                            "device_hex": f"0000:0{rank}:00", "device_info": "NVIDIA H200"} for rank in range(4)]},
    "results": [{"size": size, "count": size // 4, "type": "float", "redop": "sum", "root": "    -1",
                 "out_of_place": side(size, 12.5 + size / 1e5, 1.5), "in_place": side(size, 12.5 + size / 1e5, 1.5),
                 "actual_iterations": 20, "experiment_name": ""} for size in (1024, 1 << 20)],
    "out_of_bounds": {"count": 0, "okay": "true"}, "average_bus_bandwidth": {"bandwidth": 9.5, "okay": "unchecked"},
    "errors": ["no error"], "end_time": "2026-11-20 09:00:03",
}
