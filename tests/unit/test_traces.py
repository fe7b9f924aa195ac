"""Traces for other simulators, read by readers of their own and run in any order that the trace permits."""

import itertools
import random
import re
from collections import Counter, defaultdict
from typing import NamedTuple

import numpy
import pytest

from gpucoll.algorithms import algorithms, registry, schedules
from gpucoll.analysis.traces import chakra, goal
from gpucoll.cli import main
from gpucoll.core.collectives import COLLECTIVES
from gpucoll.core.schedule import Copy, Recv, RecvReduce, Reduce, Send
from harness.grids import sampled
from harness.refusals import refused


class Op(NamedTuple):
    sends: bool
    peer: int
    nbytes: int
    after: frozenset


def read_goal(text):
    """Return the operations of each rank: a reader of GOAL's lines, as LogGOPSim's txt2bin takes them."""
    size, *blocks = re.split(r"rank (?=\d+ \{)", text)
    assert re.fullmatch(r"num_ranks \d+\n", size)
    ranks = []
    for number, block in enumerate(blocks):
        head, *lines, last, end = block.split("\n")
        assert (head, last, end) == (f"{number} {{", "}", "")
        ops, places = [], {}
        for line in lines:
            if found := re.fullmatch(r"(\w+): (send|recv) (\d+)b (to|from) (\d+) tag 0", line):
                assert (found[2], found[4]) in {("send", "to"), ("recv", "from")}
                places[found[1]] = len(ops)
                ops.append(Op(found[2] == "send", int(found[5]), int(found[3]), frozenset()))
            else:
                one, other = re.fullmatch(r"(\w+) requires (\w+)", line).groups()
                ops[places[one]] = ops[places[one]]._replace(after=ops[places[one]].after | {places[other]})
        ranks.append(ops)
    assert len(ranks) == int(size.split()[1])
    return ranks


def varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
        if byte < 128:
            return value, at


def fields(data):
    """Return the fields of a protobuf message as a dict from number to values."""
    found, at = defaultdict(list), 0
    while at < len(data):
        key, at = varint(data, at)
        value, at = varint(data, at)
        if key & 7 == 2:
            value, at = data[at:at + value], at + value
        else:
            assert key & 7 == 0
        found[key >> 3].append(value)
    return found


def numbers(packed):
    at = 0
    while at < len(packed):
        value, at = varint(packed, at)
        yield value


KINDS = {"is_cpu_op": 27, "comm_size": 9, "comm_src": 7, "comm_dst": 7, "comm_tag": 7}  # bool, int64 and int32


def read_chakra(data, rank):
    """Return the operations of a rank from length-delimited messages: metadata, then nodes, by et_def.proto."""
    messages, at = [], 0
    while at < len(data):
        length, at = varint(data, at)
        messages.append(fields(data[at:at + length]))
        at += length
    assert messages[0] == {1: [b"0.0.4"]}
    ops = []
    for number, node in enumerate(messages[1:]):
        assert (node[1] or [0], len(node[3])) == ([number], 1)
        assert node[3][0] in (5, 6)
        pairs = {}
        for one in map(fields, node[10]):
            name = one.pop(1)[0].decode()
            assert [*one] == [KINDS[name]]
            pairs[name] = one[KINDS[name]][0]
        sends = node[3] == [5]
        assert (pairs["is_cpu_op"], pairs["comm_tag"]) == (0, 0)
        assert pairs["comm_src" if sends else "comm_dst"] == rank
        ops.append(Op(sends, pairs["comm_dst" if sends else "comm_src"], pairs["comm_size"],
                      frozenset(itertools.chain(*map(numbers, node[5])))))
    return ops


class Memory:
    """The chunks of a rank: pairs of input chunk and contributions; rounds are applied in order."""

    def __init__(self, schedule, root):
        self.rank, self.rounds, self.done = schedule.rank, [*schedule], 0
        self.row, self.size = COLLECTIVES[schedule.collective], schedule.size
        self.per_block = schedule.chunks // (self.size if self.row.blocks else 1)
        count = self.row.input.exists(self.rank, root) * (schedule.chunks if self.row.input.blocks else self.per_block)
        self.chunks = {("input", index): (index, Counter({self.rank: 1})) for index in range(count)}
        # Of each transfer: its round, and its slices; all slices to a peer, or from a peer, go together.
        self.transfers = [(number, parts) for number, steps in enumerate(self.rounds) for parts in grouped(steps)]

    def read(self, part):
        return [self.chunks[part.buffer, part.first + index] for index in range(part.count)]

    def finish(self, came):
        """Apply the round: `came` has for each receive of a peer the contents, in order."""
        steps, self.done = self.rounds[self.done], self.done + 1
        given = [self.read(step.src) if isinstance(step, Copy | Reduce) else
                 [came[step.peer].pop(0) for _ in range(step.dst.count)] if not isinstance(step, Send) else None
                 for step in steps]
        for step, contents in zip(steps, given, strict=True):
            for index, (chunk, ranks) in enumerate(contents or ()):
                key = step.dst.buffer, step.dst.first + index
                if isinstance(step, RecvReduce | Reduce):
                    assert self.chunks[key][0] == chunk
                    ranks = self.chunks[key][1] + ranks
                self.chunks[key] = chunk, ranks

    def check(self, root):
        if self.row.output.exists(self.rank, root):
            for index in range(self.per_block * (self.size if self.row.output.blocks else 1)):
                wanted = self.row.result(self.rank, self.size, root, self.per_block, index)
                if wanted.ranks:
                    assert self.chunks["output", index] == (wanted.chunk, Counter(wanted.ranks))


