"""Schedules on devices and their simulation: `python -m benchmarks.exegpt.measured --help`.

RRA on one group of devices and WAA on two serve the same requests, all waiting from the start. Each
schedule runs on the devices and then on the simulated executor with step times of those devices.
These are measured just before the run, since the speed of a machine may drift, and not fitted to
it. Other policies also answer the requests, to compare tokens. Progress and a table on stderr, one
JSON object on stdout; docs/benchmarks/papers.md says what each figure means.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, final

import numpy as np
from tqdm import tqdm

from benchmarks.common.counters import spent_s
from benchmarks.common.harness import Benchmark, Record, option, whole_numbers
from benchmarks.common.repeats import Figures, repeats, summary
from benchmarks.common.serving import raise_error
from jaxserve.cli.opening import device_groups
from jaxserve.core.metrics import spread
from jaxserve.core.request import Completion
from jaxserve.scheduling.iteration.rra import RRA
from jaxserve.scheduling.iteration.waa import WAA
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.presets import PRESETS, get_policy
from jaxserve.workload import WorkloadItem
from jaxserve.workload.load import replay

if TYPE_CHECKING:
    from jaxserve.runtime import Runtime

_DEVICES = "--xla_force_host_platform_device_count"
# Devices on one host share its cores; one thread each keeps the sharing low.
_FLAGS = f"{_DEVICES}=8 --xla_cpu_multi_thread_eigen=false"
# The devices of a model, whose attention heads and groups of them they divide.
GROUPS = {"smollm2": "1 1/1 3/3", "t5_small": "1 1/1 4/4", "tiny": "1 1/1", "tiny_t5": "1 1/1"}
FIGURES = ("output_tokens_per_s", "p50_s", "p99_s", "first_token_p50_s")
# Figures whose errors count.
JUDGED = ("output_tokens_per_s", "p99_s")


@final
@dataclass(frozen=True)
class Case:
    """A schedule, and the devices of its group, or of both groups as in "1/2"."""

    policy: Policy
    groups: str


def run(options: argparse.Namespace) -> dict[str, Any]:
    # Read when JAX starts its devices.
    if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}"
    options.encode_batches = whole_numbers(options.encode_batches, "--encode-batches")
    options.decode_iterations = whole_numbers(options.decode_iterations, "--decode-iterations")
    policies = [get_policy(name) for name in options.policies.split(",")]
    cases = list(_cases(options))
    record = Record.of("exegpt_measured", options, policies=[], schedules=[])
    session = _Session(options)
    with tqdm(total=len(policies) + len(cases), desc="exegpt on devices") as bar:
        for policy in policies:
            record.add("policies", policy.name, partial(session.answered, policy))
            bar.update()
        for case in cases:
            name = f"{case.policy.name} on {case.groups}"
            bar.set_postfix_str(name)
            record.add("schedules", name, partial(session.measured, case))
            bar.update()
    record.result |= _judged(record.result)
    record.save()
    return record.result


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    rra, waa = PRESETS["exegpt_rra"], PRESETS["exegpt_waa_c"]
    for groups in (options.groups or GROUPS[options.model]).split():
        for batch in options.encode_batches:
            for num in options.decode_iterations:
                sizes = dict(encode_batch=batch, decode_iterations=num)
                own = (waa, "waa", WAA(**sizes)) if "/" in groups else (rra, "rra", RRA(**sizes))
                policy, name, shape = own
                yield Case(replace(policy, name=f"{name} {batch} {num}", iteration=shape), groups)


def _judged(result: dict[str, Any]) -> dict[str, Any]:
    schedules = result["schedules"]
    agree = [each["tokens_agree"] for each in (*schedules, *result["policies"])]
    found: dict[str, Any] = {
        # All policies must have the first one's tokens.
        "all_tokens_agree": all(agree) if len(agree) > 1 else None,
        "errors": {},
    }
    for name in FIGURES if schedules else ():
        errors = [abs(each["error"][name]) for each in schedules]
        found["errors"][name] = {"median": statistics.median(errors), "most": max(errors)}
    for share in (0.05, 0.1):
        found[f"num_within_{share:.0%}"] = sum(
            all(abs(each["error"][name]) <= share for name in JUDGED) for each in schedules
        )
    return found


@final
class _Session:
    """One model and its requests, for every policy and schedule."""

    def __init__(self, options: argparse.Namespace):
        self._options = options
        self._model = _model(options.model)
        self._items = _items(options, self._model.config.vocab_size)
        # Tokens of the first policy.
        self._tokens: list[tuple[int, ...]] = []

    def answered(self, policy: Policy) -> Figures:
        """Return whether a policy on one device has the tokens of the first policy."""
        with closing(self._runtime(policy, "1", warmup=False)) as rt:
            done, _ = replay(rt, self._items, label=policy.name)
        return {"policy": policy.name, "tokens_agree": self._agrees(done)}

    def measured(self, case: Case) -> Figures:
        from jaxserve.planning import simulate

        runs, agree = [], True
        with closing(self._runtime(case.policy, case.groups, warmup="full")) as rt:
            cost = (
                rt.measure_group_times(rounds=1).costs()
                if "/" in case.groups
                else rt.measure_step_times(rounds=1)
            )
            for number in range(self._options.repeats + 1):
                # The first run warms up, with the number of requests that run at once.
                asked = self._items if number else self._items[: rt.config.max_slots]
                done, wall_s = replay(rt, asked, label=f"{case.policy.name}, run {number}")
                if number:
                    runs.append(_figures(done, wall_s))
                    agree = agree and self._agrees(done)
            played = simulate(self._items, case.policy, rt.config, cost, progress=False)
        measured, simulated = summary(runs), _figures(played.completions, played.wall_s)
        return {
            "schedule": case.policy.name,
            "groups": case.groups,
            "measured": measured,
            "simulated": simulated,
            "error": {name: simulated[name] / measured[name] - 1 for name in simulated},
            "tokens_agree": agree,
        }

    def _runtime(self, policy: Policy, groups: str, *, warmup: Any) -> Runtime:
        from jaxserve import Runtime
        from jaxserve.sharding import make_mesh

        options = self._options
        mesh = device_groups(groups) if "/" in groups else make_mesh(tensor=int(groups))
        return Runtime(
            self._model,
            mesh=mesh,
            policy=policy,
            warmup=warmup,
            max_slots=options.max_slots,
            max_decode_iterations=max(options.decode_iterations),
            max_context=options.max_context,
            max_step_tokens=options.max_step_tokens,
            host_memory=0,
        )

    def _agrees(self, done: Sequence[Completion]) -> bool:
        tokens = [tuple(each.token_ids) for each in done]
        self._tokens = self._tokens or tokens
        return tokens == self._tokens


def _figures(done: Sequence[Completion], wall_s: float) -> dict[str, float]:
    raise_error(done)
    latencies = spread(spent_s(done).tolist())
    firsts = spread([each.timing.time_to_first_token_s or 0.0 for each in done])
    assert latencies is not None and firsts is not None
    tokens = sum(len(each.token_ids) for each in done)
    figures = (tokens / wall_s, latencies["p50"], latencies["p99"], firsts["p50"])
    return dict(zip(FIGURES, figures, strict=True))


def _items(options: argparse.Namespace, vocab_size: int) -> list[WorkloadItem]:
    rng = np.random.default_rng(options.seed)
    items = []
    for _ in range(options.num_requests):
        num_prompt, num_output = (
            int(rng.integers(max(1, mean // 2), mean * 3 // 2 + 1))
            for mean in (options.prompt_tokens, options.output_tokens)
        )
        items.append(
            WorkloadItem(
                prompt_token_ids=tuple(rng.integers(0, vocab_size, num_prompt).tolist()),
                num_output_tokens=num_output,
                max_tokens=num_output,
                arrival_s=0.0,
            )
        )
    return items


def _model(name: str) -> Any:
    from flax import nnx

    from jaxserve.models.families.llama import Llama, LlamaConfig
    from jaxserve.models.families.t5 import T5, T5Config
    from jaxserve.testing.tiny import tiny_llama, tiny_t5

    if name == "tiny":
        return tiny_llama()
    if name == "tiny_t5":
        return tiny_t5()
    if name == "t5_small":
        config = T5Config(
            vocab_size=32128,
            hidden_size=512,
            intermediate_size=2048,
            num_layers=6,
            num_encoder_layers=6,
            num_heads=8,
            num_kv_heads=8,
            head_dim=64,
            dtype="float32",
        )
        return T5(config, rngs=nnx.Rngs(0), layer_layout="unrolled")
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position_embeddings=2048,
        dtype="float32",
    )
    return Llama(config, rngs=nnx.Rngs(0), layer_layout="unrolled")


OPTIONS = (
    option("--model", "smollm2", "shape of the random weights", choices=list(GROUPS)),
    option("--groups", None, 'devices, such as "1 4/4" for RRA on one and WAA on 4 and 4'),
    option("--policies", "auto,fastertransformer,orca,vllm_like", "to compare tokens, on a device"),
    option("--encode-batches", "2,4", "B_E, separated by commas"),
    option("--decode-iterations", "4,8", "N_D of RRA, and of WAA's steps"),
    option("--num-requests", 48, "requests, all waiting from the start"),
    option("--prompt-tokens", 64, "mean tokens of a prompt"),
    option("--output-tokens", 32, "mean tokens of an answer"),
    option("--max-slots", 16, "sequences that run at once"),
    option("--max-context", 256, "tokens of prompt and answer together"),
    option("--max-step-tokens", 256, "tokens of a step"),
    repeats("schedule, one after another"),
    option("--seed", 0, "of prompts and lengths"),
)
main = Benchmark(__doc__, run, OPTIONS, "exegpt_measured", has_budget=True)


if __name__ == "__main__":
    sys.exit(main())
