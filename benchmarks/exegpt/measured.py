"""Schedules on devices beside their simulation: `python -m benchmarks.exegpt.measured --help`.

RRA on one group of devices and WAA on two serve the same requests, all waiting from the start. Each
schedule runs on the devices and then on the simulated executor with the step times that were
measured on those devices. They are not fitted to the run. A table on stderr, one JSON object on
stdout; docs/benchmarks/papers.md says what each figure means.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from benchmarks.common.output import arguments_of, command, show
from benchmarks.common.replay import replay
from jaxserve.core.metrics import summarise
from jaxserve.core.request import Completion
from jaxserve.scheduling.iteration.rra import RRA
from jaxserve.scheduling.iteration.waa import WAA
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.presets import PRESETS
from jaxserve.workload import WorkloadItem

if TYPE_CHECKING:
    from jaxserve.execution.step_cost import StepCost
    from jaxserve.models.families.llama import Llama
    from jaxserve.runtime import Runtime

_DEVICES = "--xla_force_host_platform_device_count"
# Devices on one host share its cores; with one thread each, they do so as little as they can.
_FLAGS = f"{_DEVICES}=8 --xla_cpu_multi_thread_eigen=false"
MODELS = ("tiny", "smollm2")


@dataclass(frozen=True)
class Case:
    """A schedule, and the devices that it runs on: one number, or those of each group."""

    policy: Policy
    devices: tuple[int, ...]


def main(arguments: list[str] | None = None) -> int:
    """Run, print and write the result; return the exit code."""
    return command(run, build_parser().parse_args(arguments), show_result=_print_table)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return measured and simulated figures of every schedule, and whether tokens agree."""
    # Read when JAX starts its devices.
    if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}"
    from benchmarks.common import environment

    model = _model(options.model)
    items = _items(options, model.config.vocab_size)
    wanted = _alone(options, model, items)
    found = []
    for devices, cases in _by_devices(_cases(options)).items():
        found += _measured(options, model, devices, cases, items, wanted)
    errors = [abs(each["error"]["output_tokens_per_s"]) for each in found]
    return {
        "benchmark": "exegpt_measured",
        "arguments": arguments_of(options),
        "schedules": found,
        "all_tokens_agree": all(each["tokens_agree"] for each in found),
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        **environment.describe(),
    }


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    rra, waa = PRESETS["exegpt_rra"], PRESETS["exegpt_waa_c"]
    for batch in options.encode_batches:
        for num in options.decode_iterations:
            shape = RRA(encode_batch=batch, decode_iterations=num)
            yield Case(replace(rra, name=f"rra {batch} {num}", iteration=shape), (1,))
            steps = WAA(encode_batch=batch, decode_iterations=num)
            groups = (options.encode_devices, options.decode_devices)
            yield Case(replace(waa, name=f"waa {batch} {num}", iteration=steps), groups)


def _by_devices(cases: Iterator[Case]) -> dict[tuple[int, ...], list[Case]]:
    found: dict[tuple[int, ...], list[Case]] = {}
    for case in cases:
        found.setdefault(case.devices, []).append(case)
    return found


def _measured(
    options: argparse.Namespace,
    model: Llama,
    devices: tuple[int, ...],
    cases: Sequence[Case],
    items: Sequence[WorkloadItem],
    wanted: Sequence[tuple[int, ...]],
) -> Iterator[dict[str, Any]]:
    """Yield the figures of every schedule on these devices; step times are measured once."""
    cost: StepCost | None = None
    for case in cases:
        with closing(_runtime(options, model, case)) as rt:
            if cost is None:
                cost = _cost(rt, devices)
            runs = [replay(rt, items, label=case.policy.name) for _ in range(options.repeats + 1)]
            measured = [_figures(done, wall_s) for done, wall_s in runs[1:]]  # the first warms up
            tokens = [tuple(each.token_ids) for each in runs[-1][0]]
            simulated = _simulated(items, case.policy, rt, cost)
        middle = {name: statistics.median(run[name] for run in measured) for name in simulated}
        yield {
            "schedule": case.policy.name,
            "devices": list(devices),
            "measured": middle,
            "simulated": simulated,
            "error": {name: simulated[name] / middle[name] - 1 for name in simulated},
            "tokens_agree": tokens == list(wanted),
        }


