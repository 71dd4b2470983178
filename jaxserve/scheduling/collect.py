"""Takes a step's arrays apart, sequence by sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from jaxserve.core.request import TokenLogprob
from jaxserve.scheduling.plan import PromptLogprobs, Row, StepResult
from jaxserve.scheduling.sequence import Sequence


@final
@dataclass(frozen=True)
class Progress:
    """News of one sequence from one step: `num_new` tokens, and perhaps its end."""

    sequence: Sequence
    num_new: int


def take_results(sequence: Sequence, row: Row, index: int, result: StepResult) -> int:
    """Append what row `index` delivered to its sequence, and return the number of tokens."""
    if result.prompt_logprobs is not None and index in result.prompt_logprobs:
        _append_prompt_logprobs(sequence, row.start, result.prompt_logprobs[index])
    count = int(result.num_tokens[index])
    if count:
        _append_outputs(sequence, result, index, count)
    return count


def _append_outputs(sequence: Sequence, result: StepResult, row: int, count: int) -> None:
    """Append `count` tokens of `row`, and their log-probabilities where asked for."""
    tokens = result.tokens[row, :count].tolist()
    sequence.output += tokens
    wanted = sequence.request.params.logprobs
    if wanted is None:
        return
    assert result.logprobs is not None and result.processed_logprobs is not None
    for i, token_id in enumerate(tokens):
        top: tuple[tuple[int, float], ...] = ()
        if wanted:
            assert result.top_ids is not None and result.top_logprobs is not None
            top = _pairs(result.top_ids[row, i, :wanted], result.top_logprobs[row, i, :wanted])
        score = TokenLogprob(
            token_id=token_id,
            logprob=float(result.logprobs[row, i]),
            processed_logprob=float(result.processed_logprobs[row, i]),
            top=top,
        )
        sequence.scores.output.append(score)


def _append_prompt_logprobs(sequence: Sequence, start: int, part: PromptLogprobs) -> None:
    """Keep the log-probabilities of the prompt tokens that follow those of a prefill row.

    Those of a prompt that is computed anew stay the first ones, of the weights that the answer
    began with.
    """
    wanted = sequence.request.params.prompt_logprobs or 0
    prompt = sequence.request.prompt
    for i in range(len(part.logprobs)):
        position = start + i + 1
        is_kept = bool(sequence.output) and position in sequence.scores.prompt
        if position < len(prompt) and not is_kept:
            top = _pairs(part.top_ids[i, :wanted], part.top_logprobs[i, :wanted])
            sequence.scores.prompt[position] = TokenLogprob(
                token_id=prompt[position],
                logprob=float(part.logprobs[i]),
                processed_logprob=float(part.processed_logprobs[i]),
                top=top,
            )


def _pairs(ids: np.ndarray, logprobs: np.ndarray) -> tuple[tuple[int, float], ...]:
    return tuple(zip(ids.tolist(), logprobs.tolist(), strict=True))
