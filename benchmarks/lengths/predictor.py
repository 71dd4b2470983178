"""Accuracy of predicted answer lengths: `python -m benchmarks.lengths.predictor --help`.

A predictor is trained on ShareGPT, or on other data, and compared with baselines on conversations
that none of them was trained on.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.harness import Benchmark, of_options, option, without_folder
from jaxserve.core.errors import InvalidConfigError, JaxserveError

if TYPE_CHECKING:
    from jaxserve.predictor import LengthPredictor

BATCHES = (1, 64)


def run(options: argparse.Namespace) -> dict[str, Any]:
    try:
        return _run(options)
    except JaxserveError:
        raise
    except ValueError as error:  # of the predictor package
        raise InvalidConfigError(str(error)) from error


def _run(options: argparse.Namespace) -> dict[str, Any]:
    from jaxserve.cli.predictor import Settings
    from jaxserve.predictor import TrainingConfig, train
    from jaxserve.predictor.data import columns
    from jaxserve.predictor.evaluation import compare

    settings = of_options(
        Settings,
        options,
        data=str(options.data or "sharegpt"),
        max_examples=options.num_examples,
        max_prompt_tokens=options.max_tokens,
    )
    config = of_options(TrainingConfig, options, num_epochs=options.epochs)
    learned, kept, test = parts = settings.read(progress=True)
    predictor = settings.start(parts, progress=True)
    features = partial(predictor.embeddings, params=predictor.params)
    begin_s = time.perf_counter()
    history = train(predictor, learned, kept, config)
    training_s = time.perf_counter() - begin_s
    predictor.calibrate(*columns(kept))
    if options.save is not None:
        settings.save(predictor, options.save)
    contenders = compare(predictor.buckets, predictor.logits, features, learned, kept, test)
    lengths = [example.output_length for example in test]
    return {
        "settings": {**asdict(settings), "data": without_folder(settings.data)},
        "computed_in": config.computed_in,
        "bucket_edges": predictor.buckets.edges,
        "num_examples": dict(zip(("learned", "held_out", "test"), map(len, parts), strict=True)),
        "mean_length": sum(lengths) / len(lengths),
        "history": {**asdict(history), "best_epoch": history.best_epoch},
        "training_s": training_s,
        "step_s": training_s / (len(history.losses) * -(-len(learned) // options.batch_size)),
        "contenders": [contender.to_dict() for contender in contenders],
        "milliseconds_a_prompt": _latencies(predictor, [example.prompt for example in test]),
    }


def _latencies(predictor: LengthPredictor, prompts: list[str]) -> dict[str, float]:
    from jaxserve.predictor.evaluation import milliseconds_a_prompt

    return {str(size): milliseconds_a_prompt(predictor.logits, prompts, size) for size in BATCHES}


OPTIONS = (
    option("--data", None, "JSON lines, recorded:FILE or answered:FILE; ShareGPT by default"),
    option("--num-examples", 6000, "drawn, of all three parts together"),
    option("--held-out", 0.15, "share to calibrate on, and as much to test on"),
    option("--encoder", "minilm", "see `jaxserve predictor train`"),
    option("--max-length", 1024, "of an answer; a longer one counts as this"),
    option("--max-tokens", 128, "of a prompt; a longer one loses its middle"),
    option("--buckets", "equal", "equal, log or quantile"),
    option("--num-buckets", 10, "of lengths"),
    option("--epochs", 4, "at most; training stops early"),
    option("--batch-size", 32, "prompts a step"),
    option("--learning-rate", 5e-5, "the highest"),
    option("--model", "smollm2-135m", "the model whose tokens are counted"),
    option("--seed", 0, "of draw, split and training"),
    option("--save", None, "save the trained predictor in this folder", Path),
)
main = Benchmark(__doc__, run, OPTIONS, "predictor")


if __name__ == "__main__":
    sys.exit(main())
