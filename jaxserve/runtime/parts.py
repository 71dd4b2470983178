"""What a runtime is made of, and the order in which it is put together and taken apart."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, cast, final

from flax import nnx
from jax.sharding import Mesh

from jaxserve.conversations import Conversations, Journal, check_journal
from jaxserve.core.clock import WallClock
from jaxserve.core.options import RuntimeOptions
from jaxserve.engine.request_log import RequestLog
from jaxserve.engine.requests import RequestBuilder
from jaxserve.execution.build import enable_compilation_cache, nbytes
from jaxserve.execution.device_errors import out_of_memory_as
from jaxserve.planning import Origin
from jaxserve.runtime.disks import check_disk, disks_of
from jaxserve.runtime.forecaster import Forecaster, load_probe
from jaxserve.runtime.intake import Intake
from jaxserve.runtime.placing import place_replicas
from jaxserve.runtime.processes import claim, processes_of
from jaxserve.runtime.replicas import Replicas, WrapExecutor, build_executors
from jaxserve.runtime.upkeep import Upkeep
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.presets import get_policy
from jaxserve.workload.recorded import TraceWriter, check_is_free
from sharding import ProcessGroup, StagePlan


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class Parts:
    """Those of one `Runtime`; they know nothing of it.

    Attributes:
      group: the processes that serve the model together; None where this one does alone.
      opened: replicas and files, to be closed.
      weights_bytes: of the parameters, over all devices.
    """

    group: ProcessGroup | None
    replicas: Replicas
    intake: Intake
    conversations: Conversations
    upkeep: Upkeep
    forecaster: Forecaster | None
    opened: ExitStack
    weights_bytes: int

    def start(self) -> None:
        """Begin to learn, once the runtime is whole."""
        if self.forecaster is not None:
            self.forecaster.start()

    def close(self) -> None:
        """Cancel what is left, and close everything."""
        try:
            self.opened.close()
        finally:
            if self.forecaster is not None:
                self.forecaster.close()  # last: it writes a checkpoint, which can fail


def build_parts(
    model: nnx.Module,
    params: nnx.State | None,
    tokenizer: Any,
    eos_token_ids: Sequence[int] | None,
    mesh: Mesh | StagePlan | None,
    options: RuntimeOptions,
    wrap_executor: WrapExecutor | None,
) -> Parts:
    """See `Runtime` for the arguments and the errors."""
    policy = get_policy(options.policy)
    enable_compilation_cache()
    probe = load_probe(options.probe)
    forecaster = Forecaster.of(options, policy, tokenizer)
    graphdef, own_params = nnx.split(model)
    decoder = cast(Any, model)
    clock = WallClock()
    used = own_params if params is None else params
    group = processes_of(mesh, used)
    check_early(options, policy, group)
    claim(group)
    with (
        nullcontext() if group is None else group.together(),
        out_of_memory_as(
            "making the page pool and warming up",
            "give a smaller kv_memory, max_step_tokens or max_slots",
        ),
    ):
        places = place_replicas(used, mesh, decoder.config)
        executors = build_executors(graphdef, places, decoder, options, group, probe, wrap_executor)
    leads = group is None or group.is_leader
    with ExitStack() as if_one_fails:
        logs: list[RequestLog] = []
        if leads and options.record is not None:
            trace = TraceWriter(options.record, origin_s=clock.now())
            if_one_fails.callback(trace.close)
            logs.append(trace)
        if forecaster is not None:
            logs.append(forecaster)
        journal = Journal(options.conversations if leads else None, options.journal_limits)
        if_one_fails.callback(journal.close)
        disks = disks_of(options, [executor.config for executor, _ in executors])
        replicas = Replicas(executors, policy, clock, logs, disks)
        if_one_fails.callback(replicas.close)
        opened = if_one_fails.pop_all()
    tokenizer_ends: Sequence[int] = () if tokenizer is None else tokenizer.eos_token_ids
    requests = RequestBuilder(
        tokenizer,
        eos_token_ids=tokenizer_ends if eos_token_ids is None else eos_token_ids,
        vocab_size=decoder.config.vocab_size,
        max_prompt_tokens=replicas.max_prompt_tokens,
        seed=options.seed,
    )
    intake = Intake(requests, replicas, tokenizer, clock, forecaster, progress=options.progress)
    origin = Origin.of(decoder.config, places[0].params, replicas.first.executor.config)
    return Parts(
        group=group,
        replicas=replicas,
        intake=intake,
        conversations=Conversations(journal, intake, tokenizer, decoder.config.vocab_size),
        upkeep=Upkeep(replicas, requests, origin, clock, options),
        forecaster=forecaster,
        opened=opened,
        weights_bytes=nbytes(used),
    )


def check_early(options: RuntimeOptions, policy: Policy, group: ProcessGroup | None) -> None:
    """Refuse what cannot be, and files that cannot be written, before anything slow has happened.

    Raises:
      InvalidConfigError, JournalError
    """
    check_disk(options, policy)
    if group is None or group.is_leader:
        if options.record is not None:
            check_is_free(options.record)
        check_journal(options.conversations)
