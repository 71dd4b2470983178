"""A soak of weight updates: new weights arrive while requests run, and nothing may grow or mix.

`python -m scripts.soak_updates --help`. A tiny model answers prompts that share their first pages.
Its weights change repeatedly among a few sets: requests continue or restart, in a pause or not,
whole or in parts, prepared before or not, and some updates are refused because they have NaN. Every
token must be the greedy one of the weights of its version, no page of former weights may be hit,
nothing may be compiled, arrays may not grow after the first tenth of the run, nor the resident
memory after its middle. One JSON object on stdout; exit code 1 with what is wrong.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve import Completion, Runtime, SamplingParams
from jaxserve.core.errors import InvalidParamsError, StaleWeightsError
from jaxserve.engine.answers import Piece
from jaxserve.engine.pending import Pending
from jaxserve.testing.tiny import MAX_CONTEXT, OPTIONS, VOCAB_SIZE, tiny_llama
from scripts.soak import resident_bytes

# Sets of weights; version v is the set with index v modulo this number.
NUM_SETS = 4
# Requests that run, at least, when an update comes.
NUM_RUNNING = 6
# Rows of one check of tokens.
_ROWS = 32
# The resident size may grow by this share from the middle of the run to its end.
_MAX_GROWTH = 0.02
# A token counts as greedy if its logit is at most this far below the largest one.
_ROUNDING = 1e-3
_PATIENCE_S = 60.0
_COMPILED = "/jax/core/compile/backend_compile_duration"


@final
class Compilations:
    """Counts what JAX compiles within the block, on all threads."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Self:
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.count += event == _COMPILED


@final
@dataclass
class _Asked:
    """A request, with the version of the weights at its submission and the pieces of its stream."""

    pending: Pending[Completion]
    version: int
    pieces: list[Piece] = field(default_factory=list)


@final
class _Load:
    """Requests that run while weights change, and the check of those that have ended."""

    def __init__(self, rt: Runtime, sets: Sequence[nnx.State], rng: random.Random):
        self.problems: list[str] = []
        self.num_requests = 0
        self.num_changed = 0
        self.num_stale = 0
        self.num_tokens = 0
        self.num_wrong = 0
        self._rt = rt
        self._sets = sets
        self._rng = rng
        self._common = self._tokens(2 * OPTIONS["page_size"])
        self._open: list[_Asked] = []

    def fill(self) -> None:
        """Submit requests until enough run; every second one has a stream."""
        while sum(not each.pending.future.done() for each in self._open) < NUM_RUNNING:
            prompt = [*self._common, *self._tokens(self._rng.randint(1, 8))]
            pieces: list[Piece] = []
            pending = self._rt.submit(
                prompt,
                SamplingParams(max_tokens=12),
                on_piece=pieces.append if self.num_requests % 2 else None,
            )
            self._open.append(_Asked(pending, self._rt.weights_version, pieces))
            self.num_requests += 1

    def check_pages(self) -> None:
        """Check that no page of the common prefix is hit. Call it after an update, in a pause."""
        found = set(self._rt.residency(self._common)) - {"nowhere"}
        if found:
            self.problems.append(f"version {self._rt.weights_version}: old pages on the {found}")

    def check_ended(self) -> None:
        """Wait for all requests, check their versions and tokens, and drop them."""
        done = [(each, each.pending.result(_PATIENCE_S)) for each in self._open]
        self._open = []
        for each, completion in done:
            versions = list(completion.weights_versions)
            shown = [piece.weights_version for piece in each.pieces for _ in piece.token_ids]
            is_stale = isinstance(completion.error, StaleWeightsError)
            self.num_stale += is_stale
            self.num_changed += len(set(versions)) > 1
            if completion.error is not None and not is_stale:
                self.problems.append(f"{completion.request_id} failed: {completion.error}")
            if versions != sorted(versions) or any(v < each.version for v in versions):
                self.problems.append(f"{completion.request_id} has versions {versions}")
            if each.pieces and shown != versions:
                self.problems.append(f"{completion.request_id} streamed versions {shown}")
        for start in range(0, len(done), _ROWS):
            self._check_tokens([completion for _, completion in done[start : start + _ROWS]])

    def _check_tokens(self, done: Sequence[Completion]) -> None:
        contexts = np.zeros((_ROWS, MAX_CONTEXT), np.int32)
        for row, completion in enumerate(done):
            tokens = [*completion.prompt_token_ids, *completion.token_ids]
            contexts[row, : len(tokens)] = tokens
        gaps = [np.asarray(_gaps(params, contexts)) for params in self._sets]
        for row, completion in enumerate(done):
            start = len(completion.prompt_token_ids) - 1
            for place, version in enumerate(completion.weights_versions, start):
                self.num_tokens += 1
                self.num_wrong += gaps[version % NUM_SETS][row, place] > _ROUNDING

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(VOCAB_SIZE) for _ in range(count)]


@jax.jit
def _gaps(params: nnx.State, tokens: jax.Array) -> jax.Array:
    """Return the difference between the greedy logit and each token's, [rows, tokens - 1]."""
    logits = nnx.merge(nnx.graphdef(tiny_llama()), params).whole_logits(tokens)[:, :-1]
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], 2)[..., 0]
    return logits.max(-1) - chosen


