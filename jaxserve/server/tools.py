"""The tools of one request: the prompt that offers them, the grammar of their calls, the calls."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, final

from jaxserve.core.errors import GrammarFailedError, InvalidGrammarError
from jaxserve.core.json_schema import lark_rules
from jaxserve.engine.grammars import AnswerSchema
from jaxserve.models import tool_calls
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.models.tool_calls import parameters_of
from jaxserve.models.tool_grammars import grammar_of
from jaxserve.models.tool_reader import Call, CallReader
from jaxserve.server.errors import invalid
from jaxserve.server.schema import (
    AddedCall,
    AddedFunction,
    AnsweredCall,
    AnsweredFunction,
    AnswerMessage,
    Delta,
    NamedTool,
    Tool,
    ToolChoice,
    checked_json,
)


@final
class Tools:
    """The tools of a request, and how they may be called (`may_be_several`: `parallel_tool_calls`).

    `variables` are those of the chat template. Raise `RefusedError` if `tool_choice` names no tool,
    or tools are not supported here.
    """

    def __init__(
        self,
        given: Sequence[Tool] | None,
        choice: ToolChoice | None,
        may_be_several: bool | None,
        tokenizer: Tokenizer,
        variables: Mapping[str, Any] | None = None,
    ):
        self.variables = dict(variables or {})
        _check(given, choice)
        self.is_given = given is not None and choice != "none"
        self.tokenizer = tokenizer
        template = tokenizer.tool_template or tokenizer.chat_template or ""
        self._form = tokenizer.tool_format
        self._writes_tools = "tools" in template
        offered = (given or ()) if self.is_given else ()
        self._tools = [tool.model_dump(exclude_none=True) for tool in offered]
        self._must_call = choice == "required" or isinstance(choice, NamedTool)
        name = choice.function.name if isinstance(choice, NamedTool) else None
        functions = [tool["function"] for tool in self._tools]
        self._callable = [each for each in functions if name in (None, each["name"])]
        self._may_be_several = may_be_several is not False and name is None
        self._max_calls = 1 if may_be_several is False else None
        self._schemas: dict[str, AnswerSchema] = {}
        self._answer: AnswerSchema | None = None
        self.params: dict[str, Any] = {}
        if self._must_call:
            self.params["grammar"] = self._grammar()
        if self.is_given:  # a tag may be a control token, which answers otherwise leave out
            self.params["skip_special_tokens"] = False

    def _grammar(self, answer: Sequence[str] = ()) -> str:
        """Return the grammar of calls, whose arguments are then validated, or of an answer."""
        self._schemas = {each["name"]: AnswerSchema(parameters_of(each)) for each in self._callable}
        return grammar_of(
            self._form,
            self._callable,
            self.tokenizer.added_token_id,
            may_be_several=self._may_be_several,
            answer=answer,
        )

    def or_answer(self, schema: Any) -> dict[str, Any]:
        """Return the parameters for calls or an answer of a schema, as the model chooses.

        Where a call is demanded, the schema has no effect.

        Raises:
          InvalidGrammarError: llguidance cannot enforce the schema.
        """
        if self._must_call:
            return self.params
        try:
            rules = lark_rules(schema, "answer")
        except (ValueError, RecursionError) as error:
            raise InvalidGrammarError(f"the json_schema cannot be compiled: {error}") from error
        self._answer = AnswerSchema(schema)
        return {**self.params, "grammar": self._grammar(rules)}

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the tokens of a chat that offers the tools.

        Calls in earlier answers are given to the template as it reads them.
        """
        messages, given = self.as_said(messages), self._given
        if self.is_given and not self._writes_tools:
            takes_system, given = self.tokenizer.takes_system, None
            messages = tool_calls.with_instruction(
                self._form, messages, self._tools, takes_system=takes_system
            )
        return self.tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=given,
            variables=self.variables,
        )

    def continuation(
        self,
        asked: Sequence[Mapping[str, Any]],
        answer: Mapping[str, Any],
        new: Sequence[Mapping[str, Any]],
    ) -> list[int] | None:
        """Return the tokens after an answer; see `Tokenizer.chat_continuation`."""
        given = self._given if self._writes_tools else None
        return self.tokenizer.chat_continuation(
            asked, answer, new, tools=given, variables=self.variables
        )

    def as_said(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return new messages of a conversation as it keeps them.

        If the chat template writes no calls, they and their results become text.
        """
        if not any("tool_calls" in each or each.get("role") == "tool" for each in messages):
            return [dict(message) for message in messages]
        if self._writes_calls():
            return self._as_read(tool_calls.with_ids(self._form, messages))
        return tool_calls.with_calls_as_text(self._form, _with_objects(messages))

    def _writes_calls(self) -> bool:
        if self._form is tool_calls.LIST:  # of our own instruction
            return False
        return self.tokenizer.writes_calls(has_tools=self.is_given)

    @property
    def _given(self) -> list[dict[str, Any]] | None:
        return self._tools if self.is_given else None

    def _as_read(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages whose calls are in the form that the chat template reads."""
        has_calls = any("tool_calls" in message for message in messages)
        if has_calls and not self.tokenizer.takes_text_arguments(has_tools=self.is_given):
            return _with_objects(messages)
        return _with_arguments(messages, lambda text: text or "{}")

    def reader(self) -> Answered:
        """Return the reader of one sample, for pieces or for a whole answer."""
        functions = [tool["function"] for tool in self._tools]
        parameters = {each["name"]: parameters_of(each) for each in functions}
        reader = CallReader(self._form, parameters) if self.is_given else None
        return Answered(reader, self._schemas, self._max_calls, self._answer, self._form.id_of)


def _check(given: Sequence[Tool] | None, choice: ToolChoice | None) -> None:
    if given is None:
        if choice not in (None, "auto", "none"):
            raise invalid("tool_choice needs tools", "tool_choice")
        return
    names = [tool.function.name for tool in given]
    if len(set(names)) < len(names):
        raise invalid("two tools have the same name; give each its own", "tools")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise invalid(
            f"tool_choice names {choice.function.name!r}, and the tools are {names}", "tool_choice"
        )


def _with_objects(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose call arguments are objects, if they are valid JSON."""

    def read(arguments: Any) -> Any:
        with suppress(TypeError, ValueError, RecursionError):
            return checked_json([json.loads(arguments or "{}")])[0]
        return arguments

    return _with_arguments(messages, read)


def _with_arguments(
    messages: Sequence[Mapping[str, Any]], change: Callable[[Any], Any]
) -> list[dict[str, Any]]:
    def changed(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": change(function["arguments"])}}

    return [
        {**each, "tool_calls": [changed(call) for call in each["tool_calls"]]}
        if "tool_calls" in each
        else dict(each)
        for each in messages
    ]


def _calls(parts: Sequence[str | AddedCall]) -> list[AddedCall]:
    return [part for part in parts if isinstance(part, AddedCall)]


def whole(parts: Sequence[str | AddedCall]) -> AnswerMessage:
    content = "".join(part for part in parts if isinstance(part, str))
    added = _calls(parts)
    arguments: dict[int, str] = {}
    for part in added:
        arguments[part.index] = arguments.get(part.index, "") + part.function.arguments
    calls = [
        AnsweredCall(
            id=part.id,
            function=AnsweredFunction(
                name=part.function.name or "", arguments=arguments[part.index]
            ),
        )
        for part in added
        if part.id is not None
    ]
    return AnswerMessage(
        content=content if content or not calls else None, tool_calls=calls or None
    )


def deltas(parts: Sequence[str | AddedCall]) -> list[Delta]:
    """Return what parts add to a message, content first, with one part of a call in each."""
    content = "".join(part for part in parts if isinstance(part, str))
    calls = [Delta(tool_calls=[part]) for part in _calls(parts)]
    return [Delta(content=content), *calls] if content else calls


@final
@dataclass
class Answered:
    """The content and the calls of one sample as they arrive; excess calls are dropped.

    `_schemas` are those of the arguments that must match, by the tool's name, and `_answer` that of
    an answer without calls.
    """

    _reader: CallReader | None
    _schemas: Mapping[str, AnswerSchema]
    _max_calls: int | None = None
    _answer: AnswerSchema | None = None
    _id_of: Callable[[str], str] = str  # returns an id as the model's template takes it
    num_calls: int = 0
    _num_dropped: int = 0
    _calls: list[list[str]] = field(default_factory=list)  # the name and the arguments of each
    _texts: list[str] = field(default_factory=list)

    def push(self, text: str, reason: str | None) -> list[str | AddedCall]:
        """Return what a piece of text adds, in order: content, calls and arguments.

        A call begins without arguments, which follow, as at OpenAI: its documented clients keep
        the first part of a call and append later arguments to it. `reason` says why the answer
        ended; None before its last piece. A call that `max_tokens` cut is left out, if no part of
        it was returned before.

        Raises:
          GrammarFailedError: the arguments of a call, or an answer, that had to match a schema do
            not.
        """
        if self._reader is None:
            return [text] if text else []
        found = self._reader.push(text)
        if reason is not None:
            found += self._reader.finish(is_cut=reason == "length")
        added: list[str | AddedCall] = []
        for part in found:
            if isinstance(part, str):
                added.append(part)
            elif isinstance(part, Call):
                if self._max_calls is not None and self.num_calls >= self._max_calls:
                    self._num_dropped += 1
                else:
                    added.append(self._added(part))
                    self._add_arguments(added, part.arguments)
            elif not self._num_dropped:
                self._add_arguments(added, part.text)
        if self._answer is not None:
            self._texts += [part for part in added if isinstance(part, str)]
        if reason == "stop":
            self._check()
        if reason == "length" and self._is_cut:
            added = self._without_cut(added)
        return added

    @property
    def _is_cut(self) -> bool:
        """Whether the last call has ended within its arguments."""
        return self._reader is not None and self._reader.is_cut and not self._num_dropped

    def _without_cut(self, added: list[str | AddedCall]) -> list[str | AddedCall]:
        """Leave out the last call, of which no part was sent yet."""
        last = self.num_calls - 1
        is_new = any(part.id for part in _calls(added) if part.index == last)
        if not is_new:
            return added
        self.num_calls = last
        self._calls.pop()
        return [p for p in added if not (isinstance(p, AddedCall) and p.index == last)]

    def _check(self) -> None:
        if self._answer is not None and not self._calls:
            problem = self._answer.problem("".join(self._texts))
            if problem is not None:
                raise GrammarFailedError(
                    f"the answer does not validate against its json_schema ({problem}), although "
                    "llguidance let it pass; write that part of the schema in another way, and "
                    "report it with the schema"
                )
        for name, arguments in self._calls[: -1 if self._is_cut else None]:
            schema = self._schemas.get(name)
            problem = None if schema is None else schema.problem(arguments)
            if problem is not None:
                raise GrammarFailedError(
                    f"the call of {name!r} does not validate against its parameters ({problem}), "
                    "although llguidance let it pass; write that part of the schema in another "
                    "way, and report it with the schema"
                )

    def _add_arguments(self, added: list[str | AddedCall], arguments: str) -> None:
        self._calls[-1][1] += arguments
        last = added[-1] if added else None
        if isinstance(last, AddedCall) and last.id is None:
            arguments = last.function.arguments + arguments
            added.pop()
        if arguments:
            function = AddedFunction(arguments=arguments)
            added.append(AddedCall(index=self.num_calls - 1, function=function))

    def finish_reason(self, reason: str) -> str:
        """Return why the sample ended: "tool_calls" instead of "stop" after a whole call."""
        has_called = self.num_calls and not self._is_cut
        return "tool_calls" if has_called and reason == "stop" else reason

    def _added(self, call: Call) -> AddedCall:
        index, self.num_calls = self.num_calls, self.num_calls + 1
        self._calls.append([call.name, ""])
        function = AddedFunction(name=call.name, arguments="")
        id = call.id or self._id_of(f"call_{uuid.uuid4().hex[:24]}")
        return AddedCall(index=index, id=id, type="function", function=function)
