"""Construction and teardown of a runtime: places, executors, disk tiers, forecaster, replicas."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, final

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxserve.conversations import Conversations, Journal, check_journal
from jaxserve.core.assets import cache_folder
from jaxserve.core.clock import WallClock
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.options import RuntimeOptions
from jaxserve.core.request import EncoderPrompts
from jaxserve.core.sizes import parse_bytes
from jaxserve.engine.grammars import Grammars, has_grammars
from jaxserve.engine.recorder import RequestLog
from jaxserve.engine.requests import RequestBuilder
from jaxserve.execution.build import ExecutorSpec, build_executor, build_groups
from jaxserve.execution.compatibility import (
    Setting,
    check_adapters_fit,
    check_storage,
    check_together,
)
from jaxserve.execution.compilation import start_jax
from jaxserve.execution.device_errors import out_of_memory_as
from jaxserve.execution.memory_plan import PoolSize
from jaxserve.execution.model_executor import ModelExecutor
from jaxserve.execution.sizes import nbytes, served_context
from jaxserve.execution.weights import sharded
from jaxserve.memory.disk_tier import DiskTier, PageFiles, file_bytes
from jaxserve.models.adapter_layout import AdapterLayout
from jaxserve.models.config import DecoderConfig
from jaxserve.models.function import FunctionDecoder
from jaxserve.models.parts import planned_stages
from jaxserve.models.quantisation import (
    Quantisation,
    Quantiser,
    is_quantised,
    log_replicated,
    panels_dtype,
)
from jaxserve.models.store import load_model
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.planning.schedules.schedule import LatencyBounds
from jaxserve.planning.step_times import Origin
from jaxserve.runtime.adapters import Adapters
from jaxserve.runtime.forecaster import Forecaster, load_probe
from jaxserve.runtime.intake import Intake
from jaxserve.runtime.planner import ObservedLengths, Planner
from jaxserve.runtime.processes import claim, own_mesh, processes_of
from jaxserve.runtime.replicas import Replicas
from jaxserve.runtime.timings import Timings
from jaxserve.runtime.turn_client import ServiceTurnClient
from jaxserve.runtime.weight_update import WeightUpdater
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.presets import get_policy_for
from jaxserve.sharding import DeviceGroups, ProcessGroup, StagePlan, replica_meshes, split_replicas
from jaxserve.steps.drafting import Drafter
from jaxserve.steps.step_function import Placement
from jaxserve.workload.recorded import TraceWriter, check_is_free

if TYPE_CHECKING:
    from jaxserve.execution.grouped import GroupedExecutor
    from jaxserve.execution.transport import Processes

_log = logging.getLogger(__name__)

WrapExecutor = Callable[[ModelExecutor], ModelExecutor]


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class Parts:
    """The parts of a `Runtime`, without a reference to it, so that it can be garbage-collected.

    `opened` closes replicas and files; `weights_bytes` counts the parameters on all devices.
    """

    group: ProcessGroup | None
    replicas: Replicas
    intake: Intake
    conversations: Conversations
    adapters: Adapters
    updater: WeightUpdater
    planner: Planner
    forecaster: Forecaster | None
    opened: ExitStack
    weights_bytes: int

    def start(self) -> None:
        """Start the forecaster, once the runtime is complete."""
        if self.forecaster is not None:
            self.forecaster.start()

    def close(self) -> None:
        """Cancel every request, and close everything."""
        try:
            self.opened.close()
        finally:
            if self.forecaster is not None:
                self.forecaster.close()  # last: it writes a checkpoint, which can fail


def with_token_options(
    tokenizer: Tokenizer | None,
    eos_token_ids: Sequence[int] | None,
    options: RuntimeOptions,
    vocab_size: int,
) -> tuple[Tokenizer | None, Sequence[int] | None]:
    """Return tokenizer and end tokens as `chat_template` and `end_tokens` change them.

    Raises:
      InvalidConfigError: they do not fit the model, or the template is none.
    """
    if options.chat_template is not None:
        if tokenizer is None:
            raise InvalidConfigError(
                "chat_template is for a model with a tokenizer, and this one has none"
            )
        tokenizer = tokenizer.with_template(str(options.chat_template))
    more = options.end_tokens
    if not more:
        return tokenizer, eos_token_ids
    ids: Sequence[str | int] = more if tokenizer is None else tokenizer.ids_of(more)
    bad = [token for token in ids if isinstance(token, str) or not 0 <= token < vocab_size]
    if bad:
        raise InvalidConfigError(
            f"end_tokens has {bad[0]!r}; pass token ids from 0 to {vocab_size - 1}, or texts of "
            "tokens if the model has a tokenizer"
        )
    if eos_token_ids is not None:
        eos_token_ids = tuple(dict.fromkeys((*eos_token_ids, *map(int, ids))))
    return tokenizer and tokenizer.ending_at(more), eos_token_ids


def build_parts(
    model: nnx.Module,
    params: nnx.State | None,
    tokenizer: Tokenizer | None,
    eos_token_ids: Sequence[int] | None,
    mesh: Mesh | StagePlan | DeviceGroups | None,
    options: RuntimeOptions,
    wrap_executor: WrapExecutor | None,
) -> Parts:
    """Build all parts of a runtime; `Runtime` documents arguments and errors."""
    policy = get_policy_for(options.policy, has_groups=isinstance(mesh, DeviceGroups))
    start_jax()
    probe = load_probe(options.probe)
    forecaster = Forecaster.of(options, policy, tokenizer)
    decoder = cast(Any, model)
    decoder = decoder.for_context(served_context(decoder.config, options))
    graphdef, own_params = nnx.split(decoder)
    longest = decoder.config.max_position_embeddings
    if options.max_context is not None and options.max_context > longest:
        _log.warning(
            "max_context=%d is more than the model's longest context; %d is used",
            options.max_context,
            longest,
        )
    is_function = isinstance(decoder, FunctionDecoder)
    check_together(Setting(options=options, mesh=mesh, is_function=is_function))
    clock = WallClock()
    used = own_params if params is None else params
    quantisation, quantiser = Quantisation.of(options), None
    check_storage(options, mesh, decoder.config.dtype)
    if (panels := panels_dtype(decoder)) is not None:
        quantisation = Quantisation.in_panels(quantisation, panels)
    if quantisation is not None and quantisation.panels == "bfloat16" and options.kv_dtype is None:
        options = replace(options, kv_dtype="bfloat16")
    if quantisation is not None:
        quantiser = Quantiser(decoder, quantisation)
        if quantiser.is_dense(used):
            graphdef, used = nnx.split(quantiser.model(used))
        if isinstance(mesh, Mesh):
            log_replicated(used, mesh)
    group = processes_of(mesh, used)
    check_together(
        Setting(
            options=options,
            model_config=decoder.config,
            mesh=mesh,
            num_processes=1 if group is None else group.num_processes,
            is_placed=Placement.like(jax.tree.leaves(used)[0].sharding).mesh is not None,
            is_quantised=options.quantize is not None or is_quantised(decoder),
        )
    )
    layout = None
    if options.max_adapters:
        layout = AdapterLayout(
            decoder.config,
            decoder.layer_layout,
            num_adapters=options.max_adapters,
            max_rank=options.adapter_rank,
            dtype=options.adapter_dtype,
        )
        check_adapters_fit(layout.nbytes, options, used)
        adapted = nnx.merge(graphdef, used)
        layout.adapt(adapted)
        graphdef, used = nnx.split(adapted)
    drafter = load_drafter(options, decoder.config, tokenizer, panels or "float32")
    check_early(options, policy, mesh, group)
    claim(group)
    with (
        nullcontext() if group is None else group.together(),
        out_of_memory_as(
            "making the page pool and warming up",
            "pass a smaller kv_memory, max_step_tokens or max_slots",
        ),
    ):
        places = place_replicas(used, own_mesh(mesh, group), decoder.config)
        spec = ExecutorSpec(
            graphdef=graphdef,
            model_config=decoder.config,
            layer_layout=decoder.layer_layout,
            options=options,
            probe=probe,
            drafter=drafter,
            takes_masks=tokenizer is not None and has_grammars(),
        )
        executors, grouped = build_executors(
            spec,
            places,
            group,
            wrap_executor,
            processes=mesh.processes if group and isinstance(mesh, DeviceGroups) else None,
        )
    leads = group is None or group.is_leader
    with ExitStack() as if_one_fails:
        for executor, _ in executors:
            if_one_fails.callback(executor.close)
        observed = ObservedLengths()
        logs: list[RequestLog] = [observed]
        if leads and options.record is not None:
            trace = TraceWriter(options.record, origin_s=clock.now())
            if_one_fails.callback(trace.close)
            logs.append(trace)
        if forecaster is not None:
            logs.append(forecaster)
        journal = Journal(options.conversations if leads else None, options.journal_limits)
        if_one_fails.callback(journal.close)
        disks = open_disks(options, [executor for executor, _ in executors])
        ends: Sequence[int] = eos_token_ids or ()
        if eos_token_ids is None and tokenizer is not None:
            ends = tokenizer.eos_token_ids
        grammars = None
        if tokenizer is not None:
            grammars = Grammars(tokenizer, ends, decoder.config.vocab_size)
            if_one_fails.callback(grammars.close)
        replicas = Replicas(
            executors, policy, clock, options, logs=logs, disks=disks, grammars=grammars
        )
        if_one_fails.callback(replicas.close)
        requests = RequestBuilder(
            tokenizer,
            eos_token_ids=ends,
            vocab_size=decoder.config.vocab_size,
            max_prompt_tokens=replicas.max_prompt_tokens,
            seed=options.seed,
            encoder=_encoder_prompts(decoder.config, options.page_size),
            grammars=grammars,
            model=decoder.config,
        )
        adapters = Adapters(layout, places[0].params, replicas, options.max_adapters)
        intake = Intake(requests, replicas, tokenizer, clock, adapters, forecaster)
        client = ServiceTurnClient(
            intake.submit,
            check_may_wait=replicas.check_may_wait,
            max_prompt_tokens=replicas.max_prompt_tokens,
            progress=options.progress,
        )
        origin = Origin.of(
            decoder.config,
            places[0].params,
            replicas.first.executor.config,
            places[0].stages,
        )
        decode = places[0].decode
        decode_origin = None
        if decode is not None:
            decode_origin = Origin.of(decoder.config, decode.params, origin.config, decode.stages)
        elif isinstance(mesh, DeviceGroups):  # this process has the parameters of its group alone
            origin, decode_origin = (origin.on(len(each)) for each in mesh.devices)
        timings = Timings(replicas, origin, clock, options, decode_origin)
        regrouper = None
        if grouped is not None and isinstance(mesh, DeviceGroups) and _may_move(places[0], decoder):
            from jaxserve.execution.regroup import GroupMaker
            from jaxserve.runtime.regrouper import Regrouper

            maker = GroupMaker(replace(spec, options=replace(options, host_memory=0)))
            regrouper = Regrouper(replicas, grouped, maker, mesh, timings, clock)
        planner = Planner(replicas, timings, observed, regrouper)
        if_one_fails.callback(planner.close)
        if leads and policy.is_planned:
            planner.start(LatencyBounds.of(**options.bounds))
        return Parts(
            group=group,
            replicas=replicas,
            intake=intake,
            conversations=Conversations(journal, client, tokenizer, decoder.config.vocab_size),
            adapters=adapters,
            updater=WeightUpdater(replicas, timings, adapters, quantiser),
            planner=planner,
            forecaster=forecaster,
            opened=if_one_fails.pop_all(),
            weights_bytes=nbytes(used) * (2 if isinstance(mesh, DeviceGroups) else 1)
            + (0 if drafter is None else nbytes(drafter.params)),
        )


def _may_move(place: Place, decoder: Any) -> bool:
    """Return whether devices may move between two groups: no stages, and no encoder."""
    has_stages = any(each is not None and each.stages is not None for each in (place, place.decode))
    return not has_stages and not decoder.config.has_encoder


def _encoder_prompts(model_config: Any, page_size: int) -> EncoderPrompts | None:
    start = model_config.decoder_start_token_id
    return None if start is None else EncoderPrompts(start_token_id=start, page_size=page_size)


def check_early(
    options: RuntimeOptions,
    policy: Policy,
    mesh: Mesh | StagePlan | DeviceGroups | None,
    group: ProcessGroup | None,
) -> None:
    """Check options and output files before the slow part of the construction."""
    has_groups = isinstance(mesh, DeviceGroups)
    if policy.num_device_groups > 1 and not has_groups:
        raise InvalidConfigError(
            f"policy={policy.name!r} plans for {policy.num_device_groups} device groups, one of "
            "them for prompts alone, and this mesh is one group; pass "
            "mesh=sharding.make_groups(encode=1, decode=1) with the numbers of devices, or a "
            'policy for one group, such as "exegpt_rra"'
        )
    if policy.num_device_groups == 1 and has_groups:
        raise InvalidConfigError(
            f"mesh has two device groups, {mesh}, and policy={policy.name!r} plans for one; pass "
            'policy="exegpt" or "exegpt_waa_c", or a mesh of one group (sharding.make_mesh)'
        )
    if options.bounds and not policy.is_planned:
        given = ", ".join(f"{name}={bound!r}" for name, bound in options.bounds.items())
        raise InvalidConfigError(
            f"{given} is kept by policy 'exegpt' only, and policy={policy.name!r} was given; pass "
            "policy='exegpt', or call rt.plan(latency_bound)"
        )
    check_disk(options, policy)
    if group is None or group.is_leader:
        if options.record is not None:
            check_is_free(options.record)
        check_journal(options.conversations)


# ---- replicas on their devices ----


@final
@dataclass(frozen=True)
class Place:
    """A replica's parameters and stages; `decode` is the place of a device group for answers."""

    params: Any
    stages: StagePlan | None = None
    decode: Place | None = None


