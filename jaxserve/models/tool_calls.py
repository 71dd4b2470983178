"""How the model families write calls of tools: one description for each format.

`CallReader` reads calls, and `grammar_of` makes the grammar of calls that must be made, both from
the same description.

=============  =============================================================  =====================
format         a call is written as                                           families
=============  =============================================================  =====================
HERMES         <tool_call>, JSON of name and arguments, </tool_call>          Qwen, Hermes, SmolLM3,
                                                                              Granite 4
LIST           <tool_call>, a JSON list of names and arguments, </tool_call>  SmolLM2
MISTRAL        [TOOL_CALLS], a JSON list of names and arguments               Mistral, before 2025
MISTRAL_ARGS   [TOOL_CALLS]name[ARGS], JSON of the arguments                  Mistral
LLAMA3         JSON of name and parameters, which is the whole answer;        Llama 3
               several by semicolons
PYTHONIC       [name(key=value), ...], which is the whole answer              Llama 3.2, Llama 4
LFM2           the same between tags                                          LFM2
NEMOTRON       <TOOLCALL>, a JSON list of names and arguments, </TOOLCALL>    Nemotron Nano 2
COMMAND        <|START_ACTION|>, a JSON list of numbers, tool_names and       Command A, R7B
               parameters, <|END_ACTION|>
GRANITE        <|tool_call|>, a JSON list of names and arguments              Granite 3
TOOL_CALLS     <tool_calls>, a JSON list of names and arguments,              Apriel, Hunyuan A13B
               </tool_calls>
APERTUS        <|tools_prefix|>, a JSON list of {name: arguments},            Apertus
               <|tools_suffix|>
GIGACHAT       a message of the role "function call", JSON of name and        GigaChat 3
               arguments
QWEN3_CODER    <function=name>, <parameter=key>, value, ... in <tool_call>    Qwen3-Coder, Qwen3.5
SEED           the same in <seed:tool_call>, values without line breaks       Seed-OSS
FUNCTIONARY    <function=name>, JSON of the arguments, </function>            functionary 3.1
GLM            <tool_call>name, <arg_key>, <arg_value>, ... </tool_call>      GLM 4.5 and later
MINIMAX        <invoke name=...>, <parameter name=...>, value, ... in         MiniMax M2
               <minimax:tool_call>
DEEPSEEK_V3    function, name and JSON in a code block, between tags          DeepSeek V3, R1
DEEPSEEK_V31   name and JSON between tags                                     DeepSeek V3.1
DEEPSEEK_V32   <invoke name=...>, <parameter name=... string="true">, value,  DeepSeek V3.2
               ... in <function_calls>, with ｜DSML｜ in every tag
GIGACHAT35     the same in <tool_calls>, with ｜GCML｜                          GigaChat 3.5
KIMI           functions.name:index and JSON between tags                     Kimi K2
HARMONY        a message on the commentary channel to=functions.name          gpt-oss
FUNCTIONGEMMA  call:name{key:value, ...} between tags, text in <escape>       FunctionGemma
GEMMA4         the same between other tags, text in <|"|>                     Gemma 4
=============  =============================================================  =====================
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

_INSTRUCTION = (
    "You can call functions. They are within <tools></tools>:\n<tools>{tools}</tools>\n\n"
    "To call some, answer with {form}, and with nothing else:\n{example}"
)
_OF_LIST = "a JSON array of their names and arguments within <tool_call> tags"
_EXAMPLE = {"name": "name1", "arguments": {"argument1": "value1"}}


@final
@dataclass(frozen=True)
class JsonCall:
    """A call that is one JSON object; the attributes are its keys, `number` that of its number.

    With `is_keyed` the name is the only key, and the arguments are its value.
    """

    arguments: str = "arguments"
    name: str = "name"
    number: str = ""
    is_keyed: bool = False

    def filled(self, number: int, name: str, arguments: Any) -> dict[str, Any]:
        if self.is_keyed:
            return {name: arguments}
        first = {self.number: str(number)} if self.number else {}
        return {**first, self.name: name, self.arguments: arguments}


@final
@dataclass(frozen=True)
class JsonArguments:
    """Arguments that are one JSON object."""


@final
@dataclass(frozen=True)
class TaggedArguments:
    """Arguments between tags, each value as plain text, or as JSON if it is not a string.

    A value begins after `begin`, its key, `middle` and `value`; after `json` in place of `value`,
    if there is one, where the value is JSON. A line break that `middle` or `value` ends with, and
    one that `end` begins with, are not part of the value.
    """

    begin: str
    middle: str
    end: str
    value: str = ""
    json: str = ""

    def before(self, *, is_text: bool) -> str:
        """Return what stands between a key and its value."""
        return self.middle + (self.value if is_text or not self.json else self.json)


@final
@dataclass(frozen=True)
class PythonArguments:
    """Keyword arguments of Python, with literals as values."""


@final
@dataclass(frozen=True)
class QuotedArguments:
    """Keys without quotes, and values as in JSON, with text between two `quote`s."""

    quote: str


@final
@dataclass(frozen=True)
class NamedCall:
    """A call that is a name, and arguments after it."""

    begin: str  # before the name
    after: str  # between the name and the arguments
    end: str
    arguments: JsonArguments | TaggedArguments | PythonArguments | QuotedArguments
    is_numbered: bool = False  # whether the name is in an id, `functions.name:index`
    mark: str = ""  # what `after` ends with, where models write more before it than `after`


@final
@dataclass(frozen=True)
class ToolFormat:
    """The notation in which a family writes calls.

    Tags that the tokenizer has as one token are that token.
    """

    call: JsonCall | NamedCall
    begin: str  # before the calls; empty if the answer must begin with them
    end: str
    between: str | None  # between calls of one begin and end; None if there is one call in them
    separator: str | None  # between one end and the next begin; None if there is one of them
    opening: str = ""  # of the list that the calls are in
    closing: str = ""
    other_begins: tuple[str, ...] = ()  # that models write as well; a call may follow within one
    id_length: int = 0  # letters and digits of an id, if templates take no other ids
    answer: str = ""  # what an answer without calls begins with

    @property
    def begins(self) -> tuple[str, ...]:
        """What calls begin with, without white space around it."""
        return tuple(filter(None, (self.begin.strip(), *self.other_begins)))

    def id_of(self, given: str) -> str:
        """Return an id as templates take it: the given one, or one that is made from it."""
        if not self.id_length or (len(given) == self.id_length and given.isalnum()):
            return given
        return hashlib.sha256(given.encode(errors="surrogatepass")).hexdigest()[: self.id_length]


HERMES = ToolFormat(JsonCall(), "<tool_call>\n", "\n</tool_call>", between=None, separator="\n")
LIST = ToolFormat(
    JsonCall(),
    "<tool_call>",
    "</tool_call>",
    between=", ",
    separator=None,
    opening="[",
    closing="]",
)
MISTRAL = replace(LIST, begin="[TOOL_CALLS]", end="", id_length=9)
MISTRAL_ARGS = ToolFormat(
    NamedCall("", "[ARGS]", "", JsonArguments(), mark="[ARGS]"),
    "[TOOL_CALLS]",
    "",
    between=None,
    separator="",
    id_length=9,
)
LLAMA3 = ToolFormat(
    JsonCall("parameters"), "", "", between=None, separator="; ", other_begins=("<|python_tag|>",)
)
LFM2 = replace(
    LIST,
    call=NamedCall("", "(", ")", PythonArguments()),
    begin="<|tool_call_start|>",
    end="<|tool_call_end|>",
)
PYTHONIC = replace(LFM2, begin="", end="", other_begins=("<|python_start|>", "<|python_tag|>"))
NEMOTRON = replace(LIST, begin="<TOOLCALL>", end="</TOOLCALL>")
COMMAND = ToolFormat(
    JsonCall("parameters", name="tool_name", number="tool_call_id"),
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    between=",\n    ",
    separator=None,
    opening="[\n    ",
    closing="\n]",
)
GRANITE = replace(LIST, begin="<|tool_call|>", end="", other_begins=("<tool_call>",))
TOOL_CALLS = replace(LIST, begin="<tool_calls>", end="</tool_calls>")
APERTUS = replace(
    LIST, call=JsonCall(is_keyed=True), begin="<|tools_prefix|>", end="<|tools_suffix|>"
)
GIGACHAT = ToolFormat(
    JsonCall(),
    "<|message_sep|>\n\nfunction call<|role_sep|>\n",
    "",
    between=None,
    separator=None,
    other_begins=("function call<|role_sep|>", "<|function_call|>"),
)
QWEN3_CODER = ToolFormat(
    NamedCall(
        "<function=",
        ">\n",
        "</function>",
        TaggedArguments("<parameter=", ">\n", "\n</parameter>\n"),
    ),
    "<tool_call>\n",
    "\n</tool_call>",
    between=None,
    separator="\n",
    other_begins=("<function=",),
)
SEED = ToolFormat(
    NamedCall(
        "<function=", ">\n", "</function>", TaggedArguments("<parameter=", ">", "</parameter>\n")
    ),
    "<seed:tool_call>\n",
    "\n</seed:tool_call>",
    between=None,
    separator="\n",
)
FUNCTIONARY = ToolFormat(
    NamedCall("", ">", "", JsonArguments()), "<function=", "</function>", between=None, separator=""
)
GLM = ToolFormat(
    NamedCall(
        "", "\n", "", TaggedArguments("<arg_key>", "</arg_key>\n", "</arg_value>\n", "<arg_value>")
    ),
    "<tool_call>",
    "</tool_call>",
    between=None,
    separator="\n",
)
MINIMAX = ToolFormat(
    NamedCall(
        '<invoke name="',
        '">\n',
        "</invoke>\n",
        TaggedArguments('<parameter name="', '">', "</parameter>\n"),
    ),
    "<minimax:tool_call>\n",
    "</minimax:tool_call>",
    between="",
    separator="\n",
)
DEEPSEEK_V3 = ToolFormat(
    NamedCall(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        JsonArguments(),
    ),
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    between="\n",
    separator=None,
)
DEEPSEEK_V31 = ToolFormat(
    NamedCall("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", JsonArguments()),
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    between="",
    separator=None,
)


def _marked(mark: str, block: str) -> ToolFormat:
    """Return a format of calls in a block, with a mark in every tag."""
    arguments = TaggedArguments(
        f'<{mark}parameter name="', '" string="', f"</{mark}parameter>\n", 'true">', 'false">'
    )
    return ToolFormat(
        NamedCall(f'<{mark}invoke name="', '">\n', f"</{mark}invoke>\n", arguments),
        f"<{mark}{block}>\n",
        f"</{mark}{block}>",
        between="",
        separator=None,
    )


DEEPSEEK_V32 = _marked("｜DSML｜", "function_calls")
GIGACHAT35 = _marked("｜GCML｜", "tool_calls")
KIMI = ToolFormat(
    NamedCall(
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        JsonArguments(),
        is_numbered=True,
    ),
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    between="",
    separator=None,
)
HARMONY = ToolFormat(
    NamedCall("", " <|constrain|>json<|message|>", "<|call|>", JsonArguments(), mark="<|message|>"),
    "<|channel|>commentary to=functions.",
    "",
    between=None,
    separator=None,
    other_begins=(
        "<|start|>assistant<|channel|>commentary to=functions.",
        "<|channel|>analysis to=functions.",
        "<|start|>assistant<|channel|>analysis to=functions.",
        "<|channel|>commentary to=",
        "<|start|>assistant to=functions.",
        "to=functions.",
    ),
    answer="<|channel|>final<|message|>",
)
FUNCTIONGEMMA = ToolFormat(
    NamedCall("call:", "{", "}", QuotedArguments("<escape>")),
    "<start_function_call>",
    "<end_function_call>",
    between=None,
    separator="",
)
GEMMA4 = ToolFormat(
    NamedCall("call:", "{", "}", QuotedArguments('<|"|>')),
    "<|tool_call>",
    "<tool_call|>",
    between=None,
    separator="",
)

# What the chat template of a format has in it, the most special first: several families write
# <tool_call> around something that is not JSON.
_MARKS: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    (("｜DSML｜", "function_calls>"), DEEPSEEK_V32),
    (("<｜GCML｜tool_calls>",), GIGACHAT35),
    (("function call", "<|role_sep|>"), GIGACHAT),
    (("<|tools_prefix|>",), APERTUS),
    (("<tool_calls>[",), TOOL_CALLS),
    (("<minimax:tool_call>",), MINIMAX),
    (("<seed:tool_call>",), SEED),
    (("<|tool_call_start|>",), LFM2),
    (("<|tool_list_start|>",), LFM2),
    (("List of tools: [",), LFM2),
    (("<TOOLCALL>",), NEMOTRON),
    (("<|START_ACTION|>",), COMMAND),
    (("<arg_key>",), GLM),
    (("<tool_call>", "<function=", "<parameter="), QWEN3_CODER),
    (("<function=", "</function>"), FUNCTIONARY),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_ARGS),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<｜tool▁sep｜>", "```json"), DEEPSEEK_V3),
    (("<｜tool▁sep｜>",), DEEPSEEK_V31),
    (("<|tool_calls_section_begin|>",), KIMI),
    (("<|im_middle|>", "tool_declare"), KIMI),
    (("<|channel|>", "functions"), HARMONY),
    (("<start_function_call>",), FUNCTIONGEMMA),
    (("<|tool_call>",), GEMMA4),
    (("<|tool_call|>",), GRANITE),
    (("<tool_call>",), HERMES),
    (("[func_name1(",), PYTHONIC),
    (('"parameters"',), LLAMA3),
)


FORMATS = (*dict.fromkeys(form for _, form in _MARKS), LIST)


def format_of(chat_template: str | None) -> ToolFormat:
    """Return the format of a model, found by searching its chat template."""
    template = chat_template or ""
    found = (form for marks, form in _MARKS if all(mark in template for mark in marks))
    if "tools" in template:
        return next(found, HERMES)
    # The instruction that the template does not have can show calls of JSON only.
    return next((form for form in found if _is_json(form)), LIST)


def with_instruction(
    form: ToolFormat,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    *,
    takes_system: bool = True,
) -> list[dict[str, Any]]:
    """Return messages with instructions in the first, the system's, on how to call tools.

    For chat templates that do not write the tools. Where a template `takes_system` messages not,
    the instructions are in the first message of the user, as Gemma's later templates have them.
    """
    instruction = _INSTRUCTION.format(
        tools=json.dumps([tool["function"] for tool in tools]),
        form=_OF_LIST if form is LIST else "calls in this form",
        example=written(form, [_EXAMPLE]),
    )
    said = [dict(message) for message in messages]
    role = said[0].get("role") if said else None
    if role == "system":
        first = f"{said[0]['content']}\n\n{instruction}"
        return [{**said[0], "content": first}, *said[1:]]
    if role == "user" and not takes_system:
        return [{**said[0], "content": f"{instruction}\n\n{said[0]['content']}"}, *said[1:]]
    return [{"role": "system", "content": instruction}, *said]


def with_ids(form: ToolFormat, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose calls and results have ids that the templates of a format take."""
    if not form.id_length:
        return [dict(message) for message in messages]
    found = []
    for message in messages:
        changed = dict(message)
        if isinstance(message.get("tool_call_id"), str):
            changed["tool_call_id"] = form.id_of(message["tool_call_id"])
        if message.get("tool_calls"):
            changed["tool_calls"] = [
                {**call, "id": form.id_of(call["id"])} for call in message["tool_calls"]
            ]
        found.append(changed)
    return found