@final
class _Trainer:
    """Updates the weights of a runtime, in varying ways; `ways` counts the updates of each way."""

    def __init__(self, rt: Runtime, sets: Sequence[nnx.State], rng: random.Random, load: _Load):
        self.ways: Counter[str] = Counter()
        self._rt = rt
        self._sets = sets
        self._rng = rng
        self._load = load
        self._all = (
            self.keep,
            self.restart,
            self.prepare,
            self.in_parts,
            self.in_a_pause,
            self.stale,
            self.refused,
        )

    def update(self) -> None:
        """Update the weights in one way: in each once, then mostly with `keep`."""
        number = self.ways.total()
        is_new = number < len(self._all)
        way = self._all[number] if is_new else self._rng.choice((*self._all, *[self.keep] * 6))
        self.ways[way.__name__] += 1
        way()

    def keep(self) -> None:
        self._take(self._set(1))

    def restart(self) -> None:
        self._take(self._set(1), running="restart")

    def prepare(self) -> None:
        self._take(self._rt.prepare_params(self._set(1)))

    def in_parts(self) -> None:
        """Update two parts of one set, in a pause: the version in between computes nothing."""
        flat = nnx.to_flat_state(self._set(2))
        self._rt.pause()
        for is_first in (True, False):
            part = [(path, v) for path, v in flat if (path[:2] == ("blocks", 0)) is is_first]
            self._take(nnx.from_flat_state(part), partial=True)
        self._rt.resume()

    def in_a_pause(self) -> None:
        self._rt.pause()
        self._take(self._set(1))
        self._load.check_pages()
        self._rt.resume()

    def stale(self) -> None:
        self._take(self._set(1), max_staleness=5)

    def refused(self) -> None:
        leaves, structure = jax.tree.flatten(self._set(1))
        leaves[3] = np.full(leaves[3].shape, np.nan, leaves[3].dtype)
        try:
            self._rt.update_params(jax.tree.unflatten(structure, leaves), running="restart")
        except InvalidParamsError:
            return
        self._load.problems.append("weights with NaN were accepted")

    def _set(self, ahead: int) -> nnx.State:
        return self._sets[(self._rt.weights_version + ahead) % NUM_SETS]

    def _take(self, params: Any, **settings: Any) -> None:
        wanted = self._rt.weights_version + 1
        settings.setdefault("running", "keep")
        found = self._rt.update_params(params, **settings)
        if not found == wanted == self._rt.weights_version:
            self._load.problems.append(f"the update to version {wanted} returned {found}")


def soak_updates(num_updates: int, seed: int) -> dict[str, Any]:
    sets = [nnx.state(tiny_llama(each), nnx.Param) for each in range(NUM_SETS)]
    rng = random.Random(seed)
    seconds: list[float] = []
    resident: list[int] = []
    live: list[int] = []
    with Runtime(
        tiny_llama(0), **OPTIONS | {"policy": "auto", "strict": True, "warmup": True}
    ) as rt:
        load = _Load(rt, sets, rng)
        trainer = _Trainer(rt, sets, rng, load)
        while len(trainer.ways) < 7:  # compiles the checks of weights and of tokens
            load.fill()
            trainer.update()
        load.check_ended()
        first, before, begin_s = rt.weights_version, rt.stats(), time.perf_counter()
        with Compilations() as compilations:
            for tenth in range(1, 11):
                while rt.weights_version < first + num_updates * tenth // 10:
                    load.fill()
                    begin_update_s = time.perf_counter()
                    trainer.update()
                    seconds.append(time.perf_counter() - begin_update_s)
                load.check_ended()
                rt.check_integrity()
                gc.collect()
                resident.append(resident_bytes())
                live.append(sum(array.nbytes for array in jax.live_arrays()))
        total_s, stats = time.perf_counter() - begin_s, rt.stats()
        num_updated = rt.weights_version - first
    problems = load.problems
    if load.num_wrong:
        problems.append(f"{load.num_wrong} tokens are not those of their weights")
    if compilations.count or stats.num_compilations > before.num_compilations:
        problems.append(f"{compilations.count} executables were compiled")
    if stats.num_pages_owned:
        problems.append(f"{stats.num_pages_owned} pages are owned by no request")
    set_bytes = sum(array.nbytes for array in jax.tree.leaves(sets[0]))
    if live[-1] - live[0] >= set_bytes:
        problems.append(f"arrays on the device grew by {live[-1] - live[0]} bytes")
    return {
        "num_updates": num_updated,
        "ways": dict(trainer.ways),
        "seconds": total_s,
        "update_s": {
            name: float(np.percentile(seconds, share)) for name, share in (("p50", 50), ("p99", 99))
        },
        "num_requests": load.num_requests,
        "num_requests_of_several_versions": load.num_changed,
        "num_stale": load.num_stale,
        "num_tokens": load.num_tokens,
        "num_wrong_tokens": int(load.num_wrong),
        "num_prefix_hit": stats.num_prefix_hit - before.num_prefix_hit,
        "num_compilations": compilations.count,
        "weights_bytes": set_bytes,
        "live_array_bytes": live,
        "resident_bytes": resident,
        "growth": resident[-1] / resident[len(resident) // 2] - 1,
        "problems": problems,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.soak_updates", description=__doc__)
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    figures = soak_updates(options.updates, options.seed)
    if figures["growth"] > _MAX_GROWTH:
        figures["problems"].append(f"the resident size grew by {figures['growth']:.1%}")
    print(json.dumps(figures))
    return 1 if figures["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