def place_replicas(
    params: Any, mesh: Mesh | StagePlan | DeviceGroups | None, model_config: Any
) -> list[Place]:
    """Return a place for each index of the mesh's `data` axis; placed arrays are not copied."""
    if isinstance(mesh, DeviceGroups):
        [encode], [decode] = (place_replicas(params, each, model_config) for each in mesh.both)
        return [replace(encode, decode=decode)]
    if planned_stages(mesh, model_config) is None:
        if isinstance(mesh, Mesh):
            params = sharded(params, mesh, model_config)
        return [Place(part) for part in split_replicas(params)]
    meshes = replica_meshes(mesh) if isinstance(mesh, Mesh) else [mesh]
    return [Place(params, planned_stages(each, model_config)) for each in meshes]


def build_executors(
    spec: ExecutorSpec,
    places: Sequence[Place],
    group: ProcessGroup | None,
    wrap: WrapExecutor | None,
    *,
    processes: Processes | None = None,
) -> tuple[list[tuple[ModelExecutor, PoolSize]], GroupedExecutor | None]:
    """Build an executor for each place. If one fails, close the executors that were built.

    Return the executors with the sizes of their page pools, and the executor of two device groups,
    unwrapped, or None with one group.
    """
    with ExitStack() as if_one_fails:
        built: list[tuple[ModelExecutor, PoolSize]] = []
        grouped: GroupedExecutor | None = None
        for place in places:
            if place.decode is None:
                executor, size = build_executor(
                    spec, place.params, stages=place.stages, group=group, processes=processes
                )
            else:
                both = [(each.params, each.stages) for each in (place, place.decode)]
                grouped, size = build_groups(spec, both)
                executor = grouped
            if_one_fails.callback(executor.close)
            built.append((executor if wrap is None else wrap(executor), size))
        if_one_fails.pop_all()
    return built, grouped


