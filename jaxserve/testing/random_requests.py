"""Machines and requests that are drawn at random, for traces."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.core.prediction import LengthPrediction
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.execution.simulated import END_TOKEN
from predictor import LengthBuckets

BUCKETS = LengthBuckets.equal_width(40, 4)


def random_config(rng: random.Random) -> EngineConfig:
    """Return a small machine: 1 to 9 slots, 6 to 60 pages of 1 to 8 tokens."""
    max_slots = rng.randint(1, 9)
    page_size, num_pages = rng.choice([1, 2, 4, 8]), rng.randint(6, 60)
    return EngineConfig(
        page_size=page_size,
        num_pages=num_pages,
        max_slots=max_slots,
        max_context=rng.randint(20, 80),
        max_step_tokens=max_slots + rng.randint(0, 30),
        max_decode_iterations=rng.choice([1, 4, 8]),
        num_host_pages=(0, 3, 200)[num_pages % 3],
        restore=("on_admission", "prefetch")[num_pages % 2],
    )


def random_requests(rng: random.Random, config: EngineConfig) -> list[Request]:
    """Return 1 to 20 requests that fit: greedy or sampled, one or three samples, with priorities.

    Some have no length limit, and predictions of any quality; see `random_prediction`.
    """
    longest = min(config.max_context, (config.num_pages - 1) * config.page_size) - 1
    requests = []
    for i in range(rng.randint(1, 20)):
        temperature = rng.choice([0.0, 1.0])
        params = SamplingParams(
            max_tokens=rng.choice([None, 1, 5, 30]),
            temperature=temperature,
            n=rng.choice([1, 1, 3]) if temperature else 1,
        )
        requests.append(
            Request(
                id=str(i),
                prompt=tuple(rng.randrange(1, 50) for _ in range(rng.randint(1, longest))),
                params=params,
                arrival_s=float(i),
                stop_token_ids=(END_TOKEN,),
                seed=i,
                priority=rng.randrange(3),
            )
        )
    kinds = random.Random(f"predictions {len(requests)}")
    return [replace(request, prediction=random_prediction(kinds)) for request in requests]


def random_prediction(rng: random.Random) -> LengthPrediction | None:
    """Return a prediction that is missing, random, the shortest or longest, or not a number."""
    kind = rng.choice(["none", "random", "shortest", "longest", "nan"])
    weights = {
        "random": [rng.random() for _ in range(BUCKETS.num)],
        "shortest": [1.0, 0.0, 0.0, 0.0],
        "longest": [0.0, 0.0, 0.0, 1.0],
        "nan": [math.nan] * BUCKETS.num,
    }.get(kind)
    if weights is None:
        return None
    return LengthPrediction(BUCKETS, np.asarray(weights) / sum(weights))


def with_shared_prefixes(rng: random.Random, requests: list[Request]) -> list[Request]:
    """Return the requests with prompts of which some begin as others do, or are the same."""
    prefixes = [request.prompt for request in requests[:3]]
    shared = []
    for request in requests:
        prefix = rng.choice(prefixes)[: rng.randint(0, 80)] if rng.random() < 0.6 else ()
        prompt = (*prefix, *request.prompt[len(prefix) :])
        shared.append(replace(request, prompt=prompt))
    return shared


def with_grammars(rng: random.Random, requests: list[Request]) -> list[Request]:
    """Return the requests, of which about half have a grammar, so that they await their tokens."""
    return [
        replace(request, params=replace(request.params, regex="a*"))
        if rng.random() < 0.5
        else request
        for request in requests
    ]
