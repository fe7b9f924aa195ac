"""NCCL's tuning model against NCCL's own logs and functions; the files of nccl-tests and of NCCL's tuner."""

import json
from pathlib import Path

import pytest

from gpucoll.analysis.nccl_tuning.machines import NAMED, logged_machine, named_machine
from gpucoll.analysis.nccl_tuning.measurements import compare, parse_run, read_runs, tuner_file
from gpucoll.analysis.nccl_tuning.releases import RELEASES, release
from gpucoll.analysis.nccl_tuning.tuning import COLLECTIVES, Graph, Machine, choices, table
from gpucoll.cli import main
from harness.refusals import refused

SAMPLES = Path(__file__).parents[1] / "samples"


def sample(name, words):
    """Return the lines of a file: so many words, and the rest."""
    text = (SAMPLES / name).read_text()
    return [line.split(maxsplit=words) for line in text.splitlines() if not line.startswith("#")]


PCI, LAN = Graph(1, 3.0, 3.0, ("PHB", "PHB")), Graph(1, 20.0, 20.0, ("NVL", "PHB"))
LONE = Graph(2, 1.2, 1.2, ("LOC", "PHB"))
MACHINES = {
    "nccl-tests#89": named_machine("t4_pcie"),
    "nccl#754": Machine("4 x 4 GPUs on PCIe", "", 75, 4, 4, PCI, PCI._replace(pattern=1)),
    "nccl#1519": Machine("2 x 8 H100, slow NICs", "", 90, 2, 8, LAN, LAN._replace(pattern=1)),
    "nccl#1453": Machine("3 x 8 H100", "", 90, 3, 8, Graph(8, 24.0, 24.0), Graph(8, 24.0, 24.0, pattern=3)),
    "eunomia-bpf/nccl-eBPF": Machine("2 x RTX 5090, sockets", "", 120, 2, 1, LONE, LONE._replace(intra=2.4, pattern=3)),
}
LOGGED = sample("nccl_logged.txt", 3)


@pytest.mark.parametrize(("thread", "version", "name", "line"), LOGGED, ids=[f"{row[0]} {row[2]}" for row in LOGGED])
def test_tables_are_as_nccl_logged_them(thread, version, name, line):
    collective = next(ours for ours, theirs in COLLECTIVES.items() if theirs == name)
    cells = table(MACHINES[thread], release(version), collective).values()
    for cell, text in zip(cells, line.split(), strict=False):
        latency, algbw = text.split("/")
        assert abs(cell.latency - float(latency)) < 0.1
        assert algbw == "-" or abs(cell.algbw - float(algbw)) < 0.1


def test_the_tree_of_h800_has_the_logged_bandwidth():
    """nccl#1154 quotes a single number of its table in words: 68.8 GB/s of algbw for Tree."""
    cells = table(named_machine("h800_ndr(2)"), release("2.19.3"), "all_reduce")
    assert abs(cells["Tree", "Simple"].algbw - 68.8) < 0.1


@pytest.mark.parametrize(("nbytes", "pair", "us"), [
    (8, ("Tree", "LL"), 25.200924), (256, ("Tree", "LL"), 25.229528), (512, ("Tree", "LL"), 25.259054),
    (1024, ("Tree", "LL"), 25.331232), (262144, ("Tree", "LL128"), 54.707825),
    (8589934592, ("Ring", "Simple"), 86069.968750)])
def test_predicted_times_are_as_nccl_logged_them(nbytes, pair, us):
    """nccl#1453 logs NCCL's choice for each size with the predicted time, computed in float32."""
    first, *_ = choices(MACHINES["nccl#1453"], release("2.22.3"), "all_reduce", nbytes)
    assert first[:2] == pair
    assert first.us == pytest.approx(us, rel=2e-7)


def test_choices_are_as_nccl_logged_them():
    """The log of eunomia-bpf/nccl-eBPF has the choice for each size; of gathers it has the bytes of a block."""
    machine, model = MACHINES["eunomia-bpf/nccl-eBPF"], release("2.29.7")
    for power in range(10, 28):
        first, *_ = choices(machine, model, "broadcast", 1 << power)
        assert first[:2] == ("Ring", "LL" if power < 15 else "Simple")
    for power in range(4, 27):
        for name in ("all_gather", "reduce_scatter"):
            first, *_ = choices(machine, model, name, 2 << power)
            assert first[:2] == (("PAT", "Simple") if power == 15 else ("Ring", "LL" if power < 15 else "Simple"))