def open_disks(options: RuntimeOptions, executors: Sequence[ModelExecutor]) -> list[DiskTier]:
    """Open a disk tier for each executor, in its own folder; return [] without `disk_memory`.

    Raises InvalidConfigError if a page or a state does not fit into it, or cannot reach it.
    """
    if options.disk_memory is None:
        return []
    max_bytes = parse_bytes(options.disk_memory) // len(executors)
    for executor in executors:
        if executor.host_memory is None:
            raise _no_host_pages(options)
        memories = [each for each in (executor.host_memory, executor.host_states) if each]
        least = file_bytes(max(memory.entry_bytes for memory in memories))
        if max_bytes < least:
            raise InvalidConfigError(
                f"disk_memory={options.disk_memory!r} does not hold one page, or state, of each of "
                f"{len(executors)} replicas; pass at least {least * len(executors):,}, or no "
                "disk_memory"
            )
    with ExitStack() as if_one_fails:
        disks = []
        for index in range(len(executors)):
            disks.append(DiskTier(PageFiles(_disk_folder(options) / str(index), max_bytes)))
            if_one_fails.callback(disks[-1].close)
        if_one_fails.pop_all()
    return disks


def check_disk(options: RuntimeOptions, policy: Policy) -> None:
    """Check that pages can reach the disk tier and that its folder can be used."""
    if options.disk_memory is None:
        return
    if not policy.retention.uses_host:
        raise InvalidConfigError(
            f"disk_memory={options.disk_memory!r}, but policy={policy.name!r} keeps no pages on "
            'the host, from which the disk gets them; pass policy="pensieve" or "auto", or no '
            "disk_memory"
        )
    if options.host_memory == 0:
        raise _no_host_pages(options)
    PageFiles(_disk_folder(options) / "0", parse_bytes(options.disk_memory)).close()


