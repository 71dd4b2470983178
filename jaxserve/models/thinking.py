"""Thinking in a model's text: marks of the families, and the reader that separates it.

========  ==============================================  ==========================================
format    thinking is written as                          families
========  ==============================================  ==========================================
TAGS      <think> ... </think>                            Qwen3, QwQ, DeepSeek, GLM-4.5, SmolLM3,
                                                          Nemotron, MiniMax-M2, Kimi
GRANITE   <think> ... </think><response> ... </response>  Granite 3.3
SPOKEN    Here is my thought process: ...                 Granite 3.2
          Here is my response: ...
MAGISTRAL [THINK] ... [/THINK]                            Magistral, Ministral
GEMMA     <|channel>thought ... <channel|>                Gemma 4
SEED      <seed:think> ... </seed:think>                  Seed-OSS
COMMAND   <|START_THINKING|> ... <|END_THINKING|>, and    Command A and R7B
          <|START_RESPONSE|> ... <|END_RESPONSE|>
APERTUS   <|inner_prefix|> ... <|inner_suffix|>           Apertus
APRIEL    Here are my reasoning steps: ...                Apriel 1.6
          [BEGIN FINAL RESPONSE] ...
HARMONY   messages of the channel analysis                gpt-oss
========  ==============================================  ==========================================

In some families a call ends the thinking, too, because models write it without `</think>`: in those
with the calls of Qwen3-Coder (Qwen3.5, Nemotron 3), of GLM, Kimi and MiniMax; in Apertus they stand
inside. A call in JSON, as Qwen3 writes it, does not: it may be a draft.

Sources: chat templates in llama.cpp's `models/templates` and vLLM's `vllm/reasoning`, as of 2026.
For calls that end thinking: vLLM's `vllm/parser` (03e8268), sglang's `reasoning_parser.py`
(002e9bf); for those that do not: QwenLM/Qwen3 issue 1459.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, final

Opening = Literal["open", "closed", "undecided"]
# "start": nothing but the beginning of a mark has come; "between": of harmony, after a message.
Phase = Literal["start", "thinking", "between", "answer"]

# White space between the tag of a call and what follows it, at most.
_MAX_GAP = 64


@final
@dataclass(frozen=True)
class EndingCall:
    """A call that ends the thinking: the tag before it, what follows that, and the tag after it."""

    begin: str
    following: str
    end: str


@final
@dataclass(frozen=True)
class ThinkingFormat:
    """The notation in which a family thinks.

    Attributes:
      starts, ends: the marks around the thinking; the first one of each is what templates write.
      answer: marks around the answer that follows, which are not part of it.
      closing: the text that ends thinking when its budget is used up.
      first: what an answer that thinks begins with, if one that does not begins with the first
        token of it as well.
      bridge: what precedes the answer after the end of the thinking.
      head: what precedes an answer that begins with `first`, such as a call.
      controls: further control tokens that the reader needs to see.
      call: calls that end the thinking as well, and are the beginning of the answer.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    closing: str
    answer: tuple[str, str] | None = None
    first: str = ""
    bridge: str = ""
    head: str = ""
    controls: tuple[str, ...] = ()
    call: EndingCall | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts of which those that are control tokens have to be in the text that is read."""
        return (*self.starts, *self.ends, *(self.answer or ()), *self.controls)

    def opening(self, prompt: str) -> Opening:
        """Return whether thinking is open at the end of a rendered prompt (or of its last part).

        "closed": the prompt ends with the end of thinking, so that the model answers at once;
        "undecided": the model decides.
        """
        end = prompt.rstrip()
        if end.endswith(self.ends):
            return "closed"
        return "open" if self is HARMONY or end.endswith(self.starts) else "undecided"

    def written(self, reasoning: str, content: str) -> str:
        """Return an answer as a family writes it, with line breaks between its parts."""
        begin, end = self.answer or ("", "")
        thought = f"{self.first or self.starts[0]}\n{reasoning}{self.closing}"
        return f"{thought}\n{self.bridge}{begin}\n{content}\n{end}"

    def reader(self, opening: Opening) -> ThinkingReader:
        if self is HARMONY:
            return _HarmonyReader(is_answer=opening == "closed")
        return _TagReader(self, is_open=opening == "open")


TAGS = ThinkingFormat(("<think>",), ("</think>",), "\n</think>")
TAGS_QWEN = replace(TAGS, call=EndingCall("<tool_call>", "<function=", "</tool_call>"))
TAGS_GLM = replace(TAGS, call=EndingCall("<tool_call>", "", "</tool_call>"))
TAGS_KIMI = replace(
    TAGS, call=EndingCall("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>")
)
TAGS_MINIMAX = replace(
    TAGS, call=EndingCall("<minimax:tool_call>", "<invoke name=", "</minimax:tool_call>")
)
GRANITE = ThinkingFormat(
    ("<think>",), ("</think>",), "\n</think>", answer=("<response>", "</response>")
)
SPOKEN = ThinkingFormat(
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
    "\n\nHere is my response:",
)
MAGISTRAL = ThinkingFormat(("[THINK]",), ("[/THINK]",), "[/THINK]")
GEMMA = ThinkingFormat(
    ("<|channel>thought",), ("<channel|>",), "\n<channel|>", controls=("<|channel>",)
)
SEED = ThinkingFormat(("<seed:think>",), ("</seed:think>",), "\n</seed:think>")
COMMAND = ThinkingFormat(
    ("<|START_THINKING|>",),
    ("<|END_THINKING|>",),
    "<|END_THINKING|>",
    answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
)
APERTUS = ThinkingFormat(
    ("<|inner_prefix|>",),
    ("<|inner_suffix|>",),
    "<|inner_suffix|>",
    call=EndingCall("<|tools_prefix|>", "", "<|tools_suffix|>"),
)
APRIEL = ThinkingFormat(
    ("Here are my reasoning steps:",), ("[BEGIN FINAL RESPONSE]",), "\n[BEGIN FINAL RESPONSE]\n"
)
# Of a response template that is none of these (`response_template.RegionReader`).
REGIONS = ThinkingFormat((), (), "")
_START, _CHANNEL, _MESSAGE, _END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
_CALL_END = "<|call|>"
HARMONY = ThinkingFormat(
    (f"{_START}assistant",),
    (f"{_CHANNEL}final{_MESSAGE}",),
    _END,
    first=f"{_CHANNEL}analysis{_MESSAGE}",
    head=f"{_START}assistant",
    bridge=f"{_START}assistant{_CHANNEL}final{_MESSAGE}",
    controls=(_START, _CHANNEL, _MESSAGE, _END, "<|constrain|>", _CALL_END),
)

# What a family's chat template contains; the first row of which it has all texts counts.
_SIGNS = (
    ((_CHANNEL, "analysis"), HARMONY),
    (("<|channel>", "<channel|>"), GEMMA),
    (("[THINK]", "[/THINK]"), MAGISTRAL),
    (("</seed:think>",), SEED),
    (("<|START_THINKING|>",), COMMAND),
    (("<|inner_prefix|>", "<|inner_suffix|>"), APERTUS),
    (("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"), APRIEL),
    (("Here is my thought process:",), SPOKEN),
    (("<think></think>", "<response></response>"), GRANITE),
    (("think>", "<minimax:tool_call>"), TAGS_MINIMAX),
    (("think>", "<arg_key>"), TAGS_GLM),
    (("think>", "<tool_call>", "<function=", "<parameter="), TAGS_QWEN),
    (("think>", "<|tool_calls_section_begin|>"), TAGS_KIMI),
    (("think>",), TAGS),
)


FORMATS = (TAGS, *dict.fromkeys(form for _, form in _SIGNS if form.starts != TAGS.starts), GRANITE)


def thinking_of(chat_template: str | None) -> ThinkingFormat | None:
    """Return the format of a model, found by searching its chat template; None without thinking."""
    template = chat_template or ""
    return next((form for signs, form in _SIGNS if all(sign in template for sign in signs)), None)


@final
@dataclass(frozen=True)
class Thinking:
    """How one answer may think.

    Attributes:
      opening: whether thinking is open at the end of the prompt.
      start_ids: the tokens of the format's start.
      closing_ids: those that end thinking.
      first_ids, bridge_ids, head_ids: those of the format's fields.
      shown: the control tokens that its text must have for `reader`.
      make_reader: makes the reader, if it is not that of the format.
    """

    format: ThinkingFormat
    opening: Opening
    start_ids: tuple[int, ...] = ()
    closing_ids: tuple[int, ...] = ()
    first_ids: tuple[int, ...] = ()
    bridge_ids: tuple[int, ...] = ()
    head_ids: tuple[int, ...] = ()
    shown: frozenset[int] = frozenset()
    make_reader: Callable[[], ThinkingReader] | None = None

    def reader(self) -> ThinkingReader:
        return self.make_reader() if self.make_reader else self.format.reader(self.opening)

    @property
    def is_writable(self) -> bool:
        """Whether what ends thinking can be written, and a grammar bind after it."""
        return self.make_reader is None

    def up_to_its_mark(self) -> Thinking:
        """Return how the answer may think if only the mark ends thinking, and no call does.

        For answers with a grammar, which has the whole call.
        """
        if self.format.call is None:
            return self
        return replace(self, format=replace(self.format, call=None))

    def split(self, text: str) -> tuple[str, str]:
        """Return the reasoning and the content of a whole answer."""
        reader = self.reader()
        pieces = reader.push(text), reader.finish()
        return "".join(p[0] for p in pieces), "".join(p[1] for p in pieces)


class ThinkingReader(Protocol):
    """Separates the thinking from the text of an answer that comes in pieces.

    The result does not depend on how the text is cut. Marks are left out, and so is white space
    around the thinking and between it and the content. A piece costs time in proportion to its own
    length.
    """

    @property
    def phase(self) -> Phase: ...

    @property
    def has_thought(self) -> bool:
        """Whether a mark of thinking has come, or was in the prompt."""
        ...

    def push(self, text: str) -> tuple[str, str]:
        """Return the reasoning and the content that a piece of text adds."""
        ...

    def finish(self) -> tuple[str, str]:
        """Return the rest when the answer has ended."""
        ...


@final
class _TagReader:
    def __init__(self, form: ThinkingFormat, *, is_open: bool):
        self._starts, self._ends = form.starts, form.ends
        self._answer, self._call = form.answer, form.call
        self._buffer = ""  # its end may begin a mark
        self._spaces: list[str] = []  # white space that is dropped if a mark follows
        self._text: list[list[str]] = [[], []]  # reasoning and content to return
        # Whether a mark, and white space, at the beginning of the buffer has a meaning.
        self._is_at_start = True
        self._is_inside = is_open
        self._is_empty = True  # no thinking since its start
        self.has_thought = is_open
        self._is_wrapped = False  # the answer began with the mark of one
        # A call has ended the thinking, whose mark may follow; and the end of the content so far.
        self._is_late, self._last = False, ""

    @property
    def phase(self) -> Phase:
        if self._is_inside:
            return "thinking"
        return "start" if self._is_at_start and not self.has_thought else "answer"

    def push(self, text: str) -> tuple[str, str]:
        if not (self._is_at_start or self._is_inside or self._is_wrapped or self._is_late):
            return "", text  # the usual case
        self._buffer += text
        while self._next():
            pass
        return self._taken()

    def finish(self) -> tuple[str, str]:
        rest, self._buffer = self._buffer, ""
        if self._is_inside:
            self._spaces = [] if self._is_at_start else self._spaces
            self._add(0, rest)
        elif not self.has_thought:
            self._text[1] += [*self._spaces, rest]
        else:
            self._text[1] += [*(self._spaces if rest and not self._is_at_start else ()), rest]
        self._spaces = []
        return self._taken()

    def _taken(self) -> tuple[str, str]:
        reasoning, content = ("".join(each) for each in self._text)
        self._text = [[], []]
        return reasoning, content

    def _next(self) -> bool:
        """Read up to the next mark; return whether there was one."""
        if self._is_at_start:
            return self._at_start()
        if self._is_inside:
            return self._inside()
        if self._is_wrapped:
            return self._in_answer()
        if self._is_late:
            return self._after_call()
        self._text[1].append(self._buffer)
        self._buffer = ""
        return False

    def _at_start(self) -> bool:
        rest = self._buffer.lstrip()
        if gap := self._buffer[: len(self._buffer) - len(rest)]:
            self._spaces.append(gap)
        self._buffer = rest
        if not rest:
            return False
        marks = self._starts
        if self._answer is not None and not self._is_inside:
            marks = (*marks, self._answer[0])
        mark = next((mark for mark in marks if rest.startswith(mark)), None)
        if mark is None and any(mark.startswith(rest) for mark in marks):
            return False
        if mark is not None:
            self._buffer, self._spaces = rest[len(mark) :], []
        if mark in self._starts:
            # A model may repeat the mark that ends its prompt.
            self._is_inside = self._is_empty = self.has_thought = True
            self._is_at_start = False
        elif mark is not None:
            self._is_at_start, self._is_wrapped, self._is_empty = False, True, True
        else:
            self._is_at_start = False
            if not self.has_thought:
                self._text[1] += self._spaces
            self._spaces = []
        return True

    def _inside(self) -> bool:
        found = [(at, end) for end in self._ends if (at := self._buffer.find(end)) >= 0]
        call_at, is_call = self._found_call(min(found)[0] if found else len(self._buffer))
        if is_call:
            self._add(0, self._buffer[:call_at])
            self._buffer, self._spaces = self._buffer[call_at:], []
            self._is_inside, self._is_at_start, self._is_late = False, False, True
            return True
        if found:
            at, end = min(found)
            self._add(0, self._buffer[:at])
            self._buffer, self._spaces = self._buffer[at + len(end) :], []
            self._is_inside, self._is_at_start = False, True
            return True
        marks = self._ends if self._call is None else (*self._ends, self._call.begin)
        kept = min(len(self._buffer) - num_begun(self._buffer, marks), call_at)
        self._add(0, self._buffer[:kept])
        self._buffer = self._buffer[kept:]
        return False

    def _found_call(self, end: int) -> tuple[int, bool]:
        """Return where a call begins, or may begin, before a place, and whether it surely does."""
        if self._call is None:
            return len(self._buffer), False
        begin, following = self._call.begin, self._call.following
        at = self._buffer.find(begin, 0, end)
        while at >= 0:
            start, most = at + len(begin), _MAX_GAP + len(following)
            gap = self._buffer[start : start + most]
            rest = gap.lstrip()
            if rest.startswith(following):
                return at, True
            if following.startswith(rest) and len(gap) < most:
                return at, False
            at = self._buffer.find(begin, start, end)
        return len(self._buffer), False

    def _after_call(self) -> bool:
        """Return the answer without a mark of the end of thinking that follows its calls."""
        assert self._call is not None
        (mark,) = self._ends
        at = self._buffer.find(mark)
        kept = at if at >= 0 else len(self._buffer) - num_begun(self._buffer, (mark,))
        text, self._buffer = self._buffer[:kept], self._buffer[kept:]
        self._text[1].append(text)
        length = len(self._call.end)
        self._last = (self._last + text[-length - _MAX_GAP :])[-length - _MAX_GAP :]
        if at < 0:
            return False
        if self._last.rstrip().endswith(self._call.end):
            self._buffer = self._buffer[len(mark) :]
            self._is_late, self._is_at_start = False, True
            self._starts = ()  # thinking does not begin again
        else:
            self._text[1].append(mark)
            self._buffer, self._last = self._buffer[len(mark) :], ""
        return True

    def _in_answer(self) -> bool:
        """Return the text before the mark after an answer, without white space around it."""
        assert self._answer is not None
        end = self._answer[1]
        at = self._buffer.find(end)
        kept = at if at >= 0 else len(self._buffer) - num_begun(self._buffer, (end,))
        self._add(1, self._buffer[:kept])
        self._buffer = self._buffer[kept:]
        if at < 0:
            return False
        self._buffer, self._is_wrapped = self._buffer[len(end) :], False
        return True

    def _add(self, index: int, text: str) -> None:
        """Add text, without white space at its beginning and, until more follows, at its end."""
        if self._is_empty:
            text = text.lstrip()
        body = text.rstrip()
        if body:
            self._text[index] += [*self._spaces, body]
            self._spaces, self._is_empty = [], False
        if not self._is_empty and len(body) < len(text):
            self._spaces.append(text[len(body) :])


_HEADS = (_CHANNEL, "to=", _START)
# Models leave out "functions." at times; the others are tools of their own, and no calls.
_TO_FUNCTION = re.compile(r"\bto=(?!(?:python|browser|container|assistant|all)\b)\w")


@final
class _HarmonyReader:
    """Reads messages of a channel each: analysis is thinking, and the others are content.

    Calls of functions stay as they are written, for the reader of calls.
    """

    def __init__(self, *, is_answer: bool):
        self._buffer = ""
        self._head: list[str] = []  # of the open message, without what is in the buffer
        self._text: list[list[str]] = [[], []]
        self._num_messages = [0, 0]
        self._is_head = not is_answer
        self._is_first = True
        self._is_plain = is_answer  # text without heads
        self._kind: Literal["thinking", "content", "call"] = "content"
        self.has_thought = False

    @property
    def phase(self) -> Phase:
        if not self._is_head:
            return "thinking" if self._kind == "thinking" else "answer"
        if self._is_first:
            return "start"
        return "thinking" if self._buffer or self._head else "between"

    def push(self, text: str) -> tuple[str, str]:
        if self._is_plain:
            return "", text
        self._buffer += text
        while self._in_head() if self._is_head else self._in_message():
            pass
        return self._taken()

    def finish(self) -> tuple[str, str]:
        rest, self._buffer = "".join(self._head) + self._buffer, ""
        if not self._is_head:
            self._add(rest)
        elif self._is_first or _TO_FUNCTION.search(rest):
            self._text[1].append(rest)  # no head after all, or a call that was cut
        return self._taken()

    def _taken(self) -> tuple[str, str]:
        reasoning, content = ("".join(each) for each in self._text)
        self._text = [[], []]
        return reasoning, content

    def _in_head(self) -> bool:
        if self._is_first and not self._head:
            rest = self._buffer.lstrip()
            if rest and not any(h.startswith(rest) or rest.startswith(h) for h in _HEADS):
                self._text[1].append(self._buffer)
                self._buffer, self._is_head, self._is_plain = "", False, True
                return False
        before, message, body = self._buffer.partition(_MESSAGE)
        if not message:
            kept = len(self._buffer) - len(_MESSAGE)
            if kept > len(_START):  # enough to see what it begins with
                self._head.append(self._buffer[:kept])
                self._buffer = self._buffer[kept:]
            return False
        self._is_first = self._is_head = False
        head, self._head = "".join([*self._head, before]), []
        own = head.removeprefix(f"{_START}assistant")
        if _TO_FUNCTION.search(own):
            self._kind = "call"
            self._text[1].append(own + message)
        elif "final" in own or ("commentary" in own and "to=" not in own):
            self._begin("content", 1)
        else:
            self.has_thought = True
            self._begin("thinking", 0)
        self._buffer = body
        return True

    def _begin(self, kind: Literal["thinking", "content"], index: int) -> None:
        self._kind = kind
        if self._num_messages[index]:
            self._text[index].append("\n")
        self._num_messages[index] += 1

    def _in_message(self) -> bool:
        ends = [(at, end) for end in (_END, _START) if (at := self._buffer.find(end)) >= 0]
        if ends:
            at, end = min(ends)
            self._add(self._buffer[:at])
            if self._kind == "call" and end == _END:
                self._text[1].append(_CALL_END)  # as the reader of calls knows it
            self._buffer = self._buffer[at + (len(end) if end == _END else 0) :]
            self._is_head = True
            return True
        kept = len(self._buffer) - num_begun(self._buffer, (_END, _START))
        self._add(self._buffer[:kept])
        self._buffer = self._buffer[kept:]
        return False

    def _add(self, text: str) -> None:
        if text:
            self._text[0 if self._kind == "thinking" else 1].append(text)


def num_begun(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest end of a text that begins a mark, and is not all of it."""
    found = 0
    for mark in marks:
        at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
        while at >= 0 and not mark.startswith(text[at:]):
            at = text.find(mark[0], at + 1)
        if at >= 0:
            found = max(found, len(text) - at)
    return found
