"""The part of a runtime that scores given tokens."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
from jaxtyping import Float32

from jaxserve.core.errors import InvalidRequestError, InvalidSamplingParamsError
from jaxserve.core.request import Completion, TokenLogprob
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.runtime.cached_pages import CachedPages
from jaxserve.runtime.intake import Intake
from jaxserve.runtime.maintenance import Maintenance
from jaxserve.runtime.pending import Batch, wait

_OWN = SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True)
# Fields that change probabilities and do not depend on where an answer begins.
_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "logit_bias")


class Scored(CachedPages):
    """The method of `Runtime` that returns log-probabilities of given tokens."""

    @abc.abstractmethod
    def __init__(self, maintenance: Maintenance, intake: Intake):
        super().__init__(maintenance)
        self._intake = intake

    def score(
        self, sequences: Any, params: SamplingParams | None = None, *, progress: bool = False
    ) -> Any:
        """Return the log-probability of each token of some sequences, given those before it.

        A prompt with its answer gets the numbers that sampling reported: the same bits where
        serving is deterministic (docs/batch_invariance.md), else within rounding. Sequences run in
        steps with other requests, and use no cached pages.

        Args:
          sequences: a sequence or a list of them, as prompts in `generate`; usually token ids. Each
            is at most `max_length` - 1 tokens.
          params: None for `TokenLogprob.logprob`, which is the model's own. Else for
            `TokenLogprob.processed_logprob`, of tokens drawn with these parameters. Their
            temperature, truncation, `repetition_penalty`, `logit_bias` and `adapter` count, and
            lengths, stops and seeds do not.
          progress: show a bar when it takes over two seconds.

        Returns:
          float32 [tokens - 1] for a sequence, without the first token; a list of them for a list.

        Raises:
          InvalidSamplingParamsError: `params` are greedy, have a grammar or `min_tokens`, or count
            output tokens apart from the prompt's (`presence_penalty`, `frequency_penalty`).
          InvalidRequestError: a sequence cannot be scored; one of its subclasses. No scores are
            returned then.
          QueueFullError: more sequences than `max_waiting` would wait.
          RuntimeClosedError, EngineFailedError
        """
        batch = Batch.of(sequences, _OWN if params is None else scoring(params))
        pending = self._intake.submit_batch(batch)
        try:
            wait(pending, progress=progress)
        except BaseException:
            for one in pending:
                one.cancel()
            raise
        scores = [_scores(one.result(), is_processed=params is not None) for one in pending]
        return scores[0] if batch.is_single else scores


def scoring(params: SamplingParams) -> SamplingParams:
    """Return the parameters of a request for scores of tokens that were drawn with `params`."""
    hindrances = {
        "temperature=0": params.is_greedy,
        f"presence_penalty={params.presence_penalty}": params.presence_penalty != 0,
        f"frequency_penalty={params.frequency_penalty}": params.frequency_penalty != 0,
        f"min_tokens={params.min_tokens}": params.min_tokens > 0,
        "a grammar": params.is_constrained,
    }
    for name, is_given in hindrances.items():
        if is_given:
            raise InvalidSamplingParamsError(
                f"{name} cannot be scored; pass a temperature above 0 and only {_FIELDS}, or omit "
                "params for the model's own log-probabilities"
            )
    return replace(
        _OWN, adapter=params.adapter, **{name: getattr(params, name) for name in _FIELDS}
    )


def _scores(completion: Completion, *, is_processed: bool) -> Float32[np.ndarray, " tokens"]:
    if completion.error is not None:
        raise completion.error
    if completion.finish_reason == "cancelled":
        raise InvalidRequestError(
            "a sequence was cancelled before it was scored: weights were updated or the runtime "
            "was paused with running='abort', or it was closed; score it again"
        )
    found = cast(Sequence[TokenLogprob], completion.prompt_logprobs)
    numbers = [each.processed_logprob if is_processed else each.logprob for each in found[1:]]
    return np.array(numbers, np.float32)
