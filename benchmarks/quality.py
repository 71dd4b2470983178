"""Quality of weights in few bits, against the unquantised model's: `python -m benchmarks.quality`.

Texts are first turns of ShareGPT conversations, on which nothing here was trained or calibrated.
Every token is predicted from the previous tokens of
the text; docs/quantisation.md says what each figure means.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.common.harness import Benchmark, option, some_of
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.options import QUANTIZE

if TYPE_CHECKING:
    from jaxserve.models.store import LoadedModel
    from jaxserve.models.tokenizer import Tokenizer


FORMATS = QUANTIZE
# The highest allowed perplexity over the unquantised model's, and KL divergence in nats, for models
# of 100 million parameters or more; larger ones lose less. "keep" rounds activations only.
LIMITS = {
    "bf16": (1.005, 0.002),
    "int8": (1.01, 0.01),
    "int4": (1.10, 0.10),
    "fp8": (1.03, 0.03),
    "w8a8": (1.05, 0.05),
    "keep": (1.01, 0.01),
}


def problems(name: str, figures: Mapping[str, Any], unquantised_perplexity: float) -> list[str]:
    """Return the figures of a format that exceed its limit."""
    (most_ratio, most_divergence), found = LIMITS[name], []
    ratio = figures["perplexity"] / unquantised_perplexity
    # Written so that NaN is a problem.
    if not ratio <= most_ratio:
        found.append(
            f"the perplexity is {ratio:.3f} times the unquantised model's; at most {most_ratio} is "
            "expected"
        )
    if not figures["divergence"] <= most_divergence:
        found.append(
            f"the KL divergence is {figures['divergence']:.4f}; at most {most_divergence} is "
            "expected"
        )
    return found


def run(options: argparse.Namespace) -> dict[str, Any]:
    formats = some_of(options.formats, "--formats", FORMATS)
    reference = _load(options, None)
    if reference.tokenizer is None:
        raise InvalidConfigError(f"{options.model} has no tokenizer; give a model with one")
    texts = list(_texts(options, reference.tokenizer))
    base = _measured(texts, reference, reference)
    found = {}
    for name in formats:
        found[name] = _measured(texts, reference, _load(options, name))
        print(f"{name}: {found[name]}", file=sys.stderr)
    return {
        "model": options.model,
        "dtype": options.dtype,
        "num_texts": len(texts),
        "num_tokens": sum(len(text) - 1 for text in texts),
        "seed": options.seed,
        "unquantised": {name: base[name] for name in ("perplexity", "weights_bytes")},
        "formats": found,
        "limits": {
            name: dict(zip(("perplexity_ratio", "divergence"), LIMITS[name], strict=True))
            for name in formats
        },
        "warnings": [
            f"{name}: {problem}"
            for name in formats
            for problem in problems(name, found[name], base["perplexity"])
        ],
    }


def _load(options: argparse.Namespace, quantize: str | None) -> LoadedModel:
    from jaxserve.core.options import RuntimeOptions
    from jaxserve.models.quantisation import Quantisation
    from jaxserve.models.store import load_model

    has_choice = quantize not in (None, "bf16", "keep")
    how = RuntimeOptions(
        quantize=quantize, quantize_embeddings=options.quantize_embeddings if has_choice else None
    )
    return load_model(options.model, dtype=options.dtype, quantisation=Quantisation.of(how))


def _texts(options: argparse.Namespace, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yield the tokens of turns that are drawn; each has at least half of --tokens."""
    from jaxserve.core.assets import fetch
    from jaxserve.workload import sharegpt

    path = options.path or fetch(sharegpt.FILE)
    turns = [turn for talk in sharegpt.read(path) if (turn := talk.first_turn) is not None]
    random.Random(options.seed).shuffle(turns)
    num = 0
    for question, answer in turns:
        tokens = list(tokenizer.encode(f"{question}\n\n{answer}"))[: options.tokens]
        if 2 * len(tokens) >= options.tokens:
            yield tokens
            num += 1
            if num == options.texts:
                return
    raise InvalidConfigError(
        f"--texts {options.texts}: only {num} turns of {path} have {options.tokens // 2} tokens or "
        "more; pass fewer texts or tokens"
    )


def _measured(
    texts: list[list[int]], reference: LoadedModel, model: LoadedModel
) -> dict[str, float]:
    """Return a model's figures against the reference's, over tokens that are predicted.

    The perplexity is exp of the mean of minus the log-probability of the text's next token, the
    divergence the KL divergence of the next token's distribution in nats, and the agreement the
    share of tokens for which both have the same likeliest next token.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    # Padded to one length, so that each model is compiled once.
    longest = max(map(len, texts))

    def logits(graphdef: Any, params: Any, tokens: Any) -> Any:
        return jax.nn.log_softmax(nnx.merge(graphdef, params).whole_logits(tokens[None])[0])

    @jax.jit
    def sums(params: Any, others: Any, tokens: Any, length: Any) -> Any:
        wanted = logits(reference.graphdef, others, tokens)[:-1]
        got = logits(model.graphdef, params, tokens)[:-1]
        counts = (jnp.arange(longest - 1) < length - 1).astype(jnp.float32)
        divergence = jnp.sum(jnp.exp(wanted) * (wanted - got), axis=-1)
        right = jnp.take_along_axis(got, tokens[1:, None], axis=-1)[:, 0]
        same = jnp.argmax(wanted, axis=-1) == jnp.argmax(got, axis=-1)
        parts = (-right, divergence, same.astype(jnp.float32), jnp.ones_like(right))
        return jnp.stack([jnp.sum(counts * part) for part in parts])

    total = np.zeros(4)
    for text in texts:
        padded = jnp.asarray(text + [0] * (longest - len(text)), jnp.int32)
        total += np.asarray(sums(model.params, reference.params, padded, len(text)), np.float64)
    loss, divergence, same = (total[:3] / total[3]).tolist()
    return {
        "perplexity": math.exp(loss),
        "divergence": divergence,
        "agreement": same,
        "weights_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(model.params)),
    }


OPTIONS = (
    option("--model", "smollm2-135m", "a name, folder or GGUF file"),
    option("--dtype", "float32", "of the unquantised model and of activations"),
    option("--formats", "bf16,int8,int4,fp8,keep", f"some of {FORMATS}, separated by commas"),
    option("--quantize-embeddings", None, "of embedding and head, if not the format's usual one"),
    option("--texts", 16, "how many turns"),
    option("--tokens", 256, "of each, at most"),
    option("--seed", 0, "of the draw"),
    option("--path", None, "a ShareGPT file, if not the published one", Path),
)
main = Benchmark(__doc__, run, OPTIONS, "quality")


if __name__ == "__main__":
    sys.exit(main())
