"""The contents of a request's span, in OpenTelemetry's names for generative models."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, final

from jaxserve.core.errors import JaxserveError
from jaxserve.core.request import Completion
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.server.errors import RefusedError


@final
class RequestTrace:
    """The attributes of one request's span, as they become known.

    `error` is the type name of the error that ended a request, or the code of a server error;
    `model` is the name of the adapter that answers, or None for the served model itself.
    """

    def __init__(self) -> None:
        self.attributes: dict[str, Any] = {}
        self.error: str | None = None
        self.model: str | None = None
        self._num_input = self._num_output = 0
        self._reasons: list[str] = []

    def asked(self, params: SamplingParams, conversation_id: str | None = None) -> None:
        """Add the sampling parameters and the conversation."""
        self.model = params.adapter
        given = {
            "request.max_tokens": params.max_tokens,
            "request.temperature": params.temperature,
            "request.top_p": params.top_p,
            "request.top_k": params.top_k or None,
            "request.presence_penalty": params.presence_penalty or None,
            "request.frequency_penalty": params.frequency_penalty or None,
            "request.seed": params.seed,
            "request.stop_sequences": list(params.stop) or None,
            "request.choice.count": params.n if params.n > 1 else None,
            "conversation.id": conversation_id,
        }
        self._set(given)

    def failed(self, error: JaxserveError) -> None:
        """Add the error that ends an answer whose status has been sent."""
        code = error.kind.code if isinstance(error, RefusedError) else None
        self.error = self.error or code or type(error).__name__

    def ended(self, completion: Completion) -> None:
        """Add the completion of a prompt."""
        if completion.error is not None:
            self.error = type(completion.error).__name__
        self._num_input += len(completion.prompt_token_ids)
        self._num_output += sum(len(sample.token_ids) for sample in completion.samples)
        self._reasons += [sample.finish_reason for sample in completion.samples]
        self._set(
            {
                "usage.input_tokens": self._num_input,
                "usage.output_tokens": self._num_output,
                "response.finish_reasons": self._reasons,
            }
        )

    def _set(self, given: dict[str, Any]) -> None:
        self.attributes |= {f"gen_ai.{k}": v for k, v in given.items() if v is not None}


current: ContextVar[RequestTrace | None] = ContextVar("trace", default=None)


def trace_here() -> RequestTrace:
    """Return the attributes of the current request; without tracing, they are not used."""
    return current.get() or RequestTrace()
