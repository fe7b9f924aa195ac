"""MSCCL's XML as data: the steps of each thread block of each GPU. The XML's GPUs are gpucoll's ranks."""

from __future__ import annotations

import re
from typing import Any, NamedTuple, TypeAlias
from xml.etree import ElementTree

from gpucoll.core.collectives import COLLECTIVES, Collective
from gpucoll.errors import ArgumentError

SPELLINGS = {"".join(name.split("_")): name for name in (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter")}
TYPES = ("s", "r", "rcs", "rrc", "rrs", "rrcs", "re", "cpy", "nop")
SENDS, RECEIVES, REDUCES = ("s", "rcs", "rrs", "rrcs"), ("r", "rcs", "rrc", "rrs", "rrcs"), ("rrc", "rrs", "rrcs", "re")
MOST_GPUS, MOST_CHUNKS, MOST_MOVED = 4096, 1 << 16, 1 << 22  # limits, so that no file exhausts time or memory
NEST = ("algo", "gpu", "tb", "step")  # element names, from the outside in

ChunkPlace: TypeAlias = tuple[str, int]  # buffer "i" (input), "o" (output) or "s" (scratch), and chunk


class XmlStep(NamedTuple):
    """Step `number` of thread block `block` of `gpu`.

    `send` and `recv` are the block's peers, -1 for none; `after` is the (block, step) awaited before the step.
    """

    gpu: int
    block: int
    number: int
    type: str
    src: ChunkPlace
    dst: ChunkPlace
    count: int  # type: ignore[assignment] # as in `Slice`
    send: int
    recv: int
    channel: int
    after: tuple[int, int] | None

    def __str__(self) -> str:
        return f"gpu {self.gpu}, tb {self.block}, step {self.number} ({self.type})"


class XmlProgram(NamedTuple):
    """A parsed file: `chunks` cut the larger of input and output, `scratch` is the most chunks of scratch of a GPU."""

    name: str
    row: Collective
    in_place: bool
    size: int
    chunks: int
    scratch: int
    steps: tuple[XmlStep, ...]  # by gpu, block and number

    @property
    def per_block(self) -> int:
        """The number of chunks per block; in a collective without blocks, of the whole."""
        return self.chunks // self.size if self.row.blocks else self.chunks


def wrong(file: str, why: str) -> ArgumentError:
    """Return the error for a file with wrong XML: ArgumentError with code GC-XML."""
    return ArgumentError(f"{file}: {why}", code="GC-XML")


class XmlTree(ElementTree.TreeBuilder):
    """A builder of the element tree, checking the nesting.

    Document types are refused, and entities with them: expanded entities could turn a small file into a huge tree.
    """

    def __init__(self, file: str) -> None:
        super().__init__()
        self._file, self._depth = file, 0

    def doctype(self, *_: Any) -> None:
        raise wrong(self._file, "document types and entities are not read")

    def start(self, tag: str, attrs: dict[Any, Any], /) -> ElementTree.Element:
        if self._depth >= len(NEST) or tag != NEST[self._depth]:
            raise wrong(self._file, f"element {tag[:40]!r} at depth {self._depth} is none of {' > '.join(NEST)}")
        self._depth += 1
        return super().start(tag, attrs)

    def end(self, tag: str, /) -> ElementTree.Element:
        self._depth -= 1
        return super().end(tag)


class Fields:
    """The attributes of one element, read as checked numbers and words; `where` names the element in messages."""

    def __init__(self, file: str, where: str, element: ElementTree.Element) -> None:
        self._file, self._where, self._attributes = file, where, element.attrib

    def wrong(self, why: str) -> ArgumentError:
        return wrong(self._file, f"{self._where}: {why}")

    def number(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """Return a whole number from `low` to `high`; an attribute without `default` is required."""
        text = self._attributes.get(name, "" if default is None else str(default))
        value = int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else None
        if value is None or not low <= value <= high:
            raise self.wrong(f"{name}={text[:40]!r} is no number from {low} to {high}")
        return value

    def word(self, name: str, known: Any, default: str = "") -> str:
        """Return the attribute's value, one of the `known` words; raise ArgumentError for other values."""
        text = self._attributes.get(name, default)
        if text not in known:
            raise self.wrong(f"{name}={text[:40]!r} is none of {', '.join(known)}")
        return text


def parsed(content: bytes, file: str) -> XmlProgram:
    """Return the program in a file; raise ArgumentError with code GC-XML for other content."""
    try:
        algo = ElementTree.fromstring(content, ElementTree.XMLParser(target=XmlTree(file)))
    except ArgumentError:
        raise
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise wrong(file, f"no XML: {error}") from None
    head = Fields(file, "algo", algo)
    size = head.number("ngpus", 1, MOST_GPUS)
    kind = algo.get("coll", "").replace("_", "").lower()
    if kind == "custom":
        raise head.wrong("coll='custom' names no collective to be proved, and no file runs without a proof; "
                         f"if the file makes a known collective, name {', '.join(SPELLINGS)}")
    if kind not in SPELLINGS:
        raise head.wrong(f"coll={algo.get('coll', '')[:40]!r} is none of {', '.join(SPELLINGS)}")
    row = COLLECTIVES[SPELLINGS[kind]]
    in_place = head.number("inplace", 0, 1, 0) == 1 and head.number("outofplace", 0, 1, 0) == 0
    steps, ids, widest, scratch = list[XmlStep](), set[int](), 0, 0
    for element in algo:
        fields = Fields(file, "gpu", element)
        gpu = fields.number("id", 0, size - 1)
        if gpu in ids:
            raise fields.wrong(f"two elements have id {gpu}")
        ids.add(gpu)
        widest = max(widest, *(fields.number(name, 0, MOST_CHUNKS, 0) for name in ("i_chunks", "o_chunks")))
        scratch = max(scratch, fields.number("s_chunks", 0, MOST_CHUNKS, 0))
        steps += _blocks(file, gpu, size, element)
    if len(ids) != size:
        raise head.wrong(f"ngpus={size}, but the file has {len(ids)} elements gpu")
    chunks = head.number("nchunksperloop", 1, MOST_CHUNKS, widest)
    if row.blocks and chunks % size:
        raise head.wrong(f"nchunksperloop={chunks} is no multiple of {size} GPUs, as {row.name} needs")
    if sum(step.count for step in steps) > MOST_MOVED:
        raise head.wrong(f"the file moves more than {MOST_MOVED} chunks, the limit")
    name = re.sub(r"\W", "_", algo.get("name", ""), flags=re.ASCII)[:80] or "xml"
    return XmlProgram(name if name[0].isalpha() or name[0] == "_" else f"_{name}", row, in_place, size, chunks, scratch,
                      tuple(sorted(steps, key=lambda step: step[:3])))


def _blocks(file: str, gpu: int, size: int, blocks: ElementTree.Element) -> list[XmlStep]:
    steps, ids = list[XmlStep](), set[int]()
    for element in blocks:
        fields = Fields(file, f"gpu {gpu}, tb {element.get('id', '')[:9]}", element)
        block = fields.number("id", 0, MOST_CHUNKS)
        send, recv = (fields.number(name, -1, size - 1) for name in ("send", "recv"))
        channel = fields.number("chan", -1, MOST_CHUNKS, 0)
        if block in ids or gpu in (send, recv):
            raise fields.wrong("two thread blocks have this id" if block in ids else "the peer is the GPU of the block")
        ids.add(block)
        for number, row in enumerate(element):
            where = Fields(file, f"gpu {gpu}, tb {block}, step {number}", row)
            steps.append(_step(where, gpu, block, number, (send, recv, channel)))
    return steps


def _step(fields: Fields, gpu: int, block: int, number: int, peers: tuple[int, int, int]) -> XmlStep:
    kind = fields.word("type", TYPES)
    if fields.number("s", 0, MOST_CHUNKS) != number:
        raise fields.wrong(f"s={fields.number('s', 0, MOST_CHUNKS)} comes as number {number}")
    places = []
    for side, used in (("src", kind not in ("r", "rcs", "nop")), ("dst", kind not in ("s", "nop"))):
        buffer = fields.word(f"{side}buf", ("i", "o", "s"), "" if used else "i")
        places.append((buffer, fields.number(f"{side}off", 0 if used else -1, MOST_CHUNKS, None if used else -1)))
    waited, on = fields.number("depid", -1, MOST_CHUNKS, -1), fields.number("deps", -1, MOST_CHUNKS, -1)
    for side, kinds, peer in (("send", SENDS, peers[0]), ("recv", RECEIVES, peers[1])):
        if kind in kinds and peer < 0:
            raise fields.wrong(f"type {kind}, but the thread block has no {side}")
    return XmlStep(gpu, block, number, kind, places[0], places[1],
                   fields.number("cnt", 0 if kind == "nop" else 1, MOST_CHUNKS, 1), *peers,
                   None if waited < 0 or on < 0 else (waited, on))
