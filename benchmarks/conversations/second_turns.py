"""Second turns of a hybrid model: `python -m benchmarks.conversations.second_turns --help`.

The time to the first token of a turn, by the length of its history: with the state that the first
turn has left, with a history that is computed again, and of a request with the new tokens alone.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from benchmarks.common.harness import Benchmark, option, whole_numbers
from benchmarks.common.repeats import Figures, repeats, summary, take_turns
from jaxserve.core.sampling_params import SamplingParams

WAYS = ("kept", "computed", "alone")
# Of a model with the layers of Bamba and random weights: one of three has attention.
_SHAPE: dict[str, Any] = {
    **dict(model_type="bamba", vocab_size=32000, max_position_embeddings=16384),
    **dict(hidden_size=768, intermediate_size=2048, num_attention_heads=12, num_key_value_heads=4),
    **dict(mamba_n_heads=24, mamba_d_state=64),
}


def run(options: argparse.Namespace) -> dict[str, Any]:
    from flax import nnx

    from jaxserve import Runtime
    from jaxserve.execution.compilation import start_jax
    from jaxserve.execution.sizes import platform_defaults
    from jaxserve.models.families import config_from_hf
    from jaxserve.models.store import load_model

    start_jax()
    lengths = whole_numbers(options.lengths, "--lengths")
    layers = {
        "num_hidden_layers": options.layers,
        "attn_layer_indices": [*range(2, options.layers, 3)],
    }
    model = load_model(
        options.model or config_from_hf({**_SHAPE, **layers}),
        dtype=platform_defaults().dtype,
        load="auto" if options.model else "random",
    )
    one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    rng = np.random.default_rng(options.seed)
    with ExitStack() as stack:
        kept, computed = (
            stack.enter_context(
                Runtime(
                    nnx.merge(model.graphdef, model.params),
                    model.params,
                    max_context=max(lengths) + options.new + 8,
                    max_slots=4,
                    state_memory=memory,
                    warmup="full",
                )
            )
            for memory in (None, 0)
        )

        def play(length: int, way: str) -> Figures:
            rt = kept if way == "kept" else computed
            history, new = (
                rng.integers(0, model.config.vocab_size, size).tolist()
                for size in (0 if way == "alone" else length, options.new)
            )
            if history:
                history += rt.generate(history, one, progress=False).token_ids
            answer = rt.generate([*history, *new], one, progress=False)
            assert (way == "kept") == (answer.num_cached_tokens > 0), "no state was kept"
            return {"first_token_s": answer.timing.time_to_first_token_s}

        rows: list[dict[str, Any]] = []
        for length in lengths:
            at = f"{length:,} tokens"
            runs = take_turns(WAYS, options.repeats, partial(play, length), at=at)
            rows.append({"length": length, **{way: summary(own) for way, own in runs.items()}})
    for row in rows:
        alone_s = row["alone"]["first_token_s"]
        row |= {f"{way}_over_alone": row[way]["first_token_s"] / alone_s for way in WAYS[:2]}
    return {"rows": rows}


OPTIONS = (
    option("--lengths", "512,1024,2048,4096,8192", "tokens of the history, separated by commas"),
    option("--new", 32, "new tokens of the second turn"),
    option("--model", None, "a folder; by default a model of Bamba's layers with random weights"),
    option("--layers", 12, "layers of the model with random weights"),
    option("--seed", 0, "of the tokens"),
    repeats("way"),
)
main = Benchmark(__doc__, run, OPTIONS, "second_turns")


if __name__ == "__main__":
    sys.exit(main())
