"""Reads GBNF, the notation of llama.cpp, into rules and writes them in llguidance's Lark.

llguidance 1.9.1 cuts text into lexemes before it parses them, and each is as long as possible: of
`"a" "bc" | "ab" "d"` it can write only the second branch, since "ab" is a lexeme there. llama.cpp
parses characters. So literals and rules without recursion become lexemes, which are fast, only if
it makes no difference in the whole grammar; otherwise every character is one.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

_NAME = re.compile("[a-zA-Z0-9_-]+")
_COUNTS = re.compile(r"\{\s*(\d+)\s*(?:(,)\s*(\d*)\s*)?\}")
_HEX = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", **{c: c for c in '\\"[]-'}}
LARGEST = 0x10FFFF

Ranges = tuple[tuple[int, int], ...]
Node: TypeAlias = "Chars | Reference | Concatenation | Alternation | Repetition"
# Steps of a comparison of lexemes, of about a microsecond each; without it, characters are lexemes.
_MAX_STEPS = 300_000
_MAX_RULES = 300


@final
@dataclass(frozen=True)
class Chars:
    """One character for each set of ranges; a literal is a text."""

    sets: tuple[Ranges, ...]
    is_literal: bool


@final
@dataclass(frozen=True)
class Reference:
    name: str


@final
@dataclass(frozen=True)
class Concatenation:
    parts: tuple[Node, ...]


@final
@dataclass(frozen=True)
class Alternation:
    parts: tuple[Node, ...]


@final
@dataclass(frozen=True)
class Repetition:
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
        return parts[0] if len(parts) == 1 else Alternation(tuple(parts))

    def _sequence(self, *, is_nested: bool) -> Node:
        parts: list[Node] = []
        while (part := self._part()) is not None:
            self._skip(over_lines=is_nested)
            parts.append(self._repeated(part, is_nested=is_nested))
        return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))

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
                return Repetition(part, least, most)
        counts = _COUNTS.match(self._text, self._at)
        if counts is None:
            return part
        self._at = counts.end()
        self._skip(over_lines=is_nested)
        least, comma, most = counts.groups()
        if not comma:
            return Repetition(part, int(least), int(least))
        return Repetition(part, int(least), int(most) if most else None)

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


def _joined(ranges: Sequence[tuple[int, int]]) -> Ranges:
    return tuple(sorted(each for each in ranges if each[0] <= each[1]))


def _complement(ranges: Sequence[tuple[int, int]]) -> Ranges:
    found, start = list[tuple[int, int]](), 0
    for first, last in _joined(ranges):
        found.append((start, first - 1))
        start = max(start, last + 1)
    return _joined([*found, (start, LARGEST)])


def parts_of(node: Node) -> tuple[Node, ...]:
    if isinstance(node, (Concatenation, Alternation)):
        return node.parts
    return (node.part,) if isinstance(node, Repetition) else ()


def references_of(node: Node) -> list[str]:
    found, left = list[str](), [node]
    while left:
        each = left.pop()
        left += parts_of(each)
        if isinstance(each, Reference):
            found.append(each.name)
    return found


def lark_of(text: str) -> str:
    """Return a grammar in GBNF as one in llguidance's Lark; raise ValueError as `rules_of` does."""
    rules = rules_of(text)
    terminals = _terminals(rules) if len(rules) <= _MAX_RULES else None
    if terminals is not None and not _is_unambiguous(rules, terminals):
        terminals = None
    return _written(rules, terminals)


def _terminals(rules: Mapping[str, Node]) -> set[str]:
    """Return the rules, except for the root, that can be one lexeme: without recursion."""
    found, is_done = set[str](), False
    while not is_done:
        more = {
            name
            for name, rule in rules.items()
            if name != "root" and name not in found and found.issuperset(references_of(rule))
        }
        found |= more
        is_done = not more
    return found


# ---- lexemes ----


@final
@dataclass(frozen=True)
class _Places:
    """The places of an expression's characters: which may be first, last, and follow each other."""

    is_empty: bool
    first: frozenset[int]
    last: frozenset[int]


class _TooLong(Exception):
    """A comparison takes too many steps."""


