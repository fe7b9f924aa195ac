"""The signature of a call: compared between ranks before data is sent, and described in error messages.

Ranks exchange the encoded form. Descriptions are for people only, so the wording may change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

_SEPARATOR = "\x1f"  # ASCII's unit separator
_LENGTHS = ","
COUNTS = "counts"  # the first word of lengths given by the caller
_SHORT = 48  # characters of counts that are shown as they are
# Error codes by the first differing field. The algorithm is last: a different size or op often changes the choice.
_CODES = {"collective": "GC-COLLECTIVE", "dtype": "GC-DTYPE", "shape": "GC-SHAPE", "op": "GC-OP", "root": "GC-ROOT",
          "nbytes": "GC-COUNTS", "lengths": "GC-COUNTS", "algorithm": "GC-ALGO"}


class Signature(NamedTuple):
    """A call in the form shared by all ranks making the same call; texts of any length are the last fields.

    `nbytes` counts the larger of input and output. `where` is "on devices" or "on the host" for calls depending on the
    place. `header` is the collective announced by this exchange of shapes. `lengths` tells the lengths of all ranks'
    blocks apart: their digest, where a rank took them from an earlier call, or `counts_text` of the caller's counts.
    `op` is empty without a reduction, `refusal` is empty for accepted arguments.

    >>> call = Signature("all_reduce", 8, "float32", shape=(2,), algorithm="ring", op="sum")
    >>> call.describe()
    'all_reduce by ring, 8 bytes of float32 in (2,), op sum, root 0'
    >>> Signature.decode(call.encode()) == call
    True
    """

    collective: str
    nbytes: int = 0
    dtype: str = ""
    root: int = 0
    where: str = ""
    header: str = ""
    lengths: str = ""
    shape: tuple[int, ...] = ()
    algorithm: str = ""
    op: str = ""
    refusal: str = ""

    def encode(self) -> str:
        """Return the form exchanged and compared by the ranks: a single line of text."""
        fields = self._replace(shape=_LENGTHS.join(map(str, self.shape)))  # type: ignore[arg-type] # all become texts
        return _SEPARATOR.join(map(str, fields))

    @classmethod
    def decode(cls, text: str) -> Signature:
        """Return the call of an encoded form, possibly cut or damaged; any other text becomes the name of a collective.

        A second line, the place in the program, is no part of the call and is ignored.
        """
        fields = text.partition("\n")[0].split(_SEPARATOR, len(cls._fields) - 1)
        given = dict(zip(cls._fields, fields, strict=False))
        lengths = given.pop("shape", "").split(_LENGTHS)
        digits = {name: given.pop(name, "") for name in ("nbytes", "root")}
        numbers = {name: int(text) if text.isdecimal() else 0 for name, text in digits.items()}
        shape = tuple(int(length) for length in lengths if length.isdecimal())
        return cls(**{"collective": "", **given, **numbers, "shape": shape})  # type: ignore[arg-type] # by name

    def describe(self) -> str:
        """Return the call in words."""
        if self.refusal:
            return f"refused: {self.refusal}"
        where = f" {self.where}" if self.where else ""
        if not self.algorithm:
            return f"{self.collective}{where}"
        op = f", op {self.op}" if self.op else ""
        header = f", header of {self.header}" if self.header else ""
        header += f", {self.lengths}" if self.lengths.startswith(COUNTS) else ""
        return (f"{self.collective} by {self.algorithm}, {self.nbytes} bytes of {self.dtype} in {self.shape}{op}, "
                f"root {self.root}{where}{header}")


def counts_text(counts: Sequence[int]) -> str:
    """Return the counts given by the caller in words; many counts are cut, and followed by a digest.

    >>> counts_text([3, 0, 4])
    'counts 3, 0, 4'
    """
    text = ", ".join(map(str, counts))
    if len(text) > _SHORT:
        text = f"{text[:_SHORT]}... #{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
    return f"{COUNTS} {text}"


class LastCall(NamedTuple):
    """The last call of a rank, as far as another rank knows.

    `number` counts the calls of the communicator, 0 before the first. `text` is the signature, and after a line break
    the place in the program where a call of this kind was first made. `has_ended` is None if unknown. `when` is the
    time of the end, or of the begin of a call under way, by `time.monotonic` of this host, or 0.
    """

    number: int = 0
    text: str = ""
    has_ended: bool | None = None
    when: float = 0.0

    def describe(self) -> str:
        """Return number, call and place in words; "" before the first call.

        >>> LastCall(3, Signature("barrier").encode() + "\\na.py:7").describe()
        'call 3, barrier (first made at a.py:7)'
        """
        call, _, place = self.text.partition("\n")
        words = f", {described(call)}" if call else ""
        return f"call {self.number}{words}" + (f" (first made at {place})" if place else "") if self.number else ""


def described(text: str) -> str:
    """Return in words the call encoded in `text`.

    >>> described(Signature("barrier", where="on the host").encode())
    'barrier on the host'
    """
    return Signature.decode(text).describe()


def is_refusal(text: str) -> bool:
    """Return whether `text` is the signature of a rank refusing its arguments."""
    return Signature.decode(text).refusal != ""


def code_of_difference(calls: Sequence[Signature]) -> str:
    """Return the error code for ranks making these different calls: the code of the first differing field.

    >>> code_of_difference([Signature("reduce", root=0), Signature("reduce", root=1)])
    'GC-ROOT'
    """
    if len({call.header or call.collective for call in calls}) == 1 < len({call.header for call in calls}):
        return "GC-COUNTS"  # the counts were given on some ranks only: the other ranks exchange the lengths
    return next((code for name, code in _CODES.items() if len({getattr(call, name) for call in calls}) > 1),
                "GC-MISMATCH")
