"""Accuracy and cost of a probe of remaining lengths: `python -m benchmarks.lengths.probe --help`.

A probe is trained on some of a model's own answers and tested on the rest, against survival alone,
of all answers and of an encoder's predictions. Then decode loops with and without it are timed in
turns. Tables on stderr, one JSON object on stdout; docs/benchmarks/lengths.md says what each figure
means.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.common import environment
from benchmarks.common.harness import Benchmark, show
from benchmarks.common.policies import load_predictor
from benchmarks.common.timing import full_step_s
from jaxserve.cli.probe import ELAPSED, ProbeSettings, TrainedProbe, train_probe_on
from jaxserve.core.errors import InvalidConfigError

if TYPE_CHECKING:
    from jaxserve.runtime import Runtime
    from predictor import LengthDistributions, Refinement

_PROMPT_TOKENS = 16
# Calls that host times are averages of.
_CALLS = 200


def run(options: argparse.Namespace) -> dict[str, Any]:
    from predictor.probe_training import compare_remaining

    predictor = load_predictor(options)
    settings = ProbeSettings(
        data=str(options.answers),
        model=options.model,
        load=options.load,
        layer=options.layer,
        interval=options.interval,
        hidden_size=options.hidden_size,
        max_length=options.max_length,
        buckets=options.buckets,
        num_buckets=options.num_buckets,
        max_answers=options.max_answers,
        held_out=options.held_out,
        epochs=options.epochs,
        learning_rate=options.learning_rate,
        seed=options.seed,
    )
    begin_s = time.perf_counter()
    done = train_probe_on(settings, progress=True)
    training_s = time.perf_counter() - begin_s
    if options.save is not None:
        done.probe.save(options.save)
    predicted: dict[str, LengthDistributions] = {}
    if predictor is not None:
        decode = done.loaded.tokenizer and done.loaded.tokenizer.decode
        if decode is None:
            raise InvalidConfigError("--predictor reads text, and the model has no tokenizer")
        predicted["encoder"] = predictor.predict([decode(a.prompt) for a in done.answers[2]])
    test, refinement = done.readings[2], done.probe.refinement
    figures = compare_remaining(done.probe, test, ELAPSED, predicted)
    return {
        "benchmark": "probe",
        "settings": {**asdict(settings), "data": Path(settings.data).name},
        "predictor": None if options.predictor is None else Path(options.predictor).name,
        "layer": done.probe.layer,
        "bucket_edges": done.probe.buckets.edges,
        "num_answers": _named(map(len, done.answers)),
        "num_readings": _named(len(part.elapsed) for part in done.readings),
        "mean_length": float(test.lengths.mean()),
        "belief_weight": refinement.belief_weight,
        "reading_weight": refinement.reading_weight,
        "temperature": refinement.temperature,
        "history": {**asdict(done.history), "best_epoch": done.history.best_epoch},
        "training_s": training_s,
        "figures": [vars(each) for each in figures],
        "cost": _cost(done, options),
        **environment.describe(),
    }


def _named(counts: Any) -> dict[str, int]:
    return dict(zip(("learned", "held_out", "test"), counts, strict=True))


def _cost(done: TrainedProbe, options: argparse.Namespace) -> dict[str, Any]:
    from flax import nnx

    from jaxserve import Runtime

    loaded, size = done.loaded, options.batch_size
    shared: dict[str, Any] = {
        "tokenizer": loaded.tokenizer,
        "eos_token_ids": loaded.eos_token_ids,
        "policy": "vllm_like",
        "max_slots": size,
        "max_context": _PROMPT_TOKENS + options.tokens,
        "host_memory": 0,
        "warmup": "full",
    }

    def opened(probe: Any) -> Runtime:
        model = nnx.merge(loaded.graphdef, loaded.params)
        return Runtime(model, loaded.params, probe=probe, **shared)

    with opened(None) as without, opened(done.probe) as with_it:
        for _ in range(options.rounds):
            for rt in (without, with_it):
                _decode(rt, size, options.tokens)
        times_s = [full_step_s(rt.report().steps, size) for rt in (without, with_it)]
        beliefs = with_it.stats()
    if None in times_s:
        raise InvalidConfigError(
            f"no decode loop had all {size} rows; give a smaller --batch-size or more --tokens"
        )
    without_us, with_us = (1e6 * time_s for time_s in times_s if time_s is not None)
    return {
        "batch_size": size,
        "rounds": options.rounds,
        "iteration_us_without": without_us,
        "iteration_us_with": with_us,
        "slower_by": with_us / without_us - 1.0,
        "host_us_a_refinement": 1e6 * _refinement_s(done.probe.refinement, size),
        "compilations_while_serving": beliefs.num_compilations,
    }


def _decode(rt: Runtime, size: int, num_tokens: int) -> None:
    from jaxserve import SamplingParams

    prompts = np.random.default_rng(0).integers(
        0, rt.model_config.vocab_size, (size, _PROMPT_TOKENS)
    )
    rt.generate(
        prompts.tolist(),
        SamplingParams(max_tokens=num_tokens, forced_length=num_tokens),
        progress=False,
    )


def _refinement_s(refinement: Refinement, size: int) -> float:
    beliefs = refinement.first(None, size)
    passed, logits = np.full(size, refinement.interval), np.zeros((size, refinement.buckets.num))
    return _mean_s(lambda: refinement.refined(beliefs, passed, logits))


def _mean_s(call: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    for _ in range(_CALLS):
        call()
    return (time.perf_counter() - begin_s) / _CALLS


def _print_tables(result: dict[str, Any]) -> None:
    from jaxserve.cli.probe import table_of

    num, cost = result["num_answers"], result["cost"]
    table = table_of(result["figures"])
    table.title = (
        f"{num['test']} answers of {result['mean_length']:.0f} tokens on average; probe behind "
        f"layer {result['layer']}, trained on {num['learned']} in {result['training_s']:.0f} s"
    )
    show(table)
    print(
        f"an iteration of {cost['batch_size']} rows takes {cost['iteration_us_without']:.0f} us, "
        f"with the probe {cost['iteration_us_with']:.0f} us ({cost['slower_by']:+.1%}); the host "
        f"{cost['host_us_a_refinement']:.0f} us every {result['settings']['interval']} tokens",
        file=sys.stderr,
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    add, given = parser.add_argument, ProbeSettings
    add(
        "--answers",
        type=Path,
        required=True,
        help="a file written by --record, with the tokens of answers",
    )
    add("--model", default="smollm2-135m", help="the model that gave them")
    add("--load", default=given.load, help="random for random weights")
    add("--predictor", default=None, help="folder of a trained predictor, to compare and refine")
    add("--max-answers", type=int, default=None, help="the first of the file; all by default")
    add(
        "--held-out",
        type=float,
        default=given.held_out,
        help="share to calibrate on, and as much to test on",
    )
    add(
        "--layer", type=int, default=None, help="layers before the reading; half of them by default"
    )
    add("--interval", type=int, default=given.interval, help="tokens between readings")
    add("--hidden-size", type=int, default=given.hidden_size, help="of the head; 0 for linear")
    add("--max-length", type=int, default=given.max_length, help="longest remaining length")
    add("--buckets", default=given.buckets, help="of remaining length: log, equal or quantile")
    add("--num-buckets", type=int, default=given.num_buckets, help="how many")
    add("--epochs", type=int, default=given.epochs, help="at most; training stops early")
    add("--learning-rate", type=float, default=given.learning_rate, help="the highest")
    add("--seed", type=int, default=given.seed, help="of split and training")
    add("--batch-size", type=int, default=32, help="sequences that decode at once, for the cost")
    add("--tokens", type=int, default=64, help="of each of them")
    add("--rounds", type=int, default=5, help="runs with and without the probe, in turns")
    add("--save", type=Path, default=None, help="save the trained probe in this folder")


BENCHMARK = Benchmark(__doc__, run, add_options, show=_print_tables)
main = BENCHMARK.main


if __name__ == "__main__":
    sys.exit(main())
