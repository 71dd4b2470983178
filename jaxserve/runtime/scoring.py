"""Log-probabilities of given tokens: a runtime's scores, and those that a trainer computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from jaxserve.core.errors import InvalidRequestError, InvalidSamplingParamsError
from jaxserve.core.request import Completion, Request, TokenLogprob
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.pending import PromptBatch, wait
from jaxserve.models.decoder import Decoder
from jaxserve.runtime.intake import Intake
from jaxserve.steps.sampling.processors import Rows
from jaxserve.steps.sampling.sampler import pack_sampling, processed_logprobs

_OWN = SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True)
# Fields that change probabilities and do not depend on where an answer begins.
_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "logit_bias")


def score(intake: Intake, sequences: Any, params: SamplingParams | None, *, progress: bool) -> Any:
    """Return the scores of one sequence or a list of them; `Runtime.score` documents them."""
    batch = PromptBatch.of(sequences, _OWN if params is None else scoring(params))
    pending = intake.submit_batch(batch)
    try:
        wait(pending, progress=progress)
    except BaseException:
        for one in pending:
            one.cancel()
        raise
    scores = [_scores(one.result(), is_processed=params is not None) for one in pending]
    return scores[0] if batch.is_single else scores


def whole_processed_logprobs(
    model: Decoder, tokens: Int32[Array, "sequences length"], params: SamplingParams
) -> Float32[Array, "sequences length_minus_1"]:
    """Return the log-probability of each token after the first, as drawn with these parameters.

    It is to `Runtime.score(sequences, params)` what `model.whole_logprobs` is to
    `Runtime.score(sequences)`: a function of the model alone, for jitted training steps. On CPUs
    where serving is deterministic (docs/batch_invariance.md), the results have the bits of
    `TokenLogprob.processed_logprob`. The function is differentiable: the set of tokens that
    truncation keeps counts as constant. A token outside it has minus infinity, so mask padding with
    `jnp.where`, not with a product.

    Args:
      tokens: padding at the end of a sequence changes nothing before it.
      params: static. Its temperature, truncation, `repetition_penalty` and `logit_bias` count.

    Raises:
      InvalidSamplingParamsError: as `Runtime.score`, or `params` name an adapter.
    """
    if params.adapter is not None:
        raise InvalidSamplingParamsError(
            f"adapter={params.adapter!r} is not a part of the model; merge it into the weights and "
            "omit it"
        )
    tokens = jnp.asarray(tokens)  # of NumPy, too
    num_sequences, length = tokens.shape
    if length < 2:  # no token is after the first
        return jnp.zeros((num_sequences, 0), jnp.float32)
    logits = model.whole_logits(tokens)[:, :-1]
    num_rows = num_sequences * (length - 1)
    request = Request(id="", prompt=(0,), params=scoring(params), arrival_s=0.0)
    own = pack_sampling([(request, 0)], 1)
    sampling = jax.tree.map(lambda x: jnp.broadcast_to(x[0], (num_rows, *x.shape[1:])), own)
    rows = Rows(
        tokens,
        jnp.repeat(jnp.arange(num_sequences), length - 1),
        jnp.tile(jnp.arange(1, length), num_sequences),
        sampling.prompt_length,
    )
    found = processed_logprobs(
        logits.reshape(num_rows, -1), tokens[:, 1:].reshape(-1), sampling, rows
    )
    return found.reshape(num_sequences, -1)


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
