"""Errors, as they come out of another process."""

from __future__ import annotations

import pickle

import pytest

from jaxserve.core.errors import (
    BoundNotMetError,
    CheckpointError,
    ConversationTooLongError,
    InfeasibleBoundError,
    InvalidConfigError,
    JaxserveError,
    JournalError,
    MissingExtraError,
    TurnTimeoutError,
    UnknownConversationError,
)

pytestmark = pytest.mark.fast

ERRORS = [
    InvalidConfigError("slots=0 is not allowed"),
    ConversationTooLongError("mine", 50, num_new_tokens=20, max_prompt_tokens=60),
    BoundNotMetError("a", "first_token_bound", 1.0, 2.5, 7.0, 2.0),
    InfeasibleBoundError({"latency_s": 1.0}, {"latency_s": 2.0}),
    CheckpointError("model/", ["a is missing", "b is surplus"], "fetch it again"),
    MissingExtraError("fastapi", "serve", purpose="jaxserve serve"),
    TurnTimeoutError("mine", 2.0, 7),
    UnknownConversationError("there is no conversation 'mine'"),
    JournalError("the journal cannot be read"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_is_the_same_in_another_process(error: JaxserveError):
    """Its type, text, notes and attributes."""
    error.add_note("seen by replica 1")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error)
    assert again.__notes__ == ["seen by replica 1"]
    kept = [name for name in vars(error) if not name.startswith("_")]
    assert {name: getattr(again, name) for name in kept} == {
        name: getattr(error, name) for name in kept
    }
    assert str(pickle.loads(pickle.dumps(again))) == str(error)
