"""bench/ on ranks: what the table and the files say of each test, planted faults, the command and its exit codes."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import gpucoll as gc
from ranks import end_job, require_launcher, same_gpucoll, start_job

pytest.importorskip("gpucoll.bench.cases", reason="gpucoll runs from a checkout here and is not installed")

from gpucoll.bench import arguments
from gpucoll.bench.cases import TESTS
from gpucoll.bench.measure import BURST

FACTORS = {"all_reduce": lambda p: 2 * (p - 1) / p, "reduce": lambda p: 1, "broadcast": lambda p: 1,
           "sendrecv": lambda p: 1, "hypercube": lambda p: 1, "scan": lambda p: 1, "exscan": lambda p: 1,
           "barrier": lambda p: 1}
ROOTED = ("reduce", "broadcast", "gather", "scatter", "gather_v", "scatter_v")
FIELDS = ("size", "count", "type", "redop", "root", "time", "algbw", "busbw", "wrong", "in_time", "in_algbw",
          "in_busbw", "in_wrong")
WORDS = ("type", "redop", "algorithm")


def share(ranks):
    return (ranks - 1) / ranks


def bench(mpi, line, plant=None, environment=None):
    """Exit code, output and record of a run on ranks of the pool; `plant` spoils the communicator before."""
    from gpucoll.bench.run import Run

    output = io.StringIO()
    with gc.Communicator.from_mpi(mpi) as comm, contextlib.redirect_stdout(output):
        if plant is not None:
            plant(comm)
        run = Run(comm, arguments.parse(line.split(), environment or {}))
        run.measure()
        code = run.finish()
    return code, output.getvalue(), json.loads(json.dumps(run.record))


def refused(mpi, line):
    """The message with which a rank refuses what can be refused only once there is a communicator."""
    from gpucoll.bench.run import run

    with gc.Communicator.from_mpi(mpi, executor="native") as comm, pytest.raises(gc.ArgumentError) as error:
        run(comm, arguments.parse(line.split()))
    return str(error.value)


def parse(output):
    """The lines of data as dictionaries, as anyone's script would read them."""
    found = []
    for line in output.splitlines():
        if line[:1] == " ":
            words = line.split()
            names = (*FIELDS, "algorithm")[:len(words)]
            row = dict(zip(names, words, strict=True))
            found.append({name: float(value) if name not in WORDS and value != "N/A" else value
                          for name, value in row.items()})
    return found


def starting(output, words):
    return [line for line in output.splitlines() if line.startswith(words)]


def test_table_of_the_goal(ranks):
    found = ranks(bench, 4, "all_reduce -b 8 -e 32K -f 64 -n 3 --algorithm ring,tree,native --against mpi")
    assert [code for code, *_ in found] == [0] * 4
    assert [output for _, output, _ in found[1:]] == [""] * 3
    _, output, record = found[0]
    rows = parse(output)
    assert [(row["size"], row["algorithm"]) for row in rows] == [
        (size, name) for size in (8, 512, 32768) for name in ("ring", "tree", "native")]
    assert {(row["type"], row["redop"], row["root"], row["wrong"], row["in_wrong"]) for row in rows} == {
        ("float", "sum", -1, 0, 0)}
    assert all(row["count"] == row["size"] / 4 for row in rows)
    assert len(starting(output, "#  Rank ")) == 4
    assert output.startswith(f"# gpucoll {gc.__version__}")
    assert starting(output, "# Out of bounds values : 0 OK")
    assert starting(output, "# Collective test concluded: all_reduce")
    check_ratios(output, record)


