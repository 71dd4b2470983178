"""Waiting for the answer of a conversation's turn; whatever cuts that off ends the request."""

from __future__ import annotations

import asyncio

from jaxserve.core.errors import TurnTimeoutError
from jaxserve.core.request import Completion
from jaxserve.runtime.batches import wait
from jaxserve.runtime.pending import Pending


def turn_answer(
    pending: Pending, conversation_id: str, timeout_s: float | None, *, progress: bool
) -> Completion:
    """The completion, with its error if it has one; when an exception leaves this, it has ended.

    Raises:
      TurnTimeoutError: it was not there in `timeout_s` seconds.
    """
    try:
        wait([pending], progress=progress, timeout_s=timeout_s)
    except BaseException as error:
        pending.cancel()
        completion = pending.result()
        if not isinstance(error, TimeoutError):
            raise
        raise TurnTimeoutError(conversation_id, timeout_s, _num_tokens(completion)) from None
    return pending.result()


async def aturn_answer(
    pending: Pending, conversation_id: str, timeout_s: float | None
) -> Completion:
    """`turn_answer` for asyncio; cancelling the task ends the request."""
    try:
        async with asyncio.timeout(timeout_s):
            return await pending.aresult()
    except BaseException as error:
        pending.cancel()
        completion = await pending.aresult()
        if not isinstance(error, TimeoutError):
            raise
        raise TurnTimeoutError(conversation_id, timeout_s, _num_tokens(completion)) from None


def _num_tokens(completion: Completion) -> int:
    return len(completion.token_ids)
