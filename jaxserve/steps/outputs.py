"""The outputs of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, Shaped

from jaxserve.core.sampling_params import MAX_LOGPROBS
from jaxserve.scheduling.plan import ProposalCount
from jaxserve.steps.packing import Params
from jaxserve.steps.probing import Probe
from jaxserve.steps.sampling.sampler import Sampled, Variant


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Outputs:
    """The outputs of a step."""

    tokens: Int32[Array, "rows most"]
    num_tokens: Int32[Array, " rows"]  # the number of tokens of a row that are valid
    finite: Bool[Array, " rows"]  # False where the model's logits were not
    # None except in the FULL variant, like the three below.
    logprobs: Float32[Array, "rows most"] | None = None
    processed_logprobs: Float32[Array, "rows most"] | None = None
    top_ids: Int32[Array, "rows most top"] | None = None
    top_logprobs: Float32[Array, "rows most top"] | None = None
    # A probe's logits where a row's last token was sampled; None without a probe.
    remaining: Float32[Array, "rows buckets"] | None = None
    # Counts of `scheduling.plan.ProposalCount`; None except in decode loops that speculate.
    proposals: Int32[Array, "rows counts"] | None = None


def no_outputs(num_rows: int, most: int, variant: Variant, *, num_proposed: int = 0) -> Outputs:
    """Return outputs before the first token, with the arrays that the variant fills.

    A row gets at most `most` tokens and `num_proposed` proposals; 0 counts none.
    """
    shape = (num_rows, most)
    outputs = Outputs(
        tokens=jnp.zeros(shape, jnp.int32),
        num_tokens=jnp.zeros(num_rows, jnp.int32),
        finite=jnp.ones(num_rows, jnp.bool_),
    )
    if num_proposed:
        counts = jnp.zeros((num_rows, len(ProposalCount) + num_proposed), jnp.int32)
        outputs = replace(outputs, proposals=counts)
    if variant is not Variant.FULL:
        return outputs
    return replace(
        outputs,
        logprobs=jnp.zeros(shape, jnp.float32),
        processed_logprobs=jnp.zeros(shape, jnp.float32),
        top_ids=jnp.zeros((*shape, MAX_LOGPROBS), jnp.int32),
        top_logprobs=jnp.zeros((*shape, MAX_LOGPROBS), jnp.float32),
    )


def record(out: Outputs, live: Bool[Array, " rows"], sampled: Sampled) -> Outputs:
    row = jnp.arange(out.tokens.shape[0])
    column = jnp.where(live, out.num_tokens, out.tokens.shape[1])

    def put(
        tokens: Shaped[Array, "rows most *entry"] | None, new: Shaped[Array, " rows *entry"] | None
    ) -> Shaped[Array, "rows most *entry"] | None:
        if tokens is None or new is None:
            return None
        return tokens.at[row, column].set(new, mode="drop")

    return replace(
        out,
        tokens=out.tokens.at[row, column].set(sampled.token, mode="drop"),
        num_tokens=out.num_tokens + (live & sampled.finite).astype(out.num_tokens.dtype),
        finite=out.finite & (sampled.finite | ~live),
        logprobs=put(out.logprobs, sampled.logprob),
        processed_logprobs=put(out.processed_logprobs, sampled.processed_logprob),
        top_ids=put(out.top_ids, sampled.top_ids),
        top_logprobs=put(out.top_logprobs, sampled.top_logprobs),
    )


def count(
    out: Outputs, of: int | Int32[Array, ""], num: Bool[Array, " rows"] | Int32[Array, " rows"]
) -> Outputs:
    """Return the outputs with a count of proposals increased by `num` in each row."""
    assert out.proposals is not None, "outputs of a step that counts no proposals"
    return replace(out, proposals=out.proposals.at[:, of].add(num.astype(jnp.int32)))


def with_reading(
    outputs: Outputs,
    tapped: Float32[Array, "rows embed"] | None,
    probe: Probe | None,
    probe_params: Params,
) -> Outputs:
    if probe is None or tapped is None:
        return outputs
    return replace(outputs, remaining=probe.apply(probe_params, tapped).astype(jnp.float32))