def grouped(steps):
    found = {}
    for step in steps:
        if isinstance(step, Send | Recv | RecvReduce):
            found.setdefault((isinstance(step, Send), step.peer), []).append(step[0])
    return found.values()


def run(ranks, everyone, root, seed):
    """Run a trace: any operation whose requirements are met may be next; data move as the schedules say."""
    order, memories = random.Random(seed), [Memory(one, root) for one in everyone]
    left = [{*range(len(ops))} for ops in ranks]
    boxes = defaultdict(list)  # contents under way, by sender and receiver
    came = [defaultdict(list) for _ in ranks]
    assert [len(memory.transfers) for memory in memories] == [*map(len, ranks)]

    def apply(rank):
        memory = memories[rank]
        while memory.done < len(memory.rounds) and not any(memory.transfers[number][0] == memory.done
                                                           for number in left[rank]):
            memory.finish(came[rank])

    [apply(rank) for rank in range(len(ranks))]
    while any(left):
        ready = [(rank, number) for rank, ops in enumerate(ranks) for number in left[rank]
                 if not ops[number].after & left[rank] and (ops[number].sends or boxes[ops[number].peer, rank])
                 and not any(other < number and ops[other][:2] == ops[number][:2] for other in left[rank])]
        assert ready, "the trace waits for ever"
        rank, number = order.choice(ready)
        op, parts = ranks[rank][number], memories[rank].transfers[number][1]
        if op.sends:
            boxes[rank, op.peer].append((op.nbytes, [one for part in parts for one in memories[rank].read(part)]))
        else:
            nbytes, contents = boxes[op.peer, rank].pop(0)
            assert (nbytes, len(contents)) == (op.nbytes, sum(part.count for part in parts))
            came[rank][op.peer] += contents
        left[rank].remove(number)
        apply(rank)
    assert not any(boxes.values())
    for memory in memories:
        assert memory.done == len(memory.rounds)
        memory.check(root)


def lengths(one, nbytes):
    """Return the bytes of each chunk of a block: the first are longer by a byte."""
    blocks = one.size if COLLECTIVES[one.collective].blocks else 1
    return [len(part) for part in numpy.array_split(numpy.empty(nbytes // blocks, bool), one.chunks // blocks)]


@pytest.mark.parametrize(("row", "size"), sampled(itertools.product(sorted(registry()), (2, 5, 8)), 40, 71,
                                                  (("all_reduce", "circulant"), 5), (("all_reduce", "tree"), 8)),
                         ids=lambda value: "-".join(value) if isinstance(value, tuple) else None)
def test_traces_run_in_any_order(row, size):
    collective, algorithm = row
    if collective == "barrier" or algorithm not in algorithms(collective, size=size):
        return  # in a barrier no chunk moves
    everyone = schedules(collective, algorithm, size=size, segments=2)
    nbytes = 1000 * size + 300
    ranks = read_goal("".join(goal(everyone, nbytes)))
    assert [read_chakra(chakra(one, nbytes), one.rank) for one in everyone] == ranks
    for seed in range(3):
        run(ranks, everyone, 0, seed)
    cut = lengths(everyone[0], nbytes)
    for one, ops in zip(everyone, ranks, strict=True):
        wanted = [sum(cut[(part.first + index) % len(cut)] for part in parts for index in range(part.count))
                  for steps in one for parts in grouped(steps)]
        assert [op.nbytes for op in ops] == wanted


def test_an_empty_message_is_a_byte_of_goal_alone():
    """LogGOPSim takes the bytes after the first: 2^64 - 1 for an empty message."""
    everyone = schedules("barrier", "dissemination", size=3)
    assert {op.nbytes for ops in read_goal("".join(goal(everyone, 8))) for op in ops} == {1}
    assert {op.nbytes for one in everyone for op in read_chakra(chakra(one, 8), one.rank)} == {0}


def test_the_command_writes_traces(tmp_path, capsys):
    main(["convert", "ring", "--ranks", "4", "--size", "4K", "-o", str(tmp_path / "ring.goal")])
    main(["convert", "ring", "--ranks", "4", "--size", "4K", "-o", str(tmp_path / "ring.et")])
    assert [line.split("/")[-1] for line in capsys.readouterr().out.splitlines()] == [
        "ring.goal: all_reduce by ring, 4 ranks, 24 messages in 6 rounds",
        "ring.0.et to 3.et: all_reduce by ring, 4 ranks, 24 messages in 6 rounds"]
    ranks = read_goal((tmp_path / "ring.goal").read_text())
    assert ranks == [read_chakra((tmp_path / f"ring.{rank}.et").read_bytes(), rank) for rank in range(4)]
    assert {op.nbytes for ops in ranks for op in ops} == {1024}
    words = ["convert", "ring", "--collective", "all_gather", "--ranks", "3", "--size", "8"]
    main([*words, "-o", str(tmp_path / "r.goal")])
    assert capsys.readouterr().out.endswith("6 messages in 2 rounds; 6 of 8 bytes, for equal blocks\n")
    words = ["convert", "ring", "-o", str(tmp_path / "ring.txt")]
    assert "does not end in .xml, .goal or .et" in refused(capsys, main, words)
