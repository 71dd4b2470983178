"""The table of typed errors and HTTP statuses, and the bodies of errors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from starlette.responses import JSONResponse

from jaxserve.core import errors
from jaxserve.core.errors import JaxserveError
from jaxserve.server.schema import ErrorDetail, ErrorReply, MessagesErrorDetail, MessagesErrorReply


@final
@dataclass(frozen=True)
class Kind:
    """How an error is answered: HTTP status, and `error.type` and `error.code` of the body.

    Attributes:
      may_retry: whether the same request may succeed later. OpenAI's clients retry 408, 409, 429
        and 5xx on their own unless the answer forbids it.
    """

    status: int
    type: str
    code: str | None = None
    may_retry: bool = False


# Seconds after which a client that was one of too many may retry, if no estimate is known.
_RETRY_S = 1.0
_INVALID = "invalid_request_error"
# Path of the endpoints whose errors have the form of Anthropic's API, and its types of errors.
MESSAGES_PATH = "/v1/messages"
_MESSAGES_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    501: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_SERVER = "server_error"

# The entry of the nearest base class counts.
STATUSES: Mapping[type[JaxserveError], Kind] = {
    errors.InvalidRequestError: Kind(400, _INVALID),
    errors.PromptTooLongError: Kind(400, _INVALID, "context_length_exceeded"),
    errors.OtherTaskError: Kind(400, _INVALID, "other_task"),
    errors.EmptyPromptError: Kind(400, _INVALID, "empty_prompt"),
    errors.TokenOutOfRangeError: Kind(400, _INVALID, "token_out_of_range"),
    errors.InvalidSamplingParamsError: Kind(400, _INVALID, "invalid_sampling_params"),
    errors.UnknownAdapterError: Kind(400, _INVALID, "unknown_adapter"),
    errors.InvalidGrammarError: Kind(400, _INVALID, "invalid_grammar"),
    errors.GrammarTooComplexError: Kind(400, _INVALID, "grammar_too_complex"),
    errors.AnswerTooShortError: Kind(400, _INVALID, "answer_too_short"),
    errors.GrammarsBusyError: Kind(429, "rate_limit_error", "grammars_busy", True),
    errors.QueueFullError: Kind(429, "rate_limit_error", "queue_full", True),
    errors.InvalidConfigError: Kind(400, _INVALID),
    errors.UnknownConversationError: Kind(404, _INVALID, "conversation_not_found"),
    errors.ConversationBusyError: Kind(409, "conflict_error", "conversation_busy", True),
    errors.ConversationConflictError: Kind(409, "conflict_error", "conversation_conflict"),
    errors.OtherModelError: Kind(409, "conflict_error", "other_model"),
    errors.TurnTimeoutError: Kind(504, "timeout_error", "request_timeout"),
    errors.TurnCancelledError: Kind(503, _SERVER, "cancelled", True),
    errors.InfeasibleBoundError: Kind(503, _SERVER, "infeasible_bound"),
    errors.UnheededBoundError: Kind(400, _INVALID, "unheeded_bound"),
    errors.BoundNotMetError: Kind(503, _SERVER, "bound_not_met", True),
    errors.EngineBusyError: Kind(409, "conflict_error", "engine_busy", True),
    errors.RuntimeClosedError: Kind(503, _SERVER, "shutting_down", True),
    errors.ReplicaDiedError: Kind(503, _SERVER, "replica_died", True),
    errors.StepMemoryError: Kind(503, _SERVER, "step_memory", True),
    errors.NumericalError: Kind(500, _SERVER, "numerical_error"),
    errors.GrammarFailedError: Kind(500, _SERVER, "grammar_failed"),
    errors.MissingExtraError: Kind(501, _SERVER, "missing_extra"),
    JaxserveError: Kind(500, _SERVER, "internal_error"),
}


class RefusedError(JaxserveError):
    """A request that the server refuses for a reason of HTTP or of its own limits.

    `param` is the field of the body at fault; the request may succeed after `retry_after_s`.
    """

    def __init__(
        self,
        message: str,
        kind: Kind,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
    ):
        super().__init__(message)
        self.kind = kind
        self.param = param
        self.retry_after_s = retry_after_s


def invalid(message: str, param: str | None = None) -> RefusedError:
    """Return the error for a field that cannot be honoured."""
    return RefusedError(message, Kind(400, _INVALID), param=param)


def not_allowed(message: str) -> RefusedError:
    """Return the error for what this server was not started to do."""
    return RefusedError(message, Kind(404, _INVALID, "not_allowed"))


def no_room(error: JaxserveError) -> RefusedError:
    """Return the error for lack of device memory while the server continues."""
    return RefusedError(str(error), Kind(503, _SERVER, "device_memory"))


def unknown_model(given: str, served: str) -> RefusedError:
    return RefusedError(
        f"the model {given!r} does not exist here; this server has {served!r}",
        Kind(404, _INVALID, "model_not_found"),
        param="model",
    )


def bad_key() -> RefusedError:
    return RefusedError(
        "the API key is missing or wrong; send one of the server's keys as 'Authorization: Bearer "
        "KEY' or 'x-api-key: KEY'",
        Kind(401, "authentication_error", "invalid_api_key"),
    )


def too_busy(num_waiting: int, retry_after_s: float) -> RefusedError:
    """Return the error for a request beyond the bound of the queue."""
    return RefusedError(
        f"{num_waiting} requests are waiting, which is this server's limit; try again in "
        f"{math.ceil(retry_after_s)} s",
        Kind(429, "rate_limit_error", "queue_full", True),
        retry_after_s=retry_after_s,
    )


def unavailable(phase: str, retry_after_s: float) -> RefusedError:
    return RefusedError(
        f"the server is {phase}; try again in {math.ceil(retry_after_s)} s",
        Kind(503, _SERVER, phase, True),
        retry_after_s=retry_after_s,
    )


def failed() -> RefusedError:
    return RefusedError(
        "the model could not be loaded or has failed; the server's log says why. Restart it",
        Kind(500, _SERVER, "failed"),
    )


def timed_out(timeout_s: float) -> RefusedError:
    return RefusedError(
        f"the answer was not complete after {timeout_s:g} s and was cancelled; ask for fewer "
        "tokens, or raise the server's --request-timeout",
        Kind(504, "timeout_error", "request_timeout"),
    )


def kind_of(error: JaxserveError) -> Kind:
    if isinstance(error, RefusedError):
        return error.kind
    return next(STATUSES[base] for base in type(error).__mro__ if base in STATUSES)


def is_refusal(error: Exception) -> bool:
    """Return whether an error refuses a request as given, or its frequency."""
    return isinstance(error, JaxserveError) and kind_of(error).status < 500


def response_of(error: JaxserveError, path: str) -> JSONResponse:
    """Return the answer to a request of this path."""
    return JSONResponse(
        body_of(error, path), status_code=kind_of(error).status, headers=headers_of(error)
    )


def body_of(error: JaxserveError, path: str) -> dict[str, Any]:
    """Return the body, in the form of the API that the path belongs to."""
    kind = kind_of(error)
    if path.startswith(MESSAGES_PATH):
        return MessagesErrorReply(
            error=MessagesErrorDetail(
                type=_MESSAGES_TYPES.get(kind.status, "invalid_request_error"),
                message=_unicode(str(error)),
            )
        ).model_dump()
    param = error.param if isinstance(error, RefusedError) else None
    detail = ErrorDetail(
        message=_unicode(str(error)),
        type=kind.type,
        param=None if param is None else _unicode(param),
        code=kind.code,
    )
    return ErrorReply(error=detail).model_dump()


def _unicode(text: str) -> str:
    """Return a text with lone surrogates escaped, which names of fields in a body may contain."""
    return text.encode("utf-8", "backslashreplace").decode()


def headers_of(error: JaxserveError) -> dict[str, str]:
    kind = kind_of(error)
    headers = {}
    if kind.status >= 500 or kind.status in (408, 409, 429):
        headers["x-should-retry"] = "true" if kind.may_retry else "false"
    retry_after_s = error.retry_after_s if isinstance(error, RefusedError) else None
    if retry_after_s is None and kind.status == 429:
        retry_after_s = _RETRY_S
    if retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(retry_after_s))
    if kind.status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers
