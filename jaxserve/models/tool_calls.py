"""Calls of tools in a model's text: formats of the families and their grammars.

=======  =============================================================================  ============
format   a call is written as                                                           families
=======  =============================================================================  ============
HERMES   <tool_call>, JSON of name and arguments, </tool_call>; once a call             Qwen, Hermes
LIST     <tool_call>, a JSON list of names and arguments, </tool_call>                  SmolLM2
MISTRAL  [TOOL_CALLS], a JSON list of names and arguments                               Mistral
LLAMA3   JSON of name and parameters, which is the whole answer; several by semicolons  Llama 3
=======  =============================================================================  ============
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from jaxserve.core.errors import InvalidGrammarError
from jaxserve.core.json_schema import lark_rules

_INSTRUCTION = (
    "You can call functions. They are within <tools></tools>:\n<tools>{tools}</tools>\n\n"
    "To call some, answer with a JSON array of their names and arguments within <tool_call> tags, "
    "and with nothing else:\n"
    '<tool_call>[{{"name": "name1", "arguments": {{"argument1": "value1"}}}}]</tool_call>'
)


@final
@dataclass(frozen=True)
class ToolFormat:
    """How a family writes calls.

    Attributes:
      begin, end: around the JSON; empty for none. A begin that the tokenizer has as one token is
        that token.
      is_list: whether the JSON is a list of calls; otherwise it is one call.
      separator: between two calls, or two lists of them; None where there is one at most.
      arguments: the key of the arguments.
      in_template: whether the chat template writes the tools; otherwise `with_instruction` does.
    """

    begin: str
    end: str
    is_list: bool
    separator: str | None
    arguments: str = "arguments"
    in_template: bool = True


HERMES = ToolFormat("<tool_call>\n", "\n</tool_call>", is_list=False, separator="\n")
LIST = ToolFormat("<tool_call>", "</tool_call>", is_list=True, separator=None, in_template=False)
MISTRAL = ToolFormat("[TOOL_CALLS]", "", is_list=True, separator=None)
LLAMA3 = ToolFormat("", "", is_list=False, separator="; ", arguments="parameters")


def format_of(chat_template: str | None) -> ToolFormat:
    """Return the format of a model, by what its chat template says of tools."""
    template = chat_template or ""
    if "tools" not in template:
        return LIST
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<tool_call>" not in template and '"parameters"' in template:
        return LLAMA3
    return HERMES


def with_instruction(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return messages of which the first, the system's, says how to call tools.

    For chat templates without tools; calls and results of earlier turns become text. Without tools
    nothing else changes.
    """
    said = [_as_text(message) for message in messages]
    if not tools:
        return said
    instruction = _INSTRUCTION.format(tools=json.dumps([tool["function"] for tool in tools]))
    if said and said[0].get("role") == "system":
        first = f"{said[0]['content']}\n\n{instruction}"
        return [{**said[0], "content": first}, *said[1:]]
    return [{"role": "system", "content": instruction}, *said]


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>{message['content']}</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    written = json.dumps([call["function"] for call in calls])
    content = f"{message.get('content') or ''}<tool_call>{written}</tool_call>"
    return {"role": message["role"], "content": content}


def grammar_of(
    form: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    token_of: Callable[[str], int | None],
    *,
    may_be_several: bool,
) -> str:
    """Return a Lark grammar of answers that call one of the tools, or several.

    Args:
      tools: with `name` and perhaps `parameters`, a JSON schema of an object.
      token_of: returns the token of a text that is one added token.

    Raises:
      InvalidGrammarError: llguidance cannot enforce the parameters of a tool.
    """
    lines = [f"call: {_literal(form.begin, token_of)} body {_literal(form.end, token_of)}"]
    if form.is_list:
        more = ' (", " one)*' if may_be_several else ""
        lines.append(f'body: "[" one{more} "]"')
    else:
        lines.append("body: one")
    lines.append("one: " + " | ".join(f"tool{i}" for i in range(len(tools))))
    for i, tool in enumerate(tools):
        begin = f'{{"name": {json.dumps(tool["name"])}, {json.dumps(form.arguments)}: '
        lines.append(f'tool{i}: {json.dumps(begin)} arguments{i} "}}"')
        # A JSON schema of its own, so that references in it begin at its own root.
        try:
            lines += lark_rules(tool.get("parameters") or {"type": "object"}, f"arguments{i}")
        except (ValueError, RecursionError) as error:
            raise InvalidGrammarError(
                f"the parameters of the tool {tool['name']!r} cannot be compiled: {error}"
            ) from error
    many = form.separator is not None and may_be_several
    start = f"call ({json.dumps(form.separator)} call)*" if many else "call"
    return "\n".join(["%llguidance {}", f"start: {start}", *lines, ""])


def _literal(text: str, token_of: Callable[[str], int | None]) -> str:
    """Return a text in Lark, with the part that is an added token as that token."""
    tag = text.strip()
    token = token_of(tag) if tag else None
    if token is None:
        return json.dumps(text) if text else ""
    before, _, after = text.partition(tag)
    parts = [
        json.dumps(before) if before else "",
        f"<[{token}]>",
        json.dumps(after) if after else "",
    ]
    return " ".join(filter(None, parts))
