"""TOML files as rows: tables become named tuples, and errors name the place of a bad key or value.

`name`, `text`, `flag`, `number`, `seconds`, `count`, `one_of` and `list_of` are checks: the fault of a value as a text,
None for a good value.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from gpucoll.errors import ArgumentError, nearest

# Upper bound of a time in a file, in seconds: sums of times stay finite.
LONGEST_TIME = 1e9
# A string, a comment or a word, and a dot that makes it a part of a key; and the most parts of a key: Python's parser
# takes time and memory by their square.
KEY_PART = re.compile(r"""(?:"(?:[^"\\\n]|\\.)*"?|'[^'\n]*'?|\#[^\n]*|(?<![\w-])[\w-]+)[ \t]*(\.[ \t]*)?""")
MOST_KEY_PARTS = 64
T = TypeVar("T")
# A check takes a key and a value, and returns the fault as a text, None for a good value.
Check = Callable[[str, Any], str | None]


def name(key: str, value: Any) -> str | None:
    return None if isinstance(value, str) and value else f"{key} {value!r} is not a name"


def text(key: str, value: Any) -> str | None:
    return None if isinstance(value, str) else f"{key} {value!r} is no text"


def flag(key: str, value: Any) -> str | None:
    return None if isinstance(value, bool) else f"{key} {value!r} is not true or false"


def number(key: str, value: Any, most: float, unit: str = "") -> str | None:
    right = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most
    return None if right else f"{key} {value!r} is not a number{unit}, 0 to {most:g}"


seconds: Check = functools.partial(number, most=LONGEST_TIME, unit=" of seconds")


def count(key: str, value: Any, least: int = 1, most: int = 1 << 53) -> str | None:
    right = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
    return None if right else f"{key} {value!r} is not a whole number, {least} to {most}"


def one_of(*known: str) -> Check:
    return lambda key, value: name(key, value) or (
        None if value in known else f"unknown {key} {value!r}{nearest(value, known)}")


def list_of(check: Check) -> Check:
    return lambda key, value: next(filter(None, (check(key, one) for one in value)), None) \
        if isinstance(value, list) else f"{key} {value!r} is no list"


class TomlFile(NamedTuple):
    """A TOML file for error messages: the name of the file, the error code, and advice appended to every message."""

    name: str
    code: str
    advice: str = ""

    def error(self, reason: str, where: str = "") -> ArgumentError:
        """Return the error with this reason and place."""
        return ArgumentError(f"{self.name}{where and ', '}{where}: {reason}{self.advice}", code=self.code)

    def read(self, content: bytes, known: Iterable[str] | None) -> dict[str, Any]:
        """Return the content of the file; raise ArgumentError for bad TOML and for keys not `known` (None: any)."""
        import tomllib

        try:
            text = content.decode()
            end = parts = 0
            for part in KEY_PART.finditer(text):
                parts, end = (parts + 1 if part.start() == end else 1) if part[1] else 0, part.end()
                if parts == MOST_KEY_PARTS:
                    raise ValueError(f"a key has more than {MOST_KEY_PARTS} parts")
            document = tomllib.loads(text)
        # ValueError: malformed, not UTF-8, or a number too long. RecursionError: nested too deeply.
        except (ValueError, RecursionError) as error:
            raise self.error(f"not TOML: {error}") from None
        if known is not None:
            self.check_keys(document, known)
        return document

    def tables(self, parent: Mapping[str, Any], key: str, where: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the tables ``[[key]]`` of `parent`, each with its place in words; nothing where the key is missing."""
        tables = parent.get(key, [])
        if not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables):
            raise self.error(f"{key} is no [[{key}]]", where)
        for number, table in enumerate(tables, 1):
            yield f"{where}{where and ', '}{key} {number}", table

    def row(self, kind: Callable[..., T], table: Mapping[str, Any], checks: Mapping[str, Check], where: str) -> T:
        """Return a table as the named tuple `kind`; the allowed keys are the keys of `checks`.

        A key may be missing where the field has a default. Raises ArgumentError.
        """
        self.check_keys(table, checks, where)
        for key in checks:
            if key not in table and key not in getattr(kind, "_field_defaults", ()):
                raise self.error(f"{key} is missing", where)
        self.check(table, checks, where)
        return kind(**table)

    def check(self, table: Mapping[str, Any], checks: Mapping[str, Check], where: str = "") -> None:
        """Raise ArgumentError for the first value failing its check; None is not checked."""
        for key, value in table.items():
            fault = None if value is None else checks[key](key, value)
            if fault is not None:
                raise self.error(fault, where)

    def check_keys(self, table: Mapping[str, Any], known: Iterable[str], where: str = "") -> None:
        """Raise ArgumentError for a key not `known`."""
        for key in table:
            if key not in known:
                raise self.error(f"unknown key {key!r}{nearest(key, known)}", where)
