"""What a request says about thinking and about the chat template's variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import Field

from jaxserve.core.errors import InvalidSamplingParamsError
from jaxserve.core.sampling_params import checked_kwargs
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.server.errors import invalid
from jaxserve.server.schema import MAX_INT32, JsonObject, Strict

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# The names that templates have for a switch of thinking.
_SWITCHES = ("enable_thinking", "thinking")
# Where a template refuses other efforts, as Mistral's since 2026 do.
_EFFORTS = re.compile(r"reasoning_effort not in \[([^\]]*)\]")


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
            template = tokenizer.tool_template if has_tools else None
            found["reasoning_effort"] = _nearest(effort, template or tokenizer.chat_template or "")
    if given is not None:
        try:
            found |= checked_kwargs(given)
        except InvalidSamplingParamsError as error:
            raise invalid(str(error), "chat_template_kwargs") from None
    return found


def _nearest(effort: Effort, template: str) -> str:
    """Return an effort, or that of the template's that is nearest; only "none" becomes "none"."""
    listed = _EFFORTS.search(template)
    allowed = re.findall(r"""['"](\w+)['"]""", listed[1]) if listed else []
    order = get_args(Effort)
    known = [each for each in order if each in allowed and (each == "none") == (effort == "none")]
    if not known:
        return effort
    return min(known, key=lambda each: abs(order.index(each) - order.index(effort)))
