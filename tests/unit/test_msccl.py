"""MSCCL's XML: files of all kinds are read and proved, faults are named, gpucoll's schedules survive a round trip."""

import json

import pytest

import gpucoll as gc
from gpucoll import msccl
from gpucoll.algorithms import registry, schedule
from gpucoll.cli import main
from gpucoll.core.collectives import COLLECTIVES
from gpucoll.core.schedule import Copy, Reduce, Slice
from gpucoll.lab.verify import verify
from gpucoll.msccl.documents import SPELLINGS
from gpucoll.msccl.write import xml
from harness.commands_of import run
from harness.grids import naming
from programs.msccl_files import FILES, File, written

pytestmark = pytest.mark.usefixtures("own_algorithms")
CASES = [(kind, size) for kind, (_, _, sizes) in FILES.items() for size in sizes]
MESSAGES = {"ring": lambda p: 2 * p * (p - 1), "ring_all_gather": lambda p: p * (p - 1), "all_pairs":
            lambda p: 2 * p * (p - 1), "chain": lambda p: p - 1, "tree": lambda p: 4 * (p - 1)}


def read(text):
    return msccl.register(text.encode(), "test.xml")


def moves(collective, name, size, segments=1):
    """Return the moves of all ranks by chunk, without rounds: messages in order of each pair, and local steps.

    The numbers of chunks of scratch are left out, since a reader may choose others.
    """
    sent, local = {}, []
    for rank in range(size):
        for step in (step for steps in schedule(collective, name, rank=rank, size=size, segments=segments)
                     for step in steps):
            parts = [[(part.buffer, part.buffer != "scratch" and part.first + index) for index in range(part.count)]
                     for part in step if isinstance(part, Slice)]
            if isinstance(step, Copy | Reduce):
                local += [(rank, type(step), *pair) for pair in zip(*parts, strict=True)]
            else:
                sent.setdefault((rank, step.peer, type(step)), []).extend(parts[0])
    return {key: sorted(chunks) for key, chunks in sent.items()}, sorted(local, key=str)


@pytest.mark.parametrize(("kind", "size"), CASES)
def test_what_is_read_is_written_and_read_again(kind, size):
    collective, name = read(written(kind, size))
    assert (collective, name) == (FILES[kind][0], f"test_{kind}_{size}")
    for root in {0, size - 1} if COLLECTIVES[collective].rooted else {0}:
        proof = verify(collective, name, size, root=root)
    assert proof.messages == MESSAGES.get(kind, lambda p: proof.messages)(size)
    assert gc.algorithms(collective, size=size + 1).count(name) == 0
    again = read(xml([schedule(collective, name, rank=rank, size=size) for rank in range(size)]))
    assert again[1].startswith(f"{name}_")
    assert moves(collective, name, size) == moves(*again, size)


@pytest.mark.parametrize(("collective", "name"), [key for key in registry() if key[0] in SPELLINGS.values()])
def test_ours_are_written_and_read_again(collective, name):
    for size, segments in ((2, 1), (4, 2), (5, 1), (8, 1)):
        with naming((size, segments)):
            ours = [schedule(collective, name, rank=rank, size=size, segments=segments) for rank in range(size)]
            again = read(xml(ours))
            verify(*again, size)
            assert moves(collective, name, size, segments) == moves(*again, size)


def test_messages_that_leave_before_they_arrive_are_received_aside():
    """MSCCL sends without waiting: GPU 0's chunk leaves before the overwriting message comes, and arrives later."""
    file, place, alone, first, second = File("allgather", 2, 2, scratch=2), ("s", 0), (-1, -1, 0), (1, 1, 0), (1, 1, 1)
    file.gpus[0][alone] += [["cpy", ("i", 0), place, 1, None], ["cpy", ("i", 0), ("o", 0), 1, None],
                            ["cpy", place, ("o", 1), 1, (first, 1)]]
    file.gpus[0][first] += [["s", place, place, 1, (alone, 0)], ["r", place, place, 1, None]]
    file.gpus[0][second] += [["s", place, place, 1, (first, 1)]]
    first, second = (0, 0, 0), (0, 0, 1)
    file.gpus[1][alone] += [["cpy", place, ("s", 1), 1, (second, 0)], ["cpy", place, ("o", 0), 1, (first, 1)],
                            ["cpy", ("i", 0), ("o", 1), 1, None]]
    file.gpus[1][first] += [["s", ("i", 0), place, 1, None], ["r", place, place, 1, (alone, 0)]]
    file.gpus[1][second] += [["r", place, place, 1, None]]
    assert verify(*read(file.text("leaving")), 2).messages == 3


def test_a_reduction_whose_source_is_the_senders_is_understood():
    """msccl-tools means a chunk of the sender, the runtime a chunk of the own GPU: the provable reading counts."""
    file = File("allreduce", 2, 1, scratch=1)
    for rank in range(2):
        file.move(rank, ("i", 0), rank, ("s", 0))
    for rank in range(2):
        file.move(rank, ("i", 0), 1 - rank, ("s", 0), reduce=True)
        file.gpus[1 - rank][rank, rank, 0][-1][1] = ("i", 0)
    for rank in range(2):
        file.move(rank, ("s", 0), rank, ("o", 0))
    assert verify(*read(file.text()), 2).messages == 2
    sender = File("allreduce", 2, 1, scratch=2)
    for rank in range(2):
        sender.move(rank, ("i", 0), rank, ("s", 1))
        sender.move(rank, ("i", 0), rank, ("o", 0))
    for rank in range(2):
        sender.move(rank, ("s", 1), 1 - rank, ("o", 0), reduce=True)
    text = sender.text().replace('type="rrc" srcbuf="o" srcoff="0"', 'type="rrc" srcbuf="s" srcoff="1"')
    assert verify(*read(text), 2).messages == 2


