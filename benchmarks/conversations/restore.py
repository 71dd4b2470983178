"""Pages that come back from the host: `python -m benchmarks.conversations.restore --help`.

Every way of restoring them, by the number of tokens: the time to the first token of a turn, and the
time that sequences lose which decode meanwhile.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from statistics import median
from typing import Any, final

import numpy as np
from tqdm import tqdm

from benchmarks.common.harness import Benchmark, Record, option, whole_numbers
from benchmarks.common.repeats import Figures, in_turns, repeats, summary
from benchmarks.common.shapes import SHAPES, hf_config
from jaxserve.core.clock import WallClock
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.options import RESTORES, RuntimeOptions
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.execution.build import ExecutorSpec, build_executor
from jaxserve.execution.compilation import start_jax
from jaxserve.execution.device import DeviceExecutor
from jaxserve.execution.sizes import platform_defaults
from jaxserve.models.families.llama import LlamaConfig
from jaxserve.models.store import LoadedModel, load_model
from jaxserve.scheduling.kv.transfer import KVPages
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.sequence import Phase, Sequence

# The ways that differ when a slot is free, and when the turn waits for one. "on_device" is the
# bound: the pages are on the device already.
SITUATIONS = {"at_once": ("on_device", "on_admission", "per_layer"), "waits": RESTORES}
# Tokens of the other sequences before the measurement, and to time a token undisturbed.
_BEFORE, _UNDISTURBED = 4, 48
# Tokens of the turn itself.
NEW_TOKENS = 32
_POINT = ("situation", "length", "way")


def run(options: argparse.Namespace) -> dict[str, Any]:
    lengths = whole_numbers(options.lengths, "--lengths")
    record = Record.of("restore", options, points=[])
    server = _Server(options, max(lengths))
    record.result |= {"page_bytes": server.page_bytes, "page_size": server.page_size}
    points = {
        f"{situation}, {length} tokens, {way}": (situation, length, way)
        for situation, ways in SITUATIONS.items()
        for length in lengths
        for way in ways
    }
    runs: dict[str, list[Figures]] = {}
    turns = list(in_turns(list(points), options.repeats))
    for number, name in tqdm(turns, desc="restoring pages", delay=2, leave=False):
        if not record.allows(f"{name}, run {number + 1}"):
            continue
        runs.setdefault(name, []).append(server.measure(*points[name]))
        record.result |= {
            "token_s": server.token_s,
            "points": [
                {**dict(zip(_POINT, points[name], strict=True)), **summary(own)}
                for name, own in runs.items()
            ],
        }
        record.save()
    return record.result


@final
class _Server:
    def __init__(self, options: argparse.Namespace, longest: int):
        start_jax()
        model = _model(options, platform_defaults().dtype)
        num_tokens = options.wait_tokens + longest + NEW_TOKENS
        built, size = build_executor(
            ExecutorSpec(
                graphdef=model.graphdef,
                model_config=model.config,
                layer_layout="unrolled",
                options=RuntimeOptions(
                    max_slots=options.others + 1,
                    max_context=num_tokens + 1024,
                    kv_memory=options.kv_memory,
                    restore="both",
                ),
            ),
            model.params,
        )
        assert isinstance(built, DeviceExecutor)
        if built.config.max_context < num_tokens:
            raise InvalidConfigError(
                f"--lengths up to {longest} are more than the {built.config.max_context} tokens of "
                "the model's context; give less"
            )
        self.page_bytes, self.page_size = size.page_bytes, built.config.page_size
        self._options = options
        self._vocab_size = model.config.vocab_size
        self._executor = built
        self._clock = WallClock()
        self._engine = Engine(built, PRESETS["pensieve"], self._clock)
        # Zeros: their values change no time, but uninitialised memory may hold NaN.
        assert built.host_memory is not None
        self._contents = bytes(built.host_memory.entry_bytes)
        self._num_runs = 0
        self._undisturbed_s: list[float] = []

    @property
    def token_s(self) -> float:
        """Median seconds of one iteration of the other sequences while no page is restored."""
        return median(self._undisturbed_s)

    def measure(self, situation: str, length: int, way: str) -> dict[str, float]:
        """Measure one turn of a conversation while other sequences decode."""
        self._begin(way)
        prompt = self._tokens(length + NEW_TOKENS)
        self._put_on_host(prompt[:length])
        others = [self._add(16, 2**20) for _ in range(self._options.others)]
        blocker = self._add(16, self._options.wait_tokens) if situation == "waits" else None
        self._step_until(lambda: all(len(s.output) >= _BEFORE for s in others))
        token_s = self._undisturbed(others[0])
        if way == "on_device":
            first = self._add_prompt(prompt, 1)
            self._step_until(lambda: first.phase is Phase.FINISHED)
        num_in = self._engine.stats.num_pages_in
        figures = self._turn(prompt, others, blocker, token_s)
        expected = 0 if way == "on_device" else length // self.page_size
        came = self._engine.stats.num_pages_in - num_in
        if came != expected:
            raise AssertionError(f"{came} pages came back, not {expected}")
        for sequence in others:
            self._engine.scheduler.end(sequence, "cancelled")
        self._step_until(lambda: not self._engine.has_work)
        return figures

    def _turn(
        self,
        prompt: tuple[int, ...],
        others: list[Sequence],
        blocker: Sequence | None,
        token_s: float,
    ) -> dict[str, float]:
        before = len(others[0].output)
        begin_s = latest_s = self._clock.now()
        turn, longest_s = self._add_prompt(prompt, 4), 0.0
        while turn.times.first_token_s is None:
            if turn.phase is Phase.FINISHED:
                raise AssertionError(f"the turn ended without a token: {turn.finish_reason}")
            num_tokens = len(others[0].output)
            self._engine.step()
            if len(others[0].output) > num_tokens:
                now_s = self._clock.now()
                longest_s, latest_s = max(longest_s, now_s - latest_s), now_s
        spent_s, num_tokens = turn.times.first_token_s - begin_s, len(others[0].output) - before
        own_s = begin_s if blocker is None else blocker.times.finished_s
        assert own_s is not None, "the turn did not wait"
        self._step_until(lambda: turn.phase is Phase.FINISHED)
        return {
            "first_token_s": turn.times.first_token_s - own_s,
            "others_lost_s": spent_s - token_s * num_tokens,
            "others_longest_gap_s": longest_s,
        }

    def _begin(self, way: str) -> None:
        self._engine.drain()
        self._num_runs += 1
        restore = "on_admission" if way == "on_device" else way
        self._executor.config = replace(self._executor.config, restore=restore)
        self._engine = Engine(self._executor, PRESETS["pensieve"], self._clock)

    def _put_on_host(self, tokens: tuple[int, ...]) -> None:
        pages = [self._contents] * (len(tokens) // self.page_size)
        identity = self._engine.export_kv(()).identity
        if self._engine.import_kv(tokens, KVPages(identity, pages)) < len(pages):
            raise InvalidConfigError(
                f"the host has no room for {len(tokens)} tokens; give a larger --kv-memory, after "
                "which the host's goes, or shorter --lengths"
            )

    def _undisturbed(self, other: Sequence) -> float:
        begin_s, before = self._clock.now(), len(other.output)
        self._step_until(lambda: len(other.output) >= before + _UNDISTURBED)
        token_s = (self._clock.now() - begin_s) / (len(other.output) - before)
        self._undisturbed_s.append(token_s)
        return token_s

    def _step_until(self, is_done: Any) -> None:
        while not is_done():
            self._engine.step()

    def _add(self, num_tokens: int, max_tokens: int) -> Sequence:
        return self._add_prompt(self._tokens(num_tokens), max_tokens)

    def _add_prompt(self, prompt: tuple[int, ...], max_tokens: int) -> Sequence:
        params = SamplingParams(max_tokens=max_tokens)
        name = f"{self._num_runs} {self._clock.now()}"
        request = Request(id=name, prompt=prompt, params=params, arrival_s=self._clock.now())
        (sequence,) = self._engine.add(request)
        return sequence

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(np.random.default_rng().integers(0, self._vocab_size, count).tolist())


def _model(options: argparse.Namespace, dtype: str) -> LoadedModel:
    if options.model in SHAPES:
        config = LlamaConfig.from_hf(hf_config(options.model))
        return load_model(config, dtype=dtype, load="random")
    load = "random" if options.random_weights else "auto"
    return load_model(options.model, dtype=dtype, load=load)


OPTIONS = (
    option(
        "--model",
        "smollm2-135m",
        f"a name, folder or GGUF file, or {', '.join(SHAPES)} with random weights",
    ),
    option("--random-weights", False, "for a folder that has only a config.json"),
    option("--lengths", "256,512,1024,2048,4096", "tokens whose pages come back"),
    option("--others", 3, "sequences that decode meanwhile"),
    option("--wait-tokens", 192, "of the answer that a turn waits for"),
    repeats("way", 5),
    option("--kv-memory", None, 'size of the page pool, e.g. "1GiB"'),
)
main = Benchmark(__doc__, run, OPTIONS, "restore", has_budget=True)


if __name__ == "__main__":
    sys.exit(main())
