"""Made-up requests of every kind, and the sampler under jit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.steps.sampling.sampler import Sampled, Variant, pack_sampling, sample

# Few shapes, since each needs a compilation.
NUM_ROWS, VOCAB, CONTEXT = 32, 1000, 24
num_traces: Counter[Variant] = Counter()


@partial(jax.jit, static_argnames="variant")
def sample_jit(*arrays: Any, variant: Variant) -> Sampled:
    num_traces[variant] += 1
    return sample(*arrays, variant=variant)


def request(
    *,
    seed: int = 0,
    prompt_length: int = 1,
    stop: Sequence[int] = (),
    ends: Sequence[int] = (),
    **params: Any,
) -> Request:
    return Request(
        id="a row",
        prompt=(0,) * prompt_length,
        params=SamplingParams(**params),
        arrival_s=0.0,
        stop_token_ids=tuple(stop),
        end_token_ids=tuple(ends),
        seed=seed,
    )


def random_request(rng: np.random.Generator, vocab: int, *, is_random: bool) -> Request:
    """Return a request in which each option is used with some probability."""

    def some(name: str, value: float) -> dict[str, float]:
        return {name: value} if rng.random() < 0.5 else {}

    chosen = rng.permutation(vocab).tolist()
    num_biased = int(rng.integers(0, 7))
    return request(
        seed=int(rng.integers(0, 2**32)),
        prompt_length=int(rng.integers(1, 8)),
        stop=chosen[: rng.integers(0, 5)],
        ends=chosen[2 : rng.integers(2, 6)],
        temperature=float(rng.uniform(0.3, 2)) if is_random else 0.0,
        min_tokens=int(rng.integers(0, CONTEXT)),
        logit_bias={chosen[-1 - i]: float(rng.normal() * 5) for i in range(num_biased)},
        **some("top_k", int(rng.integers(1, vocab + 5))),
        **some("top_p", float(rng.uniform(0.05, 1))),
        **some("min_p", float(rng.uniform(0, 0.3))),
        **some("repetition_penalty", float(rng.uniform(0.5, 2))),
        **some("presence_penalty", float(rng.uniform(-1, 2))),
        **some("frequency_penalty", float(rng.uniform(-1, 2))),
    )


def random_requests(rng: np.random.Generator, num: int, vocab: int) -> list[Request]:
    """Return requests, half of them greedy."""
    return [random_request(rng, vocab, is_random=rng.random() < 0.5) for _ in range(num)]


def run(
    logits: np.ndarray,
    requests: Sequence[Request],
    *,
    tokens: np.ndarray | None = None,
    length: Sequence[int] | np.ndarray | None = None,
    variant: Variant = Variant.FULL,
) -> Sampled:
    """Sample once for every request; by default each has one token so far."""
    num_rows = len(logits)
    return sample_jit(
        jnp.asarray(logits, jnp.float32),
        pack_sampling([(each, 0) for each in requests], num_rows),
        np.zeros((num_rows, CONTEXT), np.int32) if tokens is None else tokens,
        np.ones(num_rows, np.int32) if length is None else np.asarray(length, np.int32),
        variant=variant,
    )
