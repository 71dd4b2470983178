"""The trainer's log-probabilities after temperature and truncation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jaxserve.core.errors import InvalidSamplingParamsError
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.models.decoder import Decoder
from jaxserve.runtime.scored import scoring
from jaxserve.steps.sampling.processors import Rows
from jaxserve.steps.sampling.sampler import pack_sampling, processed_logprobs


def whole_processed_logprobs(
    model: Decoder, tokens: Int32[Array, "sequences length"], params: SamplingParams
) -> Float32[Array, "sequences length_minus_1"]:
    """Return the log-probability of each token after the first, as drawn with these parameters.

    It is to `Runtime.score(sequences, params)` what `model.whole_logprobs` is to
    `Runtime.score(sequences)`: a function of the model alone, for jitted training steps. On
    CPUs where serving is deterministic (docs/batch_invariance.md), they have the bits of
    `TokenLogprob.processed_logprob`. It is differentiable: the set of tokens that truncation keeps
    counts as constant. A token outside of it has minus infinity, so mask padding with `jnp.where`,
    not with a product.

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
