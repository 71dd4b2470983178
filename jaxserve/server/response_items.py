"""The output of `/v1/responses`: messages and calls of functions, and the events of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, final

from jaxserve.server.routes.common import new_id
from jaxserve.server.schema.base import ScoredChoice
from jaxserve.server.schema.chat import AddedCall
from jaxserve.server.schema.responses import (
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputText,
    ResponseEvent,
)


@final
class OutputItems:
    """The items of one response, one after the other.

    Args:
      make: returns an event, of a type and with fields.

    Attributes:
      items: the complete ones.
    """

    def __init__(self, make: Callable[..., ResponseEvent]):
        self.items: list[OutputItem] = []
        self._make = make
        # The item that is open, as it began, and what has come of it.
        self._open: OutputItem | None = None
        self._texts: list[str] = []
        self._scored: list[ScoredChoice] = []

    @property
    def is_empty(self) -> bool:
        """Whether no item has begun."""
        return self._open is None and not self.items

    def text(self, delta: str, scored: list[ScoredChoice]) -> Iterator[ResponseEvent]:
        """Add text to the message, which begins unless it is open."""
        if self._open is None or self._open.type != "message":
            yield from self.close("completed")
            yield self._begin(OutputMessage(id=new_id("msg"), status="in_progress", content=[]))
            empty = OutputText(text="")
            yield self._make("response.content_part.added", part=empty, **self._at())
        self._texts.append(delta)
        self._scored += scored
        if delta or scored:
            yield self._make(
                "response.output_text.delta", delta=delta, logprobs=scored, **self._at()
            )

    def call(self, added: AddedCall) -> Iterator[ResponseEvent]:
        """Add to the call that is open, or begin one."""
        if added.id is not None:
            yield from self.close("completed")
            yield self._begin(
                OutputCall(
                    id=new_id("fc"),
                    call_id=added.id,
                    name=added.function.name or "",
                    arguments="",
                    status="in_progress",
                )
            )
        arguments = added.function.arguments
        if arguments:
            self._texts.append(arguments)
            kind = "response.function_call_arguments.delta"
            yield self._make(kind, delta=arguments, **self._at())

    def close(self, status: Literal["completed", "incomplete"]) -> Iterator[ResponseEvent]:
        """End the item that is open, if there is one."""
        item, text, scored = self._open, "".join(self._texts), self._scored
        if item is None:
            return
        if item.type == "message":
            part = OutputText(text=text, logprobs=scored)
            kind = "response.output_text.done"
            yield self._make(kind, text=text, logprobs=scored, **self._at())
            yield self._make("response.content_part.done", part=part, **self._at())
            ended: OutputItem = item.model_copy(update={"status": status, "content": [part]})
        else:
            kind = "response.function_call_arguments.done"
            yield self._make(kind, name=item.name, arguments=text, **self._at())
            ended = item.model_copy(update={"status": status, "arguments": text})
        index = len(self.items)
        self.items.append(ended)
        self._open, self._texts, self._scored = None, [], []
        yield self._make("response.output_item.done", output_index=index, item=ended)

    def _begin(self, item: OutputItem) -> ResponseEvent:
        self._open = item
        index = len(self.items)
        return self._make("response.output_item.added", output_index=index, item=item)

    def _at(self) -> dict[str, Any]:
        assert self._open is not None, "no item is open"
        at = {"output_index": len(self.items), "item_id": self._open.id}
        return {**at, "content_index": 0} if self._open.type == "message" else at