@final
class _Steps:
    def __init__(self) -> None:
        self._num_left = _MAX_STEPS

    def take(self, num: int = 1) -> None:
        self._num_left -= num
        if self._num_left < 0:
            raise _TooLong


@final
class _Lexeme:
    """An expression as an automaton whose states are its places; counts above one are loops."""

    def __init__(self, node: Node, rules: Mapping[str, Node], steps: _Steps):
        self._rules = rules
        self._steps = steps
        self.sets: list[Ranges] = []
        self.next: list[set[int]] = []
        self.places = self._add(node)

    @property
    def first_chars(self) -> list[Ranges]:
        return [self.sets[place] for place in self.places.first]

    def _add(self, node: Node) -> _Places:
        self._steps.take()
        if isinstance(node, Reference):
            return self._add(self._rules[node.name])
        if isinstance(node, Chars):
            return self._joined(map(self._place, node.sets))
        if isinstance(node, Concatenation):
            return self._joined(map(self._add, node.parts))
        if isinstance(node, Alternation):
            parts = [self._add(part) for part in node.parts]
            return _Places(
                any(part.is_empty for part in parts),
                frozenset().union(*(part.first for part in parts)),
                frozenset().union(*(part.last for part in parts)),
            )
        part = self._add(node.part)
        if node.is_loop:
            self._connect(part.last, part.first)
        return _Places(part.is_empty or node.least == 0, part.first, part.last)

    def _place(self, chars: Ranges) -> _Places:
        self.sets.append(chars)
        self.next.append(set())
        place = frozenset([len(self.sets) - 1])
        return _Places(False, place, place)

    def _joined(self, parts: Iterable[_Places]) -> _Places:
        whole = _Places(True, frozenset(), frozenset())
        for part in parts:
            self._connect(whole.last, part.first)
            whole = _Places(
                whole.is_empty and part.is_empty,
                whole.first | part.first if whole.is_empty else whole.first,
                whole.last | part.last if part.is_empty else part.last,
            )
        return whole

    def _connect(self, last: Iterable[int], first: frozenset[int]) -> None:
        for place in last:
            self._steps.take(len(first))
            self.next[place].update(first)

    def goes_on(self, other: _Lexeme, following: Sequence[Ranges]) -> bool:
        """Whether one of its texts, plus a character that may follow, may begin the other."""
        left = list(itertools.product(self.places.first, other.places.first))
        seen = set(left)
        while left:
            own, its = left.pop()
            self._steps.take(1 + len(other.next[its]) * len(self.next[own]))
            if not _overlap(self.sets[own], other.sets[its]):
                continue
            after = other.next[its]
            if own in self.places.last:
                self._steps.take(len(after) * len(following))
            if own in self.places.last and any(
                _overlap(other.sets[place], chars) for place in after for chars in following
            ):
                return True
            new = [pair for pair in itertools.product(self.next[own], after) if pair not in seen]
            seen.update(new)
            left += new
        return False


def _overlap(one: Ranges, other: Ranges) -> bool:
    return any(a <= d and c <= b for a, b in one for c, d in other)


def _is_unambiguous(rules: Mapping[str, Node], terminals: set[str]) -> bool:
    """Whether the longest lexeme is always the right one, as far as pairs of lexemes tell."""
    steps = _Steps()
    try:
        reached = _Reached(rules, terminals, steps)
        lexemes = {node: _Lexeme(node, rules, steps) for node in reached.after}
        return not any(
            lexemes[node].goes_on(other, [c for each in after for c in lexemes[each].first_chars])
            for node, after in reached.after.items()
            for other in lexemes.values()
        )
    except _TooLong:
        return False


