"""What a request says about thinking and about the chat template's variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from jaxserve.core.errors import InvalidSamplingParamsError
from jaxserve.core.sampling_params import checked_kwargs
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.server.errors import invalid
from jaxserve.server.schema import MAX_INT32, JsonObject, Strict

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# The names that templates have for a switch of thinking.
_SWITCHES = ("enable_thinking", "thinking")


class ThinkingFields(Strict):
    """The fields of chats about thinking."""

    chat_template_kwargs: JsonObject | None = Field(
        None, description="Variables of the model's chat template, such as enable_thinking."
    )
    enable_thinking: bool | None = Field(
        None, description="Ignored unless the chat template has such a switch."
    )
    separate_reasoning: bool | None = Field(
        None, description="False leaves what the model thinks in the content."
    )
    max_thinking_tokens: int | None = Field(
        None, ge=0, le=MAX_INT32, description="The end of thinking is written after this many."
    )
    thinking_token_budget: int | None = Field(
        None, ge=0, le=MAX_INT32, description="vLLM's name of max_thinking_tokens."
    )

    @property
    def thinking_params(self) -> dict[str, Any]:
        """Return these fields as `SamplingParams` has them."""
        both = (self.max_thinking_tokens, self.thinking_token_budget)
        if None not in both and both[0] != both[1]:
            raise invalid(
                f"max_thinking_tokens={both[0]} and thinking_token_budget={both[1]} contradict "
                "each other; pass one of them",
                "thinking_token_budget",
            )
        return {
            "separate_reasoning": self.separate_reasoning is not False,
            "max_thinking_tokens": both[1] if both[0] is None else both[0],
        }


def template_variables(
    tokenizer: Tokenizer,
    defaults: Mapping[str, Any],
    given: Mapping[str, Any] | None,
    *,
    effort: Effort | None = None,
    enable_thinking: bool | None = None,
    has_tools: bool = False,
) -> dict[str, Any]:
    """Return the variables of a chat's template.

    `effort` and `enable_thinking` are those of them that the template reads, and switch thinking;
    `given` variables count before them, and these before the server's `defaults`.
    """
    found = dict(defaults)
    if effort is not None or enable_thinking is not None:
        names = tokenizer.template_variables(has_tools=has_tools)
        thinks = effort != "none" if enable_thinking is None else enable_thinking
        found |= {name: thinks for name in _SWITCHES if name in names}
        if effort is not None and "reasoning_effort" in names:
            found["reasoning_effort"] = effort
    if given is not None:
        try:
            found |= checked_kwargs(given)
        except InvalidSamplingParamsError as error:
            raise invalid(str(error), "chat_template_kwargs") from None
    return found
