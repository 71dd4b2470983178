"""Streams whose request may start again on another replica; every token is delivered once."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import final

from jaxserve.core.request import Completion
from jaxserve.engine.answers import Piece, PieceSink

_log = logging.getLogger(__name__)


@final
@dataclass
class _Extent:
    """The tokens of a sample so far, and the characters of its text."""

    token_ids: list[int] = field(default_factory=list)
    num_characters: int = 0


@final
class StreamReplay:
    """A filter of the pieces of one request, which passes each token, character and end on once.

    Every replica should generate the same tokens, perhaps in other pieces. If a replica generates
    other tokens, this is logged, and its later tokens follow those that were already passed on.

    Args:
      sink: called with the pieces; it must not wait.
      num_samples: number of the request's samples.
    """

    def __init__(self, sink: PieceSink, num_samples: int):
        self._sink: PieceSink | None = sink
        self._shown = [_Extent() for _ in range(num_samples)]
        self._given: list[_Extent] = []
        self._has_ended = [False] * num_samples
        self._differs = False
        self.begin()

    def begin(self) -> None:
        """Expect the pieces of a replica that starts the request, from the first token on."""
        self._given = [_Extent() for _ in self._shown]

    def show(self, piece: Piece) -> None:
        """Pass on the new part of a piece.

        An end with an error is not passed on, because another replica may succeed. `end` ends a
        request that fails.
        """
        i = piece.sample_index
        if piece.finish_reason == "error" or self._has_ended[i]:
            return
        given, shown = self._given[i], self._shown[i]
        known = shown.token_ids[len(given.token_ids) :][: len(piece.token_ids)]
        tokens = piece.token_ids[len(known) :]
        text = piece.text[max(0, shown.num_characters - given.num_characters) :]
        if known != list(piece.token_ids[: len(known)]) and not self._differs:
            self._differs = True
            _log.warning(
                "a replica generates other tokens than the one that died; the stream continues "
                "with them"
            )
        given.token_ids += piece.token_ids
        given.num_characters += len(piece.text)
        shown.token_ids += tokens
        shown.num_characters = max(shown.num_characters, given.num_characters)
        self._has_ended[i] = piece.finish_reason is not None
        if tokens or text or self._has_ended[i]:
            logprobs = None if piece.logprobs is None else piece.logprobs[len(known) :]
            self._pass_on(replace(piece, text=text, token_ids=tokens, logprobs=logprobs))

    def end(self, completion: Completion) -> None:
        """End the samples that have not ended, with the reasons in the completion."""
        for i, has_ended in enumerate(self._has_ended):
            if not has_ended:
                sample = completion.samples[min(i, len(completion.samples) - 1)]
                reason = sample.finish_reason
                self._pass_on(Piece(text="", token_ids=(), sample_index=i, finish_reason=reason))

    def _pass_on(self, piece: Piece) -> None:
        if self._sink is None:
            return
        try:
            self._sink(piece)
        except Exception:  # a sink's error must not end other requests
            _log.exception("the sink of a stream failed; it gets no more pieces")
            self._sink = None
