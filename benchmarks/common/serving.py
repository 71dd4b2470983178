"""Policies side by side: what may be chosen, runtimes around one copy of the weights, one run."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, final

from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.metrics import summarise
from jaxserve.core.prediction import LengthPrediction
from jaxserve.core.request import Completion
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.memory.eviction import LRU
from jaxserve.scheduling.iteration.iteration_level import IterationLevel
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.presets import PRESETS, get_policy
from jaxserve.scheduling.retention.tiered import Tiered
from jaxserve.workload import WorkloadItem
from jaxserve.workload.conversations import FollowUp

if TYPE_CHECKING:
    from jaxserve.runtime import Runtime, RuntimeStats
    from jaxserve.runtime.forecaster import Predictor
    from predictor import LengthDistributions, LengthPredictor

DEFAULT = "fastertransformer,triton_window,concurrent_instances,orca,vllm_like,flover"
# For ablations: Flover without its memory shuffle, Pensieve with another eviction (section 3.6.3).
VARIANTS = {
    "pensieve_lru": replace(PRESETS["pensieve"], name="pensieve_lru", retention=Tiered(LRU())),
    "flover_without_shuffle": replace(
        PRESETS["flover"], name="flover_without_shuffle", iteration=IterationLevel(compacts=False)
    ),
}
# What grows with every step; the rest of the runtime's figures are sizes.
COUNTERS = (
    "num_steps",
    "num_decode_loops",
    "num_iterations",
    "num_tokens",
    "num_padding_tokens",
    "num_preemptions",
    "num_outgrown",
    "num_pages_out",
    "num_pages_in",
    "num_pages_prefetched",
    "num_recomputed",
    "num_sought",
    "num_found",
    "num_found_on_host",
    "num_found_on_disk",
    "num_lost",
    "num_refined",
    "num_compilations",
    "busy_s",
    "host_gap_s",
    "planning_s",
    "penalty_s",
    "predicting_s",
)
_SETTLING_S = 0.02


def add_policy_options(
    parser: argparse.ArgumentParser, *, policies: str, max_context: int | None
) -> None:
    """Which policies, on which model and with how much memory, and where the result goes.

    Without `max_context` the benchmark knows it, and sets it.
    """
    known = ", ".join([*PRESETS, *VARIANTS])
    add = parser.add_argument
    add("--policies", default=policies, help=f"separated by commas; known are {known}")
    add("--model", default="smollm2-135m", help="a name, folder or GGUF file")
    add("--kv-memory", default=None, help='size of each page pool, e.g. "1GiB"')
    add("--predictor", default=None, help="folder of a trained one, for policies that use it")
    add("--max-slots", type=int, default=None, help="most sequences at once")
    if max_context is not None:
        text = "most tokens of prompt and answer"
        add("--max-context", type=int, default=max_context, help=text)
    add("--output", type=Path, default=None, help="also write the object here")


def parse_policies(names: str) -> list[Policy]:
    """Presets and variants by name.

    Raises:
      InvalidConfigError: an unknown name, or one given twice.
    """
    policies = [VARIANTS.get(name) or get_policy(name) for name in names.split(",")]
    if len({policy.name for policy in policies}) < len(policies):
        raise InvalidConfigError(f"policies {names!r} name one twice; give each once")
    return policies


def arguments_of(options: argparse.Namespace) -> dict[str, Any]:
    """What a result says about how it was made; of files and folders their names."""
    given = {name: value for name, value in vars(options).items() if name != "output"}
    if given.get("predictor"):
        given["predictor"] = Path(given["predictor"])
    return {name: v.name if isinstance(v, Path) else v for name, v in given.items()}


def load_predictor(options: argparse.Namespace) -> Predictor | None:
    """Once for all runtimes.

    Raises:
      InvalidConfigError: the folder holds none.
    """
    if options.predictor is None:
        return None
    from predictor import LengthPredictor

    try:
        predictor = LengthPredictor.load(options.predictor)
    except ValueError as error:
        raise InvalidConfigError(f"--predictor: {error}") from error
    scale = getattr(options, "output_scale", 1.0)
    return predictor if scale == 1.0 else Scaled(predictor, scale)


@final
class Scaled:
    """A predictor of a workload whose answers' lengths are scaled, as those it was trained on."""

    def __init__(self, predictor: LengthPredictor, scale: float):
        from predictor import LengthBuckets

        self._predictor = predictor
        edges = [math.ceil(scale * edge) for edge in predictor.buckets.edges]
        self._buckets = LengthBuckets(tuple(edges))
        # Levels of the distribution, which scaling leaves as they are.
        self.calibration = predictor.calibration

    def predict(self, prompts: Sequence[str], /) -> LengthDistributions:
        """As `LengthPredictor.predict`."""
        from predictor import LengthDistributions

        return LengthDistributions(self._buckets, self._predictor.predict(prompts).probabilities)


