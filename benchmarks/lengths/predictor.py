"""How well answers' lengths are predicted: `python -m benchmarks.predictor --help`.

A predictor is trained on ShareGPT, or on other data, and compared with baselines on conversations
that none of them saw. A table on stderr, one JSON object on stdout. docs/benchmarks.md says what
each figure means.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.output import command, show
from jaxserve.core.errors import InvalidConfigError, JaxserveError

if TYPE_CHECKING:
    from predictor import LengthPredictor

BATCHES = (1, 64)


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and write the result; the exit code."""
    return command(run, _parser().parse_args(arguments), show_result=_print_table)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train, compare, time."""
    try:
        return _run(options)
    except JaxserveError:
        raise
    except ValueError as error:  # what the predictor package refuses
        raise InvalidConfigError(str(error)) from error


def _run(options: argparse.Namespace) -> dict[str, Any]:
    from benchmarks import environment
    from jaxserve.cli.predictor import Settings
    from predictor import TrainingConfig, train
    from predictor.comparison import compare
    from predictor.data import columns

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
    """What a result says of its data: a file's name, and what kind of file it is."""
    kind, colon, file = data.rpartition(":")
    return f"{kind}{colon}{Path(file).name}"


def _latencies(predictor: LengthPredictor, prompts: list[str]) -> dict[str, float]:
    """By batch size, tokens counted in."""
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.predictor",
        description="How well lengths are predicted; prints one JSON object.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--data", default=None, help="JSON lines, or recorded:FILE; ShareGPT where left out")
    add("--num-examples", type=int, default=6000, help="drawn, for all three parts together")
    add("--held-out", type=float, default=0.15, help="share to calibrate by, and as much to test")
    add("--encoder", default="minilm", help="see `jaxserve predictor train`")
    add("--max-length", type=int, default=1024, help="longest answer; longer ones count as this")
    add("--max-tokens", type=int, default=128, help="of a prompt; longer ones lose their middle")
    add("--buckets", default="equal", help="equal, log or quantile")
    add("--num-buckets", type=int, default=10, help="of lengths")
    add("--epochs", type=int, default=4, help="at most; training stops early")
    add("--batch-size", type=int, default=32, help="prompts a step")
    add("--learning-rate", type=float, default=5e-5, help="the highest")
    add("--model", default="smollm2-135m", help="whose tokens are counted")
    add("--seed", type=int, default=0, help="of draw, split and training")
    add("--save", type=Path, default=None, help="keep the trained predictor in this folder")
    add("--output", type=Path, default=None, help="also write the object here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
