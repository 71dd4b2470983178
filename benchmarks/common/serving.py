"""Runtimes that share one copy of the weights, and one measured run of a runtime."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, final

from benchmarks.common.counters import average_batch, counters_of, since
from benchmarks.common.policies import load_predictor, parse_policies
from benchmarks.common.repeats import Figures
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.metrics import summarise
from jaxserve.core.options import RuntimeOptions
from jaxserve.core.request import Completion
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.scheduling.policy import Policy
from jaxserve.workload import WorkloadItem
from jaxserve.workload.conversations import FollowUp
from jaxserve.workload.load import replay

if TYPE_CHECKING:
    from jaxserve.runtime import Runtime


_SETTLING_S = 0.02


@final
class Runtimes:
    """Runtimes that share one copy of the weights. A context manager that closes them.

    Attributes:
      predictor: the predictor of `--predictor`; None without one.
    """

    def __init__(self, options: argparse.Namespace):
        from jaxserve.execution.compilation import start_jax
        from jaxserve.execution.sizes import platform_defaults
        from jaxserve.models.quantisation import Quantisation
        from jaxserve.models.store import load_model

        start_jax()
        self._policy = parse_policies(options.policies)[0]
        self.predictor = load_predictor(options)
        self._model = load_model(
            options.model,
            dtype=platform_defaults().dtype,
            quantisation=Quantisation.at_loading(RuntimeOptions(), mesh=None),
        )
        self._settings: dict[str, Any] = {
            "kv_memory": options.kv_memory,
            "max_slots": options.max_slots,
            "max_context": options.max_context,
            "predictor": self.predictor,
        }
        # By the most sequences at once, which limits the pages that a pool may need.
        self._num_pages: dict[int | None, int] = {}
        self._open = ExitStack()

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._model.tokenizer

    def open(
        self, policy: Policy | None = None, *, max_slots: int | None = None, **settings: Any
    ) -> Runtime:
        """Return a runtime with the policy and a page pool as large as that of the other runtimes.

        Args:
          policy: by default the first of `--policies`.
          max_slots: most sequences at once, instead of the options' value.
          settings: more options of the runtime, see `RuntimeOptions`. A runtime with another page
            size or count is not compared with the rest.

        Raises:
          InvalidConfigError, DeviceMemoryError: the memory does not hold a pool of this size.
        """
        from flax import nnx

        from jaxserve import Runtime

        model = self._model
        policy = policy or self._policy
        is_alike = not settings.keys() & {"kv_memory", "page_size"}
        settings = {"warmup": "full", **self._settings, **settings}
        if max_slots is not None:
            settings["max_slots"] = max_slots
        rt = self._open.enter_context(
            Runtime(
                nnx.merge(model.graphdef, model.params),
                model.params,
                tokenizer=model.tokenizer,
                eos_token_ids=model.eos_token_ids,
                policy=policy,
                **settings,
            )
        )
        if not is_alike:
            return rt
        num_pages = self._num_pages.setdefault(max_slots, rt.config.num_pages)
        if num_pages != rt.config.num_pages:
            raise InvalidConfigError(
                f"the memory that is left holds {rt.config.num_pages} pages for policy "
                f"{policy.name}, and the runtimes before it have {num_pages}; give a "
                "--kv-memory that fits once for each policy, or fewer policies"
            )
        return rt

    def __enter__(self) -> Runtimes:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()


def measure(
    rt: Runtime, items: Sequence[WorkloadItem], *, label: str, follow_up: FollowUp | None = None
) -> tuple[dict[str, Any], list[Completion]]:
    """Play the items, and their follow-ups, against a runtime that may have run before.

    The runtime's cache is cleared first.

    Returns:
      The figures of this run alone (`engine` has the runtime's counters) and the completions.

    Raises:
      JaxserveError: the error of the first request that failed.
    """
    # A step that was submitted ahead may still compute for answers that have ended.
    rt.generate([1], SamplingParams(max_tokens=1), progress=False)
    rt.forget_kept_pages()  # earlier runs had the same prompts
    time.sleep(_SETTLING_S)
    before, begin_s = counters_of(rt.stats()), time.perf_counter()
    done, wall_s = replay(rt, items, label=label, follow_up=follow_up)
    time.sleep(_SETTLING_S)
    raise_error(done)
    steps = [step for step in rt.report().steps if step.submitted_s >= begin_s]
    return {
        **summarise(done, wall_s),
        "average_batch": average_batch(steps),
        "engine": {
            **since(before, counters_of(rt.stats())),
            "max_pages_owned": max((step.pages_owned for step in steps), default=0),
        },
    }, done


def raise_error(done: Iterable[Any]) -> None:
    """Raise the error of the first completion that has one."""
    for completion in done:
        if completion.error is not None:
            raise completion.error


def answered(
    rt: Runtime, prompts: Sequence[Any], params: Any, *, progress: bool = False
) -> tuple[Figures, dict[str, float], list[Completion]]:
    """Answer prompts that come all at once, with an empty prefix cache.

    Returns:
      Seconds, tokens and tokens a second of the run, the engine's counters, and the completions.
    """
    rt.forget_kept_pages()
    before, begin_s = counters_of(rt.stats()), time.perf_counter()
    done = rt.generate(prompts, params, progress=progress)
    wall_s = time.perf_counter() - begin_s
    time.sleep(_SETTLING_S)
    num_tokens = sum(len(each.token_ids) for each in done)
    figures = {
        "wall_s": wall_s,
        "num_failed": sum(each.error is not None for each in done),
        "output_tokens": num_tokens,
        "tokens_per_s": num_tokens / wall_s,
    }
    return figures, since(before, counters_of(rt.stats())), done