def check_ratios(output, record):
    """The ratios are the peer's time over ours, and the last lines are their geometric means."""
    products = dict.fromkeys(("ring", "tree", "native"), 1.0)
    for result in record["results"]:
        peer = result["against"]["mpi"]
        for placement in ("out_of_place", "in_place"):
            ratio = peer[placement]["time"] / result[placement]["time"]
            assert peer["ratio"][placement] == pytest.approx(ratio)
        products[result["algorithm"]] *= peer["ratio"]["out_of_place"]
    means = {name: product ** (1 / 3) for name, product in products.items()}
    assert record["gpucoll"]["ratios"]["mpi"]["all_reduce"] == pytest.approx(means)
    words = starting(output, "# against mpi  all_reduce  geometric mean")[0].split()[6:]
    assert dict(zip(words[::2], map(float, words[1::2]), strict=True)) == pytest.approx(means, abs=1e-3)


@pytest.mark.parametrize("size", [1, 2, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_every_test_by_every_algorithm(ranks, size):
    most = 1000 if size == 8 else 5000  # so many ranks take their time where there are fewer cores
    line = f"all -b 1000 -e {most} -i 4000 -n 2 -c 2 -d int -r {size - 1} --algorithm all --against mpi"
    code, output, record = ranks(bench, size, line, timeout=200)[0]
    assert code == 0, output
    results = record["results"]
    measured = dict.fromkeys(result["collective"] for result in results)
    assert list(measured) == [name for name in TESTS if name != "hypercube" or size != 3]
    for result in results:
        check_result(result, size)
    for name in measured:
        by = dict.fromkeys(result["algorithm"] for result in results if result["collective"] == name)
        own = {"sendrecv": ["sendrecv"], "hypercube": ["recursive_doubling"]}
        assert list(by) == own.get(name) or [*gc.algorithms(name), "native"]
    assert ("hypercube left out: nRanks 3 is not a power of 2" in output) == (size == 3)


def check_result(result, size):
    """Bytes, rates, factor, root and checks of one line of any test."""
    name = result["collective"]
    factor = FACTORS.get(name, share)(size)
    moved = result["size"] * (share(size) if name == "hypercube" else 1)
    for placement in ("out_of_place", "in_place"):
        body = result[placement]
        assert body["nwrong"] == 0
        assert body["alg_bw"] == pytest.approx(moved / body["time"] / 1e3)
        assert body["bus_bw"] == pytest.approx(body["alg_bw"] * factor)
    assert result["root"] == f"{size - 1 if name in ROOTED else -1:6d}"
    if name != "barrier" and not name.endswith("_v"):
        unit = size if TESTS[name].blocks else 1
        assert result["size"] == 4 * unit * result["count"]


@pytest.mark.parametrize("line", [
    "all_reduce -d half -o avg", "all_reduce -d bfloat16 -o prod", "all_reduce -d bool -o sum",
    "all_reduce -d f8e5m2 -o min", "reduce -d complex64 -o prod", "reduce_scatter -d uint8 -o band --against mpi",
    "reduce_scatter -d double -o lxor", "all_gather -d bool --against mpi", "broadcast -d bfloat16 --against mpi",
    "exscan -d f8e4m3 -o max", "exscan -d int8 -o min", "scan -d half -o land", "all_reduce -o all -d half",
    "all_to_all_v -d bfloat16", "reduce_scatter_v -d int -o bxor", "broadcast -r all", "all_gather -d all"])
def test_dtypes_and_ops(ranks, line):
    code, output, record = ranks(bench, 3, f"{line} -b 3000 -e 3000 -n 1 -w 0 --algorithm all")[0]
    assert code == 0, output
    assert len(record["results"]) >= 1


@pytest.mark.parametrize("line", [
    "-m 3", "-m 3 -z 1", "-z 2", "-z 3", "-C 1", "-a 0", "-a 2", "-a 3", "-u 3", "-I 1", "-I 1 -K 1", "-S 1", "-N 2",
    "-T 50", "--style osu", "--executor mpi", "-w 0"])
def test_manners_of_nccl_tests(ranks, line):
    code, output, record = ranks(bench, 2, f"all_reduce -b 1000 -e 1000 -n 3 {line}")[0]
    assert code == 0, output
    assert [result["out_of_place"]["nwrong"] for result in record["results"]] == [0] * (2 if "-N" in line else 1)


def test_the_emulated_device(ranks):
    code, output, record = ranks(bench, 2, "all_reduce -b 64 -e 4K -f 64 -n 2 --device emulated",
                                 env={"GPUCOLL_DEVICE": "emulated"})[0]
    assert code == 0, output
    assert {result["device"] for result in record["results"]} == {"emulated"}


@pytest.mark.emulated
@pytest.mark.parametrize("line", [
    "all_reduce --against nccl,mpi,cupyx", "all_reduce --graph", "all_reduce -G 3 -d bfloat16", "all_gather -m 2 -z 3",
    "all_to_all -C 1", "sendrecv --stream null --against nccl", "reduce_scatter -d f8e4m3 -o max -u 1"])
def test_gpu_arrays_on_a_stand_in_for_cupy(mpiexec, line):
    if shutil.which(os.environ.get("CXX", "g++").split()[0]) is None:
        pytest.skip("the stand-in needs a C++ compiler")
    stand_in = Path(__file__).parents[1] / "stand_in"
    job = mpiexec(2, sys.executable, "-m", "gpucoll.bench", *f"{line} -b 1K -e 1K -n 2 --device cuda".split(),
                  env={"PYTHONPATH": os.pathsep.join([str(stand_in), *same_gpucoll().values()]), "STAND_IN_GPUS": "2"})
    assert job.returncode == 0, job.stdout + job.stderr
    rows = parse(job.stdout)
    assert [(row["wrong"], row["in_wrong"]) for row in rows] == [(0, 0)]
    assert "device  1 [0000:0b:00]" in job.stdout
    assert ("# against cupyx left out" in job.stdout) == ("cupyx" in line)
    assert len(starting(job.stdout, "# against nccl")) == ("nccl" in line)


def test_without_a_check_nothing_is_said_of_wrong_elements(ranks):
    code, output, _ = ranks(bench, 2, "all_reduce -b 64 -e 64 -n 1 -c 0")[0]
    assert code == 0
    assert [(row["wrong"], row["in_wrong"]) for row in parse(output)] == [("N/A", "N/A")]


def test_repetitions_of_its_own_choice_are_at_most_nccl_tests_default(ranks):
    code, _, record = ranks(bench, 2, "broadcast -b 64 -e 64 --executor mpi")[0]
    assert code == 0
    assert 5 <= record["results"][0]["actual_iterations"] <= 20
    assert record["results"][0]["algorithm"] == "auto"


def test_peers_that_are_missing_are_named_with_the_reason(ranks):
    code, output, record = ranks(bench, 2, "all_reduce -b 64 -e 64 -n 1 -d half --against mpi,nccl,cupyx")[0]
    assert code == 0
    assert {one["what"]: one["reason"] for one in record["gpucoll"]["left_out"]} == {
        "against mpi": "MPI itself has no reduction by sum of float16",
        "against nccl": "NCCL works on GPU memory: needs --device cuda",
        "against cupyx": "cupyx.distributed works on CuPy arrays: needs --device cuda"}
    assert len(starting(output, "# against ")) == 3


def test_gloo_takes_part_where_pytorch_is_installed(mpiexec):
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
    output, errors, codes = launched(mpiexec, 2, "all_reduce -b 64 -e 64 -n 2 --against gloo")
    assert codes == [0, 0], errors
    assert starting(output, "# against gloo  all_reduce  geometric mean")


def test_overlap_has_osus_columns(ranks):
    code, output, record = ranks(bench, 2, "all_reduce -b 1K -e 64K -f 64 -n 3 --overlap")[0]
    assert code == 0
    titles = starting(output, "# Size ")[0]
    assert titles.split("  ")[-1].strip() == "Overlap(%)"
    assert len(titles) == 10 + 4 * 20
    assert [line["size"] for line in record["gpucoll"]["overlap"]] == [1024, 65536]
    assert all(0 <= line["overlap_pct"] <= 100 for line in record["gpucoll"]["overlap"])


def test_pairs_are_measured_in_both_directions_and_checked(ranks):
    code, output, record = ranks(bench, 3, "sendrecv --pairs -b 1K -e 1K -n 3")[0]
    assert code == 0
    assert [(pair["source"], pair["target"]) for pair in record["gpucoll"]["pairs"]] == [
        (0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert {(pair["size"], pair["nwrong"]) for pair in record["gpucoll"]["pairs"]} == {(1024, 0)}
    assert len(starting(output, " ")) == 6


# Planted faults


def corrupt(comm):
    """Let rank 1's results of more than one element have a wrong last one."""
    right = comm.all_reduce

    def all_reduce(x, out, **options):
        right(x, out, **options)
        out[-1] += comm.rank == 1 and out.size > 1

    comm.all_reduce = all_reduce


def forget(comm):
    """Let the collective do nothing at all."""
    comm.all_gather = lambda x, out, **options: None


def remember(comm):
    """Let the collective work once for each size, and give the same result ever after."""
    right, kept = comm.all_reduce, {}

    def all_reduce(x, out, **options):
        if out.size not in kept:
            kept[out.size] = right(x, out, **options).copy()
        out[...] = kept[out.size]

    comm.all_reduce = all_reduce


def delay(comm):
    """Let rank 2 come late to every collective of more than one element."""
    right = comm.all_reduce

    def all_reduce(x, out, **options):
        if comm.rank == 2 and out.size > 1:
            time.sleep(0.03)
        return right(x, out, **options)

    comm.all_reduce = all_reduce


def throttle(comm):
    """Make the link from rank 2 to rank 0 slow."""
    right = comm.send

    def send(x, dst, **options):
        if (comm.rank, dst) == (2, 0) and x.size > 1:
            time.sleep(0.03)
        return right(x, dst, **options)

    comm.send = send


@pytest.mark.mutant
def test_one_wrong_element_on_one_rank_is_counted(ranks):
    found = ranks(bench, 3, "all_reduce -b 4 -e 400 -f 100 -n 1 -c 2 --algorithm ring,tree", corrupt)
    assert [code for code, *_ in found] == [1] * 3
    each, none = (3 * (1 + BURST), 3 * (1 + BURST)), (0, 0)
    assert [(row["wrong"], row["in_wrong"]) for row in parse(found[0][1])] == [none, none, each, each]
    assert starting(found[0][1], f"# Out of bounds values : {12 * (1 + BURST)} FAILED")
    assert found[0][2]["out_of_bounds"] == {"count": 12 * (1 + BURST), "okay": "false"}


@pytest.mark.mutant
def test_a_collective_that_does_nothing_is_all_wrong(ranks):
    found = ranks(bench, 2, "all_gather -b 128 -e 128 -n 1 --algorithm ring --against mpi", forget)
    assert [code for code, *_ in found] == [1, 1]
    result = found[0][2]["results"][0]
    assert result["out_of_place"]["nwrong"] == 2 * 2 * 32 * (1 + BURST)
    assert result["against"]["mpi"]["out_of_place"]["nwrong"] == 0


@pytest.mark.mutant
def test_a_result_that_was_kept_does_not_score(ranks):
    code, output, _ = ranks(bench, 2, "all_reduce -b 4000 -e 4000 -n 3 --algorithm ring", remember)[0]
    assert code == 1
    assert parse(output)[0]["wrong"] > 4 * 1900  # of 2,000 elements, three timed repetitions and the check's


@pytest.mark.mutant
def test_a_check_that_finds_nothing_is_found_first(ranks):
    assert ["GC-BENCH" in text for text in ranks(without_a_check, 2)] == [True] * 2


def without_a_check(mpi):
    from gpucoll.bench.data import Data

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Data, "wrong", lambda *_: 0)
        with pytest.raises(gc.BackendError) as error:
            bench(mpi, "all_reduce -b 64 -e 64 -n 1")
    return str(error.value)


@pytest.mark.mutant
@pytest.mark.parametrize("algorithm", ["ring", "two_shot"])
def test_a_slow_rank_is_named(ranks, algorithm):
    code, output, record = ranks(bench, 4, f"all_reduce -b 4K -e 4K -n 3 --algorithm {algorithm}", delay)[0]
    assert code == 0
    assert [text.split(" on ")[0] for text in record["gpucoll"]["findings"]] == ["slow rank: 2"], record["gpucoll"]
    assert starting(output, "# slow rank: 2 on ")


@pytest.mark.mutant
def test_a_slow_link_is_named(ranks):
    code, output, record = ranks(bench, 3, "sendrecv --pairs -b 1K -e 1K -n 5", throttle)[0]
    assert code == 0
    assert len(record["gpucoll"]["findings"]) == 1, record["gpucoll"]
    text = starting(output, "# slow link: ")[0]
    assert text.startswith("# slow link: 2 on ")
    assert " to 0 on " in text
    assert [(pair["source"], pair["target"]) for pair in record["gpucoll"]["pairs"] if pair["slow"]] == [(2, 0)]


@pytest.mark.parametrize(("flags", "variables", "code"), [
    ("--min-bw 0", {}, 0), ("--min-bw 1000000", {}, 1), ("", {"NCCL_TESTS_MIN_BW": "1000000"}, 1)])
def test_a_bandwidth_below_the_least_one_fails(ranks, flags, variables, code):
    found = ranks(bench, 2, f"all_reduce -b 64 -e 64 -n 1 {flags}", None, variables)
    assert [one[0] for one in found] == [code] * 2


def test_what_the_executor_cannot_do_is_refused_on_every_rank(ranks):
    messages = ranks(refused, 3, "all_reduce -b 8 -e 8 --algorithm ring")
    assert len(set(messages)) == 1
    assert "GC-EXECUTOR" in messages[0]


def test_a_root_beyond_the_ranks_is_refused_on_every_rank(ranks):
    assert ["GC-ROOT" in message for message in ranks(refused, 2, "broadcast -b 8 -e 8 -r 2")] == [True] * 2


def test_a_file_that_cannot_be_written_is_refused_on_every_rank(ranks):
    messages = ranks(refused, 2, "all_reduce -b 8 -e 8 -J no/such/folder/run.json")
    assert ["GC-FILE" in message for message in messages] == [True] * 2


def test_symmetric_memory_is_used_or_refused_with_the_reason(ranks):
    if hasattr(gc.Communicator, "empty"):
        assert ranks(bench, 2, "all_reduce -b 64 -e 64 -n 1 --memory symmetric")[0][0] == 0
    else:
        assert ["GC-MEMORY" in text for text in ranks(refused, 2, "all_reduce --memory symmetric")] == [True] * 2


# The command


def launched(mpiexec, ranks, line, timeout=60):
    """What the command prints and complains of, and the exit code of every rank."""
    script = f'"$0" -m gpucoll.bench {line}; echo "exit $?"'
    job = mpiexec(ranks, "sh", "-c", script, sys.executable, timeout=timeout)
    codes = [int(line.split()[1]) for line in job.stdout.splitlines() if line.startswith("exit ")]
    return job.stdout, job.stderr, codes


def test_the_command_prints_once_and_ends_with_0(mpiexec):
    output, errors, codes = launched(mpiexec, 2, "reduce_scatter -b 64 -e 64 -n 2 --algorithm ring,native")
    assert codes == [0, 0], errors
    assert output.count("# Collective test starting: reduce_scatter") == 1
    assert [line.split()[-1] for line in output.splitlines() if line[:1] == " "] == ["ring", "native"]


@pytest.mark.slow
def test_the_command_of_the_goal_takes_less_than_a_minute(mpiexec):
    output, errors, codes = launched(mpiexec, 8, "all_reduce -b 8 -e 16M -f 4", timeout=60)
    assert codes == [0] * 8, errors
    assert len(parse(output)) == 11


@pytest.mark.parametrize("line", [
    "all_reduce -b 8X", "all_reduce -b 64 -e 8", "all_reduce --algorithm rng", "broadcast -b 8 -e 8 -r 2",
    "all_reduce -b 8 -e 8 -d flot", "all_reduce -b 8 -e 8 -J no/such/folder/run.json"])
def test_wrong_arguments_are_one_line_and_code_2_on_every_rank(mpiexec, line):
    output, errors, codes = launched(mpiexec, 2, line)
    assert codes == [2, 2]
    assert errors.count("gpucoll bench: ") == 1
    assert errors.count("\n") == 1
    assert output.count("\n") == 2  # the two exit codes


def test_the_verb_is_the_same_command(mpiexec):
    job = mpiexec(2, sys.executable, "-m", "gpucoll", "bench", "all_gather", "-b", "8X", timeout=60)
    assert job.returncode != 0
    assert job.stderr.count("gpucoll bench: ") == 1
    assert "size" not in job.stdout


def test_files_hold_what_was_measured(ranks, tmp_path):
    line = f"all_reduce -b 1K -e 1K -n 5 --algorithm ring -J {tmp_path}/run.json --csv {tmp_path}/run.csv"
    code, output, record = ranks(bench, 2, line)[0]
    assert code == 0
    assert starting(output, f"# Writing JSON output to {tmp_path}/run.json")
    assert json.loads((tmp_path / "run.json").read_text()) == record
    assert str(tmp_path) not in json.dumps(record)
    assert len((tmp_path / "run.csv").read_text().splitlines()) == 3


@pytest.mark.parametrize(("past", "code", "slower"), [(0.5, 1, 2), (5e6, 0, 0)])
def test_a_run_is_held_against_an_old_one(ranks, tmp_path, past, code, slower):
    line = "all_reduce -b 1K -e 1K -n 5 --algorithm ring"
    old = ranks(bench, 2, line)[0][2]
    for placement in ("out_of_place", "in_place"):
        old["results"][0][f"{placement}_per_iter"]["times_us"] = [past] * 5
    (tmp_path / "old.json").write_text(json.dumps(old))
    found = ranks(bench, 2, f"{line} --compare {tmp_path}/old.json")
    assert [one[0] for one in found] == [code] * 2
    assert len(starting(found[0][1], "# compare: SLOWER  all_reduce 1024 float sum ring")) == slower


def test_a_picture_is_drawn(ranks, tmp_path):
    code, output, _ = ranks(bench, 2, f"all_reduce -b 1K -e 64K -f 8 -n 2 --plot {tmp_path}/run.svg")[0]
    assert code == 0, output
    assert (tmp_path / "run.svg").read_text().lstrip().startswith(("<?xml", "<svg"))


def test_ctrl_c_ends_all_ranks_and_keeps_what_was_measured(launcher, tmp_path):
    command = require_launcher().command(3, [sys.executable, "-m", "gpucoll.bench", "all_reduce", "-b", "8", "-e", "8",
                                             "-n", "2", "-N", "0", "-J", str(tmp_path / "run.json")])
    output = tmp_path / "output"
    with output.open("wb") as stream:
        process = start_job(command, "ctrl-c", stream)
        try:
            wait_for_lines(process, output, 3)
            os.kill(process.pid, signal.SIGINT)
            started = time.monotonic()
            process.wait(10)
            seconds = time.monotonic() - started
        finally:
            end_job(process, "ctrl-c")
    assert seconds < 2
    assert process.returncode != 0
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["gpucoll"]["interrupted"]
    assert len(record["results"]) >= 3
    assert record["errors"] == ["interrupted"]


def wait_for_lines(process, output, count):
    """Return once so many lines of data are there; fails after a minute."""
    deadline = time.monotonic() + 60
    while sum(line[:1] == b" " for line in output.read_bytes().splitlines()) < count:
        assert time.monotonic() < deadline, output.read_text()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
            pytest.fail(output.read_text())