def _disk_folder(options: RuntimeOptions) -> Path:
    return Path(options.disk_folder or cache_folder() / "pages").expanduser()


def _no_host_pages(options: RuntimeOptions) -> InvalidConfigError:
    return InvalidConfigError(
        f"disk_memory={options.disk_memory!r}, but there are no host pages, from which the disk "
        "gets its pages; pass more host_memory, or no disk_memory"
    )


def load_drafter(
    options: RuntimeOptions,
    config: DecoderConfig,
    tokenizer: Tokenizer | None,
    panels: str,
) -> Drafter | None:
    """Return the draft model of the options, with weights in panels of a dtype; None without one.

    Raises InvalidConfigError if it does not fit the served model or cannot be served with it, and
    ModelError or DownloadError if it cannot be loaded.
    """
    given = options.draft_model
    if given is None:
        return None
    if isinstance(given, nnx.Module):
        model, own = cast(Any, given), None
    else:
        loaded = load_model(
            given,
            dtype=config.dtype,
            quantisation=Quantisation.at_loading(RuntimeOptions(), None, panels),
            progress=options.progress,
        )
        model, own = cast(Any, nnx.merge(loaded.graphdef, loaded.params)), loaded.tokenizer
    _check(model.config, config, options)
    if own is not None and tokenizer is not None and own.vocab_size != tokenizer.vocab_size:
        raise InvalidConfigError(
            f"draft_model={given!r} has a tokenizer of {own.vocab_size} tokens, and the model one "
            f"of {tokenizer.vocab_size}; pass a draft model with the same tokenizer"
        )
    model = model.for_context(served_context(config, options))
    graphdef, params = nnx.split(model)
    return Drafter(graphdef, params, model.config, model.layer_layout)


def _check(draft: DecoderConfig, served: DecoderConfig, options: RuntimeOptions) -> None:
    if draft.has_encoder or draft.num_recurrent_layers:
        raise InvalidConfigError(
            "the draft model must be a decoder with attention alone, without an encoder and "
            "recurrent layers; pass another one, or omit draft_model"
        )
    if served.has_encoder or not served.num_attention_layers:
        raise InvalidConfigError(
            "a model with a draft model must be a decoder with layers of attention, whose pages "
            "the draft model shares; omit draft_model, or pass speculation='lookup'"
        )
    if (draft.vocab_size, draft.dtype) != (served.vocab_size, served.dtype):
        raise InvalidConfigError(
            f"the draft model has {draft.vocab_size} tokens in {draft.dtype}, and the model "
            f"{served.vocab_size} in {served.dtype}; pass one that has the same of both"
        )
    context = served_context(served, options)
    if draft.max_position_embeddings < context:
        raise InvalidConfigError(
            f"the draft model has a context of {draft.max_position_embeddings} tokens, and the "
            f"runtime one of {context}; pass max_context={draft.max_position_embeddings}, or "
            "another draft model"
        )
