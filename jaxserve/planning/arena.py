"""The arena: policies on one trace, every run simulated by the real scheduler and kept in a file.

A run has a trace's part, a load, a pool, a seed and a policy. Its step times are those of a
roofline. A seed is a part of its own: seed k has the requests after those of seed k - 1.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import statistics
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
from tqdm import tqdm

from jaxserve import __version__
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.metrics import fairness
from jaxserve.core.prediction import LengthPrediction
from jaxserve.engine.engine import Engine
from jaxserve.planning.schedules import CLUSTERS, MODELS
from jaxserve.planning.simulator import Ended, Pilot, Simulation, simulate
from jaxserve.planning.step_roofline import ModelShape, RooflineCost
from jaxserve.predictor import LengthBuckets
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.presets import PRESETS
from jaxserve.workload import WorkloadItem
from jaxserve.workload.load import TimedAnswer, summarise_answers
from jaxserve.workload.sharegpt import TextEncoder
from jaxserve.workload.traces import Replay, Trace, length_shares, no_tokenizer, read_trace

_PAGE_TOKENS = 32
_VOCAB_SIZE = 1 << 30
# Points of the curve of memory over time that a result has.
_NUM_POINTS = 200
# Presets that others stand for: flover schedules as orca does, a window and instances are only
# for requests that arrive singly, and a plan needs a device.
_LEFT_OUT = ("flover", "triton_window", "concurrent_instances", "exegpt")
# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom; beyond, the normal one.
_STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160),
    *(2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056),
    *(2.052, 2.048, 2.045, 2.042),
)


def default_policies() -> list[Policy]:
    """Return the presets of one device group that predict or reserve honestly, without oracles."""
    return [
        policy
        for name, policy in PRESETS.items()
        if name not in _LEFT_OUT and "oracle" not in name and policy.num_device_groups == 1
    ]


def policies_in(path: Path) -> list[Policy]:
    """Run a Python file and return the policies that it defines.

    Raises:
      InvalidConfigError: the file cannot be run, defines no `Policy`, or one with a preset's name.
    """
    # A name that no import has; dataclasses look their module up by it.
    name = f"jaxserve policy {path.resolve()}"
    spec = importlib.util.spec_from_file_location(name, path)
    try:
        if spec is None or spec.loader is None:
            raise OSError("it is not a Python file")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except Exception as error:
        raise InvalidConfigError(
            f"the policy file {path} cannot be run: {_last_line(error)}; mend it"
        ) from error
    found = {id(each): each for each in vars(module).values() if isinstance(each, Policy)}
    if not found:
        raise InvalidConfigError(
            f"the policy file {path} defines no Policy; add a line such as policy = "
            'Policy("mine", OnDemand(), FCFS(), Unified(), Stateless())'
        )
    for policy in found.values():
        if PRESETS.get(policy.name, policy) is not policy:
            raise InvalidConfigError(
                f"the policy {policy.name!r} of {path} has the name of a preset; pass another name"
            )
    return [each for each in found.values() if each.name not in PRESETS]


def _last_line(error: BaseException) -> str:
    """Return an error with the innermost line of its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


@final
@dataclass(frozen=True, kw_only=True)
class ArenaRun:
    """What determines the result of a run.

    Attributes:
      trace_bytes: size of the trace's file; 0 of a folder.
      arrivals: None as in the trace; else as in `with_arrivals`.
      max_tokens: limit of every answer, which policies know.
      max_context: of a request, prompt and answer; longer ones were left out.
      prediction_error: standard deviation of the logarithm of predicted lengths; None for none.
      kv_memory: bytes of the pool; host memory has as many.
      load: the trace's times are divided by it.
      policy_file: None for a preset.
      digest: of the preset's choices, or of the policy's file.
    """

    version: str
    trace: str
    trace_bytes: int
    start_s: float
    num_requests: int
    arrivals: str | None
    max_tokens: int
    max_context: int
    prediction_error: float | None
    model: str
    device: str
    max_slots: int
    kv_memory: int
    load: float
    seed: int
    policy: str
    policy_file: str | None
    digest: str


