"""Answers that are read piece by piece: when they end, and how."""

from __future__ import annotations

from jaxserve.engine.answers import Answer, Piece


def still_open(num_open: int, piece: Piece) -> int:
    """How many of a request's samples are unfinished after `piece`, of `num_open` before it."""
    if piece.finish_reason == "error":
        return 0
    return num_open - (piece.finish_reason is not None)


def raise_error(answer: Answer) -> None:
    """Raise what an ended request failed with, if it did."""
    error = answer.future.result().error
    if error is not None:
        raise error
