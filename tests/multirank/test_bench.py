"""bench/ on ranks: what the table says of each collective, planted faults, the command and its exit codes."""

import contextlib
import io
import sys

import pytest

import gpucoll as gc

pytest.importorskip("gpucoll.bench.cases", reason="gpucoll runs from a checkout here and is not installed")

from gpucoll.bench import arguments, table

FACTORS = {"all_reduce": lambda p: 2 * (p - 1) / p, "reduce": lambda p: 1, "broadcast": lambda p: 1,
           "all_gather": lambda p: (p - 1) / p, "reduce_scatter": lambda p: (p - 1) / p}
FIELDS = ("size", "count", "type", "redop", "root", "algorithm", "time", "algbw", "busbw", "wrong")
NUMBERS = ("size", "count", "root", "time", "algbw", "busbw", "wrong")


def bench(mpi, line, plant=None):
    """The exit code and the output of a run on the ranks of the pool; `plant` spoils the communicator before."""
    from gpucoll.bench.run import run

    output = io.StringIO()
    with gc.Communicator.from_mpi(mpi) as comm, contextlib.redirect_stdout(output):
        if plant is not None:
            plant(comm)
        code = run(comm, arguments.parse(line.split()))
    return code, output.getvalue()


def refused(mpi, line):
    """The message with which a rank refuses what can be refused only once there is a communicator."""
    from gpucoll.bench.run import run

    with gc.Communicator.from_mpi(mpi, executor="native") as comm, pytest.raises(gc.ArgumentError) as error:
        run(comm, arguments.parse(line.split()))
    return str(error.value)


def parse(output):
    """The lines of data as dictionaries, as anyone's script would read them."""
    rows = [dict(zip(FIELDS, line.split(), strict=True)) for line in output.splitlines() if line[:1] != "#"]
    return [{name: float(value) if name in NUMBERS else value for name, value in row.items()} for row in rows]


def starting(output, words):
    return [line for line in output.splitlines() if line.startswith(words)]


def check_rates(rows, ranks, collective):
    for row in rows:
        assert row["algbw"] == pytest.approx(row["size"] / row["time"] / 1e3, rel=1e-2)
        assert row["busbw"] == pytest.approx(row["algbw"] * FACTORS[collective](ranks), rel=1e-3)


def test_table_of_the_goal(ranks):
    codes_outputs = ranks(bench, 4, "all_reduce -b 8 -e 32K -f 64 -n 3 --algorithm ring,tree,native --against mpi")
    assert [code for code, _ in codes_outputs] == [0] * 4
    assert [output for _, output in codes_outputs[1:]] == [""] * 3
    output = codes_outputs[0][1]
    rows = parse(output)
    assert [(row["size"], row["algorithm"]) for row in rows] == [
        (size, name) for size in (8, 512, 32768) for name in ("ring", "tree", "native", "mpi")]
    assert {(row["type"], row["redop"], row["root"], row["wrong"]) for row in rows} == {("float", "sum", -1, 0)}
    assert all(row["count"] == row["size"] / 4 for row in rows)
    check_rates(rows, 4, "all_reduce")
    assert len(starting(output, "#  Rank ")) == 4
    assert f"# gpucoll {gc.__version__}" in output
    assert starting(output, "# Out of bounds values : 0 OK")
    check_ratios(output, rows)


