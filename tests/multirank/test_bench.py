"""bench/ on ranks: the table and the files of each test, planted faults, and exit codes."""

import contextlib
import functools
import io
import json

import pytest

import gpucoll as gc

pytest.importorskip("gpucoll.bench.cases", reason="gpucoll runs from a checkout here and is not installed")

from gpucoll.bench import arguments
from gpucoll.bench.cases import TESTS
from gpucoll.bench.measure import BURST

FIELDS = "size count type redop root time algbw busbw wrong in_time in_algbw in_busbw in_wrong algorithm".split()


def bench(mpi, line, plant=None):
    """Run a benchmark on ranks of the pool, with an optional planted fault; return exit code, output and record."""
    from gpucoll.bench import machine
    from gpucoll.bench.run import Run

    machine.NODE_BYTES = 1 << 20  # a short measurement of memory copies, to save time
    options, output = arguments.parse(line.split(), {}), io.StringIO()
    with gc.Communicator.from_mpi(mpi, executor=options.flags.executor) as comm, contextlib.redirect_stdout(output):
        if plant is not None:
            method, fault = FAULTS[plant]
            setattr(comm, method, functools.partial(fault, comm, getattr(comm, method)))
        try:
            run = Run(comm, options)
            run.measure()
            code = run.finish()
        except (gc.ArgumentError, gc.BackendError) as error:
            return str(error), "", {}
    return code, output.getvalue(), json.loads(json.dumps(run.record))


def rows_of(output):
    """Return the data lines of the output as dictionaries, read as a user's script would read them."""
    return [dict(zip(FIELDS, line.split(), strict=False)) for line in output.splitlines() if line[:1] == " "]


def test_the_table_against_mpi(ranks, tmp_path):
    line = f"all_reduce -b 8 -e 512 -f 64 -n 2 --algorithm ring,native --against mpi -J {tmp_path}/f --csv {tmp_path}/c"
    found = ranks(bench, 3, f"{line} --plot {tmp_path}/p.svg", timeout=60)
    assert [(code, output) for code, output, _ in found[1:]] == [(0, "")] * 2
    _, output, record = found[0]
    rows = rows_of(output)
    assert [(row["size"], row["algorithm"], row["wrong"], row["in_wrong"]) for row in rows] == [
        (size, name, "0", "0") for size in ("8", "512") for name in ("ring", "native")]
    for result in record["results"]:
        peer = result["against"]["mpi"]
        ratio = peer["out_of_place"]["time"] / result["out_of_place"]["time"]
        assert peer["ratio"]["out_of_place"] == pytest.approx(ratio)
    assert set(record["gpucoll"]["ratios"]["mpi"]["all_reduce"]) == {"ring", "native"}
    assert "# against mpi  all_reduce  geometric mean  ring " in output
    assert json.loads((tmp_path / "f").read_text()) == record
    assert str(tmp_path) not in json.dumps(record)
    assert "ring" in (tmp_path / "c").read_text()
    assert "ring" in (tmp_path / "p.svg").read_text()


@pytest.mark.parametrize(("size", "algorithms"), [
    (1, "all"), (3, "auto"), pytest.param(3, "all", marks=pytest.mark.slow),
    *(pytest.param(size, "all", marks=pytest.mark.nightly) for size in (2, 8))])
def test_every_test_by_every_algorithm(ranks, size, algorithms):
    line = f"all -b 1000 -e 1000 -n 1 -w 0 -c 1 -d int -r {size - 1} --algorithm {algorithms} --against mpi"
    code, output, record = ranks(bench, size, line, timeout=200)[0]
    assert code == 0, output
    by_test = {}
    for result in record["results"]:
        name = result["collective"]
        by_test.setdefault(name, []).append(result["algorithm"])
        for placement in ("out_of_place", "in_place"):
            body, moved = result[placement], result["size"] * ((size - 1) / size if name == "hypercube" else 1)
            assert body["nwrong"] == 0
            assert body["alg_bw"] == pytest.approx(moved / body["time"] / 1e3)
            assert body["bus_bw"] == pytest.approx(body["alg_bw"] * result["factor"])
        assert result["root"] == f"{size - 1 if TESTS[name].rooted else -1:6d}"
    assert list(by_test) == [name for name in TESTS if name != "hypercube" or size != 3]

    def usual(name):
        return ["auto"] if algorithms == "auto" else [*gc.algorithms(name, size=size), "native"]

    own = {"sendrecv": ["sendrecv"], "hypercube": ["recursive_doubling"]}
    assert by_test == {name: own.get(name) or usual(name) for name in by_test}
    assert ("hypercube left out: nRanks 3 is not a power of 2" in output) == (size == 3)


@pytest.mark.parametrize(("line", "outcome"), [
    ("all_reduce --min-bw 1000000", "1"), ("all_reduce -J no/such/folder/run.json", "GC-FILE"),
    ("all_reduce --executor native --algorithm ring", "GC-EXECUTOR")])
def test_what_is_too_slow_or_refused_is_so_on_every_rank(ranks, line, outcome):
    one, other = ranks(bench, 2, f"{line} -b 64 -e 64 -n 2")
    assert outcome in str(one[0])
    assert one[0] == other[0]


# Planted faults: the replaced method, and the replacement


def corrupt(comm, right, x, out, **options):
    """Make the last element of rank 1's result wrong, in results of more than one element."""
    right(x, out, **options)
    out[-1] += comm.rank == 1 and out.size > 1


FAULTS = {"corrupt": ("all_reduce", corrupt), "forget": ("all_gather", lambda *_, **options: None)}


@pytest.mark.mutant
def test_wrong_results_are_counted_in_lines_footer_record_and_exit_code(ranks):
    found = ranks(bench, 3, "all_reduce -b 4 -e 400 -f 100 -n 1 -c 2 --algorithm ring,tree", "corrupt")
    assert [code for code, *_ in found] == [1] * 3
    each = str(3 * (1 + BURST))
    assert [(row["wrong"], row["in_wrong"]) for row in rows_of(found[0][1])] == [*[("0", "0")] * 2, *[(each, each)] * 2]
    assert f"# Out of bounds values : {12 * (1 + BURST)} FAILED" in found[0][1]
    assert found[0][2]["out_of_bounds"] == {"count": 12 * (1 + BURST), "okay": "false"}
    code, _, record = ranks(bench, 2, "all_gather -b 128 -e 128 -n 1 --algorithm ring --against mpi", "forget")[0]
    result = record["results"][0]
    assert (code, result["out_of_place"]["nwrong"]) == (1, 2 * 2 * 32 * (1 + BURST)), "a collective that does nothing"
    assert result["against"]["mpi"]["out_of_place"]["nwrong"] == 0