def parts_of(
    run: ArenaRun,
    seeds: int,
    tokenizer: Callable[[], TextEncoder] = no_tokenizer,
    *,
    progress: bool = True,
) -> tuple[Trace, list[Trace]]:
    """Return what was read of a run's trace, and the parts of the first seeds.

    A trace that is too short for `num_requests` in each part gives smaller parts.
    """
    trace = read_trace(
        run.trace,
        num=seeds * run.num_requests,
        start_s=run.start_s,
        max_context=run.max_context,
        tokenizer=tokenizer,
        progress=progress,
    )
    num = min(run.num_requests, len(trace.requests) // seeds)
    return trace, [trace.part(seed, num) for seed in range(seeds)]


def digest_of(policy: Policy, path: Path | None) -> str:
    text = repr(policy).encode() if path is None else path.read_bytes()
    return hashlib.sha256(text).hexdigest()[:16]


class ServedRequest(NamedTuple):
    """A request of a run; times are seconds from the run's start, -1 for what did not happen.

    `number` is its place in the part of the trace, and `index` counts the requests before it in the
    order in which the replay handed them out.
    """

    number: int
    index: int
    num_prompt_tokens: int
    num_output_tokens: int
    arrival_s: float
    admitted_s: float
    first_token_s: float
    finished_s: float
    num_preemptions: int
    error: str = ""

    @property
    def latency_s(self) -> float:
        return self.finished_s - self.arrival_s


@final
@dataclass(frozen=True, kw_only=True)
class ArenaResult:
    """What a run gave.

    Attributes:
      memory: (seconds, share of the pool in use) over the run.
      hit_share: share of the queried prompt tokens that the prefix cache had.
      error: what the policy raised; the rest is then empty.
    """

    wall_s: float = 0.0
    requests: tuple[ServedRequest, ...] = ()
    memory: tuple[tuple[float, float], ...] = ()
    num_preemptions: int = 0
    hit_share: float = 0.0
    error: str = ""

    def figures(
        self, tenants: Mapping[int, str], bounds_s: Mapping[str, float] | None
    ) -> dict[str, Any]:
        """Return `summarise_answers` of the requests, and the fairness between tenants.

        It is Jain's index of the seconds a token of each tenant, on average over its requests; a
        request without a tenant is one of its own.
        """
        answers = [
            TimedAnswer(
                times_s=[each.first_token_s - each.arrival_s, each.latency_s][
                    : min(2, each.num_output_tokens)
                ],
                num_tokens=each.num_output_tokens,
                end_s=each.latency_s,
                num_prompt_tokens=each.num_prompt_tokens,
                error=each.error,
            )
            for each in self.requests
        ]
        of_tenant: dict[str, list[float]] = {}
        for each in self.requests:
            if not each.error:
                tenant = tenants.get(each.number) or f"request {each.number}"
                seconds = each.latency_s / each.num_output_tokens
                of_tenant.setdefault(tenant, []).append(seconds)
        return {
            **summarise_answers(answers, self.wall_s, bounds_s=bounds_s),
            "fairness": fairness([statistics.fmean(each) for each in of_tenant.values()]),
            "num_preemptions": self.num_preemptions,
            "hit_share": self.hit_share,
        }


def interval(values: Seq[float]) -> tuple[float, float | None]:
    """Return the mean, and half the width of its 95 % confidence interval; None of one value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, None
    freedom = len(values) - 1
    quantile = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.96
    return mean, quantile * statistics.stdev(values) / math.sqrt(len(values))


def cost_of(model: str, device: str) -> RooflineCost:
    """Return the step times of a model on a device by their names.

    Raises:
      InvalidConfigError: a name is unknown, or the weights do not fit.
    """
    decoders = [name for name, shape in MODELS.items() if shape.is_decoder_only]
    if model not in decoders:
        raise InvalidConfigError(f"model {model!r} is unknown; pass one of {', '.join(decoders)}")
    if device not in CLUSTERS:
        raise InvalidConfigError(f"device {device!r} is unknown; pass one of {', '.join(CLUSTERS)}")
    cluster = CLUSTERS[device]
    cost = RooflineCost(
        model=ModelShape.of(MODELS[model]),
        roofs=cluster.roofs,
        page_tokens=_PAGE_TOKENS,
        efficiency=cluster.compute_efficiency,
    )
    if free_memory(cost, device) < cost.page_bytes:
        raise InvalidConfigError(
            f"the weights of {model} take {cost.model.weights_bytes / 1e9:.0f} GB, and a {device} "
            "has less; pass a smaller model, or another device"
        )
    return cost


def free_memory(cost: RooflineCost, device: str) -> int:
    """Return the bytes of a device that the weights leave."""
    return int(CLUSTERS[device].memory_bytes - cost.model.weights_bytes)


@final
class NoisyPredictor:
    """Predictions that are calibrated: from the logarithm of each length with noise.

    Args:
      shares: P(length) of answers of 1, 2, ... tokens.
      error: standard deviation of the noise; infinite for the distribution of all lengths.
    """

    def __init__(self, shares: np.ndarray, error: float, seed: int):
        self._shares, self._error = shares, error
        self._rng = np.random.default_rng(seed)
        self._lengths = np.arange(1, len(shares) + 1)
        self._buckets = LengthBuckets.equal_width(len(shares))
        self._places = np.asarray(self._buckets.bucket_of(self._lengths))

    def __call__(self, item: WorkloadItem) -> LengthPrediction:
        weights, error = self._shares, self._error
        if math.isfinite(error):
            seen = np.log(item.num_output_tokens) + error * self._rng.standard_normal()
            weights = weights * np.exp(-(((np.log(self._lengths) - seen) / error) ** 2) / 2)
        row = np.bincount(self._places, weights=weights, minlength=self._buckets.num)
        return LengthPrediction(self._buckets, row / row.sum())


@final
@dataclass(frozen=True)
class Pilots:
    """A pilot of what else happens between two steps: other pilots, and a count of the ended."""

    on_ended: Callable[[int], object]
    others: Seq[Pilot] = ()

    def after_step(self, engine: Engine, ended: Seq[Ended], now_s: float) -> None:
        if ended:
            self.on_ended(len(ended))
        for other in self.others:
            other.after_step(engine, ended, now_s)


def play(
    run: ArenaRun,
    part: Trace,
    policy: Policy,
    *,
    pilot: Pilot | None = None,
    on_ended: Callable[[int], object] = lambda _: None,
) -> ArenaResult:
    """Simulate a run.

    Args:
      part: the requests of the run's seed, at the trace's own load and arrivals.
      on_ended: called with the number of requests that a step has ended.

    Returns:
      The result; an exception of the policy is its `error`.
    """
    cost = cost_of(run.model, run.device)
    if run.arrivals is not None:
        part = part.with_arrivals(run.arrivals, run.seed)
    replay = Replay(part.at_load(run.load), max_tokens=run.max_tokens, vocab_size=_VOCAB_SIZE)
    predict: Callable[[WorkloadItem], LengthPrediction | None] = lambda _: None  # noqa: E731
    if run.prediction_error is not None:
        predict = NoisyPredictor(length_shares(part), run.prediction_error, run.seed)
    num_pages = run.kv_memory // cost.page_bytes
    try:
        done = simulate(
            replay.items,
            policy,
            cost.config(
                num_pages=num_pages,
                num_host_pages=num_pages,
                max_slots=run.max_slots,
                max_context=run.max_context,
            ),
            cost,
            predictions=[predict(item) for item in replay.items],
            follow_up=replay.follow_up,
            predict=predict,
            pilot=Pilots(on_ended, () if pilot is None else (pilot,)),
            swap_costs=cost.swap_costs(),
            chunk_cost=cost.chunk_cost(run.max_context),
            progress=False,
        )
    except Exception as error:
        return ArenaResult(error=_last_line(error))
    return _result(done, replay, int(num_pages))


def _result(done: Simulation, replay: Replay, num_pages: int) -> ArenaResult:
    def seconds(time_s: float | None) -> float:
        return -1.0 if time_s is None else round(time_s, 6)

    served = []
    handed_out = zip(replay.numbers, done.completions, strict=True)
    for index, (number, completion) in enumerate(handed_out):
        timing = completion.timing
        served.append(
            ServedRequest(
                number,
                index,
                len(completion.prompt_token_ids),
                len(completion.token_ids),
                seconds(timing.arrival_s),
                seconds(timing.admitted_s),
                seconds(timing.first_token_s),
                seconds(timing.finished_s),
                timing.num_preemptions,
                "" if completion.error is None else str(completion.error),
            )
        )
    every = max(1, len(done.steps) // _NUM_POINTS)
    queried = done.stats.num_prefix_queried
    return ArenaResult(
        wall_s=done.wall_s,
        requests=tuple(sorted(served)),
        memory=tuple(
            (seconds(step.submitted_s), round(step.pages_owned / num_pages, 4))
            for step in done.steps[::every]
        ),
        num_preemptions=done.stats.num_preemptions,
        hit_share=done.stats.num_prefix_hit / queried if queried else 0.0,
    )


@final
@dataclass
class ArenaResults:
    """The results of runs, by what determines them; with a file, one line of JSON each.

    A line that was cut off is removed. A run of the same settings, policy and version is not
    simulated again.

    Raises:
      InvalidConfigError: the file cannot be read or written, or holds something else.
    """

    path: Path | None = None
    _found: dict[str, ArenaResult] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is None:
            return
        try:
            text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
            whole, _, rest = text.rpartition("\n")
            for number, line in enumerate(whole.split("\n") if whole else [], start=1):
                self._take(line, number)
            if rest.startswith('{"run":'):
                os.truncate(self.path, len(text.encode()) - len(rest.encode()))
            elif rest:
                self._take(rest, 1 + whole.count("\n"))
            with self.path.open("a", encoding="utf-8"):
                pass
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidConfigError(
                f"the results {self.path} cannot be read and written: {error}; pass another file"
            ) from error

    def _take(self, line: str, number: int) -> None:
        try:
            read = json.loads(line)
            run, result = ArenaRun(**read["run"]), read["result"]
            requests = tuple(ServedRequest(*row) for row in result["requests"])
            memory = tuple(map(tuple, result["memory"]))
            self._found[_key(run)] = ArenaResult(
                **result | {"requests": requests, "memory": memory}
            )
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidConfigError(
                f"{self.path}:{number} is not a result of the arena ({type(error).__name__}: "
                f"{error}); pass another file"
            ) from error

    def get(self, run: ArenaRun) -> ArenaResult | None:
        return self._found.get(_key(run))

    def add(self, run: ArenaRun, result: ArenaResult) -> None:
        self._found[_key(run)] = result
        if self.path is not None:
            line = json.dumps({"run": asdict(run), "result": asdict(result)}) + "\n"
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)

    def runs(self) -> list[ArenaRun]:
        """Return the runs in the order in which they were added."""
        return [ArenaRun(**json.loads(key)) for key in self._found]


def _key(run: ArenaRun) -> str:
    return json.dumps(asdict(run), sort_keys=True)


def figures_over(
    results: Iterable[dict[str, Any]], *keys: str
) -> tuple[float, float | None] | None:
    """Return the `interval` of a figure, by its keys, over the results that have it, if any do."""
    values = []
    for figures in results:
        value: Any = figures
        for key in keys:
            value = None if value is None else value[key]
        if value is not None:
            values.append(value)
    return interval(values) if values else None


# The runs of one policy, load and pool, in the order of their seeds.
Cells: TypeAlias = dict[tuple[str, float, int], list[tuple[ArenaRun, Policy]]]


@final
@dataclass(frozen=True, kw_only=True)
class Contest:
    """Policies on the parts of a trace: `base` with every load, pool, seed and policy."""

    base: ArenaRun
    trace: Trace
    parts: Seq[Trace]
    loads: Seq[float]
    pools: Seq[int]

    @classmethod
    def of(
        cls,
        path: Path,
        seeds: int,
        *,
        tokenizer: Callable[[], TextEncoder] = no_tokenizer,
        loads: Seq[float],
        pools: Seq[int] | None,
        progress: bool,
        arrivals: str | None,
        max_tokens: int | None,
        model: str,
        device: str,
        **settings: Any,
    ) -> Contest:
        """Read a trace, and return the contest of no policies yet.

        Args:
          seeds: number of parts.
          pools: bytes of each KV pool; None for all memory that the weights leave.
          max_tokens: None for the longest answer of the parts.
          settings: further fields of `ArenaRun`.

        Raises:
          InvalidConfigError: the trace cannot be read or is too short, or the model or the device
            is unknown.
        """
        cost = cost_of(model, device)
        sizes = [free_memory(cost, device)] if pools is None else [*pools]
        base = ArenaRun(
            version=__version__,
            trace=str(path),
            trace_bytes=path.stat().st_size if path.is_file() else 0,
            max_tokens=0,
            max_context=int(min(sizes) // cost.page_bytes) * cost.page_tokens,
            arrivals=arrivals,
            model=model,
            device=device,
            kv_memory=0,
            load=0.0,
            seed=0,
            policy="",
            policy_file=None,
            digest="",
            **settings,
        )
        trace, parts = parts_of(base, seeds, tokenizer, progress=progress)
        if arrivals is None and not trace.has_times:
            arrivals = "all"
        longest = max(each.num_output_tokens for part in parts for each in part.requests)
        base = replace(
            base,
            num_requests=len(parts[0].requests),
            arrivals=arrivals,
            max_tokens=max(1, longest if max_tokens is None else max_tokens),
        )
        return cls(base=base, trace=trace, parts=parts, loads=loads, pools=sizes)

    def cells(self, contenders: Iterable[tuple[Policy, Path | None]]) -> Cells:
        """Return the runs of policies, each with its file if it is no preset."""
        policies = [(policy, file, digest_of(policy, file)) for policy, file in contenders]
        return {
            (policy.name, load, pool): [
                (
                    replace(
                        self.base,
                        load=load,
                        kv_memory=pool,
                        seed=seed,
                        policy=policy.name,
                        policy_file=None if file is None else str(file),
                        digest=digest,
                    ),
                    policy,
                )
                for seed in range(len(self.parts))
            ]
            for load in self.loads
            for pool in self.pools
            for policy, file, digest in policies
        }

    def simulate(self, cells: Cells, kept: ArenaResults, *, progress: bool) -> None:
        """Simulate the runs that the results do not have, and add each as it ends."""
        missing = [each for runs in cells.values() for each in runs if kept.get(each[0]) is None]
        total = len(missing) * self.base.num_requests
        with tqdm(total=total, unit="req", delay=2, leave=False, disable=not progress) as bar:
            for done, (each, policy) in enumerate(missing):
                bar.set_description(policy.name)
                kept.add(each, play(each, self.parts[each.seed], policy, on_ended=bar.update))
                bar.update((done + 1) * self.base.num_requests - bar.n)

    def figures(
        self, result: ArenaResult, seed: int, bounds_s: Mapping[str, float]
    ) -> dict[str, Any]:
        """Return the `ArenaResult.figures` of a seed's run, between the tenants of its part."""
        tenants = {i: each.tenant for i, each in enumerate(self.parts[seed].requests)}
        return result.figures(tenants, bounds_s)
