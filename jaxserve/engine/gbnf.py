"""GBNF, the notation of llama.cpp, read into rules."""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TypeAlias, final

_NAME = re.compile("[a-zA-Z0-9_-]+")
_COUNTS = re.compile(r"\{\s*(\d+)\s*(?:(,)\s*(\d*)\s*)?\}")
_HEX = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", **{c: c for c in '\\"[]-'}}
LARGEST = 0x10FFFF

Ranges = tuple[tuple[int, int], ...]
Node: TypeAlias = "Chars | Reference | Sequence | Choice | Repeat"


@final
@dataclass(frozen=True)
class Chars:
    """One character for each element: of the ranges, or of none of them."""

    sets: tuple[Ranges, ...]
    is_literal: bool


@final
@dataclass(frozen=True)
class Reference:
    name: str


@final
@dataclass(frozen=True)
class Sequence:
    parts: tuple[Node, ...]


@final
@dataclass(frozen=True)
class Choice:
    parts: tuple[Node, ...]


@final
@dataclass(frozen=True)
class Repeat:
    """A part, from `least` to `most` times; without a bound if `most` is None."""

    part: Node
    least: int
    most: int | None

    @property
    def is_loop(self) -> bool:
        return self.most is None or self.most > 1


def is_gbnf(text: str) -> bool:
    """Return whether a grammar is in GBNF; those with a rule `start` are in Lark."""
    return re.search(r"(?m)^\s*(%llguidance\b|start\s*:(?!:=))", text) is None


def rules_of(text: str) -> dict[str, Node]:
    """Return the rules of a grammar in GBNF by name, among them `root`.

    Raises:
      ValueError: it is not in GBNF, or a rule that it refers to is missing.
    """
    rules = _Parser(text).rules()
    if "root" not in rules:
        raise ValueError("GBNF has a rule 'root', and there is none")
    for rule in rules.values():
        for name in references_of(rule):
            if name not in rules:
                raise ValueError(f"the rule {name!r} is not defined")
    return rules


@final
class _Parser:
    """Reads rules; a line break ends one, except within parentheses, and after `::=` and `|`."""

    def __init__(self, text: str):
        self._text = text
        self._at = 0

    def rules(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        self._skip(over_lines=True)
        while self._at < len(self._text):
            name = self._name()
            self._skip(over_lines=False)
            self._expect("::=")
            self._skip(over_lines=True)
            found[name] = self._choice(is_nested=False)
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                raise self._error("the end of the rule")
            self._skip(over_lines=True)
        return found

    def _choice(self, *, is_nested: bool) -> Node:
        parts = [self._sequence(is_nested=is_nested)]
        while self._takes("|"):
            self._skip(over_lines=True)
            parts.append(self._sequence(is_nested=is_nested))
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def _sequence(self, *, is_nested: bool) -> Node:
        parts: list[Node] = []
        while (part := self._part()) is not None:
            self._skip(over_lines=is_nested)
            parts.append(self._repeated(part, is_nested=is_nested))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _part(self) -> Node | None:
        if self._takes('"'):
            sets = []
            while not self._takes('"'):
                char = self._char()
                sets.append(((char, char),))
            return Chars(tuple(sets), is_literal=True)
        if self._takes("["):
            return Chars((self._class(),), is_literal=False)
        if self._takes("."):
            return Chars((((0, LARGEST),),), is_literal=False)
        if self._takes("("):
            self._skip(over_lines=True)
            found = self._choice(is_nested=True)
            self._expect(")")
            return found
        if _NAME.match(self._text, self._at):
            return Reference(self._name())
        if self._text[self._at : self._at + 1] in ("<", "!"):
            raise ValueError("tokens (<name>, !<name>) are not supported; write their text")
        return None

    def _repeated(self, part: Node, *, is_nested: bool) -> Node:
        for sign, least, most in (("*", 0, None), ("+", 1, None), ("?", 0, 1)):
            if self._takes(sign):
                self._skip(over_lines=is_nested)
                return Repeat(part, least, most)
        counts = _COUNTS.match(self._text, self._at)
        if counts is None:
            return part
        self._at = counts.end()
        self._skip(over_lines=is_nested)
        least, comma, most = counts.groups()
        if not comma:
            return Repeat(part, int(least), int(least))
        return Repeat(part, int(least), int(most) if most else None)

    def _class(self) -> Ranges:
        is_negated = self._takes("^")
        ranges = list[tuple[int, int]]()
        while not self._takes("]"):
            first = last = self._char()
            if self._text[self._at : self._at + 1] == "-" and not self._text.startswith(
                "-]", self._at
            ):
                self._at += 1
                last = self._char()
            ranges.append((first, last))
        return _complement(ranges) if is_negated else _joined(ranges)

    def _char(self) -> int:
        char = self._text[self._at : self._at + 1]
        if not char:
            raise self._error("a closing quote or bracket")
        self._at += 1
        if char != "\\":
            return ord(char)
        escape = self._text[self._at : self._at + 1]
        self._at += 1
        if escape in _HEX:
            digits = self._text[self._at : self._at + _HEX[escape]]
            self._at += len(digits)
            if (
                re.fullmatch(f"[0-9a-fA-F]{{{_HEX[escape]}}}", digits)
                and int(digits, 16) <= LARGEST
            ):
                return int(digits, 16)
        elif escape in _ESCAPES:
            return ord(_ESCAPES[escape])
        raise self._error(f"an escape other than \\{escape}")

    def _name(self) -> str:
        found = _NAME.match(self._text, self._at)
        if found is None:
            raise self._error("a name")
        self._at = found.end()
        return found[0]

    def _takes(self, sign: str) -> bool:
        is_there = self._text.startswith(sign, self._at)
        self._at += len(sign) if is_there else 0
        return is_there

    def _expect(self, sign: str) -> None:
        if not self._takes(sign):
            raise self._error(repr(sign))

    def _skip(self, *, over_lines: bool) -> None:
        space = r"(?:[ \t\r\n]|#[^\r\n]*)*" if over_lines else r"(?:[ \t]|#[^\r\n]*)*"
        found = re.compile(space).match(self._text, self._at)
        assert found is not None
        self._at = found.end()

    def _error(self, wanted: str) -> ValueError:
        line = self._text.count("\n", 0, self._at) + 1
        near = self._text[max(0, self._at - 20) : self._at + 20]
        return ValueError(f"line {line} of the GBNF needs {wanted} near {near!r}")


def _joined(ranges: Seq[tuple[int, int]]) -> Ranges:
    return tuple(sorted(each for each in ranges if each[0] <= each[1]))


def _complement(ranges: Seq[tuple[int, int]]) -> Ranges:
    found, start = list[tuple[int, int]](), 0
    for first, last in _joined(ranges):
        found.append((start, first - 1))
        start = max(start, last + 1)
    return _joined([*found, (start, LARGEST)])


def parts_of(node: Node) -> tuple[Node, ...]:
    if isinstance(node, (Sequence, Choice)):
        return node.parts
    return (node.part,) if isinstance(node, Repeat) else ()


def references_of(node: Node) -> list[str]:
    """Return the names of the rules that a node refers to."""
    found, left = list[str](), [node]
    while left:
        each = left.pop()
        left += parts_of(each)
        if isinstance(each, Reference):
            found.append(each.name)
    return found
