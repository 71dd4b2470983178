"""GBNF gives all answers that llama.cpp gives, which goes by characters and not by lexemes."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from jaxserve.engine.gbnf import is_gbnf, lark_of
from tests.common.matching import matching

pytestmark = pytest.mark.fast

_JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws   # a list
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        # llguidance 1.9.1 with its own conversion can write "abd" only.
        ('root ::= "a" "bc" | "ab" "d"', ["abc", "abd"], ["ab", "abcd"]),
        ('root ::= a "bc" | b "d"\na ::= "a"\nb ::= "ab"', ["abc", "abd"], ["abbc"]),
        ('root ::= w "x"\nw ::= [a-z]+', ["abx", "xx", "xxx"], ["x", "ab"]),
        ('root ::= id ws "\\n"\nid ::= [a-z]+\nws ::= [ \\n]*', ["a\n", "a \n\n"], ["a "]),
        ('root ::= ("a" | "ab"){1,2} "c"?', ["a", "aba", "abab", "ababc"], ["aaa", "c"]),
        ('root ::= "yes" | "no" | "yesterday"', ["yes", "no", "yesterday"], ["yester"]),
        # It reads `.` as any character but a line break, and refuses `\-`.
        ('root ::= . "x" .*', ["\nx", "éx\n\n"], ["x"]),
        (r"root ::= [a\-z]+ [-+]? [x-]", ["a-z+x", "--"], ["b-", "+x"]),
        (r"root ::= [^a\-c] [^\n]", ["bx", "]é"], ["ax", "-x", "b\n"]),
        (r'root ::= "\x41\u00e9\U0001F600\t\"" [\u0400-\u04ff/]', ['Aé😀\t"я', 'Aé😀\t"/'], []),
        ('root ::= "(" root ")" | ', ["", "()", "(())"], ["("]),
        ('root ::= # one\n  "a" |\n  "b" # two\n', ["a", "b"], []),
        ('root ::= (\n  "a"\n  "b"\n)+', ["ab", "abab"], ["a"]),
        ('root ::= x{2} y{1,} z{0,2}\nx ::= "x"\ny ::= "y"\nz ::= "z"', ["xxy", "xxyyzz"], ["xy"]),
        ('root ::= start Rule_2\nstart ::= "a"\nRule_2 ::= "b"', ["ab"], ["a"]),
        (_JSON, ['{"a": [1,-2.5e3, true]}\n', '{"\\u00e9":\n  null}', "{}"], ['{"a"}', "{} \n "]),
    ],
)
def test_texts(grammar: str, texts: list[str], others: list[str]):
    """Texts of each branch can be written, and no others."""
    assert is_gbnf(grammar)
    assert matching(lark_of(grammar), [*texts, *others]) == texts


def _language(rng: random.Random, depth: int = 3) -> tuple[str, set[str]]:
    """Return a random expression over a and b, and its texts."""
    kind = rng.choice(["text", "class", "sequence", "choice", "repeat"] if depth else ["text"])
    if kind == "text":
        text = "".join(rng.choices("ab", k=rng.randint(1, 3)))
        return f'"{text}"', {text}
    if kind == "class":
        return "[ab]", {"a", "b"}
    one, ones = _language(rng, depth - 1)
    if kind == "repeat":
        return f"({one}){{0,2}}", {"", *ones, *(a + b for a in ones for b in ones)}
    other, others = _language(rng, depth - 1)
    if kind == "choice":
        return f"({one} | {other})", ones | others
    return f"{one} {other}", {a + b for a in ones for b in others}


def test_random_grammars():
    """Of 20 random grammars, every text up to 6 characters is right."""
    rng = random.Random(0)
    texts = ["".join(each) for n in range(7) for each in itertools.product("ab", repeat=n)]
    for _ in range(20):
        parts = [_language(rng) for _ in range(3)]
        grammar = "root ::= x y | z\n" + "\n".join(
            f"{name} ::= {body}" for name, (body, _) in zip("xyz", parts, strict=True)
        )
        whole = {a + b for a in parts[0][1] for b in parts[1][1]} | parts[2][1]
        assert matching(lark_of(grammar), texts) == [t for t in texts if t in whole], grammar


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ('root ::= "a', "line 1 of the GBNF needs a closing quote"),
        ('root ::= x\ny ::= "a"', "'x' is not defined"),
        ('r ::= "a"', "a rule 'root'"),
        ('root ::= "a"\nr ::= "\\q"', r"line 2 of the GBNF needs an escape other than \q"),
        ("root ::= <think>", "tokens"),
        ('root ::= "a")', "the end of the rule"),
        ('root = "a"', "'::='"),
    ],
)
def test_mistakes_are_named(grammar: str, said: str):
    """An error has the line, and what is wanted there."""
    with pytest.raises(ValueError) as raised:
        lark_of(grammar)
    assert said in str(raised.value)


def test_fast_lexemes_where_they_change_nothing():
    """llama.cpp's grammar of JSON has its strings as lexemes, which masks take a fortieth for."""
    assert '"true"' in lark_of(_JSON)
    assert '"t" "r" "u" "e"' in lark_of(_JSON.replace('"null")', '"null" | "t" ws)'))


@pytest.mark.release
def test_large_grammars_take_a_short_time():
    """A grammar that doubles 24 times, and long chains of rules and parts."""
    doubling = "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(24))
    chain = "\n".join(f"r{i} ::= r{i + 1}" for i in range(3000))
    begin_s = time.thread_time()
    for rules in (f'{doubling}\nr24 ::= ""', f'{chain}\nr3000 ::= "a"', "r0 ::= " + '"a"? ' * 3000):
        lark_of(f"root ::= r0\n{rules}")
    assert time.thread_time() - begin_s < 10


def test_lark_is_told_apart():
    """Lark has a rule `start`, or is called llguidance's; GBNF may have a rule of that name."""
    assert not is_gbnf('start: "a"') and not is_gbnf("%llguidance {}\nroot: /a/")
    assert is_gbnf('root ::= start\nstart ::= "a"')