# ---------------------------------------------------------------- faults


RING = written("ring", 4)


BOMB = ('<!DOCTYPE a [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;">]><algo name="&b;" ngpus="1" coll="allreduce" '
        'nchunksperloop="1"><gpu id="0"/></algo>')
HEAD = '<algo name="x" ngpus="1" coll="allreduce" nchunksperloop="1">'
BLOCK = HEAD + '<gpu id="0"><tb id="0" send="-1" recv="-1" chan="0">'


@pytest.mark.parametrize(("text", "words"), [
    (BOMB, "document types"), ("", "no XML"), ("<algo", "no XML"), ("\0\0", "no XML"), ("<a/>", "'a' at depth 0"),
    ('<?xml version="1.0" encoding="klingon"?><algo/>', "no XML"), ("<algo/>", "ngpus=''"),
    (HEAD.replace('"1"', '"99999999999999999999"', 1), "no XML|ngpus"), (HEAD + "</algo>", "0 elements gpu"),
    (HEAD + '<gpu id="1"/></algo>', "id='1'"), (HEAD + '<gpu id="0"/><gpu id="0"/></algo>', "two elements have id 0"),
    (HEAD.replace("allreduce", "custom") + "</algo>", "coll='custom' names no collective"),
    (HEAD.replace("allreduce", "allred") + "</algo>", "coll='allred' is none of"),
    (HEAD + "<tb/></algo>", "'tb' at depth 1"),
    (HEAD.replace('loop="1"', 'loop="0"') + '<gpu id="0"/></algo>', "nchunksperloop"),
    (HEAD.replace('loop="1"', 'loop="1e3"') + '<gpu id="0"/></algo>', "nchunksperloop"),
    (BLOCK + '<step s="0" type="x"/></tb></gpu></algo>', "type='x'"),
    (BLOCK + '<step s="1" type="nop"/></tb></gpu></algo>', "comes as number 0"),
    (BLOCK + '<step s="0" type="s" srcbuf="i" srcoff="0" cnt="1"/></tb></gpu></algo>', "has no send"),
    (BLOCK + '<step s="0" type="cpy" srcbuf="q" srcoff="0" cnt="1"/></tb></gpu></algo>', "srcbuf='q'"),
    (BLOCK + '<step s="0" type="cpy" srcbuf="i" srcoff="-1" cnt="1"/></tb></gpu></algo>', "srcoff='-1'"),
    (BLOCK.replace('send="-1"', 'send="0"') + "</tb></gpu></algo>", "the peer is the GPU of the block"),
    (BLOCK + '</tb><tb id="0" send="-1" recv="-1" chan="0"/></gpu></algo>', "two thread blocks have this id"),
    ("<algo>" * 10000, "at depth 1"), (HEAD.replace("allreduce", "alltoall").replace('gpus="1"', 'gpus="2"')
                                      + '<gpu id="0"/><gpu id="1"/></algo>', "no multiple"),
    (BLOCK + '<step s="0" type="cpy" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0" cnt="60000"/>' + "".join(
        f'<step s="{number}" type="cpy" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0" cnt="60000"/>'
        for number in range(1, 80)) + "</tb></gpu></algo>", "moves more than"),
])
def test_what_is_no_such_xml_is_refused(text, words, tmp_path):
    path = tmp_path / "algorithm.xml"
    path.write_text(text)
    with pytest.raises(gc.ArgumentError, match=words) as caught:
        gc.load(str(path))
    assert caught.value.code == "GC-XML"
    assert str(path) in str(caught.value)


def test_the_command(capsys, tmp_path):
    one, two = str(tmp_path / "one.xml"), str(tmp_path / "two.xml")
    assert "6 rounds" in run(capsys, "convert", "ring", "--ranks", "4", "-o", one)
    assert "24 messages" in run(capsys, "convert", one, "-o", two)
    assert "24 messages" in run(capsys, "convert", two, "--ranks", "4", "-o", one)
    assert run(capsys, "verify", "--ranks", "4", "--json", one, two)["faults"] == 0
    (tmp_path / "wrong.xml").write_text(RING.replace('s="3" type="rrcs"', 's="3" type="rcs"', 1))
    assert main(["verify", "--json", str(tmp_path / "wrong.xml")]) == 1
    assert "output chunk" in json.loads(capsys.readouterr().out)["algorithms"][0]["fault"]
    assert "reduce by binomial" in run(capsys, "convert", "binomial", "--collective", "reduce", "-o", two)
    assert "4 ranks" in run(capsys, "draw", one, "-o", str(tmp_path / "one.svg"))
    found = run(capsys, "simulate", "all_reduce", "1M", "--ranks", "4", "--algorithm", one, "--json")
    assert found["predictions"][0]["seconds"] > 0