def with_calls_as_text(
    form: ToolFormat, messages: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return messages whose calls and results are text; results in a row are one message.

    For chat templates that do not write calls.
    """
    found: list[dict[str, Any]] = []
    was_result = False
    for message in messages:
        is_result = message.get("role") == "tool"
        said = _as_text(form, message)
        if is_result and was_result:
            found[-1]["content"] += f"\n{said['content']}"
        else:
            found.append(said)
        was_result = is_result
    return found


def _as_text(form: ToolFormat, message: Mapping[str, Any]) -> dict[str, Any]:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>{message['content']}</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    text = written(form, [call["function"] for call in calls])
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": f"{message.get('content') or ''}{text}"}


def written(form: ToolFormat, calls: Sequence[Mapping[str, Any]]) -> str:
    """Return calls as a family writes them; each has a `name` and `arguments`."""
    call = form.call
    if isinstance(call, JsonCall):
        each = [json.dumps(call.filled(i, *_parts(one))) for i, one in enumerate(calls)]
    else:
        id = "functions.{}:{}" if call.is_numbered else "{}"
        each = [
            f"{call.begin}{id.format(name, i)}{call.after}"
            f"{_written_arguments(call.arguments, arguments)}{call.end}"
            for i, (name, arguments) in enumerate(map(_parts, calls))
        ]
    if form.between is not None:
        each = [form.between.join(each)]
    inner = f"{form.closing}{form.end}{form.separator or ''}{form.begin}{form.opening}".join(each)
    return f"{form.begin}{form.opening}{inner}{form.closing}{form.end}"


def _written_arguments(notation: object, arguments: Any) -> str:
    if isinstance(notation, JsonArguments) or not isinstance(arguments, Mapping):
        return json.dumps(arguments)
    if isinstance(notation, PythonArguments):
        return ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    if isinstance(notation, TaggedArguments):
        return "".join(
            f"{notation.begin}{key}{notation.before(is_text=isinstance(value, str))}"
            f"{value if isinstance(value, str) else json.dumps(value)}{notation.end}"
            for key, value in arguments.items()
        )
    assert isinstance(notation, QuotedArguments)
    return ",".join(f"{key}:{_quoted(value, notation.quote)}" for key, value in arguments.items())


def _quoted(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, Mapping):
        inner = ",".join(f"{key}:{_quoted(each, quote)}" for key, each in value.items())
        return f"{{{inner}}}"
    if isinstance(value, list):
        return f"[{','.join(_quoted(each, quote) for each in value)}]"
    return json.dumps(value)


def _parts(function: Mapping[str, Any]) -> tuple[str, Any]:
    return function["name"], function["arguments"]


def _is_json(form: ToolFormat) -> bool:
    return isinstance(form.call, JsonCall) or isinstance(_arguments_of(form), JsonArguments)


def _arguments_of(form: ToolFormat) -> object:
    return form.call.arguments


def parameters_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the JSON schema of a tool's arguments; any object without one."""
    return tool.get("parameters") or {"type": "object"}
