"""The kernels of batch-invariant serving on GPUs keep a request's bits: in the interpreter, too."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import InvalidConfigError
from jaxserve.kernels import dispatch
from jaxserve.models.linear import without_row_kernels
from jaxserve.testing import OPTIONS, random_prompts, tiny_llama
from tests.runtime.serving import bits_of, tiny_family

IS_GPU = jax.default_backend() == "gpu"
# On a GPU the platform's choice. Elsewhere few sizes, since an interpreted kernel takes seconds to
# compile.
KERNELS = "triton" if IS_GPU else "triton_interpreted"
ON: dict[str, Any] = {
    **OPTIONS,
    "deterministic": True,
    "attention": KERNELS,
    **({} if IS_GPU else {"max_slots": 2, "max_step_tokens": 16, "max_decode_iterations": 2}),
}
PROMPTS = random_prompts(4, seed=4, longest=40)
PARAMS = [
    SamplingParams(max_tokens=4 + i, temperature=0.7 * (i % 2), seed=i, logprobs=2)
    for i in range(len(PROMPTS))
]


own_bits = partial(bits_of, PROMPTS, PARAMS)


@pytest.mark.release
def test_invariant_when_batches_chunks_and_cached_prefixes_change_nothing():
    """Prompts are cut into other chunks beside other requests, and found in the cache again."""
    model = tiny_llama(dtype=jnp.bfloat16, num_layers=1, layer_layout="scanned")
    with Runtime(model, policy="pensieve", **ON) as rt:
        together = own_bits(rt, range(len(PROMPTS)))
        for i in (3, 0, 2, 1):
            assert own_bits(rt, [i]) == {i: together[i]}
        assert rt.stats().num_prefix_hit > 0
        assert own_bits(rt, [2, 1, 3]) == {i: together[i] for i in (2, 1, 3)}
    served = {(each.operation, each.implementation) for each in dispatch.choices()}
    rows = KERNELS.replace("triton", "triton_rows")
    assert served >= {("fused_matmul", rows), ("matmul", KERNELS), ("rms_norm", KERNELS)}


@pytest.mark.skipif(not IS_GPU, reason="there is no GPU")
@pytest.mark.parametrize("kind", ["bfloat16", "float32", "qwen3_moe"])
def test_invariant_on_a_gpu_in_random_batches(kind):
    """Many requests of random sizes have the bits that they have alone, in random batches."""
    random = np.random.default_rng(0)
    prompts = random_prompts(24, seed=0, longest=90)
    params = [
        SamplingParams(
            max_tokens=int(random.integers(1, 30)), temperature=0.8 * (i % 2), seed=i, logprobs=3
        )
        for i in range(len(prompts))
    ]

    model = tiny_family(kind) if kind == "qwen3_moe" else tiny_llama(dtype=jnp.dtype(kind))
    options: dict[str, Any] = OPTIONS | {"max_slots": 16, "deterministic": True}
    single: dict[str, Any] = options | {"max_slots": 1}
    with Runtime(model, **single) as rt:
        alone = [bits_of(prompts, params, rt, [i])[i] for i in range(len(prompts))]
    with Runtime(model, **options) as rt:
        for _ in range(6):
            size = int(random.integers(2, len(prompts)))
            chosen = random.choice(len(prompts), size, replace=False)
            assert bits_of(prompts, params, rt, chosen) == {i: alone[i] for i in chosen}
        sequences = [[*p, *each[0]] for p, each in zip(prompts, alone, strict=True)]
        for prompt, each, scores in zip(prompts, alone, rt.score(sequences), strict=True):
            reported = np.array([token.logprob for token in each[1]], np.float32)
            np.testing.assert_array_equal(scores[len(prompt) - 1 :], reported)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(quantize="int8"), "QuantisedWeight on a GPU, whose sums have no fixed order"),
        (dict(max_adapters=1), "AdaptedWeight on a GPU"),
    ],
)
def test_weights_that_the_kernels_do_not_serve_are_refused(options, message):
    """The error names the parts of the model, and what to serve instead."""
    with pytest.raises(InvalidConfigError, match=message):
        Runtime(tiny_llama(), **ON | options)


@pytest.mark.release
def test_invariant_experts():
    """Groups of tokens have other sizes in each batch, and a token the same bits."""
    with Runtime(tiny_family("qwen3_moe"), policy="pensieve", **ON) as rt:
        together = own_bits(rt, range(len(PROMPTS)))
        for i in (3, 0, 2, 1):
            assert own_bits(rt, [i]) == {i: together[i]}
    served = {(each.operation, each.implementation) for each in dispatch.choices()}
    assert ("grouped_matmul", KERNELS.replace("triton", "triton_rows")) in served


def test_all_parts_of_a_mixture_have_row_kernels():
    """Otherwise it would be refused."""
    assert not without_row_kernels(tiny_family("qwen3_moe"))
