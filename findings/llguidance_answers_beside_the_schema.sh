#!/usr/bin/env bash
# llguidance 1.9.1 lets answers through that its JSON schema does not allow, and leaves out some that
# its grammar does.
#
# Seen with llguidance 1.9.1 (Python 3.11, x86-64), byte by byte:
#   const 9007199254740993 takes 9007199254740992: True, 9007199254740993: False
#   const 0.48785665652414756 takes itself: False
#   format date takes 2023-02-29: True
#   properties {"a": string} take {"\u0061": 5}: True
#   minProperties 2 takes {"a": 1, "a": 2}: True
#   start: "a" "bc" | "ab" "d"   takes abc: False, abd: True
#
# It follows: numbers that a double does not hold have to be written as literals of its Lark, dates
# as a pattern; "json_allowed_escapes" without u keeps names from being written in escapes; and a
# grammar that goes by characters, such as GBNF, needs one lexeme a character, since the lexer takes
# the longest one before the parser sees it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q llguidance==1.9.1
"$folder/venv/bin/python" - <<'PYTHON' | tee "$folder/seen"
import json
from llguidance import LLMatcher, LLTokenizer


class Bytes:
    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = 256
    special_token_ids = [256]
    tokens = [*(bytes([i]) for i in range(256)), b"<end>"]

    def __call__(self, text):
        return list(text.encode())


vocabulary = LLTokenizer(Bytes())


def takes(grammar, text):
    matcher = LLMatcher(vocabulary, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    taken = matcher.try_consume_tokens(tokens) == len(tokens)
    return taken and (matcher.is_accepting() or matcher.is_stopped())


style = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def schema(**keywords):
    return LLMatcher.grammar_from_json_schema(keywords, defaults=style)


large = schema(const=9007199254740993)
print("integer:", takes(large, "9007199254740992"), takes(large, "9007199254740993"))
print("float:", takes(schema(const=0.48785665652414756), "0.48785665652414756"))
print("date:", takes(schema(type="string", format="date"), '"2023-02-29"'))
named = schema(type="object", properties={"a": {"type": "string"}})
print("escaped name:", takes(named, '{"\\u0061": 5}'))
print("same key twice:", takes(schema(type="object", minProperties=2), '{"a": 1, "a": 2}'))
lark = LLMatcher.grammar_from_lark('start: "a" "bc" | "ab" "d"')
print("branches:", takes(lark, "abc"), takes(lark, "abd"))
PYTHON
cat > "$folder/stated" <<'STATED'
integer: True False
float: False
date: True
escaped name: True
same key twice: True
branches: False True
STATED
if ! diff "$folder/stated" "$folder/seen"; then
    echo "changed: llguidance 1.9.1 no longer does what is stated above"
    exit 1
fi