@pytest.mark.parametrize(("name", "ring", "tree"), [
    ("gb200_nvl4(3)", 107.30, 127.87), ("gb200_nvl8(3)", 205.39, 253.40)])
def test_a_wrong_choice_of_nccl_is_reproduced(capsys, name, ring, tree):
    """nccl#1801: at 16 GiB NCCL 2.27.3 takes rings, and trees measured 19 % and 23 % more, as the bound allows."""
    assert main(["nccl", "all_reduce", "16G", "--machine", name, "--nccl", "2.27.3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    size, = found["sizes"]
    assert (size["choice"]["algorithm"], size["choice"]["protocol"]) == ("Ring", "Simple")
    assert size["algbw_GBps"] == pytest.approx(ring, rel=0.03)
    trees = min(candidate["us"] for candidate in size["candidates"] if candidate["algorithm"] == "Tree")
    assert 16 * 1024 ** 3 / trees / 1e3 < ring < tree < found["bound_GBps"]


SUMS = dict(sample("nccl_sums.txt", 1))
DRAWN = [
    Machine("pcie", "", 70, 4, 4, Graph(2, 12.0, 10.0, ("PHB", "PHB"), same_channels=False),
            Graph(2, 12.0, 10.0, ("PHB", "PHB"), 1), cpu="amd"),
    Machine("hopper", "", 90, 2, 8, Graph(8, 48.0, 45.0, latency=1.5), Graph(8, 48.0, 45.0, pattern=3, latency=1.5),
            Graph(8, 45.0, 48.0), Graph(16, 20.0, 20.0, pattern=3), Graph(8, 40.0, 40.0, pattern=6)),
    Machine("ampere", "", 80, 1, 8, Graph(12, 20.0, 20.0), Graph(12, 20.0, 20.0, pattern=1)),
    Machine("blackwell", "", 100, 8, 1, Graph(4, 40.0, 40.0, ("NVL", "P2C")), Graph(4, 60.0, 40.0, ("NVL", "PXB"), 3),
            Graph(4, 80.0, 96.0)),
    Machine("nodes", "", 100, 3, 4, Graph(16, 24.0, 30.0), Graph(16, 60.0, 40.0, pattern=3), Graph(8, 80.0, 48.0),
            cpu="amd")]


@pytest.mark.parametrize("version", SUMS)
def test_tables_and_times_add_up_as_in_nccl(version):
    model, expected = release(version), iter(map(float, SUMS[version].split()))
    for machine in DRAWN:
        latency = algbw = ms = 0.0
        for collective in COLLECTIVES:
            cells = table(machine, model, collective)
            latency += sum(cell.latency for cell in cells.values())
            algbw += sum(cell.algbw for cell in cells.values())
            skipped = machine.nodes > 1 and collective in ("all_gather", "reduce_scatter") and model.since < (2, 27)
            for nbytes in (1024, 131072, 1 << 24, 1 << 30):
                found = {candidate[:2]: candidate.us for candidate in choices(machine, model, collective, nbytes)}
                ms += sum(found.values()) / 1e3
                if skipped and cells["NVLS", "Simple"].algbw:  # in the table, never chosen
                    ms += (cells["NVLS", "Simple"].latency + nbytes / 1e3 / cells["NVLS", "Simple"].algbw) / 1e3
        for value in (latency, algbw, ms):
            assert value == pytest.approx(next(expected), abs=0.006)


def test_every_release_has_sums_and_every_named_machine_a_choice():
    assert [release(text).since for text in ("2.29", "2.29.3", "2.9")] == [(2, 29, 7), (2, 29, 2), (2, 8, 3)]
    assert {model.since for model in RELEASES} - {(2, 27, 3), (2, 28, 7)} == {release(text).since for text in SUMS}
    for name, (_, least) in NAMED.items():
        for model in RELEASES:
            for collective in COLLECTIVES:
                assert choices(named_machine(f"{name}({least})"), model, collective, 1 << 20)[0].us > 0


LOG = """\
host:1:2 [0] NCCL INFO CPU/0-0 (1/2/0)
host:1:2 [0] NCCL INFO               + NVL[480.0] - NVS/0-0
host:1:3 [1] NCCL INFO comm 0x1 rank 1 nRanks 16 nNodes 2 localRanks 8 localRank 1 MNNVL 0
host:1:2 [0] NCCL INFO Pattern 4, crossNic 0, nChannels 8, bw 24.000000/20.000000, type NVL/PXB, sameChannels 0
host:1:3 [1] NCCL INFO Pattern 1, crossNic 0, nChannels 9, bw 1.000000/1.000000, type SYS/SYS, sameChannels 1
host:1:2 [0] NCCL INFO Pattern 1, crossNic 0, nChannels 8, bw 30.000000/24.000000, type NVL/PIX, sameChannels 1
host:1:2 [0] NCCL INFO Pattern 3, crossNic 0, nChannels 0, bw 0.000000/0.000000, type NVL/PIX, sameChannels 1
host:1:2 [0] NCCL INFO Pattern 5, crossNic 0, nChannels 4, bw 40.000000/48.000000, type NVL/PIX, sameChannels 0
#  Rank  0 Group  0 Pid 1 on host device  0 [0000:18:00] NVIDIA A100-SXM4-80GB
"""


def test_a_machine_from_a_log():
    machine = logged_machine(LOG, "nccl.log")
    assert machine[2:] == (80, 2, 8, Graph(8, 24.0, 20.0, ("NVL", "PXB"), 4, False),
                           Graph(8, 30.0, 24.0, ("NVL", "PIX"), 1), Graph(4, 40.0, 48.0, ("NVL", "PIX"), 5, False),
                           None, None, "amd", "")
    assert (machine.ranks, machine.channels) == (16, 16)
    assert logged_machine(LOG.replace("A100", "GPU"), "nccl.log", 90).sm == 90


HEAD = """\
# Collective test starting: all_gather_perf
#  Rank  0 Group  0 Pid 7 on one device  0 [0000:02:00] NVIDIA GeForce RTX 5090
#  Rank  1 Group  0 Pid 7 on two device  0 [0000:02:00] NVIDIA GeForce RTX 5090
"""


def output(us, extra=""):
    """Return the text of nccl-tests with times for 1, 2, 4 MiB and so on."""
    rows = [f"  {1 << 20 + step} {1 << 17 + step}  float  none  -1  {time} 1.0 0.5 0 {time} 1.0 0.5 0"
            for step, time in enumerate(us)]
    return HEAD + extra + "\n".join(rows) + "\n"


def written(folder, **files):
    """Write files of nccl-tests, and return their paths."""
    for name, text in files.items():
        (folder / f"{name}.txt").write_text(text)
    return [str(folder / f"{name}.txt") for name in files]


def test_the_sizes_where_another_choice_wins(tmp_path, capsys):
    """AllGather as measured in eunomia-bpf/nccl-eBPF: a forced protocol wins at 16 MiB, within noise at 4 MiB."""
    auto = output(["2197.40", "2200.26", "2227.33", "2277.03", "5415.08"])
    simple = output(["2197.75", "2201.28", "2210.17", "2488.60", "3558.59"])
    low = output(["8742.17", "17479.1", "34952.7", "79008.5", "280442"], "# NCCL_PROTO=LL NCCL_ALGO=Ring\n")
    files, conf = written(tmp_path, auto=auto, ring_simple=simple, third=low), tmp_path / "tuner.conf"
    assert main(["nccl", *files, "-o", str(conf)]) == 0
    assert "another choice than NCCL's wins at 1 of 5 sizes: 16 MiB" in capsys.readouterr().out
    assert conf.read_text().splitlines()[3:] == ["allgather,16777216,16777216,ring,simple,-1,2,2"]
    assert main(["nccl", *files, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["sizes"]
    assert [row["won"] for row in rows] == [False] * 4 + [True]
    assert rows[4]["saving"] == pytest.approx(1 - 3558.59 / 5415.08)
    assert list(rows[0]["us"]) == ["default", "Ring/Simple", "Ring/LL"]


def test_a_tuner_file_covers_the_measured_sizes(tmp_path):
    """Without times of NCCL's own choice each size has a row, shared by equal neighbours; channels come from logs."""
    log = "".join(f"x NCCL INFO AllGather: {1 << 19 + step} Bytes -> Algo RING proto LL128 channel{{Lo..Hi}}="
                  f"{{0..{step}}}\n" for step in range(4))
    runs = read_runs(written(tmp_path, ring_ll128=output([1.0, 1.0, 9.0, 1.0], log),
                             nvls_tree_simple=output([2.0] * 4)))
    assert [run.label for run in runs] == ["Ring/LL128", "NVLSTree/Simple"]
    assert tuner_file(compare(runs)).splitlines()[3:] == [
        "allgather,1048576,2097151,ring,ll128,1,2,2", "allgather,2097152,4194303,ring,ll128,2,2,2",
        "allgather,4194304,8388607,nvls_tree,simple,-1,2,2", "allgather,8388608,8388608,ring,ll128,4,2,2"]
    merged = read_runs(written(tmp_path, pat_simple=output([1.0, 1.0]), ring_simple=output([2.0, 2.0])))
    assert tuner_file(compare(merged)).splitlines()[3:] == ["allgather,1048576,2097152,pat,simple,-1,2,2"]


def test_the_model_completes_what_files_leave_open(tmp_path, capsys):
    """A machine's model names NCCL's choice among the files, and the protocol of a forced algorithm."""
    text = HEAD.replace("all_gather", "all_reduce") + "".join(
        f"#  Rank {rank:2} Group  0 Pid 7 on {'one' if rank < 8 else 'two'} device  0 [0000:02:00] H100\n"
        for rank in range(16))
    files = written(tmp_path, ring=text + "67108864 16777216 float sum -1 500.0 1 1 0 500.0 1 1 0\n",
                    tree=text + "67108864 16777216 float sum -1 400.0 1 1 0 500.0 1 1 0\n")
    assert "no file has the times" in (main(["nccl", *files]), capsys.readouterr().out)[1]
    conf = tmp_path / "tuner.conf"
    assert main(["nccl", *files, "--machine", "dgx_h100(2)", "-o", str(conf)]) == 0
    assert capsys.readouterr().out.splitlines()[2].split()[3:] == ["Tree", "Ring", "20.0", "%"]
    assert conf.read_text().splitlines()[3:] == ["allreduce,67108864,67108864,tree,ll128,-1,2,16"]


def test_outputs_of_nccl_tests_are_read():
    run = parse_run((SAMPLES / "nccl_tests.txt").read_text(), "nccl_tests.txt")
    assert (run.collective, run.ranks, run.nodes, run.label) == ("all_reduce", 2, 1, "default")
    assert run.us == {8: 12.35, 32768: 15.02, 134217728: 812.4}
    run = parse_run((SAMPLES / "nccl_tests.json").read_text(), "nccl_tests.json")
    assert (run.collective, run.ranks, run.label, run.us) == ("all_reduce", 4, "Ring", {1024: 12.5, 4096: 12.5})
    old = HEAD.replace("all_gather_perf", "") + "  4096  1024  float  sum  46.60 0.00 0.00 4e-07 46.2 0.00 0.00 0e+00\n"
    assert parse_run(old + "x NCCL INFO NCCL_ALGO set by environment to nvlstree\n", "x").label == "NVLSTree"
    assert parse_run(old, "string_pattern").label == "default"


@pytest.mark.parametrize(("words", "message"), [
    (["all_reduce"], "name the machine"), (["all_to_all"], "not for all_to_all"),
    (["all_reduce", "1M", "--machine", "dgx_h200"], "no machine is named 'dgx_h200'"),
    (["all_reduce", "1M", "--machine", "dgx1(2)"], "nodes from 1 to 1"),
    (["all_reduce", "1M", "--machine", "dgx1", "--nccl", "2.14"], "NCCL 2.14 is not known"),
    (["all_reduce", "1M", "--machine", "dgx1", "-o", "x"], "-o needs files"),
    (["all_reduce", "1Q", "--machine", "dgx1"], "not a number of bytes"), (["none.txt"], "cannot read"),
    (["auto.txt", "--machine", "dgx1"], "has 8 GPUs"), (["auto.txt", "again.txt"], "like another file"),
    (["auto.txt", "other.txt"], "of one collective on the same ranks"), (["wrong.txt"], "3 wrong values at 1048576"),
    (["empty.txt"], "not output of nccl-tests"), (["bad.json"], "not JSON"), (["tree.txt", "-o", "x"], "forces Tree"),
    (["all_reduce", "--machine", "empty.txt"], "has no graphs"), (["alltoall.txt"], "is of alltoall"),
    (["all_reduce", "--machine", "short.log"], "nRanks and nNodes"), (["all_reduce", "--machine", "no.log"], "--sm 90"),
    (["auto.txt", "ring_ll.txt"], "no size in common")])
def test_refusals(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = output([1.0])
    written(tmp_path, auto=text, again=text, other=text.replace("two", "one"), empty="", tree=text,
            wrong=text.replace(" 0.5 0", " 0.5 3"), alltoall=text.replace("all_gather", "alltoall"),
            ring_ll=text.replace("1048576", "8"))
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "short.log").write_text(LOG.replace("nNodes", ""))
    (tmp_path / "no.log").write_text(LOG.replace("A100", ""))
    assert message in refused(capsys, main, ["nccl", *words])
