"""TOML files as rows: tables become named tuples, and what is wrong with a key or a value is said with its place."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from gpucoll.errors import ArgumentError, nearest

LONGEST = 1e9  # seconds: what adds up such numbers stays finite
T = TypeVar("T")
Check = Callable[[str, Any], str | None]  # of a key and its value: what is wrong with it, None where nothing is


def name(key: str, value: Any) -> str | None:
    return None if isinstance(value, str) and value else f"{key} {value!r} is not a name"


def seconds(key: str, value: Any) -> str | None:
    right = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LONGEST
    return None if right else f"{key} {value!r} is not a number of seconds, 0 to {LONGEST:g}"


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
    """A file as its errors name it, their code, and what they advise at the end."""

    name: str
    code: str
    advice: str = ""

    def error(self, reason: str, where: str = "") -> ArgumentError:
        """Return the error that says what is wrong, and where."""
        return ArgumentError(f"{self.name}{where and ', '}{where}: {reason}{self.advice}", code=self.code)

    def read(self, content: bytes, known: Iterable[str]) -> dict[str, Any]:
        """Return what the file says; only these keys are `known` in it."""
        try:
            document = tomllib.loads(content.decode())
        except (ValueError, RecursionError) as error:  # malformed, no text, numbers too long, or nested too deeply
            raise self.error(f"it is no TOML: {error}") from None
        self._check_keys(document, known)
        return document

    def tables(self, parent: Mapping[str, Any], key: str, where: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the tables ``[[key]]`` of `parent`, none where there is no such key, each with its place in words."""
        tables = parent.get(key, [])
        if not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables):
            raise self.error(f"{key} is no [[{key}]]", where)
        for number, table in enumerate(tables, 1):
            yield f"{where}{where and ', '}{key} {number}", table

    def row(self, kind: Callable[..., T], table: Mapping[str, Any], checks: Mapping[str, Check], where: str) -> T:
        """Return the named tuple that a table says; its keys are those that have `checks`."""
        self._check_keys(table, checks, where)
        for key in checks:
            if key not in table and key not in getattr(kind, "_field_defaults", ()):
                raise self.error(f"{key} is missing", where)
        self.check(table, checks, where)
        return kind(**table)

    def check(self, table: Mapping[str, Any], checks: Mapping[str, Check], where: str) -> None:
        """Raise where a value is not what it should be; None is no value."""
        for key, value in table.items():
            fault = None if value is None else checks[key](key, value)
            if fault is not None:
                raise self.error(fault, where)

    def _check_keys(self, table: Mapping[str, Any], known: Iterable[str], where: str = "") -> None:
        for key in table:
            if key not in known:
                raise self.error(f"unknown key {key!r}{nearest(key, known)}", where)