def check_ratios(output, rows):
    """Each line of ratios is what its size's times give, the last one their geometric mean."""
    *lines, last = [line.split()[3:] for line in starting(output, "# against mpi")]
    product = dict.fromkeys(("ring", "tree", "native"), 1.0)
    for start, (size, *words) in zip(range(0, len(rows), 4), lines, strict=True):
        ratios = dict(zip(words[::2], map(float, words[1::2]), strict=True))
        *ours, peer = rows[start:start + 4]
        assert float(size) == peer["size"]
        for row in ours:
            assert ratios[row["algorithm"]] == pytest.approx(peer["time"] / row["time"], rel=1e-2, abs=1e-3)
            product[row["algorithm"]] *= peer["time"] / row["time"]
    assert last[0] == "geomean"
    means = dict(zip(last[1::2], map(float, last[2::2]), strict=True))
    assert means == pytest.approx({name: value ** (1 / 3) for name, value in product.items()}, rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("collective", FACTORS)
def test_every_collective_by_every_algorithm(ranks, collective, size):
    line = f"{collective} -b 1000 -e 5000 -i 4000 -n 2 -c 2 -d int -r {size - 1} --algorithm all --against mpi"
    code, output = ranks(bench, size, line)[0]
    rows = parse(output)
    unit = 4 * (size if collective in ("all_gather", "reduce_scatter") else 1)
    names = [*gc.algorithms(collective), "native", "mpi"]
    assert code == 0, output
    assert [(row["size"], row["algorithm"]) for row in rows] == [
        (nbytes // unit * unit, name) for nbytes in (1000, 5000) for name in names]
    assert all(row["count"] == row["size"] / unit and row["wrong"] == 0 for row in rows)
    assert {row["root"] for row in rows} == {size - 1 if collective in ("reduce", "broadcast") else -1}
    assert {row["redop"] for row in rows} == {"sum" if "reduce" in collective else "none"}
    check_rates(rows, size, collective)


@pytest.mark.parametrize("line", [
    "all_reduce -d half -o avg", "all_reduce -d bfloat16 -o prod", "all_reduce -d bool -o sum",
    "all_reduce -d f8e5m2 -o min", "reduce -d complex64 -o prod", "reduce_scatter -d uint8 -o band --against mpi",
    "reduce_scatter -d double -o lxor", "all_gather -d bool --against mpi", "broadcast -d bfloat16 --against mpi"])
def test_dtypes_and_ops(ranks, line):
    code, output = ranks(bench, 3, f"{line} -b 3000 -e 3000 -n 1 -w 0 --algorithm all")[0]
    assert code == 0, output
    assert len(parse(output)) >= 2


def test_without_a_check_nothing_is_said_of_wrong_elements(ranks):
    code, output = ranks(bench, 2, "all_reduce -b 64 -e 64 -n 1 -c 0")[0]
    assert code == 0
    assert [line.split()[-1] for line in output.splitlines() if line[:1] != "#"] == ["N/A"]


def test_auto_and_a_number_of_repetitions_of_its_own_choice(ranks):
    code, output = ranks(bench, 2, "broadcast -b 64 -e 64 --executor mpi")[0]
    assert code == 0
    assert [row["algorithm"] for row in parse(output)] == ["auto"]


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


@pytest.mark.mutant
def test_one_wrong_element_on_one_rank_is_counted(ranks):
    results = ranks(bench, 3, "all_reduce -b 4 -e 400 -f 100 -n 1 -c 2 --algorithm ring,tree", corrupt)
    assert [code for code, _ in results] == [1] * 3
    assert [row["wrong"] for row in parse(results[0][1])] == [0, 0, 2, 2]
    assert starting(results[0][1], "# Out of bounds values : 4 FAILED")


@pytest.mark.mutant
def test_a_collective_that_does_nothing_is_all_wrong(ranks):
    results = ranks(bench, 2, "all_gather -b 80 -e 80 -n 1 --algorithm ring --against mpi", forget)
    assert [code for code, _ in results] == [1, 1]
    assert [row["wrong"] for row in parse(results[0][1])] == [40, 0]


def test_what_the_executor_cannot_do_is_refused_on_every_rank(ranks):
    messages = ranks(refused, 3, "all_reduce -b 8 -e 8 --algorithm ring")
    assert len(set(messages)) == 1
    assert "GC-EXECUTOR" in messages[0]


def test_a_root_beyond_the_ranks_is_refused_on_every_rank(ranks):
    assert ["GC-ROOT" in message for message in ranks(refused, 2, "broadcast -b 8 -e 8 -r 2")] == [True] * 2


# The command


def launched(mpiexec, ranks, line):
    """What the command prints and complains of, and the exit code of every rank."""
    script = f'"$0" -m gpucoll.bench {line}; echo "exit $?"'
    job = mpiexec(ranks, "sh", "-c", script, sys.executable, timeout=60)
    codes = [int(line.split()[1]) for line in job.stdout.splitlines() if line.startswith("exit ")]
    return job.stdout, job.stderr, codes


def test_the_command_prints_once_and_ends_with_0(mpiexec):
    output, errors, codes = launched(mpiexec, 2, "reduce_scatter -b 64 -e 64 -n 2 --algorithm ring,native")
    assert codes == [0, 0], errors
    assert output.count("# Collective test starting: reduce_scatter") == 1
    assert [line.split()[5] for line in output.splitlines() if line[:1] == " "] == ["ring", "native"]


@pytest.mark.parametrize("line", ["all_reduce -b 8X", "broadcast -b 8 -e 8 -r 2", "all_reduce -b 8 -e 8 -d flot"])
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
    assert table.TITLES[0][0] not in job.stdout
