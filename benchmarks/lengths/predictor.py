"""Accuracy of predicted answer lengths: `python -m benchmarks.lengths.predictor --help`.

A predictor is trained on ShareGPT, or on other data, and compared with baselines on conversations
that none of them was trained on. A table on stderr, one JSON object on stdout;
docs/benchmarks/lengths.md says what each figure means.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common import environment
from benchmarks.common.harness import Benchmark, show
from jaxserve.core.errors import InvalidConfigError, JaxserveError

if TYPE_CHECKING:
    from predictor import LengthPredictor

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
    from predictor import TrainingConfig, train
    from predictor.data import columns
    from predictor.evaluation import compare

    settings = Settings(
        data=str(options.data or "sharegpt"),
        model=options.model,
        max_examples=options.num_examples,
        held_out=options.held_out,
        seed=options.seed,
        encoder=options.encoder,
        max_length=options.max_length,
        max_prompt_tokens=options.max_tokens,
        buckets=options.buckets,
        num_buckets=options.num_buckets,
        epochs=options.epochs,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
    )
    config = TrainingConfig(
        num_epochs=options.epochs,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        seed=options.seed,
    )
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
        "benchmark": "predictor",
        "settings": {**asdict(settings), "data": _without_folder(settings.data)},
        "computed_in": config.computed_in,
        "bucket_edges": predictor.buckets.edges,
        "num_examples": dict(zip(("learned", "held_out", "test"), map(len, parts), strict=True)),
        "mean_length": sum(lengths) / len(lengths),
        "history": {**asdict(history), "best_epoch": history.best_epoch},
        "training_s": training_s,
        "step_s": training_s / (len(history.losses) * -(-len(learned) // options.batch_size)),
        "contenders": [contender.to_dict() for contender in contenders],
        "milliseconds_a_prompt": _latencies(predictor, [example.prompt for example in test]),
        **environment.describe(),
    }


def _without_folder(data: str) -> str:
    """Return the kind and the name of a data file, without its folder."""
    kind, colon, file = data.rpartition(":")
    return f"{kind}{colon}{Path(file).name}"


def _latencies(predictor: LengthPredictor, prompts: list[str]) -> dict[str, float]:
    from predictor.evaluation import milliseconds_a_prompt

    return {str(size): milliseconds_a_prompt(predictor.logits, prompts, size) for size in BATCHES}


def _print_table(result: dict[str, Any]) -> None:
    from jaxserve.cli.predictor import table_of

    num, edges = result["num_examples"], result["bucket_edges"]
    table = table_of(result["contenders"])
    table.title = (
        f"{result['settings']['data']}: {num['test']} prompts, {len(edges) - 1} buckets up to "
        f"{edges[-1]} tokens; trained on {num['learned']} in {result['training_s']:.0f} s"
    )
    show(table)
    for size, milliseconds in result["milliseconds_a_prompt"].items():
        print(f"{milliseconds:.2f} ms a prompt in batches of {size}", file=sys.stderr)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--data",
        default=None,
        help="JSON lines, recorded:FILE or answered:FILE; ShareGPT by default",
    )
    add("--num-examples", type=int, default=6000, help="drawn, of all three parts together")
    add(
        "--held-out", type=float, default=0.15, help="share to calibrate on, and as much to test on"
    )
    add("--encoder", default="minilm", help="see `jaxserve predictor train`")
    add("--max-length", type=int, default=1024, help="of an answer; a longer one counts as this")
    add("--max-tokens", type=int, default=128, help="of a prompt; a longer one loses its middle")
    add("--buckets", default="equal", help="equal, log or quantile")
    add("--num-buckets", type=int, default=10, help="of lengths")
    add("--epochs", type=int, default=4, help="at most; training stops early")
    add("--batch-size", type=int, default=32, help="prompts a step")
    add("--learning-rate", type=float, default=5e-5, help="the highest")
    add("--model", default="smollm2-135m", help="the model whose tokens are counted")
    add("--seed", type=int, default=0, help="of draw, split and training")
    add("--save", type=Path, default=None, help="save the trained predictor in this folder")


BENCHMARK = Benchmark(__doc__, run, add_options, show=_print_table)
main = BENCHMARK.main


if __name__ == "__main__":
    sys.exit(main())