@final
class _Reached:
    """Which lexemes may begin a rule, and (`after`) which may follow each lexeme."""

    def __init__(self, rules: Mapping[str, Node], terminals: set[str], steps: _Steps):
        self._rules = rules
        self._steps = steps
        self._terminals = terminals
        self.after: dict[Node, set[Node]] = {}
        self._is_empty: dict[Node, bool] = {}
        self._first: dict[str, set[Node]] = {name: set() for name in rules}
        self._follow: dict[str, set[Node]] = {name: set() for name in rules}
        self._may_be_empty = dict.fromkeys(rules, False)
        size = -1
        while size != (size := self._size()):
            for name, rule in rules.items():
                if name not in terminals:
                    may_be_empty, first = self._begin(rule)
                    self._may_be_empty[name] |= may_be_empty
                    self._first[name] |= first
                    self._visit(rule, self._follow[name])

    def _size(self) -> int:
        tables = self._first, self._follow, self.after
        return sum(len(each) for table in tables for each in table.values()) + sum(
            self._may_be_empty.values()
        )

    def _is_lexeme(self, node: Node) -> bool:
        is_terminal = isinstance(node, Reference) and node.name in self._terminals
        return isinstance(node, Chars) or is_terminal

    def _begin(self, node: Node) -> tuple[bool, set[Node]]:
        """Return whether a node may be empty, and the lexemes that may begin it."""
        self._steps.take()
        if self._is_lexeme(node):
            if node not in self._is_empty:
                self._is_empty[node] = _Lexeme(node, self._rules, self._steps).places.is_empty
            return self._is_empty[node], {node}
        if isinstance(node, Reference):
            return self._may_be_empty[node.name], set(self._first[node.name])
        if isinstance(node, Alternation):
            found = [self._begin(part) for part in node.parts]
            return any(empty for empty, _ in found), set().union(*(first for _, first in found))
        if isinstance(node, Repetition):
            empty, first = self._begin(node.part)
            return empty or node.least == 0, first
        first = set[Node]()
        for part in parts_of(node):
            empty, more = self._begin(part)
            first |= more
            if not empty:
                return False, first
        return True, first

    def _visit(self, node: Node, after: set[Node]) -> None:
        """Record what follows each part of a node; the lexemes `after` may follow the node."""
        self._steps.take(1 + len(after))
        if self._is_lexeme(node):
            self.after.setdefault(node, set()).update(after)
        elif isinstance(node, Reference):
            self._follow[node.name] |= after
        elif isinstance(node, Repetition):
            again = self._begin(node.part)[1] if node.is_loop else set[Node]()
            self._visit(node.part, after | again)
        elif isinstance(node, Alternation):
            for part in node.parts:
                self._visit(part, after)
        else:
            for part in reversed(parts_of(node)):
                self._visit(part, after)
                empty, first = self._begin(part)
                after = after | first if empty else first


# ---- writing ----


def _written(rules: Mapping[str, Node], terminals: set[str] | None) -> str:
    """Return rules in Lark; without terminals, every character is a lexeme."""
    names = {
        name: "start" if name == "root" else f"{'R' if name in (terminals or ()) else 'r'}{i}"
        for i, name in enumerate(rules)
    }

    def written(node: Node) -> str:
        if isinstance(node, Reference):
            return names[node.name]
        if isinstance(node, Chars):
            if node.is_literal and terminals is not None:
                return json.dumps("".join(chr(each[0][0]) for each in node.sets))
            return " ".join(map(_of_chars, node.sets)) or '""'
        if isinstance(node, Repetition):
            most = "" if node.most is None else node.most
            return f"({written(node.part)}){{{node.least},{most}}}"
        if isinstance(node, Alternation):
            return "(" + " | ".join(map(written, node.parts)) + ")"
        return " ".join(map(_in_parentheses(written), parts_of(node))) or '""'

    lines = (f"{names[name]}: {written(rule)}" for name, rule in rules.items())
    return "\n".join(["%llguidance {}", *lines, ""])


def _in_parentheses(written: Callable[[Node], str]) -> Callable[[Node], str]:
    return lambda node: f"({written(node)})" if isinstance(node, Concatenation) else written(node)


def _of_chars(chars: Ranges) -> str:
    if len(chars) == 1 and chars[0][0] == chars[0][1]:
        return json.dumps(chr(chars[0][0]))
    if chars == ((0, LARGEST),):
        return "/(?s:.)/"
    ranges = "".join(f"\\x{{{first:X}}}-\\x{{{last:X}}}" for first, last in chars)
    return f"/[{ranges}]/"