def _runtime(options: argparse.Namespace, model: Llama, case: Case) -> Runtime:
    from jaxserve import Runtime
    from sharding import make_groups, make_mesh

    if len(case.devices) == 1:
        mesh = make_mesh(tensor=case.devices[0])
    else:
        encode, decode = case.devices
        mesh = make_groups(encode=encode, decode=decode)
    return Runtime(model, mesh=mesh, policy=case.policy, warmup="full", **_sizes(options))


def _sizes(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "max_slots": options.max_slots,
        "max_context": options.max_context,
        "max_step_tokens": options.max_step_tokens,
        "host_memory": 0,
    }


def _alone(
    options: argparse.Namespace, model: Llama, items: Sequence[WorkloadItem]
) -> list[tuple[int, ...]]:
    """Return the answers of the default policy on one device."""
    from jaxserve import Runtime

    with Runtime(model, warmup=False, **_sizes(options)) as rt:
        done, _ = replay(rt, items, label="auto")
    return [tuple(each.token_ids) for each in done]


def _cost(rt: Runtime, devices: tuple[int, ...]) -> StepCost:
    if len(devices) == 1:
        return rt.measure_step_times(rounds=1)
    return rt.measure_group_times(rounds=1).costs()


def _simulated(
    items: Sequence[WorkloadItem], policy: Policy, rt: Runtime, cost: StepCost
) -> dict[str, float]:
    from jaxserve.planning import simulate

    simulation = simulate(items, policy, rt.config, cost, progress=False)
    return _figures(simulation.completions, simulation.wall_s)


def _figures(done: Sequence[Completion], wall_s: float) -> dict[str, float]:
    for completion in done:
        if completion.error is not None:
            raise completion.error
    figures: dict[str, Any] = summarise(done, wall_s)
    return {
        "output_tokens_per_s": figures["output_tokens_per_s"],
        "latency_p50_s": figures["latency_s"]["p50"],
        "latency_p99_s": figures["latency_s"]["p99"],
        "first_token_p50_s": figures["time_to_first_token_s"]["p50"],
    }


def _items(options: argparse.Namespace, vocab_size: int) -> list[WorkloadItem]:
    """Return requests with random prompts, and lengths around their means."""
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


def _model(name: str) -> Llama:
    """Return a model with random weights: the tests' tiny one, or one of SmolLM2-135M's shape."""
    from flax import nnx

    from jaxserve.models.families.llama import Llama, LlamaConfig
    from jaxserve.testing import tiny_llama

    if name == "tiny":
        return tiny_llama()
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


def _print_table(result: dict[str, Any]) -> None:
    names = ("output_tokens_per_s", "latency_p99_s", "first_token_p50_s")
    print("measured, simulated, and the error of the simulation", file=sys.stderr)
    table = Table("schedule", "devices", *names, "tokens", box=None, header_style="bold")
    for each in result["schedules"]:
        cells = (
            f"{each['measured'][name]:7.4g} {each['simulated'][name]:7.4g} "
            f"{each['error'][name]:+6.1%}"
            for name in names
        )
        agree = "agree" if each["tokens_agree"] else "DIFFER"
        table.add_row(each["schedule"], "+".join(map(str, each["devices"])), *cells, agree)
    show(table)


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise ValueError
    return numbers


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.exegpt.measured",
        description="RRA and WAA on devices and simulated from the devices' step times: a table "
        "and one JSON object.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", choices=MODELS, default="smollm2", help="shape of the random weights")
    add("--encode-devices", type=int, default=1, help="devices of WAA's encode group")
    add("--decode-devices", type=int, default=1, help="devices of WAA's decode group")
    add("--encode-batches", type=_numbers, default="2,4", help="B_E, separated by commas")
    add("--decode-iterations", type=_numbers, default="4,8", help="N_D of RRA, and of WAA's steps")
    add("--num-requests", type=int, default=48, help="requests, all waiting from the start")
    add("--prompt-tokens", type=int, default=64, help="mean tokens of a prompt")
    add("--output-tokens", type=int, default=32, help="mean tokens of an answer")
    add("--max-slots", type=int, default=16, help="sequences that run at once")
    add("--max-context", type=int, default=256, help="tokens of prompt and answer together")
    add("--max-step-tokens", type=int, default=256, help="tokens of a step")
    add("--repeats", type=int, default=3, help="runs of each schedule; figures are their medians")
    add("--seed", type=int, default=0, help="of prompts and lengths")
    add("--output", type=Path, default=None, help="also write the object here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
