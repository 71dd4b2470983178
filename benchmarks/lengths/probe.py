"""Accuracy and cost of a probe of remaining lengths: `python -m benchmarks.lengths.probe --help`.

A probe is trained on some of a model's own answers and tested on the rest, against survival alone,
of all answers and of an encoder's predictions. Then decode loops with and without it are timed in
turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.common.harness import Benchmark, of_options, option
from benchmarks.common.policies import load_predictor
from benchmarks.common.timing import full_step_s
from jaxserve.cli.probe import ELAPSED, ProbeSettings, TrainedProbe, train_probe_on
from jaxserve.core.errors import InvalidConfigError

if TYPE_CHECKING:
    from jaxserve.predictor import LengthDistributions, Refinement
    from jaxserve.runtime import Runtime

_PROMPT_TOKENS = 16
# Calls that host times are averages of.
_CALLS = 200


def run(options: argparse.Namespace) -> dict[str, Any]:
    from jaxserve.predictor.probe_training import compare_remaining

    predictor = load_predictor(options)
    settings = of_options(
        ProbeSettings,
        options,
        data=str(options.answers),
        batch_size=ProbeSettings.batch_size,  # the option is of the decode loops
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
    begin_s = time.perf_counter()
    for _ in range(_CALLS):
        refinement.refined(beliefs, passed, logits)
    return (time.perf_counter() - begin_s) / _CALLS


_GIVEN = ProbeSettings
OPTIONS = (
    option("--answers", None, "a file of --record, with tokens of answers", Path, required=True),
    option("--model", "smollm2-135m", "the model that gave them"),
    option("--load", _GIVEN.load, "random for random weights"),
    option("--predictor", None, "folder of a trained predictor, to compare and refine"),
    option("--max-answers", None, "the first of the file; all by default", int),
    option("--held-out", _GIVEN.held_out, "share to calibrate on, and as much to test on"),
    option("--layer", None, "layers before the reading; half of them by default", int),
    option("--interval", _GIVEN.interval, "tokens between readings"),
    option("--hidden-size", _GIVEN.hidden_size, "of the head; 0 for linear"),
    option("--max-length", _GIVEN.max_length, "longest remaining length"),
    option("--buckets", _GIVEN.buckets, "of remaining length: log, equal or quantile"),
    option("--num-buckets", _GIVEN.num_buckets, "how many"),
    option("--epochs", _GIVEN.epochs, "at most; training stops early"),
    option("--learning-rate", _GIVEN.learning_rate, "the highest"),
    option("--seed", _GIVEN.seed, "of split and training"),
    option("--batch-size", 32, "sequences that decode at once, for the cost"),
    option("--tokens", 64, "of each of them"),
    option("--rounds", 5, "runs with and without the probe, in turns"),
    option("--save", None, "save the trained probe in this folder", Path),
)
main = Benchmark(__doc__, run, OPTIONS, "probe")


if __name__ == "__main__":
    sys.exit(main())
