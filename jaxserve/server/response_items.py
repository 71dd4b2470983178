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
    """The items of one response, one after the other. The last one may still be open.

    Args:
      make: returns an event, of a type and with fields.

    Attributes:
      items: as far as they have come.
    """

    def __init__(self, make: Callable[..., ResponseEvent]):
        self.items: list[OutputItem] = []
        self._make = make
        self._is_open = False

    def text(self, delta: str, scored: list[ScoredChoice]) -> Iterator[ResponseEvent]:
        """Add text to the message, which begins unless it is open."""
        if not (self._is_open and isinstance(self.items[-1], OutputMessage)):
            yield from self.close("completed")
            message = OutputMessage(id=new_id("msg"), status="in_progress", content=[])
            yield self._begin(message)
            empty = OutputText(text="")
            yield self._make("response.content_part.added", part=empty, **self._at_part)
            message.content.append(OutputText(text=""))
        part = self._part
        part.text += delta
        part.logprobs = part.logprobs + scored
        if delta or scored:
            yield self._make(
                "response.output_text.delta", delta=delta, logprobs=scored, **self._at_part
            )

    def call(self, added: AddedCall) -> Iterator[ResponseEvent]:
        """Add to the call that is open, or begin one."""
        if added.id is not None:
            yield from self.close("completed")
            name = added.function.name or ""
            yield self._begin(
                OutputCall(
                    id=new_id("fc"),
                    call_id=added.id,
                    name=name,
                    arguments="",
                    status="in_progress",
                )
            )
        call = self.items[-1]
        assert isinstance(call, OutputCall), "arguments without a call"
        if added.function.arguments:
            call.arguments += added.function.arguments
            yield self._make(
                "response.function_call_arguments.delta",
                delta=added.function.arguments,
                **self._at,
            )

    def close(self, status: Literal["completed", "incomplete"]) -> Iterator[ResponseEvent]:
        """End the item that is open, if there is one."""
        if not self._is_open:
            return
        item = self.items[-1]
        if isinstance(item, OutputMessage):
            part = self._part
            yield self._make(
                "response.output_text.done",
                text=part.text,
                logprobs=part.logprobs,
                **self._at_part,
            )
            yield self._make("response.content_part.done", part=part, **self._at_part)
        else:
            yield self._make(
                "response.function_call_arguments.done",
                name=item.name,
                arguments=item.arguments,
                **self._at,
            )
        item.status, self._is_open = status, False
        index = len(self.items) - 1
        yield self._make("response.output_item.done", output_index=index, item=item)

    def _begin(self, item: OutputItem) -> ResponseEvent:
        self.items.append(item)
        self._is_open = True
        index = len(self.items) - 1
        return self._make(
            "response.output_item.added", output_index=index, item=item.model_copy(deep=True)
        )

    @property
    def _part(self) -> OutputText:
        message = self.items[-1]
        assert isinstance(message, OutputMessage)
        return message.content[0]

    @property
    def _at(self) -> dict[str, Any]:
        return {"output_index": len(self.items) - 1, "item_id": self.items[-1].id}

    @property
    def _at_part(self) -> dict[str, Any]:
        return {**self._at, "content_index": 0}