def predictions_of(
    predictor: Predictor | None, items: Sequence[WorkloadItem], tokenizer: Any
) -> list[LengthPrediction] | None:
    """What a runtime with this predictor believes of the items; for simulations."""
    if predictor is None:
        return None
    predicted = predictor.predict([tokenizer.decode(item.prompt_token_ids) for item in items])
    return [
        LengthPrediction(predicted.buckets, row, predictor.calibration)
        for row in predicted.probabilities
    ]


@final
class Runtimes:
    """Runtimes around one copy of the weights. A context manager, which closes them.

    Args:
      options: as `add_policy_options` describes them.
    """

    def __init__(self, options: argparse.Namespace):
        from jaxserve.execution.build import enable_compilation_cache, platform_defaults
        from jaxserve.models.store import load_model

        enable_compilation_cache()
        defaults = platform_defaults()
        self._model = load_model(
            options.model, dtype=defaults.dtype, layer_layout=cast(Any, defaults.layer_layout)
        )
        self._settings = {
            "kv_memory": options.kv_memory,
            "max_slots": options.max_slots,
            "max_context": options.max_context,
            "predictor": load_predictor(options),
        }
        self._num_pages: int | None = None
        self._open = ExitStack()

    @property
    def tokenizer(self) -> Any:
        """The model's."""
        return self._model.tokenizer

    def open(self, policy: Policy) -> Runtime:
        """A runtime that serves with the policy, its page pool as large as the others'.

        Raises:
          InvalidConfigError, DeviceMemoryError: no room for a pool as large.
        """
        from flax import nnx

        from jaxserve import Runtime

        model = self._model
        rt = self._open.enter_context(
            Runtime(
                nnx.merge(model.graphdef, model.params),
                model.params,
                tokenizer=model.tokenizer,
                eos_token_ids=model.eos_token_ids,
                policy=policy,
                **self._settings,
            )
        )
        if self._num_pages not in (None, rt.config.num_pages):
            raise InvalidConfigError(
                f"memory is left for {rt.config.num_pages} pages for policy {policy.name}, and the "
                f"runtimes before it have {self._num_pages}; give a --kv-memory that fits as often "
                "as there are policies, or fewer policies"
            )
        self._num_pages = rt.config.num_pages
        return rt

    def __enter__(self) -> Runtimes:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()


def measure(
    rt: Runtime,
    items: Sequence[WorkloadItem],
    *,
    label: str,
    follow_up: FollowUp | None = None,
) -> tuple[dict[str, Any], list[Completion]]:
    """Play the items, and what follows them, against a runtime that may have served others before.

    Nothing that those have left in its cache is found.

    Returns:
      The figures of this run alone (`engine` holds the runtime's own) and the completions.

    Raises:
      JaxserveError: of the first request that failed.
    """
    from benchmarks.replay import replay

    # A step that was submitted ahead may still compute for answers that have ended.
    rt.generate([1], SamplingParams(max_tokens=1), progress=False)
    rt.forget_kept_pages()  # what was measured before was of the same prompts
    time.sleep(_SETTLING_S)
    before, begin_s = rt.stats(), time.perf_counter()
    done, wall_s = replay(rt, items, label=label, follow_up=follow_up)
    time.sleep(_SETTLING_S)
    for completion in done:
        if completion.error is not None:
            raise completion.error
    return {**summarise(done, wall_s), "engine": _since(rt, before, begin_s)}, done


def _since(rt: Runtime, before: RuntimeStats, begin_s: float) -> dict[str, Any]:
    """The runtime's figures, counted from `begin_s` on."""
    now, then = asdict(rt.stats()), asdict(before)
    pages = [step.pages_owned for step in rt.report().steps if step.submitted_s >= begin_s]
    counted = {name: now[name] - then[name] for name in COUNTERS}
    return {**now, **counted, "max_pages_owned": max(pages, default=0)}
