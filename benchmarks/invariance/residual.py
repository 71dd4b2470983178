"""The residual between sampling and training, by mode: `python -m benchmarks.invariance.residual`.

Each mode of serving draws answers in turn. The trainer's log-probabilities of their tokens are
those of `model.whole_logprobs` in float32.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64

from benchmarks.common.harness import Benchmark, option, some_of
from benchmarks.common.serving import raise_error
from jaxserve.core.options import RuntimeOptions
from jaxserve.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.models.store import LoadedModel

# Mode -> dtype of the model, and options of the runtime.
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "deterministic": ("float32", {"deterministic": True}),
    "KV in int8": ("float32", {"kv_dtype": "int8"}),
    "bfloat16": ("bfloat16", {}),
    "weights in int8": ("float32", {"quantize": "int8"}),
    "weights in int4": ("float32", {"quantize": "int4"}),
}
# Sequences that the trainer computes at once.
_ROWS = 4


def run(options: argparse.Namespace) -> dict[str, Any]:
    from jaxserve.execution.compilation import start_jax

    modes = some_of(options.modes, "--modes", MODES)
    start_jax()
    trainer = _loaded(options, "float32", None)
    vocab = trainer.config.vocab_size
    rng = random.Random(options.seed)
    prompts = [
        [rng.randrange(vocab) for _ in range(options.prompt_tokens)]
        for _ in range(options.num_requests)
    ]
    found: dict[str, Any] = {}
    for mode in modes:
        drawn = _drawn(options, mode, prompts)
        trained = _trained(
            trainer, [[*p, *tokens] for p, (tokens, _) in zip(prompts, drawn, strict=True)]
        )
        gaps = [
            whole[options.prompt_tokens - 1 :] - np.array(sampled, np.float64)
            for whole, (_, sampled) in zip(trained, drawn, strict=True)
        ]
        found[mode] = differences(np.concatenate(gaps))
    return {"repeats": 1, "modes": found}


def differences(gaps: Float64[np.ndarray, " tokens"]) -> dict[str, Any]:
    """Return figures of log(trainer's probability / reported probability) of drawn tokens.

    `kl` estimates the divergence of sampling from the trainer, per token, by the mean of
    exp(gap) - 1 - gap, which is never negative (Schulman, "Approximating KL divergence").
    """
    return {
        "num_tokens": gaps.size,
        "num_different": int(np.count_nonzero(gaps)),
        "largest": float(np.abs(gaps).max()),
        "mean": float(np.abs(gaps).mean()),
        "largest_ratio_error": float(np.abs(np.expm1(gaps)).max()),
        "kl": float(np.mean(np.expm1(gaps) - gaps)),
    }


def _loaded(options: argparse.Namespace, dtype: str, quantize: str | None) -> LoadedModel:
    from jaxserve.models.quantisation import Quantisation
    from jaxserve.models.store import load_model

    how = Quantisation.of(RuntimeOptions(quantize=quantize)) if quantize else None
    return load_model(options.model, dtype=dtype, quantisation=how, progress=False)


def _drawn(
    options: argparse.Namespace, mode: str, prompts: list[list[int]]
) -> list[tuple[tuple[int, ...], list[float]]]:
    from flax import nnx

    from jaxserve import Runtime

    dtype, settings = MODES[mode]
    model = _loaded(options, dtype, settings.get("quantize"))
    sampling = [
        SamplingParams(
            temperature=1.0,
            max_tokens=options.output_tokens,
            ignore_eos=True,
            seed=options.seed + i,
            logprobs=0,
        )
        for i in range(len(prompts))
    ]
    print(f"{mode}: draws {len(prompts)} answers", file=sys.stderr)
    sizes = {"max_context": options.prompt_tokens + options.output_tokens + 1, "max_slots": 16}
    with Runtime(
        nnx.merge(model.graphdef, model.params), model.params, warmup=False, **sizes, **settings
    ) as rt:
        done = rt.generate(prompts, sampling, progress=False)
    raise_error(done)
    return [(each.token_ids, [token.logprob for token in each.logprobs or ()]) for each in done]


def _trained(
    model: LoadedModel, sequences: list[list[int]]
) -> Iterator[Float64[np.ndarray, " rest"]]:
    """Yield the trainer's log-probabilities of each sequence, all of one length."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    @jax.jit
    def logprobs(params: Any, tokens: Any) -> Any:
        return nnx.merge(model.graphdef, params).whole_logprobs(tokens)

    for start in range(0, len(sequences), _ROWS):
        some = sequences[start : start + _ROWS]
        rows = jnp.asarray([*some, *[some[-1]] * (_ROWS - len(some))], jnp.int32)
        yield from np.asarray(logprobs(model.params, rows), np.float64)[: len(some)]


OPTIONS = (
    option("--model", "smollm2-135m", "registered name, folder or GGUF file"),
    option("--modes", ",".join(MODES), "ways of serving"),
    option("--num-requests", 16, "answers in each mode"),
    option("--prompt-tokens", 16, "random tokens of each prompt"),
    option("--output-tokens", 48, "of each answer"),
    option("--seed", 0, "of prompts and answers"),
)
main = Benchmark(__doc__, run, OPTIONS, "residual")


if __name__ == "__main__":
    sys.exit(main())
